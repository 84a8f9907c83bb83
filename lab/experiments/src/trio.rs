//! Three servers that share a host's memory, each a guest of ours with a balloon on a disk with an exclusive cache.
//!
//! After the machines of \[LS07\] §6.5: *web* loses a little with every page taken and gains a little with every
//! page given, *search* gains until its index fits, *scan* has memory that is of no use to it. The memory of each
//! is in two places: its own (RAM less balloon) and the cache under its disk. The servers themselves report their
//! requests, one by one; the daemons of their disks report the hits of the caches.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use plimsoll_actuator::GuestNeed;
use plimsoll_estimator::ratio_error;
use plimsoll_flow::{MissRatioCurve, TraceMethod};
use plimsoll_observe::ObservedPeriod;
use plimsoll_protocol::disk_admin::{self, DiskStat};
use plimsoll_rig::{Guest, GuestConfig, GuestDisk, GuestImage};
use plimsoll_vm::ConsoleEvent;

use plimsoll_rig::{DiskGuest, Fields, Setup};
use plimsoll_trap::TraceConfig;

use crate::tracing::trace;

/// Memory of each that is allocated, in MiB.
pub const BASELINE_MIB: u64 = 160;
/// The part of it in the cache under its disk while it is not traced: the minimum size of a cache.
pub const CACHE_MIB: u64 = 4;
/// The guests' RAM, the maximum of each one's own memory.
pub const RAM_MIB: u64 = 256;
/// Their own memory while they are traced through their caches; of it their kernels keep about 70 MiB.
pub const TRACED_MIB: u64 = 104;

/// Longest boot, with the writing of all files, on a host that does other things too.
const READY_MAX: Duration = Duration::from_secs(600);
/// How long a guest may take to follow its balloon.
const BALLOON_MAX: Duration = Duration::from_secs(120);
/// How long a disk's daemon may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// Interval at which guests report statistics of their memory, in s.
const NEED_INTERVAL_S: u64 = 2;
/// Interval of polling something without notifications.
const POLL: Duration = Duration::from_millis(100);
/// Interval of reading the counters of the disks' daemons while memory fills.
const FILL_POLL: Duration = Duration::from_secs(1);
/// Difference within which a balloon has reached its target.
const NEAR_BYTES: u64 = 1 << 20;
/// The largest of their files together, in MiB.
const FILES_MIB: u64 = 192;
/// The workload of the first two, besides the common part.
const SERVERS: [(&str, &str); 2] = [
    ("demo-web", "order=web files=3072 file_kib=64"),
    ("demo-search", "order=search files=44 file_kib=4096"),
];
/// Name of the third server.
pub const SCAN: &str = "demo-scan";
/// What the third server does, besides the common part.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Third {
    /// Reads everything in turn, and a few files more often.
    Scan,
    /// The same, with the paper's light task beside it, scaled to these machines: 96 MiB, of which 4 are read once in 2.5 s.
    ScanWithTask,
    /// Wants memory that it does not need: reads 96 MiB in turn at full speed, drops each file at once, and reports that it evicted
    /// it. So the cache under its disk sees it miss and evict without end what would fit into a little more memory.
    Hostile,
}

impl Third {
    /// Its name in options and results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Scan => "scan",
            Self::ScanWithTask => "scan-with-task",
            Self::Hostile => "hostile",
        }
    }

    fn workload(self) -> &'static str {
        match self {
            Self::Scan => "order=scan files=192 file_kib=1024",
            Self::ScanWithTask => {
                "order=scan files=192 file_kib=1024 background=1 background_files=24 background_kib=4096 background_ms=2500"
            }
            Self::Hostile => {
                "order=scan files=96 file_kib=1024 hot_percent=0 drop=1 module.fault_evict=1"
            }
        }
    }
}

/// One of the servers.
pub struct Server {
    /// Its VM's name.
    pub name: &'static str,
    // Ended before its disk.
    guest: Guest,
    disk: DiskGuest,
    told: Vec<(Instant, Fields)>,
    serves: bool,
}

/// The three servers.
pub struct Trio {
    /// Web, search, scan.
    pub servers: Vec<Server>,
}

/// Pages that the servers have to read until their memory holds what they use.
#[derive(Debug)]
pub struct Filling {
    /// Of each, the blocks that it had read, and the pages that it has to read.
    until: Vec<(u64, u64)>,
}

/// Counts of a server over a time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ServerCounts {
    /// Requests answered.
    pub requests: u64,
    /// Pages that were in none of its memory, as its kernel counts reads from its disk, less what the cache caught.
    pub misses: f64,
    /// Half-width of the 95 % band of its misses per request, as a share of them, by its reports; infinite below two.
    pub error: f64,
}

