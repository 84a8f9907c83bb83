//! Settings on the command line.
//!
//! Keys begin with `plimsoll.`; all other words belong to the kernel. A key that
//! is unknown, given twice, or of no use to the chosen workload is an error: a run
//! with settings other than those meant is worse than none.

use crate::array::{PAGE_BYTES, PAGE_WORDS, WORK_MIN};
use crate::disk;
use crate::disk::settings::Swap;
use crate::keys::{Keys, SettingsError};

/// Pages in a MiB.
const PAGES_PER_MIB: u64 = (1 << 20) / PAGE_BYTES as u64;
/// Largest array taken, in pages: 16 TiB.
const PAGES_MAX: u64 = 1 << 32;

/// In which order pages are visited.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pattern {
    /// One after the other, over and over.
    Scan,
    /// Each as likely as any other.
    Uniform,
    /// The page of rank i with probability proportional to 1 / i^alpha.
    Zipf { alpha: f64 },
}

/// Which visits write.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Writes {
    /// Each visit with this probability, 0.0 to 1.0.
    Share(f64),
    /// Every second pass over the pages, the first one reading.
    EverySecondPass,
}

/// A stretch of the run with one working set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Phase {
    /// The working set: the first so many pages of the array.
    pub pages: u64,
    /// Which visits write.
    pub writes: Writes,
}

/// What is visited.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// Nothing: the machine sleeps.
    Idle,
    /// An array, in phases.
    Array {
        pattern: Pattern,
        /// At least one; each at most `pages` large.
        phases: Vec<Phase>,
        /// How long a phase lasts at least, ending with a whole pass; `None` = no end.
        phase_ms: Option<u64>,
        /// Pages in the array.
        pages: u64,
    },
}

/// When the run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// After the last phase.
    Once,
    /// Never: after the last phase comes the first.
    Never,
    /// So long after the array was populated.
    After { ms: u64 },
}

/// Parsed settings.
#[derive(Debug, Clone, PartialEq)]
pub enum Job {
    /// A workload on an array in memory.
    Memory(Settings),
    /// A workload on a disk.
    Disk(disk::Settings),
}

/// Everything a run on memory needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Name of the workload, as on the command line.
    pub name: String,
    /// What it visits.
    pub work: Work,
    /// When it ends.
    pub end: End,
    /// Threads that share the array.
    pub threads: u32,
    /// Words of a page that a visit verifies.
    pub words: usize,
    /// What all random numbers follow from.
    pub seed: u64,
    /// Where the machine swaps to.
    pub swap: Swap,
    /// Time between two lines of memory statistics; `None`: no such lines.
    pub memstat_ms: Option<u64>,
    /// Memory that is allocated beside the array and freed again; `None`: none.
    pub burst: Option<Burst>,
    /// Parameters of plimsoll_liar.ko, which falsifies the balloon's statistics; empty: it is not loaded.
    pub lies: Vec<(String, String)>,
}

/// An allocation that comes again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Burst {
    /// Its size in MiB.
    pub mib: usize,
    /// Time from one to the next; it is held for half of it.
    pub ms: u64,
}

