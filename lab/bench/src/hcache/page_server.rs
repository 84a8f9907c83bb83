//! Measurements common to all servers of pages.

use plimsoll_hcache::Page;

/// A store of pages by number, with puts and gets in batches.
pub(super) trait PageServer {
    fn put(&mut self, numbers: &[u64], fill: &mut dyn FnMut(u64, &mut Page)) -> anyhow::Result<()>;

    /// Gets pages that are all there.
    fn get(&mut self, numbers: &[u64], read: &mut dyn FnMut(u64, &Page)) -> anyhow::Result<()>;
}
