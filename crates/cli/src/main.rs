//! The command line of Plimsoll: the table of verbs, one module for each, and what verbs share.
//!
//! A verb has its `Args` and `run(&Args, &mut dyn Write)`, which writes to the output it is handed, so that tests can
//! read it. It joins a source to an estimator, or queries a daemon, and shows the result.
//!
//! Not here: any algorithm, and what a library of the workspace does.
#![forbid(unsafe_code)]

mod attach;
mod disk;
mod doctor;
mod fleet;
mod generate;
mod hcache;
mod lab;
mod live;
mod migrate;
mod mrc;
mod plan;
mod run;
mod selftest;
mod stat;
mod trace;
mod trace_args;
mod wss;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::{env, io};

use clap::{CommandFactory, Parser, Subcommand};
use live::{apply, explain, pause, report, resume, rollback, set, show, top, vms, whatif};
use plimsoll_output::exit::{self, Output};
use plimsoll_output::outlive_file_size_limit;

/// What management software starts as a backend of vhost-user: it can name a program, but no verb.
const BACKEND: &str = "plimsoll-vhost-user-blk";

/// Measure the memory needs of KVM/QEMU VMs and allocate the host's memory among them.
#[derive(Debug, Parser)]
#[command(name = "plimsoll", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Mrc(Box<mrc::Args>),
    Wss(Box<wss::Args>),
    Trace(trace::Args),
    Attach(attach::Args),
    Disk(disk::Args),
    Run(Box<run::Args>),
    Hcache(hcache::Args),
    Plan(Box<plan::Args>),
    Vms(vms::Args),
    Show(show::Args),
    Top(top::Args),
    Report(report::Args),
    Whatif(whatif::Args),
    Migrate(migrate::Args),
    Apply(apply::Args),
    Rollback(rollback::Args),
    Explain(explain::Args),
    Set(set::Args),
    Pause(pause::Args),
    Resume(resume::Args),
    Doctor(doctor::Args),
    Fleet(Box<fleet::Args>),
    Selftest(selftest::Args),
    Lab(lab::Args),
    Demo(lab::DemoArgs),
    #[command(hide = true)]
    Generate(generate::Args),
}

fn main() -> ExitCode {
    let verb = match Cli::try_parse_from(arguments(env::args_os())) {
        Ok(cli) => cli.verb,
        Err(error) => return exit::usage("plimsoll", &error),
    };
    // Without a handler it ends there, as all programs do.
    let _ = outlive_file_size_limit();
    let mut out = Output::new(io::stdout().lock());
    let result = match &verb {
        Verb::Mrc(args) => mrc::run(args, &mut out),
        Verb::Wss(args) => wss::run(args, &mut out),
        Verb::Trace(args) => trace::run(args, &mut out),
        Verb::Attach(args) => attach::run(args, &mut out),
        Verb::Disk(args) => disk::run(args, &mut out),
        // Not by `out`: a VM ends as QEMU does, also when nobody reads what is said about it.
        Verb::Run(args) => match run::run(args, &mut io::stdout()) {
            Ok(0) => Ok(()),
            Ok(code) => return ExitCode::from(code),
            Err(error) => Err(error),
        },
        Verb::Hcache(args) => hcache::run(args, &mut out),
        Verb::Plan(args) => plan::run(args, &mut out),
        Verb::Vms(args) => vms::run(args, &mut out),
        Verb::Show(args) => show::run(args, &mut out),
        Verb::Top(args) => top::run(args, &mut out),
        Verb::Report(args) => report::run(args, &mut out),
        Verb::Whatif(args) => whatif::run(args, &mut out),
        Verb::Migrate(args) => migrate::run(args, &mut out),
        Verb::Apply(args) => apply::run(args, &mut out),
        Verb::Rollback(args) => rollback::run(args, &mut out),
        Verb::Explain(args) => explain::run(args, &mut out),
        Verb::Set(args) => set::run(args, &mut out),
        Verb::Pause(args) => pause::run(args, &mut out),
        Verb::Resume(args) => resume::run(args, &mut out),
        Verb::Doctor(args) => doctor::run(args, &mut out),
        Verb::Fleet(args) => fleet::run(args, &mut out),
        Verb::Selftest(args) => selftest::run(args, &mut out),
        Verb::Lab(args) => lab::run(args),
        Verb::Demo(args) => lab::run_demo(args),
        Verb::Generate(args) => generate::run(args, Cli::command(), &mut out),
    };
    out.finish("plimsoll", result, &mut io::stderr())
}

