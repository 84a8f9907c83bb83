//! Settings of a disk workload on the command line.

use crate::keys::{Keys, SettingsError};

/// Largest number of files, and of 1 KiB blocks in one.
const COUNT_MAX: u64 = 1 << 24;

/// Everything a run on a disk needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Name of the workload, as on the command line.
    pub name: String,
    /// What it does.
    pub work: Work,
    /// What is set up before, and stopped after it.
    pub machine: Machine,
    /// What all random numbers and all contents follow from.
    pub seed: u32,
    /// Pause of a phase after its line, in ms.
    pub pause_ms: u64,
    /// Faults of plimsoll_test.ko, each provoked before every round: file of its
    /// debugfs directory, and the value written to it.
    pub provoke: Vec<(String, String)>,
}

/// What a disk workload does.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// Signed files read and overwritten whole, on ext4.
    Signed(Signed),
    /// The same on pieces of an encrypted device.
    Crypt {
        pieces: Signed,
        /// In the device mapper's words.
        cipher: String,
    },
    /// All that a file system and the memory management can do to pages.
    Stress(Stress),
    /// Requests that read files by a law, for as long as wanted.
    Serve(Serve),
    /// Blocks written so that a crash can be judged.
    Crash(Crash),
    /// Direct reads, as many as can be.
    Io(Io),
    /// Reads and writes of the raw disk by a model, also where storage fails.
    Raw(Raw),
    /// fio of a second disk.
    Fio(Fio),
}

/// Order in which files are visited.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Order {
    Sequential,
    Random,
    Zipf {
        alpha: f64,
    },
    /// A tenth of the files is ten times as popular as the rest.
    Class,
}

/// \[LS07\] §6.1: files read or overwritten whole.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Signed {
    pub files: u32,
    pub file_kib: u32,
    pub order: Order,
    /// Share of the visits that overwrite, 0 to 100.
    pub write_percent: u64,
    /// Rounds before those that are measured; a round is as many visits as there are files.
    pub warmup: u64,
    /// Rounds that are measured.
    pub rounds: u64,
    /// How the page cache is emptied before each round.
    pub flush: Flush,
    /// Whether the files are deleted at the end, and their blocks discarded.
    pub trim: bool,
}

/// How the page cache is emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flush {
    /// It is not.
    No,
    /// By `drop_caches`.
    Drop,
    /// By reclaim of the workload's control group, all at once.
    Reclaim,
}

/// Everything at once, seeded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stress {
    pub rounds: u64,
    /// Steps of each thread in a round.
    pub steps: u64,
    /// Threads, each with files of its own.
    pub threads: u32,
    /// Files of a thread.
    pub files: u32,
    /// Largest size of a file.
    pub file_kib: u32,
    /// Anonymous memory taken once a round; `None`: half of what is available, and with swap
    /// three quarters of it and half of the free swap.
    pub anon_mib: Option<u64>,
}

/// Requests that read signed files, with or without a task beside them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Serve {
    pub files: u32,
    pub file_kib: u32,
    pub order: ServeOrder,
    /// Requests a second; `None`: one after the other.
    pub rate: Option<u64>,
    /// Whether files are dropped from memory as soon as they are read.
    pub drop: bool,
    /// How long requests are served; `None`: for ever.
    pub seconds: Option<u64>,
    /// Seconds from one line of counts to the next.
    pub report_s: u64,
    pub background: Option<Background>,
}

/// What a request reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ServeOrder {
    /// A file, by Zipf's law.
    Web { alpha: f64 },
    /// Blocks from anywhere in the files, or from their hot part.
    Search(Hot),
    /// The next file, or one of the hot part.
    Scan(Hot),
}

/// The first files, read more often than the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hot {
    /// Their size: at least 1, and at most that of all but one.
    pub kib: u32,
    /// Share of the reads that go there, 0 to 100.
    pub percent: u64,
}

/// \[LS07\] §6.5's light task: one file read whole at a time, each in its turn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Background {
    pub files: u32,
    pub file_kib: u32,
    /// Time from one file to the next.
    pub every_ms: u64,
}

/// Blocks of 4 KiB written in a known order on the raw disk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Crash {
    /// Blocks that are written, the disk's first.
    pub blocks: u32,
    /// Writes between two flushes, at most.
    pub batch: u32,
    /// Writes around the page cache.
    pub direct: bool,
    pub task: CrashTask,
}

