/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What plimsoll.ko offers to other modules of the guest: the events of the
 * page cache, and a place for their pages with the host.
 */
#ifndef PLIMSOLL_H
#define PLIMSOLL_H

#include <linux/list.h>
#include <linux/types.h>

#include "plimsoll_protocol.h"

struct block_device;
struct page;

/*
 * Who wants to know what becomes of page frames. Each callback may be NULL.
 *
 * All but reattached() are called with interrupts or preemption off, often
 * with the lock of the page cache held, once for each page of a large folio:
 * they must not sleep, wait or take a lock that is ever held with interrupts
 * on. They may call plimsoll_post_put() and plimsoll_post_flush().
 */
struct plimsoll_client {
	/*
	 * Reclaim takes a clean page out of the page cache or swap cache. Its
	 * contents stay as they are until the call returns; they mean nothing
	 * unless `uptodate`.
	 */
	void (*evicted)(struct page *page, bool uptodate);
	/* The frame left the page cache or swap cache otherwise. */
	void (*removed)(unsigned long pfn);
	/* The frame enters the page cache or swap cache; its I/O comes later. */
	void (*added)(unsigned long pfn);
	/* Contents moved from one frame to another; `from` will be freed. */
	void (*migrated)(unsigned long from, unsigned long to);
	/* Events were missed: nothing known about any frame holds any more. */
	void (*lost)(void);
	/*
	 * A host was attached anew and plimsoll_generation() has changed: pools
	 * must be opened again. Process context, may sleep and open pools.
	 */
	void (*reattached)(void);
	struct list_head list;	/* of plimsoll.ko */
};

/* From here on the client is called. Process context. */
void plimsoll_register(struct plimsoll_client *client);
/* Returns when no call to the client is under way. Process context. */
void plimsoll_unregister(struct plimsoll_client *client);

/* A pool of the host's hcache, as it was opened with one generation of it. */
struct plimsoll_pool {
	u32 number;		/* for PLIMSOLL_GET_SECTOR() */
	u32 generation;		/* valid while equal to plimsoll_generation() */
};

/*
 * Opens a pool, private or shared by all guests that give the same key.
 * Process context; waits for the host, 5 s at most.
 *
 * Returns 0; -ETIMEDOUT, -EIO, -EPROTO or -ENOTCONN (no host is attached), when
 * a later try may succeed; another negative number if the host refuses.
 */
int plimsoll_pool_open(bool shared, u64 key_low, u64 key_high, struct plimsoll_pool *pool);
/* Closes a pool; the pages of a private one are dropped. As pool_open(). */
int plimsoll_pool_close(struct plimsoll_pool pool);

/*
 * Sends a page to a pool of the host. Any context.
 *
 * Returns false if the host will not have the page, as there was no room or
 * the pool is of an older generation. What the pool has of the block stays.
 */
bool plimsoll_post_put(struct plimsoll_pool pool, u64 block, struct page *page);
/*
 * Tells that `count` blocks of a pool are no longer valid. Any context. If
 * there is no room the host empties its pools.
 */
void plimsoll_post_flush(struct plimsoll_pool pool, u64 block, u32 count);

/* The control disk, open for as long as plimsoll.ko is loaded. */
struct block_device *plimsoll_control_bdev(void);
/* PLIMSOLL_HAS_* of the host, as of the last attach. */
u32 plimsoll_features(void);
/*
 * Changes before a host is attached anew. What was got from a pool of an
 * older generation must not be used. Any context.
 */
u32 plimsoll_generation(void);
/*
 * Has a worker look soon whether the host still follows, and attach it anew
 * if not: for after a get that failed. Any context.
 */
void plimsoll_check_host(void);

#endif
