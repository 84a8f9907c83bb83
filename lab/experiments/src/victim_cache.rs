//! A guest's page cache with an hcache behind it: what is kept when the page cache is flushed at once, what that saves, and
//! how guests share one store.
//!
//! Guests of ours run the signed files of guest/workload on the device-mapper target `hcache`, and verify every page. All
//! figures but times are counts, from the guest's kernel and target, the disks' daemon and the server, and so comparable
//! although guests are emulated. CPU time is that of the VM's process in the measured rounds: emulated instructions.
//!
//! The parts follow \[M08\] §5 (docs/papers.md) with another load: its compilation is `./dev lab compile`. Its table 1 is here
//! `cold`: the page cache is flushed before each round; its table 2 is `warm`: it is not, in a guest whose memory is
//! too small.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use plimsoll_output::{Format, OutputArgs, csv as csv_line};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_rig::{DiskGuest, GuestOutput, Server, Setup, cpu_time, program};
use plimsoll_serve::disk::admin::report;
use plimsoll_serve::hcache::Report as StoreReport;
use plimsoll_vm::{ConsoleEvent, detect};
use serde::Serialize;
use tempfile::TempDir;

/// Longest silence of a guest; emulated ones on a busy host are slow.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long a phase waits for our queries.
const PAUSE_MS: u64 = 500;
/// Users of the two guests that share a store, and their weights.
const SHARERS: [(u32, u32); 2] = [(2001, 100), (2002, 300)];
/// Time between two readings of the shares.
const LOOK: Duration = Duration::from_secs(1);

/// Flush guests' page caches into an hcache, compare guests with and without one, and let two share one by weight.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only this part; may be repeated [default: all]
    #[arg(long, value_enum, value_name = "NAME")]
    only: Vec<Part>,
    /// Measured rounds of each guest; a round visits each file once on average
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// More words of every guest's workload, such as module.slots=4096
    #[arg(long, value_name = "WORDS", default_value = "")]
    workload: String,
    #[command(flatten)]
    output: OutputArgs,
}

/// A part of the experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Flush the page cache at once, in two ways, and read all files again
    Flush,
    /// Compare guests of several sizes, with and without an hcache
    Memory,
    /// Let two guests with weights 1:3 compete for one store (root only)
    Weights,
}

/// A guest of the first two parts.
#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    memory_mib: u64,
    /// Capacity of its hcache in MiB; 0: it has none.
    hcache_mib: u64,
    words: &'static str,
}

const FLUSH: [Case; 4] = [
    flush("drop_caches", 0, "flush=drop"),
    flush("drop_caches", 192, "flush=drop trim=1"),
    flush("reclaim", 0, "flush=reclaim"),
    flush("reclaim", 192, "flush=reclaim trim=1"),
];

const fn flush(name: &'static str, hcache_mib: u64, words: &'static str) -> Case {
    Case {
        name,
        memory_mib: 192,
        hcache_mib,
        words,
    }
}

/// 144 MiB of files: more than a guest of 128 MiB can cache, less than one of 256 MiB.
const MEMORY: [Case; 6] = [
    memory("cold", 256, 192, "flush=drop"),
    memory("cold", 256, 0, "flush=drop"),
    memory("cold", 512, 0, "flush=drop"),
    memory("warm", 128, 192, "flush=no"),
    memory("warm", 128, 0, "flush=no"),
    memory("warm", 256, 0, "flush=no"),
];

const fn memory(name: &'static str, memory_mib: u64, hcache_mib: u64, words: &'static str) -> Case {
    Case {
        name,
        memory_mib,
        hcache_mib,
        words,
    }
}

/// What a guest's measured rounds cost. Pages are of 4 KiB.
#[derive(Debug, Default, Serialize)]
struct Row {
    part: &'static str,
    case: &'static str,
    memory_mib: u64,
    hcache_mib: u64,
    /// Pages that its programs read, and pages read from the disk for them.
    read_pages: u64,
    disk_pages: u64,
    /// CPU time of the VM's process.
    cpu_seconds: f64,
    /// Pages that left the page cache by the flushes.
    flushed_pages: u64,
    /// Pages put by the target, and evicted pages of the disk that it did not put, with the reason.
    puts: u64,
    refused: BTreeMap<String, u64>,
    gets: u64,
    hits: u64,
    /// Waits for a slot of the ring: how many, how many in vain, and their mean length.
    waits: u64,
    waits_in_vain: u64,
    wait_ns: u64,
    /// Mean times in the guest: a put, a request of several gets.
    guest_put_ns: u64,
    guest_request_ns: u64,
    requests: u64,
    /// Mean times of a page in the disks' daemon.
    host_put_ns: u64,
    host_get_ns: u64,
    /// Pages in the store before and after all files were deleted and their blocks discarded.
    before_trim: Option<u64>,
    after_trim: Option<u64>,
}

