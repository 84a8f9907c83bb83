// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Device-mapper target `hcache`: a second-level cache for a disk of the guest, in
 * the host's hcache. See DM-HCACHE.md.
 *
 *	<start> <length> hcache <lower device> <lower start>
 *		[private | shared <serial number of the disk>]
 *
 * Contents of the pool: `maybe` has a bit for each block of a private target, set
 * when the block has been put, cleared when it is requested, flushed or could not
 * be put again. A block whose bit is clear may still be in the pool with stale
 * contents: the host's answer for it is ignored.
 *
 * Order of a write to a block: its frames are untied (dm-hcache-frames.h), so
 * that no put can follow; the block is flushed if its bit is set; the write
 * goes to the lower device. The ring is a FIFO, and the host empties it before
 * it serves any request, including gets.
 *
 * Frames that are tied: for reads, those of the page cache or swap cache that no
 * process can reach yet, so that the contents hashed at the end of the read are
 * those that were read; for writes, those that this write writes back: whoever
 * changes such a frame makes it dirty, and it is written to its block again before
 * it can be evicted. A direct write may come from a frame of the page cache too,
 * but of another file: that one can change while it is written, and be evicted
 * with contents that the block never had.
 *
 * A get reads into the module's own pages, and hits are copied. If the host does
 * not answer within `get_timeout_ms`, the read goes to the lower device, and the
 * pages stay with the get until it ends.
 */
#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/device-mapper.h>
#include <linux/highmem.h>
#include <linux/irq_work.h>
#include <linux/jiffies.h>
#include <linux/kernel.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mempool.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pagemap.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>
#include <linux/timekeeping.h>
#include <linux/vmalloc.h>
#include <linux/workqueue.h>

#include "dm-hcache-frames.h"
#include "plimsoll.h"

#define DM_MSG_PREFIX "hcache"

#define BLOCK_SHIFT	3	/* sectors of a block */
#define BLOCK_SECTORS	(1U << BLOCK_SHIFT)

/* Reserves of gets and of bios to the lower device. */
#define GETS_KEPT	16
#define BIOS_KEPT	16

/* After this many consecutive gets without a valid answer, gets pause. */
#define BAD_ANSWERS_MAX	16
#define BAD_ANSWERS_REST	(10 * HZ)

/* Time until a pool that the host refused is requested again. */
#define REFUSED_REST		(30 * HZ)

/*
 * If this many of a window of checked pages differ from what was read or written
 * (6 %), the target stops putting pages.
 */
#define CHECK_WINDOW	1024
#define MISMATCHES_MAX	64

#ifdef BLK_OPEN_WRITE
#define TABLE_WRITE	BLK_OPEN_WRITE
#else
#define TABLE_WRITE	FMODE_WRITE
#endif

/* Block numbers are used as bit numbers. */
static_assert(sizeof(long) == sizeof(u64));
static_assert(PAGE_SIZE == PLIMSOLL_PAGE);

static unsigned int get_timeout_ms = 1000;
module_param(get_timeout_ms, uint, 0644);
MODULE_PARM_DESC(get_timeout_ms, "time after which a get without an answer is abandoned (1000)");

static unsigned int bounce_pages = 260;
module_param(bounce_pages, uint, 0444);
MODULE_PARM_DESC(bounce_pages, "pages reserved for gets (260)");

static bool put_dropped = true;
module_param(put_dropped, bool, 0644);
MODULE_PARM_DESC(put_dropped, "put pages that are dropped while memory is free too, by drop_caches or a program's advice (1)");

static bool fault_no_hash;
module_param(fault_no_hash, bool, 0644);
MODULE_PARM_DESC(fault_no_hash, "test only, corrupts data under dm-crypt: put pages unchecked");

enum count {
	GETS,			/* blocks requested */
	HITS,
	MISSES,
	SKIPPED_MEMORY,		/* reads without a get: no free page */
	SKIPPED_SILENT,		/* the host does not answer */
	SKIPPED_BUSY,		/* the control disk could not accept the get at once */
	PUTS,
	FLUSHES,		/* records, each of one block or more */
	REFUSED_MISMATCH,	/* evicted pages not put: changed without a write */
	REFUSED_BUSY,
	REFUSED_DOUBTED,
	REFUSED_NOT_UPTODATE,
	REFUSED_NO_ROOM,
	REFUSED_CLOSED,
	REFUSED_DISABLED,
	UNALIGNED,		/* reads and writes not of whole blocks and pages */
	TIMEOUTS,
	LATE,			/* of these, answered later */
	ERRORS,			/* gets that failed or had an invalid answer */
	REQUESTS,		/* of the control disk: gets of up to 64 blocks */
	NS_GET,			/* mean from request to answer, copies included */
	NS_PUT,			/* mean of hash, record and copy of a page, without waits */
	COUNTS
};

static const char * const count_names[COUNTS] = {
	"gets", "hits", "misses", "skipped_memory", "skipped_silent", "skipped_busy",
	"puts", "flushes", "refused_mismatch", "refused_busy", "refused_doubted", "refused_not_uptodate",
	"refused_no_room", "refused_closed", "refused_disabled", "unaligned",
	"timeouts", "late", "errors", "requests", "ns_get", "ns_put",
};

/*
 * A target. Lives until its last get has ended, which may be after the
 * target is removed: see get_ended().
 *
 * @pool: Number and generation as in pool_of(); 0: none is open.
 * @open_error: Error of the last refused pool, as logged.
 * @workqueue, @lower_bios: Per target, because targets can be stacked, and the
 *	upper one must not exhaust the reserve of the lower one.
 * @gets: Gets in flight that are not abandoned, oldest first; guarded by @lock.
 * @silent: A get was abandoned and none has ended since.
 * @bad_answers: Invalid answers since the last valid one or since the pool was
 *	opened; the last of them at @bad_since.
 */
