//! Puts, gets and flushes of pages, one by one and in groups.

use std::ops::RangeInclusive;

use super::Inner;
use super::capacity::TRIES;

use crate::arena::NIL;
use crate::descriptor::Key;
use crate::shard::{CHUNK_PAGES, Common, Goal, Need, Put, RUN, Request, Step};
use crate::sync::{Ordering, RwLockReadGuard, lock};
use crate::table::ObjectRef;
use crate::{ClientId, Error, Handle, Page, PoolId, PutOutcome, sync};

fn same_shard(left: &Request, right: &Request) -> bool {
    left.shard == right.shard
}

/// Frames held outside of any lock, as source or target of a copy. A resize waits for them.
struct Flight<'a> {
    common: &'a Common,
    frames: [u32; RUN],
    len: usize,
    _held: RwLockReadGuard<'a, ()>,
}

impl<'a> Flight<'a> {
    pub(super) fn new(common: &'a Common) -> Self {
        Self {
            common,
            frames: [NIL; RUN],
            len: 0,
            _held: sync::read(&common.in_flight),
        }
    }

    pub(super) fn frames(&self) -> &[u32] {
        &self.frames[..self.len]
    }

    fn hold(&mut self, frame: u32) {
        self.frames[self.len] = frame;
        self.len += 1;
    }

    /// Takes free frames until it has `count`, or none are left.
    fn take(&mut self, count: usize) {
        let mut free = lock(&self.common.free);
        while self.len < count {
            let Some(frame) = free.pop() else { return };
            self.hold(frame);
        }
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let mut free = lock(&self.common.free);
        for &frame in self.frames[..self.len]
            .iter()
            .filter(|&&frame| frame != NIL)
        {
            free.push(frame);
        }
    }
}

impl Inner {
    pub(super) fn put<F: FnOnce(&mut Page)>(
        &self,
        client: ClientId,
        handle: Handle,
        fill: F,
    ) -> Result<PutOutcome, Error> {
        let hash = self.common.object_hash(handle.key());
        let shard = self.shard_of(hash, handle.index);
        let mut put = Put {
            hash,
            handle,
            fill: Some(fill),
            object: ObjectRef::NONE,
            frame: None,
            counted: false,
        };
        self.put_at(client, shard, &mut put)
    }

    /// Puts a page, making room as often as necessary.
    fn put_at<F: FnOnce(&mut Page)>(
        &self,
        client: ClientId,
        shard: usize,
        put: &mut Put<F>,
    ) -> Result<PutOutcome, Error> {
        for _ in 0..TRIES {
            let need = match self.shard(shard).put(client, put)? {
                Ok(outcome) => return Ok(outcome),
                Err(need) => need,
            };
            let won = match need {
                Need::Frames => self.evict_somebody(self.batch(), Goal::Memory),
                Need::Ceiling(account) => self.evict_from(&account, self.batch(), Goal::Memory),
                Need::PoolCapacity(pool) => self.evict_from_pool(&pool, 1),
            };
            if won.pages == 0 {
                break;
            }
        }
        let flushed = self.shard(shard).refuse(client, put.hash, &put.handle)?;
        Ok(PutOutcome::Refused { flushed })
    }

    pub(super) fn get_group(
        &self,
        client: ClientId,
        handles: &[Handle],
        read: &mut impl FnMut(usize, Result<Option<&Page>, Error>),
    ) {
        let mut requests = self.requests(handles);
        let requests = &mut requests[..handles.len()];
        self.prefetch(
            client,
            requests,
            &[Step::Link, Step::Descriptor, Step::Contents],
        );
        let mut flight = Flight::new(&self.common);
        let mut numbers = [0; RUN];
        for run in requests.chunk_by(same_shard) {
            let taken = |number, frame| {
                numbers[flight.len] = number;
                flight.hold(frame);
            };
            self.shard(run[0].shard)
                .get_frames(client, run, taken, &mut *read);
        }
        for (&frame, &number) in flight.frames().iter().zip(&numbers) {
            self.common
                .slab
                .read(frame, |page| read(number, Ok(Some(page))));
        }
    }

