//! A plan: a host with its VMs, the daemon's settings, and what happens when, all drawn from one seed.

use std::time::Duration;

use plimsoll_daemon::config::{Config, VmRule, Workflow};
use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, SplitMix};
use plimsoll_policy::{GivenOptions, Policy};
use plimsoll_protocol::decision::Mode;
use plimsoll_protocol::request::SettingsChange;
use plimsoll_protocol::vm::Promise;

use crate::simulated::{BalloonBehaviour, Counts, Lie, Reports, Statistic};

pub const MIB: u64 = 1 << 20;
/// Pace of a balloon that takes hours, in bytes a second.
const CRAWL: u64 = 128 << 10;

/// Random numbers.
pub struct Numbers(pub SplitMix);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0.bits()
    }

    /// A number from `from` to `to`.
    pub fn within(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from + 1)
    }

    pub fn one_in(&mut self, count: u64) -> bool {
        self.next().is_multiple_of(count)
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::try_from(self.within(0, of.len() as u64 - 1)).unwrap_or(0)]
    }

    /// A number from 0 to 1.
    fn share(&mut self) -> f64 {
        self.within(0, 1000) as f64 / 1000.0
    }
}

/// Something that happens. Guests are numbers of [`Plan::guests`].
#[derive(Debug, Clone)]
pub enum Event {
    /// The guest reports so from now on.
    Reports(usize, Reports),
    /// Its balloon behaves so.
    Balloon(usize, BalloonBehaviour),
    /// Its monitor answers, or does not.
    Monitor(usize, bool),
    /// The daemon of its disk answers, or does not.
    Disk(usize, bool),
    /// The guest is honest, follows, and all its sockets answer.
    Heals(usize),
    /// It ends.
    Ends(usize),
    /// It starts again with this RAM in MiB, perhaps with another UUID.
    Starts(usize, u64, bool),
    /// MiB of RAM are plugged, or unplugged.
    Plugs(usize, i64),
    /// The memory of its processes approaches this share of what it had first, in percent.
    Needs(usize, u64),
    /// Its curve is another one: the true one, or the reported one.
    Curve(usize, bool, MissRatioCurve),
    /// RAM of the host that is available, in MiB.
    Available(u64),
    /// All tasks of the host waited for so many ms.
    Stall(u64),
    /// The time of day steps by seconds.
    Clock(i64),
    Pause,
    Resume,
    Set(usize, SettingsChange),
    Apply,
    RollBack,
    /// The configuration is read again, with this mode.
    Reload(Mode),
    /// The daemon is killed, and starts again.
    Restart,
}

impl Event {
    /// The guest that it befalls.
    pub fn guest(&self) -> Option<usize> {
        match self {
            Self::Reports(guest, _)
            | Self::Balloon(guest, _)
            | Self::Monitor(guest, _)
            | Self::Disk(guest, _)
            | Self::Heals(guest)
            | Self::Ends(guest)
            | Self::Starts(guest, ..)
            | Self::Plugs(guest, _)
            | Self::Needs(guest, _)
            | Self::Curve(guest, ..)
            | Self::Set(guest, _) => Some(*guest),
            _ => None,
        }
    }
}

/// A VM at the beginning.
#[derive(Debug, Clone)]
pub struct Guest {
    pub name: String,
    pub has_uuid: bool,
    pub ram_bytes: u64,
    pub direct_bytes: u64,
    pub curve: MissRatioCurve,
    pub references_per_second: u64,
    pub pace: u64,
    pub counts: Counts,
}

#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub config: Config,
    pub guests: Vec<Guest>,
    pub has_caches: bool,
    /// Whether the history is in a file.
    pub is_on_disk: bool,
    pub seconds: u64,
    /// In the order of their seconds.
    pub events: Vec<(u64, Event)>,
}

impl Plan {
    /// The host at its beginning, in short.
    pub fn text(&self) -> String {
        let config = &self.config;
        let mib = |bytes: u64| bytes / MIB;
        let guests = self.guests.iter().map(|guest| {
            format!(
                "  {}: RAM {} MiB, own {} MiB, {} MiB/s",
                guest.name,
                mib(guest.ram_bytes),
                mib(guest.direct_bytes),
                mib(guest.pace)
            )
        });
        format!(
            "{:?}, a turn each {:?}, total {:?} MiB, {:?}, cooldown {:?}, check {:?}, steps {:?} MiB, on disk: {}\n{}",
            config.mode,
            config.turn_interval,
            config.total_bytes.map(mib),
            config.workflow,
            config.cooldown,
            config.check_after,
            config.step_bytes.map(mib),
            self.is_on_disk,
            guests.collect::<Vec<_>>().join("\n")
        )
    }

