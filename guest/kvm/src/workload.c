/*
 * The workload: visits the pages of an array in an order whose miss-ratio curve is known, and verifies what it finds
 * there. README.md describes its settings and the lines that it prints.
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

#define LOW_ARRAY	0x2000000
#define LOW_END		0x80000000	/* of RAM, on machines with more than it */
#define HIGH_ARRAY	0x100000000
#define PAGES_MAX	(12ul << 30 >> 12)	/* above it start.S maps nothing */
#define PAGE_WORDS	512
#define PAGES_PER_MIB	256
#define SERIAL		0x3f8
#define FW_CFG		0x510
#define SETTINGS	"opt/plimsoll/workload"
#define KEYBOARD	0x64
#define LOOP_TURNS	200	/* as in start.S */
#define CPUS_MAX	2
#define CPU_COUNT	5	/* of fw_cfg: processors at the start, and places for them */
#define CPU_PLACES	15
#define CPU_HOTPLUG	0xcd8	/* QEMU's registers: a write selects a processor, at 4 are its flags, or what to do with it */
#define CPU_IS_THERE	1
#define CPU_MUST_GO	4
#define CPU_EJECT	8
#define LOCAL_APIC	0xfee00000
#define SECOND_START	0x8000
#define STEPS_MAX	16
/* Visits between two readings of the clock for anything but the visits themselves. */
#define VISITS		64
/* A visit that takes longer met an absent page, or something else had the processor. */
#define STALL_US	4
/* Beyond this it was something else, or memory that was made inaccessible in bulk: counted apart. */
#define LONG_STALL_US	4000

static inline void out8(u16 port, u8 value) { asm volatile("outb %0, %1" : : "a"(value), "Nd"(port)); }
static inline void out16(u16 port, u16 value) { asm volatile("outw %0, %1" : : "a"(value), "Nd"(port)); }
static inline void out32(u16 port, u32 value) { asm volatile("outl %0, %1" : : "a"(value), "Nd"(port)); }
static inline u8 in8(u16 port) { u8 value; asm volatile("inb %1, %0" : "=a"(value) : "Nd"(port)); return value; }

static inline u64 ticks(void)
{
	u32 low, high;

	asm volatile("lfence; rdtsc" : "=a"(low), "=d"(high) : : "memory");
	return (u64)high << 32 | low;
}

/* --- console --- */

static void put(const char *text)
{
	while (*text)
		out8(SERIAL, *text++);
}

static void put_number(u64 value, unsigned base)
{
	char digits[24], *at = digits + sizeof(digits) - 1;

	*at = 0;
	do {
		*--at = "0123456789abcdef"[value % base];
		value /= base;
	} while (value);
	put(at);
}

static void begin(const char *event) { put("plimsoll: "); put(event); }
static void key(const char *name) { put(" "); put(name); put("="); }
static void number(const char *name, u64 value) { key(name); put_number(value, 10); }
static void hexadecimal(const char *name, u64 value) { key(name); put("0x"); put_number(value, 16); }
static void end(void) { put("\r\n"); }

/* Resets the machine, which QEMU's -no-reboot makes the end. */
static void __attribute__((noreturn)) leave(void)
{
	for (;;)
		out8(KEYBOARD, 0xfe);
}

static void __attribute__((noreturn)) give_up(const char *message)
{
	begin("error message=");
	put(message);
	end();
	leave();
}

/* In ring 0. */
void guest_exception(u64 vector, u64 code, u64 instruction, u64 address)
{
	begin("error message=exception");
	number("vector", vector);
	hexadecimal("code", code);
	hexadecimal("instruction", instruction);
	hexadecimal("address", address);
	end();
	leave();
}

/* --- settings --- */

static char settings[1024];

static u32 fw_cfg_number(unsigned bytes)
{
	u32 value = 0;

	while (bytes--)
		value = value << 8 | in8(FW_CFG + 1);
	return value;
}

/* Whether `text` begins with `word` and goes on with `after`. */
static int begins(const char *text, const char *word, char after)
{
	while (*word && *text == *word)
		text++, word++;
	return !*word && *text == after;
}

static void read_settings(void)
{
	out16(FW_CFG, 0x19);	/* the directory of files */
	for (u32 files = fw_cfg_number(4); files; files--) {
		u32 bytes = fw_cfg_number(4), selector = fw_cfg_number(2);
		char name[56];

		fw_cfg_number(2);
		for (unsigned i = 0; i < sizeof(name); i++)
			name[i] = in8(FW_CFG + 1);
		if (!begins(name, SETTINGS, 0))
			continue;
		if (bytes >= sizeof(settings))
			give_up("the settings are longer than 1023 bytes");
		out16(FW_CFG, selector);
		for (u32 i = 0; i < bytes; i++)
			settings[i] = in8(FW_CFG + 1);
		return;
	}
}

