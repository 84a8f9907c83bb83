//! `plimsoll plan`: how a host's memory would be divided, from curves in files.
//!
//! Joins curves (what `mrc`, `attach` and `disk stat` write) to a policy and shows the division with its prediction. No
//! daemon is asked and nothing is moved. `--inputs` gives a recorded decision again.

mod files;
mod options;
mod picture;
mod report;

use std::io::Write;
use std::path::PathBuf;

use clap::ValueEnum;
use plimsoll_api::curve_json::SCHEMA;
use plimsoll_api::plan::{
    DemandJson, PlanError, PlanInputs, PlanJson, PolicyJson, RulesJson, SearchJson,
};
use plimsoll_flow::PageSize;
use plimsoll_policy::{Policy, PolicyError, Rules};

use crate::size::ByteSize;
use files::CurveFile;
use options::{Share, VmOption};
use plimsoll_output::exit::{Forbidden, UsageError};
use plimsoll_output::{Format, OutputArgs, bail_usage};
use plimsoll_plot::encode;

/// Show how a host's memory would be divided among VMs whose curves are known.
///
/// Nothing is moved. The exit code is 4 if no division keeps what the VMs were promised.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The VMs' curves as JSON, of mrc, attach or disk stat; several may be in one file, - is standard input
    #[arg(required_unless_present = "inputs", value_name = "CURVES")]
    curves: Vec<PathBuf>,
    /// All memory there is to divide
    #[arg(long, required_unless_present = "inputs", value_name = "SIZE")]
    total: Option<ByteSize>,
    /// How it is divided
    #[arg(long, value_enum, default_value_t = PolicyName::Isolated)]
    policy: PolicyName,
    /// How isolated sharing looks for the best division [default: auto]
    #[arg(long, value_enum)]
    search: Option<SearchName>,
    /// Most rise of each VM's misses over those at its baseline
    #[arg(long, default_value = "5%", value_name = "SHARE")]
    max_loss: Share,
    /// Sizes are multiples of this
    #[arg(long, default_value = "4MiB", value_name = "SIZE")]
    unit: ByteSize,
    /// Most that a VM's size may change by [default: no limit]
    #[arg(long, value_name = "SIZE")]
    step: Option<ByteSize>,
    /// Least fall of the geometric mean that is worth a move
    #[arg(long, default_value = "0%", value_name = "SHARE")]
    gain_min: Share,
    /// Share of the idle memory that ESX takes [default: 75%]
    #[arg(long, value_name = "SHARE")]
    idle_tax: Option<Share>,
    /// What annealing's random numbers follow from [default: 0]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// What holds for one VM: NAME:KEY=VALUE,... with min, max, shares, max-loss, baseline, current, working-set
    #[arg(long, value_name = "NAME:KEY=VALUE,...")]
    vm: Vec<VmOption>,
    /// Give the division of these recorded inputs again; - is standard input
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

/// How memory is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PolicyName {
    /// Least geometric mean of relative misses, no VM above its promise
    Isolated,
    /// The same by the exact search, however long it takes
    Optimal,
    /// Surplus by curves, divided by shares
    Esx,
    /// Surplus by sampled working sets, divided by shares
    EsxSampling,
}

/// How the best division is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SearchName {
    /// Optimal while that is quick, else hull
    Auto,
    /// Every division; at most three VMs
    Exhaustive,
    /// A unit at a time
    Greedy,
    /// Random moves, worse ones ever more rarely
    Annealing,
    /// Exactly, by dynamic programming
    Optimal,
    /// On convex minorants of the curves, with a certified gap
    Hull,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// A [`UsageError`] for options and VMs that do not go together, [`Forbidden`] if the promises need more than there is,