struct hcache {
	struct kref kref;
	unsigned int number;
	struct dm_dev *lower;
	sector_t lower_start;
	u64 blocks;
	bool shared;
	char serial[PLIMSOLL_SERIAL_BYTES + 1];
	u64 first_block;

	u64 pool;
	struct delayed_work open_work;
	int open_error;
	unsigned long *maybe;

	struct workqueue_struct *workqueue;
	struct bio_set lower_bios;

	spinlock_t lock;
	struct list_head gets;
	struct delayed_work timeout_work;
	bool silent;
	atomic_t bad_answers;
	unsigned long bad_since;

	bool disabled;
	struct irq_work disabled_message;
	atomic_t checks, mismatches;
	atomic64_t counts[COUNTS];
};

enum io_kind { IO_PLAIN, IO_READ, IO_WRITE, IO_RANGE };

/*
 * A bio in flight through a target.
 *
 * @iter: Iterator at the start of the bio; its pages do not change.
 * @block: First block, of @count; a write may cover them partly.
 * @whole: The bio consists of whole blocks in whole pages.
 * @missing: Bit i: block i must be read from the lower device.
 * @tied: Bit i: frames_write_begin() was called for page i of a write.
 * @hash: Hashes of these pages.
 */
struct hcache_io {
	struct hcache *c;
	struct bio *bio;
	struct bvec_iter iter;
	u64 block;
	u64 count;
	enum io_kind kind;
	bool whole;

	u64 missing;
	struct work_struct work;
	atomic_t remaining;
	blk_status_t status;

	u64 tied;
	u64 hash[PLIMSOLL_GET_PAGES_MAX];
};

/*
 * A get in flight.
 *
 * @io: The read that waits for it; must not be accessed once @given_up.
 * @begun_ns: When it was submitted; @since in jiffies.
 * @asked: Bit i: block @io->block + i.
 * @first: Lowest bit of @asked, whose page is the first of @count, and its
 *	block @block.
 * @pages: Data pages; the one after @count holds the answer.
 */
struct hcache_get {
	struct hcache *c;
	struct hcache_io *io;
	struct list_head list;
	unsigned long since;
	u64 begun_ns;
	bool given_up;
	u64 asked;
	unsigned int first;
	unsigned int count;
	u64 block;
	struct plimsoll_pool pool;
	struct page *pages[PLIMSOLL_GET_PAGES_MAX + 1];
	struct bio_vec vecs[PLIMSOLL_GET_PAGES_MAX + 1];
	struct bio bio;
};

static struct hcache *targets[FRAMES_TARGETS_MAX + 1];
static DEFINE_MUTEX(targets_lock);

static mempool_t *gets;

/* Reserved pages, guarded by @bounce_lock. */
static struct page **bounce;
static unsigned int bounce_count;
static DEFINE_SPINLOCK(bounce_lock);

static void count(struct hcache *c, enum count what)
{
	atomic64_inc(&c->counts[what]);
}

static void count_many(struct hcache *c, enum count what, u64 n)
{
	atomic64_add(n, &c->counts[what]);
}

static u64 blocks_mask(unsigned int n)
{
	return n == 64 ? U64_MAX : (1ULL << n) - 1;
}

static struct plimsoll_pool pool_of(struct hcache *c)
{
	u64 word = smp_load_acquire(&c->pool);
	struct plimsoll_pool pool = { .number = word >> 32, .generation = (u32)word };

	return pool;
}

static bool pool_is_open(struct plimsoll_pool pool)
{
	return pool.number && pool.generation == plimsoll_generation();
}

static void hcache_free(struct kref *kref)
{
	struct hcache *c = container_of(kref, struct hcache, kref);

	vfree(c->maybe);
	kfree(c);
}

/* Pages of gets. */

static void give_pages(struct page **pages, unsigned int n)
{
	unsigned long flags;
	unsigned int i;

	spin_lock_irqsave(&bounce_lock, flags);
	for (i = 0; i < n && bounce_count < bounce_pages; i++)
		bounce[bounce_count++] = pages[i];
	spin_unlock_irqrestore(&bounce_lock, flags);
	for (; i < n; i++)
		__free_page(pages[i]);
}

/* Takes all pages or none, without waiting. */
static bool take_pages(struct page **pages, unsigned int n)
{
	unsigned long flags;
	unsigned int i;

	spin_lock_irqsave(&bounce_lock, flags);
	for (i = 0; i < n && bounce_count; i++)
		pages[i] = bounce[--bounce_count];
	spin_unlock_irqrestore(&bounce_lock, flags);
	for (; i < n; i++) {
		pages[i] = alloc_page(GFP_NOWAIT | __GFP_NOWARN);
		if (!pages[i]) {
			give_pages(pages, i);
			return false;
		}
	}
	return true;
}

/* The pool. */

static size_t maybe_bytes(struct hcache *c)
{
	return BITS_TO_LONGS(c->blocks) * sizeof(long);
}

static void clear_maybe(struct hcache *c)
{
	if (c->maybe)
		memset(c->maybe, 0, maybe_bytes(c));
}

static void flush_blocks(struct hcache *c, u64 block, u64 n)
{
	struct plimsoll_pool pool = pool_of(c);
	u32 part;

	if (!pool_is_open(pool))
		return;
	while (n) {
		part = min_t(u64, n, U32_MAX);
		count(c, FLUSHES);
		plimsoll_post_flush(pool, block, part);
		block += part;
		n -= part;
	}
}

