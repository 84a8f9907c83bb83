//! `parquet`: a column of page numbers, and optionally one of operations.
//!
//! The pages are 32- or 64-bit integers, at the top level of the schema, never null. The
//! operations are strings as in `csv`; null means unknown. Times and sizes, if asked for, are integers in columns named
//! `time_us` and `size_bytes`. All other columns are ignored.
//!
//! A parquet file is read from its end, so it must be a regular file: neither a pipe nor
//! compressed as a whole. Row groups are read one after another and their columns
//! page by page, each at most [`PAGE_BYTES_MAX`] (`pages`); common writers make pages of about 1 MiB.
//!
//! Footers and values are decoded by the crate `parquet`. If it panics on a damaged
//! file, an error is returned, and nothing is printed.

mod pages;
mod writing;

use std::io::{self, BufReader, Read};
use std::sync::Arc;

use ::parquet::basic::{ConvertedType, LogicalType, TimeUnit, Type};
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use ::parquet::data_type::{ByteArray, ByteArrayType, DataType};
use ::parquet::errors::{ParquetError, Result as ParquetResult};
use ::parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader, RowGroupMetaData};
use ::parquet::file::reader::{ChunkReader, Length};
use ::parquet::schema::types::ColumnDescriptor;
use bytes::Bytes;
use plimsoll_flow::{AccessKind, PageNumber, ReferenceBatch, Source};

use crate::TraceOption;
use crate::bytes_at::ReadAt;
use crate::contained::contained;
use crate::csv::{OP, PAGE, kind_of};
use crate::lines::read_full;
use crate::progress::Progress;
use crate::row::{FormatRow, Opening};
use crate::spans::Reading;
use crate::{Column, Options, SourceError};
use pages::{FOOTER_BYTES_MAX, PAGE_BYTES_MAX, Pages, is_footer};

/// The columns of times and sizes.
const TIME: &str = "time_us";
const SIZE: &str = "size_bytes";

/// The first and the last bytes of a parquet file.
pub(crate) const MAGIC: [u8; 4] = *b"PAR1";

/// Length of the footer's length and the magic number after it, in bytes.
const FOOTER_END_BYTES: usize = 8;

/// A file that counts the bytes read and reads nothing beyond its end.
struct Chunks {
    file: Arc<dyn ReadAt>,
    length_bytes: u64,
    progress: Progress,
}

/// A reader of the file from a position on.
struct PositionReader {
    file: Arc<dyn ReadAt>,
    offset_bytes: u64,
}

impl Read for PositionReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.offset_bytes)?;
        self.offset_bytes += read as u64;
        Ok(read)
    }
}

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.length_bytes
    }
}

impl ChunkReader for Chunks {
    type T = BufReader<PositionReader>;

    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        Ok(BufReader::new(PositionReader {
            file: self.file.clone(),
            offset_bytes: start,
        }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        if length > PAGE_BYTES_MAX {
            return Err(general(format!(
                "it has {length} bytes at {start} in one piece; at most {PAGE_BYTES_MAX} are read"
            )));
        }
        let end = start.checked_add(length as u64);
        if end.is_none_or(|end| end > self.length_bytes) {
            return Err(ParquetError::General(format!(
                "it has {length} bytes at {start}, beyond the file's end"
            )));
        }
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, start)?;
        self.progress.add(length as u64);
        Ok(bytes.into())
    }
}

impl Chunks {
    /// The bytes from a position on, fewer than `length` if the file ends before.
    fn head(&self, start: u64, length: usize) -> ParquetResult<Vec<u8>> {
        let mut bytes = vec![0; length];
        let input = &mut PositionReader {
            file: self.file.clone(),
            offset_bytes: start,
        };
        let (filled, result) = read_full(input, &mut bytes);
        result?;
        bytes.truncate(filled);
        Ok(bytes)
    }

