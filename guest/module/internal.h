/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Interfaces between the source files of plimsoll.ko. */
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
extern bool fault_evict;
extern uint fault_drop_every;
extern uint put_wait_us;
#define PUT_WAIT_US_MAX	10000U

/* stats.c */

enum counter {
	COUNT_EVICTED,
	COUNT_EVICTED_SWAP,
	COUNT_EVICTED_UNREADY,
	COUNT_DROPPED,
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
	COUNT_WAITS,
	COUNT_WAITS_IN_VAIN,
	COUNT_NS_WAITED,
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
 * Registers all probes. Returns -ENOENT, with the name in the log, if this
 * kernel lacks one of the probed functions. After success no event is missed
 * without being counted.
 */
int events_start(void);
/* Removes all probes. No probe runs after it has returned. */
void events_stop(void);
/* Reports events missed since the last call, if any. Any context. */
void events_check_missed(void);
/* Reports a loss if kprobes are disabled. Process context. */
void events_check_alive(void);
/* Enables or disables page cache records; pool records are always written. */
void events_want(bool notices);
/* Invalidates everything reported so far, for the host and all clients. */
void events_forget(void);
/* Notifies the clients that a new host was attached. */
void events_reattached(void);
void events_show(struct seq_file *file);

/* ring.c */

/*
 * Allocates the ring. Both numbers are powers of two; slots may be 0.
 * Returns 0, or -ENOMEM, also if no ring can be so large.
 */
int ring_create(u32 records, u32 slots);
/* Frees its memory, or leaves it allocated for a host that may still use it. */
void ring_free(bool host_may_use_it);
u64 ring_address(void);	/* guest-physical */
u64 ring_nonce(void);

/*
 * Waits until there is room for a page, by polling; may return without. Any
 * context but NMI; preemption is off, and no lock of a client is held.
 */
void ring_wait(void);
/* Posts a record, with the contents of `page` unless NULL. Any context. */
void ring_post(u16 type, u16 flags, u64 pfn, u64 other, struct page *page);
/* Adds to the ring's counter `lost`. Any context. */
void ring_lose(u64 events);
/* Makes all pools invalid. */
void ring_next_generation(void);
/* Drops all later posts, and makes all pools invalid. */
void ring_close(void);
void ring_set_memory(u64 pages);
/* Whether the ring's header says that a host reads it. */
bool ring_attached(void);
bool ring_empty(void);
/* Posts a record without effect, to see whether the host takes it. */
void ring_post_nothing(void);
u64 ring_tail(void);
/* Allows posts to request a kick again. */
void ring_kicked(void);
void ring_show(struct seq_file *file);

/* host.c: attaching, and checking that the host reads the ring */

/*
 * Attaches the host and starts the worker. Returns 0, -ENOMEM, an error of
 * control_command(), or the error with which the host refused, negated.
 */
int host_start(void);
/* Detaches the host. It is not attached again after this. */
void host_detach(void);
/* Ends all work and frees the ring. Call when no probe can post any more. */
void host_stop(void);
/* Requests a kick of the host. Any context. */
void host_kick(void);

/* control.c: the control disk */

/* Opens and checks the control disk. The reason of a failure is logged. */
int control_open(const char *path);
void control_close(void);
/*
 * Reads the host's features. Returns as control_command(); -EPROTO if this is
 * not a control disk, -EPROTONOSUPPORT if its version differs.
 */
int control_read_info(u32 *features);
/*
 * Sends a command and waits up to 5 s for its answer. Process context;
 * allocates no memory.
 *
 * Returns 0; the positive errno value with which the host refused; or
 * -ETIMEDOUT, -EIO or -EPROTO if it is unknown what the host did. While a
 * timed-out command is still in the disk's queue, others time out at once.
 */
int control_command(u32 command, const u64 arg[4], u64 *value);

#endif
