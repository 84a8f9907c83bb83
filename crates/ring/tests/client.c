/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Proves plimsoll_hcache.h: prints its layout; with a socket, uses its server with all calls; with more, only connects. */
#include "plimsoll_hcache.h"

#include <inttypes.h>
#include <stdio.h>

#define NUMBER(name) printf("%s %" PRId64 "\n", #name, (int64_t)(name))
#define CHECK(what)                                                          \
	do {                                                                 \
		if (!(what)) {                                               \
			fprintf(stderr, "line %d: not so: %s\n", __LINE__, #what); \
			exit(1);                                             \
		}                                                            \
	} while (0)

static void print_layout(void)
{
	NUMBER(HCACHE_VERSION);
	NUMBER(HCACHE_MAGIC);
	NUMBER(HCACHE_NAME_BYTES_MAX);
	NUMBER(HCACHE_ENTRIES_MAX);
	NUMBER(HCACHE_SLOTS_MAX);
	NUMBER(HCACHE_HELLO);
	NUMBER(HCACHE_STATS);
	NUMBER(HCACHE_RESIZE);
	NUMBER(HCACHE_WELCOME);
	NUMBER(HCACHE_STATS_TEXT);
	NUMBER(HCACHE_RESIZED);
	NUMBER(HCACHE_REFUSED);
	NUMBER(HCACHE_AT_MAGIC);
	NUMBER(HCACHE_AT_VERSION);
	NUMBER(HCACHE_AT_ENTRIES);
	NUMBER(HCACHE_AT_SLOTS);
	NUMBER(HCACHE_AT_SUBMISSION_TAIL);
	NUMBER(HCACHE_AT_SUBMISSION_HEAD);
	NUMBER(HCACHE_AT_COMPLETION_TAIL);
	NUMBER(HCACHE_AT_COMPLETION_HEAD);
	NUMBER(HCACHE_AT_SERVER_SLEEPING);
	NUMBER(HCACHE_AT_CLIENT_SLEEPING);
	NUMBER(HCACHE_AT_SUBMISSIONS);
	NUMBER(HCACHE_NOP);
	NUMBER(HCACHE_PUT);
	NUMBER(HCACHE_GET);
	NUMBER(HCACHE_FLUSH);
	NUMBER(HCACHE_FLUSH_RANGE);
	NUMBER(HCACHE_FLUSH_OBJECT);
	NUMBER(HCACHE_FLUSH_POOL);
	NUMBER(HCACHE_CREATE_POOL);
	NUMBER(HCACHE_DESTROY_POOL);
	NUMBER(HCACHE_CREATE_SHARED);
	NUMBER(HCACHE_CREATE_CAPACITY);
	NUMBER(HCACHE_OK);
	NUMBER(HCACHE_MISS);
	NUMBER(HCACHE_PUT_REFUSED);
	NUMBER(HCACHE_TORN);
	NUMBER(HCACHE_BAD_OP);
	NUMBER(HCACHE_BAD_FLAGS);
	NUMBER(HCACHE_BAD_SLOT);
	NUMBER(HCACHE_BAD_RANGE);
	NUMBER(HCACHE_NO_SUCH_POOL);
	NUMBER(HCACHE_TOO_MANY_POOLS);
	NUMBER(HCACHE_FAILED);
	NUMBER(offsetof(struct hcache_submission, sequence));
	NUMBER(offsetof(struct hcache_submission, op));
	NUMBER(offsetof(struct hcache_submission, flags));
	NUMBER(offsetof(struct hcache_submission, reserved));
	NUMBER(offsetof(struct hcache_submission, pool));
	NUMBER(offsetof(struct hcache_submission, index));
	NUMBER(offsetof(struct hcache_submission, object));
	NUMBER(offsetof(struct hcache_submission, slot));
	NUMBER(offsetof(struct hcache_submission, last));
	NUMBER(offsetof(struct hcache_submission, user_data));
	NUMBER(offsetof(struct hcache_submission, capacity_pages));
	NUMBER(offsetof(struct hcache_submission, key_low));
	NUMBER(offsetof(struct hcache_submission, key_high));
	NUMBER(offsetof(struct hcache_raw_completion, user_data));
	NUMBER(offsetof(struct hcache_raw_completion, sequence));
	NUMBER(offsetof(struct hcache_raw_completion, status));
	NUMBER(offsetof(struct hcache_raw_completion, value));
}

static void sign(unsigned char *page, uint32_t index)
{
	memset(page, (int)(index & 0xff), HCACHE_PAGE_BYTES);
	memcpy(page, &index, sizeof(index));
}

static int is_signed(const unsigned char *page, uint32_t index)
{
	unsigned char expected[HCACHE_PAGE_BYTES];

	sign(expected, index);
	return memcmp(page, expected, sizeof(expected)) == 0;
}

static void use_simple_calls(struct hcache *hcache)
{
	struct hcache_pool_options shared = { 1, 2, 3, 1, 1000 };
	struct hcache_handle handle = { 0, 3, 7 };
	unsigned char page[HCACHE_PAGE_BYTES], got[HCACHE_PAGE_BYTES];
	uint32_t index;

	CHECK(hcache_create_pool(hcache, NULL, &handle.pool) == 0);
	sign(page, 3);
	CHECK(hcache_get(hcache, handle, got) == 0);
	CHECK(hcache_put(hcache, handle, page) == 1);
	CHECK(hcache_get(hcache, handle, got) == 1 && is_signed(got, 3));
	CHECK(hcache_get(hcache, handle, got) == 0);
	for (index = 0; index < 10; index++) {
		handle.index = index;
		CHECK(hcache_put(hcache, handle, page) == 1);
	}
	handle.index = 0;
	CHECK(hcache_flush(hcache, handle) == 1);
	CHECK(hcache_flush(hcache, handle) == 0);
	CHECK(hcache_flush_range(hcache, handle, 2) == 2);
	handle.index = 3;
	CHECK(hcache_flush_range(hcache, handle, 2) == -EINVAL);
	CHECK(hcache_put(hcache, handle, page) == 1);
	CHECK(hcache_flush_object(hcache, handle.pool, 7) == 7);
	CHECK(hcache_put(hcache, handle, page) == 1);
	CHECK(hcache_flush_pool(hcache, handle.pool) == 1);
	CHECK(hcache_destroy_pool(hcache, handle.pool) == 0);
	CHECK(hcache_put(hcache, handle, page) == -ENOENT);
	CHECK(hcache_destroy_pool(hcache, handle.pool) == -ENOENT);

	CHECK(hcache_create_pool(hcache, &shared, &handle.pool) == 0);
	CHECK(hcache_put(hcache, handle, page) == 1);
	CHECK(hcache_get(hcache, handle, got) == 1);
	CHECK(hcache_get(hcache, handle, got) == 1 && is_signed(got, 3));
}

/* Puts, then gets 1000 pages through the few slots there are. */
static void use_batches(struct hcache *hcache)
{
	struct hcache_handle handle = { 0, 0, 9 };
	struct hcache_completion done;
	int round, found;
	uint32_t reaped;
	int32_t slot;

	CHECK(hcache_create_pool(hcache, NULL, &handle.pool) == 0);
	for (round = 0; round < 2; round++) {
		handle.index = 0;
		for (reaped = 0; reaped < 1000; ) {
			while (handle.index < 1000 && (slot = hcache_reserve(hcache)) >= 0) {
				if (round == 0) {
					sign((unsigned char *)hcache_page(hcache, slot), handle.index);
					CHECK(hcache_submit_put(hcache, handle, slot, handle.index) == 0);
				} else {
					CHECK(hcache_submit_get(hcache, handle, slot, handle.index) == 0);
				}
				handle.index++;
			}
			CHECK(hcache_flush_pool(hcache, handle.pool) == -EBUSY);
			CHECK(hcache_wait(hcache) == 0);
			while ((found = hcache_reap(hcache, &done)) == 1) {
				CHECK(done.status == HCACHE_OK && done.user_data == reaped);
				CHECK(is_signed((unsigned char *)hcache_page(hcache, done.slot), reaped));
				hcache_release(hcache, done.slot);
				reaped++;
			}
			CHECK(found == 0);
		}
	}
	for (reaped = 0; reaped < hcache->entries; reaped++)
		CHECK(hcache_submit_flush(hcache, handle, 5) == 0);
	CHECK(hcache_submit_flush(hcache, handle, 5) == -EAGAIN);
	while (reaped) {
		CHECK(hcache_wait(hcache) == 0);
		while (hcache_reap(hcache, &done) == 1) {
			CHECK(done.user_data == 5 && done.value == 0 && done.slot == -1);
			reaped--;
		}
	}
}

/* A server that answers with what it was not handed. */
static void use_liar(const char *path)
{
	struct hcache_options options = { "lied to", 8, 2, 0, 0 };
	struct hcache_handle handle = { 1, 0, 0 };
	struct hcache_completion done;
	struct hcache *hcache;

	CHECK(hcache_connect(&hcache, path, &options) == 0);
	CHECK(hcache_submit_flush(hcache, handle, 3) == 0);
	CHECK(hcache_wait(hcache) == 0);
	CHECK(hcache_reap(hcache, &done) == 1);
	CHECK(done.user_data == 3 && done.slot == -1);
	hcache_close(hcache);
}

int main(int argc, char **argv)
{
	struct hcache_options options = { "client.c", 64, 15, 0, 0 };
	struct hcache *hcache;
	int error;

	if (argc < 2) {
		print_layout();
		return 0;
	}
	if (argc > 2 && !strcmp(argv[2], "liar")) {
		use_liar(argv[1]);
		return 0;
	}
	if (argc > 2) {
		error = hcache_connect(&hcache, argv[1], NULL);
		hcache_close(hcache);
		puts(error ? strerror(-error) : "connected");
		return 0;
	}
	CHECK(hcache_connect(&hcache, "/nowhere/hcache", NULL) == -ENOENT);
	options.entries = 3;
	CHECK(hcache_connect(&hcache, argv[1], &options) == -EINVAL);
	options.entries = HCACHE_ENTRIES_MAX;
	CHECK(hcache_connect(&hcache, argv[1], &options) == -EINVAL);
	options.entries = 64;
	CHECK(hcache_connect(&hcache, argv[1], &options) == 0);
	use_simple_calls(hcache);
	use_batches(hcache);
	hcache_close(hcache);
	CHECK(hcache_connect(&hcache, argv[1], NULL) == 0);
	use_simple_calls(hcache);
	use_batches(hcache);

	/* The server ends when it reads this; the client must see it. */
	puts("done");
	fflush(stdout);
	do {
		struct hcache_handle handle = { 0, 0, 0 };

		error = (int)hcache_flush(hcache, handle);
	} while (error == -ENOENT);
	CHECK(error == -EPIPE);
	hcache_close(hcache);
	return 0;
}
