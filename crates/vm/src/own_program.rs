//! The program of this process, to be started once more.

use std::io;
use std::path::PathBuf;

/// Another name of the program of the process that opens it, also if its file has been removed.
const OF_PROCESS: &str = "/proc/self/exe";

/// A path at which this process's own program can be executed: its file or, if an upgrade has replaced that since this
/// process was started, what is left of it in the kernel, which is the same version.
///
/// # Errors
///
/// The file is unknown, as without `/proc`.
pub fn own_program() -> io::Result<PathBuf> {
    let file = std::env::current_exe()?;
    Ok(match file.exists() {
        true => file,
        false => OF_PROCESS.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_skip::write_program;
    use std::fs;
    use std::process::Command;

    #[test]
    fn the_own_program_can_be_started_again_also_after_its_file_was_removed() {
        const AGAIN: &str = "PLIMSOLL_TEST_OWN_PROGRAM";
        if let Some(depth) = std::env::var_os(AGAIN) {
            if depth == "first" {
                fs::remove_file(std::env::current_exe().unwrap()).unwrap();
                let mut again = Command::new(own_program().unwrap());
                let status = again.args(std::env::args_os().skip(1)).env(AGAIN, "second");
                assert!(status.status().unwrap().success());
            }
            return;
        }
        assert_eq!(own_program().unwrap(), std::env::current_exe().unwrap());
        let folder = tempfile::tempdir().unwrap();
        let copy = folder.path().join("copy");
        write_program(&copy, fs::read(std::env::current_exe().unwrap()).unwrap());
        let mut first = Command::new(&copy);
        first.args([
            "--exact",
            "own_program::tests::the_own_program_can_be_started_again_also_after_its_file_was_removed",
        ]);
        assert!(first.env(AGAIN, "first").status().unwrap().success());
    }
}