impl Settings {
    /// Reads the keys out of a kernel command line.
    ///
    /// # Errors
    ///
    /// The first key that is missing, wrong, given twice or of no use.
    pub fn parse(text: &str) -> Result<Job, SettingsError> {
        let mut keys = Keys::of(text)?;
        let workloads = "steps, arrays, uniform, zipf, sequential, idle, or disk-signed, \
                         disk-stress, disk-crash, disk-io, disk-crypt";
        let name = keys
            .take("workload", workloads, |value| Some(value.to_owned()))?
            .ok_or(SettingsError::Missing {
                key: "workload",
                expected: workloads,
            })?;
        if let Some(settings) = disk::Settings::take(&name, &mut keys)? {
            keys.none_left(&name)?;
            return Ok(Job::Disk(settings));
        }
        let work = match name.as_str() {
            "idle" => Work::Idle,
            "steps" => steps(&mut keys)?,
            "arrays" => arrays(&mut keys)?,
            "sequential" => endless(&mut keys, Pattern::Scan)?,
            "uniform" => endless(&mut keys, Pattern::Uniform)?,
            "zipf" => {
                let alpha = keys.alpha()?;
                endless(&mut keys, Pattern::Zipf { alpha })?
            }
            _ => {
                return Err(SettingsError::Value {
                    key: "workload",
                    value: name,
                    expected: workloads,
                });
            }
        };
        let seconds = keys.number("seconds", "0 (for ever) to 2^32", 0..=1 << 32)?;
        let end = match (seconds, &work) {
            (Some(0), _) => End::Never,
            (Some(seconds), _) => End::After { ms: seconds * 1000 },
            (
                None,
                Work::Array {
                    phase_ms: Some(_), ..
                },
            ) => End::Once,
            (None, _) => End::Never,
        };
        let seed = keys.number("seed", "a number of 64 bits", 0..=u64::MAX)?;
        let memstat_ms = keys.number("memstat_ms", "1 to 2^32 milliseconds", 1..=1 << 32)?;
        let burst_mib = keys.number("burst_mib", "1 to 2^16", 1..=1 << 16)?;
        let burst = match burst_mib.and_then(|mib| usize::try_from(mib).ok()) {
            Some(mib) => {
                let ms = keys.number("burst_ms", "2 to 2^32 milliseconds", 2..=1 << 32)?;
                let ms = ms.unwrap_or(10_000);
                Some(Burst { mib, ms })
            }
            None => None,
        };
        let mut settings = Self {
            work,
            end,
            threads: 1,
            words: 8,
            seed: seed.unwrap_or(1),
            swap: Swap::take(&mut keys)?,
            memstat_ms,
            burst,
            lies: keys.take_all("liar."),
            name,
        };
        if let Work::Array { phases, .. } = &settings.work {
            let smallest = phases.iter().map(|phase| phase.pages).min().unwrap_or(0);
            let threads = keys.take("threads", "1 to 256, with a page for each", |value| {
                value.parse().ok().filter(|&threads| {
                    (1..=256).contains(&threads) && u64::from(threads) <= smallest
                })
            })?;
            settings.threads = threads.unwrap_or(1);
            let words = keys.take("work", "4 to 512 words a visit", |value| {
                value
                    .parse()
                    .ok()
                    .filter(|words| (WORK_MIN..=PAGE_WORDS).contains(words))
            })?;
            settings.words = words.unwrap_or(8);
        }
        keys.none_left(&settings.name)?;
        Ok(Job::Memory(settings))
    }

    /// Bytes the array takes.
    pub fn array_bytes(&self) -> u64 {
        match &self.work {
            Work::Idle => 0,
            Work::Array { pages, .. } => pages.saturating_mul(PAGE_BYTES as u64),
        }
    }
}

/// \[AET\]'s step benchmark: the array as large as its largest step.
fn steps(keys: &mut Keys) -> Result<Work, SettingsError> {
    let expected = "sizes in MiB, as 32,96,160";
    let sizes = keys
        .take("steps_mib", expected, |value| {
            let size = |size: &str| {
                let size = size.parse().ok()?;
                (1..=PAGES_MAX / PAGES_PER_MIB)
                    .contains(&size)
                    .then_some(size * PAGES_PER_MIB)
            };
            value.split(',').map(size).collect::<Option<Vec<u64>>>()
        })?
        .ok_or(SettingsError::Missing {
            key: "steps_mib",
            expected,
        })?;
    let writes = share(keys)?;
    Ok(Work::Array {
        pattern: Pattern::Scan,
        pages: sizes.iter().copied().max().unwrap_or(0),
        phases: sizes
            .into_iter()
            .map(|pages| Phase { pages, writes })
            .collect(),
        phase_ms: Some(phase_ms(keys)?),
    })
}

/// \[PRL\]'s array programs: one operation a page per pass.
fn arrays(keys: &mut Keys) -> Result<Work, SettingsError> {
    let expected = "RWRW, RRWW or WWRR";
    let (reads, writes) = (Writes::Share(0.0), Writes::Share(1.0));
    let order = keys
        .take("array", expected, |value| match value {
            "RWRW" => Some([Writes::EverySecondPass; 2]),
            "RRWW" => Some([reads, writes]),
            "WWRR" => Some([writes, reads]),
            _ => None,
        })?
        .ok_or(SettingsError::Missing {
            key: "array",
            expected,
        })?;
    let pages = pages(keys)?;
    Ok(Work::Array {
        pattern: Pattern::Scan,
        phases: order.map(|writes| Phase { pages, writes }).into(),
        phase_ms: Some(phase_ms(keys)?),
        pages,
    })
}

fn endless(keys: &mut Keys, pattern: Pattern) -> Result<Work, SettingsError> {
    let pages = pages(keys)?;
    let writes = share(keys)?;
    Ok(Work::Array {
        pattern,
        phases: vec![Phase { pages, writes }],
        phase_ms: None,
        pages,
    })
}

/// Takes the share of visits that write.
fn share(keys: &mut Keys) -> Result<Writes, SettingsError> {
    let share = keys.take("write_ratio", "a share from 0 to 1", |value| {
        value
            .parse()
            .ok()
            .filter(|share: &f64| (0.0..=1.0).contains(share))
    })?;
    Ok(Writes::Share(share.unwrap_or(0.0)))
}

