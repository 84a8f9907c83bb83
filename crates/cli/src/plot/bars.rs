//! Bars from left to right: a few costs beside each other and beside a bound.

use super::axis::{Axis, End, Scale};
use super::svg::{Anchor, FAINT_INK, GRID, INK, MARGIN, PALETTE, SMALL, Svg, WIDTH, text_width};

const ROW: f64 = 34.0;
const BAR: f64 = 18.0;

/// A few values of one kind, each a bar with its number.
#[derive(Debug, Clone, PartialEq)]
pub struct BarChart {
    /// What the picture shows.
    pub title: String,
    /// How it was measured.
    pub subtitle: String,
    /// What the bars measure.
    pub axis: Axis,
    /// The bars from top to bottom.
    pub bars: Vec<Bar>,
    /// A bound that bars should not pass, with its name.
    pub limit: Option<(f64, String)>,
}

/// A value with its spread.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// Its name, to the left.
    pub label: String,
    /// Its length.
    pub value: f64,
    /// Its number as text, to the right.
    pub text: String,
    /// Lower end of the spread; `value` if there is none.
    pub low: f64,
    /// Upper end of the spread; `value` if there is none.
    pub high: f64,
}

impl BarChart {
    /// Draws the chart; a bar that is not finite has its name and number but no length.
    #[must_use]
    pub fn to_svg(&self) -> String {
        let finite = |bar: &Bar| {
            [bar.value, bar.low, bar.high]
                .into_iter()
                .all(f64::is_finite)
        };
        let values = self
            .bars
            .iter()
            .filter(|bar| finite(bar))
            .flat_map(|bar| [bar.value, bar.low, bar.high])
            .chain(self.limit.iter().map(|(value, _)| *value));
        let widest = |texts: &mut dyn Iterator<Item = &str>| {
            texts
                .map(|text| text_width(text, SMALL))
                .fold(0.0, f64::max)
        };
        let labels = widest(&mut self.bars.iter().map(|bar| bar.label.as_str()));
        let numbers = widest(&mut self.bars.iter().map(|bar| bar.text.as_str()));
        let left = MARGIN + labels + 12.0;
        let right = WIDTH - MARGIN - numbers - 12.0;
        let x = Scale::new(&self.axis, values, End::AtTick, 6.0).laid(left, right);

        let width = WIDTH - 2.0 * MARGIN;
        let mut heading = Svg::new(WIDTH, 0.0, "");
        let heading_height = heading.heading(MARGIN, width, &self.title, &self.subtitle);
        let limit_height = if self.limit.is_some() { 18.0 } else { 0.0 };
        let top = heading_height + 12.0 + limit_height;
        let bottom = top + ROW * self.bars.len() as f64 + 4.0;
        let mut svg = Svg::new(WIDTH, bottom + 62.0, &self.title);
        svg.heading(MARGIN, width, &self.title, &self.subtitle);
        for (value, text) in &x.ticks {
            let at = x.at(*value);
            svg.line((at, top), (at, bottom), (1.0, GRID), "");
            svg.text(
                (at, bottom + 18.0),
                Anchor::Middle,
                (SMALL, FAINT_INK),
                "",
                text,
            );
        }
        for (index, bar) in self.bars.iter().enumerate() {
            let middle = top + ROW * (index as f64 + 0.5) + 2.0;
            let at = (left - 10.0, middle + 4.2);
            svg.text(at, Anchor::End, (SMALL, INK), "", &bar.label);
            svg.text(
                (right + 12.0, middle + 4.2),
                Anchor::Start,
                (SMALL, INK),
                "",
                &bar.text,
            );
            if !finite(bar) {
                continue;
            }
            let (zero, end) = (x.within(0.0), x.within(bar.value));
            svg.put(format_args!(
                "<rect x=\"{:.2}\" y=\"{:.2}\" width=\"{:.2}\" height=\"{BAR}\" fill=\"{}\"/>",
                zero.min(end),
                middle - BAR / 2.0,
                (end - zero).abs(),
                PALETTE[0]
            ));
            if bar.low < bar.high {
                let (low, high) = (x.within(bar.low), x.within(bar.high));
                svg.line((low, middle), (high, middle), (1.2, INK), "");
                for end in [low, high] {
                    svg.line((end, middle - 4.0), (end, middle + 4.0), (1.2, INK), "");
                }
            }
        }
        let zero = x.within(0.0);
        svg.line((zero, top), (zero, bottom), (1.0, FAINT_INK), "");
        if let Some((value, label)) = &self.limit
            && x.shows(*value)
        {
            let at = x.at(*value);
            svg.line(
                (at, top - 4.0),
                (at, bottom),
                (1.4, PALETTE[1]),
                " stroke-dasharray=\"5 3\"",
            );
            let half = text_width(label, SMALL) / 2.0;
            let middle = at.clamp(MARGIN + half, (WIDTH - MARGIN - half).max(MARGIN + half));
            svg.text(
                (middle, top - 9.0),
                Anchor::Middle,
                (SMALL, PALETTE[1]),
                "",
                label,
            );
        }
        let middle = f64::midpoint(left, right);
        svg.text(
            (middle, bottom + 42.0),
            Anchor::Middle,
            (13.0, INK),
            "",
            &x.title,
        );
        svg.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::{Unit, svg_to_png};

    #[test]
    fn bars_share_one_scale_and_odd_ones_have_no_length() {
        let bar = |value: f64| Bar {
            label: "<vm>".to_owned(),
            value,
            text: format!("{value}"),
            low: value - 0.1,
            high: value + 0.1,
        };
        let chart = BarChart {
            title: "Cost".to_owned(),
            subtitle: String::new(),
            axis: Axis::new("Slowdown", Unit::Share),
            bars: [0.5, -0.25, f64::NAN].map(bar).to_vec(),
            limit: Some((0.4, "bound".to_owned())),
        };
        let svg = chart.to_svg();
        let widths: Vec<f64> = svg
            .lines()
            .filter(|line| line.starts_with("<rect") && line.contains(PALETTE[0]))
            .map(|line| line.split('"').nth(5).unwrap().parse().unwrap())
            .collect();
        assert_eq!(widths.len(), 2);
        assert!((widths[0] - 2.0 * widths[1]).abs() < 0.05, "{widths:?}");
        assert!(svg_to_png(&svg, 0.5).is_ok());
    }
}
