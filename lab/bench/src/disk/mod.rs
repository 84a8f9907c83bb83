//! A VM's disk: the cost of its engine, and its throughput compared to QEMU's own block layer.
//!
//! | part | measurement | bar |
//! |---|---|---|
//! | `primitives` | a hit, a miss, an admission in the engine, beside the costs of \[LS07\] table 1 | |
//! | `iops` | reads through a virtqueue, without a cache, beside `qemu-storage-daemon` on the same image | at least 0.98 x |
//! | `copy` | what the copy into guest RAM adds to such a read at least | |
//! | `hit` | latency of a hit beside that of a read from storage | |
//! | `resize` | the longest step of a cache that becomes smaller, beside a resize at once | |
//! | `writes` | pages of I/O of a model guest with part of its memory in the cache, by share of writes: a simulation | |
//!
//! The guest of `iops` and `hit` is a driver in this process (`plimsoll-driver`), each daemon a process of its own. The two take turns of
//! half a second, each first in every other pair, so that other load on the machine affects both.

mod copy;
mod hits;
mod iops;
mod primitives;
mod resize;
mod serve;
mod writes;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

pub(crate) use serve::{Args as ServeArgs, run as serve};

use crate::Cli;

/// What is measured with.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Size of the image, in MiB
    #[arg(long, default_value_t = 512)]
    image_mib: u64,
    /// Directory for the image, on a disk
    #[arg(long, default_value = "/var/tmp")]
    folder: PathBuf,
    /// Turns of each daemon at each load
    #[arg(long, default_value_t = 11)]
    turns: u32,
    /// Of part `iops`, only loads whose name holds this
    #[arg(long, default_value = "")]
    load: String,
    #[command(flatten)]
    writes: writes::Args,
}

/// Runs all parts.
pub(crate) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if cli.wants("primitives") {
        primitives::run(cli, out)?;
    }
    if cli.wants("iops") {
        iops::run(args, out)?;
    }
    if cli.wants("copy") {
        copy::run(args, out)?;
    }
    if cli.wants("hit") {
        hits::run(args, out)?;
    }
    if cli.wants("resize") {
        resize::run(out)?;
    }
    if cli.wants("writes") {
        writes::run(&args.writes, out)?;
    }
    Ok(())
}

/// Makes an image whose blocks are all written and contain their numbers.
fn make_image(path: &Path, mib: u64) -> anyhow::Result<()> {
    let file = File::create(path)?;
    let mut chunk = vec![0_u8; 1 << 20];
    for at in 0..mib {
        for (number, page) in (at * 256..).zip(chunk.chunks_mut(4096)) {
            page.fill(0x5a);
            page[..8].copy_from_slice(&number.to_le_bytes());
        }
        file.write_all_at(&chunk, at << 20)?;
    }
    Ok(file.sync_all()?)
}
