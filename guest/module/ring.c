// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * The ring of records, in ordinary RAM (layout: plimsoll_protocol.h).
 *
 * Posting never waits: a record without room increments `lost`, except a PUT,
 * which the host can do without. Words written by the host are only compared;
 * a wrong tail at worst makes the ring appear full.
 *
 * Pages leave the page cache with its lock held and interrupts off, so nothing
 * may sleep for a slot. ring_wait() polls instead, before any lock of ours is
 * taken: at most `put_wait_us` at once and, on each CPU, for no more than half of
 * the time; and not again after a wait in vain until the host has taken a record.
 * So a slow host at most doubles the time of a burst, and one that is gone costs
 * one wait.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/export.h>
#include <linux/gfp.h>
#include <linux/highmem.h>
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/percpu.h>
#include <linux/processor.h>
#include <linux/random.h>
#include <linux/seq_file.h>
#include <linux/sizes.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/timekeeping.h>

#include "internal.h"

#define SAMPLE_EVERY	64	/* records, a power of two */

/* The contents of a record. */
struct event {
	u16 type;
	u16 flags;
	u32 count;
	u64 page;
	u64 other;
	struct page *contents;	/* or NULL */
};

static struct plimsoll_ring *shared;
static void *chunks[PLIMSOLL_CHUNKS_MAX];
static u32 chunk_shift;
static u32 chunk_count;
static u32 record_count;
static u32 slot_count;
static u64 slots_at;		/* bytes into the chunks */

/* Private copies of the words we write: the host cannot change them. */
static u64 head;
static u64 slot_head;
static u64 lost;
static u32 generation;
static bool closed;
static bool kick_asked;
static u32 since_fault;
static DEFINE_RAW_SPINLOCK(ring_lock);	/* guards the seven above */

/* The host's tail when a wait was in vain; no position of a record otherwise. */
static u64 stuck_tail = U64_MAX;

/*
 * How long this CPU may wait, in ns, as of the end of its last wait. It grows with
 * the time, up to put_wait_us.
 */
struct wait_budget {
	u64 left_ns;
	u64 ended_ns;
};
static DEFINE_PER_CPU(struct wait_budget, budgets);

static void free_chunks(void)
{
	while (chunk_count)
		free_pages((unsigned long)chunks[--chunk_count], chunk_shift - PAGE_SHIFT);
}

/* -ENOMEM: memory may be fragmented, retry with smaller chunks. */
static int allocate_chunks(u64 bytes)
{
	u32 order = chunk_shift - PAGE_SHIFT;
	u64 wanted = (bytes + (1ULL << chunk_shift) - 1) >> chunk_shift;

	if (wanted > PLIMSOLL_CHUNKS_MAX)
		return -EINVAL;
	for (chunk_count = 0; chunk_count < wanted; chunk_count++) {
		gfp_t gfp = GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN | __GFP_RETRY_MAYFAIL;

		chunks[chunk_count] = (void *)__get_free_pages(gfp, order);
		if (!chunks[chunk_count]) {
			free_chunks();
			return -ENOMEM;
		}
	}
	return 0;
}

int ring_create(u32 records, u32 slots)
{
	u64 bytes;
	u32 i;
	int rc;

	record_count = records;
	slot_count = slots;
	slots_at = PAGE_ALIGN((u64)records * sizeof(struct plimsoll_record));
	bytes = slots_at + (u64)slots * PAGE_SIZE;

	shared = (void *)get_zeroed_page(GFP_KERNEL);
	if (!shared)
		return -ENOMEM;
	chunk_shift = order_base_2(DIV_ROUND_UP_ULL(bytes, PLIMSOLL_CHUNKS_MAX));
	chunk_shift = max_t(u32, chunk_shift, ilog2(SZ_64K));
	while ((rc = allocate_chunks(bytes)) == -ENOMEM && chunk_shift > PAGE_SHIFT)
		chunk_shift--;
	if (rc) {
		pr_err("out of memory for a ring of %llu KiB\n", bytes >> 10);
		free_page((unsigned long)shared);
		return -ENOMEM;
	}

	shared->version = cpu_to_le32(PLIMSOLL_VERSION);
	shared->chunk_bytes = cpu_to_le32(1U << chunk_shift);
	shared->records = cpu_to_le32(records);
	shared->slots = cpu_to_le32(slots);
	shared->chunks = cpu_to_le32(chunk_count);
	shared->flags = cpu_to_le32(lazy ? PLIMSOLL_LAZY : 0);
	/* Never 0, the value of `attached` without a host. */
	shared->nonce = cpu_to_le64(get_random_u64() | 1);
	for (i = 0; i < chunk_count; i++)
		shared->chunk[i] = cpu_to_le64(virt_to_phys(chunks[i]));
	ring_set_memory(totalram_pages());
	shared->magic = cpu_to_le64(PLIMSOLL_RING_MAGIC);
	return 0;
}

