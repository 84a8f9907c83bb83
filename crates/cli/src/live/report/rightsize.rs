//! `plimsoll report rightsize`: the smallest size of each VM within its limit, and the memory saved.

use std::io::Write;

use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::vm::{Relative, VmStatus, VmSummary};
use serde::{Deserialize, Serialize};

use super::super::words::{maybe_size, name, name_of, ratio, relative, size, working_set};
use super::super::write_json;
use super::VmArgs;
use plimsoll_output::{Columns, Side, TextFormat, TextFormatArg, csv_table, or_empty, printable};

/// Smallest size of each VM within its bounds on misses, and the memory that would be saved.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    of: VmArgs,
    #[command(flatten)]
    form: TextFormatArg,
}

/// What `-o json` writes.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Rightsizes {
    schema: u32,
    vms: Vec<Rightsize>,
    /// Sum of what could be saved, in bytes.
    saves_bytes: u64,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Rightsize {
    vm: String,
    standing: VmStatus,
    /// What it has.
    size_bytes: u64,
    /// Smallest size within its limit; `null` if there is no curve.
    right_bytes: Option<u64>,
    /// What would be saved; `null` if its curve is unknown, 0 if it needs more.
    saves_bytes: Option<u64>,
    /// What it needs more than it has; 0 if it has enough.
    lacks_bytes: Option<u64>,
    /// Misses at that size over those at the baseline.
    relative_then: Option<Relative>,
    /// 1.0 and what may be lost; `null` if it is not promised that.
    bound: Option<f64>,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let daemon = args.of.daemon()?;
    let summaries = daemon.vms(args.of.vm.as_deref())?;
    let mut vms = Vec::new();
    for vm in &summaries {
        let then = match vm.promise_bytes {
            Some(bytes) => {
                let answer = daemon.ask_of(&vm.vm, |client, vm| client.vm_what_if(vm, bytes))?;
                answer.relative_then
            }
            None => None,
        };
        vms.push(of(vm, then));
    }
    let saves = vms.iter().filter_map(|vm| vm.saves_bytes);
    let report = Rightsizes {
        schema: SCHEMA,
        saves_bytes: saves.fold(0, u64::saturating_add),
        vms,
    };
    match args.form.output {
        TextFormat::Table => Ok(out.write_all(text(&report, &summaries).as_bytes())?),
        TextFormat::Csv => Ok(out.write_all(lines(&report).as_bytes())?),
        TextFormat::Json => write_json(&report, out),
    }
}

fn of(vm: &VmSummary, relative_then: Option<Relative>) -> Rightsize {
    let right = vm.promise_bytes;
    Rightsize {
        vm: vm.vm.clone(),
        standing: vm.standing,
        size_bytes: vm.size_bytes,
        right_bytes: right,
        saves_bytes: right.map(|right| vm.size_bytes.saturating_sub(right)),
        lacks_bytes: right.map(|right| right.saturating_sub(vm.size_bytes)),
        relative_then,
        bound: vm.settings.promise.max_loss.map(|loss| 1.0 + loss),
    }
}

fn text(report: &Rightsizes, summaries: &[VmSummary]) -> String {
    let mut columns = Columns::new(&[
        ("VM", Side::Left),
        ("standing", Side::Left),
        ("has", Side::Right),
        ("uses", Side::Right),
        ("needs", Side::Right),
        ("saves", Side::Right),
        ("lacks", Side::Right),
        ("misses then", Side::Right),
        ("bound", Side::Right),
    ]);
    for (right, vm) in report.vms.iter().zip(summaries) {
        columns.row([
            name(&right.vm),
            name_of(right.standing),
            size(right.size_bytes),
            working_set(vm.working_set.as_ref()),
            maybe_size(right.right_bytes),
            maybe_size(right.saves_bytes),
            right
                .lacks_bytes
                .filter(|lacks| *lacks > 0)
                .map(size)
                .unwrap_or_default(),
            relative(right.relative_then.as_ref()),
            right.bound.map(ratio).unwrap_or_default(),
        ]);
    }
    format!(
        "{}\n{} could be saved in all. needs: smallest size within its limit, by the upper confidence limit;\n\
         misses then: over those at its baseline.\n",
        columns.text(),
        size(report.saves_bytes)
    )
}

fn lines(report: &Rightsizes) -> String {
    csv_table(
        &report.vms,
        &[
            ("vm", &|vm| printable(&vm.vm)),
            ("standing", &|vm| name_of(vm.standing)),
            ("size_bytes", &|vm| vm.size_bytes.to_string()),
            ("right_bytes", &|vm| or_empty(vm.right_bytes)),
            ("saves_bytes", &|vm| or_empty(vm.saves_bytes)),
            ("lacks_bytes", &|vm| or_empty(vm.lacks_bytes)),
            ("relative_then", &|vm| {
                or_empty(vm.relative_then.map(|at| at.expected))
            }),
            ("relative_then_high", &|vm| {
                or_empty(vm.relative_then.map(|at| at.high))
            }),
            ("bound", &|vm| or_empty(vm.bound)),
        ],
    )
}
