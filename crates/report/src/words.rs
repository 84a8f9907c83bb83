//! The daemon's answers in words: sizes, states, names, and what is not known.

use plimsoll_protocol::curve_json::MissesJson;
use plimsoll_protocol::size::ByteSize;
use plimsoll_protocol::vm::{Relative, WorkingSetView};

use plimsoll_output::{cut_middle, duration, per_second, printable};
pub use plimsoll_output::{local_time, ratio, short_percent as percent, time_of_day};
pub use plimsoll_protocol::name_of;

/// What stands for "not known".
pub const UNKNOWN: &str = "-";
/// What a view of a host without VMs has in place of a table.
pub const NO_VM: &str = "No VM was found.\n";
/// Letters of a VM's name that a table shows.
const NAME_LETTERS: usize = 24;

/// A size for a reader.
pub fn size(bytes: u64) -> String {
    ByteSize(bytes).rounded()
}

/// A number of things.
pub fn counted(count: u64, what: &str) -> String {
    let ending = if count == 1 { "" } else { "s" };
    format!("{count} {what}{ending}")
}

/// A value that may not be known.
pub fn known<T>(value: Option<T>, form: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), form)
}

/// A size that may not be known.
pub fn maybe_size(bytes: Option<u64>) -> String {
    known(bytes, size)
}

/// A working set, marked where it is only a bound.
pub fn working_set(set: Option<&WorkingSetView>) -> String {
    known(set, |set| {
        format!("{}{}", set.bound.sign(), size(set.bytes))
    })
}

/// Misses per second with their band, or per second of vCPU time, of which the VM has `seconds` a second.
pub fn misses(misses: Option<&MissesJson>, seconds: f64) -> String {
    known(misses, |at| {
        let shown = |rate: f64| per_second(rate / seconds);
        format!(
            "{} ({} to {})",
            shown(at.misses_per_second),
            shown(at.misses_low_per_second),
            shown(at.misses_high_per_second)
        )
    })
}

/// Misses over those at the baseline, with their band.
pub fn relative(relative: Option<&Relative>) -> String {
    known(relative, |at| {
        format!(
            "{} ({} to {})",
            ratio(at.expected),
            ratio(at.low),
            ratio(at.high)
        )
    })
}

/// A VM's name as a table shows it.
pub fn name(name: &str) -> String {
    cut_middle(&printable(name), NAME_LETTERS)
}

/// Age of a time, `12 s`.
pub fn age(now_unix_ms: u64, then_unix_ms: u64) -> String {
    duration(now_unix_ms.saturating_sub(then_unix_ms) as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::WorkingSetBound;
    use plimsoll_protocol::decision::Phase;
    use plimsoll_protocol::vm::VmStatus;

    #[test]
    fn states_have_the_names_of_the_json() {
        assert_eq!(name_of(VmStatus::Violating), "violating");
        assert_eq!(name_of(Phase::GivingBack), "giving-back");
    }

    #[test]
    fn names_are_cut_and_cannot_move_the_cursor() {
        assert_eq!(name("web\u{1b}[2J"), "web\u{fffd}[2J");
        assert_eq!(name(&"x".repeat(24)), "x".repeat(24));
        assert_eq!(
            name("compute-7-instance-0000001a"),
            "compute-7-in…ce-0000001a"
        );
    }

    #[test]
    fn a_bound_is_marked_and_what_nobody_knows_is_a_dash() {
        let set = |bound| WorkingSetView {
            bytes: 3 << 20,
            bound,
        };
        let shown = |bound| working_set(Some(&set(bound)));
        assert_eq!(shown(WorkingSetBound::Estimate), "3 MiB");
        assert_eq!(shown(WorkingSetBound::AtLeast), "≥ 3 MiB");
        assert_eq!(shown(WorkingSetBound::AtMost), "≤ 3 MiB");
        assert_eq!(
            (working_set(None), relative(None)),
            ("-".into(), "-".into())
        );
    }
}
