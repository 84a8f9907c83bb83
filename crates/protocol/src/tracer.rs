//! A tracer's reports: the lines of `plimsoll attach -o json`, one per period and a final one for the whole run.
//!
//! `attach` writes [`TracerLine`]s and the daemon reads them. A field that is missing, renamed or in another unit is
//! therefore an error of the reader, never a zero.

use plimsoll_flow::{SampleCounts, TraceMethod, WorkingSetBound};
use serde::{Deserialize, Serialize};

use crate::curve_json::{CurveJson, SCHEMA};

/// A line of a tracer's output.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum TracerLine {
    /// A period has ended.
    Period(Box<PeriodLine>),
    /// Tracing has ended.
    Final(Box<FinalLine>),
}

/// The report of one period.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PeriodLine {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the VM.
    pub vm: String,
    /// How pages were observed.
    pub method: TraceMethod,
    /// Bytes in a page.
    pub page_bytes: u64,
    /// Number of the period, from 0.
    pub period: u64,
    /// Length of the period.
    pub seconds: f64,
    /// Part of the period in which pages were armed.
    pub window_seconds: f64,
    /// Working set; `null` if the VM was idle.
    pub working_set_pages: Option<u64>,
    /// Whether the working set is an estimate or only a bound.
    pub working_set_bound: Option<WorkingSetBound>,
    /// Lower limit of its confidence band (95 %).
    pub working_set_low_pages: Option<u64>,
    /// Upper limit of the same; `null` if nothing bounds it.
    pub working_set_high_pages: Option<u64>,
    /// Fraction of the VM's pages that was armed, above 0.0 to 1.0.
    pub tracking_rate: f64,
    /// With traps: capacity of the hot set, in armed pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hot_set_pages: Option<u32>,
    /// With scans: armed pages touched between two scans, whose order is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan_resolution_pages: Option<u32>,
    /// Pages of the VM that have contents.
    pub populated_pages: u64,
    /// Armed pages.
    pub tracked_pages: u64,
    /// Armed pages that were referenced at least once.
    pub distinct_pages: u64,
    /// References recorded by traps; 0 with scans.
    pub traps: u64,
    /// With scans: pages that scans found touched, each once per scan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub touches: Option<u64>,
    /// With scans: scans in this period.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scans: Option<u64>,
    /// With scans: CPU time of the VM from one scan to the next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan_interval_seconds: Option<f64>,
    /// With first touches: samples by what became of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<SampleCounts>,
    /// Traps that were writes; 0 with scans.
    pub write_traps: u64,
    /// With scans: touches that were writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_touches: Option<u64>,
    /// With idle page tracking: tracked pages that were swapped out when the sample was drawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swapped_pages: Option<u64>,
    /// With idle page tracking: tracked pages in huge pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_pages: Option<u64>,
    /// With idle page tracking: tracked pages of the page cache or of shared memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_pages: Option<u64>,
    /// Traps that recorded nothing.
    pub stray_traps: u64,
    /// Pages made inaccessible.
    pub rearmed_pages: u64,
    /// Time of the VM spent in traps.
    pub trap_seconds: f64,
    /// CPU time spent on arming and disarming pages.
    pub rearm_seconds: f64,
    /// Time spent on finding the VM's pages.
    pub collect_seconds: f64,
    /// Time taken from the VM over the time that its vCPUs had.
    pub overhead_ratio: f64,
    /// Whether the budget ended the window before the period ended.
    pub budget_ran_out: bool,
    /// References that may be missing.
    pub lost: u64,
    /// First touches of empty pages, which no tracer observes.
    pub first_touches_unseen: u64,
    /// Why this backend shows little of this VM with its budget, and what to change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// With `--compare`: mean absolute error of AET against exact LRU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_absolute_error: Option<f64>,
    /// With `--curve`: the curve of the period, or of its window; `null` if nothing was used twice.
    #[serde(
        default,
        deserialize_with = "present",
        skip_serializing_if = "Option::is_none"
    )]
    pub curve: Option<Option<CurveJson>>,
    /// With `--backend auto`, in the first period: why this backend was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice: Option<Vec<CandidateLine>>,
    /// With `--heatmap`: pages used in each cell of the RAM, scaled up from the sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heat_pages: Option<Vec<u32>>,
    /// With `--heatmap`: pages of RAM that the cells cover together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heat_ram_pages: Option<u64>,
}

