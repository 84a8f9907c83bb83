//! What is kept of the runs: what was promised, predicted and measured.

use plimsoll_plot::{Axis, Chart, Series, SeriesStyle, Unit as AxisUnit};
use plimsoll_vm::detect;

use super::CurveSource;
use super::measure::{AllocationResult, InitialVm, Run, TOLERANCE, VmResult};
use crate::results::{Conditions, GEOMETRIC_MEAN, Measurement, Repetition, ResultSet, Unit};
use crate::trio::{BASELINE_MIB, RAM_MIB, Third};

/// The paper's geometric means over its three servers, by policy and bound: \[LS07\] tables 2 and 3.
const PAPER_BOUND_5: &str = "predicted 0.88, measured 0.85";
const PAPER_BOUND_25: &str = "predicted 0.43, measured 0.41";

/// What all allocations with a bound come to.
#[derive(Debug, Default, PartialEq)]
struct Summary {
    /// VMs that were promised a bound, once for each allocation.
    promises: u32,
    /// Of them, those that missed more.
    broken: u32,
    /// VMs whose measured misses lie within the band of the prediction, widened by the error of the measurement.
    within_band: u32,
    /// VMs that had not filled what they gained when they were measured.
    cold: u32,
    /// Allocations with a bound.
    allocations: u32,
    /// Of them, those whose measured geometric mean is within 10 % of the predicted one.
    within_tenth: u32,
}

impl Summary {
    fn of<'a>(allocations: impl IntoIterator<Item = &'a AllocationResult>) -> Self {
        let mut summary = Self::default();
        let bound = allocations.into_iter();
        for allocation in bound.filter(|allocation| allocation.max_loss.is_some()) {
            for vm in allocation.vms.iter().filter(|vm| !vm.is_hostile) {
                summary.promises += 1;
                summary.broken += u32::from(vm.above_bound);
                summary.within_band += u32::from(vm.is_within_band());
                summary.cold += u32::from(vm.filled < 1.0);
            }
            summary.allocations += 1;
            let off = allocation.measured_mean / allocation.predicted_mean - 1.0;
            summary.within_tenth += u32::from(off.abs() <= 0.1);
        }
        summary
    }

    /// Its counts with their names.
    fn rows(&self) -> [(&'static str, u32); 6] {
        [
            ("promises", self.promises),
            ("promises broken", self.broken),
            ("VMs measured within the band predicted", self.within_band),
            (
                "VMs that had not filled what they gained when measured",
                self.cold,
            ),
            ("allocations with promises", self.allocations),
            (
                "their geometric mean measured within 10 % of the predicted one",
                self.within_tenth,
            ),
        ]
    }
}

