/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/**
 * DOC: hcache client
 *
 * Puts, gets and flushes pages of 4096 bytes in the store of an hcache server
 * of the same host (plimsoll hcache serve).  A get returns the page last put
 * under its handle that was not flushed since, or misses: a page may be gone at
 * any moment.  A get from a private pool takes the page out.
 *
 * Header only, C11 or C++11 with GNU atomics, Linux.  Include it before any
 * system header, or define _GNU_SOURCE.
 *
 *	struct hcache *hcache;
 *	uint32_t pool;
 *
 *	if (hcache_connect(&hcache, "/run/hcache", NULL) == 0 &&
 *	    hcache_create_pool(hcache, NULL, &pool) == 0) {
 *		struct hcache_handle handle = { pool, 3, 7 };
 *
 *		hcache_put(hcache, handle, page);
 *		if (hcache_get(hcache, handle, page) == 1)
 *			...
 *	}
 *
 * A connection belongs to one thread at a time, and not to a forked child.
 * Functions return a negative errno when they fail:
 *
 *	-EPIPE		The server has gone, or has closed this client.
 *	-EPROTO		The server breaks the protocol.
 *	-ENOENT		The pool does not exist, or is not this client's.
 *	-ENOSPC		This client gets no more pools.
 *	-EINVAL		An argument out of range.
 *	-EIO		The store failed in another way.
 *	-EBUSY		A simple call while operations of a batch are under way.
 *	-EAGAIN		No room for another operation: reap first.
 *
 * After the first two the connection is of no use any more.
 *
 * docs/hcache-protocol.md has every byte.
 */
