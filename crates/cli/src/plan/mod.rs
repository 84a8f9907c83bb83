//! `plimsoll plan`: allocate a host's memory among VMs, from curves in files.
//!
//! Applies a policy to curves that `mrc`, `attach` and `disk stat` wrote, and shows the allocation with its predicted
//! misses. No daemon is needed and nothing is moved. `--inputs` replays a recorded decision.

mod files;
mod options;

use std::io::Write;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser};
use plimsoll_policy::registry::{OptionError, PRESETS, SEARCHES};
use plimsoll_policy::{
    Demand, GivenOptions, POLICIES, Policy, PolicyError, Prediction, PredictionUnit, Rules,
};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_protocol::plan::{DemandJson, PlanError, PlanInputs, PlanJson, RulesJson};

use crate::trace_args::is_same_file;
use files::CurveFile;
use options::VmOption;
use plimsoll_output::exit::{Forbidden, UsageError};
use plimsoll_output::{OutputArgs, bail_usage, printable};
use plimsoll_plot::Figure as _;
use plimsoll_protocol::size::{ByteSize, PerSecond, Share};
use plimsoll_report::plan::PlanReport;

/// Show how a policy would allocate a host's memory among VMs whose curves are known.
///
/// Nothing is moved. The exit code is 4 if no allocation keeps every VM within its minimum size and bound, also if a maximum size
/// forbids it. A miss ratio below 0.1 % counts as 0.1 %: quotients of tiny ratios are noise.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Files with the VMs' curves in JSON, from mrc, attach or disk stat; one file may hold several, as of mrc --by device; - is standard input
    #[arg(required_unless_present = "inputs", value_name = "CURVES")]
    curves: Vec<PathBuf>,
    /// All memory that can be allocated
    #[arg(long, required_unless_present = "inputs", value_name = "SIZE")]
    total: Option<ByteSize>,
    /// How memory is allocated
    #[arg(long, value_name = "POLICY", default_value = POLICIES[0].name, value_parser = policies())]
    policy: String,
    /// Search for the best allocation under isolated sharing [default: auto]
    #[arg(long, value_name = "SEARCH", value_parser = searches())]
    search: Option<String>,
    /// Bound on the rise of each VM's misses over those at its baseline; VMs with max-misses alone have none
    #[arg(long, default_value = "5%", value_name = "SHARE")]
    max_loss: Share,
    /// Granularity of sizes
    #[arg(long, default_value = "4MiB", value_name = "SIZE")]
    unit: ByteSize,
    /// Largest change of a VM's size [default: no limit]
    #[arg(long, value_name = "SIZE")]
    step: Option<ByteSize>,
    /// Smallest fall of the geometric mean that is worth a move
    #[arg(long, default_value = "0%", value_name = "SHARE")]
    gain_min: Share,
    /// Idle tax of ESX: an idle page costs 1 / (1 - tax) times as many shares as an active one [default: 75%]
    #[arg(long, value_name = "SHARE")]
    idle_tax: Option<Share>,
    /// Random seed of simulated annealing [default: 0]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Settings of one VM; keys are min, max, shares (100 by default), max-loss, max-misses, baseline, current, working-set
    #[arg(long, value_name = "NAME:KEY=VALUE,...")]
    vm: Vec<VmOption>,
    /// Replay these recorded inputs of a decision; - is standard input
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = [
            "curves", "total", "policy", "search", "max_loss", "unit", "step", "gain_min", "idle_tax", "seed", "vm"
        ]
    )]
    inputs: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// The registry's policies and presets as choices.
fn policies() -> PossibleValuesParser {
    let policies = POLICIES.iter().map(|row| (row.name, row.summary));
    let presets = PRESETS.iter().map(|row| (row.name, row.summary));
    choices(policies.chain(presets))
}

fn searches() -> PossibleValuesParser {
    choices(SEARCHES.iter().map(|row| (row.name, row.summary)))
}

fn choices(rows: impl Iterator<Item = (&'static str, &'static str)>) -> PossibleValuesParser {
    let values: Vec<_> = rows
        .map(|(name, summary)| PossibleValue::new(name).help(summary))
        .collect();
    values.into()
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let mut read = args.curves.iter().chain(&args.inputs);
    if let Some(path) = args.output.path()
        && read.any(|read| is_same_file(path, read))
    {
        bail_usage!("--out: that is a file to read, which would be lost");
    }
    let inputs = match &args.inputs {
        Some(path) => files::read_inputs(path)?,
        None => args.gather()?,
    };
    let plan = inputs.plan().map_err(with_exit_code)?;
    let report = PlanReport {
        inputs: &inputs,
        plan: &plan,
    };
    report.write(&args.output, out)?;
    match over_its_bound(&inputs, &plan) {
        Some(why) => Err(Forbidden(why).into()),
        None => Ok(()),
    }
}

