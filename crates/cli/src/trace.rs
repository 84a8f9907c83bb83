//! `plimsoll trace`: inspect, convert and generate traces.
//!
//! `info` and `convert` read a trace once, batch by batch; `info` keeps one entry a
//! distinct page. `generate` writes a workload whose curve is known in closed form,
//! and that curve.

use std::fmt::Write as _;
use std::io::Write;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use plimsoll_flow::{MissRatioCurve, PageCount, PageNumber, PageSize, ReferenceBatch, Source as _};
use plimsoll_protocol::size::Count;
use plimsoll_source::synthetic::{Pattern, Program, Workload, curve_sizes};
use plimsoll_source::{
    Compression, Format, Options, SourceError, Trace, TraceOption, TraceSummary, TraceWriter,
    WriteOptions, create,
};
use serde::Serialize;

use crate::trace_args::{TraceArgs, format_parser, is_same_file, parse_page_size, reading_bar};
use plimsoll_output::exit::UsageError;
use plimsoll_output::{
    Cell as _, TextFormatArg, bail_usage, printable_path, remove_at_signals, write_file,
};

/// Inspect, convert and generate traces.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    Info(InfoArgs),
    Convert(ConvertArgs),
    Generate(GenerateArgs),
}

/// Show a trace's format, length, pages and kinds of access.
#[derive(Debug, clap::Args)]
struct InfoArgs {
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    format: TextFormatArg,
}

/// Write a trace in another format.
///
/// Pages are preserved; the kind of access only if the new format stores it (csv, parquet, plimsoll), times and sizes of objects
/// only in parquet.
#[derive(Debug, clap::Args)]
struct ConvertArgs {
    #[command(flatten)]
    trace: TraceArgs,
    /// Trace to write, compressed if it ends in .gz or .zst; `-` is standard output
    out: PathBuf,
    /// Format to write [default: by the file name, else ids]
    #[arg(long, value_parser = format_parser(Format::written().collect()))]
    to: Option<Format>,
    /// Write no times and sizes to parquet [default: those that the trace has, if it is no pipe]
    #[arg(long)]
    pages_only: bool,
}

/// Generate a trace whose miss-ratio curve is known in closed form.
#[derive(Debug, clap::Args)]
struct GenerateArgs {
    /// Pattern of references
    #[arg(value_enum)]
    kind: Kind,
    /// Number of pages
    #[arg(long)]
    pages: Option<u64>,
    /// Number of references, such as 10M (loop, uniform, zipf, class)
    #[arg(long)]
    references: Option<Count>,
    /// Exponent of Zipf's law, from 0 [default: 1]
    #[arg(long)]
    alpha: Option<f64>,
    /// Sizes of the steps, in pages: 100,300,500
    #[arg(long, value_delimiter = ',', value_name = "PAGES")]
    steps: Vec<u64>,
    /// Rounds over each step, or over the array [default: 4]
    #[arg(long)]
    rounds: Option<NonZeroU64>,
    /// Order of reading and writing rounds over the array [default: rwrw]
    #[arg(long, value_parser = program_parser())]
    program: Option<Program>,
    /// Share of references that write, 0 to 1; kept by csv, parquet and plimsoll [default: 0]
    #[arg(long)]
    write_ratio: Option<f64>,
    /// Random seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Renumber the pages at random, so that adjacent pages are no longer similar
    #[arg(long)]
    scramble: bool,
    /// Trace to write, compressed if it ends in .gz or .zst; `-` is standard output
    #[arg(long, required_unless_present = "curve")]
    out: Option<PathBuf>,
    /// Format to write [default: by the file name, else ids]
    #[arg(long, value_parser = format_parser(Format::written().collect()))]
    to: Option<Format>,
    /// Bytes in a page, which oracle-general records as each object's size
    #[arg(long, default_value = "4096", value_parser = parse_page_size)]
    page_bytes: PageSize,
    /// CSV file for the curve in closed form: size_pages,miss_ratio; `-` is standard output. For zipf and class it is Che's approximation, which is off by up to .04 for fewer than a hundred pages
    #[arg(long, value_name = "FILE")]
    curve: Option<PathBuf>,
}