    /// Refuses a footer that would take long to decode; other errors are reported by its decoder.
    fn check_footer(&self) -> ParquetResult<()> {
        let Some(end) = self.length_bytes.checked_sub(FOOTER_END_BYTES as u64) else {
            return Ok(());
        };
        let tail = self.get_bytes(end, FOOTER_END_BYTES)?;
        let length = tail
            .first_chunk()
            .map_or(0, |length| u32::from_le_bytes(*length));
        let Some(start) = end.checked_sub(length.into()) else {
            return Ok(());
        };
        if usize::try_from(length)? > FOOTER_BYTES_MAX {
            return Err(general(format!(
                "its footer has {length} bytes; at most {FOOTER_BYTES_MAX} are read"
            )));
        }
        if !tail.ends_with(&MAGIC) || is_footer(&self.get_bytes(start, usize::try_from(length)?)?) {
            return Ok(());
        }
        Err(general("its footer is damaged".to_owned()))
    }
}

/// A column of the file that has been checked.
#[derive(Debug, Clone, Copy)]
struct Leaf {
    index: usize,
    unsigned: bool,
    /// The definition level of values that are not null.
    defined: i16,
}

/// Reader of `parquet` traces.
pub(crate) struct Reader {
    name: String,
    chunks: Arc<Chunks>,
    metadata: ParquetMetaData,
    page: Leaf,
    op: Option<Leaf>,
    time: Option<(Leaf, Tick)>,
    size: Option<Leaf>,
    /// Numbers of the row groups to read, the next one last.
    groups: Vec<usize>,
    group: Option<Group>,
    /// Number of rows returned.
    rows: u64,
    progress: Progress,
    // Buffers for the values of the columns.
    numbers: Vec<i64>,
    small_numbers: Vec<i32>,
    words: Vec<ByteArray>,
    levels: Vec<i16>,
}

/// The open columns of a row group.
struct Group {
    page: ColumnReader,
    op: Option<ColumnReaderImpl<ByteArrayType>>,
    time: Option<ColumnReader>,
    size: Option<ColumnReader>,
    /// Number of rows left to read.
    rows: usize,
}

impl Reader {
    /// Reads the schema and finds the columns in it.
    pub(crate) fn new(
        file: Arc<dyn ReadAt>,
        length_bytes: u64,
        name: &str,
        progress: &Progress,
        options: &Options,
    ) -> Result<Self, SourceError> {
        let chunks = Arc::new(Chunks {
            file,
            length_bytes,
            progress: progress.clone(),
        });
        let failed = |reason| SourceError::Table {
            name: name.to_owned(),
            row: 0,
            reason,
        };
        let metadata = decoded(|| {
            chunks.check_footer()?;
            ParquetMetaDataReader::new().parse_and_finish(&*chunks)
        })
        .map_err(failed)?;
        let page = options.page_column.clone();
        let page = page.unwrap_or_else(|| Column::Name(PAGE.to_owned()));
        let op = options.op_column.clone();
        let (page, op, time, size, groups) = decoded(|| {
            let integers = [Type::INT32, Type::INT64];
            let page = find(&metadata, &page, &integers)?
                .ok_or_else(|| general(format!("there is no column {page}")))?;
            let op = match op {
                Some(op) => Some(
                    find(&metadata, &op, &[Type::BYTE_ARRAY])?
                        .ok_or_else(|| general(format!("there is no column {op}")))?,
                ),
                // A column of that name that was not selected may contain something else.
                None => find(&metadata, &Column::Name(OP.to_owned()), &[Type::BYTE_ARRAY])
                    .unwrap_or(None),
            };
            let wanted = |name: &str, is_wanted: bool| {
                if !is_wanted {
                    return Ok(None);
                }
                let column = Column::Name(name.to_owned());
                let found = find(&metadata, &column, &integers)?;
                let missing = || general(format!("there is no column {column}"));
                found.ok_or_else(missing).map(Some)
            };
            let time = wanted(TIME, options.times)?;
            let with_tick = |leaf| Tick::of(&metadata, leaf).map(|tick| (leaf, tick));
            let time = time.map(with_tick).transpose()?;
            let size = wanted(SIZE, options.sizes)?;
            let all = metadata.num_row_groups();
            let groups = options.row_groups.clone();
            let mut groups = groups.unwrap_or_else(|| (0..all).collect());
            if let Some(group) = groups.iter().find(|&&group| group >= all) {
                return Err(general(format!("there is no row group {group}")));
            }
            groups.reverse();
            Ok((page, op, time, size, groups))
        })
        .map_err(failed)?;
        Ok(Self {
            name: name.to_owned(),
            chunks,
            metadata,
            page,
            op,
            time,
            size,
            groups,
            group: None,
            rows: 0,
            progress: progress.clone(),
            numbers: Vec::new(),
            small_numbers: Vec::new(),
            words: Vec::new(),
            levels: Vec::new(),
        })
    }

