// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * The model without QEMU: accesses from standard input, a line "PAGE FRAME WRITE"
 * each, one an instruction, of one vCPU; words of records to standard output.
 * Arguments are the plugin's options.
 */
#include <stdarg.h>
#include <stdio.h>

#include "../pagelog.h"

static u64 instructions;
static u64 frame;

void complain(const char *format, ...)
{
	va_list values;

	va_start(values, format);
	vfprintf(stderr, format, values);
	va_end(values);
	fputc('\n', stderr);
}

u64 api_instructions(unsigned int vcpu)
{
	return instructions;
}

u32 api_ram_page(u64 physical)
{
	return physical >> PAGE_SHIFT;
}

bool qemu_plugin_mem_is_store(qemu_plugin_meminfo_t info)
{
	return info;
}

struct qemu_plugin_hwaddr *qemu_plugin_get_hwaddr(qemu_plugin_meminfo_t info,
						  u64 address)
{
	return (struct qemu_plugin_hwaddr *)&frame;
}

bool qemu_plugin_hwaddr_is_io(const struct qemu_plugin_hwaddr *address)
{
	return false;
}

u64 qemu_plugin_hwaddr_phys_addr(const struct qemu_plugin_hwaddr *address)
{
	return frame << PAGE_SHIFT;
}

void ring_put(u64 record)
{
	fwrite(&record, sizeof(record), 1, stdout);
}

void ring_publish(void)
{
}

struct ring_counts ring_close(void)
{
	return (struct ring_counts){ 0 };
}

int main(int argc, char **argv)
{
	unsigned long long page, to;
	int write;

	if (options_parse(argc - 1, argv + 1) || model_start(1))
		return 1;
	model_vcpu_starts(0);
	while (scanf("%llu %llu %d", &page, &to, &write) == 3) {
		frame = to;
		instructions++;
		if (options.references)
			model_on_reference(0, write, page << PAGE_SHIFT, NULL);
		else
			model_on_access(0, write, page << PAGE_SHIFT, NULL);
	}
	model_end();
	return 0;
}
