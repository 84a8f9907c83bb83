//! The judge: the working set of one process by every interface of the kernel, and by our backends, beside the truth.
//!
//! Everything runs inside of one emulated guest, on a program of which it is known what it touches: `plimsoll-judge`
//! (`bin/plimsoll-judge.rs`) reads the kernel's own interfaces, `plimsoll attach` is ours. Two truths, the same for every method: the
//! pages touched in a second, which most of the kernel's interfaces are for; and the LRU memory at which the misses a second are a
//! tenth of that, which an operator asks for. The one number of an interface is compared with both; of a curve each is read.
//! A third is for our backends alone: their working sets are of the visits that their curves resolve.
//!
//! Truths of made programs are closed forms. Those of real programs are counted by the emulator's plugin (`qemu/pagelog`), which
//! sees every reference of the guest: of these, the ones to page frames that the process has mapped, as its `pagemap` says before each
//! method. The plugin counts while every method watches, so that program, method and truth are of the same slow machine. Visits are
//! then references that miss the 64 pages used most recently by all of the guest; from that size on, misses are exact.

mod program;
mod reader;
mod script;
mod truth;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use plimsoll_flow::{PageCount, WorkingSetBound};
use plimsoll_plot::{Axis, Chart, Series, SeriesStyle, Unit as AxisUnit};
use plimsoll_rig::{AcceleratorChoice, Guest, GuestConfig, GuestError, GuestImage, host, median};

use program::{Kind, MADE, Program, QUICK_MADE, QUICK_REAL, REAL};
use reader::{Band, Estimate, Judged, Judgement, Reader, Shown};
use script::{Lengths, methods, script};
use truth::{ClosedForm, Counted, PAGES_PER_MIB, Truth};

use crate::page_log::ProcessTrace;
use crate::results::{Conditions, KeepArgs, Measurement, Progress, Repetition, ResultSet, Unit};

/// Compare every interface by which Linux shows working sets, and our backends, with the truth, in one guest
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only programs of one kind [default: both, each with a result of its own]
    #[arg(long, value_enum)]
    programs: Option<Programs>,
    /// Number of seeds, each of which boots every guest anew [default: 3; 1 with --quick]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// Few programs and few estimates: whether everything works
    #[arg(long)]
    quick: bool,
    /// Only programs whose names begin so
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Directory of measurements already made, which are not repeated
    #[arg(long, default_value = "target/lab/judge")]
    state: PathBuf,
    #[command(flatten)]
    keep: KeepArgs,
}

/// Kinds of programs, which have different truths.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Programs {
    /// The workload of the guest, whose touches follow a law
    Made,
    /// Programs of Debian, whose references are traced
    Real,
}

impl Programs {
    /// Stem of the result's files.
    fn name(self) -> &'static str {
        match self {
            Self::Made => "judge",
            Self::Real => "judge-programs",
        }
    }

    /// The programs, or the few of a quick run.
    fn all(self, is_quick: bool) -> &'static [Program] {
        match (self, is_quick) {
            (Self::Made, false) => &MADE,
            (Self::Made, true) => &MADE[..QUICK_MADE],
            (Self::Real, false) => &REAL,
            (Self::Real, true) => &REAL[..QUICK_REAL],
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Made => {
                "The judge: working sets by the kernel's interfaces and ours, beside the truth"
            }
            Self::Real => {
                "The judge on real programs: working sets by the kernel's interfaces and ours, beside every reference"
            }
        }
    }

    fn method(self) -> String {
        let [program, truth] = match self {
            Self::Made => [
                "a program of known touches",
                "These are closed forms, at the rate that the program itself reports. ",
            ],
            Self::Real => [
                "a program of Debian",
                "The programs are `stockfish` with a hash table of 64 MiB in an endless search, `redis` with two clients, one that reads all keys \
                 and one that writes a tenth of them, `sqlite` in memory with random queries, and `xz -4`. Their truths are counted from every \
                 reference of the guest, instruction fetches among them, as QEMU's plugin records them (qemu/pagelog), of which those to the \
                 process's page frames count, as its `pagemap` lists them before each method. A visit is there a reference that misses the 64 \
                 pages that the guest used most recently. ",
            ],
        };
        let visits = match self {
            Self::Made => "the visits a second are the program's own count while the method ran",
            Self::Real => "the misses are those counted while the method ran",
        };
        format!(
            "In an emulated guest (TCG) {program} runs in a control group of its own, and every method in turn watches it while it runs: the kernel's \
             own interfaces read once a second by `plimsoll-judge`, a program that reads and writes files alone, and `plimsoll attach` with \
             periods of 5 s at a budget of 1 %, or of 10 %. Errors are medians over a method's estimates, of the relative distance from a \
             truth, which is the same for all methods: the pages touched in a second, and the LRU memory at which the misses a second are a tenth \
             of these. {truth}\
             The memory needed is of the time since the method's estimate before; the pages touched are of the second before the estimate. \
             An interface of the kernel gives one number, which is compared with both. Of ours, the memory is the first size of the curve with \
             so few misses a second, and the pages touched are those that come in a second if the misses a second are the rate at which new pages \
             come. A table of its own compares the working sets that ours report, which are of the visits that their curves resolve, \
             with the memory at which 5 % of these miss. \
             The error of a curve is that of its misses a second, over the sizes that it resolves, as a share of the misses at the smallest \
             of these, if they are more than a tenth of what the program touches in a second; {visits}. {INTERFACES_ARE}"
        )
    }

    fn limits(self) -> Vec<String> {
        let own: &[&str] = match self {
            Self::Made => &LIMITS_MADE,
            Self::Real => &LIMITS_REAL,
        };
        let all = LIMITS.iter().chain(own);
        all.map(|&limit| limit.to_owned()).collect()
    }
}

