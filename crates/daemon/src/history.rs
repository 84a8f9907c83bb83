//! Curves, samples and decisions of the past, in an embedded store (redb) on disk.
//!
//! Samples are kept turn by turn for two hours, as means of five minutes after that; heat every five minutes, curves
//! every ten, thinned, and the last one of a VM that leaves. All are bounded in age and together in bytes, the oldest
//! going first.
//!
//! Records that must be durable (decisions, settings, flags) are on disk when the call returns; samples follow within
//! five minutes. No call fails for the caller: what cannot be written to disk is kept in memory, up to a bound,
//! reported by [`History::warnings`] and written to disk once that works again. A damaged file is set aside, never
//! deleted.

mod form;
mod store;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use plimsoll_actuator::{BalloonRecord, Holding};
use plimsoll_flow::MissRatioCurve;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::decision::{Decision, Phase};
use plimsoll_protocol::request::SettingsChange;
use plimsoll_protocol::vm::{HeatRow, HeatmapView, Sample};
use plimsoll_vm::ProcessId;
use redb::WriteTransaction;
use sha2::{Digest as _, Sha256};
use tracing::warn;
use xxhash_rust::xxh3::xxh3_64;

use crate::config::Config;
use crate::moves::SAME_BYTES;
use form::{Heat, Turn, VmRecord};
use store::{Failure, Store};

/// Time span of a mean, and the interval at which heat is kept.
const SPAN_MS: u64 = 5 * 60 * 1000;
const DAY_MS: u64 = 24 * 60 * 60 * 1000;
/// The interval at which a VM's curve is kept: half of the VMs in each span.
const CURVES_MS: u64 = 2 * SPAN_MS;
/// Maximum bytes of the history in memory.
const MEMORY_BYTES_MAX: u64 = 8 << 20;
/// Interval between attempts to write to disk again.
const RETRY_AFTER: Duration = Duration::from_mins(1);
/// Maximum number of points returned at once.
const POINTS_MAX: usize = 10_000;
/// Maximum number of decisions returned at once.
const DECISIONS_MAX: usize = 1000;
/// Begins the identifiers of control groups.
const GROUP: &str = "\0cgroup:";
/// Maximum number of cells of a heatmap that is kept; larger ones are not.
const CELLS_MAX: usize = 4096;

/// Why history could not be opened. The file is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HistoryError {
    /// Another process has locked it.
    #[error(
        "{}: another plimsolld has this history open; stop it, or configure another history.file", path.display()
    )]
    Held {
        /// The file.
        path: PathBuf,
    },
}

/// Limits of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum bytes on disk.
    pub bytes_max: u64,
    /// Maximum age of a record.
    pub keep: Duration,
}

impl Limits {
    /// The configured limits.
    pub fn of(config: &Config) -> Self {
        Self {
            bytes_max: config.history_bytes_max,
            keep: config.history_keep,
        }
    }
}

/// Where a record that must be durable is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Persistence {
    /// On disk.
    OnDisk,
    /// Only in memory, for now or permanently.
    InMemory,
}

/// What identifies the records of a control group: its path below the root of its hierarchy. No VM can have such a name.
pub fn group_id(path: &str) -> String {
    format!("{GROUP}{path}")
}

/// What is stored of a VM before it is resized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResizeMark {
    /// The process that is resized; `None` if none was.
    pub process: Option<ProcessId>,
    /// The most that its cache has in that decision.
    pub cache_bytes: Option<u64>,
    /// The most that it has above its baseline in that decision; `None` if an earlier version stored the mark.
    pub decided_above_bytes: Option<u64>,
    /// How far above its baseline somebody else had set it when it was last resized.
    pub others_above_bytes: Option<u64>,
}

impl ResizeMark {
    /// The mark before a process with this baseline is resized, after this one.
    #[must_use]
    pub fn next(self, process: ProcessId, baseline_bytes: u64, from: Holding, to: Holding) -> Self {
        let above = |holding: Holding| holding.bytes().saturating_sub(baseline_bytes);
        // Another process has what it was started with.
        let others_above_bytes = match self.process.is_none_or(|its| its == process) {
            true => self.kept_above_bytes(process, above(from)),
            false => 0,
        };
        Self {
            process: Some(process),
            cache_bytes: Some(from.cache_bytes.max(to.cache_bytes)),
            decided_above_bytes: Some(above(from).max(above(to))),
            others_above_bytes: Some(others_above_bytes),
        }
    }