/* Unties the frames of the blocks, so that no put can follow. */
static void invalidate(struct hcache *c, u64 block, u64 n)
{
	bool held = false;
	u64 end = block + n;

	for (block = find_next_bit(c->maybe, end, block); block < end;
	     block = find_next_bit(c->maybe, end, block + 1))
		held |= test_and_clear_bit(block, c->maybe);
	if (held)
		flush_blocks(c, end - n, n);
}

static void open_pool(struct work_struct *work)
{
	struct hcache *c = container_of(work, struct hcache, open_work.work);
	struct plimsoll_pool pool;
	int r;

	if (pool_is_open(pool_of(c)))
		return;
	r = plimsoll_pool_open(c->shared ? c->serial : NULL, c->first_block, &pool);
	if (r == -ENOTCONN || r == -ETIMEDOUT || r == -EIO || r == -EPROTO) {
		queue_delayed_work(system_long_wq, &c->open_work, HZ);
		return;
	}
	if (r) {
		if (r != c->open_error)
			DMWARN("%s: the host refused a pool (error %d)", c->lower->name, r);
		c->open_error = r;
		queue_delayed_work(system_long_wq, &c->open_work, REFUSED_REST);
		return;
	}
	c->open_error = 0;

	/* Nothing is put before the pool is published. */
	clear_maybe(c);
	atomic_set(&c->bad_answers, 0);
	WRITE_ONCE(c->silent, false);
	smp_store_release(&c->pool, (u64)pool.number << 32 | pool.generation);
}

static void hcache_reattached(void)
{
	unsigned int i;

	mutex_lock(&targets_lock);
	for (i = 1; i <= FRAMES_TARGETS_MAX; i++)
		if (targets[i])
			mod_delayed_work(system_long_wq, &targets[i]->open_work, 0);
	mutex_unlock(&targets_lock);
}

static void tell_disabled(struct irq_work *work)
{
	struct hcache *c = container_of(work, struct hcache, disabled_message);

	DMWARN("%s: pages change after they are read or written (dm-crypt above?): caching is disabled",
	       c->lower->name);
}

/* Whether the page has the expected contents; if not, this may disable putting. */
static bool check(struct hcache *c, struct page *page, bool uptodate, u64 hash)
{
	/* Metadata of file systems, which may be changed and dropped with its file. */
	if (!uptodate) {
		if (frames_hash(page) == hash)
			return true;
		count(c, REFUSED_NOT_UPTODATE);
		return false;
	}
	if (fault_no_hash)
		return true;
	if (!(atomic_inc_return(&c->checks) % CHECK_WINDOW))
		atomic_set(&c->mismatches, 0);
	if (frames_hash(page) == hash)
		return true;
	count(c, REFUSED_MISMATCH);
	if (atomic_inc_return(&c->mismatches) >= MISMATCHES_MAX && !xchg(&c->disabled, true))
		irq_work_queue(&c->disabled_message);
	return false;
}

void hcache_evicted(unsigned int target, u64 block, struct page *page,
		    enum frame_verdict verdict, u64 hash)
{
	struct hcache *c = targets[target];
	struct plimsoll_pool pool = pool_of(c);
	u64 begun_ns;

	switch (verdict) {
	case FRAME_BUSY:
		count(c, REFUSED_BUSY);
		return;
	case FRAME_DOUBTED:
		count(c, REFUSED_DOUBTED);
		return;
	case FRAME_NOT_UPTODATE:
	case FRAME_FIT:
		break;
	}
	if (READ_ONCE(c->disabled)) {
		count(c, REFUSED_DISABLED);
		return;
	}
	if (!pool_is_open(pool)) {
		count(c, REFUSED_CLOSED);
		return;
	}
	begun_ns = ktime_get_mono_fast_ns();
	if (!check(c, page, verdict == FRAME_FIT, hash))
		return;

	/* A write takes the bucket's lock before it tests the bit. */
	if (plimsoll_post_put(pool, block, page)) {
		count(c, PUTS);
		count_many(c, NS_PUT, ktime_get_mono_fast_ns() - begun_ns);
		if (c->maybe)
			set_bit(block, c->maybe);
	} else {
		count(c, REFUSED_NO_ROOM);
		if (c->maybe)
			clear_bit(block, c->maybe);
	}
}

/* Reads from the lower device. */

static void read_part_done(struct hcache_io *io)
{
	if (!atomic_dec_and_test(&io->remaining))
		return;
	io->bio->bi_status = io->status;
	bio_endio(io->bio);
}

static void read_part_ended(struct bio *part)
{
	struct hcache_io *io = part->bi_private;

	if (part->bi_status)
		WRITE_ONCE(io->status, part->bi_status);
	bio_put(part);
	read_part_done(io);
}

/*
 * Reads the missing blocks. Each part is submitted before the next is allocated,
 * in a worker where nothing delays it, so a reserve of one is sufficient.
 */
static void read_lower(struct hcache_io *io)
{
	struct bio *bio = io->bio;
	unsigned int first, n;
	struct bio *part;
	u64 missing = io->missing;

	if (missing == blocks_mask(io->count)) {
		submit_bio_noacct(bio);
		return;
	}
	io->status = BLK_STS_OK;
	atomic_set(&io->remaining, 1);
	while (missing) {
		first = __ffs64(missing);
		n = missing >> first == U64_MAX >> first ? 64 - first :
							   __ffs64(~(missing >> first));
		missing &= ~(blocks_mask(n) << first);

		part = bio_alloc_clone(io->c->lower->bdev, bio, GFP_NOIO, &io->c->lower_bios);
		bio_trim(part, first << BLOCK_SHIFT, n << BLOCK_SHIFT);
		part->bi_private = io;
		part->bi_end_io = read_part_ended;
		atomic_inc(&io->remaining);
		submit_bio_noacct(part);
	}
	read_part_done(io);
}

