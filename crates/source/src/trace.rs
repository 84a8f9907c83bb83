//! Opens a recorded trace: decompresses it, recognises its format, reads it.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Cursor, Read};
use std::path::Path;
use std::sync::Arc;

use plimsoll_flow::{ReferenceBatch, Source};

use crate::bytes_at::{OBJECTS, ReadAt};
use crate::compression::{Compression, decompressed};
use crate::error::{excerpt, name_of};
use crate::lines::read_full;
#[cfg(feature = "s3")]
use crate::object::Object;
use crate::progress::{CountingReader, Progress};
use crate::row::{BoxedReading, OpenSeeking, Opening};
use crate::{Format, Options, SourceError};

/// Number of bytes of a trace that are inspected to recognise its format.
const HEAD_BYTES: usize = 4096;

/// An opened trace: a [`Source`] with its format and compression.
pub struct Trace<'a> {
    source: BoxedReading<'a>,
    format: Format,
    compression: Compression,
    progress: Progress,
    at_end: bool,
    name: String,
    /// The only device that is read.
    device: Option<String>,
}

impl Trace<'_> {
    /// The format, recognised or given.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The detected compression of the trace.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// Number of requests so far that made no reference because they neither read nor wrote, or had no
    /// bytes. Requests of devices and events that are not selected are not counted.
    pub fn skipped(&self) -> u64 {
        self.source.skipped()
    }

    /// Names of the groups so far, by number: of the devices, if those were asked for. Requests have no names.
    pub fn groups(&self) -> Vec<String> {
        self.source.groups()
    }

    /// Returns a handle that shows the progress of reading from now on.
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// Refuses, at the end, a device that did not occur: its name is probably wrong.
    fn check_device(&self) -> Result<(), SourceError> {
        match &self.device {
            Some(device) if self.source.groups().is_empty() => Err(SourceError::NoSuchDevice {
                name: self.name.clone(),
                device: device.clone(),
            }),
            _ => Ok(()),
        }
    }
}

impl std::fmt::Debug for Trace<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trace")
            .field("format", &self.format)
            .field("compression", &self.compression)
            .field("progress", &self.progress)
            .field("at_end", &self.at_end)
            .finish_non_exhaustive()
    }
}

impl Source for Trace<'_> {
    type Error = SourceError;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        if self.at_end {
            batch.advance();
            return Ok(false);
        }
        let result = match self.source.next_batch(batch) {
            Ok(false) => self.check_device().map(|()| false),
            result => result,
        };
        self.at_end = !matches!(result, Ok(true));
        result
    }
}

/// Opens the trace at `path`; `-` is standard input, and with the feature `s3` `s3://BUCKET/KEY` an object of a store, found by the
/// variables of the environment that begin with `AWS_`.
///
/// # Errors
///
/// [`SourceError::Open`] if there is no such file or object, or if the store refuses it, and the errors of [`read`].
pub fn open(path: &Path, options: &Options) -> Result<Trace<'static>, SourceError> {
    if path == Path::new("-") {
        return read_counted(io::stdin(), None, "standard input", None, options);
    }
    let name = name_of(path);
    let of = |source| SourceError::Open {
        name: name.clone(),
        source,
    };
    let format_of_name = Format::of_name(path);
    if let Some(address) = path.to_str().filter(|path| path.starts_with(OBJECTS)) {
        return open_object(address, std::env::vars_os(), format_of_name, options);
    }
    let file = File::open(path).map_err(of)?;
    let metadata = file.metadata().map_err(of)?;
    let length = metadata.is_file().then_some(metadata.len());
    let file = Arc::new(file);
    if let Some(length) = length
        && let Some(trace) = seek(file.clone(), length, &name, format_of_name, options)?
    {
        return Ok(trace);
    }
    read_counted(file, length, &name, format_of_name, options)
}

#[cfg(feature = "s3")]
pub(crate) fn open_object(
    address: &str,
    variables: impl Iterator<Item = (OsString, OsString)>,
    format_of_name: Option<Format>,
    options: &Options,
) -> Result<Trace<'static>, SourceError> {
    let object = Object::open(address, variables).map_err(|source| SourceError::Open {
        name: address.to_owned(),
        source,
    })?;
    let length = object.length_bytes();
    let object = Arc::new(object);
    match seek(object.clone(), length, address, format_of_name, options)? {
        Some(trace) => Ok(trace),
        None => read_counted(
            object.stream(),
            Some(length),
            address,
            format_of_name,
            options,
        ),
    }
}

