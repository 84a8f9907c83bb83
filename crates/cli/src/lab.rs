//! `plimsoll lab` and `plimsoll demo`: run the program `plimsoll-lab`, which users do not install.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail};

/// The program with all experiments and the demonstration.
const PROGRAM: &str = "plimsoll-lab";

/// Run an experiment of Plimsoll's developers (program plimsoll-lab).
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Arguments for plimsoll-lab; --help lists its experiments
    #[arg(
        value_name = "ARGUMENTS",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    arguments: Vec<OsString>,
}

/// Boot three VMs and let plimsolld allocate memory among them (program plimsoll-lab).
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub struct DemoArgs {
    /// Arguments for plimsoll-lab demo; --help lists them
    #[arg(
        value_name = "ARGUMENTS",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    arguments: Vec<OsString>,
}

/// Becomes `plimsoll-lab`.
///
/// # Errors
///
/// If there is no such program; it does not return otherwise.
pub fn run(args: &Args) -> anyhow::Result<()> {
    become_lab(Path::new(PROGRAM), &args.arguments)
}

/// Becomes `plimsoll-lab demo`.
pub fn run_demo(args: &DemoArgs) -> anyhow::Result<()> {
    let mut arguments = vec!["demo".into()];
    arguments.extend_from_slice(&args.arguments);
    become_lab(Path::new(PROGRAM), &arguments)
}

/// Replaces this process by a program beside its own, else on `PATH`.
fn become_lab(program: &Path, arguments: &[OsString]) -> anyhow::Result<()> {
    let beside = env::current_exe().map(|own| own.with_file_name(program));
    let found = beside.ok().filter(|path| path.is_file());
    let found = found.as_deref().unwrap_or(program);
    // It returns only if it fails.
    let error = Command::new(found).args(arguments).exec();
    if error.kind() == io::ErrorKind::NotFound {
        bail!(
            "there is no {} beside this program or on PATH; it holds experiments and the demonstration, \
             which users do not install: build it in the source tree with \
             `cargo build --release -p plimsoll-lab`",
            program.display()
        );
    }
    Err(error).with_context(|| found.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_program_the_error_says_how_to_build_it() {
        let refused = become_lab(Path::new("plimsoll-no-such-lab"), &[]).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("users do not install"), "{text}");
        assert!(
            text.contains("cargo build --release -p plimsoll-lab"),
            "{text}"
        );
    }
}
