//! Charts with two axes: curves over size, series over time.

use plimsoll_flow::{MissRatioCurve, PageCount, PageSize};

use crate::axis::{Axis, End, Scale, Unit};
use crate::svg::{Anchor, FAINT_INK, GRID, INK, MARGIN, PALETTE, SMALL, Svg, WIDTH, text_width};

const PLOT_HEIGHT: f64 = 330.0;
const LEGEND_ROW: f64 = 20.0;
const MARKER_ROW: f64 = 16.0;

/// A chart with two axes; build it field by field and draw it with [`to_svg`](Self::to_svg).
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// The heading.
    pub title: String,
    /// Second line of the heading: source, estimator, number of references.
    pub subtitle: String,
    /// The axis from left to right.
    pub x: Axis,
    /// The axis from bottom to top.
    pub y: Axis,
    /// Grey ranges of x behind the data; those of one label share a legend entry.
    pub shades: Vec<Shade>,
    /// The data, drawn in order, the last on top.
    pub series: Vec<Series>,
    /// Vertical lines with a name.
    pub markers: Vec<Marker>,
}

/// A range of x with a grey background.
#[derive(Debug, Clone, PartialEq)]
pub struct Shade {
    /// Start, in the unit of x.
    pub from: f64,
    /// End, in the unit of x.
    pub to: f64,
    /// Its meaning, shown in the legend.
    pub label: String,
}

/// A vertical line at one x.
#[derive(Debug, Clone, PartialEq)]
pub struct Marker {
    /// Position, in the unit of x.
    pub x: f64,
    /// Its name, written above the line.
    pub label: String,
}

/// How a series is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeriesStyle {
    /// Each value holds until the next, as in miss-ratio curves and sizes that change at once.
    Steps,
    /// Straight lines between the values.
    Line,
    /// The values only, unconnected.
    Dots,
    /// The reference for the other series: dashed grey steps, with other dashes for each of several that have names.
    Truth,
}

/// Values to draw, rising in x.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Its name in the legend; no legend entry if empty.
    pub name: String,
    /// How it is drawn.
    pub look: SeriesStyle,
    /// The values.
    pub points: Vec<Point>,
}

/// A value with its band.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Position on the x axis.
    pub x: f64,
    /// Position on the y axis.
    pub y: f64,
    /// Lower limit of the band; `y` if there is none.
    pub low: f64,
    /// Upper limit of the band; `y` if there is none.
    pub high: f64,
}

impl Point {
    /// Returns a value without a band.
    pub fn new(x: f64, y: f64) -> Self {
        Self {
            x,
            y,
            low: y,
            high: y,
        }
    }

    fn is_finite(&self) -> bool {
        [self.x, self.y, self.low, self.high]
            .into_iter()
            .all(f64::is_finite)
    }
}

impl Series {
    /// Returns a series of values without bands.
    pub fn new(
        name: impl Into<String>,
        look: SeriesStyle,
        points: impl IntoIterator<Item = (f64, f64)>,
    ) -> Self {
        Self {
            name: name.into(),
            look,
            points: points.into_iter().map(|(x, y)| Point::new(x, y)).collect(),
        }
    }

    /// Returns a curve as steps over bytes with its band. It starts at size 0, where every
    /// reference misses, and continues after its last point to `until_bytes`.
    pub fn of_curve(
        name: impl Into<String>,
        curve: &MissRatioCurve,
        page_size: PageSize,
        until_bytes: u64,
    ) -> Self {
        let until = PageCount::from_bytes(until_bytes, page_size);
        let before = curve.points().first().filter(|point| point.size.0 > 0);
        let beyond = curve.points().last().filter(|point| point.size < until);
        let points = before
            .map(|_| curve.at(PageCount(0)))
            .into_iter()
            .chain(curve.points().iter().copied())
            .chain(beyond.map(|_| curve.at(until)))
            .map(|point| {
                let (y, low, high) = match point.misses_nothing() {
                    true => (0.0, 0.0, 0.0),
                    false => (point.miss_ratio, point.low, point.high),
                };
                Point {
                    x: point.size.to_bytes(page_size) as f64,
                    y,
                    low,
                    high,
                }
            });
        Self {
            name: name.into(),
            look: SeriesStyle::Steps,
            points: points.collect(),
        }
    }