/// Patterns of references.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// All pages in order, repeatedly
    Loop,
    /// Every page equally likely
    Uniform,
    /// Page of rank k with a probability ~ 1/k^alpha
    Zipf,
    /// A tenth of the pages ten times as likely as the others
    Class,
    /// Loops over a sequence of sizes
    Steps,
    /// Loops of reads and of writes
    Arrays,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    match &args.action {
        Action::Info(args) => info(args, out),
        Action::Convert(args) => convert(args, out),
        Action::Generate(args) => generate(args, out),
    }
}

fn program_parser() -> impl TypedValueParser<Value = Program> {
    PossibleValuesParser::new(Program::ALL.map(Program::name))
        .try_map(|name| name.parse::<Program>())
}

/// The result of `info`.
#[derive(Debug, Serialize)]
struct Info {
    schema: u32,
    format: &'static str,
    compression: String,
    references: u64,
    distinct_pages: u64,
    footprint_bytes: u64,
    reads: u64,
    writes: u64,
    unknown: u64,
    skipped_requests: u64,
    first_page: Option<u64>,
    last_page: Option<u64>,
    lowest_page: Option<u64>,
    highest_page: Option<u64>,
}

impl Info {
    /// The facts in order, by name; empty where there is none.
    fn facts(&self) -> [(&'static str, String); 13] {
        [
            ("format", self.format.to_owned()),
            ("compression", self.compression.clone()),
            ("references", self.references.to_string()),
            ("distinct_pages", self.distinct_pages.to_string()),
            ("footprint_bytes", self.footprint_bytes.to_string()),
            ("reads", self.reads.to_string()),
            ("writes", self.writes.to_string()),
            ("unknown", self.unknown.to_string()),
            ("skipped_requests", self.skipped_requests.to_string()),
            ("first_page", self.first_page.cell()),
            ("last_page", self.last_page.cell()),
            ("lowest_page", self.lowest_page.cell()),
            ("highest_page", self.highest_page.cell()),
        ]
    }
}

fn info(args: &InfoArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut trace = args.trace.open()?;
    let mut bar = reading_bar(trace.progress());
    let summary = TraceSummary::of(&mut trace, |references| bar.update(references))?;
    drop(bar);
    let number = |page: Option<PageNumber>| page.map(|page| page.0);
    let info = Info {
        schema: 1,
        format: trace.format().name(),
        compression: trace.compression().to_string(),
        references: summary.references,
        distinct_pages: summary.distinct.0,
        footprint_bytes: summary.distinct.to_bytes(args.trace.page_size()),
        reads: summary.reads,
        writes: summary.writes,
        unknown: summary.references - summary.reads - summary.writes,
        skipped_requests: trace.skipped(),
        first_page: number(summary.first),
        last_page: number(summary.last),
        lowest_page: number(summary.lowest),
        highest_page: number(summary.highest),
    };
    let facts = info.facts();
    let table = || {
        let lines = facts.iter().map(|(name, value)| {
            let value = if value.is_empty() { "none" } else { value };
            format!("{:<16} {value}\n", name.replace('_', " "))
        });
        Ok(lines.collect())
    };
    let csv = || {
        let (names, values): (Vec<_>, Vec<_>) = facts.iter().cloned().unzip();
        Ok(format!("{}\n{}\n", names.join(","), values.join(",")))
    };
    args.format.write(out, table, csv, &info)
}

impl ConvertArgs {
    /// Opens the trace, with the times and sizes that it has if they are written. Returns whether there are any.
    fn open(&self) -> anyhow::Result<(Trace<'static>, bool)> {
        let trace = self.trace.open()?;
        let to = self.to.or_else(|| Format::of_name(&self.out));
        if to != Some(Format::PARQUET) || self.pages_only || !self.trace.can_be_opened_again() {
            return Ok((trace, false));
        }
        let has = |option| trace.format().options().contains(&option);
        // Of the columns that parquet may have, a trace need not have all.
        for (times, sizes) in [(true, true), (true, false), (false, true)] {
            let options = Options {
                times: times && has(TraceOption::Times),
                sizes: sizes && has(TraceOption::Sizes),
                ..self.trace.options()
            };
            if !options.times && !options.sizes {
                continue;
            }
            if let Ok(trace) = self.trace.open_with(&options) {
                return Ok((trace, true));
            }
        }
        Ok((trace, false))
    }
}

fn convert(args: &ConvertArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    if is_same_file(&args.out, &args.trace.trace) {
        bail_usage!("input and output of a conversion must be different files");
    }
    let (mut trace, has_details) = args.open()?;
    let mut bar = reading_bar(trace.progress());
    let mut writer = trace_writer(&args.out, args.to, args.trace.page_size(), out)?;
    let mut batch = ReferenceBatch::new();
    let mut references = 0;
    while trace.next_batch(&mut batch).with_context(|| {
        let hint = match has_details {
            true => " (--pages-only leaves out times and sizes)",
            false => "",
        };
        format!(
            "no whole trace was written to '{}'{hint}",
            printable_path(&args.out)
        )
    })? {
        writer.write(&batch)?;
        references += batch.len() as u64;
        bar.update(references);
    }
    Ok(writer.finish()?)
}

fn generate(args: &GenerateArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let workload = args.workload()?;
    let usage = |error: SourceError| UsageError(error.to_string());
    let mut source = workload.source().map_err(usage)?;
    if let (Some(out), Some(curve)) = (&args.out, &args.curve)
        && (out == curve || is_same_file(out, curve))
    {
        bail_usage!("--curve and --out name one file: one of them would be lost");
    }
    if let Some(path) = &args.curve {
        let sizes = curve_sizes(workload.pattern.pages());
        let curve = workload.expected_curve(&sizes).map_err(usage)?;
        let curve = curve_csv(&curve);
        if path == Path::new("-") {
            out.write_all(curve.as_bytes())?;
        } else {
            write_file(path, curve.as_bytes())?;
        }
    }
    let Some(path) = &args.out else {
        return Ok(());
    };
    let mut writer = trace_writer(path, args.to, args.page_bytes, out)?;
    let mut batch = ReferenceBatch::new();
    while source.next_batch(&mut batch)? {
        writer.write(&batch)?;
    }
    Ok(writer.finish()?)
}

/// Opens a trace for writing, which is `out` if its path is `-`. A signal that ends the command leaves nothing of it.
fn trace_writer<'a>(
    path: &Path,
    format: Option<Format>,
    page_size: PageSize,
    out: &'a mut dyn Write,
) -> anyhow::Result<TraceWriter<'a>> {
    let writer = if path == Path::new("-") {
        let options = WriteOptions {
            format: format.unwrap_or(Format::IDS),
            compression: Compression::Plain,
            page_size,
        };
        plimsoll_source::write(out, "standard output", &options)
    } else {
        create(path, format, page_size)
    };
    let writer = writer.map_err(|error| match error {
        SourceError::NotWritten { .. }
        | SourceError::CompressionNotWritten { .. }
        | SourceError::NotCompressed { .. } => UsageError(error.to_string()).into(),
        error => anyhow::Error::from(error),
    })?;
    writer.temporary().map_or(Ok(()), remove_at_signals)?;
    Ok(writer)
}

