//! `plimsoll vms`: the host's VMs and the control groups that are watched, a line each.

use std::io::Write;

use plimsoll_report::host::{csv, text};

use super::{Daemon, QueryArgs};

/// List the VMs: status, size, working set and reclaimable memory; and the control groups that are watched.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    look: QueryArgs,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let host = Daemon::to_read(&args.look.socket)?.host()?;
    let form = args.look.form;
    form.write(out, || Ok(text(&host)), || Ok(csv(&host)), &host)
}
