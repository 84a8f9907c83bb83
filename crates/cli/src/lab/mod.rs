//! `plimsoll lab`: the experiments behind the figures that Plimsoll claims.
//!
//! Each runs for real, on guests of ours where it is about tracing, and prints what it measured. Results
//! under emulation say so.

pub(crate) mod curves;
mod disk;
mod disk_right;
mod disk_sizes;
mod divide;
mod epsilon;
mod migration;
mod overhead;
mod scan;
pub(crate) mod steps;
mod truth;
mod wss;

use std::io::Write;

use clap::Subcommand;

/// Run one of the experiments behind Plimsoll's figures.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    experiment: Experiment,
}

#[derive(Debug, Subcommand)]
enum Experiment {
    Steps(steps::Args),
    Curves(curves::Args),
    Overhead(overhead::Args),
    Scan(scan::Args),
    Disk(disk::Args),
    Divide(divide::Args),
    Epsilon(epsilon::Args),
    Wss(wss::Args),
    Truth(truth::Args),
    Migration(migration::Args),
}

/// Runs the experiment; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// Why the experiment could not be run; what it measured before stands in `out`.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    match &args.experiment {
        Experiment::Steps(args) => steps::run(args, out),
        Experiment::Curves(args) => curves::run(args, out),
        Experiment::Overhead(args) => overhead::run(args, out),
        Experiment::Scan(args) => scan::run(args, out),
        Experiment::Disk(args) => disk::run(args, out),
        Experiment::Divide(args) => divide::run(args, out),
        Experiment::Epsilon(args) => epsilon::run(args, out),
        Experiment::Wss(args) => wss::run(args, out),
        Experiment::Truth(args) => truth::run(args, out),
        Experiment::Migration(args) => migration::run(args, out),
    }
}

/// Median of `values`, which must not be empty.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        (values[middle - 1] + values[middle]) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
        assert!((median(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-12);
    }
}
