//! Page frames as the kernel lists them: which page lies in which frame, what a frame is, and whether it is idle.
//!
//! `/proc/PID/pagemap`, `/proc/kpageflags` and `/proc/kpagecgroup` have one little-endian word for each page, and
//! `/sys/kernel/mm/page_idle/bitmap` one bit for each frame, in words of 64. A frame of a compound page (a transparent huge
//! page, or one of several sizes since Linux 6.8) has one idle bit, that of its head, which therefore stands for all its frames.
//!
//! Source: Linux, Documentation/admin-guide/mm/pagemap.rst and idle_page_tracking.rst.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use crate::ram::PAGE_BYTES;
use crate::refusal::Refusal;
use crate::sys::usize_of;

/// Bytes of a word in all of these files.
const WORD_BYTES: u64 = 8;
/// Frames of a word of the bitmap.
const WORD_FRAMES: u64 = 64;
/// Most frames of a compound page that is on a list of the kernel's reclaim: a huge page of 2 MiB.
const COMPOUND_FRAMES: u64 = 512;

/// Where idle pages are tracked.
pub const BITMAP: &str = "/sys/kernel/mm/page_idle/bitmap";
const FLAGS: &str = "/proc/kpageflags";
const GROUPS: &str = "/proc/kpagecgroup";
const IOMEM: &str = "/proc/iomem";

/// A word of a process's pagemap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagemapEntry(pub u64);

impl PagemapEntry {
    /// The frame of the page; `None` if it has none, or if the caller may not know it.
    pub fn frame(self) -> Option<u64> {
        let frame = self.0 & ((1 << 55) - 1);
        (self.0 >> 63 == 1 && frame != 0).then_some(frame)
    }

    /// Whether the page is swapped out.
    pub fn is_swapped(self) -> bool {
        self.0 >> 62 & 1 == 1
    }

    /// Whether the page belongs to a file or to shared memory.
    pub fn is_file_or_shared(self) -> bool {
        self.0 >> 61 & 1 == 1
    }
}

/// A word of `kpageflags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameFlags(pub u64);

impl FrameFlags {
    const fn has(self, bit: u32) -> bool {
        self.0 >> bit & 1 == 1
    }

    /// Whether reclaim has the page on a list, as it has all whose use is tracked.
    pub const fn is_listed(self) -> bool {
        self.has(5)
    }

    /// Whether it belongs to a process and no file.
    pub const fn is_anonymous(self) -> bool {
        self.has(12)
    }

    /// Whether it is the first frame of a compound page.
    pub const fn is_head(self) -> bool {
        self.has(15)
    }

    /// Whether it is another frame of a compound page.
    pub const fn is_tail(self) -> bool {
        self.has(16)
    }

    /// Whether it is the page of zeros that stands for pages never written.
    pub const fn is_zeros(self) -> bool {
        self.has(24)
    }
}

/// A page as its use is tracked: a frame, or a compound page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    /// Its first frame.
    pub head: u64,
    /// Flags of that frame.
    pub flags: FrameFlags,
}

/// The files of the kernel about frames.
#[derive(Debug)]
pub struct Frames {
    flags: File,
    /// Which control group a frame is charged to; `None` where that is not asked.
    groups: Option<File>,
}

impl Frames {
    /// Opens the files, with those about control groups if `has_groups`.
    ///
    /// # Errors
    ///
    /// The kernel has no such file, or this caller may not open it.
    pub fn open(has_groups: bool) -> Result<Self, Refusal> {
        let open = |path| File::open(path).map_err(|source| unopened(path, source));
        Ok(Self {
            flags: open(FLAGS)?,
            groups: has_groups.then(|| open(GROUPS)).transpose()?,
        })
    }

    /// What a frame belongs to; `None` for a tail whose head is not found, as that of a compound page which is just split.
    pub fn unit(&self, frame: u64) -> io::Result<Option<Unit>> {
        let flags = FrameFlags(word(&self.flags, frame)?);
        if !flags.is_tail() {
            return Ok(Some(Unit { head: frame, flags }));
        }
        let first = frame - frame % COMPOUND_FRAMES;
        let mut bytes = vec![0; usize_of((frame - first) * WORD_BYTES)];
        self.flags.read_exact_at(&mut bytes, first * WORD_BYTES)?;
        let words = bytes.as_chunks().0.iter();
        let flags = words.map(|&word| FrameFlags(u64::from_le_bytes(word)));
        let mut before = flags.rev().zip(1..);
        let head = before.find(|(flags, _)| !flags.is_tail());
        Ok(head
            .filter(|(flags, _)| flags.is_head())
            .map(|(flags, back)| Unit {
                head: frame - back,
                flags,
            }))
    }