    /// Reads rows of the present row group, or opens the next one; `false` after the last.
    fn advance(&mut self, batch: &mut ReferenceBatch) -> ParquetResult<bool> {
        let Some(group) = self.group.as_mut().filter(|group| group.rows > 0) else {
            return self.next_group();
        };
        let wanted = group.rows.min(ReferenceBatch::CAPACITY - batch.len());
        let levels = &mut self.levels;
        let (numbers, small) = (&mut self.numbers, &mut self.small_numbers);
        let rows = &mut self.rows;
        let page = (&mut group.page, self.page, "page");
        let read = numbers_of(page, wanted, rows, numbers, small, levels)?;
        if read == 0 {
            return Err(general(format!("{} rows are missing", group.rows)));
        }
        let pages = numbers
            .iter()
            .map(|&number| PageNumber(number.cast_unsigned()));
        match (&mut group.op, self.op) {
            (Some(column), Some(op)) => {
                self.words.clear();
                if rows_of(column, read, &mut self.words, levels)? != read {
                    return Err(general("it has fewer operations than pages".to_owned()));
                }
                let mut words = self.words.iter();
                let mut kind = || {
                    words
                        .next()
                        .map_or(AccessKind::Unknown, |op| kind_of(op.data()))
                };
                if levels.is_empty() {
                    batch.extend(pages, std::iter::repeat_with(kind));
                } else {
                    let kinds = levels.iter().map(|&level| {
                        if level == op.defined {
                            kind()
                        } else {
                            AccessKind::Unknown
                        }
                    });
                    batch.extend(pages, kinds);
                }
            }
            _ => batch.extend(pages, std::iter::repeat(AccessKind::Unknown)),
        }
        let details = batch.details_mut();
        if let (Some(column), Some((time, tick))) = (&mut group.time, self.time) {
            let times = numbers_of((column, time, "time"), read, rows, numbers, small, levels)?;
            for (before, &time) in numbers.iter().enumerate() {
                let time_us = tick.to_us(time.cast_unsigned()).ok_or_else(|| {
                    *rows += before as u64;
                    general("a time is too large".to_owned())
                })?;
                details.times_us.push(time_us);
            }
            if times != read {
                return Err(general("it has fewer times than pages".to_owned()));
            }
        }
        if let (Some(column), Some(size)) = (&mut group.size, self.size) {
            let sizes = numbers_of((column, size, "size"), read, rows, numbers, small, levels)?;
            for (before, &size) in numbers.iter().enumerate() {
                let size_bytes = u32::try_from(size).map_err(|_| {
                    *rows += before as u64;
                    general("a size is 4 GiB or more".to_owned())
                })?;
                details.sizes_bytes.push(size_bytes);
            }
            if sizes != read {
                return Err(general("it has fewer sizes than pages".to_owned()));
            }
        }
        group.rows -= read;
        self.rows += read as u64;
        Ok(true)
    }

    /// Opens a column of a row group.
    fn column(&self, group: &RowGroupMetaData, leaf: Leaf) -> ParquetResult<ColumnReader> {
        let column = group.columns().get(leaf.index);
        let column = column.ok_or_else(|| general("a row group lacks a column".to_owned()))?;
        let pages = Pages::new(&self.chunks, column);
        Ok(get_column_reader(
            column.column_descr_ptr(),
            Box::new(pages),
        ))
    }

    fn next_group(&mut self) -> ParquetResult<bool> {
        let Some(group) = self.groups.pop() else {
            return Ok(false);
        };
        let group = self.metadata.row_group(group);
        let op = match self.op {
            Some(op) => match self.column(group, op)? {
                ColumnReader::ByteArrayColumnReader(column) => Some(column),
                _ => return Err(general("its operations are no strings".to_owned())),
            },
            None => None,
        };
        let column = |leaf: Option<Leaf>| leaf.map(|leaf| self.column(group, leaf)).transpose();
        let time = column(self.time.map(|(leaf, _)| leaf))?;
        let size = column(self.size)?;
        let rows = usize::try_from(group.num_rows());
        self.group = Some(Group {
            page: self.column(group, self.page)?,
            op,
            time,
            size,
            rows: rows.map_err(|_| general("a row group has fewer than no rows".to_owned()))?,
        });
        Ok(true)
    }
}

