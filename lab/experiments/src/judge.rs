//! The judge: the working set of one process by every interface of the kernel, and by our backends, beside a truth in closed form.
//!
//! Everything runs inside of one emulated guest, on a program of which it is known what it touches: `plimsoll-judge`
//! (`bin/plimsoll-judge.rs`) reads the kernel's own interfaces, `plimsoll attach` is ours. Two truths: the LRU memory at which 5 % of
//! the visits miss, which an operator asks for; and the pages touched in a second, which most of the kernel's interfaces are for.
//! Each estimate is compared with both. Of our backends, the first is that of the visits that their curves resolve, as their
//! working sets are.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use plimsoll_flow::{MissRatioCurve, PageCount, WorkingSet};
use plimsoll_observe::even_sizes;
use plimsoll_plot::{Axis, Chart, Series, SeriesStyle, Unit as AxisUnit};
use plimsoll_protocol::tracer::TracerLine;
use plimsoll_rig::{AcceleratorChoice, Guest, GuestConfig, GuestError, GuestImage, host, median};
use serde::{Deserialize, Serialize};

use crate::curves::Law;
use crate::results::{Conditions, KeepArgs, Measurement, Progress, Repetition, ResultSet, Unit};

/// Compare every interface by which Linux shows working sets, and our backends, with the truth, in one guest
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Number of seeds, each of which boots every guest anew [default: 3; 1 with --quick]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// Few programs and few estimates: whether everything works
    #[arg(long)]
    quick: bool,
    /// Directory of measurements already made, which are not repeated
    #[arg(long, default_value = "target/lab/judge")]
    state: PathBuf,
    #[command(flatten)]
    keep: KeepArgs,
}

/// The kernel's own interfaces, as plimsoll-judge names them.
const INTERFACES: [&str; 8] = [
    "damon-default",
    "damon-tuned",
    "mglru",
    "clear-refs",
    "rss",
    "cgroup",
    "committed",
    "available",
];
/// Those that only read a file, and are read at the same time.
const READERS: [&str; 4] = ["rss", "cgroup", "committed", "available"];
/// Our backends, with their budgets in percent.
const OURS: [Ours; 5] = [
    Ours::new("idle", "idle", 1),
    Ours::new("idle at 10 %", "idle", 10),
    Ours::new("damon", "damon", 1),
    Ours::new("damon at 10 %", "damon", 10),
    Ours::new("write-scan", "write-scan", 1),
];
/// Time for which each of the kernel's interfaces is read again and again: a second is what truths are computed for.
const INTERVAL: Duration = Duration::from_secs(1);
/// Length of a period of ours: the default.
const PERIOD_S: u32 = 5;
const PAGE_BYTES: f64 = 4096.0;
const PAGES_PER_MIB: u64 = 256;
/// For a guest under TCG on a busy host.
const PATIENCE: Duration = Duration::from_secs(1800);

/// One of our backends at a budget.
#[derive(Debug)]
struct Ours {
    name: &'static str,
    backend: &'static str,
    budget_percent: u32,
}

impl Ours {
    const fn new(name: &'static str, backend: &'static str, budget_percent: u32) -> Self {
        Self {
            name,
            backend,
            budget_percent,
        }
    }
}

/// A program whose touches are known.
#[derive(Debug, Clone, Copy)]
struct Program {
    name: &'static str,
    words: &'static str,
    /// How pages are chosen; `None` for one after the other.
    law: Option<Law>,
    /// Of the array; of a program that changes its working set, the largest.
    mib: u64,
    /// Whether it changes its working set, as its output says.
    is_changing: bool,
}

impl Program {
    fn only_reads(&self) -> bool {
        !self.words.contains("write_ratio")
    }
}

