/*
 * clock: the first process of a guest in which the clock is stepped while a VM is traced. Under a name that begins with
 * "qemu-system-" it is that VM: 16 MiB of memory that look like a VM's RAM, each page of which is touched in turn.
 *
 * As the first process it runs the commands of /commands, one a line, one after the other and the last again and again, and
 * meanwhile steps the clock once a second by 1 h, -2 h, 1 h and so on. A command that ends with "&" goes on beside the
 * next ones. After each of the others it prints how it ended, how long it took by a clock that is not stepped, the number of
 * steps so far, and how often the daemon called itself well just after one, and how often not:
 * "END code milliseconds steps well unwell".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RAM_BYTES (16 << 20)
#define WORDS_MAX 32

static const long steps_seconds[] = {3600, -7200, 3600};
static const struct sockaddr_un daemon_socket = {AF_UNIX, "/run/plimsolld.sock"};

static int steps, well, unwell;

static void *touch(void *ram)
{
	volatile char *bytes = ram;
	prctl(PR_SET_NAME, "CPU 0/TCG");
	for (;;)
		for (size_t page = 0; page < RAM_BYTES; page += 4096)
			bytes[page]++;
	return NULL;
}

static int be_vm(void)
{
	int ram = memfd_create("memory-backend-memfd", 0);
	if (ram < 0 || ftruncate(ram, RAM_BYTES))
		return 1;
	char *bytes = mmap(NULL, RAM_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, ram, 0);
	if (bytes == MAP_FAILED)
		return 1;
	memset(bytes, 1, RAM_BYTES);
	pthread_t thread;
	if (pthread_create(&thread, NULL, touch, bytes))
		return 1;
	for (;;)
		pause();
}

static long now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_BOOTTIME, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Asks the daemon, if it listens already, whether it is well. */
static void check_health(void)
{
	static const char request[] = "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
	char answer[16] = "";
	int stream = socket(AF_UNIX, SOCK_STREAM, 0);
	if (!connect(stream, (const struct sockaddr *)&daemon_socket, sizeof daemon_socket) &&
	    send(stream, request, strlen(request), MSG_NOSIGNAL) > 0 &&
	    recv(stream, answer, sizeof answer - 1, MSG_WAITALL) > 0) {
		if (strstr(answer, " 200"))
			well++;
		else
			unwell++;
	}
	close(stream);
}

static void step(void)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	now.tv_sec += steps_seconds[steps % 3];
	if (clock_settime(CLOCK_REALTIME, &now))
		perror("clock_settime");
	else
		steps++;
	check_health();
}

/* Runs a command, and steps the clock until it has ended. */
static void run(char *command)
{
	static long stepped;
	char *words[WORDS_MAX + 1] = {NULL};
	int count = 0, status;
	for (char *word = strtok(command, " \n"); word && count < WORDS_MAX; word = strtok(NULL, " \n"))
		words[count++] = word;
	int goes_on = !strcmp(words[count - 1], "&");
	if (goes_on)
		words[count - 1] = NULL;
	long begin = now_ms();
	pid_t child = fork();
	if (!child) {
		execv(words[0], words);
		perror(words[0]);
		_exit(127);
	}
	if (goes_on)
		return;
	while (waitpid(child, &status, WNOHANG) != child) {
		usleep(10000);
		if (now_ms() - stepped >= 1000) {
			stepped = now_ms();
			step();
		}
	}
	printf("END %d %ld %d %d %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), now_ms() - begin,
	       steps, well, unwell);
}

int main(int argc, char **argv)
{
	const char *name = strrchr(argv[0], '/');
	if (!strncmp(name ? name + 1 : argv[0], "qemu-system-", 12))
		return be_vm();
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (mount("dev", "/dev", "devtmpfs", 0, NULL) || mount("proc", "/proc", "proc", 0, NULL) ||
	    mount("sys", "/sys", "sysfs", 0, NULL))
		perror("mount");
	/* Not started by the kernel under TCG. */
	int online = open("/sys/devices/system/cpu/cpu1/online", O_WRONLY);
	if (online < 0 || write(online, "1", 1) < 0)
		perror("cpu1");
	if (!fork()) {
		execl("/bin/qemu-system-x86_64", "/bin/qemu-system-x86_64", "-name", "stepped", "-m", "16M", NULL);
		perror("qemu-system-x86_64");
		_exit(127);
	}
	FILE *commands = fopen("/commands", "r");
	char command[1024] = "";
	for (;;) {
		char next[1024];
		if (commands && fgets(next, sizeof next, commands))
			strcpy(command, next);
		else
			usleep(200000);
		strcpy(next, command);
		run(next);
	}
}
