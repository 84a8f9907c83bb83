//! Writing traces: `ids`, `csv` and `oracle-general`, plain, gzip or zstd.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use flate2::write::GzEncoder;
use plimsoll_flow::{PageSize, ReferenceBatch};

use crate::oracle_general::Records;
use crate::{Compression, Format, SourceError, csv, ids};

/// How to write a trace.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions {
    /// The format.
    pub format: Format,
    /// The compression.
    pub compression: Compression,
    /// Bytes in a page, which `oracle-general` records as each object's size
    /// (at most `u32::MAX` can be recorded, and is).
    pub page_size: PageSize,
}

/// A trace being written. Unless [`finish`](Self::finish) is called, it is left incomplete.
pub struct TraceWriter<'a> {
    name: String,
    out: Packed<'a>,
    content: Content,
}

/// The formats, with what each keeps between references.
enum Content {
    Ids,
    Csv,
    OracleGeneral { records: Records, page_bytes: u32 },
}

/// The compressors.
enum Packed<'a> {
    Plain(Box<dyn Write + 'a>),
    Gzip(GzEncoder<Box<dyn Write + 'a>>),
    Zstd(zstd::Encoder<'static, Box<dyn Write + 'a>>),
}

impl<'a> Packed<'a> {
    fn writer(&mut self) -> &mut (dyn Write + 'a) {
        match self {
            Self::Plain(out) => out,
            Self::Gzip(out) => out,
            Self::Zstd(out) => out,
        }
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Self::Plain(out) => Ok(out),
            Self::Gzip(out) => out.finish(),
            Self::Zstd(out) => out.finish(),
        }?
        .flush()
    }
}

/// Creates the trace at `path`, or overwrites it.
///
/// Without a `format` the name tells it, and `ids` is what is written if it does
/// not. The compression is told by the name: `.gz`, `.zst`, or none.
///
/// # Errors
///
/// [`SourceError::NotWritten`] and [`SourceError::CompressionNotWritten`] for what
/// is only read, with nothing created; [`SourceError::Create`]; and those of [`write()`].
pub fn create(
    path: &Path,
    format: Option<Format>,
    page_size: PageSize,
) -> Result<TraceWriter<'static>, SourceError> {
    let name = path.display().to_string();
    let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default();
    let options = WriteOptions {
        format: format.or(Format::of_name(path)).unwrap_or(Format::Ids),
        compression: match extension.to_ascii_lowercase().as_str() {
            "gz" => Compression::Gzip,
            "xz" => Compression::Xz,
            "zst" => Compression::Zstd,
            _ => Compression::Plain,
        },
        page_size,
    };
    check(&name, &options)?;
    match File::create(path) {
        Ok(file) => write(file, &name, &options),
        Err(source) => Err(SourceError::Create { name, source }),
    }
}

/// Writes a trace to any writer; `name` stands for it in errors.
///
/// # Errors
///
/// [`SourceError::NotWritten`] and [`SourceError::CompressionNotWritten`] for what
/// is only read, [`SourceError::Write`] if `out` refuses.
pub fn write<'a>(
    out: impl Write + 'a,
    name: &str,
    options: &WriteOptions,
) -> Result<TraceWriter<'a>, SourceError> {
    check(name, options)?;
    let content = match options.format {
        Format::Csv => Content::Csv,
        Format::OracleGeneral => Content::OracleGeneral {
            records: Records::default(),
            page_bytes: u32::try_from(options.page_size.bytes()).unwrap_or(u32::MAX),
        },
        _ => Content::Ids,
    };
    let failed = |source| SourceError::Write {
        name: name.to_owned(),
        source,
    };
    let out: Box<dyn Write + 'a> = Box::new(BufWriter::new(out));
    let mut out = match options.compression {
        Compression::Gzip => Packed::Gzip(GzEncoder::new(out, flate2::Compression::default())),
        Compression::Zstd => {
            Packed::Zstd(zstd::Encoder::new(out, zstd::DEFAULT_COMPRESSION_LEVEL).map_err(failed)?)
        }
        _ => Packed::Plain(out),
    };
    if let Content::Csv = content {
        csv::write_header(out.writer()).map_err(failed)?;
    }
    Ok(TraceWriter {
        name: name.to_owned(),
        out,
        content,
    })
}

