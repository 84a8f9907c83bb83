/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Interface of plimsoll.ko for other modules of the guest: events of the page
 * cache, and storage for pages in the host's hcache.
 */
#ifndef PLIMSOLL_H
#define PLIMSOLL_H

#include <linux/list.h>
#include <linux/types.h>

#include "plimsoll_protocol.h"

struct block_device;
struct page;

/*
 * Callbacks of a module that tracks page frames. Each may be NULL.
 *
 * All but reattached() are called with interrupts or preemption off, often
 * with the lock of the page cache held, once for each page of a large folio:
 * they must not sleep, wait or take a lock that is ever held with interrupts
 * on. They may call plimsoll_post_put() and plimsoll_post_flush().
 */
struct plimsoll_client {
	/*
	 * Reclaim evicts a clean page from the page cache or swap cache. Its
	 * contents do not change until the call returns; unless `uptodate`, they
	 * may not be those of the disk.
	 */
	void (*evicted)(struct page *page, bool uptodate);
	/*
	 * A clean page leaves the page cache while memory is free, because an
	 * administrator (drop_caches) or a program (POSIX_FADV_DONTNEED) drops it.
	 * As evicted(); NULL: removed() is called instead.
	 */
	void (*dropped)(struct page *page, bool uptodate);
	/* The frame left the page cache or swap cache in another way, or has a memory error. */
	void (*removed)(unsigned long pfn);
	/* The frame enters the page cache or swap cache; its I/O comes later. */
	void (*added)(unsigned long pfn);
	/* Contents moved from one frame to another; `from` will be freed. */
	void (*migrated)(unsigned long from, unsigned long to);
	/* Events were missed: all information about frames is invalid. */
	void (*lost)(void);
	/*
	 * A host was attached again and plimsoll_generation() has changed: pools
	 * must be opened again. Process context, may sleep and open pools.
	 */
	void (*reattached)(void);
	struct list_head list;	/* used by plimsoll.ko */
};

/* Registers a client. Process context. */
void plimsoll_register(struct plimsoll_client *client);
/* Unregisters a client and waits for calls to it to end. Process context. */
void plimsoll_unregister(struct plimsoll_client *client);

/* A pool of the host's hcache, valid for one generation of the host. */
struct plimsoll_pool {
	u32 number;		/* for PLIMSOLL_GET_SECTOR() */
	u32 generation;		/* valid while equal to plimsoll_generation() */
};

/*
 * Opens a pool: a private one, or, with the serial number of a disk that the host
 * serves read-only, the one of its image, from that block of the disk on. The serial
 * number has at most PLIMSOLL_SERIAL_BYTES.
 * Process context; waits at most 5 s for the host.
 *
 * Returns 0; -ETIMEDOUT, -EIO, -EPROTO or -ENOTCONN (no host is attached), after
 * which a retry may succeed; another negative errno if the host refuses.
 */
int plimsoll_pool_open(const char *serial, u64 first_block, struct plimsoll_pool *pool);
/* Closes a pool; a private one loses its pages. Returns as pool_open(). */
int plimsoll_pool_close(struct plimsoll_pool pool);

/*
 * Waits, at most `put_wait_us` and no more than half of the time, until there is
 * room for a put, if the host is taking records. Polls: for the callbacks
 * evicted() and dropped(), before they take a lock.
 */
void plimsoll_wait_put(void);
/*
 * Sends a page to a pool of the host. Any context.
 *
 * Returns false if the page was not sent, because there was no room or the pool
 * is of an older generation. The pool's copy of the block, if any, remains.
 */
bool plimsoll_post_put(struct plimsoll_pool pool, u64 block, struct page *page);
/*
 * Invalidates `count` blocks of a pool. Any context. If there is no room for
 * the record, the host empties its pools.
 */
void plimsoll_post_flush(struct plimsoll_pool pool, u64 block, u32 count);

/* The control disk, open while plimsoll.ko is loaded. */
struct block_device *plimsoll_control_bdev(void);
/* PLIMSOLL_HAS_* flags of the host at the last attach. */
u32 plimsoll_features(void);
/*
 * Changes before a host is attached again. Pages read from a pool of an older
 * generation must not be used. Any context.
 */
u32 plimsoll_generation(void);
/*
 * Makes the worker check soon whether the host still reads the ring, and attach
 * it again if not. To be called after a failed get. Any context.
 */
void plimsoll_check_host(void);

#endif
