//! `plimsoll fleet`: what the VMs of many hosts need, and on which host each should run.

mod archive;
mod place;
mod report;
mod source;

use std::io::Write;

use clap::Subcommand;

/// What the VMs of many hosts need over time, and on which host each should run.
///
/// Asks the plimsolld of each host over TCP. Nothing is moved: a placement is a list of moves for the platform's own tools.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    Archive(archive::Args),
    Collect(source::CollectArgs),
    Report(report::Args),
    Place(place::Args),
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    match &args.task {
        Task::Archive(args) => archive::run(args, out),
        Task::Collect(args) => source::run(args, out),
        Task::Report(args) => report::run(args, out),
        Task::Place(args) => place::run(args, out),
    }
}
