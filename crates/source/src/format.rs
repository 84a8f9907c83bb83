//! The table of trace formats: one row each, defined in the format's own file.
//!
//! To add a format, write its file with a [`FormatRow`] and add the row to [`ROWS`].

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use crate::error::excerpt;
use crate::row::{FormatRow, Head};
use crate::{
    Compression, Options, SourceError, TraceOption, blkparse, csv, disk_text, ids, lackey, lcs,
    mooncake, oracle_general, parquet, plimsoll, twitter, vscsi,
};

/// All formats. The content of a trace is tested against the rows from the last to the first, so general text formats
/// come first.
const ROWS: [FormatRow; 17] = [
    ids::ROW,
    csv::ROW,
    oracle_general::ROW,
    lackey::ROW,
    vscsi::ROW,
    disk_text::MSR,
    disk_text::ALIBABA,
    disk_text::TENCENT,
    disk_text::SYSTOR,
    disk_text::SPC,
    disk_text::FIU,
    blkparse::ROW,
    twitter::ROW,
    mooncake::ROW,
    lcs::ROW,
    parquet::ROW,
    plimsoll::ROW,
];

/// The format of a trace; `docs/formats.md` has the grammars.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Format(usize);

/// The format with that name.
const fn named(name: &str) -> Format {
    let mut index = 0;
    while index < ROWS.len() {
        if is_same(ROWS[index].name, name) {
            return Format(index);
        }
        index += 1;
    }
    panic!("no row has that name")
}

const fn is_same(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    let mut index = 0;
    while index < one.len() && index < other.len() && one[index] == other[index] {
        index += 1;
    }
    index == one.len() && index == other.len()
}

impl Format {
    /// One page per line.
    pub const IDS: Self = named("ids");
    /// Comma-separated values, one column of which is the page.
    pub const CSV: Self = named("csv");
    /// libCacheSim's binary records of 24 bytes.
    pub const ORACLE_GENERAL: Self = named("oracle-general");
    /// Output of `valgrind --tool=lackey --trace-mem=yes`.
    pub const LACKEY: Self = named("lackey");
    /// SCSI commands of a virtual disk, versions 1 and 2 of the records of VMware and CloudPhysics.
    pub const VSCSI: Self = named("vscsi");
    /// Block requests of MSR Cambridge, comma-separated.
    pub const MSR: Self = named("msr");
    /// Block requests of Alibaba's cloud, comma-separated.
    pub const ALIBABA: Self = named("alibaba");
    /// Block requests of Tencent's cloud, comma-separated.
    pub const TENCENT: Self = named("tencent");
    /// Block requests of a desktop infrastructure, published at SYSTOR '17, comma-separated.
    pub const SYSTOR: Self = named("systor");
    /// Block requests in the format of the Storage Performance Council, comma-separated.
    pub const SPC: Self = named("spc");
    /// Block requests with hashes of their contents, of Florida International University.
    pub const FIU: Self = named("fiu");
    /// Output of `blkparse`.
    pub const BLKPARSE: Self = named("blkparse");
    /// Requests of Twitter's caches, comma-separated.
    pub const TWITTER: Self = named("twitter");
    /// Requests to language models as lists of blocks of their prompts, a JSON object a line.
    pub const MOONCAKE: Self = named("mooncake");
    /// libCacheSim's binary records after a header, versions 1 to 8.
    pub const LCS: Self = named("lcs");
    /// A parquet file, one column of which is the page.
    pub const PARQUET: Self = named("parquet");
    /// Our own compact binary format.
    pub const PLIMSOLL: Self = named("plimsoll");

