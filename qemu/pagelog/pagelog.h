/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Plimsoll's page log: a QEMU TCG plugin that models each vCPU's TLB and the
 * accessed and dirty flags of nested page tables, and records every page walk.
 *
 *   main.c     start, end, selection of instrumented instructions
 *   options.c  options of the command line
 *   model.c    TLBs, flags, the filter of references: accesses in, records out
 *   ring.c     records in shared memory
 *   complain.c what it reports of itself
 *   api1.c, api4.c   differences between QEMU 7.2 and 10; one of them is compiled in
 */
#ifndef PLIMSOLL_PAGELOG_H
#define PLIMSOLL_PAGELOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "qemu_api.h"

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define likely(x)	__builtin_expect(!!(x), 1)
#define unlikely(x)	__builtin_expect(!!(x), 0)

#define VCPUS_MAX	32
#define PAGE_SHIFT	12
#define LARGE_SHIFT	21
#define GIB_4		(1ull << 32)
#define INSN_BYTES_MAX	15

/* Entries and ways of a TLB; none if it has no entries. */
struct tlb_size {
	u32 entries;
	u32 ways;
};

/* Options of the command line. */
struct options {
	char *ring;
	u64 ram_bytes;
	u64 below_4g_bytes;
	u64 interval_instructions;	/* 0: no intervals */
	struct tlb_size data;
	struct tlb_size second;
	struct tlb_size fetch;
	u32 filter_pages;
	u32 tlb_page_shift;
	bool walks;
	bool references;
	bool marks;			/* record only between the guest's marks */
};

extern struct options options;

int options_parse(int argc, char **argv);

/* Records, see crates/pagelog/src/record.rs. */
#define KIND(kind, vcpu)	((u64)(kind) << 61 | (u64)(vcpu) << 56)
#define RECORD_WALK		0
#define RECORD_CLOCK		1
#define RECORD_INTERVAL		2
#define RECORD_MARK		3
#define RECORD_ENTER		4
#define RECORD_LEAVE		5
#define RECORD_ACCESSES		6
#define RECORD_END		7
#define WALK_STEP_SHIFT		32
#define WALK_STEP_MAX		((1u << 20) - 1)
#define WALK_SETS_DIRTY		(1ull << 52)
#define WALK_SETS_ACCESSED	(1ull << 53)
#define WALK_FETCH		(1ull << 54)
#define BY_WRITE		(1ull << 55)
#define COUNT_MASK		((1ull << 56) - 1)

/* Counters of the ring. */
struct ring_counts {
	u64 records;
	u64 waits;
	u64 lost;
};

int ring_open(u32 vcpus);
void ring_put(u64 record);
void ring_publish(void);
struct ring_counts ring_close(void);

int model_start(u32 vcpus);
void model_vcpu_starts(unsigned int vcpu);
void model_end(void);
void model_on_access(unsigned int vcpu, qemu_plugin_meminfo_t info, u64 address,
		     void *data);
void model_on_reference(unsigned int vcpu, qemu_plugin_meminfo_t info, u64 address,
			void *data);
void model_on_fetch(unsigned int vcpu, void *data);
void *model_fetch_place(u64 address, u32 page);
void model_on_new_table(unsigned int vcpu, void *data);
void model_on_flush(unsigned int vcpu, void *data);
void model_flush_page(unsigned int vcpu, u64 address);
void model_on_mark(unsigned int vcpu, void *data);

/* Pages of RAM are numbered without gaps. */
#define NO_PAGE		UINT32_MAX
#define RAM_PAGES_MAX	UINT32_MAX

/* Functions that differ between the two interfaces. */
extern const u32 api_version;
int api_start(u32 vcpus);
void api_vcpu_starts(unsigned int vcpu);
void api_count(struct qemu_plugin_tb *tb, size_t instructions);
u64 api_instructions(unsigned int vcpu);
size_t api_insn_bytes(const struct qemu_plugin_insn *insn, u8 *bytes);
u32 api_ram_page(u64 physical);
void api_on_invlpg(struct qemu_plugin_insn *insn, const u8 *bytes, size_t count);

void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