void ring_free(bool host_may_use_it)
{
	if (host_may_use_it) {
		pr_warn("the host did not confirm the end of the ring: its %u KiB stay allocated\n",
			((chunk_count << chunk_shift) + PLIMSOLL_PAGE) >> 10);
		return;
	}
	free_chunks();
	free_page((unsigned long)shared);
}

u64 ring_address(void)
{
	return virt_to_phys(shared);
}

u64 ring_nonce(void)
{
	return le64_to_cpu(shared->nonce);
}

/* Neither records nor slots cross chunks: all sizes are powers of two. */
static void *ring_at(u64 offset)
{
	return chunks[offset >> chunk_shift] + (offset & ((1ULL << chunk_shift) - 1));
}

static bool has_room(void)
{
	u64 slots_used = READ_ONCE(slot_head) - le64_to_cpu(smp_load_acquire(&shared->slot_tail));

	return READ_ONCE(head) - ring_tail() < record_count && slots_used < slot_count;
}

void ring_wait(void)
{
	u64 limit_ns = (u64)min(READ_ONCE(put_wait_us), PUT_WAIT_US_MAX) * NSEC_PER_USEC;
	u64 tail, begun_ns, spent_ns;
	struct wait_budget *budget;
	bool room;

	/* Without slots no content ever finds room. */
	if (likely(has_room()) || !limit_ns || !slot_count)
		return;
	tail = ring_tail();
	if (tail == READ_ONCE(stuck_tail) || READ_ONCE(closed) || !ring_attached())
		return;
	budget = this_cpu_ptr(&budgets);
	begun_ns = ktime_get_mono_fast_ns();
	budget->left_ns = min(limit_ns, budget->left_ns + (begun_ns - budget->ended_ns));
	do {
		cpu_relax();
		room = has_room();
		spent_ns = ktime_get_mono_fast_ns() - begun_ns;
	} while (!room && spent_ns < budget->left_ns);
	budget->left_ns -= min(spent_ns, budget->left_ns);
	budget->ended_ns = begun_ns + spent_ns;
	count(COUNT_WAITS);
	count_many(COUNT_NS_WAITED, spent_ns);
	if (!room) {
		count(COUNT_WAITS_IN_VAIN);
		/* Not if the host took records that others have replaced. */
		if (ring_tail() == tail)
			WRITE_ONCE(stuck_tail, tail);
	}
}

void plimsoll_wait_put(void)
{
	ring_wait();
}
EXPORT_SYMBOL_GPL(plimsoll_wait_put);

static void publish_lost(u64 events)
{
	lost += events;
	WRITE_ONCE(shared->lost, cpu_to_le64(lost));
}

/* Whether fault_drop_every selects this record to be dropped. */
static bool is_faulty(u16 type)
{
	u32 every = READ_ONCE(fault_drop_every);

	if (!every || type == PLIMSOLL_PUT || type == PLIMSOLL_FLUSH || ++since_fault < every)
		return false;
	since_fault = 0;
	count(COUNT_FAULTS);
	return true;
}

