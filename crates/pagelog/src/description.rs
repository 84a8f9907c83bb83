//! Description of the machine that a page log was recorded from.
//!
//! It has the same layout and offset in the header of a ring and of a file (`docs/formats.md`).

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

use plimsoll_flow::{PageCount, PageNumber, PageSize};

use crate::PageLogError;
use crate::record::{FRAME_MAX, VCPUS_MAX};

/// Page size of a log, in bytes.
pub(crate) const PAGE_BYTES: u32 = 4096;
/// Format version of ring and file.
pub(crate) const VERSION: u32 = 1;
/// Guest-physical address at which RAM continues above the PCI hole.
const FOUR_GIB: u64 = 4 << 30;
/// Maximum number of pages in a filter.
const FILTER_PAGES_MAX: u32 = 1 << 16;

const WALKS: u32 = 1;
const REFERENCES: u32 = 1 << 1;
const ONLY_BETWEEN_MARKS: u32 = 1 << 2;

const TWO_MIB: u64 = 2 << 20;

/// Length of the description in the header, from [`Description::AT`] on.
pub(crate) const DESCRIPTION_BYTES: usize = 72;

/// Number of entries and ways of a translation lookaside buffer, with LRU replacement in each set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TlbShape {
    entries: u32,
    ways: u32,
}

impl TlbShape {
    /// Maximum number of entries of a TLB.
    pub const ENTRIES_MAX: u32 = 1 << 16;

    /// Creates a shape from entries and ways: 64 and 4 give 16 sets of 4.
    ///
    /// # Errors
    ///
    /// [`PageLogError::Tlb`] unless the number of sets is a power of two and that of entries 1 to
    /// [`Self::ENTRIES_MAX`].
    pub fn new(entries: u32, ways: u32) -> Result<Self, PageLogError> {
        let possible = ways > 0
            && entries <= Self::ENTRIES_MAX
            && entries.is_multiple_of(ways)
            && (entries / ways).is_power_of_two();
        if possible {
            Ok(Self { entries, ways })
        } else {
            Err(PageLogError::Tlb { entries, ways })
        }
    }

    /// Number of entries.
    pub fn entries(self) -> u32 {
        self.entries
    }

    /// Number of ways: the entries that can hold a given page.
    pub fn ways(self) -> u32 {
        self.ways
    }

    /// Number of sets.
    pub fn sets(self) -> u32 {
        self.entries / self.ways
    }

    /// The shape from the values in a header: 0 entries in 0 ways mean no TLB.
    fn of_head(entries: u32, ways: u32) -> Result<Option<Self>, PageLogError> {
        match (entries, ways) {
            (0, 0) => Ok(None),
            _ => Self::new(entries, ways).map(Some),
        }
    }
}

/// 64 entries of 4 ways, as in the machine of \[PRL\] §3.1.
impl Default for TlbShape {
    fn default() -> Self {
        Self {
            entries: 64,
            ways: 4,
        }
    }
}

impl fmt::Display for TlbShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.entries, self.ways)
    }
}

/// A text that is not a valid TLB shape.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' is not a TLB shape: expected ENTRIESxWAYS like 64x4, with at most {max} entries and a power of two of sets",
    max = TlbShape::ENTRIES_MAX
)]
pub struct TlbShapeError {
    text: String,
}

impl FromStr for TlbShape {
    type Err = TlbShapeError;

    fn from_str(text: &str) -> Result<Self, TlbShapeError> {
        let shape = text.split_once('x').and_then(|(entries, ways)| {
            let (entries, ways) = (entries.parse().ok()?, ways.parse().ok()?);
            Self::new(entries, ways).ok()
        });
        shape.ok_or_else(|| TlbShapeError {
            text: text.chars().take(48).collect(),
        })
    }
}

/// The machine that a log was recorded from, and the kinds of events in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// RAM, in bytes.
    pub ram_bytes: u64,
    /// RAM below 4 GiB, in bytes; the rest begins at guest-physical 4 GiB.
    pub below_4g_bytes: u64,
    /// Virtual CPUs, 1 to [`VCPUS_MAX`].
    pub vcpus: u32,
    /// Whether page walks are logged.
    pub walks: bool,
    /// Whether references are logged, as pages that enter and leave the filter.
    pub references: bool,
    /// Whether only the part between the guest's marks is logged.
    pub only_between_marks: bool,
    /// Length of an interval in instructions of all vCPUs together; `None` if there are no intervals.
    pub interval_instructions: Option<NonZeroU64>,
    /// Number of pages in the filter.
    pub filter_pages: u32,
    /// The data TLB.
    pub tlb: Option<TlbShape>,
    /// The second-level TLB.
    pub tlb2: Option<TlbShape>,
    /// The instruction TLB; without it fetches are not logged.
    pub itlb: Option<TlbShape>,
    /// Plugin interface version of the QEMU that wrote the log; 0 if it was not written by QEMU.
    pub plugin_api: u32,
    /// Page size of TLB entries and page-table flags: 4 KiB or 2 MiB. Frames are always 4 KiB.
    pub tlb_page: PageSize,
}

