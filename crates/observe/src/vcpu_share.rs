//! CPU time of a VM's vCPUs per second of wall time, over the same span as a curve.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use plimsoll_flow::Undisturbed;
use plimsoll_vm::{QemuVm, VcpuClock};

/// A span of time.
#[derive(Debug, Clone, Copy, Default)]
struct Span {
    vcpu: Duration,
    wall: Duration,
}

/// The vCPU time of the periods so far.
#[derive(Debug, Default)]
pub struct VcpuShare {
    /// `None` for a VM that is only simulated.
    clock: Option<VcpuClock>,
    began: Option<(Instant, Duration)>,
    whole: Span,
    newest: VecDeque<Span>,
}

impl VcpuShare {
    pub fn of(vm: &QemuVm) -> Self {
        Self {
            clock: Some(VcpuClock::new(vm)),
            ..Self::default()
        }
    }

    fn ran(&mut self) -> Option<Duration> {
        self.clock.as_mut()?.read()
    }

    /// Begins a period.
    pub fn begin(&mut self) {
        let ran = self.ran();
        self.began = ran.map(|ran| (Instant::now(), ran));
    }

    /// Ends it, and drops those that are older than `reach`. The time that only tracing took is left out.
    pub fn end(&mut self, reach: Duration, undisturbed: &Undisturbed) {
        let ran = self.ran();
        let (Some((start, before)), Some(ran)) = (self.began.take(), ran) else {
            return;
        };
        let span = Span {
            vcpu: ran.saturating_sub(before + undisturbed.cpu_time),
            wall: start.elapsed().saturating_sub(undisturbed.delay),
        };
        self.whole.vcpu += span.vcpu;
        self.whole.wall += span.wall;
        self.newest.push_back(span);
        let mut kept: Duration = self.newest.iter().map(|span| span.wall).sum();
        while self.newest.len() > 1 && kept - self.newest[0].wall >= reach {
            kept -= self.newest[0].wall;
            self.newest.pop_front();
        }
    }

    /// Over the periods within reach.
    pub fn recent(&self) -> Option<f64> {
        let of = |part: fn(&Span) -> Duration| self.newest.iter().map(part).sum();
        let span = Span {
            vcpu: of(|span| span.vcpu),
            wall: of(|span| span.wall),
        };
        span.share()
    }

    /// Over all periods.
    pub fn whole(&self) -> Option<f64> {
        self.whole.share()
    }
}

impl Span {
    fn share(self) -> Option<f64> {
        let wall = self.wall.as_secs_f64();
        (wall > 0.0).then(|| self.vcpu.as_secs_f64() / wall)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulated_vm_has_no_vcpu_time() {
        let mut share = VcpuShare::default();
        share.begin();
        share.end(Duration::ZERO, &Undisturbed::default());
        assert_eq!((share.recent(), share.whole()), (None, None));
    }

    #[test]
    fn periods_beyond_reach_count_only_for_the_whole() {
        let span = |vcpu, wall| Span {
            vcpu: Duration::from_secs(vcpu),
            wall: Duration::from_secs(wall),
        };
        let share = VcpuShare {
            whole: span(9, 12),
            newest: VecDeque::from([span(1, 4), span(3, 4)]),
            ..VcpuShare::default()
        };
        assert_eq!((share.recent(), share.whole()), (Some(0.5), Some(0.75)));
    }
}