fn check(name: &str, options: &WriteOptions) -> Result<(), SourceError> {
    if options.format == Format::Lackey {
        return Err(SourceError::NotWritten {
            format: options.format,
        });
    }
    if options.compression == Compression::Xz {
        return Err(SourceError::CompressionNotWritten {
            name: name.to_owned(),
        });
    }
    Ok(())
}

impl TraceWriter<'_> {
    /// Appends a batch's references.
    ///
    /// # Errors
    ///
    /// [`SourceError::Write`]; the trace is then of no use.
    pub fn write(&mut self, batch: &ReferenceBatch) -> Result<(), SourceError> {
        let out = self.out.writer();
        let mut references = batch.pages().iter().zip(batch.kinds());
        let result = match &mut self.content {
            Content::Ids => references.try_for_each(|(&page, _)| ids::write_reference(out, page)),
            Content::Csv => {
                references.try_for_each(|(&page, &kind)| csv::write_reference(out, page, kind))
            }
            Content::OracleGeneral { records, .. } => {
                references.for_each(|(&page, _)| records.push(page));
                Ok(())
            }
        };
        result.map_err(|source| SourceError::Write {
            name: self.name.clone(),
            source,
        })
    }

    /// Writes what is still held back and completes the trace.
    ///
    /// # Errors
    ///
    /// [`SourceError::Write`]; the trace is then of no use.
    pub fn finish(mut self) -> Result<(), SourceError> {
        let held_back = match &self.content {
            Content::OracleGeneral {
                records,
                page_bytes,
            } => records.write(*page_bytes, self.out.writer()),
            Content::Ids | Content::Csv => Ok(()),
        };
        held_back
            .and_then(|()| self.out.finish())
            .map_err(|source| SourceError::Write {
                name: self.name,
                source,
            })
    }
}

impl std::fmt::Debug for TraceWriter<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TraceWriter")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, Source, open};
    use plimsoll_flow::{AccessKind, PageNumber};

    #[test]
    fn what_is_written_is_read_in_every_format_and_compression() {
        let folder = tempfile::tempdir().unwrap();
        let references: Vec<_> = (0..40_000u64)
            .map(|index| {
                let kind = if index % 2 == 0 {
                    AccessKind::Read
                } else {
                    AccessKind::Write
                };
                (PageNumber(index * index % 1009), kind)
            })
            .collect();
        for (name, has_kinds) in [
            ("t.ids", false),
            ("t.csv.gz", true),
            ("t.oracleGeneral.bin.zst", false),
            ("t.unknown", false),
        ] {
            let path = folder.path().join(name);
            let mut writer = create(&path, None, PageSize::default()).unwrap();
            let mut batch = ReferenceBatch::new();
            for &(page, kind) in &references {
                batch.push(page, kind);
            }
            writer.write(&batch).unwrap();
            writer.finish().unwrap();
            let mut trace = open(&path, &Options::default()).unwrap();
            let mut read = Vec::new();
            while trace.next_batch(&mut batch).unwrap() {
                read.extend(
                    batch
                        .iter()
                        .map(|reference| (reference.page, reference.kind)),
                );
            }
            let expected: Vec<_> = references
                .iter()
                .map(|&(page, kind)| (page, if has_kinds { kind } else { AccessKind::Unknown }))
                .collect();
            assert!(read == expected, "{name}");
        }
    }

    #[test]
    fn what_is_only_read_is_refused_before_anything_is_created() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["t.lackey", "t.ids.xz"] {
            let path = folder.path().join(name);
            assert!(create(&path, None, PageSize::default()).is_err());
            assert!(!path.exists());
        }
    }
}
