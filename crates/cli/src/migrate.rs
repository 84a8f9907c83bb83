//! `plimsoll migrate estimate`: how the live migration of a running VM would go, from the pages that it writes.
//!
//! The VM is observed by write scans for some seconds, and its migration by QEMU is computed from how many distinct pages
//! it writes within a time. No migration is started, and none that runs is disturbed: a VM that is being
//! migrated is refused.
//!
//! Not here: scans and the prediction (`plimsoll_observe::migration`).

use std::io::Write;
use std::time::Duration;

use anyhow::Context as _;
use clap::Subcommand;
use plimsoll_estimator::working_set::{Contents, PrecopyOptions};
use plimsoll_flow::Whole as _;
use plimsoll_observe::migration::{MigrationEstimate, PAGE_BYTES};
use plimsoll_observe::writes;
use plimsoll_output::{TextFormatArg, bail_usage, csv, printable, stop_flag, table};
use plimsoll_protocol::size::{BitRate, ByteSize, Interval};
use plimsoll_trap::TraceConfig;

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
    /// Time from one scan to the next [default: 100ms, or a tenth of --for if that is less]; every first write to a page after a scan takes the VM about 2 µs
    #[arg(long, value_name = "TIME")]
    scan_interval: Option<Interval>,
    /// Attach to a process in a user namespace of its own, too
    #[arg(long)]
    allow_namespaced: bool,
    #[command(flatten)]
    form: TextFormatArg,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let Verb::Estimate(args) = &args.verb;
    let times = args.times()?;
    let stop = stop_flag()?;
    let vm = plimsoll_vm::find(&args.vm)?;
    let pages_per_second = args.bandwidth.bytes_per_second() / PAGE_BYTES as f64;
    let options = PrecopyOptions::qemu(pages_per_second, args.downtime.get());
    let share = vm.share_with_contents(u64::MAX)?;
    let left_pages = u64::whole(options.left_pages);
    let share_of_last = vm.share_with_contents(left_pages)?;
    let config = TraceConfig {
        allow_namespaced: args.allow_namespaced,
        ..TraceConfig::default()
    };
    let seen = writes(&vm, times, &config, &stop)?;
    let seen = seen.context("interrupted before the first scan: nothing was observed")?;
    let memory = Contents {
        pages: seen.ram.0,
        share,
        share_of_last,
    };
    let estimate = MigrationEstimate::new(
        vm.id.0.clone(),
        &memory,
        &options,
        &seen,
        args.bandwidth,
        times.1,
    );
    let downtime = args.downtime.get();
    let table = || Ok(text(&estimate, downtime));
    args.form
        .write(out, table, || Ok(lines(&estimate)), &estimate)
}

const SCAN_DEFAULT: Duration = Duration::from_millis(100);

impl EstimateArgs {
    /// How long to observe, and the time from one scan to the next.
    fn times(&self) -> anyhow::Result<(Duration, Duration)> {
        let observe = self.observe.get();
        let [shortest, longest] = [TraceConfig::PERIOD_MIN, TraceConfig::PERIOD_MAX];
        if !(shortest..=longest).contains(&observe) {
            let [shortest, longest] = [shortest, longest].map(time_text);
            bail_usage!(
                "--for {}: accepted are {shortest} to {longest}",
                self.observe
            );
        }
        let interval = match self.scan_interval {
            Some(interval) => interval.get(),
            None => SCAN_DEFAULT.min(observe / 10),
        };
        if !(TraceConfig::SCAN_INTERVAL_MIN..=observe).contains(&interval) {
            bail_usage!(
                "--scan-interval: accepted are {} to the time of --for ({})",
                time_text(TraceConfig::SCAN_INTERVAL_MIN),
                self.observe
            );
        }
        Ok((observe, interval))
    }
}

fn text(of: &MigrationEstimate, downtime_max: Duration) -> String {
    let mut notes = String::new();
    if of.interrupted {
        notes += "interrupted: observed for a shorter time than requested\n";
    }
    if !of.resolved {
        notes += &unresolved(of);
    }
    let rounds = table!((1_u64..).zip(&of.rounds), |(number, round)| {
        Right "round": number,
        Right "copied": size(round.bytes),
        Right "seconds": format!("{:.2}", round.seconds),
    });
    let end = if of.rounds.is_empty() {
        format!(
            "ends without a round: all contents, {}, fit into the downtime, of about {:.0} ms, without the state of devices",
            size(of.copied_bytes),
            of.downtime_seconds * 1000.0
        )
    } else if of.ends {
        format!(
            "ends after {} rounds, {} copied in {:.2} s; downtime about {:.0} ms, without the state of devices",
            of.rounds.len(),
            size(of.copied_bytes),
            of.running_seconds,
            of.downtime_seconds * 1000.0
        )
    } else {
        format!(
            "does not end: it writes as fast as it is copied, and {} always remain; a downtime of {:.0} ms would be needed, {:.0} ms are allowed",
            size(of.copied_bytes - of.rounds.iter().map(|round| round.bytes).sum::<f64>()),
            (of.downtime_seconds * 1000.0).ceil(),
            downtime_max.as_secs_f64() * 1000.0
        )
    };
    let second = of
        .written
        .iter()
        .rev()
        .find(|written| written.seconds <= 1.0);
    let rate = second
        .or(of.written.first())
        .map_or_else(String::new, |written| {
            format!(
                "; {} written within {:.1} s",
                size(written.bytes),
                written.seconds
            )
        });
    let table = match of.rounds.is_empty() {
        true => String::new(),
        false => rounds + "\n",
    };
    format!(
        "{}: {:.0} % of {} are not zero, observed for {:.1} s at {:.1} % of its CPU time{rate}\n\n{table}{end}\n{notes}",
        printable(&of.vm),
        of.share_with_contents * 100.0,
        size(of.ram_bytes as f64),
        of.observed_seconds,
        of.overhead_ratio * 100.0,
    )
}

