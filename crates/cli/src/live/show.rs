//! `plimsoll show`: all that is known of a VM.

use std::io::Write;

use anyhow::Context;
use plimsoll_protocol::subject::{Key, Subject};
use plimsoll_report::daemon::curve_of;
use plimsoll_report::vm::{csv, text};

use super::{Daemon, QueryArgs};

/// Show everything about a VM: memory, limits, misses, tracing, balloon, cache and curve; or about a control group that the daemon
/// watches.
///
/// With -o csv, only the curve.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of the VM or of the control group; cgroup:NAME or cgroup:/PATH is always a control group
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    vm: String,
    #[command(flatten)]
    look: QueryArgs,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let daemon = Daemon::to_read(&args.look.socket)?;
    let subject = daemon.ask_by(&Key::Written(args.vm.clone()), Subject::ask)?;
    args.look.form.write(
        out,
        || text(&subject, daemon.host()?.now_unix_ms),
        || {
            let none = "its curve is not available yet";
            let curve = curve_of(subject.curve().context(none)?)?;
            Ok(csv(subject.sizes().baseline_bytes, &curve))
        },
        &subject,
    )
}
