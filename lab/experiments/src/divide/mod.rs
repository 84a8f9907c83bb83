//! Allocates memory among three real guests and compares predicted with measured misses: \[LS07\] tables 2 and 3.
//!
//! Web, search and scan ([`trio`](crate::trio)) are measured with their initial memory (misses per request) and
//! traced: from outside by first touches, with all of their RAM, as on a host that has memory to spare; and shrunk into
//! the caches under their disks and through them, as in \[LS07\] fig. 6. Each allocation of their initial memory that a
//! policy makes from these curves is then set for real, without caches, and the servers are measured again once they have
//! read as many pages as they gained. All figures are ratios of counts: none is a time, so emulation does not distort them.
//!
//! Source of the experiments and of the yardstick: \[LS07\] tables 2 and 3 (docs/papers.md). Departs from it in the
//! servers, which are models of theirs, in sizes, and in that all is emulated where there is no KVM.

mod measure;
mod set;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum as _;
use clap::builder::PossibleValuesParser;
use plimsoll_output::{bail_usage, stop_flag};
use plimsoll_policy::{GivenOptions, POLICIES, PolicyOption};
use plimsoll_protocol::plan::{Policy, Search};
use plimsoll_protocol::size::{Interval, Share};
use serde::{Deserialize, Serialize};

use crate::results::{Conditions, KeepArgs, Progress};
use crate::trio::{BASELINE_MIB, CACHE_MIB, RAM_MIB, TRACED_MIB, Third};
use measure::{Run, Times, Trial, measure};

/// Allocate the memory of three guests by several policies; compare predicted with measured misses.
///
/// Takes 15 to 25 minutes for a run with emulated guests and the defaults. A run that was made is not repeated.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Bound on the increase of a VM's misses under isolated sharing; may be repeated [default: 5% and 25% by the caches'
    /// curves; 100% by first touches, which move little under smaller bounds]
    #[arg(long, value_name = "SHARE")]
    max_loss: Vec<Share>,
    /// Only this policy; may be repeated [default: all]
    #[arg(long, value_parser = PossibleValuesParser::new(POLICIES.iter().map(|row| row.name)))]
    policy: Vec<String>,
    /// Only curves from this source; may be repeated [default: all]
    #[arg(long, value_enum)]
    curves: Vec<CurveSource>,
    /// What the third server does; may be repeated, and then each is a run of its own [default: scan and scan-with-task]
    #[arg(long, value_enum)]
    third: Vec<Third>,
    /// Number of seeds, each with other guests and another order of their requests [default: 5; 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    seeds: Option<u32>,
    /// One seed, no background task, isolated sharing alone, curves from first touches
    #[arg(long, conflicts_with_all = ["policy", "curves", "third"])]
    quick: bool,
    /// How long to wait at most, after a change, until the servers have filled the memory that they gained
    #[arg(long, default_value = "3m", value_name = "TIME")]
    warmup: Interval,
    /// Length of each measurement
    #[arg(long, default_value = "60s", value_name = "TIME")]
    measure: Interval,
    /// How long the VMs are traced for each source of curves; plimsolld's default window is as long
    #[arg(long, default_value = "5m", value_name = "TIME")]
    trace: Interval,
    /// Directory of runs already made, which are not repeated
    #[arg(long, default_value = "target/lab/divide")]
    state: PathBuf,
    #[command(flatten)]
    keep: KeepArgs,
}

/// Where the curves come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum CurveSource {
    /// First touches of the VMs' RAM, of which they have all meanwhile
    FirstTouch,
    /// The caches under the VMs' disks, into which part of their memory goes meanwhile
    Caches,
}

impl CurveSource {
    fn name(self) -> &'static str {
        match self {
            Self::Caches => "caches",
            Self::FirstTouch => "first touches",
        }
    }

    /// What each VM has while it is traced: bytes of its own, and of the cache under its disk.
    fn traced_bytes(self) -> (u64, u64) {
        let (own_mib, cache_mib) = match self {
            // First touches show nothing beyond the memory that a VM has.
            Self::FirstTouch => (RAM_MIB, CACHE_MIB),
            Self::Caches => (TRACED_MIB, BASELINE_MIB - TRACED_MIB),
        };
        (own_mib << 20, cache_mib << 20)
    }
}

