//! The server's end of one ring: takes entries, validates them, executes them on the store, completes them.
//!
//! Nothing from a client is trusted. Positions are stored here, not in the shared memory; each word that the client
//! publishes is read once and checked; an entry is copied before it is inspected. An invalid entry gets a completion
//! with an error status; an impossible position ends the client.

use plimsoll_hcache::{Client, Error, Handle, Page, PoolId, PoolOptions, PutOutcome};
use std::collections::BTreeSet;

use crate::protocol::{CREATE_CAPACITY, CREATE_SHARED, Op, RawCompletion, Status, Submission};
use crate::sys::Region;
use crate::words::{RingFault, ServerEnd, set_server_sleeping};

/// Maximum number of consecutive puts, or gets, executed together; their completions are published together as well.
const RUN_ENTRIES: usize = 16;

/// Maximum number of completions of other entries before they are published, so that the client can proceed meanwhile.
const PUBLISH_EVERY: u32 = 8;

/// Counters of turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Entries served, invalid ones included.
    pub entries: u64,
    /// Entries answered with each of [`Status::BAD`].
    pub bad: [u64; Status::BAD.len()],
}

/// The result of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// Entries served.
    pub entries: u32,
    /// Whether the client sleeps and has completions to read.
    pub wake: bool,
}

/// Serves the ring of one client.
pub struct Executor {
    region: Region,
    client: Client,
    /// Pools it has created or joined, at most `max_pools`, because the store limits their total number.
    pools: BTreeSet<PoolId>,
    max_pools: usize,
    end: ServerEnd,
}

impl Executor {
    /// Returns the server's end of `region`, fresh from [`Region::create`]; the client gets up to `max_pools`.
    pub fn new(region: Region, client: Client, max_pools: usize) -> Self {
        Self {
            end: ServerEnd::new(region.geometry().entries()),
            region,
            client,
            pools: BTreeSet::new(),
            max_pools,
        }
    }

    /// The ring.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns how many entries wait and have room for their completions.
    ///
    /// # Errors
    ///
    /// [`RingFault`] if the client's positions are impossible.
    pub fn ready(&mut self) -> Result<u32, RingFault> {
        self.end.ready(&self.region)
    }

    /// Serves up to `budget` entries and adds their counts to `tally`.
    ///
    /// # Errors
    ///
    /// [`RingFault`] if the client's positions are impossible; nothing was served then.
    pub fn serve(&mut self, budget: u32, tally: &mut Tally) -> Result<Turn, RingFault> {
        let entries = self.ready()?.min(budget);
        if entries == 0 {
            return Ok(Turn {
                entries,
                wake: false,
            });
        }
        let (mut done, mut published) = (0, 0);
        while done < entries {
            done += self.serve_run(entries - done, tally);
            if done - published >= PUBLISH_EVERY || done == entries {
                published = done;
                self.end.publish(&self.region);
            }
        }
        tally.entries += u64::from(entries);
        let wake = self.end.end_turn(&self.region);
        Ok(Turn { entries, wake })
    }

    /// Publishes in the ring whether the server must be woken.
    pub fn set_sleeping(&self, sleeping: bool) {
        set_server_sleeping(&self.region, sleeping);
    }

    /// Serves the next entry, or up to `most` consecutive puts or gets. Returns how many.
    fn serve_run(&mut self, most: u32, tally: &mut Tally) -> u32 {
        let (first, op) = self.entry(0);
        let mut entries = [first; RUN_ENTRIES];
        let mut done = [(Status::Failed, 0); RUN_ENTRIES];
        let mut length = 1;
        match op {
            Err(bad) => done[0] = (bad, 0),
            Ok(op @ (Op::Put | Op::Get)) => {
                for (ahead, place) in (1..most).zip(&mut entries[1..]) {
                    let (entry, same) = self.entry(ahead);
                    if same != Ok(op) {
                        // It is copied and validated again as the first of the next run.
                        break;
                    }
                    *place = entry;
                    length += 1;
                }
                if op == Op::Put {
                    self.put(&entries[..length], &mut done);
                } else {
                    self.get(&entries[..length], &mut done);
                }
            }
            Ok(op) => {
                done[0] = self
                    .execute(op, &first)
                    .unwrap_or_else(|error| (failure(&error), 0));
            }
        }
        for (entry, (status, value)) in entries[..length].iter().zip(done) {
            if let Some(bad) = Status::BAD.iter().position(|bad| *bad == status) {
                tally.bad[bad] += 1;
            }
            let position = self.end.position();
            let completion = RawCompletion {
                user_data: entry.user_data,
                sequence: position.wrapping_add(1),
                status: status as i32,
                value,
            };
            self.region
                .write_completion(position, &completion.to_words());
            self.end.advance();
        }
        u32::try_from(length).expect("at most a run")
    }