/// For a guest under TCG on a busy host.
const PATIENCE: Duration = Duration::from_secs(1800);
/// Of the guest: below it, frames are numbered without a gap.
const MEMORY_MIB: u64 = 768;

/// Runs the experiment.
///
/// # Errors
///
/// Why a guest did not come up; what was measured before is kept and not repeated.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let lengths = match args.quick {
        true => Lengths {
            estimates: 8,
            periods: 5,
        },
        false => Lengths {
            estimates: 12,
            periods: 10,
        },
    };
    let only = args.only.as_deref().unwrap_or_default();
    let kinds = args
        .programs
        .map_or(vec![Programs::Made, Programs::Real], |kind| vec![kind]);
    let chosen: Vec<(Programs, Vec<&Program>)> = kinds
        .into_iter()
        .map(|kind| {
            let all = kind.all(args.quick).iter();
            (kind, all.filter(|one| one.name.starts_with(only)).collect())
        })
        .filter(|(_, programs): &(_, Vec<_>)| !programs.is_empty())
        .collect();
    anyhow::ensure!(!chosen.is_empty(), "no program's name begins with '{only}'");
    let seeds = args.seeds.unwrap_or(if args.quick { 1 } else { 3 });
    let steps = chosen.iter().map(|(_, programs)| programs.len());
    let steps = steps.sum::<usize>() * usize::try_from(seeds)? + 2 * chosen.len();
    // A seed of a program has a file of its own, so that programs can be added.
    let mut progress = Progress::begin(&args.state, &format!("{lengths:?}"), steps)?;
    for (kind, programs) in chosen {
        let guest = "Linux 6.12 of our options, one vCPU, 768 MiB, huge pages off";
        let name = kind.name();
        let conditions =
            progress.step(&format!("{name}-begin"), || Conditions::begin("tcg", guest))?;
        let mut all = Vec::new();
        for program in programs {
            let mut of_seeds: Vec<Judged> = Vec::new();
            for seed in 1..=seeds {
                let name = format!("{}-{seed}", file_name(program.name));
                of_seeds.push(progress.step(&name, || judge(program, seed, lengths))?);
            }
            all.push((program, of_seeds));
        }
        let mut command = "./dev lab judge".to_owned();
        if args.quick {
            command.push_str(" --quick");
        }
        if args.programs.is_some() || only.is_empty() {
            let kind = clap::ValueEnum::to_possible_value(&kind);
            let kind = kind.as_ref().map_or("", |kind| kind.get_name());
            command.push_str(&format!(" --programs {kind}"));
        }
        if !only.is_empty() {
            command.push_str(&format!(" --only '{only}'"));
        }
        if let Some(seeds) = args.seeds {
            command.push_str(&format!(" --seeds {seeds}"));
        }
        let set = ResultSet {
            title: kind.title().to_owned(),
            method: kind.method(),
            command,
            measurements: measurements(&all),
            limits: kind.limits(),
            raw: serde_json::to_value(
                all.iter()
                    .map(|(program, of)| (program.name, of))
                    .collect::<Vec<_>>(),
            )?,
            ..ResultSet::new(
                name,
                progress.step(&format!("{name}-end"), || conditions.ended())?,
                (seeds, Repetition::Seed),
            )
        };
        args.keep.keep(set, charts(&all), out)?;
    }
    Ok(())
}

