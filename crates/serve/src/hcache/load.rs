//! Load for a page-store server, with every page checked.
//!
//! A client signs each page that it puts: its contents depend on its number and on how often it was put before.
//! A get must return, byte for byte, the page last put. The pool is private: a page that was returned must be gone.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use hdrhistogram::Histogram;
use plimsoll_hcache::{Handle, Page, PoolId, PoolOptions};
use plimsoll_ring::Connection;
use plimsoll_ring::protocol::Status;

/// What load a run puts on a server.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// Time for which operations are submitted.
    pub length: Duration,
    /// Different pages.
    pub pages: u32,
    /// Operations in flight.
    pub batch: u32,
    /// Share of puts, 0.0 to 1.0; the rest are gets.
    pub write_ratio: f64,
    /// Random seed of the choices.
    pub seed: u64,
}

/// Counts of a run.
#[derive(Debug)]
pub struct Load {
    /// Length of the run.
    pub length: Duration,
    /// Puts.
    pub puts: u64,
    /// Of them, refused by the server.
    pub puts_refused: u64,
    /// Gets.
    pub gets: u64,
    /// Of them, those that returned a page.
    pub hits: u64,
    /// Of these, pages with other contents than were put last.
    pub wrong_pages: u64,
    /// Latencies of the puts, in nanoseconds.
    pub put_times: Histogram<u64>,
    /// Latencies of the gets, in nanoseconds.
    pub get_times: Histogram<u64>,
}

/// An operation in flight.
#[derive(Debug, Clone, Copy)]
struct Operation {
    page: u32,
    /// The version that a get must return: the one last put, 0 for none.
    version: u32,
    is_put: bool,
    begin: Instant,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            length: Duration::ZERO,
            puts: 0,
            puts_refused: 0,
            gets: 0,
            hits: 0,
            wrong_pages: 0,
            put_times: latencies(),
            get_times: latencies(),
        }
    }
}

impl Load {
    /// Puts load on the server of a connection that has a slot for each operation in flight.
    ///
    /// # Errors
    ///
    /// That the server is gone, or answers a valid request in no valid way.
    pub fn run(mut connection: Connection, options: &LoadOptions) -> anyhow::Result<Self> {
        let pool = connection.create_pool(PoolOptions::private())?;

        let mut load = Self::default();
        let mut choices = fastrand::Rng::with_seed(options.seed);
        let mut last = vec![0_u32; options.pages as usize];
        let mut stored = vec![false; options.pages as usize];
        let mut in_flight = VecDeque::new();
        let begin = Instant::now();
        let end = begin + options.length;
        let mut now = begin;
        loop {
            while now < end
                && let Some(mut slot) = connection.reserve()
            {
                let page = choices.u32(..options.pages);
                let at = page as usize;
                let is_put = choices.f64() < options.write_ratio;
                let handle = handle(pool, page);
                let version = if is_put {
                    last[at] += 1;
                    sign(connection.page(&mut slot), page, last[at]);
                    connection.submit_put(handle, slot, 0)?;
                    last[at]
                } else {
                    connection.submit_get(handle, slot, 0)?;
                    if stored[at] { last[at] } else { 0 }
                };
                stored[at] = is_put;
                in_flight.push_back(Operation {
                    page,
                    version,
                    is_put,
                    begin: now,
                });
            }
            connection.wait()?;
            now = Instant::now();
            // Completions come in the order of submission.
            while let Some(done) = connection.reap()? {
                let operation = in_flight
                    .pop_front()
                    .context("a completion without an operation")?;
                let mut slot = done.slot;
                let got = slot.as_mut().map(|slot| &*connection.page(slot));
                load.count(operation, done.status, got, now)?;
                connection.release(slot);
            }
            if in_flight.is_empty() && now >= end {
                break;
            }
        }
        load.length = begin.elapsed();
        Ok(load)
    }

    fn count(
        &mut self,
        operation: Operation,
        status: Status,
        got: Option<&Page>,
        now: Instant,
    ) -> anyhow::Result<()> {
        let time = now.saturating_duration_since(operation.begin);
        match (operation.is_put, status) {
            (true, Status::Ok) => {}
            (true, Status::Refused) => self.puts_refused += 1,
            (false, Status::Ok) => {
                self.hits += 1;
                let is_right = operation.version != 0
                    && got.is_some_and(|got| is_signed(got, operation.page, operation.version));
                self.wrong_pages += u64::from(!is_right);
            }
            (false, Status::Miss) => {}
            (_, status) => anyhow::bail!("the server answers {status:?} to a valid request"),
        }
        let (count, times) = if operation.is_put {
            (&mut self.puts, &mut self.put_times)
        } else {
            (&mut self.gets, &mut self.get_times)
        };
        *count += 1;
        times.record(u64::try_from(time.as_nanos())?)?;
        Ok(())
    }

    /// A count, per second of the run.
    pub fn a_second(&self, count: u64) -> f64 {
        count as f64 / self.length.as_secs_f64()
    }
}

/// Objects of 1024 pages.
fn handle(pool: PoolId, page: u32) -> Handle {
    Handle {
        pool,
        object: u64::from(page >> 10),
        index: page & 0x3ff,
    }
}

/// The words of a signed page.
fn words(page: u32, version: u32) -> impl Iterator<Item = u64> {
    let mut words = fastrand::Rng::with_seed(u64::from(page) << 32 | u64::from(version));
    std::iter::repeat_with(move || words.u64(..))
}

fn sign(target: &mut Page, page: u32, version: u32) {
    let target = target.as_chunks_mut().0.iter_mut();
    for (target, word) in target.zip(words(page, version)) {
        *target = word.to_ne_bytes();
    }
}

fn is_signed(got: &Page, page: u32, version: u32) -> bool {
    let got = got.as_chunks().0.iter().map(|got| u64::from_ne_bytes(*got));
    let differing = got.zip(words(page, version));
    differing.fold(0, |all, (got, word)| all | (got ^ word)) == 0
}

/// An empty histogram of latencies in nanoseconds, exact to a hundredth.
///
/// # Panics
///
/// Never: two significant digits are valid.
pub fn latencies() -> Histogram<u64> {
    let mut histogram = Histogram::new(2).expect("two significant digits");
    histogram.auto(true);
    histogram
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_hcache::PAGE_BYTES;

    #[test]
    fn a_page_is_signed_for_one_number_and_version() {
        let mut page = [0; PAGE_BYTES];
        sign(&mut page, 7, 3);
        assert!(is_signed(&page, 7, 3));
        assert!(!is_signed(&page, 3, 7) && !is_signed(&page, 7, 4));
        for at in [0, 2049, PAGE_BYTES - 1] {
            page[at] ^= 1;
            assert!(!is_signed(&page, 7, 3), "{at}");
            page[at] ^= 1;
        }
    }

    #[test]
    fn what_came_back_wrong_is_counted() {
        let mut page = [0; PAGE_BYTES];
        sign(&mut page, 7, 3);
        let now = Instant::now();
        let mut load = Load::default();
        for (version, status, wrong_pages) in [
            (3, Status::Ok, 0),
            (2, Status::Ok, 1),
            (0, Status::Miss, 1),
            // Nothing was there to be had.
            (0, Status::Ok, 2),
        ] {
            let get = Operation {
                page: 7,
                version,
                is_put: false,
                begin: now,
            };
            load.count(get, status, Some(&page), now).unwrap();
            assert_eq!(load.wrong_pages, wrong_pages);
            assert!(load.count(get, Status::NoSuchPool, None, now).is_err());
        }
        assert_eq!((load.gets, load.hits, load.puts), (4, 3, 0));
    }
}
