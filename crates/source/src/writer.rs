//! Writing traces: `ids`, `csv`, `oracle-general`, `parquet` and `plimsoll`, plain, gzip or zstd.
//!
//! A file gets its final name only when it is complete: until then it has a temporary name
//! in the same directory, and is removed if the writer is dropped. Data is not synced, so after a
//! crash of the machine the file may be incomplete.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use flate2::write::GzEncoder;
use plimsoll_flow::{PageSize, ReferenceBatch};
use tempfile::TempPath;

use crate::error::name_of;
use crate::row::{MakeWriter, Opening};
use crate::writing::ContentWriter;
use crate::{Compression, Format, SourceError};

/// Options of writing a trace.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions {
    /// The format.
    pub format: Format,
    /// The compression.
    pub compression: Compression,
    /// Bytes in a page, which `oracle-general` records as each object's size
    /// (limited to `u32::MAX`).
    pub page_size: PageSize,
}

/// A trace being written. Unless [`finish`](Self::finish) is called, an existing file of that name is
/// unchanged, and any other output has received an incomplete trace.
pub struct TraceWriter<'a> {
    name: String,
    out: Packed<'a>,
    content: Box<dyn ContentWriter>,
    partial: Option<Partial>,
}

/// A file with a temporary name, which is removed unless it gets its final name.
struct Partial {
    file: TempPath,
    path: PathBuf,
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
/// Without a `format` the name determines it, and the default is `ids`.
/// The name also determines the compression: `.gz`, `.zst`, or none.
///
/// # Errors
///
/// [`SourceError::NotWritten`], [`SourceError::CompressionNotWritten`] and [`SourceError::NotCompressed`] for formats and
/// compressions that can only be read, and for formats that are not compressed, with nothing created;
/// [`SourceError::Create`]; and those of [`write()`].
pub fn create(
    path: &Path,
    format: Option<Format>,
    page_size: PageSize,
) -> Result<TraceWriter<'static>, SourceError> {
    let name = name_of(path);
    let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default();
    let options = WriteOptions {
        format: format.or(Format::of_name(path)).unwrap_or(Format::IDS),
        compression: Compression::of_extension(&extension.to_ascii_lowercase())
            .unwrap_or(Compression::Plain),
        page_size,
    };
    check(&name, &options)?;
    let (file, partial) = match create_file(path) {
        Ok(created) => created,
        Err(source) => return Err(SourceError::Create { name, source }),
    };
    let mut writer = write(file, &name, &options)?;
    writer.partial = partial;
    Ok(writer)
}

/// Opens `path` if it is not a regular file (a pipe, a device); otherwise creates a new file in the same directory.
fn create_file(path: &Path) -> io::Result<(File, Option<Partial>)> {
    // A symbolic link is kept: its target is replaced.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mut mode = 0o666;
    match path.metadata() {
        // Whatever it has would be gone, as the disk of a VM.
        Ok(there) if there.file_type().is_block_device() => {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a block device is not overwritten by a trace",
            ));
        }
        Ok(there) if !there.is_file() => return Ok((File::create(&path)?, None)),
        Ok(there) => mode = there.permissions().mode(),
        Err(_) => {}
    }
    if path.exists() {
        // A file that this user may not write must not be replaced.
        OpenOptions::new().write(true).open(&path)?;
    }
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(mode);
    // Errors of its own files name them.
    let partial = tempfile::Builder::new()
        .prefix(".")
        .suffix(".partial")
        .make_in(folder, |path| options.open(path))?;
    let (file, partial) = partial.into_parts();
    Ok((
        file,
        Some(Partial {
            file: partial,
            path,
        }),
    ))
}