/* The value of a setting, or 0. */
static const char *setting(const char *name)
{
	for (const char *at = settings; *at;) {
		if (begins(at, name, '=')) {
			while (*at++ != '=')
				;
			return at;
		}
		while (*at && *at != ' ')
			at++;
		while (*at == ' ')
			at++;
	}
	return 0;
}

static u64 parse(const char **at)
{
	u64 value = 0;

	while (**at >= '0' && **at <= '9')
		value = value * 10 + *(*at)++ - '0';
	return value;
}

static u64 setting_number(const char *name, u64 otherwise)
{
	const char *at = setting(name);

	if (!at)
		return otherwise;
	otherwise = parse(&at);
	if (*at && *at != ' ')
		give_up("a setting that should be a number is none");
	return otherwise;
}

/* A share from 0 to 1, such as 0.25, in parts of 65536. */
static u64 setting_share(const char *name)
{
	const char *at = setting(name);
	u64 share, unit = 65536;

	if (!at)
		return 0;
	share = parse(&at) * 65536;
	if (*at == '.')
		for (at++; *at >= '0' && *at <= '9'; at++)
			share += (*at - '0') * (unit /= 10);
	return share > 65536 ? 65536 : share;
}

/* --- time --- */

static u64 ticks_per_ms;

#define TIMER_HZ	1193182

/* Reads the interval timer's third channel, which counts down, and the time-stamp counter at once: of several tries the closest. */
static u64 timer(u64 *at)
{
	u64 closest = ~0ul, count = 0;

	for (unsigned try = 0; try < 8; try++) {
		u64 before = ticks();
		out8(0x43, 0x80);	/* latch */
		u64 after = ticks(), low = in8(0x42), read = low | (u64)in8(0x42) << 8;
		if (after - before < closest)
			closest = after - before, count = read, *at = before + closest / 2;
	}
	return count;
}

/*
 * The rate of the time-stamp counter. A try in which the timer began anew, as something else had the processor, comes out too
 * high: tries go on until the two lowest agree within 0.2 %.
 */
static void calibrate(void)
{
	const u64 counts = TIMER_HZ / 50;
	u64 best = ~0ul, second = ~0ul;

	for (unsigned try = 0; try < 50 && (second == ~0ul || second - best > best / 512); try++) {
		u64 begun, ended, from, to;

		out8(0x61, (in8(0x61) & ~2) | 1);	/* gate on, speaker off */
		out8(0x43, 0xb0);			/* one shot, from the largest count */
		out8(0x42, 0xff);
		out8(0x42, 0xff);
		from = timer(&begun);
		do
			to = timer(&ended);
		while (to < from && from - to < counts);
		if (to >= from)
			continue;
		u64 rate = (ended - begun) * TIMER_HZ / (from - to) / 1000;
		if (rate < best)
			second = best, best = rate;
		else if (rate < second)
			second = rate;
	}
	ticks_per_ms = best;
	if (!best || second == ~0ul)
		give_up("the time-stamp counter cannot be timed");
}

/* How many times slower ring 0 ran a loop than this ring does. */
static u64 kernel_slowdown(u32 ring0_ticks)
{
	u64 best = ~0ul;

	for (unsigned try = 0; try < 3; try++) {
		u32 turns = LOOP_TURNS;
		u64 start = ticks();
		asm volatile("1: decl %0\n\tjnz 1b" : "+r"(turns));
		u64 took = ticks() - start;
		if (took < best)
			best = took;
	}
	return ring0_ticks / (best ? best : 1);
}

/* --- pages --- */

/* A page's number, its version (how often it was written), and words made of both, evenly spread over it. */
static u64 work;
static volatile u64 mismatches;

static inline u64 mix(u64 x)
{
	x ^= x >> 32;
	x *= 0xd6e8feb86659fd93;
	x ^= x >> 32;
	x *= 0xd6e8feb86659fd93;
	return x ^ x >> 32;
}

static u64 *array = (u64 *)LOW_ARRAY;

static void sign(u64 page, u64 version)
{
	u64 *words = array + page * PAGE_WORDS, stride = PAGE_WORDS / work, signature = mix(page ^ version << 32);

	words[0] = page;
	words[stride] = version;
	for (u64 i = 2; i < work; i++)
		words[i * stride] = signature + i;
}

