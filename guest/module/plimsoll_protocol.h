/* SPDX-License-Identifier: GPL-2.0-or-later OR MIT */
/*
 * Protocol between a guest and `plimsoll disk serve`: a ring of records in the
 * guest's RAM, and a control disk with which the guest announces it.
 *
 * All numbers are little endian. Every word has one writer: under an
 * emulator, read-modify-writes of a guest are not atomic for the host.
 */
#ifndef PLIMSOLL_PROTOCOL_H
#define PLIMSOLL_PROTOCOL_H

#include <linux/types.h>

#define PLIMSOLL_VERSION	1
#define PLIMSOLL_PAGE		4096

/*
 * The ring.
 *
 * A header page, and chunks of equal size (a power of two, at least a page,
 * physically contiguous each) that together hold, in this order:
 * `records` records of 32 bytes, padded to whole pages, then `slots` pages.
 * Both numbers are powers of two; slots may be 0.
 *
 * The guest writes record `head % records`, then advances `head`; the host
 * reads it, then advances `tail`. Page contents go into slot `slot_head %
 * slots` before their record is published; the host advances `slot_tail`.
 * Numbers only increase. A record (except a PUT) without room, or an event whose
 * probe was missed, increments `lost` before the next record is published: the
 * host then clears its table of frames before it reads a record of the batch.
 */
#define PLIMSOLL_RING_MAGIC	0x31474e52534d4c50ULL	/* "PLMSRNG1" */
#define PLIMSOLL_CHUNKS_MAX	480

struct plimsoll_ring {
	__le64 magic;
	__le32 version;
	__le32 chunk_bytes;
	__le32 records;
	__le32 slots;
	__le32 chunks;
	__le32 flags;		/* PLIMSOLL_LAZY */
	__le64 nonce;		/* distinguishes this ring from the next */
	__u8   pad0[64 - 40];
	/* 0x040, written by the guest */
	__le64 head;
	__le64 slot_head;
	__le64 lost;
	__le64 memory_pages;	/* current RAM of the guest, in pages; 0: unknown */
	__u8   pad1[64 - 32];
	/* 0x080, written by the host */
	__le64 tail;
	__le64 slot_tail;
	__le64 attached;	/* the nonce, while the host reads the ring */
	__u8   pad2[64 - 24];
	__u8   pad3[64];
	/* 0x100 */
	__le64 chunk[PLIMSOLL_CHUNKS_MAX];	/* guest-physical addresses */
};

#define PLIMSOLL_LAZY	1	/* all evictions are sent without contents */

struct plimsoll_record {
	__le16 type;
	__le16 flags;
	__le32 count;	/* FLUSH: number of blocks; else 0 */
	__le64 page;	/* guest page frame number; PUT, FLUSH: first block */
	__le64 other;	/* MIGRATE: frame moved to; PUT, FLUSH: pool */
	__le64 slot;	/* with PLIMSOLL_DATA: position of the slot, not modulo */
};

enum {
	PLIMSOLL_EVICT   = 1,	/* reclaim evicts the clean frame from the page cache or swap cache;
				 * without data, the host reads the frame and compares it */
	PLIMSOLL_RELEASE = 2,	/* the frame leaves the page cache in another way */
	PLIMSOLL_ADD     = 3,	/* the frame enters the page cache or swap cache, before its I/O */
	PLIMSOLL_MIGRATE = 4,	/* contents move from frame `page` to frame `other` */
	PLIMSOLL_PUT     = 5,	/* a page for the host's hcache; always with data */
	PLIMSOLL_FLUSH   = 6,	/* `count` blocks of a pool are no longer valid */
};

#define PLIMSOLL_DATA	1	/* the record has a slot */
#define PLIMSOLL_SWAP	2	/* a page of the swap cache */

/*
 * The control disk.
 *
 * Reading sector 0 returns struct plimsoll_info. Writing sector 0, 512 bytes,
 * sends a command; reading sector 1 returns the answer to the last one. A
 * command is done when its write completes. All other writes fail.
 *
 * A read of `n * 4096 + 512` bytes, 1 <= n <= PLIMSOLL_GET_PAGES_MAX, at
 * sector PLIMSOLL_GET_SECTOR(pool, block) is a get of n consecutive blocks
 * from a pool: pages that are found are written to the first n * 4096 bytes,
 * which are otherwise unchanged, and the last 512 bytes hold struct
 * plimsoll_get. All records published before the read was submitted are applied
 * before it. Other reads return zeros. If a read is split on its way, a part may
 * be a get too: its answer names the blocks.
 */
#define PLIMSOLL_CONTROL_MAGIC	0x314c5443534d4c50ULL	/* "PLMSCTL1" */
#define PLIMSOLL_GET_PAGES_MAX	64
#define PLIMSOLL_POOLS_MAX	31	/* pools are numbered 1 to 31 */
#define PLIMSOLL_BLOCKS_MAX	(1ULL << 44)
#define PLIMSOLL_GET_SECTOR(pool, block) (((__u64)(pool) << 47) | ((__u64)(block) << 3))
#define PLIMSOLL_CONTROL_SECTORS (32ULL << 47)

struct plimsoll_info {
	__le64 magic;
	__le32 version;
	__le32 features;	/* PLIMSOLL_HAS_* */
	__u8   pad[496];
};

#define PLIMSOLL_HAS_CACHE	1	/* a disk has an exclusive cache */
#define PLIMSOLL_HAS_HCACHE	2	/* pools can be opened */

struct plimsoll_command {
	__le64 magic;
	__le32 version;
	__le32 command;
	__le64 sequence;	/* returned in the answer */
	__le64 arg[4];
	__u8   pad[456];
};

enum {
	PLIMSOLL_ATTACH     = 1,	/* arg: guest-physical address of the ring, its nonce */
	PLIMSOLL_DETACH     = 2,	/* arg: nonce; the host stops using the ring */
	PLIMSOLL_KICK       = 3,	/* take all records of the ring; ENOTCONN without one */
	PLIMSOLL_POOL_OPEN  = 4,	/* arg: kind and first block, serial number; value: pool */
	PLIMSOLL_POOL_CLOSE = 5,	/* arg: pool; its pages are dropped if private */
};

/*
 * A pool is of this guest alone, or of a read-only image of which all guests share the
 * blocks. arg[0] has its kind, and above that the number of the image's block that is its
 * block 0; the other three have the serial number of the image's disk, padded with zeros.
 */
#define PLIMSOLL_POOL_PRIVATE	0
#define PLIMSOLL_POOL_IMAGE	2
#define PLIMSOLL_POOL_KIND_BITS	8
#define PLIMSOLL_SERIAL_BYTES	20

struct plimsoll_answer {
	__le64 magic;
	__le64 sequence;
	__le32 status;		/* 0, or an errno value */
	__le32 pad0;
	__le64 value;
	__u8   pad[480];
};

struct plimsoll_get {
	__le64 magic;
	__le64 hits;		/* bit i: block i was found */
	__le64 pool;		/* the request: pool, first block, number of blocks */
	__le64 block;
	__le32 count;
	__u8   pad[476];
};

#endif
