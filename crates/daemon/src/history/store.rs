//! One redb database, on disk or in memory: its tables and their access.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::ops::{Range, RangeInclusive};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use plimsoll_protocol::decision::{Decision, Phase};
use plimsoll_protocol::plan::PlanInputs;
use plimsoll_protocol::vm::Sample;
use redb::backends::{FileBackend, InMemoryBackend};
use redb::{
    Database, Durability, ReadTransaction, ReadableDatabase, ReadableTable, ReadableTableMetadata,
    StorageBackend as _, TableDefinition, TableError, WriteTransaction,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::warn;

use super::form::{Curve, Heat, SCHEMA, StoredSample, Turn, VmRecord, together};
use super::{Ageing, DAY_MS, SPAN_MS, key_of};

/// Key: a VM's key and the time.
type VmTable = Pairs;
/// Key: two numbers. Value: bytes.
type Pairs = TableDefinition<'static, (u64, u64), &'static [u8]>;

const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
/// Turns of the last hours, by time.
const TURNS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("turns");
/// Means over [`SPAN_MS`], by their beginning.
const MEANS: VmTable = TableDefinition::new("means");
const HEAT: VmTable = TableDefinition::new("heat");
const CURVES: VmTable = TableDefinition::new("curves");
/// Decisions without inputs, by number.
const DECISIONS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("decisions");
/// In numbered parts, because redb rounds a long value up to the next power of two.
const INPUTS: Pairs = TableDefinition::new("inputs");
/// Decisions that have not ended.
const OPEN: TableDefinition<'_, u64, ()> = TableDefinition::new("open");
/// Decisions by the VMs that they affect.
const TOUCHES: TableDefinition<'_, (u64, u64), ()> = TableDefinition::new("touches");
const VMS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("vms");

/// The numbers of phases in the store.
const PHASES: [Phase; 6] = [
    Phase::Whole,
    Phase::Shrinking,
    Phase::Tracing,
    Phase::Moving,
    Phase::Checking,
    Phase::GivingBack,
];

/// How long turns are kept individually.
const FINE_MS: u64 = 2 * 60 * 60 * 1000;
/// Maximum number of spans combined at a time.
const SPANS_MAX: usize = 24;
/// Bytes of a part, so that it fills four pages with redb's overhead.
const PART_BYTES: usize = 16_000;
/// Page size of redb.
const PAGE_BYTES: u64 = 4096;
/// Cache size of redb.
const CACHE_BYTES: usize = 4 << 20;
/// Maximum bytes to which a compressed text is decompressed.
const UNPACKED_MAX: u64 = 256 << 20;

/// Why a store fails.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// Another process has locked it.
    #[error("another process holds it")]
    Held,
    /// Its contents are damaged.
    #[error("{0}")]
    Broken(String),
    /// An I/O error of the disk.
    #[error("{0}")]
    Io(String),
}

impl From<redb::Error> for Failure {
    fn from(error: redb::Error) -> Self {
        use io::ErrorKind::{InvalidData, UnexpectedEof};
        match error {
            redb::Error::DatabaseAlreadyOpen => Self::Held,
            redb::Error::Io(error) if !matches!(error.kind(), InvalidData | UnexpectedEof) => {
                Self::Io(error.to_string())
            }
            redb::Error::PreviousIo => Self::Io("an earlier write failed".to_owned()),
            error => Self::Broken(format!("not readable as history: {error}")),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error.to_string())
    }
}

/// Flags, and the records of VMs.
pub(super) struct StoredState {
    pub(super) paused: bool,
    /// Whether it replaced one that could not be read, and that was not acknowledged yet.
    pub(super) began_anew: bool,
    pub(super) phase: Option<Phase>,
    pub(super) next_id: u64,
    pub(super) vms: BTreeMap<String, VmRecord>,
    pub(super) ageing: Ageing,
}

/// A database with all its tables.
#[derive(Debug)]
pub(super) struct Store {
    database: Database,
    /// Device and inode of its file; `None` in memory.
    file: Option<(u64, u64)>,
}

