//! Where a verb's result goes and in which format: `-o FORMAT`, `--out FILE`.

use std::ffi::OsStr;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;

use crate::bail_usage;
use crate::file::{directory_of, write_file};
use crate::text::printable_path;

/// Output formats of a verb that can draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Columns for people to read
    Table,
    /// Comma-separated values with a header line
    Csv,
    /// One JSON object with "schema": 1
    Json,
    /// A picture as scalable vector graphics
    Svg,
    /// The same picture as PNG
    Png,
}

impl Format {
    /// Whether the result is a chart, which crate `plot` draws.
    pub fn is_picture(self) -> bool {
        matches!(self, Self::Svg | Self::Png)
    }
}

/// Output formats of a verb that cannot draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum TextFormat {
    /// Columns and sentences for people to read
    #[default]
    Table,
    /// Comma-separated values with a header line; sizes in bytes
    Csv,
    /// JSON with "schema": 1
    Json,
}

/// `-o` of a verb that cannot draw.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct TextFormatArg {
    /// Output format
    #[arg(
        short = 'o',
        long,
        value_enum,
        value_name = "FORMAT",
        default_value_t,
        hide_default_value = true
    )]
    pub output: TextFormat,
}

impl TextFormatArg {
    /// Writes a result as requested; only that form of it is made.
    ///
    /// # Errors
    ///
    /// Those of making it and of writing.
    pub fn write(
        self,
        out: &mut dyn Write,
        table: impl FnOnce() -> anyhow::Result<String>,
        csv: impl FnOnce() -> anyhow::Result<String>,
        json: &impl Serialize,
    ) -> anyhow::Result<()> {
        let text = match self.output {
            TextFormat::Table => table()?,
            TextFormat::Csv => csv()?,
            TextFormat::Json => json_line(json)?,
        };
        Ok(out.write_all(text.as_bytes())?)
    }
}

/// A value as a line of JSON.
///
/// # Errors
///
/// If it cannot be serialised.
pub fn json_line(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string(value)? + "\n")
}

/// A line of JSON for each value; `null` if there is none.
///
/// # Errors
///
/// If one cannot be serialised.
pub fn json_lines<T: Serialize>(values: impl IntoIterator<Item = T>) -> anyhow::Result<String> {
    let lines = values.into_iter().map(|value| json_line(&value));
    let text = lines.collect::<anyhow::Result<String>>()?;
    Ok(if text.is_empty() {
        "null\n".to_owned()
    } else {
        text
    })
}

/// Output formats of a verb whose result has no lines of equal shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum TableOrJson {
    /// Columns for people to read
    #[default]
    Table,
    /// JSON with "schema": 1
    Json,
}

/// `-o` of a verb whose result has no lines of equal shape.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct TableOrJsonArg {
    /// Output format
    #[arg(
        short = 'o',
        long,
        value_enum,
        value_name = "FORMAT",
        default_value_t,
        hide_default_value = true
    )]
    pub output: TableOrJson,
}

impl TableOrJsonArg {
    /// Writes a result as requested; only that form of it is made.
    ///
    /// # Errors
    ///
    /// Those of making it and of writing.
    pub fn write(
        self,
        out: &mut dyn Write,
        table: impl FnOnce() -> String,
        json: &impl Serialize,
    ) -> anyhow::Result<()> {
        let text = match self.output {
            TableOrJson::Table => table(),
            TableOrJson::Json => json_line(json)?,
        };
        Ok(out.write_all(text.as_bytes())?)
    }
}

/// `-o` and `--out` of a verb that can draw.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct OutputArgs {
    /// Output format [default: by the ending of --out, else table]
    #[arg(short = 'o', long, value_enum, value_name = "FORMAT")]
    output: Option<Format>,
    /// File to write instead of standard output; it is replaced atomically. `-` is standard output
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Endings of files that are written in no format of ours.
const FOREIGN_ENDINGS: [&str; 10] = [
    "gz", "zst", "xz", "bz2", "parquet", "jpg", "jpeg", "svgz", "pdf", "webp",
];

