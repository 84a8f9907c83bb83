//! The capacity reduced in steps, for a caller that must not be held up by many GiB.
//!
//! The first step lowers `top`, so that no frame beyond it is handed out any more. The following ones visit the shards'
//! metadata and descriptors by number and move what is beyond `top` below it, and evict the oldest pages if there is
//! no frame. One visit is enough: what is inserted meanwhile is below. The last ones return the memory beyond `top`, from its end
//! downward. The store serves all operations between two steps; it may refuse puts.
//!
//! Not in steps: stores that compress or share contents, whose frames hold several pages, and metadata that is rebuilt because
//! most of it is unused: after a reduction to less than about an eighth.

use super::Inner;
use super::capacity::{Bound, FUTILE};

use crate::arena::NoFrame;
use crate::shard::Goal;
use crate::sync::lock;
use crate::{Error, PAGE_BYTES, Sharing, sync};

/// Pages moved in a step of a reduction that does not return before it is done.
const STEP_PAGES: usize = 1024;

/// Pages evicted at once.
const EVICTED: usize = 64;

/// Share of the frames that unused metadata may take, as a divisor.
const UNUSED_ONE_IN: usize = 16;

impl Inner {
    /// Does part of a resize: moves or drops about `pages_max` pages, or returns the memory of as many. Returns whether the capacity is the
    /// one requested.
    pub(super) fn resize_step(
        &self,
        bound: &mut Bound,
        capacity_bytes: u64,
        pages_max: usize,
    ) -> Result<bool, Error> {
        if !bound.unfinished {
            let outside_bytes = bound.outside_bytes;
            self.move_top(bound, capacity_bytes, outside_bytes)?;
            if !bound.unfinished {
                bound.capacity_bytes = capacity_bytes;
                self.retarget(&mut lock(&self.registry));
                return Ok(true);
            }
        }
        // Of an earlier resize to another capacity, perhaps: it is finished first.
        let asked_bytes = bound.target_bytes;
        if !self.moves_in_steps() {
            self.finish_shrink(bound, asked_bytes)?;
        } else if bound.cleared {
            self.give_back_some(bound, pages_max)?;
        } else {
            bound.cleared = self.clear_some(bound.top, pages_max, asked_bytes)?;
        }
        if bound.unfinished {
            return Ok(false);
        }
        bound.capacity_bytes = asked_bytes;
        self.retarget(&mut lock(&self.registry));
        for shard in 0..self.shards.len() {
            // Without the frames to do it, the memory stays with the metadata.
            let _ = self
                .shard(shard)
                .trim_if_above(bound.top as usize / UNUSED_ONE_IN);
        }
        Ok(asked_bytes == capacity_bytes)
    }

    /// Whether what is beyond the end can be moved in steps.
    pub(super) fn moves_in_steps(&self) -> bool {
        !self.common.compression && self.common.sharing == Sharing::Off
    }

    /// Moves all that is in frames from `top` on below it, in steps: each shard is visited as a whole, which under one lock would
    /// hold up the operations on a store of many GiB.
    pub(super) fn clear_in_steps(&self, top: u32, asked_bytes: u64) -> Result<(), Error> {
        let mut futile = 0;
        loop {
            match self.clear_some(top, STEP_PAGES, asked_bytes) {
                Ok(true) => return Ok(()),
                Ok(false) => futile = 0,
                Err(error) if futile == FUTILE => return Err(error),
                Err(_) => {
                    futile += 1;
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Moves some of what is in frames from `top` on below it. Returns whether nothing is left there.
    fn clear_some(&self, top: u32, pages_max: usize, asked_bytes: u64) -> Result<bool, Error> {
        let mut left = pages_max;
        for shard in 0..self.shards.len() {
            loop {
                let swept = self.shard(shard).relocate_some(top, &mut left);
                match swept {
                    Ok(true) => break,
                    Ok(false) => return Ok(false),
                    Err(NoFrame) => {
                        let evicted = self.evict_somebody(EVICTED, Goal::Pages).pages;
                        if evicted == 0 {
                            // Perhaps they are in reserve, or hold metadata of pages that are gone; the caller repeats
                            // the step.
                            for at in 0..self.shards.len() {
                                let mut shard = self.shard(at);
                                shard.clear_if_empty();
                                shard.magazine.spill();
                            }
                            return match lock(&self.common.free).len() {
                                0 => Err(Error::CannotShrink { asked_bytes }),
                                _ => Ok(false),
                            };
                        }
                        left = left.saturating_sub(usize::try_from(evicted).unwrap_or(left));
                    }
                }
                if left == 0 {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Returns memory beyond the end to the kernel, where nothing remains.
    fn give_back_some(&self, bound: &mut Bound, pages_max: usize) -> Result<(), Error> {
        // A thread may still be reading a frame that it took from there.
        sync::wait_for_readers(&self.common.in_flight);
        let pages = u32::try_from(pages_max).unwrap_or(u32::MAX);
        let from = bound.given_back_to.saturating_sub(pages).max(bound.top);
        self.return_frames(from..bound.given_back_to)?;
        bound.given_back_to = from;
        let beyond = u64::from(from - bound.top) * PAGE_BYTES as u64;
        bound.capacity_bytes = bound.capacity_bytes.min(bound.target_bytes + beyond);
        bound.unfinished = beyond > 0;
        Ok(())
    }
}
