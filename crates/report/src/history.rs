//! Working sets, sizes and misses of VMs and control groups over time.

use anyhow::ensure;
use plimsoll_flow::WorkingSetBound;
use plimsoll_output::{csv_table, json_lines, per_second, printable, table};
use plimsoll_plot::{Axis, Chart, Figure, Series, SeriesStyle, Unit};
use plimsoll_protocol::vm::{HistoryView, Sample};

use crate::words::{known, local_time, name, percent, ratio, size};

/// The pasts of VMs and control groups.
#[derive(Debug)]
pub struct Histories(pub Vec<HistoryView>);

impl Figure for Histories {
    fn table(&self) -> anyhow::Result<String> {
        let mut text = String::new();
        for history in &self.0 {
            if !text.is_empty() {
                text.push('\n');
            }
            text.push_str(&printable(&history.vm));
            text.push('\n');
            text.push_str(&table!(&history.samples, |sample| {
                Left "time": local_time(sample.unix_ms),
                Right "uses": uses(sample),
                Right "size": size(had(sample)),
                Right "own": size(sample.direct_bytes),
                Right "cache": size(sample.cache_bytes),
                Right "target": sample.target_bytes.map(size),
                Right "x baseline": known(sample.relative, ratio),
                Right "disk misses/s": known(sample.misses_per_second, per_second),
                Right "overhead": known(sample.overhead_ratio, percent),
                Right "lost": sample.lost,
            }));
        }
        Ok(text)
    }

    fn csv(&self) -> anyhow::Result<String> {
        let rows = self.0.iter().flat_map(|history| {
            let samples = history.samples.iter();
            samples.map(|sample| (&*history.vm, sample))
        });
        Ok(csv_table!(rows, |(vm, at)| {
            "vm": printable(vm),
            "unix_ms": at.unix_ms,
            "working_set_bytes": at.working_set_bytes,
            "working_set_bound": at.working_set_bound.map(WorkingSetBound::name),
            "direct_bytes": at.direct_bytes,
            "cache_bytes": at.cache_bytes,
            "target_bytes": at.target_bytes,
            "relative": at.relative,
            "misses_per_second": at.misses_per_second,
            "overhead_ratio": at.overhead_ratio,
            "lost": at.lost,
        }))
    }

    fn json(&self) -> anyhow::Result<String> {
        json_lines(&self.0)
    }

    fn svg(&self) -> anyhow::Result<String> {
        let histories = &*self.0;
        let moments = || histories.iter().flat_map(|history| &history.samples);
        let first = moments().map(|sample| sample.unix_ms).min();
        ensure!(first.is_some(), "nothing was recorded in that time");
        let first = first.unwrap_or(0);
        let over_time =
            |name: String, look, history: &HistoryView, of: fn(&Sample) -> Option<u64>| {
                let points = history.samples.iter().filter_map(|sample| {
                    let seconds = sample.unix_ms.saturating_sub(first) as f64 / 1000.0;
                    of(sample).map(|bytes| (seconds, bytes as f64))
                });
                Series::new(name, look, points)
            };
        let mut series = Vec::new();
        for history in histories {
            let (label, alone) = match histories {
                [_] => ("working set".to_owned(), true),
                _ => (name(&history.vm), false),
            };
            let used = |sample: &Sample| sample.working_set_bytes;
            series.push(over_time(label, SeriesStyle::Line, history, used));
            if alone {
                let has = |sample: &Sample| Some(had(sample));
                let of = history;
                series.push(over_time("size".to_owned(), SeriesStyle::Steps, of, has));
                let cache =
                    |sample: &Sample| (sample.cache_bytes > 0).then_some(sample.cache_bytes);
                series.push(over_time(
                    "of it cache".to_owned(),
                    SeriesStyle::Steps,
                    of,
                    cache,
                ));
            }
        }
        series.retain(|series| !series.points.is_empty());
        let title = match histories {
            [history] => format!("Working set of {}", name(&history.vm)),
            all => format!("{} working sets", all.len()),
        };
        let subtitle = format!("From {} on", local_time(first));
        let x = Axis::new("Time", Unit::Seconds);
        let y = Axis::new("Memory", Unit::Bytes);
        Ok(Chart::new(title, subtitle, [x, y], series).to_svg())
    }
}

/// Its working set, with the sign of a bound.
fn uses(sample: &Sample) -> String {
    let sign = sample.working_set_bound.map_or("", WorkingSetBound::sign);
    known(sample.working_set_bytes, |bytes| {
        format!("{sign}{}", size(bytes))
    })
}

fn had(sample: &Sample) -> u64 {
    sample.direct_bytes.saturating_add(sample.cache_bytes)
}
