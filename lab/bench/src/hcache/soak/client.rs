//! A client of the soak test: puts and gets at random, and tracks for each handle the valid results of a get.

use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context;
use plimsoll_flow::mix;
use plimsoll_hcache::{Handle, Page, PoolId, PoolOptions};
use plimsoll_ring::protocol::Status;
use plimsoll_ring::{ConnectOptions, Connection};
use rustix::time::{ClockId, clock_gettime};

use super::Tally;
use crate::random::Random;

/// What one client is told.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    #[arg(long)]
    socket: PathBuf,
    #[arg(long)]
    name: String,
    /// Which handles of the shared pool are its own.
    #[arg(long)]
    place: u64,
    #[arg(long)]
    places: u64,
    /// Pages it knows in each pool.
    #[arg(long)]
    pages: u64,
    #[arg(long)]
    seed: u64,
    /// When it leaves.
    #[arg(long)]
    seconds: f64,
}

/// Exit status of a client that received an invalid result.
pub(super) const WRONG: i32 = 3;

/// Pages of an object.
pub(super) const OBJECT_PAGES: u64 = 256;

/// A client's record of a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expectation {
    /// Unknown: another client may have put it.
    Unknown,
    /// It may not be found.
    Absent,
    /// If it is found, it has this generation.
    Put(u64),
    /// If it is found, it has this generation or a later one.
    From(u64),
}

/// An operation in flight.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Put(u64),
    Get,
    Flush,
}

/// A pool and the records of its handles.
struct Pool {
    id: PoolId,
    /// The pool's identity in its pages: another for each private pool, one for the shared pool.
    tag: u64,
    exclusive: bool,
    known: Vec<Expectation>,
    /// Which handles this client may put.
    place: u64,
    places: u64,
}

impl Pool {
    fn owns(&self, number: u64) -> bool {
        self.exclusive || number / OBJECT_PAGES % self.places == self.place
    }

    fn handle(&self, number: u64) -> Handle {
        Handle {
            pool: self.id,
            object: number / OBJECT_PAGES,
            index: u32::try_from(number % OBJECT_PAGES).expect("below 256"),
        }
    }

    /// The record after an operation; an error if its outcome is invalid.
    fn learn(
        &mut self,
        number: u64,
        operation: Operation,
        status: Status,
        page: Option<&Page>,
    ) -> Result<(), String> {
        let slot = usize::try_from(number).expect("a number below the pages");
        let before = self.known[slot];
        let wrong = |what: &str| {
            let handle = (number / OBJECT_PAGES, number % OBJECT_PAGES);
            let pool = if self.exclusive { "private" } else { "shared" };
            Err(format!(
                "{pool} page {handle:?}, known as {before:?}: {what}"
            ))
        };
        self.known[slot] = match (operation, status) {
            (Operation::Put(generation), Status::Ok) => Expectation::Put(generation),
            (Operation::Put(_), Status::Refused) => Expectation::Absent,
            (Operation::Flush, Status::Ok) => Expectation::Absent,
            (Operation::Get, Status::Miss) => match before {
                Expectation::Put(_) if self.owns(number) => Expectation::Absent,
                _ => before,
            },
            (Operation::Get, Status::Ok) => {
                let Some(generation) = page.and_then(|page| generation(page, self.tag, number))
                else {
                    return wrong("wrong bytes");
                };
                match before {
                    Expectation::Absent => return wrong("found though it is gone"),
                    Expectation::Put(put) if put != generation => {
                        return wrong(&format!("generation {generation}"));
                    }
                    Expectation::From(least) if generation < least => {
                        return wrong(&format!("older generation {generation}"));
                    }
                    _ if self.exclusive => Expectation::Absent,
                    _ if self.owns(number) => Expectation::Put(generation),
                    _ => Expectation::From(generation),
                }
            }
            (operation, status) => return wrong(&format!("{operation:?} is answered {status:?}")),
        };
        Ok(())
    }
}