    /// How much of what a process has above its baseline no decision gave it.
    pub fn kept_above_bytes(&self, process: ProcessId, above_bytes: u64) -> u64 {
        let decided = self.decided_above_bytes.unwrap_or(u64::MAX);
        match self.process == Some(process) && above_bytes <= decided.saturating_add(SAME_BYTES) {
            true => self.others_above_bytes.unwrap_or(0).min(above_bytes),
            false => above_bytes,
        }
    }
}

/// A VM or a control group at the end of a turn.
#[derive(Debug, Clone, Copy)]
pub struct TurnRecord<'a> {
    /// Its name, or [`group_id`].
    pub vm: &'a str,
    /// Its memory and misses.
    pub sample: Sample,
    /// Its heatmap: bytes of a cell, and the newest period.
    pub heat: Option<(u64, &'a HeatRow)>,
    /// Its curve.
    pub curve: Option<&'a CurveJson>,
}

/// The past of a host. May be used from any thread.
#[derive(Debug)]
pub struct History {
    state: Mutex<State>,
}

/// Whether records may be dropped by their age: not within a day after a leap of more than a day, because the time of day may be
/// wrong then, and what was dropped is gone when it is set right.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Ageing {
    /// When a span was last stored; 0 if none was.
    last_ms: u64,
    /// No record is dropped before.
    from_ms: u64,
}

impl Ageing {
    /// Notes when a span is stored; whether records may be dropped now.
    fn is_due(&mut self, unix_ms: u64) -> bool {
        let last_ms = std::mem::replace(&mut self.last_ms, unix_ms);
        let believed_ms = unix_ms.saturating_add(DAY_MS);
        if last_ms > 0 && unix_ms.saturating_sub(last_ms) > DAY_MS {
            self.from_ms = believed_ms;
        }
        // After a leap that was taken back, it would be long.
        self.from_ms = self.from_ms.min(believed_ms);
        unix_ms >= self.from_ms
    }
}

#[derive(Debug)]
struct State {
    /// Path of the file; `None` if there is to be none.
    place: Option<(PathBuf, Limits)>,
    /// The file, while it can be read.
    file: Option<Arc<Store>>,
    /// Records that the file does not have; writes go here while there is one.
    memory: Option<Arc<Store>>,
    /// Whether `flags` and `vms` include the contents of the file.
    loaded: bool,
    began_anew: bool,
    paused: bool,
    phase: Option<Phase>,
    /// The next decision's number.
    next_id: u64,
    vms: BTreeMap<String, VmRecord>,
    /// The UUIDs, which identify their records, of VMs by name.
    uuids: HashMap<String, String>,
    /// Heat since it was last stored.
    heat: HashMap<u64, Heat>,
    /// The span in which heat and curves were last stored.
    span: Option<u64>,
    ageing: Ageing,
    problem: Option<String>,
    retry_at: Instant,
}

impl History {
    /// Opens or creates the history at `path`; also returns warnings for the operator.
    ///
    /// A file that is damaged or of an unknown format is renamed, and a new one created. If none can be opened or
    /// created, history is kept in memory and the disk retried later.
    ///
    /// # Errors
    ///
    /// [`HistoryError::Held`] by another process.
    pub fn open(path: &Path, limits: Limits) -> Result<(Self, Vec<String>), HistoryError> {
        let mut state = State::new(Some((path.to_owned(), limits)));
        let mut warnings = Vec::new();
        match state.open_file(path, limits, &mut warnings) {
            Ok(()) => {}
            Err(Failure::Held) => {
                return Err(HistoryError::Held {
                    path: path.to_owned(),
                });
            }
            Err(failure) => {
                state.began_anew = fs::symlink_metadata(path).is_ok();
                state.paused = state.began_anew;
                state.keep_in_memory(&failure);
                warnings.extend(state.problem.clone());
            }
        }
        let state = Mutex::new(state);
        Ok((Self { state }, warnings))
    }

    /// A history in memory alone, of a few hours.
    pub fn nowhere() -> Self {
        let mut state = State::new(None);
        state.memory = Store::in_memory().ok().map(Arc::new);
        Self {
            state: Mutex::new(state),
        }
    }

    /// Why history is not on disk although it should be, and how the daemon proceeds.
    pub fn warnings(&self) -> Vec<String> {
        self.state().problem.iter().cloned().collect()
    }

    /// Whether a file was present that could not be read, at the start of this process or of an earlier one, and moving was not
    /// resumed since: earlier flags, settings and moves in progress are unknown.
    pub fn began_anew(&self) -> bool {
        self.state().began_anew
    }

