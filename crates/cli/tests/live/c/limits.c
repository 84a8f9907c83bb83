/*
 * limits DEFAULT_ERRNO NUMBER,NUMBER,... COMMAND [WORD...]: runs a command with a seccomp filter that allows the system
 * calls of these numbers and fails any other with the error. DEFAULT_ERRNO "kill" kills the process instead, and the
 * list is then of what is forbidden.
 */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

static struct sock_filter program[4096];
static unsigned short length;

static void add(unsigned short code, unsigned int value, unsigned char yes, unsigned char no)
{
	if (length == sizeof program / sizeof *program)
		exit(99);
	program[length++] = (struct sock_filter){code, yes, no, value};
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return 99;
	int kill = !strcmp(argv[1], "kill");
	unsigned int listed = kill ? SECCOMP_RET_KILL_PROCESS : SECCOMP_RET_ALLOW;
	unsigned int others = kill ? SECCOMP_RET_ALLOW : SECCOMP_RET_ERRNO | (unsigned int)atoi(argv[1]);
	add(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch), 0, 0);
	add(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0);
	add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM, 0, 0);
	add(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr), 0, 0);
	for (char *number = strtok(argv[2], ","); number; number = strtok(NULL, ",")) {
		add(BPF_JMP | BPF_JEQ | BPF_K, (unsigned int)atoi(number), 0, 1);
		add(BPF_RET | BPF_K, listed, 0, 0);
	}
	add(BPF_RET | BPF_K, others, 0, 0);
	struct sock_fprog filter = {length, program};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) {
		perror("limits");
		return 98;
	}
	execvp(argv[3], argv + 3);
	perror(argv[3]);
	return 97;
}