/// The part of the method that describes the kernel's interfaces.
const INTERFACES_ARE: &str = "`damon-default` is DAMON at the settings of its documentation (5 ms, 100 ms, 10 to 1000 regions), `damon-tuned` aggregates over half a second \
    with 20 samples; both count the bytes of regions in which an access was found. `mglru` ages the control group's generations and counts the newest two; `clear-refs` is `Referenced` after `clear_refs`; \
    `cgroup` is what is charged less inactive file pages (cAdvisor's working set); `committed` and `available` are `Committed_AS`, and `MemTotal` less `MemAvailable`, of the whole guest. The cost is CPU time over that of the program: of the method's process and its kdamond, or as `attach` reports it. A process wakes every 2 ms beside them, which makes the emulator \
    drop its TLB: that has room for all pages of the program and would hide nearly all accesses from a kernel's thread.";

const LIMITS: [&str; 5] = [
    "What a curve gives as a bound only (`at least`, `at most`), because too little was seen for more or it begins above, counts as an estimate in the tables of errors. How many are bounds, and how often band or bound holds the truth, has tables of its own.",
    "Emulated: CPU costs are those of an emulated processor, some 20 to 50 times those of a real one for each page, and the budget of 1 % pays for as much less. Costs can be compared with each other.",
    "The emulator's TLB is dropped every 2 ms; a processor's has some thousand entries, of which pages in constant use keep theirs for longer. DAMON clears accessed bits at every check, so that each of its intervals misses what the TLB hides in it: where they are of a few milliseconds, its misses a second are too low.",
    "Errors of curves are of the number of misses over up to the last minute, and so hold that of the visits a second, which change while other work runs on the host; the working sets show how far the shapes are right.",
    "Huge pages are off; so is memory pressure, by which generations age themselves.",
];

const LIMITS_MADE: [&str; 2] = [
    "A loop of 64 MiB takes a fraction of a second, and a check of its pages comes later: of misses at smaller sizes the curves show only that they are many. Their number is off there, by up to all of it.",
    "Working sets of ours are of the last period of 5 s, and of up to a minute while no change of phase is found: they follow steps of 8 s one or two periods late, which is most of their error there. Those of the kernel's interfaces are of the last second.",
];

const LIMITS_REAL: [&str; 4] = [
    "Real programs are traced while they are watched, which makes the guest several times slower still. Costs are shares of the program's time, which is slower by the same plugin.",
    "The plugin records references to page frames. Pages that the program maps while a method watches are not in the truth until the next list, and those that it frees stay in the stack of the truth; the share of new ones has a table. Frames of shared libraries count whoever uses them, and references by the kernel for the process (copies of what it reads and writes) count as its own.",
    "The plugin's filter holds the 64 pages that all processes of the guest used most recently. Misses at sizes from 64 pages on are exact; what was touched in the last second is known to within these 64 pages, and as exactly as the records come in time.",
    "The programs repeat one kind of work without phases for as long as they are watched. Seeds are repetitions of them: their inputs are the same or chosen by the programs themselves.",
];

/// Letters and digits of a name.
fn file_name(name: &str) -> String {
    let kept = name.chars().filter(char::is_ascii_alphanumeric);
    kept.collect::<String>().to_ascii_lowercase()
}

