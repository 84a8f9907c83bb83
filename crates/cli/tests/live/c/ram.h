/* Memory that looks like a VM's RAM, all of which is touched. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define RAM_BYTES (16 << 20)

static void touch_all(volatile char *ram)
{
	for (size_t page = 0; page < RAM_BYTES; page += 4096)
		ram[page]++;
}

/* Makes the memory and prints "ready". */
static volatile char *make_ram(void)
{
	int file = memfd_create("memory-backend-memfd", 0);
	if (file < 0 || ftruncate(file, RAM_BYTES))
		exit(1);
	volatile char *ram = mmap(NULL, RAM_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (ram == MAP_FAILED)
		exit(1);
	touch_all(ram);
	printf("ready\n");
	fflush(stdout);
	return ram;
}