const PROGRAMS: [Program; 5] = [
    Program {
        name: "one after the other, 64 MiB",
        words: "workload=sequential mib=64",
        law: None,
        mib: 64,
        is_changing: false,
    },
    Program {
        name: "Zipf 1.0, 96 MiB",
        words: "workload=zipf mib=96",
        law: Some(Law::Zipf(1.0)),
        mib: 96,
        is_changing: false,
    },
    Program {
        name: "32, 96 and 64 MiB in turn",
        words: "workload=steps steps_mib=32,96,64 step_ms=8000 seconds=0",
        law: None,
        mib: 96,
        is_changing: true,
    },
    Program {
        name: "at random, 96 MiB",
        words: "workload=uniform mib=96",
        law: Some(Law::Uniform),
        mib: 96,
        is_changing: false,
    },
    Program {
        name: "Zipf 0.6, half of it written, 96 MiB",
        words: "workload=zipf alpha=0.6 mib=96 write_ratio=0.5",
        law: Some(Law::Zipf(0.6)),
        mib: 96,
        is_changing: false,
    },
];
/// So many of them with `--quick`.
const QUICK_PROGRAMS: usize = 3;

/// An estimate beside the truths at its time.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Estimate {
    /// Since the method began.
    seconds: f64,
    bytes: f64,
    /// Memory at which 5 % of the visits miss.
    needed: f64,
    /// Touched in a second.
    touched: f64,
}

impl Estimate {
    fn error(self, truth: fn(Self) -> f64) -> f64 {
        (self.bytes / truth(self) - 1.0).abs()
    }
}

/// What one method showed of one program.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Shown {
    estimates: Vec<Estimate>,
    /// CPU time over that of the target.
    cost: Option<f64>,
    /// Smallest size of which its curve makes a claim.
    resolved_bytes: Option<f64>,
    /// Mean absolute error of its misses a second, as a share of those at the smallest size.
    curve_error: Option<f64>,
    /// What it said instead.
    message: Option<String>,
}

impl Shown {
    /// Whether its curve makes a claim of more than a tenth of what the program touches in a second.
    fn resolves_much(&self) -> bool {
        let touched = self.estimates.iter().map(|one| one.touched);
        let most = touched.fold(0.0, f64::max);
        self.resolved_bytes.is_some_and(|first| first < 0.9 * most)
    }
}

/// Of one program and seed: by method.
type Judged = BTreeMap<String, Shown>;

/// Runs the experiment.
///
/// # Errors
///
/// Why a guest did not come up; what was measured before is kept and not repeated.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let seeds = args.seeds.unwrap_or(if args.quick { 1 } else { 3 });
    let (programs, lengths) = match args.quick {
        true => (
            &PROGRAMS[..QUICK_PROGRAMS],
            Lengths {
                estimates: 8,
                periods: 5,
            },
        ),
        false => (
            &PROGRAMS[..],
            Lengths {
                estimates: 12,
                periods: 10,
            },
        ),
    };
    let steps = programs.len() * usize::try_from(seeds)? + 2;
    let settings = format!("{lengths:?}, seeds {seeds}, {} programs", programs.len());
    let mut progress = Progress::begin(&args.state, &settings, steps)?;
    let guest = "Linux 6.12 of our options, one vCPU, 768 MiB, huge pages off";
    let conditions = progress.step("begin", || Conditions::begin("tcg", guest))?;
    let mut all = Vec::new();
    for program in programs {
        let mut of_seeds: Vec<Judged> = Vec::new();
        for seed in 1..=seeds {
            let name = format!("{}-{seed}", file_name(program.name));
            of_seeds.push(progress.step(&name, || judge(program, seed, lengths))?);
        }
        all.push((program, of_seeds));
    }
    let set = ResultSet {
        title: "The judge: working sets by the kernel's interfaces and ours, beside the truth"
            .to_owned(),
        method: METHOD.to_owned(),
        command: format!(
            "./dev lab judge{}",
            if args.quick { " --quick" } else { "" }
        ),
        measurements: measurements(&all),
        limits: LIMITS.map(str::to_owned).to_vec(),
        raw: serde_json::to_value(
            all.iter()
                .map(|(program, of)| (program.name, of))
                .collect::<Vec<_>>(),
        )?,
        ..ResultSet::new(
            "judge",
            progress.step("end", || conditions.ended())?,
            (seeds, Repetition::Seed),
        )
    };
    args.keep.keep(set, charts(&all), out)
}

