//! `plimsoll fleet place`: on which host each VM should run.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use anyhow::Context as _;
use plimsoll_fleet::place::Aim;
use plimsoll_fleet::plan;
use plimsoll_fleet::rules::Rules;
use plimsoll_output::exit::Forbidden;
use plimsoll_output::{TableOrJsonArg, duration, printable, table};
use plimsoll_protocol::fleet::{Goal, MoveReason, PlacementJson};
use plimsoll_protocol::size::BitRate;

use super::report::hosts;
use super::source::{Source, UNANSWERED, complain};
use plimsoll_report::words::{counted, size};

/// Plan on which host each VM should run, as a list of moves in an order in which each target has room.
///
/// The exit code is 4 if not every VM can get what it needs, if moves wait for each other, or with --survive-loss if not every host
/// may be lost; 5 if some hosts did not answer.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// What it is for
    #[arg(long, value_enum, default_value_t)]
    goal: GoalArg,
    /// Any one host may be lost afterwards: its VMs then fit on the others
    #[arg(long)]
    survive_loss: bool,
    /// TOML file with the VMs that belong together or apart, or on some hosts only
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// Bandwidth of a migration, in bits per second, as 10G
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<BitRate>,
    #[command(flatten)]
    format: TableOrJsonArg,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum GoalArg {
    /// Every VM gets what it needs, with the least memory moved between hosts
    #[default]
    Fit,
    /// The same, with as few hosts as possible
    FewestHosts,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let rules = match &args.rules {
        None => Rules::default(),
        Some(path) => {
            let name = path.display();
            let text = fs::read_to_string(path).with_context(|| format!("cannot read '{name}'"))?;
            Rules::parse(&text).with_context(|| format!("'{name}'"))?
        }
    };
    let (file, fleet) = args.source.fleet()?;
    let aim = Aim {
        goal: match args.goal {
            GoalArg::Fit => Goal::Fit,
            GoalArg::FewestHosts => Goal::FewestHosts,
        },
        survive_loss: args.survive_loss,
        exhaustive: true,
    };
    let bandwidth = args.bandwidth.map(BitRate::bytes_per_second);
    let plan = plan::plan(&fleet, &rules, aim, bandwidth)?;
    args.format.write(out, || table(&plan), &plan)?;
    if !plan.fits {
        let text = "not every VM can get what it needs; the plan is as near to that as was found";
        return Err(Forbidden(text.to_owned()).into());
    }
    if plan.survives_loss == Some(false) {
        let text = "not every host may be lost; the plan is as near to that as was found";
        return Err(Forbidden(text.to_owned()).into());
    }
    if plan.moves_without_order > 0 {
        let text =
            "no order was found in which each target has room and rules are kept when a VM comes";
        return Err(Forbidden(text.to_owned()).into());
    }
    complain(&file.missing, UNANSWERED)
}

fn table(plan: &PlacementJson) -> String {
    let moves = table!((1_u64..).zip(&plan.moves), |(number, step)| {
        Right "MOVE": number,
        Left "VM": printable(&step.vm),
        Left "FROM": printable(&step.from),
        Left "TO": printable(&step.to),
        Right "SIZE": size(step.size_bytes),
        Right "SHRINK FIRST": (step.shrink_first_bytes > 0).then(|| size(step.shrink_first_bytes)),
        Right "COPYING": step.copy_s.map(duration),
        Left "WHY": match step.reason {
            MoveReason::Relief => "its host is short, or a rule requires it",
            MoveReason::Emptying => "its host is emptied",
            MoveReason::Room => "makes room",
        },
    });
    let mut text = match plan.moves.is_empty() {
        true => "No VM has to move.\n".to_owned(),
        false => moves,
    };
    text.push('\n');
    text.push_str(&hosts(&plan.hosts));
    let (used, moved) = (plan.hosts_used, plan.moved_bytes);
    let is_whole = plan.fits && plan.survives_loss != Some(false);
    let optimal = match (plan.is_optimal, is_whole) {
        (true, true) => "no placement is better",
        (true, false) => "no placement keeps all of it",
        (false, _) => "a better one may exist",
    };
    text.push_str(&format!(
        "\n{} in use, {} before; no placement needs fewer than {}. {} are moved, at least {} must be: {optimal}.\n",
        counted(used.after, "host"),
        used.before,
        used.at_least,
        size(moved.planned),
        size(moved.at_least),
    ));
    for problem in &plan.problems {
        text.push_str(&format!("{}.\n", printable(problem)));
    }
    text
}
