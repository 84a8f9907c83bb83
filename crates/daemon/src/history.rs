//! Curves, samples and decisions of the past, in an embedded store (redb) on disk.
//!
//! Samples are kept turn by turn for two hours, as means of five minutes after that; heat every five minutes, curves
//! every ten, thinned. All are bounded in age and together in bytes, the oldest going first.
//!
//! What is asked to be durable (decisions, settings, flags) is on disk when the call returns; samples are at most five
//! minutes later. Nothing here fails for the one who writes: what cannot go to disk is kept in memory, up to a bound,
//! told by [`History::warnings`] and brought to disk once that works again. A file that is not what was written is set
//! aside, never deleted.

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

use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::decision::{Decision, Phase};
use plimsoll_protocol::request::SettingsChange;
use plimsoll_protocol::vm::{HeatRow, HeatmapView, Sample};
use redb::WriteTransaction;
use tracing::warn;
use xxhash_rust::xxh3::xxh3_64;

use crate::config::Config;
use form::{Heat, KeptVm, Turn};
use store::{Failure, Store};

/// What a mean stands for, and how often heat is kept.
const SPAN_MS: u64 = 5 * 60 * 1000;
/// Bytes that the history in memory may take.
const MEMORY_BYTES_MAX: u64 = 8 << 20;
/// From one try to write to disk again to the next.
const RETRY_AFTER: Duration = Duration::from_mins(1);
/// Maximum number of points returned at once.
const POINTS_MAX: usize = 10_000;
/// Most decisions given at once.
const DECISIONS_MAX: usize = 1000;
/// Most cells of a heatmap that are kept; larger ones are not.
const CELLS_MAX: usize = 4096;

/// Why history could not be opened. The file is untouched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HistoryError {
    /// Another process has it.
    #[error(
        "{}: another plimsolld has this history open; stop it, or configure another history.file", path.display()
    )]
    Held {
        /// Which.
        path: PathBuf,
    },
}

/// What bounds a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes on disk.
    pub bytes_max: u64,
    /// How long anything is kept.
    pub keep: Duration,
}

impl Limits {
    /// Those that are configured.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        Self {
            bytes_max: config.history_bytes_max,
            keep: config.history_keep,
        }
    }
}

/// Where something that was to be durable is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// On disk.
    Durably,
    /// In memory alone, for now or for good.
    InMemory,
}

/// A VM at the end of a turn.
#[derive(Debug, Clone, Copy)]
pub struct Moment<'a> {
    /// Its name.
    pub vm: &'a str,
    /// How it stands.
    pub sample: Sample,
    /// Where it is busy: bytes of a cell, and the newest period.
    pub heat: Option<(u64, &'a HeatRow)>,
    /// Its curve.
    pub curve: Option<&'a CurveJson>,
}

/// The past of a host. Any thread may ask and write.
#[derive(Debug)]
pub struct History {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Where the file is to be; `None` if there is to be none.
    place: Option<(PathBuf, Limits)>,
    /// The file, while it can be read.
    file: Option<Arc<Store>>,
    /// What the file does not have; writes go here while there is one.
    memory: Option<Arc<Store>>,
    /// Whether `flags` and `vms` include what the file has.
    loaded: bool,
    began_anew: bool,
    paused: bool,
    phase: Option<Phase>,
    /// The next decision's number.
    next_id: u64,
    vms: BTreeMap<String, KeptVm>,
    /// Heat since it was last kept.
    heat: HashMap<u64, Heat>,
    /// The span in which heat and curves were last kept.
    span: Option<u64>,
    problem: Option<String>,
    retry_at: Instant,
}

