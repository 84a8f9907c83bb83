// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * The control disk: commands to the host, and their answers.
 *
 * One request is in flight at a time, in memory allocated at load. If the host
 * has gone, the request stays in the disk's queue forever, and then neither the
 * caller nor rmmod may hang. So a request that times out is abandoned: its
 * memory is not used again until it has ended, and if the module is unloaded
 * first, the memory stays allocated. Therefore its end_io must not be code of
 * this module. It is bio_put(), which drops the second of the two references
 * taken; the reference count shows that the request has ended.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/random.h>
#include <linux/slab.h>

#include "internal.h"

#define TIMEOUT		(5 * HZ)
#define SECTOR		512
#define INFO_SECTOR	0
#define COMMAND_SECTOR	0
#define ANSWER_SECTOR	1

struct request_memory {
	struct bio bio;
	struct bio_vec vec;
	void *sector;
};

static struct file *disk;
static struct request_memory *request;
static bool left_behind;	/* `request` timed out and may not have ended */
static u64 sequence;
static DEFINE_MUTEX(control_lock);	/* guards the three above */

static bool request_ended(void)
{
	return atomic_read_acquire(&request->bio.__bi_cnt) == 1;
}

/* Whether `request` may be used again. */
static bool request_is_free(void)
{
	if (left_behind && request_ended()) {
		bio_uninit(&request->bio);
		left_behind = false;
	}
	return !left_behind;
}

/* Transfers request->sector; -EAGAIN if the disk's queue is full. */
static int transfer_once(blk_opf_t operation, sector_t sector, unsigned long deadline)
{
	struct bio *bio = &request->bio;
	unsigned int wait_us = 20;
	int rc;

	/* NOWAIT: do not block on a queue that is full of a dead host's requests. */
	bio_init(bio, plimsoll_control_bdev(), &request->vec, 1,
		 operation | REQ_SYNC | REQ_NOMERGE | REQ_NOWAIT);
	bio->bi_iter.bi_sector = sector;
	bio->bi_end_io = bio_put;
	__bio_add_page(bio, virt_to_page(request->sector), SECTOR, offset_in_page(request->sector));
	bio_get(bio);
	submit_bio(bio);
	while (!request_ended()) {
		if (time_after(jiffies, deadline)) {
			left_behind = true;
			count(COUNT_COMMAND_TIMEOUTS);
			return -ETIMEDOUT;
		}
		fsleep(wait_us);
		wait_us = min(wait_us * 2, 10000U);
	}
	rc = blk_status_to_errno(bio->bi_status);
	bio_uninit(bio);
	return rc;
}

static int transfer(blk_opf_t operation, sector_t sector, unsigned long deadline)
{
	int rc;

	for (;;) {
		rc = transfer_once(operation, sector, deadline);
		if (rc != -EAGAIN)
			break;
		if (time_after(jiffies, deadline))
			return -ETIMEDOUT;
		fsleep(1000);
	}
	return rc && rc != -ETIMEDOUT ? -EIO : rc;
}

static int read_answer(u64 *value, unsigned long deadline)
{
	struct plimsoll_answer *answer = request->sector;
	u32 status;
	int rc;

	rc = transfer(REQ_OP_READ, ANSWER_SECTOR, deadline);
	if (rc)
		return rc;
	status = le32_to_cpu(answer->status);
	if (le64_to_cpu(answer->magic) != PLIMSOLL_CONTROL_MAGIC ||
	    le64_to_cpu(answer->sequence) != sequence || status > MAX_ERRNO)
		return -EPROTO;
	if (value)
		*value = le64_to_cpu(answer->value);
	return status;
}

int control_command(u32 number, const u64 arg[4], u64 *value)
{
	unsigned long deadline = jiffies + TIMEOUT;
	struct plimsoll_command *command;
	int i, rc = -ETIMEDOUT;

	mutex_lock(&control_lock);
	if (!request_is_free())
		goto unlock;
	command = request->sector;
	memset(command, 0, SECTOR);
	command->magic = cpu_to_le64(PLIMSOLL_CONTROL_MAGIC);
	command->version = cpu_to_le32(PLIMSOLL_VERSION);
	command->command = cpu_to_le32(number);
	command->sequence = cpu_to_le64(++sequence);
	for (i = 0; i < 4; i++)
		command->arg[i] = cpu_to_le64(arg[i]);
	rc = transfer(REQ_OP_WRITE, COMMAND_SECTOR, deadline);
	if (!rc)
		rc = read_answer(value, deadline);
unlock:
	mutex_unlock(&control_lock);
	return rc;
}

int control_read_info(u32 *features)
{
	struct plimsoll_info *info;
	int rc = -ETIMEDOUT;

	mutex_lock(&control_lock);
	if (!request_is_free())
		goto unlock;
	info = request->sector;
	rc = transfer(REQ_OP_READ, INFO_SECTOR, jiffies + TIMEOUT);
	if (rc)
		goto unlock;
	*features = le32_to_cpu(info->features);
	if (le64_to_cpu(info->magic) != PLIMSOLL_CONTROL_MAGIC)
		rc = -EPROTO;
	else if (le32_to_cpu(info->version) != PLIMSOLL_VERSION)
		rc = -EPROTONOSUPPORT;
unlock:
	mutex_unlock(&control_lock);
	return rc;
}

int control_open(const char *path)
{
	u32 features;
	int rc;

	/* Exclusive: it must not be mounted or used by another driver. */
	disk = filp_open(path, O_RDWR | O_EXCL | O_LARGEFILE, 0);
	if (IS_ERR(disk)) {
		rc = PTR_ERR(disk);
		pr_err("control disk %s cannot be opened (error %d)\n", path, rc);
		return rc;
	}
	if (!S_ISBLK(file_inode(disk)->i_mode)) {
		pr_err("control disk %s is not a block device\n", path);
		rc = -ENOTBLK;
		goto close;
	}
	if (bdev_logical_block_size(plimsoll_control_bdev()) != SECTOR) {
		pr_err("control disk %s has sectors of %u bytes; %u is required\n", path,
		       bdev_logical_block_size(plimsoll_control_bdev()), SECTOR);
		rc = -EINVAL;
		goto close;
	}
	request = kzalloc(sizeof(*request), GFP_KERNEL);
	if (!request) {
		rc = -ENOMEM;
		goto close;
	}
	request->sector = kzalloc(SECTOR, GFP_KERNEL);
	if (!request->sector) {
		kfree(request);
		rc = -ENOMEM;
		goto close;
	}
	/* Answers to an earlier load must not match. */
	sequence = get_random_u64();
	rc = control_read_info(&features);
	switch (rc) {
	case 0:
		return 0;
	case -EPROTO:
		pr_err("%s is not a control disk of Plimsoll\n", path);
		break;
	case -EPROTONOSUPPORT:
		pr_err("the host does not support version %u of the protocol\n",
		       PLIMSOLL_VERSION);
		break;
	default:
		pr_err("control disk %s cannot be read (error %d)\n", path, rc);
	}
	control_close();
	return rc;

close:
	filp_close(disk, NULL);
	return rc;
}

void control_close(void)
{
	if (request_is_free()) {
		kfree(request->sector);
		kfree(request);
	}
	filp_close(disk, NULL);
}

struct block_device *plimsoll_control_bdev(void)
{
	return I_BDEV(disk->f_mapping->host);
}
EXPORT_SYMBOL_GPL(plimsoll_control_bdev);