impl Source for Reader {
    type Error = SourceError;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        batch.advance();
        while !batch.is_full() {
            match decoded(|| self.advance(batch)) {
                Ok(true) => {}
                Ok(false) => {
                    self.progress.complete();
                    break;
                }
                Err(reason) => {
                    return Err(SourceError::Table {
                        name: self.name.clone(),
                        row: self.rows + 1,
                        reason,
                    });
                }
            }
        }
        Ok(!batch.is_empty())
    }
}

impl Reading for Reader {}

fn general(reason: String) -> ParquetError {
    ParquetError::General(reason)
}

/// Runs a decoder of untrusted bytes; converts its panic to an error. The trace is then at its end.
fn decoded<T>(decode: impl FnOnce() -> ParquetResult<T>) -> Result<T, String> {
    let Some(result) = contained(decode) else {
        return Err("it is damaged: the decoder panicked".to_owned());
    };
    result.map_err(|error| match error {
        ParquetError::General(reason) => reason,
        error => error.to_string(),
    })
}

/// Unit of a column of times: that of its type, if it is one of timestamps or of times of day, else microseconds, as its
/// name says.
#[derive(Debug, Clone, Copy)]
enum Tick {
    Milliseconds,
    Microseconds,
    Nanoseconds,
}

impl Tick {
    fn of(metadata: &ParquetMetaData, leaf: Leaf) -> ParquetResult<Self> {
        let column = metadata.file_metadata().schema_descr().column(leaf.index);
        let unit = match column.logical_type_ref() {
            Some(LogicalType::Timestamp(timestamp)) => Some(timestamp.unit),
            Some(LogicalType::Time(time)) => Some(time.unit),
            _ => None,
        };
        Ok(match (unit, column.converted_type()) {
            (Some(TimeUnit::MILLIS), _) => Self::Milliseconds,
            (Some(TimeUnit::MICROS), _) => Self::Microseconds,
            (Some(TimeUnit::NANOS), _) => Self::Nanoseconds,
            (None, ConvertedType::TIMESTAMP_MILLIS | ConvertedType::TIME_MILLIS) => {
                Self::Milliseconds
            }
            (None, ConvertedType::DATE) => {
                return Err(general(format!("column '{TIME}' has dates, not times")));
            }
            _ => Self::Microseconds,
        })
    }

    /// `None` beyond 64 bits.
    fn to_us(self, time: u64) -> Option<u64> {
        match self {
            Self::Milliseconds => time.checked_mul(1000),
            Self::Microseconds => Some(time),
            Self::Nanoseconds => Some(time / 1000),
        }
    }
}

/// Finds a column; an error if it does not have one of these types.
fn find(
    metadata: &ParquetMetaData,
    column: &Column,
    types: &[Type],
) -> ParquetResult<Option<Leaf>> {
    let schema = metadata.file_metadata().schema_descr();
    let is_it = |index: usize, descriptor: &ColumnDescriptor| match column {
        Column::Name(name) => descriptor.path().string().eq_ignore_ascii_case(name),
        Column::Place(place) => index + 1 == *place,
    };
    let mut columns = schema.columns().iter().enumerate();
    let Some((index, found)) = columns.find(|(index, found)| is_it(*index, found)) else {
        return Ok(None);
    };
    if found.max_rep_level() > 0 || !types.contains(&found.physical_type()) {
        let wanted = if types.contains(&Type::INT64) {
            "an integer"
        } else {
            "a string"
        };
        return Err(general(format!(
            "column {column} is not {wanted} in each row"
        )));
    }
    let converted = matches!(
        found.converted_type(),
        ConvertedType::UINT_8
            | ConvertedType::UINT_16
            | ConvertedType::UINT_32
            | ConvertedType::UINT_64
    );
    let logical = match found.logical_type_ref() {
        Some(LogicalType::Integer(integer)) => !integer.is_signed,
        _ => false,
    };
    Ok(Some(Leaf {
        index,
        unsigned: converted || logical,
        defined: found.max_def_level(),
    }))
}