/// The two halves of a crash test.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CrashTask {
    /// Write so many blocks, then verify them; `None`: write without end.
    Write { writes: Option<u32> },
    /// Verify what was flushed, up to this write.
    Verify { upto: u32 },
}

/// Direct reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Io {
    /// Reads in flight.
    pub depth: u32,
    pub seconds: u64,
    pub random: bool,
    /// Bytes of a read, in KiB.
    pub block_kib: u32,
    /// The part of the disk that is read; `None`: all of it.
    pub span_mib: Option<u64>,
}

/// Reads and writes of the raw disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Raw {
    /// Threads, each with its part of the disk.
    pub threads: u32,
    pub seconds: u64,
    /// Share of the requests that write, 0 to 100.
    pub write_percent: u64,
    /// Around the page cache.
    pub direct: bool,
    /// Whether requests may fail.
    pub errors: bool,
    /// How long the target `hcache` works until it is suspended for a while; `None`: it is not.
    pub suspend_ms: Option<u64>,
    /// How long all CPUs run until all but one are stopped for a while; `None`: they are not.
    pub cpus_ms: Option<u64>,
    /// The part of the disk that is used; `None`: all of it.
    pub span_mib: Option<u64>,
}

/// fio, which verifies by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fio {
    /// Its options, without `--`.
    pub options: Vec<String>,
    /// No run is begun after that time; one is run at least.
    pub seconds: u64,
    /// On the raw disk, and not on a file.
    pub raw: bool,
}

/// What is set up around a workload.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Machine {
    /// Device or serial of the disk; `None`: the first virtio disk that has no other duty.
    pub disk: Option<String>,
    /// plimsoll.ko, with these parameters.
    pub module: Option<Vec<(String, String)>>,
    /// dm-hcache.ko over the disk, with these last words of its table line.
    pub hcache: Option<String>,
    /// Whether the multi-generational LRU is switched on or off.
    pub mglru: Option<bool>,
    pub swap: Swap,
    /// Whether modules are unloaded at the end.
    pub unload: bool,
    /// Whether the machine stays on at the end.
    pub stay: bool,
}

/// Where the machine swaps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Swap {
    #[default]
    None,
    /// The disk with the serial `plimsoll-swap`.
    Disk,
    /// Compressed memory; its size, or half of the machine's memory.
    Zram { mib: Option<u64> },
}

impl Swap {
    /// Takes the keys of it.
    pub fn take(keys: &mut Keys) -> Result<Self, SettingsError> {
        let swap = keys.take("swap", "none, disk or zram", |value| match value {
            "none" => Some(Self::None),
            "disk" => Some(Self::Disk),
            "zram" => Some(Self::Zram { mib: None }),
            _ => None,
        })?;
        Ok(match swap.unwrap_or_default() {
            Self::Zram { .. } => Self::Zram {
                mib: keys.number("swap_mib", "1 to 2^20", 1..=1 << 20)?,
            },
            swap => swap,
        })
    }
}