const METHOD: &str = "In an emulated guest (TCG) a program of known references runs in a control group of its own, and every method \
    in turn watches it while it runs: the kernel's own interfaces read once a second by `plimsoll-judge`, a program that reads and writes files alone, and `plimsoll attach` with \
    periods of 5 s at a budget of 1 %, or of 10 %. Errors are medians over a method's estimates, of the relative distance from a truth in closed form: the LRU memory at which 5 % of the visits miss, \
    and the pages touched in a second at the rate that the program itself reports. Working sets of ours are of the visits that their curves resolve, and are compared with the memory at which 5 % of these miss. \
    The error of a curve is that of its misses a second, over the sizes that it resolves, as a share of the misses at the smallest of these, if they are more than a tenth of what the program touches in a second; the visits a second are the program's own count while the method ran. `damon-default` is DAMON at the settings of its documentation (5 ms, 100 ms, 10 to 1000 regions), `damon-tuned` aggregates over half a second \
    with 20 samples; both count the bytes of regions in which an access was found. `mglru` ages the control group's generations and counts the newest two; `clear-refs` is `Referenced` after `clear_refs`; \
    `cgroup` is what is charged less inactive file pages (cAdvisor's working set); `committed` and `available` are `Committed_AS`, and `MemTotal` less `MemAvailable`, of the whole guest. The cost is CPU time over that of the program: of the method's process and its kdamond, or as `attach` reports it. A process wakes every 2 ms beside them, which makes the emulator \
    drop its TLB: that has room for all pages of the program and would hide nearly all accesses from a kernel's thread.";

const LIMITS: [&str; 8] = [
    "Emulated: CPU costs are those of an emulated processor, some 20 to 50 times those of a real one for each page, and the budget of 1 % pays for as much less. Costs can be compared with each other.",
    "The emulator's TLB is dropped every 2 ms; a processor's has some thousand entries, of which pages in constant use keep theirs for longer. DAMON clears accessed bits at every check, so that each of its intervals misses what the TLB hides in it: where they are of a few milliseconds, its misses a second are too low.",
    "A loop of 64 MiB takes a fraction of a second, and a check of its pages comes later: of misses at smaller sizes the curves show only that they are many. Their number is off there, by up to all of it.",
    "Errors of curves are of the number of misses over up to the last minute, and so hold that of the visits a second, which change while other work runs on the host; the working sets show how far the shapes are right.",
    "Working sets of ours are of the last period of 5 s, and of up to a minute while no change of phase is found: they follow steps of 8 s one or two periods late, which is most of their error there. Those of the kernel's interfaces are of the last second.",
    "All programs are made ones with one array; no real program was judged.",
    "Huge pages are off; so is memory pressure, by which generations age themselves.",
    "Of the page log's plugin no trace was taken: the truths are closed forms.",
];

/// How much is measured by each method.
#[derive(Debug, Clone, Copy)]
struct Lengths {
    /// Of the kernel's interfaces, a second each.
    estimates: u32,
    /// Of ours.
    periods: u32,
}

/// Letters and digits of a name.
fn file_name(name: &str) -> String {
    let kept = name.chars().filter(char::is_ascii_alphanumeric);
    kept.collect::<String>().to_ascii_lowercase()
}

