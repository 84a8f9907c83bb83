//! Coverage and width of the band of a disk's curve, behind model guests whose kernels are not LRU.
//!
//! A guest of [`OWN`] pages visits files of [`FILE`] pages by a pattern, and reads or overwrites each whole; the list behind it
//! predicts its reads with memory of other sizes. The truth is the same guest with that memory, on the same visits. The guests
//! are LRU; active and inactive lists after Linux 6.1 (a second use activates, a page read again within the size of
//! the active list is active at once); and generations after its MGLRU (pages used more than once stay for another
//! generation while such pages are read again more often than others). They are simple models: real kernels are
//! measured in docs/disk-measured.md.
//!
//! *Held*, *given* and *needed* are those of live curves, at [`SIZES`] sizes: needed is the mean width that holds the truth at
//! 95 % of them, if all bands are widened by one factor. *Quotients*: the same for the misses at each size divided by those at
//! each other one, as a promise compares them; widths are those of the logarithm.

use std::collections::BTreeMap;
use std::io::Write;

use plimsoll_estimator::{GhostOptions, GuestGhosts};
use plimsoll_flow::{PageCount, PageNumber};
use plimsoll_source::synthetic::Pattern;

use super::{Args, HELD_MIN, pages_of, uniform, zipf};
use crate::{Cli, title};

/// Number of files, and pages of each.
const FILES: u64 = 448;
const FILE: u64 = 16;
/// Pages of the guest.
const OWN: u64 = FILES * FILE * 3 / 10;
/// Visits before the counts begin, and those counted.
const WARM: u64 = FILES;
const COUNTED: u64 = 4 * FILES;
/// Sizes at which the curve is compared, evenly from the guest's to all files.
const SIZES: u64 = 8;
/// Error, as a share of the reads or of a quotient, that does not count against a band.
const ROUNDING: f64 = 1e-3;
/// Smaller shares of misses count as this one in a quotient, as for promises.
const LEAST: f64 = 1e-3;

#[derive(Debug, Clone, Copy)]
enum Order {
    Lru,
    Lists,
    Generations,
}

const ORDERS: [(&str, Order); 3] = [
    ("LRU", Order::Lru),
    ("lists", Order::Lists),
    ("generations", Order::Generations),
];

const ACTIVE: usize = 1;

/// A page of a guest, there or not.
#[derive(Debug, Clone, Copy, Default)]
struct Page {
    /// Its list, and its time there.
    place: Option<(usize, u64)>,
    uses: u32,
    is_dirty: bool,
    /// Evictions when it left.
    left: Option<u64>,
}

/// A guest of `size` pages.
struct Guest {
    order: Order,
    size: usize,
    pages: Vec<Page>,
    /// Oldest first: one list; inactive and active; or generations by their number modulo 4.
    lists: [BTreeMap<u64, usize>; 4],
    oldest_generation: usize,
    /// Pages used once, and more often: evicted, and read again.
    tiers: [(f64, f64); 2],
    time: u64,
    evictions: u64,
}

impl Guest {
    fn new(order: Order, size: u64) -> Self {
        Self {
            order,
            size: usize::try_from(size).unwrap_or(usize::MAX),
            pages: vec![Page::default(); usize::try_from(FILES * FILE).unwrap_or_default()],
            lists: Default::default(),
            oldest_generation: 0,
            tiers: Default::default(),
            time: 0,
            evictions: 0,
        }
    }

    /// Moves a page to the young end of a list.
    fn put(&mut self, page: usize, list: usize) {
        self.take(page);
        self.time += 1;
        self.lists[list].insert(self.time, page);
        self.pages[page].place = Some((list, self.time));
    }

    fn take(&mut self, page: usize) {
        if let Some((list, time)) = self.pages[page].place.take() {
            self.lists[list].remove(&time);
        }
    }

    /// Uses a page. Returns whether it was not there, and the page that left for it.
    fn touch(&mut self, page: usize, writes: bool) -> (bool, Option<usize>) {
        let missed = self.pages[page].place.is_none();
        let mut gone = None;
        if missed {
            let full = self.lists.iter().map(BTreeMap::len).sum::<usize>() >= self.size;
            gone = full.then(|| self.evict());
            self.enter(page);
        } else {
            self.pages[page].uses += 1;
            match self.order {
                Order::Lru => self.put(page, 0),
                Order::Lists if self.pages[page].uses > 1 => {
                    let (list, _) = self.pages[page].place.unwrap_or_default();
                    if list != ACTIVE {
                        self.put(page, ACTIVE);
                    }
                }
                Order::Lists | Order::Generations => {}
            }
        }
        self.pages[page].is_dirty |= writes;
        (missed, gone)
    }