fn curve_csv(curve: &MissRatioCurve) -> String {
    let mut text = "size_pages,miss_ratio\n".to_owned();
    for point in curve.points() {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{},{}", point.size, point.miss_ratio);
    }
    text
}

impl GenerateArgs {
    fn workload(&self) -> anyhow::Result<Workload> {
        Ok(Workload {
            pattern: self.pattern()?,
            seed: self.seed,
            write_ratio: self.write_ratio.unwrap_or(0.0),
            scrambled: self.scramble,
        })
    }

    fn pattern(&self) -> anyhow::Result<Pattern> {
        self.refuse_needless()?;
        let pages = || self.need("--pages", self.pages).map(PageCount);
        let references = || {
            self.need("--references", self.references)
                .map(|Count(number)| number.get())
        };
        let rounds = self.rounds.map_or(4, NonZeroU64::get);
        Ok(match self.kind {
            Kind::Loop => Pattern::Loop {
                pages: pages()?,
                references: references()?,
            },
            Kind::Uniform => Pattern::Uniform {
                pages: pages()?,
                references: references()?,
            },
            Kind::Zipf => Pattern::Zipf {
                pages: pages()?,
                alpha: self.alpha.unwrap_or(1.0),
                references: references()?,
            },
            Kind::Class => Pattern::Class {
                pages: pages()?,
                references: references()?,
            },
            Kind::Steps => {
                let sizes = Some(&self.steps).filter(|sizes| !sizes.is_empty());
                let sizes = self.need("--steps", sizes)?;
                Pattern::Steps {
                    sizes: sizes.iter().copied().map(PageCount).collect(),
                    rounds,
                }
            }
            Kind::Arrays => Pattern::Arrays {
                pages: pages()?,
                program: self.program.unwrap_or(Program::Rwrw),
                rounds,
            },
        })
    }

