// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Probes of the page cache, and the records they produce.
 *
 * The probed functions, and the state in which they are called:
 * - mm_filemap_add_to_page_cache: the folio is locked, its I/O follows.
 * - mm_filemap_delete_from_page_cache: every removal, with interrupts off and
 *   the lock of the page cache held. The cause is reclaim if
 *   workingset_eviction() was entered for this folio just before on this CPU:
 *   between the two, interrupts are off. The folio is then clean, unmapped, and
 *   its reference count is frozen at 0, so its contents cannot change. If only
 *   the count is frozen, the page is dropped while memory is free: all that
 *   remove_mapping() removes is clean and unmapped. Truncation does not freeze it.
 * - folio_migrate_flags(to, from): contents and cache entry have moved, both
 *   folios are locked.
 * - add_to_swap_cache(), __delete_from_swap_cache(): as the first two, for the
 *   swap cache; removal by reclaim if the reference count is frozen.
 *
 * A kprobe that cannot run is counted as missed by the kernel. All earlier
 * reports are then invalid, which is reported before any other event.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kprobes.h>
#include <linux/mm.h>
#include <linux/page-flags.h>
#include <linux/ptrace.h>
#include <linux/rculist.h>
#include <linux/seq_file.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/swap.h>
#include <linux/tracepoint.h>

#include "internal.h"

/* The folio that reclaim on this CPU is about to remove from the page cache. */
static DEFINE_PER_CPU(struct folio *, reclaimed);

static bool notices;			/* the host wants page cache records */
static unsigned long missed;		/* missed events reported so far */
static DEFINE_RAW_SPINLOCK(missed_lock);	/* guards `missed` */
static LIST_HEAD(clients);		/* RCU: probes run with preemption off */
static DEFINE_MUTEX(clients_lock);	/* serialises changes of the list */

#define notify_clients(callback, ...)					\
	do {									\
		struct plimsoll_client *client;					\
										\
		list_for_each_entry_rcu(client, &clients, list, true)		\
			if (client->callback)					\
				client->callback(__VA_ARGS__);			\
	} while (0)

/*
 * File systems read their metadata (inodes, directories, extents) block by block, and
 * the kernel then marks the buffers up to date, not the page; the buffers are gone by
 * now. The contents may also have been changed and dropped with the file they
 * described. So such a page is sent without them: the host reads the frame, and
 * admits it only if it matches the disk.
 */
static void report_evicted(struct page *page, bool uptodate, u16 flags)
{
	bool copied = uptodate && !lazy;

	notify_clients(evicted, page, uptodate);
	if (!READ_ONCE(notices))
		return;
	if (!uptodate)
		count(COUNT_EVICTED_UNREADY);
	if (copied)
		ring_wait();
	ring_post(PLIMSOLL_EVICT, flags, page_to_pfn(page), 0, copied ? page : NULL);
}

/* The host's exclusive cache takes only what reclaim evicts. */
static void report_dropped(struct page *page, bool uptodate)
{
	struct plimsoll_client *client;

	list_for_each_entry_rcu(client, &clients, list, true) {
		if (client->dropped)
			client->dropped(page, uptodate);
		else if (client->removed)
			client->removed(page_to_pfn(page));
	}
	count(COUNT_DROPPED);
	if (READ_ONCE(notices))
		ring_post(PLIMSOLL_RELEASE, 0, page_to_pfn(page), 0, NULL);
}

static void report_removed(unsigned long pfn, u16 flags)
{
	notify_clients(removed, pfn);
	if (READ_ONCE(notices))
		ring_post(PLIMSOLL_RELEASE, flags, pfn, 0, NULL);
}

static void report_added(unsigned long pfn, u16 flags)
{
	notify_clients(added, pfn);
	if (READ_ONCE(notices))
		ring_post(PLIMSOLL_ADD, flags, pfn, 0, NULL);
}

static void report_migrated(unsigned long from, unsigned long to)
{
	notify_clients(migrated, from, to);
	if (READ_ONCE(notices))
		ring_post(PLIMSOLL_MIGRATE, 0, from, to, NULL);
}

static void folio_added(struct folio *folio, u16 flags)
{
	long i, pages = folio_nr_pages(folio);

	events_check_missed();
	if (READ_ONCE(fault_no_add)) {
		count_many(COUNT_FAULTS, pages);
		return;
	}
	if (pages > 1)
		count(COUNT_LARGE_FOLIOS);
	for (i = 0; i < pages; i++)
		report_added(folio_pfn(folio) + i, flags);
}

