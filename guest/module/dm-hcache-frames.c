// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Maps page frames to blocks: see dm-hcache-frames.h.
 *
 * Locks: one for each bucket of the hash table, taken with interrupts off.
 * Callers may hold the lock of a page cache; under a bucket's lock only the lock
 * of plimsoll.ko's ring is taken. No two buckets are locked at once.
 */
#include <linux/atomic.h>
#include <linux/hash.h>
#include <linux/highmem.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/nodemask.h>
#include <linux/random.h>
#include <linux/sched.h>
#include <linux/spinlock.h>
#include <linux/vmalloc.h>

#include "dm-hcache-frames.h"
#include "plimsoll.h"

#define TARGET_SHIFT	44	/* PLIMSOLL_BLOCKS_MAX is 1 << 44 */
#define STATE_SHIFT	62
#define PLACE_MASK	((1ULL << STATE_SHIFT) - 1)

#define RESCHED_EVERY	4096	/* buckets */

/* States of an entry; one without a state has the key 0 and is not linked. */
#define READING		(1ULL << STATE_SHIFT)
#define WRITING		(2ULL << STATE_SHIFT)
#define SETTLED		(3ULL << STATE_SHIFT)

/*
 * @key: State, target and block, or 0. Leaves 0 by cmpxchg, becomes 0 and
 *	changes its state under the lock of its bucket.
 * @hash: Of the contents; while READING the token of the read.
 * @next: Next frame of the bucket; 0: none. Frame 0 is never cached.
 * @epoch: `epoch` when the entry was tied.
 */
struct frame {
	u64 key;
	u64 hash;
	u32 next;
	u32 epoch;
};

/*
 * @first: First frame, or 0.
 * @writing: Writes in flight to the blocks of the bucket.
 */
struct bucket {
	raw_spinlock_t lock;
	u32 first;
	u32 writing;
};

static struct frame *frames;
static unsigned long frame_count;
static struct bucket *buckets;
static unsigned int bucket_bits;
static u64 secrets[12];		/* of frames_hash() */
/* Incremented when all entries become invalid. */
static atomic_t epoch;
/* Range operations in progress. */
static atomic_t ranges[FRAMES_TARGETS_MAX + 1];

static u64 place_of(unsigned int target, u64 block)
{
	return ((u64)target << TARGET_SHIFT) | block;
}

static struct bucket *bucket_of(u64 key)
{
	return &buckets[hash_64(key & PLACE_MASK, bucket_bits)];
}

static bool is_known(unsigned long pfn)
{
	return pfn && pfn < frame_count;
}

/* Uses all bits of the product, so the effect of a change depends on the secrets. */
static u64 mix(u64 a, u64 b)
{
	unsigned __int128 product = (unsigned __int128)a * b;

	return (u64)product ^ (u64)(product >> 64);
}

/*
 * Like wyhash, with four lanes so that multiplications overlap. A factor of 0,
 * which would clear the lane, requires guessing a secret.
 */
u64 frames_hash(struct page *page)
{
	const u64 *s = secrets;
	u64 a = s[4], b = s[5], c = s[6], d = s[7];
	u64 *words = kmap_local_page(page);
	unsigned int i;

	for (i = 0; i < PAGE_SIZE / sizeof(u64); i += 8) {
		a = mix(words[i] ^ s[0], words[i + 1] ^ a);
		b = mix(words[i + 2] ^ s[1], words[i + 3] ^ b);
		c = mix(words[i + 4] ^ s[2], words[i + 5] ^ c);
		d = mix(words[i + 6] ^ s[3], words[i + 7] ^ d);
	}
	kunmap_local(words);
	return mix(mix(a ^ s[8], b ^ s[9]) ^ s[10], mix(c ^ s[9], d ^ s[8]) ^ s[11]);
}

/* Under the lock of @bucket, in which @pfn is. */
static void untie(struct bucket *bucket, unsigned long pfn)
{
	u32 *link = &bucket->first;

	while (*link != pfn)
		link = &frames[*link].next;
	*link = frames[pfn].next;
	smp_store_release(&frames[pfn].key, 0);
}