/// The script that the guest runs.
fn script(program: &Program, seed: u64, lengths: Lengths) -> String {
    let words = program
        .words
        .split(' ')
        .map(|word| format!("plimsoll.{word}"));
    let words = words.collect::<Vec<_>>().join(" ");
    let mut text = format!(
        "b=/bin/busybox
$b mkdir -p /proc /sys /tmp /dev /cg /run
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
$b mount -t tmpfs tmp /tmp
$b mount -t debugfs debug /sys/kernel/debug
$b mount -t cgroup2 cg /cg
echo 1 > /proc/sys/kernel/printk
echo never > /sys/kernel/mm/transparent_hugepage/enabled
echo y > /sys/kernel/mm/lru_gen/enabled
echo +memory > /cg/cgroup.subtree_control
$b mkdir /cg/judged
$b sh -c 'echo $$ > /cg/judged/cgroup.procs; exec /workload {words} plimsoll.seed={seed}' > /tmp/log 2>&1 &
pid=$!
while ! $b grep -q round /tmp/log; do $b sleep 0.2; done
/plimsoll-judge wake 2000 &
$b tail -f /tmp/log &
tail=$!
"
    );
    for interface in INTERFACES {
        let count = lengths.estimates;
        let interval = INTERVAL.as_millis();
        let run = format!("/plimsoll-judge {interface} $pid {interval} {count} 2>&1");
        text += &match READERS.contains(&interface) {
            true => format!("echo begin {interface}\n{run} &\nreaders=\"$readers $!\"\n"),
            false => format!("echo begin {interface}\n{run}\n"),
        };
    }
    text += "wait $readers\n";
    // Lines of JSON are long, and the console is one.
    let (form, to) = match program.is_changing {
        true => ("csv", ""),
        false => {
            text += "$b kill $tail\n";
            ("json", " > /tmp/out")
        }
    };
    for ours in &OURS {
        if !to.is_empty() {
            text += "lines=$($b wc -l < /tmp/log)\n";
        }
        text += &format!(
            "echo begin {}\n/plimsoll attach $pid --backend {} --budget {}% --period {PERIOD_S}s --periods {} -o {form} 2>&1{to}\n",
            ours.name, ours.backend, ours.budget_percent, lengths.periods
        );
        if !to.is_empty() {
            // The rounds that ended meanwhile. The console takes lines of up to 16 KiB.
            text += "$b tail -n +$((lines + 1)) /tmp/log\n$b fold -w 4000 /tmp/out\n";
        }
    }
    text + "echo finished\n$b poweroff -f\n"
}

/// The truths of a program at a time.
#[derive(Debug, Clone)]
struct Truth {
    program: Program,
    /// Pages that it uses now.
    pages: u64,
    /// Visits a second, of the last round.
    rate: f64,
    /// Visits, and the seconds that they took, of all rounds since the method began.
    since_begun: (f64, f64),
    curve: Option<MissRatioCurve>,
}

impl Truth {
    fn new(program: Program) -> anyhow::Result<Self> {
        let pages = program.mib * PAGES_PER_MIB;
        let curve = program.law.map(|law| law.lru_curve(PageCount(pages)));
        Ok(Self {
            program,
            pages,
            rate: 0.0,
            since_begun: (0.0, 0.0),
            curve: curve.transpose()?,
        })
    }

    /// Bytes at which 5 % of the visits miss that miss at `from`.
    fn needed(&self, from: PageCount) -> f64 {
        let of_curve = self.curve.as_ref();
        let size = of_curve.and_then(|curve| {
            let resolved = curve.miss_ratio(from);
            curve.size_for(resolved * WorkingSet::MISS_RATIO)
        });
        size.map_or(self.pages, |size| size.0) as f64 * PAGE_BYTES
    }

    /// Bytes touched in a second.
    fn touched(&self) -> f64 {
        let count = self.pages as f64;
        let pages = match self.program.law {
            None => count.min(self.rate),
            Some(law) => {
                let alpha = match law {
                    Law::Uniform => 0.0,
                    Law::Zipf(alpha) => alpha,
                };
                let weights = (1..=self.pages).map(|rank| (rank as f64).powf(-alpha));
                let sum: f64 = weights.clone().sum();
                let missed = weights.map(|weight| (-weight / sum * self.rate).exp());
                count - missed.sum::<f64>()
            }
        };
        pages * PAGE_BYTES
    }

    /// Takes a line that the program printed.
    fn follow(&mut self, line: &str) {
        let value = |key: &str| {
            let mut words = line.split(' ');
            words.find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
        };
        let number = |key: &str| value(key)?.parse::<f64>().ok();
        let pages = value("pages").and_then(|pages| pages.parse().ok());
        if let (Some(pages), Some(ops), Some(ms)) = (pages, number("ops"), number("ms"))
            && ms > 0.0
        {
            if self.program.is_changing {
                self.pages = pages;
            }
            self.rate = ops / ms * 1e3;
            self.since_begun.0 += ops;
            self.since_begun.1 += ms / 1e3;
        }
    }