enum removal { EVICTED, DROPPED, REMOVED };

static void folio_removed(struct folio *folio, enum removal removal, u16 flags)
{
	bool uptodate = folio_test_uptodate(folio) && !folio_test_dirty(folio) &&
			!folio_test_writeback(folio);
	long i, pages = folio_nr_pages(folio);

	events_check_missed();
	for (i = 0; i < pages; i++) {
		/* Whoever reads a page with a memory error gets a machine check. */
		if (PageHWPoison(folio_page(folio, i)))
			report_removed(folio_pfn(folio) + i, flags);
		else if (removal == EVICTED || READ_ONCE(fault_evict))
			report_evicted(folio_page(folio, i), uptodate, flags);
		else if (removal == DROPPED)
			report_dropped(folio_page(folio, i), uptodate);
		else
			report_removed(folio_pfn(folio) + i, flags);
	}
}

/* Pages of hugetlbfs have no storage. */

static void on_add(void *data, struct folio *folio)
{
	if (!folio_test_hugetlb(folio))
		folio_added(folio, 0);
}

static void on_delete(void *data, struct folio *folio)
{
	bool reclaim = this_cpu_xchg(reclaimed, NULL) == folio;
	enum removal removal = REMOVED;

	if (!folio_ref_count(folio))
		removal = reclaim ? EVICTED : DROPPED;
	if (!folio_test_hugetlb(folio))
		folio_removed(folio, removal, 0);
}

static struct folio *folio_argument(struct pt_regs *regs, unsigned int n)
{
	return (struct folio *)regs_get_kernel_argument(regs, n);
}

static int on_workingset_eviction(struct kprobe *probe, struct pt_regs *regs)
{
	struct folio *folio = folio_argument(regs, 0);

	if (folio_test_swapcache(folio))
		folio = NULL;
	this_cpu_write(reclaimed, folio);
	return 0;
}

static int on_migrate(struct kprobe *probe, struct pt_regs *regs)
{
	struct folio *to = folio_argument(regs, 0);
	struct folio *from = folio_argument(regs, 1);
	long i, pages = folio_nr_pages(from);

	events_check_missed();
	if (folio_test_hugetlb(from))
		return 0;
	/* An anonymous page outside the swap cache is in no cache. */
	if (folio_test_anon(from) && !folio_test_swapcache(from)) {
		count_many(COUNT_MIGRATED_ANON, pages);
		return 0;
	}
	if (READ_ONCE(fault_no_migrate)) {
		count_many(COUNT_FAULTS, pages);
		return 0;
	}
	for (i = 0; i < pages; i++)
		report_migrated(folio_pfn(from) + i, folio_pfn(to) + i);
	return 0;
}

static int on_swap_add(struct kprobe *probe, struct pt_regs *regs)
{
	folio_added(folio_argument(regs, 0), PLIMSOLL_SWAP);
	return 0;
}

static int on_swap_delete(struct kprobe *probe, struct pt_regs *regs)
{
	struct folio *folio = folio_argument(regs, 0);

	folio_removed(folio, folio_ref_count(folio) ? REMOVED : EVICTED, PLIMSOLL_SWAP);
	return 0;
}

static struct kprobe probes[] = {
	{ .symbol_name = "workingset_eviction", .pre_handler = on_workingset_eviction },
	{ .symbol_name = "folio_migrate_flags", .pre_handler = on_migrate },
	{ .symbol_name = "add_to_swap_cache", .pre_handler = on_swap_add },
	{ .symbol_name = "__delete_from_swap_cache", .pre_handler = on_swap_delete },
};
static u32 probes_set;

static struct {
	const char *name;
	void *function;
	struct tracepoint *point;
} traces[] = {
	{ "mm_filemap_add_to_page_cache", on_add },
	{ "mm_filemap_delete_from_page_cache", on_delete },
};
static u32 traces_set;

/*
 * All kprobes can be disabled at once, without a notification. A probe of our
 * own function detects it.
 */

static bool canary_seen;

static noinline void canary(void)
{
	barrier();
}

static int on_canary(struct kprobe *probe, struct pt_regs *regs)
{
	canary_seen = true;
	return 0;
}

