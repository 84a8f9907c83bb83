//! Images and accelerators of an experiment's guests.

use std::io::Write;

use clap::ValueEnum;
use plimsoll_rig::{AcceleratorChoice, Boot, GuestConfig, GuestImage, Subject};

/// The guests of an experiment; shared by those that trace memory workloads.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct GuestArgs {
    /// What the guests boot
    #[arg(long, value_enum, default_value_t = System::Linux)]
    guest: System,
    /// What executes the guests' instructions
    #[arg(long, value_enum, default_value_t = Accelerator::Auto)]
    accelerator: Accelerator,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum System {
    /// Linux
    Linux,
    /// No operating system: also runs under a KVM that emulates kernels; also has workloads of classes and of two kinds of pages
    Bare,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Accelerator {
    /// KVM where it runs such guests, else TCG
    Auto,
    /// KVM
    Kvm,
    /// QEMU's emulator
    Tcg,
}

/// What guests are booted from.
#[derive(Debug)]
pub struct Guests {
    /// The image of Linux guests; `None` for guests without an operating system.
    image: Option<GuestImage>,
    accelerator: AcceleratorChoice,
}

impl GuestArgs {
    /// Finds the image that the guests need.
    ///
    /// # Errors
    ///
    /// As [`GuestImage::locate`].
    pub fn prepare(self) -> anyhow::Result<Guests> {
        Ok(Guests {
            image: match self.guest {
                System::Linux => Some(GuestImage::locate()?),
                System::Bare => None,
            },
            accelerator: match self.accelerator {
                Accelerator::Auto => AcceleratorChoice::Auto,
                Accelerator::Kvm => AcceleratorChoice::Kvm,
                Accelerator::Tcg => AcceleratorChoice::Tcg,
            },
        })
    }
}

impl Guests {
    /// RAM in MiB of a guest with an array of `array_mib`.
    pub fn memory_mib(&self, array_mib: u64) -> u64 {
        self.origin().memory_mib(array_mib)
    }

    fn origin(&self) -> Boot<'_> {
        self.image.as_ref().map_or(Boot::Bare, Boot::Linux)
    }

    /// Boots a guest and waits until its array is populated; `None`, after printing so, if such guests do not have its
    /// workload.
    ///
    /// # Errors
    ///
    /// As [`Subject::boot`].
    pub fn boot(
        &self,
        config: GuestConfig,
        out: &mut dyn Write,
    ) -> anyhow::Result<Option<Subject>> {
        let workload = &config.workload;
        let of_bare = ["hot_ratio=", "loop_ratio="];
        if self.image.is_some() && of_bare.iter().any(|key| workload.contains(key)) {
            writeln!(out, "not run: guests with Linux have no {workload}")?;
            return Ok(None);
        }
        let config = GuestConfig {
            accelerator: self.accelerator,
            ..config
        };
        Subject::boot(self.origin(), &config).map(Some)
    }
}