#ifndef PLIMSOLL_HCACHE_H
#define PLIMSOLL_HCACHE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
#define HCACHE_ASSERT(what) static_assert(what, #what)
extern "C" {
#else
#define HCACHE_ASSERT(what) _Static_assert(what, #what)
#endif

#define HCACHE_VERSION 1u
#define HCACHE_MAGIC 0x47524348u
#define HCACHE_PAGE_BYTES 4096u
#define HCACHE_NAME_BYTES_MAX 64u
#define HCACHE_ENTRIES_MAX 32768u
#define HCACHE_SLOTS_MAX 262144u

/* Types of messages on the socket. */
#define HCACHE_HELLO 0x01u
#define HCACHE_STATS 0x02u
#define HCACHE_RESIZE 0x03u
#define HCACHE_WELCOME 0x81u
#define HCACHE_STATS_TEXT 0x82u
#define HCACHE_RESIZED 0x83u
#define HCACHE_REFUSED 0x84u

/* Offsets of the words in the head of a ring, in bytes. */
#define HCACHE_AT_MAGIC 0u
#define HCACHE_AT_VERSION 4u
#define HCACHE_AT_ENTRIES 8u
#define HCACHE_AT_SLOTS 12u
#define HCACHE_AT_SUBMISSION_TAIL 64u
#define HCACHE_AT_SUBMISSION_HEAD 128u
#define HCACHE_AT_COMPLETION_TAIL 192u
#define HCACHE_AT_COMPLETION_HEAD 256u
#define HCACHE_AT_SERVER_SLEEPING 320u
#define HCACHE_AT_CLIENT_SLEEPING 384u
#define HCACHE_AT_SUBMISSIONS 4096u

enum hcache_op {
	HCACHE_NOP,
	HCACHE_PUT,
	HCACHE_GET,
	HCACHE_FLUSH,
	HCACHE_FLUSH_RANGE,
	HCACHE_FLUSH_OBJECT,
	HCACHE_FLUSH_POOL,
	HCACHE_CREATE_POOL,
	HCACHE_DESTROY_POOL,
};

/* Flags of HCACHE_CREATE_POOL. */
#define HCACHE_CREATE_SHARED 1u
#define HCACHE_CREATE_CAPACITY 2u

/* Status of a completion. */
enum hcache_status {
	HCACHE_OK = 0,
	HCACHE_MISS = 1,
	HCACHE_PUT_REFUSED = 2,
	HCACHE_TORN = -1,
	HCACHE_BAD_OP = -2,
	HCACHE_BAD_FLAGS = -3,
	HCACHE_BAD_SLOT = -4,
	HCACHE_BAD_RANGE = -5,
	HCACHE_NO_SUCH_POOL = -6,
	HCACHE_TOO_MANY_POOLS = -7,
	HCACHE_FAILED = -8,
};

/* An entry of the submission ring. */
struct hcache_submission {
	uint32_t sequence;
	uint8_t op;
	uint8_t flags;
	uint16_t reserved;
	uint32_t pool;
	uint32_t index;
	uint64_t object;
	uint32_t slot;
	uint32_t last;
	uint64_t user_data;
	uint64_t capacity_pages;
	uint64_t key_low;
	uint64_t key_high;
};
HCACHE_ASSERT(sizeof(struct hcache_submission) == 64);

/* An entry of the completion ring. */
struct hcache_raw_completion {
	uint64_t user_data;
	uint32_t sequence;
	int32_t status;
	uint64_t value;
	uint64_t reserved;
};
HCACHE_ASSERT(sizeof(struct hcache_raw_completion) == 32);

/**
 * struct hcache_handle - Name of a page.
 * @pool:	Pool the page is in.
 * @index:	Which page of the object.
 * @object:	Number the client gave the object.
 */
struct hcache_handle {
	uint32_t pool;
	uint32_t index;
	uint64_t object;
};

/**
 * struct hcache_options - How to connect.
 * @name:	Name for people, a line of up to 64 bytes; NULL for none.
 * @entries:	Operations that can be under way, a power of two; 0 for 256.
 * @slots:	Slots for batches; 0 for 127.
 * @spin_us:	How long to poll for completions before sleeping, in microseconds.
 * @timeout_ms:	How long the server may take to let us in; 0 for 5000.
 *
 * With NULL instead, connecting takes 50 us for @spin_us and 0 for the others.
 */
struct hcache_options {
	const char *name;
	uint32_t entries;
	uint32_t slots;
	uint32_t spin_us;
	uint32_t timeout_ms;
};

/**
 * struct hcache_pool_options - What a pool is to be.
 * @shared:	Not 0 for a pool shared with other clients of the same user.
 * @key_low:	What they agree on, low half.
 * @key_high:	What they agree on, high half.
 * @limited:	Not 0 if @capacity_pages is meant.
 * @capacity_pages: Most pages the pool may hold.
 */
struct hcache_pool_options {
	int shared;
	uint64_t key_low;
	uint64_t key_high;
	int limited;
	uint64_t capacity_pages;
};

/**
 * struct hcache_completion - What became of an operation.
 * @user_data:	What was handed in with it.
 * @value:	A put: 1 if it replaced or flushed a page.  A flush: how many
 *		pages there were.
 * @status:	An enum hcache_status.
 * @slot:	Slot handed in, the caller's again; -1 for none.
 */
struct hcache_completion {
	uint64_t user_data;
	uint64_t value;
	int32_t status;
	int32_t slot;
};

/* An operation under way. */
struct hcache__pending {
	uint64_t user_data;
	int32_t slot;
};

/* A connection.  Its fields are nobody else's. */
struct hcache {
	unsigned char *base;
	size_t region_bytes;
	size_t completions_at;
	size_t slots_at;
	uint32_t entries;
	uint32_t slots;		/* for batches; one more is for simple calls */
	uint32_t client;
	uint32_t written;	/* entries written */
	uint32_t published;	/* of them published */
	uint32_t reaped;	/* completions read */
	uint32_t spin_us;
	uint32_t free_count;
	int32_t *free_slots;
	struct hcache__pending *pending;	/* each operation under way */
	int socket;
	int bell;
};

static inline uint32_t *hcache__word(const struct hcache *hcache, size_t at)
{
	return (uint32_t *)(void *)(hcache->base + at);
}

static inline int hcache__has_completion(const struct hcache *hcache)
{
	return __atomic_load_n(hcache__word(hcache, HCACHE_AT_COMPLETION_TAIL),
			       __ATOMIC_ACQUIRE) != hcache->reaped;
}

/**
 * hcache_close() - End a connection.
 * @hcache:	Connection, or NULL.
 *
 * The server drops all that was put by it, except in shared pools that others
 * are in.
 */
static inline void hcache_close(struct hcache *hcache)
{
	if (!hcache)
		return;
	if (hcache->base)
		munmap(hcache->base, hcache->region_bytes);
	if (hcache->bell >= 0)
		close(hcache->bell);
	if (hcache->socket >= 0)
		close(hcache->socket);
	free(hcache->free_slots);
	free(hcache->pending);
	free(hcache);
}

static inline int hcache__refusal(uint32_t code)
{
	static const int errnos[] = {
		EIO, EACCES, EPROTONOSUPPORT, EINVAL, EINVAL, EUSERS, EUSERS,
		EIO, ENOMEM,
	};

	return -(code < sizeof(errnos) / sizeof(*errnos) ? errnos[code] : EIO);
}

/* Receives exactly @length bytes; descriptors that come with them go to @fds. */
static inline int hcache__receive(int socket, void *to, size_t length, int fds[2])
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(2 * sizeof(int))];
	} control;
	char *at = (char *)to;

	while (length) {
		struct iovec part = { at, length };
		struct msghdr message;
		struct cmsghdr *head;
		ssize_t got;

		memset(&message, 0, sizeof(message));
		message.msg_iov = &part;
		message.msg_iovlen = 1;
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
		got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return errno == EAGAIN ? -ETIMEDOUT : -errno;
		if (!got)
			return -EPIPE;
		head = CMSG_FIRSTHDR(&message);
		if (head && head->cmsg_type == SCM_RIGHTS &&
		    head->cmsg_len == CMSG_LEN(2 * sizeof(int)) && fds[0] < 0)
			memcpy(fds, CMSG_DATA(head), 2 * sizeof(int));
		at += got;
		length -= (size_t)got;
	}
	return 0;
}

