//! What can be observed: a VM, any other process, or a control group.
//!
//! | a target is named | and is |
//! |---|---|
//! | `PID` or `PID@START` | the VM of that process, otherwise the process itself |
//! | `cgroup:PATH`, `cgroup:NAME`, `cgroup:ID` | the control group and all below it |
//! | anything else | a VM, by its name or UUID |

use std::fmt;

use plimsoll_flow::VmId;

use crate::VmError;
use crate::cgroup::MemoryGroup;
use crate::group_list::find_group;
use crate::group_name::escaped;
use crate::identity::ProcessId;
use crate::process::{MemoryProcess, QemuVm, find};

/// How a control group is named.
const GROUP: &str = "cgroup:";

/// Whose memory is observed, at the time it was inspected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A VM: its RAM.
    Vm(QemuVm),
    /// A process that is no VM: its memory.
    Process(MemoryProcess),
    /// A control group: the memory that is charged to it.
    Group(MemoryGroup),
}

impl Target {
    /// Finds a target by its name.
    ///
    /// # Errors
    ///
    /// Those of [`find`], of [`MemoryProcess::of_pid`] and of [`find_group`]; [`VmError::OtherProcess`].
    pub fn find(name: &str) -> Result<Self, VmError> {
        if let Some(path) = name.strip_prefix(GROUP) {
            return find_group(path).map(Self::Group);
        }
        let pid = match find(name) {
            Ok(vm) => return Ok(Self::Vm(vm)),
            Err(VmError::NotQemu { pid, .. }) => pid,
            Err(error) => return Err(error),
        };
        let found = MemoryProcess::of_pid(pid)?;
        let wanted = name.parse::<ProcessId>();
        if wanted.is_ok_and(|wanted| wanted != found.process) {
            return Err(VmError::OtherProcess { pid });
        }
        Ok(Self::Process(found))
    }

    /// Inspects it again.
    ///
    /// # Errors
    ///
    /// [`VmError::NoSuchProcess`], [`VmError::NoMemory`] or [`VmError::GroupGone`] if it has ended, also if another one has its process id or
    /// path by now.
    pub fn refreshed(&self) -> Result<Self, VmError> {
        let same = |before: ProcessId, now: ProcessId| match before == now {
            true => Ok(()),
            false => Err(VmError::NoSuchProcess { pid: before.pid }),
        };
        match self {
            Self::Vm(vm) => {
                let now = QemuVm::of_pid(vm.pid)?;
                same(vm.process(), now.process())?;
                Ok(Self::Vm(now))
            }
            Self::Process(process) => {
                let now = MemoryProcess::of_pid(process.process.pid)?;
                same(process.process, now.process)?;
                Ok(Self::Process(now))
            }
            Self::Group(group) => group.refreshed().map(Self::Group),
        }
    }

    /// Its name: of a VM its own; of a process its own and its process id; of a control group its directory.
    pub fn id(&self) -> VmId {
        match self {
            Self::Vm(vm) => vm.id.clone(),
            Self::Process(process) => VmId(format!("{}-{}", process.name, process.process.pid)),
            Self::Group(group) => VmId(format!("{GROUP}{}", group.directory.display())),
        }
    }

    /// The VM, if it is one.
    pub fn vm(&self) -> Option<&QemuVm> {
        match self {
            Self::Vm(vm) => Some(vm),
            Self::Process(_) | Self::Group(_) => None,
        }
    }
}

/// Its kind and its name. Names are chosen by processes, so what a terminal could obey is [`escaped`].
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vm(vm) => write!(f, "VM {}", escaped(&vm.id.0)),
            Self::Process(process) => {
                let (pid, name) = (process.process.pid, escaped(&process.name));
                write!(f, "process {pid} ({name})")
            }
            Self::Group(group) => {
                let directory = escaped(&group.directory.to_string_lossy());
                write!(f, "control group {directory}")
            }
        }
    }
}

