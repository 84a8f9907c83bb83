// SPDX-License-Identifier: GPL-2.0-or-later
/* Counters, and the debugfs files that show them. */
#include <linux/debugfs.h>
#include <linux/math64.h>
#include <linux/percpu.h>
#include <linux/seq_file.h>

#include "internal.h"

DEFINE_PER_CPU(u64[COUNTERS], plimsoll_counters);

static const char *const names[COUNTERS] = {
	[COUNT_EVICTED] = "evicted",
	[COUNT_EVICTED_SWAP] = "evicted_swap",
	[COUNT_EVICTED_UNREADY] = "evicted_unready",
	[COUNT_DROPPED] = "dropped",
	[COUNT_RELEASED] = "released",
	[COUNT_ADDED] = "added",
	[COUNT_MIGRATED] = "migrated",
	[COUNT_MIGRATED_ANON] = "migrated_anon",
	[COUNT_PUT] = "put",
	[COUNT_FLUSHED] = "flushed",
	[COUNT_RECORDS] = "records",
	[COUNT_COPIES] = "copies",
	[COUNT_LARGE_FOLIOS] = "large_folios",
	[COUNT_NO_SLOT] = "no_slot",
	[COUNT_RING_FULL] = "ring_full",
	[COUNT_WAITS] = "waits",
	[COUNT_WAITS_IN_VAIN] = "waits_in_vain",
	[COUNT_NS_WAITED] = "ns_waited",
	[COUNT_STALE_POOL] = "stale_pool",
	[COUNT_PROBES_OFF] = "probes_off",
	[COUNT_RESUMES] = "resumes",
	[COUNT_KICKS] = "kicks",
	[COUNT_KICKS_FAILED] = "kicks_failed",
	[COUNT_ATTACHES] = "attaches",
	[COUNT_ATTACHES_FAILED] = "attaches_failed",
	[COUNT_COMMAND_TIMEOUTS] = "command_timeouts",
	[COUNT_FAULTS] = "faults",
	[COUNT_SAMPLES_RECORD] = "samples_record",
	[COUNT_NS_RECORD] = "ns_record",
	[COUNT_SAMPLES_COPY] = "samples_copy",
	[COUNT_NS_COPY] = "ns_copy",
};

static struct dentry *directory;

static u64 total(enum counter counter)
{
	u64 sum = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		sum += READ_ONCE(per_cpu(plimsoll_counters, cpu)[counter]);
	return sum;
}

static void show_mean(struct seq_file *file, enum counter sum, enum counter samples)
{
	u64 divisor = total(samples);

	seq_printf(file, "%s %llu\n", names[sum],
		   divisor ? div64_u64(total(sum), divisor) : 0);
}

static int stats_show(struct seq_file *file, void *data)
{
	int i;

	for (i = 0; i < COUNTERS; i++) {
		if (i == COUNT_NS_RECORD)
			show_mean(file, i, COUNT_SAMPLES_RECORD);
		else if (i == COUNT_NS_COPY)
			show_mean(file, i, COUNT_SAMPLES_COPY);
		else if (i == COUNT_NS_WAITED)
			show_mean(file, i, COUNT_WAITS);
		else
			seq_printf(file, "%s %llu\n", names[i], total(i));
	}
	events_show(file);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(stats);

static int layout_show(struct seq_file *file, void *data)
{
	ring_show(file);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(layout);

void stats_create(void)
{
	directory = debugfs_create_dir("plimsoll", NULL);
	debugfs_create_file("stats", 0444, directory, NULL, &stats_fops);
	debugfs_create_file("ring", 0444, directory, NULL, &layout_fops);
}

void stats_remove(void)
{
	debugfs_remove_recursive(directory);
}
