//! Memory that a shard releases: frames that move below a limit, and metadata that shrinks.

use std::collections::HashMap;

use super::{COLD, Common, Shard, ids, pages};

use crate::arena::{Arena, Frames, NoFrame};
use crate::descriptor::{Descriptor, Owner, Place};
use crate::list::List;
use crate::packed;
use crate::radix::Tree;
use crate::sync::Arc;
use crate::sys::Slab;
use crate::table::Table;

/// Frames taken beforehand.
struct Reserve {
    common: Arc<Common>,
    frames: Vec<u32>,
}

impl Frames for Reserve {
    fn slab(&self) -> &Arc<Slab> {
        &self.common.slab
    }

    fn take(&mut self) -> Option<u32> {
        self.frames.pop()
    }

    fn give(&mut self, frame: u32) {
        self.frames.push(frame);
    }
}

impl Shard {
    /// Moves everything in this shard out of frames from `top` on, except shared contents. On failure some was moved,
    /// and the rest stays in place.
    pub(crate) fn relocate(&mut self, top: u32) -> Result<(), NoFrame> {
        self.leave_spare_frames(top);
        let Self {
            table,
            tree,
            descriptors,
            magazine,
            packed,
            pools,
            common,
            ..
        } = self;
        table.relocate(top, || magazine.take())?;
        tree.relocate(top, || magazine.take())?;
        descriptors.relocate(top, || magazine.take())?;
        let mut outcome = Ok(());
        // A packed frame moves with all of its pages.
        let mut moved: HashMap<u32, u32> = HashMap::new();
        for id in pages(pools, descriptors) {
            let Place::Packed(place) = descriptors[id].place() else {
                continue;
            };
            let from = packed::Place(place).frame();
            if from < top || moved.contains_key(&from) {
                continue;
            }
            let Some(to) = magazine.take() else {
                outcome = Err(NoFrame);
                break;
            };
            packed.relocate(&common.slab, from, to);
            moved.insert(from, to);
        }
        for id in pages(pools, descriptors) {
            let place = descriptors[id].place();
            let to = match place {
                Place::Frame(frame) if frame >= top => {
                    let Some(to) = magazine.take() else {
                        outcome = Err(NoFrame);
                        continue;
                    };
                    common.slab.copy(frame, to);
                    Place::Frame(to)
                }
                Place::Packed(place) => match moved.get(&packed::Place(place).frame()) {
                    Some(&to) => Place::Packed(packed::Place(place).moved_to(to).0),
                    None => continue,
                },
                _ => continue,
            };
            descriptors[id].set_place(to);
        }
        outcome
    }

    /// Gives up frames in reserve, and those of pages that left that are from `top` on.
    fn leave_spare_frames(&mut self, top: u32) {
        self.magazine.spill();
        let entries = || self.common.ghost_entries(top);
        self.ghosts.set_entries(top, entries, &mut self.magazine);
        self.ghosts.leave_frames(top, &mut self.magazine);
    }

    /// Moves at most `left` pages, metadata included, out of frames from `top` on, and counts it down. Returns whether
    /// nothing is left there. Only if pages are neither compressed nor shared.
    pub(crate) fn relocate_some(&mut self, top: u32, left: &mut usize) -> Result<bool, NoFrame> {
        /// Descriptors visited that count like a page.
        const VISITED: u32 = 64;
        self.leave_spare_frames(top);
        let Self {
            table,
            tree,
            descriptors,
            magazine,
            common,
            swept,
            ..
        } = self;
        let mut take = || {
            let fewer = left.checked_sub(1)?;
            let frame = magazine.take()?;
            *left = fewer;
            Some(frame)
        };
        let moved = table
            .relocate(top, &mut take)
            .and_then(|()| tree.relocate(top, &mut take))
            .and_then(|()| descriptors.relocate(top, &mut take));
        if moved.is_err() {
            return if *left == 0 {
                Ok(false)
            } else {
                moved.map(|()| false)
            };
        }
        while *swept < descriptors.end() {
            if *left == 0 {
                return Ok(false);
            }
            if let Place::Frame(frame) = descriptors[*swept].place()
                && frame >= top
            {
                let to = magazine.take().ok_or(NoFrame)?;
                common.slab.copy(frame, to);
                descriptors[*swept].set_place(Place::Frame(to));
                *left -= 1;
            }
            *swept += 1;
            if swept.is_multiple_of(VISITED) {
                *left = left.saturating_sub(1);
            }
        }
        Ok(true)
    }