    /// Bytes on disk; `None` if there is no file.
    pub fn bytes(&self) -> Option<u64> {
        let state = self.state();
        let (path, _) = state.place.as_ref()?;
        bytes_on_disk(path)
    }

    /// Records of the VM called `name` are from now on those of its UUID, under whatever names it had; without one,
    /// those of its name. What was recorded under the name alone, if it belongs to no UUID, becomes that UUID's.
    pub fn identify(&self, name: &str, uuid: Option<&str>) {
        let mut state = self.state();
        let Some(uuid) = uuid else {
            state.uuids.remove(name);
            return;
        };
        state.uuids.insert(name.to_owned(), uuid.to_owned());
        if state.vms.contains_key(uuid) {
            return;
        }
        let former = state.vms.remove(name);
        let was_here = former.is_some();
        let record = former.unwrap_or_default();
        state.vms.insert(uuid.to_owned(), record.clone());
        if let Some(heat) = state.heat.remove(&key_of(name)) {
            state.heat.insert(key_of(uuid), heat);
        }
        let _ = state.write(true, &|txn| {
            store::put_vm(txn, name, None)?;
            store::put_vm(txn, uuid, Some(&record))?;
            if was_here {
                store::move_turns(txn, key_of(name), key_of(uuid))?;
            }
            store::move_records(txn, key_of(name), key_of(uuid))
        });
    }

