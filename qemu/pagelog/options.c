// SPDX-License-Identifier: GPL-2.0-or-later
/* Options of the plugin: key=value each, all checked before the guest starts. */
#include <stdlib.h>
#include <string.h>

#include "pagelog.h"

#define INTERVAL_MIN	1000		/* instructions */
#define ENTRIES_MAX	(1u << 16)
#define FILTER_MAX	4096

struct options options = {
	.data = { 64, 4 },
	.filter_pages = 64,
	.tlb_page_shift = PAGE_SHIFT,
	.walks = true,
};

/* A decimal number from @min to @max that ends at @end, or 0 with a complaint. */
static bool number(const char *key, const char *text, char end, u64 min, u64 max,
		   u64 *value, const char **rest)
{
	char *after;
	unsigned long long parsed;

	parsed = strtoull(text, &after, 10);
	if (*text < '0' || *text > '9' || *after != end || parsed < min ||
	    parsed > max) {
		complain("%s=%s: expected a number from %llu to %llu", key, text,
			 (unsigned long long)min, (unsigned long long)max);
		return false;
	}
	*value = parsed;
	if (rest)
		*rest = after + 1;
	return true;
}

static bool whole(const char *key, const char *text, u64 min, u64 max, u64 *value)
{
	return number(key, text, 0, min, max, value, NULL);
}

/* ENTRIESxWAYS, with a power of two of sets. */
static bool tlb(const char *key, const char *text, struct tlb_size *size)
{
	const char *ways_text;
	u64 entries, ways, sets;

	if (!number(key, text, 'x', 1, ENTRIES_MAX, &entries, &ways_text) ||
	    !whole(key, ways_text, 1, entries, &ways))
		return false;
	sets = entries / ways;
	if (sets * ways != entries || sets & (sets - 1)) {
		complain("%s=%s: entries / ways must be a power of two", key, text);
		return false;
	}
	size->entries = entries;
	size->ways = ways;
	return true;
}

static bool flag(const char *key, const char *text, bool *value)
{
	*value = !strcmp(text, "on");
	if (*value || !strcmp(text, "off"))
		return true;
	complain("%s=%s: expected on or off", key, text);
	return false;
}

static bool page(const char *key, const char *text, u32 *shift)
{
	if (!strcmp(text, "4096"))
		*shift = PAGE_SHIFT;
	else if (!strcmp(text, "2097152"))
		*shift = LARGE_SHIFT;
	else {
		complain("%s=%s: expected 4096 or 2097152", key, text);
		return false;
	}
	return true;
}

static bool option(const char *key, const char *text)
{
	const u64 ram_max = (u64)RAM_PAGES_MAX << PAGE_SHIFT;
	u64 pages;

	if (!strcmp(key, "ring")) {
		free(options.ring);
		options.ring = strdup(text);
		return options.ring;
	}
	if (!strcmp(key, "ram"))
		return whole(key, text, 1ull << PAGE_SHIFT, ram_max,
			     &options.ram_bytes);
	if (!strcmp(key, "below_4g"))
		return whole(key, text, 1ull << PAGE_SHIFT, GIB_4,
			     &options.below_4g_bytes);
	if (!strcmp(key, "tlb"))
		return tlb(key, text, &options.data);
	if (!strcmp(key, "tlb2"))
		return tlb(key, text, &options.second);
	if (!strcmp(key, "itlb"))
		return tlb(key, text, &options.fetch);
	if (!strcmp(key, "tlb_page"))
		return page(key, text, &options.tlb_page_shift);
	if (!strcmp(key, "interval_instructions"))
		return whole(key, text, INTERVAL_MIN, COUNT_MASK,
			     &options.interval_instructions);
	if (!strcmp(key, "walks"))
		return flag(key, text, &options.walks);
	if (!strcmp(key, "references"))
		return flag(key, text, &options.references);
	if (!strcmp(key, "marks"))
		return flag(key, text, &options.marks);
	if (!strcmp(key, "filter")) {
		if (!whole(key, text, 1, FILTER_MAX, &pages))
			return false;
		options.filter_pages = pages;
		return true;
	}
	complain("there is no option %s", key);
	return false;
}

static bool page_multiple(const char *key, u64 bytes)
{
	if (!(bytes & ((1u << PAGE_SHIFT) - 1)))
		return true;
	complain("%s=%llu: expected a multiple of 4096", key,
		 (unsigned long long)bytes);
	return false;
}

/**
 * options_parse() - Read the plugin's options into &options.
 * @argc:	How many there are.
 * @argv:	Each as key=value.
 *
 * Return: 0, or -1 after a complaint.
 */
int options_parse(int argc, char **argv)
{
	for (int i = 0; i < argc; i++) {
		char *value = strchr(argv[i], '=');

		if (!value) {
			complain("%s: expected key=value", argv[i]);
			return -1;
		}
		*value++ = 0;
		if (!option(argv[i], value))
			return -1;
	}
	if (!options.ring || !options.ram_bytes) {
		complain("ring=PATH and ram=BYTES must be given");
		return -1;
	}
	if (!options.below_4g_bytes)
		options.below_4g_bytes = options.ram_bytes;
	if (!page_multiple("ram", options.ram_bytes) ||
	    !page_multiple("below_4g", options.below_4g_bytes))
		return -1;
	if (options.below_4g_bytes > options.ram_bytes ||
	    options.below_4g_bytes > GIB_4) {
		complain("below_4g: expected at most ram and at most 4 GiB; it must be given for more RAM");
		return -1;
	}
	if (!options.walks && !options.references) {
		complain("walks=off and references=off: nothing is left to record");
		return -1;
	}
	if (options.references && options.tlb_page_shift != PAGE_SHIFT) {
		complain("references=on needs tlb_page=4096: with large pages the 4 KiB pages cannot be distinguished");
		return -1;
	}
	return 0;
}