impl Description {
    /// Offset of the description in a header.
    pub(crate) const AT: usize = 24;

    /// Whether a page is RAM.
    pub fn holds(&self, frame: PageNumber) -> bool {
        let page_of = |address| PageSize::FOUR_KIB.page_of(address).0;
        let above = page_of(FOUR_GIB);
        let above_pages = page_of(self.ram_bytes.saturating_sub(self.below_4g_bytes));
        frame.0 < page_of(self.below_4g_bytes)
            || (frame.0 >= above && frame.0 - above < above_pages)
    }

    /// Pages of RAM.
    pub fn pages(&self) -> PageCount {
        PageCount::from_bytes(self.ram_bytes, PageSize::FOUR_KIB)
    }

    /// Checks that the description is valid.
    ///
    /// # Errors
    ///
    /// [`PageLogError::Description`], of a log called `name`.
    pub fn validate(&self, name: &str) -> Result<(), PageLogError> {
        let page = u64::from(PAGE_BYTES);
        let last = (FRAME_MAX + 1) * page;
        let reason = if self.vcpus == 0 || self.vcpus as usize > VCPUS_MAX {
            format!("{} vCPUs, instead of 1 to {VCPUS_MAX}", self.vcpus)
        } else if !self.ram_bytes.is_multiple_of(page) || !self.below_4g_bytes.is_multiple_of(page)
        {
            "its RAM is not a whole number of pages".to_owned()
        } else if self.below_4g_bytes == 0
            || self.below_4g_bytes > self.ram_bytes.min(FOUR_GIB)
            || self.ram_bytes - self.below_4g_bytes > last - FOUR_GIB
        {
            let (ram, below) = (self.ram_bytes, self.below_4g_bytes);
            format!("{ram} bytes of RAM, {below} of them below 4 GiB")
        } else if self.filter_pages > FILTER_PAGES_MAX || self.references && self.filter_pages == 0
        {
            format!("a filter of {} pages", self.filter_pages)
        } else if self.walks && self.tlb.is_none() {
            "it logs page walks without a TLB".to_owned()
        } else if ![page, TWO_MIB].contains(&self.tlb_page.bytes()) {
            format!("a TLB of pages of {} bytes", self.tlb_page.bytes())
        } else {
            return Ok(());
        };
        let name = name.to_owned();
        Err(PageLogError::Description { name, reason })
    }

    /// The bytes of a header from [`Self::AT`] on.
    pub(crate) fn to_bytes(&self) -> [u8; DESCRIPTION_BYTES] {
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        let flags = flag(self.walks, WALKS)
            | flag(self.references, REFERENCES)
            | flag(self.only_between_marks, ONLY_BETWEEN_MARKS);
        let interval = self.interval_instructions.map_or(0, NonZeroU64::get);
        let of = |tlb: Option<TlbShape>| tlb.map_or([0, 0], |tlb| [tlb.entries, tlb.ways]);
        let mut bytes = [0; DESCRIPTION_BYTES];
        let mut put = |at: usize, value: &[u8]| {
            bytes[at - Self::AT..][..value.len()].copy_from_slice(value);
        };
        put(24, &self.ram_bytes.to_le_bytes());
        put(32, &self.below_4g_bytes.to_le_bytes());
        put(40, &self.vcpus.to_le_bytes());
        put(44, &flags.to_le_bytes());
        put(48, &interval.to_le_bytes());
        put(56, &self.filter_pages.to_le_bytes());
        let tlbs = [of(self.tlb), of(self.tlb2), of(self.itlb)];
        for (index, value) in tlbs.as_flattened().iter().enumerate() {
            put(60 + 4 * index, &value.to_le_bytes());
        }
        put(84, &self.plugin_api.to_le_bytes());
        put(88, &self.tlb_page.bytes().to_le_bytes());
        bytes
    }