/// and what is wrong with a file, by its name.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let inputs = match &args.inputs {
        Some(path) => files::read_inputs(path)?,
        None => args.gather()?,
    };
    let plan = inputs.plan().map_err(as_answer)?;
    let content = match args.output.format() {
        Format::Table => report::table(&inputs, &plan).into_bytes(),
        Format::Csv => report::csv(&plan).into_bytes(),
        Format::Json => (serde_json::to_string(&plan)? + "\n").into_bytes(),
        format @ (Format::Svg | Format::Png) => encode(picture(&inputs, &plan)?, format)?,
    };
    args.output.write(&content, out)
}

fn picture(inputs: &PlanInputs, plan: &PlanJson) -> anyhow::Result<String> {
    let (demands, rules, _) = inputs.read()?;
    let page_size = PageSize::new(inputs.page_bytes)?;
    Ok(picture::svg(&demands, &rules, plan, page_size))
}

/// With the exit code that it stands for.
fn as_answer(error: PlanError) -> anyhow::Error {
    match error {
        PlanError::Infeasible(shortfall) => Forbidden(shortfall.to_string()).into(),
        PlanError::Policy(
            error
            @ (PolicyError::Rule { .. } | PolicyError::Twice(_) | PolicyError::TooMany { .. }),
        ) => UsageError(error.to_string()).into(),
        error => error.into(),
    }
}

impl Args {
    /// What the policy is given, from the curves and the options.
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
                bail_usage!("--vm {}: given twice; put all its keys into one", option.vm);
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
                gain_min: self.gain_min.0,
                miss_ratio_min: Rules::MISS_RATIO_MIN,
            },
            demands: demands.collect::<anyhow::Result<_>>()?,
        })
    }

    fn policy(&self) -> anyhow::Result<PolicyJson> {
        let esx = matches!(self.policy, PolicyName::Esx | PolicyName::EsxSampling);
        let search = match (self.policy, self.search) {
            (PolicyName::Optimal, Some(_)) => {
                bail_usage!("--search: --policy optimal names the search; take --policy isolated")
            }
            (PolicyName::Esx | PolicyName::EsxSampling, Some(_)) => {
                bail_usage!("--search: ESX searches for nothing; isolated does")
            }
            (PolicyName::Optimal, None) => SearchName::Optimal,
            (_, search) => search.unwrap_or(SearchName::Auto),
        };
        if self.seed.is_some() && search != SearchName::Annealing {
            bail_usage!("--seed: only --search annealing takes one");
        }
        if self.idle_tax.is_some() && !esx {
            bail_usage!("--idle-tax: only --policy esx and esx-sampling take it");
        }
        let idle_tax = self.idle_tax.map_or(Policy::IDLE_TAX, |tax| tax.0);
        Ok(match self.policy {
            PolicyName::Esx => PolicyJson::Esx { idle_tax },
            PolicyName::EsxSampling => PolicyJson::EsxSampling { idle_tax },
            PolicyName::Isolated | PolicyName::Optimal => PolicyJson::Isolated {
                search: match search {
                    SearchName::Auto => SearchJson::Auto,
                    SearchName::Exhaustive => SearchJson::Exhaustive,
                    SearchName::Greedy => SearchJson::Greedy,
                    SearchName::Annealing => SearchJson::Annealing {
                        seed: self.seed.unwrap_or(0),
                    },
                    SearchName::Optimal => SearchJson::Optimal,
                    SearchName::Hull => SearchJson::Hull,
                },
            },
        })
    }

    fn demand(&self, found: &CurveFile) -> anyhow::Result<DemandJson> {
        let unnamed = VmOption::default();
        let option = self.vm.iter().find(|option| option.vm == found.vm);
        let option = option.unwrap_or(&unnamed);
        let bytes = |size: Option<ByteSize>| size.map(|ByteSize(bytes)| bytes);
        let Some(baseline) = bytes(option.baseline).or(found.baseline_bytes()) else {
            bail_usage!(
                "'{}': nothing says how much memory VM {} is entitled to; add --vm {}:baseline=SIZE",
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
            max_loss: option.max_loss.unwrap_or(self.max_loss).0,
            shares: option.shares.map_or(1, Into::into),
            working_set_bytes: bytes(option.working_set),
        })
    }
}
