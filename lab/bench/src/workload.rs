//! The reference streams of the measurements.

use std::fmt;

use plimsoll_flow::{AccessKind, PageCount, PageNumber, ReferenceBatch, Source};
use plimsoll_source::synthetic::{Pattern, Workload};

/// A stream by its kind, its pages and how these are numbered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) law: Law,
    pub(crate) pages: u64,
    /// Whether pages have numbers all over 64 bits, as hashes do, instead of 0, 1, 2 ..
    pub(crate) scattered: bool,
}

/// How pages are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Law {
    /// Zipf with exponent 1.0.
    Zipf,
    /// Uniform.
    Uniform,
    /// Sequential.
    Loop,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let law = match self.law {
            Law::Zipf => "Zipf 1.0",
            Law::Uniform => "uniform",
            Law::Loop => "loop",
        };
        let pages = if self.pages >= 1_000_000 {
            format!("{} M", self.pages / 1_000_000)
        } else {
            format!("{} K", self.pages / 1024)
        };
        let scattered = if self.scattered { ", scattered" } else { "" };
        write!(f, "{law}, {pages}{scattered}")
    }
}

impl Kind {
    pub(crate) const fn new(law: Law, pages: u64) -> Self {
        Self {
            law,
            pages,
            scattered: false,
        }
    }

    /// Makes the references.
    pub(crate) fn batches(self, references: u64) -> anyhow::Result<Vec<ReferenceBatch>> {
        let pages = PageCount(self.pages);
        let pattern = match self.law {
            Law::Zipf => Pattern::Zipf {
                pages,
                alpha: 1.0,
                references,
            },
            Law::Uniform => Pattern::Uniform { pages, references },
            Law::Loop => Pattern::Loop { pages, references },
        };
        let workload = Workload::of(pattern);
        let mut source = workload.source()?;
        let mut batches = Vec::new();
        loop {
            let mut batch = ReferenceBatch::new();
            if !source.next_batch(&mut batch)? {
                return Ok(batches);
            }
            if self.scattered {
                batch = scattered(&batch);
            }
            batches.push(batch);
        }
    }
}

/// Numbers pages anew by a bijection of 64 bits.
fn scattered(batch: &ReferenceBatch) -> ReferenceBatch {
    let mut anew = ReferenceBatch::new();
    for page in batch.pages() {
        let number = page.0.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let number = (number ^ (number >> 29)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        anew.push(PageNumber(number ^ (number >> 32)), AccessKind::Unknown);
    }
    anew
}
