//! A table of the archive: its columns, and its file.
//!
//! Columns are compressed by Zstandard. The footer's metadata have `plimsoll.until_unix_ms`, the time until which the table has the
//! host's past, and `plimsoll.schema`.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::Path;
use std::sync::Arc;

use parquet::basic::{Compression, ZstdLevel};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::metadata::{KeyValue, ParquetMetaDataReader};
use parquet::file::properties::WriterProperties;
use parquet::file::reader::{FileReader as _, RowGroupReader, SerializedFileReader};
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::parser::parse_message_type;
use plimsoll_protocol::SCHEMA;

/// Rows of a row group, which a reader may skip by its range of names and times.
const GROUP_ROWS: usize = 1 << 18;
/// Metadata of the footer.
const UNTIL: &str = "plimsoll.until_unix_ms";
const SCHEMA_KEY: &str = "plimsoll.schema";

/// Columns of a table, as in a Parquet schema; the first three are time, name and UUID.
pub(super) type Columns = [&'static str];

/// A point of a curve.
pub(super) const CURVES: &Columns = &[
    "REQUIRED INT64 time (TIMESTAMP(MILLIS,true))",
    "REQUIRED BYTE_ARRAY vm (STRING)",
    "OPTIONAL BYTE_ARRAY uuid (STRING)",
    "REQUIRED INT64 size_bytes",
    "REQUIRED DOUBLE miss_ratio",
    "REQUIRED DOUBLE low",
    "REQUIRED DOUBLE high",
    "OPTIONAL DOUBLE misses_per_second",
    "OPTIONAL DOUBLE misses_low_per_second",
    "OPTIONAL DOUBLE misses_high_per_second",
    "REQUIRED INT64 reference_count",
    "OPTIONAL INT64 baseline_bytes",
    "OPTIONAL DOUBLE vcpu_seconds_per_second",
];

/// A VM in some minutes.
pub(super) const WORKING_SETS: &Columns = &[
    "REQUIRED INT64 time (TIMESTAMP(MILLIS,true))",
    "REQUIRED BYTE_ARRAY vm (STRING)",
    "OPTIONAL BYTE_ARRAY uuid (STRING)",
    "OPTIONAL INT64 working_set_bytes",
    "OPTIONAL BYTE_ARRAY working_set_bound (STRING)",
    "REQUIRED INT64 direct_bytes",
    "REQUIRED INT64 cache_bytes",
    "OPTIONAL INT64 target_bytes",
    "OPTIONAL DOUBLE misses_per_second",
    "OPTIONAL DOUBLE relative_misses",
    "OPTIONAL DOUBLE overhead_ratio",
    "REQUIRED INT64 lost",
];

/// A value of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Cell<'a> {
    /// None; the column must be optional.
    Null,
    /// Of `INT64`.
    Whole(i64),
    /// Of `DOUBLE`.
    Real(f64),
    /// Of `BYTE_ARRAY`.
    Text(&'a str),
}

/// The values of a column.
#[derive(Debug)]
enum Values {
    Whole(Vec<i64>),
    Real(Vec<f64>),
    Text(Vec<ByteArray>),
}

#[derive(Debug)]
struct Column {
    values: Values,
    /// Which rows have a value; `None` if all must.
    present: Option<Vec<i16>>,
}

impl Column {
    fn new(declared: &str) -> Self {
        let mut words = declared.split(' ');
        let is_optional = words.next() == Some("OPTIONAL");
        let values = match words.next() {
            Some("INT64") => Values::Whole(Vec::new()),
            Some("DOUBLE") => Values::Real(Vec::new()),
            _ => Values::Text(Vec::new()),
        };
        Self {
            values,
            present: is_optional.then(Vec::new),
        }
    }

    fn push(&mut self, cell: Cell<'_>) {
        if let Some(present) = &mut self.present {
            present.push(i16::from(cell != Cell::Null));
        }
        match (&mut self.values, cell) {
            (Values::Whole(values), Cell::Whole(value)) => values.push(value),
            (Values::Real(values), Cell::Real(value)) => values.push(value),
            (Values::Text(values), Cell::Text(value)) => values.push(ByteArray::from(value)),
            (_, Cell::Null) if self.present.is_some() => {}
            (column, cell) => unreachable!("{cell:?} in {column:?}"),
        }
    }

    /// Reads the column that is so declared. If a file of an earlier version has none, it has no values.
    fn read(declared: &str, group: &dyn RowGroupReader) -> ParquetResult<Self> {
        let name = declared.split(' ').nth(2).unwrap_or_default();
        let other = || ParquetError::General(format!("no column {name} of this form"));
        let rows = usize::try_from(group.metadata().num_rows())?;
        let mut column = Self::new(declared);
        let columns = group.metadata().columns();
        let place = columns
            .iter()
            .position(|own| own.column_path().string() == name);
        let Some(place) = place else {
            column.present.as_mut().ok_or_else(other)?.resize(rows, 0);
            return Ok(column);
        };
        let descriptor = columns[place].column_descr();
        let levels = (descriptor.max_def_level(), descriptor.max_rep_level());
        if levels != (i16::from(column.present.is_some()), 0) {
            return Err(other());
        }
        let present = column.present.as_mut();
        match (&mut column.values, group.get_column_reader(place)?) {
            (Values::Whole(values), ColumnReader::Int64ColumnReader(reader)) => {
                read_all(reader, rows, present, values)?;
            }
            (Values::Real(values), ColumnReader::DoubleColumnReader(reader)) => {
                read_all(reader, rows, present, values)?;
            }
            (Values::Text(values), ColumnReader::ByteArrayColumnReader(reader)) => {
                read_all(reader, rows, present, values)?;
                for value in values {
                    value.as_utf8()?;
                }
            }
            _ => return Err(other()),
        }
        Ok(column)
    }

    /// The values of all rows.
    fn cells(&self) -> impl Iterator<Item = Cell<'_>> {
        let rows = match (&self.present, &self.values) {
            (Some(present), _) => present.len(),
            (None, Values::Whole(values)) => values.len(),
            (None, Values::Real(values)) => values.len(),
            (None, Values::Text(values)) => values.len(),
        };
        let mut next = 0;
        (0..rows).map(move |row| {
            if self
                .present
                .as_ref()
                .is_some_and(|present| present[row] == 0)
            {
                return Cell::Null;
            }
            next += 1;
            match &self.values {
                Values::Whole(values) => Cell::Whole(values[next - 1]),
                Values::Real(values) => Cell::Real(values[next - 1]),
                Values::Text(values) => Cell::Text(values[next - 1].as_utf8().unwrap_or_default()),
            }
        })
    }

    fn write(&self, mut column: SerializedColumnWriter<'_>) -> ParquetResult<()> {
        let present = self.present.as_deref();
        match &self.values {
            Values::Whole(values) => {
                let writer = column.typed::<Int64Type>();
                writer.write_batch(values, present, None)?;
            }
            Values::Real(values) => {
                let writer = column.typed::<DoubleType>();
                writer.write_batch(values, present, None)?;
            }
            Values::Text(values) => {
                let writer = column.typed::<ByteArrayType>();
                writer.write_batch(values, present, None)?;
            }
        }
        column.close()
    }
}