    fn enter(&mut self, page: usize) {
        let since = self.pages[page].left.map(|left| self.evictions - left);
        let tier = usize::from(self.pages[page].uses > 1);
        self.pages[page].uses = 1;
        match self.order {
            Order::Lru => self.put(page, 0),
            Order::Lists => {
                let active = self.lists[ACTIVE].len() as u64;
                let soon = since.is_some_and(|since| since <= active);
                self.put(page, if soon { ACTIVE } else { 0 });
            }
            Order::Generations => {
                if since.is_some_and(|since| since <= 2 * self.size as u64) {
                    self.tiers[tier].1 += 1.0;
                }
                self.put(page, (self.oldest_generation + 1) % 4);
            }
        }
    }

    fn evict(&mut self) -> usize {
        let page = match self.order {
            Order::Lru => self.lists[0].first_key_value().map(|(_, &page)| page),
            Order::Lists => self.oldest_inactive(),
            Order::Generations => self.oldest_of_generations(),
        };
        let page = page.expect("a full guest has pages");
        self.take(page);
        self.evictions += 1;
        self.pages[page].left = Some(self.evictions);
        page
    }

    fn oldest_inactive(&mut self) -> Option<usize> {
        while self.lists[0].len() <= self.lists[ACTIVE].len() {
            let (_, &page) = self.lists[ACTIVE].first_key_value()?;
            self.pages[page].uses = 0;
            self.put(page, 0);
        }
        self.lists[0].first_key_value().map(|(_, &page)| page)
    }

    fn oldest_of_generations(&mut self) -> Option<usize> {
        loop {
            let oldest = &self.lists[self.oldest_generation % 4];
            let Some((_, &page)) = oldest.first_key_value() else {
                self.oldest_generation += 1;
                self.tiers = self.tiers.map(|(out, back)| (out / 2.0, back / 2.0));
                continue;
            };
            let tier = usize::from(self.pages[page].uses > 1);
            let [(once_out, once_back), (more_out, more_back)] = self.tiers;
            let stays = more_back * (once_out + 64.0) > once_back * (more_out + 64.0) / 2.0;
            if tier == 1 && stays {
                self.pages[page].uses = 1;
                self.put(page, (self.oldest_generation + 1) % 4);
                continue;
            }
            self.tiers[tier].0 += 1.0;
            return Some(page);
        }
    }
}

/// Visits of files, each a read or a write.
fn visits(name: &str, writes: bool, seed: u64) -> anyhow::Result<Vec<(u64, bool)>> {
    let count = WARM + COUNTED;
    let files = match name {
        "Zipf 0.6" => pages_of(zipf(FILES, 0.6, count), seed)?,
        "Zipf 0.9" => pages_of(zipf(FILES, 0.9, count), seed)?,
        "Zipf 1.2" => pages_of(zipf(FILES, 1.2, count), seed)?,
        "class" => {
            let pages = PageCount(FILES);
            pages_of(
                Pattern::Class {
                    pages,
                    references: count,
                },
                seed,
            )?
        }
        "loop" => (0..count).map(|at| at % FILES).collect(),
        "phase" => {
            // Of all files first half of them, then the other half and some of the first.
            let mixed = pages_of(uniform(FILES, count), seed)?;
            let half = |(at, file): (u64, u64)| match at / (2 * FILES) % 2 {
                0 => file / 2,
                _ => FILES * 2 / 5 + file * 3 / 5,
            };
            (0..).zip(mixed).map(half).collect()
        }
        _ => pages_of(uniform(FILES, count), seed)?,
    };
    let coins = pages_of(uniform(10, count), !seed)?;
    let writes = coins.into_iter().map(|coin| writes && coin == 0);
    Ok(files.into_iter().zip(writes).collect())
}

const STREAMS: [&str; 7] = [
    "uniform", "Zipf 0.6", "Zipf 0.9", "Zipf 1.2", "class", "loop", "phase",
];

/// Bands over sizes and seeds.
#[derive(Default)]
struct Tally {
    held: f64,
    given: f64,
    /// Error as a share of the band's side on which the truth is.
    factors: Vec<f64>,
}

impl Tally {
    /// Counts a band about `expected`.
    fn add(&mut self, expected: f64, [low, high]: [f64; 2], truth: f64) {
        let holds = low - ROUNDING <= truth && truth <= high + ROUNDING;
        self.held += f64::from(u8::from(holds));
        self.given += high - low;
        let error = truth - expected;
        let side = if error > 0.0 {
            high - expected
        } else {
            expected - low
        };
        self.factors
            .push((error.abs() - ROUNDING).max(0.0) / side.max(1e-9));
    }

