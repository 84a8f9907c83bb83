//! Parses a QEMU process's memory map and finds its mappings of guest RAM.
//!
//! The kernel's map lists the address and the backing of each mapping, but not its purpose. QEMU's command line has the
//! size of each RAM backend. A mapping of exactly that length that is readable and writable but not executable is used;
//! if there are several, one whose backing matches the backend's kind, then the one whose file was created first. If no
//! length matches (huge pages round up, and the kernel merges adjacent anonymous mappings), the largest mapping that
//! is long enough is used.
//!
//! Source of the format: proc_pid_maps(5), proc_pid_smaps(5).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use plimsoll_flow::{RamBacking, RamMapping};

use crate::VmError;
use crate::command_line::{BackendKind, BackendUsage, CommandLine};

/// Name of the mapping of a memfd backend, including plugged ones.
const PLUGGED: &str = "/memfd:memory-backend-memfd";

/// One mapping of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapEntry {
    /// First address.
    pub start: u64,
    /// First address after it; above `start`.
    pub end: u64,
    /// Whether it is readable and writable but not executable, as guest RAM is.
    pub is_data: bool,
    /// Whether it can be read.
    pub is_readable: bool,
    /// Whether it can be written.
    pub is_writable: bool,
    /// Whether writes reach the file behind it.
    pub is_shared: bool,
    /// Offset of its start in the file, in bytes.
    pub offset_bytes: u64,
    /// Device of the file, major and minor number; 0, 0 if there is none.
    pub device: (u32, u32),
    /// Inode of the file; 0 if there is none.
    pub inode: u64,
    /// Path of the file as the kernel reports it, or a name in brackets, or empty.
    pub path: String,
}

impl MapEntry {
    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.end - self.start
    }

    /// Parses a line of the map; `None` if it is malformed.
    fn parse(line: &str) -> Option<Self> {
        let mut rest = line;
        let mut field = || {
            let (field, after) = rest.split_once(' ').unwrap_or((rest, ""));
            rest = after;
            field
        };
        let (start, end) = field().split_once('-')?;
        let (permissions, offset, device, inode) = (field(), field(), field(), field());
        let (major, minor) = device.split_once(':')?;
        let permissions: [u8; 4] = permissions.as_bytes().try_into().ok()?;
        let hexadecimal = |text| u64::from_str_radix(text, 16).ok();
        let entry = Self {
            start: hexadecimal(start)?,
            end: hexadecimal(end)?,
            is_data: permissions.starts_with(b"rw-"),
            is_readable: permissions[0] == b'r',
            is_writable: permissions[1] == b'w',
            is_shared: permissions[3] == b's',
            offset_bytes: hexadecimal(offset)?,
            device: (
                u32::from_str_radix(major, 16).ok()?,
                u32::from_str_radix(minor, 16).ok()?,
            ),
            inode: inode.parse().ok()?,
            path: rest.trim_start().to_owned(),
        };
        (entry.start < entry.end).then_some(entry)
    }

    /// Whether `next` continues this mapping, both in memory and in its file.
    fn continues_in(&self, next: &Self) -> bool {
        self.end == next.start
            && self.inode != 0
            && (self.device, self.inode) == (next.device, next.inode)
            && (self.is_data, self.is_shared) == (next.is_data, next.is_shared)
            && self.offset_bytes.checked_add(self.len_bytes()) == Some(next.offset_bytes)
    }
}

/// Reads `/proc/PID/maps`.
///
/// # Errors
///
/// [`VmError::Maps`] at the first malformed line.
pub fn parse_maps(text: &str) -> Result<Vec<MapEntry>, VmError> {
    let entry = |(index, line): (usize, &str)| {
        MapEntry::parse(line).ok_or_else(|| VmError::Maps {
            line: index + 1,
            text: line.chars().take(120).collect(),
        })
    };
    text.lines().enumerate().map(entry).collect()
}

/// Properties of a RAM mapping that decide whether it can be traced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RamState {
    /// Some of it is locked into memory (mlock), so its pages cannot be unmapped.
    pub locked: bool,
    /// Some of it is registered with a userfaultfd, by another tracer or a migration.
    pub userfaultfd: bool,
}