    /// Error of the misses a second of a curve, of the time since the method began, over the sizes that it resolves, as a share of the misses at the smallest of them;
    /// `None` if it resolves none that the program could miss.
    fn curve_error(&self, curve: &MissRatioCurve) -> Option<f64> {
        let (from, end) = (curve.points().first()?.size, PageCount(self.pages));
        let (visits, seconds) = self.since_begun;
        let misses = |size| {
            visits / seconds
                * match &self.curve {
                    Some(truth) => truth.miss_ratio(size),
                    None => f64::from(u8::from(size < end)),
                }
        };
        let most = misses(from);
        // Neither is one without a round.
        if from >= end || most.is_nan() || most <= 0.0 {
            return None;
        }
        let errors = even_sizes(from, end).map(|size| {
            let estimated = curve.misses_per_second(size)?.expected;
            Some((estimated - misses(size)).abs() / most)
        });
        let errors = errors.collect::<Option<Vec<f64>>>()?;
        Some(errors.iter().sum::<f64>() / errors.len() as f64)
    }
}

/// What is read from the guest's console.
#[derive(Debug)]
struct Reader {
    truth: Truth,
    judged: Judged,
    method: Option<String>,
    begun: Instant,
    costs: Vec<f64>,
    /// The beginning of a line of JSON that was folded.
    folded: String,
}

impl Reader {
    fn take(&mut self, line: &str, at: Instant) {
        if line.starts_with("begin ") {
            self.folded.clear();
        }
        if line.starts_with('{') || !self.folded.is_empty() {
            self.folded.push_str(line);
            if self.folded.ends_with('}')
                && serde_json::from_str::<serde_json::Value>(&self.folded).is_ok()
            {
                let whole = std::mem::take(&mut self.folded);
                self.take_line(&whole, at);
            }
            return;
        }
        self.take_line(line, at);
    }