/// The VM, if there is one, that its maximum size takes below what its bound needs: the allocation was computed
/// nevertheless.
fn over_its_bound(inputs: &PlanInputs, plan: &PlanJson) -> Option<String> {
    let mut targets = plan.targets.iter().zip(&inputs.demands);
    targets.find_map(|(target, demand)| {
        let next_bytes = target.target_bytes.saturating_add(inputs.page_bytes);
        let is_forced =
            target.target_bytes < target.baseline_bytes && next_bytes > demand.ceiling_bytes?;
        let predictions = target.predictions().into_iter();
        let mut over = predictions.filter(|prediction| prediction.high > prediction.limit);
        let Prediction {
            unit, high, limit, ..
        } = over.next().filter(|_| is_forced)?;
        let needs = match unit {
            PredictionUnit::OfBaseline => format!(
                "max-loss needs: {high:.2}x of its misses at the baseline, {limit:.2}x are allowed"
            ),
            PredictionUnit::PerSecond => {
                format!("max-misses needs: {high:.1}/s, {limit}/s are allowed")
            }
        };
        let vm = printable(&target.vm);
        Some(format!(
            "VM '{vm}': its maximum size is less than its {needs}"
        ))
    })
}

/// The error with its exit code.
fn with_exit_code(error: PlanError) -> anyhow::Error {
    match error {
        PlanError::Infeasible(shortfall) => Forbidden(shortfall.to_string()).into(),
        error @ PlanError::BelowPage { .. } => UsageError(error.to_string()).into(),
        PlanError::Policy(
            error
            @ (PolicyError::Rule { .. } | PolicyError::Twice(_) | PolicyError::TooMany { .. }),
        ) => UsageError(error.to_string()).into(),
        error => error.into(),
    }
}

impl Args {
    /// The policy's inputs, from the curves and the options.
    fn gather(&self) -> anyhow::Result<PlanInputs> {
        let policy = self.policy()?;
        let found = files::read_curves(&self.curves)?;
        if let Some(option) = self.vm.iter().find(|option| {
            let mut names = found.iter().map(|found| &found.vm);
            names.all(|vm| *vm != option.vm)
        }) {
            bail_usage!("--vm {}: no file has a curve of that VM", option.vm);
        }
        for (index, option) in self.vm.iter().enumerate() {
            if self.vm[..index].iter().any(|other| other.vm == option.vm) {
                bail_usage!(
                    "--vm {}: given twice; give all keys of a VM in one option",
                    option.vm
                );
            }
        }
        let demands = found.iter().map(|found| self.demand(found));
        Ok(PlanInputs {
            schema: SCHEMA,
            page_bytes: files::page_bytes(&found)?,
            policy,
            rules: RulesJson {
                total_bytes: self.total.map_or(0, |total| total.0),
                unit_bytes: self.unit.0,
                step_bytes: self.step.map(|step| step.0),
                gain_min: self.gain_min.get(),
                miss_ratio_min: Rules::MISS_RATIO_MIN,
            },
            demands: demands.collect::<anyhow::Result<_>>()?,
        })
    }

    fn policy(&self) -> anyhow::Result<Policy> {
        let given = GivenOptions {
            search: self.search.as_deref(),
            seed: self.seed,
            idle_tax: self.idle_tax.map(Share::get),
        };
        Policy::by_name(&self.policy, given).map_err(|error| match error {
            OptionError::NotTaken { option, .. } => {
                let option = option.key().replace('_', "-");
                UsageError(format!("--{option}: {error}")).into()
            }
            error => UsageError(error.to_string()).into(),
        })
    }

    fn demand(&self, found: &CurveFile) -> anyhow::Result<DemandJson> {
        let unnamed = VmOption::default();
        let option = self.vm.iter().find(|option| option.vm == found.vm);
        let option = option.unwrap_or(&unnamed);
        let bytes = |size: Option<ByteSize>| size.map(|ByteSize(bytes)| bytes);
        let Some(baseline) = bytes(option.baseline).or(found.baseline_bytes()) else {
            bail_usage!(
                "'{}' has no baseline for VM {}; add --vm {}:baseline=SIZE",
                found.file,
                found.vm,
                found.vm
            );
        };
        Ok(DemandJson {
            vm: found.vm.clone(),
            curve: found.curve.clone(),
            baseline_bytes: baseline,
            current_bytes: bytes(option.current).unwrap_or(baseline),
            floor_bytes: bytes(option.min).unwrap_or(0),
            ceiling_bytes: bytes(option.max),
            max_loss: match option.max_misses {
                Some(_) => option.max_loss,
                None => option.max_loss.or(Some(self.max_loss)),
            }
            .map(Share::get),
            max_misses_per_second: option.max_misses.map(PerSecond::get),
            shares: option.shares.map_or(Demand::SHARES, Into::into),
            working_set_bytes: bytes(option.working_set),
        })
    }
}