    fn finite(&self) -> impl DoubleEndedIterator<Item = &Point> + Clone {
        self.points.iter().filter(|point| point.is_finite())
    }

    fn has_band(&self) -> bool {
        self.finite().any(|point| point.low < point.high)
    }
}

/// What a series is drawn with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pen {
    color: &'static str,
    /// An attribute, or nothing.
    dashes: &'static str,
}

/// An entry of the legend.
enum Key<'a> {
    Series(&'a Series, Pen),
    Shade(&'a str),
}

impl Key<'_> {
    fn label(&self) -> &str {
        match self {
            Self::Series(series, _) => &series.name,
            Self::Shade(label) => label,
        }
    }
}

const SHADE: &str = "#efefef";
const TRUTH: &str = "#444444";
const DASHES: [&str; 3] = [
    " stroke-dasharray=\"6 4\"",
    " stroke-dasharray=\"2 3\"",
    " stroke-dasharray=\"10 3 2 3\"",
];
const SWATCH: f64 = 24.0;

impl Chart {
    /// Series between two axes.
    pub fn new(
        title: impl Into<String>,
        subtitle: impl Into<String>,
        [x, y]: [Axis; 2],
        series: impl IntoIterator<Item = Series>,
    ) -> Self {
        Self {
            title: title.into(),
            subtitle: subtitle.into(),
            x,
            y,
            shades: Vec::new(),
            series: series.into_iter().collect(),
            markers: Vec::new(),
        }
    }

    /// The size at which a chart of a curve ends whose last step is at `last_bytes`: room behind it shows that the curve stays
    /// where it is.
    pub fn end_beyond(last_bytes: u64) -> u64 {
        last_bytes.saturating_add((last_bytes / 25).max(1))
    }

    /// Miss ratios, from 0 to all references, over sizes up to `until_bytes`, whose axis is called `sizes`.
    pub fn of_miss_ratios(
        title: impl Into<String>,
        subtitle: impl Into<String>,
        sizes: &str,
        until_bytes: u64,
        series: impl IntoIterator<Item = Series>,
    ) -> Self {
        let x = Axis::new(sizes, Unit::Bytes).up_to(until_bytes as f64);
        let y = Axis::new("Miss ratio", Unit::Share).up_to(1.0);
        Self::new(title, subtitle, [x, y], series)
    }

