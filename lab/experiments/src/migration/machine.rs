//! The tiny machine, copied by each of our trackers.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use plimsoll_flow::{PageCount, PageNumber};
use plimsoll_migration::precopy::precopy;
use plimsoll_migration::tiny::{Machine, MachineConfig, Runner, Slot, Work};
use plimsoll_migration::{
    AsyncWriteProtect, Clearing, DirtyLog, DirtyRing, KvmError, Tracker, WriteProtect, hardware,
};

use super::{Args, Figures, Row, add, row};

pub const LOG: &str = "dirty log";
const LATE_LOG: &str = "dirty log, late";
const RING: &str = "dirty ring";
pub const FAULTS: &str = "write-protect faults";
const SCAN: &str = "async write-protect";
const STOPPED: &str = "none: stopped";

const WAYS: [&str; 6] = [STOPPED, FAULTS, LOG, LATE_LOG, RING, SCAN];
/// The machine's memory begins at 2 MiB.
const FIRST: PageNumber = PageNumber(512);

/// Whether a method is one of tracking, compared with faults.
pub fn is_tracked(way: &str) -> bool {
    ![FAULTS, STOPPED].contains(&way)
}

/// Copies a machine with every method at each share of writes.
pub fn rows(args: &Args, writes: &[f64], pages: u64) -> Vec<Row> {
    let under = format!("kvm ({})", hardware().modules.join(", "));
    let mut rows = Vec::new();
    for &share in writes {
        // In turn, so that a change of the host's load affects all alike.
        let mut copies: [anyhow::Result<Vec<Figures>>; WAYS.len()] =
            std::array::from_fn(|_| Ok(Vec::new()));
        for _ in 0..args.repeats {
            for (copies, way) in copies.iter_mut().zip(WAYS) {
                add(copies, || Ok(copy(args, way, share, pages)?));
            }
        }
        for (copies, way) in copies.into_iter().zip(WAYS) {
            rows.push(row("machine", way, (share, pages), &under, copies));
        }
    }
    rows
}

/// Makes a machine, lets it run, and copies it.
fn copy(args: &Args, way: &str, share: f64, pages: u64) -> Result<Figures, KvmError> {
    let array = Slot {
        first: FIRST,
        pages: PageCount(pages),
    };
    let (machine, vcpus) = Machine::new(&MachineConfig {
        slots: vec![array],
        vcpus: 1,
        ring_entries: if way == RING { args.ring_entries } else { 0 },
    })?;
    machine.populate()?;
    let mut runner = Runner::new(Arc::clone(&machine), vcpus)?;
    runner.begin(&[Work {
        array,
        stride_pages: NonZeroU64::MIN,
        write_ratio: share,
        passes: None,
        seed: 1,
    }])?;
    let (begin, operations) = (Instant::now(), machine.operations());
    thread::sleep(args.window.get());
    let operations = machine.operations() - operations;
    let before = operations as f64 / begin.elapsed().as_nanos() as f64;
    let start = || start(way, Arc::clone(&machine));
    let pass = precopy(&machine, &mut runner, start)?;
    runner.pause()?;
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    Ok(Figures {
        operations_per_ns_before: before,
        operations_per_ns_during: Some(pass.operations as f64 / pass.took.as_nanos() as f64),
        rounds: pass.round_pages.len() as f64,
        pages_sent: pass.pages() as f64,
        took_ms: ms(pass.took),
        stopped_ms: ms(pass.stopped),
        full_exits: pass.full_exits as f64,
        lost: pass.lost,
        wrong_pages: pass.wrong_pages,
        ..Figures::default()
    })
}

fn start(way: &str, machine: Arc<Machine>) -> Result<Option<Box<dyn Tracker>>, KvmError> {
    Ok(match way {
        LOG => Some(Box::new(DirtyLog::start(machine, Clearing::WithRound)?)),
        LATE_LOG => Some(Box::new(DirtyLog::start(machine, Clearing::BeforeCopy)?)),
        RING => Some(Box::new(DirtyRing::start(machine)?)),
        FAULTS => Some(Box::new(WriteProtect::start(machine)?)),
        SCAN => Some(Box::new(AsyncWriteProtect::start(machine)?)),
        _ => None,
    })
}
