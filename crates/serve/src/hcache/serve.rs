//! The page-store server: a store for the processes of this machine.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{panic, thread};

use anyhow::Context as _;
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser};
use plimsoll_hcache::{
    EVICTION_POLICIES, EvictionPolicyRow, PAGE_BYTES, Sharing, Store, StoreOptions, eviction_policy,
};
use plimsoll_output::{bail_usage, stop_flag};
use plimsoll_protocol::size::{ByteSize, Rate};
use plimsoll_ring::protocol::Geometry;
use plimsoll_ring::{ClientLimits, ConnectOptions, Server, ServerOptions};

use super::ghosts::{GhostPlan, Ghosts};
use super::report::{Report, Surroundings};
use crate::host_memory::check_sizes;
use crate::socket_mode::mode;

/// Interval at which the memory of rings is counted in the store's capacity and signals are polled; each second, ghost
/// lists follow the clients.
const TURN: Duration = Duration::from_millis(100);
const TURNS_OF_A_SECOND: u64 = 10;

/// Serve a page store to the processes of this machine, until Ctrl-C or SIGTERM.
///
/// Clients put pages and get them back, if the store still has them: docs/hcache.md. The store's memory,
/// including its metadata, never exceeds --capacity.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket to listen on; a stale one is replaced
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Limit of the store's memory, such as 512M
    #[arg(long, value_name = "SIZE")]
    capacity: ByteSize,
    /// Largest capacity that `hcache resize` can set [default: --capacity]
    #[arg(long, value_name = "SIZE")]
    max_capacity: Option<ByteSize>,
    /// Compress cold pages (LZ4)
    #[arg(long)]
    compress: bool,
    /// Which pages of the same content are stored once
    #[arg(long, value_enum, default_value_t = Share::Off)]
    share: Share,
    /// Which page is evicted when memory runs short
    #[arg(long, value_name = "POLICY", default_value = EVICTION_POLICIES[0].name, value_parser = eviction_names())]
    eviction: String,
    /// Threads that serve clients [default: one for two CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: Option<u16>,
    /// How long a thread polls for requests before it sleeps, in microseconds
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    spin_us: u64,
    /// Limit of one client's memory
    #[arg(long, value_name = "SIZE")]
    client_max: Option<ByteSize>,
    /// Limit of concurrent clients [default: 256, of one user 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=Store::MOST_CLIENTS as i64))]
    max_clients: Option<u16>,
    /// Numeric ID of a user who may connect, in addition to root and the server's own user; may be repeated. Half of the
    /// places for clients, of the numbers of pools and of the memory for rings is reserved for the users in equal parts
    #[arg(long, value_name = "UID")]
    allow_uid: Vec<u32>,
    /// Weight of each client of a user in the division of the capacity, as UID=N, 1 to 1000000; may be repeated
    /// [default: 100]
    #[arg(long, value_name = "UID=N", value_parser = weight)]
    weight: Vec<(u32, u32)>,
    /// Permissions of the socket, in octal
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = mode)]
    mode: u32,
    /// Share of the pages that are modelled to predict hit ratios at other capacities: 1, 1/2, 1/4 ..
    /// [default: chosen so that each client takes at most 0.6 MiB]
    #[arg(long, value_name = "RATE", conflicts_with = "no_ghost")]
    ghost_rate: Option<Rate>,
    /// Disable hit-ratio prediction for other capacities
    #[arg(long)]
    no_ghost: bool,
}

/// Which pages of the same content are stored once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Share {
    /// None
    Off,
    /// Those of one client
    Client,
    /// Those of all clients, each of which can then find out which pages others store
    All,
}

impl From<Share> for Sharing {
    fn from(share: Share) -> Self {
        match share {
            Share::Off => Self::Off,
            Share::Client => Self::WithinClient,
            Share::All => Self::AcrossClients,
        }
    }
}

/// The names of the eviction policies, with their descriptions.
fn eviction_names() -> PossibleValuesParser {
    let value = |row: &EvictionPolicyRow| PossibleValue::new(row.name).help(row.summary);
    PossibleValuesParser::new(EVICTION_POLICIES.map(value))
}