/// Returns the state of mappings, taken together, from the text of `/proc/PID/smaps`.
///
/// Lines that are neither a mapping nor its flags are ignored.
pub fn ram_state(smaps: &str, ram: &[RamMapping]) -> RamState {
    let mut ranges: Vec<_> = ram
        .iter()
        .map(|ram| (ram.address, ram.address.saturating_add(ram.len_bytes)))
        .collect();
    // Mappings of one process do not overlap, so their ends are in order too.
    ranges.sort_unstable();
    let (mut state, mut within) = (RamState::default(), false);
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if within {
                for flag in flags.split_ascii_whitespace() {
                    match flag {
                        "lo" => state.locked = true,
                        "um" | "uw" | "ui" => state.userfaultfd = true,
                        _ => {}
                    }
                }
            }
        } else if let Some(entry) = MapEntry::parse(line) {
            let next = ranges.partition_point(|&(_, end)| end <= entry.start);
            within = ranges
                .get(next)
                .is_some_and(|&(start, _)| start < entry.end);
        }
    }
    state
}

/// Returns the first addresses of the mappings that have pages swapped out, from the text of `/proc/PID/smaps`.
///
/// Lines that are neither a mapping nor its swap are ignored.
pub fn swapped_out(smaps: &str) -> BTreeSet<u64> {
    let (mut swapped, mut start) = (BTreeSet::new(), None);
    for line in smaps.lines() {
        if let Some(size) = line.strip_prefix("Swap:") {
            if size.trim() != "0 kB" {
                swapped.extend(start);
            }
        } else if let Some(entry) = MapEntry::parse(line) {
            start = Some(entry.start);
        }
    }
    swapped
}

/// File systems by device number.
#[derive(Debug, Clone, Default)]
pub struct FileSystems(BTreeMap<(u32, u32), String>);

impl FileSystems {
    /// Parses `/proc/PID/mountinfo`; malformed lines are ignored.
    pub fn parse(mountinfo: &str) -> Self {
        let of_line = |line: &str| {
            let (mount, source) = line.split_once(" - ")?;
            let (major, minor) = mount.split(' ').nth(2)?.split_once(':')?;
            let kind = source.split(' ').next()?;
            Some(((major.parse().ok()?, minor.parse().ok()?), kind.to_owned()))
        };
        Self(mountinfo.lines().filter_map(of_line).collect())
    }

    /// Adds the file systems of memfds of huge pages, which are mounted nowhere. `is_huge` is called once for each.
    pub fn with_memfds(
        mut self,
        entries: &[MapEntry],
        is_huge: impl Fn(&MapEntry) -> bool,
    ) -> Self {
        let mut devices = BTreeSet::new();
        for entry in entries {
            let is_unknown = entry.path.starts_with("/memfd:") && devices.insert(entry.device);
            if is_unknown && is_huge(entry) {
                self.0.insert(entry.device, "hugetlbfs".to_owned());
            }
        }
        self
    }

    fn kind(&self, device: (u32, u32)) -> &str {
        self.0.get(&device).map_or("", String::as_str)
    }
}

