//! One curve as a reader, a program or a picture wants it.

use std::fmt::Write as _;

use plimsoll_flow::{MissRatioCurve, PageCount, PageSize};

use crate::curve_json::CurveJson;
use crate::size::ByteSize;
use plimsoll_output::grouped;
use plimsoll_plot::{Axis, Chart, Marker, Series, Unit};

/// A curve and what a reader wants to know about it.
pub(super) struct Report {
    pub(super) name: String,
    pub(super) method: String,
    /// References in the trace; the curve counts those the estimator looked at.
    pub(super) references: u64,
    pub(super) page_size: PageSize,
    /// Of the whole curve, not of the points selected.
    pub(super) working_set: Option<PageCount>,
    pub(super) curve: MissRatioCurve,
}

impl Report {
    fn bytes(&self, pages: PageCount) -> ByteSize {
        ByteSize(pages.to_bytes(self.page_size))
    }

    /// How many of the references were sampled, if not all.
    fn sampled(&self) -> String {
        match self.curve.references() {
            seen if seen == self.references => String::new(),
            seen => format!(", of which {} sampled", grouped(seen as f64)),
        }
    }

    fn banded(&self) -> bool {
        let points = self.curve.points();
        points.iter().any(|point| point.low < point.high)
    }

    fn working_set(&self) -> String {
        match self.working_set {
            Some(size) => format!(
                "{} pages, {} (5 % misses)",
                grouped(size.0 as f64),
                self.bytes(size).rounded()
            ),
            None => "none: more than 5 % miss at every size".to_owned(),
        }
    }

    pub(super) fn to_table(&self) -> String {
        let mut table = String::new();
        let heads = [
            ("trace", self.name.clone()),
            ("estimator", self.method.clone()),
            (
                "references",
                grouped(self.references as f64) + &self.sampled(),
            ),
            ("page", self.bytes(PageCount(1)).rounded()),
            ("working set", self.working_set()),
        ];
        for (label, value) in heads {
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(table, "{label:<12}{value}");
        }
        let banded = self.banded();
        let band_head = if banded { "       low      high" } else { "" };
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
        table.replace('\u{a0}', " ")
    }

    pub(super) fn to_csv(&self) -> String {
        let mut csv = String::from("size_pages,miss_ratio,low,high\n");
        for point in self.curve.points() {
            let (size, ratio) = (point.size, point.miss_ratio);
            let _ = writeln!(csv, "{size},{ratio},{},{}", point.low, point.high);
        }
        csv
    }

    pub(super) fn to_json(&self) -> anyhow::Result<String> {
        let curve = CurveJson::new(&self.name, self.page_size, None, &self.curve);
        Ok(serde_json::to_string(&curve)? + "\n")
    }

    pub(super) fn to_chart(&self) -> Chart {
        let last = self
            .curve
            .points()
            .last()
            .map_or(0, |point| point.size.to_bytes(self.page_size));
        // Some room behind the last step shows that the curve stays where it is.
        let until = last
            .saturating_add(last / 25)
            .saturating_add(self.page_size.bytes());
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
        Chart {
            title: format!("Miss-ratio curve of {}", self.name),
            subtitle: format!(
                "{} · {} references{}",
                self.method,
                grouped(self.references as f64),
                self.sampled()
            ),
            x: Axis::new("Memory size", Unit::Bytes).up_to(until as f64),
            y: Axis::new("Miss ratio", Unit::Share).up_to(1.0),
            shades: Vec::new(),
            series: vec![curve],
            markers: markers.into_iter().collect(),
        }
    }
}
