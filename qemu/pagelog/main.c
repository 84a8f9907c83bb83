// SPDX-License-Identifier: GPL-2.0-or-later
/* Start and end of the plugin, and the instructions it instruments. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pagelog.h"

/*
 * Address of RAM in this process: plugins get code only by its host address.
 * Determined when the first code is translated, as the one file of RAM's size
 * that is mapped from its beginning.
 */
static u64 ram_start;
static pthread_once_t ram_once = PTHREAD_ONCE_INIT;

static void find_ram(void)
{
	unsigned long long start, end, offset, inode, of = 0;
	unsigned long long from = 0, until = 0;
	u32 found = 0;
	char line[512];
	FILE *maps;

	maps = fopen("/proc/self/maps", "r");
	while (maps && fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%llx-%llx rw%*s %llx %*s %llu", &start, &end,
			   &offset, &inode) != 4 || !inode)
			continue;
		/* madvise() may have split a mapping. */
		if (inode != of || start != until || offset != start - from)
			from = offset ? 0 : start;
		of = inode;
		until = end;
		if (from && end - from == options.ram_bytes) {
			ram_start = from;
			found++;
		}
	}
	if (maps)
		fclose(maps);
	if (found != 1) {
		ram_start = 0;
		complain("itlb: no single file of the RAM's size is mapped (memory-backend-memfd): fetches are not recorded");
	}
}

static u32 page_of_code(const struct qemu_plugin_insn *insn)
{
	u64 place = (u64)qemu_plugin_insn_haddr(insn);

	pthread_once(&ram_once, find_ram);
	if (!ram_start || place - ram_start >= options.ram_bytes)
		return NO_PAGE;
	return (place - ram_start) >> PAGE_SHIFT;
}

/* A block's instructions are in one page or two. */
static void watch_fetches(struct qemu_plugin_tb *tb, size_t count)
{
	u64 before = UINT64_MAX;

	for (size_t i = 0; i < count; i += count > 1 ? count - 1 : 1) {
		const struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		u64 address = qemu_plugin_insn_vaddr(insn);
		u32 page = page_of_code(insn);
		void *place;

		if (address >> PAGE_SHIFT == before || page == NO_PAGE)
			continue;
		before = address >> PAGE_SHIFT;
		place = model_fetch_place(address, page);
		if (place)
			qemu_plugin_register_vcpu_tb_exec_cb(tb, model_on_fetch,
							     QEMU_PLUGIN_CB_NO_REGS,
							     place);
	}
}

/* nopl DISP32(%rax,%rax,1) whose DISP32 is 0x4d415200 and the number of a mark. */
static bool is_mark(const u8 *bytes, size_t count)
{
	static const u8 begin[] = { 0x0f, 0x1f, 0x84, 0x00 };
	static const u8 end[] = { 0x52, 0x41, 0x4d };

	return count == 8 && !memcmp(bytes, begin, 4) && !memcmp(bytes + 5, end, 3);
}

static void on_exec(struct qemu_plugin_insn *insn, qemu_exec_cb cb, u64 data)
{
	qemu_plugin_register_vcpu_insn_exec_cb(insn, cb, QEMU_PLUGIN_CB_NO_REGS,
					       (void *)data);
}

/* Instructions that invalidate translations: MOV to CR0, CR3 and CR4, INVLPG, INVPCID. */
static void watch_flushes(struct qemu_plugin_insn *insn, const u8 *bytes, size_t count)
{
	bool upper = false;
	size_t at = 0;
	u8 field;

	while (at < count && (bytes[at] == 0x66 || bytes[at] == 0xf2 ||
			      bytes[at] == 0xf3 || (bytes[at] & 0xf0) == 0x40)) {
		/* REX.R: one of the registers from CR8 on. */
		upper = (bytes[at] & 0xf4) == 0x44;
		at++;
	}
	if (count < at + 3 || bytes[at] != 0x0f)
		return;
	field = bytes[at + 2] >> 3 & 7;
	if (bytes[at + 1] == 0x22 && !upper) {
		if (field == 3)
			on_exec(insn, model_on_new_table, 0);
		else if (field == 0 || field == 4)
			on_exec(insn, model_on_flush, 0);
	} else if (bytes[at + 1] == 0x01 && field == 7 && bytes[at + 2] >> 6 != 3) {
		api_on_invlpg(insn, bytes, count);
	} else if (bytes[at + 1] == 0x38 && bytes[at + 2] == 0x82) {
		on_exec(insn, model_on_flush, 0);
	}
}

static void on_translation(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	qemu_mem_cb access = options.references ? model_on_reference : model_on_access;
	size_t count = qemu_plugin_tb_n_insns(tb);

	api_count(tb, count);
	if (options.fetch.entries)
		watch_fetches(tb, count);
	for (size_t i = 0; i < count; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		u8 bytes[INSN_BYTES_MAX];
		size_t size = api_insn_bytes(insn, bytes);

		if (is_mark(bytes, size)) {
			on_exec(insn, model_on_mark, bytes[4]);
			continue;
		}
		watch_flushes(insn, bytes, size);
		qemu_plugin_register_vcpu_mem_cb(insn, access, QEMU_PLUGIN_CB_NO_REGS,
						 QEMU_PLUGIN_MEM_RW, NULL);
	}
}

static void on_vcpu(qemu_plugin_id_t id, unsigned int vcpu)
{
	api_vcpu_starts(vcpu);
	model_vcpu_starts(vcpu);
}

static void at_exit(qemu_plugin_id_t id, void *data)
{
	model_end();
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const struct qemu_info *info,
			       int argc, char **argv);

/**
 * qemu_plugin_install() - Called by QEMU before the machine is created.
 * @id:		This plugin's number.
 * @info:	The machine.
 * @argc:	Number of options.
 * @argv:	Options.
 *
 * Return: 0, or -1 after an error message: QEMU then does not start.
 */
int qemu_plugin_install(qemu_plugin_id_t id, const struct qemu_info *info,
			int argc, char **argv)
{
	u32 vcpus;

	if (!info->system_emulation || strcmp(info->target_name, "x86_64")) {
		complain("only qemu-system-x86_64 is supported");
		return -1;
	}
	if (info->system.max_vcpus < 1 || info->system.max_vcpus > VCPUS_MAX) {
		complain("%d vCPUs: at most %d are supported",
			 info->system.max_vcpus, VCPUS_MAX);
		return -1;
	}
	vcpus = info->system.max_vcpus;
	if (options_parse(argc, argv) || api_start(vcpus) || model_start(vcpus) ||
	    ring_open(vcpus))
		return -1;
	qemu_plugin_register_vcpu_init_cb(id, on_vcpu);
	qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
	qemu_plugin_register_atexit_cb(id, at_exit, NULL);
	return 0;
}
