//! Partial states: one for each slice of a trace, and the curve of the whole trace from all of them.
//!
//! Slices are mapped by independent processes, on any machines, and merged in the order of the trace.

use std::fs;
use std::io::{self, BufWriter, IntoInnerError, Read as _, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use plimsoll_estimator::{Partial, PartialError, SliceOf};
use plimsoll_output::exit::UsageError;
use plimsoll_output::{AtomicFile, bail_usage, cannot_write, printable_path};

use super::input::{no_curve, read};
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;

/// Options that --merge does not use: the partial states have them.
const NOT_OF_MERGE: [&str; 9] = [
    "seed",
    "format",
    "page_bytes",
    "page_column",
    "key_column",
    "op_column",
    "instructions",
    "device",
    "event",
];
/// Options of a curve, which --partial does not print.
const NOT_OF_PARTIAL: [&str; 3] = ["points", "sizes", "output"];

/// Options of partial states. Flatten them into a verb's `Args`.
#[derive(Debug, clap::Args)]
#[group(conflicts_with_all = ["compare", "stream", "window", "by", "every", "object_sizes", "prefix", "cache_policy"])]
pub struct PartialArgs {
    /// Instead of a curve, write the partial state of this slice of a trace, for --merge (lru, shards, shards-max)
    #[arg(long, value_name = "FILE", conflicts_with_all = NOT_OF_PARTIAL)]
    partial: Option<PathBuf>,
    /// References of the trace before this slice; required by shards at rates from 1/1024 on, otherwise for checks alone
    #[arg(long, value_name = "N", requires = "partial", conflicts_with = "merge", conflicts_with_all = NOT_OF_PARTIAL)]
    start: Option<u64>,
    /// Merge the partial states of a trace's slices, given in order: print the curve of the trace, or write a partial state
    #[arg(long, conflicts_with_all = NOT_OF_MERGE)]
    merge: bool,
    /// With --merge: the other partial states, in order
    #[arg(value_name = "PART", requires = "merge", conflicts_with = "start", conflicts_with_all = NOT_OF_MERGE)]
    others: Vec<PathBuf>,
}

impl PartialArgs {
    /// Whether a partial state is written or read.
    pub(super) fn is_given(&self) -> bool {
        self.merge || self.partial.is_some()
    }

    /// Whether partial states are read instead of a trace.
    pub(super) fn is_merge(&self) -> bool {
        self.merge
    }

    /// Where a partial state is written, if anywhere.
    pub(super) fn path(&self) -> Option<&Path> {
        self.partial.as_deref()
    }

    /// Partial states that are read beside the first.
    pub(super) fn others(&self) -> &[PathBuf] {
        &self.others
    }

    /// Reads a slice and writes its partial state.
    pub(super) fn map(&self, trace: &TraceArgs, of: SliceOf, path: &Path) -> anyhow::Result<()> {
        let mut partial = Partial::new(of, trace.page_size(), self.start).map_err(|error| {
            let error = match error {
                PartialError::NeedsStart { .. } => format!("{error} (--start N)"),
                _ => error.to_string(),
            };
            UsageError(error)
        })?;
        let mut source = trace.open()?;
        let file = create(path)?;
        read(&mut source, |batch| partial.observe(batch.pages()))?;
        write(partial, file, path)
    }

    /// Merges partial states, and prints the curve of the whole or writes the merged state.
    pub(super) fn merge(
        &self,
        trace: &TraceArgs,
        view: &ViewArgs,
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let dashes = self.others.iter().filter(|path| *path == Path::new("-"));
        if dashes.count() + usize::from(trace.trace == Path::new("-")) > 1 {
            bail_usage!("--merge: standard input (-) is given twice, and can be read once");
        }
        let mut merged = with_bytes(&trace.trace, Partial::from_bytes)?;
        for path in &self.others {
            with_bytes(path, |bytes| merged.append(Partial::parse(bytes)?))?;
        }
        if let Some(path) = &self.partial {
            return write(merged, create(path)?, path);
        }
        let trace = TraceArgs {
            page_bytes: Some(merged.page_size()),
            ..trace.clone()
        };
        let references = merged.references();
        let curve = merged.curve().map_err(|error| match error {
            PartialError::Curve(error) => no_curve(&trace, error, references),
            error => anyhow::Error::new(error).context(format!("no curve of '{}'", trace.label())),
        })?;
        view.write(&trace, merged.of().to_string(), references, &curve, out)
    }

    /// Refuses options that nothing uses.
    pub(super) fn check(&self, view: &ViewArgs) -> anyhow::Result<()> {
        if self.partial.is_some() && view.output.path().is_some() {
            bail_usage!("--out: --partial writes no curve");
        }
        Ok(())
    }
}

/// Calls a function with the bytes of a file, or of standard input for `-`; its error names it.
fn with_bytes<T>(
    path: &Path,
    f: impl FnOnce(&[u8]) -> Result<T, PartialError>,
) -> anyhow::Result<T> {
    let (name, bytes) = if path == Path::new("-") {
        let mut bytes = Vec::new();
        let read = io::stdin().read_to_end(&mut bytes);
        ("standard input".to_owned(), read.map(|_| bytes))
    } else {
        (printable_path(path), fs::read(path))
    };
    let bytes = bytes.with_context(|| format!("cannot read '{name}'"))?;
    f(&bytes).with_context(|| format!("'{name}'"))
}

/// Begins a file of which nothing is left if a signal ends the command before it is whole.
fn create(path: &Path) -> anyhow::Result<AtomicFile> {
    let file = AtomicFile::create(path)?;
    file.remove_at_signals()?;
    Ok(file)
}

fn write(partial: Partial, file: AtomicFile, path: &Path) -> anyhow::Result<()> {
    let not_written = || cannot_write(path);
    let mut file = BufWriter::new(file);
    partial.write(&mut file).with_context(not_written)?;
    let file = file.into_inner().map_err(IntoInnerError::into_error);
    file.with_context(not_written)?.persist()
}
