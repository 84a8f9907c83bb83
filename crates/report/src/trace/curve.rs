//! One curve.

use std::fmt::Write as _;

use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, PageSize};
use plimsoll_output::{grouped, json_line, labelled};
use plimsoll_plot::{Chart, Figure, Marker, Series};
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::size::ByteSize;

use super::{counted, points_csv, working_set};

/// A curve and its description in the table.
#[derive(Debug)]
pub struct CurveReport {
    /// Name of the trace.
    pub name: String,
    /// The estimator with its settings.
    pub method: String,
    /// References in the trace; the curve counts those that the estimator sampled.
    pub references: u64,
    /// Bytes in a page.
    pub page_size: PageSize,
    /// Of the whole curve, not of the points selected.
    pub working_set: Option<PageCount>,
    /// The largest size of the whole curve.
    pub end: Option<CurvePoint>,
    /// The points selected.
    pub curve: MissRatioCurve,
}

impl CurveReport {
    fn bytes(&self, pages: PageCount) -> ByteSize {
        ByteSize(pages.to_bytes(self.page_size))
    }

    fn banded(&self) -> bool {
        let points = self.curve.points();
        points.iter().any(|point| point.low < point.high)
    }

    fn working_set(&self) -> String {
        let pages = |size: PageCount| {
            let pages = grouped(size.0 as f64);
            format!("{pages} pages, {}", self.bytes(size).rounded())
        };
        working_set(self.working_set, self.end.as_ref(), pages, "misses")
    }
}

impl Figure for CurveReport {
    fn table(&self) -> anyhow::Result<String> {
        let (references, sampled) = counted(self.references, self.curve.references());
        let mut table = labelled(
            12,
            [
                ("trace", self.name.clone()),
                ("estimator", self.method.clone()),
                ("references", references + &sampled),
                ("page", self.bytes(PageCount(1)).rounded()),
                ("working set", self.working_set()),
            ],
        );
        let banded = self.banded();
        let band_head = if banded { "       low      high" } else { "" };
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(
            table,
            "\n{:>14}  {:>11}  {:>10}{band_head}",
            "size (pages)", "size", "miss ratio"
        );
        for point in self.curve.points() {
            let _ = write!(
                table,
                "{:>14}  {:>11}  {:>8.2} %",
                grouped(point.size.0 as f64),
                self.bytes(point.size).rounded(),
                point.miss_ratio * 100.0
            );
            if banded {
                let (low, high) = (point.low * 100.0, point.high * 100.0);
                let _ = write!(table, "  {low:>6.2} %  {high:>6.2} %");
            }
            table.push('\n');
        }
        Ok(table.replace('\u{a0}', " "))
    }

    fn csv(&self) -> anyhow::Result<String> {
        let points = self.curve.points().iter();
        Ok(points_csv([], points.map(|point| ([], point))))
    }

    fn json(&self) -> anyhow::Result<String> {
        let curve = CurveJson::new(&self.name, self.page_size, None, &self.curve);
        json_line(&curve)
    }

    fn svg(&self) -> anyhow::Result<String> {
        let last = self
            .curve
            .points()
            .last()
            .map_or(0, |point| point.size.to_bytes(self.page_size));
        let until = Chart::end_beyond(last);
        let name = if self.banded() {
            "miss ratio with its band"
        } else {
            ""
        };
        let curve = Series::of_curve(name, &self.curve, self.page_size, until);
        let markers = self.working_set.map(|size| Marker {
            x: self.bytes(size).0 as f64,
            label: format!("working set {} (5 %)", self.bytes(size).rounded()),
        });
        let (references, sampled) = counted(self.references, self.curve.references());
        let subtitle = format!("{} · {references} references{sampled}", self.method);
        let title = format!("Miss-ratio curve of {}", self.name);
        let chart = Chart {
            markers: markers.into_iter().collect(),
            ..Chart::of_miss_ratios(title, subtitle, "Memory size", until, [curve])
        };
        Ok(chart.to_svg())
    }
}