impl Store {
    /// Opens or creates a file, checks all of it, and compacts it if it is above `bytes_max`.
    pub(super) fn open(path: &Path, bytes_max: u64) -> Result<Self, Failure> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        let (file, is_new) = match options.clone().create_new(true).open(path) {
            Ok(file) => (file, true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                (options.open(path)?, false)
            }
            Err(error) => return Err(error.into()),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(Failure::Io("not a regular file".to_owned()));
        }
        let opened = guarded(move || {
            let mut builder = Database::builder();
            builder
                .set_cache_size(CACHE_BYTES)
                .set_check_integrity_on_open(true);
            let backend = FileBackend::new(file)?;
            if !is_new && backend.len()? == 0 {
                return Err(redb::Error::Corrupted("it is empty".to_owned()));
            }
            let database = builder.create_with_backend(backend)?;
            let mut store = Self::begun(database)?;
            store.file = Some((metadata.dev(), metadata.ino()));
            if metadata.len() > bytes_max {
                store.shrink_below(bytes_max - bytes_max / 4)?;
                store.database.compact()?;
            }
            Ok(store)
        });
        // What could not be created, as on a full disk, is no damaged history.
        if let Err(failure) = &opened
            && is_new
            && !matches!(failure, Failure::Held)
        {
            let _ = fs::remove_file(path);
        }
        opened
    }

    /// Creates one in memory.
    pub(super) fn in_memory() -> Result<Self, Failure> {
        guarded(|| {
            let mut builder = Database::builder();
            builder.set_cache_size(1 << 20);
            Self::begun(builder.create_with_backend(InMemoryBackend::new())?)
        })
    }

    /// Creates the tables, or refuses those of another schema.
    fn begun(database: Database) -> Result<Self, redb::Error> {
        let schema = match database.begin_read()?.open_table(META) {
            Ok(meta) => meta.get("schema")?.map(|schema| schema.value()),
            Err(TableError::TableDoesNotExist(_)) => None,
            Err(error) => return Err(error.into()),
        };
        match schema {
            None => {}
            // Nothing is written, so that a file on a full disk can be read.
            Some(schema) if schema == u64::from(SCHEMA) => {
                return Ok(Self {
                    database,
                    file: None,
                });
            }
            Some(schema) => {
                return Err(redb::Error::Corrupted(format!(
                    "its schema is {schema}; this plimsolld supports {SCHEMA}"
                )));
            }
        }
        let txn = database.begin_write()?;
        {
            put_schema(&txn, SCHEMA)?;
            txn.open_table(TURNS)?;
            for table in [MEANS, HEAT, CURVES] {
                txn.open_table(table)?;
            }
            txn.open_table(DECISIONS)?;
            txn.open_table(INPUTS)?;
            txn.open_table(OPEN)?;
            txn.open_table(TOUCHES)?;
            txn.open_table(VMS)?;
        }
        txn.commit()?;
        Ok(Self {
            database,
            file: None,
        })
    }

    /// Checks that its file is the one at `path`: nobody finds what is written to a file that was removed.
    pub(super) fn check_is_at(&self, path: &Path) -> Result<(), Failure> {
        let there = fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino()));
        match there.ok() == self.file {
            true => Ok(()),
            false => Err(Failure::Io("it was removed or replaced".to_owned())),
        }
    }

    /// One transaction; if it fails, none of its changes take effect.
    pub(super) fn write(
        &self,
        durable: bool,
        write: &dyn Fn(&WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), Failure> {
        guarded(|| self.write_one(durable, write))
    }

    fn write_one(
        &self,
        durable: bool,
        write: &dyn Fn(&WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), redb::Error> {
        let mut txn = self.database.begin_write()?;
        let durability = if durable {
            Durability::Immediate
        } else {
            Durability::None
        };
        txn.set_durability(durability)?;
        write(&txn)?;
        Ok(txn.commit()?)
    }

    fn read<T>(
        &self,
        read: impl FnOnce(&ReadTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, Failure> {
        guarded(|| read(&self.database.begin_read()?))
    }

    /// Whether it has neither decisions nor records of VMs.
    pub(super) fn is_empty(&self) -> Result<bool, Failure> {
        self.read(|txn| {
            Ok(txn.open_table(DECISIONS)?.is_empty()?
                && txn.open_table(VMS)?.is_empty()?
                && txn.open_table(META)?.get("next_id")?.is_none())
        })
    }

    pub(super) fn load(&self) -> Result<StoredState, Failure> {
        self.read(|txn| {
            let meta = txn.open_table(META)?;
            let number = |key| Ok::<_, redb::Error>(meta.get(key)?.map(|number| number.value()));
            let mut vms = BTreeMap::new();
            for entry in txn.open_table(VMS)?.iter()? {
                let (name, vm) = entry?;
                let whole = [vm.value(), &VmRecord::NOTHING_MORE].concat();
                vms.insert(name.value().to_owned(), unpacked(&whole)?);
            }
            Ok(StoredState {
                paused: number("paused")? == Some(1),
                began_anew: number("began_anew")? == Some(1),
                phase: number("phase")?.and_then(|number| {
                    let number = usize::try_from(number).ok()?;
                    PHASES.get(number).copied()
                }),
                next_id: number("next_id")?.unwrap_or(1),
                vms,
                ageing: ageing(&meta)?,
            })
        })
    }

    pub(super) fn decision(&self, id: u64) -> Result<Option<Decision>, Failure> {
        self.read(|txn| {
            let decision = txn.open_table(DECISIONS)?.get(id)?;
            Ok(decision.and_then(|packed| understood(packed.value())))
        })
    }

    pub(super) fn inputs(&self, id: u64) -> Result<Option<PlanInputs>, Failure> {
        self.read(|txn| {
            let inputs = joined(&txn.open_table(INPUTS)?, id)?;
            Ok(inputs.and_then(|packed| understood(&packed)))
        })
    }

    /// Newest first.
    pub(super) fn decisions(
        &self,
        vm: Option<u64>,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Vec<Decision>, Failure> {
        let before = before.unwrap_or(u64::MAX);
        self.read(|txn| {
            let decisions = txn.open_table(DECISIONS)?;
            let mut found = Vec::new();
            if let Some(vm) = vm {
                let touches = txn.open_table(TOUCHES)?;
                for entry in touches.range((vm, 0)..(vm, before))?.rev().take(limit) {
                    let (key, _) = entry?;
                    let packed = decisions.get(key.value().1)?;
                    found.extend(packed.and_then(|packed| understood(packed.value())));
                }
            } else {
                for entry in decisions.range(..before)?.rev().take(limit) {
                    found.extend(understood(entry?.1.value()));
                }
            }
            Ok(found)
        })
    }

    pub(super) fn open_ids(&self) -> Result<Vec<u64>, Failure> {
        self.read(|txn| {
            let open = txn.open_table(OPEN)?;
            open.iter()?.map(|entry| Ok(entry?.0.value())).collect()
        })
    }

    /// In ascending time.
    pub(super) fn samples(
        &self,
        vm: u64,
        since_ms: u64,
        until_ms: u64,
    ) -> Result<Vec<Sample>, Failure> {
        if since_ms >= until_ms {
            return Ok(Vec::new());
        }
        let within = |sample: &Sample| (since_ms..until_ms).contains(&sample.unix_ms);
        self.read(|txn| {
            let mut found: Vec<Sample> = Vec::new();
            let from = since_ms.saturating_sub(SPAN_MS);
            let means = txn.open_table(MEANS)?;
            for entry in means.range((vm, from)..=(vm, until_ms))? {
                let StoredSample(sample) = unpacked(entry?.1.value())?;
                found.push(sample);
            }
            let turns = txn.open_table(TURNS)?;
            // A mean may be somewhat older than its turn.
            for entry in turns.range(since_ms..=until_ms.saturating_add(SPAN_MS))? {
                let turn: Turn = unpacked(entry?.1.value())?;
                let own = turn.0.into_iter().filter(|(key, _)| *key == vm);
                found.extend(own.map(|(_, StoredSample(sample))| sample));
            }
            found.retain(within);
            Ok(found)
        })
    }

    pub(super) fn curve_at(&self, vm: u64, unix_ms: u64) -> Result<Option<(u64, Curve)>, Failure> {
        self.read(|txn| {
            let curves = txn.open_table(CURVES)?;
            let newest = curves.range((vm, 0)..=(vm, unix_ms))?.next_back();
            let Some((key, packed)) = newest.transpose()? else {
                return Ok(None);
            };
            Ok(Some((key.value().1, curve_of(packed.value())?)))
        })
    }

    /// In ascending time.
    pub(super) fn curves(&self, vm: u64, since_ms: u64) -> Result<Vec<(u64, Curve)>, Failure> {
        self.read(|txn| {
            let curves = txn.open_table(CURVES)?;
            let kept = curves.range((vm, since_ms)..=(vm, u64::MAX))?;
            kept.map(|entry| {
                let (key, packed) = entry?;
                Ok((key.value().1, curve_of(packed.value())?))
            })
            .collect()
        })
    }

    pub(super) fn heat(
        &self,
        vm: u64,
        since_ms: u64,
        until_ms: u64,
    ) -> Result<Vec<(u64, Heat)>, Failure> {
        if since_ms >= until_ms {
            return Ok(Vec::new());
        }
        self.read(|txn| {
            let heat = txn.open_table(HEAT)?;
            let rows = heat.range((vm, since_ms)..(vm, until_ms))?;
            rows.map(|entry| {
                let (key, packed) = entry?;
                Ok((key.value().1, unpacked(packed.value())?))
            })
            .collect()
        })
    }

    /// Copies everything into another store, except flags and records of VMs.
    pub(super) fn copy_to(&self, to: &WriteTransaction) -> Result<(), redb::Error> {
        let txn = self.database.begin_read()?;
        {
            let mut turns = to.open_table(TURNS)?;
            for entry in txn.open_table(TURNS)?.iter()? {
                let (key, value) = entry?;
                turns.insert(key.value(), value.value())?;
            }
        }
        for table in [MEANS, HEAT, CURVES] {
            let mut into = to.open_table(table)?;
            for entry in txn.open_table(table)?.iter()? {
                let (key, value) = entry?;
                into.insert(key.value(), value.value())?;
            }
        }
        let inputs = txn.open_table(INPUTS)?;
        for entry in txn.open_table(DECISIONS)?.iter()? {
            let (id, packed) = entry?;
            if let Some(mut decision) = understood::<Decision>(packed.value()) {
                let given = joined(&inputs, id.value())?;
                decision.inputs = given.and_then(|packed| understood(&packed));
                put_decision(to, &decision)?;
            }
        }
        Ok(())
    }

    /// Drops the oldest records until the rest takes fewer bytes.
    pub(super) fn keep_below(&self, bytes: u64) -> Result<(), Failure> {
        guarded(|| self.shrink_below(bytes))
    }

    fn shrink_below(&self, bytes: u64) -> Result<(), redb::Error> {
        while self.bytes_taken()? > bytes {
            let dropped = std::cell::Cell::new(false);
            self.write_one(true, &|txn| {
                dropped.set(drop_oldest(txn)?);
                Ok(())
            })?;
            if !dropped.get() {
                break;
            }
        }
        Ok(())
    }

    /// Bytes of pages in use.
    pub(super) fn bytes_taken(&self) -> Result<u64, redb::Error> {
        // The pages freed by a transaction are available once two more have ended.
        for _ in 0..2 {
            self.database.begin_write()?.commit()?;
        }
        let txn = self.database.begin_write()?;
        let pages = txn.stats()?.allocated_pages();
        txn.abort()?;
        Ok(pages.saturating_mul(PAGE_BYTES))
    }
}

/// Runs an operation of redb and catches its panics, which can follow from bytes that it did not write.
fn guarded<T>(run: impl FnOnce() -> Result<T, redb::Error>) -> Result<T, Failure> {
    let done = catch_unwind(AssertUnwindSafe(run));
    let gave_up = |_| Err(redb::Error::Corrupted("the store gave up".to_owned()));
    Ok(done.unwrap_or_else(gave_up)?)
}

fn damaged(error: &dyn std::fmt::Display) -> redb::Error {
    redb::Error::Corrupted(error.to_string())
}

fn packed(value: &impl Serialize) -> Result<Vec<u8>, redb::Error> {
    postcard::to_stdvec(value).map_err(|error| damaged(&error))
}

fn curve_of(bytes: &[u8]) -> Result<Curve, redb::Error> {
    unpacked(&[bytes, &Curve::UNKNOWN].concat())
}

fn unpacked<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, redb::Error> {
    postcard::from_bytes(bytes).map_err(|error| damaged(&error))
}

/// Compressed JSON: decisions are long and similar to each other.
fn zipped(value: &impl Serialize) -> Result<Vec<u8>, redb::Error> {
    let text = serde_json::to_vec(value).map_err(|error| damaged(&error))?;
    Ok(zstd::bulk::compress(&text, 3)?)
}

fn unzipped<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, redb::Error> {
    let mut text = Vec::new();
    zstd::Decoder::new(bytes)?
        .take(UNPACKED_MAX)
        .read_to_end(&mut text)?;
    serde_json::from_slice(&text).map_err(|error| damaged(&error))
}

/// A decision, or its inputs, if this version supports their form: redb guarantees the bytes.
fn understood<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    unzipped(bytes)
        .inspect_err(|error| warn!("history: a decision is left out: {error}"))
        .ok()
}

/// The parts of a value in order; `None` if there are none.
fn joined(
    table: &impl ReadableTable<(u64, u64), &'static [u8]>,
    id: u64,
) -> Result<Option<Vec<u8>>, redb::Error> {
    let mut whole = Vec::new();
    for entry in table.range((id, 0)..=(id, u64::MAX))? {
        whole.extend_from_slice(entry?.1.value());
    }
    Ok((!whole.is_empty()).then_some(whole))
}

pub(super) fn put_schema(txn: &WriteTransaction, schema: u32) -> Result<(), redb::Error> {
    txn.open_table(META)?.insert("schema", u64::from(schema))?;
    Ok(())
}

pub(super) fn put_paused(txn: &WriteTransaction, paused: bool) -> Result<(), redb::Error> {
    txn.open_table(META)?.insert("paused", u64::from(paused))?;
    Ok(())
}

pub(super) fn put_began_anew(txn: &WriteTransaction, anew: bool) -> Result<(), redb::Error> {
    txn.open_table(META)?
        .insert("began_anew", u64::from(anew))?;
    Ok(())
}

pub(super) fn put_phase(txn: &WriteTransaction, phase: Phase) -> Result<(), redb::Error> {
    let number = PHASES.iter().position(|known| *known == phase);
    let number = number.unwrap_or_default() as u64;
    txn.open_table(META)?.insert("phase", number)?;
    Ok(())
}

pub(super) fn put_ageing(txn: &WriteTransaction, ageing: Ageing) -> Result<(), redb::Error> {
    let mut meta = txn.open_table(META)?;
    meta.insert("last_ms", ageing.last_ms)?;
    meta.insert("aged_from_ms", ageing.from_ms)?;
    Ok(())
}

fn ageing(meta: &impl ReadableTable<&'static str, u64>) -> Result<Ageing, redb::Error> {
    let number = |name| Ok::<_, redb::Error>(meta.get(name)?.map_or(0, |number| number.value()));
    Ok(Ageing {
        last_ms: number("last_ms")?,
        from_ms: number("aged_from_ms")?,
    })
}

pub(super) fn put_next_id(txn: &WriteTransaction, next_id: u64) -> Result<(), redb::Error> {
    txn.open_table(META)?.insert("next_id", next_id)?;
    Ok(())
}

/// A VM's record; `None` if there is none.
pub(super) fn put_vm(
    txn: &WriteTransaction,
    name: &str,
    vm: Option<&VmRecord>,
) -> Result<(), redb::Error> {
    let mut vms = txn.open_table(VMS)?;
    match vm {
        Some(vm) => vms.insert(name, packed(vm)?.as_slice())?,
        None => vms.remove(name)?,
    };
    Ok(())
}

/// The records of all VMs, replacing all others.
pub(super) fn put_all_vms(
    txn: &WriteTransaction,
    all: &BTreeMap<String, VmRecord>,
) -> Result<(), redb::Error> {
    let mut vms = txn.open_table(VMS)?;
    vms.retain(|name, _| all.contains_key(name))?;
    for (name, vm) in all {
        vms.insert(name.as_str(), packed(vm)?.as_slice())?;
    }
    Ok(())
}

/// Moves the turns of one VM's key to another's. Reads all turns: they are of all VMs.
pub(super) fn move_turns(txn: &WriteTransaction, from: u64, to: u64) -> Result<(), redb::Error> {
    let mut turns = txn.open_table(TURNS)?;
    let mut moved = Vec::new();
    for entry in turns.iter()? {
        let (unix_ms, value) = entry?;
        let mut turn: Turn = unpacked(value.value())?;
        if let Some((key, _)) = turn.0.iter_mut().find(|(key, _)| *key == from) {
            *key = to;
            moved.push((unix_ms.value(), packed(&turn)?));
        }
    }
    for (unix_ms, turn) in moved {
        turns.insert(unix_ms, turn.as_slice())?;
    }
    Ok(())
}

/// Moves means, heat and curves of one VM's key to another's.
pub(super) fn move_records(txn: &WriteTransaction, from: u64, to: u64) -> Result<(), redb::Error> {
    for table in [MEANS, HEAT, CURVES] {
        let mut table = txn.open_table(table)?;
        let old = table.extract_from_if((from, 0)..=(from, u64::MAX), |_, _| true)?;
        let old: Vec<_> = old
            .map(|entry| entry.map(|(key, value)| (key.value().1, value.value().to_vec())))
            .collect::<Result<_, _>>()?;
        for (unix_ms, value) in old {
            table.insert((to, unix_ms), value.as_slice())?;
        }
    }
    Ok(())
}

pub(super) fn put_decision(txn: &WriteTransaction, decision: &Decision) -> Result<(), redb::Error> {
    let id = decision.id;
    if let Some(given) = &decision.inputs {
        let given = zipped(given)?;
        let mut inputs = txn.open_table(INPUTS)?;
        // They do not change with the state of the decision.
        if joined(&inputs, id)?.as_ref() != Some(&given) {
            inputs.retain_in((id, 0)..=(id, u64::MAX), |_, _| false)?;
            for (part, bytes) in (0..).zip(given.chunks(PART_BYTES)) {
                inputs.insert((id, part), bytes)?;
            }
        }
    }
    let rest = Decision {
        inputs: None,
        ..decision.clone()
    };
    txn.open_table(DECISIONS)?
        .insert(id, zipped(&rest)?.as_slice())?;
    let mut open = txn.open_table(OPEN)?;
    if decision.state.has_ended() {
        open.remove(id)?;
    } else {
        open.insert(id, ())?;
    }
    let mut touches = txn.open_table(TOUCHES)?;
    for step in &decision.steps {
        touches.insert((key_of(&step.vm), id), ())?;
    }
    Ok(())
}

pub(super) fn put_turn(
    txn: &WriteTransaction,
    unix_ms: u64,
    turn: &Turn,
) -> Result<(), redb::Error> {
    if !turn.0.is_empty() {
        let mut turns = txn.open_table(TURNS)?;
        turns.insert(unix_ms, packed(turn)?.as_slice())?;
    }
    Ok(())
}

pub(super) fn put_heat(
    txn: &WriteTransaction,
    unix_ms: u64,
    heat: &HashMap<u64, Heat>,
) -> Result<(), redb::Error> {
    let mut table = txn.open_table(HEAT)?;
    for (vm, row) in heat {
        table.insert((*vm, unix_ms), packed(row)?.as_slice())?;
    }
    Ok(())
}

pub(super) fn put_curves(
    txn: &WriteTransaction,
    unix_ms: u64,
    curves: &[(u64, Curve)],
) -> Result<(), redb::Error> {
    let mut table = txn.open_table(CURVES)?;
    for (vm, curve) in curves {
        table.insert((*vm, unix_ms), packed(curve)?.as_slice())?;
    }
    Ok(())
}

/// Combines old turns, a span at a time.
pub(super) fn grow_coarse(txn: &WriteTransaction, now_ms: u64) -> Result<(), redb::Error> {
    let mut turns = txn.open_table(TURNS)?;
    let mut means = txn.open_table(MEANS)?;
    for _ in 0..SPANS_MAX {
        let Some(oldest) = turns.first()?.map(|(key, _)| key.value()) else {
            break;
        };
        let begin = oldest - oldest % SPAN_MS;
        let end = begin.saturating_add(SPAN_MS);
        if end > now_ms.saturating_sub(FINE_MS) {
            break;
        }
        let mut of_vm: BTreeMap<u64, Vec<Sample>> = BTreeMap::new();
        for entry in turns.range(begin..end)? {
            let turn: Turn = unpacked(entry?.1.value())?;
            for (vm, StoredSample(sample)) in turn.0 {
                of_vm.entry(vm).or_default().push(sample);
            }
        }
        for (vm, samples) in &of_vm {
            if let Some(mean) = together(samples) {
                means.insert((*vm, begin), packed(&StoredSample(mean))?.as_slice())?;
            }
        }
        turns.retain_in(begin..end, |_, _| false)?;
    }
    Ok(())
}

/// Drops records older than `oldest_ms`, except decisions that have not ended. A decision that a wrong clock has dated later than
/// `now_ms` is as old as those numbered after it.
pub(super) fn forget_before(
    txn: &WriteTransaction,
    oldest_ms: u64,
    now_ms: u64,
) -> Result<(), redb::Error> {
    forget_moments(txn, 0..oldest_ms)?;
    let (mut old, mut ahead) = (Vec::new(), Vec::new());
    {
        let decisions = txn.open_table(DECISIONS)?;
        for entry in decisions.iter()? {
            let (id, packed) = entry?;
            let decision = understood::<Decision>(packed.value());
            let unix_ms = decision.as_ref().map_or(0, |decision| decision.unix_ms);
            if decision.is_some_and(|decision| !decision.state.has_ended()) {
                continue;
            }
            if unix_ms > now_ms {
                ahead.push(id.value());
            } else if unix_ms < oldest_ms {
                old.append(&mut ahead);
                old.push(id.value());
            } else {
                break;
            }
        }
    }
    drop_decisions(txn, &old)
}

fn forget_moments(txn: &WriteTransaction, times: Range<u64>) -> Result<bool, redb::Error> {
    let mut turns = txn.open_table(TURNS)?;
    let before = turns.len()?;
    turns.retain_in(times.clone(), |_, _| false)?;
    let mut dropped = turns.len()? < before;
    for table in [MEANS, HEAT, CURVES] {
        let mut table = txn.open_table(table)?;
        for vm in vms_of(&table)? {
            let before = table.len()?;
            table.retain_in((vm, times.start)..(vm, times.end), |_, _| false)?;
            dropped |= table.len()? < before;
        }
    }
    Ok(dropped)
}

/// Each VM of a table.
fn vms_of(table: &impl ReadableTable<(u64, u64), &'static [u8]>) -> Result<Vec<u64>, redb::Error> {
    let mut found = Vec::new();
    let mut rest: Option<RangeInclusive<(u64, u64)>> = Some((0, 0)..=(u64::MAX, u64::MAX));
    while let Some(range) = rest {
        let Some((key, _)) = table.range(range)?.next().transpose()? else {
            break;
        };
        let (vm, _) = key.value();
        found.push(vm);
        rest = vm
            .checked_add(1)
            .map(|next| (next, 0)..=(u64::MAX, u64::MAX));
    }
    Ok(found)
}

fn drop_decisions(txn: &WriteTransaction, ids: &[u64]) -> Result<(), redb::Error> {
    let mut decisions = txn.open_table(DECISIONS)?;
    let mut inputs = txn.open_table(INPUTS)?;
    let mut open = txn.open_table(OPEN)?;
    let mut touches = txn.open_table(TOUCHES)?;
    for id in ids {
        let decision = decisions.remove(id)?;
        let decision = decision.and_then(|packed| understood::<Decision>(packed.value()));
        for step in decision.into_iter().flat_map(|decision| decision.steps) {
            touches.remove((key_of(&step.vm), *id))?;
        }
        inputs.retain_in((*id, 0)..=(*id, u64::MAX), |_, _| false)?;
        open.remove(id)?;
    }
    Ok(())
}

/// Drops what a clock that was wrong has dated later than now, otherwise the oldest eighth of the records and of the ended
/// decisions; `false` if there is nothing to drop.
fn drop_oldest(txn: &WriteTransaction) -> Result<bool, redb::Error> {
    let Ageing { last_ms, from_ms } = ageing(&txn.open_table(META)?)?;
    if last_ms > 0
        && last_ms >= from_ms
        && forget_moments(txn, last_ms.saturating_add(DAY_MS)..u64::MAX)?
    {
        return Ok(true);
    }
    let mut times = Vec::new();
    for entry in txn.open_table(TURNS)?.iter()? {
        times.push(entry?.0.value());
    }
    for table in [MEANS, HEAT, CURVES] {
        for entry in txn.open_table(table)?.iter()? {
            let (_, time) = entry?.0.value();
            times.push(time);
        }
    }
    let mut dropped = false;
    if !times.is_empty() {
        let eighth = times.len() / 8;
        let (_, time, _) = times.select_nth_unstable(eighth);
        dropped = forget_moments(txn, 0..time.saturating_add(1))?;
    }
    let old = {
        let open = txn.open_table(OPEN)?;
        let decisions = txn.open_table(DECISIONS)?;
        let most = usize::try_from(decisions.len()? / 8 + 1).unwrap_or(usize::MAX);
        let mut old = Vec::new();
        for entry in decisions.iter()? {
            let id = entry?.0.value();
            if open.get(id)?.is_none() {
                old.push(id);
            }
            if old.len() == most {
                break;
            }
        }
        old
    };
    drop_decisions(txn, &old)?;
    Ok(dropped || !old.is_empty())
}