/// Runs one client until its time is over. Exits with status 3 if it received an invalid result.
pub(crate) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut random = Random::new(args.seed);
    let mut connection = Connection::connect(&args.socket, &ConnectOptions::new(&args.name))?;
    let count = usize::try_from(args.pages)?;
    let mut pools = [
        Pool {
            id: connection.create_pool(PoolOptions::private())?,
            tag: args.seed,
            exclusive: true,
            known: vec![Expectation::Absent; count],
            place: 0,
            places: 1,
        },
        Pool {
            id: connection.create_pool(PoolOptions::shared(1))?,
            tag: 1,
            exclusive: false,
            known: vec![Expectation::Unknown; count],
            place: args.place,
            places: args.places,
        },
    ];
    let mut tally = Tally::default();
    let begin = Instant::now();
    let mut said = 0;
    while begin.elapsed().as_secs_f64() < args.seconds {
        let pool = &mut pools[usize::from(random.chance(0.3))];
        let outcome = match random.below(2000) {
            0 => flush_many(&mut connection, pool, &mut random, &mut tally)?,
            _ => batch(&mut connection, pool, &mut random, &mut tally)?,
        };
        if let Err(wrong) = outcome {
            eprintln!("{}: {wrong}", args.name);
            std::process::exit(WRONG);
        }
        if begin.elapsed().as_secs() > said {
            said = begin.elapsed().as_secs();
            say(&mut tally, out)?;
        }
    }
    say(&mut tally, out)
}

fn say(tally: &mut Tally, out: &mut dyn Write) -> anyhow::Result<()> {
    let words = tally.numbers().map(|number| number.to_string());
    writeln!(out, "{}", words.join(" "))?;
    out.flush()?;
    Ok(())
}

/// The result of a get or a flush, unless the connection failed.
type Outcome = Result<(), String>;

/// Up to 64 operations on as many handles, or some on the same: they are done in order.
fn batch(
    connection: &mut Connection,
    pool: &mut Pool,
    random: &mut Random,
    tally: &mut Tally,
) -> anyhow::Result<Outcome> {
    let mut under_way = HashMap::new();
    for order in 0..1 + random.below(64) as u64 {
        // Three of four operations are on the first quarter of the handles.
        let most = pool.known.len() >> (2 * u32::from(random.chance(0.75)));
        let number = random.below(most.max(1)) as u64;
        let handle = pool.handle(number);
        let mut slot = connection.reserve().context("no free slot")?;
        let operation = match random.below(100) {
            0..55 => Operation::Get,
            55..97 if pool.owns(number) => Operation::Put(now()),
            _ if pool.owns(number) => Operation::Flush,
            _ => Operation::Get,
        };
        match operation {
            Operation::Get => {
                tally.gets += 1;
                connection.submit_get(handle, slot, order)?;
            }
            Operation::Put(generation) => {
                tally.puts += 1;
                make(connection.page(&mut slot), pool.tag, number, generation);
                connection.submit_put(handle, slot, order)?;
            }
            Operation::Flush => {
                tally.flushes += 1;
                connection.release(slot);
                connection.submit_flush(handle, order)?;
            }
        }
        under_way.insert(order, (number, operation));
    }
    let mut outcome = Ok(());
    while !under_way.is_empty() {
        connection.wait()?;
        while let Some(mut done) = connection.reap()? {
            let (number, operation) = under_way
                .remove(&done.user_data)
                .context("a completion of nothing")?;
            // The contents of the slot after a miss are undefined.
            let page = match (&mut done.slot, operation) {
                (Some(slot), Operation::Get) => Some(*connection.page(slot)),
                _ => None,
            };
            if matches!(operation, Operation::Get) && done.status == Status::Ok {
                tally.hits += 1;
            }
            let learnt = pool.learn(number, operation, done.status, page.as_ref());
            outcome = outcome.and(learnt);
            connection.release(done.slot);
        }
    }
    Ok(outcome)
}