fn weight(text: &str) -> Result<(u32, u32), String> {
    let parsed = text.split_once('=').and_then(|(uid, weight)| {
        let weight = weight.parse().ok();
        let weight = weight.filter(|weight| (1..=1_000_000).contains(weight))?;
        Some((uid.parse().ok()?, weight))
    });
    parsed.ok_or_else(|| {
        format!(
            "'{text}' is not the weight of a user: write UID=N with N from 1 to 1000000, such as 1000=300"
        )
    })
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// A [`UsageError`](plimsoll_output::exit::UsageError) for options that contradict each other or are out of range,
/// and why the store cannot be served.
#[expect(
    clippy::missing_panics_doc,
    reason = "a report can always be written as JSON"
)]
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let max_capacity = args.check()?;
    let stop = stop_flag()?;
    let server_options = args.server_options();
    let descriptors = server_options.descriptors();
    if let Some(limit) =
        crate::descriptors::allow_descriptors().filter(|limit| *limit < descriptors)
    {
        // Else users who take them all would keep others out, and `hcache stat`.
        bail_usage!(
            "{} clients need {descriptors} open files, and the limit of this process is {limit}: raise it (ulimit -n, LimitNOFILE=), or lower --max-clients",
            server_options.clients_max()
        );
    }
    crate::oom_score::lower_oom_score();
    let ghosts = args.ghosts(max_capacity)?.map(Arc::new);
    let mut options = StoreOptions::new(args.capacity.0);
    options.max_capacity_bytes = max_capacity.0;
    options.compression = args.compress;
    options.sharing = args.share.into();
    options.eviction = args.eviction();
    if let Some(ghosts) = &ghosts {
        options.observe_one_in = ghosts.plan().one_in;
        options.observer = Some(Arc::<Ghosts>::clone(ghosts));
    }
    let store = Store::new(options)?;
    if let Some(ghosts) = &ghosts {
        ghosts.settle(&store)?;
    }
    let workers = server_options.workers;
    let begin = Instant::now();
    let server = Server::bind(&args.socket, store.clone(), server_options)
        .with_context(|| format!("cannot serve at {}", args.socket.display()))?;
    writeln!(
        out,
        "hcache: serving at {}, capacity {}{}, {}{}, eviction by {}",
        args.socket.display(),
        args.capacity.rounded(),
        if max_capacity > args.capacity {
            format!(" (up to {})", max_capacity.rounded())
        } else {
            String::new()
        },
        match workers {
            1 => "1 worker".to_owned(),
            _ => format!("{workers} workers"),
        },
        if args.compress {
            ", LZ4 compression"
        } else {
            ", no compression"
        },
        args.eviction,
    )?;
    out.flush()?;

    let report = || {
        let surroundings = Surroundings {
            workers: workers as u64,
            compression: args.compress,
            sharing: args.share.into(),
            eviction: args.eviction.clone(),
            server: named(&server),
        };
        let mut stats = store.stats();
        // The store's own is that of its last turn: two reports between turns would be no time apart.
        stats.age_seconds = begin.elapsed().as_secs_f64();
        let report = Report::new(stats, ghosts.as_deref(), surroundings);
        serde_json::to_string(&report).expect("all keys of a report are texts")
    };
    let resize = |capacity_bytes| match &ghosts {
        Some(ghosts) => ghosts.resize(&store, capacity_bytes),
        None => store.resize(capacity_bytes),
    };
    thread::scope(|scope| {
        let serving = scope.spawn(|| server.run(&report, &resize));
        let mut turns = 0_u64;
        while !stop.load(Ordering::Relaxed) && !serving.is_finished() {
            thread::sleep(TURN);
            turns += 1;
            if let Some(ghosts) = ghosts
                .as_ref()
                .filter(|_| turns.is_multiple_of(TURNS_OF_A_SECOND))
            {
                // Without more memory there are no more curves, which the report shows.
                let _ = ghosts.settle(&store);
            }
        }
        server.stop_handle().stop();
        serving
            .join()
            .unwrap_or_else(|panic| panic::resume_unwind(panic))
    })?;
    Ok(())
}

