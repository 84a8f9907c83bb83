//! The past of a fleet as Parquet files, for queries over many hosts and months.
//!
//! Of each day (UTC, by the host's clock) and host there are two tables, `date=YYYY-MM-DD/host=NAME/curves.parquet` and
//! `working_sets.parquet`. A table is written whole under another name, and gets its own when it is complete. It records the time
//! until which it has the host's past: a table with more than the day and three hours after it is final and never written again,
//! others are replaced. What a file has of times before its daemon's past begins, and of VMs of which the daemon has none, as after it
//! was restarted without its history, is kept. So archiving may be repeated, interrupted, or left out for as long as daemons keep
//! their past.
//!
//! Not here: queries. VMs that have left are archived if they have a UUID.

mod table;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use plimsoll_protocol::curve_json::MissesJson;
use plimsoll_protocol::fleet::{CollectedHost, FleetFile, MissingHost, VmDemands};
use plimsoll_protocol::path::{encoded, of_vm, query};
use plimsoll_protocol::vm::{HistoryView, KeptCurves};

use crate::collect::Collector;
use table::{CURVES, Cell, Columns, Table, WORKING_SETS, is_final};

/// A day, and the unit of archiving.
pub const DAY_MS: u64 = 24 * 60 * 60 * 1000;
/// Time after which a daemon has combined the samples of a day into means of five minutes.
const SETTLED_MS: u64 = 3 * 60 * 60 * 1000;
/// Rows of a day: means of five minutes.
const SAMPLES: usize = 288;
/// Time span of such a mean. It stands for all older rows of its span.
const SPAN_MS: i64 = 5 * 60 * 1000;
/// How far ahead of ours a host's clock may be. A host whose clock is not believed is not archived.
const AHEAD_MAX_MS: i64 = 60 * 60 * 1000;

/// What was archived.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Archived {
    /// Hosts of which nothing is missing.
    pub hosts: u64,
    /// Tables that were written.
    pub written: u64,
    /// Tables that were final already.
    pub kept: u64,
    /// Hosts of which something is missing, each with the reason. They may be archived later.
    pub missing: Vec<MissingHost>,
}

/// Why nothing was archived.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// The directory cannot be used.
    #[error("'{}': {source}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process archives there.
    #[error("another `fleet archive` writes to '{}'", path.display())]
    Taken {
        /// The directory.
        path: PathBuf,
    },
}

/// Archives the hosts of `answers`, which begin at a day and have intervals of [`DAY_MS`], in the directory `root`, which is created.
///
/// # Errors
///
/// [`ArchiveError`]; what failed of single hosts is in the result.
pub fn archive(
    collector: &Collector,
    answers: FleetFile,
    root: &Path,
) -> Result<Archived, ArchiveError> {
    let failed = |source| ArchiveError::Directory {
        path: root.to_owned(),
        source,
    };
    fs::create_dir_all(root).map_err(failed)?;
    // Held until it is dropped.
    let lock = File::open(root).map_err(failed)?;
    lock.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => ArchiveError::Taken {
            path: root.to_owned(),
        },
        TryLockError::Error(source) => failed(source),
    })?;
    let mut archived = Archived {
        missing: answers.missing,
        ..Archived::default()
    };
    let mut names: HashMap<&str, u32> = HashMap::new();
    for host in &answers.hosts {
        *names.entry(&host.demands.host).or_default() += 1;
    }
    let results = collector.each(&answers.hosts, |host| {
        let mut tables = Archived::default();
        let result = match names[host.demands.host.as_str()] {
            1 => whole_host(collector, host, root, &mut tables),
            _ => Err(format!(
                "another host is called {:?} too",
                host.demands.host
            )),
        };
        (tables, result)
    });
    for (host, (tables, result)) in results {
        archived.written += tables.written;
        archived.kept += tables.kept;
        match result {
            Ok(()) => archived.hosts += 1,
            Err(why) => archived.missing.push(MissingHost {
                target: host.target.clone(),
                why,
            }),
        }
    }
    archived.missing.sort_by(|a, b| a.target.cmp(&b.target));
    Ok(archived)
}

/// Archives the days of a host that are not final.
fn whole_host(
    collector: &Collector,
    host: &CollectedHost,
    root: &Path,
    archived: &mut Archived,
) -> Result<(), String> {
    let demands = &host.demands;
    if host.clock_ahead_ms > AHEAD_MAX_MS {
        return Err(format!(
            "its clock is {} s ahead, so its days cannot be dated",
            host.clock_ahead_ms / 1000
        ));
    }
    let now_ms = demands.now_unix_ms;
    if now_ms < demands.since_unix_ms {
        return Err(format!(
            "its clock is {} s behind, so it has none of the days",
            host.clock_ahead_ms.unsigned_abs() / 1000
        ));
    }
    let mut begin_ms = demands.since_unix_ms - demands.since_unix_ms % DAY_MS;
    while begin_ms < now_ms {
        let day = Day {
            collector,
            host,
            folder: root
                .join(format!("date={}", date(begin_ms)?))
                .join(format!("host={}", encoded(&demands.host))),
            begin_ms,
        };
        for (name, columns, rows) in TABLES {
            let path = day.folder.join(name);
            if is_final(&path, begin_ms + DAY_MS + SETTLED_MS) {
                archived.kept += 1;
            } else if day.write(&path, columns, rows)? {
                archived.written += 1;
            }
        }
        begin_ms += DAY_MS;
    }
    Ok(())
}

