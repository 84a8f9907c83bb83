//! Cost of a trap of the live tracer on this machine.

use std::io::Write;

use plimsoll_trap::{HandlerCpu, measure_trap_cost};

use crate::title;

/// Measures a trap with its handler near and far.
pub(crate) fn run(out: &mut dyn Write) -> anyhow::Result<()> {
    title(out, "A trap")?;
    for (name, cpu) in [
        ("on the accessing thread's CPU", HandlerCpu::Follow),
        ("anywhere", HandlerCpu::Any),
    ] {
        match measure_trap_cost(cpu) {
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