static inline int hcache__greet(struct hcache *hcache, const char *name,
				int fds[2])
{
	unsigned char hello[24 + HCACHE_NAME_BYTES_MAX];
	uint32_t head[2], words[4];
	size_t length = name ? strlen(name) : 0;
	int error;

	if (length > HCACHE_NAME_BYTES_MAX)
		return -EINVAL;
	head[0] = (uint32_t)(16 + length);
	head[1] = HCACHE_HELLO;
	words[0] = HCACHE_VERSION;
	words[1] = hcache->entries;
	words[2] = hcache->slots + 1;
	words[3] = 0;
	memcpy(hello, head, 8);
	memcpy(hello + 8, words, 16);
	if (length)
		memcpy(hello + 24, name, length);
	/* Who is refused at once may find the socket closed, with the reason in it. */
	(void)!send(hcache->socket, hello, 24 + length, MSG_NOSIGNAL);

	error = hcache__receive(hcache->socket, head, sizeof(head), fds);
	if (error)
		return error;
	if (head[1] == HCACHE_REFUSED && head[0] >= 4) {
		error = hcache__receive(hcache->socket, words, 4, fds);
		return error ? error : hcache__refusal(words[0]);
	}
	if (head[1] != HCACHE_WELCOME || head[0] != 16)
		return -EPROTO;
	error = hcache__receive(hcache->socket, words, 16, fds);
	if (error)
		return error;
	if (words[0] != HCACHE_VERSION || words[2] != hcache->entries ||
	    words[3] != hcache->slots + 1 || fds[0] < 0)
		return -EPROTO;
	hcache->client = words[1];
	return 0;
}