    fn take_line(&mut self, line: &str, at: Instant) {
        if line.starts_with("plimsoll: round ") {
            self.truth.follow(line);
            return;
        }
        if let Some(method) = line.strip_prefix("begin ") {
            self.judged.entry(method.to_owned()).or_default();
            self.method = Some(method.to_owned());
            self.costs.clear();
            self.truth.since_begun = (0.0, 0.0);
            self.begun = at;
            return;
        }
        let words: Vec<&str> = line.split(' ').collect();
        let method = match words.as_slice() {
            // Of several that are read at the same time.
            ["estimate" | "cost", of, ..] => Some(*of),
            _ => self.method.as_deref(),
        };
        let Some(shown) = method.and_then(|method| self.judged.get_mut(method)) else {
            return;
        };
        let mut estimate = |bytes: f64| {
            shown.estimates.push(Estimate {
                seconds: at.saturating_duration_since(self.begun).as_secs_f64(),
                bytes,
                needed: self.truth.needed(PageCount(0)),
                touched: self.truth.touched(),
            });
        };
        match words.as_slice() {
            ["estimate", _, bytes] => bytes.parse().into_iter().for_each(estimate),
            ["cost", _, own, target, _] => {
                if let (Ok(own), Ok(target)) = (own.parse::<f64>(), target.parse::<f64>()) {
                    shown.cost = Some(own / target);
                }
            }
            _ if line.starts_with('{') => match TracerLine::read(line.as_bytes()) {
                Ok(TracerLine::Period(period)) => {
                    if let Some(pages) = period.working_set_pages {
                        estimate(pages as f64 * PAGE_BYTES);
                    }
                }
                Ok(TracerLine::Final(last)) => {
                    shown.cost = Some(last.overhead_ratio);
                    let curve = last.curve.as_ref().and_then(|curve| curve.to_curve().ok());
                    let first = curve.as_ref().and_then(|curve| curve.points().first());
                    if let (Some(curve), Some(first)) = (&curve, first) {
                        shown.resolved_bytes = Some(first.size.0 as f64 * PAGE_BYTES);
                        shown.curve_error = self.truth.curve_error(curve);
                        let needed = self.truth.needed(first.size);
                        for estimate in &mut shown.estimates {
                            estimate.needed = needed;
                        }
                    }
                }
                Err(error) => shown.message = Some(error.to_string()),
            },
            _ => {
                let fields: Vec<&str> = line.split(',').collect();
                let number = |index: usize| fields.get(index)?.parse::<f64>().ok();
                match (number(0), number(2), number(7)) {
                    (Some(_), Some(pages), Some(cost)) => {
                        estimate(pages * PAGE_BYTES);
                        self.costs.push(cost);
                        let mean = self.costs.iter().sum::<f64>() / self.costs.len() as f64;
                        shown.cost = Some(mean);
                    }
                    _ if line.starts_with("plimsoll") && line.contains("error") => {
                        shown.message = Some(line.to_owned());
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Judges the methods on one program.
fn judge(program: &Program, seed: u64, lengths: Lengths) -> anyhow::Result<Judged> {
    let folder = tempfile::tempdir()?;
    let own = std::env::current_exe()?;
    let beside = own.parent().unwrap_or(Path::new("."));
    let programs = ["plimsoll", "plimsoll-judge"].map(|name| beside.join(name));
    for program in &programs {
        anyhow::ensure!(program.is_file(), "there is no {}", program.display());
    }
    let programs: Vec<&Path> = programs.iter().map(PathBuf::as_path).collect();
    let image =
        GuestImage::tracking_idle_pages(&script(program, seed, lengths), &programs, folder.path());
    let image = image.context("./dev setup builds its kernel")?;
    let _turn = host::turn();
    let config = GuestConfig {
        accelerator: AcceleratorChoice::Tcg,
        memory_mib: 768,
        ..GuestConfig::new(&format!("judge-{}", std::process::id()), "")
    };
    let mut guest = Guest::start(&image, &config)?;
    let mut reader = Reader {
        truth: Truth::new(*program)?,
        judged: Judged::new(),
        method: None,
        begun: Instant::now(),
        costs: Vec::new(),
        folded: String::new(),
    };
    let deadline = Instant::now() + PATIENCE;
    let mut is_finished = false;
    loop {
        match guest.next_line(deadline.saturating_duration_since(Instant::now())) {
            Ok(Some(line)) => {
                is_finished |= line.text == "finished";
                reader.take(line.text.trim_end(), Instant::now());
            }
            Ok(None) => anyhow::bail!("the guest is still not done"),
            Err(GuestError::GuestEnded { .. }) => break,
            Err(error) => return Err(error.into()),
        }
    }
    anyhow::ensure!(is_finished, "the guest did not come to its end");
    Ok(reader.judged)
}

/// The figures of a method on a program: one of each seed.
type Figure = fn(&Shown) -> Option<f64>;

fn median_error(shown: &Shown, truth: fn(Estimate) -> f64) -> Option<f64> {
    let errors = shown.estimates.iter().map(|one| one.error(truth));
    (!shown.estimates.is_empty()).then(|| median(errors))
}

/// Names of all methods.
fn methods() -> impl Iterator<Item = &'static str> {
    OURS.iter().map(|ours| ours.name).chain(INTERFACES)
}

fn measurements(all: &[(&Program, Vec<Judged>)]) -> Vec<Measurement> {
    let figures: [(&str, Unit, Figure); 5] = [
        (
            "Error of the working set: memory at which 5 % of the visits miss",
            Unit::Percent,
            |shown| median_error(shown, |one| one.needed),
        ),
        (
            "Error of the working set: pages touched in a second",
            Unit::Percent,
            |shown| median_error(shown, |one| one.touched),
        ),
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
                // Only ours have curves.
                if !has_value && unit != Unit::Percent {
                    continue;
                }
                let message = shown().find_map(|shown| shown.message.clone());
                made.push(Measurement {
                    item: String::new(),
                    what: what.to_owned(),
                    of: format!("{}: {method}", program.name),
                    unit,
                    values,
                    paper: String::new(),
                    remark: match (has_value, is_blind) {
                        (true, _) => String::new(),
                        (false, true) => "the program only reads".to_owned(),
                        (false, false) => message.unwrap_or_default(),
                    },
                });
            }
        }
    }
    made
}

/// The working set over time of the program that changes it, by our backends and by the kernel's interfaces.
fn charts(all: &[(&Program, Vec<Judged>)]) -> Vec<(&'static str, Chart)> {
    let mut charts = Vec::new();
    let changing = all.iter().find(|(program, _)| program.is_changing);
    if let Some((program, of_seeds)) = changing
        && let Some(judged) = of_seeds.first()
    {
        let ours = ["idle", "idle at 10 %", "damon", "damon at 10 %"];
        let kernel = ["damon-default", "damon-tuned", "mglru", "clear-refs"];
        for (name, methods) in [("ours", ours), ("kernel", kernel)] {
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
                    points(|one| one.bytes),
                ));
                truth.extend(points(|one| one.needed));
                offset += shown.estimates.last().map_or(0.0, |one| one.seconds);
            }
            series.push(Series::new("in use", SeriesStyle::Truth, truth));
            charts.push((
                name,
                Chart {
                    title: format!("Working set over time, {}", program.name),
                    subtitle: "one method after the other; emulated (TCG)".to_owned(),
                    x: Axis::new("time", AxisUnit::Seconds),
                    y: Axis::new("working set", AxisUnit::Bytes),
                    shades: Vec::new(),
                    series,
                    markers: Vec::new(),
                },
            ));
        }
    }
    charts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(program: Program) -> Reader {
        Reader {
            truth: Truth::new(program).unwrap(),
            judged: Judged::new(),
            method: None,
            begun: Instant::now(),
            costs: Vec::new(),
            folded: String::new(),
        }
    }