static void read_lower_work(struct work_struct *work)
{
	read_lower(container_of(work, struct hcache_io, work));
}

/* Gets. */

static void get_free(struct hcache_get *get)
{
	struct hcache *c = get->c;

	bio_uninit(&get->bio);
	give_pages(get->pages, get->count + 1);
	mempool_free(get, gets);
	kref_put(&c->kref, hcache_free);
}

/* Copies hits (bit i: page @first + i of the bio); the others are missing. */
static void take_hits(struct hcache_io *io, struct hcache_get *get, u64 hits)
{
	struct bvec_iter iter;
	struct bio_vec vec;
	unsigned int i = 0;

	__bio_for_each_segment(vec, io->bio, iter, io->iter) {
		if (hits >> i & 1) {
			memcpy_page(vec.bv_page, 0, get->pages[i - get->first], 0, PAGE_SIZE);
			flush_dcache_page(vec.bv_page);
		}
		i++;
	}
	io->missing = blocks_mask(io->count) & ~hits;
}

/* Whether the answer is valid and covers the whole get, not a part of it. */
static bool is_answer(struct hcache_get *get, struct plimsoll_get *answer)
{
	return answer->magic == cpu_to_le64(PLIMSOLL_CONTROL_MAGIC) &&
	       answer->pool == cpu_to_le64(get->pool.number) &&
	       answer->block == cpu_to_le64(get->block) &&
	       answer->count == cpu_to_le32(get->count);
}

/* Any context. */
static void get_ended(struct bio *bio)
{
	struct hcache_get *get = container_of(bio, struct hcache_get, bio);
	struct plimsoll_get *answer = page_address(get->pages[get->count]);
	struct hcache *c = get->c;
	struct hcache_io *io = get->io;
	unsigned long flags;
	bool given_up, sent = bio->bi_status != BLK_STS_AGAIN;
	u64 hits = 0;

	spin_lock_irqsave(&c->lock, flags);
	given_up = get->given_up;
	if (!given_up)
		list_del(&get->list);
	spin_unlock_irqrestore(&c->lock, flags);

	if (!sent) {
		count(c, SKIPPED_BUSY);
	} else if (!bio->bi_status && is_answer(get, answer)) {
		/* After a new attach the pool's number may belong to another target. */
		if (pool_is_open(get->pool))
			hits = le64_to_cpu(answer->hits) << get->first & get->asked;
		atomic_set(&c->bad_answers, 0);
	} else {
		count(c, ERRORS);
		WRITE_ONCE(c->bad_since, jiffies);
		atomic_inc(&c->bad_answers);
		plimsoll_check_host();
	}
	if (sent) {
		count_many(c, GETS, hweight64(get->asked));
		if (READ_ONCE(c->silent))
			WRITE_ONCE(c->silent, false);
	}

	if (given_up) {
		count(c, LATE);
		get_free(get);
		/* The module is there until this has returned: see hcache_exit(). */
		module_put(THIS_MODULE);
		return;
	}

	if (sent) {
		count_many(c, HITS, hweight64(hits));
		count_many(c, MISSES, hweight64(get->asked & ~hits));
	}
	take_hits(io, get, hits);
	if (sent) {
		count(c, REQUESTS);
		count_many(c, NS_GET, ktime_get_mono_fast_ns() - get->begun_ns);
	}
	get_free(get);
	if (io->missing)
		queue_work(c->workqueue, &io->work);
	else
		bio_endio(io->bio);
}

static unsigned long get_timeout(void)
{
	return msecs_to_jiffies(get_timeout_ms);
}

/* Abandons gets that take too long, and reads from the lower device instead. */
static void give_up_gets(struct work_struct *work)
{
	struct hcache *c = container_of(work, struct hcache, timeout_work.work);
	struct bio_list late = BIO_EMPTY_LIST;
	struct hcache_get *get;
	struct hcache_io *io;
	struct bio *bio;
	unsigned long flags, end;

	spin_lock_irqsave(&c->lock, flags);
	while ((get = list_first_entry_or_null(&c->gets, struct hcache_get, list))) {
		end = get->since + get_timeout();
		if (time_before(jiffies, end)) {
			queue_delayed_work(c->workqueue, &c->timeout_work, end - jiffies);
			break;
		}
		list_del(&get->list);
		get->given_up = true;
		__module_get(THIS_MODULE);
		WRITE_ONCE(c->silent, true);
		count(c, TIMEOUTS);
		bio_list_add(&late, get->io->bio);
	}
	spin_unlock_irqrestore(&c->lock, flags);

	if (!bio_list_empty(&late))
		plimsoll_check_host();
	while ((bio = bio_list_pop(&late))) {
		io = dm_per_bio_data(bio, sizeof(*io));
		io->missing = blocks_mask(io->count);
		read_lower(io);
	}
}

/* Clears the bits of the blocks in @asked; returns those that were set. */
static u64 take_maybe(struct hcache *c, u64 block, u64 asked)
{
	u64 rest = asked;
	unsigned int i;

	while (rest) {
		i = __ffs64(rest);
		rest &= rest - 1;
		if (!test_and_clear_bit(block + i, c->maybe))
			asked &= ~(1ULL << i);
	}
	return asked;
}

