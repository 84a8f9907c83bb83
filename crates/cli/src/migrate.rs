//! `plimsoll migrate estimate`: how the live migration of a running VM would go, from the pages that it writes.
//!
//! The VM is observed by write scans for some seconds, and its migration by QEMU is computed from how many distinct pages
//! it writes within a time. No migration is started, and none that runs is disturbed: a VM that is being
//! migrated is refused.
//!
//! Not here: scans (`plimsoll-trap`), the course of a migration (`plimsoll_estimator::working_set::precopy`).

use std::io::Write;
use std::time::Duration;

use anyhow::Context as _;
use clap::Subcommand;
use plimsoll_estimator::working_set::{Contents, Precopy, PrecopyOptions, precopy};
use plimsoll_observe::{ObservedWrites, writes};
use plimsoll_output::{Columns, Side, TextFormat, TextFormatArg, csv, printable, stop_flag};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::size::{BitRate, ByteSize, Interval};
use plimsoll_trap::TraceConfig;
use serde::Serialize;

/// Predict a VM's live migration from the pages that it writes.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Estimate(EstimateArgs),
}

/// Predict rounds, data copied and downtime of a live migration by QEMU.
///
/// Observes the VM's writes for some seconds, private RAM and locked RAM too; nothing is migrated. Needs root and Linux 6.7.
#[derive(Debug, clap::Args)]
struct EstimateArgs {
    /// VM: process id or name
    #[arg(value_name = "PID|NAME")]
    vm: String,
    /// Bandwidth for the migration, in bits a second: 10G, 800M
    #[arg(long, value_name = "RATE")]
    bandwidth: BitRate,
    /// Longest downtime that is allowed, QEMU's downtime-limit
    #[arg(long, value_name = "TIME", default_value = "300ms")]
    downtime: Interval,
    /// How long to observe; predictions for rounds that take longer assume that the last rise goes on
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    observe: Interval,
    /// Time from one scan to the next; every first write to a page after a scan takes the VM about 2 µs
    #[arg(long, value_name = "TIME", default_value = "100ms")]
    scan_interval: Interval,
    /// Attach to a process in a user namespace of its own, too
    #[arg(long)]
    allow_namespaced: bool,
    #[command(flatten)]
    form: TextFormatArg,
}

const PAGE_BYTES: u64 = 4096;

/// What `-o json` writes.
#[derive(Debug, Serialize)]
struct Estimate {
    schema: u32,
    vm: String,
    ram_bytes: u64,
    /// Share of it that is not all zero, by a sample; the rest takes no time to copy.
    share_with_contents: f64,
    bandwidth_bits_per_second: f64,
    observed_seconds: f64,
    /// Share of the VM's CPU time that observing took.
    overhead_ratio: f64,
    /// Distinct pages written within a time, in bytes.
    written: Vec<Written>,
    /// Rounds while the VM runs.
    rounds: Vec<Round>,
    /// All rounds and the stop.
    copied_bytes: f64,
    running_seconds: f64,
    /// Without the time for the state of devices.
    downtime_seconds: f64,
    /// Whether writing is slow enough for the migration to end; if not, the downtime is that of the rest that always remains.
    ends: bool,
}

#[derive(Debug, Serialize)]
struct Written {
    seconds: f64,
    bytes: f64,
}

#[derive(Debug, Serialize)]
struct Round {
    bytes: f64,
    seconds: f64,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// Why there is no such VM, and why its writes cannot be observed.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let Verb::Estimate(args) = &args.verb;
    let stop = stop_flag()?;
    let vm = plimsoll_vm::find(&args.vm)?;
    let pages_per_second = args.bandwidth.bytes_per_second() / PAGE_BYTES as f64;
    let options = PrecopyOptions::qemu(pages_per_second, args.downtime.get());
    let share = vm.share_with_contents(u64::MAX)?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and more than all pages are all"
    )]
    let left_pages = options.left_pages as u64;
    let share_of_last = vm.share_with_contents(left_pages)?;
    let config = TraceConfig {
        allow_namespaced: args.allow_namespaced,
        ..TraceConfig::default()
    };
    let times = (args.observe.get(), args.scan_interval.get());
    let seen = writes(&vm, times, &config, &stop)?;
    let seen = seen.context("interrupted before the first scan: nothing was observed")?;
    let memory = Contents {
        pages: seen.ram.0,
        share,
        share_of_last,
    };
    let estimate = Estimate::new(vm.id.0.clone(), &memory, &options, &seen, args);
    match args.form.output {
        TextFormat::Table => Ok(out.write_all(estimate.to_text(args.downtime.get()).as_bytes())?),
        TextFormat::Csv => Ok(out.write_all(estimate.to_csv().as_bytes())?),
        TextFormat::Json => Ok(writeln!(out, "{}", serde_json::to_string(&estimate)?)?),
    }
}

