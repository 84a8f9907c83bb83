//! The evaluation of \[AET\] on real programs: the model against exact LRU on the same trapped references, and both against
//! every reference of the same time, which the page log's plugin counts.

mod measure;
mod rate;
mod set;

use std::io::Write;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use plimsoll_rig::{GuestImage, GuestKernel, JOBS, ProgramsImage};

use crate::results::{Conditions, KeepArgs, Progress};

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

/// Trace real programs as the paper on AET does, and compare AET with exact LRU and both with every reference
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Jobs of lab/programs
    #[arg(long, value_delimiter = ',', default_values_t = PROGRAMS.map(str::to_owned), value_parser = PossibleValuesParser::new(JOBS))]
    programs: Vec<String>,
    /// Program on which rules for the tracking rate, hot sets and rates are compared
    #[arg(long, default_value = "xz", value_parser = PossibleValuesParser::new(JOBS))]
    rate_program: String,
    /// Number of seeds, each of which traces every program anew [default: 3; 1 with --quick]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// Only the programs, without the rules for the tracking rate and the program in steps; kept as `aet-programs`
    #[arg(long)]
    only_programs: bool,
    /// Two programs and few periods: whether everything works
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

impl Lengths {
    fn text(self) -> String {
        format!(
            "{} periods at the published settings, {} at 1/128, {} at the defaults, {} with each rule for the rate",
            self.published, self.fixed, self.default, self.rate
        )
    }
}

/// Runs the experiment.
///
/// # Errors
///
/// Why a guest did not come up or could not be traced; what was measured before is kept and not repeated.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let seeds = args.seeds.unwrap_or(if args.quick { 1 } else { 3 });
    let (programs, lengths) = if args.quick {
        let lengths = Lengths {
            published: 2,
            fixed: 1,
            default: 2,
            rate: 4,
        };
        (&args.programs[..args.programs.len().min(2)], lengths)
    } else {
        let lengths = Lengths {
            published: 4,
            fixed: 2,
            default: 4,
            rate: 14,
        };
        (&args.programs[..], lengths)
    };
    let image = ProgramsImage::locate(GuestKernel::default())?;
    let guest = "Debian 12 of one vCPU and 512 MiB, with the page log's plugin";
    let stepping = GuestImage::locate()?;
    let mut progress = Progress::begin(
        &args.state,
        &lengths.text(),
        (programs.len() + if args.only_programs { 0 } else { 3 }) * usize::try_from(seeds)? + 2,
    )?;
    let conditions = progress.step("begin", || Conditions::begin("tcg", guest))?;
    let mut all = set::Measured::default();
    for seed in 1..=seeds {
        for program in programs {
            let name = format!("{program}-{seed}");
            all.programs
                .push(progress.step(&name, || measure::program(&image, program, seed, lengths))?);
        }
        if args.only_programs {
            continue;
        }
        let name = format!("rate-{}-{seed}", args.rate_program);
        all.rates.push(progress.step(&name, || {
            rate::rules(&image, &args.rate_program, seed, lengths.rate)
        })?);
        let name = format!("settings-{}-{seed}", args.rate_program);
        all.settings
            .push(progress.step(&name, || rate::settings(&image, &args.rate_program, seed))?);
        let name = format!("steps-{seed}");
        all.steps
            .push(progress.step(&name, || measure::steps(&stepping, seed))?);
    }
    let (set, charts) = set::of(progress.step("end", || conditions.ended())?, seeds, &all)?;
    args.keep.keep(set, charts, out)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        args: super::Args,
    }

    #[test]
    fn a_program_that_does_not_exist_is_a_usage_error_that_names_those_that_do() {
        let parsed = |words: &[&str]| Command::try_parse_from([&["aet"], words].concat());
        assert!(parsed(&["--programs", "tpcc,xz"]).is_ok());
        for option in ["--programs", "--rate-program"] {
            let error = parsed(&[option, "nosuch"]).unwrap_err().to_string();
            assert!(
                error.contains("nosuch") && error.contains("xsltproc"),
                "{error}"
            );
        }
    }
}
