//! The script `dev` checks its words before it installs anything.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder with the few programs that the script needs to read its words, and with none that installs or builds.
fn programs() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("words-of-dev");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["basename", "cat", "dirname", "sed", "sh", "tr"] {
        let places = ["/bin", "/usr/bin"].map(|place| Path::new(place).join(name));
        let place = places.iter().find(|place| place.exists()).unwrap();
        symlink(place, folder.join(name)).unwrap();
    }
    folder
}

#[test]
fn words_are_checked_before_anything_is_installed() {
    let programs = programs();
    let dev = |words: &str| -> Output {
        Command::new(programs.join("sh"))
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dev"))
            .args(words.split(' '))
            .env_clear()
            .env("PATH", &programs)
            .output()
            .unwrap()
    };
    for command in [
        "demo", "test", "bpf", "check", "soak", "bench", "lab", "package", "setup",
    ] {
        for help in ["-h", "--help"] {
            let output = dev(&format!("{command} {help}"));
            let shown = String::from_utf8_lossy(&output.stdout);
            assert!(
                shown.starts_with("usage: ./dev"),
                "{command} {help}: {output:?}"
            );
        }
    }
    for words in [
        "demo --nonsense",
        "test nonsense",
        "check docs nonsense",
        "soak nonsense",
        "bench nonsense",
        "lab steps nonsense",
        "lab nonsense --quick",
        "package nonsense",
    ] {
        let output = dev(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words}: {said}");
        assert!(said.starts_with("./dev: there is no "), "{words}: {said}");
    }
    // Known ones are not refused.
    for words in [
        "demo --port 8000",
        "bench hcache-soak",
        "lab victim-cache",
        "lab disk --only log",
    ] {
        let output = dev(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.contains("; there are: "), "{words}: {said}");
    }
}
