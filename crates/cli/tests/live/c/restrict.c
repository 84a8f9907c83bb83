/*
 * restrict FAMILY,FAMILY... COMMAND [WORD...]: runs a command under what systemd makes of RestrictAddressFamilies= (sockets of
 * these families alone), MemoryDenyWriteExecute=, RestrictNamespaces= and RestrictRealtime=, by a seccomp filter.
 */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NAMESPACES (CLONE_NEWCGROUP | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUSER | CLONE_NEWUTS)

static struct sock_filter program[256];
static unsigned short length;

static void add(unsigned short code, unsigned int value, unsigned char yes, unsigned char no)
{
	if (length == sizeof program / sizeof *program)
		exit(99);
	program[length++] = (struct sock_filter){code, yes, no, value};
}

static void load_argument(int index)
{
	add(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args) + 8 * index, 0, 0);
}

static void load_number(void)
{
	add(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr), 0, 0);
}

/* Fails a call whose argument has all of these bits; with `any`, one of them. The number is loaded before and after. */
static void deny(int number, int index, unsigned int bits, int any)
{
	add(BPF_JMP | BPF_JEQ | BPF_K, number, 0, any ? 4 : 5);
	load_argument(index);
	if (any) {
		add(BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1);
	} else {
		add(BPF_ALU | BPF_AND | BPF_K, bits, 0, 0);
		add(BPF_JMP | BPF_JEQ | BPF_K, bits, 0, 1);
	}
	add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM, 0, 0);
	load_number();
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return 99;
	add(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch), 0, 0);
	add(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0);
	add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM, 0, 0);
	load_number();
	deny(SYS_mmap, 2, PROT_WRITE | PROT_EXEC, 0);
	deny(SYS_mprotect, 2, PROT_EXEC, 1);
	deny(SYS_pkey_mprotect, 2, PROT_EXEC, 1);
	deny(SYS_shmat, 2, SHM_EXEC, 1);
	deny(SYS_unshare, 0, NAMESPACES, 1);
	deny(SYS_clone, 0, NAMESPACES, 1);
	add(BPF_JMP | BPF_JEQ | BPF_K, SYS_setns, 0, 1);
	add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM, 0, 0);
	/* Its flags are behind a pointer: the C library falls back on clone(). */
	add(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1);
	add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS, 0, 0);
	add(BPF_JMP | BPF_JEQ | BPF_K, SYS_sched_setscheduler, 0, 5);
	load_argument(1);
	add(BPF_JMP | BPF_JEQ | BPF_K, SCHED_FIFO, 1, 0);
	add(BPF_JMP | BPF_JEQ | BPF_K, SCHED_RR, 0, 1);
	add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM, 0, 0);
	load_number();
	add(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 1, 0);
	add(BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
	load_argument(0);
	for (char *family = strtok(argv[1], ","); family; family = strtok(NULL, ",")) {
		add(BPF_JMP | BPF_JEQ | BPF_K, (unsigned int)atoi(family), 0, 1);
		add(BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
	}
	add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAFNOSUPPORT, 0, 0);
	struct sock_fprog filter = {length, program};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) {
		perror("restrict");
		return 98;
	}
	execvp(argv[2], argv + 2);
	perror(argv[2]);
	return 97;
}