/// A guest that shares a store.
#[derive(Debug, Serialize)]
struct Sharer {
    uid: u64,
    weight: u32,
    /// Mean over the looks: share of both guests' memory in the store, gets a second.
    share: f64,
    activity: f64,
    /// Share of its gets that hit, over the whole run.
    hit_ratio: f64,
    looks: u64,
}

#[derive(Debug, Default, Serialize)]
struct Results {
    rows: Vec<Row>,
    weights: Vec<Sharer>,
}

/// Runs the experiment.
///
/// # Errors
///
/// Why a guest or server did not run, or that a guest read wrong data.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let plimsoll = program("plimsoll")?;
    let wanted = |part| args.only.is_empty() || args.only.contains(&part);
    let mut results = Results::default();
    for (part, name, cases) in [
        (Part::Flush, "flush", &FLUSH[..]),
        (Part::Memory, "memory", &MEMORY[..]),
    ] {
        for case in cases.iter().filter(|_| wanted(part)) {
            let row = measure(&plimsoll, args, name, case);
            let row = row.with_context(|| format!("{name}: {case:?}"))?;
            results.rows.push(row);
        }
    }
    if wanted(Part::Weights) {
        results.weights = share(&plimsoll, args).context("two guests on one store")?;
    }
    let text = match args.output.format() {
        Format::Json => serde_json::to_string_pretty(&serde_json::json!({
            "schema": SCHEMA,
            "accelerator": detect().accelerator.to_string(),
            "rounds": args.rounds,
            "rows": results.rows,
            "weights": results.weights,
        }))?,
        Format::Csv => csv_of(&results),
        _ => table(&results),
    };
    args.output.write(text.trim_end().as_bytes(), out)?;
    Ok(())
}

/// An hcache server, and where it listens.
struct Store {
    socket: PathBuf,
    server: Server,
    _folder: TempDir,
}

impl Store {
    fn start(plimsoll: &Path, capacity_mib: u64, options: &[String]) -> anyhow::Result<Self> {
        let folder = TempDir::with_prefix("plimsoll-hcache-")?;
        // Daemons of other users connect.
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
        let socket = folder.path().join("hcache");
        let mut command = Command::new(plimsoll);
        command
            .args(["hcache", "serve", "--capacity", &format!("{capacity_mib}M")])
            .args(options)
            .arg("--socket")
            .arg(&socket);
        let log = folder.path().join("log");
        let server = Server::start(&mut command, &log, Duration::from_secs(30), |server| {
            server.log().starts_with("hcache: serving at ")
        })?;
        Ok(Self {
            socket,
            server,
            _folder: folder,
        })
    }

    fn report(&self, plimsoll: &Path) -> anyhow::Result<StoreReport> {
        let asked = Command::new(plimsoll)
            .args(["hcache", "stat", "-o", "json", "--socket"])
            .arg(&self.socket)
            .output()?;
        ensure!(
            asked.status.success(),
            "hcache stat: {}; the server: {}",
            String::from_utf8_lossy(&asked.stderr),
            self.server.log()
        );
        Ok(serde_json::from_slice(&asked.stdout)?)
    }

    fn pages(&self, plimsoll: &Path) -> anyhow::Result<u64> {
        let clients = self.report(plimsoll)?.clients;
        Ok(clients.iter().map(|client| client.stats.pages).sum())
    }
}

fn setup(args: &Args, memory_mib: u64, socket: Option<&Path>, words: &str) -> Setup {
    let mut serve = "--cache-mode none".to_owned();
    let mut workload = format!("workload=disk-signed module=copy pause_ms={PAUSE_MS} {words}");
    if let Some(socket) = socket {
        serve += &format!(" --hcache {}", socket.display());
        workload += " dm=private";
    }
    Setup {
        memory_mib,
        ..Setup::new(&serve, &format!("{workload} {}", args.workload))
    }
}

