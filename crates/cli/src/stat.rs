//! What `disk stat` and `hcache stat` share: formats, repetition, and where the report goes.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::ValueEnum;
use plimsoll_flow::MissRatioCurve;
use plimsoll_output::{bail_usage, watch, write_file};
use plimsoll_plot::{Chart, encode};
use plimsoll_protocol::curve_json::CurveJson;
use serde::Serialize;

/// Options of both verbs. Flatten them into a verb's `Args`.
#[derive(Debug, clap::Args)]
pub struct StatArgs {
    /// Output format; a picture shows curves [default: by the ending of --out, else table]
    #[arg(short = 'o', long, value_enum, value_name = "FORMAT")]
    output: Option<Format>,
    /// File to write instead of standard output; it is replaced atomically
    #[arg(long, value_name = "FILE", conflicts_with = "watch")]
    out: Option<PathBuf>,
    /// Repeat at this interval until Ctrl-C: the table with counts or rates since the previous output, JSON with totals
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        default_missing_value = "1",
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    watch: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Columns for people to read
    Table,
    /// JSON with "schema": 1, one object per line
    Json,
    /// OpenMetrics text, for Prometheus
    #[value(alias = "metrics")]
    Openmetrics,
    /// Curves as scalable vector graphics
    Svg,
    /// The same picture as pixels
    Png,
}

/// A server's report.
pub trait Report: Serialize {
    /// The option of the verb that adds curves to the report.
    const CURVE_OPTION: &str;

    /// The report as lines; with an earlier one, counts are those since then.
    fn table(&self, earlier: Option<&Self>, curves: bool) -> String;

    /// The report as OpenMetrics text.
    fn metrics(&self) -> String;

    /// The report's curves.
    fn chart(&self) -> anyhow::Result<Chart>;
}

impl StatArgs {
    /// Queries and prints reports; `query` is called with whether curves are wanted.
    ///
    /// # Errors
    ///
    /// [`UsageError`](plimsoll_output::exit::UsageError) for options that contradict each other; those of `query` and
    /// of writing.
    pub fn run<R: Report>(
        &self,
        curves: bool,
        query: impl Fn(bool) -> anyhow::Result<R>,
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let format = self.format();
        let picture = matches!(format, Format::Svg | Format::Png);
        if format == Format::Openmetrics && (self.watch.is_some() || curves) {
            let option = R::CURVE_OPTION;
            bail_usage!("-o openmetrics is one exposition: it goes without --watch and {option}");
        }
        if picture && self.watch.is_some() {
            bail_usage!("a picture shows one point in time: omit --watch");
        }
        if picture && self.out.is_none() && std::io::stdout().is_terminal() {
            bail_usage!("a picture is not for a terminal: name a file with --out FILE");
        }
        let query = || query(curves || picture);
        let form = |report: &R, earlier: Option<&R>| -> anyhow::Result<Vec<u8>> {
            Ok(match format {
                Format::Table => report.table(earlier, curves).into_bytes(),
                Format::Json => (serde_json::to_string(report)? + "\n").into_bytes(),
                Format::Openmetrics => report.metrics().into_bytes(),
                Format::Svg => report.chart()?.to_svg().into_bytes(),
                Format::Png => encode(report.chart()?.to_svg(), plimsoll_output::Format::Png)?,
            })
        };
        if let Some(seconds) = self.watch {
            let is_table = format == Format::Table;
            let between = |report: &R, earlier: &R| form(report, Some(earlier));
            return watch(seconds, is_table, query, between, out);
        }
        let content = form(&query()?, None)?;
        match &self.out {
            Some(path) => write_file(path, &content),
            None => Ok(out.write_all(&content)?),
        }
    }

    fn format(&self) -> Format {
        let ending = || {
            let ending = self.out.as_ref()?.extension()?.to_str()?;
            Format::from_str(ending, true).ok()
        };
        self.output.or_else(ending).unwrap_or(Format::Table)
    }
}

/// The curve that a server wrote.
///
/// # Errors
///
/// If it is not a miss-ratio curve.
pub fn curve_of(json: &CurveJson) -> anyhow::Result<MissRatioCurve> {
    let curve = json.to_curve();
    curve.with_context(|| format!("the server's curve of {} is invalid", json.vm))
}