    /// Draws the chart.
    pub fn to_svg(&self) -> String {
        let x_values = self
            .series
            .iter()
            .flat_map(|series| series.finite().map(|point| point.x))
            .chain(self.markers.iter().map(|marker| marker.x))
            .chain(self.shades.iter().flat_map(|shade| [shade.from, shade.to]));
        let y_values = self
            .series
            .iter()
            .flat_map(|series| series.finite().flat_map(|point| [point.low, point.high]));
        let x = Scale::new(&self.x, x_values, End::AtData, 8.0);
        let y = Scale::new(&self.y, y_values, End::AtTick, 6.0);
        let label_width = y
            .ticks
            .iter()
            .map(|(_, text)| text_width(text, SMALL))
            .fold(0.0, f64::max);
        let left = MARGIN + 20.0 + label_width + 8.0;
        let right = WIDTH - MARGIN - 8.0;
        let x = x.laid(left, right);

        // Above the data, from top to bottom: heading, legend, marker names.
        let keys = self.keys();
        let keys_at = legend_places(&keys, left, right);
        let legend_rows = keys_at.last().map_or(0.0, |(_, row)| row + 1.0);
        let markers_at = self.marker_places(&x);
        let marker_rows = markers_at
            .iter()
            .map(|place| place.row + 1.0)
            .fold(0.0, f64::max);
        let mut heading = Svg::new(WIDTH, 0.0, "");
        let heading_height =
            heading.heading(MARGIN, WIDTH - 2.0 * MARGIN, &self.title, &self.subtitle);
        let legend_top = heading_height + 10.0;
        let markers_top =
            legend_top + legend_rows * LEGEND_ROW + if legend_rows > 0.0 { 5.0 } else { 0.0 };
        let top = markers_top + marker_rows * MARKER_ROW + 10.0;
        let bottom = top + PLOT_HEIGHT;
        let y = y.laid(bottom, top);

        let mut svg = Svg::new(WIDTH, bottom + 62.0, &self.title);
        svg.heading(MARGIN, WIDTH - 2.0 * MARGIN, &self.title, &self.subtitle);
        for (key, (key_left, row)) in keys.iter().zip(&keys_at) {
            draw_key(
                &mut svg,
                key,
                *key_left,
                legend_top + (row + 0.5) * LEGEND_ROW,
            );
        }
        for shade in &self.shades {
            let (from, to) = (x.within(shade.from), x.within(shade.to));
            svg.put(format_args!(
                "<rect x=\"{from:.2}\" y=\"{top:.2}\" width=\"{:.2}\" height=\"{PLOT_HEIGHT:.2}\" fill=\"{SHADE}\"/>",
                (to - from).max(0.0)
            ));
        }
        draw_axes(&mut svg, &x, &y, (left, right), (top, bottom));
        // A nested SVG element, which clips everything outside the axes.
        svg.put(format_args!(
            "<svg x=\"{left:.2}\" y=\"{:.2}\" width=\"{:.2}\" height=\"{:.2}\" viewBox=\"{left:.2} {:.2} {:.2} {:.2}\">",
            top - 3.0, right - left + 3.0, PLOT_HEIGHT + 4.0,
            top - 3.0, right - left + 3.0, PLOT_HEIGHT + 4.0,
        ));
        for (series, pen) in self.drawn() {
            draw_band(&mut svg, series, pen.color, &x, &y);
        }
        for (series, pen) in self.drawn() {
            draw_series(&mut svg, series, pen, &x, &y);
        }
        svg.put(format_args!("</svg>"));
        for place in &markers_at {
            let from = markers_top + place.row * MARKER_ROW;
            let (from, to) = ((place.x, from), (place.x, bottom));
            svg.line(from, to, (1.0, FAINT_INK), " stroke-dasharray=\"2 3\"");
        }
        for place in &markers_at {
            let row_top = markers_top + place.row * MARKER_ROW;
            // A white background behind the name, because another marker's line may cross it.
            svg.put(format_args!(
                "<rect x=\"{:.1}\" y=\"{row_top:.1}\" width=\"{:.1}\" height=\"{MARKER_ROW}\" fill=\"#ffffff\"/>",
                place.left - 2.0,
                place.width + 4.0
            ));
            let at = (place.left, row_top + MARKER_ROW - 4.0);
            svg.text(at, Anchor::Start, (SMALL, INK), "", place.label);
        }
        svg.finish()
    }

    /// The series with their pens: the palette in order, grey dashes for [`SeriesStyle::Truth`]; one without a name continues
    /// the one before it.
    fn drawn(&self) -> impl Iterator<Item = (&Series, Pen)> {
        let mut palette = PALETTE.into_iter().cycle();
        let mut patterns = DASHES.into_iter().cycle();
        let mut last = DASHES[0];
        self.series.iter().map(move |series| {
            let pen = match series.look {
                SeriesStyle::Truth => {
                    if !series.name.is_empty() {
                        last = patterns.next().unwrap_or(last);
                    }
                    Pen {
                        color: TRUTH,
                        dashes: last,
                    }
                }
                _ => Pen {
                    color: palette.next().unwrap_or(TRUTH),
                    dashes: "",
                },
            };
            (series, pen)
        })
    }

    fn keys(&self) -> Vec<Key<'_>> {
        let mut keys: Vec<_> = self
            .drawn()
            .filter(|(series, _)| !series.name.is_empty())
            .map(|(series, pen)| Key::Series(series, pen))
            .collect();
        for shade in &self.shades {
            if !shade.label.is_empty() && keys.iter().all(|key| key.label() != shade.label) {
                keys.push(Key::Shade(&shade.label));
            }
        }
        keys
    }

    /// Places each marker's name beside the top of its line.
    ///
    /// A name is written to the right of its line, in the highest free row.
    /// Names are placed from left to right. Each lies below the names that it would overlap
    /// and beside their lines; a name may overlap a line only at the right limit of the chart,
    /// where it is moved to the left.
    fn marker_places(&self, x: &Scale) -> Vec<MarkerPlace<'_>> {
        let mut shown: Vec<_> = self
            .markers
            .iter()
            .filter(|marker| x.shows(marker.x))
            .collect();
        shown.sort_by(|a, b| a.x.total_cmp(&b.x));
        let mut free_from: Vec<f64> = Vec::new();
        let mut places = Vec::with_capacity(shown.len());
        for marker in shown {
            let width = text_width(&marker.label, SMALL);
            let at = x.at(marker.x);
            let left = (at + 5.0).min(WIDTH - MARGIN - width).max(0.0);
            let free = free_from.iter().position(|&free| free <= left.min(at));
            let row = free.unwrap_or(free_from.len());
            free_from.resize(free_from.len().max(row + 1), 0.0);
            free_from[row] = left + width + 8.0;
            places.push(MarkerPlace {
                x: at,
                left,
                width,
                row: row as f64,
                label: &marker.label,
            });
        }
        places
    }
}

