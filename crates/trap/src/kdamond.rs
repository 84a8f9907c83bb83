//! The kernel's sysfs interface of DAMON, as far as sampling single pages needs it.
//!
//! One kdamond with one context watches *regions of one page each*. They are not merged, because their size is the limit
//! that DAMON computes from the least number of regions, and not split, because nothing is smaller than a page. With an
//! aggregation as long as a sampling interval a region's `nr_accesses` is 1 if its page was touched in the last interval, else
//! 0, and its `age` is the number of intervals since that changed. So one snapshot says of every page when it was last
//! touched: in the last interval, or `age + 1` to `age + 2` intervals ago.
//!
//! The first region is a page that nobody can touch: its age is the number of intervals so far, which kdamond does not
//! report otherwise; what is as old was not touched at all. It is also the mark by which a kdamond of ours is recognised.
//!
//! **Ownership.** DAMON has no owners. A kdamond of somebody else is left alone. Ours is claimed by a lock on
//! [`CLAIM`], where the process is named that uses it; the kernel releases the lock when the process ends, however it does.
//! A kdamond whose claim is free, with our mark, was left behind by a tracer that was killed, and the next one removes
//! it. Until then it ends by itself when its target does; a control group's goes on.
//!
//! Source: Linux, Documentation/admin-guide/mm/damon/usage.rst; mm/damon of Linux 6.12 for ages.
//! Cost: about 20 µs for each page to set up, and 20 to read.
//! Not here: which pages, and what their ages mean for a curve.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags, flock, openat};

use crate::ram::PAGE_BYTES;
use crate::refusal::Refusal;

/// Where kdamonds are listed.
const KDAMONDS: &str = "/sys/kernel/mm/damon/admin/kdamonds";
/// Where the process is named that uses DAMON for us; in the one directory of `/run` that a container may write.
const CLAIM: &str = "/run/plimsoll/damon";
/// Prefix of the names of DAMON's threads.
const THREAD: &str = "kdamond";
/// The process that is the parent of the kernel's threads.
const KERNEL_THREADS: &str = "2";
/// The address that nobody can touch: below the least that can be mapped, and in physical memory the firmware's.
const UNTOUCHABLE: u64 = PAGE_BYTES;
/// Tries while another command or reader of the interface has it locked, and the pause between two.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(10);
/// Fewest regions that DAMON accepts.
const REGIONS_MIN: usize = 3;
/// Everything, in a pattern of a scheme.
const ANY_SIZE: u64 = u64::MAX;
const ANY_COUNT: u64 = u32::MAX as u64;

/// Prefix of the names of DAMON's functions.
const FUNCTIONS: &str = "damon_";

/// The part of DAMON that watches a kind of memory; a kernel may lack it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operations {
    /// That of a process.
    Process,
    /// Physical memory.
    Physical,
}

impl Operations {
    const ALL: [Self; 2] = [Self::Process, Self::Physical];

    /// The kernel's name of the operations.
    const fn name(self) -> &'static str {
        match self {
            Self::Process => "fvaddr",
            Self::Physical => "paddr",
        }
    }

    /// A function of that part.
    const fn function(self) -> &'static str {
        match self {
            Self::Process => "damon_va_prepare_access_checks",
            Self::Physical => "damon_pa_prepare_access_checks",
        }
    }

    /// Refuses a kernel that has others only.
    fn check(self, available: &[Self]) -> Result<(), Refusal> {
        let missing = match self {
            Self::Process => "CONFIG_DAMON_VADDR, without which it cannot watch processes",
            Self::Physical => "CONFIG_DAMON_PADDR, without which it cannot watch control groups",
        };
        match available.contains(&self) {
            true => Ok(()),
            false => Err(Refusal::NoDamon { missing }),
        }
    }
}

/// What is watched.
#[derive(Debug, Clone, Copy)]
pub struct Watch<'a> {
    /// The process; `None` for physical memory.
    pub pid: Option<u32>,
    /// Addresses of the pages, ascending.
    pub pages: &'a [u64],
    /// Time from one check to the next.
    pub interval: Duration,
}

