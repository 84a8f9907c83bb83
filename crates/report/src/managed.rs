//! Refuses a VM whose memory plimsolld manages: two programs must not move one balloon.

use anyhow::Context as _;
use plimsoll_output::exit::Forbidden;
use plimsoll_output::printable;
use plimsoll_protocol::decision::Mode;
use plimsoll_protocol::vm::{HostView, VmSummary};

use crate::daemon::{Daemon, SocketArg};

/// Fails if a daemon may move the memory of the VM of this name or process.
///
/// # Errors
///
/// [`Forbidden`] if so, and the daemon's error if it cannot be queried. No daemon is no error.
pub fn refuse_managed(socket: &SocketArg, name: &str, pid: Option<u32>) -> anyhow::Result<()> {
    let daemon = Daemon::to_read_if_any(socket);
    let Some(daemon) = daemon.context("cannot find out whether plimsolld manages the VM")? else {
        return Ok(());
    };
    match refusal(&daemon.host()?, &daemon.vms(None)?, name, pid) {
        Some(why) => Err(Forbidden(why).into()),
        None => Ok(()),
    }
}

/// Why the VM may not be shrunk; `None` if the daemon does not move its memory.
fn refusal(host: &HostView, vms: &[VmSummary], name: &str, pid: Option<u32>) -> Option<String> {
    let is_named =
        |vm: &&VmSummary| vm.vm == name || Some(vm.pid) == pid || vm.pid.to_string() == name;
    let vm = vms.iter().find(is_named)?;
    if !vm.settings.managed {
        return None;
    }
    let vm = printable(&vm.vm);
    match host.mode {
        Mode::Observe => None,
        Mode::Advise | Mode::Act if host.paused => None,
        Mode::Advise | Mode::Act => Some(format!(
            "plimsolld manages the memory of VM {vm}, which --shrink would move past it; nothing was moved: \
             run `plimsoll pause` first and `plimsoll resume` after it"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example;

    #[test]
    fn a_vm_that_the_daemon_may_move_is_refused() {
        let vms = example::host().vms;
        let web = vms.iter().find(|vm| vm.vm == "web").unwrap();
        let (name, pid) = (web.vm.clone(), web.pid);
        let host = |mode, paused| HostView {
            mode,
            paused,
            ..example::host()
        };
        for mode in [Mode::Advise, Mode::Act] {
            let named = refusal(&host(mode, false), &vms, &name, None).unwrap();
            assert!(
                named.contains(&name) && named.contains("nothing was moved"),
                "{named}"
            );
            assert!(refusal(&host(mode, false), &vms, "other", Some(pid)).is_some());
            assert!(refusal(&host(mode, false), &vms, &pid.to_string(), None).is_some());
            // Another VM, and a daemon that is paused.
            assert_eq!(
                refusal(&host(mode, false), &vms, "other", Some(u32::MAX)),
                None
            );
            assert_eq!(refusal(&host(mode, true), &vms, &name, Some(pid)), None);
            // One whose memory the daemon leaves alone.
            let mut others = example::host().vms;
            others.iter_mut().for_each(|vm| vm.settings.managed = false);
            assert_eq!(refusal(&host(mode, false), &others, &name, None), None);
        }
        assert_eq!(
            refusal(&host(Mode::Observe, false), &vms, &name, Some(pid)),
            None
        );
    }

    #[test]
    fn a_host_without_a_daemon_has_nothing_to_refuse() {
        let folder = tempfile::tempdir().unwrap();
        let socket = SocketArg::at(folder.path().join("none.sock"));
        refuse_managed(&socket, "a", None).unwrap();
    }
}