/* Under the lock of @bucket, that of @place. */
static void untie_place(struct bucket *bucket, u64 place)
{
	u32 pfn, next;

	for (pfn = bucket->first; pfn; pfn = next) {
		next = frames[pfn].next;
		if ((frames[pfn].key & PLACE_MASK) == place)
			untie(bucket, pfn);
	}
}

/*
 * Under the lock of @bucket, that of @key. Does nothing if another CPU has just
 * tied the frame.
 */
static void tie(struct bucket *bucket, unsigned long pfn, u64 key, u64 hash, u32 at_epoch)
{
	struct frame *frame = &frames[pfn];

	untie_place(bucket, key & PLACE_MASK);
	if (cmpxchg(&frame->key, 0, key))
		return;
	frame->hash = hash;
	frame->epoch = at_epoch;
	frame->next = bucket->first;
	bucket->first = pfn;
}

/*
 * Locks the bucket of a frame's entry. Returns NULL, with nothing locked, if the
 * frame is not tied, or was tied to another block meanwhile. Sparse, which knows
 * no lock that is only perhaps held, is told of it by the callers.
 */
static struct bucket *lock_frame(unsigned long pfn, unsigned long *flags)
{
	struct bucket *bucket;
	u64 key;

	if (!is_known(pfn))
		return NULL;
	key = READ_ONCE(frames[pfn].key);
	if (!key)
		return NULL;
	bucket = bucket_of(key);
	raw_spin_lock_irqsave(&bucket->lock, *flags);
	/* If only the state has changed, the entry is still in this bucket. */
	if (((READ_ONCE(frames[pfn].key) ^ key) & PLACE_MASK) == 0) {
		__release(&bucket->lock);
		return bucket;
	}
	raw_spin_unlock_irqrestore(&bucket->lock, *flags);
	return NULL;
}

void frames_forget(unsigned long pfn)
{
	unsigned long flags;
	struct bucket *bucket = lock_frame(pfn, &flags);

	if (!bucket)
		return;
	__acquire(&bucket->lock);
	untie(bucket, pfn);
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
}

void frames_forget_all(void)
{
	atomic_inc(&epoch);
}

void frames_read_begin(unsigned int target, u64 block, unsigned long pfn, u64 token)
{
	u64 place = place_of(target, block);
	struct bucket *bucket = bucket_of(place);
	unsigned long flags;

	frames_forget(pfn);
	if (!is_known(pfn))
		return;
	raw_spin_lock_irqsave(&bucket->lock, flags);
	if (!bucket->writing && !atomic_read(&ranges[target]))
		tie(bucket, pfn, READING | place, token, atomic_read(&epoch));
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
}

void frames_read_end(unsigned int target, u64 block, struct page *page, u64 token, bool good)
{
	u64 place = place_of(target, block);
	struct bucket *bucket = bucket_of(place);
	unsigned long pfn = page_to_pfn(page);
	struct frame *frame = &frames[pfn];
	unsigned long flags;
	u64 hash;

	if (!is_known(pfn) || READ_ONCE(frame->key) != (READING | place))
		return;
	hash = good ? frames_hash(page) : 0;
	raw_spin_lock_irqsave(&bucket->lock, flags);
	if (frame->key == (READING | place) && frame->hash == token) {
		if (good) {
			frame->hash = hash;
			WRITE_ONCE(frame->key, SETTLED | place);
		} else {
			untie(bucket, pfn);
		}
	}
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
}

void frames_write_begin(unsigned int target, u64 block, unsigned long pfn, u64 hash)
{
	u64 place = place_of(target, block);
	struct bucket *bucket = bucket_of(place);
	unsigned long flags;

	frames_forget(pfn);
	raw_spin_lock_irqsave(&bucket->lock, flags);
	untie_place(bucket, place);
	if (is_known(pfn) && !bucket->writing && !atomic_read(&ranges[target]))
		tie(bucket, pfn, WRITING | place, hash, atomic_read(&epoch));
	bucket->writing++;
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
}

void frames_write_end(unsigned int target, u64 block, unsigned long pfn, u64 hash, bool good)
{
	u64 place = place_of(target, block);
	struct bucket *bucket = bucket_of(place);
	struct frame *frame = &frames[pfn];
	unsigned long flags;

	raw_spin_lock_irqsave(&bucket->lock, flags);
	bucket->writing--;
	if (is_known(pfn) && frame->key == (WRITING | place) && frame->hash == hash) {
		if (good)
			WRITE_ONCE(frame->key, SETTLED | place);
		else
			untie(bucket, pfn);
	}
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
}

