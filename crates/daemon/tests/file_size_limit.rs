//! plimsolld where files may not grow (`ulimit -f`).

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

#[test]
fn a_file_that_may_not_grow_is_an_error_and_no_signal() {
    let folder = tempfile::tempdir().unwrap();
    let script = "ulimit -f 0; exec \"$0\" --generate \"$1\"";
    let output = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_plimsolld")])
        .arg(folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("File too large"), "{output:?}");
    assert_eq!(output.status.signal(), None);
}
