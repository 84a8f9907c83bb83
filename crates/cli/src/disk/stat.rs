//! `plimsoll disk stat`: what a VM's disks and their cache did, and what other sizes would bring.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::ValueEnum;
use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, PageSize};

use super::report::Report;
use super::{SocketArg, admin, metrics, table};
use crate::curve_json::CurveJson;
use crate::size::ByteSize;
use crate::watch::watch;
use plimsoll_output::{bail_usage, grouped, write_file};
use plimsoll_plot::{Axis, Chart, Marker, Series, Unit, encode};

/// Show statistics of a VM's disks and their cache, and predictions for other cache sizes.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArg,
    /// Output format; pictures show the curve [default: by the extension of --out, else table]
    #[arg(short = 'o', long, value_enum, value_name = "FORMAT")]
    output: Option<Format>,
    /// File to write instead of standard output; replaced only when complete
    #[arg(long, value_name = "FILE", conflicts_with = "watch")]
    out: Option<PathBuf>,
    /// Repeat at this interval, with counts since the previous output, until Ctrl-C
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        default_missing_value = "1",
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    watch: Option<u64>,
    /// Show the curve: the share of reads that miss at each total size of guest memory and cache
    #[arg(long)]
    curve: bool,
}

/// Output formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Columns for people to read
    Table,
    /// JSON with "schema": 1, one object per line
    Json,
    /// OpenMetrics text, for Prometheus
    #[value(alias = "metrics")]
    Openmetrics,
    /// The curve as scalable vector graphics
    Svg,
    /// The same as PNG
    Png,
}

impl Args {
    fn format(&self) -> Format {
        let ending = || {
            let ending = self.out.as_ref()?.extension()?.to_str()?;
            Format::from_str(ending, true).ok()
        };
        self.output.or_else(ending).unwrap_or(Format::Table)
    }

    fn check(&self) -> anyhow::Result<()> {
        let format = self.format();
        if format == Format::Openmetrics && (self.watch.is_some() || self.curve) {
            bail_usage!("-o openmetrics is one exposition: it goes without --watch and --curve");
        }
        if matches!(format, Format::Svg | Format::Png) {
            if self.watch.is_some() {
                bail_usage!("a picture shows one point in time: omit --watch");
            }
            if self.out.is_none() && std::io::stdout().is_terminal() {
                bail_usage!("a picture is not for a terminal: name a file with --out FILE");
            }
        }
        Ok(())
    }

    fn ask(&self) -> anyhow::Result<Report> {
        let curve = self.curve || matches!(self.format(), Format::Svg | Format::Png);
        admin::report(&self.socket.socket, curve)
    }

    fn form(&self, report: &Report, earlier: Option<&Report>) -> anyhow::Result<Vec<u8>> {
        Ok(match self.format() {
            Format::Table => table::text(report, earlier).into_bytes(),
            Format::Json => (serde_json::to_string(report)? + "\n").into_bytes(),
            Format::Openmetrics => metrics::text(report).into_bytes(),
            Format::Svg => chart(report)?.to_svg().into_bytes(),
            Format::Png => encode(chart(report)?.to_svg(), plimsoll_output::Format::Png)?,
        })
    }
}

/// Runs the command; `out` is standard output, or a buffer in tests.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.check()?;
    let Some(seconds) = args.watch else {
        let content = args.form(&args.ask()?, None)?;
        return match &args.out {
            Some(path) => write_file(path, &content),
            None => Ok(out.write_all(&content)?),
        };
    };
    let is_table = args.format() == Format::Table;
    let form = |report: &Report, earlier: &Report| args.form(report, Some(earlier));
    watch(seconds, is_table, || args.ask(), form, out)
}

fn chart(report: &Report) -> anyhow::Result<Chart> {
    let none = "there is no curve: no block was read yet, or the daemon runs with --ghost 0";
    let json = report.curve.as_ref().context(none)?;
    let curve = curve_of(json).context("the daemon's curve is none")?;
    let bytes = |pages: u64| pages.saturating_mul(PageSize::FOUR_KIB.bytes());
    let last = bytes(curve.points().last().map_or(0, |point| point.size.0));
    let until = last.saturating_add(last / 25);
    let marker = |pages: u64, name: &str| Marker {
        x: bytes(pages) as f64,
        label: format!("{name} {}", ByteSize(bytes(pages)).rounded()),
    };
    let direct = report
        .ghosts
        .as_ref()
        .and_then(|ghosts| ghosts.direct_pages);
    let direct = direct.map(|pages| marker(pages, "guest"));
    let now = json
        .baseline_pages
        .map(|pages| marker(pages, "with its cache"));
    Ok(Chart {
        title: format!("Miss-ratio curve of {}", report.vm),
        subtitle: format!(
            "Ghost buffer behind the guest's memory · {} reads of its disks",
            grouped(curve.references() as f64)
        ),
        x: Axis::new("Guest memory and cache", Unit::Bytes).up_to(until as f64),
        y: Axis::new("Miss ratio", Unit::Share).up_to(1.0),
        shades: Vec::new(),
        series: vec![Series::of_curve(
            "miss ratio with its band",
            &curve,
            PageSize::FOUR_KIB,
            until,
        )],
        markers: direct.into_iter().chain(now).collect(),
    })
}

fn curve_of(json: &CurveJson) -> Option<MissRatioCurve> {
    let points = json.points.iter().map(|point| CurvePoint {
        size: PageCount(point.size_pages),
        miss_ratio: point.miss_ratio,
        low: point.low,
        high: point.high,
    });
    MissRatioCurve::new(points.collect(), json.references).ok()
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::example;
    use super::*;
    use crate::curve_json::PointJson;

    #[test]
    fn the_picture_marks_the_guests_memory_and_what_it_has_with_its_cache() {
        let mut report = example();
        assert!(chart(&report).unwrap_err().to_string().contains("no curve"));
        let point = |size_pages, miss_ratio| PointJson {
            size_pages,
            miss_ratio,
            low: 0.0,
            high: miss_ratio,
        };
        report.curve = Some(CurveJson {
            schema: 1,
            vm: "web".to_owned(),
            page_bytes: 4096,
            references: 9000,
            baseline_pages: Some(65_536),
            points: vec![point(0, 1.0), point(49_152, 0.9), point(81_920, 0.2)],
        });
        let svg = chart(&report).unwrap().to_svg();
        for label in [
            "guest 192 MiB",
            "with its cache 256 MiB",
            "reads of its disks",
        ] {
            assert!(svg.contains(label), "{label}");
        }
    }
}