/// Writes a trace to any writer; `name` identifies it in errors.
///
/// # Errors
///
/// [`SourceError::NotWritten`], [`SourceError::CompressionNotWritten`] and [`SourceError::NotCompressed`] for formats and
/// compressions that can only be read, and for formats that are not compressed; [`SourceError::Write`] if writing to `out` fails.
pub fn write<'a>(
    out: impl Write + 'a,
    name: &str,
    options: &WriteOptions,
) -> Result<TraceWriter<'a>, SourceError> {
    let make = check(name, options)?;
    let failed = |source| SourceError::Write {
        name: name.to_owned(),
        source,
    };
    let mut content = make(options.page_size).map_err(failed)?;
    let out: Box<dyn Write + 'a> = Box::new(BufWriter::new(out));
    let mut out = match options.compression {
        Compression::Gzip => Packed::Gzip(GzEncoder::new(out, flate2::Compression::default())),
        Compression::Zstd => {
            let encoder = zstd::Encoder::new(out, zstd::DEFAULT_COMPRESSION_LEVEL);
            let mut encoder = encoder.map_err(failed)?;
            // As the tool does: without it a flipped bit makes another trace.
            encoder.include_checksum(true).map_err(failed)?;
            Packed::Zstd(encoder)
        }
        _ => Packed::Plain(out),
    };
    content.begin(out.writer()).map_err(failed)?;
    Ok(TraceWriter {
        name: name.to_owned(),
        out,
        content,
        partial: None,
    })
}

/// Refuses formats and compressions that can only be read, and what could not be read again.
fn check(name: &str, options: &WriteOptions) -> Result<MakeWriter, SourceError> {
    let format = options.format;
    let is_read_from_end = matches!(format.row().opening, Opening::Seek { .. });
    if is_read_from_end && options.compression != Compression::Plain {
        return Err(SourceError::NotCompressed {
            name: name.to_owned(),
            format,
        });
    }
    let is_only_read = matches!(options.compression, Compression::Bzip2 | Compression::Xz);
    if is_only_read && options.format.is_written() {
        return Err(SourceError::CompressionNotWritten {
            name: name.to_owned(),
            compression: options.compression,
        });
    }
    format
        .row()
        .writer
        .ok_or(SourceError::NotWritten { format })
}