impl History {
    /// Opens or creates the history at `path`; also returns warnings for the operator.
    ///
    /// A file that is torn or not understood is renamed, and a new one begun. If none can be opened or begun, history
    /// is kept in memory and the disk tried again later.
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
                state.keep_in_memory(&failure);
                warnings.extend(state.problem.clone());
            }
        }
        let state = Mutex::new(state);
        Ok((Self { state }, warnings))
    }

    /// A history in memory alone, of a few hours.
    #[must_use]
    pub fn nowhere() -> Self {
        let mut state = State::new(None);
        state.memory = Store::in_memory().ok().map(Arc::new);
        Self {
            state: Mutex::new(state),
        }
    }

    /// Why history is not on disk although it should be, and what becomes of it.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.state().problem.iter().cloned().collect()
    }

    /// Whether a file was there at the start that could not be read: flags, settings and moves under way of the
    /// time before are not known.
    #[must_use]
    pub fn began_anew(&self) -> bool {
        self.state().began_anew
    }

    /// Bytes on disk; `None` if there is no file.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        let state = self.state();
        let (path, _) = state.place.as_ref()?;
        bytes_on_disk(path)
    }

    /// Keeps how all VMs stand at the end of a turn, in one transaction.
    pub fn record_turn(&self, vms: &[Moment<'_>]) {
        if let Some(unix_ms) = vms.iter().map(|vm| vm.sample.unix_ms).max() {
            self.state().record_turn(unix_ms, vms);
        }
    }

    /// Brings all turns to disk.
    pub fn flush(&self) -> Kept {
        self.state().write(true, &|_| Ok(()))
    }

    /// Keeps a decision, or what has become of it. Inputs that it once had stay although it comes without.
    pub fn put_decision(&self, decision: &Decision) -> Kept {
        let mut state = self.state();
        let next_id = state.next_id.max(decision.id.saturating_add(1));
        state.next_id = next_id;
        state.write(true, &|txn| {
            store::put_next_id(txn, next_id)?;
            store::put_decision(txn, decision)
        })
    }

    /// A number for a decision: rising, and never given twice while the file lives.
    #[must_use]
    pub fn next_id(&self) -> u64 {
        let mut state = self.state();
        let id = state.next_id;
        let next_id = id.saturating_add(1);
        state.next_id = next_id;
        let _ = state.write(true, &|txn| store::put_next_id(txn, next_id));
        id
    }

    /// A decision in full.
    #[must_use]
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
    #[must_use]
    pub fn decisions(&self, vm: Option<&str>, before: Option<u64>, limit: usize) -> Vec<Decision> {
        let limit = limit.min(DECISIONS_MAX);
        let vm = vm.map(key_of);
        let mut found = BTreeMap::new();
        // What is in memory is newer than what the file says of the same decision.
        for store in self.stores() {
            for decision in told(store.decisions(vm, before, limit)).unwrap_or_default() {
                found.entry(decision.id).or_insert(decision);
            }
        }
        found.into_values().rev().take(limit).collect()
    }

    /// Decisions that have not ended, in full, oldest first: after a crash, what was begun.
    #[must_use]
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

    /// A VM's moments from `since_ms` until before `until_ms`, rising in time; more than `points` are put together.
    #[must_use]
    pub fn samples(&self, vm: &str, since_ms: u64, until_ms: u64, points: usize) -> Vec<Sample> {
        let mut samples = Vec::new();
        for store in self.stores() {
            samples.extend(told(store.samples(key_of(vm), since_ms, until_ms)).unwrap_or_default());
        }
        samples.sort_by_key(|sample| sample.unix_ms);
        thinned(&samples, points.clamp(1, POINTS_MAX))
    }

    /// A VM's newest curve at or before `unix_ms`, and when it was made.
    #[must_use]
    pub fn curve_at(&self, vm: &str, unix_ms: u64) -> Option<(u64, CurveJson)> {
        let curves = self.stores().into_iter();
        let curves = curves.filter_map(|store| told(store.curve_at(key_of(vm), unix_ms)).flatten());
        let (made, curve) = curves.max_by_key(|(made, _)| *made)?;
        Some((made, curve.into_json(vm)))
    }

    /// Where a VM was busy from `since_ms` until before `until_ms`, as far as its cells have the newest's size.
    #[must_use]
    pub fn heat(&self, vm: &str, since_ms: u64, until_ms: u64) -> Option<HeatmapView> {
        let mut rows: Vec<(u64, Heat)> = Vec::new();
        for store in self.stores() {
            rows.extend(told(store.heat(key_of(vm), since_ms, until_ms)).unwrap_or_default());
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

    /// Whether moving was paused.
    #[must_use]
    pub fn paused(&self) -> bool {
        self.state().paused
    }

    /// Keeps whether moving is paused.
    pub fn put_paused(&self, paused: bool) -> Kept {
        let mut state = self.state();
        state.paused = paused;
        state.write(true, &|txn| store::put_paused(txn, paused))
    }

    /// Where in the workflow the host was, if that was ever kept.
    #[must_use]
    pub fn phase(&self) -> Option<Phase> {
        self.state().phase
    }

    /// Keeps where in the workflow the host is.
    pub fn put_phase(&self, phase: Phase) -> Kept {
        let mut state = self.state();
        state.phase = Some(phase);
        state.write(true, &|txn| store::put_phase(txn, phase))
    }

    /// What was changed by hand for a VM.
    #[must_use]
    pub fn settings(&self, vm: &str) -> SettingsChange {
        let state = self.state();
        let settings = state.vms.get(vm).and_then(|vm| vm.settings.as_ref());
        settings.map(form::Settings::to_change).unwrap_or_default()
    }

    /// Keeps all that is changed by hand for a VM, in the place of what was kept before; an empty change forgets it.
    pub fn put_settings(&self, vm: &str, change: &SettingsChange) -> Kept {
        let settings = form::Settings::of(change);
        self.state().change_vm(vm, |kept| kept.settings = settings)
    }

    /// What a VM was first found with, in bytes, as far as that is kept.
    #[must_use]
    pub fn baseline(&self, vm: &str) -> Option<u64> {
        self.state().vms.get(vm)?.baseline_bytes
    }

    /// Keeps what a VM was first found with. It is forgotten when the VM was away for longer than history is kept.
    pub fn put_baseline(&self, vm: &str, bytes: u64) -> Kept {
        self.state()
            .change_vm(vm, |kept| kept.baseline_bytes = Some(bytes))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What can be read, the newer first.
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
            heat: HashMap::new(),
            span: None,
            problem: None,
            retry_at: Instant::now(),
        }
    }

    /// Opens the file, or sets it aside and begins another.
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
                self.began_anew = true;
                let store = Store::open(path, limits.bytes_max)?;
                (store.load()?, store)
            }
            opened => opened?,
        };
        self.paused = loaded.paused;
        self.phase = loaded.phase;
        self.next_id = self.next_id.max(loaded.next_id);
        self.vms = loaded.vms;
        self.file = Some(Arc::new(store));
        self.loaded = true;
        Ok(())
    }

    /// Writes to the file, or to memory while that cannot be.
    fn write(
        &mut self,
        durable: bool,
        write: &dyn Fn(&WriteTransaction) -> Result<(), redb::Error>,
    ) -> Kept {
        if self.memory.is_some() && Instant::now() >= self.retry_at {
            self.retry();
        }
        if self.memory.is_none()
            && let Some(file) = &self.file
        {
            match file.write(durable, write) {
                Ok(()) => return Kept::Durably,
                Err(failure) => {
                    self.file = None;
                    self.keep_in_memory(&failure);
                    warn!("{}", self.problem.as_deref().unwrap_or_default());
                }
            }
        }
        let Some(memory) = &self.memory else {
            return Kept::InMemory;
        };
        if let Err(failure) = memory.write(false, write) {
            warn!("history in memory begins anew: {failure}");
            self.memory = Store::in_memory().ok().map(Arc::new);
        }
        Kept::InMemory
    }

    /// Goes on in memory because of `failure`.
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
        // A store that failed to write stays shut; opened anew it may well be read.
        if self.loaded && self.file.is_none() && !matches!(failure, Failure::Broken(_)) {
            self.file = Store::open(path, limits.bytes_max).ok().map(Arc::new);
        }
    }

    /// Brings to disk what is in memory.
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
                // Its decisions have numbers that were given again since.
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

    /// Sets the file aside and begins another.
    fn renew(&self, path: &Path, limits: Limits, why: &str) -> Result<Arc<Store>, Failure> {
        let aside = set_aside(path)?;
        warn!(
            "{}: {why}; it is kept as {} and a new history begins",
            path.display(),
            aside.display()
        );
        Store::open(path, limits.bytes_max).map(Arc::new)
    }

    fn record_turn(&mut self, unix_ms: u64, moments: &[Moment<'_>]) {
        let span = unix_ms / SPAN_MS;
        let closes = self.span != Some(span);
        let mut curves = Vec::new();
        for moment in moments {
            let key = key_of(moment.vm);
            if let Some((cell_bytes, row)) = moment.heat
                && row.pages.len() <= CELLS_MAX
            {
                let heat = self.heat.entry(key).or_default();
                heat.add(cell_bytes, row);
            }
            // Half of the VMs at a time.
            if let Some(curve) = moment.curve
                && closes
                && (span ^ key).is_multiple_of(2)
            {
                curves.push((key, form::Curve::thinned(curve)));
            }
            if let Some(vm) = self.vms.get_mut(moment.vm) {
                vm.seen_unix_ms = unix_ms;
            }
        }
        let turn = Turn::of(
            moments
                .iter()
                .map(|moment| (key_of(moment.vm), moment.sample)),
        );
        let heat = if closes {
            std::mem::take(&mut self.heat)
        } else {
            HashMap::new()
        };
        let keep = self.place.as_ref().map(|(_, limits)| limits.keep);
        let oldest_ms = keep.map_or(0, |keep| unix_ms.saturating_sub(millis(keep)));
        if closes {
            self.span = Some(span);
            let forgotten = |vm: &KeptVm| vm.settings.is_none() && vm.seen_unix_ms < oldest_ms;
            // A VM that was never seen was set just now.
            self.vms
                .retain(|_, vm| vm.seen_unix_ms == 0 || !forgotten(vm));
        }
        let vms = self.vms.clone();
        let _ = self.write(closes, &|txn| {
            store::put_turn(txn, unix_ms, &turn)?;
            if closes {
                store::put_heat(txn, unix_ms, &heat)?;
                store::put_curves(txn, unix_ms, &curves)?;
                store::put_all_vms(txn, &vms)?;
                store::grow_coarse(txn, unix_ms)?;
                store::forget_before(txn, oldest_ms)?;
            }
            Ok(())
        });
        if closes {
            self.keep_small();
        }
    }

    /// Drops the oldest until the bounds hold.
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
        // Blocks are only ever added, so that a file below the bound has never been above it.
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

    fn change_vm(&mut self, name: &str, change: impl FnOnce(&mut KeptVm)) -> Kept {
        let vm = self.vms.entry(name.to_owned()).or_default();
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

/// A VM in keys: names may be long. Names are the host's, not a guest's, so that nobody makes two of them meet.
fn key_of(vm: &str) -> u64 {
    xxh3_64(vm.as_bytes())
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

/// Renames a file so that nothing is overwritten, and gives its new name.
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

/// At most `points` points in time, each standing for an equal part of the range.
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
