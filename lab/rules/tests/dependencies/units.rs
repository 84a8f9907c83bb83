//! Units of systemd: the OOM killer chooses what they start before any VM, a child that it ends does not end the unit, and nothing keeps
//! it from the monitors of VMs.

use std::path::Path;

#[test]
fn units_are_chosen_before_vms_by_the_oom_killer() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    let units = folder
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().path());
    for unit in units {
        let text = std::fs::read_to_string(&unit).unwrap();
        let setting = |key: &str| {
            let mut values = text
                .lines()
                .filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
            values
                .next()
                .unwrap_or_else(|| panic!("{}: no {key}", unit.display()))
        };
        let score: i32 = setting("OOMScoreAdjust").parse().unwrap();
        assert!((1..=1000).contains(&score), "{}: {score}", unit.display());
        assert_eq!(setting("OOMPolicy"), "continue");
        // With it openat2 fails, by which sockets are opened in the file system of another process.
        assert!(
            !text.lines().any(|line| line == "RestrictSUIDSGID=yes"),
            "{}",
            unit.display()
        );
    }
}
