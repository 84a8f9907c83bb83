//! How long it takes to allocate memory, and how far each search is from the optimum.
//!
//! `n` VMs of `u` units: each VM's size can be any of 1/16 `u` to `u` units, its curve has a point at each unit, it
//! has half of them now and is entitled to them, and the host has just that in all: `n * u / 2` units. VMs take turns
//! among eight kinds of curve, sized at random: Zipf of three exponents, loops that are cliffs, half loop and half
//! Zipf, two classes of uniform pages, a straight line, and a scan that no memory helps. Bands are 2 % wide, bounds 5
//! to 25 %. *Cliffs* are loops alone, each larger than its half: all or nothing. Time is CPU time of one whole call of
//! `allocate`, the median of the runs; *gap* is what the search certifies, *off* how far its mean is above that of the
//! optimum.

use std::io::Write;

use anyhow::Context as _;
use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, VmId};
use plimsoll_policy::{Bound, Demand, Policy, Rules, Search, allocate};

use crate::measure::{Clock, Watch, at_most, median};
use crate::random::Random;
use crate::{Cli, title};

/// VMs, units of each, and the bars of the optimum and of the hull: milliseconds, and percent of the mean.
struct Host {
    name: &'static str,
    vms: usize,
    units: u64,
    kinds: &'static [Kind],
    optimal_ms: Option<f64>,
    hull_ms: Option<f64>,
}

const HOSTS: [Host; 6] = [
    Host {
        name: "64 VMs of 1024 units",
        vms: 64,
        units: 1024,
        kinds: &MIXED,
        optimal_ms: Some(10.0),
        hull_ms: None,
    },
    Host {
        name: "256 VMs of 4096 units",
        vms: 256,
        units: 4096,
        kinds: &MIXED,
        optimal_ms: None,
        hull_ms: Some(50.0),
    },
    Host {
        name: "1024 VMs of 1024 units",
        vms: 1024,
        units: 1024,
        kinds: &MIXED,
        optimal_ms: Some(1000.0),
        hull_ms: None,
    },
    Host {
        name: "8 cliffs of 1024 units",
        vms: 8,
        units: 1024,
        kinds: &[Kind::Cliff],
        optimal_ms: None,
        hull_ms: None,
    },
    Host {
        name: "64 cliffs of 1024 units",
        vms: 64,
        units: 1024,
        kinds: &[Kind::Cliff],
        optimal_ms: None,
        hull_ms: None,
    },
    Host {
        name: "256 cliffs of 4096 units",
        vms: 256,
        units: 4096,
        kinds: &[Kind::Cliff],
        optimal_ms: None,
        hull_ms: None,
    },
];

/// Maximum gap of the hull, in percent.
const GAP_MAX: f64 = 0.5;

const MIXED: [Kind; 8] = [
    Kind::Zipf(0.6),
    Kind::Loop,
    Kind::Zipf(0.8),
    Kind::LoopAndZipf,
    Kind::Classes,
    Kind::Zipf(0.95),
    Kind::Uniform,
    Kind::Scan,
];

#[derive(Debug, Clone, Copy)]
enum Kind {
    Zipf(f64),
    Loop,
    LoopAndZipf,
    Classes,
    Uniform,
    Scan,
    /// A loop that needs more than its half.
    Cliff,
}

impl Kind {
    /// Share of references that hit in `share` of the footprint.
    fn hits(self, share: f64) -> f64 {
        let share = share.min(1.0);
        match self {
            Self::Zipf(alpha) => share.powf(1.0 - alpha),
            Self::Loop | Self::Cliff => f64::from(u8::from(share >= 1.0)),
            Self::LoopAndZipf => 0.5 * (Self::Loop.hits(share) + Self::Zipf(0.8).hits(share)),
            Self::Classes => 0.9 * (share * 5.0).min(1.0) + 0.1 * share,
            Self::Uniform => share,
            Self::Scan => 0.02,
        }
    }
}

