/*
 * devices GROUP MAJOR:MINOR...: lets the processes of a control group of version 2 open only these character devices, by a
 * BPF program, as systemd and libvirt do. MINOR may be "*". The filter goes with the group.
 */
#include <fcntl.h>
#include <linux/bpf.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct bpf_insn program[1024];
static unsigned int length;

static void add(unsigned char code, unsigned char destination, unsigned char source, short offset, int value)
{
	if (length == sizeof program / sizeof *program)
		exit(99);
	program[length++] = (struct bpf_insn){code, destination, source, offset, value};
}

static int bpf(int command, union bpf_attr *attributes)
{
	return (int)syscall(SYS_bpf, command, attributes, sizeof *attributes);
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return 99;
	add(BPF_LDX | BPF_MEM | BPF_W, 2, 1, offsetof(struct bpf_cgroup_dev_ctx, access_type), 0);
	add(BPF_LDX | BPF_MEM | BPF_W, 3, 1, offsetof(struct bpf_cgroup_dev_ctx, major), 0);
	add(BPF_LDX | BPF_MEM | BPF_W, 4, 1, offsetof(struct bpf_cgroup_dev_ctx, minor), 0);
	/* The lower half is the type. */
	add(BPF_ALU64 | BPF_AND | BPF_K, 2, 0, 0, 0xffff);
	for (char **rule = argv + 2; *rule; rule++) {
		char *minor = strchr(*rule, ':');
		if (!minor++)
			return 99;
		int any = !strcmp(minor, "*");
		add(BPF_JMP | BPF_JNE | BPF_K, 2, 0, any ? 3 : 4, BPF_DEVCG_DEV_CHAR);
		add(BPF_JMP | BPF_JNE | BPF_K, 3, 0, any ? 2 : 3, atoi(*rule));
		if (!any)
			add(BPF_JMP | BPF_JNE | BPF_K, 4, 0, 2, atoi(minor));
		add(BPF_ALU64 | BPF_MOV | BPF_K, 0, 0, 0, 1);
		add(BPF_JMP | BPF_EXIT, 0, 0, 0, 0);
	}
	add(BPF_ALU64 | BPF_MOV | BPF_K, 0, 0, 0, 0);
	add(BPF_JMP | BPF_EXIT, 0, 0, 0, 0);
	static char log[1 << 16];
	union bpf_attr load = {
		.prog_type = BPF_PROG_TYPE_CGROUP_DEVICE,
		.insn_cnt = length,
		.insns = (unsigned long)program,
		.license = (unsigned long)"GPL",
		.log_level = 1,
		.log_size = sizeof log,
		.log_buf = (unsigned long)log,
	};
	int loaded = bpf(BPF_PROG_LOAD, &load);
	if (loaded < 0) {
		perror("BPF_PROG_LOAD");
		fputs(log, stderr);
		return 98;
	}
	union bpf_attr attach = {0};
	attach.target_fd = open(argv[1], O_RDONLY | O_DIRECTORY);
	attach.attach_bpf_fd = loaded;
	attach.attach_type = BPF_CGROUP_DEVICE;
	if (bpf(BPF_PROG_ATTACH, &attach)) {
		perror("BPF_PROG_ATTACH");
		return 98;
	}
	return 0;
}
