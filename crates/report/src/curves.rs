//! Curves of VMs and control groups.

use anyhow::ensure;
use plimsoll_output::{csv_table, grouped, json_lines, printable};
use plimsoll_plot::{Chart, Figure, Marker, Series};
use plimsoll_protocol::subject::Subject;

use crate::daemon::curve_of;
use crate::vm::plot;
use crate::words::{name, size};

/// The curves of VMs and control groups, of which some may not be known yet.
#[derive(Debug)]
pub struct Curves(pub Vec<Subject>);

impl Figure for Curves {
    fn table(&self) -> anyhow::Result<String> {
        let mut text = String::new();
        for view in &self.0 {
            if !text.is_empty() {
                text.push('\n');
            }
            let vm = printable(view.name());
            match view.curve() {
                None => text.push_str(&format!("{vm}: its curve is not available yet\n")),
                Some(json) => {
                    let references = grouped(json.references as f64);
                    text.push_str(&format!("{vm}: {references} references\n"));
                    text.push_str(&plot(&view.sizes(), &curve_of(json)?));
                }
            }
        }
        Ok(text)
    }

    fn csv(&self) -> anyhow::Result<String> {
        let mut rows = Vec::new();
        for view in &self.0 {
            let Some(json) = view.curve() else { continue };
            let curve = curve_of(json)?;
            let page_bytes = curve.page_size.bytes();
            let points = curve.misses.points().iter();
            rows.extend(points.map(|&point| (view.name(), page_bytes, point)));
        }
        Ok(csv_table!(rows, |(vm, page_bytes, point)| {
            "vm": printable(vm),
            "page_bytes": page_bytes,
            "size_pages": point.size.0,
            "miss_ratio": point.miss_ratio,
            "low": point.low,
            "high": point.high,
            "misses_per_second": point.misses.map(|misses| misses.expected),
            "misses_low_per_second": point.misses.map(|misses| misses.low),
            "misses_high_per_second": point.misses.map(|misses| misses.high),
        }))
    }

    fn json(&self) -> anyhow::Result<String> {
        json_lines(self.0.iter().filter_map(Subject::curve))
    }

    fn svg(&self) -> anyhow::Result<String> {
        let mut series = Vec::new();
        let mut until_bytes = 0;
        let mut known = Vec::new();
        for view in &self.0 {
            let Some(json) = view.curve() else { continue };
            let curve = curve_of(json)?;
            until_bytes = until_bytes.max(view.sizes().until(&curve));
            known.push((view, curve));
        }
        ensure!(!known.is_empty(), "no curve is known yet");
        let until_bytes = Chart::end_beyond(until_bytes);
        for (view, curve) in &known {
            let name = name(view.name());
            series.push(Series::of_curve(
                name,
                &curve.misses,
                curve.page_size,
                until_bytes,
            ));
        }
        let references: f64 = known
            .iter()
            .map(|(_, curve)| curve.misses.references() as f64)
            .sum();
        let (title, markers) = match &known[..] {
            [(view, _)] => {
                let markers = view.sizes().marks.into_iter().map(|(bytes, names)| Marker {
                    x: bytes as f64,
                    label: format!("{names} {}", size(bytes)),
                });
                (
                    format!("Miss-ratio curve of {}", name(view.name())),
                    markers.collect(),
                )
            }
            all => (format!("{} miss-ratio curves", all.len()), Vec::new()),
        };
        let subtitle = format!("Live, with its band · {} references", grouped(references));
        let chart = Chart {
            markers,
            ..Chart::of_miss_ratios(title, subtitle, "Memory", until_bytes, series)
        };
        Ok(chart.to_svg())
    }
}
