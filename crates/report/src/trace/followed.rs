//! The curve of the last while of a stream, as it comes.

use std::time::Duration;

use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, PageSize};
use plimsoll_output::{Format, grouped, json_line, local_time};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::curve_json::{CurveJson, FollowedCurve};
use plimsoll_protocol::size::ByteSize;

use super::{least_misses, points_csv};

/// A window of a stream.
#[derive(Debug)]
pub struct FollowedReport {
    /// Name of the stream.
    pub name: String,
    /// Bytes in a page.
    pub page_size: PageSize,
    /// End of the window.
    pub unix_ms: u64,
    /// Its length.
    pub length: Duration,
    /// References in it.
    pub references: u64,
    /// Of the whole curve, not of the selected points.
    pub working_set: Option<PageCount>,
    /// The largest size of the whole curve.
    pub end: Option<CurvePoint>,
    /// The points selected; `None` if no reference was sampled.
    pub curve: Option<MissRatioCurve>,
    /// Sizes whose ratios the table shows.
    pub sizes: Vec<PageCount>,
    /// Whether heads come before it: it is the first window.
    pub has_head: bool,
}

impl FollowedReport {
    /// The window as a table, CSV or a line of JSON.
    ///
    /// # Errors
    ///
    /// If its length is beyond what JSON has.
    pub fn text(&self, format: Format) -> anyhow::Result<String> {
        let unix_ms = self.unix_ms;
        let points = || self.curve.iter().flat_map(MissRatioCurve::points);
        let mut text = String::new();
        match format {
            Format::Json => {
                let curve = self
                    .curve
                    .as_ref()
                    .map(|curve| CurveJson::new(&self.name, self.page_size, None, curve));
                let followed = FollowedCurve {
                    schema: SCHEMA,
                    unix_ms,
                    window_ms: u64::try_from(self.length.as_millis())?,
                    references: self.references,
                    curve,
                };
                text = json_line(&followed)?;
            }
            Format::Csv => {
                let keys = [unix_ms, self.references].map(|key| key.to_string());
                let points = points().map(|point| (keys.clone(), point));
                text = points_csv(["unix_ms", "references"], points);
                if !self.has_head {
                    text = text.split_off(text.find('\n').map_or(0, |end| end + 1));
                }
            }
            _ => {
                let bytes = |pages: PageCount| ByteSize(pages.to_bytes(self.page_size)).rounded();
                if self.has_head {
                    text.push_str(
                        "time                   references    per second   working set  least misses",
                    );
                    for &size in &self.sizes {
                        text.push_str(&format!("  {:>10}", bytes(size)));
                    }
                    text.push('\n');
                }
                let set = match (&self.curve, self.working_set) {
                    (None, _) => String::new(),
                    (Some(_), Some(size)) => bytes(size),
                    (Some(_), None) => "more".to_owned(),
                };
                let rate = self.references as f64 / self.length.as_secs_f64();
                text.push_str(&format!(
                    "{}  {:>12}  {:>12}  {set:>12}",
                    local_time(unix_ms),
                    grouped(self.references as f64),
                    grouped(rate.round())
                ));
                if let Some(end) = &self.end {
                    text.push_str(&format!("  {:>12}", least_misses(end)));
                    for point in points().filter(|_| !self.sizes.is_empty()) {
                        text.push_str(&format!("  {:>8.2} %", point.miss_ratio * 100.0));
                    }
                }
                text.push('\n');
                text = text.replace('\u{a0}', " ");
            }
        }
        Ok(text)
    }
}
