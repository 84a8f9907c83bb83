//! Records of the history store, separate from the forms sent to clients: they change only with [`SCHEMA`].

use plimsoll_flow::{LogErrors, PageCount, PageSize, Whole as _, WorkingSetBound};
use plimsoll_protocol::curve_json::{CurveJson, MissesJson, PointJson};
use plimsoll_protocol::request::SettingsChange;
use plimsoll_protocol::vm::{HeatRow, Sample};
use plimsoll_vm::ProcessId;
use serde::{Deserialize, Serialize};

use super::{ResizeMark, kept};

/// Version of all forms in the store.
pub(super) const SCHEMA: u32 = 1;

/// Maximum number of steps of a stored curve.
const POINTS_MAX: usize = 48;

/// All VMs at the end of a turn, by key.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Turn(pub(super) Vec<(u64, StoredSample)>);

impl Turn {
    pub(super) fn of(samples: impl Iterator<Item = (u64, Sample)>) -> Self {
        let stored = samples.map(|(key, sample)| (key, StoredSample(sample)));
        Self(stored.collect())
    }
}

/// A sample as it is stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "SampleForm", into = "SampleForm")]
pub(super) struct StoredSample(pub(super) Sample);

/// The fields of a stored [`Sample`].
#[derive(Serialize, Deserialize)]
struct SampleForm {
    unix_ms: u64,
    direct_bytes: u64,
    cache_bytes: u64,
    target_bytes: Option<u64>,
    /// The working set in bytes, with its bound in the highest two bits, which earlier versions left 0.
    working_set: Option<u64>,
    relative: Option<f64>,
    misses_per_second: Option<f64>,
    overhead_ratio: Option<f64>,
    lost: u64,
}

/// The bounds by their number in a [`SampleForm`], from 1 on. Of a mean it is the first that a part has.
const BOUNDS: [WorkingSetBound; 3] = [
    WorkingSetBound::AtLeast,
    WorkingSetBound::AtMost,
    WorkingSetBound::Estimate,
];
/// Place of that number, and the largest working set below it.
const BOUND_SHIFT: u32 = 62;
const WORKING_SET_MAX: u64 = (1 << BOUND_SHIFT) - 1;

impl From<SampleForm> for StoredSample {
    fn from(form: SampleForm) -> Self {
        let number = |set: u64| (set >> BOUND_SHIFT) as usize;
        let bound = |set| BOUNDS.get(number(set).checked_sub(1)?).copied();
        Self(Sample {
            unix_ms: form.unix_ms,
            direct_bytes: form.direct_bytes,
            cache_bytes: form.cache_bytes,
            target_bytes: form.target_bytes,
            working_set_bytes: form.working_set.map(|set| set & WORKING_SET_MAX),
            working_set_bound: form.working_set.and_then(bound),
            relative: form.relative,
            misses_per_second: form.misses_per_second,
            overhead_ratio: form.overhead_ratio,
            lost: form.lost,
        })
    }
}

impl From<StoredSample> for SampleForm {
    fn from(StoredSample(sample): StoredSample) -> Self {
        let is_its = |bound: &WorkingSetBound| sample.working_set_bound == Some(*bound);
        let number = BOUNDS.iter().position(is_its).map_or(0, |at| at as u64 + 1);
        let with_bound = |bytes: u64| bytes.min(WORKING_SET_MAX) | number << BOUND_SHIFT;
        Self {
            unix_ms: sample.unix_ms,
            direct_bytes: sample.direct_bytes,
            cache_bytes: sample.cache_bytes,
            target_bytes: sample.target_bytes,
            working_set: sample.working_set_bytes.map(with_bound),
            relative: sample.relative,
            misses_per_second: sample.misses_per_second,
            overhead_ratio: sample.overhead_ratio,
            lost: sample.lost,
        }
    }
}