/* Bit i: block i of the read may be in the pool. */
static u64 maybe_there(struct hcache *c, struct hcache_io *io)
{
	u64 end = io->block + io->count, block, asked = 0;

	if (!c->maybe)
		return blocks_mask(io->count);
	for (block = find_next_bit(c->maybe, end, io->block); block < end;
	     block = find_next_bit(c->maybe, end, block + 1))
		asked |= 1ULL << (block - io->block);
	return asked;
}

static bool is_failing(struct hcache *c)
{
	return atomic_read(&c->bad_answers) >= BAD_ANSWERS_MAX &&
	       time_before(jiffies, READ_ONCE(c->bad_since) + BAD_ANSWERS_REST);
}

/* Maximum pages of a get that is not split; may change at any time; 0: no gets. */
static unsigned int get_pages_max(void)
{
	struct request_queue *control = bdev_get_queue(plimsoll_control_bdev());

	return min3(PLIMSOLL_GET_PAGES_MAX, (int)queue_max_segments(control) - 1,
		    (int)(queue_max_sectors(control) - 1) >> BLOCK_SHIFT);
}

/* Submits a get for a read. Returns false if the read must use the lower device. */
static bool ask(struct hcache *c, struct hcache_io *io)
{
	struct plimsoll_pool pool = pool_of(c);
	unsigned int pages_max = get_pages_max();
	struct hcache_get *get;
	unsigned long flags;
	unsigned int i;
	u64 asked;

	if (!pool_is_open(pool) || is_failing(c))
		return false;
	asked = maybe_there(c, io);
	if (!asked)
		return false;
	if (READ_ONCE(c->silent)) {
		count(c, SKIPPED_SILENT);
		return false;
	}
	if (!pages_max) {
		count(c, SKIPPED_BUSY);
		return false;
	}

	get = mempool_alloc(gets, GFP_NOWAIT | __GFP_NOWARN);
	if (!get) {
		count(c, SKIPPED_MEMORY);
		return false;
	}
	get->first = __ffs64(asked);
	get->count = min_t(unsigned int, fls64(asked) - get->first, pages_max);
	asked &= blocks_mask(get->count) << get->first;
	if (!take_pages(get->pages, get->count + 1)) {
		mempool_free(get, gets);
		count(c, SKIPPED_MEMORY);
		return false;
	}
	if (c->maybe)
		asked = take_maybe(c, io->block, asked);

	get->c = c;
	kref_get(&c->kref);
	get->io = io;
	get->since = jiffies;
	get->begun_ns = ktime_get_mono_fast_ns();
	get->given_up = false;
	get->asked = asked;
	get->block = io->block + get->first;
	get->pool = pool;
	memset(page_address(get->pages[get->count]), 0, sizeof(struct plimsoll_get));
	/* NOWAIT: do not split, and do not block on a queue full of a dead host's requests. */
	bio_init(&get->bio, plimsoll_control_bdev(), get->vecs, get->count + 1,
		 REQ_OP_READ | REQ_SYNC | REQ_NOMERGE | REQ_NOWAIT);
	for (i = 0; i < get->count; i++)
		__bio_add_page(&get->bio, get->pages[i], PAGE_SIZE, 0);
	__bio_add_page(&get->bio, get->pages[i], sizeof(struct plimsoll_get), 0);
	get->bio.bi_iter.bi_sector = PLIMSOLL_GET_SECTOR(pool.number, get->block);
	get->bio.bi_end_io = get_ended;
	bio_clear_polled(io->bio);

	spin_lock_irqsave(&c->lock, flags);
	list_add_tail(&get->list, &c->gets);
	spin_unlock_irqrestore(&c->lock, flags);
	queue_delayed_work(c->workqueue, &c->timeout_work, get_timeout());
	submit_bio_noacct(&get->bio);
	return true;
}

/* Bios. */

/* Token of this read's entries; unique among the reads in flight. */
static u64 token_of(struct hcache_io *io)
{
	return (unsigned long)io;
}

static bool is_whole(struct hcache_io *io, sector_t offset)
{
	struct bvec_iter iter;
	struct bio_vec vec;

	if (offset % BLOCK_SECTORS)
		return false;
	__bio_for_each_segment(vec, io->bio, iter, io->iter)
		if (vec.bv_len != PAGE_SIZE || vec.bv_offset)
			return false;
	return true;
}

/* Whether a page is in the page cache or swap cache at this time. */
static bool is_cached(struct page *page)
{
	return folio_mapping(page_folio(page));
}

/*
 * Whether nothing can write to a page before a read into it has ended: it is in a
 * cache, where only the owner of this read accesses it until it is up to date.
 */
static bool is_unreachable(struct page *page)
{
	struct folio *folio = page_folio(page);

	return is_cached(page) && !folio_test_uptodate(folio) && !folio_mapped(folio);
}

/*
 * Whether a write to the target writes back the cache's own page. Direct I/O marks
 * its writes as idle, and in later kernels pins its pages. Buffers are written
 * without the mark of write-back: they are of a block device, which few map.
 */
static bool is_written_back(struct bio *bio, struct page *page)
{
	struct folio *folio = page_folio(page);
	struct address_space *mapping;
	bool buffers;

	/* One with a memory error must not be read, so not hashed. */
	if (bio->bi_opf & REQ_IDLE || folio_maybe_dma_pinned(folio) || PageHWPoison(page))
		return false;
	rcu_read_lock();
	mapping = folio_mapping(folio);
	buffers = mapping && mapping->host && S_ISBLK(mapping->host->i_mode) &&
		  !folio_mapped(folio);
	rcu_read_unlock();
	return mapping && (buffers || folio_test_writeback(folio));
}

