//! Compares the cache with guest memory of the same size, and its curve with other sizes.

use std::io::Write;

use super::lab::{Expectation, GROWTH_BYTES, Kind, Lab, Order};
use plimsoll_rig::Setup;

/// RAM of guest and cache together, in MiB.
pub(super) const TOTAL_MIB: u64 = 216;
/// What a guest's kernel leaves of that is about 180 MiB: of it these are 12.5, 25, 50 and 75 %.
pub(super) const CACHES_MIB: [(f64, u64); 4] = [(12.5, 22), (25.0, 45), (50.0, 90), (75.0, 135)];
/// RAM of guests without a cache whose reads are predicted, in MiB.
const SIZES_MIB: [u64; 6] = [120, 152, 184, 200, 232, 248];
/// Files, each of 512 KiB: 224 MiB.
const FILES: u64 = 448;
/// Percentages of visits that write.
const PREDICTION_WRITES: [u64; 2] = [0, 10];

/// A guest that visits files in some order; `cache_mib` of the memory are in the cache in the measured rounds, 0: there
/// is none.
pub(super) fn setup(
    kind: Kind,
    order: Order,
    write_percent: u64,
    ram_mib: u64,
    cache_mib: u64,
) -> Setup {
    let serve = match cache_mib {
        0 => "--cache-mode none".to_owned(),
        _ => format!("--cache {}M", cache_mib - (GROWTH_BYTES >> 20)),
    };
    // Twice the usual slots: an emulated guest may evict many pages before its host gets to run.
    let workload = format!(
        "workload=disk-signed module=copy module.slots=1024 {} order={} write_percent={write_percent} \
         files={FILES} file_kib=512 warmup=1",
        kind.word(),
        order.text(),
    );
    let mut setup = Setup::new(&serve, &workload);
    (setup.kernel, setup.memory_mib, setup.image_mib) = (kind.kernel(), ram_mib, 320);
    setup
}

fn percent(value: f64, of: f64) -> f64 {
    (value / of - 1.0) * 100.0
}

/// Reads of guests of other sizes: predicted by the curve of one with 3/4 of its memory in the cache, and measured.
pub(super) fn prediction(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    let (_, cache_mib) = CACHES_MIB[3];
    let mut sizes = SIZES_MIB.to_vec();
    sizes.push(TOTAL_MIB);
    sizes.sort_unstable();
    let mut bands = Bands::default();
    for kind in lab.guests.clone() {
        writeln!(
            lab.out,
            "prediction: {}; {} MiB of RAM and {cache_mib} MiB of cache against RAM alone\n\
             order        writes   RAM MiB  pages read  predicted    error              band",
            kind.text(),
            TOTAL_MIB - cache_mib,
        )?;
        // Below and above what there is now.
        let mut worst = [0.0_f64; 2];
        for order in lab.orders.clone() {
            for write_percent in lab.writes_or(&PREDICTION_WRITES) {
                let setup =
                    |ram_mib, cache_mib| setup(kind, order, write_percent, ram_mib, cache_mib);
                let observed = lab.measure(&setup(TOTAL_MIB - cache_mib, cache_mib))?;
                for &ram_mib in &sizes {
                    let alone = lab.measure(&setup(ram_mib, 0))?;
                    let Some(at) = observed.expected(alone.memory) else {
                        continue;
                    };
                    let missed = alone.missed.max(1) as f64;
                    let error = percent(at.expected, missed);
                    if ram_mib != TOTAL_MIB {
                        let worst = &mut worst[usize::from(ram_mib > TOTAL_MIB)];
                        *worst = worst.max(error.abs());
                    }
                    let inside = bands.add(&at, missed);
                    writeln!(
                        lab.out,
                        "{:<12} {write_percent:>4} %  {ram_mib:>8}  {:>10}  {:>9.0}  {error:>+5.1} %  \
                         {:>6.0} .. {:>6.0}{}{}",
                        order.text(),
                        alone.missed,
                        at.expected,
                        at.low,
                        at.high,
                        if inside { "" } else { "  OUTSIDE" },
                        if ram_mib == TOTAL_MIB { "  now" } else { "" },
                    )?;
                    lab.out.flush()?;
                }
            }
        }
        writeln!(
            lab.out,
            "worst below {:.1} % (aim 5, [LS07] 9), above {:.1} % (aim 10, [LS07] 15)\n",
            worst[0], worst[1]
        )?;
    }
    bands.write(lab.out)
}

/// How many bands hold what was measured, and how wide they are.
#[derive(Default)]
struct Bands {
    held: usize,
    width: f64,
    /// Error as a share of the band's side on which the measured value is.
    factors: Vec<f64>,
}

impl Bands {
    /// Returns whether the band holds `missed` pages.
    fn add(&mut self, at: &Expectation, missed: f64) -> bool {
        let holds = at.low <= missed && missed <= at.high;
        self.held += usize::from(holds);
        self.width += (at.high - at.low) / missed;
        let side = if missed > at.expected {
            at.high
        } else {
            at.low
        };
        let side = (side - at.expected).abs().max(1.0);
        self.factors.push((missed - at.expected).abs() / side);
        holds
    }

    /// Prints the width that was given, and the one that would have held 95 % if all bands were widened by one factor.
    fn write(mut self, out: &mut dyn Write) -> anyhow::Result<()> {
        let count = self.factors.len();
        self.factors.sort_by(f64::total_cmp);
        let Some(factor) = self
            .factors
            .get((count * 95).div_ceil(100).saturating_sub(1))
        else {
            return Ok(());
        };
        let given = self.width / count as f64 * 100.0;
        writeln!(
            out,
            "bands hold {} of {count}; mean width {given:.1} % of the pages read, needed for 95 %: {:.1} %\n",
            self.held,
            given * factor,
        )?;
        Ok(())
    }
}

/// Reads from disk with part of the memory in the cache, against all of it in the guest.
pub(super) fn lru(lab: &mut Lab<'_>) -> anyhow::Result<()> {
    for kind in lab.guests.clone() {
        writeln!(
            lab.out,
            "lru: {}; {TOTAL_MIB} MiB in the guest, or partly in the cache, read only (aim: within 1 %)\n\
             order         in cache  pages from disk   without cache   change  of all asked for",
            kind.text(),
        )?;
        for order in lab.orders.clone() {
            let alone = lab.measure(&setup(kind, order, 0, TOTAL_MIB, 0))?;
            for (share, cache_mib) in [CACHES_MIB[3], CACHES_MIB[2]] {
                let split =
                    lab.measure(&setup(kind, order, 0, TOTAL_MIB - cache_mib, cache_mib))?;
                let more = split.disk_reads as f64 - alone.disk_reads as f64;
                writeln!(
                    lab.out,
                    "{:<12} {share:>7} %  {:>15}  {:>14}  {:>+5.1} %  {:>+13.2} %",
                    order.text(),
                    split.disk_reads,
                    alone.disk_reads,
                    percent(split.disk_reads as f64, alone.disk_reads.max(1) as f64),
                    more / alone.asked as f64 * 100.0,
                )?;
                lab.out.flush()?;
            }
        }
        writeln!(lab.out)?;
    }
    Ok(())
}
