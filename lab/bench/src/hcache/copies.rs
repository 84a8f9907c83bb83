//! Put and get of cold pages beside the copy of cold pages.

use std::io::Write;

use plimsoll_hcache::{Client, Handle, PoolId, PoolOptions, PutOutcome};

use super::bounds::Lines;
use super::pages::handle;
use super::region::{Region, huge_bytes};
use super::{Args, roomy, store_of};
use crate::measure::{Clock, Watch, at_most, median};
use crate::random::Random;
use crate::{Cli, title};

/// Number of pages between two readings of the clock.
const CHUNK: usize = 4096;

/// The target, as a multiple of a copy; \[M08\] has about 2.5.
const BAR: f64 = 1.15;

/// The result of one operation compared to the copies with which it alternated.
#[derive(Default)]
struct CopyComparison {
    copy_ns: Vec<f64>,
    ours_ns: Vec<f64>,
    ratios: Vec<f64>,
}

impl CopyComparison {
    fn line(self, out: &mut dyn Write, name: &str, barred: bool) -> anyhow::Result<()> {
        let (copy, ours) = (median(self.copy_ns), median(self.ours_ns));
        let ratio = median(self.ratios);
        let note = match barred {
            true => at_most(ratio, BAR, " x"),
            false => String::new(),
        };
        writeln!(
            out,
            "{name:<44} {ours:>8.0} {copy:>8.0} {ratio:>7.2} x  {note}"
        )?;
        Ok(())
    }
}

/// Memory on the client's side: pages are put from one region and got into the other, and copied between them.
struct Memory {
    from: Region,
    to: Region,
}

impl Memory {
    fn copy(&mut self, from: &[usize], to: &[usize]) {
        for (&from, &to) in from.iter().zip(to) {
            *self.to.page_mut(to) = *self.from.page(from);
        }
    }

    /// Goes through `order`, with as many copies after each chunk as operations in it. Copies are half a pass
    /// ahead, so that neither warms a page for the other.
    fn pass(
        &mut self,
        order: &[usize],
        others: &[usize],
        mut work: impl FnMut(&mut Self, &[usize]) -> anyhow::Result<()>,
        found: &mut CopyComparison,
    ) -> anyhow::Result<()> {
        let half = order.len() / 2 / CHUNK * CHUNK;
        for start in (0..order.len() / CHUNK * CHUNK).step_by(CHUNK) {
            let far = (start + half) % (order.len() / CHUNK * CHUNK);
            let mut copy_ns = 0.0;
            let copy_first = (start / CHUNK).is_multiple_of(2);
            if copy_first {
                copy_ns = self.timed_copy(&order[far..][..CHUNK], &others[far..][..CHUNK]);
            }
            let watch = Watch::start(Clock::Cpu);
            work(self, &order[start..][..CHUNK])?;
            let ours_ns = watch.seconds() * 1e9 / CHUNK as f64;
            if !copy_first {
                copy_ns = self.timed_copy(&order[far..][..CHUNK], &others[far..][..CHUNK]);
            }
            found.copy_ns.push(copy_ns);
            found.ours_ns.push(ours_ns);
            found.ratios.push(ours_ns / copy_ns);
        }
        Ok(())
    }

    fn timed_copy(&mut self, from: &[usize], to: &[usize]) -> f64 {
        let watch = Watch::start(Clock::Cpu);
        self.copy(from, to);
        watch.seconds() * 1e9 / from.len() as f64
    }
}

