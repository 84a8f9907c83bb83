//! The order in which the kernel's OOM killer chooses processes.

use std::fs;
use std::path::Path;

/// The score of a server: below that of VMs, which lose their disks or dirty pages with it.
const SCORE: i32 = -500;

/// Has the OOM killer choose this process after the VMs. Without `CAP_SYS_RESOURCE` its score stays as it is.
pub(crate) fn lower_oom_score() {
    lower(Path::new("/proc/self/oom_score_adj"));
}

/// Writes the score unless a lower one is there.
fn lower(file: &Path) {
    let present = fs::read_to_string(file);
    let present = present
        .ok()
        .and_then(|text| text.trim().parse::<i32>().ok());
    if present.is_some_and(|present| present > SCORE) {
        // Not permitted to everybody.
        let _ = fs::write(file, SCORE.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_is_lowered_and_a_lower_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("oom_score_adj");
        for (before, after) in [("0\n", "-500"), ("500\n", "-500"), ("-900\n", "-900\n")] {
            fs::write(&file, before).unwrap();
            lower(&file);
            assert_eq!(fs::read_to_string(&file).unwrap(), after);
        }
        lower(&folder.path().join("absent"));
    }
}