fn measure(plimsoll: &Path, args: &Args, part: &'static str, case: &Case) -> anyhow::Result<Row> {
    let store = match case.hcache_mib {
        0 => None,
        mib => Some(Store::start(plimsoll, mib, &[])?),
    };
    let files = match part {
        "flush" => "files=96 file_kib=1024 order=sequential warmup=1",
        _ => "files=144 file_kib=1024 order=random warmup=2",
    };
    let words = format!("{files} rounds={} {}", args.rounds, case.words);
    let socket = store.as_ref().map(|store| store.socket.as_path());
    let mut guest = DiskGuest::start(plimsoll, &setup(args, case.memory_mib, socket, &words))?;
    wait_for(&mut guest, "measured")?;
    let cpu_before = cpu_seconds(&mut guest)?;
    let disk_before = report(&guest.admin(), false)?.machine;
    let (mut before_trim, mut after_trim) = (None, None);
    let trims = case.words.contains("trim=1");
    wait_for(&mut guest, if trims { "trim" } else { "end" })?;
    let cpu_after = cpu_seconds(&mut guest)?;
    let disk_after = report(&guest.admin(), false)?.machine;
    if let Some(store) = store.as_ref().filter(|_| trims) {
        before_trim = Some(store.pages(plimsoll)?);
        wait_for(&mut guest, "end")?;
        after_trim = Some(store.pages(plimsoll)?);
    }
    let told = guest.finish(PATIENCE)?;
    guest.check_image()?;
    ensure_right(&told)?;

    let behind = &disk_after.victim_cache;
    let mean = |ns: u64, count: u64| ns.checked_div(count).unwrap_or(0);
    let target = status(&told);
    let of_target = |key: &str| target.get(key).copied().unwrap_or(0);
    let of_module = |key: &str| told.number("plimsoll", None, key).unwrap_or(0);
    let flushes = told.results.iter().filter(|(name, _)| name == "flush");
    let pages = |fields: &BTreeMap<String, String>, key| -> u64 {
        fields
            .get(key)
            .and_then(|text| text.parse().ok())
            .unwrap_or(0)
    };
    Ok(Row {
        part,
        case: case.name,
        memory_mib: case.memory_mib,
        hcache_mib: case.hcache_mib,
        read_pages: told.number("files", Some("measured"), "reads")?,
        disk_pages: told.number("files", Some("measured"), "disk_read_sectors")? / 8,
        cpu_seconds: cpu_after - cpu_before,
        flushed_pages: flushes
            .map(|(_, fields)| pages(fields, "pages").saturating_sub(pages(fields, "left")))
            .sum(),
        puts: of_target("puts"),
        refused: (target.iter())
            .filter(|(key, count)| key.starts_with("refused_") && **count > 0)
            .map(|(key, count)| (key["refused_".len()..].to_owned(), *count))
            .collect(),
        gets: of_target("gets"),
        hits: of_target("hits"),
        waits: of_module("waits"),
        waits_in_vain: of_module("waits_in_vain"),
        wait_ns: of_module("ns_waited"),
        guest_put_ns: of_target("ns_put"),
        guest_request_ns: of_target("ns_get"),
        requests: of_target("requests"),
        host_put_ns: mean(behind.put_ns, behind.puts),
        host_get_ns: mean(
            behind.get_ns - disk_before.victim_cache.get_ns,
            behind.gets - disk_before.victim_cache.gets,
        ),
        before_trim,
        after_trim,
    })
}