/// Runs the part.
pub(super) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let pages = args.region_mib * 256;
    anyhow::ensure!(
        pages >= 2 * CHUNK,
        "--region-mib must be at least {}",
        CHUNK / 128
    );
    let huge = stands_on_huge_pages(pages)?;
    let kind = if huge { "huge pages" } else { "4 KiB pages" };
    title(
        out,
        &format!(
            "hcache: cold pages, {} MiB of them, all memory on {kind}, one thread",
            args.region_mib
        ),
    )?;
    writeln!(
        out,
        "\n{:<44} {:>8} {:>8} {:>9}",
        "operation, order of handles", "ns", "copy, ns", "ratio"
    )?;
    let mut memory = Memory {
        from: Region::new(pages, huge)?,
        to: Region::new(pages, huge)?,
    };
    let mut random = Random::new(1);
    let sequential: Vec<_> = (0..pages).collect();
    for in_order in [false, true] {
        let mut order = || match in_order {
            true => sequential.clone(),
            false => random.order(pages),
        };
        let setting = Setting {
            runs: cli.runs.max(1).into(),
            puts: order(),
            gets: order(),
            others: order(),
            order: if in_order { "sequential" } else { "random" },
        };
        setting.private(&mut memory, out)?;
        setting.shared(&mut memory, out)?;
        setting.full(&mut memory, out)?;
        setting.bound(&mut memory, out)?;
    }
    Ok(())
}

/// Whether a store of this size has its frames on huge pages.
fn stands_on_huge_pages(pages: usize) -> anyhow::Result<bool> {
    let before = huge_bytes()?;
    let (client, pool) = store_of(roomy(pages), PoolOptions::private())?;
    for number in 0..pages as u64 {
        client.put(handle(pool, number), &[1; 4096])?;
    }
    Ok(huge_bytes()?.saturating_sub(before) > pages as u64 * 4096 / 2)
}

/// Lines of metadata that a put or get of a page changes: of its tree, its descriptor and the two neighbours' in its list, all random.
const METADATA_LINES: usize = 4;

/// Size of the metadata, in MiB: that of a GiB of pages.
const METADATA_MIB: usize = 10;

/// Number of handles that a caller passes in one put or get.
const AT_ONCE: usize = 64;

fn put(
    client: &Client,
    pool: PoolId,
    first: u64,
) -> impl FnMut(&mut Memory, &[usize]) -> anyhow::Result<()> {
    move |memory, chunk| {
        let mut refused = 0;
        for numbers in chunk.chunks(AT_ONCE) {
            let handles: [Handle; AT_ONCE] =
                std::array::from_fn(|n| handle(pool, first + numbers[n] as u64));
            client.put_each(
                &handles,
                |n, frame| frame.copy_from_slice(memory.from.page(numbers[n])),
                |_, outcome| refused += usize::from(!outcome.is_ok_and(PutOutcome::is_stored)),
            );
        }
        anyhow::ensure!(refused == 0, "{refused} puts were refused");
        Ok(())
    }
}

fn get(client: &Client, pool: PoolId) -> impl FnMut(&mut Memory, &[usize]) -> anyhow::Result<()> {
    move |memory, chunk| {
        let mut gone = 0;
        for numbers in chunk.chunks(AT_ONCE) {
            let handles: [Handle; AT_ONCE] =
                std::array::from_fn(|n| handle(pool, numbers[n] as u64));
            client.get_each(&handles, |n, page| match page {
                Ok(Some(page)) => memory.to.page_mut(numbers[n]).copy_from_slice(page),
                _ => gone += 1,
            });
        }
        anyhow::ensure!(
            gone == 0,
            "{gone} pages are gone from a store with room for all"
        );
        Ok(())
    }
}

/// Puts all pages and gets them again, untimed: each must be the page that was put. Copies have
/// overwritten what the timed gets brought.
fn check(client: &Client, pool: PoolId, memory: &Memory) -> anyhow::Result<()> {
    for number in 0..memory.from.pages() {
        client.put(handle(pool, number as u64), memory.from.page(number))?;
    }
    let mut page = [0; 4096];
    for number in 0..memory.from.pages() {
        let found = client.get(handle(pool, number as u64), &mut page)?;
        let right = found && &page == memory.from.page(number);
        anyhow::ensure!(right, "a get of page {number} gave wrong bytes or none");
    }
    Ok(())
}

/// The conditions of a part's lines.
struct Setting<'a> {
    runs: u64,
    puts: Vec<usize>,
    gets: Vec<usize>,
    others: Vec<usize>,
    /// The name of the order of handles.
    order: &'a str,
}

