// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * The ring of records, in a file that a reader has created and maps as well.
 *
 * A full ring stops the guest until the reader has made room, so that nothing is
 * lost. A reader that died no longer holds its lock on the file: records are then
 * counted and dropped, and the guest continues.
 *
 * Context: all functions but ring_open() need the model's lock.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "pagelog.h"

#define VERSION		1
#define HEADER_BYTES	4096
#define CAPACITY_MAX	(1ull << 30)		/* records */
#define BATCH		64			/* records between two publications */
#define WAIT_NS		50000
#define DEATH_CHECK_NS	1000000000ull

enum state {
	NOBODY,
	WRITING,
	ENDED,
};

enum flags {
	WALKS = 1,
	REFERENCES = 2,
	BETWEEN_MARKS = 4,
};

/* Little endian, like x86. */
struct header {
	/* Written by the reader, before a writer attaches. */
	char magic[8];
	u32 version;
	u32 page_bytes;
	u64 capacity_records;
	/* Written by the plugin when it attaches. */
	u64 ram_bytes;
	u64 below_4g_bytes;
	u32 vcpus;
	u32 flags;
	u64 interval_instructions;
	u32 filter_pages;
	struct tlb_size data;
	struct tlb_size second;
	struct tlb_size fetch;
	u32 api_version;
	u32 tlb_page_bytes;
	/* Each in its own cache line. */
	u64 head __attribute__((aligned(64)));	/* plugin: records written */
	u64 tail __attribute__((aligned(64)));	/* reader: records read */
	u32 state __attribute__((aligned(64)));	/* plugin: this and the rest */
	u64 waits;
	u64 lost;
};

_Static_assert(offsetof(struct header, ram_bytes) == 24, "the ring's layout");
_Static_assert(offsetof(struct header, interval_instructions) == 48, "the ring's layout");
_Static_assert(offsetof(struct header, data) == 60, "the ring's layout");
_Static_assert(offsetof(struct header, api_version) == 84, "the ring's layout");
_Static_assert(offsetof(struct header, head) == 128, "the ring's layout");
_Static_assert(offsetof(struct header, tail) == 192, "the ring's layout");
_Static_assert(offsetof(struct header, state) == 256, "the ring's layout");
_Static_assert(offsetof(struct header, lost) == 272, "the ring's layout");

static struct header *header;
static u64 *records;
static u64 capacity;
static int file = -1;
static u64 head;		/* records written, published or not */
static u64 room_until;		/* head at which the ring is full, by the last tail read */
static struct ring_counts counts;
static bool reader_is_gone;

/**
 * ring_open() - Attach to the ring that the options name.
 * @vcpus:	vCPUs of the machine.
 *
 * Return: 0, or -1 after an error message.
 */
int ring_open(u32 vcpus)
{
	const char *path = options.ring;
	struct stat status;
	const struct header *found;
	size_t bytes;

	file = open(path, O_RDWR | O_CLOEXEC);
	if (file < 0 || fstat(file, &status)) {
		complain("ring %s: %s", path, strerror(errno));
		return -1;
	}
	if (!S_ISREG(status.st_mode) || status.st_size < HEADER_BYTES + 8) {
		complain("ring %s: not a ring: no file of a header and records", path);
		return -1;
	}
	if (!flock(file, LOCK_SH | LOCK_NB)) {
		complain("ring %s: nobody reads it (the reader holds a lock on the file)", path);
		return -1;
	}
	found = mmap(NULL, HEADER_BYTES, PROT_READ, MAP_SHARED, file, 0);
	if (found == MAP_FAILED) {
		complain("ring %s: %s", path, strerror(errno));
		return -1;
	}
	capacity = found->capacity_records;
	if (memcmp(found->magic, "PLIMPLG1", 8) || found->version != VERSION ||
	    found->page_bytes != 1u << PAGE_SHIFT) {
		complain("ring %s: not a ring of version %d with pages of 4096 bytes", path, VERSION);
		return -1;
	}
	if (!capacity || capacity > CAPACITY_MAX || capacity & (capacity - 1) ||
	    (u64)status.st_size < HEADER_BYTES + 8 * capacity) {
		complain("ring %s: %llu records in a file of %lld bytes: expected a power of two that fits",
			 path, (unsigned long long)capacity, (long long)status.st_size);
		return -1;
	}
	if (found->state != NOBODY || found->head || found->tail) {
		complain("ring %s: another one writes it, or has written it", path);
		return -1;
	}
	munmap((void *)found, HEADER_BYTES);
	bytes = HEADER_BYTES + 8 * capacity;
	header = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (header == MAP_FAILED) {
		complain("ring %s: %s", path, strerror(errno));
		return -1;
	}
	records = (u64 *)((char *)header + HEADER_BYTES);
	room_until = capacity;
	header->ram_bytes = options.ram_bytes;
	header->below_4g_bytes = options.below_4g_bytes;
	header->vcpus = vcpus;
	header->flags = (options.walks ? WALKS : 0) |
			(options.references ? REFERENCES : 0) |
			(options.marks ? BETWEEN_MARKS : 0);
	header->interval_instructions = options.interval_instructions;
	header->filter_pages = options.filter_pages;
	header->data = options.data;
	header->second = options.second;
	header->fetch = options.fetch;
	header->api_version = api_version;
	header->tlb_page_bytes = 1u << options.tlb_page_shift;
	__atomic_store_n(&header->state, WRITING, __ATOMIC_RELEASE);
	return 0;
}

static u64 now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static bool has_room(void)
{
	room_until = __atomic_load_n(&header->tail, __ATOMIC_ACQUIRE) + capacity;
	/* A tail beyond the head is as good as none. */
	return room_until - head - 1 < capacity;
}

/* Waits for the reader; false if there is none any more. */
static bool wait_for_room(void)
{
	const struct timespec pause = { .tv_nsec = WAIT_NS };
	u64 since;

	if (has_room())
		return true;
	ring_publish();
	header->waits = ++counts.waits;
	since = now_ns();
	while (!has_room()) {
		nanosleep(&pause, NULL);
		if (now_ns() - since < DEATH_CHECK_NS)
			continue;
		if (!flock(file, LOCK_SH | LOCK_NB)) {
			u64 unread = head - __atomic_load_n(&header->tail, __ATOMIC_ACQUIRE);

			reader_is_gone = true;
			if (unread <= capacity) {
				counts.lost += unread;
				counts.records -= unread;
			}
			complain("the reader of %s is gone: the guest goes on, what follows is lost",
				 options.ring);
			return false;
		}
		since = now_ns();
	}
	return true;
}

/**
 * ring_put() - Append a record.
 * @record:	Its word.
 *
 * Waits while the ring is full. Without a reader the record is counted as lost.
 */
void ring_put(u64 record)
{
	if (unlikely(head == room_until) && (reader_is_gone || !wait_for_room())) {
		header->lost = ++counts.lost;
		return;
	}
	records[head & (capacity - 1)] = record;
	head++;
	counts.records++;
	if (!(head & (BATCH - 1)))
		ring_publish();
}

/**
 * ring_publish() - Let the reader see all records that were put.
 */
void ring_publish(void)
{
	__atomic_store_n(&header->head, head, __ATOMIC_RELEASE);
}

/**
 * ring_close() - Tell the reader that no more records come.
 *
 * Return: what became of all records.
 */
struct ring_counts ring_close(void)
{
	ring_publish();
	__atomic_store_n(&header->state, ENDED, __ATOMIC_RELEASE);
	return counts;
}