static void forget_pages(struct hcache_io *io)
{
	struct bvec_iter iter;
	struct bio_vec vec;

	__bio_for_each_segment(vec, io->bio, iter, io->iter)
		frames_forget(page_to_pfn(vec.bv_page));
}

/* Whether frames should be tied: evicted ones would be put now. */
static bool will_put(struct hcache *c)
{
	return !READ_ONCE(c->disabled) && pool_is_open(pool_of(c));
}

static int map_read(struct hcache *c, struct hcache_io *io)
{
	struct bvec_iter iter;
	struct bio_vec vec;
	u64 block = io->block;

	if (!io->whole || !will_put(c)) {
		forget_pages(io);
	} else {
		io->kind = IO_READ;
		__bio_for_each_segment(vec, io->bio, iter, io->iter) {
			if (is_unreachable(vec.bv_page))
				frames_read_begin(c->number, block, page_to_pfn(vec.bv_page),
						  token_of(io));
			else
				frames_forget(page_to_pfn(vec.bv_page));
			block++;
		}
	}
	if (io->whole && ask(c, io))
		return DM_MAPIO_SUBMITTED;
	return DM_MAPIO_REMAPPED;
}

static int map_write(struct hcache *c, struct hcache_io *io)
{
	struct bvec_iter iter;
	struct bio_vec vec;
	unsigned int i = 0;

	io->kind = IO_WRITE;
	io->tied = 0;
	if (io->whole && will_put(c)) {
		__bio_for_each_segment(vec, io->bio, iter, io->iter) {
			if (is_written_back(io->bio, vec.bv_page)) {
				io->tied |= 1ULL << i;
				io->hash[i] = frames_hash(vec.bv_page);
				frames_write_begin(c->number, io->block + i,
						   page_to_pfn(vec.bv_page), io->hash[i]);
			} else {
				frames_forget(page_to_pfn(vec.bv_page));
				frames_write_begin(c->number, io->block + i, 0, 0);
			}
			i++;
		}
	} else {
		io->whole = false;
		forget_pages(io);
		for (; i < io->count; i++)
			frames_write_begin(c->number, io->block + i, 0, 0);
	}
	invalidate(c, io->block, io->count);
	return DM_MAPIO_REMAPPED;
}

static int map_range(struct hcache *c, struct hcache_io *io)
{
	io->kind = IO_RANGE;
	frames_range_begin(c->number, io->block, io->count);
	invalidate(c, io->block, io->count);
	return DM_MAPIO_REMAPPED;
}

static int hcache_map(struct dm_target *ti, struct bio *bio)
{
	struct hcache *c = ti->private;
	struct hcache_io *io = dm_per_bio_data(bio, sizeof(*io));
	sector_t offset = dm_target_offset(ti, bio->bi_iter.bi_sector);
	u64 end;

	bio_set_dev(bio, c->lower->bdev);
	bio->bi_iter.bi_sector = c->lower_start + offset;

	io->kind = IO_PLAIN;
	if (!bio_sectors(bio))
		return DM_MAPIO_REMAPPED;
	end = (offset + bio_sectors(bio) + BLOCK_SECTORS - 1) >> BLOCK_SHIFT;
	io->c = c;
	io->bio = bio;
	io->iter = bio->bi_iter;
	io->block = offset >> BLOCK_SHIFT;
	io->count = end - io->block;
	INIT_WORK(&io->work, read_lower_work);
	if (bio_has_data(bio)) {
		io->whole = is_whole(io, offset);
		if (!io->whole)
			count(c, UNALIGNED);
	}

	switch (bio_op(bio)) {
	case REQ_OP_READ:
		return map_read(c, io);
	case REQ_OP_WRITE:
		return c->shared ? DM_MAPIO_KILL : map_write(c, io);
	case REQ_OP_DISCARD:
	case REQ_OP_SECURE_ERASE:
	case REQ_OP_WRITE_ZEROES:
		return c->shared ? DM_MAPIO_KILL : map_range(c, io);
	default:
		return DM_MAPIO_KILL;
	}
}

static int hcache_end_io(struct dm_target *ti, struct bio *bio, blk_status_t *error)
{
	struct hcache *c = ti->private;
	struct hcache_io *io = dm_per_bio_data(bio, sizeof(*io));
	bool good = !*error;
	struct bvec_iter iter;
	struct bio_vec vec;
	unsigned int i = 0;

	switch (io->kind) {
	case IO_READ:
		__bio_for_each_segment(vec, bio, iter, io->iter)
			frames_read_end(c->number, io->block + i++, vec.bv_page, token_of(io),
					good);
		break;
	case IO_WRITE:
		if (!io->whole) {
			for (; i < io->count; i++)
				frames_write_end(c->number, io->block + i, 0, 0, good);
			break;
		}
		__bio_for_each_segment(vec, bio, iter, io->iter) {
			if (io->tied >> i & 1)
				frames_write_end(c->number, io->block + i,
						 page_to_pfn(vec.bv_page), io->hash[i], good);
			else
				frames_write_end(c->number, io->block + i, 0, 0, good);
			i++;
		}
		break;
	case IO_RANGE:
		frames_range_end(c->number);
		break;
	case IO_PLAIN:
		break;
	}
	return DM_ENDIO_DONE;
}

/* The target. */

