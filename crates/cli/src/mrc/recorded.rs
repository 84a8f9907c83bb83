//! Counter Stacks on disk: recording a trace's, and the curve of any window from the record.

use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use anyhow::Context;
use plimsoll_estimator::{
    CounterStacksOptions, CounterStream, Estimator, StreamWindow, StreamWriter,
};

use super::input::{curve_of, read};
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;
use plimsoll_output::{AtomicFile, bail_usage, cannot_write, grouped};

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
    file.remove_at_signals()?;
    let mut writer = StreamWriter::new(options, trace.page_size(), BufWriter::new(file))?;
    let references = read(&mut source, |batch| writer.observe(batch.pages()))?;
    let curve = curve_of(trace, &mut writer, references)?;
    let not_written = || cannot_write(path);
    let file = writer.finish().with_context(not_written)?;
    let file = file
        .into_inner()
        .map_err(std::io::IntoInnerError::into_error);
    file.with_context(not_written)?.persist()?;
    view.write(trace, "Counter Stacks".to_owned(), references, &curve, out)
}

/// Prints the curve of a window of a record.
pub(super) fn show(
    trace: &TraceArgs,
    stream: &CounterStream,
    window: Option<StreamWindow>,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let path = trace.label();
    let page_bytes = stream.page_size().unwrap_or(trace.page_size());
    if trace.page_bytes.is_some_and(|given| given != page_bytes) {
        bail_usage!(
            "--page-bytes: '{path}' was recorded with pages of {} bytes",
            page_bytes.bytes()
        );
    }
    let trace = &TraceArgs {
        page_bytes: Some(page_bytes),
        ..trace.clone()
    };
    if stream.lost_bytes() > 0 {
        eprintln!(
            "plimsoll: '{path}' is damaged: its last {} bytes could not be read, {} references before them could",
            stream.lost_bytes(),
            stream.references()
        );
    } else if !stream.is_finished() {
        eprintln!("plimsoll: '{path}' is incomplete: its end is counted approximately");
    }
    let Range { start, end } = window.unwrap_or_default().of(stream);
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