/// Reads `0` or `1`.
fn yes_or_no(value: &str) -> Option<bool> {
    match value {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

impl Settings {
    /// Takes the keys of the disk workload `name`; `None` if that is another kind of workload.
    pub fn take(name: &str, keys: &mut Keys) -> Result<Option<Self>, SettingsError> {
        let work = match name {
            "disk-signed" => Work::Signed(Signed {
                trim: flag(keys, "trim")?,
                ..signed(keys)?
            }),
            "disk-crypt" => Work::Crypt {
                pieces: signed(keys)?,
                cipher: keys
                    .take("cipher", "a cipher as aes-xts-plain64", |value| {
                        (!value.is_empty()).then(|| value.to_owned())
                    })?
                    .unwrap_or_else(|| "aes-xts-plain64".to_owned()),
            },
            "disk-stress" => Work::Stress(stress(keys)?),
            "disk-serve" => Work::Serve(serve(keys)?),
            "disk-crash" => Work::Crash(crash(keys)?),
            "disk-io" => Work::Io(io(keys)?),
            "disk-raw" => Work::Raw(raw(keys)?),
            "disk-fio" => Work::Fio(fio(keys)?),
            _ => return Ok(None),
        };
        let seed = number(keys, "seed", 0..=u32::MAX.into(), 1)?;
        let pause_ms = keys.number("pause_ms", "0 to 3600000 milliseconds", 0..=3_600_000)?;
        let provoke = keys.take("provoke", "faults, as missed or flood:1000", |value| {
            let fault = |fault: &str| {
                let (file, text) = fault.split_once(':').unwrap_or((fault, "1"));
                let sound = !file.is_empty() && !file.contains(['/', '.']);
                sound.then(|| (file.to_owned(), text.to_owned()))
            };
            value.split(',').map(fault).collect()
        })?;
        Ok(Some(Self {
            name: name.to_owned(),
            work,
            machine: machine(keys)?,
            seed,
            pause_ms: pause_ms.unwrap_or(0),
            provoke: provoke.unwrap_or_default(),
        }))
    }
}

/// Takes a number of at most 32 bits.
fn number(
    keys: &mut Keys,
    key: &'static str,
    range: std::ops::RangeInclusive<u64>,
    default: u32,
) -> Result<u32, SettingsError> {
    let value = keys.number(key, "a whole number in range", range)?;
    Ok(value.map_or(default, |value| u32::try_from(value).unwrap_or(u32::MAX)))
}

fn flag(keys: &mut Keys, key: &'static str) -> Result<bool, SettingsError> {
    Ok(keys.take(key, "0 or 1", yes_or_no)?.unwrap_or(false))
}

fn machine(keys: &mut Keys) -> Result<Machine, SettingsError> {
    let module = keys.take("module", "copy, lazy or none", |value| match value {
        "copy" => Some(Some("0")),
        "lazy" => Some(Some("1")),
        "none" => Some(None),
        _ => None,
    })?;
    // Without the module its parameters remain, and are reported as unknown keys.
    let module = module.flatten().map(|lazy| {
        let mut parameters = vec![("lazy".to_owned(), lazy.to_owned())];
        parameters.extend(keys.take_all("module."));
        parameters
    });
    let hcache = keys.take("dm", "private or shared:SERIAL", |value| match value {
        "private" => Some("private".to_owned()),
        _ => value
            .strip_prefix("shared:")
            .map(|serial| format!("shared {serial}")),
    })?;
    let swap = Swap::take(keys)?;
    Ok(Machine {
        disk: keys.take("disk", "a device or serial", |value| {
            (!value.is_empty()).then(|| value.to_owned())
        })?,
        module,
        hcache,
        mglru: keys.take("mglru", "0 or 1", yes_or_no)?,
        swap,
        unload: flag(keys, "unload")?,
        stay: flag(keys, "stay")?,
    })
}

fn signed(keys: &mut Keys) -> Result<Signed, SettingsError> {
    let order = keys.take(
        "order",
        "sequential, random, zipf or class",
        |value| match value {
            "sequential" => Some(Order::Sequential),
            "random" => Some(Order::Random),
            "zipf" => Some(Order::Zipf { alpha: 1.0 }),
            "class" => Some(Order::Class),
            _ => None,
        },
    )?;
    let order = match order.unwrap_or(Order::Sequential) {
        Order::Zipf { .. } => Order::Zipf {
            alpha: keys.alpha()?,
        },
        order => order,
    };
    let percent = keys.number("write_percent", "0 to 100", 0..=100)?;
    let rounds = |keys: &mut Keys, key, default| {
        let rounds = keys.number(key, "a number of rounds", 0..=1 << 32)?;
        Ok(rounds.unwrap_or(default))
    };
    Ok(Signed {
        files: number(keys, "files", 1..=COUNT_MAX, 64)?,
        file_kib: number(keys, "file_kib", 1..=COUNT_MAX, 1024)?,
        order,
        write_percent: percent.unwrap_or(0),
        warmup: rounds(keys, "warmup", 1)?,
        rounds: rounds(keys, "rounds", 2)?,
        flush: keys
            .take("flush", "no, drop or reclaim", |value| match value {
                "no" => Some(Flush::No),
                "drop" => Some(Flush::Drop),
                "reclaim" => Some(Flush::Reclaim),
                _ => None,
            })?
            .unwrap_or(Flush::No),
        trim: false,
    })
}

fn stress(keys: &mut Keys) -> Result<Stress, SettingsError> {
    let rounds = keys.number("rounds", "a number of rounds", 0..=1 << 32)?;
    let steps = keys.number("steps", "a number of steps", 0..=1 << 32)?;
    Ok(Stress {
        rounds: rounds.unwrap_or(12),
        steps: steps.unwrap_or(60),
        threads: number(keys, "threads", 1..=64, 1)?,
        files: number(keys, "files", 2..=4096, 8)?,
        file_kib: number(keys, "file_kib", 64..=1 << 20, 2048)?,
        anon_mib: keys.number("anon_mib", "MiB, 0 for none", 0..=1 << 20)?,
    })
}

fn serve(keys: &mut Keys) -> Result<Serve, SettingsError> {
    let expected = "web, search or scan";
    let name = keys.take("order", expected, |value| {
        ["web", "search", "scan"]
            .into_iter()
            .find(|name| *name == value)
    })?;
    let name = name.ok_or(SettingsError::Missing {
        key: "order",
        expected,
    })?;
    // Files, the fewest of them, KiB of each, and of what their size is a multiple.
    let (files, least, file_kib, unit) = match name {
        "web" => (2048, 1, 64, 1),
        "search" => (32, 2, 4096, 4),
        _ => (256, 2, 1024, 1),
    };
    let files = number(keys, "files", least..=COUNT_MAX, files)?;
    let file_kib = keys
        .take(
            "file_kib",
            "1 to 2^24, of a search a multiple of 4",
            |value| {
                let kib: u32 = value.parse().ok()?;
                (kib.is_multiple_of(unit) && (1..=COUNT_MAX).contains(&kib.into())).then_some(kib)
            },
        )?
        .unwrap_or(file_kib);
    let order = match name {
        "web" => ServeOrder::Web {
            alpha: keys.alpha()?,
        },
        "search" => ServeOrder::Search(hot(keys, files, file_kib, 1024, 50)?),
        _ => ServeOrder::Scan(hot(keys, files, file_kib, 4096, 20)?),
    };
    Ok(Serve {
        files,
        file_kib,
        order,
        rate: keys
            .number("rate", "0 to 1000000 requests a second", 0..=1_000_000)?
            .filter(|&rate| rate > 0),
        drop: name != "search" && flag(keys, "drop")?,
        seconds: keys
            .number("seconds", "0 to 2^32", 0..=1 << 32)?
            .filter(|&seconds| seconds > 0),
        report_s: keys.number("report_s", "1 to 3600", 1..=3600)?.unwrap_or(5),
        background: background(keys)?,
    })
}

/// Takes the hot part of so many files, with defaults for its size and share.
fn hot(
    keys: &mut Keys,
    files: u32,
    file_kib: u32,
    kib: u64,
    percent: u64,
) -> Result<Hot, SettingsError> {
    let most = u64::from(files - 1) * u64::from(file_kib);
    let most = most.min(u32::MAX.into());
    let own_kib = keys.number("hot_kib", "1 to all files but one, in KiB", 1..=most)?;
    let own_percent = keys.number("hot_percent", "0 to 100", 0..=100)?;
    Ok(Hot {
        kib: u32::try_from(own_kib.unwrap_or(kib.min(most))).expect("in range"),
        percent: own_percent.unwrap_or(percent),
    })
}

fn background(keys: &mut Keys) -> Result<Option<Background>, SettingsError> {
    // Without it its keys remain, and are reported as unknown.
    if !flag(keys, "background")? {
        return Ok(None);
    }
    let every_ms = keys.number("background_ms", "1 to 3600000 milliseconds", 1..=3_600_000)?;
    Ok(Some(Background {
        files: number(keys, "background_files", 1..=COUNT_MAX, 500)?,
        file_kib: number(keys, "background_kib", 1..=COUNT_MAX, 4096)?,
        every_ms: every_ms.unwrap_or(2500),
    }))
}

fn crash(keys: &mut Keys) -> Result<Crash, SettingsError> {
    let task = if flag(keys, "verify")? {
        let missing = SettingsError::Missing {
            key: "upto",
            expected: "the number of the last write that was flushed",
        };
        let upto = keys.number("upto", "0 to 2^32 - 1", 0..=u32::MAX.into())?;
        let upto = upto.and_then(|upto| upto.try_into().ok()).ok_or(missing)?;
        CrashTask::Verify { upto }
    } else {
        let writes = number(keys, "writes", 0..=u32::MAX.into(), 0)?;
        CrashTask::Write {
            writes: (writes > 0).then_some(writes),
        }
    };
    Ok(Crash {
        blocks: number(keys, "blocks", 1..=COUNT_MAX, 4096)?,
        batch: number(keys, "batch", 1..=4096, 32)?,
        direct: flag(keys, "direct")?,
        task,
    })
}

fn raw(keys: &mut Keys) -> Result<Raw, SettingsError> {
    let (errors, direct) = (flag(keys, "errors")?, flag(keys, "direct")?);
    let percent = keys.number("write_percent", "0 to 100", 0..=100)?;
    let seconds = keys.number("seconds", "0 to 2^32", 0..=1 << 32)?;
    Ok(Raw {
        threads: number(keys, "threads", 1..=64, 2)?,
        seconds: seconds.unwrap_or(5),
        write_percent: percent.unwrap_or(30),
        // Which pages of its cache are not stored after an error is the kernel's secret.
        direct: errors || direct,
        errors,
        suspend_ms: keys.number("suspend_ms", "1 to 60000 milliseconds", 1..=60_000)?,
        cpus_ms: keys.number("cpus_ms", "1 to 60000 milliseconds", 1..=60_000)?,
        span_mib: keys.number("span_mib", "1 to 2^24", 1..=1 << 24)?,
    })
}

fn fio(keys: &mut Keys) -> Result<Fio, SettingsError> {
    let options = keys.take("fio", "options of fio, as rw=randrw,bs=4k", |value| {
        let option = |option: &str| option.contains('=').then(|| option.to_owned());
        value.split(',').map(option).collect()
    })?;
    let seconds = keys.number("seconds", "0 to 2^32", 0..=1 << 32)?;
    Ok(Fio {
        options: options.ok_or(SettingsError::Missing {
            key: "fio",
            expected: "options of fio, as rw=randrw,bs=4k",
        })?,
        seconds: seconds.unwrap_or(5),
        raw: flag(keys, "raw")?,
    })
}

fn io(keys: &mut Keys) -> Result<Io, SettingsError> {
    let random = keys.take("order", "sequential or random", |value| match value {
        "sequential" => Some(false),
        "random" => Some(true),
        _ => None,
    })?;
    let seconds = keys.number("seconds", "1 to 2^32", 1..=1 << 32)?;
    Ok(Io {
        depth: number(keys, "depth", 1..=64, 1)?,
        seconds: seconds.unwrap_or(5),
        random: random.unwrap_or(true),
        block_kib: keys
            .take("block_kib", "a multiple of 4, to 1024", |value| {
                let kib = value.parse().ok()?;
                (kib % 4 == 0 && (4..=1024).contains(&kib)).then_some(kib)
            })?
            .unwrap_or(4),
        span_mib: keys.number("span_mib", "1 to 2^24", 1..=1 << 24)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Job, Settings as Any};

    fn parse(words: &str) -> Result<Settings, String> {
        let words: Vec<_> = words
            .split(' ')
            .map(|word| format!("plimsoll.{word}"))
            .collect();
        match Any::parse(&words.join(" ")) {
            Ok(Job::Disk(settings)) => Ok(settings),
            Ok(Job::Memory(_)) => panic!("a workload on a disk was asked for"),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn a_disk_that_may_fail_is_used_around_the_page_cache() {
        let direct = |words| match parse(words).unwrap().work {
            Work::Raw(raw) => raw.direct,
            other => panic!("{other:?}"),
        };
        assert!(direct("workload=disk-raw errors=1"));
        assert!(direct("workload=disk-raw errors=1 direct=1"));
        assert!(direct("workload=disk-raw direct=1"));
        assert!(!direct("workload=disk-raw"));
    }

    #[test]
    fn a_module_takes_its_parameters_along() {
        let settings = parse(
            "workload=disk-signed order=zipf alpha=0.5 files=3 module=lazy module.records=256 \
             dm=shared:ff swap=zram mglru=0 provoke=missed,flood:100",
        )
        .unwrap();
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(
            settings.machine,
            Machine {
                module: Some(vec![pair("lazy", "1"), pair("records", "256")]),
                hcache: Some("shared ff".into()),
                mglru: Some(false),
                swap: Swap::Zram { mib: None },
                ..Machine::default()
            }
        );
        assert_eq!(
            settings.provoke,
            [pair("missed", "1"), pair("flood", "100")]
        );
        let Work::Signed(signed) = settings.work else {
            panic!("{:?}", settings.work);
        };
        assert_eq!(
            (signed.files, signed.order),
            (3, Order::Zipf { alpha: 0.5 })
        );
        assert_eq!((signed.flush, signed.trim), (Flush::No, false));
    }

    #[test]
    fn the_page_cache_is_emptied_in_the_way_that_is_named() {
        for (words, expected) in [
            ("flush=no", (Flush::No, false)),
            ("flush=drop trim=1", (Flush::Drop, true)),
            ("flush=reclaim", (Flush::Reclaim, false)),
        ] {
            let settings = parse(&format!("workload=disk-signed {words}")).unwrap();
            let Work::Signed(signed) = settings.work else {
                panic!("{:?}", settings.work);
            };
            assert_eq!((signed.flush, signed.trim), expected, "{words}");
        }
    }

    #[test]
    fn a_crash_is_judged_by_what_was_flushed() {
        let task = |words| match parse(words).unwrap().work {
            Work::Crash(crash) => crash.task,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            task("workload=disk-crash verify=1 upto=77"),
            CrashTask::Verify { upto: 77 }
        );
        assert_eq!(
            task("workload=disk-crash"),
            CrashTask::Write { writes: None }
        );
    }

    #[test]
    fn a_server_has_its_own_files_and_perhaps_a_task_beside_it() {
        let serve = |words| match parse(words).unwrap().work {
            Work::Serve(serve) => serve,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            serve("workload=disk-serve order=web alpha=0.8 rate=50 seconds=60 report_s=2"),
            Serve {
                files: 2048,
                file_kib: 64,
                order: ServeOrder::Web { alpha: 0.8 },
                rate: Some(50),
                drop: false,
                seconds: Some(60),
                report_s: 2,
                background: None,
            }
        );
        let scan = serve(
            "workload=disk-serve order=scan files=3 file_kib=100 rate=0 background=1 background_files=9 \
             background_kib=128 background_ms=80",
        );
        assert_eq!((scan.rate, scan.seconds, scan.report_s), (None, None, 5));
        // The default of 4 MiB would leave nothing to be scanned.
        let hot = Hot {
            kib: 200,
            percent: 20,
        };
        assert_eq!(scan.order, ServeOrder::Scan(hot));
        assert_eq!(
            scan.background,
            Some(Background {
                files: 9,
                file_kib: 128,
                every_ms: 80,
            })
        );
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_name() {
        for (words, expected) in [
            (
                "workload=disk-signed order=lru",
                "plimsoll.order=lru: expected sequential, random",
            ),
            (
                "workload=disk-signed alpha=1",
                "plimsoll.alpha is unknown, or of no use",
            ),
            (
                "workload=disk-crypt trim=1",
                "plimsoll.trim is unknown, or of no use",
            ),
            (
                "workload=disk-signed flush=1",
                "plimsoll.flush=1: expected no, drop or reclaim",
            ),
            (
                "workload=disk-signed module.records=1",
                "plimsoll.module.records is unknown",
            ),
            ("workload=disk-crash verify=1", "plimsoll.upto is missing"),
            (
                "workload=disk-serve",
                "plimsoll.order is missing: expected web, search or scan",
            ),
            (
                "workload=disk-serve order=zipf",
                "plimsoll.order=zipf: expected web",
            ),
            (
                "workload=disk-serve order=web hot_kib=4",
                "plimsoll.hot_kib is unknown, or of no use",
            ),
            (
                "workload=disk-serve order=search file_kib=6",
                "plimsoll.file_kib=6: expected 1 to 2^24, of a search a multiple of 4",
            ),
            (
                "workload=disk-serve order=scan files=3 file_kib=8 hot_kib=17",
                "plimsoll.hot_kib=17: expected 1 to all files but one",
            ),
            (
                "workload=disk-serve order=scan background_ms=9",
                "plimsoll.background_ms is unknown",
            ),
            (
                "workload=disk-io block_kib=6",
                "plimsoll.block_kib=6: expected a multiple of 4",
            ),
            (
                "workload=disk-stress swap=disk swap_mib=4",
                "plimsoll.swap_mib is unknown",
            ),
            (
                "workload=disk-io provoke=../x",
                "plimsoll.provoke=../x: expected faults",
            ),
            (
                "workload=disk-io dm=public",
                "plimsoll.dm=public: expected private or shared:SERIAL",
            ),
        ] {
            let message = parse(words).unwrap_err();
            assert!(message.starts_with(expected), "{message}");
        }
    }
}
