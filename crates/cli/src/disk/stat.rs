//! `plimsoll disk stat`: statistics of a VM's disks and their cache, and predictions for other sizes.

use std::io::Write;

use anyhow::Context as _;
use plimsoll_flow::PageSize;
use plimsoll_output::grouped;
use plimsoll_plot::{Chart, Marker, Series};
use plimsoll_protocol::size::ByteSize;
use plimsoll_serve::disk::{Report, admin, metrics, table};

use super::SocketArg;
use crate::stat::{self, StatArgs, curve_of};

/// Show what a VM's disks and their cache did, and the hit ratios predicted for other cache sizes.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArg,
    #[command(flatten)]
    stat: StatArgs,
    /// Include the curve: the share of reads that miss at each size of guest memory and cache together
    #[arg(long)]
    curve: bool,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let query = |curve| admin::report(&args.socket.socket, curve);
    args.stat.run(args.curve, query, out)
}

impl stat::Report for Report {
    const CURVE_OPTION: &str = "--curve";

    fn table(&self, earlier: Option<&Self>, _: bool) -> String {
        table::text(self, earlier)
    }

    fn metrics(&self) -> String {
        metrics::text(self)
    }

    fn chart(&self) -> anyhow::Result<Chart> {
        chart(self)
    }
}

fn chart(report: &Report) -> anyhow::Result<Chart> {
    let none = "there is no curve: no block was read yet, or the daemon runs with --ghost 0";
    let json = report.curve.as_ref().context(none)?;
    let curve = curve_of(json)?;
    let bytes = |pages: u64| pages.saturating_mul(PageSize::FOUR_KIB.bytes());
    let last = bytes(curve.points().last().map_or(0, |point| point.size.0));
    let until = Chart::end_beyond(last);
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
    let title = format!("Miss-ratio curve of {}", report.vm);
    let references = grouped(curve.references() as f64);
    let subtitle =
        format!("Ghost buffer behind the guest's memory · {references} reads of its disks");
    let name = "miss ratio with its band";
    let series = Series::of_curve(name, &curve, PageSize::FOUR_KIB, until);
    let sizes = "Guest memory and cache";
    Ok(Chart {
        markers: direct.into_iter().chain(now).collect(),
        ..Chart::of_miss_ratios(title, subtitle, sizes, until, [series])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_disk::MachineStats;
    use plimsoll_protocol::curve_json::{CurveJson, PointJson};
    use plimsoll_serve::disk::report::{BandReport, GhostsReport};

    #[test]
    fn the_picture_marks_the_guests_memory_and_what_it_has_with_its_cache() {
        let ghosts = GhostsReport {
            direct_pages: Some(49_152),
            reach_pages: 81_920,
            segment_pages: 1024,
            memory_bytes: 4 << 20,
            reads: 990_000,
            hits: 742_000,
            expected: None,
            band: BandReport::default(),
        };
        let mut report = Report::new("web", MachineStats::default(), Some(ghosts));
        assert!(chart(&report).unwrap_err().to_string().contains("no curve"));
        let point = |size_pages, miss_ratio| PointJson {
            size_pages,
            miss_ratio,
            low: 0.0,
            high: miss_ratio,
            misses: None,
        };
        report.curve = Some(CurveJson {
            schema: 1,
            vm: "web".to_owned(),
            page_bytes: 4096,
            references: 9000,
            baseline_pages: Some(65_536),
            vcpu_seconds_per_second: None,
            uncertain_pages: 0,
            log_errors_permille: Vec::new(),
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