/// Flushes a range, an object or (if private) the pool; then none of their pages may be found.
fn flush_many(
    connection: &mut Connection,
    pool: &mut Pool,
    random: &mut Random,
    tally: &mut Tally,
) -> anyhow::Result<Outcome> {
    let objects = (pool.known.len() as u64 / OBJECT_PAGES).max(1);
    let object = random.bits() % objects;
    let first = object * OBJECT_PAGES;
    let flushed = if pool.exclusive && random.chance(0.02) {
        connection.flush_pool(pool.id)?;
        0..pool.known.len() as u64
    } else if !pool.owns(first) {
        return Ok(Ok(()));
    } else if random.chance(0.5) {
        connection.flush_object(pool.id, object)?;
        first..first + OBJECT_PAGES
    } else {
        connection.flush_range(pool.id, object, 16..=199)?;
        first + 16..first + 200
    };
    tally.flushes += 1;
    for (number, known) in (0..).zip(&mut pool.known) {
        if flushed.contains(&number) {
            *known = Expectation::Absent;
        }
    }
    Ok(Ok(()))
}

/// Nanoseconds of the machine's clock: later puts, of any process, have later generations.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    u64::try_from(time.tv_sec * 1_000_000_000 + time.tv_nsec).expect("a time after boot")
}

/// Makes a page: its generation, then words that only its identity and generation give; in one of two pages
/// half of them are alike, so that it can be compressed.
fn make(page: &mut Page, tag: u64, number: u64, generation: u64) {
    let (first, words) = page.split_at_mut(8);
    first.copy_from_slice(&generation.to_le_bytes());
    let seed = mix(tag ^ mix(number ^ mix(generation)));
    for (word, value) in words.chunks_exact_mut(8).zip(values(seed)) {
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// The generation of a page, if each of its bytes is correct.
fn generation(page: &Page, tag: u64, number: u64) -> Option<u64> {
    let first = page[..8].try_into().expect("eight bytes");
    let generation = u64::from_le_bytes(first);
    let mut right = [0; 4096];
    make(&mut right, tag, number, generation);
    (page == &right).then_some(generation)
}

fn values(seed: u64) -> impl Iterator<Item = u64> {
    (0..).map(move |at| match seed.is_multiple_of(2) && at % 16 < 8 {
        true => seed,
        false => mix(seed.wrapping_add(at)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(exclusive: bool, known: Expectation) -> Pool {
        Pool {
            id: PoolId(1),
            tag: 5,
            exclusive,
            known: vec![known; 512],
            place: 0,
            places: 2,
        }
    }

    fn page(tag: u64, number: u64, generation: u64) -> Page {
        let mut page = [0; 4096];
        make(&mut page, tag, number, generation);
        page
    }

    #[test]
    fn a_changed_byte_a_foreign_page_and_an_old_generation_are_seen() {
        let get = |known, page: &Page| {
            let mut pool = pool(false, known);
            pool.learn(3, Operation::Get, Status::Ok, Some(page))
        };
        let right = page(5, 3, 70);
        assert_eq!(get(Expectation::Put(70), &right), Ok(()));
        let mut changed = right;
        changed[4000] ^= 1;
        assert!(get(Expectation::Put(70), &changed).is_err());
        assert!(get(Expectation::Put(70), &page(5, 4, 70)).is_err());
        assert!(get(Expectation::Put(70), &page(6, 3, 70)).is_err());
        assert!(get(Expectation::Put(71), &right).is_err());
        assert!(get(Expectation::From(71), &right).is_err());
        assert_eq!(get(Expectation::From(70), &right), Ok(()));
        assert!(get(Expectation::Absent, &right).is_err());
    }

    #[test]
    fn a_page_got_from_a_private_pool_is_known_to_be_gone() {
        let mut pool = pool(true, Expectation::Put(70));
        let right = page(5, 3, 70);
        let mut get = || pool.learn(3, Operation::Get, Status::Ok, Some(&right));
        assert_eq!(get(), Ok(()));
        assert!(get().is_err());
    }

    #[test]
    fn a_refused_put_leaves_nothing() {
        let mut pool = pool(false, Expectation::Put(70));
        pool.learn(3, Operation::Put(80), Status::Refused, None)
            .unwrap();
        assert_eq!(pool.known[3], Expectation::Absent);
    }
}
