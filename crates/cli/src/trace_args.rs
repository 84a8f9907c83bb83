//! Options for reading a recorded trace, shared by all verbs that read one.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Once;

use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use plimsoll_estimator::{CounterStream, Partial};
use plimsoll_flow::PageSize;
use plimsoll_observe::wss::begins_as_page_log;
use plimsoll_output::ReadingBar;
use plimsoll_output::exit::UsageError;
use plimsoll_output::{directory_of, printable, printable_path};
use plimsoll_source::{BlockEvent, Column, Format, Options, Progress, SourceError, Trace};

use plimsoll_protocol::size::ByteSize;

/// A bar that follows the reading of a trace.
pub(crate) fn reading_bar(progress: Progress) -> ReadingBar<impl Fn() -> u64> {
    ReadingBar::new(progress.total_bytes(), move || progress.read_bytes())
}

/// Whether both are one regular file, however it is named; it need not exist yet. `-` is none.
pub(crate) fn is_same_file(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| match path.canonicalize() {
        _ if path == Path::new("-") => None,
        Ok(path) => path.is_file().then_some(path),
        Err(_) => {
            let directory = directory_of(path).canonicalize().ok()?;
            Some(directory.join(path.file_name()?))
        }
    };
    place(one).is_some_and(|one| place(other) == Some(one))
}

/// A trace and how to read it. Flatten it into a verb's `Args`.
#[derive(Debug, Clone, clap::Args)]
pub struct TraceArgs {
    /// Trace to read, plain or compressed by bzip2, gzip, xz or zstd; `-` is standard input, `s3://BUCKET/KEY` an object of a store, found by the
    /// usual `AWS_` variables
    pub trace: PathBuf,
    /// Format of the trace [default: by its name and first bytes]
    #[arg(long, visible_alias = "from", value_parser = format_parser(Format::all().collect()))]
    pub format: Option<Format>,
    /// Bytes in a page, for formats that record addresses, offsets or blocks of unknown size: 4096, 64K, 2MiB [default: 4096]
    #[arg(long, value_parser = parse_page_size)]
    pub page_bytes: Option<PageSize>,
    /// CSV column of the page's number: the column's name, or its position from 1
    #[arg(long, value_name = "COLUMN")]
    pub page_column: Option<Column>,
    /// CSV column of a key, any text, instead of a page's number
    #[arg(long, value_name = "COLUMN", conflicts_with = "page_column")]
    pub key_column: Option<Column>,
    /// CSV column of the kind of access [default: op]
    #[arg(long, value_name = "COLUMN")]
    pub op_column: Option<Column>,
    /// Count instruction fetches of a lackey trace as reads; by default they are ignored
    #[arg(long)]
    pub instructions: bool,
    /// Read only the requests of this device of a trace of several disks [default: all, with separate pages]
    #[arg(long)]
    pub device: Option<String>,
    /// Event of a blkparse trace that is a reference: queued, issued or completed [default: Q]
    #[arg(long, value_parser = event_parser())]
    pub event: Option<BlockEvent>,
}

