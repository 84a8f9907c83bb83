//! Pages of equal content, stored once.
//!
//! An entry is a frame, the domain in which it is shared, and its reference count. Frames are found by a hash of their
//! content (XXH3 with a secret seed) and compared byte for byte: the hash alone is never trusted. Pages of different
//! content and the same hash may both be stored, but only the first of them is found, so that one comparison is
//! sufficient. A secret seed does not prevent a search for pages with equal hashes, because XXH3 does not resist it;
//! such pages are merely not shared. (36 bits of the hash are kept: by chance this keeps about 8 pages of a million
//! from being shared, and 2000 of 16 million.)
//!
//! The table is in shards by hash, each with its lock, which is held while pages are compared. An entry takes
//! 16 bytes (18 where the shard has just grown), and 5 to 11 in the index (open addressing, linear probing;
//! up to 32 while entries go).
//! An entry never changes its slot, so the memory of slots is given back from the end: those in the lower half
//! are used first, and the higher ones become free in time.
//! Not here: the choice of pages that may be shared, and the accounts to which they are charged.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::Page;
use crate::arena::NoFrame;
use crate::sync::{AtomicU64, Mutex, Ordering, lock};
use crate::sys::Slab;

const SHARDS: usize = 16;
const SHARD_BITS: u32 = SHARDS.trailing_zeros();
/// Maximum number of slots of a shard.
const SLOTS_MAX: usize = 1 << (u32::BITS - SHARD_BITS);
/// No slot.
const NIL: u32 = u32::MAX;
/// Number of slots, and of index positions, below which memory is not released.
const SPARE: usize = 64;

/// Names an entry, until its last reference is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct EntryId(pub(crate) u32);

impl EntryId {
    fn new(shard: usize, slot: u32) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "below SHARDS")]
        Self(slot << SHARD_BITS | shard as u32)
    }

    fn shard(self) -> usize {
        self.0 as usize % SHARDS
    }

    fn slot(self) -> usize {
        (self.0 >> SHARD_BITS) as usize
    }
}

/// The result of offering a frame for sharing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShareResult {
    /// The content is stored already: the entry has one more reference, and the frame still belongs to the caller.
    Existing(EntryId),
    /// The frame is that of a new entry with one reference.
    New(EntryId),
}

/// Frames by content.
pub(crate) struct Contents {
    seed: u64,
    shards: [Mutex<TableShard>; SHARDS],
    /// Heap memory of the shards.
    heap_bytes: AtomicU64,
}

