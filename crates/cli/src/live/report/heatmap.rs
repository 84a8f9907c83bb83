//! `plimsoll report heatmap`: where in its RAM a VM is busy.

use std::io::Write;

use plimsoll_output::{OutputArgs, bail_usage, printable};
use plimsoll_plot::Figure as _;
use plimsoll_protocol::client::Client;
use plimsoll_protocol::request::RefusalKind;
use plimsoll_report::heatmap::Heatmaps;

use super::VmArgs;

/// Activity by region of a VM's RAM: time from top to bottom (in pictures from bottom to top), addresses from left to right.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    of: VmArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    if args.output.format().is_picture() && args.of.vm.is_none() {
        bail_usage!("a picture shows one VM: give its name");
    }
    let daemon = args.of.daemon()?;
    let mut maps = Vec::new();
    if let Some(vm) = &args.of.vm {
        maps.push(daemon.ask_of(vm, Client::heatmap)?);
    } else {
        for vm in args.of.names(&daemon)? {
            let map = daemon.ask(|client| match client.heatmap(&vm) {
                Err(error) if error.refusal_kind() == Some(RefusalKind::NotFound) => Ok(Err(error)),
                found => found.map(Ok),
            })?;
            match map {
                Ok(map) => maps.push(map),
                Err(error) => eprintln!("plimsoll: {}", printable(&error.to_string())),
            }
        }
    }
    Heatmaps(maps).write(&args.output, out)
}
