//! Device-mapper devices of one target, made by the mapper's ioctls.
//!
//! Layout: <linux/dm-ioctl.h>, version 4. Names and table lines are our own, none comes from outside.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use crate::sys::{DM_HEAD_BYTES, device_mapper};

const CONTROL: &str = "/dev/mapper/control";
/// Bytes of a request: a head, a target, and room for its words or its status.
const REQUEST_BYTES: usize = 4096;
const TARGET_BYTES: usize = 40;
const DATA_SIZE_AT: usize = 12;
const DATA_START_AT: usize = 16;
const TARGET_COUNT_AT: usize = 20;
const FLAGS_AT: usize = 28;
/// `DM_SUSPEND_FLAG`.
const SUSPENDED: u32 = 1 << 1;
const NAME_AT: usize = 48;
const DEVICE_AT: usize = 40;
const CREATE: u8 = 3;
const REMOVE: u8 = 4;
/// Without a flag it resumes, which makes the loaded table the active one.
const SUSPEND: u8 = 6;
const LOAD: u8 = 9;
const STATUS: u8 = 12;

/// A mapped device.
pub struct MappedDevice {
    control: File,
    name: &'static str,
    /// Its block device.
    pub path: PathBuf,
}

impl MappedDevice {
    /// Makes the device `name` of `sectors` sectors: `target` with the words of its table line.
    pub fn new(name: &'static str, sectors: u64, target: &str, words: &str) -> io::Result<Self> {
        let control = File::options().read(true).write(true).open(CONTROL)?;
        let created = call(&control, CREATE, request(name))?;
        let mut device = Self {
            control,
            name,
            path: PathBuf::new(),
        };
        let mut load = request(name);
        put(&mut load, TARGET_COUNT_AT, &1u32.to_ne_bytes());
        let at = DM_HEAD_BYTES;
        put(&mut load, at + 8, &sectors.to_ne_bytes());
        put(&mut load, at + 24, target.as_bytes());
        put(&mut load, at + TARGET_BYTES, words.as_bytes());
        call(&device.control, LOAD, load)?;
        call(&device.control, SUSPEND, request(name))?;
        // The number of the device, as huge_encode_dev() makes it; its minor is the node's name.
        let number = u64::from_ne_bytes(take(&created, DEVICE_AT));
        let minor = number & 0xff | number >> 12 & 0xf_ff00;
        device.path = PathBuf::from(format!("/dev/dm-{minor}"));
        Ok(device)
    }

    /// The status line of its target.
    pub fn status(&self) -> io::Result<String> {
        let answer = call(&self.control, STATUS, request(self.name))?;
        let text = &answer[DM_HEAD_BYTES + TARGET_BYTES..];
        let end = text
            .iter()
            .position(|&byte| byte == 0)
            .unwrap_or(text.len());
        Ok(String::from_utf8_lossy(&text[..end]).into_owned())
    }

    /// Lets its requests in flight end, and holds others back until it is resumed.
    pub fn suspend(&self) -> io::Result<()> {
        let mut suspend = request(self.name);
        put(&mut suspend, FLAGS_AT, &SUSPENDED.to_ne_bytes());
        call(&self.control, SUSPEND, suspend).map(drop)
    }

    /// Ends a suspension.
    pub fn resume(&self) -> io::Result<()> {
        call(&self.control, SUSPEND, request(self.name)).map(drop)
    }

    /// Takes the device away; nobody may have it open.
    pub fn remove(self) -> io::Result<()> {
        call(&self.control, REMOVE, request(self.name)).map(drop)
    }
}

fn put(request: &mut [u8], at: usize, bytes: &[u8]) {
    request[at..at + bytes.len()].copy_from_slice(bytes);
}

fn take<const N: usize>(answer: &[u8], at: usize) -> [u8; N] {
    *answer[at..].first_chunk().expect("inside the head")
}

fn request(name: &str) -> Vec<u8> {
    let mut request = vec![0; REQUEST_BYTES];
    put(&mut request, 0, &4u32.to_ne_bytes());
    for (at, len) in [
        (DATA_SIZE_AT, REQUEST_BYTES),
        (DATA_START_AT, DM_HEAD_BYTES),
    ] {
        let len = u32::try_from(len).expect("a page at most");
        put(&mut request, at, &len.to_ne_bytes());
    }
    put(&mut request, NAME_AT, name.as_bytes());
    request
}

fn call(control: &File, number: u8, mut request: Vec<u8>) -> io::Result<Vec<u8>> {
    device_mapper(control, number, &mut request)?;
    Ok(request)
}
