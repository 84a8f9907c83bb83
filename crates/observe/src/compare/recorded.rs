//! Data recorded by other programs: the daemon under the VM's disk, and the page log of its emulator.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use plimsoll_flow::{WorkingSet, WorkingSetBound};
use plimsoll_protocol::disk_admin;

use super::{Answer, Figure, Method, Subject};
use crate::wss::{self, EstimatorArgs};

/// The admin socket of a disk daemon beside its disks' sockets.
const ADMIN_SOCKET: &str = "admin.sock";
/// Time limit of an answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Guest memory plus the ghost entries behind it at which 5 % of the disk's reads would remain.
///
/// The daemon's own cache replaces the heuristics of the original: it receives or infers evictions, and keeps ghost
/// entries of evicted pages.
pub(super) fn geiger(subject: &Subject<'_>) -> Answer {
    let method = Method {
        estimator: "Geiger",
        sees: "evictions and reads at the VM's disk",
        whole_vm: true,
    };
    subject.run(method, |answer| {
        let socket = subject
            .options
            .disk
            .clone()
            .or_else(|| admin_socket(subject))
            .context("no disk of the VM is served by `plimsoll disk serve`, or its daemon has no admin socket (--disk)")?;
        let curve = disk_admin::curve(&socket, ANSWER_MAX)?
            .context("the daemon under its disk has no curve yet: it needs reads")?;
        let reached = curve
            .points
            .iter()
            .find(|point| point.miss_ratio <= WorkingSet::MISS_RATIO);
        let last = curve.points.last().context("the curve is empty")?;
        let bytes = |pages: u64| pages.saturating_mul(curve.page_bytes);
        answer.working_set = Some(match reached {
            Some(point) => Figure::new(bytes(point.size_pages)),
            None => Figure::new(bytes(last.size_pages)).bound(WorkingSetBound::AtLeast),
        });
        answer.note = Some(format!("{} reads", curve.references));
        Ok(())
    })
}

/// The admin socket beside those that the VM's devices use, if it belongs to the same user.
fn admin_socket(subject: &Subject<'_>) -> Option<PathBuf> {
    let owner = std::fs::metadata(format!("/proc/{}", subject.vm.pid))
        .ok()?
        .uid();
    let folders = subject
        .vm
        .sockets
        .iter()
        .filter_map(|socket| socket.parent());
    folders
        .map(|folder| folder.join(ADMIN_SOCKET))
        .find(|path| {
            std::fs::symlink_metadata(path)
                .is_ok_and(|there| there.file_type().is_socket() && there.uid() == owner)
        })
}

/// Pages logged often by page reference logging.
pub(super) fn prl(subject: &Subject<'_>) -> Answer {
    let method = Method {
        estimator: "PRL",
        sees: "every page walk of the emulated machine",
        whole_vm: false,
    };
    subject.run(method, |answer| logged(subject, "prl", answer))
}

/// Pages logged by page modification logging.
pub(super) fn pml(subject: &Subject<'_>) -> Answer {
    let method = Method {
        estimator: "PML",
        sees: "first writes in an interval of the emulated machine",
        whole_vm: false,
    };
    subject.run(method, |answer| logged(subject, "pml", answer))
}

/// Evaluates the page log by one of the estimators of `plimsoll wss`.
fn logged(subject: &Subject<'_>, method: &str, answer: &mut Answer) -> anyhow::Result<()> {
    let Some(log) = &subject.options.page_log else {
        bail!(
            "no --page-log of this VM: `plimsoll run --page-log FILE -- qemu-system-x86_64 ...` records one"
        );
    };
    let args = EstimatorArgs::of(method)?;
    let (origin, results) = wss::of_log(log, false, &args)?;
    let mut found = results.findings(&origin, &args).into_iter();
    let found = found.find(|found| found.estimator == method);
    let found = found.context("the log was not analysed")?;
    let (Some(bytes), Some(bound)) = (found.working_set_bytes, found.bound) else {
        bail!(found.reason.unwrap_or_default());
    };
    let mut logging = results.logging();
    answer.overhead_ratio = logging.next().map(|(_, logging)| logging.vm.slowdown());
    answer.working_set = Some(Figure::new(bytes).bound(bound));
    let settled = found.settled_step.map_or_else(
        || "it did not settle".to_owned(),
        |step| format!("settled at step {step}"),
    );
    answer.note = Some(match found.error_ratio {
        Some(error) => format!("{settled}; {:+.1} % of what the log touched", error * 100.0),
        None => settled,
    });
    Ok(())
}
