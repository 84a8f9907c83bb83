//! `plimsoll report hot`: the pages to load first when a snapshot of a VM resumes.

use std::io::Write;
use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use plimsoll_observe::hot::{Hot, of_file, of_history};
use plimsoll_observe::wss::begins_as_page_log;
use plimsoll_output::{TextFormatArg, bail_usage, csv_table, grouped, printable};
use plimsoll_protocol::client::Client;
use plimsoll_protocol::size::{ByteSize, Count};
use plimsoll_report::words::percent;

use super::super::{Daemon, SocketArg};

/// Default length of an interval.
const INTERVAL: Count = Count(NonZeroU64::new(100_000).unwrap());

/// Pages to load first when a snapshot resumes: those used in most intervals of a run; of equals, those used first.
///
/// The list (-o csv) has the position and length of each piece of RAM in bytes: pages from a file, regions from the daemon's
/// history.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of a traced VM, whose history the daemon has
    #[arg(value_parser = NonEmptyStringValueParser::new(), required_unless_present = "from", conflicts_with = "from")]
    vm: Option<String>,
    /// Page log (`plimsoll run --page-log`) or trace of an earlier run, instead of a VM
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    from: Option<PathBuf>,
    /// Maximum size of the list
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    top: ByteSize,
    /// With --from: length of an interval of a trace, in references, such as 10M; a page log has its own [default: 100000]
    #[arg(long, value_name = "N", requires = "from", conflicts_with_all = ["vm", "socket"])]
    interval: Option<Count>,
    /// With --from: page log or trace of another run, to measure how much of it the list covers
    #[arg(long, value_name = "FILE", requires = "from", conflicts_with_all = ["vm", "socket"])]
    check: Option<PathBuf>,
    #[command(flatten)]
    socket: SocketArg,
    #[command(flatten)]
    form: TextFormatArg,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let hot = match (&args.from, &args.vm) {
        (Some(path), _) => {
            let mut read = [path].into_iter().chain(&args.check);
            if args.interval.is_some() && read.all(|path| begins_as_page_log(path)) {
                bail_usage!("--interval: a page log has intervals of its own");
            }
            let Count(interval) = args.interval.unwrap_or(INTERVAL);
            of_file(path, interval, args.top.0, args.check.as_deref())?
        }
        (None, Some(vm)) => {
            let daemon = Daemon::to_read(&args.socket)?;
            of_history(&daemon.ask_of(vm, Client::heatmap)?, args.top)?
        }
        (None, None) => unreachable!("clap requires one of both"),
    };
    args.form
        .write(out, || Ok(text(&hot)), || Ok(csv(&hot)), &hot)
}

fn text(hot: &Hot) -> String {
    let mut text = format!(
        "{}: {} of the {} used, in {} pieces, cover {} of all uses; -o csv lists them\n",
        printable(&hot.of),
        ByteSize(hot.bytes).rounded(),
        ByteSize(hot.used_bytes).rounded(),
        hot.pieces.len(),
        percent(hot.uses_covered)
    ) + &missing(&hot.of, hot.cut.as_deref(), hot.lost);
    if let Some(check) = &hot.check {
        text.push_str(&format!(
            "{}: {} used; the list covers {} of its uses and {} of its pages, at {:.2} times its size\n",
            printable(&check.of),
            ByteSize(check.used_bytes).rounded(),
            percent(check.uses_covered),
            percent(check.pages_covered),
            hot.bytes as f64 / check.used_bytes as f64
        ));
        text.push_str(&missing(&check.of, check.cut.as_deref(), check.lost));
    }
    text
}

/// What a page log lacks.
fn missing(name: &str, cut: Option<&str>, lost: Option<u64>) -> String {
    let cut = cut.map(|cut| format!("{}: only these count\n", printable(cut)));
    let lost = lost.filter(|&lost| lost > 0).map(|lost| {
        let lost = grouped(lost as f64);
        format!(
            "{}: {lost} records were lost when the log was taken\n",
            printable(name)
        )
    });
    cut.into_iter().chain(lost).collect()
}

fn csv(hot: &Hot) -> String {
    csv_table!(&hot.pieces, |piece| {
        "begin_bytes": piece.begin_bytes,
        "length_bytes": piece.length_bytes,
        "intervals": piece.intervals,
        "uses": piece.uses,
    })
}