/// Finds the mappings of a QEMU process that are guest RAM, one for each backend that is RAM,
/// in the order of the command line; empty if there are no candidates. If the command line allows memory to grow, memfd
/// backends that were plugged later follow, in the order of their creation.
pub fn guest_ram(
    entries: &[MapEntry],
    file_systems: &FileSystems,
    command_line: &CommandLine,
) -> Vec<RamMapping> {
    let mut candidates: Vec<(MapEntry, RamBacking)> = joined(entries)
        .into_iter()
        .filter_map(|entry| {
            let backing = backing(&entry, file_systems)?;
            Some((entry, backing))
        })
        .collect();
    // Inode numbers rise in the order of creation; addresses need not.
    candidates.sort_by_key(|(entry, _)| (entry.inode, entry.start));
    let mut ram = Vec::new();
    for backend in &command_line.backends {
        let exact = (0..candidates.len())
            .filter(|&nth| candidates[nth].0.len_bytes() == backend.size_bytes)
            .min_by_key(|&nth| !fits(&candidates[nth].0, backend.kind));
        // What a device uses is mapped at its size, or was unplugged.
        let exact = exact.filter(|&nth| {
            backend.usage != BackendUsage::Other || fits(&candidates[nth].0, backend.kind)
        });
        let chosen = exact.or_else(|| {
            (0..candidates.len())
                .filter(|_| backend.usage == BackendUsage::Machine)
                .filter(|&nth| candidates[nth].0.len_bytes() > backend.size_bytes)
                .max_by_key(|&nth| {
                    let entry = &candidates[nth].0;
                    (fits(entry, backend.kind), entry.len_bytes())
                })
        });
        if let Some(nth) = chosen {
            let (entry, backing) = candidates.remove(nth);
            if backend.usage != BackendUsage::Other {
                ram.push(mapping(&entry, backing));
            }
        }
    }
    if command_line.memory_max_bytes.is_some() {
        let plugged = candidates.into_iter().filter(|(entry, backing)| {
            let is_memfd = matches!(backing, RamBacking::SharedMemfd | RamBacking::HugeTlb);
            is_memfd && entry.path.starts_with(PLUGGED)
        });
        ram.extend(plugged.map(|(entry, backing)| mapping(&entry, backing)));
    }
    ram
}

/// The memory of a process that is no VM.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProcessRam {
    /// Its mappings, in the order of their addresses.
    pub mappings: Vec<RamMapping>,
    /// Bytes of mappings that are larger than all memory of the host: reserved addresses, of which most have no pages.
    pub left_out_bytes: u64,
}

/// Finds the memory of a process: private mappings, without what they have from files unchanged, and shared
/// memory, each part of it once. Mappings of more than `largest_bytes` are left out.
///
/// Not among it: shared mappings of files, huge pages, code, and addresses that are only reserved.
pub fn process_ram(
    entries: &[MapEntry],
    file_systems: &FileSystems,
    largest_bytes: u64,
) -> ProcessRam {
    let mut ram = ProcessRam::default();
    let mut shared = Vec::new();
    for entry in entries {
        let Some(backing) = memory_of(entry, file_systems) else {
            continue;
        };
        if entry.len_bytes() > largest_bytes {
            ram.left_out_bytes = ram.left_out_bytes.saturating_add(entry.len_bytes());
        } else if entry.is_shared {
            shared.push((entry, backing));
        } else {
            ram.mappings.push(mapping(entry, backing));
        }
    }
    // A part that is mapped several times is observed by one mapping, by which most of it is likely to be used.
    shared.sort_by_key(|(entry, _)| (!entry.is_writable, Reverse(entry.len_bytes())));
    let mut known = KnownParts::default();
    for (entry, backing) in shared {
        let parts = known.add(entry);
        ram.mappings
            .extend(parts.into_iter().map(|part| RamMapping {
                address: entry.start + (part.start - entry.offset_bytes),
                len_bytes: part.end - part.start,
                file_offset_bytes: part.start,
                backing: backing.clone(),
            }));
    }
    ram.mappings.sort_by_key(|mapping| mapping.address);
    ram
}

/// Parts of files that are observed: by device, inode and first byte, the byte after the last.
#[derive(Default)]
struct KnownParts(BTreeMap<((u32, u32), u64, u64), u64>);

impl KnownParts {
    /// Adds what a mapping has of its file; returns what of it was not known.
    fn add(&mut self, entry: &MapEntry) -> Vec<Range<u64>> {
        let key = |start| (entry.device, entry.inode, start);
        let (mut start, end) = (
            entry.offset_bytes,
            entry.offset_bytes.saturating_add(entry.len_bytes()),
        );
        let mut parts = Vec::new();
        if let Some((_, &before)) = self.0.range(key(0)..=key(start)).next_back() {
            start = start.max(before);
        }
        for (&(_, _, other), &other_end) in self.0.range(key(start)..key(end.max(start))) {
            if start < other {
                parts.push(start..other);
            }
            start = other_end;
        }
        if start < end {
            parts.push(start..end);
        }
        let added = parts.iter().map(|part| (key(part.start), part.end));
        self.0.extend(added);
        parts
    }
}

