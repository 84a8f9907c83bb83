//! The settings on which overhead depends, \[AET\] §3.4: the published rules for the tracking rate, driven by traps over
//! references with pages tracked for the whole period; and hot sets and rates that are fixed.

use plimsoll_rig::ProgramsImage;
use plimsoll_trap::{PeriodCost, RateControl, RateRule, TraceConfig};
use serde::{Deserialize, Serialize};

use super::measure::{self, PeriodRow, with_program};

/// Traps per reference above which a period costs too much, \[AET\] §3.4.
pub const TRAPS_PER_REFERENCE: f64 = 1e-6;

/// The periods under each rule.
#[derive(Debug, Serialize, Deserialize)]
pub struct RateResult {
    pub program: String,
    pub linear: Vec<PeriodRow>,
    pub log: Vec<PeriodRow>,
}

/// Traces a program for `periods` under each rule, from 1/128 on.
pub fn rules(
    image: &ProgramsImage,
    program: &str,
    seed: u64,
    periods: u32,
) -> anyhow::Result<RateResult> {
    with_program(image, program, |guest, references| {
        let under = |rule| -> anyhow::Result<Vec<PeriodRow>> {
            let start = measure::fixed(seed);
            let mut control = RateControl::new(rule, start.scale, start.least_pages);
            let mut rows = Vec::new();
            for period in 0..periods {
                let config = TraceConfig {
                    scale: control.scale(),
                    // Other pages in each period.
                    seed: seed * 1000 + u64::from(period),
                    ..start.clone()
                };
                let traced = measure::tracing(&guest.vm, references, &config, 1)?;
                for row in traced.periods {
                    control.adapt(&PeriodCost {
                        pressure: row.traps as f64
                            / row.references.max(1) as f64
                            / TRAPS_PER_REFERENCE,
                        traps: row.traps,
                        distinct_pages: row.distinct_pages,
                        // Of the rule by budget alone.
                        affordable_traps: 0.0,
                        budget_ran_out: false,
                        scale_min: 1,
                    });
                    rows.push(row);
                }
            }
            Ok(rows)
        };
        Ok(RateResult {
            program: program.to_owned(),
            linear: under(RateRule::Linear)?,
            log: under(RateRule::Log)?,
        })
    })
}

/// Capacities of the hot set and rates of \[AET\] table 2.
pub const HOT_SETS: [u32; 3] = [64, 128, 256];
pub const SCALES: [u32; 4] = [64, 128, 256, 512];

/// A period at each setting of table 2: hot sets one after the other, and of each the rates.
pub fn settings(image: &ProgramsImage, program: &str, seed: u64) -> anyhow::Result<Vec<PeriodRow>> {
    with_program(image, program, |guest, references| {
        let mut rows = Vec::new();
        for hot_set_pages in HOT_SETS {
            for scale in SCALES {
                let config = TraceConfig {
                    hot_set_pages,
                    scale,
                    ..measure::fixed(seed)
                };
                rows.extend(measure::tracing(&guest.vm, references, &config, 1)?.periods);
            }
        }
        Ok(rows)
    })
}
