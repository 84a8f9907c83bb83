//! Daemons in processes of their own: ours and QEMU's.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::Context as _;
use plimsoll_disk::{
    CacheMode, Direct, DiskOptions, EngineOptions, Machine, MachineOptions, Socket,
};

use crate::child::{ChildProcess, ourselves};

/// What the process is told.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    #[arg(long)]
    image: PathBuf,
    #[arg(long)]
    socket: PathBuf,
    #[arg(long)]
    control: Option<PathBuf>,
    /// 0: none
    #[arg(long, default_value_t = 0)]
    cache_mib: u64,
    #[arg(long)]
    read_only: bool,
}

/// Serves until standard input ends, as it does when the process that started this one is gone.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mode = match args.cache_mib {
        0 => CacheMode::None,
        _ => CacheMode::Exclusive,
    };
    let disk = DiskOptions {
        image: args.image.clone(),
        socket: Socket::Path(args.socket.clone()),
        read_only: args.read_only,
        serial: "bench".to_owned(),
        queues: 1,
        direct: Direct::On,
    };
    let mut machine = Machine::new(MachineOptions {
        disks: vec![disk],
        control: args.control.clone().map(Socket::Path),
        engine: EngineOptions {
            cache_bytes: args.cache_mib << 20,
            cache_bytes_max: args.cache_mib << 20,
            mode,
            ..EngineOptions::default()
        },
        ..MachineOptions::default()
    })?;
    let handle = machine.handle();
    thread::spawn(move || {
        // Whether it succeeds or fails, nobody is there any more.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        // A machine that has ended cannot be stopped, which is harmless.
        let _ = handle.stop();
    });
    Ok(machine.run()?)
}

/// CPU seconds that a process has used, to 10 ms.
pub(super) fn cpu_seconds(process: &ChildProcess) -> anyhow::Result<f64> {
    let text = fs::read_to_string(format!("/proc/{}/stat", process.0.id()))?;
    let (_, fields) = text.rsplit_once(')').context("no name in stat")?;
    let mut fields = fields.split_whitespace().skip(11);
    let mut ticks = || -> anyhow::Result<u64> { Ok(fields.next().context("short")?.parse()?) };
    Ok((ticks()? + ticks()?) as f64 / 100.0)
}

/// Starts our daemon; without a cache it serves the image read-only, so that QEMU's may serve it as well.
pub(super) fn start_ours(
    image: &Path,
    socket: &Path,
    cache: Option<(u64, &Path)>,
) -> anyhow::Result<ChildProcess> {
    let mut command = ourselves(["disk-serve"])?;
    command
        .arg("--image")
        .arg(image)
        .arg("--socket")
        .arg(socket);
    if let Some((mib, control)) = cache {
        command.arg("--cache-mib").arg(mib.to_string());
        command.arg("--control").arg(control);
    } else {
        command.arg("--read-only");
    }
    ChildProcess::start(command.stdin(Stdio::piped()))
}

/// How QEMU's daemon does its I/O.
pub(super) const QEMU_AIO: [&str; 2] = ["threads", "io_uring"];

/// Starts QEMU's daemon, read-only and bypassing the page cache as ours does.
pub(super) fn start_qemu(image: &Path, socket: &Path, aio: &str) -> anyhow::Result<ChildProcess> {
    let (image, path) = (image.display(), socket.display());
    let mut command = Command::new("qemu-storage-daemon");
    command.arg("--blockdev").arg(format!(
        "driver=file,node-name=disk,filename={image},read-only=on,cache.direct=on,aio={aio}"
    ));
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=disk,node-name=disk,writable=off,addr.type=unix,addr.path={path}"
    ));
    ChildProcess::start(command.stdin(Stdio::null()))
        .context("qemu-storage-daemon is in package qemu-system-common")
}
