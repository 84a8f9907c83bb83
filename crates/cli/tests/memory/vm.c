/*
 * A process whose memory looks like a VM's RAM and is used again and again. Prints "ready", and a line for each time that it has used
 * all of it.
 */
#define _GNU_SOURCE
#include "../live/c/ram.h"

int main(void)
{
	volatile char *ram = make_ram();
	for (;;) {
		touch_all(ram);
		puts("used");
		fflush(stdout);
		usleep(1000);
	}
}
