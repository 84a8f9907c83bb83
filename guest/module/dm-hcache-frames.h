/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Which page frame holds the newest contents of which block of a cached disk.
 *
 * The tables P2S and S2P of [LS07] in one: an entry for each page frame of
 * RAM, linked into a hash table by its block. An entry is linked only while
 * both tables would agree, so a frame that is found may be put.
 *
 * A frame is tied to a block when a read or write between them is submitted,
 * and becomes fit to be put when that has ended well. The caller sees to it that
 * nobody can write to a frame while it is tied by a read. It is let go as soon as
 * any of these happens:
 * - a write to the block, whole or not, from any frame, is submitted;
 * - a newer read or write ties the block to another frame;
 * - the frame is read into, or enters, leaves or moves within the page cache.
 * While a write to a block is under way nothing else is tied to it, as what a
 * read finds then, or which of two writes wins, is not known.
 *
 * The contents are hashed when a write starts and when a read ends. Who changes
 * a page without writing it, as dm-crypt does that decrypts reads in place, is
 * caught by the hash.
 *
 * Cost: 24 bytes a page frame, and 12 bytes for two.
 */
#ifndef DM_HCACHE_FRAMES_H
#define DM_HCACHE_FRAMES_H

#include <linux/types.h>

struct page;

/* Targets are numbered from 1 to FRAMES_TARGETS_MAX. */
#define FRAMES_TARGETS_MAX	31

/*
 * Why a frame that is evicted must not be put, or that it may. FRAME_UNKNOWN:
 * the frame is tied to no block.
 */
enum frame_verdict {
	FRAME_FIT,
	FRAME_BUSY,		/* its read or write has not ended */
	FRAME_DOUBTED,		/* events were lost since */
	FRAME_NOT_UPTODATE,
};

/*
 * Called for an evicted frame that is tied to a block, interrupts off, under
 * the lock that writes to the block take before they flush it. `hash` is that
 * of the contents the block has; of meaning only with FRAME_FIT.
 */
void hcache_evicted(unsigned int target, u64 block, struct page *page,
		    enum frame_verdict verdict, u64 hash);

int frames_init(void);
void frames_exit(void);

/* A hash of a page's contents, another at each load of the module. */
u64 frames_hash(struct page *page);

/*
 * Of reads. `token` tells this read from others under way; read_end() ties
 * the frame for good if `good` and nothing came between.
 */
void frames_read_begin(unsigned int target, u64 block, unsigned long pfn, u64 token);
void frames_read_end(unsigned int target, u64 block, struct page *page, u64 token, bool good);

/*
 * Of writes; `pfn` 0 if no whole frame is written or it must not be tied.
 * `hash` is of the contents before the write was submitted.
 */
void frames_write_begin(unsigned int target, u64 block, unsigned long pfn, u64 hash);
void frames_write_end(unsigned int target, u64 block, unsigned long pfn, u64 hash, bool good);

/*
 * Of discards and the like: lets go of all frames of a range; between begin
 * and end nothing is tied to any block of the target. begin() is for process
 * context, it may sleep.
 */
void frames_range_begin(unsigned int target, u64 block, u64 count);
void frames_range_end(unsigned int target);

/* Lets go of a frame, and of all. Any context. */
void frames_forget(unsigned long pfn);
void frames_forget_all(void);

/* Events of the page cache. Any context. */
void frames_evicted(struct page *page, bool uptodate);
void frames_migrated(unsigned long from, unsigned long to);

#endif
