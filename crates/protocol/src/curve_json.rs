//! A curve as JSON, schema 1: what `mrc -o json` and `attach --curve` write.
//!
//! ```json
//! {"schema":1,"vm":"web","page_bytes":4096,"references":9,"baseline_pages":null,
//!  "points":[{"size_pages":2,"miss_ratio":0.5,"low":0.5,"high":0.5}]}
//! ```
//!
//! Points rise in size; between two of them the curve holds the left one's ratio. The points of a running VM's curve
//! also have `misses_per_second`, `misses_low_per_second` and `misses_high_per_second`, and the curve has
//! `vcpu_seconds_per_second` if that is known. With its `log_errors_permille`, one for each of the first points, the
//! misses at two sizes are compared more exactly than by their bands.

use plimsoll_flow::{
    CurveError, CurvePoint, LogErrors, MissRatioCurve, MissesPerSecond, PageCount, PageSize,
    PageSizeError,
};
use serde::{Deserialize, Serialize};

/// Version of the form; a reader refuses any other.
pub const SCHEMA: u32 = 1;

/// A VM's curve.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CurveJson {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the VM, or of the trace.
    pub vm: String,
    /// Bytes in a page.
    pub page_bytes: u64,
    /// References behind the curve, as [`MissRatioCurve::references`] counts them.
    pub references: u64,
    /// Memory the VM had while it was observed, in pages; `null` if unknown.
    pub baseline_pages: Option<u64>,
    /// CPU time of the VM's vCPUs, all together, per second of wall time while it was observed: misses per second divided
    /// by it are misses per second of vCPU time. Absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpu_seconds_per_second: Option<f64>,
    /// By how many pages all sizes may be too large; absent if they are certain. See [`MissRatioCurve::uncertain`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub uncertain_pages: u64,
    /// The curve's steps, rising in size.
    pub points: Vec<PointJson>,
    /// Of the first points: the independent parts of the error of the logarithm of the misses, in thousandths, as
    /// [`LogErrors`]. Absent if unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<Vec<i16>>))]
    pub log_errors_permille: Vec<LogErrors>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// What each of several curves of a trace is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CurvesBy {
    /// A device, volume, tenant or client.
    Device,
    /// An interval of time.
    Interval,
}

impl CurvesBy {
    /// Its word in JSON and for readers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Interval => "interval",
        }
    }
}

/// The curve of the last while of a stream: a line of `mrc --follow -o json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FollowedCurve {
    /// [`SCHEMA`].
    pub schema: u32,
    /// End of the window.
    pub unix_ms: u64,
    /// Its length.
    pub window_ms: u64,
    /// References in it.
    pub references: u64,
    /// Their curve; `null` if none was sampled.
    pub curve: Option<CurveJson>,
}

/// A step of a curve.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PointJson {
    /// Size in pages from which the ratio holds.
    pub size_pages: u64,
    /// Share of references that miss, 0.0 to 1.0.
    pub miss_ratio: f64,
    /// Lower limit of the confidence band, 0.0 to `miss_ratio`.
    pub low: f64,
    /// Upper limit of the confidence band, `miss_ratio` to 1.0.
    pub high: f64,
    /// Misses per second of wall time; absent for references without a clock.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub misses: Option<MissesJson>,
}

/// Misses per second of wall time, with the limits of their 95 % confidence band.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MissesJson {
    /// The estimate.
    pub misses_per_second: f64,
    /// Lower limit of the band.
    pub misses_low_per_second: f64,
    /// Upper limit of the band.
    pub misses_high_per_second: f64,
}

impl From<MissesPerSecond> for MissesJson {
    fn from(misses: MissesPerSecond) -> Self {
        Self {
            misses_per_second: misses.expected,
            misses_low_per_second: misses.low,
            misses_high_per_second: misses.high,
        }
    }
}

impl From<MissesJson> for MissesPerSecond {
    fn from(misses: MissesJson) -> Self {
        Self {
            expected: misses.misses_per_second,
            low: misses.misses_low_per_second,
            high: misses.misses_high_per_second,
        }
    }
}

