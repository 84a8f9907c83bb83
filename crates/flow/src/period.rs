//! One period of tracing a VM: results, cost and losses of the backend.
//!
//! A field has the same meaning for all methods: traps are counted in [`TrapCounts`], touches found by scans in
//! [`ScanCounts`], and the counts of the other kind are zero.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// How a backend observes a VM's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum TraceMethod {
    /// Every access to an inaccessible page traps and is recorded, in order.
    #[cfg_attr(feature = "serde", serde(rename = "trap"))]
    Traps,
    /// Scans find which unmapped pages the VM has mapped again.
    #[cfg_attr(feature = "serde", serde(rename = "scan"))]
    AccessedPageScans,
    /// Scans list the pages written since the scan before.
    #[cfg_attr(feature = "serde", serde(rename = "write-scan"))]
    WriteScans,
    /// Random pages are unmapped once a period and checked at its end.
    #[cfg_attr(feature = "serde", serde(rename = "sample"))]
    SampledPages,
    /// Random pages are made inaccessible one after another, each until its next access, which traps.
    #[cfg_attr(feature = "serde", serde(rename = "first-touch"))]
    FirstTouches,
    /// Sampled pages are protected against every access; scans find from which the kernel has removed the protection.
    #[cfg_attr(feature = "serde", serde(rename = "rwp"))]
    AccessProtection,
    /// Sampled pages are marked idle; scans find which have lost the mark.
    #[cfg_attr(feature = "serde", serde(rename = "idle"))]
    IdlePages,
    /// The kernel's DAMON reports how long ago sampled pages were last touched.
    #[cfg_attr(feature = "serde", serde(rename = "damon"))]
    Damon,
    /// BPF programs in the kernel report every use of sampled pages of the page cache, in order.
    #[cfg_attr(feature = "serde", serde(rename = "page-cache"))]
    PageCache,
}

impl TraceMethod {
    /// All methods.
    pub const ALL: [Self; 9] = [
        Self::Traps,
        Self::AccessedPageScans,
        Self::WriteScans,
        Self::SampledPages,
        Self::FirstTouches,
        Self::AccessProtection,
        Self::IdlePages,
        Self::Damon,
        Self::PageCache,
    ];

    /// Whether accesses trap, so that they are counted in [`TrapCounts`]; otherwise scans find them.
    pub const fn traps(self) -> bool {
        matches!(self, Self::Traps | Self::FirstTouches)
    }

    /// The name in configuration, options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Traps => "trap",
            Self::AccessedPageScans => "scan",
            Self::WriteScans => "write-scan",
            Self::SampledPages => "sample",
            Self::FirstTouches => "first-touch",
            Self::AccessProtection => "rwp",
            Self::IdlePages => "idle",
            Self::Damon => "damon",
            Self::PageCache => "page-cache",
        }
    }
}

impl fmt::Display for TraceMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that no tracing method has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a tracing method: {names}", names = TraceMethod::ALL.map(TraceMethod::name).join(", "))]
pub struct UnknownTraceMethod(pub String);

impl FromStr for TraceMethod {
    type Err = UnknownTraceMethod;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let mut all = Self::ALL.into_iter();
        all.find(|method| method.name() == name)
            .ok_or_else(|| UnknownTraceMethod(name.to_owned()))
    }
}

/// Traps of a period; zero unless accesses trap ([`TraceMethod::traps`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrapCounts {
    /// Traps that recorded a reference.
    pub taken: u64,
    /// Those of them that were writes.
    pub writes: u64,
    /// Traps that recorded nothing: a second vCPU at the same page, or a page no longer tracked.
    pub strays: u64,
    /// Capacity of the hot set in sampled pages; 0 where there is none.
    pub hot_set_pages: u32,
}

/// Samples of a period; zero unless the method is [`TraceMethod::FirstTouches`] or [`TraceMethod::Damon`].
///
/// A page that is drawn while it is inaccessible already is one more sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SampleCounts {
    /// Pages drawn from the whole RAM.
    pub drawn: u64,
    /// Those of them without contents: never touched, taken by a balloon or reported as free.
    pub empty: u64,
    /// Samples that began.
    pub begun: u64,
    /// Samples that ended with the first touch of their page.
    pub touched: u64,
    /// Samples that were ended untouched: at their maximum age, or because traps were over the budget.
    pub withdrawn: u64,
    /// Samples whose page lost its contents, so that its next touch could not trap; and those of which it is not known
    /// whether a touch was that of a neighbouring page.
    pub vanished: u64,
    /// Samples whose page is still untouched at the end of the period.
    pub waiting: u64,
}

/// Scans of a period; zero if accesses trap ([`TraceMethod::traps`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScanCounts {
    /// Scans completed.
    pub scans: u64,
    /// Mean time from one scan to the next, in the scanner's own clock: CPU time of the VM's process for
    /// accessed-page scans, wall time for the others.
    pub interval: Duration,
    /// Pages found touched, summed over all scans.
    pub touches: u64,
    /// Touches of all pages, tracked or not, by an estimate that does not depend on which are; 0 if there is none.
    pub touches_of_all: u64,
    /// Those of the first known to be written.
    pub writes: u64,
    /// Mean number of tracked pages touched between two scans. Their order is unknown, so no smaller
    /// memory can be resolved.
    pub resolution_pages: u32,
    /// Tracked pages that were swapped out when the sample was drawn. This and the following counts are those of idle
    /// page tracking and DAMON, zero for other methods.
    pub swapped_pages: u64,
    /// Tracked pages that lie in huge pages, of which all count as touched when a part is.
    pub huge_pages: u64,
    /// Tracked pages of the page cache or of shared memory.
    pub cache_pages: u64,
}