impl ServerCounts {
    /// Misses per request; `None` without requests.
    #[must_use]
    pub fn per_request(&self) -> Option<f64> {
        (self.requests > 0).then(|| self.misses / self.requests as f64)
    }
}

impl Trio {
    /// Boots the three and waits until they serve with [`BASELINE_MIB`] each. `program` is `plimsoll`;
    /// `third` is what the third does; `seed` chooses the order of their requests.
    ///
    /// # Errors
    ///
    /// Why one did not come up, or `stop` was set; nothing is left running.
    pub fn boot(
        program: &Path,
        third: Third,
        seed: u32,
        stop: &AtomicBool,
    ) -> anyhow::Result<Self> {
        let servers = SERVERS.into_iter().chain([(SCAN, third.workload())]);
        let servers = servers.map(|(name, serves)| {
            Server::boot(program, name, &format!("{serves} seed={seed}"))
                .with_context(|| format!("VM {name} does not start"))
        });
        let mut trio = Self {
            servers: servers.collect::<anyhow::Result<_>>()?,
        };
        let deadline = Instant::now() + READY_MAX;
        while !trio.servers.iter().all(|server| server.serves) {
            ensure!(
                Instant::now() < deadline,
                "the VMs do not serve after {READY_MAX:?}"
            );
            trio.pass(POLL, stop)?;
        }
        for server in &mut trio.servers {
            server.request_need()?;
        }
        let own_mib = BASELINE_MIB - CACHE_MIB;
        trio.hold(&[(own_mib << 20, CACHE_MIB << 20); 3], stop)?;
        Ok(trio)
    }

