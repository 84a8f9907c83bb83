//! The interval at which a guest reports statistics: none, somebody's, or ours while this process needs it.

/// The interval of one guest's statistics, as far as this process sets it.
#[derive(Debug)]
pub(crate) struct StatsInterval {
    /// The interval that is set where there is none, in s; 0 sets none.
    ours_s: u64,
    /// Whether the guest is to report statistics.
    wanted: bool,
    /// Whether this process has set a target: what the guest needs must be known soon.
    has_set_target: bool,
    /// The interval before this process, or an earlier one that could not restore it, set it, in s.
    pub former_s: Option<u64>,
}

impl StatsInterval {
    pub(crate) fn new(ours_s: u64) -> Self {
        Self {
            ours_s,
            wanted: true,
            has_set_target: false,
            former_s: None,
        }
    }

    /// Whether the guest is to report statistics.
    #[cfg(feature = "libvirt")]
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// The interval that is to be set instead of `found_s`, 0 for none: where there is none, and instead of a longer one once
    /// a target was set.
    pub(crate) fn to_set(&self, found_s: u64) -> Option<u64> {
        let is_long = found_s == 0 || (found_s > self.ours_s && self.has_set_target);
        (is_long && self.wanted && self.ours_s > 0).then_some(self.ours_s)
    }

    /// Notes that ours was set instead of `former_s`.
    pub(crate) fn was_set(&mut self, former_s: u64) {
        self.former_s.get_or_insert(former_s);
    }

    /// Notes that a target is set; returns whether it is the first.
    pub(crate) fn target_is_set(&mut self) -> bool {
        !std::mem::replace(&mut self.has_set_target, true)
    }

    /// Turns the statistics on or off; returns the interval that is to be restored, if any.
    pub(crate) fn want(&mut self, wanted: bool) -> Option<u64> {
        self.wanted = wanted;
        if wanted {
            return None;
        }
        self.has_set_target = false;
        self.former_s.take()
    }
}