/// A backend that `--backend auto` considered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CandidateLine {
    /// The backend.
    pub backend: TraceMethod,
    /// Whether it was chosen.
    pub is_chosen: bool,
    /// Time of the VM that a curve of a period takes for the error at which backends are compared; `null` if the backend
    /// cannot observe the VM.
    pub curve_seconds: Option<f64>,
    /// Time of one observed touch on this host; `null` if it was not measured.
    pub touch_seconds: Option<f64>,
    /// The cost, or the obstacle, in words.
    pub why: String,
}

/// Reads a field that must be present, so that `null` differs from an absent field.
fn present<'de, T, D>(field: D) -> Result<Option<T>, D::Error>
where
    T: Deserialize<'de>,
    D: serde::Deserializer<'de>,
{
    T::deserialize(field).map(Some)
}

/// The report of the whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FinalLine {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the VM.
    pub vm: String,
    /// Always true.
    #[serde(rename = "final")]
    pub is_final: bool,
    /// How pages were observed.
    pub method: TraceMethod,
    /// Periods of the run.
    pub periods: u64,
    /// References recorded by traps; 0 with scans.
    pub traps: u64,
    /// With scans: pages that scans found touched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub touches: Option<u64>,
    /// Time taken from the VM over the time that its vCPUs had.
    pub overhead_ratio: f64,
    /// References that may be missing.
    pub lost: u64,
    /// That of the last period.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// The curve of the run, with first touches that of the last minute at most, since the last change of phase; `null` if no page was
    /// used twice.
    pub curve: Option<CurveJson>,
    /// With `--compare`: the curve by AET.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aet_curve: Option<CurveJson>,
    /// With `--compare`: its mean absolute error against exact LRU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_absolute_error: Option<f64>,
}

/// Why a line is not a valid tracer report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TracerLineError {
    /// The line has another schema version.
    #[error("schema {schema}; this program reads {SCHEMA}")]
    Schema {
        /// The schema version of the line.
        schema: u32,
    },
    /// It is not JSON, or a field is missing or of another type.
    #[error("not a line of a tracer: {0}")]
    Form(#[from] serde_json::Error),
    /// A number is outside its range.
    #[error("{field} is {value}, which is out of range")]
    Range {
        /// The field's name.
        field: &'static str,
        /// The field's value.
        value: f64,
    },
}

impl TracerLine {
    /// Reads one line.
    ///
    /// # Errors
    ///
    /// [`TracerLineError`] for another schema, a missing field, or a number out of its range.
    pub fn read(line: &[u8]) -> Result<Self, TracerLineError> {
        #[derive(Deserialize)]
        struct Head {
            schema: u32,
            #[serde(rename = "final", default)]
            is_final: bool,
        }
        let head: Head = serde_json::from_slice(line)?;
        if head.schema != SCHEMA {
            return Err(TracerLineError::Schema {
                schema: head.schema,
            });
        }
        if head.is_final {
            return Ok(Self::Final(Box::new(serde_json::from_slice(line)?)));
        }
        let period: PeriodLine = serde_json::from_slice(line)?;
        period.check()?;
        Ok(Self::Period(Box::new(period)))
    }

    /// Writes the line, without its line end.
    ///
    /// # Errors
    ///
    /// Those of the JSON writer.
    pub fn write(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(self)
    }
}