    /// Waits, and reads the servers' output meanwhile.
    ///
    /// # Errors
    ///
    /// If a server gave up, ended or read what it had not written, or `stop` was set.
    pub fn pass(&mut self, time: Duration, stop: &AtomicBool) -> anyhow::Result<()> {
        let end = Instant::now() + time;
        loop {
            for server in &mut self.servers {
                server.hear()?;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            ensure!(!stop.load(Ordering::Relaxed), "stopped");
            thread::sleep(left.min(POLL));
        }
    }

    /// Begins to count the pages that the servers read after their boot, until as many are read as the largest of them
    /// has files: until then their memory holds what they wrote.
    ///
    /// # Errors
    ///
    /// If a disk's daemon does not answer.
    pub fn filling_first(&self) -> anyhow::Result<Filling> {
        let begun = self.disks()?.into_iter();
        Ok(Filling {
            until: begun
                .map(|disk| (disk.read_blocks, FILES_MIB << 8))
                .collect(),
        })
    }

    /// Begins to count the pages that the servers read, because each fills a page of the memory that a server gained
    /// since it had `from_bytes` of its own.
    ///
    /// # Errors
    ///
    /// If a disk's daemon or a monitor does not answer.
    pub fn filling(&mut self, from_bytes: [u64; 3]) -> anyhow::Result<Filling> {
        let has_bytes = self.direct_bytes()?;
        let until = self.disks()?.into_iter().zip(has_bytes).zip(from_bytes);
        Ok(Filling {
            until: until
                .map(|((disk, has), from)| {
                    let gained_pages = has.saturating_sub(from) >> 12;
                    (disk.read_blocks, gained_pages)
                })
                .collect(),
        })
    }

    /// Waits until all servers have filled the memory that they gained, `most` at the longest. Returns those that had
    /// not by then, each with the share that it had filled, 0.0 to 1.0.
    ///
    /// # Errors
    ///
    /// Those of [`pass`](Self::pass), and if a disk's daemon does not answer.
    pub fn warm(
        &mut self,
        filling: &Filling,
        most: Duration,
        stop: &AtomicBool,
    ) -> anyhow::Result<Vec<(&'static str, f64)>> {
        let deadline = Instant::now() + most;
        loop {
            let mut cold = Vec::new();
            for (server, (before, gained)) in self.servers.iter().zip(&filling.until) {
                let read = server.disk()?.read_blocks.saturating_sub(*before);
                if read < *gained {
                    cold.push((server.name, read as f64 / *gained as f64));
                }
            }
            if cold.is_empty() || Instant::now() >= deadline {
                return Ok(cold);
            }
            self.pass(FILL_POLL, stop)?;
        }
    }

    /// Lets the servers run for a while, each traced from outside by first touches. Returns the last period of each, or
    /// why there is none.
    ///
    /// # Errors
    ///
    /// Those of [`pass`](Self::pass).
    pub fn observe(
        &mut self,
        time: Duration,
        stop: &AtomicBool,
    ) -> anyhow::Result<Vec<anyhow::Result<ObservedPeriod>>> {
        let pids: Vec<_> = self.servers.iter().map(Server::pid).collect();
        let is_over = &AtomicBool::new(false);
        thread::scope(|scope| {
            let view = |pid| scope.spawn(move || view_from_outside(pid, time, is_over));
            let tracers: Vec<_> = pids.into_iter().map(view).collect();
            let passed = self.pass(time, stop);
            is_over.store(true, Ordering::Relaxed);
            let views = tracers
                .into_iter()
                .map(|tracer| tracer.join().expect("tracing does not panic"));
            let views = views.collect();
            passed.map(|()| views)
        })
    }

    /// Each server's own memory, in bytes.
    ///
    /// # Errors
    ///
    /// If a monitor does not answer.
    pub fn direct_bytes(&mut self) -> anyhow::Result<[u64; 3]> {
        let mut bytes = [0; 3];
        for (server, bytes) in self.servers.iter_mut().zip(&mut bytes) {
            *bytes = server.direct_bytes()?;
        }
        Ok(bytes)
    }

    /// Measures for a time.
    ///
    /// # Errors
    ///
    /// Those of [`pass`](Self::pass), and if a disk's daemon does not answer.
    pub fn measure(
        &mut self,
        time: Duration,
        stop: &AtomicBool,
    ) -> anyhow::Result<Vec<ServerCounts>> {
        let begin = Instant::now();
        let before = self.disks()?;
        self.pass(time, stop)?;
        let after = self.disks()?;
        let counted = self.servers.iter().zip(before.iter().zip(&after));
        counted
            .map(|(server, (before, after))| server.counted(begin, before, after))
            .collect()
    }

    /// Sets each server's own memory and its cache to this many bytes, one pair for each, and waits until that is so.
    /// VMs that shrink go first.
    ///
    /// # Errors
    ///
    /// Those of [`pass`](Self::pass), and if a guest does not follow; the others then have their new sizes.
    pub fn hold(&mut self, holdings: &[(u64, u64)], stop: &AtomicBool) -> anyhow::Result<()> {
        for shrinking in [true, false] {
            for (server, &(direct, cache)) in self.servers.iter_mut().zip(holdings) {
                if (server.direct_bytes()? > direct) == shrinking {
                    server.guest.qmp()?.set_balloon(direct)?;
                }
                let has = disk_admin::stat(&server.admin(), ANSWER_MAX)?.cache_bytes;
                if has != cache && (has > cache) == shrinking {
                    disk_admin::resize(&server.admin(), cache, ANSWER_MAX)?;
                }
            }
            let deadline = Instant::now() + BALLOON_MAX;
            for (index, &(direct, _)) in holdings.iter().enumerate() {
                loop {
                    let has = self.servers[index].direct_bytes()?;
                    let follows = if shrinking {
                        has > direct + NEAR_BYTES
                    } else {
                        has.abs_diff(direct) > NEAR_BYTES
                    };
                    if !follows {
                        break;
                    }
                    ensure!(
                        Instant::now() < deadline,
                        "VM {} has {} MiB and does not follow its balloon to {}",
                        self.servers[index].name,
                        has >> 20,
                        direct >> 20
                    );
                    self.pass(POLL, stop)?;
                }
            }
        }
        Ok(())
    }

    /// Counters of the disks' daemons.
    ///
    /// # Errors
    ///
    /// If one does not answer.
    pub fn disks(&self) -> anyhow::Result<Vec<DiskStat>> {
        self.servers.iter().map(Server::disk).collect()
    }
}

impl Server {
    fn boot(program: &Path, name: &'static str, serves: &str) -> anyhow::Result<Self> {
        let mut setup = Setup::new(&format!("--cache {CACHE_MIB}M"), "");
        setup.image_mib = 384;
        setup.memory_mib = RAM_MIB;
        let disk = DiskGuest::prepare(program, &setup)?;
        let mut config = GuestConfig::new(
            name,
            // Twice the usual slots: an emulated guest may evict many pages before its host gets to run.
            &format!("workload=disk-serve module=copy module.slots=1024 mglru=0 {serves}"),
        );
        config.kernel = setup.kernel;
        config.memory_mib = RAM_MIB;
        config.balloon = true;
        for socket in ["disk.sock", "control.sock"] {
            let disk = GuestDisk::vhost_user(disk.folder().join(socket));
            config.disks.push(disk);
        }
        let image = GuestImage::for_guest(&config)?;
        Ok(Self {
            name,
            guest: Guest::start(&image, &config)?,
            disk,
            told: Vec::new(),
            serves: false,
        })
    }

    /// Its QEMU process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.guest.pid()
    }

    /// Its accelerator.
    #[must_use]
    pub fn accelerator(&self) -> String {
        self.guest.detection().accelerator.to_string()
    }

