// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Attaches the host to the ring, and checks that it keeps reading.
 *
 * The host takes records whenever it serves a request. If records remain for
 * two checks of the worker, it may only have had no request to serve, so the
 * worker kicks it. If it still takes none, it was restarted and does not have
 * the ring: the ring is announced again, and pools get a new generation.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/irq_work.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/reboot.h>
#include <linux/string.h>
#include <linux/suspend.h>
#include <linux/workqueue.h>

#include "internal.h"

#define CHECK_INTERVAL	HZ
#define SOON		(HZ / 10)
#define STUCK_CHECKS	2

static bool attached;		/* the host confirmed the attach */
static bool ended;		/* no further attach */
static bool announced;		/* a host may use the ring */
static u32 features;
static DEFINE_MUTEX(attach_lock);	/* guards the four above */

static bool suspect;		/* plimsoll_check_host() was called */
static bool must_attach;	/* the host cannot have the ring, or may have other pools */
static u64 last_tail;		/* at the worker's last check */
static u32 checks_stuck;

static struct workqueue_struct *queue;
static void check(struct work_struct *work);
static DECLARE_DELAYED_WORK(check_work, check);
static void kick(struct work_struct *work);
static DECLARE_WORK(kick_work, kick);

static void queue_kick(struct irq_work *work)
{
	queue_work(queue, &kick_work);
}

static DEFINE_IRQ_WORK(kick_irq, queue_kick);

/* In a probe, only an irq_work is certain to be allowed. */
void host_kick(void)
{
	irq_work_queue(&kick_irq);
}

static int send_kick(void)
{
	static const u64 none[4];
	int rc = control_command(PLIMSOLL_KICK, none, NULL);

	count(rc ? COUNT_KICKS_FAILED : COUNT_KICKS);
	return rc;
}

/* A host that does not answer gets no further kick before the next check. */
static void kick(struct work_struct *work)
{
	if (!send_kick())
		ring_kicked();
}

/* With attach_lock held. */
static void forget_host(void)
{
	if (!attached)
		return;
	ring_next_generation();
	attached = false;
	pr_info("the host no longer reads the ring\n");
}

/* With attach_lock held. */
static int attach(void)
{
	const u64 arg[4] = { ring_address(), ring_nonce() };
	int rc;

	if (ended)
		return -ESHUTDOWN;
	forget_host();
	rc = control_read_info(&features);
	if (rc)
		goto failed;
	events_want(features & PLIMSOLL_HAS_CACHE);
	announced = true;
	rc = control_command(PLIMSOLL_ATTACH, arg, NULL);
	if (!rc && !ring_attached())
		rc = -EPROTO;
	if (rc)
		goto failed;
	attached = true;
	count(COUNT_ATTACHES);
	return 0;

failed:
	count(COUNT_ATTACHES_FAILED);
	return rc;
}

static void attach_again(void)
{
	bool changed;

	mutex_lock(&attach_lock);
	/* Before, so that a reason that arises meanwhile is not lost. */
	WRITE_ONCE(must_attach, false);
	changed = !attach();
	mutex_unlock(&attach_lock);
	if (!changed)
		return;
	pr_info("the host reads the ring again\n");
	checks_stuck = 0;
	events_reattached();
}

static bool host_reads_ring(void)
{
	bool asked = xchg(&suspect, false);
	u64 tail = ring_tail();
	bool moved = tail != last_tail;

	last_tail = tail;
	if (READ_ONCE(must_attach) || !READ_ONCE(attached) || !ring_attached())
		return false;
	if (moved || ring_empty())
		checks_stuck = 0;
	else
		checks_stuck++;
	if (!asked && checks_stuck < STUCK_CHECKS)
		return true;
	checks_stuck = 0;
	if (ring_empty())
		ring_post_nothing();
	return !send_kick() && (ring_empty() || ring_tail() != tail);
}

static void check(struct work_struct *work)
{
	ring_set_memory(totalram_pages());
	events_check_alive();
	events_check_missed();
	if (!host_reads_ring())
		attach_again();
	ring_kicked();
	queue_delayed_work(queue, &check_work, CHECK_INTERVAL);
}

void plimsoll_check_host(void)
{
	if (!xchg(&suspect, true))
		mod_delayed_work(queue, &check_work, SOON);
}
EXPORT_SYMBOL_GPL(plimsoll_check_host);

u32 plimsoll_features(void)
{
	return READ_ONCE(features);
}
EXPORT_SYMBOL_GPL(plimsoll_features);

