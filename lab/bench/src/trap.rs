//! Cost of a trap of the live tracer on this machine.

use std::io::Write;

use plimsoll_trap::{HandlerCpu, Toucher, measure_trap_cost};

use crate::title;

/// Measures a trap with its handler near and far.
pub(crate) fn run(out: &mut dyn Write) -> anyhow::Result<()> {
    title(out, "A trap")?;
    for (name, cpu, toucher) in [
        (
            "on the accessing thread's CPU",
            HandlerCpu::Follow,
            Toucher::Thread,
        ),
        ("anywhere", HandlerCpu::Any, Toucher::Thread),
        (
            "on the CPU of a KVM vCPU",
            HandlerCpu::Follow,
            Toucher::KvmVcpu,
        ),
        ("anywhere, of a KVM vCPU", HandlerCpu::Any, Toucher::KvmVcpu),
    ] {
        match measure_trap_cost(cpu, toucher) {
            Ok(cost) => writeln!(
                out,
                "with its handler {name}: {:.1} µs, of which {:.1} µs outside the handler",
                cost.whole.as_secs_f64() * 1e6,
                cost.outside_handler.as_secs_f64() * 1e6
            )?,
            Err(error) => writeln!(out, "SKIPPED: the cost of a trap: {error}")?,
        }
    }
    Ok(())
}
