//! `plimsoll whatif`: another size of a VM, or a host of another size.

use std::io::Write;

use plimsoll_protocol::client::Client;
use plimsoll_protocol::plan::PlanJson;
use plimsoll_protocol::request::{HostWhatIf, VmWhatIf};
use plimsoll_report::plan::{division, division_csv};
use plimsoll_report::words::{misses, name_of, relative, size};

use super::{Daemon, QueryArgs};
use plimsoll_output::exit::Forbidden;
use plimsoll_output::{TextFormatArg, bail_usage, csv_table, printable};
use plimsoll_protocol::size::ByteSize;

/// Predict the misses of a VM at another size, or the allocation on a host with less (or more) memory.
///
/// Nothing is changed. The exit code is 4 if a host of that memory could not keep the limits.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("question").required(true).args(["size", "host_loses", "host_gains"]))]
pub struct Args {
    /// Name of the VM
    #[arg(requires = "size", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    vm: Option<String>,
    /// The VM's size: guest memory plus cache
    #[arg(long, value_name = "SIZE", requires = "vm")]
    size: Option<ByteSize>,
    /// Memory that the host would lose
    #[arg(long, value_name = "SIZE", conflicts_with = "vm")]
    host_loses: Option<ByteSize>,
    /// Memory that the host would gain
    #[arg(long, value_name = "SIZE", conflicts_with = "vm")]
    host_gains: Option<ByteSize>,
    #[command(flatten)]
    look: QueryArgs,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if let (Some(vm), Some(size)) = (&args.vm, args.size) {
        let daemon = Daemon::to_read(&args.look.socket)?;
        let answer = daemon.ask_of(vm, |client, vm| client.vm_what_if(vm, size.0))?;
        let form = args.look.form;
        return form.write(
            out,
            || Ok(of_vm(&answer)),
            || Ok(lines_of_vm(&answer)),
            &answer,
        );
    }
    let lose = args.host_loses.map(|size| i128::from(size.0));
    let gain = args.host_gains.map(|size| -i128::from(size.0));
    let Ok(lose_bytes) = i64::try_from(lose.or(gain).unwrap_or(0)) else {
        bail_usage!("no host has 8 EiB to lose or to gain");
    };
    let daemon = Daemon::to_read(&args.look.socket)?;
    let answer = daemon.ask(|client: &Client| client.host_what_if(lose_bytes))?;
    of_host(&answer, args.look.form, out)
}

fn of_vm(answer: &VmWhatIf) -> String {
    let mut text = format!(
        "{}, {} -> {}: {}\n",
        printable(&answer.vm),
        size(answer.size_bytes),
        size(answer.size_then_bytes),
        name_of(answer.status_then),
    );
    let shares = [
        ("", Some(1.0)),
        (" of vCPU time", answer.vcpu_seconds_per_second),
    ];
    for (of, seconds) in shares {
        let Some(seconds) = seconds.filter(|_| answer.misses_then.is_some()) else {
            continue;
        };
        text.push_str(&format!(
            "misses per second{of}: {} now, {} then\n",
            misses(answer.misses.as_ref(), seconds),
            misses(answer.misses_then.as_ref(), seconds),
        ));
    }
    text + &format!(
        "misses over those at its baseline: {} now, {} then\n{}\n",
        relative(answer.relative.as_ref()),
        relative(answer.relative_then.as_ref()),
        printable(&answer.why)
    )
}

fn lines_of_vm(answer: &VmWhatIf) -> String {
    csv_table!([answer], |vm| {
        "vm": printable(&vm.vm),
        "size_bytes": vm.size_bytes,
        "size_then_bytes": vm.size_then_bytes,
        "relative": vm.relative.map(|at| at.expected),
        "relative_then": vm.relative_then.map(|at| at.expected),
        "relative_then_low": vm.relative_then.map(|at| at.low),
        "relative_then_high": vm.relative_then.map(|at| at.high),
        "status_then": name_of(vm.status_then),
        "misses_per_second": vm.misses.map(|at| at.misses_per_second),
        "misses_then_per_second": vm.misses_then.map(|at| at.misses_per_second),
        "misses_then_low_per_second": vm.misses_then.map(|at| at.misses_low_per_second),
        "misses_then_high_per_second": vm.misses_then.map(|at| at.misses_high_per_second),
        "vcpu_seconds_per_second": vm.vcpu_seconds_per_second,
    })
}

fn of_host(answer: &HostWhatIf, form: TextFormatArg, out: &mut dyn Write) -> anyhow::Result<()> {
    let of_plan =
        |text: fn(&PlanJson) -> String| answer.plan.as_ref().map_or_else(String::new, text);
    form.write(
        out,
        || Ok(of_plan(division)),
        || Ok(of_plan(division_csv)),
        answer,
    )?;
    match (&answer.refusal, &answer.plan) {
        (Some(why), _) => Err(Forbidden(printable(why)).into()),
        (None, None) => Err(Forbidden("no allocation keeps all limits".to_owned()).into()),
        (None, Some(_)) => Ok(()),
    }
}