/// Losses of the tracer in a period.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeriodLosses {
    /// Sampled pages that could not be made inaccessible at the start.
    pub stayed_accessible: u64,
    /// Times that a page left the hot set and could not be made inaccessible at once; the tracer
    /// retries every 50 ms.
    pub left_hot_set_accessible: u64,
    /// Uses of sampled pages that found the kernel's ring full, which the tracer reads too late.
    pub overflowed: u64,
    /// Pages of the VM, sampled or not, that were populated since the period before: the first touch of a page
    /// without contents is not observed.
    pub first_touches_unseen: u64,
}

impl PeriodLosses {
    /// References that may be missing: of sampled pages that were accessible while they were tracked, and those that found a ring
    /// full.
    pub fn lost(&self) -> u64 {
        self.stayed_accessible + self.left_hot_set_accessible + self.overflowed
    }
}

/// What a VM did in a window, in the time that it would have taken without tracing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Undisturbed {
    /// For what it did while all tracked pages were observed; zero if unknown.
    pub observed: Duration,
    /// The same at least and at most.
    pub limits: [Duration; 2],
    /// References recorded before that: while pages were made inaccessible, and until the hot set was full.
    pub references_before: u64,
    /// Wall time by which tracing made the period longer.
    pub delay: Duration,
    /// CPU time of the VM in the period that only tracing took.
    pub cpu_time: Duration,
}

impl Undisturbed {
    /// Of a VM that tracing did not delay.
    pub fn whole(window: Duration) -> Self {
        Self {
            observed: window,
            limits: [window; 2],
            ..Self::default()
        }
    }
}

/// Results, cost and losses of a tracing backend in one period.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs, reason = "the names of the others suffice")]
pub struct Period {
    pub index: u64,
    /// How the pages were observed.
    pub method: TraceMethod,
    pub length: Duration,
    /// The part of the period in which pages were tracked.
    pub window: Duration,
    /// The VM's own part of it.
    pub undisturbed: Undisturbed,
    /// One page in `scale` was tracked; each tracked page represents that many. For first touches, a sample represents
    /// that many pages with contents.
    pub scale: u32,
    /// Pages of the VM that have contents.
    pub populated_pages: u64,
    /// For first touches, samples that waited in this period.
    pub tracked_pages: u64,
    /// Tracked pages referenced at least once.
    pub distinct_pages: u64,
    pub traps: TrapCounts,
    /// Scans and the touches that they found.
    pub scans: ScanCounts,
    /// Samples of first touches.
    pub samples: SampleCounts,
    /// Pages made inaccessible, at the start and again later.
    pub rearmed_pages: u64,
    /// Time that the VM spent in faults: traps with their context switches (\[AET\] §4.3, phase 1), or minor faults.
    pub fault_time: Duration,
    /// CPU time spent making pages inaccessible and accessible, and scanning (phase 2). For first touches, also choosing
    /// pages and estimating.
    pub arm_time: Duration,
    /// Time spent finding the VM's populated pages (phase 3).
    pub collect_time: Duration,
    /// Fault and arming time over the time that the VM's vCPUs had, 0.0 or more.
    pub overhead_ratio: f64,
    /// Whether the time budget closed the window before the end of the period.
    pub budget_exhausted: bool,
    pub losses: PeriodLosses,
}

impl Period {
    /// A period in which a method observed nothing.
    pub fn empty(method: TraceMethod, length: Duration, window: Duration) -> Self {
        Self {
            index: 0,
            method,
            length,
            window,
            undisturbed: Undisturbed::whole(window),
            scale: 1,
            populated_pages: 0,
            tracked_pages: 0,
            distinct_pages: 0,
            traps: TrapCounts::default(),
            scans: ScanCounts::default(),
            samples: SampleCounts::default(),
            rearmed_pages: 0,
            fault_time: Duration::ZERO,
            arm_time: Duration::ZERO,
            collect_time: Duration::ZERO,
            overhead_ratio: 0.0,
            budget_exhausted: false,
            losses: PeriodLosses::default(),
        }
    }

    /// References recorded: traps taken, or touches found by scans.
    pub fn references(&self) -> u64 {
        if self.method.traps() {
            self.traps.taken
        } else {
            self.scans.touches
        }
    }

    /// Minimum resolvable size in pages of the VM: a curve contains no information about smaller memories, which the
    /// hot set, or the pages touched between two scans, would fill. 0 for first touches, which have no such size.
    pub fn resolution_pages(&self) -> u64 {
        let sampled = if self.method.traps() {
            self.traps.hot_set_pages
        } else {
            self.scans.resolution_pages
        };
        u64::from(sampled) * u64::from(self.scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_is_found_by_its_name() {
        for method in TraceMethod::ALL {
            assert_eq!(method.name().parse(), Ok(method));
        }
        let error = "traps".parse::<TraceMethod>().unwrap_err().to_string();
        assert!(error.contains("'traps'"), "{error}");
    }
}