    /// Stores the state of all VMs at the end of a turn, in one transaction.
    pub fn record_turn(&self, vms: &[TurnRecord<'_>]) {
        if let Some(unix_ms) = vms.iter().map(|vm| vm.sample.unix_ms).max() {
            self.state().record_turn(unix_ms, vms);
        }
    }

    /// Stores the last curves of VMs that leave, or of all when the daemon ends: what was observed since a curve was kept
    /// would be lost. A VM whose newest kept curve is less than ten minutes old gets no other, because right sizes weigh all
    /// kept curves equally.
    pub fn keep_last_curves(&self, unix_ms: u64, curves: &[CurveJson]) {
        let is_due = |curve: &&CurveJson| {
            // One that a wrong clock dated ahead is none of the last minutes.
            let newest = self.curve_at(&curve.vm, unix_ms);
            newest.is_none_or(|(made, _)| made.saturating_add(CURVES_MS) <= unix_ms)
        };
        let due = curves.iter().filter(is_due);
        let due: Vec<_> = due
            .map(|curve| (self.key(&curve.vm), form::Curve::thinned(curve)))
            .collect();
        if due.is_empty() {
            return;
        }
        let mut state = self.state();
        let vms = state.vms.clone();
        let _ = state.write(true, &|txn| {
            store::put_curves(txn, unix_ms, &due)?;
            // With the time at which they were last present.
            store::put_all_vms(txn, &vms)
        });
    }

    /// Writes all turns to disk.
    pub fn flush(&self) -> Persistence {
        self.state().write(true, &|_| Ok(()))
    }

    /// Stores a decision or its new state. Inputs stored earlier are kept if it comes without.
    pub fn put_decision(&self, decision: &Decision) -> Persistence {
        let mut state = self.state();
        let next_id = state.next_id.max(decision.id.saturating_add(1));
        state.next_id = next_id;
        state.write(true, &|txn| {
            store::put_next_id(txn, next_id)?;
            store::put_decision(txn, decision)
        })
    }

    /// A number for a decision: increasing, and never repeated while the file exists.
    pub fn next_id(&self) -> u64 {
        let mut state = self.state();
        let id = state.next_id;
        let next_id = id.saturating_add(1);
        state.next_id = next_id;
        let _ = state.write(true, &|txn| store::put_next_id(txn, next_id));
        id
    }

    /// A decision with its inputs.
    pub fn decision(&self, id: u64) -> Option<Decision> {
        let stores = self.stores();
        let mut inputs = None;
        let mut found: Option<Decision> = None;
        for store in &stores {
            if found.is_none() {
                found = told(store.decision(id)).flatten();
            }
            inputs = inputs.or_else(|| told(store.inputs(id)).flatten());
        }
        let mut decision = found?;
        decision.inputs = inputs;
        Some(decision)
    }

    /// Decisions that touch `vm`, or all, with numbers below `before`; newest first, at most a thousand.
    ///
    /// They come without inputs, which can be large: [`decision`](Self::decision) has them.
    pub fn decisions(&self, vm: Option<&str>, before: Option<u64>, limit: usize) -> Vec<Decision> {
        let limit = limit.min(DECISIONS_MAX);
        let vm = vm.map(key_of);
        let mut found = BTreeMap::new();
        // The version in memory is newer than the one in the file.
        for store in self.stores() {
            for decision in told(store.decisions(vm, before, limit)).unwrap_or_default() {
                found.entry(decision.id).or_insert(decision);
            }
        }
        found.into_values().rev().take(limit).collect()
    }

    /// Decisions that have not ended, in full, oldest first: after a crash, those that were in progress.
    pub fn unfinished(&self) -> Vec<Decision> {
        let mut ids: Vec<u64> = Vec::new();
        for store in self.stores() {
            ids.extend(told(store.open_ids()).unwrap_or_default());
        }
        ids.sort_unstable();
        ids.dedup();
        let all = ids.into_iter().filter_map(|id| self.decision(id));
        all.filter(|decision| !decision.state.has_ended()).collect()
    }

    /// A VM's samples from `since_ms` until before `until_ms`, in ascending time; more than `points` are combined.
    pub fn samples(&self, vm: &str, since_ms: u64, until_ms: u64, points: usize) -> Vec<Sample> {
        let (mut samples, key) = (Vec::new(), self.key(vm));
        for store in self.stores() {
            samples.extend(told(store.samples(key, since_ms, until_ms)).unwrap_or_default());
        }
        samples.sort_by_key(|sample| sample.unix_ms);
        thinned(&samples, points.clamp(1, POINTS_MAX))
    }

    /// A VM's newest curve at or before `unix_ms`, and its time.
    pub fn curve_at(&self, vm: &str, unix_ms: u64) -> Option<(u64, CurveJson)> {
        let (curves, key) = (self.stores().into_iter(), self.key(vm));
        let curves = curves.filter_map(|store| told(store.curve_at(key, unix_ms)).flatten());
        let (made, curve) = curves.max_by_key(|(made, _)| *made)?;
        Some((made, curve.into_json(vm)))
    }

    /// A VM's curves from `since_ms`, in ascending time.
    pub fn curves(&self, vm: &str, since_ms: u64) -> Vec<(u64, CurveJson)> {
        let (mut curves, key) = (Vec::new(), self.key(vm));
        for store in self.stores() {
            curves.extend(told(store.curves(key, since_ms)).unwrap_or_default());
        }
        curves.sort_by_key(|(made, _)| *made);
        let curves = curves.into_iter();
        curves
            .map(|(made, curve)| (made, curve.into_json(vm)))
            .collect()
    }

    /// The same as curves of the domain; malformed ones are left out.
    pub fn valid_curves(&self, vm: &str, since_ms: u64) -> Vec<(u64, MissRatioCurve)> {
        let kept = self.curves(vm, since_ms).into_iter();
        kept.filter_map(|(unix_ms, curve)| Some((unix_ms, curve.to_curve().ok()?)))
            .collect()
    }

    /// Whether there is a record of a VM, by the name that it has now, or by its UUID.
    pub fn is_known(&self, vm: &str) -> bool {
        let state = self.state();
        state.vms.contains_key(state.id(vm))
    }

    /// The UUIDs of VMs that were here since `since_ms`, but for those `present`, each with its baseline in bytes.
    pub fn departed(&self, since_ms: u64, present: &[&str]) -> Vec<(String, u64)> {
        let state = self.state();
        let departed = state.vms.iter().filter(|(id, record)| {
            record.seen_unix_ms >= since_ms && is_uuid(id) && !present.contains(&id.as_str())
        });
        departed
            .filter_map(|(uuid, record)| Some((uuid.clone(), record.baseline_bytes?)))
            .collect()
    }

    /// A VM's heatmap from `since_ms` until before `until_ms`, of the rows whose cells have the newest row's size.
    pub fn heat(&self, vm: &str, since_ms: u64, until_ms: u64) -> Option<HeatmapView> {
        let (mut rows, key): (Vec<(u64, Heat)>, _) = (Vec::new(), self.key(vm));
        for store in self.stores() {
            rows.extend(told(store.heat(key, since_ms, until_ms)).unwrap_or_default());
        }
        rows.sort_by_key(|(made, _)| *made);
        let cell_bytes = rows.last()?.1.cell_bytes;
        let alike = rows
            .into_iter()
            .filter(|(_, row)| row.cell_bytes == cell_bytes);
        Some(HeatmapView {
            schema: plimsoll_protocol::SCHEMA,
            vm: vm.to_owned(),
            cell_bytes,
            rows: alike
                .map(|(unix_ms, row)| HeatRow {
                    unix_ms,
                    pages: row.pages,
                })
                .collect(),
        })
    }

    /// Whether moving was paused, or that is not known, because the history began anew.
    pub fn paused(&self) -> bool {
        self.state().paused
    }

    /// Stores whether moving is paused.
    pub fn put_paused(&self, paused: bool) -> Persistence {
        let mut state = self.state();
        state.paused = paused;
        state.began_anew &= paused;
        let began_anew = state.began_anew;
        state.write(true, &|txn| {
            store::put_paused(txn, paused)?;
            store::put_began_anew(txn, began_anew)
        })
    }

    /// The host's phase in the workflow, if one was ever stored.
    pub fn phase(&self) -> Option<Phase> {
        self.state().phase
    }

    /// Stores the host's phase in the workflow.
    pub fn put_phase(&self, phase: Phase) -> Persistence {
        let mut state = self.state();
        state.phase = Some(phase);
        state.write(true, &|txn| store::put_phase(txn, phase))
    }

    /// The settings changed by hand for a VM.
    pub fn settings(&self, vm: &str) -> SettingsChange {
        let state = self.state();
        let record = state.vms.get(state.id(vm));
        record.map(VmRecord::change).unwrap_or_default()
    }

    /// Stores all settings changed by hand for a VM in place of the earlier ones; an empty change deletes them.
    pub fn put_settings(&self, vm: &str, change: &SettingsChange) -> Persistence {
        self.state().change_vm(vm, |kept| kept.put(change))
    }

    /// A VM's size when it was first discovered, in bytes, if it is still stored.
    pub fn baseline(&self, vm: &str) -> Option<u64> {
        let state = self.state();
        state.vms.get(state.id(vm))?.baseline_bytes
    }

    /// Stores a VM's size at discovery. It is deleted when the VM was absent for longer than history is kept.
    pub fn put_baseline(&self, vm: &str, bytes: u64) -> Persistence {
        self.state()
            .change_vm(vm, |kept| kept.baseline_bytes = Some(bytes))
    }

    /// The RAM of a VM that its baseline accounts for, in bytes.
    pub fn ram(&self, vm: &str) -> Option<u64> {
        let state = self.state();
        state.vms.get(state.id(vm))?.ram_bytes
    }

    /// Stores the RAM that a VM's baseline accounts for.
    pub fn put_ram(&self, vm: &str, bytes: u64) -> Persistence {
        self.state()
            .change_vm(vm, |kept| kept.ram_bytes = Some(bytes))
    }

    /// Whether this process of a VM was resized.
    pub fn was_resized(&self, vm: &str, process: ProcessId) -> bool {
        let state = self.state();
        let record = state.vms.get(state.id(vm));
        let resized = record.and_then(|record| record.resized);
        resized == Some(kept(process))
    }

    /// The last process that was resized of each VM, by the VM's UUID, or its name if it has none.
    pub fn resized(&self) -> Vec<(String, ProcessId)> {
        let state = self.state();
        let vms = state.vms.iter();
        vms.filter_map(|(id, record)| Some((id.clone(), record.mark().process?)))
            .collect()
    }

    /// Whether a process of a VM may continue another one, which was resized: neither was it resized itself, nor did it begin anew.
    pub fn may_continue(&self, vm: &str, process: ProcessId) -> bool {
        let process = Some(kept(process));
        let state = self.state();
        let record = state.vms.get(state.id(vm));
        record.is_some_and(|record| {
            record.resized.is_some() && record.resized != process && record.began_anew != process
        })
    }

    /// Stores that this process of a VM began anew. What was resized before is kept: a state that was saved then may still be restored.
    pub fn put_began_anew(&self, vm: &str, process: ProcessId) -> Persistence {
        let process = Some(kept(process));
        self.state().change_vm(vm, |kept| kept.began_anew = process)
    }

    /// What an earlier daemon recorded of the balloon of this process of a VM.
    pub fn balloon(&self, vm: &str, process: ProcessId) -> BalloonRecord {
        let state = self.state();
        let record = state.vms.get(state.id(vm));
        let balloon = record.and_then(|record| record.balloon);
        let balloon = balloon.filter(|(of, ..)| *of == kept(process));
        balloon.map_or_else(BalloonRecord::default, |(_, excludes, former_s)| {
            BalloonRecord {
                total_excludes_balloon: excludes,
                former_interval_s: former_s,
            }
        })
    }

    /// Stores that in place of what was recorded before.
    pub fn put_balloon(&self, vm: &str, process: ProcessId, record: BalloonRecord) -> Persistence {
        let BalloonRecord {
            total_excludes_balloon,
            former_interval_s,
        } = record;
        let balloon = (kept(process), total_excludes_balloon, former_interval_s);
        self.state()
            .change_vm(vm, |kept| kept.balloon = Some(balloon))
    }

    /// The most that a VM's cache had in the last decision about the VM, in bytes.
    pub fn cache(&self, vm: &str) -> Option<u64> {
        let state = self.state();
        state.vms.get(state.id(vm))?.cache_bytes
    }

    /// Stores the most that a cache had.
    pub fn put_cache(&self, vm: &str, cache_bytes: u64) -> Persistence {
        self.state()
            .change_vm(vm, |kept| kept.cache_bytes = Some(cache_bytes))
    }

    /// What was stored before a VM was last resized.
    pub fn mark(&self, vm: &str) -> ResizeMark {
        let state = self.state();
        let record = state.vms.get(state.id(vm));
        record.map(VmRecord::mark).unwrap_or_default()
    }

    /// Stores that a VM is about to be resized.
    pub fn put_mark(&self, vm: &str, mark: ResizeMark) -> Persistence {
        self.state().change_vm(vm, |kept| kept.put_mark(mark))
    }

    fn key(&self, vm: &str) -> u64 {
        key_of(self.state().id(vm))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The readable stores, the newer first.
    fn stores(&self) -> Vec<Arc<Store>> {
        let state = self.state();
        state.memory.iter().chain(&state.file).cloned().collect()
    }
}

impl State {
    fn new(place: Option<(PathBuf, Limits)>) -> Self {
        Self {
            place,
            file: None,
            memory: None,
            loaded: false,
            began_anew: false,
            paused: false,
            phase: None,
            next_id: 1,
            vms: BTreeMap::new(),
            uuids: HashMap::new(),
            heat: HashMap::new(),
            span: None,
            ageing: Ageing::default(),
            problem: None,
            retry_at: Instant::now(),
        }
    }

    /// Opens the file, or sets it aside and creates another.
    fn open_file(
        &mut self,
        path: &Path,
        limits: Limits,
        warnings: &mut Vec<String>,
    ) -> Result<(), Failure> {
        let opened = Store::open(path, limits.bytes_max);
        let opened = opened.and_then(|store| Ok((store.load()?, store)));
        let (loaded, store) = match opened {
            Err(Failure::Broken(why)) => {
                let aside = set_aside(path)?;
                warnings.push(format!(
                    "{}: {why}; it is kept as {} and a new history begins: what was paused or set by hand is forgotten",
                    path.display(),
                    aside.display()
                ));
                let store = Store::open(path, limits.bytes_max)?;
                // Until it is resumed, and not only until the next start.
                store.write(true, &|txn| {
                    store::put_paused(txn, true)?;
                    store::put_began_anew(txn, true)
                })?;
                (store.load()?, store)
            }
            opened => opened?,
        };
        self.paused = loaded.paused;
        self.began_anew = loaded.began_anew;
        self.phase = loaded.phase;
        self.next_id = self.next_id.max(loaded.next_id);
        self.vms = loaded.vms;
        self.ageing = loaded.ageing;
        self.file = Some(Arc::new(store));
        self.loaded = true;
        Ok(())
    }

    /// What identifies the records of a VM.
    fn id<'a>(&'a self, vm: &'a str) -> &'a str {
        self.uuids.get(vm).map_or(vm, String::as_str)
    }

    /// Writes to the file, or to memory while that fails.
    fn write(
        &mut self,
        durable: bool,
        write: &dyn Fn(&WriteTransaction) -> Result<(), redb::Error>,
    ) -> Persistence {
        if self.memory.is_some() && Instant::now() >= self.retry_at {
            self.retry();
        }
        if self.memory.is_none()
            && let (Some(file), Some((path, _))) = (&self.file, &self.place)
        {
            let checked = file.check_is_at(path);
            match checked.and_then(|()| file.write(durable, write)) {
                Ok(()) => return Persistence::OnDisk,
                Err(failure) => {
                    self.file = None;
                    self.keep_in_memory(&failure);
                    warn!("{}", self.problem.as_deref().unwrap_or_default());
                }
            }
        }
        let Some(memory) = &self.memory else {
            return Persistence::InMemory;
        };
        if let Err(failure) = memory.write(false, write) {
            warn!("history in memory begins anew: {failure}");
            self.memory = Store::in_memory().ok().map(Arc::new);
        }
        Persistence::InMemory
    }

    /// Continues in memory because of `failure`.
    fn keep_in_memory(&mut self, failure: &Failure) {
        let Some((path, limits)) = &self.place else {
            return;
        };
        self.problem = Some(format!(
            "{}: {failure}; history is kept in memory, the disk is tried again every minute",
            path.display()
        ));
        self.retry_at = Instant::now() + RETRY_AFTER;
        if self.memory.is_none() {
            self.memory = Store::in_memory().ok().map(Arc::new);
        }
        // A store that failed to write stays closed; it may be readable when opened again.
        if self.loaded && self.file.is_none() && !matches!(failure, Failure::Broken(_)) {
            self.file = Store::open(path, limits.bytes_max).ok().map(Arc::new);
        }
    }

    /// Writes the contents of memory to disk.
    fn retry(&mut self) {
        let Some((path, limits)) = self.place.clone() else {
            return;
        };
        match self.bring_to_disk(&path, limits) {
            Ok(()) => {
                warn!("{}: history is on disk again", path.display());
                self.memory = None;
                self.problem = None;
            }
            Err(failure) => {
                self.file = None;
                self.keep_in_memory(&failure);
            }
        }
    }

    fn bring_to_disk(&mut self, path: &Path, limits: Limits) -> Result<(), Failure> {
        let file = match self.file.take() {
            Some(file) => file,
            None => match Store::open(path, limits.bytes_max) {
                // The numbers of its decisions were assigned again since.
                Ok(store) if !self.loaded && !store.is_empty()? => {
                    drop(store);
                    self.renew(path, limits, "could not be read when the daemon started")?
                }
                Err(Failure::Broken(why)) => self.renew(path, limits, &why)?,
                opened => Arc::new(opened?),
            },
        };
        let memory = self.memory.as_ref();
        file.write(true, &|txn| {
            if let Some(memory) = memory {
                memory.copy_to(txn)?;
            }
            store::put_paused(txn, self.paused)?;
            if let Some(phase) = self.phase {
                store::put_phase(txn, phase)?;
            }
            store::put_next_id(txn, self.next_id)?;
            store::put_all_vms(txn, &self.vms)
        })?;
        self.file = Some(file);
        self.loaded = true;
        Ok(())
    }

    /// Sets the file aside and creates another.
    fn renew(&self, path: &Path, limits: Limits, why: &str) -> Result<Arc<Store>, Failure> {
        let aside = set_aside(path)?;
        warn!(
            "{}: {why}; it is kept as {} and a new history begins",
            path.display(),
            aside.display()
        );
        Store::open(path, limits.bytes_max).map(Arc::new)
    }

    fn record_turn(&mut self, unix_ms: u64, moments: &[TurnRecord<'_>]) {
        let span = unix_ms / SPAN_MS;
        let closes = self.span != Some(span);
        // With turns that are longer than a span, those of the spans passed over are kept, too.
        let passes_over = self.span.is_some_and(|last| last.abs_diff(span) > 1);
        let mut curves = Vec::new();
        for moment in moments {
            let id = self.id(moment.vm).to_owned();
            let key = key_of(&id);
            if let Some((cell_bytes, row)) = moment.heat
                && row.pages.len() <= CELLS_MAX
            {
                let heat = self.heat.entry(key).or_default();
                heat.add(cell_bytes, row);
            }
            // Half of the VMs at a time.
            if let Some(curve) = moment.curve
                && closes
                && (passes_over || (span ^ key).is_multiple_of(2))
            {
                curves.push((key, form::Curve::thinned(curve)));
            }
            if let Some(vm) = self.vms.get_mut(&id) {
                vm.seen_unix_ms = unix_ms;
            }
        }
        let turn = Turn::of(
            moments
                .iter()
                .map(|moment| (key_of(self.id(moment.vm)), moment.sample)),
        );
        let heat = if closes {
            std::mem::take(&mut self.heat)
        } else {
            HashMap::new()
        };
        let keep = self.place.as_ref().map(|(_, limits)| limits.keep);
        let mut oldest_ms = 0;
        if closes {
            self.span = Some(span);
            let keep = keep.filter(|_| self.ageing.is_due(unix_ms));
            oldest_ms = keep.map_or(0, |keep| unix_ms.saturating_sub(millis(keep)));
            let forgotten = |vm: &VmRecord| vm.settings.is_none() && vm.seen_unix_ms < oldest_ms;
            // A VM without an earlier record was set just now.
            self.vms
                .retain(|_, vm| vm.seen_unix_ms == 0 || !forgotten(vm));
        }
        let vms = self.vms.clone();
        let ageing = self.ageing;
        let _ = self.write(closes, &|txn| {
            store::put_turn(txn, unix_ms, &turn)?;
            if closes {
                store::put_ageing(txn, ageing)?;
                store::put_heat(txn, unix_ms, &heat)?;
                store::put_curves(txn, unix_ms, &curves)?;
                store::put_all_vms(txn, &vms)?;
                store::grow_coarse(txn, unix_ms)?;
                store::forget_before(txn, oldest_ms, unix_ms)?;
            }
            Ok(())
        });
        if closes {
            self.keep_small();
        }
    }

    /// Drops the oldest records until the limits hold.
    fn keep_small(&mut self) {
        if let Some(memory) = &self.memory
            && let Err(failure) = memory.keep_below(MEMORY_BYTES_MAX)
        {
            warn!("history in memory begins anew: {failure}");
            self.memory = Store::in_memory().ok().map(Arc::new);
        }
        let (Some(file), Some((path, limits)), None) = (&self.file, &self.place, &self.memory)
        else {
            return;
        };
        // Blocks are only ever added, so a file below the limit has never been above it.
        let near = limits.bytes_max - limits.bytes_max / 4;
        if bytes_on_disk(path).is_some_and(|bytes| bytes < near) {
            return;
        }
        if let Err(failure) = file.keep_below(near) {
            self.file = None;
            self.keep_in_memory(&failure);
            warn!("{}", self.problem.as_deref().unwrap_or_default());
        }
    }

    fn change_vm(&mut self, name: &str, change: impl FnOnce(&mut VmRecord)) -> Persistence {
        let name = &self.id(name).to_owned();
        let vm = self.vms.entry(name.clone()).or_default();
        change(vm);
        let vm = vm.clone();
        let empty = vm.settings.is_none() && vm.baseline_bytes.is_none();
        if empty {
            self.vms.remove(name);
        }
        let vm = (!empty).then_some(vm);
        self.write(true, &|txn| store::put_vm(txn, name, vm.as_ref()))
    }
}

/// Whether a record's key is a UUID as QEMU prints it, and not a name.
fn is_uuid(id: &str) -> bool {
    let lengths = id.split('-').map(str::len);
    lengths.eq([8, 4, 4, 4, 12])
        && id
            .bytes()
            .all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
}

/// A process as records keep it.
const fn kept(process: ProcessId) -> (u32, u64) {
    (process.pid, process.start_ticks)
}

/// The key of a VM or of a control group: names may be long. Names of VMs are assigned by the host, not a guest. The path of a group
/// is chosen by whoever may create one, who must not find one with the key of a VM.
fn key_of(id: &str) -> u64 {
    if !id.starts_with(GROUP) {
        return xxh3_64(id.as_bytes());
    }
    let digest: [u8; 32] = Sha256::digest(id.as_bytes()).into();
    let [a, b, c, d, e, f, g, h, ..] = digest;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// The readable records; unreadable ones are logged.
fn told<T>(read: Result<T, Failure>) -> Option<T> {
    read.inspect_err(|failure| warn!("history: {failure}")).ok()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn bytes_on_disk(path: &Path) -> Option<u64> {
    let blocks = fs::metadata(path).ok()?.blocks();
    Some(blocks.saturating_mul(512))
}

/// Renames a file without overwriting another, and returns its new name.
fn set_aside(path: &Path) -> Result<PathBuf, io::Error> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let mut unix_s = now.unwrap_or_default().as_secs();
    loop {
        let mut aside = path.as_os_str().to_owned();
        aside.push(format!(".broken-{unix_s}"));
        let aside = PathBuf::from(aside);
        if fs::symlink_metadata(&aside).is_err() {
            fs::rename(path, &aside)?;
            return Ok(aside);
        }
        unix_s += 1;
    }
}

/// At most `points` points in time, each representing an equal part of the range.
fn thinned(samples: &[Sample], points: usize) -> Vec<Sample> {
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else {
        return Vec::new();
    };
    if samples.len() <= points {
        return samples.to_vec();
    }
    let part_ms = (last.unix_ms - first.unix_ms) / points as u64 + 1;
    let parts = samples.chunk_by(|a, b| {
        let part = |sample: &Sample| (sample.unix_ms - first.unix_ms) / part_ms;
        part(a) == part(b)
    });
    parts.filter_map(form::together).collect()
}
