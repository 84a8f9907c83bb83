//! The capacity reduced in steps, for a caller that must not be held up by many GiB.
//!
//! The first step lowers `top`, so that no frame beyond it is handed out any more. The following ones drop the pages that no
//! longer fit, the oldest first. Then they visit the shards'
//! metadata and descriptors by number and move what is beyond `top` below it, and evict more pages if there is
//! no frame. One visit is enough: what is inserted meanwhile is below. The last ones return the memory beyond `top`, from its end
//! downward. The store serves all operations between two steps; it may refuse puts.
//!
//! Not in steps: stores that compress or share contents, whose frames hold several pages, and metadata that is rebuilt because
//! most of it is unused: after a reduction to less than about an eighth.

use super::Inner;
use super::capacity::{Bound, Shrink};

use crate::arena::NoFrame;
use crate::sync::lock;
use crate::{Error, PAGE_BYTES, Sharing};

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
        if bound.shrink == Shrink::Finished {
            let outside_bytes = bound.outside_bytes;
            self.move_top(bound, capacity_bytes, outside_bytes)?;
        }
        // Of an earlier resize to another capacity, perhaps: it is finished first.
        let asked_bytes = bound.target_bytes;
        match bound.shrink {
            Shrink::Finished => {}
            _ if !self.moves_in_steps() => self.finish_shrink(bound, asked_bytes)?,
            Shrink::Dropping { frames } if frames > 0 => {
                let frames = self.drop_frames(frames, pages_max);
                bound.shrink = Shrink::Dropping { frames };
            }
            Shrink::Dropping { .. } => {
                let unused_max = bound.top as usize / (UNUSED_ONE_IN * self.shards.len());
                for shard in 0..self.shards.len() {
                    // Without the frames to do it, the memory stays with the metadata.
                    let _ = self.shard(shard).trim_if_above(unused_max);
                }
                bound.shrink = Shrink::Moving;
            }
            Shrink::Moving => match self.clear_some(bound.top, pages_max) {
                Ok(true) => bound.shrink = Shrink::Returning,
                Ok(false) => {}
                Err(NoFrame) if self.make_room() || lock(&self.common.free).len() > 0 => {}
                Err(NoFrame) => return Err(Error::CannotShrink { asked_bytes }),
            },
            Shrink::Returning => {
                self.give_back(bound, u32::try_from(pages_max).unwrap_or(u32::MAX))?;
                let beyond = u64::from(bound.given_back_to - bound.top) * PAGE_BYTES as u64;
                bound.capacity_bytes = bound.capacity_bytes.min(bound.target_bytes + beyond);
            }
        }
        if bound.shrink != Shrink::Finished {
            return Ok(false);
        }
        bound.capacity_bytes = asked_bytes;
        self.retarget(&mut lock(&self.registry));
        Ok(asked_bytes == capacity_bytes)
    }

    /// Whether what is beyond the end can be moved in steps.
    pub(super) fn moves_in_steps(&self) -> bool {
        !self.common.compression && self.common.sharing == Sharing::Off
    }

    /// Moves some of what is in frames from `top` on below it. Returns whether nothing is left there.
    pub(super) fn clear_some(&self, top: u32, pages_max: usize) -> Result<bool, NoFrame> {
        let mut left = pages_max;
        for shard in 0..self.shards.len() {
            if !self.shard(shard).relocate_some(top, &mut left)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
