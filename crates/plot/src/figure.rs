//! Results in every format.

use std::io::Write;

use plimsoll_output::{Format, OutputArgs};

use crate::png::encode;

/// A result as a table, CSV, JSON and a picture.
pub trait Figure {
    /// Columns for people to read.
    ///
    /// # Errors
    ///
    /// Why there is no such form; here and below.
    fn table(&self) -> anyhow::Result<String>;

    /// Comma-separated values with a header line.
    ///
    /// # Errors
    ///
    /// As [`table`](Self::table).
    fn csv(&self) -> anyhow::Result<String>;

    /// A line of JSON with "schema": 1.
    ///
    /// # Errors
    ///
    /// As [`table`](Self::table).
    fn json(&self) -> anyhow::Result<String>;

    /// A picture as SVG.
    ///
    /// # Errors
    ///
    /// As [`table`](Self::table).
    fn svg(&self) -> anyhow::Result<String>;

    /// Writes the form and to the file that the options request.
    ///
    /// # Errors
    ///
    /// Why that form cannot be made or written; an older file of the name is then as it was.
    fn write(&self, options: &OutputArgs, out: &mut dyn Write) -> anyhow::Result<()> {
        let format = options.format();
        let text = match format {
            Format::Table => self.table()?,
            Format::Csv => self.csv()?,
            Format::Json => self.json()?,
            Format::Svg | Format::Png => self.svg()?,
        };
        options.write(&encode(text, format)?, out)
    }
}
