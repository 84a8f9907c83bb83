//! `plimsoll hcache bench`: load for a server, with every page checked.
//!
//! A client signs each page that it puts: its contents depend on its number and on how often it was put before.
//! A get must return, byte for byte, the page last put. The pool is private: a page that was got must be gone.

use std::collections::VecDeque;
use std::io::Write;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use plimsoll_hcache::{Handle, PAGE_BYTES, Page, PoolId, PoolOptions};
use plimsoll_output::TableOrJson;
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_protocol::size::{ByteSize, Rate};
use plimsoll_ring::protocol::Status;
use plimsoll_ring::{ConnectOptions, Connection};
use serde::Serialize;

use super::{SocketArgs, failure};

/// Put load on a running server, and check every byte of the pages that it returns.
///
/// Pages are chosen uniformly at random. The exit code is 1 if a page came back wrong.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    socket: SocketArgs,
    /// Length of the run
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Different pages, each 4 KiB
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    pages: u32,
    /// Operations in flight
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4095))]
    batch: u32,
    /// Share of puts; the rest are gets
    #[arg(long, value_name = "RATE", default_value = "0.5")]
    write_ratio: Rate,
    /// Random seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Output format
    #[arg(short = 'o', long, value_enum, value_name = "FORMAT", default_value_t)]
    output: TableOrJson,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let load = Load::run(args)?;
    match args.output {
        TableOrJson::Table => load.table(args, out)?,
        TableOrJson::Json => writeln!(out, "{}", serde_json::to_string(&load.json(args))?)?,
    }
    anyhow::ensure!(
        load.wrong_pages == 0,
        "{} of {} pages that came back were wrong",
        load.wrong_pages,
        load.hits
    );
    Ok(())
}

/// Counts of a run.
#[derive(Debug)]
struct Load {
    length: Duration,
    puts: u64,
    puts_refused: u64,
    gets: u64,
    hits: u64,
    wrong_pages: u64,
    put_times: Histogram<u64>,
    get_times: Histogram<u64>,
}

/// An operation in flight.
#[derive(Debug, Clone, Copy)]
struct Operation {
    page: u32,
    /// The version that a get must return: the one last put, 0 for none.
    version: u32,
    is_put: bool,
    begin: Instant,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            length: Duration::ZERO,
            puts: 0,
            puts_refused: 0,
            gets: 0,
            hits: 0,
            wrong_pages: 0,
            put_times: latencies(),
            get_times: latencies(),
        }
    }
}

impl Load {
    fn run(args: &Args) -> anyhow::Result<Self> {
        let mut options = ConnectOptions::new("bench");
        options.entries = args.batch.next_power_of_two();
        options.slots = args.batch;
        let mut connection = Connection::connect(&args.socket.socket, &options).map_err(failure)?;
        let pool = connection.create_pool(PoolOptions::private())?;

        let mut load = Self::default();
        let mut choices = Choices(args.seed);
        let mut last = vec![0_u32; args.pages as usize];
        let mut held = vec![false; args.pages as usize];
        let mut under_way = VecDeque::new();
        let begin = Instant::now();
        let end = begin + Duration::from_secs(args.seconds);
        let mut now = begin;
        loop {
            while now < end
                && let Some(mut slot) = connection.reserve()
            {
                let page = choices.below(args.pages);
                let at = page as usize;
                let is_put = choices.share() < args.write_ratio.get();
                let handle = handle(pool, page);
                let version = if is_put {
                    last[at] += 1;
                    sign(connection.page(&mut slot), page, last[at]);
                    connection.submit_put(handle, slot, 0)?;
                    last[at]
                } else {
                    connection.submit_get(handle, slot, 0)?;
                    if held[at] { last[at] } else { 0 }
                };
                held[at] = is_put;
                under_way.push_back(Operation {
                    page,
                    version,
                    is_put,
                    begin: now,
                });
            }
            connection.wait()?;
            now = Instant::now();
            // Completions come in the order of submission.
            while let Some(done) = connection.reap()? {
                let operation = under_way.pop_front().expect("a completion of an operation");
                let mut slot = done.slot;
                let got = slot.as_mut().map(|slot| &*connection.page(slot));
                load.count(operation, done.status, got, now)?;
                connection.release(slot);
            }
            if under_way.is_empty() && now >= end {
                break;
            }
        }
        load.length = begin.elapsed();
        Ok(load)
    }

