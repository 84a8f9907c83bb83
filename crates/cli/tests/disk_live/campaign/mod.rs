//! Guests that verify all they read while everything beneath them is killed, stopped and resized, and while storage fails.
//!
//! What a guest does and what happens to it follows from a seed, which is printed. `PLIMSOLL_CAMPAIGN_SEED` is where the
//! seeds begin, and `PLIMSOLL_CAMPAIGN_SECONDS` how long new guests are started (a minute): the seed of a guest that found
//! something, with one second, runs that guest alone. `./dev soak qemu` runs these tests for hours.

mod plan;
mod storage;
mod trial;

use std::env;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use plimsoll_rig::{host, make_tools_image};
use plimsoll_skip::{Lack, skip};

use crate::rig::shared_turn;
use plan::Plan;

const SEED: &str = "PLIMSOLL_CAMPAIGN_SEED";
const SECONDS: &str = "PLIMSOLL_CAMPAIGN_SECONDS";
const FIO: &str = "/usr/bin/fio";

/// A number from the environment.
fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{variable}={text} is no number")))
}

/// Seeds, each of the one before, as long as the campaign lasts; at least one.
fn seeds(seconds: u64) -> impl Iterator<Item = u64> {
    let first = number(SEED).unwrap_or_else(|| host::printed_seed() >> 32);
    let lasts = Duration::from_secs(number(SECONDS).unwrap_or(seconds));
    let began = Instant::now();
    (first..).take_while(move |&seed| seed == first || began.elapsed() < lasts)
}

/// What was verified.
#[derive(Debug, Default, Clone, Copy)]
struct Verified {
    /// Pages that guests read and compared.
    pages: u64,
    /// Blocks that daemons served from memory and compared with storage.
    served: u64,
    guests: u64,
    kills: u64,
    stops: u64,
    resizes: u64,
}

impl Verified {
    fn add(&mut self, other: &Self) {
        self.pages += other.pages;
        self.served += other.served;
        self.guests += other.guests;
        self.kills += other.kills;
        self.stops += other.stops;
        self.resizes += other.resizes;
    }
}

#[test]
fn guests_read_right_whatever_is_killed_stopped_and_resized_beneath_them() {
    let Some(_turn) = shared_turn() else { return };
    let folder = tempfile::tempdir().unwrap();
    let tools: Option<PathBuf> = if PathBuf::from(FIO).exists() {
        let image = folder.path().join("tools.img");
        make_tools_image(&image, FIO.as_ref()).unwrap();
        Some(image)
    } else {
        skip(
            Lack::Program,
            format_args!("guests that run fio: there is no {FIO}"),
        );
        None
    };
    let mut all = Verified::default();
    let began = Instant::now();
    for seed in seeds(60) {
        let plan = Plan::draw(seed, tools.as_deref());
        println!("seed {seed}: {plan}");
        all.add(&trial::run(&plan));
        println!(
            "{} guests in {} s: {} pages verified by them, {} served from memory and verified; {} kills, {} stops, {} resizes",
            all.guests,
            began.elapsed().as_secs(),
            all.pages,
            all.served,
            all.kills,
            all.stops,
            all.resizes
        );
    }
    assert!(all.pages > 0);
}