static inline int hcache__map(struct hcache *hcache, int memory)
{
	const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	const size_t page = HCACHE_PAGE_BYTES;
	struct stat status;
	void *base;

	hcache->completions_at = HCACHE_AT_SUBMISSIONS +
		(hcache->entries * sizeof(struct hcache_submission) + page - 1) / page * page;
	hcache->slots_at = hcache->completions_at +
		(hcache->entries * sizeof(struct hcache_raw_completion) + page - 1) / page * page;
	hcache->region_bytes = hcache->slots_at + (hcache->slots + 1) * page;
	if (fstat(memory, &status))
		return -errno;
	if ((size_t)status.st_size != hcache->region_bytes ||
	    (fcntl(memory, F_GET_SEALS) & seals) != seals)
		return -EPROTO;
	base = mmap(NULL, hcache->region_bytes, PROT_READ | PROT_WRITE,
		    MAP_SHARED, memory, 0);
	if (base == MAP_FAILED)
		return -errno;
	hcache->base = (unsigned char *)base;
	return 0;
}

/**
 * hcache_connect() - Become a client of a server.
 * @result:	Where to put the connection; NULL if it fails.
 * @path:	Socket of the server.
 * @options:	How to connect, or NULL.
 *
 * Return: 0; -ENOENT or -ECONNREFUSED if there is no server; -EACCES if we may
 * not connect; -EPROTONOSUPPORT if it speaks another version; -EUSERS if it has
 * its clients; -EINVAL for more entries, slots or name than it gives;
 * -ETIMEDOUT; others.
 */
