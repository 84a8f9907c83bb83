// SPDX-License-Identifier: MIT OR GPL-2.0-or-later
/*
 * Uses of the page cache that is charged to a set of control groups: those of a sample of its pages, in order.
 *
 * A use is what the kernel counts as one: a read of a page by a system call, the first write to a page since it was last written to
 * its file, and, when a mapping ends, what was used through it. Shared memory and tmpfs are left out: without swap they cannot be
 * evicted.
 *
 * Every use on the host runs this program, so what is cheap and rejects most comes first: the page's kind, then the sample, then the
 * group; of a large folio, which has many pages, the group. Structures declare the fields that are read; the loader relocates them to those of the running kernel (CO-RE).
 *
 * Source: Linux, mm/swap.c and mm/filemap.c of 6.1 to 6.18; mm/memcontrol.c of 7.1 for what a folio is charged to.
 */
#include <stdbool.h>
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

/* The kernel accepts helpers that read its memory from programs under this licence. */
char LICENSE[] SEC("license") = "Dual MIT/GPL";

#define RELOCATED __attribute__((preserve_access_index))

/* Most pages of a folio: 2 MiB of 4 KiB, the largest in the page cache of x86-64. */
#define FOLIO_PAGES_MAX 512
/* Flags in the lowest bits of a folio's pointer to its group. */
#define MEMCG_DATA_FLAGS 7UL
/* Set in a folio's pointer to its file if it has none: it is anonymous, or movable. */
#define MAPPING_FLAGS 3UL
/* Binary logarithm of the neighbours of a file whose numbers are neighbours: estimators expect those to be used alike. */
#define NEIGHBOURS_BITS 6

struct super_block {
	__u32 s_dev;
} RELOCATED;

struct inode {
	struct super_block *i_sb;
	unsigned long i_ino;
	__u32 i_generation;
} RELOCATED;

struct address_space {
	struct inode *host;
} RELOCATED;

struct folio {
	unsigned long flags;
	struct address_space *mapping;
	unsigned long index;
	unsigned long memcg_data;
} RELOCATED;

/* Since Linux 6.18. */
struct folio___flags {
	struct {
		unsigned long f;
	} flags;
} RELOCATED;

/* Number of pages of a large folio, until Linux 6.14 and since. */
struct folio___until_6_14 {
	unsigned int _folio_nr_pages;
} RELOCATED;

struct folio___since_6_15 {
	unsigned int _nr_pages;
} RELOCATED;

struct kernfs_node {
	__u64 id;
} RELOCATED;

struct cgroup {
	struct kernfs_node *kn;
} RELOCATED;

struct cgroup_subsys_state {
	struct cgroup *cgroup;
} RELOCATED;

struct mem_cgroup {
	struct cgroup_subsys_state css;
} RELOCATED;

/* What folios are charged to since Linux 7.1; it passes to the parent of a group that is removed. */
struct obj_cgroup___since_7_1 {
	struct mem_cgroup *memcg;
	bool is_root;
} RELOCATED;

enum pageflags {
	PG_swapbacked = 1,
	PG_head = 2,
};

/* Set by the loader. A page is in the sample if these bits of its hash are zero. */
const volatile __u64 sample_mask = 0;
const volatile __u64 seed = 0;
/* Of the uses of all pages of the groups one in 2^counted_bits is counted. */
const volatile __u32 counted_bits = 0;

/* The groups, by the inodes of their directories. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, __u8);
} groups SEC(".maps");

/* Numbers of the pages used. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 << 20);
} uses SEC(".maps");

/* Uses that found the ring full; and uses of all pages of the groups, drawn at random. */
enum count { LOST, COUNTED, COUNTS };

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

/* A use of a folio. */
struct use {
	__u64 file;
	__u64 index;
};

/* The finalizer of splitmix64. */
static __always_inline __u64 mix(__u64 value)
{
	value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
	value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
	return value ^ (value >> 31);
}

static __always_inline void count(__u32 which, __u64 more)
{
	__u64 *total = bpf_map_lookup_elem(&counts, &which);

	if (total)
		*total += more;
}

