//! `plimsoll-judge METHOD PID INTERVAL_MS COUNT`: the working set of a process as one of the kernel's own interfaces shows it, for
//! `lab judge`. It runs inside of a guest, as root, and prints a line for each interval.
//!
//! | method | what it takes for the working set of an interval |
//! |---|---|
//! | `damon-default` | bytes of the regions that DAMON found accessed, in the mean of its aggregations, at the settings of its documentation: 5 ms, 100 ms, 10 to 1000 regions, all of the address space |
//! | `damon-tuned` | the same, aggregated over half of the interval with 20 samples, with 100 to 1000 regions |
//! | `mglru` | pages that aging the control group's generations moved to the newest two |
//! | `clear-refs` | `Referenced` of `smaps_rollup`, with `clear_refs` before |
//! | `rss` | what is resident |
//! | `cgroup` | what the control group is charged, less its inactive file pages: what cAdvisor calls a working set |
//! | `committed` | the guest's `Committed_AS` |
//! | `available` | the guest's `MemTotal` less `MemAvailable` |
//!
//! `plimsoll-judge wake INTERVAL_US` does nothing but to wake, which has an emulator flush its TLB: that has room for all pages of
//! a program and would hide every access after the first, where a processor's holds some thousand.
//!
//! `plimsoll-judge frames PID` prints the guest's page frames that are mapped by a process now: lines `frames START+COUNT ...` in
//! hexadecimal digits, of ranges in their order, then `frames end`.
//!
//! Lines: `estimate METHOD BYTES`, and in the end `cost METHOD OWN_S TARGET_S WALL_S`: CPU time of this process with its kernel
//! thread, and of the target. It uses files alone, so that it costs what reading them costs.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt as _;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const USAGE: &str = "usage: plimsoll-judge METHOD PID INTERVAL_MS COUNT, plimsoll-judge frames PID, or plimsoll-judge wake INTERVAL_US";
/// Ticks in which the kernel reports CPU time to programs.
const TICKS: f64 = 100.0;
const PAGE_BYTES: u64 = 4096;
const KDAMONDS: &str = "/sys/kernel/mm/damon/admin/kdamonds";
const GENERATIONS: &str = "/sys/kernel/debug/lru_gen";

/// An interface of the kernel.
trait Interface {
    /// Bytes used in the last interval.
    fn estimate(&mut self) -> Result<u64>;
    /// Another process that works for it.
    fn helper(&self) -> Option<u32> {
        None
    }
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(|error| format!("{path}: {error}").into())
}

fn write(path: &str, value: &str) -> Result<()> {
    let mut tries = 0;
    loop {
        match fs::write(path, value) {
            // Another command is in progress.
            Err(error) if error.raw_os_error() == Some(16) && tries < 50 => {
                tries += 1;
                sleep(Duration::from_millis(10));
            }
            other => {
                return other.map_err(|error| format!("'{value}' to {path}: {error}").into());
            }
        }
    }
}

/// The number after a name in lines `NAME: NUMBER kB`, or `NAME NUMBER`.
fn number_of(text: &str, name: &str) -> Result<u64> {
    let mut lines = text.lines();
    let value = lines.find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let is_it = words.next()?.trim_end_matches(':') == name;
        is_it.then(|| words.next()?.parse().ok()).flatten()
    });
    value.ok_or_else(|| format!("no {name}").into())
}

/// CPU time of a process and, for this one, of nothing else.
fn cpu_seconds(pid: &str) -> Result<f64> {
    let stat = read(&format!("/proc/{pid}/stat"))?;
    let (_, after) = stat.rsplit_once(')').ok_or("no name in stat")?;
    let words: Vec<_> = after.split_ascii_whitespace().collect();
    let ticks =
        |index: usize| -> Result<f64> { Ok(words.get(index).ok_or("stat is short")?.parse()?) };
    Ok((ticks(11)? + ticks(12)?) / TICKS)
}