/// Why a curve in JSON is not valid.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CurveJsonError {
    /// The curve has another schema version.
    #[error("the curve has schema {found}; only schema {SCHEMA} is supported")]
    Schema {
        /// The schema version of the curve.
        found: u32,
    },
    /// An invalid page size.
    #[error(transparent)]
    PageSize(#[from] PageSizeError),
    /// Invalid points, which are counted from 0.
    #[error(transparent)]
    Curve(#[from] CurveError),
    /// Errors of points that do not exist.
    #[error(
        "row {points} of log_errors_permille: there are only {points} points, and each row is of one"
    )]
    LogErrors {
        /// Number of points, and index of the first row of none, from 0.
        points: usize,
    },
}

impl CurveJson {
    /// Converts the curve of the VM called `vm`, which had `baseline` memory if that is known.
    pub fn new(
        vm: impl Into<String>,
        page_size: PageSize,
        baseline: Option<PageCount>,
        curve: &MissRatioCurve,
    ) -> Self {
        Self {
            schema: SCHEMA,
            vm: vm.into(),
            page_bytes: page_size.bytes(),
            references: curve.references(),
            baseline_pages: baseline.map(|pages| pages.0),
            vcpu_seconds_per_second: curve.vcpus(),
            uncertain_pages: curve.uncertain().0,
            points: curve.points().iter().map(PointJson::from).collect(),
            log_errors_permille: curve.log_errors().to_vec(),
        }
    }

    /// The miss ratio at `size_pages`: that of the last point up to there, and 1.0 before the first.
    pub fn miss_ratio(&self, size_pages: u64) -> f64 {
        let below = self
            .points
            .partition_point(|point| point.size_pages <= size_pages);
        let point = below.checked_sub(1).map(|at| &self.points[at]);
        point.map_or(1.0, |point| point.miss_ratio)
    }

    /// Misses per second at `size_pages`; `None` without a clock, and below the first point.
    pub fn misses_at(&self, size_pages: u64) -> Option<MissesJson> {
        let below = self
            .points
            .partition_point(|point| point.size_pages <= size_pages);
        self.points[below.checked_sub(1)?].misses
    }

    /// Converts to a curve whose sizes are pages of [`page_bytes`](Self::page_bytes).
    ///
    /// # Errors
    ///
    /// [`CurveJsonError`] for another schema, an invalid page size, invalid points, or more errors than points.
    pub fn to_curve(&self) -> Result<MissRatioCurve, CurveJsonError> {
        if self.schema != SCHEMA {
            return Err(CurveJsonError::Schema { found: self.schema });
        }
        PageSize::new(self.page_bytes)?;
        let points = self.points.iter().map(|point| CurvePoint {
            size: PageCount(point.size_pages),
            miss_ratio: point.miss_ratio,
            low: point.low,
            high: point.high,
            misses: point.misses.map(MissesPerSecond::from),
        });
        let curve = MissRatioCurve::new(points.collect(), self.references)?;
        let points = self.points.len();
        if self.log_errors_permille.len() > points {
            return Err(CurveJsonError::LogErrors { points });
        }
        Ok(curve
            .with_vcpus(self.vcpu_seconds_per_second)
            .with_log_errors(self.log_errors_permille.clone())
            .with_uncertain(PageCount(self.uncertain_pages)))
    }
}

