//! Histories of overlapping calls, and whether a sequential order explains them.
//!
//! A history of one handle is *linearizable* if each call can be given a point in time between its invocation and its
//! response so that the answers are those of calls made one after another at these times, on a place that holds a page
//! or none: a put fills it, a get empties it (a private pool) or leaves it, a flush empties it. In a
//! store that is short of room the place may also lose its page at any time, and a put may empty it instead.
//!
//! The search for such an order is that of Wing and Gong (1993), with Lowe's cache of visited states (2017): try each
//! call next that no other one precedes wholly. It is complete: it finds an order if there is one.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

use plimsoll_hcache::{Client, Error, Handle, PAGE_BYTES, Page, PoolId, PutOutcome};

use crate::random::mixed;

/// A call and its answer. A page is identified by its number, which its contents contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// A put.
    Put { page: u64, outcome: PutOutcome },
    /// A get and what it found.
    Get(Option<u64>),
    /// A peek and what it found.
    Peek(Option<u64>),
    /// A flush, and whether the page was there, if reported.
    Flush(Option<bool>),
    /// A flush of the whole pool, which may leave a page whose put had not returned when it began.
    FlushPool,
}

/// A call, and its interval in time.
#[derive(Debug, Clone, Copy)]
pub struct Operation {
    pub start: u64,
    pub end: u64,
    pub call: Call,
    /// The page whose put comes before this one in the same call.
    pub after: Option<u64>,
}

/// Returns a call that is ordered by time only.
pub fn operation(start: u64, end: u64, call: Call) -> Operation {
    Operation {
        start,
        end,
        call,
        after: None,
    }
}

/// What the pool and the store may do.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// A get leaves the page there.
    pub shared: bool,
    /// Pages may be dropped at any time, and puts be refused.
    pub drops: bool,
}

/// The page under a handle.
type State = Option<u64>;

impl Rules {
    /// Returns the state after a call with its answer, `None` if that answer is impossible.
    fn after(self, state: State, call: Call) -> Option<State> {
        match call {
            Call::Put {
                page,
                outcome: PutOutcome::Stored { replaced },
            } => (state.is_some() == replaced).then_some(Some(page)),
            Call::Put {
                outcome: PutOutcome::Refused { flushed },
                ..
            } => (self.drops && state.is_some() == flushed).then_some(None),
            Call::Get(found) => {
                let left = state.filter(|_| self.shared);
                (state == found).then_some(left)
            }
            Call::Peek(found) => (state == found).then_some(state),
            Call::Flush(there) => there
                .is_none_or(|there| state.is_some() == there)
                .then_some(None),
            Call::FlushPool => Some(None),
        }
    }

    /// Whether a history of one handle, empty before it, is linearizable.
    pub fn explain(self, history: &[Operation]) -> bool {
        assert!(history.len() <= 128, "a history of {} calls", history.len());
        let all = (0..history.len()).fold(0, |all, at| all | 1 << at);
        let is_young = |state: State, moment: u64| {
            let put = |operation: &&Operation| matches!(operation.call, Call::Put { page, .. } if Some(page) == state);
            history.iter().find(put).is_some_and(|put| put.end > moment)
        };
        let (mut seen, mut left) = (HashSet::new(), vec![(0u128, State::None)]);
        while let Some((done, state)) = left.pop() {
            if done == all {
                return true;
            }
            if !seen.insert((done, state)) {
                continue;
            }
            let to_do = || (0..history.len()).filter(|at| done & (1 << at) == 0);
            let first_end = to_do().map(|at| history[at].end).min();
            let is_next = |at: &usize| {
                let Operation { start, after, .. } = history[*at];
                let is_before = |other: usize| matches!(history[other].call, Call::Put { page, .. } if Some(page) == after);
                Some(start) < first_end && !to_do().any(is_before)
            };
            for at in to_do().filter(is_next) {
                let (operation, done) = (history[at], done | 1 << at);
                let states = [Some(state), self.drops.then_some(None)];
                let after = |state| self.after(state, operation.call);
                left.extend(
                    states
                        .into_iter()
                        .flatten()
                        .filter_map(after)
                        .map(|state| (done, state)),
                );
                if operation.call == Call::FlushPool && is_young(state, operation.start) {
                    left.push((done, state));
                }
            }
        }
        false
    }
}

/// Returns the page of that number: the number in each second word, noise or always the same between.
fn page_of(number: u64) -> Page {
    let mut page = [0; PAGE_BYTES];
    for (at, bytes) in (0u64..).zip(page.chunks_exact_mut(8)) {
        let word = match number % 4 {
            _ if at.is_multiple_of(2) => number,
            0 => number,
            1 => at,
            _ => mixed(number ^ at),
        };
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    page
}

/// Returns the number of a page.
///
/// # Panics
///
/// If the page has the contents of no number, because it is torn.
fn number_of(page: &Page) -> u64 {
    let number = u64::from_le_bytes(page[..8].try_into().expect("eight bytes"));
    assert!(*page == page_of(number), "page {number} is torn");
    number
}

/// The clock of all threads, and numbers for pages.
#[derive(Debug, Default)]
pub struct Clock(AtomicU64);

impl Clock {
    fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }
}

