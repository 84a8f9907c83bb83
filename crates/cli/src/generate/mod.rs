//! `plimsoll generate`: man pages and shell completions from the table of verbs, and the reference page from the registries.

mod reference;

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Command, Subcommand};
use clap_complete::Shell;

/// Write man pages, shell completions or the reference page into a directory.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: Artifact,
}

#[derive(Debug, Subcommand)]
enum Artifact {
    /// Man pages, one for each command: plimsoll.1, plimsoll-vms.1, ...
    Man(OutputDirectory),
    /// Completions for bash, zsh and fish
    Completions(OutputDirectory),
    /// reference.md: backends, estimators, formats, policies and actuators, with their costs and sources
    Reference(OutputDirectory),
}

/// Where to.
#[derive(Debug, clap::Args)]
struct OutputDirectory {
    /// Output directory; created if needed
    folder: PathBuf,
}

/// Shells for which completions are written.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// `verbs` is the program's command line. After an error some of the files may have been written.
pub fn run(args: &Args, mut verbs: Command, out: &mut dyn Write) -> anyhow::Result<()> {
    let (Artifact::Man(OutputDirectory { folder })
    | Artifact::Completions(OutputDirectory { folder })
    | Artifact::Reference(OutputDirectory { folder })) = &args.what;
    let cannot = || format!("cannot write to '{}'", folder.display());
    fs::create_dir_all(folder).with_context(cannot)?;
    match args.what {
        Artifact::Man(_) => clap_mangen::generate_to(verbs, folder).with_context(cannot)?,
        Artifact::Reference(_) => {
            fs::write(folder.join(reference::FILE), reference::page()).with_context(cannot)?;
        }
        Artifact::Completions(_) => {
            for shell in SHELLS {
                clap_complete::generate_to(shell, &mut verbs, "plimsoll", folder)
                    .with_context(cannot)?;
            }
        }
    }
    writeln!(out, "written to {}", folder.display())?;
    Ok(())
}