    /// The admin socket of its disk's daemon.
    #[must_use]
    pub fn admin(&self) -> PathBuf {
        self.disk.folder().join("admin.sock")
    }

    /// Counters of its disk's daemon.
    ///
    /// # Errors
    ///
    /// If it does not answer.
    pub fn disk(&self) -> anyhow::Result<DiskStat> {
        Ok(disk_admin::stat(&self.admin(), ANSWER_MAX)?)
    }

    /// Memory of its own: RAM less balloon.
    ///
    /// # Errors
    ///
    /// If its monitor does not answer.
    pub fn direct_bytes(&mut self) -> anyhow::Result<u64> {
        Ok(self.guest.qmp()?.balloon_actual_bytes()?)
    }

    /// Makes its guest report statistics of its memory from now on.
    fn request_need(&mut self) -> anyhow::Result<()> {
        let mut qmp = self.guest.qmp()?;
        let balloon = qmp.find_balloon()?.context("it has no balloon")?;
        Ok(qmp.set_stats_interval_s(&balloon, NEED_INTERVAL_S)?)
    }

    /// Converts a curve of the pages that it used into one of its sizes, by its guest's own last report.
    ///
    /// # Errors
    ///
    /// If its monitor does not answer, or its guest does not report its memory.
    pub fn in_vm_sizes(&mut self, curve: MissRatioCurve) -> anyhow::Result<MissRatioCurve> {
        let own_bytes = self.direct_bytes()?;
        let mut qmp = self.guest.qmp()?;
        let balloon = qmp.find_balloon()?.context("it has no balloon")?;
        let stats = qmp.guest_stats(&balloon)?;
        let need = stats.and_then(|stats| GuestNeed::of(&stats, own_bytes));
        let need = need
            .with_context(|| format!("the guest of VM {} does not report its memory", self.name))?;
        Ok(need.in_vm_sizes(curve, own_bytes, 0))
    }

    /// Takes its output.
    fn hear(&mut self) -> anyhow::Result<()> {
        while let Some(line) = self.guest.next_line(Duration::ZERO)? {
            match line.event {
                Some(ConsoleEvent::Phase { name, .. }) if name == "measured" => self.serves = true,
                Some(ConsoleEvent::Result { name, fields }) if name == "serve" => {
                    let wrong = number(&fields, "mismatches")?;
                    ensure!(wrong == 0, "VM {} read {wrong} wrong blocks", self.name);
                    self.told.push((line.at, fields));
                }
                Some(ConsoleEvent::Error { message }) => {
                    bail!("VM {} gave up: {message}", self.name)
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Counts of its output lines that lie wholly after `begin`.
    fn counted(
        &self,
        begin: Instant,
        before: &DiskStat,
        after: &DiskStat,
    ) -> anyhow::Result<ServerCounts> {
        let (mut requests, mut sectors) = (0, 0);
        let mut reports = Vec::new();
        for (at, fields) in &self.told {
            let length = Duration::from_millis(number(fields, "ms")?);
            if at.checked_sub(length).is_some_and(|from| from >= begin) {
                let [of_report, read] = [
                    number(fields, "requests")?,
                    number(fields, "disk_read_sectors")?,
                ];
                requests += of_report;
                sectors += read;
                reports.push([read as f64, of_report as f64]);
            }
        }
        let reads = after.read_blocks.saturating_sub(before.read_blocks);
        let hits = after.hits.saturating_sub(before.hits);
        let missed = if reads == 0 {
            1.0
        } else {
            1.0 - hits as f64 / reads as f64
        };
        Ok(ServerCounts {
            requests,
            misses: sectors as f64 / 8.0 * missed,
            error: ratio_error(&reports).map_or(f64::INFINITY, |error| {
                error * requests as f64 / (sectors as f64).max(1.0)
            }),
        })
    }
}

fn view_from_outside(
    pid: u32,
    time: Duration,
    stop: &AtomicBool,
) -> anyhow::Result<ObservedPeriod> {
    let vm = plimsoll_vm::find(&pid.to_string())?;
    let method = (TraceMethod::FirstTouches, &TraceConfig::default());
    let mut traced = trace(&vm, method, (time, Some(time)), stop, &mut |_| ())?;
    // The last one may have been cut short.
    let whole = traced.periods.len().saturating_sub(2);
    ensure!(!traced.periods.is_empty(), "no period has ended");
    Ok(traced.periods.swap_remove(whole).observed)
}

fn number(fields: &Fields, key: &str) -> anyhow::Result<u64> {
    let text = fields
        .get(key)
        .with_context(|| format!("a server reported no {key}"))?;
    text.parse().with_context(|| format!("{key}={text}"))
}
