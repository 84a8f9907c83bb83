/*
 * delay FILE interrupted|released: a process that serves FILE itself, by FUSE, in a mount namespace of its own, and whose
 * second thread puts that file in the place of the first descriptor of /dev/userfaultfd that appears. An ioctl() of the
 * file takes until it is interrupted; or it cannot be, and takes until the standard input ends. Its memory looks like a
 * VM's RAM. Prints "ready".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include "ram.h"

static int file;
static struct stat served;
static dev_t device;
/* Whether an ioctl() of the file has begun; shared with the process that serves it. */
static volatile int *called;

static void answer(int fuse, uint64_t unique, int error, const void *body, size_t length)
{
	struct fuse_out_header head = {sizeof head + length, error, unique};
	struct iovec parts[] = {{&head, sizeof head}, {(void *)body, length}};
	if (writev(fuse, parts, 2) < 0 && errno != ENOENT)
		exit(1);
}

/* Serves one regular file, the root of its file system. */
static void serve(int fuse, int released)
{
	static char request[1 << 20];
	for (;;) {
		ssize_t length = read(fuse, request, sizeof request);
		if (length < 0 && (errno == EINTR || errno == ENOENT))
			continue;
		if (length < (ssize_t)sizeof(struct fuse_in_header))
			exit(0);
		struct fuse_in_header *head = (void *)request;
		struct fuse_init_out init = {.major = FUSE_KERNEL_VERSION, .minor = 31, .max_write = 4096};
		struct fuse_attr_out attributes = {.attr = {.ino = 1, .mode = S_IFREG | 0666, .nlink = 1}};
		struct fuse_open_out opened = {.fh = 1};
		struct fuse_ioctl_out done = {.result = -ENOTTY};
		switch (head->opcode) {
		case FUSE_INIT:
			answer(fuse, head->unique, 0, &init, sizeof init);
			break;
		case FUSE_GETATTR:
			answer(fuse, head->unique, 0, &attributes, sizeof attributes);
			break;
		case FUSE_OPEN:
			answer(fuse, head->unique, 0, &opened, sizeof opened);
			break;
		case FUSE_IOCTL:
			*called = 1;
			if (released) {
				char byte;
				while (read(STDIN_FILENO, &byte, 1) > 0)
					;
				answer(fuse, head->unique, 0, &done, sizeof done);
			}
			break;
		case FUSE_INTERRUPT: {
			struct fuse_interrupt_in *interrupt = (void *)(head + 1);
			if (!released)
				answer(fuse, interrupt->unique, -EINTR, NULL, 0);
			break;
		}
		case FUSE_FORGET:
			break;
		default:
			answer(fuse, head->unique, -ENOSYS, NULL, 0);
		}
	}
}

static int is_file(int descriptor)
{
	struct stat found;
	return !fstat(descriptor, &found) && found.st_dev == served.st_dev && found.st_ino == served.st_ino;
}

static void *exchange(void *unused)
{
	(void)unused;
	struct stat found;
	/* Of this thread alone. It must run while the other's call is between two steps, also on a busy machine. */
	setpriority(PRIO_PROCESS, syscall(SYS_gettid), -20);
	for (;;)
		for (int descriptor = 3; descriptor < 16; descriptor++) {
			if (fstat(descriptor, &found) || !S_ISCHR(found.st_mode) || found.st_rdev != device ||
			    dup2(file, descriptor) < 0)
				continue;
			/* Too late if no call comes; then nothing of it may stay. */
			for (int wait_ms = 0; wait_ms < 2000 && !*called; wait_ms++)
				usleep(1000);
			if (*called)
				return NULL;
			if (is_file(descriptor))
				close(descriptor);
		}
}

int main(int argc, char **argv)
{
	struct stat found;
	if (argc < 3 || stat("/dev/userfaultfd", &found))
		return 1;
	device = found.st_rdev;
	int fuse = open("/dev/fuse", O_RDWR);
	char options[80];
	snprintf(options, sizeof options, "fd=%d,rootmode=100666,user_id=0,group_id=0", fuse);
	close(open(argv[1], O_CREAT | O_RDWR, 0600));
	if (fuse < 0 || unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("delay", argv[1], "fuse", 0, options)) {
		perror("delay");
		return 1;
	}
	called = mmap(NULL, sizeof *called, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (called == MAP_FAILED)
		return 1;
	if (!fork()) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		serve(fuse, !strcmp(argv[2], "released"));
	}
	file = open(argv[1], O_RDWR);
	if (file < 0 || fstat(file, &served))
		return 1;
	close(fuse);
	volatile char *ram = make_ram();
	pthread_t thread;
	if (pthread_create(&thread, NULL, exchange, NULL))
		return 1;
	for (;;)
		touch_all(ram);
}