static inline int hcache_connect(struct hcache **result, const char *path,
				 const struct hcache_options *options)
{
	static const struct hcache_options defaults = { NULL, 0, 0, 50, 0 };
	struct sockaddr_un address;
	struct hcache *hcache;
	struct timeval timeout;
	int fds[2] = { -1, -1 };
	uint32_t timeout_ms, slot;
	int error;

	*result = NULL;
	if (!options)
		options = &defaults;
	if (strlen(path) >= sizeof(address.sun_path) ||
	    options->entries > HCACHE_ENTRIES_MAX ||
	    (options->entries & (options->entries - 1)) ||
	    options->slots >= HCACHE_SLOTS_MAX)
		return -EINVAL;
	hcache = (struct hcache *)calloc(1, sizeof(*hcache));
	if (!hcache)
		return -ENOMEM;
	hcache->bell = -1;
	hcache->entries = options->entries ? options->entries : 256;
	hcache->slots = options->slots ? options->slots : 127;
	hcache->spin_us = options->spin_us;
	hcache->pending = (struct hcache__pending *)
		calloc(hcache->entries, sizeof(*hcache->pending));
	hcache->free_slots = (int32_t *)calloc(hcache->slots, sizeof(int32_t));
	hcache->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	error = hcache->socket < 0 ? -errno : -ENOMEM;
	if (hcache->socket < 0 || !hcache->pending || !hcache->free_slots)
		goto fail;
	for (slot = hcache->slots; slot; slot--)
		hcache->free_slots[hcache->free_count++] = (int32_t)slot - 1;

	timeout_ms = options->timeout_ms ? options->timeout_ms : 5000;
	timeout.tv_sec = (time_t)(timeout_ms / 1000);
	timeout.tv_usec = (suseconds_t)(timeout_ms % 1000 * 1000);
	setsockopt(hcache->socket, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
	setsockopt(hcache->socket, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
	memset(&address, 0, sizeof(address));
	address.sun_family = AF_UNIX;
	strcpy(address.sun_path, path);
	if (connect(hcache->socket, (struct sockaddr *)&address, sizeof(address))) {
		error = errno == EAGAIN ? -ETIMEDOUT : -errno;
		goto fail;
	}
	error = hcache__greet(hcache, options->name, fds);
	hcache->bell = fds[1];
	if (!error)
		error = hcache__map(hcache, fds[0]);
	if (fds[0] >= 0)
		close(fds[0]);
	if (error)
		goto fail;
	*result = hcache;
	return 0;

fail:
	hcache_close(hcache);
	return error;
}

/**
 * hcache_publish() - Let the server see what was submitted.
 * @hcache:	Connection.
 *
 * Wakes the server if it sleeps; else no system call.
 */
static inline void hcache_publish(struct hcache *hcache)
{
	uint32_t *sleeping = hcache__word(hcache, HCACHE_AT_SERVER_SLEEPING);
	const uint64_t one = 1;

	if (hcache->published == hcache->written)
		return;
	hcache->published = hcache->written;
	/* Told before, so that no entry waits for room for its completion. */
	__atomic_store_n(hcache__word(hcache, HCACHE_AT_COMPLETION_HEAD),
			 hcache->reaped, __ATOMIC_RELEASE);
	__atomic_store_n(hcache__word(hcache, HCACHE_AT_SUBMISSION_TAIL),
			 hcache->written, __ATOMIC_RELEASE);
	/* The server stores "sleeping", then looks for entries. */
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (__atomic_load_n(sleeping, __ATOMIC_RELAXED) &&
	    __atomic_exchange_n(sleeping, 0, __ATOMIC_RELAXED))
		(void)!write(hcache->bell, &one, sizeof(one));
}

/**
 * hcache_reap() - Take the next completion, if there is one.
 * @hcache:	Connection.
 * @completion:	Where to put it.
 *
 * Completions come in the order of submission.
 *
 * Return: 1 if there was one, 0 if not yet, or a negative errno.
 */
static inline int hcache_reap(struct hcache *hcache,
			      struct hcache_completion *completion)
{
	uint32_t ready = __atomic_load_n(hcache__word(hcache, HCACHE_AT_COMPLETION_TAIL),
					 __ATOMIC_ACQUIRE) - hcache->reaped;
	uint32_t place = hcache->reaped & (hcache->entries - 1);
	struct hcache_raw_completion raw;

	if (!ready)
		return 0;
	if (ready > hcache->published - hcache->reaped)
		return -EPROTO;
	memcpy(&raw, hcache->base + hcache->completions_at + place * sizeof(raw),
	       sizeof(raw));
	if (raw.sequence != hcache->reaped + 1)
		return -EPROTO;
	hcache->reaped = raw.sequence;
	/* Not the server's: callers may have handed in a pointer. */
	completion->user_data = hcache->pending[place].user_data;
	completion->value = raw.value;
	completion->status = raw.status;
	completion->slot = hcache->pending[place].slot;
	return 1;
}

static inline uint64_t hcache__now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* Waits for a byte of the server's, or its end. */
static inline int hcache__sleep(struct hcache *hcache)
{
	struct pollfd socket = { hcache->socket, POLLIN, 0 };
	char bytes[64];
	ssize_t got;

	if (poll(&socket, 1, -1) < 0)
		return errno == EINTR ? 0 : -errno;
	got = recv(hcache->socket, bytes, sizeof(bytes), MSG_DONTWAIT);
	if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR)))
		return 0;
	return -EPIPE;
}

/**
 * hcache_wait() - Publish, and wait until a completion can be reaped.
 * @hcache:	Connection.
 *
 * Polls first, then sleeps.
 *
 * Return: 0, also if nothing is under way, or a negative errno.
 */
