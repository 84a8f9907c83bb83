//! Guests with disks, and what comes of them.

use std::time::Duration;

use plimsoll_disk::EngineStats;
use plimsoll_rig::{
    DiskGuest, GuestConfig, GuestDisk, GuestError, GuestImage, GuestKernel, GuestOutput, Setup,
    host,
};
use plimsoll_serve::disk::{Report, admin};
use plimsoll_skip::{Lack, guests_wanted, skip};

/// Longest wait for anything that must come; guests here are emulated, some have a debug kernel, and machines are busy.
pub const PATIENCE: Duration = Duration::from_secs(900);
/// The program under test.
pub const PLIMSOLL: &str = env!("CARGO_BIN_EXE_plimsoll");

/// Waits for this test's turn, with the host for itself; `None` after saying why there is none here.
pub fn turn() -> Option<host::Turn> {
    turn_of(host::turn)
}

/// Waits for this test's turn, beside at most one other test; `None` after saying why there is none here. For tests whose
/// guests do a fixed amount of work, whatever time that takes.
pub fn shared_turn() -> Option<host::Turn> {
    turn_of(host::shared_turn)
}

fn turn_of(begin: fn() -> host::Turn) -> Option<host::Turn> {
    if !guests_wanted() {
        return None;
    }
    let turn = begin();
    let installed = host::installed(&[host::QEMU, host::MKE2FS, host::E2FSCK]);
    installed
        .inspect_err(|why| skip(Lack::Live, format_args!("{why}")))
        .ok()?;
    has(GuestKernel::V6_1).then_some(turn)
}

/// Whether guests of this kernel can be booted; says why not.
pub fn has(kernel: GuestKernel) -> bool {
    image(kernel)
        .inspect_err(|error| {
            skip(
                Lack::Live,
                format_args!("guests of Linux {}: {error}", kernel.series()),
            );
        })
        .is_ok()
}

/// Kernel and initrd of guests with disks.
pub fn image(kernel: GuestKernel) -> Result<GuestImage, GuestError> {
    let mut config = GuestConfig::new("image", "");
    config.kernel = kernel;
    config.disks.push(GuestDisk::vhost_user("none"));
    GuestImage::for_guest(&config)
}

/// Makes an image, runs a guest on it to its end, and has the image checked.
pub fn run(setup: &Setup) -> (GuestOutput, Report) {
    let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), setup).unwrap();
    let (told, report) = finish(&mut guest);
    guest.check_image().unwrap();
    (told, report)
}

/// Waits until the guest has ended by itself, and asks the daemon then.
pub fn finish(guest: &mut DiskGuest) -> (GuestOutput, Report) {
    let told = guest.finish(PATIENCE).unwrap_or_else(|error| {
        let told = guest.told();
        let log = guest.daemon_log();
        panic!("{error:#}\nkernel: {:?}\ndaemon: {log}", told.kernel)
    });
    (told, report(guest))
}

/// What the disks' daemon reports.
pub fn report(guest: &DiskGuest) -> Report {
    admin::report(&guest.admin(), false).unwrap()
}

/// Fails unless the guest read what it had written and its kernel had nothing to complain of.
pub fn assert_sound(told: &GuestOutput) {
    assert_eq!(told.mismatches, Some(0), "{told:?}");
    assert_eq!(told.kernel, [""; 0]);
    assert_eq!(told.number("kernel", None, "complaints").unwrap(), 0);
}

/// Fails unless all that was served and taken in was what it should be.
pub fn assert_right(engine: &EngineStats) {
    assert_eq!(engine.wrong_served, 0, "{engine:?}");
    assert_eq!(engine.storage_errors, 0, "{engine:?}");
    assert_eq!(engine.write_back_errors, 0, "{engine:?}");
    assert_eq!(engine.disabled, None);
    // Of a page that is copied too late the daemon learns by its hash.
    assert!(
        engine.refused_mismatch <= engine.evictions / 1000,
        "{engine:?}"
    );
}

/// Says what came of the cache.
pub fn tell(what: &str, told: &GuestOutput, engine: &EngineStats) {
    println!(
        "{what}: {} blocks read, {} from the cache; {} evicted, {} taken in, {} not what they should be; \
         {} served wrong, {:?} read wrong",
        engine.read_blocks,
        engine.hits,
        engine.evictions,
        engine.admitted,
        engine.refused_mismatch + engine.refused_stale,
        engine.wrong_served,
        told.mismatches
    );
}

/// A time from 0 to `most_ms`, another one in each run.
pub fn any_time(random: &mut fastrand::Rng, most_ms: u64) -> Duration {
    Duration::from_millis(random.u64(..=most_ms))
}
