/*
 * From the processor's reset to `guest_main` in ring 3.
 *
 * A KVM without hardware support (PVM, shadow page tables) emulates rings 0 to 2 at about a microsecond an instruction and
 * runs ring 3 on the processor. So there is as little as possible here. The task segment permits all I/O ports to ring 3;
 * I/O privilege 3 in RFLAGS would be simpler, but PVM drops it. The interrupt flag is set although nothing interrupts: with
 * it clear, KVM handles an absent host page in a way that no real system's programs meet.
 *
 * A second processor is started by the first one's program: it begins with `second_start`, copied to a page below 1 MiB, and
 * enters `second_main` in ring 3 with tables of the same kind.
 *
 * Memory: `second_start` at 32 KiB, page tables at 64 KiB (the first 16 GiB as they are, in pages of 2 MiB), this program at
 * 1 MiB, stacks below 2 MiB, the workload's array from 32 MiB or 4 GiB.
 */
#define IMAGE		0xffff0000
#define TABLE4		0x10000		/* page tables: one of level 4, one of level 3, GIB of level 2 */
#define TABLE3		0x11000
#define TABLE2		0x12000
#define GIB		16		/* of memory that is mapped */
#define KERNEL_STACK	0x1f0000
#define PROGRAM_STACK	0x1e0000
#define KERNEL_STACK_2	0x1d0000	/* of the second processor */
#define PROGRAM_STACK_2	0x1c0000
#define LINK		0x07		/* present, writable, user */
#define LARGE_PAGE	0x87		/* the same, 2 MiB */
#define LOOP_TURNS	200		/* as in workload.c */

	/* What both processors do. Paging, and from protected to long mode. */
	.macro	enable_long_mode next
	movl	$0x620, %eax		/* physical address extension, SSE and its exceptions */
	movl	%eax, %cr4
	movl	$TABLE4, %eax
	movl	%eax, %cr3
	movl	$0xc0000080, %ecx	/* EFER: long mode, no-execute, SYSCALL */
	movl	$0x901, %eax
	xorl	%edx, %edx
	wrmsr
	movl	$0x80050033, %eax	/* paging, write protection, protected mode */
	movl	%eax, %cr0
	ljmpl	$0x10, $\next
	.endm

	/* Segments, gates, the task segment of this selector, and the floating-point unit. */
	.macro	load_tables task
	lgdt	segments_pointer
	lidt	gates_pointer
	movl	$0x18, %eax
	movl	%eax, %ss
	movl	$0x2b, %eax
	movl	%eax, %ds
	movl	%eax, %es
	movl	$\task, %eax
	ltr	%ax
	fninit
	.endm

	/* A task segment: a stack for exceptions and an I/O map, whose zeros permit every port. */
	.macro	fill_task_segment task, stack, map
	movq	$\stack, \task + 4
	movw	$(\map - \task), \task + 102
	movb	$0xff, \task\()_end - 1
	movl	$\task, %eax
	movw	%ax, \task\()_descriptor + 2
	shrl	$16, %eax
	movb	%al, \task\()_descriptor + 4
	movb	%ah, \task\()_descriptor + 7
	.endm

	.macro	enter_ring_3 entry, stack
	pushq	$0x2b
	pushq	$\stack
	pushq	$0x202			/* interrupt flag */
	pushq	$0x33
	pushq	$\entry
	iretq
	.endm

	.section .reset, "ax"
	.code16
	jmp	start

	.section .rom, "ax"
start:
	cli
	lgdtl	%cs:(boot_segments_pointer - IMAGE)
	movl	%cr0, %eax
	orl	$1, %eax
	movl	%eax, %cr0
	ljmpl	$0x08, $protected

	.code32
protected:
	movl	$0x18, %eax
	movl	%eax, %ds
	movl	%eax, %es
	movl	%eax, %ss
	cld
	movl	$ram_load, %esi
	movl	$ram_start, %edi
	movl	$ram_dwords, %ecx
	rep movsl
	xorl	%eax, %eax
	movl	$bss_start, %edi
	movl	$bss_dwords, %ecx
	rep stosl
	movl	$TABLE4, %edi
	movl	$((2 + GIB) * 1024), %ecx
	rep stosl

	movl	$(TABLE3 + LINK), TABLE4
	movl	$TABLE3, %edi
	movl	$(TABLE2 + LINK), %eax
	movl	$GIB, %ecx
1:	movl	%eax, (%edi)
	addl	$8, %edi
	addl	$0x1000, %eax
	loop	1b
	movl	$TABLE2, %edi
	movl	$LARGE_PAGE, %eax
	xorl	%edx, %edx
	movl	$(GIB * 512), %ecx
