// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Makes the balloon's statistics false, to see what a host does that believes
 * them. Not to be installed.
 *
 * The functions from which the balloon's driver takes them are probed. Its
 * reports are made by a kernel thread; processes that read /proc get the truth.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kprobes.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/vmstat.h>

static long available_mib = -1;
module_param(available_mib, long, 0400);
MODULE_PARM_DESC(available_mib, "available memory that is reported, in MiB; below 0: the truth");

static unsigned long faults;
module_param(faults, ulong, 0400);
MODULE_PARM_DESC(faults, "each report adds so many more major faults than the one before");

static unsigned long faults_rise, faults_added;

static bool is_report(void)
{
	return current->flags & PF_KTHREAD;
}

static int on_available(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	if (available_mib >= 0 && is_report())
		regs_set_return_value(regs, available_mib << (20 - PAGE_SHIFT));
	return 0;
}
NOKPROBE_SYMBOL(on_available);

static struct kretprobe available_probe = {
	.kp.symbol_name = "si_mem_available",
	.handler = on_available,
};

static int before_events(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	*(unsigned long **)instance->data = (unsigned long *)regs_get_kernel_argument(regs, 0);
	return 0;
}
NOKPROBE_SYMBOL(before_events);

static int on_events(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	unsigned long *events = *(unsigned long **)instance->data;

	if (is_report()) {
		faults_rise += faults;
		faults_added += faults_rise;
		events[PGMAJFAULT] += faults_added;
	}
	return 0;
}
NOKPROBE_SYMBOL(on_events);

static struct kretprobe events_probe = {
	.kp.symbol_name = "all_vm_events",
	.entry_handler = before_events,
	.handler = on_events,
	.data_size = sizeof(unsigned long *),
};

static struct kretprobe *probes[] = { &available_probe, &events_probe };

static int __init plimsoll_liar_init(void)
{
	return register_kretprobes(probes, ARRAY_SIZE(probes));
}

static void __exit plimsoll_liar_exit(void)
{
	unregister_kretprobes(probes, ARRAY_SIZE(probes));
}

module_init(plimsoll_liar_init);
module_exit(plimsoll_liar_exit);
MODULE_DESCRIPTION("False statistics of a balloon, for tests");
MODULE_LICENSE("GPL");