impl PeriodLine {
    /// Checks the ranges of the numbers that readers divide or multiply by.
    fn check(&self) -> Result<(), TracerLineError> {
        let out = |field, value| Err(TracerLineError::Range { field, value });
        if !(self.seconds > 0.0 && self.seconds.is_finite()) {
            return out("seconds", self.seconds);
        }
        if !(self.tracking_rate > 0.0 && self.tracking_rate <= 1.0) {
            return out("tracking_rate", self.tracking_rate);
        }
        if !(self.overhead_ratio >= 0.0 && self.overhead_ratio.is_finite()) {
            return out("overhead_ratio", self.overhead_ratio);
        }
        if !self.page_bytes.is_power_of_two() {
            return out("page_bytes", self.page_bytes as f64);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A period of traps with every optional field.
    fn period() -> PeriodLine {
        let text = r#"{"schema":1,"vm":"web","method":"trap","page_bytes":4096,"period":3,"seconds":2.0,"window_seconds":1.5,"working_set_pages":10,"working_set_bound":"at_most","working_set_low_pages":8,"working_set_high_pages":null,"tracking_rate":0.5,"hot_set_pages":64,"populated_pages":9,"tracked_pages":7,"distinct_pages":6,"traps":100,"write_traps":4,"stray_traps":1,"rearmed_pages":50,"trap_seconds":0.25,"rearm_seconds":0.125,"collect_seconds":0.5,"overhead_ratio":0.01,"budget_ran_out":false,"lost":2,"first_touches_unseen":5,"mean_absolute_error":0.5,"curve":{"schema":1,"vm":"web","page_bytes":4096,"references":9,"baseline_pages":null,"points":[{"size_pages":2,"miss_ratio":0.5,"low":0.5,"high":0.5}]},"heat_pages":[1,2],"heat_ram_pages":512}"#;
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        let trap = period();
        let scan = PeriodLine {
            method: TraceMethod::AccessedPageScans,
            working_set_pages: None,
            working_set_bound: None,
            hot_set_pages: None,
            traps: 0,
            touches: Some(77),
            scans: Some(12),
            scan_resolution_pages: Some(7),
            scan_interval_seconds: Some(0.1),
            write_touches: Some(3),
            curve: Some(None),
            heat_pages: None,
            heat_ram_pages: None,
            mean_absolute_error: None,
            ..period()
        };
        let last = FinalLine {
            schema: SCHEMA,
            vm: "web".into(),
            is_final: true,
            method: TraceMethod::AccessedPageScans,
            periods: 4,
            traps: 0,
            touches: Some(9),
            overhead_ratio: 0.02,
            lost: 1,
            advice: Some("use another".into()),
            curve: None,
            aet_curve: period().curve.flatten(),
            mean_absolute_error: Some(0.25),
        };
        let lines = [
            TracerLine::Period(Box::new(trap)),
            TracerLine::Period(Box::new(scan)),
            TracerLine::Final(Box::new(last)),
        ];
        for line in lines {
            let text = line.write().unwrap();
            assert_eq!(TracerLine::read(text.as_bytes()).unwrap(), line, "{text}");
        }
    }

    #[test]
    fn a_number_that_is_missing_is_an_error_and_not_a_zero() {
        let whole = serde_json::to_value(period()).unwrap();
        let optional = [
            "working_set_pages",
            "working_set_bound",
            "working_set_low_pages",
            "working_set_high_pages",
            "hot_set_pages",
            "mean_absolute_error",
            "curve",
            "heat_pages",
            "heat_ram_pages",
        ];
        for field in whole.as_object().unwrap().keys() {
            let mut line = whole.clone();
            line.as_object_mut().unwrap().remove(field);
            let read = TracerLine::read(line.to_string().as_bytes());
            assert_eq!(read.is_ok(), optional.contains(&field.as_str()), "{field}");
        }
    }

    #[test]
    fn a_bound_and_a_method_have_one_spelling() {
        for method in TraceMethod::ALL {
            let json = serde_json::to_string(&method).unwrap();
            assert_eq!(json, format!("\"{method}\""));
        }
        for bound in [
            WorkingSetBound::Estimate,
            WorkingSetBound::AtLeast,
            WorkingSetBound::AtMost,
        ] {
            let json = serde_json::to_string(&bound).unwrap();
            assert_eq!(json, format!("\"{bound}\""));
        }
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let with = |change: fn(&mut PeriodLine)| {
            let mut line = period();
            change(&mut line);
            let text = TracerLine::Period(Box::new(line)).write().unwrap();
            TracerLine::read(text.as_bytes()).unwrap_err().to_string()
        };
        assert!(with(|line| line.seconds = 0.0).starts_with("seconds is 0"));
        assert!(with(|line| line.tracking_rate = 1.5).starts_with("tracking_rate is 1.5"));
        assert!(with(|line| line.overhead_ratio = -1.0).starts_with("overhead_ratio is -1"));
        assert!(with(|line| line.page_bytes = 0).starts_with("page_bytes is 0"));
        assert!(with(|line| line.schema = 2).starts_with("schema 2"));
    }
}