/// DAMON of a whole address space. Two schemes count what was found in each aggregation: bytes of the regions accessed, and of
/// all.
struct Damon {
    pid: Option<u32>,
    /// Bytes watched.
    watched: u64,
    /// Counts until the last estimate.
    before: [u64; 2],
}

impl Damon {
    fn start(target: &str, [sample_us, aggr_us]: [u64; 2], regions: [u64; 2]) -> Result<Self> {
        let set = |name: &str, value: &str| write(&format!("{KDAMONDS}/{name}"), value);
        if read(&format!("{KDAMONDS}/nr_kdamonds"))?.trim() != "0" {
            return Err("DAMON is in use".into());
        }
        set("nr_kdamonds", "1")?;
        set("0/contexts/nr_contexts", "1")?;
        let context = "0/contexts/0";
        set(&format!("{context}/operations"), "vaddr")?;
        let attributes = format!("{context}/monitoring_attrs");
        let values = [
            ("intervals/sample_us", sample_us),
            ("intervals/aggr_us", aggr_us),
            ("nr_regions/max", regions[1]),
            ("nr_regions/min", regions[0]),
        ];
        for (name, value) in values {
            set(&format!("{attributes}/{name}"), &value.to_string())?;
        }
        set(&format!("{context}/targets/nr_targets"), "1")?;
        set(&format!("{context}/targets/0/pid_target"), target)?;
        set(&format!("{context}/schemes/nr_schemes"), "2")?;
        for (scheme, least) in [(0, "1"), (1, "0")] {
            let scheme = format!("{context}/schemes/{scheme}");
            set(&format!("{scheme}/action"), "stat")?;
            let pattern = format!("{scheme}/access_pattern");
            set(&format!("{pattern}/sz/max"), &u64::MAX.to_string())?;
            set(&format!("{pattern}/nr_accesses/min"), least)?;
            set(&format!("{pattern}/nr_accesses/max"), &u32::MAX.to_string())?;
            set(&format!("{pattern}/age/max"), &u32::MAX.to_string())?;
        }
        set("0/state", "on")?;
        Ok(Self {
            pid: read(&format!("{KDAMONDS}/0/pid"))?.trim().parse().ok(),
            watched: watched_bytes(&read(&format!("/proc/{target}/maps"))?)?,
            before: [0; 2],
        })
    }
}

/// Bytes that DAMON watches of an address space: from the first mapping to the last, without the two largest gaps.
fn watched_bytes(maps: &str) -> Result<u64> {
    let mut gaps = Vec::new();
    let (mut first, mut end) = (None, 0);
    for line in maps.lines().filter(|line| !line.contains("[vsyscall]")) {
        let (range, _) = line.split_once(' ').ok_or("no range")?;
        let (start, stop) = range.split_once('-').ok_or("no range")?;
        let [start, stop] = [start, stop].map(|text| u64::from_str_radix(text, 16));
        let (start, stop) = (start?, stop?);
        match first {
            None => first = Some(start),
            Some(_) => gaps.push(start.saturating_sub(end)),
        }
        end = stop;
    }
    gaps.sort_unstable();
    let left_out: u64 = gaps.iter().rev().take(2).sum();
    let all = end.checked_sub(first.ok_or("no mappings")?);
    let watched = all.and_then(|all| all.checked_sub(left_out));
    Ok(watched.ok_or("mappings out of order")?)
}

impl Interface for Damon {
    fn estimate(&mut self) -> Result<u64> {
        let tried = |scheme: u32| -> Result<u64> {
            let schemes = format!("{KDAMONDS}/0/contexts/0/schemes");
            Ok(read(&format!("{schemes}/{scheme}/stats/sz_tried"))?
                .trim()
                .parse()?)
        };
        let mut tries = 0;
        let [found, all] = loop {
            write(&format!("{KDAMONDS}/0/state"), "update_schemes_stats")?;
            let now = [tried(0)?, tried(1)?];
            let since = [0, 1].map(|which: usize| now[which].saturating_sub(self.before[which]));
            // A kdamond that takes long for its samples has aggregated nothing yet.
            if since[1] > 0 {
                self.before = now;
                break since;
            }
            tries += 1;
            if tries > 20 {
                return Err("DAMON aggregated nothing".into());
            }
            sleep(Duration::from_millis(100));
        };
        let bytes = u128::from(self.watched) * u128::from(found) / u128::from(all);
        Ok(u64::try_from(bytes)?)
    }