/*
 * With attach_lock held. After a failure it is unknown whether the host has opened
 * or closed a pool, which would be its own until the guest ends: the worker's next
 * check attaches the host again, which closes all pools. The check is not hastened:
 * a host that fails each time is attached once a second at most.
 */
static int pool_command(u32 command, const u64 arg[4], u64 *value)
{
	int rc = control_command(command, arg, value);

	if (rc < 0)
		WRITE_ONCE(must_attach, true);
	return rc > 0 ? -rc : rc;
}

int plimsoll_pool_open(const char *serial, u64 first_block, struct plimsoll_pool *pool)
{
	u64 arg[4] = { PLIMSOLL_POOL_PRIVATE };
	__le64 words[3] = {};
	int i, rc = -ENOTCONN;
	u64 number;

	if (serial) {
		strscpy((char *)words, serial, PLIMSOLL_SERIAL_BYTES + 1);
		arg[0] = PLIMSOLL_POOL_IMAGE | first_block << PLIMSOLL_POOL_KIND_BITS;
		for (i = 0; i < 3; i++)
			arg[1 + i] = le64_to_cpu(words[i]);
	}
	mutex_lock(&attach_lock);
	if (attached)
		rc = pool_command(PLIMSOLL_POOL_OPEN, arg, &number);
	pool->generation = plimsoll_generation();
	mutex_unlock(&attach_lock);
	if (rc)
		return rc;
	if (number < 1 || number > PLIMSOLL_POOLS_MAX)
		return -EPROTO;
	pool->number = number;
	return 0;
}
EXPORT_SYMBOL_GPL(plimsoll_pool_open);

int plimsoll_pool_close(struct plimsoll_pool pool)
{
	const u64 arg[4] = { pool.number };
	int rc = 0;

	mutex_lock(&attach_lock);
	if (attached && pool.generation == plimsoll_generation())
		rc = pool_command(PLIMSOLL_POOL_CLOSE, arg, NULL);
	mutex_unlock(&attach_lock);
	return rc;
}
EXPORT_SYMBOL_GPL(plimsoll_pool_close);

/* After a resume the host may be a different one, and frames may have changed. */
static int on_power(struct notifier_block *block, unsigned long event, void *data)
{
	switch (event) {
	case PM_POST_HIBERNATION:
	case PM_POST_RESTORE:
		WRITE_ONCE(must_attach, true);
		fallthrough;
	case PM_POST_SUSPEND:
		count(COUNT_RESUMES);
		events_forget();
		plimsoll_check_host();
	}
	return NOTIFY_DONE;
}

static struct notifier_block power_block = { .notifier_call = on_power };

/* The next kernel will use the ring's memory for other purposes. */
static int on_reboot(struct notifier_block *block, unsigned long event, void *data)
{
	host_detach();
	return NOTIFY_DONE;
}

static struct notifier_block reboot_block = { .notifier_call = on_reboot };

int host_start(void)
{
	int rc;

	/* A kick must reach the host before a burst has filled the ring. */
	queue = alloc_workqueue("plimsoll", WQ_MEM_RECLAIM | WQ_UNBOUND | WQ_HIGHPRI, 0);
	if (!queue)
		return -ENOMEM;
	mutex_lock(&attach_lock);
	rc = attach();
	mutex_unlock(&attach_lock);
	if (rc) {
		if (rc > 0)
			pr_err("the host refused the ring (error %d)\n", rc);
		else
			pr_err("attaching the host to the ring failed (error %d)\n", rc);
		return rc > 0 ? -rc : rc;
	}
	register_pm_notifier(&power_block);
	register_reboot_notifier(&reboot_block);
	queue_delayed_work(queue, &check_work, CHECK_INTERVAL);
	return 0;
}

void host_detach(void)
{
	const u64 arg[4] = { ring_nonce() };

	mutex_lock(&attach_lock);
	/* First, so that no pool is opened whose flushes would be dropped. */
	ended = true;
	attached = false;
	ring_close();
	/* A refusal is an answer too: the host does not use the ring. */
	if (announced && control_command(PLIMSOLL_DETACH, arg, NULL) >= 0)
		announced = false;
	mutex_unlock(&attach_lock);
}

void host_stop(void)
{
	unregister_pm_notifier(&power_block);
	unregister_reboot_notifier(&reboot_block);
	if (queue) {
		cancel_delayed_work_sync(&check_work);
		irq_work_sync(&kick_irq);
		destroy_workqueue(queue);
	}
	ring_free(announced);
}
