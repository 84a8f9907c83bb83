/*
 * delay FILE SECONDS: a process that serves FILE itself, by FUSE, in a mount namespace of its own, and whose second thread
 * puts that file in the place of the first descriptor of /dev/userfaultfd that appears. An ioctl() of the file takes
 * SECONDS and cannot be interrupted; if that is 0, it takes until it is interrupted. Its memory looks like a VM's RAM.
 * Prints "ready".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define RAM_BYTES (16 << 20)

static int file;
static dev_t device;

static void answer(int fuse, uint64_t unique, int error, const void *body, size_t length)
{
	struct fuse_out_header head = {sizeof head + length, error, unique};
	struct iovec parts[] = {{&head, sizeof head}, {(void *)body, length}};
	if (writev(fuse, parts, 2) < 0 && errno != ENOENT)
		exit(1);
}

/* Serves one regular file, the root of its file system. */
static void serve(int fuse, int seconds)
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
			if (seconds) {
				sleep(seconds);
				answer(fuse, head->unique, 0, &done, sizeof done);
			}
			break;
		case FUSE_INTERRUPT: {
			struct fuse_interrupt_in *interrupt = (void *)(head + 1);
			if (!seconds)
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

static void *exchange(void *unused)
{
	(void)unused;
	struct stat found;
	for (;;)
		for (int descriptor = 3; descriptor < 16; descriptor++)
			if (!fstat(descriptor, &found) && S_ISCHR(found.st_mode) && found.st_rdev == device &&
			    dup2(file, descriptor) >= 0)
				return NULL;
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
	if (fuse < 0 || unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("delay", argv[1], "fuse", 0, options)) {
		perror("delay");
		return 1;
	}
	if (!fork()) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		serve(fuse, atoi(argv[2]));
	}
	file = open(argv[1], O_RDWR);
	int ram = memfd_create("memory-backend-memfd", 0);
	if (file < 0 || ram < 0 || ftruncate(ram, RAM_BYTES))
		return 1;
	volatile char *bytes = mmap(NULL, RAM_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, ram, 0);
	if (bytes == MAP_FAILED)
		return 1;
	for (size_t page = 0; page < RAM_BYTES; page += 4096)
		bytes[page]++;
	close(fuse);
	printf("ready\n");
	fflush(stdout);
	pthread_t thread;
	if (pthread_create(&thread, NULL, exchange, NULL))
		return 1;
	for (;;)
		for (size_t page = 0; page < RAM_BYTES; page += 4096)
			bytes[page]++;
}
