//! `plimsoll-lab`: the experiments behind Plimsoll's figures, and its demonstration.
//!
//! Each runs for real, on guests of ours where it is about tracing, and prints what it measured. Results
//! under emulation say so. Users do not install this program; `plimsoll lab` and `plimsoll demo` run it.
#![forbid(unsafe_code)]

mod aet;
mod backends;
mod curves;
mod demo;
mod disk;
mod divide;
mod epsilon;
mod guests;
mod judge;
mod migration;
mod overhead;
mod page_log;
mod results;
mod starving;
mod steps;
mod tracing;
mod trio;
mod truth;
mod victim_cache;
mod wss;

use std::io;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use plimsoll_output::exit::{self, Output};

/// The experiments behind Plimsoll's figures, and its demonstration.
#[derive(Debug, Parser)]
#[command(name = "plimsoll-lab", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    experiment: Experiment,
}

#[derive(Debug, Subcommand)]
enum Experiment {
    Demo(demo::Args),
    Aet(aet::Args),
    Steps(steps::Args),
    Curves(curves::Args),
    Overhead(overhead::Args),
    Backends(backends::Args),
    Disk(disk::Args),
    Splits(disk::splits::Args),
    Services(disk::services::Args),
    Judge(judge::Args),
    Divide(divide::Args),
    Starving(starving::Args),
    Epsilon(epsilon::Args),
    Wss(wss::Args),
    Truth(truth::Args),
    VictimCache(victim_cache::Args),
    Migration(migration::Args),
    Report(results::report::Args),
}

fn main() -> ExitCode {
    let experiment = match Cli::try_parse() {
        Ok(cli) => cli.experiment,
        Err(error) => return exit::usage("plimsoll-lab", &error),
    };
    let mut out = Output::new(io::stdout().lock());
    let result = match &experiment {
        Experiment::Demo(args) => demo::run(args, &mut out),
        Experiment::Aet(args) => aet::run(args, &mut out),
        Experiment::Steps(args) => steps::run(args, &mut out),
        Experiment::Curves(args) => curves::run(args, &mut out),
        Experiment::Overhead(args) => overhead::run(args, &mut out),
        Experiment::Backends(args) => backends::run(args, &mut out),
        Experiment::Disk(args) => disk::run(args, &mut out),
        Experiment::Splits(args) => disk::splits::run(args, &mut out),
        Experiment::Services(args) => disk::services::run(args, &mut out),
        Experiment::Judge(args) => judge::run(args, &mut out),
        Experiment::Divide(args) => divide::run(args, &mut out),
        Experiment::Starving(args) => starving::run(args, &mut out),
        Experiment::Epsilon(args) => epsilon::run(args, &mut out),
        Experiment::Wss(args) => wss::run(args, &mut out),
        Experiment::Truth(args) => truth::run(args, &mut out),
        Experiment::VictimCache(args) => victim_cache::run(args, &mut out),
        Experiment::Migration(args) => migration::run(args, &mut out),
        Experiment::Report(args) => results::report::run(args, &mut out),
    };
    out.finish("plimsoll-lab", result, &mut io::stderr())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn no_experiment_has_options_that_contradict_each_other() {
        Cli::command().debug_assert();
    }
}
