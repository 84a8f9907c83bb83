//! `plimsoll`: the table of verbs.
#![forbid(unsafe_code)]

use std::io;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use plimsoll::exit::{self, Output};
use plimsoll::{attach, demo, doctor, hcache, lab, mrc, trace};

/// How far a host's memory may safely be loaded, VM by VM.
#[derive(Debug, Parser)]
#[command(name = "plimsoll", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Mrc(mrc::Args),
    Trace(trace::Args),
    Attach(attach::Args),
    Hcache(hcache::Args),
    Doctor(doctor::Args),
    Lab(lab::Args),
    Demo(demo::Args),
}

fn main() -> ExitCode {
    let verb = match Cli::try_parse() {
        Ok(cli) => cli.verb,
        Err(error) => return exit::not_understood(&error),
    };
    let mut out = Output::new(io::stdout().lock());
    let result = match &verb {
        Verb::Mrc(args) => mrc::run(args, &mut out),
        Verb::Trace(args) => trace::run(args, &mut out),
        Verb::Attach(args) => attach::run(args, &mut out),
        Verb::Hcache(args) => hcache::run(args, &mut out),
        Verb::Doctor(args) => doctor::run(args, &mut out),
        Verb::Lab(args) => lab::run(args, &mut out),
        Verb::Demo(args) => demo::run(args, &mut out),
    };
    out.finish(result, &mut io::stderr())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn no_verb_has_options_that_contradict_each_other() {
        Cli::command().debug_assert();
    }
}