    fn helper(&self) -> Option<u32> {
        self.pid
    }
}

impl Drop for Damon {
    fn drop(&mut self) {
        let _ = write(&format!("{KDAMONDS}/0/state"), "off");
        let _ = write(&format!("{KDAMONDS}/nr_kdamonds"), "0");
    }
}

/// The generations of a control group.
struct Generations {
    path: String,
}

/// The group's number, and pages of its generations, oldest first.
fn generations_of(text: &str, path: &str) -> Result<(u64, Vec<(u64, u64)>)> {
    let mut found = None;
    let mut pages = Vec::new();
    for line in text.lines() {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        match words.as_slice() {
            ["memcg", number, rest @ ..] => {
                if found.is_some() {
                    break;
                }
                if rest.concat() == path {
                    found = Some(number.parse()?);
                }
            }
            ["node", _] => {}
            [generation, _, anon, file, ..] if found.is_some() => {
                let count = |text: &str| text.trim_end_matches('x').parse::<u64>();
                pages.push((generation.parse()?, count(anon)? + count(file)?));
            }
            _ => {}
        }
    }
    let number = found.ok_or_else(|| format!("no control group {path} in {GENERATIONS}"))?;
    Ok((number, pages))
}

impl Interface for Generations {
    fn estimate(&mut self) -> Result<u64> {
        let (number, pages) = generations_of(&read(GENERATIONS)?, &self.path)?;
        let (newest, _) = pages.last().ok_or("no generations")?;
        write(GENERATIONS, &format!("+ {number} 0 {newest} 1 1"))?;
        let (_, pages) = generations_of(&read(GENERATIONS)?, &self.path)?;
        let newest_two = pages.iter().rev().take(2);
        Ok(newest_two.map(|(_, pages)| pages).sum::<u64>() * PAGE_BYTES)
    }
}

struct ClearRefs {
    pid: String,
}

impl Interface for ClearRefs {
    fn estimate(&mut self) -> Result<u64> {
        let text = read(&format!("/proc/{}/smaps_rollup", self.pid))?;
        write(&format!("/proc/{}/clear_refs", self.pid), "1")?;
        Ok(number_of(&text, "Referenced")? * 1024)
    }
}

/// What a file says.
struct FileValue<F: Fn() -> Result<u64>>(F);

impl<F: Fn() -> Result<u64>> Interface for FileValue<F> {
    fn estimate(&mut self) -> Result<u64> {
        (self.0)()
    }
}

/// Path of the control group of a process, of version 2.
fn group_of(pid: &str) -> Result<String> {
    let text = read(&format!("/proc/{pid}/cgroup"))?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"));
    Ok(path.ok_or("no control group")?.to_owned())
}

fn interface(method: &str, pid: &str, interval_ms: u64) -> Result<Box<dyn Interface>> {
    let pid = pid.to_owned();
    Ok(match method {
        "damon-default" => Box::new(Damon::start(&pid, [5000, 100_000], [10, 1000])?),
        "damon-tuned" => {
            let aggr_us = interval_ms * 500;
            Box::new(Damon::start(&pid, [aggr_us / 20, aggr_us], [100, 1000])?)
        }
        "mglru" => Box::new(Generations {
            path: group_of(&pid)?,
        }),
        "clear-refs" => Box::new(ClearRefs { pid }),
        "rss" => Box::new(FileValue(move || {
            Ok(number_of(&read(&format!("/proc/{pid}/status"))?, "VmRSS")? * 1024)
        })),
        "cgroup" => {
            let folder = format!("/cg{}", group_of(&pid)?);
            Box::new(FileValue(move || {
                let current: u64 = read(&format!("{folder}/memory.current"))?.trim().parse()?;
                let inactive =
                    number_of(&read(&format!("{folder}/memory.stat"))?, "inactive_file")?;
                Ok(current.saturating_sub(inactive))
            }))
        }
        "committed" => Box::new(FileValue(|| {
            Ok(number_of(&read("/proc/meminfo")?, "Committed_AS")? * 1024)
        })),
        "available" => Box::new(FileValue(|| {
            let text = read("/proc/meminfo")?;
            let total = number_of(&text, "MemTotal")?;
            Ok(total.saturating_sub(number_of(&text, "MemAvailable")?) * 1024)
        })),
        other => return Err(format!("there is no method {other}; {USAGE}").into()),
    })
}

