//! `plimsoll report`: figures of one VM or of all, for a reader, a program or a paper.

mod compare;
mod heatmap;
mod hot;
mod mrc;
mod overhead;
mod promises;
mod rightsize;
mod wss;

use std::io::Write;

use clap::Subcommand;
use clap::builder::NonEmptyStringValueParser;

use super::{Daemon, SocketArg};
use plimsoll_protocol::subject::{Entry, Key};

/// Reports on a VM, or on all of them: curve, working set over time, activity by region of RAM, the right size,
/// cost of tracing and possible losses, promises kept and broken.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    report: Report,
}

#[derive(Debug, Subcommand)]
enum Report {
    Mrc(mrc::Args),
    Wss(wss::Args),
    Heatmap(heatmap::Args),
    Hot(hot::Args),
    Rightsize(rightsize::Args),
    Overhead(overhead::Args),
    Promises(promises::Args),
}

/// VM and connection to the daemon.
#[derive(Debug, Clone, clap::Args)]
struct VmArgs {
    /// Name of the VM; mrc and wss also take a control group [default: all]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    vm: Option<String>,
    #[command(flatten)]
    socket: SocketArg,
}

impl VmArgs {
    fn daemon(&self) -> anyhow::Result<Daemon> {
        Daemon::to_read(&self.socket)
    }

    /// The keys of those VMs and of all control groups, or of the one that is meant.
    fn keys_with_groups(&self, daemon: &Daemon) -> anyhow::Result<Vec<Key>> {
        if let Some(name) = &self.vm {
            return Ok(vec![Key::Written(name.clone())]);
        }
        let keys: Vec<_> = Entry::all(&daemon.host()?).map(Entry::key).collect();
        if keys.is_empty() {
            eprintln!("plimsoll: there is no VM, and no control group is watched");
        }
        Ok(keys)
    }

    /// The names of those VMs.
    fn names(&self, daemon: &Daemon) -> anyhow::Result<Vec<String>> {
        match &self.vm {
            Some(vm) => Ok(vec![vm.clone()]),
            None => Ok(daemon.vms(None)?.into_iter().map(|vm| vm.vm).collect()),
        }
    }
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    match &args.report {
        Report::Mrc(args) => mrc::run(args, out),
        Report::Wss(args) => wss::run(args, out),
        Report::Heatmap(args) => heatmap::run(args, out),
        Report::Hot(args) => hot::run(args, out),
        Report::Rightsize(args) => rightsize::run(args, out),
        Report::Overhead(args) => overhead::run(args, out),
        Report::Promises(args) => promises::run(args, out),
    }
}