static inline int hcache_wait(struct hcache *hcache)
{
	uint32_t *sleeping = hcache__word(hcache, HCACHE_AT_CLIENT_SLEEPING);
	uint64_t begin;
	int turn, error;

	hcache_publish(hcache);
	if (hcache->written == hcache->reaped || hcache__has_completion(hcache))
		return 0;
	begin = hcache__now_us();
	while (hcache__now_us() - begin < hcache->spin_us) {
		for (turn = 0; turn < 64; turn++) {
			if (hcache__has_completion(hcache))
				return 0;
		}
		/* The server may wait for this very processor. */
		sched_yield();
	}
	for (;;) {
		__atomic_store_n(sleeping, 1, __ATOMIC_RELAXED);
		/* The server publishes completions, then looks whether we sleep. */
		__atomic_thread_fence(__ATOMIC_SEQ_CST);
		error = hcache__has_completion(hcache) ? 0 : hcache__sleep(hcache);
		__atomic_store_n(sleeping, 0, __ATOMIC_RELAXED);
		if (hcache__has_completion(hcache))
			return 0;
		if (error)
			return error;
	}
}

/* Writes an entry; @entry->slot is meant if @has_slot. */
static inline int hcache__submit(struct hcache *hcache,
				 struct hcache_submission *entry, int has_slot)
{
	uint32_t place = hcache->written & (hcache->entries - 1);

	if (hcache->written - hcache->reaped == hcache->entries)
		return -EAGAIN;
	hcache->written++;
	entry->sequence = hcache->written;
	memcpy(hcache->base + HCACHE_AT_SUBMISSIONS + place * sizeof(*entry),
	       entry, sizeof(*entry));
	hcache->pending[place].user_data = entry->user_data;
	hcache->pending[place].slot = has_slot ? (int32_t)entry->slot : -1;
	return 0;
}

static inline void hcache__page_entry(struct hcache_submission *entry,
				      enum hcache_op op,
				      struct hcache_handle handle)
{
	memset(entry, 0, sizeof(*entry));
	entry->op = (uint8_t)op;
	entry->pool = handle.pool;
	entry->object = handle.object;
	entry->index = handle.index;
}

/* Does one operation and waits for its completion. */
static inline int hcache__call(struct hcache *hcache,
			       struct hcache_submission *entry,
			       struct hcache_completion *completion)
{
	int error;

	if (hcache->written != hcache->reaped)
		return -EBUSY;
	error = hcache__submit(hcache, entry, 0);
	if (!error)
		error = hcache_wait(hcache);
	if (error)
		return error;
	error = hcache_reap(hcache, completion);
	if (error != 1)
		return error ? error : -EPROTO;
	switch (completion->status) {
	case HCACHE_OK:
	case HCACHE_MISS:
	case HCACHE_PUT_REFUSED:
		return 0;
	case HCACHE_NO_SUCH_POOL:
		return -ENOENT;
	case HCACHE_TOO_MANY_POOLS:
		return -ENOSPC;
	case HCACHE_FAILED:
		return -EIO;
	default:
		return -EINVAL;
	}
}

/**
 * hcache_create_pool() - Make a pool, or join the shared pool of a key.
 * @hcache:	Connection.
 * @options:	What it is to be; NULL for a private pool.
 * @pool:	Where to put its number.
 *
 * Return: 0 or a negative errno.
 */
static inline int hcache_create_pool(struct hcache *hcache,
				     const struct hcache_pool_options *options,
				     uint32_t *pool)
{
	struct hcache_completion completion;
	struct hcache_submission entry;
	int error;

	memset(&entry, 0, sizeof(entry));
	entry.op = HCACHE_CREATE_POOL;
	if (options && options->shared) {
		entry.flags |= HCACHE_CREATE_SHARED;
		entry.key_low = options->key_low;
		entry.key_high = options->key_high;
	}
	if (options && options->limited) {
		entry.flags |= HCACHE_CREATE_CAPACITY;
		entry.capacity_pages = options->capacity_pages;
	}
	error = hcache__call(hcache, &entry, &completion);
	if (!error)
		*pool = (uint32_t)completion.value;
	return error;
}

/**
 * hcache_destroy_pool() - Leave a pool; with its last client it goes.
 * @hcache:	Connection.
 * @pool:	Pool.
 *
 * Return: 0 or a negative errno.
 */
