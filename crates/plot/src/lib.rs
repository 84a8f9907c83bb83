//! Charts of curves and time series for papers and reports.
//!
//! `to_svg` of a [`Chart`] or a [`HeatChart`] writes
//! scalable vector graphics, and [`encode`] returns them unchanged or rasterised.
//! A [`Figure`] is a result that has such a picture besides a table, CSV and JSON.
//! Text is measured and rasterised with an embedded font, so that a
//! machine without fonts draws the same picture.
//!
//! Colours are those of Okabe and Ito, which colour-blind readers can distinguish, also
//! in print. Legend and marker names are
//! placed above the data, never over it.
//!
//! Values are in base units: bytes, seconds, fractions of 1. Axes choose their own
//! units and round ticks. Points that are not finite are left out.
#![forbid(unsafe_code)]

mod axis;
mod chart;
mod figure;
mod heat_chart;
mod png;
mod svg;

pub use axis::{Axis, Unit};
pub use chart::{Chart, Marker, Point, Series, SeriesStyle, Shade};
pub use figure::Figure;
pub use heat_chart::HeatChart;
pub use png::{PlotError, encode};
pub use svg::EscapedText;
