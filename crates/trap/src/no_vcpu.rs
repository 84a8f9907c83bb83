//! In place of `vcpu` on processors other than x86-64: there is no machine, and trials touch pages by a thread.

use std::convert::Infallible;
use std::io;
use std::marker::PhantomData;

use crate::sys::SharedMemory;

pub const OWN_PAGES: usize = 16;
pub const PRESENT_PAGE: u64 = 8;
pub const TOUCHED_PAGE: u64 = 1024;

/// A machine, of which there is none.
#[derive(Debug)]
pub struct Machine<'memory> {
    none: Infallible,
    _memory: PhantomData<&'memory SharedMemory>,
}

impl<'memory> Machine<'memory> {
    /// Makes no machine.
    ///
    /// # Errors
    ///
    /// Always [`io::ErrorKind::Unsupported`].
    pub fn new(_own: &'memory SharedMemory, _touched: &'memory SharedMemory) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn touch(&mut self, _first: u64, _count: u64, _stride: u64) -> io::Result<()> {
        match self.none {}
    }
}
