//! Which estimators look, and how they are set.

use std::num::{NonZeroU16, NonZeroU32};

use clap::ValueEnum;
use plimsoll_estimator::working_set::{PmlOptions, PrlOptions, SamplingOptions, TouchedOptions};
use plimsoll_flow::{PageCount, PageSize};
use plimsoll_pagelog::machine::{Config, CostModel, Mode};

use crate::size::{ByteSize, Share};

/// Working-set estimators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Method {
    /// Page reference logging: pages logged often
    Prl,
    /// Page modification logging: pages logged
    Pml,
    /// VMware's sampling of random pages
    Esx,
    /// Size at which the miss-ratio curve reaches 5 %
    Mrc,
    /// Pages really accessed
    Truth,
    /// All of them
    All,
}

/// Options of the estimators and their logging buffers. Flatten them into a verb's `Args`.
#[derive(Debug, clap::Args)]
pub struct EstimatorArgs {
    /// Working-set estimator
    #[arg(long, value_enum, default_value_t = Method::All)]
    estimator: Method,
    /// prl: number of times a page is logged until it is hot (τ)
    #[arg(long, default_value = "50", value_name = "N")]
    tau: NonZeroU32,
    /// prl, pml: number of intervals without change after which the estimate is settled (ω)
    #[arg(long, default_value = "4", value_name = "N")]
    omega: NonZeroU16,
    /// prl: share of the pages logged within omega intervals that must be hot before the estimate settles
    #[arg(long, default_value = "10%", value_name = "SHARE")]
    warm_up: Share,
    /// prl, pml: growth within omega intervals that is ignored; 0 is the paper's rule
    #[arg(long, default_value = "0.1%", value_name = "SHARE")]
    tolerance: Share,
    /// prl: additional need of the guest's kernel (ε), added to the estimate
    #[arg(long, default_value = "0", value_name = "SIZE")]
    epsilon: ByteSize,
    /// esx: pages sampled in each interval
    #[arg(long, default_value = "100", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    sample_pages: u32,
    /// esx: random seed of the sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Truth: window in intervals
    #[arg(long, default_value = "4", value_name = "N")]
    window: NonZeroU16,
    /// Truth: number of these intervals in which a page must have been accessed
    #[arg(long, default_value = "1", value_name = "N")]
    times: NonZeroU16,
    /// prl, pml: entries of a logging buffer
    #[arg(long, default_value = "512", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    buffer: u32,
    #[command(flatten)]
    costs: CostArgs,
}

/// Costs of logging, in cycles.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Costs of logging, in cycles")]
struct CostArgs {
    /// An instruction, in thousandths of a cycle [default: 1000]
    #[arg(long, value_name = "N")]
    instruction_cost: Option<u32>,
    /// A VM exit (pml) [default: 2000]
    #[arg(long, value_name = "N")]
    exit_cost: Option<u32>,
    /// Latency of the interrupt to the host's CPU (prl) [default: 2000; for a trace 0]
    #[arg(long, value_name = "N")]
    latency_cost: Option<u32>,
    /// The interrupt's handler, without draining (prl) [default: 3000; for a trace 0]
    #[arg(long, value_name = "N")]
    interrupt_cost: Option<u32>,
    /// Draining an entry of a buffer [default: 40; for a trace 0]
    #[arg(long, value_name = "N")]
    drain_cost: Option<u32>,
}

impl CostArgs {
    /// A trace has no clock: unless said, its handlers take no time.
    fn model(&self, has_clock: bool) -> CostModel {
        let default = CostModel::default();
        let timed =
            |given: Option<u32>, cycles: u32| given.unwrap_or(if has_clock { cycles } else { 0 });
        CostModel {
            instruction_thousandths: self
                .instruction_cost
                .unwrap_or(default.instruction_thousandths),
            exit_cycles: self.exit_cost.unwrap_or(default.exit_cycles),
            latency_cycles: timed(self.latency_cost, default.latency_cycles),
            interrupt_cycles: timed(self.interrupt_cost, default.interrupt_cycles),
            entry_cycles: timed(self.drain_cost, default.entry_cycles),
            reset_cycles: timed(None, default.reset_cycles),
            ..default
        }
    }
}

impl EstimatorArgs {
    /// Whether a method was asked for, alone or with all.
    pub(super) fn wants(&self, method: Method) -> bool {
        self.estimator == Method::All || self.estimator == method
    }

    pub(super) fn prl(&self) -> PrlOptions {
        PrlOptions {
            tau: self.tau,
            omega: self.omega,
            warm_up: self.warm_up.get(),
            tolerance: self.tolerance.get(),
            ..PrlOptions::default()
        }
    }

    /// What is added to what prl finds.
    pub(super) fn epsilon(&self, page_size: PageSize) -> PageCount {
        PageCount::from_bytes(self.epsilon.0, page_size)
    }

    pub(super) fn pml(&self) -> PmlOptions {
        PmlOptions {
            omega: self.omega,
            tolerance: self.tolerance.get(),
        }
    }

    pub(super) fn sampling(&self) -> SamplingOptions {
        SamplingOptions {
            pages: NonZeroU32::new(self.sample_pages).unwrap_or(NonZeroU32::MIN),
            seed: self.seed,
            ..SamplingOptions::default()
        }
    }

    pub(super) fn truth(&self) -> TouchedOptions {
        TouchedOptions {
            intervals: self.window,
            times: self.times,
        }
    }

    /// The machine whose buffers are logged into.
    pub(super) fn machine(&self, mode: Mode, has_clock: bool) -> Config {
        Config {
            buffer_entries: self.buffer,
            costs: self.costs.model(has_clock),
            ..Config::new(mode)
        }
    }
}
