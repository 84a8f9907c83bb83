//! A page store in this process, which can be made unreachable.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use plimsoll_disk::{Page, PoolRequest, VictimCache};
use plimsoll_hcache::{Client, ClientOptions, Handle, PoolId, PoolOptions, Store, StoreOptions};

pub struct LocalStore {
    client: Client,
    /// Pools by their number.
    pools: Vec<PoolId>,
    /// Pages stored since the last [`VictimCache::collect_puts`].
    stored: u64,
    pub away: Arc<AtomicBool>,
    pub calls: Arc<AtomicU32>,
}

pub fn store() -> Store {
    Store::new(StoreOptions::new(16 << 20)).unwrap()
}

impl LocalStore {
    pub fn new(store: &Store) -> Self {
        Self {
            client: store.create_client(ClientOptions::new("test")).unwrap(),
            pools: Vec::new(),
            stored: 0,
            away: Arc::default(),
            calls: Arc::default(),
        }
    }

    fn pool(&self, number: u32) -> io::Result<PoolId> {
        self.calls.fetch_add(1, Relaxed);
        if self.away.load(Relaxed) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(self.pools[number as usize])
    }
}

fn handle(pool: PoolId, block: u64) -> Handle {
    Handle {
        pool,
        object: block >> 32,
        index: block as u32,
    }
}

impl VictimCache for LocalStore {
    fn is_in_reach(&mut self) -> bool {
        !self.away.load(Relaxed)
    }

    fn failure(&self) -> Option<String> {
        self.away.load(Relaxed).then(|| "it is away".to_owned())
    }

    fn open(&mut self, pool: PoolRequest) -> io::Result<u32> {
        if self.away.load(Relaxed) {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let options = match pool {
            PoolRequest::Private => PoolOptions::private(),
            PoolRequest::Shared { key } => PoolOptions::shared(key),
        };
        let pool = self.client.create_pool(options).map_err(io::Error::other)?;
        self.pools.push(pool);
        Ok(self.pools.len() as u32 - 1)
    }

    fn close(&mut self, pool: u32) -> io::Result<()> {
        self.client.destroy_pool(self.pools[pool as usize]).unwrap();
        Ok(())
    }

    fn put(&mut self, pool: u32, block: u64, page: &Page) -> io::Result<()> {
        let pool = self.pool(pool)?;
        let outcome = self.client.put(handle(pool, block), page);
        self.stored += u64::from(outcome.map_err(io::Error::other)?.is_stored());
        Ok(())
    }

    fn collect_puts(&mut self) -> io::Result<u64> {
        if self.stored > 0 && self.away.load(Relaxed) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(std::mem::take(&mut self.stored))
    }

    fn get(
        &mut self,
        pool: u32,
        block: u64,
        count: u32,
        found: &mut dyn FnMut(u32, &Page),
    ) -> io::Result<()> {
        let pool = self.pool(pool)?;
        let mut page = [0; 4096];
        for index in 0..count {
            let handle = handle(pool, block + u64::from(index));
            if self
                .client
                .get(handle, &mut page)
                .map_err(io::Error::other)?
            {
                found(index, &page);
            }
        }
        Ok(())
    }

    fn flush(&mut self, pool: u32, block: u64, count: u32) -> io::Result<()> {
        let pool = self.pool(pool)?;
        for index in 0..u64::from(count) {
            (self.client.flush(handle(pool, block + index))).map_err(io::Error::other)?;
        }
        Ok(())
    }

    fn flush_pool(&mut self, pool: u32) -> io::Result<()> {
        let pool = self.pool(pool)?;
        self.client.flush_pool(pool).map_err(io::Error::other)?;
        Ok(())
    }
}