/// What rounds shorter than a scan count, and what to do.
fn unresolved(of: &MigrationEstimate) -> String {
    let rounds = of.rounds.iter().map(|round| round.seconds);
    let shortest_ms = rounds.fold(f64::INFINITY, f64::min) * 1000.0;
    // Half of a round, because rounds become shorter with what is then found.
    let interval = Duration::from_secs_f64((shortest_ms / 2.0).floor() / 1000.0);
    let advice = if interval < TraceConfig::SCAN_INTERVAL_MIN {
        format!("the shortest, of {shortest_ms:.1} ms, cannot be resolved")
    } else {
        format!(
            "repeat with --scan-interval {} or less",
            time_text(interval)
        )
    };
    format!("rounds shorter than a scan count what one scan found, an upper limit: {advice}\n")
}

fn lines(of: &MigrationEstimate) -> String {
    let stop_bytes = of.copied_bytes - of.rounds.iter().map(|round| round.bytes).sum::<f64>();
    let mut text = csv(["phase", "bytes", "seconds", "resolved", "interrupted"]);
    let limits = [of.resolved, of.interrupted].map(|limit| limit.to_string());
    let mut line = |phase: &str, bytes: f64, seconds: f64| {
        let [resolved, interrupted] = &limits;
        let (bytes, seconds) = (format!("{bytes:.0}"), seconds.to_string());
        text.push_str(&csv([phase, &bytes, &seconds, resolved, interrupted]));
    };
    for round in &of.rounds {
        line("round", round.bytes, round.seconds);
    }
    let last = if of.ends { "stop" } else { "rest" };
    line(last, stop_bytes, of.downtime_seconds);
    text
}

/// A time as options have it, in whole microseconds.
fn time_text(time: Duration) -> String {
    let micros = u64::try_from(time.as_micros()).ok();
    micros
        .and_then(Interval::from_micros)
        .map_or_else(|| "0".to_owned(), |time| time.to_string())
}

fn size(bytes: f64) -> String {
    ByteSize(u64::whole(bytes)).rounded()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;
    use plimsoll_observe::migration::Round;
    use plimsoll_protocol::SCHEMA;

    #[derive(Debug, clap::Parser)]
    struct Program {
        #[command(flatten)]
        args: EstimateArgs,
    }

    fn times(line: &str) -> anyhow::Result<(Duration, Duration)> {
        let words = "x 1 --bandwidth 1G"
            .split(' ')
            .chain(line.split_whitespace());
        Program::try_parse_from(words).unwrap().args.times()
    }

    #[test]
    fn a_short_observation_has_shorter_scans_and_a_wrong_time_is_blamed_on_its_option() {
        let ms = Duration::from_millis;
        assert_eq!(times("").unwrap(), (ms(10_000), ms(100)));
        assert_eq!(times("--for 500ms").unwrap(), (ms(500), ms(50)));
        assert_eq!(times("--for 10ms").unwrap(), (ms(10), ms(1)));
        for (line, option) in [
            ("--for 5ms", "--for"),
            ("--for 25h", "--for"),
            ("--scan-interval 11s", "--scan-interval"),
            ("--scan-interval 500us", "--scan-interval"),
        ] {
            let error = times(line).unwrap_err().to_string();
            assert!(error.starts_with(option), "{error}");
            let limits = ["accepted are 10ms to 24h", "accepted are 1ms to the time"];
            assert!(limits.iter().any(|limit| error.contains(limit)), "{error}");
        }
    }

    fn estimate(round_seconds: &[f64]) -> MigrationEstimate {
        let round = |&seconds: &f64| Round {
            bytes: 4096.0,
            seconds,
        };
        MigrationEstimate {
            schema: SCHEMA,
            vm: "web".to_owned(),
            ram_bytes: 1 << 20,
            share_with_contents: 0.5,
            bandwidth_bits_per_second: 1e9,
            observed_seconds: 1.0,
            interrupted: !round_seconds.is_empty(),
            resolved: round_seconds.is_empty(),
            overhead_ratio: 0.0,
            written: Vec::new(),
            rounds: round_seconds.iter().map(round).collect(),
            copied_bytes: 524_288.0,
            running_seconds: 0.0,
            downtime_seconds: 0.1,
            ends: true,
        }
    }

    #[test]
    fn a_result_without_rounds_has_no_table_and_limits_of_one_are_named() {
        let text = super::text(&estimate(&[]), SCAN_DEFAULT);
        assert!(text.contains("ends without a round"), "{text}");
        assert!(
            !text.contains("copied ") && !text.contains("interrupted"),
            "{text}"
        );
        let text = super::text(&estimate(&[2.0, 0.051]), SCAN_DEFAULT);
        assert!(
            text.contains("interrupted:")
                && text.contains("limit: repeat with --scan-interval 25ms or less\n"),
            "{text}"
        );
        let text = super::text(&estimate(&[2.0, 0.0015]), SCAN_DEFAULT);
        assert!(
            text.contains("limit: the shortest, of 1.5 ms, cannot be resolved\n"),
            "{text}"
        );
        let csv = lines(&estimate(&[2.0]));
        let expected = "phase,bytes,seconds,resolved,interrupted\nround,";
        assert!(
            csv.starts_with(expected) && csv.contains(",2,false,true\nstop,"),
            "{csv}"
        );
    }
}
