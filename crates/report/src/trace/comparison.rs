//! Estimators beside the exact curve: error, speed and memory.

use plimsoll_estimator::Compared;
use plimsoll_flow::PageSize;
use plimsoll_output::{csv_table, grouped, json_line, labelled, table};
use plimsoll_plot::{Chart, Figure, Point, Series, SeriesStyle};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::size::ByteSize;
use serde::Serialize;

/// A comparison on a trace.
#[derive(Debug)]
pub struct ComparisonReport {
    /// Name of the trace.
    pub name: String,
    /// Bytes in a page.
    pub page_size: PageSize,
    /// The curves.
    pub compared: Compared,
}

/// A line of the table.
#[derive(Debug, Serialize)]
struct Row<'a> {
    estimator: &'a str,
    /// Mean absolute error, 0.0 to 1.0; none without a curve.
    mean_absolute_error: Option<f64>,
    /// Largest error outside 1 % of a size.
    max_error: Option<f64>,
    /// How far the steepest cliff stands from its place, as a share of its size; none without a cliff.
    cliff_position_error: Option<f64>,
    /// Share of the sizes whose true ratio lies in the band; none if there is no band.
    band_coverage: Option<f64>,
    references_per_second: f64,
    peak_memory_bytes: usize,
}

/// The comparison as JSON.
#[derive(Debug, Serialize)]
struct Document<'a> {
    schema: u32,
    trace: &'a str,
    references: u64,
    footprint_pages: u64,
    estimators: Vec<Row<'a>>,
}

impl ComparisonReport {
    fn rows(&self) -> Vec<Row<'_>> {
        let references = self.compared.references as f64;
        let rows = self.compared.estimators.iter().map(|entry| {
            let errors = self.compared.errors(entry);
            Row {
                estimator: &entry.label,
                mean_absolute_error: errors.mean_absolute,
                max_error: errors.max,
                cliff_position_error: errors.cliff_position,
                band_coverage: errors.band_coverage,
                references_per_second: references / entry.time.as_secs_f64().max(1e-9),
                peak_memory_bytes: entry.peak_bytes,
            }
        });
        rows.collect()
    }
}

impl Figure for ComparisonReport {
    fn table(&self) -> anyhow::Result<String> {
        let compared = &self.compared;
        let references = format!(
            "{} to {} pages",
            grouped(compared.references as f64),
            grouped(compared.footprint.0 as f64)
        );
        let cliff = compared.exact.cliff().map_or("none".to_owned(), |cliff| {
            format!(
                "at {} pages, from {:.1} % to {:.1} % misses",
                grouped(cliff.size.0 as f64),
                cliff.from * 100.0,
                cliff.to * 100.0
            )
        });
        let name = self.name.clone();
        let heads = [
            ("trace", name),
            ("references", references),
            ("cliff", cliff),
        ];
        let mut table = labelled(12, heads) + "\n";
        let share = |share: Option<f64>, digits: usize| match share {
            Some(share) => format!("{:.digits$} %", share * 100.0),
            None => "-".to_owned(),
        };
        table.push_str(&table!(self.rows(), |row| {
            Left "estimator": row.estimator,
            Right "MAE": share(row.mean_absolute_error, 3),
            Right "max err": share(row.max_error, 2),
            Right "cliff": share(row.cliff_position_error, 2),
            Right "in band": share(row.band_coverage, 1),
            Right "M refs/CPU s": format!("{:.1}", row.references_per_second / 1e6),
            Right "peak memory": ByteSize(row.peak_memory_bytes as u64).rounded(),
        }));
        table.push_str(
            "\nMAE and max err: against the exact curve, at even sizes up to the footprint; max err forgives\n\
             sizes off by 1 %. cliff: how far its place is off. in band: sizes whose true ratio is in it.\n",
        );
        Ok(table.replace('\u{a0}', " "))
    }

    fn csv(&self) -> anyhow::Result<String> {
        Ok(csv_table!(self.rows(), |row| {
            "estimator": row.estimator,
            "mean_absolute_error": row.mean_absolute_error,
            "max_error": row.max_error,
            "cliff_position_error": row.cliff_position_error,
            "band_coverage": row.band_coverage,
            "references_per_second": row.references_per_second,
            "peak_memory_bytes": row.peak_memory_bytes,
        }))
    }

    fn json(&self) -> anyhow::Result<String> {
        json_line(&Document {
            schema: SCHEMA,
            trace: &self.name,
            references: self.compared.references,
            footprint_pages: self.compared.footprint.0,
            estimators: self.rows(),
        })
    }

    fn svg(&self) -> anyhow::Result<String> {
        let (compared, page_size) = (&self.compared, self.page_size);
        let until = Chart::end_beyond(compared.footprint.to_bytes(page_size));
        let exact = Series {
            look: SeriesStyle::Truth,
            ..Series::of_curve("exact", &compared.exact, page_size, until)
        };
        let curves = compared.estimators.iter().filter_map(|entry| {
            let curve = entry.curve.as_ref();
            let curve = curve.filter(|&curve| *curve != compared.exact)?;
            let mut series = Series::of_curve(&entry.label, curve, page_size, until);
            series.points.retain(|point| point.x <= until as f64);
            // Bands over one another show nothing.
            series.points = series.points.iter().map(|p| Point::new(p.x, p.y)).collect();
            Some(series)
        });
        let title = format!("Estimated miss-ratio curves of {}", self.name);
        let subtitle = format!("{} references", grouped(compared.references as f64));
        let series = curves.chain([exact]);
        Ok(Chart::of_miss_ratios(title, subtitle, "Memory size", until, series).to_svg())
    }
}