static void count_record(const struct event *event, bool copied)
{
	count(COUNT_RECORDS);
	if (copied)
		count(COUNT_COPIES);
	switch (event->type) {
	case PLIMSOLL_EVICT:
		count(event->flags & PLIMSOLL_SWAP ? COUNT_EVICTED_SWAP : COUNT_EVICTED);
		break;
	case PLIMSOLL_RELEASE:
		count(COUNT_RELEASED);
		break;
	case PLIMSOLL_ADD:
		count(COUNT_ADDED);
		break;
	case PLIMSOLL_MIGRATE:
		count(COUNT_MIGRATED);
		break;
	case PLIMSOLL_PUT:
		count(COUNT_PUT);
		break;
	case PLIMSOLL_FLUSH:
		count(COUNT_FLUSHED);
		break;
	}
}

/* Copies contents into the next slot and returns its number. */
static u64 fill_slot(struct page *contents)
{
	u64 offset = slots_at + (slot_head & (slot_count - 1)) * PAGE_SIZE;

	memcpy_from_page(ring_at(offset), contents, 0, PAGE_SIZE);
	WRITE_ONCE(shared->slot_head, cpu_to_le64(slot_head + 1));
	WRITE_ONCE(slot_head, slot_head + 1);
	return slot_head - 1;
}

/* With ring_lock held. Returns whether a record is in the ring. */
static bool post_locked(struct event event)
{
	u64 records_used = head - le64_to_cpu(READ_ONCE(shared->tail));
	u64 slots_used = slot_head - le64_to_cpu(smp_load_acquire(&shared->slot_tail));
	bool sampled = !(head & (SAMPLE_EVERY - 1));
	struct page *contents = event.contents;
	u64 begun_ns = 0, copied_ns = 0, slot = 0;
	struct plimsoll_record *record;
	bool crowded;

	if (closed || is_faulty(event.type))
		return false;
	crowded = records_used > record_count / 2 || (contents && slots_used > slot_count / 2);
	if (crowded && !kick_asked) {
		kick_asked = true;
		host_kick();
	}
	if (event.type == PLIMSOLL_PUT &&
	    (records_used >= record_count || slots_used >= slot_count)) {
		count(COUNT_NO_SLOT);
		return false;
	}
	if (records_used >= record_count) {
		count(COUNT_RING_FULL);
		publish_lost(1);
		return false;
	}
	if (sampled)
		begun_ns = ktime_get_mono_fast_ns();
	if (contents && slots_used >= slot_count) {
		count(COUNT_NO_SLOT);
		contents = NULL;
		event.flags = 0;
		event.type = PLIMSOLL_RELEASE;
	}
	if (contents) {
		slot = fill_slot(contents);
		event.flags |= PLIMSOLL_DATA;
		if (sampled) {
			copied_ns = ktime_get_mono_fast_ns();
			count(COUNT_SAMPLES_COPY);
			count_many(COUNT_NS_COPY, copied_ns - begun_ns);
			begun_ns = copied_ns;
		}
	}
	record = ring_at((head & (record_count - 1)) * sizeof(*record));
	record->type = cpu_to_le16(event.type);
	record->flags = cpu_to_le16(event.flags);
	record->count = cpu_to_le32(event.count);
	record->page = cpu_to_le64(event.page);
	record->other = cpu_to_le64(event.other);
	record->slot = cpu_to_le64(slot);
	WRITE_ONCE(head, head + 1);
	smp_store_release(&shared->head, cpu_to_le64(head));
	count_record(&event, contents);
	if (sampled) {
		count(COUNT_SAMPLES_RECORD);
		count_many(COUNT_NS_RECORD, ktime_get_mono_fast_ns() - begun_ns);
	}
	return true;
}

void ring_post(u16 type, u16 flags, u64 pfn, u64 other, struct page *page)
{
	struct event event = {
		.type = type,
		.flags = flags,
		.page = pfn,
		.other = other,
		.contents = page,
	};
	unsigned long irqs;

	raw_spin_lock_irqsave(&ring_lock, irqs);
	post_locked(event);
	raw_spin_unlock_irqrestore(&ring_lock, irqs);
}