    fn count(
        &mut self,
        operation: Operation,
        status: Status,
        got: Option<&Page>,
        now: Instant,
    ) -> anyhow::Result<()> {
        let time = now.saturating_duration_since(operation.begin);
        match (operation.is_put, status) {
            (true, Status::Ok) => {}
            (true, Status::Refused) => self.puts_refused += 1,
            (false, Status::Ok) => {
                self.hits += 1;
                let is_right = operation.version != 0
                    && got.is_some_and(|got| is_signed(got, operation.page, operation.version));
                self.wrong_pages += u64::from(!is_right);
            }
            (false, Status::Miss) => {}
            (_, status) => anyhow::bail!("the server answers {status:?} to a valid request"),
        }
        let (count, times) = if operation.is_put {
            (&mut self.puts, &mut self.put_times)
        } else {
            (&mut self.gets, &mut self.get_times)
        };
        *count += 1;
        times.record(u64::try_from(time.as_nanos())?)?;
        Ok(())
    }

    fn a_second(&self, count: u64) -> f64 {
        count as f64 / self.length.as_secs_f64()
    }

    fn table(&self, args: &Args, out: &mut dyn Write) -> std::io::Result<()> {
        let bytes = ByteSize(u64::from(args.pages) * PAGE_BYTES as u64);
        writeln!(
            out,
            "load    {} pages ({}), {} in flight, {:.0} % puts, {:.1} s",
            args.pages,
            bytes.rounded(),
            args.batch,
            args.write_ratio.get() * 100.0,
            self.length.as_secs_f64(),
        )?;
        let share = |part: u64, whole: u64| match whole {
            0 => "-".to_owned(),
            _ => format!("{:.1} %", part as f64 * 100.0 / whole as f64),
        };
        for (what, count, times, note) in [
            (
                "puts",
                self.puts,
                &self.put_times,
                format!("{} refused", share(self.puts_refused, self.puts)),
            ),
            (
                "gets",
                self.gets,
                &self.get_times,
                format!("{} hit", share(self.hits, self.gets)),
            ),
        ] {
            let [p50, p99, p999] = percentiles(times).map(|time| time.as_secs_f64() * 1e6);
            writeln!(
                out,
                "{what}    {:>9.0} /s, {note}; p50 {p50:.1} µs, p99 {p99:.1} µs, p99.9 {p999:.1} µs",
                self.a_second(count)
            )?;
        }
        let rate = self.a_second(self.puts + self.hits) * PAGE_BYTES as f64 / f64::from(1 << 30);
        writeln!(out, "moved   {rate:.2} GiB/s, puts and hits")?;
        writeln!(
            out,
            "checked {} pages, {} wrong",
            self.hits, self.wrong_pages
        )
    }

    fn json(&self, args: &Args) -> LoadJson {
        let times = |times: &Histogram<u64>| {
            let [p50, p99, p999] = percentiles(times).map(|time| time.as_secs_f64());
            TimesJson { p50, p99, p999 }
        };
        LoadJson {
            schema: SCHEMA,
            pages: args.pages,
            batch: args.batch,
            write_ratio: args.write_ratio.get(),
            seconds: self.length.as_secs_f64(),
            puts: self.puts,
            puts_refused: self.puts_refused,
            gets: self.gets,
            hits: self.hits,
            wrong_pages: self.wrong_pages,
            puts_per_second: self.a_second(self.puts),
            gets_per_second: self.a_second(self.gets),
            put_seconds: times(&self.put_times),
            get_seconds: times(&self.get_times),
        }
    }
}

/// `-o json`.
#[derive(Serialize)]
struct LoadJson {
    schema: u32,
    pages: u32,
    batch: u32,
    write_ratio: f64,
    seconds: f64,
    puts: u64,
    puts_refused: u64,
    gets: u64,
    hits: u64,
    wrong_pages: u64,
    puts_per_second: f64,
    gets_per_second: f64,
    put_seconds: TimesJson,
    get_seconds: TimesJson,
}

#[derive(Serialize)]
struct TimesJson {
    p50: f64,
    p99: f64,
    p999: f64,
}