impl OutputArgs {
    /// The format requested by name or by the ending of the file's name.
    pub fn format(&self) -> Format {
        let format = self.output.or_else(|| self.format_of_ending());
        format.unwrap_or(Format::Table)
    }

    fn format_of_ending(&self) -> Option<Format> {
        let ending = self.path()?.extension()?.to_str()?;
        Format::from_str(ending, true).ok()
    }

    /// The file to write instead of standard output.
    pub fn path(&self) -> Option<&Path> {
        self.out.as_deref().filter(|&out| out != Path::new("-"))
    }

    /// Checks, before the work, that its result can be written.
    ///
    /// # Errors
    ///
    /// [`UsageError`](crate::exit::UsageError) for a picture that would go to a terminal, for
    /// a file in a directory that does not exist, and for one whose ending promises another format.
    pub fn check(&self) -> anyhow::Result<()> {
        let ending = self.path().and_then(Path::extension);
        let is_foreign = |ending: &&OsStr| {
            let mut foreign = FOREIGN_ENDINGS.iter();
            foreign.any(|foreign| ending.eq_ignore_ascii_case(foreign))
        };
        if let (None, Some(ending)) = (self.output, ending.filter(is_foreign)) {
            let ending = ending.display();
            bail_usage!("--out: no output format is '.{ending}': name one with -o");
        }
        if let (Some(format), Some(other)) = (self.output, self.format_of_ending())
            && format != other
            && (format.is_picture() || other.is_picture())
        {
            bail_usage!("--out: the file's ending is of another format than -o");
        }
        let picture = self.format().is_picture();
        match self.path() {
            None if picture && std::io::stdout().is_terminal() => {
                bail_usage!("a picture is not for a terminal: name a file with --out FILE")
            }
            Some(out) if !directory_of(out).is_dir() => {
                bail_usage!("--out {}: there is no such directory", printable_path(out))
            }
            _ => Ok(()),
        }
    }

    /// Writes the result to the file of `--out`, or to `out`.
    ///
    /// # Errors
    ///
    /// The cause with the file's name; an older file of that name is then as it was.
    pub fn write(&self, content: &[u8], out: &mut dyn Write) -> anyhow::Result<()> {
        match self.path() {
            Some(path) => write_file(path, content),
            None => Ok(out.write_all(content)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(format: Option<Format>, out: Option<&str>) -> OutputArgs {
        OutputArgs {
            output: format,
            out: out.map(PathBuf::from),
        }
    }

    #[test]
    fn the_files_ending_stands_in_for_a_format() {
        assert_eq!(args(None, None).format(), Format::Table);
        assert_eq!(args(None, Some("a/b.PNG")).format(), Format::Png);
        assert_eq!(args(None, Some("a/b.txt")).format(), Format::Table);
        assert_eq!(args(Some(Format::Csv), Some("b.svg")).format(), Format::Csv);
    }

    #[test]
    fn an_ending_that_promises_another_format_needs_one_by_name() {
        for name in ["curve.csv.gz", "curve.PARQUET"] {
            assert!(args(None, Some(name)).check().is_err(), "{name}");
            args(Some(Format::Csv), Some(name)).check().unwrap();
        }
        args(None, Some("curve.txt")).check().unwrap();
        assert!(args(Some(Format::Svg), Some("curve.PNG")).check().is_err());
        args(Some(Format::Svg), Some("curve.SVG")).check().unwrap();
    }

    #[test]
    fn a_dash_is_standard_output() {
        let args = args(None, Some("-"));
        assert_eq!(args.path(), None);
        args.check().unwrap();
        let mut out = Vec::new();
        args.write(b"curve", &mut out).unwrap();
        assert_eq!(out, b"curve");
    }

    #[test]
    fn a_file_in_a_missing_directory_is_refused_before_the_work() {
        let lost = args(None, Some("/nonexistent/curve.csv"))
            .check()
            .unwrap_err();
        assert!(lost.to_string().contains("no such directory"), "{lost}");
    }
}
