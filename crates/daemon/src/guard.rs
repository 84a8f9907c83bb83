//! What keeps a guest from starving: the memory that it keeps when it is shrunk, and the signs that it runs short.
//!
//! A guest keeps what it cannot give by its own report, slack, and twice what its need grew by since the report before, and
//! it is shrunk step by step. Without a recent report nothing shows which part of its memory it can do without, so it
//! keeps all, unless its swap is known to take the rest. A report that is false harms the VM of the guest that makes it:
//! it cannot raise the VM above its size, nor its claim in a plan above its baseline.

use plimsoll_actuator::{MemoryStatus, STATS_AGE_MAX_S, slack_bytes};

/// Rise of a guest's major page faults a second from which a move is too much for it, at most; and the share of the time
/// that it may wait for them: a slow disk never serves that many.
const FAULTS_RISE_MAX: f64 = 500.0;
const WAITS_RISE_MAX: f64 = 0.5;
/// Share of a VM's own memory that it gets back at once when its guest runs short or its balloon is stuck.
const GIVE_BACK_SHARE: u64 = 10;

/// Counters of a guest at the beginning of a move.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GuestCounters {
    /// Major page faults a second.
    pub faults_per_second: f64,
    /// Processes killed for lack of memory.
    pub oom_kills: Option<u64>,
}

impl GuestCounters {
    /// The counters of the last report.
    pub fn of(status: &MemoryStatus) -> Self {
        let need = status.need.as_ref();
        Self {
            faults_per_second: need
                .and_then(|need| need.major_faults_per_second)
                .unwrap_or(0.0),
            oom_kills: need.and_then(|need| need.oom_kills),
        }
    }
}

/// The part of its own memory that a VM keeps, in bytes; never more than it has. `swap_bytes` is the size of the swap
/// that its guest is known to have.
pub fn floor_bytes(status: &MemoryStatus, swap_bytes: u64) -> u64 {
    let has = status.direct.actual_bytes;
    let kept = status.need.map_or(has, |need| {
        // It grows until the next report, and until what that shows has had an effect.
        let growth = need.growth_bytes.saturating_mul(2);
        let kept = need.needed_bytes.saturating_add(slack_of(status));
        kept.saturating_add(growth)
    });
    kept.saturating_sub(swap_bytes).min(has)
}

/// The largest part of its own memory that a VM loses between two looks at its guest, in bytes, if it keeps `floor_bytes`:
/// half of its slack, or an eighth of what it can give. A guest reports every two seconds what it has left, and what it
/// allocates meanwhile must be there.
pub fn step_bytes(status: &MemoryStatus, floor_bytes: u64) -> u64 {
    let gives = status.direct.actual_bytes.saturating_sub(floor_bytes);
    (slack_of(status) / 2).max(gives / 8)
}

/// The memory that a VM gets back at once when its guest runs short, in bytes: a tenth of its own, and at least its
/// slack.
pub fn give_back_bytes(status: &MemoryStatus) -> u64 {
    let tenth = status.direct.actual_bytes / GIVE_BACK_SHARE;
    tenth.max(slack_of(status))
}

/// The rise of a guest's major page faults a second from which it runs short, if it waits so many ms for each.
pub fn faults_rise_max(miss_cost_ms: f64) -> f64 {
    (WAITS_RISE_MAX * 1000.0 / miss_cost_ms).min(FAULTS_RISE_MAX)
}

/// Why a VM gets memory back, if its guest runs short by its last report. Memory that its swap takes is not available
/// by design, so that only faults count for a guest with swap: more than `faults_max` per second above those before. That
/// is infinite if its page cache moves into the cache under its disk, which causes faults.
pub fn shortage(
    status: &MemoryStatus,
    before: GuestCounters,
    swap_bytes: u64,
    faults_max: f64,
) -> Option<String> {
    let need = status.need?;
    let killed = need.oom_kills > before.oom_kills && before.oom_kills.is_some();
    if killed {
        return Some("its guest killed a process for lack of memory".to_owned());
    }
    if swap_bytes == 0 && need.available_bytes < slack_of(status) / 2 {
        return Some(format!(
            "only {} MiB are available in its guest",
            need.available_bytes >> 20
        ));
    }
    let faults = need.major_faults_per_second.unwrap_or(0.0);
    if faults > before.faults_per_second + faults_max {
        return Some(format!("its guest waits for {faults:.0} pages a second"));
    }
    None
}

/// Why nothing more is taken from a VM at its floor.
pub fn why_kept(status: &MemoryStatus) -> String {
    match status.need {
        Some(need) => format!(
            "its guest cannot give more: it needs {} MiB of {}",
            need.needed_bytes >> 20,
            status.direct.actual_bytes >> 20
        ),
        None => format!(
            "its guest reported no available memory in the last {STATS_AGE_MAX_S} s, so nothing shows what it can give"
        ),
    }
}

/// Memory that a VM keeps available when it is shrunk.
pub fn slack_of(status: &MemoryStatus) -> u64 {
    let direct = &status.direct;
    slack_bytes(direct.max_bytes.unwrap_or(direct.actual_bytes))
}