impl Estimate {
    fn new(
        vm: String,
        memory: &Contents,
        options: &PrecopyOptions,
        seen: &ObservedWrites,
        args: &EstimateArgs,
    ) -> Self {
        let course = precopy(memory, &seen.curve, options);
        let observed_seconds = seen.curve.observed_seconds();
        let doublings =
            (0..).map(|power| args.scan_interval.get().as_secs_f64() * f64::from(1_u32 << power));
        let within = doublings
            .take(24)
            .take_while(|&seconds| seconds <= observed_seconds);
        let bytes = |pages: f64| pages * PAGE_BYTES as f64;
        let Precopy {
            round_pages,
            ends,
            running_seconds,
            stopped_seconds,
            ..
        } = &course;
        let rounds = round_pages.iter().map(|&pages| Round {
            bytes: bytes(pages),
            seconds: pages / options.pages_per_second,
        });
        Self {
            schema: SCHEMA,
            vm,
            ram_bytes: seen.ram.0 * PAGE_BYTES,
            share_with_contents: memory.share,
            bandwidth_bits_per_second: args.bandwidth.bytes_per_second() * 8.0,
            observed_seconds,
            overhead_ratio: seen.overhead_ratio,
            written: within
                .map(|seconds| Written {
                    seconds,
                    bytes: bytes(seen.curve.pages_within(seconds)),
                })
                .collect(),
            rounds: rounds.collect(),
            copied_bytes: bytes(course.pages()),
            running_seconds: *running_seconds,
            downtime_seconds: *stopped_seconds,
            ends: *ends,
        }
    }

    fn to_text(&self, downtime_max: Duration) -> String {
        let mut columns = Columns::new(&[
            ("round", Side::Right),
            ("copied", Side::Right),
            ("seconds", Side::Right),
        ]);
        for (number, round) in (1..).zip(&self.rounds) {
            columns.row([
                number.to_string(),
                size(round.bytes),
                format!("{:.2}", round.seconds),
            ]);
        }
        let end = if self.ends {
            format!(
                "ends after {} rounds, {} copied in {:.2} s; downtime about {:.0} ms, without the state of devices",
                self.rounds.len(),
                size(self.copied_bytes),
                self.running_seconds,
                self.downtime_seconds * 1000.0
            )
        } else {
            format!(
                "does not end: it writes as fast as it is copied, and {} always remain; a downtime of {:.0} ms would be needed, {:.0} ms are allowed",
                size(self.copied_bytes - self.rounds.iter().map(|round| round.bytes).sum::<f64>()),
                (self.downtime_seconds * 1000.0).ceil(),
                downtime_max.as_secs_f64() * 1000.0
            )
        };
        let second = self
            .written
            .iter()
            .rev()
            .find(|written| written.seconds <= 1.0);
        let rate = second
            .or(self.written.first())
            .map_or_else(String::new, |written| {
                format!(
                    "; {} written within {:.1} s",
                    size(written.bytes),
                    written.seconds
                )
            });
        format!(
            "{}: {:.0} % of {} are not zero, observed for {:.1} s at {:.1} % of its CPU time{rate}\n\n{}\n{end}\n",
            printable(&self.vm),
            self.share_with_contents * 100.0,
            size(self.ram_bytes as f64),
            self.observed_seconds,
            self.overhead_ratio * 100.0,
            columns.text()
        )
    }

    fn to_csv(&self) -> String {
        let stop_bytes =
            self.copied_bytes - self.rounds.iter().map(|round| round.bytes).sum::<f64>();
        let mut text = csv(["phase", "bytes", "seconds"]);
        let mut line = |phase: &str, bytes: f64, seconds: f64| {
            text.push_str(&csv([phase, &format!("{bytes:.0}"), &seconds.to_string()]));
        };
        for round in &self.rounds {
            line("round", round.bytes, round.seconds);
        }
        let last = if self.ends { "stop" } else { "rest" };
        line(last, stop_bytes, self.downtime_seconds);
        text
    }
}

fn size(bytes: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and saturated"
    )]
    let bytes = bytes as u64;
    ByteSize(bytes).rounded()
}
