//! Guests with disks, one test's at a time, and what comes of them.

use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use plimsoll::disk_guest::{DiskGuest, Setup, Told};
use plimsoll_disk::EngineStats;
use plimsoll_serve::disk::Report;
use plimsoll_skip::{Lack, guests_wanted, skip};
use plimsoll_vm::{GuestConfig, GuestDisk, GuestImage, GuestKernel};

/// Longest wait for anything that must come; guests here are emulated, and machines busy.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// The program under test.
pub const PLIMSOLL: &str = env!("CARGO_BIN_EXE_plimsoll");

static TURN: Mutex<()> = Mutex::new(());

/// Waits for this test's turn; `None` after saying why there is none here.
pub fn turn() -> Option<MutexGuard<'static, ()>> {
    if !guests_wanted() {
        return None;
    }
    for (program, option) in [
        ("qemu-system-x86_64", "--version"),
        ("mke2fs", "-V"),
        ("e2fsck", "-V"),
    ] {
        let mut command = Command::new(program);
        command.arg(option).stdout(Stdio::null());
        if let Err(error) = command.stderr(Stdio::null()).status() {
            skip(Lack::Live, format_args!("{program}: {error}"));
            return None;
        }
    }
    // A test that failed leaves nothing behind that the next one minds.
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
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
pub fn image(kernel: GuestKernel) -> Result<GuestImage, plimsoll_vm::VmError> {
    let mut config = GuestConfig::new("image", "");
    config.kernel = kernel;
    config.disks.push(GuestDisk::vhost_user("none"));
    GuestImage::for_guest(&config)
}

/// Makes an image, runs a guest on it to its end, and has the image checked.
pub fn run(setup: &Setup) -> (Told, Report) {
    let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), setup).unwrap();
    let (told, report) = finish(&mut guest);
    guest.check_image().unwrap();
    (told, report)
}

/// Waits until the guest has ended by itself, and asks the daemon then.
pub fn finish(guest: &mut DiskGuest) -> (Told, Report) {
    let told = guest.finish(PATIENCE).unwrap_or_else(|error| {
        let told = guest.told();
        let said = guest.daemon_said();
        panic!("{error:#}\nkernel: {:?}\ndaemon: {said}", told.kernel)
    });
    (told, guest.report(false).unwrap())
}

/// Fails unless the guest read what it had written and its kernel had nothing to complain of.
pub fn assert_sound(told: &Told) {
    assert_eq!(told.mismatches, Some(0), "{told:?}");
    assert_eq!(told.number("kernel", None, "complaints").unwrap(), 0);
    assert_eq!(told.kernel, [""; 0]);
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
pub fn tell(what: &str, told: &Told, engine: &EngineStats) {
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

/// Numbers of no importance, other ones in each run.
pub struct Moments(u64);

impl Moments {
    pub fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seed = now.map_or(1, |now| u64::from(now.subsec_nanos()));
        println!("moments from seed {seed}");
        Self(seed)
    }

    /// A time from 0 to `most_ms`.
    pub fn next(&mut self, most_ms: u64) -> Duration {
        // A linear congruence (Knuth, MMIX); its upper bits are good enough.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        Duration::from_millis((self.0 >> 33) % (most_ms + 1))
    }
}
