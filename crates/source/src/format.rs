//! The trace formats by name, and recognising a trace's format.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use crate::SourceError;
use crate::disk_csv::Layout;
use crate::error::excerpt;
use crate::lines::BYTE_ORDER_MARK;
use crate::{blkparse, ids, lackey, parquet, plimsoll, vscsi};

/// How a trace is laid out; `docs/formats.md` has the grammars.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// One page a line.
    Ids,
    /// Comma-separated values, one column of which is the page.
    Csv,
    /// libCacheSim's binary records of 24 bytes.
    OracleGeneral,
    /// What `valgrind --tool=lackey --trace-mem=yes` prints.
    Lackey,
    /// SCSI commands of a virtual disk, versions 1 and 2 of VMware's and CloudPhysics' records.
    Vscsi,
    /// Block requests of MSR Cambridge, comma-separated.
    Msr,
    /// Block requests of Alibaba's cloud, comma-separated.
    Alibaba,
    /// Block requests of Tencent's cloud, comma-separated.
    Tencent,
    /// What `blkparse` prints.
    Blkparse,
    /// A parquet file, one column of which is the page.
    Parquet,
    /// Our own compact binary format.
    Plimsoll,
}

impl Format {
    /// Every format.
    pub const ALL: [Self; 11] = [
        Self::Ids,
        Self::Csv,
        Self::OracleGeneral,
        Self::Lackey,
        Self::Vscsi,
        Self::Msr,
        Self::Alibaba,
        Self::Tencent,
        Self::Blkparse,
        Self::Parquet,
        Self::Plimsoll,
    ];

    /// The formats that are written, too.
    pub const WRITTEN: [Self; 4] = [Self::Ids, Self::Csv, Self::OracleGeneral, Self::Plimsoll];

    /// Whether the format is written, too.
    #[must_use]
    pub fn is_written(self) -> bool {
        Self::WRITTEN.contains(&self)
    }

