//! How long a VM waits for a miss, measured where its reads are served.
//!
//! The daemon of a VM's disks measures the time of the reads for which it needs storage; over the blocks that it then
//! reads, that is the cost of one miss as misses of disks are counted, readahead included. QEMU's block layer counts
//! reads and their time, but not which are misses: all count, and each as one, as a major fault waits for one. Reads
//! that are not waited for (readahead, several at once) count in full, so the cost is an upper bound. The guest's own
//! statistics have no times.

use plimsoll_actuator::{BlockReads, MemoryStatus};
use plimsoll_protocol::vm::{MissCost, MissCostSource};

/// Minimum number of reads of a measured cost.
const READS_MIN: f64 = 50.0;
/// Number of reads after which older ones count half, and less.
const READS_KEPT: f64 = 2000.0;
/// Costs are at least and at most this, in ms: a process may report anything.
const COST_MS: (f64, f64) = (0.001, 10_000.0);

/// Measures the cost of a VM's misses from counts that rise.
#[derive(Debug, Default)]
pub struct MissCostMeter {
    last: Option<(MissCostSource, BlockReads)>,
    /// Reads and their time, both as differences of counts; older ones count less.
    reads: f64,
    wait_ms: f64,
}

impl MissCostMeter {
    /// Takes the counts of a poll.
    pub fn observe(&mut self, status: &MemoryStatus) {
        let of_disk = status.disk.as_ref().and_then(|disk| {
            let counts = BlockReads {
                reads: disk.read_blocks.saturating_sub(disk.hits),
                wait_ns: disk.read_wait_ns?,
            };
            Some((MissCostSource::DiskDaemon, counts))
        });
        let of_qemu = status.blocks;
        let of_qemu = of_qemu.map(|counts| (MissCostSource::BlockStatistics, counts));
        // Behind a disk daemon QEMU counts other disks, also while that daemon does not answer.
        let of_qemu = of_qemu.filter(|_| status.cache.is_none());
        let Some((source, now)) = of_disk.or(of_qemu) else {
            return;
        };
        let before = self.last.replace((source, now));
        let Some((_, before)) = before.filter(|(of, _)| *of == source) else {
            (self.reads, self.wait_ms) = (0.0, 0.0);
            return;
        };
        // Counters that decreased were restarted.
        let differences = now
            .reads
            .checked_sub(before.reads)
            .zip(now.wait_ns.checked_sub(before.wait_ns));
        let Some((reads, wait_ns)) = differences.filter(|(reads, _)| *reads > 0) else {
            return;
        };
        let kept = READS_KEPT / (self.reads + reads as f64).max(READS_KEPT);
        self.reads = (self.reads + reads as f64) * kept;
        self.wait_ms = (self.wait_ms + wait_ns as f64 / 1e6) * kept;
    }

    /// The cost, once enough reads were measured.
    pub fn cost(&self) -> Option<MissCost> {
        let (source, _) = self.last?;
        (self.reads >= READS_MIN).then(|| MissCost {
            ms: (self.wait_ms / self.reads).clamp(COST_MS.0, COST_MS.1),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_actuator::DiskStat;

    fn status(disk: Option<DiskStat>, blocks: Option<BlockReads>) -> MemoryStatus {
        MemoryStatus {
            disk,
            blocks,
            ..MemoryStatus::default()
        }
    }

    fn by_qemu(reads: u64, wait_ms: u64) -> MemoryStatus {
        let wait_ns = wait_ms * 1_000_000;
        status(None, Some(BlockReads { reads, wait_ns }))
    }

    fn by_daemon(read_blocks: u64, hits: u64, read_wait_ns: Option<u64>) -> MemoryStatus {
        let disk = DiskStat {
            read_blocks,
            hits,
            read_wait_ns,
            ..DiskStat::default()
        };
        status(Some(disk), None)
    }

    #[test]
    fn a_cost_is_the_time_of_reads_over_their_number_since_the_first_poll() {
        let mut meter = MissCostMeter::default();
        meter.observe(&by_qemu(1_000_000, 9_000_000));
        assert_eq!(meter.cost(), None);
        meter.observe(&by_qemu(1_000_049, 9_000_100));
        assert_eq!(meter.cost(), None);
        meter.observe(&by_qemu(1_000_100, 9_000_400));
        let expected = MissCost {
            ms: 4.0,
            source: MissCostSource::BlockStatistics,
        };
        assert_eq!(meter.cost(), Some(expected));
        // An idle disk, a poll without counts and a counter that began again leave it.
        for same in [
            by_qemu(1_000_100, 9_000_400),
            status(None, None),
            by_qemu(5, 5),
        ] {
            meter.observe(&same);
            assert_eq!(meter.cost(), Some(expected));
        }
        // The disk has become fast: after many reads, what was before hardly counts.
        meter.observe(&by_qemu(20_005, 2005));
        let cost = meter.cost().unwrap().ms;
        assert!((0.1..0.12).contains(&cost), "{cost}");
    }

    #[test]
    fn blocks_from_a_daemons_cache_cost_nothing_and_are_not_counted() {
        let mut meter = MissCostMeter::default();
        meter.observe(&by_daemon(1000, 500, Some(0)));
        meter.observe(&by_daemon(3000, 2400, Some(50_000_000)));
        let expected = MissCost {
            ms: 0.5,
            source: MissCostSource::DiskDaemon,
        };
        assert_eq!(meter.cost(), Some(expected));
        // QEMU's own statistics are of other disks.
        let mut both = by_daemon(3000, 2400, Some(50_000_000));
        both.blocks = Some(BlockReads {
            reads: 900,
            wait_ns: 1,
        });
        meter.observe(&both);
        assert_eq!(meter.cost(), Some(expected));
        // A daemon that measures no time.
        let mut meter = MissCostMeter::default();
        for blocks in [0, 1000] {
            meter.observe(&by_daemon(blocks, 0, None));
        }
        assert_eq!(meter.cost(), None);
    }

    #[test]
    fn no_count_makes_a_cost_of_nothing_or_without_end() {
        for (reads, wait_ns, ms) in [(u64::MAX, 0, 0.001), (60, u64::MAX, 10_000.0)] {
            let mut meter = MissCostMeter::default();
            meter.observe(&by_qemu(0, 0));
            meter.observe(&status(None, Some(BlockReads { reads, wait_ns })));
            assert_eq!(meter.cost().map(|cost| cost.ms), Some(ms));
        }
    }
}
