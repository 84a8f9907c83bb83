//! A client of a store: the operations available to a caller.

use std::ops::RangeInclusive;

use super::{Inner, Store};

use crate::account::Account;
use crate::shard::{RUN, Shard};
use crate::sync::{Arc, MutexGuard};
use crate::{ClientId, Error, Handle, Page, PoolId, PoolOptions, PutOutcome};

/// A client of a store. Its operations may be called from several threads. When it is dropped,
/// everything that only it held is released at once.
pub struct Client {
    pub(super) store: Store,
    pub(super) account: Arc<Account>,
}

impl Client {
    /// Its number.
    pub fn id(&self) -> ClientId {
        self.account.id
    }

    /// The store to which it belongs.
    pub fn store(&self) -> &Store {
        &self.store
    }

    pub(super) fn inner(&self) -> &Inner {
        &self.store.inner
    }

    /// The shard of a page, and the hash of its object.
    #[inline(always)]
    fn locate(&self, handle: &Handle) -> (MutexGuard<'_, Shard>, u64) {
        let inner = self.inner();
        let hash = inner.common.object_hash(handle.key());
        (inner.shard(inner.shard_of(hash, handle.index)), hash)
    }

    /// Makes a pool, or joins the shared pool of that key in the client's group (whose capacity then stays as it is).
    ///
    /// # Errors
    /// [`Error::TooManyPools`] and [`Error::NoPoolLeft`]; [`Error::CapacityTooSmall`] and [`Error::CannotShrink`] if there is no room for the
    /// pool's metadata.
    pub fn create_pool(&self, options: PoolOptions) -> Result<PoolId, Error> {
        let id = self.inner().create_pool(&self.account, options)?;
        self.inner().settle().inspect_err(|_| {
            // There is no room for it.
            let _ = self.inner().leave_pool(&self.account, id);
        })?;
        Ok(id)
    }

    /// Leaves a pool; with its last client it is destroyed and its pages are dropped.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn destroy_pool(&self, pool: PoolId) -> Result<(), Error> {
        self.inner().leave_pool(&self.account, pool)
    }

    /// Puts a page.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn put(&self, handle: Handle, page: &Page) -> Result<PutOutcome, Error> {
        self.put_with(handle, |frame| frame.copy_from_slice(page))
    }

    /// Puts the page that `fill` writes. `fill` is called at most once, with a frame of arbitrary former
    /// contents, all of which it must overwrite, and with a shard of the store locked: it must not call the
    /// store. If it panics, no page is left.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn put_with(
        &self,
        handle: Handle,
        fill: impl FnOnce(&mut Page),
    ) -> Result<PutOutcome, Error> {
        self.inner().put(self.id(), handle, fill)
    }

    /// Gets a page into `page`, which is unchanged if there is none. Returns whether there was one.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn get(&self, handle: Handle, page: &mut Page) -> Result<bool, Error> {
        self.get_with(handle, |frame| page.copy_from_slice(frame))
    }

    /// Gets a page through `read`, called if there is one, with a shard of the store locked: it must not call the
    /// store.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    #[inline]
    pub fn get_with(&self, handle: Handle, read: impl FnOnce(&Page)) -> Result<bool, Error> {
        let (mut shard, hash) = self.locate(&handle);
        shard.get(self.id(), hash, &handle, read)
    }

    /// Gets pages, as [`get`](Self::get) would one after the other, but with the memory accesses of many of them
    /// overlapped: for random handles, several times as fast. `read` receives each one's number in
    /// `handles`, in no order; it may run with a shard of the store locked: it must not call the store.
    pub fn get_each(
        &self,
        handles: &[Handle],
        mut read: impl FnMut(usize, Result<Option<&Page>, Error>),
    ) {
        for (group, handles) in handles.chunks(RUN).enumerate() {
            let mut read =
                |n: usize, page: Result<Option<&Page>, Error>| read(group * RUN + n, page);
            self.inner().get_group(self.id(), handles, &mut read);
        }
    }

    /// Puts pages, as [`put_with`](Self::put_with) would one after the other, but with the memory accesses of many of
    /// them overlapped. `fill` writes the page of that number in `handles`, at most once, and must overwrite
    /// all former contents; `done` receives each outcome, in order. `fill` may run with a shard of the
    /// store locked: it must not call the store.
    pub fn put_each(
        &self,
        handles: &[Handle],
        mut fill: impl FnMut(usize, &mut Page),
        mut done: impl FnMut(usize, Result<PutOutcome, Error>),
    ) {
        for (group, handles) in handles.chunks(RUN).enumerate() {
            let mut fill = |n: usize, page: &mut Page| fill(group * RUN + n, page);
            let mut done =
                |n: usize, outcome: Result<PutOutcome, Error>| done(group * RUN + n, outcome);
            self.inner()
                .put_group(self.id(), handles, &mut fill, &mut done);
        }
    }

    /// Copies a page, without removing it or counting that as a use. Returns whether there was one.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn peek(&self, handle: Handle, page: &mut Page) -> Result<bool, Error> {
        let (mut shard, hash) = self.locate(&handle);
        shard.peek(self.id(), hash, &handle, page)
    }

    /// Drops a page. Returns whether it was there.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn flush(&self, handle: Handle) -> Result<bool, Error> {
        let (mut shard, hash) = self.locate(&handle);
        shard.flush(self.id(), hash, &handle)
    }

    /// Drops an object's pages of a range of indices. Returns how many there were.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn flush_range(
        &self,
        pool: PoolId,
        object: u64,
        indices: RangeInclusive<u32>,
    ) -> Result<u64, Error> {
        self.inner().flush_range(self.id(), pool, object, indices)
    }

    /// Drops an object's pages. Returns how many there were.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn flush_object(&self, pool: PoolId, object: u64) -> Result<u64, Error> {
        self.flush_range(pool, object, 0..=u32::MAX)
    }

    /// Drops all pages of a pool. Returns how many there were.
    ///
    /// # Errors
    /// [`Error::NoSuchPool`].
    pub fn flush_pool(&self, pool: PoolId) -> Result<u64, Error> {
        let inner = self.inner();
        let mut flushed = 0;
        for number in 0..inner.shards.len() {
            flushed += inner
                .shard(number)
                .flush_pool(self.id(), pool, number == 0)?;
        }
        Ok(flushed)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.inner().remove_client(&self.account);
    }
}
