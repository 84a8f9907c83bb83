//! Where the answers of a fleet come from: its daemons, or a file with answers of before. `plimsoll fleet collect` writes one.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use plimsoll_fleet::collect::{Access, Collector, set_aside};
use plimsoll_fleet::discovery;
use plimsoll_fleet::fleet::{Fleet, Settings};
use plimsoll_output::exit::PartialResult;
use plimsoll_output::{bail_usage, printable};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::fleet::{
    FleetFile, INTERVAL_MIN_MS, INTERVALS_MAX, MissingHost, are_intervals_accepted,
};
use plimsoll_protocol::size::{Interval, Share};

/// The daemons of a fleet.
#[derive(Debug, Clone, clap::Args)]
pub struct Daemons {
    /// File or URL with a list of hosts in the form of Prometheus' file or HTTP service discovery
    #[arg(long, value_name = "FILE|URL", conflicts_with = "prometheus")]
    hosts: Option<String>,
    /// URL of a Prometheus that scrapes the hosts' daemons
    #[arg(long, value_name = "URL")]
    prometheus: Option<String>,
    /// Its scrape job for plimsolld
    #[arg(
        long,
        value_name = "NAME",
        default_value = "plimsoll",
        requires = "prometheus",
        conflicts_with = "hosts"
    )]
    job: String,
    /// File with the token of the daemons; it is sent to all of them
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Send the token also to http addresses of other hosts, where the network can read it
    #[arg(long, requires = "token_file")]
    plain_text: bool,
    /// PEM file with the authorities that signed their certificates; https needs it
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// PEM file with our own certificate
    #[arg(long, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// PEM file with its key
    #[arg(long, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
    /// How far back to ask
    #[arg(long, value_name = "TIME", default_value = "7d")]
    since: Interval,
    /// How long a daemon may take to answer
    #[arg(long, value_name = "TIME", default_value = "20s")]
    time_out: Interval,
}

/// Keep the answers of all daemons in a file, for `report` and `place`.
///
/// The exit code is 5 if some did not answer; the file then lists them.
#[derive(Debug, clap::Args)]
pub struct CollectArgs {
    #[command(flatten)]
    daemons: Daemons,
    /// Length of an interval of needs
    #[arg(long, value_name = "TIME", default_value = "1h")]
    every: Interval,
}

/// The answers of a fleet.
#[derive(Debug, Clone, clap::Args)]
pub struct Source {
    /// File that `fleet collect` wrote, instead of asking daemons; its intervals are those of `collect`; - is standard input
    #[arg(
        value_name = "FILE",
        conflicts_with_all = [
            "hosts", "prometheus", "job", "token_file", "plain_text", "ca", "cert", "key", "since", "time_out", "every"
        ]
    )]
    file: Option<PathBuf>,
    #[command(flatten)]
    daemons: Daemons,
    /// Length of an interval of needs
    #[arg(long, value_name = "TIME", default_value = "1h")]
    every: Interval,
    /// Period into which time is folded: needs at the same time of it count together
    #[arg(long, value_name = "TIME", default_value = "24h")]
    period: Interval,
    /// Share of each host's RAM that VMs do not get
    #[arg(long, value_name = "SHARE", default_value = "10%")]
    reserve: Share,
    /// Processors that VMs may use for each processor of a host
    #[arg(long, value_name = "RATIO", default_value_t = 1.0)]
    cpu_ratio: f64,
    /// Leave processors out
    #[arg(long, conflicts_with = "cpu_ratio")]
    no_cpu: bool,
}

/// Runs `fleet collect`.
pub fn run(args: &CollectArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let (_, file) = args.daemons.collect(milliseconds(args.every)?)?;
    writeln!(out, "{}", serde_json::to_string(&file)?)?;
    complain(&file.missing, UNANSWERED)
}

/// What is missing of hosts of which nothing is known.
pub const UNANSWERED: &str = "without a usable answer";

/// An error if hosts are missing, with what they did or lack: the rest was shown.
pub fn complain(missing: &[MissingHost], what: &str) -> anyhow::Result<()> {
    let Some(first) = missing.first() else {
        return Ok(());
    };
    let text = format!(
        "hosts {what}: {}; the first: {}: {}",
        missing.len(),
        printable(&first.target),
        printable(&first.why)
    );
    Err(PartialResult(text).into())
}

