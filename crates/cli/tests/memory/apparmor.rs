//! A process that looks like a VM under the profile of AppArmor that libvirt gives its VMs, in a guest with a kernel of Debian.

use std::fs;
use std::path::Path;
use std::process::Command;

use plimsoll_rig::{GuestKernel, host};
use plimsoll_skip::{Lack, guests_wanted, skip};

use super::run_in;

/// Of which libvirt makes the profile of each VM.
const TEMPLATE: &str = "/etc/apparmor.d/libvirt/TEMPLATE.qemu";
/// The features that Debian's profiles are written for.
const FEATURES: &str = "/etc/apparmor.d/abi/3.0";
const PARSER: &str = "/usr/sbin/apparmor_parser";
/// Those that make calls in the VM or lend it a descriptor, and one that does neither.
const BACKENDS: [&str; 4] = ["trap", "first-touch", "write-scan", "scan"];

/// The profile with all that it includes.
fn profile() -> String {
    let output = Command::new(PARSER)
        .args(["--preprocess", TEMPLATE])
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let rules = text
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'));
    rules.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_vm_under_libvirts_profile_of_apparmor_is_traced() {
    if !guests_wanted() {
        return;
    }
    if [TEMPLATE, FEATURES, PARSER]
        .iter()
        .any(|file| !Path::new(file).exists())
    {
        let why = "apparmor or libvirt-daemon-system is not installed";
        skip(Lack::Program, why);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let vm = folder.path().join("qemu-system-x86_64");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/memory/vm.c");
    let mut compiler = Command::new("cc");
    let compiled = compiler.arg("-o").args([&vm, &source]).status().unwrap();
    assert!(compiled.success());
    let (profile, features) = (profile(), fs::read_to_string(FEATURES).unwrap());
    let backends = BACKENDS.join(" ");
    let script = format!(
        r#"
$b mount -t securityfs security /sys/kernel/security
$b mkdir -p /etc/apparmor.d/abi /usr/bin
$b cat > /etc/apparmor.d/abi/3.0 <<'END_OF_FEATURES'
{features}
END_OF_FEATURES
$b cat > /tmp/profile <<'END_OF_PROFILE'
{profile}
END_OF_PROFILE
/apparmor_parser --skip-cache --replace /tmp/profile
$b cp /qemu-system-x86_64 /usr/bin/
(
    echo 'exec LIBVIRT_TEMPLATE' > /proc/self/attr/exec
    exec /usr/bin/qemu-system-x86_64 -m 16M -machine q35,memory-backend=ram \
        -object memory-backend-memfd,id=ram,size=16M,share=on > /tmp/vm
) &
vm=$!
while ! $b grep -q ready /tmp/vm; do $b sleep 0.2; done
echo label $($b cat /proc/$vm/attr/current)
for backend in {backends}; do
    echo backend $backend
    attach $vm --backend $backend --period 2s --periods 2 -o csv
done
echo descriptors $($b ls /proc/$vm/fd | $b wc -l)
# It fills its own output again.
: > /tmp/vm
$b sleep 1
echo rounds $($b wc -c < /tmp/vm)
$b dmesg | $b grep DENIED
"#
    );
    let Some(lines) = run_in(
        host::shared_turn,
        Some(GuestKernel::V6_12),
        &[],
        &[Path::new(PARSER), &vm],
        "apparmor",
        &script,
    ) else {
        return;
    };
    let has = |wanted: &str| lines.iter().filter(|line| *line == wanted).count();
    assert_eq!(has("label LIBVIRT_TEMPLATE (enforce)"), 1);
    assert_eq!(has("exit 0"), BACKENDS.len());
    assert_eq!(has("descriptors 4"), 1, "what it was lent is closed");
    assert!(!lines.iter().any(|line| line.contains("DENIED")));
    let rounds = lines.iter().find_map(|line| line.strip_prefix("rounds "));
    assert_ne!(rounds, Some("0"));
    for backend in ["trap", "write-scan", "scan"] {
        let mut rows = lines
            .iter()
            .skip_while(|line| *line != &format!("backend {backend}"));
        let last = rows.find(|line| line.starts_with("1,")).unwrap();
        let pages: u64 = last.split(',').nth(2).unwrap().parse().unwrap();
        // A slow guest is not seen as a whole in two seconds.
        assert!(pages > 1000, "{backend}: {last}");
    }
}
