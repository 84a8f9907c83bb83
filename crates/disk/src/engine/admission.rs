//! Admission of evicted pages, and when the cache switches itself off.

use super::transfer::BLOCK;
use super::{Engine, Outstanding};

use crate::busy::Use;
use crate::frames::FrameContents;
use crate::{Action, CacheMode, Contents, Location, PAGE_BYTES};

/// A cache disables itself when at least this many copied pages did not have the contents of their last I/O, and these
/// are more than a given share of the copied pages inspected recently.
const MISMATCHES_MAX: u64 = 64;

const MISMATCH_ONE_IN: u64 = 20;

/// Maximum number of pages being read into the cache at a time ([`CacheMode::FromStorage`]).
const FILLS_MAX: usize = 4096;

/// Number of inspections after which earlier ones count half.
const LOOKS: u64 = 4096;

/// Recent numbers of inspected pages and of mismatches.
#[derive(Default)]
pub(super) struct InspectionCounts {
    pub(super) looks: u64,
    pub(super) mismatches: u64,
}

impl InspectionCounts {
    /// Counts an inspection. Returns whether too many pages did not match.
    fn look(&mut self, matches: bool) -> bool {
        if self.looks >= LOOKS {
            self.looks /= 2;
            self.mismatches /= 2;
        }
        self.looks += 1;
        self.mismatches += u64::from(!matches);
        self.mismatches >= MISMATCHES_MAX && self.mismatches * MISMATCH_ONE_IN > self.looks
    }
}

impl Engine {
    /// The guest evicts a frame.
    pub(super) fn evict(&mut self, frame: u64, contents: Option<Contents<'_>>) {
        let Some(held) = self.frames.held(frame) else {
            self.stats.refused_unknown += 1;
            return;
        };
        let FrameContents::Contents(location, _) = held else {
            self.stats.refused_other += 1;
            return;
        };
        let newest = self.frames.newest(location);
        if self.options.newest_check && newest != Some(frame) {
            self.stats.refused_not_newest += 1;
            return;
        }
        if self.options.mode == CacheMode::FromStorage {
            self.fill(location);
            return;
        }
        let lazy = matches!(contents, Some(Contents::Lazy(_)));
        let page = match contents {
            Some(Contents::Copied(page)) => Some(page),
            Some(Contents::Lazy(ram)) => ram
                .read(frame * BLOCK, &mut self.scratch[..])
                .is_ok()
                .then_some(&*self.scratch),
            None => None,
        };
        let Some(page) = page else {
            self.stats.refused_other += 1;
            return;
        };
        if self.options.hash_check {
            // Of the newest I/O with the block, whichever frame it was.
            let newest = newest.and_then(|frame| self.frames.held(frame));
            let Some(FrameContents::Contents(_, hash)) = newest else {
                self.stats.refused_unknown += 1;
                return;
            };
            let matches = self.hash(page) == hash;
            let broken = !lazy && self.looks.look(matches);
            if !matches && lazy {
                self.stats.refused_stale += 1;
                return;
            }
            if !matches {
                self.stats.refused_mismatch += 1;
                if broken {
                    self.disable();
                }
                return;
            }
        }
        let Some(cache) = &self.cache else { return };
        if !cache.put(location, page) {
            self.stats.refused_other += 1;
            return;
        }
        self.stats.admitted += 1;
        if let Some(observer) = &mut self.observer {
            observer.evicted(location);
        }
    }

    /// Submits the read of a page for the cache, or takes it from the log if storage does not have it yet.
    pub(super) fn fill(&mut self, location: Location) {
        if self.dirty.contains(location) {
            let read = self.log.read(location, &mut self.scratch).is_ok();
            let cache = self.cache.as_ref().filter(|_| read);
            if cache.is_some_and(|cache| cache.put(location, &self.scratch)) {
                self.stats.admitted += 1;
            } else {
                self.stats.refused_other += 1;
            }
            return;
        }
        if self.fills == FILLS_MAX {
            self.stats.refused_other += 1;
            return;
        }
        self.fills += 1;
        self.busy.begin(location, Use::Fill);
        let action = Action::Read {
            offset: location.block() * BLOCK,
            buffer: self.buffers.take(PAGE_BYTES),
        };
        self.submit_io(location.disk(), action, Outstanding::Fill { location });
        if let Some(observer) = &mut self.observer {
            observer.evicted(location);
        }
    }

    fn disable(&mut self) {
        self.disabled = Some(format!(
            "{} of the last {} evicted pages did not hold what was last read from or written to their blocks: the guest changes \
             pages in place (as dm-crypt does), or its notices are wrong",
            self.looks.mismatches, self.looks.looks
        ));
        self.frames.clear();
        if let Some(cache) = &self.cache {
            cache.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts of pages, in this order; returns after how many of all there were too many mismatches.
    fn too_many(counts: &[(u64, bool)]) -> Option<u64> {
        let mut inspected = InspectionCounts::default();
        let all = counts
            .iter()
            .flat_map(|(count, matches)| (0..*count).map(move |_| *matches));
        let broken = all
            .enumerate()
            .find(|(_, matches)| inspected.look(*matches));
        broken.map(|(number, _)| number as u64 + 1)
    }

    #[test]
    fn the_64th_mismatch_is_too_many_if_more_than_one_in_20_of_all_pages_are() {
        assert_eq!(too_many(&[(63, false)]), None);
        assert_eq!(too_many(&[(64, false)]), Some(64));
        // 64 of 1279 and 64 of 1280.
        assert_eq!(too_many(&[(1215, true), (64, false)]), Some(1279));
        assert_eq!(too_many(&[(1216, true), (64, false)]), None);
        assert_eq!(too_many(&[(1216, true), (65, false)]), Some(1281));
    }

    #[test]
    fn pages_count_half_after_4096_of_them() {
        // 4096 as 2048: one in 20 are 107 of 2048 + 107.
        assert_eq!(too_many(&[(4096, true), (107, false)]), None);
        assert_eq!(too_many(&[(4096, true), (108, false)]), Some(4096 + 108));
        // The 4096th counts half as well, and half of one mismatch is none.
        assert_eq!(too_many(&[(4095, true), (108, false)]), None);
        assert_eq!(too_many(&[(4095, true), (109, false)]), Some(4095 + 109));
        // 100 mismatches as 50.
        assert_eq!(too_many(&[(3996, true), (155, false)]), None);
        assert_eq!(too_many(&[(3996, true), (156, false)]), Some(3996 + 156));
    }
}
