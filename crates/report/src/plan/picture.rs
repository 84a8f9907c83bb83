//! A plan as a picture: each VM's relative misses over its size, with its bound, before and after.

use std::cmp::Reverse;
use std::fmt::Write as _;

use plimsoll_flow::{MissRatioCurve, PageCount, PageSize, Whole as _};
use plimsoll_policy::{Demand, Rules};
use plimsoll_protocol::plan::{PlanJson, TargetJson};
use plimsoll_protocol::vm::Relative;

use super::{change, method, times};
use crate::words::{counted, size};
use plimsoll_plot::{Axis, Chart, EscapedText, Marker, Point, Series, SeriesStyle, Unit};

/// Most VMs shown; of more, those whose size changes most.
const PANELS_MAX: usize = 24;
/// Points of a curve that a panel has room for.
const POINTS: usize = 1500;
/// The charts' width and the room between them, in pixels.
const PANEL_WIDTH: f64 = 760.0;
const GAP: f64 = 12.0;
const HEADING: f64 = 78.0;
/// Misses over the baseline's that the axis shows at least and at most.
const TOP: (f64, f64) = (1.5, 5.0);

/// A VM whose curve is known.
struct Panel<'a> {
    target: &'a TargetJson,
    curve: &'a MissRatioCurve,
    demand: &'a Demand,
}

/// Draws the plan that was made of `demands` by `rules`.
pub(super) fn svg(
    demands: &[Demand],
    rules: &Rules,
    plan: &PlanJson,
    page_size: PageSize,
) -> String {
    let known = demands.iter().zip(&plan.targets);
    let mut panels: Vec<_> = known
        .filter_map(|(demand, target)| {
            let curve = demand.curve.as_ref()?;
            Some(Panel {
                target,
                curve,
                demand,
            })
        })
        .collect();
    let unknown = demands.len() - panels.len();
    let left_out = panels.len().saturating_sub(PANELS_MAX);
    if left_out > 0 {
        let mut changes: Vec<_> = panels.into_iter().enumerate().collect();
        changes.sort_by_key(|(_, panel)| Reverse(panel.change_bytes()));
        changes.truncate(PANELS_MAX);
        changes.sort_by_key(|(place, _)| *place);
        panels = changes.into_iter().map(|(_, panel)| panel).collect();
    }
    let top = top(&panels);
    let charts: Vec<_> = panels
        .iter()
        .map(|panel| panel.chart(rules, page_size, top).to_svg())
        .collect();
    let columns = if charts.len() > 1 { 2 } else { 1 };
    let width = PANEL_WIDTH * columns as f64 + GAP * (columns - 1) as f64;

    let mut body = String::new();
    let mut row_top = HEADING;
    for row in charts.chunks(columns) {
        for (column, chart) in row.iter().enumerate() {
            let left = (PANEL_WIDTH + GAP) * column as f64;
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(
                body,
                "<g transform=\"translate({left:.0} {row_top:.0})\">\n{chart}</g>"
            );
        }
        row_top += row.iter().map(|chart| height_of(chart)).fold(0.0, f64::max) + GAP;
    }
    let title = format!(
        "{} allocated to {}",
        size(plan.total_bytes),
        counted(demands.len() as u64, "VM")
    );
    let mut subtitle = format!(
        "{} · geometric mean of misses {} of the baselines', now {} · {} spare",
        method(plan),
        times(plan.geometric_mean),
        times(plan.geometric_mean_now),
        size(plan.spare_bytes)
    );
    if unknown > 0 {
        let _ = write!(subtitle, " · {unknown} without a known curve");
    }
    if left_out > 0 {
        let _ = write!(subtitle, " · {left_out} that change less are not shown");
    }
    let mut svg = String::new();
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{row_top:.0}\" \
         viewBox=\"0 0 {width:.0} {row_top:.0}\" role=\"img\" aria-label=\"{title}\" \
         font-family=\"Ubuntu, 'Helvetica Neue', Helvetica, Arial, sans-serif\">\n\
         <rect width=\"{width:.0}\" height=\"{row_top:.0}\" fill=\"#ffffff\"/>\n\
         <text x=\"24\" y=\"38\" font-size=\"22\" fill=\"#1a1a1a\" stroke=\"#1a1a1a\" stroke-width=\"0.5\">{title}</text>\n\
         <text x=\"24\" y=\"62\" font-size=\"14\" fill=\"#555555\">{}</text>",
        EscapedText(&subtitle)
    );
    svg + &body + "</svg>\n"
}

