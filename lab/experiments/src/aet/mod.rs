//! The evaluation of \[AET\] on real programs: the model against exact LRU on the same trapped references, and both against
//! every reference of the same time, which the page log's plugin counts.

mod measure;
mod rate;
mod set;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use plimsoll_output::write_file;
use plimsoll_rig::{GuestImage, GuestKernel, ProgramsImage};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::results::{Conditions, KeepArgs};

/// Programs that are traced unless others are named.
const PROGRAMS: [&str; 12] = [
    "nginx",
    "xapian",
    "postgresql",
    "redis",
    "sqlite",
    "gcc",
    "perl",
    "xsltproc",
    "povray",
    "stockfish",
    "vips",
    "xz",
];

/// Trace real programs as [AET] does, and compare AET with exact LRU and both with every reference
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Jobs of lab/programs
    #[arg(long, value_delimiter = ',', default_values_t = PROGRAMS.map(str::to_owned))]
    programs: Vec<String>,
    /// Program on which rules for the tracking rate, hot sets and rates are compared
    #[arg(long, default_value = "xz")]
    rate_program: String,
    /// Number of seeds, each of which traces every program anew
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Two programs, one seed and few periods: whether everything works
    #[arg(long)]
    quick: bool,
    /// Directory of measurements already made, which are not repeated
    #[arg(long, default_value = "target/lab/aet")]
    state: PathBuf,
    #[command(flatten)]
    keep: KeepArgs,
}

/// Lengths of what is measured, in periods.
#[derive(Debug, Clone, Copy)]
struct Lengths {
    /// With a hot set of 2048 pages and without sampling.
    published: u32,
    /// With a fixed rate of 1/128.
    fixed: u32,
    /// At the default settings.
    default: u32,
    /// Each rule for the tracking rate.
    rate: u32,
}

/// Runs the experiment.
///
/// # Errors
///
/// Why a guest did not come up or could not be traced; what was measured before is kept and not repeated.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let (programs, seeds, lengths) = if args.quick {
        let lengths = Lengths {
            published: 2,
            fixed: 1,
            default: 2,
            rate: 4,
        };
        (&args.programs[..args.programs.len().min(2)], 1, lengths)
    } else {
        let lengths = Lengths {
            published: 4,
            fixed: 2,
            default: 4,
            rate: 14,
        };
        (&args.programs[..], args.seeds, lengths)
    };
    let image = ProgramsImage::locate(GuestKernel::default())?;
    let guest = "Debian 12 of one vCPU and 512 MiB, with the page log's plugin";
    let conditions = Conditions::begin("tcg", guest)?;
    fs::create_dir_all(&args.state)
        .with_context(|| format!("cannot create '{}'", args.state.display()))?;
    let state = |name: String| args.state.join(name).with_extension("json");
    let stepping = GuestImage::locate()?;
    let mut progress = Progress::of((programs.len() as u64 + 3) * seeds);
    let mut all = set::Measured::default();
    for seed in 1..=seeds {
        for program in programs {
            let path = state(format!("{program}-{seed}"));
            all.programs.push(progress.step(&path, program, || {
                measure::program(&image, program, seed, lengths)
            })?);
        }
        let path = state(format!("rate-{}-{seed}", args.rate_program));
        all.rates
            .push(progress.step(&path, "the rules for the rate", || {
                rate::rules(&image, &args.rate_program, seed, lengths.rate)
            })?);
        let path = state(format!("settings-{}-{seed}", args.rate_program));
        all.settings
            .push(progress.step(&path, "hot sets and rates", || {
                rate::settings(&image, &args.rate_program, seed)
            })?);
        let path = state(format!("steps-{seed}"));
        all.steps
            .push(progress.step(&path, "the program in steps", || {
                measure::steps(&stepping, seed)
            })?);
    }
    let (set, charts) = set::of(conditions.ended()?, seeds, &all)?;
    args.keep.keep(set, charts, out)
}

/// What was done, on standard error.
struct Progress {
    all: u64,
    done: u64,
    /// Those of them that were not done before this run.
    now: u32,
    since: Instant,
}

impl Progress {
    fn of(all: u64) -> Self {
        Self {
            all,
            done: 0,
            now: 0,
            since: Instant::now(),
        }
    }

    /// Returns what `path` has from an earlier run, otherwise makes it and keeps it there.
    fn step<T: Serialize + DeserializeOwned>(
        &mut self,
        path: &Path,
        what: &str,
        make: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        if let Ok(bytes) = fs::read(path) {
            self.done += 1;
            return serde_json::from_slice(&bytes).with_context(|| {
                format!("'{}' is not of this version: delete it", path.display())
            });
        }
        let left = match self.now {
            0 => String::new(),
            now => {
                let left = f64::from(now).recip() * (self.all - self.done) as f64;
                let left = self.since.elapsed().mul_f64(left);
                format!(", about {} min left", left.as_secs() / 60 + 1)
            }
        };
        eprintln!("{} of {}: {what}{left}", self.done + 1, self.all);
        let made = make().with_context(|| format!("with {what}"))?;
        write_file(path, &serde_json::to_vec(&made)?)?;
        self.done += 1;
        self.now += 1;
        Ok(made)
    }
}
