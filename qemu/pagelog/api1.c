// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * API 1, QEMU 7.2. It counts in line at one address for all vCPUs, so that more
 * than one count by a call; it cannot read registers, so that INVLPG empties the
 * whole TLB; and it tells RAM by its offset, without the hole below 4 GiB.
 */
#include <string.h>

#include "pagelog.h"

EXPORT int qemu_plugin_version = 1;
const u32 api_version = 1;

void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb,
					      enum qemu_plugin_op op, void *counter,
					      uint64_t value);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn);

static struct {
	u64 instructions;
} __attribute__((aligned(64))) counters[VCPUS_MAX];
static bool alone;

int api_start(u32 vcpus)
{
	alone = vcpus == 1;
	return 0;
}

void api_vcpu_starts(unsigned int vcpu)
{
}

static void on_block(unsigned int vcpu, void *data)
{
	counters[vcpu].instructions += (u64)data;
}

void api_count(struct qemu_plugin_tb *tb, size_t instructions)
{
	if (alone)
		qemu_plugin_register_vcpu_tb_exec_inline(tb, QEMU_PLUGIN_INLINE_ADD_U64,
							 &counters[0].instructions,
							 instructions);
	else
		qemu_plugin_register_vcpu_tb_exec_cb(tb, on_block,
						     QEMU_PLUGIN_CB_NO_REGS,
						     (void *)instructions);
}

u64 api_instructions(unsigned int vcpu)
{
	return __atomic_load_n(&counters[vcpu].instructions, __ATOMIC_RELAXED);
}

size_t api_insn_bytes(const struct qemu_plugin_insn *insn, u8 *bytes)
{
	size_t size = qemu_plugin_insn_size(insn);

	if (size > INSN_BYTES_MAX)
		size = INSN_BYTES_MAX;
	memcpy(bytes, qemu_plugin_insn_data(insn), size);
	return size;
}

u32 api_ram_page(u64 physical)
{
	return physical < options.ram_bytes ? physical >> PAGE_SHIFT : NO_PAGE;
}

void api_on_invlpg(struct qemu_plugin_insn *insn, const u8 *bytes, size_t count)
{
	qemu_plugin_register_vcpu_insn_exec_cb(insn, model_on_flush,
					       QEMU_PLUGIN_CB_NO_REGS, NULL);
}