impl From<&CurvePoint> for PointJson {
    fn from(point: &CurvePoint) -> Self {
        Self {
            size_pages: point.size.0,
            miss_ratio: point.miss_ratio,
            low: point.low,
            high: point.high,
            misses: point.misses.map(MissesJson::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::LOG_ERRORS;

    #[test]
    fn the_json_is_the_documented_one() {
        let points = vec![
            CurvePoint::exact(PageCount(2), 0.5),
            CurvePoint {
                size: PageCount(8),
                miss_ratio: 0.25,
                low: 0.125,
                high: 0.375,
                misses: None,
            },
        ];
        let curve = MissRatioCurve::new(points, 9).unwrap();
        let page_size = PageSize::FOUR_KIB;
        let json = CurveJson::new("web", page_size, Some(PageCount(512)), &curve);
        let ratios = [0, 1, 2, 7, 8, u64::MAX].map(|size| json.miss_ratio(size));
        assert_eq!(ratios, [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]);
        let text = serde_json::to_string(&json).unwrap();
        assert_eq!(
            text,
            r#"{"schema":1,"vm":"web","page_bytes":4096,"references":9,"baseline_pages":512,"points":[{"size_pages":2,"miss_ratio":0.5,"low":0.5,"high":0.5},{"size_pages":8,"miss_ratio":0.25,"low":0.125,"high":0.375}]}"#
        );
        assert_eq!(serde_json::from_str::<CurveJson>(&text).unwrap(), json);
        let unknown = serde_json::to_string(&CurveJson::new("web", page_size, None, &curve));
        assert!(unknown.unwrap().contains(r#""baseline_pages":null"#));
    }

    #[test]
    fn misses_per_second_are_read_as_they_were_written() {
        let points = vec![
            CurvePoint::exact(PageCount(2), 0.5),
            CurvePoint::exact(PageCount(8), 0.25),
        ];
        let curve = MissRatioCurve::new(points, 9).unwrap();
        let curve = curve.with_references_per_second(30.0).with_vcpus(Some(2.0));
        let errors = vec![std::array::from_fn(|part| i16::try_from(part).unwrap() - 8)];
        let known = curve.clone().with_log_errors(errors);
        let known = known.shifted(PageCount(1), PageCount(4));
        let json = CurveJson::new("web", PageSize::FOUR_KIB, None, &known);
        let text = serde_json::to_string(&json).unwrap();
        assert!(text.contains(r#""uncertain_pages":3,"points""#), "{text}");
        let errors = r#""log_errors_permille":[[-8,-7,-6,-5,-4,-3,-2,-1,0,1,2,3,4,5,6,7,8]]}"#;
        assert!(text.ends_with(errors), "{text}");
        let read: CurveJson = serde_json::from_str(&text).unwrap();
        assert_eq!(read.to_curve(), Ok(known));
        let json = CurveJson::new("web", PageSize::FOUR_KIB, None, &curve);
        let text = serde_json::to_string(&json).unwrap();
        assert_eq!(
            text,
            r#"{"schema":1,"vm":"web","page_bytes":4096,"references":9,"baseline_pages":null,"vcpu_seconds_per_second":2.0,"points":[{"size_pages":2,"miss_ratio":0.5,"low":0.5,"high":0.5,"misses_per_second":15.0,"misses_low_per_second":15.0,"misses_high_per_second":15.0},{"size_pages":8,"miss_ratio":0.25,"low":0.25,"high":0.25,"misses_per_second":7.5,"misses_low_per_second":7.5,"misses_high_per_second":7.5}]}"#
        );
        let read: CurveJson = serde_json::from_str(&text).unwrap();
        assert_eq!(read.to_curve(), Ok(curve));
        let rising = text.replace("\"misses_per_second\":7.5", "\"misses_per_second\":16.0");
        let rising: CurveJson = serde_json::from_str(&rising).unwrap();
        assert!(rising.to_curve().is_err());
    }

    #[test]
    fn errors_of_points_that_do_not_exist_are_refused() {
        let points = vec![CurvePoint::exact(PageCount(2), 0.5)];
        let curve = MissRatioCurve::new(points, 9).unwrap();
        let mut json = CurveJson::new("web", PageSize::FOUR_KIB, None, &curve);
        json.log_errors_permille = vec![[7; LOG_ERRORS]];
        assert_eq!(json.to_curve().unwrap().log_errors(), [[7; LOG_ERRORS]]);
        json.log_errors_permille.push([7; LOG_ERRORS]);
        assert_eq!(
            json.to_curve(),
            Err(CurveJsonError::LogErrors { points: 1 })
        );
    }
}
