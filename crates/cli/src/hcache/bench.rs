//! `plimsoll hcache bench`: load for a server, with every page checked.
//!
//! Not here: the load (`plimsoll_serve::hcache::load`).

use std::io::Write;
use std::time::Duration;

use hdrhistogram::Histogram;
use plimsoll_hcache::PAGE_BYTES;
use plimsoll_output::{TableOrJsonArg, bail_usage, labelled};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_protocol::size::{ByteSize, Share};
use plimsoll_ring::{ConnectOptions, Connection};
use plimsoll_serve::hcache::load::{Load, LoadOptions};
use serde_json::{Value, json};

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
    /// Share of puts, 0 to 1; the rest are gets
    #[arg(long, value_name = "SHARE", default_value = "0.5")]
    write_ratio: Share,
    /// Random seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    format: TableOrJsonArg,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if args.write_ratio.get() > 1.0 {
        bail_usage!("--write-ratio {}: expected 0 to 1", args.write_ratio);
    }
    let mut options = ConnectOptions::new("bench");
    options.entries = args.batch.next_power_of_two();
    options.slots = args.batch;
    let connection = Connection::connect(&args.socket.socket, &options).map_err(failure)?;
    let options = LoadOptions {
        length: Duration::from_secs(args.seconds),
        pages: args.pages,
        batch: args.batch,
        write_ratio: args.write_ratio.get(),
        seed: args.seed,
    };
    let load = Load::run(connection, &options)?;
    args.format
        .write(out, || table(&load, args), &json(&load, args))?;
    anyhow::ensure!(
        load.wrong_pages == 0,
        "{} of {} pages that came back were wrong",
        load.wrong_pages,
        load.hits
    );
    Ok(())
}

fn table(load: &Load, args: &Args) -> String {
    let bytes = ByteSize(u64::from(args.pages) * PAGE_BYTES as u64);
    let size = format!(
        "{} pages ({}), {} in flight, {:.0} % puts, {:.1} s",
        args.pages,
        bytes.rounded(),
        args.batch,
        args.write_ratio.get() * 100.0,
        load.length.as_secs_f64(),
    );
    let share = |part: u64, whole: u64| match whole {
        0 => "-".to_owned(),
        _ => format!("{:.1} %", part as f64 * 100.0 / whole as f64),
    };
    let line = |count: u64, times: &Histogram<u64>, note: String| {
        let [p50, p99, p999] = percentiles(times).map(|time| time.as_secs_f64() * 1e6);
        format!(
            "{:>9.0} /s, {note}; p50 {p50:.1} µs, p99 {p99:.1} µs, p99.9 {p999:.1} µs",
            load.a_second(count)
        )
    };
    let refused = format!("{} refused", share(load.puts_refused, load.puts));
    let hit = format!("{} hit", share(load.hits, load.gets));
    let rate = load.a_second(load.puts + load.hits) * PAGE_BYTES as f64 / f64::from(1 << 30);
    let lines = [
        ("load", size),
        ("puts", line(load.puts, &load.put_times, refused)),
        ("gets", line(load.gets, &load.get_times, hit)),
        ("moved", format!("{rate:.2} GiB/s, puts and hits")),
        (
            "checked",
            format!("{} pages, {} wrong", load.hits, load.wrong_pages),
        ),
    ];
    labelled(8, lines)
}

fn json(load: &Load, args: &Args) -> Value {
    let times = |times: &Histogram<u64>| {
        let [p50, p99, p999] = percentiles(times).map(|time| time.as_secs_f64());
        json!({ "p50": p50, "p99": p99, "p999": p999 })
    };
    json!({
        "schema": SCHEMA,
        "pages": args.pages,
        "batch": args.batch,
        "write_ratio": args.write_ratio.get(),
        "seconds": load.length.as_secs_f64(),
        "puts": load.puts,
        "puts_refused": load.puts_refused,
        "gets": load.gets,
        "hits": load.hits,
        "wrong_pages": load.wrong_pages,
        "puts_per_second": load.a_second(load.puts),
        "gets_per_second": load.a_second(load.gets),
        "put_seconds": times(&load.put_times),
        "get_seconds": times(&load.get_times),
    })
}

/// The times that 50, 99 and 99.9 % of all did not exceed; 0 if there are none.
fn percentiles(latencies: &Histogram<u64>) -> [Duration; 3] {
    [0.5, 0.99, 0.999].map(|share| Duration::from_nanos(latencies.value_at_quantile(share)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_serve::hcache::load::latencies;

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
}