2:	movl	%eax, (%edi)
	movl	%edx, 4(%edi)
	addl	$8, %edi
	addl	$0x200000, %eax
	adcl	$0, %edx
	loop	2b

	enable_long_mode long_mode

	.balign	16
boot_segments:
	.quad	0
	.quad	0x00cf9b000000ffff	/* 08: code, 32 bits */
	.quad	0x00af9b000000ffff	/* 10: code, 64 bits */
	.quad	0x00cf93000000ffff	/* 18: data */
boot_segments_pointer:
	.word	boot_segments_pointer - boot_segments - 1
	.long	boot_segments

	.text
	.code64
long_mode:
	movl	$KERNEL_STACK, %esp
	fill_task_segment task, KERNEL_STACK, io_map
	fill_task_segment task_2, KERNEL_STACK_2, io_map_2

	/* All exceptions end the guest: gate N leads to entry N. */
	movl	$gates, %edi
	movl	$entries, %esi
	movl	$32, %ecx
1:	movw	%si, (%rdi)
	movw	$0x10, 2(%rdi)
	movw	$0x8e00, 4(%rdi)
	movl	%esi, %eax
	shrl	$16, %eax
	movw	%ax, 6(%rdi)
	addl	$16, %edi
	addl	$16, %esi
	decl	%ecx
	jnz	1b

	/* No interrupt may come from the old controllers. */
	movb	$0xff, %al
	outb	%al, $0x21
	outb	%al, $0xa1

	load_tables 0x38

	/* How long ring 0 takes for a loop, for the program to compare with its own; the best of three. */
	movl	$3, %r8d
	movl	$-1, %edi
2:	rdtsc
	movl	%eax, %r9d
	movl	$LOOP_TURNS, %ecx
3:	decl	%ecx
	jnz	3b
	rdtsc
	subl	%r9d, %eax
	cmpl	%edi, %eax
	jae	4f
	movl	%eax, %edi
4:	decl	%r8d
	jnz	2b

	enter_ring_3 guest_main, PROGRAM_STACK

	.globl	second_start, second_start_end
	.code16
second_start:
	cli
	lgdtl	%cs:(second_segments_pointer - second_start)
	movl	%cr0, %eax
	orl	$1, %eax
	movl	%eax, %cr0
	ljmpl	$0x08, $second_protected
second_segments_pointer:
	.word	segments_pointer - segments - 1
	.long	segments
second_start_end:

	.code32
second_protected:
	movl	$0x18, %eax
	movl	%eax, %ds
	movl	%eax, %es
	movl	%eax, %ss
	enable_long_mode second_long_mode

	.code64
second_long_mode:
	movl	$KERNEL_STACK_2, %esp
	movb	$0x89, task_2_descriptor + 5	/* it is busy if a processor was plugged here before */
	load_tables 0x48
	enter_ring_3 second_main, PROGRAM_STACK_2

	.balign	16
entries:
	.set	vector, 0
	.rept	32
	.balign	16
	/* The others come with an error code. */
	.if	!(vector == 8 || (vector >= 10 && vector <= 14) || vector == 17 || vector == 21)
	pushq	$0
	.endif
	pushq	$vector
	jmp	exception
	.set	vector, vector + 1
	.endr
	.balign	16
exception:
	popq	%rdi
	popq	%rsi
	popq	%rdx			/* the instruction */
	movq	%cr2, %rcx
	call	guest_exception
1:	hlt
	jmp	1b

	.data
	.balign	16
segments:
	.quad	0
	.quad	0x00cf9b000000ffff	/* 08, 10, 18: as before */
	.quad	0x00af9b000000ffff
	.quad	0x00cf93000000ffff
	.quad	0x00cffb000000ffff	/* 20: ring 3, code, 32 bits */
	.quad	0x00cff3000000ffff	/* 28: ring 3, data */
	.quad	0x00affb000000ffff	/* 30: ring 3, code, 64 bits */
task_descriptor:			/* 38: its base is filled in */
	.word	task_end - task - 1, 0
	.byte	0, 0x89, 0, 0
	.quad	0
task_2_descriptor:			/* 48: of the second processor */
	.word	task_2_end - task_2 - 1, 0
	.byte	0, 0x89, 0, 0
	.quad	0
segments_pointer:
	.word	segments_pointer - segments - 1
	.quad	segments
gates_pointer:
	.word	32 * 16 - 1
	.quad	gates

	.bss
	.balign	16
gates:	.skip	32 * 16
	.balign	16
task:	.skip	104
io_map:	.skip	8192 + 1
task_end:
	.balign	16
task_2:	.skip	104
io_map_2: .skip	8192 + 1
task_2_end:

	.section .note.GNU-stack, "", @progbits