static int parse_pool(struct hcache *c, struct dm_target *ti, unsigned int argc, char **argv)
{
	if (!argc || (argc == 1 && !strcmp(argv[0], "private")))
		return 0;
	if (argc != 2 || strcmp(argv[0], "shared")) {
		ti->error = "Pool must be private, or shared with a serial number";
		return -EINVAL;
	}
	if (!*argv[1] || strscpy(c->serial, argv[1], sizeof(c->serial)) < 0) {
		ti->error = "Serial number of a disk must have 1 to 20 characters";
		return -EINVAL;
	}
	c->shared = true;
	return 0;
}

/*
 * Where the target begins on the disk, of which the host knows the blocks: the lower
 * device must be the disk itself or a partition, without a mapping in between.
 */
static int find_first_block(struct hcache *c, struct dm_target *ti)
{
	struct block_device *lower = c->lower->bdev;
	sector_t start = get_start_sect(lower) + c->lower_start;

	if ((dm_table_get_mode(ti->table) & TABLE_WRITE) && !bdev_read_only(lower)) {
		ti->error = "Shared pools are for read-only tables or devices";
		return -EINVAL;
	}
	if (lower->bd_disk->fops != plimsoll_control_bdev()->bd_disk->fops) {
		ti->error = "Shared pools are for a disk of the host or a partition of one";
		return -EINVAL;
	}
	if (start % BLOCK_SECTORS) {
		ti->error = "Shared pools are for targets that begin with a block of the disk";
		return -EINVAL;
	}
	c->first_block = start / BLOCK_SECTORS;
	return 0;
}

static int enlist(struct hcache *c)
{
	int r = -ENOSPC;
	unsigned int i;

	mutex_lock(&targets_lock);
	for (i = 1; i <= FRAMES_TARGETS_MAX; i++) {
		if (!targets[i]) {
			c->number = i;
			targets[i] = c;
			r = 0;
			break;
		}
	}
	mutex_unlock(&targets_lock);
	return r;
}

/* For a target without bios. */
static void drop_reserves(struct hcache *c)
{
	if (c->workqueue)
		destroy_workqueue(c->workqueue);
	bioset_exit(&c->lower_bios);
}

static int hcache_ctr(struct dm_target *ti, unsigned int argc, char **argv)
{
	struct hcache *c;
	int r;

	if (argc < 2) {
		ti->error = "Lower device and its start are missing";
		return -EINVAL;
	}
	c = kzalloc(sizeof(*c), GFP_KERNEL);
	if (!c) {
		ti->error = "Out of memory";
		return -ENOMEM;
	}
	kref_init(&c->kref);
	spin_lock_init(&c->lock);
	INIT_LIST_HEAD(&c->gets);
	INIT_DELAYED_WORK(&c->open_work, open_pool);
	INIT_DELAYED_WORK(&c->timeout_work, give_up_gets);
	init_irq_work(&c->disabled_message, tell_disabled);
	c->blocks = DIV_ROUND_UP(ti->len, BLOCK_SECTORS);

	r = kstrtoull(argv[1], 10, &c->lower_start);
	if (r) {
		ti->error = "Start on the lower device must be a number of sectors";
		goto free;
	}
	r = parse_pool(c, ti, argc - 2, argv + 2);
	if (r)
		goto free;
	r = -EINVAL;
	if (!get_pages_max()) {
		ti->error = "Control disk does not accept requests of more than a page";
		goto free;
	}
	if (c->blocks > PLIMSOLL_BLOCKS_MAX) {
		ti->error = "Target is too large";
		goto free;
	}
	r = dm_set_target_max_io_len(ti, PLIMSOLL_GET_PAGES_MAX * BLOCK_SECTORS);
	if (r)
		goto free;
	r = -ENOMEM;
	c->workqueue = alloc_workqueue("dm_hcache", WQ_MEM_RECLAIM | WQ_HIGHPRI, 0);
	if (!c->workqueue || bioset_init(&c->lower_bios, BIOS_KEPT, 0, 0)) {
		ti->error = "Out of memory for a worker and its bios";
		goto free;
	}
	if (!c->shared) {
		c->maybe = vzalloc(maybe_bytes(c));
		if (!c->maybe) {
			ti->error = "Out of memory for the bitmap of blocks";
			goto free;
		}
	}
	r = dm_get_device(ti, argv[0], dm_table_get_mode(ti->table), &c->lower);
	if (r) {
		ti->error = "Lower device cannot be opened";
		goto free;
	}
	r = c->shared ? find_first_block(c, ti) : 0;
	if (r)
		goto put_device;
	r = enlist(c);
	if (r) {
		ti->error = "Too many targets";
		goto put_device;
	}

	ti->num_flush_bios = 1;
	ti->num_discard_bios = 1;
	ti->num_secure_erase_bios = 1;
	ti->num_write_zeroes_bios = 1;
	ti->per_io_data_size = sizeof(struct hcache_io);
	ti->private = c;

	/* The disk works without a host. */
	queue_delayed_work(system_long_wq, &c->open_work, 0);
	flush_delayed_work(&c->open_work);
	return 0;

put_device:
	dm_put_device(ti, c->lower);
free:
	drop_reserves(c);
	kref_put(&c->kref, hcache_free);
	return r;
}

/* All bios have ended; abandoned gets may still be in flight. */
static void hcache_dtr(struct dm_target *ti)
{
	struct hcache *c = ti->private;
	struct plimsoll_pool pool;

	/* Once no frame is tied to the target, hcache_evicted() is not called for it. */
	frames_range_begin(c->number, 0, PLIMSOLL_BLOCKS_MAX);
	frames_range_end(c->number);
	mutex_lock(&targets_lock);
	targets[c->number] = NULL;
	mutex_unlock(&targets_lock);

	cancel_delayed_work_sync(&c->open_work);
	cancel_delayed_work_sync(&c->timeout_work);
	irq_work_sync(&c->disabled_message);
	pool = pool_of(c);
	if (pool_is_open(pool) && plimsoll_pool_close(pool))
		DMWARN("%s: the host may not have closed pool %u", c->lower->name, pool.number);
	dm_put_device(ti, c->lower);
	drop_reserves(c);
	kref_put(&c->kref, hcache_free);
}