    /// Lets [`relocate_some`](Self::relocate_some) visit all descriptors.
    pub(crate) fn restart_sweep(&mut self) {
        self.swept = 0;
    }

    /// Rebuilds the metadata if much of its memory is unused.
    pub(crate) fn trim(&mut self) -> Result<(), NoFrame> {
        self.trim_if_above(self.metadata_needed() / 4 + 2)
    }

    /// Frames that the metadata would take if none of it were unused.
    pub(crate) fn metadata_needed(&self) -> usize {
        self.table.frames_needed() + self.tree.frames_needed() + self.descriptors.frames_needed()
    }

    /// Rebuilds the metadata if more than so many of its frames are unused.
    pub(crate) fn trim_if_above(&mut self, unused: usize) -> Result<(), NoFrame> {
        let needed = self.metadata_needed();
        if self.page_metadata_frames() <= needed + unused {
            return Ok(());
        }
        // The pages get other numbers.
        self.restart_sweep();
        let mut reserve = Reserve {
            common: self.common.clone(),
            frames: Vec::new(),
        };
        reserve
            .frames
            .extend(std::iter::from_fn(|| self.magazine.take()).take(needed + 2));
        let mut table = Table::new(self.common.clone());
        let (mut tree, mut descriptors) = (Tree::new(), Arena::new());
        match self.copy_metadata(&mut table, &mut tree, &mut descriptors, &mut reserve) {
            Ok(lists) => {
                for (pool, lists) in self.pools.iter_mut().flatten().zip(lists) {
                    pool.lists = lists;
                    pool.published = None;
                }
                std::mem::swap(&mut self.table, &mut table);
                std::mem::swap(&mut self.tree, &mut tree);
                std::mem::swap(&mut self.descriptors, &mut descriptors);
                for slot in 0..self.pools.len() {
                    if self.pools[slot].is_some() {
                        self.publish(slot);
                    }
                }
                self.give_up(table, tree, descriptors, reserve);
                Ok(())
            }
            Err(NoFrame) => {
                self.give_up(table, tree, descriptors, reserve);
                Err(NoFrame)
            }
        }
    }

    fn give_up(
        &mut self,
        mut table: Table<Arc<Common>>,
        mut tree: Tree,
        mut descriptors: Arena<Descriptor>,
        reserve: Reserve,
    ) {
        table.clear(&mut self.magazine);
        tree.clear(&mut self.magazine);
        descriptors.clear(&mut self.magazine);
        for frame in reserve.frames {
            self.magazine.give(frame);
        }
    }

    /// Inserts all pages into new tables. Returns each pool's lists in them.
    fn copy_metadata(
        &self,
        table: &mut Table<Arc<Common>>,
        tree: &mut Tree,
        descriptors: &mut Arena<Descriptor>,
        frames: &mut Reserve,
    ) -> Result<Vec<[List; COLD + 1]>, NoFrame> {
        let mut all = Vec::new();
        for pool in self.pools.iter().flatten() {
            let mut copy = |list: &List| -> Result<List, NoFrame> {
                let mut new = List::new();
                for old in ids(list, &self.descriptors) {
                    let mut page = self.descriptors[old];
                    let key = self.table.key_of(&page);
                    let hash = self.common.object_hash(key);
                    let object = table.find(hash, key, descriptors);
                    descriptors.ensure(1, frames)?;
                    page.set_owner(Owner::Sole(key));
                    let id = descriptors.insert(page);
                    table.add_page(tree, descriptors, (hash, object), id, frames)?;
                    new.push_tail(descriptors, id);
                }
                Ok(new)
            };
            let [first, second, cold] = &pool.lists;
            all.push([copy(first)?, copy(second)?, copy(cold)?]);
        }
        Ok(all)
    }

    /// Releases all metadata if no page is left.
    pub(crate) fn clear_if_empty(&mut self) {
        if self.descriptors.live() == 0 {
            self.table.clear(&mut self.magazine);
            self.tree.clear(&mut self.magazine);
            self.descriptors.clear(&mut self.magazine);
            self.ghosts.clear(&mut self.magazine);
        }
    }
}