/// Replaces `numbers` by rows of a column of integers, all of which must be there and not negative; `before` is the number of
/// rows before them, and before the first that is not so.
fn numbers_of(
    (column, leaf, what): (&mut ColumnReader, Leaf, &str),
    wanted: usize,
    before: &mut u64,
    numbers: &mut Vec<i64>,
    small_numbers: &mut Vec<i32>,
    levels: &mut Vec<i16>,
) -> ParquetResult<usize> {
    numbers.clear();
    small_numbers.clear();
    let read = match column {
        ColumnReader::Int64ColumnReader(column) => rows_of(column, wanted, numbers, levels)?,
        ColumnReader::Int32ColumnReader(column) => rows_of(column, wanted, small_numbers, levels)?,
        _ => return Err(general("its numbers are no integers".to_owned())),
    };
    let unsigned = leaf.unsigned;
    let small = small_numbers.iter().map(|&number| match unsigned {
        true => i64::from(number.cast_unsigned()),
        false => i64::from(number),
    });
    numbers.extend(small);
    let is_null = |&level: &i16| level != leaf.defined;
    // Up to the first null there is a number for each row, and behind it fewer.
    let null = (numbers.len() < read).then(|| levels.iter().position(is_null));
    let null = null.map(|null| null.unwrap_or(numbers.len()));
    let negative = numbers.iter().position(|&number| !unsigned && number < 0);
    if let Some(wrong) = null.into_iter().chain(negative).min() {
        *before += wrong as u64;
        return Err(general(format!("a {what} is null or negative")));
    }
    Ok(read)
}

/// Reads rows of a column: its values and, if some may be null, which of the rows have one.
fn rows_of<T: DataType>(
    column: &mut ColumnReaderImpl<T>,
    wanted: usize,
    values: &mut Vec<T::T>,
    levels: &mut Vec<i16>,
) -> ParquetResult<usize> {
    levels.clear();
    let (rows, ..) = column.read_records(wanted, Some(levels), None, values)?;
    Ok(rows)
}

