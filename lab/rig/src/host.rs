//! Requirements of tests with guests on a host, and their mutual exclusion.

use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::BuildHasher as _;
use std::os::unix::fs::MetadataExt as _;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A program, and an option with which it does nothing.
pub const QEMU: (&str, &str) = ("qemu-system-x86_64", "--version");
/// Makes file systems.
pub const MKE2FS: (&str, &str) = ("mke2fs", "-V");
/// Checks file systems.
pub const E2FSCK: (&str, &str) = ("e2fsck", "-V");

static TURN: Mutex<()> = Mutex::new(());

/// Waits until no other test of this program uses guests: they share the host's CPUs.
pub fn turn() -> MutexGuard<'static, ()> {
    // A test that failed leaves nothing behind that affects the next one.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that programs are installed.
///
/// # Errors
///
/// The first that is not.
pub fn installed(programs: &[(&str, &str)]) -> Result<(), String> {
    for (program, option) in programs {
        let mut command = Command::new(program);
        command
            .arg(option)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
            .status()
            .map_err(|error| format!("{program}: {error}"))?;
    }
    Ok(())
}

/// Checks that VMs can be traced: by root, on a host that does not swap.
///
/// # Errors
///
/// Why not.
pub fn can_trace() -> Result<(), String> {
    if fs::metadata("/proc/self").is_ok_and(|this| this.uid() != 0) {
        return Err("only root may trace a VM".into());
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    if swaps.lines().count() > 1 {
        return Err("this host swaps, so its VMs are not traced".into());
    }
    Ok(())
}

/// A seed that differs from run to run, printed so that a run can be repeated.
#[must_use]
pub fn printed_seed() -> u64 {
    let seed = RandomState::new().hash_one(std::process::id());
    println!("seed {seed}");
    seed
}

/// The middle value, or the mean of the two in the middle.
///
/// # Panics
///
/// Without values.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    assert!(!values.is_empty(), "a median of no values");
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two() {
        assert!((median([3.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
        assert!((median([4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-12);
    }

    #[test]
    fn a_program_that_is_not_installed_is_named() {
        let missing = installed(&[("no-such-program", "-V")]).unwrap_err();
        assert!(missing.starts_with("no-such-program: "), "{missing}");
    }
}