/* Unties the frames of @count blocks that are in one bucket. */
static void untie_range(struct bucket *bucket, u64 place, u64 count)
{
	unsigned long flags;
	u32 pfn, next;

	raw_spin_lock_irqsave(&bucket->lock, flags);
	for (pfn = bucket->first; pfn; pfn = next) {
		next = frames[pfn].next;
		if ((frames[pfn].key & PLACE_MASK) - place < count)
			untie(bucket, pfn);
	}
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
}

void frames_range_begin(unsigned int target, u64 block, u64 count)
{
	u64 place = place_of(target, block);
	u64 i;

	/*
	 * A frame tied before its bucket is locked below is found there; a CPU
	 * that takes the lock later reads the new count of ranges.
	 */
	atomic_inc(&ranges[target]);
	smp_mb__after_atomic();
	if (count <= 1ULL << bucket_bits) {
		for (i = 0; i < count; i++) {
			untie_range(bucket_of(place + i), place, count);
			if (i % RESCHED_EVERY == RESCHED_EVERY - 1)
				cond_resched();
		}
	} else {
		for (i = 0; i < 1ULL << bucket_bits; i++) {
			untie_range(&buckets[i], place, count);
			if (i % RESCHED_EVERY == RESCHED_EVERY - 1)
				cond_resched();
		}
	}
}

void frames_range_end(unsigned int target)
{
	atomic_dec(&ranges[target]);
}

void frames_evicted(struct page *page, bool uptodate)
{
	unsigned long pfn = page_to_pfn(page);
	enum frame_verdict verdict = FRAME_FIT;
	struct bucket *bucket;
	unsigned long flags;
	u64 key, place, hash;

	/* Before the lock, for which others must not wait that long. */
	if (is_known(pfn) && READ_ONCE(frames[pfn].key) >= SETTLED)
		plimsoll_wait_put();
	bucket = lock_frame(pfn, &flags);
	if (!bucket)
		return;
	__acquire(&bucket->lock);
	key = frames[pfn].key;
	place = key & PLACE_MASK;
	hash = frames[pfn].hash;
	if (key != (SETTLED | place))
		verdict = FRAME_BUSY;
	else if (frames[pfn].epoch != (u32)atomic_read(&epoch))
		verdict = FRAME_DOUBTED;
	else if (!uptodate)
		verdict = FRAME_NOT_UPTODATE;
	untie(bucket, pfn);
	hcache_evicted(place >> TARGET_SHIFT, place & (PLIMSOLL_BLOCKS_MAX - 1),
		       page, verdict, hash);
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
}

void frames_migrated(unsigned long from, unsigned long to)
{
	struct bucket *bucket;
	unsigned long flags;
	u64 key, hash;
	u32 at_epoch;

	frames_forget(to);
	bucket = lock_frame(from, &flags);
	if (!bucket)
		return;
	__acquire(&bucket->lock);
	key = frames[from].key;
	hash = frames[from].hash;
	at_epoch = frames[from].epoch;
	untie(bucket, from);
	if (key >= SETTLED && is_known(to))
		tie(bucket, to, key, hash, at_epoch);
	raw_spin_unlock_irqrestore(&bucket->lock, flags);
}

int frames_init(void)
{
	unsigned long i;
	int node;

	for_each_online_node(node)
		frame_count = max(frame_count, node_end_pfn(node));
	if (frame_count > U32_MAX)
		frame_count = U32_MAX;
	bucket_bits = ilog2(roundup_pow_of_two(frame_count)) - 1;

	frames = vzalloc(frame_count * sizeof(*frames));
	buckets = vzalloc(sizeof(*buckets) << bucket_bits);
	if (!frames || !buckets) {
		frames_exit();
		return -ENOMEM;
	}
	for (i = 0; i < 1UL << bucket_bits; i++)
		raw_spin_lock_init(&buckets[i].lock);
	get_random_bytes(secrets, sizeof(secrets));
	return 0;
}

void frames_exit(void)
{
	vfree(buckets);
	vfree(frames);
}
