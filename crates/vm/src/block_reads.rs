//! Reads of a VM's disks and the time that they took, by the statistics of QEMU's block layer.
//!
//! Source: QEMU, qapi/block-core.json (`query-blockstats`). The time of a read ends with its completion, so reads at
//! once count with the time of each. Disks that another process serves (vhost-user) are not in these statistics.

use serde_json::Value;

/// Counts since the start of the process that made them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockReads {
    /// Reads.
    pub reads: u64,
    /// Time that they took, added up.
    pub wait_ns: u64,
}

impl BlockReads {
    /// The sum over all disks of an answer to `query-blockstats`; `None` if it lists none with counts.
    pub fn of_qmp(answer: &Value) -> Option<Self> {
        let disks = answer.as_array()?.iter();
        let reads = disks.filter_map(|disk| {
            let stats = &disk["stats"];
            Some(Self {
                reads: stats["rd_operations"].as_u64()?,
                wait_ns: stats["rd_total_time_ns"].as_u64()?,
            })
        });
        reads.reduce(Self::plus)
    }

    /// The sum over all disks of the output of `virsh domstats --block`; `None` if it lists none with counts.
    pub fn of_virsh(text: &str) -> Option<Self> {
        let sum = |end: &str| {
            let values = text.lines().filter_map(|line| {
                let (key, value) = line.trim().strip_prefix("block.")?.split_once('=')?;
                key.ends_with(end).then(|| value.parse::<u64>().ok())?
            });
            values.reduce(u64::saturating_add)
        };
        Some(Self {
            reads: sum(".rd.reqs")?,
            wait_ns: sum(".rd.times")?,
        })
    }

    fn plus(self, other: Self) -> Self {
        Self {
            reads: self.reads.saturating_add(other.reads),
            wait_ns: self.wait_ns.saturating_add(other.wait_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn the_reads_of_all_disks_are_added_up() {
        let disk = |reads: u64, wait_ns: u64| json!({ "device": "d", "stats": { "rd_operations": reads, "rd_total_time_ns": wait_ns, "wr_operations": 9 } });
        let sum = |answer: &Value| BlockReads::of_qmp(answer).map(|it| (it.reads, it.wait_ns));
        assert_eq!(
            sum(&json!([disk(3, 500), {}, disk(4, 900)])),
            Some((7, 1400))
        );
        assert_eq!(
            sum(&json!([disk(u64::MAX, 1), disk(1, 1)])),
            Some((u64::MAX, 2))
        );
        for none in [
            json!([]),
            json!({}),
            json!(null),
            json!([{ "stats": { "rd_operations": -1, "rd_total_time_ns": 2 } }]),
            json!([{ "stats": [] }, 7, "vda"]),
        ] {
            assert_eq!(sum(&none), None, "{none}");
        }
    }

    #[test]
    fn so_are_those_that_libvirt_lists() {
        let text = "Domain: 'web'\n  block.count=2\n  block.0.name=vda\n  block.0.rd.reqs=10\n  \
            block.0.rd.bytes=9\n  block.0.rd.times=2000\n  block.1.name=a.rd.reqs=7\n  block.1.rd.reqs=1\n  \
            block.1.rd.times=500\n  block.1.wr.times=3\n\n";
        let expected = BlockReads {
            reads: 11,
            wait_ns: 2500,
        };
        assert_eq!(BlockReads::of_virsh(text), Some(expected));
        assert_eq!(BlockReads::of_virsh("block.0.rd.reqs=5\n"), None);
        assert_eq!(BlockReads::of_virsh("block.0.rd.reqs=-5\n"), None);
    }

    proptest! {
        #[test]
        fn no_output_makes_it_panic(text in "((block.)?[0-9]{0,20}(.rd.(reqs|times)=)?[=' \\n0-9a-z]{0,20}){0,9}") {
            let _ = BlockReads::of_virsh(&text);
        }
    }
}
