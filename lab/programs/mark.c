/*
 * mark ID: tells a page log (qemu/pagelog) where a job begins (1) or ends (2), by a no-operation of 8 bytes that QEMU's plugin
 * looks for: 0f 1f 84 00 and 0x4d415200 | ID. On any other machine it does nothing.
 */
#define MARK(id) __asm__ volatile(".byte 0x0f, 0x1f, 0x84, 0x00, " #id ", 0x52, 0x41, 0x4d" ::: "memory")

int main(int argc, char **argv)
{
	switch (argc == 2 ? argv[1][0] : 0) {
	case '1':
		MARK(1);
		return 0;
	case '2':
		MARK(2);
		return 0;
	}
	return 2;
}
