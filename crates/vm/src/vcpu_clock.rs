//! The CPU time of a VM's virtual CPUs, of which some may be plugged and unplugged meanwhile.

use std::time::Duration;

use crate::QemuVm;

/// Reads the CPU time of a VM's virtual CPUs.
#[derive(Debug)]
pub struct VcpuClock {
    vm: QemuVm,
    time: Duration,
    /// What those known have used.
    ran: Option<Duration>,
}

impl VcpuClock {
    /// The clock of the VM; it begins at 0.
    pub fn new(vm: &QemuVm) -> Self {
        Self {
            vm: vm.clone(),
            time: Duration::ZERO,
            ran: None,
        }
    }

    /// CPU time used since the first call, all together; `None` if the virtual CPUs are unknown. When one was plugged or
    /// unplugged, what the VM used since the last call is left out.
    pub fn read(&mut self) -> Option<Duration> {
        self.read_or(|vm| {
            let now = QemuVm::of_pid(vm.pid).ok()?;
            (now.process() == vm.process()).then_some(now)
        })
    }

    /// The same; `describe` describes the VM anew.
    fn read_or(&mut self, describe: impl FnOnce(&QemuVm) -> Option<QemuVm>) -> Option<Duration> {
        if self.vm.vcpus.is_empty() {
            return None;
        }
        let known = self.vm.vcpu_time().filter(|_| self.vm.has_its_vcpus());
        let (ran, before) = match known {
            Some(ran) => (ran, self.ran),
            None => {
                self.vm = describe(&self.vm).filter(|vm| !vm.vcpus.is_empty())?;
                (self.vm.vcpu_time()?, None)
            }
        };
        self.time += ran.saturating_sub(before.unwrap_or(ran));
        self.ran = Some(ran);
        Some(self.time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use crate::Vcpu;

    /// A thread that is named as that of a vCPU, and works when it is asked to.
    fn vcpu(index: u32) -> (Vcpu, mpsc::SyncSender<Duration>) {
        let (ask, asked) = mpsc::sync_channel::<Duration>(0);
        let (tell, told) = mpsc::channel();
        let work = move || {
            tell.send(rustix::thread::gettid()).unwrap();
            for length in asked {
                let end = Instant::now() + length;
                while Instant::now() < end {}
            }
        };
        let name = format!("CPU {index}/KVM");
        thread::Builder::new().name(name).spawn(work).unwrap();
        let id = told.recv().unwrap().as_raw_nonzero().get();
        let vcpu = Vcpu {
            index,
            thread_id: id.unsigned_abs(),
        };
        (vcpu, ask)
    }

    fn vm(vcpus: Vec<Vcpu>) -> QemuVm {
        QemuVm {
            pid: std::process::id(),
            vcpus,
            ..QemuVm::default()
        }
    }

    #[test]
    fn time_goes_on_when_vcpus_come() {
        let long = Duration::from_millis(100);
        let (first, work_first) = vcpu(0);
        // What it used before is not of the time since.
        work_first.send(long).unwrap();
        work_first.send(Duration::ZERO).unwrap();
        let mut clock = VcpuClock::new(&vm(vec![first]));
        assert_eq!(clock.read_or(|_| None), Some(Duration::ZERO));
        work_first.send(long).unwrap();
        work_first.send(Duration::ZERO).unwrap();
        let one = clock.read_or(|_| None).unwrap();
        assert!(one > Duration::ZERO);

        let (second, work_second) = vcpu(1);
        work_second.send(long).unwrap();
        work_second.send(Duration::ZERO).unwrap();
        let both = vm(vec![first, second]);
        assert_eq!(clock.read_or(|_| Some(both)), Some(one));
        work_second.send(long).unwrap();
        work_second.send(Duration::ZERO).unwrap();
        assert!(clock.read_or(|_| None).unwrap() > one);

        let mut unknown = VcpuClock::new(&vm(Vec::new()));
        assert_eq!(unknown.read_or(|_| panic!("it is not asked")), None);
    }
}
