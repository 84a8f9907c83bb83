//! `plimsoll fleet archive`: the past of a fleet as Parquet files.

use std::io::Write;
use std::path::PathBuf;

use plimsoll_fleet::archive::{self, DAY_MS};

use super::source::{Daemons, complain};

/// Keep the curves and working sets of all VMs as Parquet files, for queries over many hosts and months.
///
/// Writes DIR/date=YYYY-MM-DD/host=NAME/curves.parquet and working_sets.parquet. Files of days that ended more than three hours ago are
/// final; others are replaced when the command is repeated, as by a timer once a day, and keep what a daemon does not have any more.
/// A run that is interrupted leaves no damaged file. The exit code is 5 if some hosts are not completely archived, such as those that did not answer: their days are archived later,
/// as long as their daemons keep them.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory of the archive, which is created
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    #[command(flatten)]
    daemons: Daemons,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let (collector, answers) = args.daemons.collect(DAY_MS)?;
    let archived = archive::archive(&collector, answers, &args.folder)?;
    writeln!(
        out,
        "hosts archived: {}; files written: {}, final already: {}",
        archived.hosts, archived.written, archived.kept
    )?;
    complain(&archived.missing, "not completely archived")
}