    /// Copies and validates the entry at this distance after the next.
    fn entry(&self, ahead: u32) -> (Submission, Result<Op, Status>) {
        let position = self.end.position().wrapping_add(ahead);
        let entry = Submission::from_words(&self.region.submission(position));
        let op = self.judge(&entry, position.wrapping_add(1));
        (entry, op)
    }

    /// Returns the operation that the entry requests, if it is valid.
    fn judge(&self, entry: &Submission, sequence: u32) -> Result<Op, Status> {
        if entry.sequence != sequence {
            return Err(Status::Torn);
        }
        let op = *Op::ALL.get(usize::from(entry.op)).ok_or(Status::BadOp)?;
        let flags = match op {
            Op::CreatePool => CREATE_SHARED | CREATE_CAPACITY,
            _ => 0,
        };
        if entry.flags & !flags != 0 || entry.reserved != 0 {
            return Err(Status::BadFlags);
        }
        let has_slot = matches!(op, Op::Put | Op::Get);
        if has_slot && entry.slot >= self.region.geometry().slots() {
            return Err(Status::BadSlot);
        }
        Ok(op)
    }

    /// Puts the pages in the slots of a run.
    fn put(&self, run: &[Submission], done: &mut [(Status, u64)]) {
        let fill = |n: usize, page: &mut Page| self.region.read_slot(run[n].slot, page);
        self.client
            .put_each(&handles(run)[..run.len()], fill, |n, outcome| {
                done[n] = match outcome {
                    Ok(PutOutcome::Stored { replaced }) => (Status::Ok, replaced.into()),
                    Ok(PutOutcome::Refused { flushed }) => (Status::Refused, flushed.into()),
                    Err(error) => (failure(&error), 0),
                };
            });
    }

    /// Gets pages into the slots of a run.
    fn get(&self, run: &[Submission], done: &mut [(Status, u64)]) {
        self.client.get_each(&handles(run)[..run.len()], |n, page| {
            let status = match page {
                Ok(Some(page)) => {
                    self.region.write_slot(run[n].slot, page);
                    Status::Ok
                }
                Ok(None) => Status::Miss,
                Err(error) => failure(&error),
            };
            done[n] = (status, 0);
        });
    }

    /// Executes an entry that is neither a put nor a get. Returns its status and value.
    fn execute(&mut self, op: Op, entry: &Submission) -> Result<(Status, u64), Error> {
        let handle = handle(entry);
        let pool = handle.pool;
        let client = &self.client;
        Ok(match op {
            Op::Nop => (Status::Ok, 0),
            Op::Put | Op::Get => unreachable!("served in runs"),
            Op::Flush => (Status::Ok, client.flush(handle)?.into()),
            Op::FlushRange if entry.last < entry.index => (Status::BadRange, 0),
            Op::FlushRange => {
                let indices = entry.index..=entry.last;
                (Status::Ok, client.flush_range(pool, entry.object, indices)?)
            }
            Op::FlushObject => (Status::Ok, client.flush_object(pool, entry.object)?),
            Op::FlushPool => (Status::Ok, client.flush_pool(pool)?),
            Op::CreatePool if self.pools.len() >= self.max_pools => (Status::TooManyPools, 0),
            Op::CreatePool => {
                let options = if entry.flags & CREATE_SHARED == 0 {
                    PoolOptions::private()
                } else {
                    PoolOptions::shared(entry.key)
                };
                let limited = entry.flags & CREATE_CAPACITY != 0;
                let made = client.create_pool(PoolOptions {
                    capacity_pages: limited.then_some(entry.capacity_pages),
                    ..options
                })?;
                self.pools.insert(made);
                (Status::Ok, made.0.into())
            }
            Op::DestroyPool => {
                client.destroy_pool(pool)?;
                self.pools.remove(&pool);
                (Status::Ok, 0)
            }
        })
    }
}