#[cfg(not(feature = "s3"))]
fn open_object(
    address: &str,
    _: impl Iterator<Item = (OsString, OsString)>,
    _: Option<Format>,
    _: &Options,
) -> Result<Trace<'static>, SourceError> {
    Err(SourceError::Open {
        name: address.to_owned(),
        source: io::Error::new(
            io::ErrorKind::Unsupported,
            "built without the feature s3, by which objects of stores are read",
        ),
    })
}

/// Opens a trace of a format that is read by seeking; `None` if it is of none.
fn seek(
    file: Arc<dyn ReadAt>,
    length_bytes: u64,
    name: &str,
    format_of_name: Option<Format>,
    options: &Options,
) -> Result<Option<Trace<'static>>, SourceError> {
    let found = seekable(&*file, options.format.or(format_of_name));
    let found = found.map_err(|source| SourceError::Read {
        name: name.to_owned(),
        offset_bytes: 0,
        source,
    })?;
    let Some((format, open)) = found else {
        return Ok(None);
    };
    format.check(name, options)?;
    let progress = Progress::of(Some(length_bytes));
    Ok(Some(Trace {
        source: open(file, length_bytes, name, &progress, options)?,
        format,
        compression: Compression::Plain,
        progress,
        at_end: false,
        name: name.to_owned(),
        device: options.device.clone(),
    }))
}

/// Reads a trace from any reader; `name` identifies it in errors.
///
/// # Errors
///
/// [`SourceError::UnknownFormat`] if the format is neither given nor recognised from the
/// first bytes, [`SourceError::Read`] if those cannot be read,
/// [`SourceError::NotSeekable`] for `parquet`, and for CSV [`SourceError::Line`] if
/// the selected columns do not exist.
pub fn read<'a>(
    input: impl Read + Send + 'a,
    name: &str,
    options: &Options,
) -> Result<Trace<'a>, SourceError> {
    read_counted(input, None, name, None, options)
}

/// The format of a file that is read by seeking, and how: the expected one, otherwise any, if the file begins with its magic
/// number. A file that is compressed as a whole does not.
fn seekable(
    file: &dyn ReadAt,
    expected: Option<Format>,
) -> io::Result<Option<(Format, OpenSeeking)>> {
    for format in Format::all() {
        if expected.is_some_and(|expected| expected != format) {
            continue;
        }
        if let Opening::Seek { magic, open } = format.row().opening {
            let mut head = vec![0; magic.len()];
            if file.read_at(&mut head, 0)? == magic.len() && head == magic {
                return Ok(Some((format, open)));
            }
        }
    }
    Ok(None)
}