impl From<&QemuVm> for Target {
    fn from(vm: &QemuVm) -> Self {
        Self::Vm(vm.clone())
    }
}

impl From<&Self> for Target {
    fn from(target: &Self) -> Self {
        target.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// A process that is killed in the end.
    struct Sleeper(Child);

    impl Sleeper {
        fn start() -> Self {
            Self(Command::new("sleep").arg("60").spawn().unwrap())
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            // It may have ended.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_that_is_no_vm_is_a_target_with_its_private_memory() {
        let target = Target::find(&std::process::id().to_string()).unwrap();
        let Target::Process(process) = &target else {
            panic!("{target:?}");
        };
        let here = &raw const target as u64;
        let contains = |ram: &&plimsoll_flow::RamMapping| {
            (ram.address..ram.address + ram.len_bytes).contains(&here)
        };
        // A thread's stack is a private mapping.
        let stack = process.ram.mappings.iter().find(contains).unwrap();
        assert_eq!(stack.backing, plimsoll_flow::RamBacking::Private);
        assert!(target.id().0.ends_with(&format!("-{}", std::process::id())));
        let again = Target::find(&process.process.to_string()).unwrap();
        assert_eq!(again.id(), target.id());
    }

    #[test]
    fn a_process_id_that_was_used_again_is_another_process() {
        let pid = std::process::id();
        let now = ProcessId::of_pid(pid).unwrap();
        let before = ProcessId {
            start_ticks: now.start_ticks - 1,
            ..now
        };
        let error = Target::find(&before.to_string()).unwrap_err();
        assert!(matches!(error, VmError::OtherProcess { .. }), "{error}");
        let Ok(Target::Process(process)) = Target::find(&now.to_string()) else {
            panic!("this process is one");
        };
        let earlier = Target::Process(MemoryProcess {
            process: before,
            ..process
        });
        let error = earlier.refreshed().unwrap_err();
        assert!(matches!(error, VmError::NoSuchProcess { .. }), "{error}");
    }

    #[test]
    fn a_process_that_executes_another_program_is_still_the_same_with_other_memory() {
        let mut command = Command::new("sh");
        command.args(["-c", "read line; exec sleep 60"]);
        let child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
        let mut shell = Sleeper(child);
        let before = Target::find(&shell.0.id().to_string()).unwrap();
        drop(shell.0.stdin.take());
        let changed = (0..500).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            let now = before.refreshed().ok()?;
            (now.id() != before.id()).then_some(now)
        });
        let changed = changed.expect("a process with another name");
        assert!(changed.id().0.starts_with("sleep-"), "{}", changed.id());
        assert_ne!(changed, before);
    }

    #[test]
    fn a_name_is_shown_without_what_a_terminal_could_obey() {
        let found = Target::find(&std::process::id().to_string()).unwrap();
        let Target::Process(mut process) = found else {
            panic!("this process is no VM");
        };
        process.name = "a\u{1b}[2J\nb".to_owned();
        let shown = Target::Process(process).to_string();
        assert!(shown.ends_with(r"(a\u{1b}[2J\nb)"), "{shown}");
    }

    #[test]
    fn a_process_that_ends_is_gone() {
        let mut sleeper = Sleeper::start();
        let target = Target::find(&sleeper.0.id().to_string()).unwrap();
        sleeper.0.kill().unwrap();
        // Not waited for yet: it has a process id and no memory.
        let ended = (0..500).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            target.refreshed().err()
        });
        let ended = ended.expect("an error");
        let is_gone = matches!(
            ended,
            VmError::NoSuchProcess { .. } | VmError::NoMemory { .. }
        );
        assert!(is_gone, "{ended}");
        sleeper.0.wait().unwrap();
        let error = target.refreshed().unwrap_err();
        assert!(matches!(error, VmError::NoSuchProcess { .. }), "{error}");
    }
}