/// The command line; called by [`BACKEND`]'s name, the program is `plimsoll disk serve`.
fn arguments(given: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut given: Vec<_> = given.collect();
    let called = given
        .first()
        .and_then(|program| Path::new(program).file_name());
    if called.is_some_and(|name| name == BACKEND) {
        given.splice(..1, ["plimsoll", "disk", "serve"].map(Into::into));
    }
    given
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::fmt;

    use super::*;

    #[test]
    fn a_link_of_the_backends_name_serves_disks() {
        let of = |line: &str| arguments(line.split(' ').map(Into::into));
        let serve = ["plimsoll", "disk", "serve", "--fd", "3"];
        assert_eq!(of("/usr/libexec/plimsoll-vhost-user-blk --fd 3"), serve);
        assert_eq!(of("bin/plimsoll mrc x"), ["bin/plimsoll", "mrc", "x"]);
        assert_eq!(arguments(std::iter::empty()), [""; 0]);
    }

    #[test]
    fn no_verb_has_options_that_contradict_each_other() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_man_page_separates_qemus_arguments_from_ours() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let args = Cli::try_parse_from(["plimsoll", "generate", "man", path]).unwrap();
        let Verb::Generate(args) = args.verb else {
            unreachable!();
        };
        generate::run(&args, Cli::command(), &mut Vec::new()).unwrap();
        let page = std::fs::read_to_string(folder.path().join("plimsoll-run.1")).unwrap();
        assert!(page.contains("[OPTIONS] \\-\\- <QEMU>..."), "{page}");
    }

    /// The names in a field of an argument or a group; clap shows them nowhere but in this form.
    fn names(of: &impl fmt::Debug, field: &str) -> BTreeSet<String> {
        let form = format!("{of:?}");
        let (_, rest) = form.split_once(&format!("{field}: [")).unwrap();
        let (list, _) = rest.split_once(']').unwrap();
        list.split('"')
            .skip(1)
            .step_by(2)
            .map(str::to_owned)
            .collect()
    }

    /// The names of each argument's conflicts, in both directions; a group stands for its arguments.
    fn conflicts(command: &clap::Command) -> BTreeMap<String, BTreeSet<String>> {
        let members = |name: &str| -> Vec<String> {
            let group = command.get_groups().find(|group| *group.get_id() == name);
            group.map_or_else(
                || vec![name.to_owned()],
                |group| group.get_args().map(ToString::to_string).collect(),
            )
        };
        let mut conflicts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut add = |one: &str, other: &str| {
            for one in members(one) {
                for other in members(other).into_iter().filter(|other| *other != one) {
                    conflicts
                        .entry(one.clone())
                        .or_default()
                        .insert(other.clone());
                    conflicts.entry(other).or_default().insert(one.clone());
                }
            }
        };
        for argument in command.get_arguments() {
            for other in names(argument, "conflicts") {
                add(argument.get_id().as_str(), &other);
            }
        }
        for group in command.get_groups() {
            let name = group.get_id().as_str();
            for other in names(group, "conflicts") {
                add(name, &other);
            }
            if !group.clone().is_multiple() {
                add(name, name);
            }
        }
        conflicts
    }

    /// Clap does not demand what an option requires if that contradicts an option that is given: alone, it would have no
    /// effect.
    #[test]
    fn an_option_contradicts_all_that_contradicts_what_it_requires() {
        let mut commands = vec![Cli::command()];
        let mut requirements = 0;
        while let Some(command) = commands.pop() {
            let conflicts = conflicts(&command);
            let of = |name: &str| conflicts.get(name).cloned().unwrap_or_default();
            for argument in command.get_arguments() {
                let name = argument.get_id().as_str();
                let own = of(name);
                for required in names(argument, "requires") {
                    requirements += 1;
                    let open: Vec<_> = of(&required)
                        .into_iter()
                        .filter(|other| other != name && !own.contains(other))
                        .collect();
                    let verb = command.get_name();
                    assert!(
                        open.is_empty(),
                        "{verb} {name} requires {required}: {open:?}"
                    );
                }
            }
            commands.extend(command.get_subcommands().cloned());
        }
        assert!(requirements > 30, "{requirements}");
    }
}