/// Addresses of a process's mappings that it can have pages in: not those of the kernel, which all processes share.
fn mappings_of(maps: &str) -> Result<Vec<(u64, u64)>> {
    let own = maps
        .lines()
        .filter(|line| !line.ends_with("[vsyscall]") && !line.contains("[vvar"));
    own.map(|line| {
        let (range, _) = line.split_once(' ').ok_or("no range")?;
        let (start, end) = range.split_once('-').ok_or("no range")?;
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16));
        Ok((start?, end?))
    })
    .collect()
}

/// The frame of an entry of `pagemap`, of a page that is present.
fn frame_of(entry: u64) -> Option<u64> {
    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    Some(entry & FRAME).filter(|frame| entry & PRESENT != 0 && *frame != 0)
}

/// Numbers in their order as starts and counts; those that are there twice count once.
fn ranges_of(mut numbers: Vec<u64>) -> Vec<(u64, u64)> {
    numbers.sort_unstable();
    numbers.dedup();
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((start, count)) if *start + *count == number => *count += 1,
            _ => ranges.push((number, 1)),
        }
    }
    ranges
}

/// Prints the frames that are mapped by a process.
fn print_frames(pid: &str, mut out: impl Write) -> Result<()> {
    /// Of `pagemap`, read at a time.
    const ENTRIES: usize = 512;
    /// Well below what a console takes as a line.
    const RANGES_OF_A_LINE: usize = 200;
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut frames = Vec::new();
    for (start, end) in mappings_of(&read(&format!("/proc/{pid}/maps"))?)? {
        let (mut page, end) = (start / PAGE_BYTES, end / PAGE_BYTES);
        while page < end {
            let mut bytes = [0; 8 * ENTRIES];
            let wanted = usize::try_from(end - page).map_or(ENTRIES, |left| left.min(ENTRIES));
            let length = pagemap.read_at(&mut bytes[..8 * wanted], page * 8)?;
            let (entries, _) = bytes[..length].as_chunks::<8>();
            // The rest was unmapped meanwhile.
            if entries.is_empty() {
                break;
            }
            let entries = entries.iter().map(|entry| u64::from_ne_bytes(*entry));
            page += entries.len() as u64;
            frames.extend(entries.filter_map(frame_of));
        }
    }
    for ranges in ranges_of(frames).chunks(RANGES_OF_A_LINE) {
        write!(out, "frames")?;
        for (start, count) in ranges {
            write!(out, " {start:x}+{count:x}")?;
        }
        writeln!(out)?;
    }
    writeln!(out, "frames end")?;
    Ok(out.flush()?)
}

