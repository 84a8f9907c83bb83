// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Injects faults that plimsoll.ko must survive. Not to be installed.
 *
 * debugfs plimsoll_test/missed: writing N makes the kprobe on
 * folio_migrate_flags miss N events: the function is called in the handler of
 * another kprobe, where no second one can run.
 *
 * debugfs plimsoll_test/flood: writing N creates N events with preemption off,
 * so that no worker can have the host empty the ring between them.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/debugfs.h>
#include <linux/gfp.h>
#include <linux/kprobes.h>
#include <linux/migrate.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pagemap.h>

#define FLOOD_MAX	1000000

static struct dentry *directory;
static struct folio *from;
static struct folio *to;
static DEFINE_MUTEX(test_lock);

/* Fresh folios: the call moves flags and nothing else. */
static void migrate(void)
{
	folio_migrate_flags(to, from);
}

static noinline void outer(void)
{
	barrier();
}

static int on_outer(struct kprobe *probe, struct pt_regs *regs)
{
	migrate();
	return 0;
}

static struct kprobe outer_probe = {
	.addr = (kprobe_opcode_t *)outer,
	.pre_handler = on_outer,
};

static int missed_set(void *data, u64 n)
{
	if (n > FLOOD_MAX)
		return -ERANGE;
	mutex_lock(&test_lock);
	while (n--)
		outer();
	mutex_unlock(&test_lock);
	return 0;
}
DEFINE_DEBUGFS_ATTRIBUTE(missed_fops, NULL, missed_set, "%llu\n");

static int flood_set(void *data, u64 n)
{
	if (n > FLOOD_MAX)
		return -ERANGE;
	mutex_lock(&test_lock);
	preempt_disable();
	while (n--)
		migrate();
	preempt_enable();
	mutex_unlock(&test_lock);
	return 0;
}
DEFINE_DEBUGFS_ATTRIBUTE(flood_fops, NULL, flood_set, "%llu\n");

static void free_folios(void)
{
	if (from) {
		folio_unlock(from);
		folio_put(from);
	}
	if (to) {
		folio_unlock(to);
		folio_put(to);
	}
}

static int __init plimsoll_test_init(void)
{
	int rc = -ENOMEM;

	from = folio_alloc(GFP_KERNEL, 0);
	if (from)
		folio_lock(from);
	to = folio_alloc(GFP_KERNEL, 0);
	if (to)
		folio_lock(to);
	if (!from || !to)
		goto free;
	rc = register_kprobe(&outer_probe);
	if (rc)
		goto free;
	directory = debugfs_create_dir("plimsoll_test", NULL);
	debugfs_create_file_unsafe("missed", 0200, directory, NULL, &missed_fops);
	debugfs_create_file_unsafe("flood", 0200, directory, NULL, &flood_fops);
	return 0;

free:
	free_folios();
	return rc;
}

static void __exit plimsoll_test_exit(void)
{
	debugfs_remove_recursive(directory);
	unregister_kprobe(&outer_probe);
	free_folios();
}

module_init(plimsoll_test_init);
module_exit(plimsoll_test_exit);
MODULE_DESCRIPTION("Fault injection for plimsoll.ko");
MODULE_LICENSE("GPL");
