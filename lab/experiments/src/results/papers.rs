//! The tables, figures and experiments of the papers, and what answers them.

/// What answers an item.
pub enum Answer {
    /// Measurements of kept sets, which name the item.
    Kept,
    /// Measurements that were not kept by the lab, in a document below docs/.
    Document(&'static str),
    /// Nothing, and why.
    Missing(&'static str),
}

/// A table, figure or experiment of a paper.
pub struct PaperItem {
    /// Paper and number, as measurements name it.
    pub item: &'static str,
    pub what: &'static str,
    pub answer: Answer,
}

const fn item(item: &'static str, what: &'static str, answer: Answer) -> PaperItem {
    PaperItem { item, what, answer }
}

const DISK: Answer = Answer::Document("disk-measured.md");
const WORKING_SET: Answer = Answer::Document("working-set-measured.md");
const MIGRATION: Answer = Answer::Document("migration-measured.md");

/// All of them, by paper.
pub const ITEMS: [PaperItem; 45] = [
    item("AET table 1", "overhead at H 64, T 128", Answer::Kept),
    item("AET table 2", "overhead by H and T", Answer::Kept),
    item("AET table 3", "traps per reference", Answer::Kept),
    item("AET fig. 1", "linear rule for the rate", Answer::Kept),
    item("AET fig. 2", "logarithmic rule", Answer::Kept),
    item(
        "AET fig. 3",
        "working sets of a program in steps",
        Answer::Kept,
    ),
    item(
        "AET fig. 4",
        "curves of real programs by AET and LRU",
        Answer::Kept,
    ),
    item(
        "AET fig. 5",
        "working sets over time by AET and LRU",
        Answer::Kept,
    ),
    item(
        "AET table 5",
        "phases and overhead without sampling (fig. 6)",
        Answer::Kept,
    ),
    item(
        "LS07 fig. 4",
        "cache loaded from storage instead of from guest memory",
        Answer::Kept,
    ),
    item(
        "LS07 fig. 5",
        "guest memory and cache act as one LRU memory",
        DISK,
    ),
    item(
        "LS07 fig. 6",
        "the workflow of the controller",
        Answer::Document("results/single-runs.md"),
    ),
    item(
        "LS07 fig. 7",
        "throughput by share of memory in the cache, as I/O and CPU counts",
        Answer::Kept,
    ),
    item(
        "LS07 fig. 8",
        "I/O for eight workloads and five splits",
        Answer::Kept,
    ),
    item(
        "LS07 fig. 9",
        "CPU by share of memory in the cache",
        Answer::Kept,
    ),
    item(
        "LS07 fig. 10",
        "write ratios 0 to 50 %, both write modes",
        Answer::Kept,
    ),
    item(
        "LS07 fig. 11",
        "prediction at other sizes, eight workloads",
        DISK,
    ),
    item(
        "LS07 fig. 12",
        "curve of a service with a background task",
        Answer::Kept,
    ),
    item("LS07 table 1", "costs of the primitives", DISK),
    item(
        "LS07 table 2",
        "allocation under isolation constraints",
        Answer::Kept,
    ),
    item("LS07 table 3", "against ESX's sampling", Answer::Kept),
    item("LS07 §6.2", "signatures of pages; ablations", DISK),
    item(
        "LS07 §4.4",
        "a guest that reports falsely",
        Answer::Document("dividing-measured.md"),
    ),
    item("M08 table 1", "compiling from a cold page cache", DISK),
    item("M08 table 2", "128 MB with hcache beside 256 MB", DISK),
    item(
        "M08 §5",
        "hit ratio; cost relative to a page copy",
        Answer::Document("performance.md"),
    ),
    item(
        "M08 §7",
        "self-ballooning with hcache",
        Answer::Missing("tested by parts, not measured on guests"),
    ),
    item("M08 §2, §7", "several guests compete in one hcache", DISK),
    item(
        "PRL §1",
        "all pages of 1 GB made invalid each second, a fault for each page touched",
        Answer::Missing("would be the cost of emulation"),
    ),
    item("PRL fig. 2", "the synthetic application", MIGRATION),
    item(
        "PRL fig. 3",
        "power",
        Answer::Missing("this machine has no counter of energy"),
    ),
    item("PRL fig. 4", "migration with PML", MIGRATION),
    item(
        "PRL fig. 5",
        "duration of a copy (`save`) with PML",
        MIGRATION,
    ),
    item("PRL §3.3", "checkpoint", MIGRATION),
    item("PRL §3.4 L1", "PML finds only written pages", WORKING_SET),
    item(
        "PRL §3.4 L2",
        "all written once, then a part",
        Answer::Missing("the program is not written"),
    ),
    item(
        "PRL fig. 6",
        "slowdown of PML-based estimation",
        Answer::Missing("the model computes it (`plimsoll wss`); no table"),
    ),
    item(
        "PRL fig. 8",
        "distinct hot addresses by iteration",
        WORKING_SET,
    ),
    item(
        "PRL fig. 10",
        "arrays and HPL by three estimators",
        WORKING_SET,
    ),
    item(
        "PRL §5.2",
        "HPL with the memory found, and with 100 MB less",
        Answer::Missing("needs the balloon in a guest of lab/programs"),
    ),
    item("PRL table 1", "missed addresses", WORKING_SET),
    item("PRL fig. 11", "PARSEC", WORKING_SET),
    item(
        "PRL §5.3.1",
        "no cost to the VM",
        Answer::Missing("an assumption of the model, as in the paper"),
    ),
    item(
        "PRL fig. 12",
        "CPU of the host by number of VMs",
        Answer::Document("performance.md"),
    ),
    item(
        "PRL §4.4",
        "footprint of the guest's kernel (epsilon)",
        WORKING_SET,
    ),
];