    #[test]
    fn estimates_are_compared_with_what_the_program_says_at_their_time() {
        let mut reader = reader(PROGRAMS[2]);
        let mib = |mib: u64| (mib << 20) as f64;
        for line in [
            "estimate mglru 1",
            "begin mglru",
            "plimsoll: round index=1 pages=8192 ops=900000 ms=100 total_ops=1 mismatches=0",
            "estimate mglru 33554432",
            "estimate rss 5",
            "estimate mglru nonsense",
            "plimsoll: round index=2 pages=24576 ops=100 ms=100 total_ops=1 mismatches=0",
            "estimate mglru 50331648",
            "cost mglru 0.5 10.0 12.0",
            "begin idle",
            "3,5.000,12288,estimate,0.01,100,0,0.012000,0,300",
            "plimsoll: error: no such thing",
        ] {
            reader.take(line, Instant::now());
        }
        let shown = &reader.judged["mglru"];
        assert_eq!(shown.estimates.len(), 2);
        let [first, second] = shown.estimates[..] else {
            panic!()
        };
        assert_eq!((first.needed, first.touched), (mib(32), mib(32)));
        assert_eq!(first.error(|one| one.needed), 0.0);
        assert_eq!(
            (second.needed, second.touched),
            (mib(96), 1000.0 * PAGE_BYTES)
        );
        assert_eq!(shown.cost, Some(0.05));
        let idle = &reader.judged["idle"];
        assert_eq!((idle.estimates[0].bytes, idle.cost), (mib(48), Some(0.012)));
        assert!(idle.message.as_ref().unwrap().contains("no such thing"));
    }

    #[test]
    fn pages_touched_in_a_second_follow_from_the_rate() {
        let mut truth = Truth::new(PROGRAMS[3]).unwrap();
        let pages = truth.pages as f64;
        truth.rate = pages;
        let share = truth.touched() / PAGE_BYTES / pages;
        assert!((share - (1.0 - (-1.0_f64).exp())).abs() < 1e-9, "{share}");
        // 5 % of the visits miss 95 % of the pages.
        let needed = |from: u64| truth.needed(PageCount(from)) / PAGE_BYTES / pages;
        assert!((needed(0) - 0.95).abs() < 0.001);
        // Of the half that misses half of the memory.
        // As far as points of the curve are apart.
        assert!((needed(truth.pages / 2) - 0.975).abs() < 0.002);
    }

    #[test]
    fn a_script_names_every_method_and_ends() {
        let lengths = Lengths {
            estimates: 2,
            periods: 1,
        };
        for program in &PROGRAMS {
            let text = script(program, 7, lengths);
            for method in methods() {
                assert!(text.contains(&format!("begin {method}\n")), "{method}");
            }
            assert!(text.contains("plimsoll.seed=7") && text.ends_with("poweroff -f\n"));
        }
    }
}