static void __attribute__((noinline)) wrong(u64 page, u64 word, u64 expected, u64 found)
{
	if (++mismatches > 16)
		return;
	begin("MISMATCH");
	number("page", page);
	number("word", word);
	hexadecimal("expected", expected);
	hexadecimal("found", found);
	end();
}

/* Verifies a page and returns its version. */
static inline u64 verify(u64 page)
{
	volatile u64 *words = array + page * PAGE_WORDS;
	u64 stride = PAGE_WORDS / work, version = words[stride], signature = mix(page ^ version << 32);

	if (words[0] != page)
		wrong(page, 0, page, words[0]);
	for (u64 i = 2; i < work; i++)
		if (words[i * stride] != signature + i)
			wrong(page, i, signature + i, words[i * stride]);
	return version;
}

/* --- run --- */

enum order { SEQUENTIAL, UNIFORM, ZIPF, STEPS };

/* A processor, which visits pages of its own: `first` and those after it. */
struct cpu {
	u64 random_state, first, page, loop_page, visits, writes;
	u64 stalls, stalled, long_stalled, longest;
};

static struct cpu cpus[CPUS_MAX];
static u64 cpu_count;

/* What all of them do; set before the second one starts, except for the size. */
static enum order order;
static u64 write_share, hot_share, loop_share, think, stall_min, long_min;
/* Pages of each processor: visited by the order, visited more often, and visited in turn beside the order. */
static u64 share_pages, hot_pages, loop_pages;
/* What the order visits at present. */
static volatile u64 size;
/* Whether the second processor is to visit pages, and whether it does. */
static volatile int second_wanted, second_runs;

static inline u64 random(struct cpu *cpu) { return mix(cpu->random_state += 0x9e3779b97f4a7c15); }
static inline u64 below(struct cpu *cpu, u64 bound) { return (u64)((unsigned __int128)random(cpu) * bound >> 64); }

/* --- powers of two, in units of 2^-32 --- */

#define ROOTS	27	/* bits of an exponent below 1 that count */

/* 2^(1/2), 2^(1/4), ... */
static u64 roots[ROOTS];
static u64 log_pages;

/* 2^exponent, below 2^63. */
static u64 power(u64 exponent)
{
	u64 result = 1ul << 32;

	for (unsigned i = 0; i < ROOTS; i++)
		if (exponent >> (31 - i) & 1)
			result = (unsigned __int128)result * roots[i] >> 32;
	return result << (exponent >> 32);
}

static void prepare_zipf(void)
{
	u64 last = 2ul << 32;

	for (unsigned i = 0; i < ROOTS; i++) {
		u64 root = 0;

		for (u64 bit = 1ul << 33; bit; bit >>= 1)
			if ((unsigned __int128)(root | bit) * (root | bit) <= (unsigned __int128)last << 32)
				root |= bit;
		roots[i] = last = root;
	}
	for (u64 bit = 16ul << 32; bit >> (31 - ROOTS); bit >>= 1)
		if (power(log_pages | bit) <= (share_pages + 1) << 32)
			log_pages |= bit;
}

/* A page with a probability in proportion to log(1 + 1 / rank), nearly 1 / rank. */
static u64 zipf(struct cpu *cpu)
{
	u64 page = (power(below(cpu, log_pages)) >> 32) - 1;

	return page < share_pages ? page : share_pages - 1;
}

/* --- visits --- */

static u64 next_page(struct cpu *cpu)
{
	if (loop_share && (random(cpu) & 0xffff) < loop_share) {
		if (++cpu->loop_page >= loop_pages)
			cpu->loop_page = 0;
		return share_pages + cpu->loop_page;
	}
	if (order == UNIFORM)
		return below(cpu, hot_share && (random(cpu) & 0xffff) < hot_share ? hot_pages : share_pages);
	if (order == ZIPF)
		return zipf(cpu);
	if (++cpu->page >= size)
		cpu->page = 0;
	return cpu->page;
}

static void visit_pages(struct cpu *cpu)
{
	for (unsigned i = 0; i < VISITS; i++) {
		u64 page = cpu->first + next_page(cpu), touched = ticks(), version = verify(page);

		if (write_share && (random(cpu) & 0xffff) < write_share) {
			sign(page, version + 1);
			cpu->writes++;
		}
		u64 took = ticks() - touched;

		if (took >= stall_min) {
			if (took < long_min)
				cpu->stalls++, cpu->stalled += took;
			else
				cpu->long_stalled += took;
			if (took > cpu->longest)
				cpu->longest = took;
		}
		for (u64 turn = 0; turn < think; turn++)
			asm volatile("");
	}
	cpu->visits += VISITS;
}