static inline int hcache_destroy_pool(struct hcache *hcache, uint32_t pool)
{
	struct hcache_handle handle = { pool, 0, 0 };
	struct hcache_completion completion;
	struct hcache_submission entry;

	hcache__page_entry(&entry, HCACHE_DESTROY_POOL, handle);
	return hcache__call(hcache, &entry, &completion);
}

/**
 * hcache_put() - Put a page.
 * @hcache:	Connection.
 * @handle:	Name to put it under.
 * @page:	4096 bytes.
 *
 * Return: 1 if it was stored; 0 if it was refused, and no older page is left
 * under the handle either; or a negative errno.
 */
static inline int hcache_put(struct hcache *hcache, struct hcache_handle handle,
			     const void *page)
{
	struct hcache_completion completion;
	struct hcache_submission entry;
	int error;

	if (hcache->written != hcache->reaped)
		return -EBUSY;
	hcache__page_entry(&entry, HCACHE_PUT, handle);
	entry.slot = hcache->slots;
	memcpy(hcache->base + hcache->slots_at + (size_t)entry.slot * HCACHE_PAGE_BYTES,
	       page, HCACHE_PAGE_BYTES);
	error = hcache__call(hcache, &entry, &completion);
	return error ? error : completion.status == HCACHE_OK;
}

/**
 * hcache_get() - Get a page.
 * @hcache:	Connection.
 * @handle:	Its name.
 * @page:	Room for 4096 bytes; left alone if there is none.
 *
 * Return: 1 if there was one, 0 if not, or a negative errno.
 */
static inline int hcache_get(struct hcache *hcache, struct hcache_handle handle,
			     void *page)
{
	struct hcache_completion completion;
	struct hcache_submission entry;
	int error;

	hcache__page_entry(&entry, HCACHE_GET, handle);
	entry.slot = hcache->slots;
	error = hcache__call(hcache, &entry, &completion);
	if (error || completion.status != HCACHE_OK)
		return error;
	memcpy(page, hcache->base + hcache->slots_at +
		     (size_t)entry.slot * HCACHE_PAGE_BYTES, HCACHE_PAGE_BYTES);
	return 1;
}

static inline int64_t hcache__flush(struct hcache *hcache, enum hcache_op op,
				    struct hcache_handle handle, uint32_t last)
{
	struct hcache_completion completion;
	struct hcache_submission entry;
	int error;

	hcache__page_entry(&entry, op, handle);
	entry.last = last;
	error = hcache__call(hcache, &entry, &completion);
	return error ? error : (int64_t)completion.value;
}

/**
 * hcache_flush() - Drop a page.
 * @hcache:	Connection.
 * @handle:	Its name.
 *
 * Return: 1 if it was there, 0 if not, or a negative errno.
 */
static inline int64_t hcache_flush(struct hcache *hcache,
				   struct hcache_handle handle)
{
	return hcache__flush(hcache, HCACHE_FLUSH, handle, 0);
}

/**
 * hcache_flush_range() - Drop an object's pages of a range of indices.
 * @hcache:	Connection.
 * @first:	Name of the first.
 * @last:	Index of the last, not below the first's.
 *
 * Return: How many there were, or a negative errno.
 */
static inline int64_t hcache_flush_range(struct hcache *hcache,
					 struct hcache_handle first,
					 uint32_t last)
{
	return hcache__flush(hcache, HCACHE_FLUSH_RANGE, first, last);
}

/**
 * hcache_flush_object() - Drop an object's pages.
 * @hcache:	Connection.
 * @pool:	Pool.
 * @object:	Object.
 *
 * Return: How many there were, or a negative errno.
 */
static inline int64_t hcache_flush_object(struct hcache *hcache, uint32_t pool,
					  uint64_t object)
{
	struct hcache_handle handle = { pool, 0, object };

	return hcache__flush(hcache, HCACHE_FLUSH_OBJECT, handle, 0);
}

