//! Pictures of curves and of time series, fit for a paper.
//!
//! There is one way to a picture: `to_svg` of a [`Chart`] or a [`HeatChart`] writes
//! scalable vector graphics, and [`encode`] writes them as they are or turns them into pixels.
//! Text is measured and rasterised with a font inside the program, so that a
//! machine without fonts draws the same picture.
//!
//! Colours are those of Okabe and Ito, which stay apart for colour-blind readers
//! and in print. What belongs to the reader's orientation (legend, names of
//! markers) stands above the data, never over it.
//!
//! Values are in base units: bytes, seconds, shares of 1. Axes choose their own
//! units and round ticks. Points that are not finite are left out.
#![forbid(unsafe_code)]

mod axis;
mod chart;
mod heat_chart;
mod png;
mod svg;

pub use axis::{Axis, Unit};
pub use chart::{Chart, Look, Marker, Point, Series, Shade};
pub use heat_chart::HeatChart;
pub use png::{PlotError, encode};
pub use svg::Escaped;