static const char *state_name(struct hcache *c)
{
	if (READ_ONCE(c->disabled))
		return "disabled";
	if (!pool_is_open(pool_of(c)))
		return "closed";
	if (READ_ONCE(c->silent))
		return "silent";
	if (is_failing(c))
		return "failed";
	return "open";
}

/* What the status shows: times are means. */
static u64 shown(struct hcache *c, enum count what)
{
	u64 value = atomic64_read(&c->counts[what]), of = 1;

	if (what == NS_GET)
		of = atomic64_read(&c->counts[REQUESTS]);
	else if (what == NS_PUT)
		of = atomic64_read(&c->counts[PUTS]);
	return of ? value / of : 0;
}

static void hcache_status(struct dm_target *ti, status_type_t type, unsigned int flags,
			  char *result, unsigned int maxlen)
{
	struct hcache *c = ti->private;
	unsigned int i, sz = 0;

	switch (type) {
	case STATUSTYPE_INFO:
		DMEMIT("state %s pool %u", state_name(c), pool_of(c).number);
		for (i = 0; i < COUNTS; i++)
			DMEMIT(" %s %llu", count_names[i], shown(c, i));
		break;
	case STATUSTYPE_TABLE:
		DMEMIT("%s %llu", c->lower->name, (unsigned long long)c->lower_start);
		if (c->shared)
			DMEMIT(" shared %s", c->serial);
		else
			DMEMIT(" private");
		break;
	case STATUSTYPE_IMA:
		DMEMIT_TARGET_NAME_VERSION(ti->type);
		DMEMIT(",lower=%s,start=%llu,shared=%c;", c->lower->name,
		       (unsigned long long)c->lower_start, c->shared ? 'y' : 'n');
		break;
	}
}

static int hcache_message(struct dm_target *ti, unsigned int argc, char **argv,
			  char *result, unsigned int maxlen)
{
	struct hcache *c = ti->private;

	if (argc != 1 || strcasecmp(argv[0], "flush_pool"))
		return -EINVAL;
	/* A page put meanwhile is flushed too; its bit may stay set, which is harmless. */
	clear_maybe(c);
	flush_blocks(c, 0, c->blocks);
	return 0;
}

static int hcache_iterate_devices(struct dm_target *ti, iterate_devices_callout_fn fn,
				  void *data)
{
	struct hcache *c = ti->private;

	return fn(ti, c->lower, c->lower_start, ti->len, data);
}

static struct target_type hcache_type = {
	.name = "hcache",
	.version = { 1, 0, 0 },
	.module = THIS_MODULE,
	.ctr = hcache_ctr,
	.dtr = hcache_dtr,
	.map = hcache_map,
	.end_io = hcache_end_io,
	.status = hcache_status,
	.message = hcache_message,
	.iterate_devices = hcache_iterate_devices,
};

static void frame_dropped(struct page *page, bool uptodate)
{
	if (READ_ONCE(put_dropped))
		frames_evicted(page, uptodate);
	else
		frames_forget(page_to_pfn(page));
}

static struct plimsoll_client client = {
	.evicted = frames_evicted,
	.dropped = frame_dropped,
	.removed = frames_forget,
	.added = frames_forget,
	.migrated = frames_migrated,
	.lost = frames_forget_all,
	.reattached = hcache_reattached,
};

static void free_bounce(void)
{
	while (bounce_count)
		__free_page(bounce[--bounce_count]);
	kvfree(bounce);
}

static int fill_bounce(void)
{
	struct page *page;

	bounce = kvcalloc(bounce_pages, sizeof(*bounce), GFP_KERNEL);
	if (!bounce)
		return -ENOMEM;
	while (bounce_count < bounce_pages) {
		page = alloc_page(GFP_KERNEL);
		if (!page) {
			free_bounce();
			return -ENOMEM;
		}
		bounce[bounce_count++] = page;
	}
	return 0;
}

static int __init hcache_init(void)
{
	int r;

	r = frames_init();
	if (r)
		return r;
	r = fill_bounce();
	if (r)
		goto exit_frames;
	r = -ENOMEM;
	gets = mempool_create_kmalloc_pool(GETS_KEPT, sizeof(struct hcache_get));
	if (!gets)
		goto free_bounce;
	plimsoll_register(&client);
	r = dm_register_target(&hcache_type);
	if (r)
		goto unregister_client;
	return 0;

unregister_client:
	plimsoll_unregister(&client);
	mempool_destroy(gets);
free_bounce:
	free_bounce();
exit_frames:
	frames_exit();
	return r;
}

/* No target and no get is left: an abandoned get holds the module. */
static void __exit hcache_exit(void)
{
	dm_unregister_target(&hcache_type);
	plimsoll_unregister(&client);
	/*
	 * Wait until the code that dropped the last reference has left the module:
	 * in a task, which may be preempted before it returns, and in an interrupt.
	 */
	synchronize_rcu_tasks();
	synchronize_rcu();
	mempool_destroy(gets);
	free_bounce();
	frames_exit();
}

module_init(hcache_init);
module_exit(hcache_exit);
MODULE_DESCRIPTION("Device-mapper target with a second-chance cache in the host");
MODULE_LICENSE("GPL");