    /// Parses the bytes of the header of a log called `name` from [`Self::AT`] on.
    pub(crate) fn of_bytes(
        bytes: &[u8; DESCRIPTION_BYTES],
        name: &str,
    ) -> Result<Self, PageLogError> {
        let u32_at = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[at - Self::AT..][..4]);
            u32::from_le_bytes(word)
        };
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let flags = u32_at(44);
        if flags & !(WALKS | REFERENCES | ONLY_BETWEEN_MARKS) != 0 {
            return Err(PageLogError::Description {
                name: name.to_owned(),
                reason: format!("flags {flags:#x}, some of which have no meaning"),
            });
        }
        let tlb_page = PageSize::new(u64_at(88)).map_err(|error| PageLogError::Description {
            name: name.to_owned(),
            reason: error.to_string(),
        })?;
        let description = Self {
            ram_bytes: u64_at(24),
            below_4g_bytes: u64_at(32),
            vcpus: u32_at(40),
            walks: flags & WALKS != 0,
            references: flags & REFERENCES != 0,
            only_between_marks: flags & ONLY_BETWEEN_MARKS != 0,
            interval_instructions: NonZeroU64::new(u64_at(48)),
            filter_pages: u32_at(56),
            tlb: TlbShape::of_head(u32_at(60), u32_at(64))?,
            tlb2: TlbShape::of_head(u32_at(68), u32_at(72))?,
            itlb: TlbShape::of_head(u32_at(76), u32_at(80))?,
            plugin_api: u32_at(84),
            tlb_page,
        };
        description.validate(name)?;
        Ok(description)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A machine of 6 GiB, half of it below 4 GiB, with two vCPUs.
    pub(crate) fn machine() -> Description {
        Description {
            ram_bytes: 6 << 30,
            below_4g_bytes: 3 << 30,
            vcpus: 2,
            walks: true,
            references: true,
            only_between_marks: false,
            interval_instructions: NonZeroU64::new(10_000_000),
            filter_pages: 64,
            tlb: Some(TlbShape::default()),
            tlb2: None,
            itlb: Some(TlbShape::new(16, 16).unwrap()),
            plugin_api: 1,
            tlb_page: PageSize::FOUR_KIB,
        }
    }

    #[test]
    fn a_description_survives_the_way() {
        let there = machine();
        assert_eq!(
            Description::of_bytes(&there.to_bytes(), "t").unwrap(),
            there
        );
    }

    #[test]
    fn ram_above_the_hole_begins_at_four_gib() {
        let machine = machine();
        let holds = |address: u64| machine.holds(PageNumber(address >> 12));
        assert!(holds(0) && holds((3 << 30) - 1) && holds(4 << 30) && holds((7 << 30) - 1));
        assert!(!holds(3 << 30) && !holds((4 << 30) - 1) && !holds(7 << 30));
        assert_eq!(machine.pages(), PageCount(6 << 18));
    }

    #[test]
    fn machines_that_cannot_be_are_refused() {
        let fault = |change: fn(&mut Description)| {
            let mut machine = machine();
            change(&mut machine);
            let error = Description::of_bytes(&machine.to_bytes(), "t").unwrap_err();
            error.to_string()
        };
        assert!(fault(|m| m.vcpus = 33).contains("33 vCPUs"));
        assert!(fault(|m| m.vcpus = 0).contains("0 vCPUs"));
        assert!(fault(|m| m.ram_bytes += 1).contains("whole number of pages"));
        assert!(fault(|m| m.ram_bytes = 1 << 30).contains("below 4 GiB"));
        assert!(fault(|m| m.below_4g_bytes = 5 << 30).contains("below 4 GiB"));
        assert!(fault(|m| m.ram_bytes = 1 << 44).contains("below 4 GiB"));
        assert!(fault(|m| m.filter_pages = 0).contains("filter of 0 pages"));
        assert!(fault(|m| m.tlb = None).contains("without a TLB"));
        assert!(fault(|m| m.tlb_page = PageSize::new(8192).unwrap()).contains("of 8192 bytes"));
        let mut bytes = machine().to_bytes();
        bytes[88 - Description::AT] = 1;
        let error = Description::of_bytes(&bytes, "t").unwrap_err();
        assert!(error.to_string().contains("4097 bytes"), "{error}");
        bytes = machine().to_bytes();
        bytes[44 - Description::AT] |= 8;
        let error = Description::of_bytes(&bytes, "t").unwrap_err();
        assert!(error.to_string().contains("flags 0xb"), "{error}");
        bytes = machine().to_bytes();
        bytes[64 - Description::AT] = 5;
        let error = Description::of_bytes(&bytes, "t").unwrap_err();
        assert!(
            error.to_string().contains("64 entries in 5 ways"),
            "{error}"
        );
    }

    #[test]
    fn a_tlb_has_sets_of_a_power_of_two() {
        assert_eq!("64x4".parse(), Ok(TlbShape::default()));
        assert_eq!("1536x12".parse::<TlbShape>().unwrap().sets(), 128);
        assert_eq!(TlbShape::default().to_string(), "64x4");
        for text in [
            "", "64", "0x1", "64x0", "48x4", "131072x4", "64x4x1", "-64x4",
        ] {
            let error = text.parse::<TlbShape>().unwrap_err().to_string();
            assert!(error.contains("is not a TLB shape"), "{error}");
        }
    }
}