/// Position of a marker's name: pixels, and the row counted from the top.
struct MarkerPlace<'a> {
    x: f64,
    left: f64,
    width: f64,
    row: f64,
    label: &'a str,
}

/// Arranges legend entries in rows from `left`; returns the start and the row of each.
fn legend_places(keys: &[Key<'_>], left: f64, right: f64) -> Vec<(f64, f64)> {
    let (mut at, mut row) = (left, 0.0);
    let mut places = Vec::with_capacity(keys.len());
    for key in keys {
        let width = SWATCH + 7.0 + text_width(key.label(), SMALL) + 22.0;
        if at > left && at + width - 22.0 > right {
            (at, row) = (left, row + 1.0);
        }
        places.push((at, row));
        at += width;
    }
    places
}

fn draw_key(svg: &mut Svg, key: &Key<'_>, left: f64, middle: f64) {
    match *key {
        Key::Series(series, Pen { color, dashes }) => {
            if series.has_band() {
                svg.put(format_args!(
                    "<rect x=\"{left:.1}\" y=\"{:.1}\" width=\"{SWATCH}\" height=\"12\" fill=\"{color}\" fill-opacity=\"0.18\"/>",
                    middle - 6.0
                ));
            }
            let (from, to) = ((left, middle), (left + SWATCH, middle));
            match series.look {
                SeriesStyle::Steps | SeriesStyle::Line => svg.line(from, to, (2.0, color), ""),
                SeriesStyle::Truth => svg.line(from, to, (1.6, color), dashes),
                SeriesStyle::Dots => draw_dot(svg, left + SWATCH / 2.0, middle, color),
            }
        }
        Key::Shade(_) => svg.put(format_args!(
            "<rect x=\"{left:.1}\" y=\"{:.1}\" width=\"{SWATCH}\" height=\"12\" fill=\"{SHADE}\" stroke=\"#d0d0d0\" stroke-width=\"0.6\"/>",
            middle - 6.0
        )),
    }
    let at = (left + SWATCH + 7.0, middle + 4.2);
    svg.text(at, Anchor::Start, (SMALL, INK), "", key.label());
}

pub(super) fn draw_axes(
    svg: &mut Svg,
    x: &Scale,
    y: &Scale,
    (left, right): (f64, f64),
    (top, bottom): (f64, f64),
) {
    for (value, text) in &y.ticks {
        let at = y.at(*value);
        svg.line((left, at), (right, at), (1.0, GRID), "");
        svg.text(
            (left - 8.0, at + 4.2),
            Anchor::End,
            (SMALL, FAINT_INK),
            "",
            text,
        );
    }
    for (value, text) in &x.ticks {
        let at = x.at(*value);
        svg.line((at, top), (at, bottom), (0.6, GRID), "");
        svg.line((at, bottom), (at, bottom + 4.0), (1.0, FAINT_INK), "");
        svg.text(
            (at, bottom + 18.0),
            Anchor::Middle,
            (SMALL, FAINT_INK),
            "",
            text,
        );
    }
    svg.line((left, bottom), (right, bottom), (1.0, FAINT_INK), "");
    let middle = f64::midpoint(left, right);
    svg.text(
        (middle, bottom + 42.0),
        Anchor::Middle,
        (13.0, INK),
        "",
        &x.title,
    );
    let (at, middle) = (MARGIN + 8.0, f64::midpoint(top, bottom));
    let turned = format!(" transform=\"rotate(-90 {at:.1} {middle:.1})\"");
    svg.text((at, middle), Anchor::Middle, (13.0, INK), &turned, &y.title);
}

fn draw_dot(svg: &mut Svg, x: f64, y: f64, color: &str) {
    svg.put(format_args!(
        "<circle cx=\"{x:.2}\" cy=\"{y:.2}\" r=\"3\" fill=\"{color}\" stroke=\"#ffffff\" stroke-width=\"0.8\"/>"
    ));
}

/// Connects pixels to a path, by steps that hold from the left or by straight lines.
fn path(points: impl Iterator<Item = (f64, f64)>, steps: bool) -> String {
    let mut path = String::new();
    for (x, y) in points {
        path += &match (path.is_empty(), steps) {
            (true, _) => format!("M{x:.2} {y:.2}"),
            (false, true) => format!("H{x:.2}V{y:.2}"),
            (false, false) => format!("L{x:.2} {y:.2}"),
        };
    }
    path
}

fn draw_band(svg: &mut Svg, series: &Series, color: &str, x: &Scale, y: &Scale) {
    if !series.has_band() {
        return;
    }
    let steps = matches!(series.look, SeriesStyle::Steps | SeriesStyle::Truth);
    let upper = path(series.finite().map(|p| (x.at(p.x), y.at(p.high))), steps);
    // In the reverse direction a step changes its value before it continues, so it is written explicitly.
    let mut lower = String::new();
    let mut after: Option<f64> = None;
    for point in series.finite().rev() {
        let (at, low) = (x.at(point.x), y.at(point.low));
        if let (true, Some(after)) = (steps, after) {
            lower += &format!("L{after:.2} {low:.2}");
        }
        lower += &format!("L{at:.2} {low:.2}");
        after = Some(at);
    }
    svg.put(format_args!(
        "<path d=\"{upper}{lower}Z\" fill=\"{color}\" fill-opacity=\"0.18\"/>"
    ));
}

fn draw_series(svg: &mut Svg, series: &Series, pen: Pen, x: &Scale, y: &Scale) {
    let Pen { color, dashes } = pen;
    let points = series.finite().map(|point| (x.at(point.x), y.at(point.y)));
    let width = match series.look {
        SeriesStyle::Dots => {
            points.for_each(|(x, y)| draw_dot(svg, x, y, color));
            return;
        }
        SeriesStyle::Truth => 1.6,
        SeriesStyle::Steps | SeriesStyle::Line => 2.0,
    };
    let path = path(points, series.look != SeriesStyle::Line);
    svg.put(format_args!(
        "<path d=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"{width}\" stroke-linejoin=\"round\"{dashes}/>"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Unit;
    use crate::png::svg_to_png;
    use plimsoll_flow::CurvePoint;

    fn chart(series: Vec<Series>) -> Chart {
        Chart {
            title: "Title".to_owned(),
            subtitle: "Subtitle".to_owned(),
            x: Axis::new("Size", Unit::Bytes).up_to(1024.0),
            y: Axis::new("Miss ratio", Unit::Share).up_to(1.0),
            shades: Vec::new(),
            series,
            markers: Vec::new(),
        }
    }

    fn marker(x: f64, label: &str) -> Marker {
        let label = label.to_owned();
        Marker { x, label }
    }

    #[test]
    fn a_curve_becomes_steps_over_bytes_with_its_band() {
        let points = vec![
            CurvePoint::exact(PageCount(1), 1.0),
            CurvePoint {
                size: PageCount(2),
                miss_ratio: 0.5,
                low: 0.25,
                high: 0.75,
                misses: None,
            },
        ];
        let curve = MissRatioCurve::new(points, 10).unwrap();
        let series = Series::of_curve("LRU", &curve, PageSize::FOUR_KIB, 3 * 4096);
        let places = series.points.iter().map(|point| (point.x, point.y));
        assert_eq!(
            places.collect::<Vec<_>>(),
            [(0.0, 1.0), (4096.0, 1.0), (8192.0, 0.5), (12288.0, 0.5)]
        );
        assert!(series.has_band());
        let svg = chart(vec![series]).to_svg();
        assert_eq!(svg.matches("fill-opacity").count(), 2, "band and swatch");
    }

    #[test]
    fn a_step_holds_from_the_left_and_a_line_does_not() {
        let points = [(0.0, 3.0), (2.0, 1.0)];
        assert_eq!(path(points.into_iter(), true), "M0.00 3.00H2.00V1.00");
        assert_eq!(path(points.into_iter(), false), "M0.00 3.00L2.00 1.00");
    }

    #[test]
    fn colors_go_by_order_and_a_truth_takes_none() {
        let series = [SeriesStyle::Truth, SeriesStyle::Steps, SeriesStyle::Dots]
            .map(|look| Series::new("", look, [(0.0, 0.0)]));
        let chart = chart(series.to_vec());
        let colors: Vec<_> = chart.drawn().map(|(_, pen)| pen.color).collect();
        assert_eq!(colors, [TRUTH, PALETTE[0], PALETTE[1]]);
    }

    #[test]
    fn truths_with_names_differ_in_their_dashes() {
        let series =
            ["one", "", "two", ""].map(|name| Series::new(name, SeriesStyle::Truth, [(0.0, 0.0)]));
        let chart = chart(series.to_vec());
        let dashes: Vec<_> = chart.drawn().map(|(_, pen)| pen.dashes).collect();
        assert_eq!(dashes, [DASHES[0], DASHES[0], DASHES[1], DASHES[1]]);
    }

    #[test]
    fn names_of_markers_never_touch_each_other() {
        let mut chart = chart(Vec::new());
        chart.markers = (0..12)
            .map(|index| marker(f64::from(index) * 93.0, "working set of some MiB"))
            .chain([marker(5000.0, "beyond the axis")])
            .collect();
        let x = Scale::new(&chart.x, [].into_iter(), End::AtData, 8.0).laid(80.0, 728.0);
        let places = chart.marker_places(&x);
        assert_eq!(places.len(), 12);
        for (index, a) in places.iter().enumerate() {
            assert!(a.left >= 0.0 && a.left + a.width <= WIDTH);
            for b in places[..index].iter().filter(|b| b.row == a.row) {
                assert!(b.left + b.width < a.left);
            }
        }
    }

    #[test]
    fn the_legend_breaks_into_rows_within_the_picture() {
        let series = (0..9)
            .map(|index| {
                Series::new(
                    format!("a series of a long name {index}"),
                    SeriesStyle::Line,
                    [],
                )
            })
            .collect();
        let chart = chart(series);
        let keys = chart.keys();
        let places = legend_places(&keys, 80.0, 728.0);
        assert!(places.last().unwrap().1 > 1.0);
        for (key, (left, _)) in keys.iter().zip(&places) {
            assert!(left + SWATCH + 7.0 + text_width(key.label(), SMALL) <= 728.0);
        }
    }

    #[test]
    fn shades_of_one_label_share_a_legend_entry() {
        let mut chart = chart(Vec::new());
        chart.shades = [0.0, 100.0, 200.0]
            .map(|from| Shade {
                from,
                to: from + 50.0,
                label: "idle".to_owned(),
            })
            .to_vec();
        assert_eq!(chart.keys().len(), 1);
        assert_eq!(chart.to_svg().matches(SHADE).count(), 3 + 1);
    }

    #[test]
    fn every_chart_is_a_picture_whatever_its_data_and_names() {
        let odd = [
            (f64::NAN, 1.0),
            (1.0, f64::INFINITY),
            (5.0, -3.0),
            (1e300, 1e300),
        ];
        let ends = [None, Some(f64::NAN), Some(-1.0), Some(10.0)];
        let looks = [
            SeriesStyle::Steps,
            SeriesStyle::Line,
            SeriesStyle::Dots,
            SeriesStyle::Truth,
        ];
        for ((look, to), count) in looks.into_iter().zip(ends).zip([4, 2, 0, 3]) {
            let points = odd.iter().take(count).copied();
            let mut chart = chart(vec![Series::new("<vm & \u{1}\">", look, points)]);
            chart.title = "</svg>".to_owned();
            chart.markers = vec![marker(f64::NAN, "no place"), marker(1.0, "<here>")];
            (chart.x.to, chart.y.to) = (to, to);
            assert!(svg_to_png(&chart.to_svg(), 0.5).is_ok());
        }
    }
}