static struct kprobe canary_probe = {
	.addr = (kprobe_opcode_t *)canary,
	.pre_handler = on_canary,
};

void events_check_alive(void)
{
	unsigned long before = READ_ONCE(canary_probe.nmissed);

	canary_seen = false;
	canary();
	if (!READ_ONCE(canary_seen) && READ_ONCE(canary_probe.nmissed) == before) {
		count(COUNT_PROBES_OFF);
		events_forget();
	}
}

static unsigned long missed_by_now(void)
{
	unsigned long sum = 0;
	u32 i;

	for (i = 0; i < ARRAY_SIZE(probes); i++)
		sum += READ_ONCE(probes[i].nmissed);
	return sum;
}

void events_check_missed(void)
{
	unsigned long now, irqs;

	/* Pairs with the release below: a new number is visible only after its report. */
	if (likely(missed_by_now() == smp_load_acquire(&missed)))
		return;
	raw_spin_lock_irqsave(&missed_lock, irqs);
	/* Another CPU may have reported more than was read above. */
	now = missed_by_now();
	if ((long)(now - missed) > 0) {
		ring_lose(now - missed);
		notify_clients(lost);
		smp_store_release(&missed, now);
	}
	raw_spin_unlock_irqrestore(&missed_lock, irqs);
}

void events_forget(void)
{
	unsigned long irqs;

	raw_spin_lock_irqsave(&missed_lock, irqs);
	ring_lose(1);
	notify_clients(lost);
	raw_spin_unlock_irqrestore(&missed_lock, irqs);
}

void events_want(bool wanted)
{
	WRITE_ONCE(notices, wanted);
}

void events_reattached(void)
{
	struct plimsoll_client *client;

	mutex_lock(&clients_lock);
	list_for_each_entry(client, &clients, list)
		if (client->reattached)
			client->reattached();
	mutex_unlock(&clients_lock);
}

void plimsoll_register(struct plimsoll_client *client)
{
	mutex_lock(&clients_lock);
	list_add_tail_rcu(&client->list, &clients);
	mutex_unlock(&clients_lock);
}
EXPORT_SYMBOL_GPL(plimsoll_register);

void plimsoll_unregister(struct plimsoll_client *client)
{
	mutex_lock(&clients_lock);
	list_del_rcu(&client->list);
	mutex_unlock(&clients_lock);
	synchronize_rcu();
}
EXPORT_SYMBOL_GPL(plimsoll_unregister);

static void find_trace(struct tracepoint *point, void *data)
{
	u32 i;

	for (i = 0; i < ARRAY_SIZE(traces); i++)
		if (!strcmp(point->name, traces[i].name))
			traces[i].point = point;
}

int events_start(void)
{
	int rc;

	for_each_kernel_tracepoint(find_trace, NULL);
	for (; probes_set < ARRAY_SIZE(probes); probes_set++) {
		rc = register_kprobe(&probes[probes_set]);
		if (rc) {
			pr_err("this kernel has no function %s to probe (error %d)\n",
			       probes[probes_set].symbol_name, rc);
			goto stop;
		}
	}
	for (; traces_set < ARRAY_SIZE(traces); traces_set++) {
		rc = -ENOENT;
		if (traces[traces_set].point)
			rc = tracepoint_probe_register(traces[traces_set].point,
						       traces[traces_set].function, NULL);
		if (rc) {
			pr_err("this kernel has no tracepoint %s (error %d)\n",
			       traces[traces_set].name, rc);
			goto stop;
		}
	}
	rc = register_kprobe(&canary_probe);
	if (rc) {
		pr_err("kprobes do not work (error %d)\n", rc);
		goto stop;
	}
	return 0;

stop:
	canary_probe.addr = NULL;
	events_stop();
	return rc;
}

void events_stop(void)
{
	if (canary_probe.addr)
		unregister_kprobe(&canary_probe);
	while (traces_set) {
		traces_set--;
		tracepoint_probe_unregister(traces[traces_set].point,
					    traces[traces_set].function, NULL);
	}
	while (probes_set)
		unregister_kprobe(&probes[--probes_set]);
	tracepoint_synchronize_unregister();
}

void events_show(struct seq_file *file)
{
	u32 i;

	for (i = 0; i < ARRAY_SIZE(probes); i++)
		seq_printf(file, "missed_%s %lu\n", probes[i].symbol_name,
			   READ_ONCE(probes[i].nmissed));
}