/// Two guests of 128 MiB with 144 MiB of files each, and a store of 64 MiB.
fn share(plimsoll: &Path, args: &Args) -> anyhow::Result<Vec<Sharer>> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "only root can start daemons of two users"
    );
    let mut options = vec!["--mode".to_owned(), "666".to_owned()];
    for (uid, weight) in SHARERS {
        options.extend(["--allow-uid".to_owned(), uid.to_string()]);
        options.extend(["--weight".to_owned(), format!("{uid}={weight}")]);
    }
    let store = Store::start(plimsoll, 64, &options)?;
    let words = format!(
        "files=144 file_kib=1024 order=random warmup=2 rounds={}",
        args.rounds * 4
    );
    let mut guests = Vec::new();
    for (uid, _) in SHARERS {
        let mut setup = setup(args, 128, Some(&store.socket), &words);
        setup.user = Some(uid);
        guests.push(DiskGuest::start(plimsoll, &setup)?);
    }
    for guest in &mut guests {
        wait_for(guest, "measured")?;
    }
    // Until the first of them has done.
    let mut sums = [(0.0, 0.0); SHARERS.len()];
    let mut looks = 0u32;
    let mut ratios = [0.0; SHARERS.len()];
    while !guests.iter_mut().any(has_ended) {
        let clients = store.report(plimsoll)?.clients;
        let used: u64 = clients.iter().map(|client| client.stats.used_bytes).sum();
        for (index, (uid, _)) in SHARERS.into_iter().enumerate() {
            let client = clients
                .iter()
                .find(|client| client.stats.group == u64::from(uid));
            let client = &client
                .context("a guest is not a client of the store")?
                .stats;
            sums[index].0 += client.used_bytes as f64 / used.max(1) as f64;
            sums[index].1 += client.activity;
            ratios[index] = client.counters.hit_ratio().unwrap_or(0.0);
        }
        looks += 1;
        std::thread::sleep(LOOK);
    }
    ensure!(looks > 5, "the guests ended before their shares were seen");
    for guest in &mut guests {
        let told = guest.finish(PATIENCE)?;
        guest.check_image()?;
        ensure_right(&told)?;
    }
    let sharers = SHARERS.into_iter().enumerate();
    Ok(sharers
        .map(|(index, (uid, weight))| Sharer {
            uid: uid.into(),
            weight,
            share: sums[index].0 / f64::from(looks),
            activity: sums[index].1 / f64::from(looks),
            hit_ratio: ratios[index],
            looks: looks.into(),
        })
        .collect())
}

fn wait_for(guest: &mut DiskGuest, phase: &str) -> anyhow::Result<()> {
    guest.listen(
        PATIENCE,
        |event| matches!(event, ConsoleEvent::Phase { name, .. } if name == phase),
    )
}

/// Whether a guest's measured rounds are over, without waiting for it.
fn has_ended(guest: &mut DiskGuest) -> bool {
    let seen = Instant::now();
    let listened = guest.listen(
        Duration::from_millis(1),
        |event| matches!(event, ConsoleEvent::Phase { name, .. } if name == "end"),
    );
    // A guest that printed nothing goes on; one that failed returns at once, and is reported when it is finished.
    listened.is_ok() || (seen.elapsed() < Duration::from_millis(1))
}

/// Counts of the target's status, by name.
fn status(told: &GuestOutput) -> BTreeMap<String, u64> {
    let found = told.results.iter().find(|(name, _)| name == "dm");
    let text = found.and_then(|(_, fields)| fields.get("text"));
    let words: Vec<&str> = text
        .map(|text| text.split(' ').collect())
        .unwrap_or_default();
    words
        .chunks_exact(2)
        .filter_map(|pair| Some((pair[0].to_owned(), pair[1].parse().ok()?)))
        .collect()
}

/// CPU time that the VM's process has used.
fn cpu_seconds(guest: &mut DiskGuest) -> anyhow::Result<f64> {
    let pid = guest.guest().context("the guest has ended")?.pid();
    Ok(cpu_time(pid)?.as_secs_f64())
}

fn ensure_right(told: &GuestOutput) -> anyhow::Result<()> {
    ensure!(
        told.mismatches == Some(0),
        "the guest found {:?} wrong blocks",
        told.mismatches
    );
    ensure!(
        told.number("kernel", None, "complaints")? == 0,
        "the guest's kernel complains: {:?}",
        told.kernel
    );
    Ok(())
}

/// Share of the evicted pages of the disk that were put.
fn kept(row: &Row) -> f64 {
    let refused: u64 = row.refused.values().sum();
    row.puts as f64 / (row.puts + refused).max(1) as f64
}