fn run() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [command, interval] = words.as_slice()
        && command == "wake"
    {
        let interval = Duration::from_micros(interval.parse()?);
        loop {
            sleep(interval);
        }
    }
    if let [command, pid] = words.as_slice()
        && command == "frames"
    {
        return print_frames(pid, BufWriter::new(std::io::stdout().lock()));
    }
    let [method, pid, interval, count] = words.as_slice() else {
        return Err(USAGE.into());
    };
    let (interval_ms, count): (u64, u32) = (interval.parse()?, count.parse()?);
    let interval = Duration::from_millis(interval_ms);
    let mut interface = interface(method, pid, interval_ms)?;
    let helper = interface.helper().map(|pid| pid.to_string());
    let own = || -> Result<f64> {
        let helper = helper.as_ref().map_or(Ok(0.0), |pid| cpu_seconds(pid))?;
        Ok(cpu_seconds("self")? + helper)
    };
    let mut out = std::io::stdout().lock();
    // The first interval begins here.
    sleep(interval);
    interface.estimate()?;
    let (start, before, target) = (Instant::now(), own()?, cpu_seconds(pid)?);
    for index in 1..=count {
        let due = start + interval * index;
        sleep(due.saturating_duration_since(Instant::now()));
        writeln!(out, "estimate {method} {}", interface.estimate()?)?;
        out.flush()?;
    }
    writeln!(
        out,
        "cost {method} {:.3} {:.3} {:.3}",
        own()? - before,
        cpu_seconds(pid)? - target,
        start.elapsed().as_secs_f64()
    )?;
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("plimsoll-judge: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_their_names_and_malformed_lines_are_errors() {
        let text = "Rss:      67000 kB\nReferenced:    1234 kB\ninactive_file 99\nbad: x\n";
        assert_eq!(number_of(text, "Referenced").unwrap(), 1234);
        assert_eq!(number_of(text, "inactive_file").unwrap(), 99);
        for name in ["Ref", "bad", ""] {
            assert!(number_of(text, name).is_err(), "{name}");
        }
    }

    #[test]
    fn damon_watches_all_but_the_two_largest_gaps() {
        let maps = "\
00400000-00500000 r-xp 00000000 00:01 1 /workload
00600000-00700000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
7f0000500000-7f0000600000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00100000 rw-p 00000000 00:00 0 [stack]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
";
        assert_eq!(watched_bytes(maps).unwrap(), (3 + 6 + 1) << 20);
        for maps in ["", "x", "5-4 r\n1-2 r\n"] {
            assert!(watched_bytes(maps).is_err(), "{maps:?}");
        }
    }

    #[test]
    fn the_generations_of_a_group_are_its_own() {
        let text = "\
memcg     1 /
 node     0
          0      11216        100          7
memcg    12 /small
 node     0
          3       5000         10          1
          4       2000        400          2x
          5        100      16000          0
memcg    13 /other
 node     0
          9       5000         10          1
";
        let (number, pages) = generations_of(text, "/small").unwrap();
        assert_eq!((number, pages), (12, vec![(3, 11), (4, 402), (5, 16_000)]));
        assert!(generations_of(text, "/none").is_err());
        assert!(generations_of("memcg x /small\n", "/small").is_err());
    }

    #[test]
    fn frames_are_those_of_present_pages_in_ranges() {
        let present = 1 << 63;
        assert_eq!(frame_of(present | 1 << 61 | 1 << 55 | 0x123), Some(0x123));
        // Swapped out; and without the right to see numbers.
        assert_eq!([frame_of(0x123), frame_of(present)], [None, None]);
        assert_eq!(ranges_of(vec![9, 5, 4, 6, 5]), [(4, 3), (9, 1)]);
        let maps = "\
00400000-00500000 r-xp 00000000 00:01 1 /workload
7ffc00100000-7ffc00104000 r--p 00000000 00:00 0 [vvar]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
";
        assert_eq!(mappings_of(maps).unwrap(), [(0x40_0000, 0x50_0000)]);
        assert!(mappings_of("x").is_err());
    }

    #[test]
    fn the_frames_of_a_process_are_lines_with_an_end() {
        let mut printed = Vec::new();
        print_frames("self", &mut printed).unwrap();
        let text = String::from_utf8(printed).unwrap();
        assert!(text.ends_with("frames end\n"));
        assert!(
            text.lines()
                .all(|line| line.starts_with("frames ") && line.len() < 8000)
        );
        assert!(print_frames("0", Vec::new()).is_err());
    }
}
