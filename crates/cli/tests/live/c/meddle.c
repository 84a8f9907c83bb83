/*
 * meddle: a process whose second thread spoils what a tracer does through the first. It writes other numbers below
 * the stack of the first, and puts another file in place of descriptors that appear. Its memory looks like a VM's RAM.
 * Prints "ready".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include "ram.h"

static char *volatile stack;
/* Whether the first thread has returned from creating the second, whose frames lie where that writes. */
static volatile int is_alone;

static void *meddle(void *unused)
{
	(void)unused;
	int null = open("/dev/null", O_RDWR);
	uint32_t random = 1;
	while (!is_alone)
		;
	for (;;) {
		for (int pause = 0; pause < 20000; pause++)
			random = random * 1664525 + 1013904223;
		/* Below the red zone, where a tracer borrows: the first thread calls nothing. */
		((volatile uint32_t *)(stack - 704))[random >> 8 & 127] = random >> 16 & 15;
		/* Not always, so that a tracer gets to every step at some time. */
		int descriptor = null + 1 + (random >> 20 & 3);
		if (!(random >> 24 & 7) && fcntl(descriptor, F_GETFD) >= 0)
			dup2(null, descriptor);
		if (!(random >> 24 & 127))
			close(descriptor);
	}
	return NULL;
}

int main(void)
{
	volatile char *ram = make_ram();
	char here;
	stack = &here;
	pthread_t thread;
	if (pthread_create(&thread, NULL, meddle, NULL))
		return 1;
	is_alone = 1;
	for (;;)
		touch_all(ram);
}