impl TraceArgs {
    /// Opens the trace.
    ///
    /// # Errors
    ///
    /// Those of [`plimsoll_source::open`], each of which names the trace. An option that the trace's format
    /// does not use is a [`UsageError`].
    pub fn open(&self) -> anyhow::Result<Trace<'static>> {
        self.open_with(&self.options())
    }

    /// Opens the trace with options of which a verb changed some.
    pub(crate) fn open_with(&self, options: &Options) -> anyhow::Result<Trace<'static>> {
        let opened = plimsoll_source::open(&self.trace, options);
        if let Ok(trace) = &opened {
            self.note_assumed_size(trace.format());
        }
        opened.map_err(|error| {
            let usage = match &error {
                SourceError::OptionNotUsed { .. } => Some(error.to_string()),
                SourceError::UnknownFormat { .. } => {
                    let what = self.made_by_us();
                    what.map(|what| format!("'{}' is no trace but {what}", self.label()))
                }
                _ => None,
            };
            usage.map_or_else(|| error.into(), |usage| UsageError(usage).into())
        })
    }

    /// Bytes in a page.
    pub fn page_size(&self) -> PageSize {
        self.page_bytes.unwrap_or(PageSize::FOUR_KIB)
    }

    /// Notes once that sizes in bytes are of an assumed page, if the trace has blocks of unknown size.
    fn note_assumed_size(&self, format: Format) {
        static NOTE: Once = Once::new();
        if self.page_bytes.is_none() && format.name() == "mooncake" {
            NOTE.call_once(|| {
                eprintln!(
                    "plimsoll: the size of a block is not in '{}': a page is a block, and sizes in bytes assume {} bytes a block; \
                     --page-bytes sets another",
                    self.label(),
                    self.page_size().bytes()
                );
            });
        }
    }

    /// Whether it is read from its beginning again: not a pipe, which has lost what was read of it.
    pub(crate) fn can_be_opened_again(&self) -> bool {
        self.trace.is_file() || self.trace.starts_with("s3:")
    }

    /// What else the file is that Plimsoll writes, and which verb reads it.
    fn made_by_us(&self) -> Option<&'static str> {
        if !self.can_be_opened_again() {
            return None;
        }
        let mut head = [0; 8];
        File::open(&self.trace).ok()?.read_exact(&mut head).ok()?;
        match &head {
            _ if begins_as_page_log(&self.trace) => Some("a page log: `wss` reads it"),
            CounterStream::MAGIC => Some("a record of counters: `mrc` reads it"),
            Partial::MAGIC => Some("a partial state: `mrc --merge` reads it"),
            _ => None,
        }
    }

    /// The first option given that only traces have; their page size may be that of what else is read.
    pub(crate) fn option_given(&self) -> Option<&'static str> {
        let given = [
            (self.format.is_some(), "--format"),
            (self.page_column.is_some(), "--page-column"),
            (self.key_column.is_some(), "--key-column"),
            (self.op_column.is_some(), "--op-column"),
            (self.instructions, "--instructions"),
            (self.device.is_some(), "--device"),
            (self.event.is_some(), "--event"),
        ];
        let mut given = given.into_iter().filter(|(is_given, _)| *is_given);
        given.next().map(|(_, option)| option)
    }

    /// The trace's name without directory and ending, printable.
    pub(crate) fn stem(&self) -> String {
        let name = self.trace.file_name().unwrap_or_default();
        let name = printable(&name.to_string_lossy());
        match name.split('.').next() {
            _ if self.trace == Path::new("-") => self.label(),
            Some(stem) if !stem.is_empty() => stem.to_owned(),
            _ => name,
        }
    }

    /// What errors call the trace, printable.
    pub(crate) fn label(&self) -> String {
        match self.trace.to_str() {
            Some("-") => "standard input".to_owned(),
            _ => printable_path(&self.trace),
        }
    }

    /// The options of the command line.
    pub(crate) fn options(&self) -> Options {
        Options {
            format: self.format,
            page_size: self.page_size(),
            page_column: self.page_column.clone(),
            key_column: self.key_column.clone(),
            op_column: self.op_column.clone(),
            instructions: self.instructions,
            device: self.device.clone(),
            block_event: self.event,
            ..Options::default()
        }
    }
}

/// Parses the name of one of the formats, which the help lists.
pub(crate) fn format_parser(
    formats: Vec<Format>,
) -> impl clap::builder::TypedValueParser<Value = Format> + use<> {
    let names = formats.into_iter().map(Format::name);
    PossibleValuesParser::new(names).try_map(|name| name.parse::<Format>())
}

/// Parses the character of a block request's event.
fn event_parser() -> impl clap::builder::TypedValueParser<Value = BlockEvent> {
    PossibleValuesParser::new(BlockEvent::ALL.map(BlockEvent::name))
        .try_map(|name| name.parse::<BlockEvent>())
}

/// Parses the size of a page.
pub(crate) fn parse_page_size(text: &str) -> anyhow::Result<PageSize> {
    let ByteSize(bytes) = text.parse()?;
    Ok(PageSize::new(bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_the_same_by_any_name_whether_it_exists_or_not() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("below")).unwrap();
        std::fs::write(at("there"), "").unwrap();
        std::os::unix::fs::symlink(at("there"), at("link")).unwrap();
        assert!(is_same_file(&at("link"), &at("below/../there")));
        assert!(is_same_file(&at("new"), &at("below/../new")));
        assert!(!is_same_file(&at("new"), &at("there")));
        assert!(!is_same_file(&at("none/new"), &at("none/new")));
        let null = Path::new("/dev/null");
        assert!(!is_same_file(null, null));
        let dash = Path::new("-");
        assert!(!is_same_file(dash, dash));
    }

    #[test]
    fn a_page_size_is_a_size_that_is_a_power_of_two() {
        let bytes = |text| parse_page_size(text).map(PageSize::bytes).ok();
        assert_eq!(bytes("4096"), Some(4096));
        assert_eq!(bytes("2MiB"), Some(2 << 20));
        for wrong in ["", "4097", "0", "-1", "3K"] {
            assert_eq!(bytes(wrong), None, "{wrong}");
        }
    }
}