/* The second processor, in ring 3. */
void __attribute__((noreturn)) second_main(void)
{
	second_runs = 1;
	while (second_wanted)
		visit_pages(&cpus[1]);
	second_runs = 0;
	for (;;)
		asm volatile("pause");
}

extern const u8 second_start[], second_start_end[];

static void wait_us(u64 us)
{
	for (u64 end = ticks() + us * ticks_per_ms / 1000; ticks() < end;)
		asm volatile("pause");
}

static void start_second(void)
{
	volatile u32 *high = (u32 *)(LOCAL_APIC + 0x310), *low = (u32 *)(LOCAL_APIC + 0x300);

	second_wanted = 1;
	for (u64 i = 0; second_start + i < second_start_end; i++)
		((volatile u8 *)SECOND_START)[i] = second_start[i];
	*high = 1 << 24;
	*low = 0x4500;		/* reset, then start at the page of SECOND_START */
	wait_us(10000);
	*low = 0x4600 | SECOND_START >> 12;
	wait_us(1000);
	for (u64 end = ticks() + 5000 * ticks_per_ms; !second_runs && ticks() < end;)
		asm volatile("pause");
	if (!second_runs)
		give_up("the second processor does not start");
}

static void stop_second(void)
{
	second_wanted = 0;
	while (second_runs)
		asm volatile("pause");
}

/* Starts the second processor if it was plugged, and lets it go if it is to be unplugged. */
static void follow_plugs(void)
{
	out32(CPU_HOTPLUG, 1);
	u8 flags = in8(CPU_HOTPLUG + 4);

	if (flags & CPU_MUST_GO) {
		stop_second();
		out8(CPU_HOTPLUG + 4, CPU_MUST_GO);
		out8(CPU_HOTPLUG + 4, CPU_EJECT);
	} else if ((flags & CPU_IS_THERE) && !second_wanted) {
		start_second();
	}
}

static u64 sum(const volatile u64 *of_first)
{
	u64 result = 0;

	for (u64 i = 0; i < cpu_count; i++)
		result += of_first[i * sizeof(struct cpu) / sizeof(u64)];
	return result;
}