/// The backing of a mapping that is memory of a process; `None` if it is none.
fn memory_of(entry: &MapEntry, file_systems: &FileSystems) -> Option<RamBacking> {
    let path = entry.path.as_str();
    let kind = file_systems.kind(entry.device);
    if !entry.is_readable || matches!(kind, "hugetlbfs" | "devtmpfs") {
        return None;
    }
    let is_file = path.starts_with('/');
    // The kernel's own pages.
    let is_kernels = ["[v", "[uprobes"].iter().any(|name| path.starts_with(name));
    if !entry.is_shared {
        return ((!is_file || entry.is_writable) && !is_kernels).then_some(RamBacking::Private);
    }
    if path.starts_with("/memfd:") {
        Some(RamBacking::SharedMemfd)
    } else if kind == "tmpfs"
        || path.starts_with("[anon_shmem")
        || path.starts_with("/dev/zero")
        || path.starts_with("/SYSV")
    {
        Some(RamBacking::SharedTmpfs)
    } else {
        None
    }
}

fn mapping(entry: &MapEntry, backing: RamBacking) -> RamMapping {
    RamMapping {
        address: entry.start,
        len_bytes: entry.len_bytes(),
        file_offset_bytes: entry.offset_bytes,
        backing,
    }
}

/// Merges adjacent mappings of one file, which the kernel split because their flags differed.
fn joined(entries: &[MapEntry]) -> Vec<MapEntry> {
    let mut joined: Vec<MapEntry> = Vec::new();
    for entry in entries {
        match joined.last_mut() {
            Some(last) if last.continues_in(entry) => last.end = entry.end,
            _ => joined.push(entry.clone()),
        }
    }
    joined
}

/// The backing of a mapping that may be guest RAM; `None` if it cannot be.
fn backing(entry: &MapEntry, file_systems: &FileSystems) -> Option<RamBacking> {
    if !entry.is_data {
        return None;
    }
    let path = entry.path.as_str();
    let kind = file_systems.kind(entry.device);
    if path.is_empty() || path.starts_with("[anon") {
        Some(RamBacking::Private)
    } else if !path.starts_with('/') || kind == "devtmpfs" {
        // The heap, a stack, a device's registers.
        None
    } else if kind == "hugetlbfs" {
        Some(RamBacking::HugeTlb)
    } else if !entry.is_shared {
        Some(RamBacking::Private)
    } else if path.starts_with("/memfd:") {
        Some(RamBacking::SharedMemfd)
    } else if kind == "tmpfs" || path == "/dev/zero (deleted)" {
        Some(RamBacking::SharedTmpfs)
    } else {
        Some(RamBacking::File(path.to_owned()))
    }
}