    pub(super) fn put_group(
        &self,
        client: ClientId,
        handles: &[Handle],
        fill: &mut impl FnMut(usize, &mut Page),
        done: &mut impl FnMut(usize, Result<PutOutcome, Error>),
    ) {
        let mut requests = self.requests(handles);
        let requests = &mut requests[..handles.len()];
        let mut flight = Flight::new(&self.common);
        // In a small store each page counts: there they go in one by one.
        let count = handles
            .len()
            .min(self.common.top.load(Ordering::Relaxed) as usize / 256);
        flight.take(count);
        if flight.len < count {
            self.evict_somebody(count - flight.len, Goal::Memory);
            flight.take(count);
        }
        for (request, &frame) in requests.iter().zip(flight.frames()) {
            self.common
                .slab
                .write(frame, |page| fill(request.number, page));
        }
        self.prefetch(client, requests, &[Step::Link]);
        let mut outcomes = [const { None }; RUN];
        let mut at = 0;
        for run in requests.chunk_by(same_shard) {
            let home = run[0].shard;
            let mut shard = self.shard(home);
            for request in run {
                let frame = flight.frames().get(at).copied();
                let mut put = Put {
                    hash: request.hash,
                    handle: request.handle,
                    fill: frame
                        .is_none()
                        .then_some(|page: &mut Page| fill(request.number, page)),
                    object: request.object,
                    frame,
                    counted: false,
                };
                let outcome = match shard.put(client, &mut put) {
                    Ok(Ok(outcome)) => Ok(outcome),
                    Err(error) => Err(error),
                    Ok(Err(_)) => {
                        drop(shard);
                        let outcome = self.put_at(client, home, &mut put);
                        shard = self.shard(home);
                        outcome
                    }
                };
                if put.frame.is_none() && frame.is_some() {
                    flight.frames[at] = NIL;
                }
                outcomes[request.number] = Some(outcome);
                at += 1;
            }
        }
        // `done` may call the store.
        drop(flight);
        for (number, outcome) in outcomes.into_iter().enumerate() {
            if let Some(outcome) = outcome {
                done(number, outcome);
            }
        }
    }

    /// Prefetches everything between handles and their pages: one step for all of them before the
    /// next step for any, so that their memory accesses overlap.
    fn prefetch(&self, client: ClientId, requests: &mut [Request], steps: &[Step]) {
        if requests.len() < 2 {
            return;
        }
        for &step in steps {
            for run in requests.chunk_by_mut(same_shard) {
                self.shard(run[0].shard).prefetch(client, run, step);
            }
        }
    }

    /// Requests for handles, grouped by shard, and otherwise in their order.
    fn requests(&self, handles: &[Handle]) -> [Request; RUN] {
        /// Number of shards distinguished; with more of them, a shard's requests may be in several groups, at one more
        /// lock each.
        const SHARDS: usize = 64;
        let mut places = [(0, 0); RUN];
        let mut starts = [0; SHARDS + 1];
        for (place, handle) in places.iter_mut().zip(handles) {
            let hash = self.common.object_hash(handle.key());
            let shard = self.shard_of(hash, handle.index);
            *place = (shard, hash);
            starts[shard % SHARDS + 1] += 1;
        }
        for shard in 0..SHARDS.min(self.shards.len()) {
            starts[shard + 1] += starts[shard];
        }
        let nothing = Request {
            number: 0,
            shard: 0,
            hash: 0,
            handle: handles[0],
            object: ObjectRef::NONE,
            candidate: NIL,
        };
        let mut requests = [nothing; RUN];
        for (number, (&handle, (shard, hash))) in handles.iter().zip(places).enumerate() {
            let at = &mut starts[shard % SHARDS];
            requests[*at] = Request {
                number,
                shard,
                hash,
                handle,
                ..nothing
            };
            *at += 1;
        }
        requests
    }

    /// Drops an object's pages of a range, in each shard that may have some.
    pub(super) fn flush_range(
        &self,
        client: ClientId,
        pool: PoolId,
        object: u64,
        indices: RangeInclusive<u32>,
    ) -> Result<u64, Error> {
        let hash = self.common.object_hash(Key::new(pool, object));
        let home = self.shard_of(hash, 0);
        let mut first = true;
        let mut pages = 0;
        let mut flush = |shard: usize, mut indices: RangeInclusive<u32>| -> Result<bool, Error> {
            loop {
                let flushed = self.shard(shard).flush_range(
                    client,
                    hash,
                    pool,
                    object,
                    indices.clone(),
                    first,
                )?;
                first = false;
                pages += flushed.pages;
                match flushed.next {
                    Some(next) => indices = next..=*indices.end(),
                    None => return Ok(flushed.large),
                }
            }
        };
        let large = flush(home, indices.clone())?;
        if !large || indices.is_empty() {
            return Ok(pages);
        }
        let chunks = indices.start() / CHUNK_PAGES..=indices.end() / CHUNK_PAGES;
        if chunks.clone().count() < self.shards.len() {
            for chunk in chunks {
                let start = (chunk * CHUNK_PAGES).max(*indices.start());
                let end = (chunk * CHUNK_PAGES + (CHUNK_PAGES - 1)).min(*indices.end());
                flush(self.shard_of(hash, start), start..=end)?;
            }
        } else {
            for shard in (0..self.shards.len()).filter(|&shard| shard != home) {
                flush(shard, indices.clone())?;
            }
        }
        Ok(pages)
    }
}
