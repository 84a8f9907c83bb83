//! Where in its RAM a VM is busy: time from top to bottom (in pictures from bottom to top), addresses from left to right.

use anyhow::{Context as _, ensure};
use plimsoll_output::{csv_table, json_lines, printable};
use plimsoll_plot::{Axis, Figure, HeatChart, Unit};
use plimsoll_protocol::vm::{HeatRow, HeatmapView};

use crate::words::{local_time, name, size, time_of_day};

/// Letters beside each other and lines below each other in a table, at most.
const LETTERS: usize = 64;
const LINES: usize = 40;
/// From idle to busiest.
const SHADES: [char; 5] = [' ', '░', '▒', '▓', '█'];

/// Activity of VMs. A picture shows the first one alone.
#[derive(Debug)]
pub struct Heatmaps(pub Vec<HeatmapView>);

impl Figure for Heatmaps {
    fn table(&self) -> anyhow::Result<String> {
        let maps: Vec<_> = self.0.iter().map(text).collect();
        Ok(maps.join("\n"))
    }

    fn csv(&self) -> anyhow::Result<String> {
        let cells = self.0.iter().flat_map(|map| {
            let rows = map.rows.iter();
            let cells = rows.flat_map(|row| (0_u64..).zip(&row.pages).map(move |cell| (row, cell)));
            cells.map(move |(row, (index, pages))| (map, row, index, pages))
        });
        Ok(csv_table!(cells, |(map, row, index, pages)| {
            "vm": printable(&map.vm),
            "unix_ms": row.unix_ms,
            "begin_bytes": map.cell_bytes.saturating_mul(index),
            "pages": pages,
        }))
    }

    fn json(&self) -> anyhow::Result<String> {
        json_lines(&self.0)
    }

    fn svg(&self) -> anyhow::Result<String> {
        let map = self.0.first().context("there is no VM")?;
        Ok(chart(map)?.to_svg())
    }
}

/// Pages in the busiest cell, and cells in the widest row.
fn extent(map: &HeatmapView) -> (u32, usize) {
    let busiest = map.rows.iter().flat_map(|row| &row.pages).copied().max();
    let widest = map.rows.iter().map(|row| row.pages.len()).max();
    (busiest.unwrap_or(0), widest.unwrap_or(0))
}

fn text(map: &HeatmapView) -> String {
    let (_, columns) = extent(map);
    if columns == 0 {
        return format!("{}: nothing was recorded yet\n", printable(&map.vm));
    }
    let merged = columns.div_ceil(LETTERS);
    let rows = &map.rows[map.rows.len().saturating_sub(LINES)..];
    let sums = |row: &HeatRow| -> Vec<u64> {
        let cells = row.pages.chunks(merged);
        cells
            .map(|cells| cells.iter().copied().map(u64::from).sum())
            .collect()
    };
    let rows: Vec<_> = rows.iter().map(|row| (row.unix_ms, sums(row))).collect();
    let busiest = rows
        .iter()
        .flat_map(|(_, sums)| sums)
        .copied()
        .max()
        .unwrap_or(0);
    let cell_bytes = map.cell_bytes.saturating_mul(merged as u64);
    let mut text = format!(
        "{}: each character covers {} of its RAM, each line one period; █ is {} pages used in it\n",
        printable(&map.vm),
        size(cell_bytes),
        busiest,
    );
    for (unix_ms, sums) in &rows {
        let shades: String = sums.iter().map(|pages| shade(*pages, busiest)).collect();
        text.push_str(&format!(
            "{} │{shades:<width$}│\n",
            time_of_day(*unix_ms),
            width = columns.div_ceil(merged)
        ));
    }
    text
}

fn shade(pages: u64, busiest: u64) -> char {
    let steps = SHADES.len() as u64 - 1;
    let step = u128::from(pages) * u128::from(steps);
    let step = step.div_ceil(u128::from(busiest.max(1)));
    SHADES[usize::try_from(step).map_or(SHADES.len() - 1, |step| step.min(SHADES.len() - 1))]
}

fn chart(map: &HeatmapView) -> anyhow::Result<HeatChart> {
    let (busiest, columns) = extent(map);
    ensure!(columns > 0, "nothing was recorded yet");
    let first = map.rows.first().map_or(0, |row| row.unix_ms);
    // A row ends where its period did; the first has the length of the second.
    let period = map
        .rows
        .get(1)
        .map_or(1000, |row| row.unix_ms.saturating_sub(first));
    let begin = first.saturating_sub(period);
    let rows = map.rows.iter().map(|row| {
        let end = row.unix_ms.saturating_sub(begin) as f64 / 1000.0;
        let shares = row
            .pages
            .iter()
            .map(|pages| f64::from(*pages) / f64::from(busiest.max(1)));
        (end, shares.collect())
    });
    Ok(HeatChart {
        title: format!("Where {} is busy", name(&map.vm)),
        subtitle: format!(
            "From {} on · darkest: {busiest} pages used in {} within a period",
            local_time(begin),
            size(map.cell_bytes)
        ),
        x: Axis::new("Address in its RAM", Unit::Bytes),
        y: Axis::new("Time", Unit::Seconds),
        columns_to: (columns as f64) * map.cell_bytes as f64,
        rows: rows.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example;

    #[test]
    fn a_line_is_a_period_and_the_place_that_is_always_busy_is_full_in_each() {
        let text = text(&example::heatmap("web\u{1b}[2J"));
        let lines: Vec<_> = text.lines().collect();
        let head = "web\u{fffd}[2J: each character covers 8 MiB of its RAM, each line one period; █ is 2048 pages used in it";
        assert_eq!((lines.len(), lines[0]), (31, head));
        for (period, line) in lines[1..].iter().enumerate() {
            let (_, row) = line.split_once('│').unwrap();
            let cells: Vec<_> = row.chars().collect();
            assert_eq!((cells.len(), cells[64]), (65, '│'));
            assert_eq!((cells[5], cells[6], cells[63]), ('█', '█', ' '), "{period}");
        }
    }

    #[test]
    fn a_map_of_any_form_is_drawn() {
        let mut map = example::heatmap("web");
        map.cell_bytes = u64::MAX;
        map.rows.push(HeatRow {
            unix_ms: 0,
            pages: vec![u32::MAX; 300],
        });
        assert_eq!(text(&map).lines().count(), 32);
        assert!(chart(&map).unwrap().to_svg().contains("</svg>"));
        map.rows.clear();
        assert_eq!(text(&map), "web: nothing was recorded yet\n");
        assert!(chart(&map).is_err());
    }

    #[test]
    fn what_is_busy_at_all_is_not_blank_and_the_busiest_is_full() {
        let shades: String = [0, 1, 25, 26, 75, 99, 100, 101]
            .map(|pages| shade(pages, 100))
            .iter()
            .collect();
        assert_eq!(shades, " ░░▒▓███");
        assert_eq!((shade(0, 0), shade(u64::MAX, u64::MAX)), (' ', '█'));
    }
}
