// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * API 4, QEMU 10: it counts in line for each vCPU, reads registers, and tells
 * guest-physical addresses.
 */
#include <string.h>

#include "pagelog.h"

EXPORT int qemu_plugin_version = 4;
const u32 api_version = 4;

struct qemu_plugin_scoreboard;
struct qemu_plugin_register;

typedef struct {
	struct qemu_plugin_scoreboard *score;
	size_t offset;
} qemu_plugin_u64;

/* The beginning of GLib's arrays of bytes, and of elements. */
struct byte_array {
	u8 *data;
	unsigned int count;
};

struct register_description {
	struct qemu_plugin_register *handle;
	const char *name;
	const char *feature;
};

struct description_array {
	struct register_description *data;
	unsigned int count;
};

struct byte_array *g_byte_array_new(void);
u8 *g_byte_array_free(struct byte_array *array, int with_data);
char *g_array_free(struct description_array *array, int with_data);

struct qemu_plugin_scoreboard *qemu_plugin_scoreboard_new(size_t bytes);
uint64_t qemu_plugin_u64_get(qemu_plugin_u64 counter, unsigned int vcpu);
void qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(struct qemu_plugin_tb *tb,
						       enum qemu_plugin_op op,
						       qemu_plugin_u64 counter,
						       uint64_t value);
size_t qemu_plugin_insn_data(const struct qemu_plugin_insn *insn, void *bytes,
			     size_t count);
struct description_array *qemu_plugin_get_registers(void);
int qemu_plugin_read_register(struct qemu_plugin_register *handle,
			      struct byte_array *value);

#define REGISTERS	16

static const char *const names[REGISTERS] = {
	"rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi",
	"r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
};

static qemu_plugin_u64 counter;
static struct qemu_plugin_register *registers[VCPUS_MAX][REGISTERS];

int api_start(u32 vcpus)
{
	/* A cache line for each vCPU. */
	counter.score = qemu_plugin_scoreboard_new(64);
	return 0;
}

void api_vcpu_starts(unsigned int vcpu)
{
	struct description_array *found = qemu_plugin_get_registers();

	for (unsigned int i = 0; found && i < found->count; i++) {
		for (int number = 0; number < REGISTERS; number++) {
			if (!strcmp(found->data[i].name, names[number]))
				registers[vcpu][number] = found->data[i].handle;
		}
	}
	if (found)
		g_array_free(found, true);
}

void api_count(struct qemu_plugin_tb *tb, size_t instructions)
{
	qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(tb, QEMU_PLUGIN_INLINE_ADD_U64,
							  counter, instructions);
}

u64 api_instructions(unsigned int vcpu)
{
	return qemu_plugin_u64_get(counter, vcpu);
}

size_t api_insn_bytes(const struct qemu_plugin_insn *insn, u8 *bytes)
{
	return qemu_plugin_insn_data(insn, bytes, INSN_BYTES_MAX);
}

u32 api_ram_page(u64 physical)
{
	if (physical < options.below_4g_bytes)
		return physical >> PAGE_SHIFT;
	if (physical < GIB_4)
		return NO_PAGE;
	physical = physical - GIB_4 + options.below_4g_bytes;
	return physical < options.ram_bytes ? physical >> PAGE_SHIFT : NO_PAGE;
}

static bool read_register(unsigned int vcpu, int number, u64 *value)
{
	struct byte_array *bytes;
	bool whole;

	if (!registers[vcpu][number])
		return false;
	bytes = g_byte_array_new();
	whole = qemu_plugin_read_register(registers[vcpu][number], bytes) == sizeof(*value);
	if (whole)
		memcpy(value, bytes->data, sizeof(*value));
	g_byte_array_free(bytes, true);
	return whole;
}

/* The register that holds the address. */
static void on_invlpg(unsigned int vcpu, void *data)
{
	u64 address;

	if (read_register(vcpu, (u64)data, &address))
		model_flush_page(vcpu, address);
	else
		model_on_flush(vcpu, NULL);
}

/* As kernels write it, INVLPG (REGISTER); others empty the whole TLB. */
void api_on_invlpg(struct qemu_plugin_insn *insn, const u8 *bytes, size_t count)
{
	size_t at = count - 3;
	u8 base = bytes[count - 1] & 7;
	bool is_plain = bytes[at] == 0x0f && !(bytes[count - 1] >> 6) &&
			base != 4 && base != 5 &&
			(at == 0 || (at == 1 && (bytes[0] & 0xf0) == 0x40));
	bool extended = at == 1 && bytes[0] & 1;

	if (is_plain)
		qemu_plugin_register_vcpu_insn_exec_cb(insn, on_invlpg,
						       QEMU_PLUGIN_CB_R_REGS,
						       (void *)(u64)(base | (extended ? 8 : 0)));
	else
		qemu_plugin_register_vcpu_insn_exec_cb(insn, model_on_flush,
						       QEMU_PLUGIN_CB_NO_REGS, NULL);
}