/// When a page was last touched, in intervals before the snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastTouch {
    /// So many intervals ago, at least; and less than one more. 0: in the last interval.
    Ago(u32),
    /// Not since the start.
    Never,
}

/// A snapshot of the watched pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Intervals since the start.
    pub intervals: u32,
    /// By page, in their order.
    pub last_touches: Vec<LastTouch>,
}

impl Snapshot {
    /// When it was taken, after the start: the kernel takes it at the end of the interval in which it is asked, at `asked`, but has the
    /// asker wait in steps of 0.1 s, until `copied`, which may be longer than all intervals.
    pub fn taken(&self, asked: Duration, copied: Duration) -> Duration {
        let intervals = f64::from(self.intervals.max(1));
        asked.mul_f64(intervals / (intervals - 0.5)).min(copied)
    }
}

/// The kernel's files, or a copy of them.
#[derive(Debug)]
struct Files {
    kdamonds: PathBuf,
    claim: PathBuf,
    proc: PathBuf,
}

impl Files {
    fn of_kernel() -> Self {
        Self {
            kdamonds: KDAMONDS.into(),
            claim: CLAIM.into(),
            proc: "/proc".into(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.kdamonds.join(name)
    }

    /// Writes a value. Another command that has the interface locked is waited for.
    fn write(&self, name: &str, value: &str) -> io::Result<()> {
        let path = self.path(name);
        patiently(|| {
            let mut file = File::options().write(true).truncate(true).open(&path)?;
            file.write_all(value.as_bytes())
        })
        .map_err(|source| of_file(&path, &format!("writing '{value}' to"), &source))
    }

    fn text(&self, name: &str) -> io::Result<String> {
        let path = self.path(name);
        let text = patiently(|| fs::read_to_string(&path));
        text.map_err(|source| of_file(&path, "reading", &source))
    }

    fn number(&self, name: &str) -> io::Result<u64> {
        parse(&self.path(name), &self.text(name)?)
    }

    fn kdamonds(&self) -> io::Result<u64> {
        self.number("nr_kdamonds")
    }

    /// What DAMON can watch, by the functions that the kernel lists: the operations themselves are listed only in a kdamond, and
    /// one that is set up to read them would disturb others. A kernel that does not list DAMON's functions is believed to have all.
    fn operations(&self) -> Vec<Operations> {
        let symbols = fs::read_to_string(self.proc.join("kallsyms")).unwrap_or_default();
        let names = symbols.lines();
        let names = names.filter_map(|line| line.split_ascii_whitespace().nth(2));
        let names: Vec<_> = names.filter(|name| name.starts_with(FUNCTIONS)).collect();
        let mut operations = Operations::ALL.to_vec();
        operations.retain(|operations| {
            // Compilers append to names.
            let mut names = names.iter();
            names.len() == 0 || names.any(|name| name.starts_with(operations.function()))
        });
        operations
    }

    /// Whether the only kdamond is one of ours, or was to become one.
    fn is_marked(&self) -> bool {
        let is_empty = self.number("0/contexts/nr_contexts").is_ok_and(|n| n == 0);
        let intervals = "0/contexts/0/monitoring_attrs/intervals";
        let of_interval = |name| self.number(&format!("{intervals}/{name}_us")).ok();
        let start = self.number("0/contexts/0/targets/0/regions/0/start").ok();
        let is_ours = start == Some(UNTOUCHABLE) && of_interval("sample") == of_interval("aggr");
        is_empty || is_ours
    }

    /// The kdamond that runs for others, for a reader; `None` if there is none. `is_left` if the claim was never
    /// released and nobody holds it.
    fn other(&self, is_left: bool) -> io::Result<Option<String>> {
        match self.kdamonds()? {
            0 => {}
            1 if is_left && self.is_marked() => return Ok(None),
            count => {
                let thread = self.number("0/pid").map_or_else(
                    |_| "kdamond, not running".to_owned(),
                    |pid| format!("kdamond.0 (process {pid})"),
                );
                return Ok(Some(format!(
                    "{thread}, of {count} that others have set up"
                )));
            }
        }
        // The kernel's modules DAMON_RECLAIM, DAMON_LRU_SORT and DAMON_STAT have kdamonds that are not listed.
        let thread = self.thread();
        Ok(thread.map(|pid| format!("a module of the kernel (kdamond, process {pid})")))
    }

    /// A thread of DAMON.
    fn thread(&self) -> Option<u32> {
        let listing = fs::read_dir(&self.proc).into_iter().flatten().flatten();
        let mut processes =
            listing.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        processes.find(|pid| {
            // Any process may have that name, but only the kernel's threads have this parent.
            let stat =
                fs::read_to_string(self.proc.join(format!("{pid}/stat"))).unwrap_or_default();
            let named = stat
                .split_once('(')
                .and_then(|(_, rest)| rest.rsplit_once(')'));
            named.is_some_and(|(name, rest)| {
                let parent = rest.split_ascii_whitespace().nth(1);
                name.starts_with(THREAD) && parent == Some(KERNEL_THREADS)
            })
        })
    }
}

/// A directory of numbered directories, which are many.
#[derive(Debug)]
struct Entries {
    path: PathBuf,
    directory: File,
}

impl Entries {
    fn open(path: PathBuf) -> io::Result<Self> {
        let directory = File::open(&path).map_err(|source| of_file(&path, "opening", &source))?;
        Ok(Self { path, directory })
    }

    fn path(&self, index: usize, name: &str) -> PathBuf {
        self.path.join(format!("{index}/{name}"))
    }

    fn file(&self, index: usize, name: &str, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::CLOEXEC;
        let file = openat(
            &self.directory,
            format!("{index}/{name}"),
            flags,
            Mode::empty(),
        )?;
        Ok(file.into())
    }

    fn write(&self, index: usize, name: &str, value: u64) -> io::Result<()> {
        let written = patiently(|| {
            let mut file = self.file(index, name, OFlags::WRONLY | OFlags::TRUNC)?;
            file.write_all(value.to_string().as_bytes())
        });
        written.map_err(|source| of_file(&self.path(index, name), "writing", &source))
    }

    fn number(&self, index: usize, name: &str) -> io::Result<u64> {
        let read = patiently(|| {
            let mut file = self.file(index, name, OFlags::RDONLY)?;
            // Longer than any number, and enough for a message.
            let mut bytes = [0; 40];
            let length = file.read(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
        });
        let text = read.map_err(|source| of_file(&self.path(index, name), "reading", &source))?;
        text.trim()
            .parse()
            .or_else(|_| parse(&self.path(index, name), &text))
    }
}

/// The exclusive right to use DAMON. Dropped, it is released.
#[derive(Debug)]
struct Claim {
    file: File,
    /// Whether a process that ended without releasing it had it before.
    is_left: bool,
}

impl Claim {
    fn take(path: &Path) -> Result<Self, Refusal> {
        let unopened = |source| Refusal::NoAdmin {
            what: format!("open {}", path.display()),
            source,
        };
        let directory = path.parent().map_or(Ok(()), fs::create_dir_all);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        // Who may read it may lock it.
        let private = fs::Permissions::from_mode(0o600);
        options.mode(private.mode());
        let opened = directory.and_then(|()| options.open(path));
        let opened = opened.and_then(|file| {
            file.set_permissions(private)?;
            Ok(file)
        });
        let mut file = opened.map_err(unopened)?;
        let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
        let mut text = String::new();
        // Whatever else it holds names nobody.
        let _ = (&mut file).take(32).read_to_string(&mut text);
        let owner = text.trim().parse::<u32>().ok();
        match (locked, owner) {
            (Ok(()), owner) => Ok(Self {
                file,
                is_left: owner.is_some(),
            }),
            (Err(_), Some(owner)) => Err(Refusal::DamonInUse {
                by: format!("another tracer of Plimsoll (process {owner})"),
            }),
            (Err(_), None) => Err(Refusal::DamonInUse {
                by: "another tracer of Plimsoll".to_owned(),
            }),
        }
    }

    /// Names this process as the owner, or nobody.
    fn name(&mut self, owner: Option<u32>) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        owner.map_or(Ok(()), |owner| writeln!(self.file, "{owner}"))
    }
}

/// A kdamond of ours. Dropped, it is removed.
#[derive(Debug)]
pub struct Kdamond {
    files: Files,
    claim: Claim,
    /// Pages of the last configuration.
    pages: usize,
}

/// Refuses a host without a DAMON that can watch such memory, a caller who may not use it, and a DAMON that is in use. Changes
/// nothing.
pub fn check_damon(operations: Operations) -> Result<(), Refusal> {
    // Read once: the list of functions is long, and stays the same.
    static OF_KERNEL: OnceLock<Vec<Operations>> = OnceLock::new();
    let files = Files::of_kernel();
    let kdamonds = files.kdamonds().map_err(unusable)?;
    operations.check(OF_KERNEL.get_or_init(|| files.operations()))?;
    if kdamonds == 0 && files.thread().is_none() {
        // /sys may be read-only, as for plimsolld's unit.
        let opened = File::options().write(true).open(files.path("nr_kdamonds"));
        return opened.map(drop).map_err(unusable);
    }
    let is_left = files.claim.exists() && Claim::take(&files.claim)?.is_left;
    in_use(files.other(is_left).map_err(unusable)?)
}

fn in_use(by: Option<String>) -> Result<(), Refusal> {
    by.map_or(Ok(()), |by| Err(Refusal::DamonInUse { by }))
}

fn unusable(source: io::Error) -> Refusal {
    match source.kind() {
        io::ErrorKind::NotFound => Refusal::NoDamon { missing: KDAMONDS },
        _ => Refusal::NoAdmin {
            what: "use DAMON".to_owned(),
            source,
        },
    }
}

impl Kdamond {
    /// Claims DAMON, removes what a killed tracer left, and sets up a kdamond that does not run yet.
    ///
    /// # Errors
    ///
    /// That there is no DAMON, or who uses it; nothing is changed then.
    pub fn take() -> Result<Self, Refusal> {
        Self::take_from(Files::of_kernel())
    }

    fn take_from(files: Files) -> Result<Self, Refusal> {
        files.kdamonds().map_err(unusable)?;
        let mut claim = Claim::take(&files.claim)?;
        in_use(files.other(claim.is_left).map_err(unusable)?)?;
        claim.name(Some(std::process::id())).map_err(unusable)?;
        let kdamond = Self {
            files,
            claim,
            pages: 0,
        };
        let set_up = || {
            let write = |name: &str, value: &str| kdamond.files.write(name, value);
            if kdamond.files.kdamonds()? > 0 {
                kdamond.stop()?;
            }
            write("nr_kdamonds", "1")?;
            write("0/contexts/nr_contexts", "1")?;
            write("0/contexts/0/targets/nr_targets", "1")?;
            write("0/contexts/0/schemes/nr_schemes", "1")?;
            // Of the watched pages all.
            write("0/contexts/0/schemes/0/action", "stat")?;
            let pattern = "0/contexts/0/schemes/0/access_pattern";
            for (name, most) in [
                ("sz", ANY_SIZE),
                ("nr_accesses", ANY_COUNT),
                ("age", ANY_COUNT),
            ] {
                write(&format!("{pattern}/{name}/max"), &most.to_string())?;
            }
            io::Result::Ok(())
        };
        set_up().map_err(unusable)?;
        Ok(kdamond)
    }

    /// Begins to watch.
    pub fn start(&mut self, watch: &Watch<'_>) -> io::Result<()> {
        let files = &self.files;
        let context = "0/contexts/0";
        let operations = match watch.pid {
            Some(_) => Operations::Process,
            None => Operations::Physical,
        };
        files.write(&format!("{context}/operations"), operations.name())?;
        if let Some(pid) = watch.pid {
            files.write(&format!("{context}/targets/0/pid_target"), &pid.to_string())?;
        }
        let count = watch.pages.len() + 1;
        let regions = format!("{context}/targets/0/regions");
        files.write(&format!("{regions}/nr_regions"), &count.to_string())?;
        let regions = Entries::open(files.path(&regions))?;
        let starts = std::iter::once(&UNTOUCHABLE).chain(watch.pages);
        for (index, start) in starts.enumerate() {
            regions.write(index, "start", *start)?;
            regions.write(index, "end", start + PAGE_BYTES)?;
        }
        let attributes = format!("{context}/monitoring_attrs");
        for name in ["sample", "aggr"] {
            let path = format!("{attributes}/intervals/{name}_us");
            files.write(&path, &watch.interval.as_micros().to_string())?;
        }
        let (least, most) = ("nr_regions/min", "nr_regions/max");
        // The least may never exceed the most.
        for (name, value) in [(most, ANY_COUNT), (least, count.max(REGIONS_MIN) as u64)] {
            files.write(&format!("{attributes}/{name}"), &value.to_string())?;
        }
        files.write(
            &format!("{attributes}/{most}"),
            &count.max(REGIONS_MIN).to_string(),
        )?;
        files.write("0/state", "on")?;
        self.pages = watch.pages.len();
        Ok(())
    }

    /// Process id of the thread, while it runs.
    pub fn thread(&self) -> Option<u32> {
        let pid = self.files.number("0/pid").ok()?;
        u32::try_from(pid).ok()
    }

    /// Has the kernel copy the state of all pages (at [`Snapshot::taken`]); returns up to an interval and 0.2 s later.
    pub fn copy(&self) -> io::Result<()> {
        self.files.write("0/state", "update_schemes_tried_regions")
    }

    /// Ends watching; what was copied can still be read.
    pub fn stop(&self) -> io::Result<()> {
        if self.files.text("0/state")?.trim() == "on" {
            // It may end by itself, with its target, just before.
            let _ = self.files.write("0/state", "off");
        }
        Ok(())
    }

    /// Reads what was copied; `None` if the kernel copied only a part, or nothing.
    pub fn read(&self) -> io::Result<Option<Snapshot>> {
        let tried = "0/contexts/0/schemes/0/tried_regions";
        let is_whole = self.files.path(&format!("{tried}/{}", self.pages)).exists();
        if !is_whole {
            return Ok(None);
        }
        let regions = Entries::open(self.files.path(tried))?;
        let of_region = |index: usize, name: &str| {
            let value = regions.number(index, name)?;
            io::Result::Ok(u32::try_from(value).unwrap_or(u32::MAX))
        };
        if regions.number(0, "start")? != UNTOUCHABLE {
            return Ok(None);
        }
        let intervals = of_region(0, "age")?;
        let last_touches = (1..=self.pages).map(|index| {
            let is_touched = of_region(index, "nr_accesses")? > 0;
            if is_touched {
                return Ok(LastTouch::Ago(0));
            }
            let age = of_region(index, "age")?;
            Ok(match age < intervals {
                true => LastTouch::Ago(age.saturating_add(1)),
                false => LastTouch::Never,
            })
        });
        let last_touches = last_touches.collect::<io::Result<_>>()?;
        Ok(Some(Snapshot {
            intervals,
            last_touches,
        }))
    }
}

impl Drop for Kdamond {
    fn drop(&mut self) {
        // What stays in spite of this is removed by the next tracer.
        let removed = self
            .stop()
            .and_then(|()| self.files.write("nr_kdamonds", "0"));
        if removed.is_ok() {
            let _ = self.claim.name(None);
        }
    }
}

/// Tries while the interface is locked.
fn patiently<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    for _ in 1..TRIES {
        match attempt() {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => std::thread::sleep(PAUSE),
            other => return other,
        }
    }
    attempt()
}

fn parse(path: &Path, text: &str) -> io::Result<u64> {
    let value = text.trim();
    value.parse().map_err(|_| {
        let value: String = value.chars().take(40).collect();
        let message = format!("{} reads {value:?}, not a number", path.display());
        io::Error::new(io::ErrorKind::InvalidData, message)
    })
}

fn of_file(path: &Path, what: &str, source: &io::Error) -> io::Error {
    io::Error::new(
        source.kind(),
        format!("{what} {}: {source}", path.display()),
    )
}

/// A thread of DAMON. It marks pages idle as the backend `idle` does: where it samples a page of the target just before a
/// check, a touch is missed. It is left alone.
pub fn damon_thread() -> Option<u32> {
    Files::of_kernel().thread()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A copy of the files that the kernel makes for one kdamond, in a directory that is not the kernel's.
    struct Host {
        root: tempfile::TempDir,
    }

    #[test]
    fn a_pod_may_write_where_damon_is_claimed() {
        let pod = include_str!("../../../packaging/helm/plimsoll/templates/daemonset.yaml");
        let directory = Path::new(CLAIM).parent().unwrap().display();
        let mount = format!("mountPath: {directory}\n            - name");
        assert!(
            pod.contains(&mount),
            "{directory} is not mounted, or only to be read"
        );
    }

    const ATTRIBUTES: &str = "0/contexts/0/monitoring_attrs";
    const TRIED: &str = "0/contexts/0/schemes/0/tried_regions";
    const REGIONS: &str = "0/contexts/0/targets/0/regions";

    impl Host {
        fn new() -> Self {
            let host = Self {
                root: tempfile::tempdir().unwrap(),
            };
            host.set("nr_kdamonds", "0");
            for (name, value) in [
                ("0/state", "off"),
                ("0/pid", "-1"),
                ("0/contexts/nr_contexts", "0"),
                ("0/contexts/0/operations", "vaddr"),
                ("0/contexts/0/targets/nr_targets", "0"),
                ("0/contexts/0/targets/0/pid_target", "0"),
                ("0/contexts/0/schemes/nr_schemes", "0"),
                ("0/contexts/0/schemes/0/action", "stat"),
            ] {
                host.set(name, value);
            }
            for name in ["sz", "nr_accesses", "age"] {
                let pattern = "0/contexts/0/schemes/0/access_pattern";
                host.set(&format!("{pattern}/{name}/max"), "0");
            }
            for (name, value) in [
                ("intervals/sample_us", "5000"),
                ("intervals/aggr_us", "100000"),
                ("nr_regions/min", "10"),
                ("nr_regions/max", "1000"),
            ] {
                host.set(&format!("{ATTRIBUTES}/{name}"), value);
            }
            host.set(&format!("{REGIONS}/nr_regions"), "0");
            host
        }

        fn files(&self) -> Files {
            Files {
                kdamonds: self.root.path().join("kdamonds"),
                claim: self.root.path().join("run/plimsoll/claim"),
                proc: self.root.path().join("proc"),
            }
        }

        fn claim(&self, owner: &str) {
            let path = self.files().claim;
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, owner).unwrap();
        }

        fn set(&self, name: &str, text: &str) {
            let path = self.files().path(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn get(&self, name: &str) -> String {
            fs::read_to_string(self.files().path(name)).unwrap()
        }

        /// What the kernel makes of a number of regions.
        fn make(&self, regions: &str, count: usize, names: &[&str]) {
            for index in 0..count {
                for name in names {
                    self.set(&format!("{regions}/{index}/{name}"), "0");
                }
            }
        }

        /// A kdamond that runs, as somebody sets it up.
        fn run_another(&self, start: u64, aggr_us: u64) {
            self.set("nr_kdamonds", "1\n");
            self.set("0/contexts/nr_contexts", "1\n");
            self.set("0/state", "on\n");
            self.set("0/pid", "77\n");
            self.set(
                &format!("{ATTRIBUTES}/intervals/aggr_us"),
                &aggr_us.to_string(),
            );
            self.set(&format!("{REGIONS}/0/start"), &start.to_string());
        }
    }

    #[test]
    fn a_snapshot_is_of_the_interval_in_which_it_was_asked_for() {
        let ms = Duration::from_millis;
        let taken = |intervals, asked, copied| {
            let snapshot = Snapshot {
                intervals,
                last_touches: Vec::new(),
            };
            snapshot.taken(ms(asked), ms(copied))
        };
        // 24 intervals of 4 ms, asked for in the midst of the last; copied when the asker looked again.
        assert_eq!(taken(24, 94, 194), ms(96));
        // It was there when it was asked for.
        assert_eq!(taken(1, 94, 100), ms(100));
        assert_eq!(taken(0, 94, 100), ms(100));
    }

    #[test]
    fn each_page_is_a_region_that_is_neither_merged_nor_split() {
        let host = Host::new();
        let mut kdamond = Kdamond::take_from(host.files()).unwrap();
        host.make(REGIONS, 4, &["start", "end"]);
        let pages = [0x10_0000, 0x10_1000, 0x7000_0000_0000];
        let watch = Watch {
            pid: Some(42),
            pages: &pages,
            interval: Duration::from_millis(3),
        };
        kdamond.start(&watch).unwrap();
        let region = |index: usize| {
            let of = |name| host.get(&format!("{REGIONS}/{index}/{name}"));
            (
                of("start").parse::<u64>().unwrap(),
                of("end").parse::<u64>().unwrap(),
            )
        };
        let regions: Vec<_> = (0..4).map(region).collect();
        assert_eq!(regions[0], (4096, 8192));
        let starts = regions[1..].iter().map(|region| region.0);
        assert_eq!(starts.collect::<Vec<_>>(), pages);
        assert!(regions.iter().all(|(start, end)| end - start == 4096));
        let attribute = |name: &str| host.get(&format!("{ATTRIBUTES}/{name}"));
        // As many as there are: two of one page would be larger than the limit that follows from it.
        assert_eq!(attribute("nr_regions/min"), "4");
        assert_eq!(attribute("nr_regions/max"), "4");
        assert_eq!(attribute("intervals/sample_us"), "3000");
        assert_eq!(attribute("intervals/aggr_us"), "3000");
        assert_eq!(host.get("0/contexts/0/operations"), "fvaddr");
        assert_eq!(host.get("0/contexts/0/targets/0/pid_target"), "42");
        assert_eq!(host.get("0/state"), "on");
        drop(kdamond);
        assert_eq!(
            (host.get("0/state"), host.get("nr_kdamonds")),
            ("off".into(), "0".into())
        );
    }

    #[test]
    fn ages_are_times_since_the_last_touch() {
        let host = Host::new();
        let mut kdamond = Kdamond::take_from(host.files()).unwrap();
        kdamond.pages = 4;
        assert_eq!(kdamond.read().unwrap(), None);
        host.make(TRIED, 5, &["start", "end", "nr_accesses", "age"]);
        host.set(&format!("{TRIED}/0/start"), "4096\n");
        for (index, accesses, age) in [(0, 0, 30), (1, 1, 9), (2, 0, 0), (3, 0, 28), (4, 0, 30)] {
            host.set(
                &format!("{TRIED}/{index}/nr_accesses"),
                &format!("{accesses}\n"),
            );
            host.set(&format!("{TRIED}/{index}/age"), &format!("{age}\n"));
        }
        let snapshot = kdamond.read().unwrap().unwrap();
        assert_eq!(snapshot.intervals, 30);
        let ago = LastTouch::Ago;
        assert_eq!(
            snapshot.last_touches,
            [ago(0), ago(1), ago(29), LastTouch::Never]
        );
        // Regions that are not the ones set up.
        host.set(&format!("{TRIED}/0/start"), "8192\n");
        assert_eq!(kdamond.read().unwrap(), None);
    }

    #[test]
    fn a_damon_of_others_is_refused_by_its_process_and_not_touched() {
        for (start, aggr_us) in [(0x10_0000, 100_000), (4096, 100_000), (0x10_0000, 5000)] {
            let host = Host::new();
            host.run_another(start, aggr_us);
            // Ours was killed before it set anything up.
            host.claim("4194301\n");
            let refusal = Kdamond::take_from(host.files()).unwrap_err();
            assert!(matches!(refusal, Refusal::DamonInUse { .. }), "{refusal}");
            assert!(refusal.to_string().contains("process 77"), "{refusal}");
            assert_eq!(
                (host.get("0/state"), host.get("0/pid")),
                ("on\n".into(), "77\n".into())
            );
            assert_eq!(host.get("nr_kdamonds"), "1\n");
        }
    }

    #[test]
    fn a_damon_of_the_kernels_modules_is_refused_too() {
        let host = Host::new();
        host.set("../proc/1/stat", "1 (init) S 0 1 1\n");
        host.set("../proc/77/stat", "77 (kdamond) 2 2) S 1 77 77\n");
        assert!(Kdamond::take_from(host.files()).is_ok());
        host.set("../proc/78/stat", "78 (kdamond.0) S 2 0 0\n");
        let refusal = Kdamond::take_from(host.files()).unwrap_err().to_string();
        assert!(
            refusal.contains("module of the kernel (kdamond, process 78)"),
            "{refusal}"
        );
    }

    #[test]
    fn what_a_killed_tracer_left_is_removed_and_what_a_living_one_has_is_not() {
        let host = Host::new();
        host.run_another(4096, 5000);
        host.claim("4194301\n");
        let kdamond = Kdamond::take_from(host.files()).unwrap();
        assert_eq!(
            (host.get("0/state"), host.get("nr_kdamonds")),
            ("off".into(), "1".into())
        );
        let second = Kdamond::take_from(host.files()).unwrap_err().to_string();
        let ours = format!(
            "another tracer of Plimsoll (process {})",
            std::process::id()
        );
        assert!(second.contains(&ours), "{second}");
        drop(kdamond);
        // Released, it is nobody's: what is there then is another's.
        host.run_another(4096, 5000);
        assert!(Kdamond::take_from(host.files()).is_err());
    }

    #[test]
    fn a_host_without_damon_is_told_what_is_missing() {
        let root = tempfile::tempdir().unwrap();
        let files = Files {
            kdamonds: root.path().join("none"),
            claim: root.path().join("claim"),
            proc: root.path().join("proc"),
        };
        let refusal = Kdamond::take_from(files).unwrap_err();
        assert!(matches!(refusal, Refusal::NoDamon { .. }), "{refusal}");
    }

    #[test]
    fn a_kernel_is_refused_whose_damon_cannot_watch_such_memory() {
        let (process, physical) = (Operations::Process, Operations::Physical);
        let core = "ffffffff816a5ba0 T damon_start\n";
        let of_processes = "0000000000000000 t damon_va_prepare_access_checks.llvm.77\n";
        let physical_only = "0000000000000000 t damon_pa_prepare_access_checks\n";
        let all = [process, physical];
        for (symbols, expected) in [
            // Nothing is listed of it.
            ("ffffffff816a5ba0 T schedule\n".to_owned(), &all[..]),
            ([core, physical_only].concat(), &[physical]),
            ([core, of_processes].concat(), &[process]),
            ([core, of_processes, physical_only].concat(), &all),
            (core.to_owned(), &[]),
        ] {
            let host = Host::new();
            host.set("../proc/kallsyms", &symbols);
            assert_eq!(host.files().operations(), expected, "{symbols}");
        }
        // No list.
        assert_eq!(Host::new().files().operations(), all);
        let refusal = process.check(&[physical]).unwrap_err().to_string();
        assert!(refusal.contains("CONFIG_DAMON_VADDR"), "{refusal}");
        assert!(physical.check(&[physical]).is_ok());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn no_content_of_the_kernels_files_makes_it_panic(text in "[0-9a-z\\- \n]{0,60}") {
            let host = Host::new();
            let mut kdamond = Kdamond::take_from(host.files()).unwrap();
            kdamond.pages = 1;
            host.make(TRIED, 2, &["start", "end", "nr_accesses", "age"]);
            host.set(&format!("{TRIED}/0/start"), "4096");
            host.set(&format!("{TRIED}/1/age"), &text);
            match (kdamond.read(), text.trim().parse::<u64>()) {
                (Ok(Some(_)), Ok(_)) => {}
                (Err(error), Err(_)) => {
                    prop_assert!(error.to_string().contains("tried_regions/1/age"));
                }
                // Cut off at 40 bytes.
                (read, _) => prop_assert!(text.len() > 40, "{read:?}"),
            }
        }
    }
}
