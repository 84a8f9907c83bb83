/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Maps page frames to the blocks of cached disks whose newest contents they hold.
 *
 * The tables P2S and S2P of [LS07] in one: an entry for each page frame of
 * RAM, linked into a hash table by its block. An entry is linked only while
 * both tables would agree, so a frame that is found may be put.
 *
 * A frame is tied to a block when a read or write between them is submitted,
 * and may be put once that has succeeded. The caller ensures that nothing can
 * write to a frame while it is tied by a read, and that a frame that changes while
 * it is tied by a write is written to the block again before it is evicted. It is untied as soon as any of
 * these happens:
 * - a write to the block, complete or partial, from any frame, is submitted;
 * - a newer read or write ties the block to another frame;
 * - the frame is read into, or enters, leaves or moves within the page cache.
 * While a write to a block is in flight nothing else is tied to it, because the
 * result of a concurrent read, or of a second write, is undefined.
 *
 * The contents are hashed when a write starts and when a read ends. The hash
 * detects pages that are changed without a write, for example by dm-crypt, which
 * decrypts reads in place.
 *
 * Cost: 24 bytes per page frame, and 12 bytes for every two.
 */
#ifndef DM_HCACHE_FRAMES_H
#define DM_HCACHE_FRAMES_H

#include <linux/types.h>

struct page;

/* Targets are numbered from 1 to FRAMES_TARGETS_MAX. */
#define FRAMES_TARGETS_MAX	31

/*
 * Whether an evicted frame may be put, or the reason why not.
 */
enum frame_verdict {
	FRAME_FIT,
	FRAME_BUSY,		/* its read or write is in flight */
	FRAME_DOUBTED,		/* events were lost since it was tied */
	FRAME_NOT_UPTODATE,	/* it may be put if its contents are the block's */
};

/*
 * Called for an evicted frame that is tied to a block, with interrupts off, under
 * the lock that writes to the block take before they flush it. `hash` is the hash
 * of the block's contents; valid only with FRAME_FIT and FRAME_NOT_UPTODATE.
 */
void hcache_evicted(unsigned int target, u64 block, struct page *page,
		    enum frame_verdict verdict, u64 hash);

int frames_init(void);
void frames_exit(void);

/* Hash of a page's contents, keyed by secrets drawn when the module is loaded. */
u64 frames_hash(struct page *page);

/*
 * Start and end of a read. `token` identifies it among the reads in flight;
 * read_end() completes the entry if `good` and the frame was not untied since.
 */
void frames_read_begin(unsigned int target, u64 block, unsigned long pfn, u64 token);
void frames_read_end(unsigned int target, u64 block, struct page *page, u64 token, bool good);

/*
 * Start and end of a write. `pfn` is 0 if the write does not cover a whole frame,
 * or the frame must not be tied. `hash` is that of the contents before the write
 * was submitted.
 */
void frames_write_begin(unsigned int target, u64 block, unsigned long pfn, u64 hash);
void frames_write_end(unsigned int target, u64 block, unsigned long pfn, u64 hash, bool good);

/*
 * Start and end of a discard or similar: unties all frames of a range; between
 * begin and end nothing is tied to any block of the target. begin() may sleep.
 */
void frames_range_begin(unsigned int target, u64 block, u64 count);
void frames_range_end(unsigned int target);

/* Unties one frame, or all. Any context. */
void frames_forget(unsigned long pfn);
void frames_forget_all(void);

/* Events of the page cache. Any context. */
void frames_evicted(struct page *page, bool uptodate);
void frames_migrated(unsigned long from, unsigned long to);

#endif