static __always_inline bool is_charged(__u64 memcg_data)
{
	struct obj_cgroup___since_7_1 *owner = (void *)(memcg_data & ~MEMCG_DATA_FLAGS);
	struct mem_cgroup *memcg = (void *)owner;
	__u64 group;

	if (owner && bpf_core_field_exists(owner->is_root))
		memcg = BPF_CORE_READ(owner, memcg);
	if (!memcg)
		return false;
	group = BPF_CORE_READ(memcg, css.cgroup, kn, id);
	return bpf_map_lookup_elem(&groups, &group) != NULL;
}

static __always_inline __u64 page_at(const struct use *use, __u32 offset)
{
	__u64 index = use->index + offset;
	__u64 page = mix(use->file ^ (index >> NEIGHBOURS_BITS)) << NEIGHBOURS_BITS;

	return page | (index & ((1 << NEIGHBOURS_BITS) - 1));
}

static __always_inline bool is_sampled(__u64 page)
{
	return !(mix(page) & sample_mask);
}

static __always_inline void pass_on(__u64 page)
{
	if (bpf_ringbuf_output(&uses, &page, sizeof(page), BPF_RB_NO_WAKEUP))
		count(LOST, 1);
}

/* The loop over the pages of a large folio. */
static long use_page(__u32 offset, struct use *use)
{
	__u64 page = page_at(use, offset);

	if (is_sampled(page))
		pass_on(page);
	return 0;
}

static __always_inline __u64 flags_of(struct folio *folio)
{
	struct folio___flags *since = (void *)folio;

	if (bpf_core_field_exists(since->flags.f))
		return since->flags.f;
	return folio->flags;
}

static __always_inline bool has_flag(__u64 flags, __u64 bit)
{
	return flags & (1ULL << bit);
}

static __always_inline __u32 pages_of(struct folio *folio)
{
	struct folio___since_6_15 *since = (void *)folio;
	struct folio___until_6_14 *until = (void *)folio;

	if (bpf_core_field_exists(since->_nr_pages))
		return since->_nr_pages;
	if (bpf_core_field_exists(until->_folio_nr_pages))
		return until->_folio_nr_pages;
	return 1;
}

static __always_inline int use_folio(struct folio *folio)
{
	__u64 flags = flags_of(folio);
	unsigned long mapping = 0;
	struct use use = {};
	struct inode *inode;
	__u32 pages = 1;
	bool sampled;
	__u32 drawn;
	__u64 page;

	if (has_flag(flags, bpf_core_enum_value(enum pageflags, PG_swapbacked)))
		return 0;
	/* As a number: the verifier lets nobody test the bits of a pointer. */
	bpf_core_read(&mapping, sizeof(mapping), &folio->mapping);
	if (!mapping || mapping & MAPPING_FLAGS)
		return 0;
	inode = folio->mapping->host;
	if (!inode)
		return 0;
	use.file = mix(seed ^ (((__u64)inode->i_sb->s_dev << 32) | inode->i_generation));
	use.file = mix(use.file ^ inode->i_ino);
	use.index = folio->index;
	if (has_flag(flags, bpf_core_enum_value(enum pageflags, PG_head)))
		pages = pages_of(folio);
	if (pages > FOLIO_PAGES_MAX)
		pages = FOLIO_PAGES_MAX;
	/* Of n pages n in 2^counted_bits in the mean, so that large folios vary no more than small ones. */
	drawn = (pages + (bpf_get_prandom_u32() & ((1U << counted_bits) - 1))) >> counted_bits;
	if (pages == 1) {
		page = page_at(&use, 0);
		sampled = is_sampled(page);
		if ((!sampled && !drawn) || !is_charged(folio->memcg_data))
			return 0;
		if (sampled)
			pass_on(page);
	} else {
		if (!is_charged(folio->memcg_data))
			return 0;
		bpf_loop(pages, use_page, &use, 0);
	}
	if (drawn)
		count(COUNTED, drawn);
	return 0;
}

SEC("fentry/folio_mark_accessed")
int BPF_PROG(accessed, struct folio *folio)
{
	return use_folio(folio);
}

SEC("tp_btf/writeback_dirty_folio")
int BPF_PROG(dirtied, struct folio *folio)
{
	return use_folio(folio);
}
