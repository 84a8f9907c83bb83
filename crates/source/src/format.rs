//! The trace formats by name, and how a trace's format is told.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use crate::SourceError;
use crate::error::excerpt;
use crate::{ids, lackey};

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
}

impl Format {
    /// Every format.
    pub const ALL: [Self; 4] = [Self::Ids, Self::Csv, Self::OracleGeneral, Self::Lackey];

    /// The name by which the command line knows the format.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ids => "ids",
            Self::Csv => "csv",
            Self::OracleGeneral => "oracle-general",
            Self::Lackey => "lackey",
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
            part if oracle(part) => Some(Self::OracleGeneral),
            "bin" if parts.next().is_some_and(oracle) => Some(Self::OracleGeneral),
            _ => None,
        }
    }

    /// Tells a text format from the first bytes of a trace, by its first line that says anything.
    ///
    /// `head` may end anywhere. An empty trace is one of `ids` without a reference.
    pub(crate) fn of_head(head: &[u8]) -> Option<Self> {
        if head.contains(&0) {
            return None;
        }
        let line = head
            .split(|&byte| byte == b'\n')
            .find(|line| !ids::is_empty_line(line));
        match line {
            None => Some(Self::Ids),
            Some(line) if line.starts_with(b"==") || lackey::is_access(line) => Some(Self::Lackey),
            Some(line) if line.contains(&b',') => Some(Self::Csv),
            Some(line) if line.trim_ascii().first().is_some_and(u8::is_ascii_digit) => {
                Some(Self::Ids)
            }
            Some(_) => None,
        }
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
        assert_eq!(of_head(""), Some(Format::Ids));
        assert_eq!(of_head("page,op\n1,r\n"), Some(Format::Csv));
        assert_eq!(of_head("==12== Lackey\n"), Some(Format::Lackey));
        assert_eq!(of_head("I  04001000,3\n"), Some(Format::Lackey));
        assert_eq!(of_head(" L 1ffe,8\n"), Some(Format::Lackey));
        assert_eq!(of_head("<html>\n"), None);
        assert_eq!(of_head("1\n\0"), None);
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = "vscsi".parse::<Format>().unwrap_err().to_string();
        assert_eq!(
            error,
            "'vscsi' is no trace format; there are: ids, csv, oracle-general, lackey"
        );
        for format in Format::ALL {
            assert_eq!(format.name().parse::<Format>().unwrap(), format);
        }
    }
}