fn read_counted<'a>(
    input: impl Read + Send + 'a,
    length_bytes: Option<u64>,
    name: &str,
    format_of_name: Option<Format>,
    options: &Options,
) -> Result<Trace<'a>, SourceError> {
    let progress = Progress::of(length_bytes);
    let failed = |source| SourceError::Read {
        name: name.to_owned(),
        offset_bytes: 0,
        source,
    };
    let counted = CountingReader {
        input,
        progress: progress.clone(),
    };
    let (mut input, compression) = decompressed(counted).map_err(failed)?;
    let format = match (options.format, format_of_name) {
        (Some(format), _) => format,
        (None, Some(format)) if !format.shares_name() => format,
        (None, of_name) => {
            let mut head = vec![0; HEAD_BYTES];
            let (length, result) = read_full(&mut input, &mut head);
            result.map_err(failed)?;
            head.truncate(length);
            let told = match of_name {
                Some(csv) if options.page_column.is_some() || options.key_column.is_some() => {
                    Some(csv)
                }
                Some(named) => Some(named.or_of_head(&head)),
                None => Format::of_head(&head),
            };
            let format = told.ok_or_else(|| SourceError::UnknownFormat {
                name: name.to_owned(),
                found: excerpt(&head),
            })?;
            input = Box::new(Cursor::new(head).chain(input));
            format
        }
    };
    format.check(name, options)?;
    let source = match format.row().opening {
        Opening::Stream(open) => open(input, name, options)?,
        Opening::Seek { magic, .. }
            if length_bytes.is_some() && compression == Compression::Plain =>
        {
            return Err(SourceError::Table {
                name: name.to_owned(),
                row: 0,
                reason: format!(
                    "it does not begin as a {format} file does, with {}",
                    excerpt(magic)
                ),
            });
        }
        Opening::Seek { .. } => {
            return Err(SourceError::NotSeekable {
                name: name.to_owned(),
                format,
            });
        }
    };
    Ok(Trace {
        source,
        format,
        compression,
        progress,
        at_end: false,
        name: name.to_owned(),
        device: options.device.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn pages(trace: &mut Trace) -> Vec<u64> {
        let mut batch = ReferenceBatch::new();
        let mut pages = Vec::new();
        while trace.next_batch(&mut batch).unwrap() {
            pages.extend(batch.pages().iter().map(|page| page.0));
        }
        pages
    }

    #[test]
    fn format_and_compression_are_told_and_progress_counts_raw_bytes() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let text: String = (0..100_000).map(|page| format!("{}\n", page % 7)).collect();
        let packed = zstd::encode_all(text.as_bytes(), 1).unwrap();
        file.write_all(&packed).unwrap();
        let mut trace = open(file.path(), &Options::default()).unwrap();
        assert_eq!(trace.format(), Format::IDS);
        assert_eq!(trace.compression(), Compression::Zstd);
        let progress = trace.progress();
        assert_eq!(progress.total_bytes(), Some(packed.len() as u64));
        assert_eq!(pages(&mut trace).len(), 100_000);
        assert_eq!(progress.read_bytes(), packed.len() as u64);
    }

    #[test]
    fn what_cannot_be_told_is_refused_with_the_formats() {
        let error = read(&b"\x7fELF\0"[..], "prog", &Options::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "prog: unknown format, it begins with '\\x7fELF\\x00'; \
             use --format with one of: ids, csv, oracle-general, lackey, vscsi, msr, alibaba, tencent, \
             systor, spc, fiu, blkparse, twitter, mooncake, lcs, parquet, plimsoll"
        );
        let missing = open(Path::new("/no/such/trace"), &Options::default()).unwrap_err();
        assert!(
            missing
                .to_string()
                .starts_with("cannot open '/no/such/trace': ")
        );
    }

    #[test]
    fn a_file_that_is_parquet_by_name_alone_is_no_matter_of_pipes() {
        let mut file = tempfile::Builder::new()
            .suffix(".parquet")
            .tempfile()
            .unwrap();
        for (text, fault) in [
            (
                &b""[..],
                "row 0: it does not begin as a parquet file does, with 'PAR1'",
            ),
            (
                b"1\n2\n",
                "row 0: it does not begin as a parquet file does, with 'PAR1'",
            ),
            (
                b"\x1f\x8b\x08",
                "parquet is read from its end: it must be an uncompressed regular file",
            ),
        ] {
            file.as_file().set_len(0).unwrap();
            std::io::Seek::rewind(&mut file).unwrap();
            file.write_all(text).unwrap();
            let error = open(file.path(), &Options::default())
                .unwrap_err()
                .to_string();
            assert!(error.ends_with(fault), "{error}");
        }
    }

    #[test]
    fn after_a_fault_the_good_references_are_there_and_the_source_is_at_its_end() {
        let mut trace = read(&b"1\n2\nx\n3\n"[..], "t", &Options::default()).unwrap();
        let mut batch = ReferenceBatch::new();
        let error = trace.next_batch(&mut batch).unwrap_err();
        assert!(matches!(error, SourceError::Line { line: 3, .. }));
        assert_eq!(batch.len(), 2);
        assert!(!trace.next_batch(&mut batch).unwrap());
        assert!(batch.is_empty());
        assert_eq!(batch.start().0, 2);
    }

    #[cfg(feature = "s3")]
    #[test]
    fn a_trace_in_a_store_is_read_as_from_a_file() {
        use crate::drained::references_of;
        use crate::object::tests as object;
        use plimsoll_flow::PageSize;

        let text: String = (0..700_000_u64)
            .map(|at| format!("{}\n", at * at % 4099))
            .collect();
        let packed = zstd::encode_all(text.as_bytes(), 1).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let table = folder.path().join("t.parquet");
        let mut writer = crate::create(&table, None, PageSize::FOUR_KIB).unwrap();
        let mut source = crate::read(text.as_bytes(), "t", &Options::default()).unwrap();
        let mut batch = ReferenceBatch::new();
        while source.next_batch(&mut batch).unwrap() {
            writer.write(&batch).unwrap();
        }
        writer.finish().unwrap();
        let table = std::fs::read(table).unwrap();
        for (contents, format) in [
            (text.clone().into_bytes(), Format::IDS),
            (packed, Format::IDS),
            (table, Format::PARQUET),
            (Vec::new(), Format::IDS),
        ] {
            let length = contents.len() as u64;
            let store = object::store(contents, object::Fault::None);
            let options = Options {
                format: Some(format),
                ..Options::default()
            };
            let mut trace =
                open_object(object::ADDRESS, object::variables(&store), None, &options).unwrap();
            assert_eq!(trace.progress().total_bytes(), Some(length));
            let pages: Vec<u64> = references_of(&mut trace)
                .unwrap()
                .iter()
                .map(|it| it.0)
                .collect();
            let expected = if length == 0 { 0 } else { 700_000 };
            assert_eq!(pages.len(), expected);
            assert!((0..).zip(&pages).all(|(at, page)| *page == at * at % 4099));
        }
    }
}