fn demands(host: &Host, seed: u64) -> anyhow::Result<Vec<Demand>> {
    let mut random = Random::new(seed);
    let unit = Rules::UNIT.0;
    let demand = |vm: usize| {
        let kind = host.kinds[vm % host.kinds.len()];
        let share = random.below(1000) as f64 / 1000.0;
        let footprint = match kind {
            Kind::Cliff => 0.5 + 0.5 * share,
            _ => 0.1 + 1.4 * share,
        };
        let footprint = host.units as f64 * footprint;
        let cold = 0.001 + random.below(50) as f64 / 1000.0;
        let points = (1..=host.units).map(|units| {
            let hits = kind.hits(units as f64 / footprint);
            let miss_ratio = cold + (1.0 - cold) * (1.0 - hits);
            CurvePoint {
                size: PageCount(units * unit),
                miss_ratio,
                low: miss_ratio * 0.99,
                high: (miss_ratio * 1.01).min(1.0),
                misses: None,
            }
        });
        let half = PageCount(host.units / 2 * unit);
        Ok(Demand {
            vm: VmId(format!("vm{vm}")),
            curve: Some(MissRatioCurve::new(points.collect(), 1_000_000)?),
            baseline: half,
            current: half,
            floor: PageCount(host.units / 16 * unit),
            ceiling: PageCount(host.units * unit),
            bound: Bound::on_loss((5 + random.below(21)) as f64 / 100.0),
            shares: 1000,
            working_set: None,
        })
    };
    (0..host.vms).map(demand).collect()
}

/// Measures every search on every host.
pub(crate) fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        "Memory divided among VMs, each of half its units in the mean, promises of 5 to 25 %",
    )?;
    let searches = [
        ("optimal", Search::Optimal),
        ("auto", Search::Auto),
        ("hull", Search::Hull),
        ("greedy", Search::Greedy),
        ("annealing", Search::Annealing { seed: 1 }),
    ];
    for host in HOSTS.iter().filter(|host| cli.wants(host.name)) {
        writeln!(
            out,
            "\n{:<26} {:>10} {:>8} {:>10} {:>10}",
            host.name, "ms", "mean", "gap %", "off %"
        )?;
        let demands = demands(host, 1)?;
        let total = demands.iter().map(|demand| demand.baseline.0).sum();
        let rules = Rules::new(PageCount(total));
        let mut optimum = None;
        for (name, search) in searches {
            let mut milliseconds = Vec::new();
            let mut found = None;
            for _ in 0..cli.runs.max(1) {
                let watch = Watch::start(Clock::Cpu);
                let allocation = allocate(&demands, &rules, Policy::isolated(search))?;
                milliseconds.push(watch.seconds() * 1e3);
                found = Some(allocation);
            }
            let found = found.context("no run")?;
            let milliseconds = median(milliseconds);
            let mean = found.geometric_mean;
            let optimum = *optimum.get_or_insert(mean);
            let gap = found.gap.map(|gap| gap * 100.0);
            let shown = gap.map_or_else(|| "-".into(), |gap| format!("{gap:.6}"));
            let off = (mean / optimum - 1.0) * 100.0;
            write!(
                out,
                "  {name:<24} {milliseconds:>10.2} {mean:>8.4} {shown:>10} {off:>10.4}"
            )?;
            let bar = match search {
                Search::Optimal => host.optimal_ms,
                Search::Hull => host.hull_ms,
                _ => None,
            };
            if let Some(bar) = bar {
                let gap_max = if search == Search::Hull { GAP_MAX } else { 0.0 };
                let gap = at_most(gap.unwrap_or(f64::INFINITY), gap_max, " %");
                write!(out, "   {}; gap {gap}", at_most(milliseconds, bar, " ms"))?;
            }
            writeln!(out)?;
        }
    }
    Ok(())
}