/// Reads the values of so many rows, and which of them have one.
fn read_all<T: DataType>(
    mut reader: ColumnReaderImpl<T>,
    rows: usize,
    mut present: Option<&mut Vec<i16>>,
    values: &mut Vec<T::T>,
) -> ParquetResult<()> {
    let mut read = 0;
    while read < rows {
        let (more, ..) = reader.read_records(rows - read, present.as_deref_mut(), None, values)?;
        if more == 0 {
            return Err(ParquetError::EOF(format!("{read} of {rows} rows")));
        }
        read += more;
    }
    Ok(())
}

/// The rows of a row group.
fn rows_of(columns: &[Column]) -> impl Iterator<Item = Vec<Cell<'_>>> {
    let mut columns: Vec<_> = columns.iter().map(Column::cells).collect();
    std::iter::from_fn(move || columns.iter_mut().map(Iterator::next).collect())
}

/// A table in memory.
#[derive(Debug)]
pub(super) struct Table {
    declared: &'static Columns,
    /// Columns of each row group.
    groups: Vec<Vec<Column>>,
    /// Rows of the last row group.
    rows: usize,
    until_unix_ms: u64,
}

impl Table {
    /// An empty table of a host's past until a time.
    pub(super) fn new(declared: &'static Columns, until_unix_ms: u64) -> Self {
        Self {
            declared,
            groups: Vec::new(),
            rows: 0,
            until_unix_ms,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Adds a row, with one cell for each column.
    pub(super) fn push(&mut self, cells: &[Cell<'_>]) {
        assert_eq!(cells.len(), self.declared.len());
        if self.groups.is_empty() || self.rows == GROUP_ROWS {
            let columns = self.declared.iter().map(|declared| Column::new(declared));
            self.groups.push(columns.collect());
            self.rows = 0;
        }
        self.rows += 1;
        let columns = self.groups.last_mut().into_iter().flatten();
        for (column, cell) in columns.zip(cells) {
            column.push(*cell);
        }
    }

    /// Adds the rows of a file that are of an earlier span of time than the first row of their VM here, and those of VMs that have
    /// no row here. A file that does not exist, or has no readable footer, has no rows.
    pub(super) fn add_earlier(&mut self, path: &Path, span_ms: i64) -> io::Result<()> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            file => file?,
        };
        match SerializedFileReader::new(file) {
            Ok(file) => self
                .add_earlier_of(&file, span_ms)
                .map_err(io::Error::other),
            Err(_) => Ok(()),
        }
    }

    fn add_earlier_of(
        &mut self,
        file: &SerializedFileReader<File>,
        span_ms: i64,
    ) -> ParquetResult<()> {
        // By UUID and by name, as a VM may have got its UUID since.
        let mut first: HashMap<String, i64> = HashMap::new();
        for row in self.groups.iter().flat_map(|columns| rows_of(columns)) {
            let [Cell::Whole(time), ids @ ..] = &row[..3] else {
                continue;
            };
            for id in ids {
                if let Cell::Text(id) = *id {
                    let first = first.entry(id.to_owned()).or_insert(*time);
                    *first = (*first).min(*time);
                }
            }
        }
        for group in 0..file.num_row_groups() {
            let group = file.get_row_group(group)?;
            let columns = self.declared.iter();
            let columns = columns.map(|declared| Column::read(declared, &*group));
            let columns = columns.collect::<ParquetResult<Vec<_>>>()?;
            for row in rows_of(&columns) {
                let is_earlier = match row[..3] {
                    [Cell::Whole(time), _, Cell::Text(id)]
                    | [Cell::Whole(time), Cell::Text(id), Cell::Null] => first
                        .get(id)
                        .is_none_or(|first| time.div_euclid(span_ms) < first.div_euclid(span_ms)),
                    _ => false,
                };
                if is_earlier {
                    self.push(&row);
                }
            }
        }
        Ok(())
    }

    /// Writes it to a file, which is replaced when the new one is complete and on disk.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        let part = path.with_extension("parquet.part");
        let written = self.write_part(&part);
        let named = written.and_then(|()| fs::rename(&part, path));
        if named.is_err() {
            // It is no table.
            let _ = fs::remove_file(&part);
        }
        named
    }

