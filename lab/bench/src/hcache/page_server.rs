//! What is measured alike of every server of pages.

use plimsoll_hcache::Page;

/// Something that keeps pages by number, to be put and got in batches.
pub(super) trait PageServer {
    fn put(&mut self, numbers: &[u64], fill: &mut dyn FnMut(u64, &mut Page)) -> anyhow::Result<()>;

    /// Gets pages that are all there.
    fn get(&mut self, numbers: &[u64], read: &mut dyn FnMut(u64, &Page)) -> anyhow::Result<()>;
}