impl Setting<'_> {
    /// Puts every page once, under handles from `first` on, beside copies.
    fn put(
        &self,
        memory: &mut Memory,
        (client, pool): (&Client, PoolId),
        first: u64,
        found: &mut CopyComparison,
    ) -> anyhow::Result<()> {
        memory.pass(&self.puts, &self.others, put(client, pool, first), found)
    }

    /// Gets every page once, beside copies.
    fn get(
        &self,
        memory: &mut Memory,
        (client, pool): (&Client, PoolId),
        found: &mut CopyComparison,
    ) -> anyhow::Result<()> {
        memory.pass(&self.gets, &self.others, get(client, pool), found)
    }

    /// Pages go in and out again; frames were used before, but for the first time.
    fn private(&self, memory: &mut Memory, out: &mut dyn Write) -> anyhow::Result<()> {
        let (client, pool) = store_of(roomy(self.puts.len()), PoolOptions::private())?;
        let [mut first, mut again, mut out_again] = [(); 3].map(|()| CopyComparison::default());
        self.put(memory, (&client, pool), 0, &mut first)?;
        self.get(memory, (&client, pool), &mut out_again)?;
        for _ in 0..self.runs {
            self.put(memory, (&client, pool), 0, &mut again)?;
            self.get(memory, (&client, pool), &mut out_again)?;
        }
        check(&client, pool, memory)?;
        let name = format!("put, memory never used before, {}", self.order);
        first.line(out, &name, false)?;
        again.line(out, &format!("put, private, {}", self.order), true)?;
        out_again.line(out, &format!("get, private, {}", self.order), true)
    }

    /// What a put or a get has at least besides its copy.
    fn bound(&self, memory: &mut Memory, out: &mut dyn Write) -> anyhow::Result<()> {
        let mut lines = Lines::new(METADATA_MIB);
        let (mut random, mut found) = (Random::new(3), CopyComparison::default());
        for _ in 0..self.runs {
            memory.pass(
                &self.puts,
                &self.gets,
                |memory, chunk| {
                    for numbers in chunk.chunks(AT_ONCE) {
                        lines.change(numbers.len(), METADATA_LINES, &mut random);
                        memory.copy(numbers, numbers);
                    }
                    Ok(())
                },
                &mut found,
            )?;
        }
        let name = format!("bound: {METADATA_LINES} lines and a copy, {}", self.order);
        found.line(out, &name, false)
    }

    /// Pages are replaced, and stay when they are got.
    fn shared(&self, memory: &mut Memory, out: &mut dyn Write) -> anyhow::Result<()> {
        let (client, pool) = store_of(roomy(self.puts.len()), PoolOptions::shared(1))?;
        let [mut first, mut replaced, mut got] = [(); 3].map(|()| CopyComparison::default());
        self.put(memory, (&client, pool), 0, &mut first)?;
        for _ in 0..self.runs {
            self.get(memory, (&client, pool), &mut got)?;
            self.put(memory, (&client, pool), 0, &mut replaced)?;
        }
        check(&client, pool, memory)?;
        replaced.line(
            out,
            &format!("put, shared, replacing, {}", self.order),
            true,
        )?;
        got.line(out, &format!("get, shared, {}", self.order), true)
    }

    /// Each put drops another page.
    fn full(&self, memory: &mut Memory, out: &mut dyn Write) -> anyhow::Result<()> {
        let pages = self.puts.len() as u64;
        let mut options = roomy(self.puts.len());
        options.capacity_bytes = pages * 4096 / 16 * 15;
        options.max_capacity_bytes = options.capacity_bytes;
        let (client, pool) = store_of(options, PoolOptions::private())?;
        let [mut first, mut found] = [(); 2].map(|()| CopyComparison::default());
        self.put(memory, (&client, pool), 0, &mut first)?;
        let before = client.store().stats().counters;
        for run in 1..=self.runs {
            self.put(memory, (&client, pool), run * pages, &mut found)?;
        }
        let after = client.store().stats().counters;
        let evicted = (after.evicted_pages - before.evicted_pages) as f64
            / (after.puts - before.puts).max(1) as f64;
        let name = format!("put, full store, {} ({evicted:.2} evicted)", self.order);
        found.line(out, &name, true)
    }
}