/// Runs the experiment.
///
/// # Errors
///
/// A [`UsageError`](plimsoll_output::exit::UsageError) for times too short; why a guest did not come up, gave up, or
/// did not follow its balloon; runs that were made are kept and not repeated.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if args.measure.get() < Duration::from_secs(15) {
        bail_usage!("--measure: servers report their counts every 5 s; measure for 15s or longer");
    }
    let stop = stop_flag()?;
    let times = Times {
        warmup: args.warmup.get(),
        measure: args.measure.get(),
        trace: args.trace.get(),
    };
    let thirds = args.thirds();
    let trials = args.sources().map(|curves| Trial {
        curves,
        allocations: args.allocations(curves),
    });
    let trials: Vec<_> = trials.collect();
    let settings = format!("{times:?}, {trials:?}");
    let seeds = args.seeds.unwrap_or(if args.quick { 1 } else { 5 });
    let steps = seeds as usize * thirds.len() + 2;
    let mut progress = Progress::begin(&args.state, &settings, steps)?;
    let guest = "Debian's Linux 6.1, one vCPU, three at a time";
    let conditions = progress.step("begin", || Conditions::begin("tcg", guest))?;
    let mut runs: Vec<Run> = Vec::new();
    for seed in 1..=seeds {
        for &third in &thirds {
            let name = format!("{}-{seed}", third.name());
            runs.push(progress.step(&name, || measure(third, seed, &trials, &times, &stop))?);
        }
    }
    // The load is that of the last run, which a longer campaign has not made yet.
    let conditions = conditions.ended()?;
    let command = match args.quick {
        true => format!("./dev lab divide --quick --seeds {seeds}"),
        false => format!("./dev lab divide --seeds {seeds}"),
    };
    let (set, charts) = set::result_set(&runs, &thirds, seeds, conditions, command)?;
    args.keep.keep(set, charts, out)
}

impl Args {
    fn thirds(&self) -> Vec<Third> {
        match (self.quick, self.third.as_slice()) {
            (true, _) => vec![Third::Scan],
            (false, []) => vec![Third::Scan, Third::ScanWithTask],
            (false, given) => given.to_vec(),
        }
    }

    fn sources(&self) -> impl Iterator<Item = CurveSource> {
        let all = CurveSource::value_variants().iter().copied();
        all.filter(|source| match (self.quick, self.curves.as_slice()) {
            (true, _) => *source == CurveSource::FirstTouch,
            (false, given) => given.is_empty() || given.contains(source),
        })
    }

    /// The allocations to try by curves of a source, each with its bound.
    fn allocations(&self, source: CurveSource) -> Vec<(Policy, Option<f64>)> {
        let given = self.max_loss.iter().map(|loss| loss.get());
        let losses: Vec<f64> = match (self.max_loss.is_empty(), source) {
            (true, CurveSource::Caches) => vec![0.05, 0.25],
            (true, CurveSource::FirstTouch) => vec![1.0],
            (false, _) => given.collect(),
        };
        let mut allocations = Vec::new();
        for row in POLICIES {
            if !self.policy.is_empty() && !self.policy.iter().any(|name| name == row.name) {
                continue;
            }
            if row.options.contains(&PolicyOption::Search) {
                let exact = Policy::isolated(Search::Optimal);
                allocations.extend(losses.iter().map(|loss| (exact, Some(*loss))));
            } else if !self.quick
                && let Ok(policy) = Policy::by_name(row.name, GivenOptions::default())
            {
                allocations.push((policy, None));
            }
        }
        allocations
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn esx_is_bound_by_no_promise_and_isolated_sharing_by_each_given() {
        use clap::Parser as _;
        #[derive(Debug, clap::Parser)]
        struct Cli {
            #[command(flatten)]
            args: Args,
        }
        let losses = |line: &str, source| {
            let args = Cli::parse_from(line.split(' ')).args;
            let allocations = args.allocations(source);
            allocations
                .iter()
                .map(|(_, loss)| *loss)
                .collect::<Vec<_>>()
        };
        let (touches, caches) = (CurveSource::FirstTouch, CurveSource::Caches);
        assert_eq!(losses("x", caches), [Some(0.05), Some(0.25), None, None]);
        assert_eq!(losses("x", touches), [Some(1.0), None, None]);
        assert_eq!(losses("x --quick", touches), [Some(1.0)]);
        let line = "x --policy isolated --max-loss 10%";
        assert_eq!(losses(line, caches), [Some(0.1)]);
        assert_eq!(losses(line, touches), [Some(0.1)]);
        assert_eq!(losses("x --policy esx", caches), [None]);
    }
}