    pub fn of_seed(seed: u64) -> Self {
        let mut numbers = Numbers(SplitMix(seed));
        let numbers = &mut numbers;
        let has_caches = numbers.one_in(3);
        let guests: Vec<_> = (0..numbers.within(2, 4))
            .map(|index| guest(index, numbers))
            .collect();
        let sum = guests.iter().map(|guest| guest.direct_bytes).sum();
        let config = config(has_caches, sum, numbers);
        let seconds = match numbers.one_in(20) {
            true => 4000,
            false => numbers.within(200, 1000),
        };
        // Some hosts are calm, on others something happens every few seconds.
        let mut every = numbers.pick(&[5, 15, 40, 100]);
        let mut events = Vec::new();
        if seconds == 4000 && numbers.one_in(2) {
            // Balloons that move, but hardly, and are left alone.
            every = seconds;
            let crawls = BalloonBehaviour::Pace(CRAWL);
            events.extend((0..guests.len()).map(|guest| (1, Event::Balloon(guest, crawls))));
        }
        for second in 1..seconds {
            if numbers.one_in(every) {
                let guest = numbers.within(0, guests.len() as u64 - 1);
                let guest = usize::try_from(guest).unwrap_or(0);
                let event = event(guest, numbers);
                // An operator undoes what the daemon did before it was killed.
                if matches!(event, Event::Restart) && numbers.one_in(2) {
                    events.push((second + numbers.within(1, 9), Event::RollBack));
                }
                events.push((second, event));
            }
        }
        events.sort_by_key(|(at, _)| *at);
        Self {
            seed,
            config,
            guests,
            has_caches,
            is_on_disk: numbers.one_in(64),
            seconds,
            events,
        }
    }
}

fn guest(index: u64, numbers: &mut Numbers) -> Guest {
    let ram = numbers.pick(&[256, 512, 1024, 2048]) * MIB;
    Guest {
        name: format!("vm{index}"),
        has_uuid: numbers.one_in(2),
        ram_bytes: ram,
        direct_bytes: ram / 8 * numbers.within(4, 8),
        curve: curve(ram, numbers),
        references_per_second: numbers.pick(&[10, 1000, 40_000]),
        pace: numbers.pick(&[32, 64, 256]) * MIB,
        counts: numbers.pick(&[Counts::Disk, Counts::Faults, Counts::Reads]),
    }
}

fn config(has_caches: bool, sum: u64, numbers: &mut Numbers) -> Config {
    let seconds = |from, to, numbers: &mut Numbers| Duration::from_secs(numbers.within(from, to));
    let workflow = match has_caches {
        false => Workflow::Trap,
        true => Workflow::Cache {
            direct_ratio: numbers.pick(&[0.25, 0.5]),
            trace_for: seconds(5, 30, numbers),
            keep: numbers.one_in(2),
            every: seconds(20, 100, numbers),
        },
    };
    let policy = match numbers.one_in(8) {
        true => Policy::by_name("esx", GivenOptions::default()).expect("it is in the registry"),
        false => Config::default().policy,
    };
    let promise = match numbers.one_in(3) {
        true => Promise {
            max_loss: None,
            max_misses_per_second: Some(20.0),
            max_stall: None,
        },
        false => Promise::on_loss(numbers.pick(&[0.05, 0.25, 1.0])),
    };
    let mut vms = vec![VmRule {
        promise: Some(promise),
        ..VmRule::for_name("*")
    }];
    if numbers.one_in(6) {
        vms.push(VmRule {
            managed: Some(false),
            ..VmRule::for_name("vm1")
        });
    }
    Config {
        mode: if numbers.one_in(8) {
            Mode::Advise
        } else {
            Mode::Act
        },
        turn_interval: Duration::from_secs(numbers.pick(&[1, 1, 1, 2, 5])),
        total_bytes: numbers.one_in(3).then(|| sum / 8 * numbers.within(7, 10)),
        policy,
        unit_bytes: 16 * MIB,
        step_bytes: numbers.one_in(4).then_some(64 * MIB),
        cooldown: seconds(2, 20, numbers),
        check_after: seconds(3, 12, numbers),
        headroom_bytes: Some(1 << 30),
        workflow,
        history: None,
        vms,
        ..Config::default()
    }
}

