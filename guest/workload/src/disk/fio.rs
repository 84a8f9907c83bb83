//! fio of a Debian on a second disk: it writes, reads back and compares by its own checksums, again and again.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::mount::{MountFlags, mount, mount_bind};

use super::settings::Fio;
use super::setup::{TOOLS_SERIAL, disk_with_serial};
use super::tally::Tally;
use super::{MOUNT, Scene};
use crate::WorkloadError;
use crate::clock::Time;
use crate::console::Line;

/// Where the disk with the programs is mounted; its directories `dev`, `proc` and `disk` are empty.
const TOOLS: &str = "/tools";
/// Characters of what fio said that are reported.
const SAID_MAX: usize = 600;
/// Fields of a line in fio's terse format, version 3: KiB read and written.
const READ_KIB_AT: usize = 5;
const WRITTEN_KIB_AT: usize = 46;

/// Runs fio with other random numbers each time until the time is over.
pub fn run(scene: &Scene, fio: &Fio) -> Result<Tally, WorkloadError> {
    let tools = disk_with_serial(TOOLS_SERIAL)?;
    fs::create_dir_all(TOOLS).map_err(WorkloadError::during(TOOLS))?;
    let device = Path::new("/dev").join(tools);
    mount(device, TOOLS, c"ext4", MountFlags::RDONLY, None)
        .map_err(std::io::Error::from)
        .map_err(WorkloadError::during("mounting the disk with fio"))?;
    let bind = |from: &str| {
        mount_bind(from, format!("{TOOLS}{from}"))
            .map_err(std::io::Error::from)
            .map_err(WorkloadError::during(format_args!(
                "mounting {from} for fio"
            )))
    };
    bind("/dev")?;
    bind("/proc")?;
    let place = if fio.raw {
        scene.ready.device.display().to_string()
    } else {
        scene.mount()?;
        bind(MOUNT)?;
        format!("{MOUNT}/fio")
    };
    scene.phase("measured");
    let mut tally = Tally::default();
    let start = Time::now();
    while Time::now().ms_since(start) < fio.seconds * 1000 || tally.ops == 0 {
        let seed = u64::from(scene.settings.seed) << 16 | tally.ops;
        tally.add(&once(fio, &place, seed)?);
        Line::new("result")
            .with("name", "round")
            .with("reads", tally.read_pages())
            .with("mismatches", tally.mismatches)
            .print();
    }
    if !fio.raw {
        rustix::mount::unmount(
            format!("{TOOLS}{MOUNT}"),
            rustix::mount::UnmountFlags::empty(),
        )
        .map_err(std::io::Error::from)
        .map_err(WorkloadError::during("unmounting fio's files"))?;
        scene.unmount()?;
    }
    Line::new("result")
        .with("name", "fio")
        .with("runs", tally.ops)
        .with("reads", tally.read_pages())
        .with("writes", tally.written_pages())
        .with("mismatches", tally.mismatches)
        .print();
    Ok(tally)
}

/// Runs fio once.
fn once(fio: &Fio, place: &str, seed: u64) -> Result<Tally, WorkloadError> {
    let mut command = Command::new("/usr/bin/fio");
    command.args(fio.options.iter().map(|option| format!("--{option}")));
    command.args([
        "--name=verified",
        "--thread",
        "--minimal",
        "--terse-version=3",
    ]);
    command.args(["--verify=crc32c", "--verify_fatal=1", "--fallocate=none"]);
    command.arg(format!("--filename={place}"));
    command.arg(format!("--randseed={seed}"));
    command.stdin(Stdio::null());
    let ran = crate::sys::run_in_root(&mut command, Path::new(TOOLS));
    let output = ran.map_err(WorkloadError::during("running fio"))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let pages = pages_verified(&said);
    let mut tally = Tally {
        ops: 1,
        ..Tally::default()
    };
    match pages {
        Some(pages) if output.status.success() => {
            tally.read_bytes = pages * 4096;
            tally.written_bytes = pages * 4096;
        }
        _ => {
            tally.mismatches = 1;
            let errors = String::from_utf8_lossy(&output.stderr);
            let text: String = format!("{}: {errors} {said}", output.status)
                .chars()
                .take(SAID_MAX)
                .collect();
            Line::new("result")
                .with("name", "fio_failed")
                .rest("text", text)
                .print();
        }
    }
    Ok(tally)
}

/// Pages that were written and read again, by fio's report: what is read is also what a mixed job reads beside.
fn pages_verified(said: &str) -> Option<u64> {
    let line = said.lines().find(|line| line.starts_with("3;"))?;
    let fields: Vec<_> = line.split(';').collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(number(READ_KIB_AT)?.min(number(WRITTEN_KIB_AT)?) / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_and_read_is_counted() {
        let fields: Vec<_> = (0..130).map(|at| at.to_string()).collect();
        let mut fields = fields;
        fields[0] = "3".into();
        fields[READ_KIB_AT] = "16384".into();
        fields[WRITTEN_KIB_AT] = "8052".into();
        let said = format!("a warning\n{}\n", fields.join(";"));
        assert_eq!(pages_verified(&said), Some(2013));
        assert_eq!(pages_verified("fio: it failed"), None);
    }
}
