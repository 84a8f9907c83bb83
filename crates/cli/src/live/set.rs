//! `plimsoll set`: change a VM's limits.

use std::io::Write;

use clap::ValueEnum;
use plimsoll_protocol::request::SettingsChange;
use plimsoll_protocol::vm::{Settings, VmSummary};

use super::{Daemon, QueryArgs, warn_if_not_stored};
use plimsoll_output::{bail_usage, csv_table, printable};
use plimsoll_protocol::size::{ByteSize, PerSecond, Share};
use plimsoll_report::words::size;

/// Change a VM's limits; options that are not given stay unchanged.
///
/// --max-loss, --max-misses and --max-stall together are what the VM is promised: each one that is given holds, and those that
/// are not given no longer do.
///
/// Changes take precedence over the configuration until --reset. The VM is not resized at once: the next
/// decision obeys them. The exit code is 4 if the host cannot satisfy them together with the other VMs' limits.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of the VM
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    vm: String,
    /// Minimum size
    #[arg(long, value_name = "SIZE")]
    min: Option<ByteSize>,
    /// Maximum size
    #[arg(long, value_name = "SIZE")]
    max: Option<ByteSize>,
    /// Baseline: size against which its misses are compared
    #[arg(long, value_name = "SIZE")]
    baseline: Option<ByteSize>,
    /// Weight in proportional sharing, 1 to 1000000
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    shares: Option<u32>,
    /// Bound on the increase of its misses relative to the baseline, such as 5% or 0.05
    #[arg(long, value_name = "SHARE")]
    max_loss: Option<Share>,
    /// Bound on its misses per second, such as 20/s
    #[arg(long, value_name = "N/s")]
    max_misses: Option<PerSecond>,
    /// Bound on the time that it waits for misses, as a share of its vCPU time, such as 1%
    #[arg(long, value_name = "SHARE")]
    max_stall: Option<Share>,
    /// Whether the daemon may resize it
    #[arg(long, value_enum)]
    managed: Option<YesNo>,
    /// Restore the configured settings first
    #[arg(long)]
    reset: bool,
    #[command(flatten)]
    look: QueryArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum YesNo {
    Yes,
    No,
}

impl Args {
    fn change(&self) -> anyhow::Result<SettingsChange> {
        let change = SettingsChange {
            reset: self.reset,
            min_bytes: self.min.map(|size| size.0),
            max_bytes: self.max.map(|size| size.0),
            baseline_bytes: self.baseline.map(|size| size.0),
            shares: self.shares,
            max_loss: self.max_loss.map(Share::get),
            max_misses_per_second: self.max_misses.map(PerSecond::get),
            max_stall: self.max_stall.map(Share::get),
            managed: self.managed.map(|managed| managed == YesNo::Yes),
        };
        if change == SettingsChange::default() {
            bail_usage!(
                "nothing to set: name --min, --max, --baseline, --shares, --max-loss, --max-misses, --max-stall, --managed or --reset"
            );
        }
        if let (Some(min), Some(max)) = (self.min, self.max)
            && min > max
        {
            bail_usage!("--min {min} is above --max {max}");
        }
        Ok(change)
    }
}

/// If it fails, the settings are as they were.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let change = args.change()?;
    let daemon = Daemon::to_change(&args.look.socket)?;
    let changed = daemon.ask_of(&args.vm, |client, vm| client.set(vm, &change))?;
    let vm = &changed.vm;
    args.look.form.write(
        out,
        || Ok(format!("{}: {}\n", printable(&vm.vm), text(&vm.settings))),
        || Ok(lines(vm)),
        &changed,
    )?;
    warn_if_not_stored(&changed.acknowledgement);
    Ok(())
}

fn text(settings: &Settings) -> String {
    format!(
        "{} to {}, baseline {}, promised {}, {} shares, {}",
        size(settings.min_bytes),
        size(settings.max_bytes),
        size(settings.baseline_bytes),
        settings.promise,
        settings.shares,
        if settings.managed {
            "managed"
        } else {
            "not managed: the daemon moves none of its memory"
        },
    )
}

fn lines(vm: &VmSummary) -> String {
    csv_table!([vm], |vm| {
        "vm": printable(&vm.vm),
        "min_bytes": vm.settings.min_bytes,
        "max_bytes": vm.settings.max_bytes,
        "baseline_bytes": vm.settings.baseline_bytes,
        "shares": vm.settings.shares,
        "max_loss": vm.settings.promise.max_loss,
        "max_misses_per_second": vm.settings.promise.max_misses_per_second,
        "max_stall": vm.settings.promise.max_stall,
        "managed": vm.settings.managed,
    })
}