fn named(server: &Server) -> BTreeMap<String, u64> {
    let named = server.counters().named().into_iter();
    named
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

impl Args {
    /// Checks the sizes, and returns the largest capacity.
    fn check(&self) -> anyhow::Result<ByteSize> {
        let min = ByteSize(StoreOptions::MIN_CAPACITY_BYTES);
        let max = self.max_capacity.unwrap_or(self.capacity);
        if self.capacity < min {
            bail_usage!("--capacity {}: the minimum is {min}", self.capacity);
        }
        if max < self.capacity {
            bail_usage!(
                "--max-capacity {max} is less than --capacity {}",
                self.capacity
            );
        }
        if let Some(client_max) = self.client_max {
            let [smallest, usual] = client_min();
            if client_max < smallest {
                bail_usage!(
                    "--client-max {client_max}: the minimum is {smallest}, and {usual} for clients with a ring of the usual size"
                );
            }
        }
        check_sizes([("--capacity", self.capacity), ("--max-capacity", max)])?;
        Ok(max)
    }

    fn ghosts(&self, max_capacity: ByteSize) -> anyhow::Result<Option<Ghosts>> {
        if self.no_ghost {
            return Ok(None);
        }
        let one_in = self.ghost_rate.map(one_in).transpose()?;
        // Curves extend to twice the largest capacity, and compressed pages take half as much or less.
        let times = if self.compress { 4 } else { 2 };
        let reach_pages = max_capacity.0 / PAGE_BYTES as u64 * times;
        let plan = GhostPlan::new(self.eviction(), reach_pages, one_in);
        Ok(Some(Ghosts::new(plan).context("no curves")?))
    }

    fn eviction(&self) -> &'static EvictionPolicyRow {
        eviction_policy(&self.eviction).expect("one of the names that the parser accepts")
    }

    fn server_options(&self) -> ServerOptions {
        let mut options = ServerOptions::default();
        if let Some(workers) = self.workers {
            options.workers = workers.into();
        }
        options.spin = Duration::from_micros(self.spin_us);
        options.mode = self.mode;
        options.allowed_uids.extend(&self.allow_uid);
        options.limits.ceiling_bytes = self.client_max.map(|size| size.0);
        if let Some(clients) = self.max_clients {
            options.max_clients = clients.into();
            options.limits.max_clients = clients.into();
        }
        for &(uid, weight) in &self.weight {
            let limits = ClientLimits {
                weight,
                ..options.limits.clone()
            };
            options.user_limits.insert(uid, limits);
        }
        options
    }
}

/// The minimum memory of a client with the smallest ring, and of one with a ring of the usual size: the ring, which counts
/// as the client's memory, and a page with its description, rounded up to two pages.
fn client_min() -> [ByteSize; 2] {
    let usual = ConnectOptions::new("");
    [(1, 1), (usual.entries, usual.slots)].map(|(entries, slots)| {
        let ring = Geometry::new(entries, slots).expect("the size of a ring");
        ByteSize((ring.region_bytes() + 2 * PAGE_BYTES) as u64)
    })
}

/// The number of pages that one modelled page represents.
fn one_in(rate: Rate) -> anyhow::Result<u32> {
    let whole = rate.to_string();
    let parts = match whole.strip_prefix("1/") {
        Some(parts) => parts.parse().ok(),
        None => (rate == Rate::ONE).then_some(1),
    };
    match parts {
        Some(parts) if u32::is_power_of_two(parts) => Ok(parts),
        _ => {
            bail_usage!("--ghost-rate {rate}: it must be 1 over a power of two, such as 1 or 1/16")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parsed(words: &str) -> Result<Args, clap::Error> {
        let line = format!("x --socket /s --capacity 8M {words}");
        Ok(Line::try_parse_from(line.split_whitespace())?.args)
    }

    #[test]
    fn a_user_with_a_weight_has_the_other_limits_of_all() {
        let args =
            parsed("--weight 1001=300 --weight 7=1 --client-max 4M --max-clients 9").unwrap();
        let options = args.server_options();
        assert_eq!(options.limits.weight, ClientLimits::default().weight);
        for (uid, weight) in [(1001, 300), (7, 1)] {
            let expected = ClientLimits {
                weight,
                ceiling_bytes: Some(4 << 20),
                max_clients: 9,
                ..ClientLimits::default()
            };
            assert_eq!(options.user_limits.get(&uid), Some(&expected));
        }
    }

    #[test]
    fn what_is_no_weight_is_refused() {
        for text in ["300", "1001=0", "1001=1000001", "root=3", "=3", "1001="] {
            let error = parsed(&format!("--weight {text}")).unwrap_err().to_string();
            assert!(
                error.contains("is not the weight of a user"),
                "{text}: {error}"
            );
        }
    }
}