    /// The name by which the command line knows the format.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ids => "ids",
            Self::Csv => "csv",
            Self::OracleGeneral => "oracle-general",
            Self::Lackey => "lackey",
            Self::Vscsi => "vscsi",
            Self::Msr => "msr",
            Self::Alibaba => "alibaba",
            Self::Tencent => "tencent",
            Self::Blkparse => "blkparse",
            Self::Parquet => "parquet",
            Self::Plimsoll => "plimsoll",
        }
    }

    /// Tells the format from a file's name, whatever its compression; `None` if the name does not say.
    #[must_use]
    pub fn of_name(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.to_ascii_lowercase();
        let mut parts = name.split('.').rev();
        let mut last = parts.next()?;
        if matches!(last, "gz" | "xz" | "zst") {
            last = parts.next()?;
        }
        // libCacheSim calls its files `x.oracleGeneral`, `x.oracleGeneral.bin`, `x.oracleGeneral.zst`.
        let oracle = |part: &str| part.contains("oraclegeneral") || part.contains("oracle-general");
        match last {
            "ids" => Some(Self::Ids),
            "csv" => Some(Self::Csv),
            "lackey" => Some(Self::Lackey),
            "vscsi" => Some(Self::Vscsi),
            "blkparse" => Some(Self::Blkparse),
            "parquet" => Some(Self::Parquet),
            "plimsoll" => Some(Self::Plimsoll),
            part if oracle(part) => Some(Self::OracleGeneral),
            "bin" if parts.next().is_some_and(oracle) => Some(Self::OracleGeneral),
            _ => None,
        }
    }

    /// Tells the format from the first bytes of a trace: a binary one by its magic number or
    /// its records, a text by its first line that says anything.
    ///
    /// `head` may end anywhere. An empty trace is one of `ids` without a reference.
    pub(crate) fn of_head(head: &[u8]) -> Option<Self> {
        if head.starts_with(&plimsoll::MAGIC) {
            return Some(Self::Plimsoll);
        }
        if head.starts_with(&parquet::MAGIC) {
            return Some(Self::Parquet);
        }
        if vscsi::is_head(head) {
            return Some(Self::Vscsi);
        }
        if head.contains(&0) {
            return None;
        }
        let line = head
            .strip_prefix(BYTE_ORDER_MARK)
            .unwrap_or(head)
            .split(|&byte| byte == b'\n')
            .find(|line| !ids::is_empty_line(line) && !line.starts_with(b"Input file "));
        match line {
            None => Some(Self::Ids),
            Some(line) if line.starts_with(b"==") || lackey::is_access(line) => Some(Self::Lackey),
            Some(line) if blkparse::is_event(line) => Some(Self::Blkparse),
            Some(line) if line.contains(&b',') => Some(Self::of_layout(line).unwrap_or(Self::Csv)),
            Some(line) if line.trim_ascii().first().is_some_and(u8::is_ascii_digit) => {
                Some(Self::Ids)
            }
            Some(_) => None,
        }
    }

    fn of_layout(line: &[u8]) -> Option<Self> {
        Layout::of_line(line).map(|layout| match layout {
            Layout::Msr => Self::Msr,
            Layout::Alibaba => Self::Alibaba,
            Layout::Tencent => Self::Tencent,
        })
    }

    /// The block format that a file named `.csv` is in truth. No such file reads as `csv`
    /// unless it is told its columns.
    pub(crate) fn of_csv_head(head: &[u8]) -> Option<Self> {
        let told = Self::of_head(head)?;
        matches!(told, Self::Msr | Self::Alibaba | Self::Tencent).then_some(told)
    }

    pub(crate) fn list() -> String {
        Self::ALL.map(Self::name).join(", ")
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
        let format = Self::ALL.into_iter().find(|format| format.name() == name);
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
        assert_eq!(of_name("a/b.ids"), Some(Format::Ids));
        assert_eq!(of_name("b.csv.gz"), Some(Format::Csv));
        assert_eq!(of_name("B.CSV"), Some(Format::Csv));
        assert_eq!(of_name("w.lackey.xz"), Some(Format::Lackey));
        assert_eq!(of_name("w.vscsi.gz"), Some(Format::Vscsi));
        assert_eq!(of_name("w.blkparse"), Some(Format::Blkparse));
        assert_eq!(of_name("w.parquet"), Some(Format::Parquet));
        assert_eq!(of_name("w.plimsoll.zst"), Some(Format::Plimsoll));
        for name in [
            "x.oracleGeneral",
            "x.oracleGeneral.bin",
            "x.oracleGeneral.bin.zst",
            "x.oracle-general.zst",
        ] {
            assert_eq!(of_name(name), Some(Format::OracleGeneral), "{name}");
        }
        for name in ["x.trace.gz", "x.bin", "ids_of_x", ".gz", "-", ""] {
            assert_eq!(of_name(name), None, "{name}");
        }
    }

    #[test]
    fn the_first_line_that_says_anything_tells_a_text_format() {
        let of_head = |head: &str| Format::of_head(head.as_bytes());
        assert_eq!(of_head("# pages\n\n12\n"), Some(Format::Ids));
        assert_eq!(of_head("  0x1f"), Some(Format::Ids));
        assert_eq!(of_head("\u{feff}12\n"), Some(Format::Ids));
        assert_eq!(of_head("\u{feff}1,usr,0,Read,7,2,4\n"), Some(Format::Msr));
        assert_eq!(of_head(""), Some(Format::Ids));
        assert_eq!(of_head("page,op\n1,r\n"), Some(Format::Csv));
        assert_eq!(of_head("==12== Lackey\n"), Some(Format::Lackey));
        assert_eq!(of_head("I  04001000,3\n"), Some(Format::Lackey));
        assert_eq!(of_head(" L 1ffe,8\n"), Some(Format::Lackey));
        assert_eq!(
            of_head("8,0 3 1 0.0 697 Q W 8 + 8 [x]\n"),
            Some(Format::Blkparse)
        );
        assert_eq!(
            of_head("Input file x\n  8,0 3 1 0.0 6 Q W 8 + 8"),
            Some(Format::Blkparse)
        );
        assert_eq!(of_head("1,usr,0,Read,7,2,4\n"), Some(Format::Msr));
        assert_eq!(of_head("\n419,W,8,4096,15\n"), Some(Format::Alibaba));
        assert_eq!(of_head("1538323200,8,16,0,1063\n"), Some(Format::Tencent));
        assert_eq!(of_head("5,8,16,0,1063\n"), Some(Format::Csv));
        assert_eq!(of_head("PAR1\0"), Some(Format::Parquet));
        assert_eq!(of_head("<html>\n"), None);
        assert_eq!(of_head("1\n\0"), None);
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = "vscsi2".parse::<Format>().unwrap_err().to_string();
        assert_eq!(
            error,
            "'vscsi2' is no trace format; there are: ids, csv, oracle-general, lackey, vscsi, \
             msr, alibaba, tencent, blkparse, parquet, plimsoll"
        );
        for format in Format::ALL {
            assert_eq!(format.name().parse::<Format>().unwrap(), format);
        }
    }
}
