// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * The model: accesses of the guest in, records out.
 *
 * A TLB is sets of entries in the order of their use. What was used last in its
 * set needs nothing at all: each set has its last page in `struct recent`, which
 * is all that most accesses look at. The rest (another page of the set, a
 * miss, the first write to a page that was only read) is slow_access().
 *
 * Per-vCPU state is touched by its own vCPU alone, without a lock. The flags
 * of pages, the ring and the numbers told are under `lock`, taken for a walk, for
 * a page that enters or leaves the filter, and at the end of an interval.
 *
 * An interval's end flushes all TLBs and clears all flags at once: keys of entries
 * and the words of flags hold the epoch in which they were made, and a new one begins.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "pagelog.h"

#define NO_KEY			UINT64_MAX
/* Epochs in a key: above all page numbers, and never all ones. */
#define EPOCH_SHIFT		52
#define EPOCHS			((1u << 12) - 1)
/* Minimum instructions between two reads of the other vCPUs' counters. */
#define LOOK_MIN		1000
#define FRAME_MAX		UINT32_MAX

/* What a place of fetching is made of: see model_fetch_place(). */
#define FETCH_PAGE_BITS		36
#define FETCH_RAM_PAGES_MAX	(1u << (64 - FETCH_PAGE_BITS))

#define NO_SLOT			UINT16_MAX

struct entry {
	u64 key;		/* virtual page, and the epoch; or NO_KEY */
	u32 page;		/* of RAM; with large pages the one that missed */
	bool dirty;
	bool global;
};

struct tlb {
	struct entry *entries;	/* of each set, in the order of their use */
	u64 set_mask;
	u32 ways;
};

/* The entry of a set that was used last: nothing changes when it is used again. */
struct recent {
	u64 read;		/* its key */
	u64 write;		/* its key, if it is dirty */
	u64 *stamp;		/* when its page in the filter was used */
	u64 unused;
};

/* The pages used last, found by their number, with the time of their use. */
struct filter {
	u32 *pages;
	u64 *stamps;
	u16 *next;		/* in the chain of the same hash */
	u16 *chains;
	u32 chain_mask;
	u32 used;
};

struct vcpu {
	struct recent *recent;
	u64 uses;		/* accesses, and with references also fetches */
	u64 fetch_key;
	u32 fetch_page;
	u64 *fetch_stamp;

	u64 epoch;		/* seen by this vCPU */
	u64 run;
	u64 look_at;		/* instructions at which the interval may be over */
	unsigned int number;
	bool present;
	struct tlb data;
	struct tlb second;
	struct tlb fetch;
	struct filter filter;
	u64 no_stamp;

	/* Under the lock. */
	u64 told_instructions;
	u64 told_accesses;

	/* For the summary. */
	u64 walks;
	u64 io;
	u64 outside;
	u64 table_changes;
	u64 flushes;
	u64 page_flushes;
} __attribute__((aligned(512)));

static struct vcpu vcpus[VCPUS_MAX];
static u32 vcpu_count;

/* Read at every access, written at the end of an interval. */
static u64 salt __attribute__((aligned(64)));
static u64 set_mask;
static u32 page_shift;
static u64 epoch = 1;
static u64 run;			/* stretches between marks, for who resets his filter */
static bool recording;

static pthread_mutex_t lock __attribute__((aligned(64))) = PTHREAD_MUTEX_INITIALIZER;
static u32 *flags;		/* of each nested page: epoch, dirty, accessed */
static u64 interval;
static u64 interval_ends_at;	/* instructions of all vCPUs */
static bool ended;

#define ACCESSED	1u
#define DIRTY		2u
#define FLAGS_SHIFT	2