    /// Share held, and mean widths given and needed.
    fn result(&mut self) -> [f64; 3] {
        let count = self.factors.len();
        self.factors.sort_by(f64::total_cmp);
        let factor = self.factors[(count * 95).div_ceil(100) - 1];
        let given = self.given / count as f64;
        [self.held / count as f64, given, given * factor]
    }
}

/// Results of a row.
#[derive(Default)]
struct Row {
    misses: Tally,
    quotients: Tally,
}

impl Row {
    fn add(&mut self, order: Order, visits: &[(u64, bool)]) -> anyhow::Result<()> {
        let mut list = GuestGhosts::new(GhostOptions {
            direct: PageCount(OWN),
            ghost: PageCount(FILES * FILE),
            segment: PageCount(FILE),
        })?;
        let mut own = Guest::new(order, OWN);
        let step = (FILES * FILE - OWN) / SIZES;
        let sizes = (1..SIZES).map(|nth| OWN + nth * step / FILE * FILE);
        let mut others: Vec<_> = sizes.map(|size| (Guest::new(order, size), 0.0)).collect();
        for (at, &(file, writes)) in (0..).zip(visits) {
            if at == WARM {
                list.resize(PageCount(OWN), PageCount(FILES * FILE))?;
                others.iter_mut().for_each(|(_, misses)| *misses = 0.0);
            }
            for number in file * FILE..(file + 1) * FILE {
                let page = usize::try_from(number)?;
                let (missed, gone) = own.touch(page, writes);
                if missed && !writes {
                    list.missed(PageNumber(number));
                }
                if let Some(gone) = gone {
                    let number = PageNumber(gone as u64);
                    if std::mem::take(&mut own.pages[gone].is_dirty) {
                        list.released(number);
                    }
                    list.evicted(number);
                }
                for (other, misses) in &mut others {
                    let (missed, _) = other.touch(page, writes);
                    *misses += f64::from(u8::from(missed && !writes));
                }
            }
        }
        let curve = list.curve()?;
        let truths = others.iter().map(|(other, misses)| {
            let size = PageCount(other.size as u64);
            (size, misses / curve.references() as f64)
        });
        let truths: Vec<_> = truths.collect();
        for &(size, truth) in &truths {
            let point = curve.at(size);
            let band = [point.low, point.high];
            self.misses.add(point.miss_ratio, band, truth);
            for &(baseline, divisor) in truths.iter().filter(|(other, _)| *other != size) {
                let band = curve.quotient_band(size, baseline, LEAST);
                let log = |over: f64, under: f64| (over.max(LEAST) / under.max(LEAST)).ln();
                let expected = log(point.miss_ratio, curve.miss_ratio(baseline));
                let limits = [*band.start(), *band.end()].map(f64::ln);
                self.quotients.add(expected, limits, log(truth, divisor));
            }
        }
        Ok(())
    }

    fn write(mut self, name: &str, out: &mut dyn Write) -> anyhow::Result<()> {
        let [held, given, needed] = self.misses.result();
        let [quotients, log_given, log_needed] = self.quotients.result();
        let is_under = held < HELD_MIN || quotients < HELD_MIN;
        let under = if is_under { "  UNDER" } else { "" };
        writeln!(
            out,
            "  {name:<28} {held:>7.3} {given:>8.4} {needed:>8.4} {quotients:>10.3} {log_given:>8.4} {log_needed:>8.4}{under}"
        )?;
        out.flush()?;
        Ok(())
    }
}

/// Measures the band behind every model guest and prints a table for each.
pub(super) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if !cli.wants("disk") {
        return Ok(());
    }
    title(
        out,
        &format!(
            "Bands of disks' curves: {} seeds from {}",
            args.seeds, args.first_seed
        ),
    )?;
    for (guest, order) in ORDERS {
        writeln!(
            out,
            "\n{:<30} {:>7} {:>8} {:>8} {:>10} {:>8} {:>8}",
            format!("disk: {guest}"),
            "held",
            "given",
            "needed",
            "quotients",
            "given",
            "needed"
        )?;
        for stream in STREAMS {
            if args
                .stream
                .as_ref()
                .is_some_and(|only| !stream.contains(only.as_str()))
            {
                continue;
            }
            for (writes, text) in [(false, ""), (true, ", 10 % writes")] {
                let mut row = Row::default();
                for seed in args.first_seed..args.first_seed + args.seeds {
                    row.add(order, &visits(stream, writes, seed)?)?;
                }
                row.write(&format!("{stream}{text}"), out)?;
            }
        }
    }
    Ok(())
}