/// `parquet`.
pub(crate) const ROW: FormatRow = FormatRow {
    name: "parquet",
    is_named: |last, _| last == "parquet",
    is_head: |head| head.bytes.starts_with(&MAGIC),
    also_named: &[],
    options: &[
        TraceOption::PageColumn,
        TraceOption::OpColumn,
        TraceOption::RowGroups,
        TraceOption::Times,
        TraceOption::Sizes,
    ],
    opening: Opening::Seek {
        magic: &MAGIC,
        open: |file, length_bytes, name, progress, options| {
            let reader = Reader::new(file, length_bytes, name, progress, options)?;
            Ok(Box::new(reader))
        },
    },
    writer: Some(|_| Ok(Box::new(writing::Writer::default()))),
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drained::references_of;
    use crate::{Format, open, read};
    use ::parquet::basic::Compression;
    use ::parquet::column::writer::ColumnWriter;
    use ::parquet::file::properties::{WriterProperties, WriterVersion};
    use ::parquet::file::writer::SerializedFileWriter;
    use ::parquet::schema::parser::parse_message_type;
    use AccessKind::{Read as R, Unknown as U, Write as W};
    use std::io::Write as _;

    /// A column's values; `None` is null.
    enum Values {
        Long(Vec<Option<i64>>),
        Short(Vec<Option<i32>>),
        Words(Vec<Option<&'static str>>),
    }

    fn file_of(
        schema: &str,
        columns: &[Values],
        compression: Compression,
    ) -> tempfile::NamedTempFile {
        let properties = WriterProperties::builder().set_compression(compression);
        file_with(schema, columns, properties.build())
    }

    /// Writes the same rows into two row groups.
    fn file_with(
        schema: &str,
        columns: &[Values],
        properties: WriterProperties,
    ) -> tempfile::NamedTempFile {
        let file = tempfile::Builder::new()
            .suffix(".parquet")
            .tempfile()
            .unwrap();
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let out = file.reopen().unwrap();
        let mut writer = SerializedFileWriter::new(out, schema, Arc::new(properties)).unwrap();
        for _ in 0..2 {
            let mut group = writer.next_row_group().unwrap();
            for column in columns {
                let mut out = group.next_column().unwrap().unwrap();
                fn levels<T>(values: &[Option<T>]) -> Vec<i16> {
                    values
                        .iter()
                        .map(|value| i16::from(value.is_some()))
                        .collect()
                }
                match (out.untyped(), column) {
                    (ColumnWriter::Int64ColumnWriter(out), Values::Long(values)) => {
                        let some: Vec<_> = values.iter().flatten().copied().collect();
                        out.write_batch(&some, Some(&levels(values)), None).unwrap();
                    }
                    (ColumnWriter::Int32ColumnWriter(out), Values::Short(values)) => {
                        let some: Vec<_> = values.iter().flatten().copied().collect();
                        out.write_batch(&some, Some(&levels(values)), None).unwrap();
                    }
                    (ColumnWriter::ByteArrayColumnWriter(out), Values::Words(values)) => {
                        let some: Vec<_> =
                            values.iter().flatten().map(|&word| word.into()).collect();
                        out.write_batch(&some, Some(&levels(values)), None).unwrap();
                    }
                    _ => panic!("the schema has another type"),
                }
                out.close().unwrap();
            }
            group.close().unwrap();
        }
        writer.close().unwrap();
        file
    }

    fn references(
        file: &tempfile::NamedTempFile,
        options: &Options,
    ) -> Result<Vec<(u64, AccessKind)>, SourceError> {
        let mut trace = open(file.path(), options)?;
        assert_eq!(trace.format(), Format::PARQUET);
        let progress = trace.progress();
        let all = references_of(&mut trace)?;
        assert_eq!(Some(progress.read_bytes()), progress.total_bytes());
        Ok(all)
    }

    #[test]
    fn timestamps_are_read_in_their_unit() {
        let with_times = Options {
            times: true,
            ..Options::default()
        };
        let times = |kind: &str, time: Values| {
            let schema = format!("message t {{ required int64 page; required {kind}; }}");
            let pages = Values::Long(vec![Some(1); 2]);
            let file = file_of(&schema, &[pages, time], Compression::UNCOMPRESSED);
            let mut trace = open(file.path(), &with_times)?;
            let mut batch = ReferenceBatch::new();
            trace.next_batch(&mut batch)?;
            Ok::<_, SourceError>(batch.details().times_us.clone())
        };
        let long = |time: i64| Values::Long(vec![Some(3), Some(time)]);
        let short = |time: i32| Values::Short(vec![Some(3), Some(time)]);
        for (kind, time, first_us) in [
            ("int64 time_us", long(3_000_000), 3),
            ("int64 time_us (TIMESTAMP(MILLIS,true))", long(3000), 3000),
            ("int64 time_us (TIMESTAMP_MILLIS)", long(3000), 3000),
            ("int64 time_us (TIMESTAMP(MICROS,true))", long(3_000_000), 3),
            (
                "int64 time_us (TIMESTAMP(NANOS,false))",
                long(3_000_000_999),
                0,
            ),
            ("int32 time_us (TIME(MILLIS,true))", short(3000), 3000),
            ("int32 time_us (TIME_MILLIS)", short(3000), 3000),
            ("int64 time_us (TIME(MICROS,true))", long(3_000_000), 3),
            ("int64 time_us (TIME(NANOS,true))", long(3_000_000_999), 0),
        ] {
            let both = times(kind, time).unwrap();
            assert_eq!(both[..2], [first_us, 3_000_000], "{kind}");
        }
        let error = |kind, time| times(kind, time).unwrap_err().to_string();
        let late = error("int64 time_us (TIMESTAMP(MILLIS,true))", long(i64::MAX));
        assert!(late.ends_with("row 2: a time is too large"), "{late}");
        let date = error("int32 time_us (DATE)", short(20_000));
        assert!(date.contains("column 'time_us' has dates"), "{date}");
    }

    #[test]
    fn pages_and_operations_are_read_from_every_row_group() {
        let schema = "message t { required binary note (UTF8); required int64 page; \
                      optional binary op (UTF8); }";
        let pages: Vec<_> = (0..40_000i64).map(|n| Some(n * n % 1009)).collect();
        let ops: Vec<_> = (0..40_000)
            .map(|n| [Some("read"), None, Some("W")][n % 3])
            .collect();
        let notes = vec![Some("x"); pages.len()];
        let group = pages
            .iter()
            .enumerate()
            .map(|(n, page)| (page.unwrap().cast_unsigned(), [R, U, W][n % 3]));
        let expected: Vec<_> = group.clone().chain(group).collect();
        let columns = [
            Values::Words(notes),
            Values::Long(pages),
            Values::Words(ops),
        ];
        for compression in [
            Compression::UNCOMPRESSED,
            Compression::SNAPPY,
            Compression::GZIP(Default::default()),
            Compression::ZSTD(Default::default()),
        ] {
            for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
                for dictionary in [true, false] {
                    // Pages of many sizes; strings without a dictionary only in version 1.
                    let properties = WriterProperties::builder()
                        .set_compression(compression)
                        .set_writer_version(version)
                        .set_data_page_size_limit(7000)
                        .set_column_dictionary_enabled("page".into(), dictionary)
                        .build();
                    let file = file_with(schema, &columns, properties);
                    assert!(references(&file, &Options::default()).unwrap() == expected);
                }
            }
        }
        let file = file_of(schema, &columns, Compression::UNCOMPRESSED);
        let of_second = Options {
            row_groups: Some(vec![1]),
            ..Options::default()
        };
        let read = references_of(&mut open(file.path(), &of_second).unwrap()).unwrap();
        assert!(read == expected[40_000..]);
        let of_none = Options {
            row_groups: Some(vec![0, 2]),
            ..Options::default()
        };
        let error = references(&file, &of_none).unwrap_err().to_string();
        assert!(error.contains("there is no row group 2"), "{error}");
        let options = Options {
            page_column: Some(Column::Place(2)),
            op_column: Some(Column::Name("note".to_owned())),
            ..Options::default()
        };
        let unknown: Vec<_> = expected.iter().map(|&(page, _)| (page, U)).collect();
        assert!(references(&file, &options).unwrap() == unknown);
    }

    #[test]
    fn a_column_of_the_default_name_that_is_no_operation_is_left_alone() {
        let schema = "message t { required int64 page; required int32 op; }";
        let columns = [Values::Long(vec![Some(7)]), Values::Short(vec![Some(1)])];
        let file = file_of(schema, &columns, Compression::UNCOMPRESSED);
        assert_eq!(
            references(&file, &Options::default()).unwrap(),
            [(7, U), (7, U)]
        );
        let options = Options {
            op_column: Some(Column::Name("op".to_owned())),
            ..Options::default()
        };
        let error = references(&file, &options).unwrap_err().to_string();
        assert!(error.contains("column 'op' is not a string"), "{error}");
    }

    #[test]
    fn numbers_without_a_sign_reach_the_last_page() {
        let long = [Values::Long(vec![Some(-1), Some(0)])];
        let short = [Values::Short(vec![Some(-1), Some(0)])];
        let plain = Compression::UNCOMPRESSED;
        let all =
            |schema, columns| references(&file_of(schema, columns, plain), &Options::default());
        let unsigned = all("message t { required int64 Page (UINT_64); }", &long).unwrap();
        assert_eq!(unsigned, [(u64::MAX, U), (0, U), (u64::MAX, U), (0, U)]);
        let unsigned = all(
            "message t { required int32 page (INTEGER(32,false)); }",
            &short,
        )
        .unwrap();
        assert_eq!(unsigned[0], (u64::from(u32::MAX), U));
        for (schema, columns) in [
            ("message t { required int64 page; }", &long),
            ("message t { required int32 page; }", &short),
        ] {
            let error = all(schema, columns).unwrap_err().to_string();
            assert!(
                error.ends_with(", row 1: a page is null or negative"),
                "{error}"
            );
        }
    }

    #[test]
    fn what_is_null_or_negative_is_named_with_its_row() {
        let options = Options {
            times: true,
            ..Options::default()
        };
        let schema = "message t { optional int64 page; optional int64 time_us; }";
        let good: Vec<_> = (0..30_000).map(Some).collect();
        let with = |wrong: &[(usize, Option<i64>)]| {
            let mut column = good.clone();
            for &(at, number) in wrong {
                column[at] = number;
            }
            Values::Long(column)
        };
        for (columns, expected) in [
            ([with(&[(20_000, None)]), with(&[])], "row 20001: a page "),
            (
                [with(&[(9, Some(-1)), (5, None)]), with(&[])],
                "row 6: a page ",
            ),
            (
                [with(&[(9, None), (5, Some(-1))]), with(&[])],
                "row 6: a page ",
            ),
            (
                [with(&[]), with(&[(29_999, Some(-1))])],
                "row 30000: a time ",
            ),
        ] {
            let file = file_of(schema, &columns, Compression::UNCOMPRESSED);
            let error = references(&file, &options).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_size_of_4_gib_is_named_with_its_row() {
        let options = Options {
            sizes: true,
            ..Options::default()
        };
        let schema = "message t { required int64 page; required int64 size_bytes; }";
        let mut sizes = vec![Some(1); 30_000];
        sizes[20_000] = Some(1 << 32);
        let columns = [Values::Long(vec![Some(1); 30_000]), Values::Long(sizes)];
        let file = file_of(schema, &columns, Compression::UNCOMPRESSED);
        let error = references(&file, &options).unwrap_err().to_string();
        assert!(
            error.ends_with("row 20001: a size is 4 GiB or more"),
            "{error}"
        );
    }

    #[test]
    fn a_null_page_and_columns_of_other_types_are_refused() {
        let plain = Compression::UNCOMPRESSED;
        let error = |schema, column| {
            let file = file_of(schema, &[column], plain);
            references(&file, &Options::default())
                .unwrap_err()
                .to_string()
        };
        let null = error(
            "message t { optional int64 page; }",
            Values::Long(vec![Some(1), None]),
        );
        assert!(
            null.ends_with(", row 2: a page is null or negative"),
            "{null}"
        );
        let word = error(
            "message t { required binary page; }",
            Values::Words(vec![Some("1")]),
        );
        assert!(
            word.ends_with("column 'page' is not an integer in each row"),
            "{word}"
        );
        let other = error(
            "message t { required int64 id; }",
            Values::Long(vec![Some(1)]),
        );
        assert!(
            other.ends_with(", row 0: there is no column 'page'"),
            "{other}"
        );
    }

    #[test]
    fn what_cannot_be_sought_in_is_refused_with_the_reason() {
        let options = Options {
            format: Some(Format::PARQUET),
            ..Options::default()
        };
        for error in [
            read(&b"PAR1"[..], "pipe", &Options::default()).unwrap_err(),
            read(&b"1\n"[..], "pipe", &options).unwrap_err(),
        ] {
            assert_eq!(
                error.to_string(),
                "pipe: parquet is read from its end: it must be an uncompressed regular file"
            );
        }
    }

    #[test]
    fn a_footer_that_claims_what_is_not_there_is_refused_at_once() {
        // Field 1: a list of 2^31 - 1 booleans, none of which exist.
        let footer = [0x19, 0xf1, 0xff, 0xff, 0xff, 0xff, 0x07, 0];
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let length = u32::try_from(footer.len()).unwrap().to_le_bytes();
        let bytes = [&MAGIC[..], &footer, &length, &MAGIC].concat();
        file.write_all(&bytes).unwrap();
        let error = open(file.path(), &Options::default()).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with(", row 0: its footer is damaged"),
            "{error}"
        );
    }

    #[test]
    fn a_damaged_file_is_an_error_and_never_a_panic() {
        let pages = Values::Long((0..500).map(Some).collect());
        let ops = Values::Words((0..500).map(|n| Some(["r", "w"][n % 2])).collect());
        let schema = "message t { required int64 page; required binary op; }";
        let file = file_of(schema, &[pages, ops], Compression::SNAPPY);
        let whole = std::fs::read(file.path()).unwrap();
        let mut damaged = tempfile::NamedTempFile::new().unwrap();
        for place in (4..whole.len()).step_by(5) {
            let mut bytes = whole.clone();
            bytes[place] ^= 1 << (place % 8);
            damaged.as_file().set_len(0).unwrap();
            std::io::Seek::rewind(&mut damaged).unwrap();
            damaged.write_all(&bytes).unwrap();
            let mut batch = ReferenceBatch::new();
            if let Ok(mut trace) = open(damaged.path(), &Options::default()) {
                while let Ok(true) = trace.next_batch(&mut batch) {}
            }
            damaged.as_file().set_len(place as u64).unwrap();
            assert!(
                open(damaged.path(), &Options::default()).is_err(),
                "{place}"
            );
        }
    }
}