/// A curve of few points that falls somewhere.
fn curve(ram_bytes: u64, numbers: &mut Numbers) -> MissRatioCurve {
    let pages = ram_bytes / 4096;
    let (high, low) = (0.3 + 0.6 * numbers.share(), 0.3 * numbers.share());
    let knee = numbers.within(1, 8);
    let points = (1..=10).map(|step| {
        let over = f64::from(i32::try_from(step).unwrap_or(0)) / knee as f64;
        let ratio = low + (high - low) / (1.0 + over.powi(4));
        CurvePoint::exact(PageCount(pages * step / 10), ratio)
    });
    let curve = MissRatioCurve::new(points.collect(), 100_000).expect("it falls");
    match numbers.one_in(2) {
        true => curve.with_references_per_second(100.0),
        false => curve,
    }
}

fn event(guest: usize, numbers: &mut Numbers) -> Event {
    match numbers.within(0, 30) {
        0..=4 => Event::Reports(guest, reports(numbers)),
        5..=7 => {
            let pace = numbers.pick(&[0, 1, 4, 64, 1024]) * MIB;
            Event::Balloon(
                guest,
                numbers.pick(&[
                    BalloonBehaviour::Never,
                    BalloonBehaviour::Back(pace),
                    BalloonBehaviour::Broken,
                    BalloonBehaviour::Absent,
                    BalloonBehaviour::Pace(pace),
                    BalloonBehaviour::Pace(pace),
                ]),
            )
        }
        8 => Event::Monitor(guest, numbers.one_in(2)),
        9 => Event::Disk(guest, numbers.one_in(2)),
        10..=12 => Event::Heals(guest),
        13 => Event::Ends(guest),
        14 | 15 => {
            let ram = numbers.pick(&[256, 512, 1024, 2048]);
            Event::Starts(guest, ram, numbers.one_in(3))
        }
        16 => Event::Plugs(guest, numbers.pick(&[128, 256, -128, -256])),
        17..=19 => Event::Needs(guest, numbers.within(2, 80)),
        20 => {
            let ram = numbers.pick(&[256, 1024, 2048]) * MIB;
            Event::Curve(guest, numbers.one_in(2), curve(ram, numbers))
        }
        21 => Event::Available(numbers.pick(&[0, 300, 900, 1023, 1500, 5000, 500_000])),
        22 => Event::Stall(numbers.within(10, 1000)),
        23 => Event::Clock(numbers.pick(&[-200_000, -3600, -5, -1, 1, 5, 3600, 200_000])),
        24 => Event::Pause,
        25 | 26 => Event::Resume,
        27 => Event::Set(guest, change(numbers)),
        28 if numbers.one_in(2) => Event::Apply,
        28 => Event::RollBack,
        29 => Event::Reload(numbers.pick(&[Mode::Act, Mode::Act, Mode::Advise, Mode::Observe])),
        _ => Event::Restart,
    }
}

fn reports(numbers: &mut Numbers) -> Reports {
    let statistic = numbers.pick(&[
        Statistic::Available,
        Statistic::Available,
        Statistic::Available,
        Statistic::Total,
        Statistic::Free,
        Statistic::DiskCaches,
        Statistic::MajorFaults,
        Statistic::SwapIn,
        Statistic::SwapOut,
        Statistic::OomKills,
    ]);
    let lie = numbers.pick(&[
        Lie::Zero,
        Lie::Little,
        Lie::Much,
        Lie::Max,
        Lie::Frozen,
        Lie::Missing,
    ]);
    numbers.pick(&[
        Reports::Nothing,
        Reports::Ended,
        Reports::Distress,
        Reports::Backwards,
        Reports::False(statistic, lie),
        Reports::False(statistic, lie),
        Reports::False(statistic, lie),
        Reports::False(statistic, lie),
    ])
}

fn change(numbers: &mut Numbers) -> SettingsChange {
    let size = numbers.within(0, 20) * 128 * MIB;
    let none = SettingsChange::default();
    numbers.pick(&[
        SettingsChange {
            min_bytes: Some(size),
            ..none
        },
        SettingsChange {
            max_bytes: Some(size),
            ..none
        },
        SettingsChange {
            min_bytes: Some(size),
            max_bytes: Some(size),
            ..none
        },
        SettingsChange {
            baseline_bytes: Some(size),
            ..none
        },
        SettingsChange {
            managed: Some(size > 512 * MIB),
            ..none
        },
        SettingsChange {
            max_loss: Some(size as f64 / (1 << 30) as f64),
            ..none
        },
        SettingsChange {
            reset: true,
            ..none
        },
    ])
}