    fn need<T>(&self, flag: &str, value: Option<T>) -> anyhow::Result<T> {
        match value {
            Some(value) => Ok(value),
            None => bail_usage!("{} needs {flag}", self.kind_name()),
        }
    }

    /// Refuses flags that the pattern would ignore.
    fn refuse_needless(&self) -> anyhow::Result<()> {
        let by_rounds = matches!(self.kind, Kind::Steps | Kind::Arrays);
        for (flag, given, used) in [
            ("--pages", self.pages.is_some(), self.kind != Kind::Steps),
            ("--references", self.references.is_some(), !by_rounds),
            ("--rounds", self.rounds.is_some(), by_rounds),
            ("--alpha", self.alpha.is_some(), self.kind == Kind::Zipf),
            ("--steps", !self.steps.is_empty(), self.kind == Kind::Steps),
            (
                "--program",
                self.program.is_some(),
                self.kind == Kind::Arrays,
            ),
            (
                "--write-ratio",
                self.write_ratio.is_some(),
                self.kind != Kind::Arrays,
            ),
        ] {
            if given && !used {
                bail_usage!("{flag} has no effect with {}", self.kind_name());
            }
        }
        Ok(())
    }

    fn kind_name(&self) -> String {
        let value = self.kind.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::fs;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    fn trace(arguments: &[&str]) -> anyhow::Result<String> {
        let command = Command::try_parse_from([&["trace"], arguments].concat())?;
        let mut out = Vec::new();
        run(&command.args, &mut out)?;
        Ok(String::from_utf8(out)?)
    }

    fn usage_error(arguments: &[&str]) -> String {
        let error = trace(arguments).unwrap_err();
        error.downcast::<UsageError>().unwrap().0
    }

    #[test]
    fn info_counts_references_pages_and_kinds() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.csv");
        fs::write(&path, "page,op\n7,r\n3,w\n7,w\n9,\n").unwrap();
        let path = path.to_str().unwrap();
        let csv = trace(&["info", path, "-o", "csv"]).unwrap();
        assert_eq!(
            csv,
            "format,compression,references,distinct_pages,footprint_bytes,reads,writes,unknown,\
             skipped_requests,first_page,last_page,lowest_page,highest_page\n\
             csv,none,4,3,12288,1,2,1,0,7,9,3,9\n"
        );
        let json = trace(&["info", path, "-o", "json", "--page-bytes", "2M"]).unwrap();
        assert!(json.starts_with(r#"{"schema":1,"format":"csv","#), "{json}");
        assert!(json.contains(r#""footprint_bytes":6291456,"#), "{json}");
        let table = trace(&["info", path]).unwrap();
        assert!(table.contains("distinct pages   3\n"), "{table}");
    }

    #[test]
    fn an_empty_trace_has_no_first_page() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.ids");
        fs::write(&path, "# nothing\n").unwrap();
        let table = trace(&["info", path.to_str().unwrap()]).unwrap();
        assert!(table.contains("first page       none\n"), "{table}");
    }

    #[test]
    fn a_trace_survives_conversion_through_every_format() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let zipf = [
            "generate",
            "zipf",
            "--pages",
            "100",
            "--references",
            "50000",
        ];
        let ids = trace(&[&zipf[..], &["--write-ratio", "0.5", "--out", "-"]].concat()).unwrap();
        assert_eq!(ids.lines().count(), 50_000);
        let csv = path("t.csv.zst");
        trace(&[&zipf[..], &["--write-ratio", "0.5", "--out", &csv]].concat()).unwrap();
        let oracle = path("t.oracleGeneral.bin.gz");
        trace(&["convert", &csv, &oracle]).unwrap();
        assert_eq!(trace(&["convert", &oracle, "-"]).unwrap(), ids);
        let renamed = path("t.dat");
        fs::rename(&oracle, &renamed).unwrap();
        let back = trace(&["convert", "--from", "oracle-general", &renamed, "-"]).unwrap();
        assert_eq!(back, ids);
        let again = usage_error(&["convert", &csv, &csv]);
        assert_eq!(
            again,
            "input and output of a conversion must be different files"
        );
    }

    #[test]
    fn the_curve_of_steps_is_written_beside_the_trace() {
        let folder = tempfile::tempdir().unwrap();
        let curve = folder.path().join("curve.csv");
        let arguments = [
            "generate", "steps", "--steps", "3,1", "--rounds", "2", "--curve",
        ];
        let arguments = [&arguments[..], &[curve.to_str().unwrap(), "--out", "-"]].concat();
        assert_eq!(trace(&arguments).unwrap(), "0\n1\n2\n0\n1\n2\n0\n0\n");
        let expected = "size_pages,miss_ratio\n0,1\n1,0.875\n3,0.375\n";
        assert_eq!(fs::read_to_string(&curve).unwrap(), expected);
        let steps = ["generate", "steps", "--steps", "3,1", "--rounds", "2"];
        let to = |more: &[&'static str]| [&steps[..], more].concat();
        assert_eq!(trace(&to(&["--curve", "-"])).unwrap(), expected);
        let both = usage_error(&to(&["--curve", "-", "--out", "-"]));
        assert!(both.contains("name one file"), "{both}");
        let file = curve.to_str().unwrap();
        let again = folder.path().join(".").join("curve.csv");
        let same = [
            &steps[..],
            &["--curve", file, "--out", again.to_str().unwrap()],
        ]
        .concat();
        assert!(usage_error(&same).contains("name one file"));
        assert_eq!(fs::read_to_string(&curve).unwrap(), expected);
    }

    #[test]
    fn flags_that_do_not_fit_the_workload_are_usage_errors() {
        let error =
            |arguments: &[&str]| usage_error(&[&["generate"], arguments, &["--out", "-"]].concat());
        assert_eq!(error(&["loop", "--references", "9"]), "loop needs --pages");
        assert_eq!(error(&["zipf", "--pages", "9"]), "zipf needs --references");
        assert_eq!(error(&["steps"]), "steps needs --steps");
        let loops = ["loop", "--pages", "9", "--references", "9"];
        let with = |more: &[&'static str]| [&loops[..], more].concat();
        let alpha = error(&with(&["--alpha", "1"]));
        assert_eq!(alpha, "--alpha has no effect with loop");
        let ratio = error(&with(&["--write-ratio", "1.5"]));
        assert!(
            ratio.contains("a write ratio lies within 0 and 1, not at 1.5"),
            "{ratio}"
        );
    }

    #[test]
    fn a_broken_trace_is_named_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.ids");
        fs::write(&path, "1\nx\n").unwrap();
        let error = trace(&["info", path.to_str().unwrap()]).unwrap_err();
        assert!(
            format!("{error:#}").contains("line 2: expected a page number"),
            "{error:#}"
        );
    }
}