/// Adds a VM's rows of a day to a table.
type Rows = fn(&Day<'_>, &VmDemands, &mut Table) -> Result<(), String>;

/// The tables: name, columns, and where their rows come from.
const TABLES: [(&str, &Columns, Rows); 2] = [
    ("curves.parquet", CURVES, |day, vm, table| {
        day.curves(vm, table)
    }),
    ("working_sets.parquet", WORKING_SETS, |day, vm, table| {
        day.working_sets(vm, table)
    }),
];

/// A day of a host.
struct Day<'a> {
    collector: &'a Collector,
    host: &'a CollectedHost,
    folder: PathBuf,
    begin_ms: u64,
}

impl Day<'_> {
    /// Writes a table, with the rows of its file that the daemon does not have any more; whether the daemon has a row. If not, nothing
    /// is written.
    fn write(&self, path: &Path, columns: &'static Columns, rows: Rows) -> Result<bool, String> {
        let demands = &self.host.demands;
        let failed = |error: io::Error| format!("cannot write '{}': {error}", path.display());
        let mut table = Table::new(columns, demands.now_unix_ms);
        for vm in &demands.vms {
            rows(self, vm, &mut table)?;
        }
        if table.is_empty() {
            return Ok(false);
        }
        fs::create_dir_all(&self.folder).map_err(failed)?;
        table.add_earlier(path, SPAN_MS).map_err(|error| {
            format!(
                "cannot read '{}': {error}; it stays as it is, and is written anew once it is moved away",
                path.display()
            )
        })?;
        table.write(path).map_err(failed)?;
        Ok(true)
    }

    /// A VM's answer at a path below its own, about this day.
    fn ask<T: serde::de::DeserializeOwned>(
        &self,
        vm: &VmDemands,
        path: &str,
        points: Option<usize>,
    ) -> Result<T, String> {
        let until_ms = self.begin_ms + DAY_MS;
        let query = query(&[
            ("since_unix_ms", Some(self.begin_ms.to_string())),
            ("until_unix_ms", Some(until_ms.to_string())),
            ("points", points.map(|points| points.to_string())),
        ]);
        let path = of_vm(&vm.vm, &format!("{path}{query}"));
        self.collector.ask(&format!("{}{path}", self.host.target))
    }

    /// A time, which must be of this day.
    fn time(&self, unix_ms: u64) -> Result<Cell<'static>, String> {
        match unix_ms >= self.begin_ms && unix_ms - self.begin_ms < DAY_MS {
            true => whole(unix_ms),
            false => Err("it answered for another day than the one requested".to_owned()),
        }
    }

    fn curves(&self, vm: &VmDemands, table: &mut Table) -> Result<(), String> {
        let kept: KeptCurves = self.ask(vm, "/curves", None)?;
        for kept in &kept.curves {
            let (time, curve) = (self.time(kept.unix_ms)?, &kept.curve);
            curve
                .to_curve()
                .map_err(|error| format!("malformed answer: {error}"))?;
            let bytes = |pages: u64| whole(pages.saturating_mul(curve.page_bytes));
            for point in &curve.points {
                let misses = point.misses;
                let rate = |of: fn(&MissesJson) -> f64| real(misses.as_ref().map(of));
                table.push(&[
                    time,
                    Cell::Text(&vm.vm),
                    uuid(vm),
                    bytes(point.size_pages)?,
                    Cell::Real(point.miss_ratio),
                    Cell::Real(point.low),
                    Cell::Real(point.high),
                    rate(|misses| misses.misses_per_second),
                    rate(|misses| misses.misses_low_per_second),
                    rate(|misses| misses.misses_high_per_second),
                    whole(curve.references)?,
                    curve.baseline_pages.map_or(Ok(Cell::Null), bytes)?,
                    real(curve.vcpu_seconds_per_second),
                ]);
            }
        }
        Ok(())
    }

    fn working_sets(&self, vm: &VmDemands, table: &mut Table) -> Result<(), String> {
        let history: HistoryView = self.ask(vm, "/history", Some(SAMPLES))?;
        let optional = |bytes: Option<u64>| bytes.map_or(Ok(Cell::Null), whole);
        for sample in &history.samples {
            table.push(&[
                self.time(sample.unix_ms)?,
                Cell::Text(&vm.vm),
                uuid(vm),
                optional(sample.working_set_bytes)?,
                sample
                    .working_set_bound
                    .map_or(Cell::Null, |bound| Cell::Text(bound.name())),
                whole(sample.direct_bytes)?,
                whole(sample.cache_bytes)?,
                optional(sample.target_bytes)?,
                real(sample.misses_per_second),
                real(sample.relative),
                real(sample.overhead_ratio),
                whole(sample.lost)?,
            ]);
        }
        Ok(())
    }
}

fn uuid(vm: &VmDemands) -> Cell<'_> {
    vm.uuid.as_deref().map_or(Cell::Null, Cell::Text)
}

fn real(value: Option<f64>) -> Cell<'static> {
    value.map_or(Cell::Null, Cell::Real)
}

fn whole(value: u64) -> Result<Cell<'static>, String> {
    let value = i64::try_from(value);
    value
        .map(Cell::Whole)
        .map_err(|_| "malformed answer: a number above 2^63".to_owned())
}

/// The date of a time, as 2026-11-25.
fn date(unix_ms: u64) -> Result<String, String> {
    let time = i64::try_from(unix_ms).ok();
    let time = time.and_then(|ms| Timestamp::from_millisecond(ms).ok());
    let time = time.ok_or_else(|| "malformed answer: a time that has no date".to_owned())?;
    Ok(time.strftime("%F").to_string())
}