/// The runs as a set, with its charts. Each repetition is a seed.
///
/// # Errors
///
/// That a run cannot be written as JSON.
pub fn result_set(
    runs: &[Run],
    thirds: &[Third],
    seeds: u32,
    conditions: Conditions,
    command: String,
) -> anyhow::Result<(ResultSet, Vec<(&'static str, Chart)>)> {
    let mut measurements = summaries(runs, seeds);
    for &third in thirds {
        let of_third: Vec<&Run> = runs.iter().filter(|run| run.third == third).collect();
        measurements.extend(of_allocations(&of_third));
        measurements.extend(drifts(&of_third));
    }
    let accelerator = runs.first().map_or("", |run| run.accelerator.as_str());
    let set = ResultSet {
        title: "Memory allocated among three VMs: predicted and measured misses".to_owned(),
        method: format!(
            "Three guests of {BASELINE_MIB} MiB each, after the machines of [LS07] §6.5: web reads files by popularity, search reads an index at random, scan \
             reads everything in turn, with a light background task (scan-with-task) or without. Their curves come from first touches while they have all of their RAM ({RAM_MIB} MiB), as on a host with memory to spare, or from the caches under \
             their disks. Each allocation of their memory is set for real, without caches, and measured once the servers have filled what they gained. All misses are misses per \
             request relative to those before; 1.00 is no change. A VM is measured within its band if its distance from the prediction is at most that of the band's limit and the error of the measurement (95 %, by the servers' reports), added as squares. A promise is broken if a VM misses more than its bound plus {:.0} points, [LS07]'s own largest excess.",
            TOLERANCE * 100.0
        ),
        command,
        measurements,
        limits: vec![
            "Counts, no times: guests may be emulated, as the conditions state.".to_owned(),
            "Curves of first touches show nothing beyond the memory that a VM has, so the VMs are given all of their RAM to trace them.".to_owned(),
            format!(
                "Of the {} runs, {} have allocations by curves of first touches.",
                runs.len(),
                runs.iter().filter(|run| by_touches(run)).count()
            ),
            "The servers are models of the paper's, and smaller.".to_owned(),
            "ESX by sampling checks all pages for accesses in 30 s, not 100 random ones: it is the paper's sampling without its noise.".to_owned(),
        ],
        raw: serde_json::to_value(runs)?,
        ..ResultSet::new(
            "divide",
            Conditions {
                accelerator: accelerator.to_owned(),
                ..conditions
            },
            (u64::from(seeds), Repetition::Seed),
        )
    };
    Ok((set, vec![("misses", scatter(runs))]))
}

fn by_touches(run: &Run) -> bool {
    let mut sources = run.allocations.iter().map(|one| one.curves);
    sources.any(|source| source == CurveSource::FirstTouch)
}

/// Counts over all runs of each seed.
fn summaries(runs: &[Run], seeds: u32) -> Vec<Measurement> {
    let of_seed = |seed| {
        let runs = runs.iter().filter(move |run| run.seed == seed);
        Summary::of(runs.flat_map(|run| &run.allocations)).rows()
    };
    let by_seed: Vec<_> = (1..=seeds).map(of_seed).collect();
    let all = Summary::of(runs.iter().flat_map(|run| &run.allocations));
    let rows = all.rows().into_iter().enumerate();
    rows.map(|(row, (name, count))| Measurement {
        item: "LS07 table 2".to_owned(),
        what: "Promises of limits on misses, by seed".to_owned(),
        of: name.to_owned(),
        column: String::new(),
        unit: Unit::Count,
        values: by_seed
            .iter()
            .map(|rows| Some(f64::from(rows[row].1)))
            .collect(),
        paper: String::new(),
        remark: format!("{count} in all"),
    })
    .collect()
}

/// Each allocation: every VM's memory, predicted and measured misses, and the means. `runs` are those of one third server,
/// by seed; the first has all allocations.
fn of_allocations(runs: &[&Run]) -> Vec<Measurement> {
    let Some(first) = runs.first() else {
        return Vec::new();
    };
    let mut rows = Vec::new();
    for allocation in &first.allocations {
        let what = title(first.third, allocation);
        let values = |of: &dyn Fn(&AllocationResult) -> f64| {
            let of_run = |run: &&Run| {
                let mut all = run.allocations.iter();
                all.find(|one| title(run.third, one) == what).map(of)
            };
            runs.iter().map(of_run).collect()
        };
        let mut push = |of: String, unit, paper: &str, values| {
            rows.push(Measurement {
                item: match allocation.max_loss {
                    Some(_) => "LS07 table 2".to_owned(),
                    None => "LS07 table 3".to_owned(),
                },
                what: what.clone(),
                of,
                column: String::new(),
                unit,
                values,
                paper: paper.to_owned(),
                remark: String::new(),
            });
        };
        for (index, vm) in allocation.vms.iter().enumerate() {
            let of_vm = |of: fn(&VmResult) -> f64| {
                values(&move |one: &AllocationResult| of(&one.vms[index]))
            };
            let name = vm.vm.trim_start_matches("demo-");
            push(
                format!("{name}, memory"),
                Unit::Bytes,
                "",
                of_vm(|vm| vm.bytes as f64),
            );
            push(
                format!("{name}, predicted"),
                Unit::Factor,
                "",
                of_vm(|vm| vm.predicted.expected),
            );
            push(
                format!("{name}, measured"),
                Unit::Factor,
                "",
                of_vm(|vm| vm.measured),
            );
        }
        let paper = match allocation.max_loss {
            Some(0.05) => PAPER_BOUND_5,
            Some(0.25) => PAPER_BOUND_25,
            _ => "",
        };
        push(
            format!("{GEOMETRIC_MEAN}, predicted"),
            Unit::Factor,
            paper,
            values(&|one| one.predicted_mean),
        );
        push(
            format!("{GEOMETRIC_MEAN}, measured"),
            Unit::Factor,
            paper,
            values(&|one| one.measured_mean),
        );
    }
    rows
}

/// The same memory at the end as at the beginning.
fn drifts(runs: &[&Run]) -> Vec<Measurement> {
    let Some(first) = runs.first() else {
        return Vec::new();
    };
    let drift = |vm: &InitialVm| vm.misses_per_request_again / vm.misses_per_request;
    let vms = first.vms.iter().enumerate();
    vms.map(|(index, vm)| Measurement {
        item: "LS07 table 2".to_owned(),
        what: format!(
            "{}: with the memory of the beginning again, at the end",
            first.third.name()
        ),
        of: vm.vm.trim_start_matches("demo-").to_owned(),
        column: String::new(),
        unit: Unit::Factor,
        values: runs
            .iter()
            .map(|run| Some(drift(&run.vms[index])))
            .collect(),
        paper: String::new(),
        remark: "the servers' own change meanwhile".to_owned(),
    })
    .collect()
}

fn title(third: Third, allocation: &AllocationResult) -> String {
    let bound = allocation
        .max_loss
        .map(|loss| format!(", at most {:.0} % more misses", loss * 100.0));
    format!(
        "{}: {}{}, curves from {}",
        third.name(),
        allocation.plan.policy.row().title,
        bound.unwrap_or_default(),
        allocation.curves.name()
    )
}

/// Measured over predicted misses of each VM that was promised a bound.
fn scatter(runs: &[Run]) -> Chart {
    let of_source = |source: CurveSource| {
        let allocations = runs.iter().flat_map(|run| &run.allocations);
        let vms = allocations
            .filter(|one| one.curves == source && one.max_loss.is_some())
            .flat_map(|one| &one.vms)
            .filter(|vm| !vm.is_hostile);
        let mut points: Vec<_> = vms.map(|vm| (vm.predicted.expected, vm.measured)).collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        points
    };
    let sources = [CurveSource::FirstTouch, CurveSource::Caches];
    let points = sources.map(of_source);
    let all = points.iter().flatten().flat_map(|(x, y)| [*x, *y]);
    let most = all.fold(1.25, f64::max);
    let dots = sources.iter().zip(points).map(|(source, points)| {
        let name = format!("curves from {}", source.name());
        Series::new(name, SeriesStyle::Dots, points)
    });
    let line = Series::new(
        "as predicted",
        SeriesStyle::Line,
        [(0.0, 0.0), (most, most)],
    );
    let title = "Misses of each VM that was promised a bound";
    let subtitle = format!(
        "relative to those before: 1.00 is no change; accelerator {}",
        detect().accelerator
    );
    let axes = ["predicted", "measured"].map(|name| Axis::new(name, AxisUnit::Count));
    Chart::new(title, &subtitle, axes, dots.chain([line]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_policy::Relative;
    use plimsoll_protocol::plan::{DemandJson, PlanInputs, Policy, RulesJson, Search};

    fn run(seed: u32, allocations: &[(Option<f64>, f64)]) -> Run {
        let plan = PlanInputs {
            schema: 1,
            page_bytes: 4096,
            policy: Policy::isolated(Search::Optimal),
            rules: RulesJson {
                total_bytes: 1 << 20,
                unit_bytes: 4096,
                step_bytes: None,
                gain_min: 0.0,
                miss_ratio_min: 1e-6,
            },
            demands: vec![DemandJson {
                vm: "demo-web".to_owned(),
                curve: None,
                baseline_bytes: 1 << 20,
                current_bytes: 1 << 20,
                floor_bytes: 0,
                ceiling_bytes: None,
                max_loss: None,
                max_misses_per_second: None,
                shares: 1,
                working_set_bytes: None,
            }],
        };
        let allocation = |&(max_loss, measured): &(Option<f64>, f64)| AllocationResult {
            curves: CurveSource::Caches,
            max_loss,
            predicted_mean: 1.0,
            measured_mean: measured,
            vms: vec![VmResult {
                vm: "demo-web".to_owned(),
                bytes: 1 << 20,
                predicted: Relative {
                    expected: 1.0,
                    low: 0.9,
                    high: 1.1,
                },
                measured,
                measured_error: 0.0,
                filled: 1.0,
                above_bound: max_loss.is_some_and(|loss| measured > 1.0 + loss + TOLERANCE),
                is_hostile: false,
            }],
            plan: plan.plan().unwrap(),
        };
        Run {
            third: Third::Scan,
            seed,
            accelerator: "TCG".to_owned(),
            vms: vec![InitialVm {
                vm: "demo-web".to_owned(),
                misses_per_request: 2.0,
                misses_per_request_again: 2.2,
                touched_bytes: 0,
            }],
            allocations: allocations.iter().map(allocation).collect(),
        }
    }

    #[test]
    fn what_exceeds_its_bound_or_its_band_is_counted() {
        let run = run(
            1,
            &[
                (Some(0.25), 1.05),
                (Some(0.25), 1.2),
                (Some(0.05), 1.2),
                (None, 2.0),
            ],
        );
        let expected = Summary {
            promises: 3,
            broken: 1,
            within_band: 1,
            cold: 0,
            allocations: 3,
            within_tenth: 1,
        };
        assert_eq!(Summary::of(&run.allocations), expected);
    }

    #[test]
    fn a_set_has_each_seed_in_a_column_and_the_counts_of_all() {
        let runs = [run(1, &[(Some(0.25), 1.1)]), run(2, &[(Some(0.25), 1.4)])];
        let conditions = Conditions::begin("tcg", "no guest").unwrap();
        let (set, charts) =
            result_set(&runs, &[Third::Scan], 2, conditions, String::new()).unwrap();
        let row = |of: &str| {
            let row = set.measurements.iter().find(|row| row.of == of);
            row.unwrap_or_else(|| panic!("no row {of}"))
        };
        let broken = row("promises broken");
        assert_eq!(broken.values, [Some(0.0), Some(1.0)]);
        assert_eq!(broken.remark, "1 in all");
        assert_eq!(row("web, measured").values, [Some(1.1), Some(1.4)]);
        let drift = row("web").values[0].unwrap();
        assert!((drift - 1.1).abs() < 1e-12);
        assert_eq!(charts[0].1.series[1].points.len(), 2);
    }
}