/// Combines several points in ascending time: sizes are the last, measurements the mean, losses the sum.
pub(super) fn together(samples: &[Sample]) -> Option<Sample> {
    let last = samples.last()?;
    let mean = |of: &dyn Fn(&Sample) -> Option<f64>| {
        let (sum, count) = samples
            .iter()
            .filter_map(of)
            .fold((0.0, 0_u32), |(sum, count), value| (sum + value, count + 1));
        (count > 0).then(|| sum / f64::from(count))
    };
    let has = |bound: &WorkingSetBound| {
        let is_its = |sample: &Sample| sample.working_set_bound == Some(*bound);
        samples.iter().any(is_its)
    };
    let bound = BOUNDS.into_iter().find(has);
    // A mean of lower and upper bounds would be neither; what is known of a size with an upper bound is that it is not negative.
    let is_no_lower = |of: Option<WorkingSetBound>| {
        bound == Some(WorkingSetBound::AtLeast) && of == Some(WorkingSetBound::AtMost)
    };
    let used = mean(&|sample| {
        let bytes = sample.working_set_bytes?;
        Some(if is_no_lower(sample.working_set_bound) {
            0.0
        } else {
            bytes as f64
        })
    });
    let lost = samples.iter().map(|sample| sample.lost);
    Some(Sample {
        working_set_bytes: used.map(|bytes| u64::whole(bytes.round())),
        working_set_bound: bound.filter(|_| used.is_some()),
        relative: mean(&|sample| sample.relative),
        misses_per_second: mean(&|sample| sample.misses_per_second),
        overhead_ratio: mean(&|sample| sample.overhead_ratio),
        lost: lost.fold(0, u64::saturating_add),
        ..*last
    })
}

/// The maximum number of pages touched in each cell over a span.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Heat {
    pub(super) cell_bytes: u64,
    pub(super) pages: Vec<u32>,
}

impl Heat {
    /// Adds a period; if its cells differ, the heat restarts with it.
    pub(super) fn add(&mut self, cell_bytes: u64, row: &HeatRow) {
        if self.cell_bytes != cell_bytes || self.pages.len() != row.pages.len() {
            self.cell_bytes = cell_bytes;
            self.pages.clone_from(&row.pages);
            return;
        }
        for (most, pages) in self.pages.iter_mut().zip(&row.pages) {
            *most = (*most).max(*pages);
        }
    }
}

/// A curve of few steps: size in pages, miss ratio and its band.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Curve {
    page_bytes: u64,
    references: u64,
    baseline_pages: Option<u64>,
    points: Vec<(u64, f32, f32, f32)>,
    vcpu_seconds_per_second: Option<f64>,
    /// By point, misses per second with the limits of their band, if they are known.
    misses: Vec<(f32, f32, f32)>,
    /// Of each of the first points, the errors of which those common to two sizes cancel out.
    log_errors: Vec<LogErrors>,
    uncertain_pages: u64,
}

impl Curve {
    /// What the last four fields are if nothing is known of them. Curves of earlier versions end before some of them.
    pub(super) const UNKNOWN: [u8; 4] = [0; 4];

    /// At most [`POINTS_MAX`] steps, of which one holds at the baseline.
    pub(super) fn thinned(curve: &CurveJson) -> Self {
        let baseline = curve.baseline_pages.map(PageCount);
        let whole = curve
            .to_curve()
            .ok()
            .zip(PageSize::new(curve.page_bytes).ok());
        let thin = whole.map(|(whole, page_size)| {
            let thin = whole.thinned_around(POINTS_MAX, baseline.as_slice());
            CurveJson::new(curve.vm.clone(), page_size, baseline, &thin)
        });
        // Curves are valid: they are made here.
        let curve = thin.as_ref().unwrap_or(curve);
        let kept = &curve.points;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "seven digits of a ratio do"
        )]
        let short = |value: f64| value as f32;
        let points = kept.iter().map(|point| {
            let [ratio, low, high] = [point.miss_ratio, point.low, point.high].map(short);
            (point.size_pages, ratio, low, high)
        });
        let misses = kept.iter().filter_map(|point| {
            let misses = point.misses?;
            Some((
                short(misses.misses_per_second),
                short(misses.misses_low_per_second),
                short(misses.misses_high_per_second),
            ))
        });
        Self {
            page_bytes: curve.page_bytes,
            references: curve.references,
            baseline_pages: curve.baseline_pages,
            points: points.collect(),
            vcpu_seconds_per_second: curve.vcpu_seconds_per_second,
            misses: misses.collect(),
            log_errors: curve.log_errors_permille.clone(),
            uncertain_pages: curve.uncertain_pages,
        }
    }

    pub(super) fn into_json(self, vm: &str) -> CurveJson {
        let misses = self.misses.into_iter().map(|(expected, low, high)| {
            Some(MissesJson {
                misses_per_second: expected.into(),
                misses_low_per_second: low.into(),
                misses_high_per_second: high.into(),
            })
        });
        let points = self.points.into_iter();
        let points = points.zip(misses.chain(std::iter::repeat(None)));
        CurveJson {
            schema: plimsoll_protocol::SCHEMA,
            vm: vm.to_owned(),
            page_bytes: self.page_bytes,
            references: self.references,
            baseline_pages: self.baseline_pages,
            vcpu_seconds_per_second: self.vcpu_seconds_per_second,
            uncertain_pages: self.uncertain_pages,
            log_errors_permille: self.log_errors,
            points: points
                .map(|((size_pages, miss_ratio, low, high), misses)| PointJson {
                    size_pages,
                    miss_ratio: miss_ratio.into(),
                    low: low.into(),
                    high: high.into(),
                    misses,
                })
                .collect(),
        }
    }
}

