//! How long it takes to place the VMs of many hosts, and how far that is from the best.
//!
//! Hosts have 230 or 460 GiB for VMs and 64 processors, and 30 VMs each of 4 to 32 GiB, whose needs have a peak at some hour of the
//! day: 15 to 70 % of the size, up to 1.8 times as much at the peak, and 0.05 to 1.5 processors. Some hosts are short
//! then. *Off the bound* compares the hosts that run with the fewest that can, and the bytes moved with the fewest that must; no
//! placement may reach either. *Off the best* is of 500 small fleets (3 hosts of a twelfth of that, 3 VMs each), without their exhaustive search and with it. Time is wall time of one whole plan, the median of three fleets.

use std::io::Write;
use std::time::Instant;

use plimsoll_fleet::fleet::{Fleet, Host, Vm};
use plimsoll_fleet::place::Aim;
use plimsoll_fleet::plan::plan;
use plimsoll_fleet::rules::Rules;
use plimsoll_flow::Whole as _;
use plimsoll_protocol::fleet::{Goal, PlacementJson};

use crate::measure::median;
use crate::random::Random;
use crate::{Cli, title};

const SLOTS: usize = 24;
const GIB: u32 = 1024;
const SMALL_FLEETS: u64 = 500;
/// Fleets of each line.
const FLEETS: u64 = 3;

/// Runs the part.
pub fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<()> {
    title(out, "VMs on many hosts")?;
    for hosts in [10, 100, 1000] {
        for (name, goal, survive_loss) in [
            ("fit", Goal::Fit, false),
            ("fewest hosts", Goal::FewestHosts, false),
            ("fewest hosts, any may be lost", Goal::FewestHosts, true),
        ] {
            let line = format!("{hosts} hosts: {name}");
            if !cli.wants(&line) {
                continue;
            }
            let aim = Aim {
                goal,
                survive_loss,
                exhaustive: true,
            };
            let mut seconds = Vec::new();
            let mut off = Vec::new();
            for seed in 1..=FLEETS {
                let fleet = fleet(seed, hosts, 30);
                let begin = Instant::now();
                let found = plan(&fleet, &Rules::default(), aim, None)?;
                seconds.push(begin.elapsed().as_secs_f64());
                anyhow::ensure!(found.fits, "{line}: seed {seed} does not fit");
                off.push(off_bound(&found));
            }
            writeln!(
                out,
                "{line:<46} {:>8.2} s  off the bound {:>6.1} %",
                median(seconds),
                100.0 * median(off)
            )?;
        }
    }
    for (name, goal) in [("fit", Goal::Fit), ("fewest hosts", Goal::FewestHosts)] {
        let line = format!("small fleets: {name}");
        if cli.wants(&line) {
            small(&line, goal, out)?;
        }
    }
    Ok(())
}

/// How far the hosts that run, or the bytes that move, are above what is needed at least.
fn off_bound(plan: &PlacementJson) -> f64 {
    let (value, bound) = match plan.goal {
        Goal::Fit => (plan.moved_bytes.planned, plan.moved_bytes.at_least),
        Goal::FewestHosts => (plan.hosts_used.after, plan.hosts_used.at_least),
    };
    match bound {
        0 => 0.0,
        bound => value as f64 / bound as f64 - 1.0,
    }
}

/// Compares the plan without an exhaustive search with the best.
fn small(line: &str, goal: Goal, out: &mut dyn Write) -> anyhow::Result<()> {
    let (mut best, mut missed, mut whole, mut off) = (0_u64, 0_u64, 0_u64, 0.0);
    for seed in 1..=SMALL_FLEETS {
        let fleet = fleet(seed, 3, 3);
        let found = [true, false].map(|exhaustive| {
            let aim = Aim {
                goal,
                survive_loss: false,
                exhaustive,
            };
            plan(&fleet, &Rules::default(), aim, None)
        });
        let [exact, quick] = found;
        let (exact, quick) = (exact?, quick?);
        if !exact.fits {
            continue;
        }
        whole += 1;
        if !quick.fits {
            missed += 1;
            continue;
        }
        let cost = |plan: &PlacementJson| match goal {
            Goal::Fit => plan.moved_bytes.planned as f64,
            Goal::FewestHosts => plan.hosts_used.after as f64,
        };
        let (least, cost) = (cost(&exact), cost(&quick));
        best += u64::from(cost <= least);
        off += if least > 0.0 { cost / least - 1.0 } else { 0.0 };
    }
    Ok(writeln!(
        out,
        "{line:<46} the best in {best} of {whole}, off it {:.2} % in the mean, none found in {missed}",
        100.0 * off / (whole - missed).max(1) as f64
    )?)
}

fn fleet(seed: u64, hosts: usize, vms: usize) -> Fleet {
    let mut random = Random::new(seed);
    let mut fleet = Fleet {
        slots: SLOTS,
        hosts: Vec::new(),
        vms: Vec::new(),
        notes: Vec::new(),
    };
    for host in 0..hosts {
        let small = random.chance(0.5);
        // Of small fleets, hosts are small as well.
        let scale = if vms < 30 { 12 } else { 1 };
        let memory = if small { 230 * GIB } else { 460 * GIB } / scale;
        let mut capacity = vec![memory; SLOTS];
        capacity.resize(2 * SLOTS, 64_000);
        fleet.hosts.push(Host {
            name: format!("host-{host}"),
            capacity,
        });
        for vm in 0..vms {
            let gib: u32 = [4, 8, 8, 16, 16, 32][random.below(6)];
            let mut share = || random.below(1_000_000) as f64 / 1e6;
            let base = f64::from(gib) * (0.15 + 0.55 * share());
            let (rise, hour, processors) = (0.8 * share(), 24.0 * share(), 0.05 + 1.45 * share());
            let wave = |slot: usize| {
                let angle = (slot as f64 - hour) / 24.0 * std::f64::consts::TAU;
                angle.cos().max(0.0)
            };
            let memory = (0..SLOTS).map(|slot| base * (1.0 + rise * wave(slot)) * f64::from(GIB));
            let time = (0..SLOTS).map(|slot| 1000.0 * processors * (0.5 + 0.5 * wave(slot)));
            fleet.vms.push(Vm {
                name: format!("vm-{host}-{vm}"),
                uuid: None,
                host,
                size_bytes: u64::from(gib) << 30,
                need: memory.chain(time).map(u32::whole).collect(),
                known_ratio: 1.0,
                processors_known: true,
                is_migrating: false,
            });
        }
    }
    fleet
}
