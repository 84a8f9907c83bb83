// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * plimsoll.ko reports this guest's page cache events to the host.
 *
 * events.c probes the kernel for pages that enter, move within or leave the
 * page cache; ring.c writes a record of each event to a ring in RAM, with the
 * contents of evicted pages; host.c announces the ring through control.c and
 * checks that the host reads it.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/version.h>

#include "internal.h"

static char *control = "/dev/disk/by-id/virtio-plimsoll-control";
module_param(control, charp, 0444);
MODULE_PARM_DESC(control, "block device of the control disk");

static uint records = 16384;
module_param(records, uint, 0444);
MODULE_PARM_DESC(records, "records in the ring, a power of two, 128 to 262144");

/* Without slots=: at most a 32nd of the memory, within limits of pages. */
#define SLOTS_SHARE	32
#define SLOTS_LOW	512
#define SLOTS_HIGH	8192

static int slots = -1;
module_param(slots, int, 0444);
MODULE_PARM_DESC(slots, "pages in the ring, a power of two up to 65536, or 0; -1: by the size of the memory (-1)");

uint put_wait_us = 1000;
module_param(put_wait_us, uint, 0644);
MODULE_PARM_DESC(put_wait_us, "longest time in us that the removal of a page waits for room in the ring, up to 10000 (1000)");

bool lazy;
module_param(lazy, bool, 0444);
MODULE_PARM_DESC(lazy, "do not copy evicted pages: the host reads the frame, if it is not reused first");

static bool force;
module_param(force, bool, 0444);
MODULE_PARM_DESC(force, "load into a kernel series that was not tested");

bool fault_no_add;
module_param(fault_no_add, bool, 0644);
MODULE_PARM_DESC(fault_no_add, "FOR TESTS, BREAKS THE CACHE: do not report added pages");

bool fault_evict;
module_param(fault_evict, bool, 0644);
MODULE_PARM_DESC(fault_evict, "for tests: report every page that leaves the page cache as evicted");

bool fault_no_migrate;
module_param(fault_no_migrate, bool, 0644);
MODULE_PARM_DESC(fault_no_migrate, "FOR TESTS, BREAKS THE CACHE: do not report migrated pages");

uint fault_drop_every;
module_param(fault_drop_every, uint, 0644);
MODULE_PARM_DESC(fault_drop_every, "FOR TESTS, BREAKS THE CACHE: silently drop every n-th record");

/* The probed functions have the same meaning in all kernels of a series. */
static bool kernel_is_supported(void)
{
	u32 series = LINUX_VERSION_CODE >> 8;

	return series == KERNEL_VERSION(6, 1, 0) >> 8 ||
	       series == KERNEL_VERSION(6, 12, 0) >> 8;
}

static int check_parameters(void)
{
	if (!is_power_of_2(records) || records < 128 || records > 262144) {
		pr_err("records=%u is not a power of two from 128 to 262144\n", records);
		return -EINVAL;
	}
	if (slots == -1)
		slots = clamp(rounddown_pow_of_two(totalram_pages() / SLOTS_SHARE + 1),
			      (unsigned long)SLOTS_LOW, (unsigned long)SLOTS_HIGH);
	if (slots && (slots < 0 || !is_power_of_2(slots) || slots > 65536)) {
		pr_err("slots=%d is not a power of two up to 65536\n", slots);
		return -EINVAL;
	}
	if (!slots && !lazy) {
		pr_err("slots=0 leaves no room for evicted pages: set lazy=1 too\n");
		return -EINVAL;
	}
	if (fault_no_add || fault_no_migrate || fault_evict || fault_drop_every)
		pr_warn("a fault_ parameter is set: the host gets wrong reports on purpose\n");
	return 0;
}

static int __init plimsoll_init(void)
{
	int rc;

	if (PAGE_SIZE != PLIMSOLL_PAGE) {
		pr_err("the page size of this kernel is %lu bytes; %u is required\n",
		       PAGE_SIZE, PLIMSOLL_PAGE);
		return -EINVAL;
	}
	if (!kernel_is_supported()) {
		pr_err("built for Linux %u.%u, but only 6.1 and 6.12 are supported (force=1 overrides)\n",
		       LINUX_VERSION_CODE >> 16, (LINUX_VERSION_CODE >> 8) & 255);
		if (!force)
			return -EINVAL;
	}
	rc = check_parameters();
	if (rc)
		return rc;
	rc = control_open(control);
	if (rc)
		return rc;
	rc = ring_create(records, slots);
	if (rc)
		goto close;
	rc = events_start();
	if (rc) {
		ring_free(false);
		goto close;
	}
	rc = host_start();
	if (rc) {
		host_detach();
		events_stop();
		host_stop();
		goto close;
	}
	stats_create();
	return 0;

close:
	control_close();
	return rc;
}

static void __exit plimsoll_exit(void)
{
	stats_remove();
	host_detach();
	events_stop();
	host_stop();
	control_close();
}

module_init(plimsoll_init);
module_exit(plimsoll_exit);
MODULE_DESCRIPTION("Page cache notifications for the host's exclusive cache");
MODULE_LICENSE("GPL");
MODULE_VERSION("1.0");
