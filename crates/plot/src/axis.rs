//! Axes: unit, range and round ticks.

use plimsoll_output::grouped;

/// The unit of an axis; values are in the base unit named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, written in binary units with ticks at powers of two.
    Bytes,
    /// Fractions of 1, written in percent.
    Share,
    /// Seconds, written in seconds, minutes or hours.
    Seconds,
    /// Plain numbers.
    Count,
}

/// A side of a chart.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// What is measured, without its unit.
    pub label: String,
    /// The unit of its values.
    pub unit: Unit,
    /// Smallest value shown; by default 0, or the minimum of the data if that is negative.
    pub from: Option<f64>,
    /// Largest value shown; by default a round value above the maximum of the data.
    pub to: Option<f64>,
}

impl Axis {
    /// Returns an axis whose range follows the data.
    pub fn new(label: impl Into<String>, unit: Unit) -> Self {
        Self {
            label: label.into(),
            unit,
            from: None,
            to: None,
        }
    }

    /// Returns the same axis ending at `to`.
    #[must_use]
    pub fn up_to(self, to: f64) -> Self {
        Self {
            to: Some(to),
            ..self
        }
    }
}

/// An axis laid along a line of pixels.
#[derive(Debug)]
pub(super) struct Scale {
    /// Label with the unit the ticks are written in.
    pub(super) title: String,
    /// Value and text of each tick, rising.
    pub(super) ticks: Vec<(f64, String)>,
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

/// How the end of an axis without a fixed end follows the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// At the last value.
    AtData,
    /// At the first tick that is not below the last value.
    AtTick,
}

impl Scale {
    /// Fits `axis` around the finite ones of `values`, with at most about `ticks_max` ticks.
    pub(super) fn new(
        axis: &Axis,
        values: impl Iterator<Item = f64>,
        end: End,
        ticks_max: f64,
    ) -> Self {
        let (least, most) = values
            .filter(|value| value.is_finite())
            .fold((0.0f64, 0.0f64), |(least, most), value| {
                (least.min(value), most.max(value))
            });
        let given = |value: Option<f64>| value.filter(|value| value.is_finite());
        let mut from = given(axis.from).unwrap_or(least);
        let mut to = given(axis.to).unwrap_or(most);
        if to <= from {
            to = from + 1.0;
        }
        let (suffix, factor) = written_unit(axis.unit, from.abs().max(to.abs()));
        let step = round_step(axis.unit, (to - from) / factor / ticks_max) * factor;
        if axis.from.is_none() {
            from = (from / step).floor() * step;
        }
        if axis.to.is_none() && end == End::AtTick {
            // A small tolerance, so that 100 % does not get an empty row above it.
            to = (to / step - 1e-9).ceil() * step;
        }
        let mut ticks = Vec::new();
        let mut index = (from / step - 1e-9).ceil();
        while index * step <= to + 1e-9 * step {
            let number = grouped(index * step / factor);
            let text = match axis.unit {
                Unit::Share => format!("{number}\u{a0}%"),
                _ => number,
            };
            ticks.push((index * step, text));
            index += 1.0;
        }
        let title = match suffix {
            "" => axis.label.clone(),
            suffix => format!("{} ({suffix})", axis.label),
        };
        Self {
            title,
            ticks,
            from,
            to,
            start: 0.0,
            end: 1.0,
        }
    }

    /// Maps the axis to the pixels from `start` to `end`; `end` may be smaller than `start`.
    pub(super) fn laid(self, start: f64, end: f64) -> Self {
        Self { start, end, ..self }
    }

    /// The pixel of a value.
    pub(super) fn at(&self, value: f64) -> f64 {
        self.start + (value - self.from) / (self.to - self.from) * (self.end - self.start)
    }

    /// The pixel of a value, or of the nearest end of the axis for a value outside it.
    pub(super) fn within(&self, value: f64) -> f64 {
        self.at(value.clamp(self.from, self.to))
    }

    /// Whether a value lies within the axis.
    pub(super) fn shows(&self, value: f64) -> bool {
        (self.from..=self.to).contains(&value)
    }
}

