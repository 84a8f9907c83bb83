//! Gets that miss, and the size of the store's metadata of a page.

use std::io::Write;

use plimsoll_flow::mix;
use plimsoll_hcache::{Client, Handle, PoolId, PoolOptions};

use super::bounds::{Lines, locked_reads};
use super::{Args, roomy, store_of};
use crate::measure::{Clock, Watch, at_most, median};
use crate::random::Random;
use crate::{Cli, title};

/// Number of lookups between two readings of the clock.
const LOOKUPS: usize = 1 << 18;

/// How pages lie in objects.
struct Shape {
    name: &'static str,
    objects: u64,
    object_pages: u64,
}

impl Shape {
    fn handle(&self, pool: PoolId, number: u64) -> Handle {
        self.place(pool, number / self.object_pages, number % self.object_pages)
    }

    /// Objects have numbers all over 64 bits, as inode numbers and hashes may.
    fn place(&self, pool: PoolId, object: u64, index: u64) -> Handle {
        Handle {
            pool,
            object: mix(object),
            index: u32::try_from(index).expect("indices below 2^32"),
        }
    }
}

/// Runs the part.
pub(super) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let pages = args.lookup_kilopages as u64 * 1000;
    title(
        out,
        &format!(
            "hcache: gets that miss at {} K pages, random handles back to back, and metadata",
            args.lookup_kilopages
        ),
    )?;
    writeln!(out)?;
    let shapes = [
        Shape {
            name: "one object",
            objects: 1,
            object_pages: pages,
        },
        Shape {
            name: "objects of 1000 pages",
            objects: pages / 1000,
            object_pages: 1000,
        },
        Shape {
            name: "objects of one page",
            objects: pages,
            object_pages: 1,
        },
    ];
    for shape in shapes {
        of_shape(cli, &shape, pages, out)?;
    }
    for mib in TABLES_MIB {
        let ns = locked_read_ns(cli, &Lines::new(mib));
        let name = format!("bound: one random line of {mib} MiB, read within a lock, ns");
        line(out, &name, ns, "what any lookup does")?;
    }
    Ok(())
}

/// Sizes of the tables in which a lookup's line lies, in MiB: about those of the nodes of a million pages in one object, of the slots
/// of a million objects, and of the descriptors.
const TABLES_MIB: [usize; 3] = [4, 12, 32];

fn locked_read_ns(cli: &Cli, lines: &Lines) -> f64 {
    let mut random = Random::new(2);
    let mut found = Vec::new();
    for _ in 0..4 * cli.runs.max(1) {
        let watch = Watch::start(Clock::Cpu);
        locked_reads(lines, LOOKUPS, &mut random);
        found.push(watch.seconds() * 1e9 / LOOKUPS as f64);
    }
    median(found)
}

fn of_shape(cli: &Cli, shape: &Shape, pages: u64, out: &mut dyn Write) -> anyhow::Result<()> {
    let count = usize::try_from(pages)?;
    let (client, pool) = store_of(roomy(count + count / 16), PoolOptions::private())?;
    let mut random = Random::new(1);
    for number in random.order(count) {
        let stored = client.put(shape.handle(pool, number as u64), &[1; 4096])?;
        anyhow::ensure!(stored.is_stored(), "a put was refused");
    }
    let stats = client.store().stats();
    anyhow::ensure!(stats.pages == pages, "{} of {pages} pages", stats.pages);
    let bytes = stats.metadata_bytes as f64 / pages as f64;
    let name = format!("{}: metadata, bytes a page", shape.name);
    line(out, &name, bytes, &at_most(bytes, 40.0, " bytes"))?;

    // Holes: pages that were there and are flushed, others put in their stead so that as many are left.
    let mut holes = random.order(count);
    holes.truncate(count / 16);
    for &number in &holes {
        client.flush(shape.handle(pool, number as u64))?;
    }
    for extra in 0..holes.len() as u64 {
        client.put(shape.place(pool, 2 * pages + extra, 0), &[1; 4096])?;
    }
    let hole = if shape.object_pages == 1 {
        "an object that was flushed"
    } else {
        "a hole in an object"
    };
    type Miss<'a> = Box<dyn Fn(&mut Random) -> Handle + 'a>;
    let misses: [(&str, Miss); 3] = [
        (
            hole,
            Box::new(|random| shape.handle(pool, holes[random.below(holes.len())] as u64)),
        ),
        (
            "beyond an object's last page",
            Box::new(|random| {
                let object = random.below(usize::try_from(shape.objects).unwrap_or(1)) as u64;
                let index = shape.object_pages + random.below(1000) as u64;
                shape.place(pool, object, index)
            }),
        ),
        (
            "an object that is absent",
            Box::new(|random| {
                let object = pages + random.below(count) as u64;
                shape.place(pool, object, random.below(1000) as u64)
            }),
        ),
    ];
    for (what, miss) in misses {
        let ns = missing_ns(cli, &client, &miss)?;
        let name = format!("{}: miss, {what}, ns", shape.name);
        line(out, &name, ns, &at_most(ns, 50.0, " ns"))?;
    }
    Ok(())
}

/// Nanoseconds of a get that misses, the making of its handle included.
fn missing_ns(
    cli: &Cli,
    client: &Client,
    miss: &dyn Fn(&mut Random) -> Handle,
) -> anyhow::Result<f64> {
    let mut random = Random::new(2);
    let mut page = [0; 4096];
    let mut found = Vec::new();
    for _ in 0..4 * cli.runs.max(1) {
        let mut hits = 0;
        let watch = Watch::start(Clock::Cpu);
        for _ in 0..LOOKUPS {
            hits += u32::from(client.get(miss(&mut random), &mut page)?);
        }
        found.push(watch.seconds() * 1e9 / LOOKUPS as f64);
        anyhow::ensure!(hits == 0, "{hits} gets found what was never put");
    }
    Ok(median(found))
}

fn line(out: &mut dyn Write, name: &str, figure: f64, note: &str) -> std::io::Result<()> {
    writeln!(out, "{name:<64} {figure:>8.1}  {note}")
}