fn csv_of(results: &Results) -> String {
    let rows = results.rows.iter().map(|row| {
        vec![
            row.part.to_owned(),
            row.case.to_owned(),
            row.memory_mib.to_string(),
            row.hcache_mib.to_string(),
            row.read_pages.to_string(),
            row.disk_pages.to_string(),
            format!("{:.2}", row.cpu_seconds),
            row.flushed_pages.to_string(),
            row.puts.to_string(),
            format!("{:.4}", kept(row)),
            row.gets.to_string(),
            row.hits.to_string(),
            String::new(),
        ]
    });
    let sharers = results.weights.iter().map(|sharer| {
        let mut cells = vec![String::new(); 13];
        cells[0] = "weights".to_owned();
        cells[1] = sharer.weight.to_string();
        cells[12] = format!("{:.4}", sharer.share);
        cells
    });
    let head = [
        "part",
        "case",
        "memory_mib",
        "hcache_mib",
        "read_pages",
        "disk_pages",
        "cpu_seconds",
        "flushed_pages",
        "puts",
        "kept",
        "gets",
        "hits",
        "share",
    ];
    let lines = rows
        .chain(sharers)
        .map(|cells| csv_line(cells.iter().map(String::as_str)));
    csv_line(head) + &lines.collect::<String>()
}

fn table(results: &Results) -> String {
    let mut text = String::from(
        "Guests under TCG. Pages of 4 KiB; reads and CPU time of the measured rounds, puts and gets of all.\n",
    );
    let mut part = "";
    for row in &results.rows {
        if row.part != part {
            part = row.part;
            text += &format!(
                "\n{part}\ncase         memory  hcache     read  from disk    CPU s  flushed     puts    kept     gets    hits\n"
            );
        }
        let hits = row.hits as f64 / row.gets.max(1) as f64;
        let of_hcache = |figure: String| {
            if row.hcache_mib > 0 {
                figure
            } else {
                "-".to_owned()
            }
        };
        text += &format!(
            "{:<11} {:>7} {:>7} {:>8} {:>10} {:>8.2} {:>8} {:>8} {:>7} {:>8} {:>7}\n",
            row.case,
            row.memory_mib,
            of_hcache(row.hcache_mib.to_string()),
            row.read_pages,
            row.disk_pages,
            row.cpu_seconds,
            row.flushed_pages,
            of_hcache(row.puts.to_string()),
            of_hcache(format!("{:.1} %", kept(row) * 100.0)),
            of_hcache(row.gets.to_string()),
            of_hcache(format!("{:.1} %", hits * 100.0)),
        );
        if row.hcache_mib > 0 {
            text += &format!(
                "            not put: {:?}; {} waits of {} ns, {} in vain; a put takes {} ns of the guest and {} of the daemon, \
                 a get {} of the daemon, a request of {:.1} gets {} until it is answered",
                row.refused,
                row.waits,
                row.wait_ns,
                row.waits_in_vain,
                row.guest_put_ns,
                row.host_put_ns,
                row.host_get_ns,
                row.gets as f64 / row.requests.max(1) as f64,
                row.guest_request_ns,
            );
            if let (Some(before), Some(after)) = (row.before_trim, row.after_trim) {
                text += &format!("; {before} pages in the store, {after} once all was discarded");
            }
            text.push('\n');
        }
    }
    if !results.weights.is_empty() {
        text += "\nweights\nweight    share   gets/s    hits\n";
        for sharer in &results.weights {
            text += &format!(
                "{:>6} {:>6.1} % {:>8.0} {:>5.1} %\n",
                sharer.weight,
                sharer.share * 100.0,
                sharer.activity,
                sharer.hit_ratio * 100.0
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read_by_its_names() {
        let mut told = GuestOutput::default();
        let text = "state open pool 1 gets 64 hits 60 refused_no_room 7 ns_put 2574";
        let fields = BTreeMap::from([("text".to_owned(), text.to_owned())]);
        told.results.push(("dm".to_owned(), fields));
        let status = status(&told);
        assert_eq!(status.get("state"), None);
        assert_eq!((status["gets"], status["refused_no_room"]), (64, 7));
        assert_eq!(status["ns_put"], 2574);
    }

    #[test]
    fn pages_that_were_not_put_lower_the_share_that_is_kept() {
        let refused = BTreeMap::from([("no_room".to_owned(), 20), ("mismatch".to_owned(), 5)]);
        let row = Row {
            puts: 75,
            refused,
            ..Row::default()
        };
        assert_eq!(kept(&row), 0.75);
        assert_eq!(kept(&Row::default()), 0.0);
    }
}
