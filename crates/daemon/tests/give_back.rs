//! `plimsolld --give-back` where nothing is known of what VMs had.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Runs `plimsolld --give-back` with a history in `folder`.
fn give_back(folder: &Path) -> Output {
    let config = folder.join("plimsoll.toml");
    let history = folder.join("history.redb");
    let text = format!(
        "[guard]\non_exit = \"give-back\"\n[history]\nfile = \"{}\"\n",
        history.display()
    );
    fs::write(&config, text).unwrap();
    Command::new(env!("CARGO_BIN_EXE_plimsolld"))
        .args(["--give-back", "--config"])
        .arg(&config)
        .output()
        .unwrap()
}

#[test]
fn a_lost_history_is_a_partial_result_and_none_at_all_is_done() {
    let folder = tempfile::tempdir().unwrap();
    // No daemon has resized anything.
    assert_eq!(give_back(folder.path()).status.code(), Some(0));
    for lost in [&b""[..], b"no database"] {
        fs::write(folder.path().join("history.redb"), lost).unwrap();
        // The second time there is a new history, and what VMs had is as unknown as before.
        for time in 0..2 {
            let output = give_back(folder.path());
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(5), "{time}: {said}");
            assert!(said.contains("the history is lost"), "{time}: {said}");
        }
    }
}
