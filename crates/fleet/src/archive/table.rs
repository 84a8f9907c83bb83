//! A table of the archive: its columns, and its file.
//!
//! Columns are compressed by Zstandard. The footer's metadata have `plimsoll.until_unix_ms`, the time until which the table has the
//! host's past, and `plimsoll.schema`.

use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::Path;
use std::sync::Arc;

use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::errors::Result as ParquetResult;
use parquet::file::metadata::{KeyValue, ParquetMetaDataReader};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::parser::parse_message_type;
use plimsoll_protocol::SCHEMA;

/// Rows of a row group, which a reader may skip by its range of names and times.
const GROUP_ROWS: usize = 1 << 18;
/// Metadata of the footer.
const UNTIL: &str = "plimsoll.until_unix_ms";
const SCHEMA_KEY: &str = "plimsoll.schema";

/// Columns of a table, as in a Parquet schema.
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
    pub(super) fn push<const N: usize>(&mut self, cells: [Cell<'_>; N]) {
        assert_eq!(N, self.declared.len());
        if self.groups.is_empty() || self.rows == GROUP_ROWS {
            let columns = self.declared.iter().map(|declared| Column::new(declared));
            self.groups.push(columns.collect());
            self.rows = 0;
        }
        self.rows += 1;
        let columns = self.groups.last_mut().into_iter().flatten();
        for (column, cell) in columns.zip(cells) {
            column.push(cell);
        }
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