/// Returns the name and the size of the unit in which values up to `most` are written.
fn written_unit(unit: Unit, most: f64) -> (&'static str, f64) {
    const BYTES: [(&str, f64); 6] = [
        ("PiB", (1u64 << 50) as f64),
        ("TiB", (1u64 << 40) as f64),
        ("GiB", (1u64 << 30) as f64),
        ("MiB", (1u64 << 20) as f64),
        ("KiB", (1u64 << 10) as f64),
        ("bytes", 1.0),
    ];
    const SECONDS: [(&str, f64); 3] = [("h", 3600.0), ("min", 60.0), ("s", 1.0)];
    // A unit is chosen if the range has enough of them for round ticks: 1536 MiB
    // reads better than 1.5 GiB beside 0.75.
    let (units, enough) = match unit {
        Unit::Bytes => (&BYTES[..], 4.0),
        Unit::Seconds => (&SECONDS[..], 5.0),
        Unit::Share => return ("", 0.01),
        Unit::Count => return ("", 1.0),
    };
    let fits = units.iter().find(|(_, size)| most >= enough * size);
    fits.copied().unwrap_or(units[units.len() - 1])
}

/// Returns the smallest round number that is at least `least`.
fn round_step(unit: Unit, least: f64) -> f64 {
    let least = least.max(f64::MIN_POSITIVE);
    if unit == Unit::Bytes {
        return least.log2().ceil().exp2();
    }
    let power = 10f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0];
    let step = steps
        .into_iter()
        .find(|step| step * power >= least * (1.0 - 1e-9));
    step.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ticks(unit: Unit, values: &[f64]) -> (String, String) {
        let axis = Axis::new("Size", unit);
        let scale = Scale::new(&axis, values.iter().copied(), End::AtTick, 6.0);
        let texts: Vec<_> = scale.ticks.into_iter().map(|(_, text)| text).collect();
        (scale.title, texts.join(" ").replace('\u{a0}', "_"))
    }

    fn known(title: &str, texts: &str) -> (String, String) {
        (title.to_owned(), texts.to_owned())
    }

    #[test]
    fn ticks_are_round_in_the_unit_they_are_written_in() {
        let mib = f64::exp2(20.0);
        assert_eq!(
            ticks(Unit::Bytes, &[700.0 * mib]),
            known("Size (MiB)", "0 128 256 384 512 640 768")
        );
        assert_eq!(
            ticks(Unit::Bytes, &[8192.0 * mib]),
            known("Size (GiB)", "0 2 4 6 8")
        );
        assert_eq!(
            ticks(Unit::Share, &[0.97]),
            known("Size", "0_% 20_% 40_% 60_% 80_% 100_%")
        );
        assert_eq!(
            ticks(Unit::Share, &[0.011, -0.002]),
            known("Size", "\u{2212}0.5_% 0_% 0.5_% 1_% 1.5_%")
        );
        assert_eq!(
            ticks(Unit::Seconds, &[119.0]),
            known("Size (s)", "0 20 40 60 80 100 120")
        );
        assert_eq!(
            ticks(Unit::Count, &[60_000.0]),
            known("Size", "0 10_000 20_000 30_000 40_000 50_000 60_000")
        );
    }

    #[test]
    fn nothing_to_show_still_makes_an_axis() {
        for values in [&[][..], &[0.0], &[f64::NAN, f64::INFINITY]] {
            assert_eq!(ticks(Unit::Count, values).1, "0 0.2 0.4 0.6 0.8 1");
        }
    }

    #[test]
    fn minutes_and_hours_take_over_from_seconds() {
        let unit = |seconds: f64| ticks(Unit::Seconds, &[seconds]).0;
        assert_eq!(unit(240.0), "Size (s)");
        assert_eq!(unit(1200.0), "Size (min)");
        assert_eq!(unit(20_000.0), "Size (h)");
    }

    proptest! {
        #[test]
        fn ticks_rise_are_few_and_lie_on_the_axis(
            values in prop::collection::vec(-1e12f64..1e15, 0..8),
            unit in prop::sample::select(vec![Unit::Bytes, Unit::Share, Unit::Seconds, Unit::Count]),
        ) {
            let axis = Axis::new("", unit);
            let scale = Scale::new(&axis, values.iter().copied(), End::AtTick, 6.0);
            prop_assert!((2..=9).contains(&scale.ticks.len()), "{:?}", scale.ticks);
            let scale = scale.laid(0.0, 100.0);
            for pair in scale.ticks.windows(2) {
                prop_assert!(pair[0].0 < pair[1].0);
            }
            for value in values.iter().chain(scale.ticks.iter().map(|(value, _)| value)) {
                prop_assert!((-1e-6..=100.0 + 1e-6).contains(&scale.at(*value)));
            }
        }
    }
}
