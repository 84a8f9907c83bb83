//! Counter Stacks on disk: recording a trace's, and the curve of any window from the record.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read as _, Write};
use std::ops::Range;
use std::path::Path;
use std::str::FromStr;

use anyhow::Context;
use plimsoll_estimator::{CounterStacksOptions, CounterStream, Estimator, StreamWriter};

use super::input::{curve_of, read};
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;
use plimsoll_output::{AtomicFile, grouped};

/// A window of a stream, in references from its beginning: `FROM..TO`, either of which may be left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    from: u64,
    to: Option<u64>,
}

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| match text {
            "" => Ok(None),
            text => text.parse().map(Some),
        };
        text.split_once("..")
            .and_then(|(from, to)| Some((number(from).ok()?, number(to).ok()?)))
            .map(|(from, to)| Self {
                from: from.unwrap_or(0),
                to,
            })
            .ok_or_else(|| format!("'{text}' is no window such as 0..1000000 or 500000.."))
    }
}

/// Reads the trace into counters that are recorded at `path`, and prints the whole trace's curve.
pub(super) fn record(
    trace: &TraceArgs,
    options: CounterStacksOptions,
    path: &Path,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut source = trace.open()?;
    let file = AtomicFile::create(path)?;
    let mut writer = StreamWriter::new(options, BufWriter::new(file))?;
    let references = read(&mut source, |batch| writer.observe(batch))?;
    let curve = curve_of(trace, &mut writer, references)?;
    let not_written = || format!("cannot write '{}'", path.display());
    let file = writer.finish().with_context(not_written)?;
    let file = file
        .into_inner()
        .map_err(std::io::IntoInnerError::into_error);
    file.with_context(not_written)?.persist()?;
    view.write(trace, "Counter Stacks".to_owned(), references, &curve, out)
}

/// Opens a record of counters; `None` if the file is none.
///
/// # Errors
///
/// That the file begins as one and cannot be read as one.
pub(super) fn open(path: &Path) -> anyhow::Result<Option<CounterStream>> {
    let mut head = [0; CounterStream::MAGIC.len()];
    // A pipe is not read here: its bytes would be missing in the trace.
    let is_record = path != Path::new("-")
        && path.is_file()
        && File::open(path).is_ok_and(|mut file| file.read_exact(&mut head).is_ok())
        && head == *CounterStream::MAGIC;
    if !is_record {
        return Ok(None);
    }
    let failed = || format!("cannot read '{}'", path.display());
    let file = File::open(path).with_context(failed)?;
    let stream = CounterStream::open(BufReader::new(file)).with_context(failed)?;
    Ok(Some(stream))
}

/// Prints the curve of a window of a record.
pub(super) fn show(
    trace: &TraceArgs,
    stream: &CounterStream,
    window: Option<Window>,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let path = trace.trace.display();
    if stream.lost_bytes() > 0 {
        eprintln!(
            "plimsoll: '{path}' is damaged: its last {} bytes could not be read, {} references before them could",
            stream.lost_bytes(),
            stream.references()
        );
    } else if !stream.is_finished() {
        eprintln!("plimsoll: '{path}' is incomplete: its end is counted approximately");
    }
    let window = window.unwrap_or(Window { from: 0, to: None });
    let Range { start, end } = window.from..window.to.unwrap_or(stream.references());
    let curve = stream
        .curve(start..end)
        .with_context(|| format!("no curve of '{path}'"))?;
    let method = format!(
        "Counter Stacks, references {} to {}",
        grouped(start as f64),
        grouped(end as f64)
    );
    view.write(trace, method, end - start, &curve, out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_may_be_open_at_either_end() {
        let window = |from, to| Ok(Window { from, to });
        assert_eq!("10..20".parse(), window(10, Some(20)));
        assert_eq!("..20".parse(), window(0, Some(20)));
        assert_eq!("10..".parse(), window(10, None));
        assert_eq!("..".parse(), window(0, None));
        for wrong in ["", "10", "a..b", "1..2..3", "-1..2"] {
            assert!(wrong.parse::<Window>().is_err(), "{wrong}");
        }
    }
}