/* Drops records for pools of an older generation: the next host has other pools. */
static bool post_for_pool(struct plimsoll_pool pool, struct event event)
{
	unsigned long irqs;
	bool posted = false;

	events_check_missed();
	event.other = pool.number;
	raw_spin_lock_irqsave(&ring_lock, irqs);
	if (pool.generation == generation)
		posted = post_locked(event);
	else
		count(COUNT_STALE_POOL);
	raw_spin_unlock_irqrestore(&ring_lock, irqs);
	return posted;
}

bool plimsoll_post_put(struct plimsoll_pool pool, u64 block, struct page *page)
{
	return post_for_pool(pool, (struct event) {
		.type = PLIMSOLL_PUT,
		.page = block,
		.contents = page,
	});
}
EXPORT_SYMBOL_GPL(plimsoll_post_put);

void plimsoll_post_flush(struct plimsoll_pool pool, u64 block, u32 blocks)
{
	post_for_pool(pool, (struct event) {
		.type = PLIMSOLL_FLUSH,
		.page = block,
		.count = blocks,
	});
}
EXPORT_SYMBOL_GPL(plimsoll_post_flush);

u32 plimsoll_generation(void)
{
	return READ_ONCE(generation);
}
EXPORT_SYMBOL_GPL(plimsoll_generation);

void ring_next_generation(void)
{
	unsigned long irqs;

	raw_spin_lock_irqsave(&ring_lock, irqs);
	WRITE_ONCE(generation, generation + 1);
	raw_spin_unlock_irqrestore(&ring_lock, irqs);
}

void ring_lose(u64 events)
{
	unsigned long irqs;

	raw_spin_lock_irqsave(&ring_lock, irqs);
	publish_lost(events);
	raw_spin_unlock_irqrestore(&ring_lock, irqs);
}

void ring_close(void)
{
	unsigned long irqs;

	raw_spin_lock_irqsave(&ring_lock, irqs);
	WRITE_ONCE(closed, true);
	WRITE_ONCE(generation, generation + 1);
	raw_spin_unlock_irqrestore(&ring_lock, irqs);
}

void ring_kicked(void)
{
	unsigned long irqs;

	raw_spin_lock_irqsave(&ring_lock, irqs);
	kick_asked = false;
	raw_spin_unlock_irqrestore(&ring_lock, irqs);
}

void ring_set_memory(u64 pages)
{
	WRITE_ONCE(shared->memory_pages, cpu_to_le64(pages));
}

bool ring_attached(void)
{
	return le64_to_cpu(READ_ONCE(shared->attached)) == ring_nonce();
}

u64 ring_tail(void)
{
	return le64_to_cpu(READ_ONCE(shared->tail));
}

void ring_post_nothing(void)
{
	ring_post(PLIMSOLL_RELEASE, 0, ring_address() >> PAGE_SHIFT, 0, NULL);
}

bool ring_empty(void)
{
	return ring_tail() == READ_ONCE(head);
}

void ring_show(struct seq_file *file)
{
	seq_printf(file, "address 0x%llx\n", ring_address());
	seq_printf(file, "nonce 0x%llx\n", ring_nonce());
	seq_printf(file, "attached %d\n", ring_attached());
	seq_printf(file, "generation %u\n", plimsoll_generation());
	seq_printf(file, "records %u\n", record_count);
	seq_printf(file, "slots %u\n", slot_count);
	seq_printf(file, "chunks %u\n", chunk_count);
	seq_printf(file, "chunk_bytes %u\n", 1U << chunk_shift);
	seq_printf(file, "head %llu\n", READ_ONCE(head));
	seq_printf(file, "tail %llu\n", ring_tail());
	seq_printf(file, "slot_head %llu\n", READ_ONCE(slot_head));
	seq_printf(file, "slot_tail %llu\n", le64_to_cpu(READ_ONCE(shared->slot_tail)));
	seq_printf(file, "lost %llu\n", READ_ONCE(lost));
	seq_printf(file, "memory_pages %llu\n", le64_to_cpu(shared->memory_pages));
}
