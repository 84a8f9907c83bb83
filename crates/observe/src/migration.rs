//! The live migration of a VM by QEMU, predicted from the pages that it writes.
//!
//! Not here: how they are observed ([`writes`](crate::writes())), the course of a migration
//! (`plimsoll_estimator::working_set::precopy`).

use std::time::Duration;

use plimsoll_estimator::working_set::{Contents, Precopy, PrecopyOptions, precopy};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::size::BitRate;
use serde::Serialize;

use crate::writes::ObservedWrites;

/// Bytes in a page.
pub const PAGE_BYTES: u64 = 4096;
/// A round of this share of a scan's time counts as one of its time: scans take a little longer than their interval.
const ROUNDED: f64 = 0.9;

/// A migration as it would go, as JSON has it.
#[derive(Debug, Serialize)]
pub struct MigrationEstimate {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The VM.
    pub vm: String,
    /// Its RAM.
    pub ram_bytes: u64,
    /// Share of it that is not all zero, by a sample; the rest takes no time to copy.
    pub share_with_contents: f64,
    /// Bandwidth for the migration.
    pub bandwidth_bits_per_second: f64,
    /// How long its writes were observed.
    pub observed_seconds: f64,
    /// Whether the observation ended before its time.
    pub interrupted: bool,
    /// Whether all rounds are as long as a scan at least; if not, shorter ones count what one scan found, an upper limit.
    pub resolved: bool,
    /// Share of the VM's CPU time that observing took.
    pub overhead_ratio: f64,
    /// Distinct pages written within a time, in bytes.
    pub written: Vec<Written>,
    /// Rounds while the VM runs.
    pub rounds: Vec<Round>,
    /// All rounds and the stop.
    pub copied_bytes: f64,
    /// Time while the VM runs.
    pub running_seconds: f64,
    /// Without the time for the state of devices.
    pub downtime_seconds: f64,
    /// Whether writing is slow enough for the migration to end; if not, the downtime is that of the rest that always remains.
    pub ends: bool,
}

/// What is written within a time.
#[derive(Debug, Serialize)]
pub struct Written {
    /// The time.
    pub seconds: f64,
    /// Distinct pages, in bytes.
    pub bytes: f64,
}

/// A round of copying.
#[derive(Debug, Serialize)]
pub struct Round {
    /// What it copies.
    pub bytes: f64,
    /// How long that takes.
    pub seconds: f64,
}

impl MigrationEstimate {
    /// The migration of a VM with this memory whose writes were observed by scans at an interval.
    pub fn new(
        vm: String,
        memory: &Contents,
        options: &PrecopyOptions,
        seen: &ObservedWrites,
        bandwidth: BitRate,
        scan_interval: Duration,
    ) -> Self {
        let course = precopy(memory, &seen.curve, options);
        let observed_seconds = seen.curve.observed_seconds();
        let doublings = (0..).map(|power| scan_interval.as_secs_f64() * f64::from(1_u32 << power));
        let within = doublings
            .take(24)
            .take_while(|&seconds| seconds <= observed_seconds);
        let bytes = |pages: f64| pages * PAGE_BYTES as f64;
        let Precopy {
            round_pages,
            ends,
            running_seconds,
            stopped_seconds,
            ..
        } = &course;
        let rounds = round_pages.iter().map(|&pages| Round {
            bytes: bytes(pages),
            seconds: pages / options.pages_per_second,
        });
        let rounds: Vec<Round> = rounds.collect();
        Self {
            schema: SCHEMA,
            vm,
            ram_bytes: seen.ram.0 * PAGE_BYTES,
            share_with_contents: memory.share,
            bandwidth_bits_per_second: bandwidth.bytes_per_second() * 8.0,
            observed_seconds,
            interrupted: seen.is_interrupted,
            resolved: rounds
                .iter()
                .all(|round| round.seconds >= seen.curve.scan_seconds() * ROUNDED),
            overhead_ratio: seen.overhead_ratio,
            written: within
                .map(|seconds| Written {
                    seconds,
                    bytes: bytes(seen.curve.pages_within(seconds)),
                })
                .collect(),
            rounds,
            copied_bytes: bytes(course.pages()),
            running_seconds: *running_seconds,
            downtime_seconds: *stopped_seconds,
            ends: *ends,
        }
    }
}