/// Judges the methods on one program.
fn judge(program: &Program, seed: u64, lengths: Lengths) -> anyhow::Result<Judged> {
    let folder = tempfile::tempdir()?;
    let own = std::env::current_exe()?;
    let beside = own.parent().unwrap_or(Path::new("."));
    let mut files = ["plimsoll", "plimsoll-judge"]
        .map(|name| beside.join(name))
        .to_vec();
    if let Kind::Real(real) = program.kind {
        files.extend(real.files.iter().map(PathBuf::from));
    }
    for file in &files {
        anyhow::ensure!(
            file.is_file(),
            "there is no {}: ./dev lab judge installs what it needs",
            file.display()
        );
    }
    let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    let image =
        GuestImage::tracking_idle_pages(&script(program, seed, lengths), &files, folder.path());
    let image = image.context("./dev setup builds its kernel")?;
    let _turn = host::turn();
    let mut config = GuestConfig {
        accelerator: AcceleratorChoice::Tcg,
        memory_mib: MEMORY_MIB,
        ..GuestConfig::new(&format!("judge-{}", std::process::id()), "")
    };
    let (truth, trace) = match program.kind {
        Kind::Made(made) => (Truth::Made(ClosedForm::new(made)?), None),
        Kind::Real(_) => {
            let trace = ProcessTrace::of(&mut config)?;
            let memory = PageCount(MEMORY_MIB * PAGES_PER_MIB);
            (
                Truth::Real(Counted::new(trace.frames(), memory)),
                Some(trace),
            )
        }
    };
    let mut guest = Guest::start(&image, &config)?;
    let mut reader = Reader::new(truth);
    let deadline = Instant::now() + PATIENCE;
    let mut is_finished = false;
    loop {
        match guest.next_line(deadline.saturating_duration_since(Instant::now())) {
            Ok(Some(line)) => {
                is_finished |= line.text == "finished";
                reader.take(line.text.trim_end(), Instant::now())?;
            }
            Ok(None) => anyhow::bail!("the guest is still not done"),
            Err(GuestError::GuestEnded { .. }) => break,
            Err(error) => return Err(error.into()),
        }
    }
    anyhow::ensure!(is_finished, "the guest did not come to its end");
    drop(guest);
    if let Some(trace) = trace {
        trace.end()?;
    }
    Ok(reader.judged)
}

/// The figures of a method on a program: one of each seed.
type Figure = fn(&Shown) -> Option<f64>;

/// One of the judgements of an estimate.
type OneOf = fn(&Estimate) -> Option<Judgement>;

fn median_error(shown: &Shown, of: OneOf) -> Option<f64> {
    let errors = shown.estimates.iter().filter_map(of);
    let errors: Vec<f64> = errors.map(|judged| judged.error()).collect();
    (!errors.is_empty()).then(|| median(errors))
}

/// Share of the estimates with a band for which this is true.
fn share_of_bands(shown: &Shown, of: OneOf, is_so: fn(&Band, f64) -> bool) -> Option<f64> {
    let judged = shown.estimates.iter().filter_map(of);
    let each = judged.filter_map(|one| Some(is_so(&one.band?, one.truth)));
    let each: Vec<bool> = each.collect();
    let count = each.iter().filter(|&&is_so| is_so).count();
    (!each.is_empty()).then(|| count as f64 / each.len() as f64)
}

fn is_bound(band: &Band, _: f64) -> bool {
    band.bound != WorkingSetBound::Estimate
}

fn measurements(all: &[(&Program, Vec<Judged>)]) -> Vec<Measurement> {
    let figures: [(&str, Unit, Figure); 11] = [
        (
            "Error of the memory at which the misses a second are a tenth of the pages touched in a second",
            Unit::Percent,
            |shown| median_error(shown, NEEDED),
        ),
        (
            "Error of the pages touched in a second",
            Unit::Percent,
            |shown| median_error(shown, |one| Some(one.touched)),
        ),
        (
            "Estimates of that memory whose 95 % band, or bound, holds the truth",
            Unit::Share,
            |shown| share_of_bands(shown, NEEDED, Band::holds),
        ),
        (
            "Estimates of that memory that are bounds only",
            Unit::Share,
            |shown| share_of_bands(shown, NEEDED, is_bound),
        ),
        (
            "Error of the working sets that ours report: memory at which 5 % of the visits miss that their curves resolve",
            Unit::Percent,
            |shown| median_error(shown, |one| one.of_resolved),
        ),
        (
            "Working sets whose 95 % band, or bound, holds the truth",
            Unit::Share,
            |shown| share_of_bands(shown, |one| one.of_resolved, Band::holds),
        ),
        ("Working sets that are bounds only", Unit::Share, |shown| {
            share_of_bands(shown, |one| one.of_resolved, is_bound)
        }),
        (
            "CPU time over that of the program",
            Unit::Percent,
            |shown| shown.cost,
        ),
        (
            "Smallest size that the curve resolves",
            Unit::Bytes,
            |shown| shown.resolved_bytes,
        ),
        ("Mean absolute error of the curve", Unit::Share, |shown| {
            shown.curve_error.filter(|_| shown.resolves_much())
        }),
        (
            "Pages mapped while a method watched, which the truth lacks, of all of the program",
            Unit::Share,
            |shown| shown.new_frames,
        ),
    ];
    let mut made = Vec::new();
    for (what, unit, figure) in figures {
        for (program, of_seeds) in all {
            for method in methods() {
                let shown = || of_seeds.iter().filter_map(|judged| judged.get(method));
                // What it sees then is the program's own beginning.
                let is_blind = method == "write-scan" && program.only_reads();
                let values: Vec<_> = of_seeds
                    .iter()
                    .map(|judged| judged.get(method).filter(|_| !is_blind).and_then(figure))
                    .collect();
                let has_value = values.iter().any(Option::is_some);
                let message = shown().find_map(|shown| shown.message.clone());
                let remark = match (has_value, is_blind) {
                    (true, _) => String::new(),
                    (false, true) => "the program only reads".to_owned(),
                    (false, false) => message.unwrap_or_default(),
                };
                // Only ours have curves.
                if !has_value && (unit != Unit::Percent || remark.is_empty()) {
                    continue;
                }
                made.push(Measurement {
                    item: String::new(),
                    what: what.to_owned(),
                    of: method.to_owned(),
                    column: program.name.to_owned(),
                    unit,
                    values,
                    paper: String::new(),
                    remark,
                });
            }
        }
    }
    made
}