/* `ring0_ticks`: what start.S measured. */
void guest_main(u32 ring0_ticks)
{
	u64 steps[STEPS_MAX], step_count = 0, pages;
	const char *at, *name;

	read_settings();
	out16(FW_CFG, CPU_COUNT);
	const u64 begin_count = in8(FW_CFG + 1);
	out16(FW_CFG, CPU_PLACES);
	cpu_count = in8(FW_CFG + 1);
	if (!begin_count || begin_count > cpu_count || cpu_count > CPUS_MAX)
		give_up("the machine must have 1 or 2 processors");
	if (begin_count < cpu_count)
		out8(CPU_HOTPLUG, 0);	/* these registers instead of a map of processors */
	calibrate();
	at = setting("workload");
	if (at && (begins(at, "steps", ' ') || begins(at, "steps", 0)))
		order = STEPS, name = "steps";
	else if (at && (begins(at, "uniform", ' ') || begins(at, "uniform", 0)))
		order = UNIFORM, name = "uniform";
	else if (at && (begins(at, "zipf", ' ') || begins(at, "zipf", 0)))
		order = ZIPF, name = "zipf";
	else if (at && (begins(at, "sequential", ' ') || begins(at, "sequential", 0)))
		order = SEQUENTIAL, name = "sequential";
	else
		give_up("workload= must be sequential, uniform, zipf or steps");
	pages = setting_number("mib", 64) * PAGES_PER_MIB;
	if (order == STEPS) {
		if (!(at = setting("steps_mib")))
			give_up("steps needs steps_mib=");
		for (pages = 0; step_count < STEPS_MAX; at++) {
			steps[step_count] = parse(&at) * PAGES_PER_MIB;
			if (steps[step_count] > pages)
				pages = steps[step_count];
			if (!steps[step_count++])
				give_up("steps_mib= has a step without pages");
			if (*at != ',')
				break;
		}
	}
	if (order == ZIPF && setting_number("alpha", 1) != 1)
		give_up("zipf has no alpha= but 1");
	work = setting_number("work", 8);
	if (!pages || pages > PAGES_MAX || work < 4 || work > PAGE_WORDS)
		give_up("mib= must be 1 to 12288, work= 4 to 512");
	if (LOW_ARRAY + pages * PAGE_WORDS * sizeof(u64) > LOW_END)
		array = (u64 *)HIGH_ARRAY;
	write_share = setting_share("write_ratio");
	hot_share = setting_share("hot_ratio");
	loop_share = setting_share("loop_ratio");
	loop_pages = setting_number("loop_mib", 0) * PAGES_PER_MIB / cpu_count;
	if (loop_pages >= pages / cpu_count || !loop_pages != !loop_share || (loop_pages && order == STEPS))
		give_up("loop_mib= must be below mib=, with loop_ratio= and without steps");
	share_pages = pages / cpu_count - loop_pages;
	hot_pages = setting_number("hot_mib", 0) * PAGES_PER_MIB / cpu_count;
	think = setting_number("think", 0);
	stall_min = ticks_per_ms * STALL_US / 1000;
	long_min = ticks_per_ms * LONG_STALL_US / 1000;
	for (u64 i = 0; i < cpu_count; i++) {
		cpus[i].random_state = setting_number("seed", 1) + i;
		cpus[i].first = i * (share_pages + loop_pages);
	}
	const u64 step_ticks = setting_number("step_ms", 5000) * ticks_per_ms;
	const u64 report_ticks = setting_number("report_ms", 200) * ticks_per_ms;
	const u64 seconds = setting_number("seconds", 0), visits = setting_number("visits", ~0ul);

	if (hot_pages > share_pages || (hot_share && !hot_pages))
		give_up("hot_mib= must be 1 or more, at most mib= without loop_mib=");
	if (order == ZIPF)
		prepare_zipf();
	begin("ready");
	key("workload");
	put(name);
	number("pages", pages);
	number("cpus", begin_count);
	number("kernel_ms", 0);
	number("kernel_slowdown", kernel_slowdown(ring0_ticks));
	number("ticks_per_ms", ticks_per_ms);
	end();

	u64 begun = ticks();

	for (u64 page = 0; page < pages; page++)
		sign(page, 0);
	begin("populated");
	number("ms", (ticks() - begun) / ticks_per_ms);
	end();

	size = order == STEPS ? steps[0] / cpu_count : share_pages;
	if (begin_count > 1)
		start_second();

	u64 start = ticks(), now = start, reported = start, stepped = start;
	u64 total = 0, total_reported = 0, rounds = 0, step = 0;
	const u64 finish = seconds ? start + seconds * 1000 * ticks_per_ms : ~0ul;

	if (order == STEPS) {
		begin("step");
		number("index", 0);
		number("pages", size * cpu_count);
		number("start_ms", 0);
		end();
	}
	while (now < finish && total < visits) {
		visit_pages(&cpus[0]);
		total = sum(&cpus[0].visits);
		now = ticks();
		if (order == STEPS && now - stepped >= step_ticks) {
			stepped = now;
			size = steps[++step % step_count] / cpu_count;
			cpus[0].page = 0;
			begin("step");
			number("index", step);
			number("pages", size * cpu_count);
			number("start_ms", (now - start) / ticks_per_ms);
			end();
		}
		if (now - reported >= report_ticks) {
			u64 longest = 0;

			if (begin_count < cpu_count)
				follow_plugs();

			for (u64 i = 0; i < cpu_count; i++) {
				if (cpus[i].longest > longest)
					longest = cpus[i].longest;
				cpus[i].longest = 0;
			}
			begin("round");
			number("index", rounds++);
			number("pages", size * cpu_count);
			number("ops", total - total_reported);
			number("ms", (now - reported) / ticks_per_ms);
			number("total_ops", total);
			number("mismatches", mismatches);
			number("stalls", sum(&cpus[0].stalls));
			number("stalled_us", sum(&cpus[0].stalled) * 1000 / ticks_per_ms);
			number("long_stalled_us", sum(&cpus[0].long_stalled) * 1000 / ticks_per_ms);
			number("longest_us", longest * 1000 / ticks_per_ms);
			end();
			reported = now;
			total_reported = total;
		}
	}
	stop_second();

	begin("audit");
	number("pages", pages);
	end();
	u64 versions = 0;

	for (u64 page = 0; page < pages; page++)
		versions += verify(page);
	if (versions != sum(&cpus[0].writes))
		wrong(pages, 1, sum(&cpus[0].writes), versions);
	begin("done");
	number("ops", total);
	number("ms", (now - start) / ticks_per_ms);
	number("mismatches", mismatches);
	end();
	leave();
}
