/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What the parts of plimsoll.ko offer each other. */
#ifndef PLIMSOLL_INTERNAL_H
#define PLIMSOLL_INTERNAL_H

#include <linux/mutex.h>
#include <linux/percpu.h>
#include <linux/types.h>

#include "plimsoll.h"

struct dentry;
struct seq_file;

/* main.c: parameters */

extern bool lazy;
extern bool fault_no_add;
extern bool fault_no_migrate;
extern uint fault_drop_every;

/* stats.c */

enum counter {
	COUNT_EVICTED,
	COUNT_EVICTED_SWAP,
	COUNT_EVICTED_UNREADY,
	COUNT_RELEASED,
	COUNT_ADDED,
	COUNT_MIGRATED,
	COUNT_MIGRATED_ANON,
	COUNT_PUT,
	COUNT_FLUSHED,
	COUNT_RECORDS,
	COUNT_COPIES,
	COUNT_LARGE_FOLIOS,
	COUNT_NO_SLOT,
	COUNT_RING_FULL,
	COUNT_STALE_POOL,
	COUNT_PROBES_OFF,
	COUNT_RESUMES,
	COUNT_KICKS,
	COUNT_KICKS_FAILED,
	COUNT_ATTACHES,
	COUNT_ATTACHES_FAILED,
	COUNT_COMMAND_TIMEOUTS,
	COUNT_FAULTS,
	COUNT_SAMPLES_RECORD,
	COUNT_NS_RECORD,
	COUNT_SAMPLES_COPY,
	COUNT_NS_COPY,
	COUNTERS
};

DECLARE_PER_CPU(u64[COUNTERS], plimsoll_counters);

static inline void count_many(enum counter counter, u64 n)
{
	this_cpu_add(plimsoll_counters[counter], n);
}

static inline void count(enum counter counter)
{
	count_many(counter, 1);
}

void stats_create(void);
void stats_remove(void);

/* events.c: from probes to records */

/*
 * Probes the kernel. -ENOENT, with the name in the log, if a place to probe
 * is missing. Once this is done no event goes unnoticed.
 */
int events_start(void);
/* When this returns no probe runs. */
void events_stop(void);
/* Tells if events were missed since the last call. Any context. */
void events_check_missed(void);
/* Tells if kprobes are switched off. Process context. */
void events_check_alive(void);
/* Whether records of the page cache are wanted, or those of pools only. */
void events_want(bool notices);
/* Nothing told before holds: for the host and all clients. */
void events_forget(void);
/* Tells the clients that the host is another. */
void events_reattached(void);
void events_show(struct seq_file *file);

/* ring.c */

/*
 * Allocates the ring. Both numbers are powers of two; slots may be 0.
 * -ENOMEM; -EINVAL if no ring can be so large.
 */
int ring_create(u32 records, u32 slots);
/* Gives its memory back, or leaves it to a host that may still use it. */
void ring_free(bool host_may_use_it);
u64 ring_address(void);	/* guest-physical */
u64 ring_nonce(void);

/* Posts a record; with `page`, its contents too. Any context. */
void ring_post(u16 type, u16 flags, u64 pfn, u64 other, struct page *page);
/* Raises `lost`. */
void ring_lose(u64 events);
/* Makes all pools invalid. */
void ring_next_generation(void);
/* From here on posts are dropped, and all pools are invalid. */
void ring_close(void);
void ring_set_memory(u64 pages);
/* Whether a host says that it reads the ring. */
bool ring_attached(void);
bool ring_empty(void);
/* Posts a record that says what holds anyway: a host that follows takes it. */
void ring_post_nothing(void);
u64 ring_tail(void);
/* Posts ask for a kick again. */
void ring_kicked(void);
void ring_show(struct seq_file *file);

/* host.c: attaching, and watching that the host follows */

/* -EBUSY, -ETIMEDOUT, -EIO, -EPROTO or what the host refused with. */
int host_start(void);
/* Announces the end of the ring. After this no attach happens. */
void host_detach(void);
/* When no probe can post any more; ends all work and gives back the ring. */
void host_stop(void);
/* Asks for a kick. Any context. */
void host_kick(void);

/* control.c: the control disk */

/* Opens and checks it. The log tells why it failed. */
int control_open(const char *path);
void control_close(void);
/*
 * Reads what the host can do. As control_command(), -EPROTO if this is no
 * control disk, -EPROTONOSUPPORT if it is one of another version.
 */
int control_read_info(u32 *features);
/*
 * Gives a command and waits for its answer, up to 5 s. Process context; needs
 * no memory.
 *
 * Returns 0; the positive errno value with which the host refused; or a
 * negative one if it is not known what the host did: -ETIMEDOUT, -EIO,
 * -EPROTO. While a timed-out command is still with the disk, others time out
 * at once.
 */
int control_command(u32 command, const u64 arg[4], u64 *value);

#endif
