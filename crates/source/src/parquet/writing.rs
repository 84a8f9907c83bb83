//! Writing `parquet`: columns `page`, `op`, and `time_us` and `size_bytes` if the first batch has them.
//!
//! References are collected into row groups, so that memory does not depend on the length of the trace. Columns are compressed by
//! Zstandard; times are stored as differences.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use ::parquet::basic::{Compression, Encoding, ZstdLevel};
use ::parquet::data_type::{ByteArray, ByteArrayType, Int32Type, Int64Type};
use ::parquet::errors::Result as ParquetResult;
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use ::parquet::schema::types::ColumnPath;
use plimsoll_flow::{AccessKind, ReferenceBatch};

use super::{SIZE, TIME};
use crate::csv::{OP, PAGE};
use crate::writing::ContentWriter;

/// References of a row group, the unit of reading in parallel.
const GROUP_ROWS: usize = 1 << 20;

/// The bytes that the file's writer made, until they are passed on.
#[derive(Debug, Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Sink {
    fn take(&self) -> Vec<u8> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut sink = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sink.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writer of `parquet` traces.
#[derive(Default)]
pub(super) struct Writer {
    sink: Sink,
    /// Made with the first batch, by which columns it has.
    file: Option<SerializedFileWriter<Sink>>,
    with_times: bool,
    with_sizes: bool,
    // Columns of the row group; an operation is missing where the kind is unknown.
    pages: Vec<i64>,
    ops: Vec<ByteArray>,
    are_ops: Vec<i16>,
    times: Vec<i64>,
    sizes: Vec<i32>,
}

impl Writer {
    fn start(&mut self) -> ParquetResult<SerializedFileWriter<Sink>> {
        let time = match self.with_times {
            true => format!("REQUIRED INT64 {TIME} (INTEGER(64,false));"),
            false => String::new(),
        };
        let size = match self.with_sizes {
            true => format!("REQUIRED INT32 {SIZE} (INTEGER(32,false));"),
            false => String::new(),
        };
        let schema = parse_message_type(&format!(
            "message trace {{ REQUIRED INT64 {PAGE} (INTEGER(64,false)); \
             OPTIONAL BYTE_ARRAY {OP} (STRING); {time} {size} }}"
        ))?;
        let time = ColumnPath::from(TIME);
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_column_dictionary_enabled(time.clone(), false)
            .set_column_encoding(time, Encoding::DELTA_BINARY_PACKED)
            .build();
        SerializedFileWriter::new(self.sink.clone(), Arc::new(schema), Arc::new(properties))
    }

    /// Writes the collected references as a row group.
    fn end_group(&mut self) -> ParquetResult<()> {
        let mut file = match self.file.take() {
            Some(file) => file,
            None => self.start()?,
        };
        if !self.pages.is_empty() {
            let mut group = file.next_row_group()?;
            if let Some(mut column) = group.next_column()? {
                column
                    .typed::<Int64Type>()
                    .write_batch(&self.pages, None, None)?;
                column.close()?;
            }
            if let Some(mut column) = group.next_column()? {
                let ops = column.typed::<ByteArrayType>();
                ops.write_batch(&self.ops, Some(&self.are_ops), None)?;
                column.close()?;
            }
            if self.with_times
                && let Some(mut column) = group.next_column()?
            {
                column
                    .typed::<Int64Type>()
                    .write_batch(&self.times, None, None)?;
                column.close()?;
            }
            if self.with_sizes
                && let Some(mut column) = group.next_column()?
            {
                column
                    .typed::<Int32Type>()
                    .write_batch(&self.sizes, None, None)?;
                column.close()?;
            }
            group.close()?;
        }
        self.file = Some(file);
        self.pages.clear();
        self.ops.clear();
        self.are_ops.clear();
        self.times.clear();
        self.sizes.clear();
        Ok(())
    }
}

impl ContentWriter for Writer {
    fn write(&mut self, batch: &ReferenceBatch, out: &mut dyn Write) -> io::Result<()> {
        let details = batch.details();
        if self.file.is_none() && self.pages.is_empty() {
            self.with_times = !details.times_us.is_empty();
            self.with_sizes = !details.sizes_bytes.is_empty();
        }
        let pages = batch.pages().iter();
        self.pages.extend(pages.map(|page| page.0.cast_signed()));
        for kind in batch.kinds() {
            let op = match kind {
                AccessKind::Read => Some("r"),
                AccessKind::Write => Some("w"),
                AccessKind::Unknown => None,
            };
            self.are_ops.push(op.is_some().into());
            self.ops.extend(op.map(ByteArray::from));
        }
        if self.with_times {
            let times = details.times_us.iter();
            self.times.extend(times.map(|time| time.cast_signed()));
        }
        if self.with_sizes {
            let sizes = details.sizes_bytes.iter();
            self.sizes.extend(sizes.map(|size| size.cast_signed()));
        }
        if self.pages.len() >= GROUP_ROWS {
            self.end_group().map_err(io::Error::other)?;
            out.write_all(&self.sink.take())?;
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        self.end_group().map_err(io::Error::other)?;
        if let Some(file) = self.file.take() {
            file.close().map_err(io::Error::other)?;
        }
        out.write_all(&self.sink.take())
    }
}