/// Objects of 1024 pages.
fn handle(pool: PoolId, page: u32) -> Handle {
    Handle {
        pool,
        object: u64::from(page >> 10),
        index: page & 0x3ff,
    }
}

/// The words of a signed page.
fn words(page: u32, version: u32) -> impl Iterator<Item = u64> {
    let first = mix(u64::from(page) << 32 | u64::from(version));
    (0..PAGE_BYTES as u64 / 8)
        .map(move |word| first.wrapping_add(word.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

fn sign(target: &mut Page, page: u32, version: u32) {
    let target = target.as_chunks_mut().0.iter_mut();
    for (target, word) in target.zip(words(page, version)) {
        *target = word.to_ne_bytes();
    }
}

fn is_signed(got: &Page, page: u32, version: u32) -> bool {
    let got = got.as_chunks().0.iter().map(|got| u64::from_ne_bytes(*got));
    let differing = got.zip(words(page, version));
    differing.fold(0, |all, (got, word)| all | (got ^ word)) == 0
}

/// Random choices, the same for the same seed.
struct Choices(u64);

impl Choices {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn below(&mut self, end: u32) -> u32 {
        let scaled = u128::from(self.next()) * u128::from(end);
        u32::try_from(scaled >> 64).expect("below a number of 32 bits")
    }

    /// From 0.0 to below 1.0.
    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The finalizer of splitmix64: one word, well mixed.
fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Latencies, in nanoseconds.
fn latencies() -> Histogram<u64> {
    let mut histogram = Histogram::new(2).expect("two significant digits");
    histogram.auto(true);
    histogram
}

/// The times that 50, 99 and 99.9 % of all did not exceed; 0 if there are none.
fn percentiles(latencies: &Histogram<u64>) -> [Duration; 3] {
    [0.5, 0.99, 0.999].map(|share| Duration::from_nanos(latencies.value_at_quantile(share)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_signed_for_one_number_and_version() {
        let mut page = [0; PAGE_BYTES];
        sign(&mut page, 7, 3);
        assert!(is_signed(&page, 7, 3));
        assert!(!is_signed(&page, 3, 7) && !is_signed(&page, 7, 4));
        for at in [0, 2049, PAGE_BYTES - 1] {
            page[at] ^= 1;
            assert!(!is_signed(&page, 7, 3), "{at}");
            page[at] ^= 1;
        }
    }

    #[test]
    fn what_came_back_wrong_is_counted() {
        let mut page = [0; PAGE_BYTES];
        sign(&mut page, 7, 3);
        let now = Instant::now();
        let mut load = Load::default();
        for (version, status, wrong_pages) in [
            (3, Status::Ok, 0),
            (2, Status::Ok, 1),
            (0, Status::Miss, 1),
            // Nothing was there to be had.
            (0, Status::Ok, 2),
        ] {
            let get = Operation {
                page: 7,
                version,
                is_put: false,
                begin: now,
            };
            load.count(get, status, Some(&page), now).unwrap();
            assert_eq!(load.wrong_pages, wrong_pages);
            assert!(load.count(get, Status::NoSuchPool, None, now).is_err());
        }
        assert_eq!((load.gets, load.hits, load.puts), (4, 3, 0));
    }

    #[test]
    fn percentiles_are_right_to_a_hundredth() {
        let mut times = latencies();
        assert_eq!(percentiles(&times), [Duration::ZERO; 3]);
        for nanos in 1..=100_000 {
            times.record(nanos).unwrap();
        }
        for (found, truth) in percentiles(&times)
            .into_iter()
            .zip([50_000, 99_000, 99_900])
        {
            let found = u64::try_from(found.as_nanos()).unwrap();
            assert!((truth..=truth + truth / 100).contains(&found), "{found}");
        }
    }

    #[test]
    fn choices_are_even_and_stay_below_their_end() {
        let mut choices = Choices(0);
        let mut counts = [0_u32; 10];
        for _ in 0..10_000 {
            counts[choices.below(10) as usize] += 1;
        }
        assert!(
            counts.iter().all(|count| (900..1100).contains(count)),
            "{counts:?}"
        );
        let sum: f64 = (0..10_000).map(|_| choices.share()).sum();
        assert!((4_900.0..5_100.0).contains(&sum));
    }
}