    fn write_part(&self, part: &Path) -> io::Result<()> {
        let out = BufWriter::new(File::create(part)?);
        let out = self.write_to(out).map_err(io::Error::other)?;
        out.into_inner()?.sync_all()
    }

    fn write_to(&self, out: BufWriter<File>) -> ParquetResult<BufWriter<File>> {
        let schema = format!("message table {{ {}; }}", self.declared.join("; "));
        let schema = parse_message_type(&schema)?;
        let metadata = [
            (SCHEMA_KEY, SCHEMA.to_string()),
            (UNTIL, self.until_unix_ms.to_string()),
        ];
        let metadata = metadata.map(|(key, value)| KeyValue::new(key.to_owned(), value));
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_key_value_metadata(Some(metadata.to_vec()))
            .build();
        let mut file = SerializedFileWriter::new(out, Arc::new(schema), Arc::new(properties))?;
        for columns in &self.groups {
            let mut group = file.next_row_group()?;
            for column in columns {
                if let Some(writer) = group.next_column()? {
                    column.write(writer)?;
                }
            }
            group.close()?;
        }
        file.into_inner()
    }
}

/// Whether there is a table with a host's past until `unix_ms` or later.
pub(super) fn is_final(path: &Path, unix_ms: u64) -> bool {
    let Ok(file) = File::open(path) else {
        return false;
    };
    let Ok(metadata) = ParquetMetaDataReader::new().parse_and_finish(&file) else {
        return false;
    };
    let pairs = metadata.file_metadata().key_value_metadata();
    let mut pairs = pairs.into_iter().flatten();
    let until = pairs.find(|pair| pair.key == UNTIL);
    let until = until.and_then(|pair| pair.value.as_ref()?.parse().ok());
    until.is_some_and(|until: u64| until >= unix_ms)
}