/**
 * hcache_flush_pool() - Drop all pages of a pool.
 * @hcache:	Connection.
 * @pool:	Pool.
 *
 * Return: How many there were, or a negative errno.
 */
static inline int64_t hcache_flush_pool(struct hcache *hcache, uint32_t pool)
{
	struct hcache_handle handle = { pool, 0, 0 };

	return hcache__flush(hcache, HCACHE_FLUSH_POOL, handle, 0);
}

/**
 * hcache_reserve() - Take a slot for a batch.
 * @hcache:	Connection.
 *
 * It is the caller's until it is handed in with a get or put, and comes back
 * with the completion.
 *
 * Return: Number of the slot, or -1 if none is free.
 */
static inline int32_t hcache_reserve(struct hcache *hcache)
{
	if (!hcache->free_count)
		return -1;
	return hcache->free_slots[--hcache->free_count];
}

/**
 * hcache_release() - Give a slot back.
 * @hcache:	Connection.
 * @slot:	A slot that is the caller's, or -1 for none.
 */
static inline void hcache_release(struct hcache *hcache, int32_t slot)
{
	if (slot >= 0)
		hcache->free_slots[hcache->free_count++] = slot;
}

/**
 * hcache_page() - The page in a slot.
 * @hcache:	Connection.
 * @slot:	A slot that is the caller's.
 *
 * Return: Its 4096 bytes.
 */
static inline void *hcache_page(struct hcache *hcache, int32_t slot)
{
	return hcache->base + hcache->slots_at + (size_t)slot * HCACHE_PAGE_BYTES;
}

/**
 * hcache_submit_put() - Submit a put of the page in a slot.
 * @hcache:	Connection.
 * @handle:	Name to put it under.
 * @slot:	A slot that is the caller's.
 * @user_data:	Comes back with the completion.
 *
 * The server may not see it before hcache_publish() or hcache_wait().
 *
 * Return: 0, or -EAGAIN if completions must be reaped first.
 */
static inline int hcache_submit_put(struct hcache *hcache,
				    struct hcache_handle handle, int32_t slot,
				    uint64_t user_data)
{
	struct hcache_submission entry;

	hcache__page_entry(&entry, HCACHE_PUT, handle);
	entry.slot = (uint32_t)slot;
	entry.user_data = user_data;
	return hcache__submit(hcache, &entry, 1);
}

/**
 * hcache_submit_get() - Submit a get of a page into a slot.
 * @hcache:	Connection.
 * @handle:	Name of the page.
 * @slot:	A slot that is the caller's.
 * @user_data:	Comes back with the completion.
 *
 * Return: 0, or -EAGAIN if completions must be reaped first.
 */
static inline int hcache_submit_get(struct hcache *hcache,
				    struct hcache_handle handle, int32_t slot,
				    uint64_t user_data)
{
	struct hcache_submission entry;

	hcache__page_entry(&entry, HCACHE_GET, handle);
	entry.slot = (uint32_t)slot;
	entry.user_data = user_data;
	return hcache__submit(hcache, &entry, 1);
}

/**
 * hcache_submit_flush() - Submit the flush of a page.
 * @hcache:	Connection.
 * @handle:	Name of the page.
 * @user_data:	Comes back with the completion.
 *
 * Return: 0, or -EAGAIN if completions must be reaped first.
 */
static inline int hcache_submit_flush(struct hcache *hcache,
				      struct hcache_handle handle,
				      uint64_t user_data)
{
	struct hcache_submission entry;

	hcache__page_entry(&entry, HCACHE_FLUSH, handle);
	entry.user_data = user_data;
	return hcache__submit(hcache, &entry, 0);
}

#ifdef __cplusplus
}
#endif

#endif /* PLIMSOLL_HCACHE_H */