static u64 load(const u64 *word)
{
	return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static void store(u64 *word, u64 value)
{
	__atomic_store_n(word, value, __ATOMIC_RELAXED);
}

static u64 salt_of(u64 of_epoch)
{
	return of_epoch % EPOCHS << EPOCH_SHIFT;
}

static u64 accesses(const struct vcpu *c)
{
	return load(&c->uses);
}

/* Frame number of a RAM page: RAM above the hole begins at 4 GiB. */
static u64 frame_of(u32 page)
{
	u64 below = options.below_4g_bytes >> PAGE_SHIFT;

	return page < below ? page : page - below + (GIB_4 >> PAGE_SHIFT);
}

/* Begins an epoch: all TLBs are empty and all flags clear. */
static void new_epoch(void)
{
	store(&epoch, epoch + 1);
	store(&salt, salt_of(epoch));
}

/*
 * TLBs
 */

static void tlb_flush(struct tlb *tlb, bool all)
{
	struct entry *end = tlb->entries + (tlb->set_mask + 1) * tlb->ways;

	if (!tlb->ways)
		return;
	for (struct entry *entry = tlb->entries; entry < end; entry++) {
		if (all || !entry->global)
			entry->key = NO_KEY;
	}
}

static int tlb_start(struct tlb *tlb, struct tlb_size size)
{
	if (!size.entries)
		return 0;
	tlb->ways = size.ways;
	tlb->set_mask = size.entries / size.ways - 1;
	tlb->entries = calloc(size.entries, sizeof(*tlb->entries));
	if (!tlb->entries)
		return -1;
	tlb_flush(tlb, true);
	return 0;
}

static struct entry *set_of(const struct tlb *tlb, u64 key)
{
	return tlb->entries + (key & tlb->set_mask) * tlb->ways;
}

static struct entry *to_front(struct entry *set, u32 way, struct entry entry)
{
	for (; way; way--)
		set[way] = set[way - 1];
	set[0] = entry;
	return set;
}

/* Finds an entry and makes it the one used last. */
static struct entry *tlb_use(struct tlb *tlb, u64 key)
{
	struct entry *set = set_of(tlb, key);

	for (u32 way = 0; way < tlb->ways; way++) {
		if (set[way].key == key)
			return to_front(set, way, set[way]);
	}
	return NULL;
}

/* Replaces an empty entry, or the least recently used one. */
static struct entry *tlb_fill(struct tlb *tlb, struct entry entry)
{
	struct entry *set = set_of(tlb, entry.key);
	u64 mask = (u64)EPOCHS << EPOCH_SHIFT;
	u32 way = 0;

	if (!tlb->ways)
		return NULL;
	while (way < tlb->ways - 1 && set[way].key != NO_KEY &&
	       (set[way].key & mask) == (entry.key & mask))
		way++;
	return to_front(set, way, entry);
}

static void tlb_drop(struct tlb *tlb, u64 key)
{
	struct entry *entry = tlb_use(tlb, key);

	if (entry)
		entry->key = NO_KEY;
}

static void forget_recent(struct vcpu *c)
{
	for (u64 set = 0; set <= set_mask; set++)
		c->recent[set].read = c->recent[set].write = NO_KEY;
	c->fetch_key = NO_KEY;
}

/*
 * Records
 */

static void put_state(struct vcpu *c)
{
	u64 instructions = api_instructions(c->number);
	u64 done = accesses(c);

	/* Of a vCPU that runs, the two parts are not read at once. */
	if (done < c->told_accesses)
		done = c->told_accesses;
	ring_put(KIND(RECORD_CLOCK, c->number) | (instructions & COUNT_MASK));
	ring_put(KIND(RECORD_ACCESSES, c->number) |
		 ((done - c->told_accesses) & COUNT_MASK));
	c->told_instructions = instructions;
	c->told_accesses = done;
}

static void put_states(void)
{
	for (u32 i = 0; i < vcpu_count; i++) {
		if (vcpus[i].present)
			put_state(&vcpus[i]);
	}
}

static u64 all_instructions(void)
{
	u64 sum = 0;

	for (u32 i = 0; i < vcpu_count; i++) {
		if (vcpus[i].present)
			sum += api_instructions(i);
	}
	return sum;
}

/* Ends the intervals that are over. */
static void end_intervals(u64 instructions)
{
	if (!recording || !options.interval_instructions)
		return;
	while (instructions >= interval_ends_at) {
		put_states();
		ring_put(KIND(RECORD_INTERVAL, 0) | (interval++ & COUNT_MASK));
		ring_publish();
		interval_ends_at += options.interval_instructions;
		new_epoch();
	}
}

/* Checks whether the interval is over, and sets the time of the next check. */
static void look(struct vcpu *c)
{
	u64 all, left;

	c->look_at = UINT64_MAX;
	pthread_mutex_lock(&lock);
	if (recording && options.interval_instructions) {
		all = all_instructions();
		end_intervals(all);
		left = (interval_ends_at - all) / vcpu_count;
		if (vcpu_count > 1 && left < LOOK_MIN)
			left = LOOK_MIN;
		c->look_at = api_instructions(c->number) + left;
	}
	pthread_mutex_unlock(&lock);
}

/* Applies to this vCPU an epoch that another one has begun. */
static void catch_up(struct vcpu *c)
{
	u64 now = load(&run);

	if (c->run != now) {
		c->run = now;
		c->filter.used = 0;
		memset(c->filter.chains, 0xff,
		       (c->filter.chain_mask + 1) * sizeof(*c->filter.chains));
		c->look_at = 0;
	}
	now = load(&epoch);
	if (c->epoch != now) {
		/* Keys of an epoch come again after EPOCHS of them. */
		if (c->epoch / EPOCHS != now / EPOCHS) {
			tlb_flush(&c->data, true);
			tlb_flush(&c->second, true);
			tlb_flush(&c->fetch, true);
		}
		c->epoch = now;
		forget_recent(c);
	}
}

static void before_slow(struct vcpu *c)
{
	if (c->run != load(&run))
		catch_up(c);
	if (api_instructions(c->number) >= c->look_at)
		look(c);
	if (c->epoch != load(&epoch))
		catch_up(c);
}

/* Walks the page tables: sets the flags of a page, and records the walk. */
static void walk(struct vcpu *c, u32 page, bool write, bool fetch)
{
	u32 *word = &flags[page >> (page_shift - PAGE_SHIFT)];
	u32 now = ACCESSED | (write ? DIRTY : 0);
	u64 record, instructions, step;
	u32 before, era;

	pthread_mutex_lock(&lock);
	era = (u32)epoch << FLAGS_SHIFT;
	before = (*word & ~(ACCESSED | DIRTY)) == era ? *word & (ACCESSED | DIRTY) : 0;
	*word = era | before | now;
	c->walks++;
	if (recording && options.walks) {
		instructions = api_instructions(c->number);
		step = instructions - c->told_instructions;
		if (step > WALK_STEP_MAX) {
			ring_put(KIND(RECORD_CLOCK, c->number) |
				 (instructions & COUNT_MASK));
			step = 0;
		}
		c->told_instructions = instructions;
		record = KIND(RECORD_WALK, c->number) | frame_of(page) |
			 step << WALK_STEP_SHIFT;
		if (write)
			record |= BY_WRITE;
		if (fetch)
			record |= WALK_FETCH;
		if (now & ~before & ACCESSED)
			record |= WALK_SETS_ACCESSED;
		if (now & ~before & DIRTY)
			record |= WALK_SETS_DIRTY;
		ring_put(record);
	}
	pthread_mutex_unlock(&lock);
}

/*
 * The filter
 */

/* Records that a page enters the filter and which one leaves it, or NO_PAGE. */
static void put_reference(struct vcpu *c, u32 page, bool write, u32 leaves)
{
	pthread_mutex_lock(&lock);
	/* Pages that entered before this stretch are not part of its references. */
	if (recording && c->run == run) {
		ring_put(KIND(RECORD_ENTER, c->number) | frame_of(page) |
			 (write ? BY_WRITE : 0));
		if (leaves != NO_PAGE)
			ring_put(KIND(RECORD_LEAVE, c->number) | frame_of(leaves));
	}
	pthread_mutex_unlock(&lock);
}

static u16 *chain_of(struct filter *filter, u32 page)
{
	return &filter->chains[(page * 0x9e3779b1u >> 16) & filter->chain_mask];
}

/* Takes the page out that was not used for longest; returns its slot. */
static u16 filter_take(struct vcpu *c)
{
	struct filter *filter = &c->filter;
	u16 *link;
	u16 oldest = 0;

	for (u16 slot = 1; slot < filter->used; slot++) {
		if (filter->stamps[slot] < filter->stamps[oldest])
			oldest = slot;
	}
	for (link = chain_of(filter, filter->pages[oldest]); *link != oldest;
	     link = &filter->next[*link])
		;
	*link = filter->next[oldest];
	for (u64 set = 0; set <= set_mask; set++) {
		if (c->recent[set].stamp == &filter->stamps[oldest])
			c->recent[set].read = c->recent[set].write = NO_KEY;
	}
	if (c->fetch_stamp == &filter->stamps[oldest])
		c->fetch_key = NO_KEY;
	return oldest;
}

/* A use of a page: returns where the time of its next one goes. */
static u64 *filter_use(struct vcpu *c, u32 page, bool write)
{
	struct filter *filter = &c->filter;
	u16 *chain = chain_of(filter, page);
	u32 leaves = NO_PAGE;
	u16 slot;

	for (slot = *chain; slot != NO_SLOT; slot = filter->next[slot]) {
		if (filter->pages[slot] == page) {
			filter->stamps[slot] = c->uses;
			return &filter->stamps[slot];
		}
	}
	if (filter->used < options.filter_pages) {
		slot = filter->used++;
	} else {
		slot = filter_take(c);
		leaves = filter->pages[slot];
	}
	filter->pages[slot] = page;
	filter->stamps[slot] = c->uses;
	filter->next[slot] = *chain;
	*chain = slot;
	put_reference(c, page, write, leaves);
	return &filter->stamps[slot];
}

static int filter_start(struct filter *filter)
{
	u32 pages = options.references ? options.filter_pages : 0;
	u32 chains = 1;

	while (chains < 4 * pages)
		chains *= 2;
	filter->chain_mask = chains - 1;
	filter->chains = malloc(chains * sizeof(*filter->chains));
	filter->pages = calloc(pages + 1, sizeof(*filter->pages));
	filter->stamps = calloc(pages + 1, sizeof(*filter->stamps));
	filter->next = calloc(pages + 1, sizeof(*filter->next));
	if (!filter->chains || !filter->pages || !filter->stamps || !filter->next)
		return -1;
	memset(filter->chains, 0xff, chains * sizeof(*filter->chains));
	return 0;
}

/*
 * Accesses
 */

/* The page of RAM that was just accessed, or NO_PAGE, which is counted. */
static u32 page_of(struct vcpu *c, qemu_plugin_meminfo_t info, u64 address)
{
	const struct qemu_plugin_hwaddr *place = qemu_plugin_get_hwaddr(info, address);
	u32 page;

	if (!place || qemu_plugin_hwaddr_is_io(place)) {
		c->io++;
		return NO_PAGE;
	}
	page = api_ram_page(qemu_plugin_hwaddr_phys_addr(place));
	if (page == NO_PAGE)
		c->outside++;
	return page;
}

/* Finds the entry of a page in either TLB, and brings it into the first. */
static struct entry *cached(struct vcpu *c, u64 key)
{
	struct entry *entry = tlb_use(&c->data, key);
	const struct entry *second;

	if (entry)
		return entry;
	second = tlb_use(&c->second, key);
	return second ? tlb_fill(&c->data, *second) : NULL;
}

/* Stores the result of a walk in both TLBs, replacing older entries of the page. */
static struct entry *fill(struct vcpu *c, struct entry new)
{
	struct entry *entry = tlb_use(&c->second, new.key);

	if (entry)
		*entry = new;
	else
		tlb_fill(&c->second, new);
	entry = tlb_use(&c->data, new.key);
	if (!entry)
		return tlb_fill(&c->data, new);
	*entry = new;
	return entry;
}

static __attribute__((noinline)) void slow_access(struct vcpu *c,
						  qemu_plugin_meminfo_t info,
						  u64 address, bool write,
						  bool references)
{
	struct entry new = { .dirty = write, .global = address >> 63 };
	struct recent *recent;
	struct entry *entry;
	u64 *stamp = &c->no_stamp;

	before_slow(c);
	new.key = (address >> page_shift) ^ salt_of(c->epoch);
	recent = &c->recent[new.key & set_mask];
	entry = cached(c, new.key);
	if (entry && (entry->dirty || !write)) {
		if (references)
			stamp = filter_use(c, entry->page, write);
	} else {
		/* An entry of a large page does not contain the 4 KiB frame accessed now. */
		new.page = entry && page_shift == PAGE_SHIFT ?
				   entry->page : page_of(c, info, address);
		if (new.page == NO_PAGE) {
			recent->read = recent->write = NO_KEY;
			return;
		}
		if (references)
			stamp = filter_use(c, new.page, write);
		walk(c, new.page, write, false);
		entry = fill(c, new);
	}
	/* Only now: the page that left the filter may have been this set's. */
	recent->stamp = stamp;
	recent->read = new.key;
	recent->write = entry->dirty ? new.key : NO_KEY;
}

/*
 * Reads and writes come together: QEMU 7.2 confuses the two when only one is requested of
 * them. Which one it is matters only where a page is not dirty.
 */
static inline __attribute__((always_inline)) void
access(unsigned int vcpu, qemu_plugin_meminfo_t info, u64 address, bool references)
{
	struct vcpu *c = &vcpus[vcpu];
	u64 key = (address >> page_shift) ^ load(&salt);
	const struct recent *recent = &c->recent[key & set_mask];
	bool write = false;

	c->uses++;
	if (unlikely(recent->write != key)) {
		write = qemu_plugin_mem_is_store(info);
		if (unlikely(recent->read != key || write)) {
			slow_access(c, info, address, write, references);
			return;
		}
	}
	if (references)
		*recent->stamp = c->uses;
}

/**
 * model_on_access() - The guest has accessed memory.
 * @vcpu:	By this vCPU.
 * @info:	How, for QEMU.
 * @address:	Virtual address of the first byte; a second page is not seen.
 * @data:	Not used.
 */
void model_on_access(unsigned int vcpu, qemu_plugin_meminfo_t info, u64 address,
		     void *data)
{
	access(vcpu, info, address, false);
}

/**
 * model_on_reference() - The guest has accessed memory, and references are recorded.
 * @vcpu:	By this vCPU.
 * @info:	How, for QEMU.
 * @address:	Virtual address of the first byte; a second page is not seen.
 * @data:	Not used.
 */
void model_on_reference(unsigned int vcpu, qemu_plugin_meminfo_t info, u64 address,
			void *data)
{
	access(vcpu, info, address, true);
}

/**
 * model_fetch_place() - Where instructions are fetched, in a pointer's bits.
 * @address:	Virtual address.
 * @page:	Page of RAM.
 *
 * The address keeps 48 bits, so it is exact for page tables of four levels.
 *
 * Return: The argument of model_on_fetch(); NULL if the page number is too large.
 */
void *model_fetch_place(u64 address, u32 page)
{
	if (page >= FETCH_RAM_PAGES_MAX)
		return NULL;
	return (void *)(address << 16 >> (16 + PAGE_SHIFT) |
			(u64)page << FETCH_PAGE_BITS);
}

/**
 * model_on_fetch() - Instructions of a page are about to run.
 * @vcpu:	By this vCPU.
 * @data:	model_fetch_place().
 */
void model_on_fetch(unsigned int vcpu, void *data)
{
	struct vcpu *c = &vcpus[vcpu];
	u64 virtual = (u64)data & ((1ull << FETCH_PAGE_BITS) - 1);
	u64 number = virtual >> (page_shift - PAGE_SHIFT);
	struct entry new = {
		.key = number ^ load(&salt),
		.page = (u64)data >> FETCH_PAGE_BITS,
		.global = virtual >> (FETCH_PAGE_BITS - 1),
	};
	struct entry *entry;

	if (options.references)
		/* A use like others, in the order of all. */
		c->uses++;
	/* A block may serve all addresses that its page is mapped at, and be known by the first of them. */
	if (c->fetch_key == new.key && c->fetch_page == new.page) {
		*c->fetch_stamp = c->uses;
		return;
	}
	before_slow(c);
	new.key = number ^ salt_of(c->epoch);
	c->fetch_stamp = options.references ? filter_use(c, new.page, false) :
					      &c->no_stamp;
	entry = tlb_use(&c->fetch, new.key);
	if (!entry || entry->page != new.page) {
		walk(c, new.page, false, true);
		if (entry)
			*entry = new;
		else
			tlb_fill(&c->fetch, new);
	}
	c->fetch_key = new.key;
	c->fetch_page = new.page;
}

static void flush(struct vcpu *c, bool all)
{
	tlb_flush(&c->data, all);
	tlb_flush(&c->second, all);
	tlb_flush(&c->fetch, all);
	forget_recent(c);
}

/**
 * model_on_new_table() - CR3 is about to be written.
 * @vcpu:	On this vCPU.
 * @data:	Not used.
 */
void model_on_new_table(unsigned int vcpu, void *data)
{
	vcpus[vcpu].table_changes++;
	flush(&vcpus[vcpu], false);
}

/**
 * model_on_flush() - All translations of a vCPU are about to end.
 * @vcpu:	The vCPU.
 * @data:	Not used.
 */
void model_on_flush(unsigned int vcpu, void *data)
{
	vcpus[vcpu].flushes++;
	flush(&vcpus[vcpu], true);
}

/**
 * model_flush_page() - A page's translation is about to end.
 * @vcpu:	On this vCPU.
 * @address:	Any virtual address of the page.
 */
void model_flush_page(unsigned int vcpu, u64 address)
{
	struct vcpu *c = &vcpus[vcpu];
	u64 key = (address >> page_shift) ^ salt_of(c->epoch);
	u64 fetch = (address << 16 >> (16 + page_shift)) ^ salt_of(c->epoch);

	c->page_flushes++;
	tlb_drop(&c->data, key);
	tlb_drop(&c->second, key);
	tlb_drop(&c->fetch, fetch);
	c->recent[key & set_mask].read = c->recent[key & set_mask].write = NO_KEY;
	c->fetch_key = NO_KEY;
}

#define MARK_BEGIN	1
#define MARK_END	2

/* Begins a stretch of records: nothing is cached, accessed or dirty. */
static void begin(void)
{
	recording = true;
	store(&run, run + 1);
	new_epoch();
	interval_ends_at = all_instructions() + options.interval_instructions;
	for (u32 i = 0; i < vcpu_count; i++)
		vcpus[i].told_accesses = accesses(&vcpus[i]);
}

/**
 * model_on_mark() - The guest marks a place in its run.
 * @vcpu:	On this vCPU.
 * @data:	Number of the mark, below 256.
 */
void model_on_mark(unsigned int vcpu, void *data)
{
	u64 id = (u64)data;

	pthread_mutex_lock(&lock);
	if (!ended) {
		end_intervals(all_instructions());
		if (options.marks && id == MARK_BEGIN)
			begin();
		if (recording) {
			put_states();
			ring_put(KIND(RECORD_MARK, vcpu) | id);
			ring_publish();
		}
		if (options.marks && id == MARK_END)
			recording = false;
	}
	pthread_mutex_unlock(&lock);
}

/**
 * model_start() - Make an empty model.
 * @vcpus_wanted:	vCPUs of the machine, at most VCPUS_MAX.
 *
 * Return: 0, or -1 after a complaint.
 */
int model_start(u32 vcpus_wanted)
{
	u64 pages = options.ram_bytes >> PAGE_SHIFT;
	u64 frame_last = frame_of(pages - 1);

	if (frame_last > FRAME_MAX) {
		complain("ram=%llu: its last page is beyond the frames that records can name",
			 (unsigned long long)options.ram_bytes);
		return -1;
	}
	if (options.fetch.entries && pages > FETCH_RAM_PAGES_MAX) {
		complain("itlb: not for more than 1 TiB of RAM");
		return -1;
	}
	page_shift = options.tlb_page_shift;
	set_mask = options.data.entries / options.data.ways - 1;
	salt = salt_of(epoch);
	vcpu_count = vcpus_wanted;
	/* Pages that the guest never uses cost nothing. */
	flags = mmap(NULL, pages * sizeof(*flags), PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (flags == MAP_FAILED) {
		complain("no memory for the flags of %llu pages",
			 (unsigned long long)pages);
		return -1;
	}
	for (u32 i = 0; i < vcpu_count; i++) {
		struct vcpu *c = &vcpus[i];

		c->number = i;
		c->recent = calloc(set_mask + 1, sizeof(*c->recent));
		if (!c->recent || tlb_start(&c->data, options.data) ||
		    tlb_start(&c->second, options.second) ||
		    tlb_start(&c->fetch, options.fetch) ||
		    filter_start(&c->filter)) {
			complain("no memory for the model of a vCPU");
			return -1;
		}
		forget_recent(c);
		c->fetch_stamp = &c->no_stamp;
		c->epoch = epoch;
	}
	if (!options.marks) {
		recording = true;
		interval_ends_at = options.interval_instructions;
	}
	return 0;
}

/**
 * model_vcpu_starts() - A vCPU begins to run.
 * @vcpu:	Its number.
 */
void model_vcpu_starts(unsigned int vcpu)
{
	pthread_mutex_lock(&lock);
	vcpus[vcpu].present = true;
	pthread_mutex_unlock(&lock);
}

/**
 * model_end() - Write the last records and print a summary.
 */
void model_end(void)
{
	struct ring_counts ring;
	u64 instructions, done = 0, walks = 0, io = 0, outside = 0;
	u64 tables = 0, full = 0, pages = 0;

	pthread_mutex_lock(&lock);
	instructions = all_instructions();
	end_intervals(instructions);
	if (recording)
		put_states();
	ring_put(KIND(RECORD_END, 0));
	ring = ring_close();
	recording = false;
	ended = true;
	pthread_mutex_unlock(&lock);
	for (u32 i = 0; i < vcpu_count; i++) {
		done += accesses(&vcpus[i]);
		walks += vcpus[i].walks;
		io += vcpus[i].io;
		outside += vcpus[i].outside;
		tables += vcpus[i].table_changes;
		full += vcpus[i].flushes;
		pages += vcpus[i].page_flushes;
	}
	complain("%llu instructions, %llu accesses, %llu walks (no RAM: %llu of devices, %llu of ROM); flushes: %llu by CR3, %llu whole, %llu of a page; %llu records, %llu waits, %llu lost",
		 (unsigned long long)instructions, (unsigned long long)done,
		 (unsigned long long)walks, (unsigned long long)io,
		 (unsigned long long)outside, (unsigned long long)tables,
		 (unsigned long long)full, (unsigned long long)pages,
		 (unsigned long long)ring.records, (unsigned long long)ring.waits,
		 (unsigned long long)ring.lost);
}