/// How far up all panels show misses, so that their heights compare.
fn top(panels: &[Panel<'_>]) -> f64 {
    let shown = panels.iter().flat_map(|panel| {
        let relative = [panel.target.relative_now, panel.target.relative];
        let edges = relative.into_iter().flatten().map(|relative| relative.high);
        edges.chain(panel.target.max_loss.map(|loss| 1.0 + loss))
    });
    let highest = shown.fold(0.0, f64::max) * 1.15;
    highest.clamp(TOP.0, TOP.1)
}

/// The height that a chart states in its SVG, in pixels.
fn height_of(svg: &str) -> f64 {
    let (_, rest) = svg.split_once(" height=\"").unwrap_or_default();
    let (height, _) = rest.split_once('"').unwrap_or_default();
    height.parse().unwrap_or(0.0)
}

impl Panel<'_> {
    fn change_bytes(&self) -> u64 {
        self.target.target_bytes.abs_diff(self.target.current_bytes)
    }

    fn chart(&self, rules: &Rules, page_size: PageSize, top: f64) -> Chart {
        let target = self.target;
        let sizes = [
            target.baseline_bytes,
            target.current_bytes,
            target.target_bytes,
        ];
        let largest = sizes.into_iter().max().unwrap_or(0);
        let last = self.curve.points().last();
        let last = last.map_or(0, |point| point.size.to_bytes(page_size));
        // As much of the curve as could be of use to the VM next.
        let until = Chart::end_beyond(last)
            .clamp(largest / 20 * 23, largest.saturating_mul(2))
            .max(page_size.bytes());
        let moved = target.target_bytes != target.current_bytes;
        let bound = target.max_loss.map(|loss| 1.0 + loss);
        let bound = bound.map(|bound| {
            Series::new(
                format!("bound: at most {}", times(bound)),
                SeriesStyle::Truth,
                [(0.0, bound), (until as f64, bound)],
            )
        });
        let mut series: Vec<_> = bound.into_iter().collect();
        series.push(self.relative(rules, page_size, until));
        let dot = |name: &str, bytes: u64, relative: Option<Relative>| {
            let point = relative.map(|relative| (bytes as f64, relative.expected.min(top)));
            Series::new(name, SeriesStyle::Dots, point)
        };
        if moved {
            series.push(dot("now", target.current_bytes, target.relative_now));
        }
        let name = if moved { "planned" } else { "kept" };
        series.push(dot(name, target.target_bytes, target.relative));
        let x = Axis::new("Memory and cache", Unit::Bytes).up_to(until as f64);
        let y = Axis::new("Misses over the baseline's", Unit::Count).up_to(top);
        Chart {
            markers: self.markers(),
            ..Chart::new(&target.vm, self.subtitle(), [x, y], series)
        }
    }

    fn relative(&self, rules: &Rules, page_size: PageSize, until: u64) -> Series {
        let least = rules.miss_ratio_min;
        let baseline = self.demand.baseline;
        let divisor = self.curve.miss_ratio(baseline).max(least);
        let curve = Series::of_curve("misses", &self.curve.thinned(POINTS), page_size, until);
        let points = curve.points.into_iter().map(|point| {
            let size = PageCount::from_bytes(u64::whole(point.x), page_size);
            // By which the size was chosen.
            let band = self.curve.quotient_band(size, baseline, least);
            Point {
                x: point.x,
                y: point.y.max(least) / divisor,
                low: *band.start(),
                high: *band.end(),
            }
        });
        Series {
            points: points.collect(),
            ..curve
        }
    }

    fn subtitle(&self) -> String {
        let target = self.target;
        let misses = match (target.relative_now, target.relative) {
            (Some(now), Some(then)) if then.low < then.high => format!(
                " · misses {} to {} ({}-{})",
                times(now.expected),
                times(then.expected),
                times(then.low),
                times(then.high)
            ),
            (Some(now), Some(then)) => {
                format!(
                    " · misses {} to {}",
                    times(now.expected),
                    times(then.expected)
                )
            }
            _ => String::new(),
        };
        let change = match change(target.current_bytes, target.target_bytes).as_str() {
            "-" => "no change".to_owned(),
            change => change.to_owned(),
        };
        format!("{change}{misses} · {}", target.reason)
    }

    /// One line for each size, with all its names.
    fn markers(&self) -> Vec<Marker> {
        let target = self.target;
        let mut named: Vec<(u64, String)> = Vec::new();
        for (name, bytes) in [
            ("baseline", target.baseline_bytes),
            ("now", target.current_bytes),
            ("planned", target.target_bytes),
        ] {
            match named.iter_mut().find(|(other, _)| *other == bytes) {
                Some((_, names)) => {
                    let _ = write!(names, ", {name}");
                }
                None => named.push((bytes, name.to_owned())),
            }
        }
        let marker = |(bytes, names): (u64, String)| Marker {
            x: bytes as f64,
            label: format!("{names} {}", size(bytes)),
        };
        named.into_iter().map(marker).collect()
    }
}