/// A VM's record besides its samples.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct VmRecord {
    pub(super) baseline_bytes: Option<u64>,
    pub(super) settings: Option<Settings>,
    /// Time at which it was last present; 0 if never.
    pub(super) seen_unix_ms: u64,
    max_misses_per_second: Option<f64>,
    max_stall: Option<f64>,
    /// The RAM that the baseline accounts for.
    pub(super) ram_bytes: Option<u64>,
    /// The last process that was resized: its number, and its start in clock ticks since boot.
    pub(super) resized: Option<(u32, u64)>,
    /// The most that its cache had in the last decision about it.
    pub(super) cache_bytes: Option<u64>,
    /// The last process that was found to have begun anew since then.
    pub(super) began_anew: Option<(u32, u64)>,
    decided_above_bytes: Option<u64>,
    others_above_bytes: Option<u64>,
    /// What its process's balloon needs: the process, whether the total of its guest excludes the balloon, and the former interval of
    /// its guest's statistics in s.
    pub(super) balloon: Option<((u32, u64), bool, Option<u64>)>,
}

impl VmRecord {
    /// What the last nine fields are without values. Records of earlier versions end before some of them.
    pub(super) const NOTHING_MORE: [u8; 9] = [0; 9];

    /// The settings changed by hand.
    pub(super) fn change(&self) -> SettingsChange {
        let change = self.settings.as_ref().map(Settings::to_change);
        SettingsChange {
            max_misses_per_second: self.max_misses_per_second,
            max_stall: self.max_stall,
            ..change.unwrap_or_default()
        }
    }

    /// Stores `change` in place of the settings changed by hand before.
    pub(super) fn put(&mut self, change: &SettingsChange) {
        self.settings = (*change != SettingsChange::default()).then(|| Settings::of(change));
        self.max_misses_per_second = change.max_misses_per_second;
        self.max_stall = change.max_stall;
    }

    /// What was stored before it was last resized.
    pub(super) fn mark(&self) -> ResizeMark {
        ResizeMark {
            process: self
                .resized
                .map(|(pid, start_ticks)| ProcessId { pid, start_ticks }),
            cache_bytes: self.cache_bytes,
            decided_above_bytes: self.decided_above_bytes,
            others_above_bytes: self.others_above_bytes,
        }
    }

    /// Stores `mark` in place of that.
    pub(super) fn put_mark(&mut self, mark: ResizeMark) {
        self.resized = mark.process.map(kept);
        self.cache_bytes = mark.cache_bytes;
        self.decided_above_bytes = mark.decided_above_bytes;
        self.others_above_bytes = mark.others_above_bytes;
    }
}

/// [`SettingsChange`] without `reset` and the bounds of [`VmRecord`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Settings {
    min_bytes: Option<u64>,
    max_bytes: Option<u64>,
    baseline_bytes: Option<u64>,
    shares: Option<u32>,
    max_loss: Option<f64>,
    managed: Option<bool>,
}

impl Settings {
    fn of(change: &SettingsChange) -> Self {
        Self {
            min_bytes: change.min_bytes,
            max_bytes: change.max_bytes,
            baseline_bytes: change.baseline_bytes,
            shares: change.shares,
            max_loss: change.max_loss,
            managed: change.managed,
        }
    }

    fn to_change(&self) -> SettingsChange {
        SettingsChange {
            min_bytes: self.min_bytes,
            max_bytes: self.max_bytes,
            baseline_bytes: self.baseline_bytes,
            shares: self.shares,
            max_loss: self.max_loss,
            managed: self.managed,
            ..SettingsChange::default()
        }
    }
}