    /// The inode of the control group that a frame is charged to, 0 for none.
    pub fn group(&self, frame: u64) -> io::Result<u64> {
        self.groups
            .as_ref()
            .map_or(Ok(0), |groups| word(groups, frame))
    }
}

/// The kernel's bitmap of idle pages.
#[derive(Debug)]
pub struct IdleMarks {
    bitmap: File,
}

impl IdleMarks {
    /// Opens the bitmap.
    ///
    /// # Errors
    ///
    /// As [`Frames::open`].
    pub fn open() -> Result<Self, Refusal> {
        let bitmap = File::options().read(true).write(true).open(BITMAP);
        let bitmap = bitmap.map_err(|source| unopened(BITMAP, source))?;
        Ok(Self { bitmap })
    }

    /// Whether a unit was not used since it was made idle.
    pub fn is_idle(&self, head: u64) -> io::Result<bool> {
        match word(&self.bitmap, head / WORD_FRAMES) {
            Ok(bits) => Ok(bits >> (head % WORD_FRAMES) & 1 == 1),
            // Of the last frames of memory, if they are no whole word, the kernel tells nothing.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Makes units idle, in the order of `heads`; neighbours that share a word together.
    pub fn make_idle(&self, heads: &[u64]) -> io::Result<()> {
        for heads in heads.chunk_by(|one, next| one / WORD_FRAMES == next / WORD_FRAMES) {
            let bits = heads
                .iter()
                .fold(0, |bits, head| bits | 1 << (head % WORD_FRAMES));
            let bytes = u64::to_le_bytes(bits);
            // Of the last frames of memory, if they are no whole word, the kernel takes the bits and says that it took none.
            self.bitmap
                .write_at(&bytes, heads[0] / WORD_FRAMES * WORD_BYTES)?;
        }
        Ok(())
    }
}

/// Refuses a host whose kernel does not track idle pages, and a caller who may not see which are idle.
pub fn check_tracking() -> Result<(), Refusal> {
    // First, because a kernel without it is the commonest obstacle.
    IdleMarks::open()?;
    check_frames()
}

/// Refuses a caller who may not see in which frames pages lie.
pub fn check_frames() -> Result<(), Refusal> {
    Frames::open(false)?;
    let no_frames = || Refusal::NoAdmin {
        what: "see in which frames pages lie".to_owned(),
        source: io::Error::from_raw_os_error(libc::EPERM),
    };
    // Of a page of ours that is present, since it was just written.
    let here = [1_u64; 1];
    let address = std::hint::black_box(&here).as_ptr().addr() as u64;
    let entry = File::open("/proc/self/pagemap").and_then(|file| word(&file, address / PAGE_BYTES));
    let is_seen = entry.is_ok_and(|entry| PagemapEntry(entry).frame().is_some());
    if is_seen { Ok(()) } else { Err(no_frames()) }
}

fn unopened(path: &'static str, source: io::Error) -> Refusal {
    match source.kind() {
        io::ErrorKind::NotFound if path == BITMAP => Refusal::NoIdleTracking { missing: path },
        io::ErrorKind::NotFound => Refusal::NoFrames { missing: path },
        _ => Refusal::NoAdmin {
            what: format!("open {path}"),
            source,
        },
    }
}

/// The word `index` of a file.
pub fn word(file: &File, index: u64) -> io::Result<u64> {
    let mut bytes = [0; size_of::<u64>()];
    let offset = index.checked_mul(WORD_BYTES);
    let offset = offset.ok_or_else(|| io::Error::other("a frame beyond all memory"))?;
    file.read_exact_at(&mut bytes, offset)?;
    Ok(u64::from_le_bytes(bytes))
}

/// The frames of this host's memory, as ranges in ascending order.
pub fn ranges_of_memory() -> io::Result<Vec<std::ops::Range<u64>>> {
    Ok(parse_iomem(&std::fs::read_to_string(IOMEM)?))
}

/// The frames of memory by the text of `/proc/iomem`, as ranges in ascending order. Malformed lines, and those out of order,
/// are ignored; for an ordinary user all addresses are 0, and there is no range.
pub fn parse_iomem(text: &str) -> Vec<std::ops::Range<u64>> {
    let mut ranges: Vec<std::ops::Range<u64>> = Vec::new();
    for line in text.lines() {
        // Lines of what lies within are indented, among them memory that a driver added; what lies within memory is not counted twice.
        let is_memory = |name: &str| name == "System RAM" || name.starts_with("System RAM (");
        let range = line.trim_start().split_once(" : ");
        let range = range.filter(|(_, name)| is_memory(name));
        let range = range.and_then(|(range, _)| range.split_once('-'));
        let Some((first, last)) = range else { continue };
        let address = |text| u64::from_str_radix(text, 16).ok();
        let (Some(first), Some(last)) = (address(first), address(last)) else {
            continue;
        };
        let frames = first.div_ceil(PAGE_BYTES)..last.saturating_add(1) / PAGE_BYTES;
        let is_next = ranges
            .last()
            .is_none_or(|before| before.end <= frames.start);
        if is_next && !frames.is_empty() {
            ranges.push(frames);
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LISTED: u64 = 1 << 5;
    const HEAD: u64 = 1 << 15;
    const TAIL: u64 = 1 << 16;

    /// A file of these words.
    fn file(words: &[u64]) -> File {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        file.write_all_at(&bytes, 0).unwrap();
        file
    }

    fn frames(flags: &[u64]) -> Frames {
        Frames {
            flags: file(flags),
            groups: None,
        }
    }

    #[test]
    fn a_word_of_a_pagemap_has_the_frame_of_a_page_that_is_present() {
        let entry = |word| {
            let entry = PagemapEntry(word);
            (entry.frame(), entry.is_swapped(), entry.is_file_or_shared())
        };
        assert_eq!(entry(1 << 63 | 1 << 56 | 77), (Some(77), false, false));
        assert_eq!(
            entry(1 << 63 | 1 << 61 | 1 << 55 | 77),
            (Some(77), false, true)
        );
        assert_eq!(entry(1 << 62 | 77), (None, true, false));
        // Without the right to know it.
        assert_eq!(entry(1 << 63), (None, false, false));
    }

    #[test]
    fn all_frames_of_a_compound_page_are_tracked_by_its_head() {
        let mut flags = vec![LISTED; 1200];
        flags[600] = LISTED | HEAD;
        flags[601..616].fill(TAIL);
        flags[512] = TAIL;
        let frames = frames(&flags);
        let head = |frame| frames.unit(frame).unwrap().map(|unit| unit.head);
        assert_eq!(
            (head(599), head(600), head(601)),
            (Some(599), Some(600), Some(600))
        );
        assert_eq!((head(615), head(616)), (Some(600), Some(616)));
        assert!(frames.unit(610).unwrap().unwrap().flags.is_listed());
        // Of which there is no head.
        assert_eq!(head(512), None);
        assert!(frames.unit(5000).is_err());
    }

    #[test]
    fn what_is_made_idle_is_idle_and_nothing_else() {
        let marks = IdleMarks {
            bitmap: file(&[0; 4]),
        };
        marks.make_idle(&[0, 63, 64, 130, 191]).unwrap();
        let idle = (0..256).filter(|&frame| marks.is_idle(frame).unwrap());
        assert_eq!(idle.collect::<Vec<_>>(), [0, 63, 64, 130, 191]);
        marks.make_idle(&[]).unwrap();
        // Beyond the end nothing is known to be in use.
        assert!(marks.is_idle(256).unwrap());
    }

    #[test]
    fn memory_is_what_is_called_so_without_its_parts() {
        let text = "\
00000000-00000fff : Reserved
00001000-0009fbff : System RAM
000a0000-000bffff : PCI Bus 0000:00
00100000-1fffffff : System RAM
  01000000-01e00f5f : Kernel code
  01f00000-01ffffff : System RAM
fee00000-fee00fff : Local APIC
100000000-1ffffffff : System RAM
200000000-27fffffff : virtio0
  200000000-20fffffff : System RAM (virtio_mem)
280000000-2ffffffff : dax0.0
  280000000-2ffffffff : System RAM (kmem)
00000000-00000000 : System RAM
";
        let virtio_mem = 0x20_0000..0x21_0000;
        let kmem = 0x28_0000..0x30_0000;
        let own = [1..0x9f, 0x100..0x2_0000, 0x10_0000..0x20_0000];
        assert_eq!(parse_iomem(text), [&own[..], &[virtio_mem, kmem]].concat());
    }

    proptest! {
        #[test]
        fn no_list_of_memory_makes_it_panic_and_ranges_rise(
            text in "([0-9a-f]{1,17}-[0-9a-f]{1,17} : (System RAM|x)\n|.{0,20}\n){0,9}",
        ) {
            let ranges = parse_iomem(&text);
            prop_assert!(ranges.iter().all(|range| range.start < range.end));
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }
}