/// Whether a backend of this kind creates such mappings.
fn fits(entry: &MapEntry, kind: BackendKind) -> bool {
    let is_memfd = entry.path.starts_with("/memfd:");
    let is_anonymous = entry.inode == 0 || entry.path == "/dev/zero (deleted)";
    match kind {
        BackendKind::Memfd => is_memfd,
        BackendKind::File => !is_memfd && !is_anonymous,
        BackendKind::Anonymous => is_anonymous,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAPS: &str = "\
555555554000-555555a00000 r--p 00000000 fe:00 1234                       /usr/bin/qemu-system-x86_64
555556800000-555556a00000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0040000000 rwxp 00000000 00:00 0 
7f0048000000-7f0050000000 rw-s 00000000 00:01 2060                       /memfd:memory-backend-memfd (deleted)
7f0050000000-7f0058000000 rw-s 08000000 00:01 2060                       /memfd:memory-backend-memfd (deleted)
7f0060000000-7f0070000000 rw-s 00000000 00:01 2050                       /memfd:memory-backend-memfd (deleted)
7f0080000000-7f0090000000 rw-p 00000000 00:00 0 
7f00a0000000-7f00b0000000 rw-s 00000000 00:19 77                         /dev/shm/two words
7f00c0000000-7f00d0000000 rw-s 00000000 00:2d 78                         /dev/hugepages/ram
7ffffffde000-7ffffffff000 rw-p 00000000 00:00 0                          [stack]
";
    const MOUNTS: &str = "\
24 29 0:25 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,inode64
31 24 0:45 / /dev/hugepages rw,relatime shared:16 - hugetlbfs hugetlbfs rw,pagesize=2M
";

    fn found(arguments: &[&str]) -> Vec<(u64, RamBacking)> {
        let entries = parse_maps(MAPS).unwrap();
        let command_line = CommandLine::parse(arguments);
        guest_ram(&entries, &FileSystems::parse(MOUNTS), &command_line)
            .into_iter()
            .map(|ram| {
                assert_eq!(ram.len_bytes, 256 << 20);
                (ram.address, ram.backing)
            })
            .collect()
    }

    #[test]
    fn a_mapping_with_swap_is_named_by_its_start() {
        let smaps = "1000-3000 rw-s 00000000 00:01 7 /memfd:a\nSize: 8 kB\nSwap:                  0 kB\nSwapPss: 0 kB\n\
                     3000-5000 rw-s 00000000 00:01 8 /memfd:b\nSize: 8 kB\nSwap:                  4 kB\nSwapPss: 4 kB\n";
        assert_eq!(swapped_out(smaps), BTreeSet::from([0x3000]));
    }

    #[test]
    fn a_backends_kind_decides_among_mappings_of_one_length() {
        let memfd = "memory-backend-memfd,id=ram,size=256M,share=on";
        let file = "memory-backend-file,id=ram,size=256M,mem-path=/dev/shm/x,share=on";
        let with = |object| found(&["-object", object, "-machine", "q35,memory-backend=ram"]);
        assert_eq!(with(memfd), [(0x7f00_6000_0000, RamBacking::SharedMemfd)]);
        assert_eq!(with(file), [(0x7f00_a000_0000, RamBacking::SharedTmpfs)]);
        assert_eq!(
            found(&["-m", "256"]),
            [(0x7f00_8000_0000, RamBacking::Private)]
        );
    }

    #[test]
    fn several_backends_are_found_in_the_order_they_were_made() {
        let node = |id| format!("memory-backend-memfd,id={id},size=268435456,share=on");
        let found = found(&[
            "-m",
            "512",
            "-object",
            &node("a"),
            "-object",
            &node("b"),
            "-numa",
            "node,memdev=a",
            "-numa",
            "node,memdev=b",
        ]);
        // The second of them is one mapping that the kernel lists in two parts.
        let addresses: Vec<_> = found.iter().map(|(address, _)| *address).collect();
        assert_eq!(addresses, [0x7f00_6000_0000, 0x7f00_4800_0000]);
    }

    #[test]
    fn plugged_memory_follows_that_of_the_command_line() {
        let object = "memory-backend-memfd,id=ram,size=256M,share=on";
        let machine = ["-machine", "q35,memory-backend=ram"];
        let size = ["-m", "256M,slots=2,maxmem=4G"];
        let found = found(&[&["-object", object], &machine[..], &size].concat());
        let addresses: Vec<_> = found.iter().map(|(address, _)| *address).collect();
        assert_eq!(addresses, [0x7f00_6000_0000, 0x7f00_4800_0000]);
    }

    #[test]
    fn memory_that_is_shared_with_others_is_not_ram_and_takes_none_of_it() {
        let shared = "memory-backend-memfd,id=sh,size=256M,share=on";
        let device = ["-device", "ivshmem-plain,memdev=sh"];
        let object = ["-object", shared];
        let machine = ["-m", "256M,slots=2,maxmem=4G"];
        let with = |rest: &[&str]| found(&[&machine[..], &object, &device, rest].concat());
        assert_eq!(
            with(&[]),
            [
                (0x7f00_8000_0000, RamBacking::Private),
                // Plugged later.
                (0x7f00_4800_0000, RamBacking::SharedMemfd),
            ]
        );
        // A DIMM that was unplugged.
        let dimm = "memory-backend-memfd,id=d,size=16M,share=on";
        let devices = ["-object", dimm, "-device", "pc-dimm,memdev=d"];
        let line = [&["-m", "256M"], &devices[..]].concat();
        assert_eq!(found(&line), [(0x7f00_8000_0000, RamBacking::Private)]);
        // One that is not mapped, or not at that length.
        let gone = "memory-backend-file,id=sh,size=1M,mem-path=/dev/shm/y,share=on";
        let line = ["-m", "256M", "-object", gone, "-device", device[1]];
        assert_eq!(found(&line), [(0x7f00_8000_0000, RamBacking::Private)]);
    }

    #[test]
    fn executable_memory_is_never_guest_ram() {
        let entries = parse_maps(MAPS).unwrap();
        let ram = guest_ram(
            &entries,
            &FileSystems::parse(MOUNTS),
            &CommandLine::parse(&["-m", "1G"]),
        );
        assert_eq!(ram, []);
    }

    #[test]
    fn the_largest_mapping_stands_in_where_no_length_agrees() {
        let found = found(&["-m", "200"]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].1, RamBacking::Private);
    }

    #[test]
    fn memfds_of_huge_pages_are_known_by_their_file_system() {
        let maps = MAPS.replace("00:01 2050", "00:0f 2050");
        let entries = parse_maps(&maps).unwrap();
        let file_systems = FileSystems::parse(MOUNTS);
        let file_systems = file_systems.with_memfds(&entries, |entry| entry.device == (0, 0xf));
        let object = "memory-backend-memfd,id=ram,size=256M,share=on";
        let line = ["-object", object, "-machine", "memory-backend=ram"];
        let line = [&line[..], &["-m", "256M,slots=2,maxmem=4G"]].concat();
        let ram = guest_ram(&entries, &file_systems, &CommandLine::parse(&line));
        let found: Vec<_> = ram.iter().map(|ram| (ram.address, &ram.backing)).collect();
        let expected = [
            (0x7f00_6000_0000, &RamBacking::HugeTlb),
            (0x7f00_4800_0000, &RamBacking::SharedMemfd),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn tmpfs_and_huge_pages_are_known_by_their_device() {
        let entries = parse_maps(MAPS).unwrap();
        let file_systems = FileSystems::parse(MOUNTS);
        let of = |path: &str| {
            let entry = entries.iter().find(|entry| entry.path == path).unwrap();
            backing(entry, &file_systems)
        };
        assert_eq!(of("/dev/shm/two words"), Some(RamBacking::SharedTmpfs));
        assert_eq!(of("/dev/hugepages/ram"), Some(RamBacking::HugeTlb));
        assert_eq!(of("[heap]"), None);
    }

    #[test]
    fn the_memory_of_a_process_is_what_is_private_or_shared_and_no_file() {
        let maps = "\
400000-401000 r-xp 00000000 fe:00 7                          /usr/bin/program
401000-402000 r--p 00001000 fe:00 7                          /usr/bin/program
402000-403000 rw-p 00002000 fe:00 7                          /usr/bin/program
600000-610000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000010000 rwxp 00000000 00:00 0 
7f0000010000-7f0000020000 ---p 00000000 00:00 0 
7f0000100000-7f0000110000 rw-s 00000000 00:01 9              /memfd:heap (deleted)
7f0000200000-7f0000210000 rw-s 00000000 00:01 9              /memfd:heap (deleted)
7f0000300000-7f0000310000 rw-s 00010000 00:01 9              /memfd:heap (deleted)
7f0000400000-7f0000410000 rw-s 00000000 fe:00 8              /var/lib/data
7f0000500000-7f0000510000 rw-s 00000000 00:2d 8              /dev/hugepages/x
7f0000600000-7f0000610000 rw-s 00000000 00:05 3              /SYSV00000000 (deleted)
7f1000000000-7fe000000000 rw-p 00000000 00:00 0 
7ffffffde000-7ffffffff000 rw-p 00000000 00:00 0              [stack]
7ffffffff000-7ffffffff800 r--p 00000000 00:00 0              [vvar]
";
        let entries = parse_maps(maps).unwrap();
        let ram = process_ram(&entries, &FileSystems::parse(MOUNTS), 1 << 36);
        let found: Vec<_> = ram
            .mappings
            .iter()
            .map(|ram| (ram.address, &ram.backing))
            .collect();
        use RamBacking::{Private, SharedMemfd, SharedTmpfs};
        assert_eq!(
            found,
            [
                (0x40_2000, &Private),
                (0x60_0000, &Private),
                (0x7f00_0000_0000, &Private),
                (0x7f00_0010_0000, &SharedMemfd),
                (0x7f00_0030_0000, &SharedMemfd),
                (0x7f00_0060_0000, &SharedTmpfs),
                (0x7fff_fffd_e000, &Private),
            ]
        );
        assert_eq!(ram.left_out_bytes, 0xd0_0000_0000);
    }

    #[test]
    fn each_part_of_shared_memory_is_observed_once_by_the_mapping_most_likely_used() {
        let of = |maps: &str| {
            let entries = parse_maps(maps).unwrap();
            let ram = process_ram(&entries, &FileSystems::parse(MOUNTS), 1 << 36);
            let parts = ram.mappings.iter();
            let part = |ram: &RamMapping| (ram.address, ram.len_bytes, ram.file_offset_bytes);
            parts.map(part).collect::<Vec<_>>()
        };
        let header_first = "\
1000-2000 rw-s 00000000 00:01 9 /memfd:a (deleted)
8000-18000 rw-s 00000000 00:01 9 /memfd:a (deleted)
";
        assert_eq!(of(header_first), [(0x8000, 0x1_0000, 0)]);
        let code = "\
10000-20000 r-xs 00000000 00:01 9 /memfd:a (deleted)
30000-38000 rw-s 00004000 00:01 9 /memfd:a (deleted)
";
        let apart = [
            (0x1_0000, 0x4000, 0),
            (0x1_c000, 0x4000, 0xc000),
            (0x3_0000, 0x8000, 0x4000),
        ];
        assert_eq!(of(code), apart);
        let overlapping = "\
10000-20000 rw-s 00000000 00:01 9 /memfd:a (deleted)
30000-3f000 rw-s 00001000 00:01 9 /memfd:a (deleted)
50000-52000 rw-s 0000f000 00:01 9 /memfd:a (deleted)
";
        let once = [(0x1_0000, 0x1_0000, 0), (0x5_1000, 0x1000, 0x1_0000)];
        assert_eq!(of(overlapping), once);
    }

    #[test]
    fn flags_of_any_part_of_the_ram_count() {
        let smaps = "\
1000-3000 rw-s 00000000 00:01 5 /memfd:a (deleted)
Size:                  8 kB
VmFlags: rd wr sh mr mw me ms sd 
3000-5000 rw-s 00002000 00:01 5 /memfd:a (deleted)
VmFlags: rd wr sh mr mw me ms lo ui sd 
";
        let ram = |address, len_bytes| RamMapping {
            address,
            len_bytes,
            file_offset_bytes: 0,
            backing: RamBacking::SharedMemfd,
        };
        assert_eq!(
            ram_state(smaps, &[ram(0x1000, 0x2000)]),
            RamState::default()
        );
        let apart = [ram(0x9000, 0x1000), ram(0x4000, 0x1000)];
        assert!(ram_state(smaps, &apart).locked);
        let both = RamState {
            locked: true,
            userfaultfd: true,
        };
        assert_eq!(ram_state(smaps, &[ram(0x1000, 0x4000)]), both);
    }

    #[test]
    fn a_line_that_is_none_is_named() {
        let error = parse_maps("1000-2000 rw-p 00000000 00:00 0\n2000-1000 rw-p 0 00:00 0\n");
        assert!(matches!(error, Err(VmError::Maps { line: 2, .. })));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(
            text in "([0-9a-f]{1,16}-[0-9a-f]{1,16} [rwxps-]{3,4} [0-9a-f]{1,16} [0-9a-f:]{1,6} [0-9]{1,20} ?.{0,9}\n|.{0,20}\n){0,8}",
            mib in 0u64..8,
        ) {
            let ram = RamMapping {
                address: u64::MAX - 1, len_bytes: 4, file_offset_bytes: 0, backing: RamBacking::Private,
            };
            let _ = ram_state(&text, &[ram.clone(), ram]);
            let file_systems = FileSystems::parse(&text);
            if let Ok(entries) = parse_maps(&text) {
                let _ = process_ram(&entries, &file_systems, mib);
                let command_line = CommandLine::parse(&["-m", &mib.to_string()]);
                let _ = guest_ram(&entries, &file_systems, &command_line);
            }
        }
    }
}
