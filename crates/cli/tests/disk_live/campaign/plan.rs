//! What a guest of the campaign is and does, drawn from a seed.

use std::fmt;
use std::path::Path;

use fastrand::Rng;
use plimsoll_rig::{GuestKernel, Setup};
use plimsoll_skip::longer;

use crate::rig::image;

/// How a guest ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By itself, when it has verified all once more.
    ByItself,
    /// The VM is killed; its file system is checked.
    Killed,
    /// The VM is killed; what it had flushed is verified by another.
    KilledAndVerified,
}

/// A guest and what becomes of it.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub setup: Setup,
    /// Whether the guest's device-mapper target is used, over an hcache server.
    pub hcache: bool,
    /// Whether the daemon has a cache of its own.
    pub cached: bool,
    pub end: End,
    /// Names what it does.
    what: String,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let setup = &self.setup;
        write!(
            f,
            "{}, {:?}, Linux {}, {} CPUs, {} queues, {} MiB, {}: {}",
            self.what,
            self.end,
            setup.kernel.series(),
            setup.vcpus,
            setup.queues,
            setup.memory_mib,
            setup.serve.join(" "),
            setup.workload
        )
    }
}

/// One of them.
fn one<T: Copy>(random: &mut Rng, of: &[T]) -> T {
    of[random.usize(..of.len())]
}

/// How long a guest works on its disk, in seconds.
fn seconds() -> usize {
    longer(10)
}

impl Plan {
    /// Without an image of tools no guest runs fio.
    pub fn draw(seed: u64, tools: Option<&Path>) -> Self {
        let mut random = Rng::with_seed(seed);
        let random = &mut random;
        let module = one(random, &["copy", "copy", "lazy"]);
        // Neighbouring seeds do different things.
        let (what, workload, formatted, end) = match seed % 7 {
            0 | 1 => ("raw disk", raw(random), false, End::ByItself),
            2 => ("files", stress(random), true, End::ByItself),
            3 if tools.is_some() => {
                let raw = random.bool();
                ("fio", fio(random, raw), !raw, End::ByItself)
            }
            3 | 4 => ("signed files", signed(random), true, End::ByItself),
            5 => ("files of a killed VM", stress(random), true, End::Killed),
            _ => {
                let workload = format!("workload=disk-crash direct={}", random.u8(..2));
                ("a killed VM", workload, false, End::KilledAndVerified)
            }
        };
        let hcache = random.u8(..3) == 0;
        let write = one(random, &["through", "delayed"]);
        let cache = one(random, &[16, 24, 32, 48]);
        let mut serve = format!("--write {write} --verify");
        if write == "delayed" {
            let (dirty, age_ms) = (one(random, &[10, 25, 50]), one(random, &[50, 1000, 30_000]));
            serve.push_str(&format!(" --dirty {dirty}% --dirty-age {age_ms}ms"));
        }
        let cached = !hcache || write == "delayed" || random.bool();
        serve.push_str(&if cached {
            format!(" --cache {cache}M --cache-max 96M")
        } else {
            " --cache-mode none".to_owned()
        });
        let guest_seed = random.u32(1..);
        let mut words = format!("{workload} module={module} seed={guest_seed} unload=1");
        if hcache {
            words.push_str(" dm=private");
        }
        let mut setup = Setup::new(&serve, &words);
        setup.kernel = one(random, &[GuestKernel::V6_1, GuestKernel::V6_12]);
        if image(setup.kernel).is_err() {
            setup.kernel = GuestKernel::V6_1;
        }
        setup.vcpus = random.u32(1..=2);
        setup.queues = random.u16(1..=4);
        setup.memory_mib = one(random, &[120, 136, 160]);
        setup.image_mib = one(random, &[96, 128]);
        setup.formatted = formatted;
        if what == "fio" {
            setup.tools = tools.map(Path::to_owned);
            // For it and its libraries.
            setup.memory_mib += 64;
        }
        if workload.contains("swap=disk") {
            setup.swap_mib = 64;
        }
        Self {
            seed,
            setup,
            hcache,
            cached,
            end,
            what: what.to_owned(),
        }
    }
}

fn raw(random: &mut Rng) -> String {
    format!(
        "workload=disk-raw seconds={} threads={} write_percent={} direct={} span_mib={}",
        seconds(),
        random.u8(1..=3),
        one(random, &[5, 20, 50]),
        one(random, &[0, 0, 1]),
        one(random, &[32, 64, 96])
    )
}

fn stress(random: &mut Rng) -> String {
    let swap = one(random, &["none", "zram", "disk"]);
    format!(
        "workload=disk-stress rounds={} steps=40 threads={} files={} swap={swap}",
        longer(random.usize(3..=5)),
        random.u8(1..=3),
        random.u8(4..=8)
    )
}

fn signed(random: &mut Rng) -> String {
    format!(
        "workload=disk-signed files=64 warmup=0 rounds={} write_percent={} order={} flush={}",
        longer(random.usize(4..=8)),
        one(random, &[0, 10, 30]),
        one(random, &["random", "zipf", "class", "sequential"]),
        one(random, &["no", "no", "drop", "reclaim"])
    )
}

fn fio(random: &mut Rng, raw: bool) -> String {
    let direct = random.bool();
    let engine = if direct {
        one(random, &["libaio", "io_uring", "psync"])
    } else if raw {
        // The engine `mmap` of fio 3.33 finds its own writes wrong on every block device, as on a loop device without a disk daemon.
        one(random, &["psync", "vsync"])
    } else {
        one(random, &["psync", "mmap", "vsync"])
    };
    format!(
        "workload=disk-fio seconds={} raw={} fio=rw={},bsrange=4k-{}k,size={}m,direct={},ioengine={engine},\
         iodepth={},verify_backlog={}",
        seconds(),
        u8::from(raw),
        one(random, &["randwrite", "randrw", "write", "rw"]),
        one(random, &[4, 16, 64]),
        one(random, &[8, 24]),
        u8::from(direct),
        one(random, &[1, 4, 16]),
        one(random, &[16, 256, 4096])
    )
}
