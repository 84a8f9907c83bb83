//! hcache: the cost of a page in it, compared to copies and to other caches.
//!
//! | part | measurement | bar |
//! |---|---|---|
//! | `copy` | put and get of a cold page beside the copy of a cold page | at most 1.15 x |
//! | `lookup` | a get that misses, metadata a page, at 1 M pages | at most 50 ns, 40 bytes |
//! | `threads` | two threads beside one, and the bare copy's two beside one | at least 1.8 x |
//! | `caches` | get, else put, beside moka, quick_cache and foyer in processes of their own | |
//! | `ratios` | hit ratios by eviction policy on the stream of `caches` and on traces, beside the same | |
//! | `shrink` | the longest puts while a store shrinks to a quarter | |
//! | `content` | compression and sharing of pages of known compressibility | |
//!
//! A *cold* page was last touched a whole pass over the memory ago, which is many times the last-level cache. A copy
//! has both its pages cold, in memory of the store's kind (huge pages or not), and alternates with the operation
//! compared to it, a few thousand pages at a time.

mod bounds;
mod caches;
mod content;
mod copies;
mod lookups;
mod memcached;
mod page_server;
mod pages;
mod ratios;
mod redis;
mod region;
mod serve;
mod server;
mod shrink;
mod soak;
mod threads;

use std::io::Write;
use std::path::PathBuf;

use plimsoll_hcache::{Client, ClientOptions, PoolId, PoolOptions, Store, StoreOptions};

pub(crate) use caches::{Args as CacheArgs, run_one as run_one_cache};
pub(crate) use serve::{Args as ServeArgs, run as serve};
pub(crate) use server::{Args as ServerArgs, run as run_server};
pub(crate) use soak::{
    Args as SoakArgs, ClientArgs as SoakClientArgs, run as run_soak, run_client as run_soak_client,
};

use crate::Cli;

/// What is measured with.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Pages in memory that pages come from and go to, in MiB
    #[arg(long, default_value_t = 1024)]
    region_mib: usize,
    /// Pages in the store when lookups miss, in thousands
    #[arg(long, default_value_t = 1000)]
    lookup_kilopages: usize,
    /// Capacity of each cache, in MiB
    #[arg(long, default_value_t = 256)]
    cache_mib: usize,
    /// A directory whose traces are taken for hit ratios, those that can be read
    #[arg(long, default_value = "target/traces")]
    traces: PathBuf,
}

/// Runs all parts.
pub(crate) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if cli.wants("copy") {
        copies::run(cli, args, out)?;
    }
    if cli.wants("lookup") {
        lookups::run(cli, args, out)?;
    }
    if cli.wants("threads") {
        threads::run(cli, args, out)?;
    }
    if cli.wants("caches") {
        caches::run(cli, args, out)?;
    }
    if cli.wants("ratios") {
        ratios::run(cli, args, out)?;
    }
    if cli.wants("shrink") {
        shrink::run(cli, args, out)?;
    }
    if cli.wants("content") {
        content::run(args, out)?;
    }
    Ok(())
}

/// A store with one client and one pool.
fn store_of(options: StoreOptions, pool: PoolOptions) -> anyhow::Result<(Client, PoolId)> {
    let client = Store::new(options)?.create_client(ClientOptions::new("bench"))?;
    let pool = client.create_pool(pool)?;
    Ok((client, pool))
}

/// Room for this many pages and their metadata.
fn roomy(pages: usize) -> StoreOptions {
    StoreOptions::new(pages as u64 * 4096 / 8 * 9 + (16 << 20))
}