fn handle(entry: &Submission) -> Handle {
    Handle {
        pool: PoolId(entry.pool),
        object: entry.object,
        index: entry.index,
    }
}

/// The handles of a run; positions past its end repeat its first.
fn handles(run: &[Submission]) -> [Handle; RUN_ENTRIES] {
    let mut handles = [handle(&run[0]); RUN_ENTRIES];
    for (place, entry) in handles.iter_mut().zip(run) {
        *place = handle(entry);
    }
    handles
}

fn failure(error: &Error) -> Status {
    match error {
        Error::NoSuchPool(_) => Status::NoSuchPool,
        Error::TooManyPools(_) | Error::NoPoolLeft { .. } => Status::TooManyPools,
        _ => Status::Failed,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Release;

    use plimsoll_hcache::{ClientOptions, Store, StoreOptions};

    use super::*;
    use crate::protocol::Geometry;
    use crate::words::Word;

    /// A ring of 4 entries and 2 slots of a client of a group.
    fn executor(store: &Store, group: u64) -> Executor {
        let (region, _) = Region::create(Geometry::new(4, 2).unwrap()).unwrap();
        let options = ClientOptions {
            group,
            ..ClientOptions::new("test")
        };
        Executor::new(region, store.create_client(options).unwrap(), 3)
    }

    /// Serves one entry.
    fn call(executor: &mut Executor, entry: Submission) -> (Status, u64) {
        let position = executor.end.position();
        let sequence = position.wrapping_add(1);
        let region = &executor.region;
        region.write_submission(position, &Submission { sequence, ..entry }.to_words());
        region.word(Word::SubmissionTail).store(sequence, Release);
        region.word(Word::CompletionHead).store(position, Release);
        let turn = executor.serve(64, &mut Tally::default()).unwrap();
        assert_eq!(turn.entries, 1);
        let done = RawCompletion::from_words(&executor.region.completion(position));
        (Status::from_number(done.status).unwrap(), done.value)
    }

    fn entry(op: Op, pool: u64) -> Submission {
        Submission {
            op: op as u8,
            pool: u32::try_from(pool).unwrap(),
            ..Submission::default()
        }
    }

    fn store() -> Store {
        Store::new(StoreOptions::new(8 << 20)).unwrap()
    }

    #[test]
    fn users_who_agree_on_a_key_do_not_meet() {
        let store = store();
        let [mut first, mut second, mut stranger] = [1, 1, 2].map(|group| executor(&store, group));
        let join = Submission {
            flags: CREATE_SHARED,
            key: 99,
            ..entry(Op::CreatePool, 0)
        };
        let (_, pool) = call(&mut first, join);
        assert_eq!(call(&mut second, join), (Status::Ok, pool));
        let (status, other) = call(&mut stranger, join);
        assert_eq!(status, Status::Ok);
        assert_ne!(other, pool);
        assert_eq!(call(&mut first, entry(Op::Put, pool)).0, Status::Ok);
        assert_eq!(call(&mut second, entry(Op::Get, pool)).0, Status::Ok);
        assert_eq!(call(&mut stranger, entry(Op::Get, other)).0, Status::Miss);
        let foreign = call(&mut stranger, entry(Op::Get, pool));
        assert_eq!(foreign.0, Status::NoSuchPool);
    }

    #[test]
    fn a_client_gets_so_many_pools_and_others_for_those_it_leaves() {
        let mut executor = executor(&store(), 0);
        let create = entry(Op::CreatePool, 0);
        let (_, pool) = call(&mut executor, create);
        for _ in 0..2 {
            assert_eq!(call(&mut executor, create).0, Status::Ok);
        }
        assert_eq!(call(&mut executor, create), (Status::TooManyPools, 0));
        assert_eq!(
            call(&mut executor, entry(Op::DestroyPool, pool)).0,
            Status::Ok
        );
        assert_eq!(call(&mut executor, create).0, Status::Ok);
        assert_eq!(call(&mut executor, create), (Status::TooManyPools, 0));
    }

    #[test]
    fn positions_go_on_where_32_bits_end() {
        let mut executor = executor(&store(), 0);
        for word in [Word::SubmissionTail, Word::CompletionHead] {
            executor.region.word(word).store(u32::MAX - 2, Release);
        }
        executor.end.set_position(u32::MAX - 2);
        for _ in 0..6 {
            assert_eq!(call(&mut executor, entry(Op::Nop, 0)), (Status::Ok, 0));
        }
        assert_eq!(executor.end.position(), 3);
    }

    #[test]
    fn runs_of_puts_and_gets_end_where_something_else_comes() {
        let store = store();
        let (region, _) = Region::create(Geometry::new(64, 20).unwrap()).unwrap();
        let client = store.create_client(ClientOptions::new("test")).unwrap();
        let pool = client.create_pool(PoolOptions::private()).unwrap();
        let mut executor = Executor::new(region, client, 3);
        for slot in 0..20 {
            let filled = u8::try_from(slot).unwrap();
            executor.region.write_slot(slot, &[filled; 4096]);
        }
        let page = |op, index: u32, slot| Submission {
            index,
            slot,
            ..entry(op, pool.0.into())
        };
        let (good, old) = ((Status::Ok, 0), (Status::Ok, 1));
        let mut entries: Vec<_> = (0..18).map(|n| (page(Op::Put, n, n), good)).collect();
        entries.extend([
            (page(Op::Put, 0, 20), (Status::BadSlot, 0)),
            (page(Op::Put, 1, 18), old),
            (page(Op::Get, 1, 0), good),
            (page(Op::Get, 1, 1), (Status::Miss, 0)),
            (page(Op::Flush, 2, 0), old),
            (page(Op::Get, 2, 2), (Status::Miss, 0)),
            (page(Op::Get, 17, 3), good),
        ]);
        for (position, (entry, _)) in (0..).zip(&entries) {
            let entry = Submission {
                sequence: position + 1,
                user_data: u64::from(position) + 100,
                ..*entry
            };
            executor
                .region
                .write_submission(position, &entry.to_words());
        }
        let count = u32::try_from(entries.len()).unwrap();
        executor
            .region
            .word(Word::SubmissionTail)
            .store(count, Release);
        let turn = executor.serve(64, &mut Tally::default()).unwrap();
        assert_eq!(turn.entries, count);
        for (position, (_, expected)) in (0..).zip(&entries) {
            let done = RawCompletion::from_words(&executor.region.completion(position));
            assert_eq!(done.user_data, u64::from(position) + 100);
            let status = Status::from_number(done.status).unwrap();
            assert_eq!((status, done.value), *expected, "entry {position}");
        }
        for (slot, byte) in [(0, 18), (1, 1), (2, 2), (3, 17)] {
            let mut page = [0; 4096];
            executor.region.read_slot(slot, &mut page);
            assert_eq!(page, [byte; 4096], "slot {slot}");
        }
    }

    #[test]
    fn a_turn_ends_with_its_budget_and_wakes_a_sleeper_once() {
        let mut executor = executor(&store(), 0);
        for position in 0..4 {
            let sequence = position + 1;
            let entry = Submission {
                sequence,
                ..entry(Op::Nop, 0)
            };
            executor
                .region
                .write_submission(position, &entry.to_words());
        }
        executor.region.word(Word::SubmissionTail).store(4, Release);
        executor.region.word(Word::ClientSleeping).store(1, Release);
        let mut tally = Tally::default();
        for (entries, wake) in [(3, true), (1, false), (0, false)] {
            let turn = executor.serve(3, &mut tally).unwrap();
            assert_eq!(turn, Turn { entries, wake });
        }
        assert_eq!((tally.entries, tally.bad), (4, [0; 8]));
    }
}