impl Contents {
    /// Returns an empty table; `seed` must be random and unknown to clients.
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            seed,
            shards: std::array::from_fn(|_| Mutex::new(TableShard::default())),
            heap_bytes: AtomicU64::new(0),
        }
    }

    /// Number of entries.
    pub(crate) fn entries(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).live).sum()
    }

    /// Memory it takes, in bytes, frames not counted.
    pub(crate) fn bytes(&self) -> u64 {
        size_of::<Self>() as u64 + self.heap_bytes.load(Ordering::Relaxed)
    }

    /// Finds the entry of a domain that has the content of a frame, which the caller holds, and adds a
    /// reference to it; or else makes the frame an entry.
    pub(crate) fn share(&self, slab: &Slab, domain: u32, frame: u32) -> ShareResult {
        let seed = self.seed ^ u64::from(domain);
        let hash = slab.read(frame, |page| xxh3_64_with_seed(page, seed));
        self.share_hashed(slab, domain, frame, hash)
    }

    fn share_hashed(&self, slab: &Slab, domain: u32, frame: u32, hash: u64) -> ShareResult {
        #[expect(clippy::cast_possible_truncation, reason = "different bits of it")]
        let (shard, tag) = (hash as usize % SHARDS, (hash >> 32) as u32);
        self.with(shard, |entries| {
            let found = entries.find(domain, tag);
            if let Some(at) = found {
                let slot = entries.index[at];
                let entry = &mut entries.slots[slot as usize];
                if same(slab, entry.frame, frame) {
                    entry.references += 1;
                    return ShareResult::Existing(EntryId::new(shard, slot));
                }
            }
            let slot = entries.insert(Entry {
                frame,
                references: 1,
                domain,
                tag,
            });
            if found.is_none() {
                entries.add_to_index(slot);
            }
            ShareResult::New(EntryId::new(shard, slot))
        })
    }

    /// Reads an entry to which the caller has a reference.
    pub(crate) fn read<R>(&self, slab: &Slab, entry: EntryId, read: impl FnOnce(&Page) -> R) -> R {
        // Under the lock, so that no other thread moves it meanwhile.
        self.with(entry.shard(), |entries| {
            slab.read(entries.get(entry).frame, read)
        })
    }

    /// Releases a reference. The last one removes the entry, and its frame then belongs to the caller.
    pub(crate) fn release(&self, entry: EntryId) -> Option<u32> {
        self.with(entry.shard(), |entries| {
            let held = entries.get(entry);
            held.references -= 1;
            if held.references > 0 {
                return None;
            }
            let frame = held.frame;
            entries.remove(entry.slot());
            Some(frame)
        })
    }

    /// Takes the frame of an entry to which nobody else has a reference, if it is below `top`; the entry is then
    /// removed. (A frame beyond `top` is about to be moved, which is done for contents after it was done for shards.)
    pub(crate) fn take_only(&self, entry: EntryId, top: u32) -> Option<u32> {
        self.with(entry.shard(), |entries| {
            let Entry {
                frame, references, ..
            } = *entries.get(entry);
            if references > 1 || frame >= top {
                return None;
            }
            entries.get(entry).references = 0;
            entries.remove(entry.slot());
            Some(frame)
        })
    }

    /// Moves entries out of frames from `top` on. On failure some were moved.
    pub(crate) fn relocate(
        &self,
        slab: &Slab,
        top: u32,
        mut take: impl FnMut() -> Option<u32>,
    ) -> Result<(), NoFrame> {
        for shard in 0..SHARDS {
            self.with(shard, |entries| {
                let held = entries
                    .slots
                    .iter_mut()
                    .filter(|entry| entry.references > 0);
                for entry in held.filter(|entry| entry.frame >= top) {
                    let to = take().ok_or(NoFrame)?;
                    slab.copy(entry.frame, to);
                    entry.frame = to;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Calls a closure with a shard under its lock.
    fn with<R>(&self, shard: usize, work: impl FnOnce(&mut TableShard) -> R) -> R {
        let mut shard = lock(&self.shards[shard]);
        let before = shard.heap_bytes();
        let result = work(&mut shard);
        let after = shard.heap_bytes();
        if after > before {
            self.heap_bytes.fetch_add(after - before, Ordering::Relaxed);
        } else if after < before {
            self.heap_bytes.fetch_sub(before - after, Ordering::Relaxed);
        }
        result
    }
}

fn same(slab: &Slab, a: u32, b: u32) -> bool {
    assert_ne!(a, b, "a frame is offered once");
    slab.read(a, |a| slab.read(b, |b| a == b))
}

/// A page's content. With no references it is a free slot; `frame` is the next one then, `domain` the one before.
#[derive(Clone, Copy)]
struct Entry {
    frame: u32,
    references: u32,
    domain: u32,
    /// The bits of its hash that the shard does not imply.
    tag: u32,
}

/// Entries of one shard.
struct TableShard {
    slots: Vec<Entry>,
    /// Ends of the list of free slots. The last slot is never free.
    first_free: u32,
    last_free: u32,
    live: usize,
    /// Slots by tag. Its length is 0 or a power of two, and at least a quarter of it is `NIL`.
    index: Vec<u32>,
    indexed: usize,
}

impl Default for TableShard {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            first_free: NIL,
            last_free: NIL,
            live: 0,
            index: Vec::new(),
            indexed: 0,
        }
    }
}

impl TableShard {
    fn heap_bytes(&self) -> u64 {
        let slots = self.slots.capacity() * size_of::<Entry>();
        (slots + self.index.capacity() * size_of::<u32>()) as u64
    }

    fn get(&mut self, entry: EntryId) -> &mut Entry {
        let held = &mut self.slots[entry.slot()];
        assert_ne!(held.references, 0, "{entry:?} is held");
        held
    }

    /// Writes an entry to a slot.
    fn insert(&mut self, entry: Entry) -> u32 {
        self.live += 1;
        if self.first_free != NIL {
            let slot = self.first_free;
            self.unlink_free(slot as usize);
            self.slots[slot as usize] = entry;
            return slot;
        }
        let len = self.slots.len();
        assert!(len < SLOTS_MAX, "an entry has a frame, and there are fewer");
        if len == self.slots.capacity() {
            self.slots.reserve_exact(SPARE.max(len / 8));
        }
        self.slots.push(entry);
        u32::try_from(len).expect("below SLOTS_MAX")
    }

    /// Frees an entry's slot, and removes it from the index if it is there.
    fn remove(&mut self, slot: usize) {
        let Entry { domain, tag, .. } = self.slots[slot];
        if let Some(at) = self.find(domain, tag)
            && self.index[at] as usize == slot
        {
            self.remove_from_index(at);
        }
        self.live -= 1;
        if slot + 1 < self.slots.len() {
            self.link_free(slot);
            return;
        }
        self.slots.pop();
        while self.slots.last().is_some_and(|entry| entry.references == 0) {
            self.unlink_free(self.slots.len() - 1);
            self.slots.pop();
        }
        if self.slots.capacity() > self.slots.len() * 2 + SPARE {
            self.slots
                .shrink_to(self.slots.len() + self.slots.len() / 8);
        }
    }

    fn link_free(&mut self, slot: usize) {
        let number = u32::try_from(slot).expect("below SLOTS_MAX");
        let (previous, next) = if slot < self.slots.len() / 2 {
            (NIL, self.first_free)
        } else {
            (self.last_free, NIL)
        };
        self.slots[slot].domain = previous;
        self.slots[slot].frame = next;
        *self.next_free(previous) = number;
        *self.previous_free(next) = number;
    }

    fn unlink_free(&mut self, slot: usize) {
        let Entry {
            frame: next,
            domain: previous,
            ..
        } = self.slots[slot];
        *self.next_free(previous) = next;
        *self.previous_free(next) = previous;
    }

    /// The link to the free slot behind `slot`.
    fn next_free(&mut self, slot: u32) -> &mut u32 {
        match slot {
            NIL => &mut self.first_free,
            slot => &mut self.slots[slot as usize].frame,
        }
    }

    /// The link to the free slot before `slot`.
    fn previous_free(&mut self, slot: u32) -> &mut u32 {
        match slot {
            NIL => &mut self.last_free,
            slot => &mut self.slots[slot as usize].domain,
        }
    }

    fn mask(&self) -> usize {
        self.index.len() - 1
    }

    /// The index position of the entry with a tag.
    fn find(&self, domain: u32, tag: u32) -> Option<usize> {
        if self.index.is_empty() {
            return None;
        }
        let mut at = tag as usize & self.mask();
        while self.index[at] != NIL {
            let entry = &self.slots[self.index[at] as usize];
            if entry.tag == tag && entry.domain == domain {
                return Some(at);
            }
            at = (at + 1) & self.mask();
        }
        None
    }

    fn add_to_index(&mut self, slot: u32) {
        if (self.indexed + 1) * 4 > self.index.len() * 3 {
            self.rebuild_index((self.index.len() * 2).max(SPARE));
        }
        self.indexed += 1;
        self.write_to_index(slot);
    }

    /// Writes a slot to the first suitable index position.
    fn write_to_index(&mut self, slot: u32) {
        let mut at = self.slots[slot as usize].tag as usize & self.mask();
        while self.index[at] != NIL {
            at = (at + 1) & self.mask();
        }
        self.index[at] = slot;
    }

    /// Empties a position, and moves those entries after it that would not be found beyond the gap.
    fn remove_from_index(&mut self, at: usize) {
        let mask = self.mask();
        let (mut gap, mut at) = (at, (at + 1) & mask);
        while self.index[at] != NIL {
            let home = self.slots[self.index[at] as usize].tag as usize & mask;
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.index[gap] = self.index[at];
                gap = at;
            }
            at = (at + 1) & mask;
        }
        self.index[gap] = NIL;
        self.indexed -= 1;
        if self.indexed * 8 < self.index.len() && self.index.len() > SPARE {
            self.rebuild_index(self.index.len() / 2);
        }
    }

    fn rebuild_index(&mut self, len: usize) {
        let old = std::mem::replace(&mut self.index, vec![NIL; len]);
        for slot in old.into_iter().filter(|&slot| slot != NIL) {
            self.write_to_index(slot);
        }
    }
}

/// Returns the word that the page consists of, if all its words are equal.
pub(crate) fn repeated_word(page: &Page) -> Option<u32> {
    let (&word, rest) = page.split_first_chunk()?;
    // Each word equals the one before it.
    (*rest == page[..rest.len()]).then(|| u32::from_ne_bytes(word))
}

/// Fills a page with a word.
pub(crate) fn fill(page: &mut Page, word: u32) {
    page.as_chunks_mut().0.fill(word.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::PAGE_BYTES;

    /// A page by number; neighbours differ in their last byte only.
    fn content(number: u32) -> Page {
        let mut page = [0; PAGE_BYTES];
        fill(&mut page, number / 8);
        page[PAGE_BYTES - 1] = u8::try_from(number % 8).unwrap();
        page
    }

    fn holds(slab: &Slab, contents: &Contents, entry: EntryId, number: u32) -> bool {
        contents.read(slab, entry, |page| *page == content(number))
    }

    fn frame_of(contents: &Contents, entry: EntryId) -> u32 {
        lock(&contents.shards[entry.shard()]).get(entry).frame
    }

    #[derive(Debug, Clone)]
    enum Step {
        Share { domain: u32, number: u32 },
        Release { which: usize },
        Relocate { top: u32 },
    }

    fn step(numbers: u32) -> impl Strategy<Value = Step> {
        prop_oneof![
            5 => (0..3u32, 0..numbers).prop_map(|(domain, number)| Step::Share { domain, number }),
            4 => any::<usize>().prop_map(|which| Step::Release { which }),
            1 => any::<u32>().prop_map(|top| Step::Relocate { top }),
        ]
    }

    /// The twin's record of an entry.
    #[derive(Clone, Copy)]
    struct TwinEntry {
        domain: u32,
        number: u32,
        hash: u64,
        references: usize,
        frame: u32,
    }

    /// Compares a table with a twin that stores everything, step by step.
    fn agrees_with_twin(steps: &[Step], hash_of: impl Fn(u32) -> u64) {
        let frames = 2 + u32::try_from(steps.len()).unwrap();
        let slab = Slab::reserve(frames, false).unwrap();
        let contents = Contents::new(1);
        let mut free: Vec<u32> = (0..frames).collect();
        let mut known: HashMap<EntryId, TwinEntry> = HashMap::new();
        let mut found: HashMap<(u32, u64), EntryId> = HashMap::new();
        let mut held: Vec<EntryId> = Vec::new();
        let release =
            |entry, known: &mut HashMap<EntryId, TwinEntry>, found: &mut HashMap<_, _>| {
                let now = known.get_mut(&entry).unwrap();
                now.references -= 1;
                let freed = contents.release(entry);
                assert_eq!(freed, (now.references == 0).then_some(now.frame));
                if now.references == 0 {
                    let key = (now.domain, now.hash);
                    if found.get(&key) == Some(&entry) {
                        found.remove(&key);
                    }
                    known.remove(&entry);
                }
                freed
            };
        for step in steps {
            match *step {
                Step::Share { domain, number } => {
                    let frame = free.pop().unwrap();
                    slab.write(frame, |page| *page = content(number));
                    let hash = hash_of(number);
                    let there = found.get(&(domain, hash)).copied();
                    match contents.share_hashed(&slab, domain, frame, hash) {
                        ShareResult::Existing(entry) => {
                            assert_eq!(there, Some(entry));
                            let now = known.get_mut(&entry).unwrap();
                            assert_eq!((now.domain, now.number), (domain, number));
                            now.references += 1;
                            free.push(frame);
                            held.push(entry);
                        }
                        ShareResult::New(entry) => {
                            assert!(there.is_none_or(|there| known[&there].number != number));
                            let new = TwinEntry {
                                domain,
                                number,
                                hash,
                                references: 1,
                                frame,
                            };
                            assert!(known.insert(entry, new).is_none(), "{entry:?} is in use");
                            found.entry((domain, hash)).or_insert(entry);
                            held.push(entry);
                        }
                    }
                }
                Step::Release { which } if !held.is_empty() => {
                    let entry = held.swap_remove(which % held.len());
                    free.extend(release(entry, &mut known, &mut found));
                }
                Step::Relocate { top } => {
                    let top = top % frames;
                    let (mut below, above) = free.into_iter().partition(|&frame| frame < top);
                    free = above;
                    let room = below.len();
                    let high = known.values().filter(|now| now.frame >= top).count();
                    let done = contents.relocate(&slab, top, || below.pop());
                    assert_eq!(done.is_ok(), high <= room);
                    assert_eq!(room - below.len(), high.min(room));
                    free.append(&mut below);
                    for (&entry, now) in &mut known {
                        let frame = frame_of(&contents, entry);
                        if frame != now.frame {
                            assert!(now.frame >= top && frame < top);
                            free.push(std::mem::replace(&mut now.frame, frame));
                        }
                    }
                }
                Step::Release { .. } => {}
            }
            assert_eq!(contents.entries(), known.len());
        }
        for (&entry, now) in &known {
            assert!(holds(&slab, &contents, entry, now.number));
        }
        for entry in held {
            free.extend(release(entry, &mut known, &mut found));
        }
        assert_eq!(contents.entries(), 0);
        free.sort_unstable();
        assert!(free.into_iter().eq(0..frames), "each frame came back once");
    }

    /// Hashes as a good hash function would produce them.
    fn scattered(number: u32) -> u64 {
        u64::from(number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    proptest! {
        #[test]
        fn agrees_with_a_twin(steps in prop::collection::vec(step(40), 1..400)) {
            agrees_with_twin(&steps, scattered);
        }

        #[test]
        fn agrees_with_a_twin_where_hashes_collide(steps in prop::collection::vec(step(40), 1..400)) {
            agrees_with_twin(&steps, |number| scattered(number % 5));
        }

        #[test]
        fn agrees_with_a_twin_where_places_collide(steps in prop::collection::vec(step(300), 1..800)) {
            // One shard; tags whose first places are the last few of the index.
            agrees_with_twin(&steps, |number| (u64::from(number) * 0x400 + 0x3fd + u64::from(number % 3)) << 32);
        }
    }

    #[test]
    fn a_page_is_shared_within_its_domain_only() {
        let slab = Slab::reserve(3, false).unwrap();
        let contents = Contents::new(7);
        for frame in 0..3 {
            slab.write(frame, |page| *page = content(5));
        }
        let ShareResult::New(first) = contents.share(&slab, 1, 0) else {
            panic!()
        };
        assert_eq!(contents.share(&slab, 1, 1), ShareResult::Existing(first));
        let ShareResult::New(other) = contents.share(&slab, 2, 2) else {
            panic!()
        };
        assert_eq!(
            (frame_of(&contents, first), frame_of(&contents, other)),
            (0, 2)
        );
        assert_eq!(contents.release(first), None);
        assert_eq!(contents.release(first), Some(0));
        assert_eq!(contents.release(other), Some(2));
    }

    #[test]
    fn memory_follows_the_entries_up_and_down() {
        const ENTRIES: u32 = 40_000;
        let slab = Slab::reserve(ENTRIES, false).unwrap();
        let contents = Contents::new(7);
        let empty_bytes = contents.bytes();
        let mut held: Vec<EntryId> = (0..ENTRIES)
            .map(|frame| {
                slab.write(frame, |page| *page = content(frame));
                let ShareResult::New(entry) = contents.share(&slab, 0, frame) else {
                    panic!()
                };
                entry
            })
            .collect();
        let full_bytes = contents.bytes() - empty_bytes;
        assert!(
            (16..29).contains(&(full_bytes / u64::from(ENTRIES))),
            "{full_bytes}"
        );
        // Those that stay are the oldest, in the lowest slots.
        for entry in held.drain(400..) {
            contents.release(entry).unwrap();
        }
        let few_bytes = contents.bytes() - empty_bytes;
        assert!(few_bytes < full_bytes / 15, "{few_bytes} of {full_bytes}");
        for (number, &entry) in (0..).zip(&held) {
            assert!(holds(&slab, &contents, entry, number));
        }
        for entry in held {
            contents.release(entry).unwrap();
        }
        let spare_bytes = (SHARDS * SPARE * (size_of::<Entry>() + size_of::<u32>())) as u64;
        assert!(contents.bytes() - empty_bytes <= spare_bytes);
    }

    #[test]
    fn memory_of_former_entries_is_given_back_as_pages_come_and_go() {
        const ENTRIES: u32 = 40_000;
        let slab = Slab::reserve(ENTRIES, false).unwrap();
        let contents = Contents::new(7);
        let new_entry = |frame, number| {
            slab.write(frame, |page| *page = content(number));
            let ShareResult::New(entry) = contents.share(&slab, 0, frame) else {
                panic!("page {number} is new")
            };
            entry
        };
        let mut held: Vec<EntryId> = (0..ENTRIES).map(|frame| new_entry(frame, frame)).collect();
        let full_bytes = contents.bytes();
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..ENTRIES / 20 * 19 {
            contents.release(held.swap_remove(random.usize(..held.len())));
        }
        for number in ENTRIES..ENTRIES * 4 {
            let entry = held.swap_remove(random.usize(..held.len()));
            let frame = contents.release(entry).unwrap();
            held.push(new_entry(frame, number));
        }
        assert!(
            contents.bytes() < full_bytes / 8,
            "{} of {full_bytes}",
            contents.bytes()
        );
    }

    #[test]
    fn threads_see_the_content_they_shared_until_they_release_it() {
        const THREADS: u64 = 4;
        const HELD_MAX: usize = 100;
        // One for each page held, one or two in hand.
        const FRAMES: u32 = 102 * 4;
        let slab = Slab::reserve(FRAMES, false).unwrap();
        let contents = Contents::new(99);
        let free: Mutex<Vec<u32>> = Mutex::new((0..FRAMES).collect());
        std::thread::scope(|scope| {
            for seed in 1..=THREADS {
                let (slab, contents, free) = (&slab, &contents, &free);
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(seed);
                    let mut held: Vec<(EntryId, u32)> = Vec::new();
                    for _ in 0..20_000 {
                        if held.len() < HELD_MAX && random.usize(..2) == 0 {
                            let number = u32::try_from(random.usize(..60)).unwrap();
                            let frame = lock(free).pop().unwrap();
                            slab.write(frame, |page| *page = content(number));
                            let domain = number % 2;
                            held.push(match contents.share(slab, domain, frame) {
                                ShareResult::New(entry) => (entry, number),
                                ShareResult::Existing(entry) => {
                                    slab.write(frame, |page| page.fill(0xee));
                                    lock(free).push(frame);
                                    (entry, number)
                                }
                            });
                        } else if !held.is_empty() {
                            let (entry, number) = held.swap_remove(random.usize(..held.len()));
                            assert!(holds(slab, contents, entry, number));
                            if let Some(frame) = contents.release(entry) {
                                slab.write(frame, |page| page.fill(0xee));
                                lock(free).push(frame);
                            }
                        }
                    }
                    for (entry, number) in held {
                        assert!(holds(slab, contents, entry, number));
                        lock(free).extend(contents.release(entry));
                    }
                });
            }
        });
        assert_eq!(contents.entries(), 0);
        let mut free = free.into_inner().unwrap();
        free.sort_unstable();
        assert!(free.into_iter().eq(0..FRAMES), "each frame came back once");
    }

    #[test]
    fn a_page_of_one_word_is_told_from_any_other() {
        for word in [0, 1, 0x0101_0101, 0xdead_beef, u32::MAX] {
            let mut page = [0x55; PAGE_BYTES];
            fill(&mut page, word);
            assert_eq!(repeated_word(&page), Some(word));
            assert_eq!(page[4092..], word.to_ne_bytes());
            for at in 0..PAGE_BYTES {
                page[at] ^= 0x10;
                assert_eq!(repeated_word(&page), None, "byte {at} differs");
                page[at] ^= 0x10;
            }
        }
        let words_of_eight_bytes: Page = std::array::from_fn(|at| u8::from(at % 8 == 0));
        assert_eq!(repeated_word(&words_of_eight_bytes), None);
    }
}