impl TraceWriter<'_> {
    /// The file that has what was written so far, until it gets its name; `None` if there is no such file.
    pub fn temporary(&self) -> Option<&Path> {
        self.partial.as_ref().map(|partial| &*partial.file)
    }

    /// Appends a batch's references.
    ///
    /// # Errors
    ///
    /// [`SourceError::Write`]; the trace is then unusable.
    pub fn write(&mut self, batch: &ReferenceBatch) -> Result<(), SourceError> {
        let out = self.out.writer();
        let result = self.content.write(batch, out);
        result.map_err(|source| SourceError::Write {
            name: self.name.clone(),
            source,
        })
    }

    /// Writes the pending references and completes the trace.
    ///
    /// # Errors
    ///
    /// [`SourceError::Write`]; the trace is then unusable.
    pub fn finish(mut self) -> Result<(), SourceError> {
        let out = self.out.writer();
        let held_back = self.content.finish(out);
        let finished = held_back.and_then(|()| self.out.finish());
        finished
            .and_then(|()| match self.partial {
                Some(partial) => partial.file.persist(partial.path).map_err(|e| e.error),
                None => Ok(()),
            })
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
    use crate::{Options, open};
    use plimsoll_flow::Source as _;
    use plimsoll_flow::{AccessKind, PageNumber};

    #[test]
    fn an_error_names_the_file_and_nothing_hidden() {
        let path = Path::new("/nonexistent/folder/t.csv");
        let error = create(path, None, PageSize::default()).unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(cause, "No such file or directory (os error 2)");
    }

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
            ("t.parquet", true),
            ("t.plimsoll", true),
            ("t.plimsoll.gz", true),
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
    fn parquet_keeps_times_sizes_and_unknown_kinds_in_several_row_groups() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        let mut writer = create(&path, None, PageSize::default()).unwrap();
        let mut expected = Vec::new();
        let mut batch = ReferenceBatch::new();
        for index in 0..1_100_000_u64 {
            let kinds = [AccessKind::Read, AccessKind::Unknown, AccessKind::Write];
            let kind = kinds[usize::try_from(index % 3).unwrap()];
            let size = u32::MAX - u32::try_from(index % 7).unwrap();
            expected.push((PageNumber(u64::MAX - index % 10), kind, index * 3, size));
            batch.push(expected[expected.len() - 1].0, kind);
            batch.details_mut().times_us.push(index * 3);
            batch.details_mut().sizes_bytes.push(size);
            if batch.is_full() {
                writer.write(&batch).unwrap();
                batch.advance();
            }
        }
        writer.write(&batch).unwrap();
        writer.finish().unwrap();
        let options = Options {
            times: true,
            sizes: true,
            ..Options::default()
        };
        let mut trace = open(&path, &options).unwrap();
        let mut read = Vec::new();
        while trace.next_batch(&mut batch).unwrap() {
            let details = batch.details();
            let kinds = batch.kinds().iter().zip(&details.times_us);
            let rest = kinds.zip(&details.sizes_bytes);
            let rows = batch.pages().iter().zip(rest);
            read.extend(rows.map(|(&page, ((&kind, &time), &size))| (page, kind, time, size)));
        }
        assert!(read == expected);
    }

    #[test]
    fn parquet_of_references_without_times_has_no_column_of_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        let mut writer = create(&path, None, PageSize::default()).unwrap();
        writer.write(&batch_of(7)).unwrap();
        writer.finish().unwrap();
        let options = Options {
            times: true,
            ..Options::default()
        };
        let error = open(&path, &options).err().unwrap().to_string();
        assert!(
            error.ends_with("row 0: there is no column 'time_us'"),
            "{error}"
        );
    }

    fn files_in(folder: &Path) -> Vec<String> {
        let files = std::fs::read_dir(folder).unwrap();
        files
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    fn batch_of(page: u64) -> ReferenceBatch {
        let mut batch = ReferenceBatch::new();
        batch.push(PageNumber(page), AccessKind::Read);
        batch
    }

    #[test]
    fn a_trace_gets_its_name_only_when_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.ids");
        let mut writer = create(&path, None, PageSize::default()).unwrap();
        writer.write(&batch_of(7)).unwrap();
        assert!(!path.exists());
        drop(writer);
        assert!(files_in(folder.path()).is_empty());
        for page in [7, 8] {
            let mut writer = create(&path, None, PageSize::default()).unwrap();
            writer.write(&batch_of(page)).unwrap();
            writer.finish().unwrap();
            let mut writer = create(&path, None, PageSize::default()).unwrap();
            writer.write(&batch_of(9)).unwrap();
            drop(writer);
            let text = std::fs::read_to_string(&path).unwrap();
            assert_eq!(text, format!("{page}\n"));
            assert_eq!(files_in(folder.path()), ["t.ids"]);
        }
    }

    #[test]
    fn a_link_stays_one_and_a_file_keeps_its_permissions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.ids");
        let link = folder.path().join("link.ids");
        std::fs::write(&path, "1\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let mut writer = create(&link, None, PageSize::default()).unwrap();
        writer.write(&batch_of(5)).unwrap();
        writer.finish().unwrap();
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "5\n");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
    }

    #[test]
    fn what_is_no_plain_file_is_written_to_as_it_is() {
        let null = Path::new("/dev/null");
        let mut writer = create(null, Some(Format::PLIMSOLL), PageSize::default()).unwrap();
        writer.write(&batch_of(5)).unwrap();
        writer.finish().unwrap();
        assert!(!std::fs::metadata(null).unwrap().is_file());
        let nowhere = create(Path::new("/no/such/folder/t"), None, PageSize::default());
        assert!(matches!(nowhere, Err(SourceError::Create { .. })));
    }

    #[test]
    fn what_is_only_read_is_refused_before_anything_is_created() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "t.ids.xz",
            "t.ids.bz2",
            "t.parquet.gz",
            "t.parquet.zst",
            "t.parquet.xz",
        ] {
            let path = folder.path().join(name);
            assert!(create(&path, None, PageSize::default()).is_err(), "{name}");
        }
        for format in Format::all() {
            let path = folder.path().join(format.name());
            let refused = create(&path, Some(format), PageSize::default()).is_err();
            assert_eq!(refused, !format.is_written(), "{format}");
        }
        assert!(files_in(folder.path()).is_empty());
    }
}