/// The memory that few misses need.
const NEEDED: OneOf = |estimate| Some(estimate.needed);

/// Methods that cost CPU time for each estimate: ours that see reads, and the kernel's.
const COSTING: [[&str; 4]; 2] = [
    ["idle", "idle at 10 %", "damon", "damon at 10 %"],
    ["damon-default", "damon-tuned", "mglru", "clear-refs"],
];

/// What each method costs and how far it is off, and the working set over time of the program that changes it.
fn charts(all: &[(&Program, Vec<Judged>)]) -> Vec<(&'static str, Chart)> {
    let of_seeds = |of_seeds: &[Judged], method, figure: Figure| {
        let shown = of_seeds.iter().filter_map(|judged| judged.get(method));
        let values: Vec<f64> = shown.filter_map(figure).collect();
        (!values.is_empty()).then(|| median(values))
    };
    let costs = COSTING.as_flattened().iter().map(|&method| {
        let points = all.iter().filter_map(|(_, seeds)| {
            Some((
                of_seeds(seeds, method, |shown| shown.cost)?,
                of_seeds(seeds, method, |shown| median_error(shown, NEEDED))?,
            ))
        });
        Series::new(method, SeriesStyle::Dots, points)
    });
    let mut charts = vec![(
        "cost",
        Chart::new(
            "Error of the memory at which few pages miss, against its cost",
            "a dot for each program, but those of errors beyond 100 %; emulated (TCG)",
            [
                Axis::new("CPU time over that of the program", AxisUnit::Share),
                Axis::new("error", AxisUnit::Share).up_to(1.0),
            ],
            costs,
        ),
    )];
    let changing = all.iter().find(|(program, _)| program.is_changing());
    if let Some((program, of_seeds)) = changing
        && let Some(judged) = of_seeds.first()
    {
        for (name, methods) in ["ours", "kernel"].into_iter().zip(COSTING) {
            let mut series = Vec::new();
            let mut offset = 0.0;
            let mut truth = Vec::new();
            for method in methods {
                let Some(shown) = judged.get(method) else {
                    continue;
                };
                let points = |of: fn(&Estimate) -> f64| {
                    let points = shown.estimates.iter();
                    points
                        .map(move |one| (one.seconds + offset, of(one)))
                        .collect::<Vec<_>>()
                };
                series.push(Series::new(
                    method,
                    SeriesStyle::Dots,
                    points(|one| one.needed.bytes),
                ));
                truth.extend(points(|one| one.needed.truth));
                offset += shown.estimates.last().map_or(0.0, |one| one.seconds);
            }
            series.push(Series::new("in use", SeriesStyle::Truth, truth));
            charts.push((
                name,
                Chart::new(
                    format!("Working set over time, {}", program.name),
                    "one method after the other; emulated (TCG)",
                    [
                        Axis::new("time", AxisUnit::Seconds),
                        Axis::new("working set", AxisUnit::Bytes),
                    ],
                    series,
                ),
            ));
        }
    }
    charts
}