/// Calls a client and records its answers; one for each thread.
pub struct Recorder<'a> {
    clock: &'a Clock,
    client: &'a Client,
    page: Page,
    operations: Vec<(Handle, Operation)>,
}

/// The records of one thread.
#[derive(Debug, Default)]
pub struct Record {
    operations: Vec<(Handle, Operation)>,
}

impl<'a> Recorder<'a> {
    /// Returns one that calls that client.
    pub fn new(clock: &'a Clock, client: &'a Client) -> Self {
        Self {
            clock,
            client,
            page: [0; PAGE_BYTES],
            operations: Vec::new(),
        }
    }

    /// Returns the records.
    pub fn finish(self) -> Record {
        Record {
            operations: self.operations,
        }
    }

    fn record(&mut self, handle: Handle, start: u64, call: Call) {
        let end = self.clock.next();
        self.operations.push((handle, operation(start, end, call)));
    }

    /// Puts a page of a number never used before.
    pub fn put(&mut self, handle: Handle) {
        let number = self.clock.next();
        let page = page_of(number);
        let start = self.clock.next();
        let outcome = self.client.put(handle, &page);
        let call = Call::Put {
            page: number,
            outcome: outcome.unwrap(),
        };
        self.record(handle, start, call);
    }

    /// Gets a page.
    pub fn get(&mut self, handle: Handle) -> Option<u64> {
        let start = self.clock.next();
        let hit = self.client.get(handle, &mut self.page).unwrap();
        let found = hit.then(|| number_of(&self.page));
        self.record(handle, start, Call::Get(found));
        found
    }

    /// Puts pages of numbers never used before in one call; those of one handle in their order. None of a
    /// `foreign` pool.
    pub fn put_each(&mut self, handles: &[Handle], foreign: PoolId) {
        let numbers: Vec<u64> = handles.iter().map(|_| self.clock.next()).collect();
        let start = self.clock.next();
        let mut last = HashMap::new();
        let fill = |at: usize, frame: &mut Page| *frame = page_of(numbers[at]);
        let (clock, operations) = (self.clock, &mut self.operations);
        let done = |at: usize, outcome: Result<PutOutcome, Error>| {
            let handle = handles[at];
            if handle.pool == foreign {
                return assert_eq!(outcome, Err(Error::NoSuchPool(foreign)));
            }
            let call = Call::Put {
                page: numbers[at],
                outcome: outcome.unwrap(),
            };
            let put = Operation {
                after: last.insert(handle, numbers[at]),
                ..operation(start, clock.next(), call)
            };
            operations.push((handle, put));
        };
        self.client.put_each(handles, fill, done);
    }

    /// Gets pages in one call, in any order. None of a `foreign` pool.
    pub fn get_each(&mut self, handles: &[Handle], foreign: PoolId) {
        let start = self.clock.next();
        let (clock, operations) = (self.clock, &mut self.operations);
        self.client.get_each(handles, |at, page| {
            let handle = handles[at];
            if handle.pool == foreign {
                return assert_eq!(page, Err(Error::NoSuchPool(foreign)));
            }
            let call = Call::Get(page.unwrap().map(number_of));
            operations.push((handle, operation(start, clock.next(), call)));
        });
    }

    /// Peeks at a page.
    pub fn peek(&mut self, handle: Handle) {
        let start = self.clock.next();
        let there = self.client.peek(handle, &mut self.page).unwrap();
        let found = there.then(|| number_of(&self.page));
        self.record(handle, start, Call::Peek(found));
    }

    /// Flushes a page.
    pub fn flush(&mut self, handle: Handle) {
        let start = self.clock.next();
        let there = self.client.flush(handle).unwrap();
        self.record(handle, start, Call::Flush(Some(there)));
    }

    /// Flushes pages by `flush`, which returns how many there were: one `call` of each.
    pub fn flush_all(
        &mut self,
        handles: &[Handle],
        call: Call,
        flush: impl FnOnce(&Client) -> u64,
    ) -> u64 {
        let start = self.clock.next();
        let count = flush(self.client);
        let end = self.clock.next();
        for handle in handles {
            self.operations.push((*handle, operation(start, end, call)));
        }
        count
    }
}

/// Asserts that the records of all threads are linearizable for each handle.
///
/// # Panics
///
/// If they are not, with the history that is not.
pub fn check(records: Vec<Record>, rules: Rules) {
    let mut histories: BTreeMap<Handle, Vec<Operation>> = BTreeMap::new();
    for record in records {
        for (handle, operation) in record.operations {
            histories.entry(handle).or_default().push(operation);
        }
    }
    for (handle, mut history) in histories {
        history.sort_by_key(|operation| operation.start);
        if !rules.explain(&history) {
            let lines = history.iter().map(|call| format!("{call:?}\n"));
            panic!(
                "no order explains {handle:?}, {rules:?}:\n{}",
                lines.collect::<String>()
            );
        }
    }
}