impl Daemons {
    /// The answers of all daemons in intervals of this length, with the client that queried them.
    pub fn collect(&self, interval_ms: u64) -> anyhow::Result<(Collector, FleetFile)> {
        // The first interval may begin before.
        let span_ms = milliseconds(self.since)?.saturating_add(interval_ms);
        if !are_intervals_accepted(span_ms, interval_ms) {
            bail_usage!(
                "intervals of {} s: expected {} s or more, and fewer than {INTERVALS_MAX} in the {} of --since",
                interval_ms as f64 / 1000.0,
                INTERVAL_MIN_MS / 1000,
                self.since
            );
        }
        let certificate = self.cert.clone().zip(self.key.clone());
        let collector = Collector::new(&Access {
            token_file: self.token_file.clone(),
            plain_text: self.plain_text,
            ca_file: self.ca.clone(),
            certificate,
            time_out: self.time_out.get(),
        })?;
        let bases = match (&self.hosts, &self.prometheus) {
            (Some(list), _) => {
                let text = match list.contains("://") {
                    true => collector.text(list)?,
                    false => {
                        fs::read_to_string(list).with_context(|| format!("cannot read '{list}'"))?
                    }
                };
                discovery::of_list(&text)
                    .with_context(|| format!("'{list}' is no list of targets"))?
            }
            (None, Some(prometheus)) => {
                let address = format!(
                    "{}{}",
                    prometheus.trim_end_matches('/'),
                    discovery::TARGETS_PATH
                );
                let text = collector.text(&address)?;
                discovery::of_prometheus(&text, &self.job)
                    .with_context(|| format!("{address}: no answer of a Prometheus"))?
            }
            (None, None) => bail_usage!(
                "which hosts? Give --hosts or --prometheus, or a file of `fleet collect`"
            ),
        };
        if bases.is_empty() {
            bail_usage!(
                "there is no host: the list is empty, or Prometheus has no job {:?}",
                self.job
            );
        }
        let file = collector.collect(&bases, self.since.get(), interval_ms);
        Ok((collector, file))
    }
}

impl Source {
    /// The answers, and the fleet that they describe.
    pub fn fleet(&self) -> anyhow::Result<(FleetFile, Fleet)> {
        let reserve_ratio = self.reserve.get();
        if reserve_ratio >= 1.0 {
            bail_usage!("--reserve {}: below 100 %", self.reserve);
        }
        if !(self.cpu_ratio > 0.0 && self.cpu_ratio.is_finite()) {
            bail_usage!("--cpu-ratio {}: above 0", self.cpu_ratio);
        }
        let mut file = match &self.file {
            Some(path) => read(path)?,
            None => self.daemons.collect(milliseconds(self.every)?)?.1,
        };
        set_aside(&mut file);
        let settings = Settings {
            period_ms: milliseconds(self.period)?,
            reserve_ratio,
            processors_ratio: (!self.no_cpu).then_some(self.cpu_ratio),
        };
        if let (true, Err(error)) = (file.hosts.is_empty(), complain(&file.missing, UNANSWERED)) {
            return Err(error);
        }
        let fleet = Fleet::of(&file, &settings)?;
        Ok((file, fleet))
    }
}

fn milliseconds(time: Interval) -> anyhow::Result<u64> {
    Ok(u64::try_from(time.get().as_millis())?)
}

fn read(path: &Path) -> anyhow::Result<FleetFile> {
    let name = path.display();
    let text = match path == Path::new("-") {
        true => io::read_to_string(io::stdin()),
        false => fs::read_to_string(path),
    };
    let text = text.with_context(|| format!("cannot read '{name}'"))?;
    let file: FleetFile = serde_json::from_str(&text)
        .with_context(|| format!("'{name}' is not of `fleet collect`"))?;
    anyhow::ensure!(
        file.schema == SCHEMA,
        "'{name}' has schema {}, not {SCHEMA}",
        file.schema
    );
    Ok(file)
}
