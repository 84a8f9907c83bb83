//! Reads without a cache, beside QEMU's own daemon.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use plimsoll_driver::{
    Bank, Driver, DriverOptions, FrontendError, Ram, RamOptions, Request, Segment, Status,
};

use super::serve::{QEMU_AIO, cpu_seconds, start_ours, start_qemu};
use super::{Args, make_image};
use crate::child::ChildProcess;
use crate::measure::{at_least, median};
use crate::random::Random;
use crate::title;

/// The project's target.
const BAR: f64 = 0.98;
/// Length of a turn.
const TURN: Duration = Duration::from_millis(500);

/// A kind of load.
struct Load {
    name: &'static str,
    bytes: u32,
    depth: usize,
    random: bool,
}

const LOADS: [Load; 4] = [
    Load {
        name: "4 KiB random, depth 1",
        bytes: 4096,
        depth: 1,
        random: true,
    },
    Load {
        name: "4 KiB random, depth 32",
        bytes: 4096,
        depth: 32,
        random: true,
    },
    Load {
        name: "64 KiB sequential, depth 1",
        bytes: 65536,
        depth: 1,
        random: false,
    },
    Load {
        name: "64 KiB sequential, depth 32",
        bytes: 65536,
        depth: 32,
        random: false,
    },
];

/// A daemon, its guest, and their results.
struct Side {
    name: String,
    process: ChildProcess,
    disk: Driver,
    buffers: Vec<u64>,
    random: Random,
    next: u64,
    rates: Vec<f64>,
    cpu_us: Vec<f64>,
}

impl Side {
    /// Connects to a daemon.
    fn new(
        name: String,
        process: ChildProcess,
        socket: &Path,
        inflight: bool,
    ) -> anyhow::Result<Self> {
        let ram = Ram::new(&RamOptions::default())?;
        let options = DriverOptions {
            inflight,
            ..DriverOptions::default()
        };
        let disk = Driver::connect(&ram, socket, options)?;
        let buffers = (0..32).map(|_| ram.allocate(Bank::High, 65536)).collect();
        Ok(Self {
            name,
            process,
            disk,
            buffers,
            random: Random::new(1),
            next: 0,
            rates: Vec::new(),
            cpu_us: Vec::new(),
        })
    }

    fn submit(&mut self, load: &Load, at: usize) -> Result<(), FrontendError> {
        let places = self.disk.config().capacity_sectors * 512 / u64::from(load.bytes);
        self.next = match load.random {
            true => self.random.below(usize::try_from(places).expect("64-bit")) as u64,
            false => (self.next + 1) % places,
        };
        let segments = [Segment {
            address: self.buffers[at],
            bytes: load.bytes,
        }];
        let read = Request::Read {
            sector: self.next * u64::from(load.bytes) / 512,
            segments: &segments,
        };
        self.disk.queue(0).submit(&read, at as u64)
    }

    /// Reads for a turn.
    fn turn(&mut self, load: &Load, duration: Duration) -> anyhow::Result<()> {
        let cpu = cpu_seconds(&self.process)?;
        let start = Instant::now();
        for at in 0..load.depth {
            self.submit(load, at)?;
        }
        self.disk.queue(0).notify()?;
        let (mut done, mut under_way) = (0_u64, load.depth);
        let mut seconds = 0.0;
        while under_way > 0 {
            self.disk.wait()?;
            let go_on = start.elapsed() < duration;
            while let Some(completion) = self.disk.poll(0)? {
                anyhow::ensure!(completion.status == Status::Ok, "a read failed");
                under_way -= 1;
                done += 1;
                if go_on {
                    self.submit(load, usize::try_from(completion.tag)?)?;
                    under_way += 1;
                }
            }
            self.disk.queue(0).notify()?;
            seconds = start.elapsed().as_secs_f64();
        }
        self.rates.push(done as f64 / seconds);
        let cpu = cpu_seconds(&self.process)? - cpu;
        self.cpu_us.push(cpu * 1e6 / done as f64);
        Ok(())
    }
}

/// Runs the part.
pub(super) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "disk without a cache beside qemu-storage-daemon: reads of an image of {} MiB, O_DIRECT",
            args.image_mib
        ),
    )?;
    let folder = tempfile::tempdir_in(&args.folder)?;
    let image = folder.path().join("image");
    make_image(&image, args.image_mib)?;
    writeln!(
        out,
        "\n{:<28} {:<16} {:>10} {:>14} {:>9} {:>9}",
        "load", "daemon", "reads/s", "CPU us a read", "our CPU", "our rate"
    )?;
    for load in LOADS.iter().filter(|load| load.name.contains(&args.load)) {
        for aio in QEMU_AIO {
            let sockets = ["ours", "qemu"].map(|name| folder.path().join(name));
            let ours = start_ours(&image, &sockets[0], None)?;
            let qemu = start_qemu(&image, &sockets[1], aio)?;
            let mut sides = [
                Side::new("plimsoll".to_owned(), ours, &sockets[0], true)?,
                Side::new(format!("qemu, {aio}"), qemu, &sockets[1], false)?,
            ];
            compare(args, load, &mut sides, out)?;
            for socket in sockets {
                // What a daemon that was killed leaves.
                fs::remove_file(socket)?;
            }
        }
    }
    Ok(())
}

fn compare(
    args: &Args,
    load: &Load,
    sides: &mut [Side; 2],
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    for side in &mut *sides {
        side.turn(load, TURN)?;
        side.rates.clear();
        side.cpu_us.clear();
    }
    for turn in 0..args.turns {
        let first = usize::from(turn % 2 == 1);
        sides[first].turn(load, TURN)?;
        sides[1 - first].turn(load, TURN)?;
    }
    let beside = |of: fn(&Side) -> &[f64]| {
        let pairs = of(&sides[0]).iter().zip(of(&sides[1]));
        median(pairs.map(|(ours, theirs)| ours / theirs).collect())
    };
    let (rate, cpu) = (beside(|side| &side.rates), beside(|side| &side.cpu_us));
    for (at, side) in sides.iter().enumerate() {
        let beside = match at {
            0 => String::new(),
            _ => format!("{cpu:>7.2} x {rate:>7.2} x  {}", at_least(rate, BAR, " x")),
        };
        writeln!(
            out,
            "{:<28} {:<16} {:>10.0} {:>14.1} {beside}",
            load.name,
            side.name,
            median(side.rates.clone()),
            median(side.cpu_us.clone())
        )?;
    }
    Ok(())
}