/// Takes the size of the array, in pages.
fn pages(keys: &mut Keys) -> Result<u64, SettingsError> {
    let pages = keys.number("pages", "1 to 2^32", 1..=PAGES_MAX)?;
    let mib = keys.number("mib", "1 to 2^24", 1..=PAGES_MAX / PAGES_PER_MIB)?;
    match (pages, mib) {
        (Some(pages), None) => Ok(pages),
        (None, Some(mib)) => Ok(mib * PAGES_PER_MIB),
        (Some(_), Some(_)) => Err(SettingsError::Twice { key: "mib".into() }),
        (None, None) => Err(SettingsError::Missing {
            key: "mib",
            expected: "the array's size in MiB, or plimsoll.pages",
        }),
    }
}

/// Takes how long a phase lasts at least.
fn phase_ms(keys: &mut Keys) -> Result<u64, SettingsError> {
    let ms = keys.number("step_ms", "1 to 2^32 milliseconds", 1..=1 << 32)?;
    Ok(ms.unwrap_or(5000))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_step_benchmark_is_as_large_as_its_largest_step() {
        let settings = Settings::parse(
            "console=ttyS0 quiet plimsoll.workload=steps plimsoll.steps_mib=32,96,32 \
             plimsoll.step_ms=2000 plimsoll.write_ratio=0.5 plimsoll.seed=9 plimsoll.swap=zram \
             plimsoll.swap_mib=64 plimsoll.memstat_ms=500 plimsoll.burst_mib=20 plimsoll.burst_ms=900 plimsoll.liar.faults=7\n",
        );
        let phase = |mib: u64| Phase {
            pages: mib * 256,
            writes: Writes::Share(0.5),
        };
        assert_eq!(
            settings,
            Ok(Job::Memory(Settings {
                name: "steps".into(),
                work: Work::Array {
                    pattern: Pattern::Scan,
                    phases: vec![phase(32), phase(96), phase(32)],
                    phase_ms: Some(2000),
                    pages: 96 * 256,
                },
                end: End::Once,
                threads: 1,
                words: 8,
                seed: 9,
                swap: Swap::Zram { mib: Some(64) },
                memstat_ms: Some(500),
                burst: Some(Burst { mib: 20, ms: 900 }),
                lies: vec![("faults".to_owned(), "7".to_owned())],
            }))
        );
    }

    #[test]
    fn reads_then_writes_are_two_phases() {
        let settings = Settings::parse(
            "plimsoll.workload=arrays plimsoll.array=RRWW plimsoll.pages=7 plimsoll.seconds=0",
        )
        .unwrap();
        let Job::Memory(settings) = settings else {
            panic!("a workload on memory was requested");
        };
        let Work::Array { phases, .. } = settings.work else {
            panic!("an array was requested");
        };
        let writes: Vec<_> = phases.iter().map(|phase| phase.writes).collect();
        assert_eq!(writes, [Writes::Share(0.0), Writes::Share(1.0)]);
        assert_eq!(settings.end, End::Never);
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_name() {
        let message = |text: &str| {
            let words: Vec<_> = text
                .split(' ')
                .map(|word| format!("plimsoll.{word}"))
                .collect();
            Settings::parse(&words.join(" ")).unwrap_err().to_string()
        };
        assert_eq!(
            message("workload=zipf mib=4 alhpa=1"),
            "plimsoll.alhpa is unknown, or of no use to workload zipf"
        );
        assert_eq!(
            message("workload=uniform mib=4 alpha=1"),
            "plimsoll.alpha is unknown, or of no use to workload uniform"
        );
        assert_eq!(
            message("workload=zipf mib=0"),
            "plimsoll.mib=0: expected 1 to 2^24"
        );
        assert_eq!(
            message("workload=sequential pages=3 threads=4"),
            "plimsoll.threads=4: expected 1 to 256, with a page for each"
        );
        assert_eq!(
            message("workload=zipf mib=4 write_ratio=NaN"),
            "plimsoll.write_ratio=NaN: expected a share from 0 to 1"
        );
        assert!(message("workload=zipf mib=4 mib=5").contains("twice"));
        assert!(message("workload=zipf").contains("plimsoll.mib is missing"));
        assert!(message("workload=linpack").contains("expected steps, arrays"));
        assert!(message("mib=4").contains("plimsoll.workload is missing"));
    }

    proptest! {
        #[test]
        fn no_command_line_makes_it_panic(text in "(plimsoll\\.[a-z_]{1,10}=?[0-9a-zRW,.]{0,6} ?){0,6}.{0,20}") {
            let _ = Settings::parse(&text);
        }
    }
}