    /// All formats, in the order of the table.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> {
        (0..ROWS.len()).map(Self)
    }

    /// The formats that can be written as well as read.
    pub fn written() -> impl Iterator<Item = Self> {
        Self::all().filter(|format| format.is_written())
    }

    pub(crate) fn row(self) -> &'static FormatRow {
        const TABLE: &[FormatRow] = &ROWS;
        &TABLE[self.0]
    }

    /// Whether the format can be written as well as read.
    pub fn is_written(self) -> bool {
        self.row().writer.is_some()
    }

    /// The name of the format on the command line.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The options that the format uses, besides the page size.
    pub fn options(self) -> &'static [TraceOption] {
        self.row().options
    }

    /// Infers the format from a file's name, ignoring its compression; `None` if the name does not identify it.
    pub fn of_name(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.to_ascii_lowercase();
        let mut parts = name.split('.').rev();
        let mut last = parts.next()?;
        if Compression::of_extension(last).is_some() {
            last = parts.next()?;
        }
        let before = parts.next();
        Self::all().find(|format| (format.row().is_named)(last, before))
    }

    /// Infers the format from the first bytes of a trace: a binary one by its magic number or
    /// its records, a text by its first line with content.
    ///
    /// `head` may end anywhere. An empty trace is an `ids` trace without references.
    pub(crate) fn of_head(head: &[u8]) -> Option<Self> {
        let head = Head::of(head);
        Self::all()
            .rev()
            .find(|format| (format.row().is_head)(&head))
    }

    /// Whether files of another format go by its name as well.
    pub(crate) fn shares_name(self) -> bool {
        Self::all().any(|other| other.is_also_named(self))
    }

    /// The format of a file that is named as one of this format. A file of another format that goes by its name cannot be read
    /// as this one, but for `csv` with a selection of columns.
    pub(crate) fn or_of_head(self, head: &[u8]) -> Self {
        let other = Self::of_head(head).filter(|other| other.is_also_named(self));
        other.unwrap_or(self)
    }

    fn is_also_named(self, named: Self) -> bool {
        self.row().also_named.contains(&named.name())
    }

    /// Refuses options that the format does not use.
    pub(crate) fn check(self, name: &str, options: &Options) -> Result<(), SourceError> {
        let unused =
            |option: &TraceOption| option.is_given(options) && !self.options().contains(option);
        match TraceOption::ALL.into_iter().find(unused) {
            None => Ok(()),
            Some(option) => {
                let users = Self::all().filter(|format| format.options().contains(&option));
                let users: Vec<_> = users.map(Self::name).collect();
                Err(SourceError::OptionNotUsed {
                    name: name.to_owned(),
                    format: self,
                    option,
                    users: users.join(", "),
                })
            }
        }
    }

    pub(crate) fn list() -> String {
        let names: Vec<_> = Self::all().map(Self::name).collect();
        names.join(", ")
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Format {
    type Err = SourceError;

    fn from_str(name: &str) -> Result<Self, SourceError> {
        let format = Self::all().find(|format| format.name() == name);
        format.ok_or_else(|| SourceError::NoSuchFormat {
            name: excerpt(name.as_bytes()).trim_matches('\'').to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_tells_the_format_whatever_the_compression() {
        let of_name = |name| Format::of_name(Path::new(name));
        assert_eq!(of_name("a/b.ids"), Some(Format::IDS));
        assert_eq!(of_name("b.csv.gz"), Some(Format::CSV));
        assert_eq!(of_name("B.CSV"), Some(Format::CSV));
        assert_eq!(of_name("w.lackey.xz"), Some(Format::LACKEY));
        assert_eq!(of_name("w.vscsi.gz"), Some(Format::VSCSI));
        assert_eq!(of_name("w.blkparse"), Some(Format::BLKPARSE));
        assert_eq!(of_name("w.spc.bz2"), Some(Format::SPC));
        assert_eq!(of_name("w.lcs.zst"), Some(Format::LCS));
        assert_eq!(of_name("w.jsonl"), Some(Format::MOONCAKE));
        assert_eq!(of_name("w.parquet"), Some(Format::PARQUET));
        assert_eq!(of_name("w.plimsoll.zst"), Some(Format::PLIMSOLL));
        for name in [
            "x.oracleGeneral",
            "x.oracleGeneral.bin",
            "x.oracleGeneral.bin.zst",
            "x.oracle-general.zst",
        ] {
            assert_eq!(of_name(name), Some(Format::ORACLE_GENERAL), "{name}");
        }
        for name in ["x.trace.gz", "x.bin", "ids_of_x", ".gz", "-", ""] {
            assert_eq!(of_name(name), None, "{name}");
        }
    }

    #[test]
    fn the_first_line_that_says_anything_tells_a_text_format() {
        let of_head = |head: &str| Format::of_head(head.as_bytes());
        assert_eq!(of_head("# pages\n\n12\n"), Some(Format::IDS));
        assert_eq!(of_head("  0x1f"), Some(Format::IDS));
        assert_eq!(of_head("\u{feff}12\n"), Some(Format::IDS));
        assert_eq!(of_head("\u{feff}1,usr,0,Read,7,2,4\n"), Some(Format::MSR));
        assert_eq!(of_head(""), Some(Format::IDS));
        assert_eq!(of_head("page,op\n1,r\n"), Some(Format::CSV));
        assert_eq!(of_head("==12== Lackey\n"), Some(Format::LACKEY));
        assert_eq!(of_head("I  04001000,3\n"), Some(Format::LACKEY));
        assert_eq!(of_head(" L 1ffe,8\n"), Some(Format::LACKEY));
        assert_eq!(
            of_head("8,0 3 1 0.0 697 Q W 8 + 8 [x]\n"),
            Some(Format::BLKPARSE)
        );
        assert_eq!(
            of_head("Input file x\n  8,0 3 1 0.0 6 Q W 8 + 8"),
            Some(Format::BLKPARSE)
        );
        assert_eq!(of_head("1,usr,0,Read,7,2,4\n"), Some(Format::MSR));
        assert_eq!(of_head("\n419,W,8,4096,15\n"), Some(Format::ALIBABA));
        assert_eq!(of_head("1538323200,8,16,0,1063\n"), Some(Format::TENCENT));
        assert_eq!(of_head("5,8,16,0,1063\n"), Some(Format::CSV));
        assert_eq!(of_head("5.25,0.1,,3,512,512\n"), Some(Format::SYSTOR));
        assert_eq!(of_head("0,8,512,W,0.5,x\n"), Some(Format::SPC));
        assert_eq!(of_head("0,8,512,W,5\n"), Some(Format::CSV));
        assert_eq!(of_head("0,a:b,c,12,34,5,get,0\n"), Some(Format::TWITTER));
        assert_eq!(
            of_head(r#"{"timestamp": 0, "hash_ids": [1, 2]}"#),
            Some(Format::MOONCAKE)
        );
        assert_eq!(of_head("PAR1\0"), Some(Format::PARQUET));
        assert_eq!(of_head("<html>\n"), None);
        assert_eq!(of_head("1\n\0"), None);
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = "vscsi2".parse::<Format>().unwrap_err().to_string();
        let known = error.strip_prefix("'vscsi2' is not a trace format; known formats: ");
        let known: Vec<_> = known.unwrap().split(", ").collect();
        assert_eq!(known, ROWS.map(|row| row.name));
        for format in Format::all() {
            assert_eq!(format.name().parse::<Format>().unwrap(), format);
        }
    }

    #[test]
    fn the_table_of_the_documentation_has_every_format() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/formats.md");
        let page = std::fs::read_to_string(page).unwrap();
        for format in Format::all() {
            let row = page
                .lines()
                .find(|line| line.starts_with(&format!("| [`{format}`](#")));
            let row = row.unwrap_or_else(|| panic!("docs/formats.md lacks {format}"));
            let written = if format.is_written() { "yes" } else { "no" };
            assert!(row.ends_with(&format!("| yes | {written} |")), "{row}");
        }
    }

    #[test]
    fn an_option_that_the_format_does_not_use_is_refused() {
        let options = Options {
            device: Some("sda".to_owned()),
            ..Options::default()
        };
        for format in Format::all() {
            let checked = format.check("t", &options);
            let is_used = format.options().contains(&TraceOption::Device);
            assert_eq!(checked.is_ok(), is_used, "{format}");
        }
        let error = Format::IDS.check("t", &options).unwrap_err().to_string();
        let users = error.strip_prefix("t: --device is not used by ids traces, only by: ");
        let users: Vec<_> = users.unwrap().split(", ").collect();
        let takes_device = |row: &&FormatRow| row.options.contains(&TraceOption::Device);
        let rows: Vec<_> = ROWS
            .iter()
            .filter(takes_device)
            .map(|row| row.name)
            .collect();
        assert_eq!(users, rows);
        assert!(Format::IDS.check("t", &Options::default()).is_ok());
    }
}
