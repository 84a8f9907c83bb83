//! A trace as JSON: the lines that the daemon reads too.

use plimsoll_flow::{MissRatioCurve, PageSize};
use plimsoll_observe::{Curves, ObservedPeriod};
use plimsoll_protocol::curve_json::{CurveJson, SCHEMA};
use plimsoll_protocol::tracer::{CandidateLine, FinalLine, PeriodLine};
use plimsoll_trap::{Candidate, Yield};

use super::TracingReport;
use super::totals::reports_kinds;

/// Points of a curve in JSON.
const POINTS: usize = 1000;

impl TracingReport<'_> {
    fn curve_json(&self, curve: &MissRatioCurve) -> CurveJson {
        let curve = curve.thinned(POINTS);
        CurveJson::new(&self.target.id().0, PageSize::FOUR_KIB, self.ram(), &curve)
    }

    fn candidate_line(&self, candidate: &Candidate) -> CandidateLine {
        let cost = candidate.cost();
        CandidateLine {
            backend: candidate.row.method,
            is_chosen: candidate.row.method == self.backend.method,
            curve_seconds: cost.map(|cost| cost.curve.as_secs_f64()),
            touch_seconds: cost.map(|cost| cost.touch.time.as_secs_f64()),
            why: candidate.to_string(),
        }
    }

    pub(super) fn period_line(&self, period: &ObservedPeriod) -> PeriodLine {
        let report = &period.period;
        let yields = self.backend.yields;
        let scans = (!report.method.traps()).then_some(report.scans);
        let idle = scans.filter(|_| reports_kinds(report.method));
        PeriodLine {
            schema: SCHEMA,
            vm: self.target.id().0,
            method: report.method,
            page_bytes: PageSize::FOUR_KIB.bytes(),
            period: report.index,
            seconds: report.length.as_secs_f64(),
            window_seconds: report.window.as_secs_f64(),
            working_set_pages: period.working_set.map(|set| set.size.0),
            working_set_bound: period.working_set.map(|set| set.bound),
            working_set_low_pages: period.working_set_band.map(|(low, _)| low.0),
            working_set_high_pages: period
                .working_set_band
                .and_then(|(_, high)| high)
                .map(|size| size.0),
            scans: scans.map(|scans| scans.scans),
            scan_interval_seconds: scans.map(|scans| scans.interval.as_secs_f64()),
            scan_resolution_pages: scans.map(|scans| scans.resolution_pages),
            touches: scans.map(|scans| scans.touches),
            write_touches: scans.map(|scans| scans.writes),
            swapped_pages: idle.map(|scans| scans.swapped_pages),
            huge_pages: idle.map(|scans| scans.huge_pages),
            cache_pages: idle.map(|scans| scans.cache_pages),
            tracking_rate: 1.0 / f64::from(report.scale),
            hot_set_pages: (yields == Yield::References).then_some(report.traps.hot_set_pages),
            populated_pages: report.populated_pages,
            tracked_pages: report.tracked_pages,
            distinct_pages: report.distinct_pages,
            traps: report.traps.taken,
            samples: (yields == Yield::FirstTouches).then_some(report.samples),
            write_traps: report.traps.writes,
            stray_traps: report.traps.strays,
            rearmed_pages: report.rearmed_pages,
            trap_seconds: report.fault_time.as_secs_f64(),
            rearm_seconds: report.arm_time.as_secs_f64(),
            collect_seconds: report.collect_time.as_secs_f64(),
            overhead_ratio: report.overhead_ratio,
            budget_ran_out: report.budget_exhausted,
            lost: report.losses.lost(),
            first_touches_unseen: report.losses.first_touches_unseen,
            advice: self.limit.map(|limit| limit.to_string()),
            mean_absolute_error: period
                .distance()
                .map(|distance| distance.mean_absolute_error),
            curve: self
                .has_curves
                .then(|| period.curve.as_ref().map(|curve| self.curve_json(curve))),
            choice: self.choice.filter(|_| report.index == 0).map(|choice| {
                choice
                    .candidates
                    .iter()
                    .map(|one| self.candidate_line(one))
                    .collect()
            }),
            heat_pages: period.heat.as_ref().map(|heat| heat.pages.clone()),
            heat_ram_pages: period.heat.as_ref().map(|heat| heat.ram.0),
        }
    }

    pub(super) fn final_line(
        &self,
        chosen: Option<&MissRatioCurve>,
        compared: Option<&Curves>,
    ) -> FinalLine {
        let distance = compared.and_then(Curves::distance);
        let method = self.backend.method;
        FinalLine {
            schema: SCHEMA,
            vm: self.target.id().0,
            is_final: true,
            method,
            periods: self.totals.periods,
            traps: self.totals.traps,
            touches: (!method.traps()).then_some(self.totals.touches),
            overhead_ratio: self.totals.overhead_ratio(),
            lost: self.totals.lost,
            advice: self.limit.map(|limit| limit.to_string()),
            curve: chosen.map(|curve| self.curve_json(curve)),
            aet_curve: compared.map(|curves| self.curve_json(&curves.aet)),
            mean_absolute_error: distance.map(|distance| distance.mean_absolute_error),
        }
    }
}
