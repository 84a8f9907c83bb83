//! The charts of a run.

use std::time::{Duration, Instant};

use plimsoll_flow::{PageCount, PageSize, WorkingSet};

use crate::attach::size;
use crate::plot::{Axis, Bar, BarChart, Chart, Look, Marker, Series, Shade, Unit, grouped};

use super::findings::{Findings, OfGuest, Standing, standing};
use super::recording::{Recording, Watched, sizes_during};

/// Points of a curve that a picture has room for.
const POINTS: usize = 1500;
/// Rounds of a guest are pooled over so long.
const SPEED_BIN: Duration = Duration::from_secs(1);

/// A chart and what to say under it.
#[derive(Debug)]
pub(super) struct Picture {
    /// Name of its file, without an ending.
    pub name: &'static str,
    /// The chart.
    pub svg: String,
    /// How to read it.
    pub caption: String,
}

/// Draws every chart for which there are data.
pub(super) fn all(recording: &Recording, findings: &Findings) -> Vec<Picture> {
    let mut pictures = vec![working_sets(recording)];
    let curves = [
        (
            "curve-zipf",
            &recording.zipf,
            &findings.zipf,
            "The truth is the closed form of LRU for these references, divided by the share that gets past \
             the hot set. Close to the hidden sizes the traced curve is too high: the hot set lets pages go that LRU \
             would have kept. The band is one of 95 %.",
        ),
        (
            "curve-steps",
            &recording.steps,
            &findings.steps,
            "A cyclic scan of S pages misses at every size below S and hits from S on, so the truth has a cliff at \
             each size the guest scanned, as high as its share of the time. Scans that fit into the hot set leave no trace.",
        ),
    ];
    for (name, guest, figures, caption) in curves {
        pictures.extend(curve(name, guest, figures, caption));
    }
    pictures.push(overhead(recording, findings));
    pictures.push(speed(recording));
    pictures
}

/// Seconds since both guests were up.
fn seconds(recording: &Recording, at: Instant) -> f64 {
    at.saturating_duration_since(recording.begin).as_secs_f64()
}

fn bytes(pages: PageCount) -> f64 {
    pages.to_bytes(PageSize::FOUR_KIB) as f64
}

/// The stretches in which the guests were left alone.
fn alone(recording: &Recording) -> Vec<Shade> {
    let (from, to) = recording.traced;
    [(recording.begin, from), (to, recording.end)]
        .map(|(from, to)| Shade {
            from: seconds(recording, from),
            to: seconds(recording, to),
            label: "not traced".to_owned(),
        })
        .to_vec()
}

fn working_sets(recording: &Recording) -> Picture {
    let guest = &recording.steps;
    let steps = guest.console.steps();
    let last = steps.last().map(|&(_, pages)| (recording.end, pages));
    let truth = steps
        .iter()
        .copied()
        .chain(last)
        .map(|(at, pages)| (seconds(recording, at), bytes(pages)));
    let mut series = vec![Series::new(
        "truth, as the guest tells it",
        Look::Truth,
        truth,
    )];
    for (wanted, name) in [
        (Standing::Steady, "found from outside"),
        (
            Standing::AcrossChange,
            "found, the size changed in the period",
        ),
        (Standing::AtLeast, "only a lower bound"),
        (Standing::AtMost, "only an upper bound"),
    ] {
        let points = guest.observed.periods.iter().filter_map(|traced| {
            let sizes = sizes_during(&steps, traced.start, traced.end).len();
            let (standing, set) = standing(traced, sizes)?;
            let middle = traced.start + (traced.end - traced.start) / 2;
            (standing == wanted).then(|| (seconds(recording, middle), bytes(set.size)))
        });
        let dots = Series::new(name, Look::Dots, points);
        if !dots.points.is_empty() {
            series.push(dots);
        }
    }
    let chart = Chart {
        title: "Working set of a running VM, found from outside".to_owned(),
        subtitle: format!(
            "VM {} · one dot a period of {} s, at its middle · smallest memory with at most 5 % misses",
            guest.vm,
            recording.config.period.as_secs_f64()
        ),
        x: Axis::new("Time", Unit::Seconds).up_to(seconds(recording, recording.end)),
        y: Axis::new("Working set", Unit::Bytes),
        shades: alone(recording),
        series,
        markers: Vec::new(),
    };
    Picture {
        name: "working-set",
        svg: chart.to_svg(),
        caption: "The guest scans its array in passes and tells on its console how large it is; the tracer \
                  sees only which pages the VM's process touches."
            .to_owned(),
    }
}

fn curve(name: &'static str, guest: &Watched, figures: &OfGuest, caption: &str) -> Option<Picture> {
    let against = figures.curve.as_ref()?;
    let found = against.found.thinned(POINTS);
    let last = |curve: &plimsoll_flow::MissRatioCurve| {
        curve
            .points()
            .last()
            .map_or(PageCount(0), |point| point.size)
    };
    let largest = against
        .truth
        .as_ref()
        .map_or(last(&found), |truth| last(truth).max(last(&found)));
    let until = PageCount(largest.0 + largest.0 / 25 + 1).to_bytes(PageSize::FOUR_KIB);
    let mut series = vec![Series::of_curve(
        "traced",
        &found,
        PageSize::FOUR_KIB,
        until,
    )];
    if let Some(truth) = &against.truth {
        let past = truth
            .points()
            .iter()
            .filter(|point| point.size > figures.hidden);
        let points = [truth.at(figures.hidden)].into_iter().chain(past.copied());
        let points = points.chain([truth.at(PageCount(until / 4096))]);
        series.push(Series::new(
            "closed form",
            Look::Truth,
            points.map(|point| (bytes(point.size), point.miss_ratio)),
        ));
    }
    let markers = found.size_for(WorkingSet::MISS_RATIO).map(|set| Marker {
        x: bytes(set),
        label: format!("{} for 5 % misses", size(set)),
    });
    let error = against.distance.map_or_else(String::new, |distance| {
        format!(" · mean error {:.4}", distance.mean_absolute_error)
    });
    let chart = Chart {
        title: format!("Miss-ratio curve of VM {}", guest.vm),
        subtitle: format!(
            "{} references past the hot set, all periods together{error}",
            grouped(found.references() as f64)
        ),
        x: Axis::new("Memory size", Unit::Bytes).up_to(until as f64),
        y: Axis::new("Miss ratio", Unit::Share).up_to(1.0),
        shades: vec![Shade {
            from: 0.0,
            to: bytes(figures.hidden).min(until as f64),
            label: "hidden by the hot set".to_owned(),
        }],
        series,
        markers: markers.into_iter().collect(),
    };
    Some(Picture {
        name,
        svg: chart.to_svg(),
        caption: caption.to_owned(),
    })
}

fn overhead(recording: &Recording, findings: &Findings) -> Picture {
    let guests = [
        (&recording.steps, &findings.steps),
        (&recording.zipf, &findings.zipf),
    ];
    let bars = guests.map(|(guest, figures)| Bar {
        label: format!("VM {}", guest.vm),
        value: figures.overhead.mean,
        text: format!("{:.2} %", figures.overhead.mean * 100.0),
        low: figures.overhead.low,
        high: figures.overhead.high,
    });
    let chart = BarChart {
        title: "What tracing takes from the VMs".to_owned(),
        subtitle: "Time in traps and in making pages inaccessible, over the vCPU's time; whiskers from the \
                   lowest to the highest period"
            .to_owned(),
        axis: Axis::new("Overhead, share of the VM's CPU time", Unit::Share),
        bars: bars.to_vec(),
        limit: recording
            .config
            .budget
            .map(|budget| (budget, format!("budget {} %", grouped(budget * 100.0)))),
    };
    Picture {
        name: "overhead",
        svg: chart.to_svg(),
        caption:
            "This is the tracer's own account, traps times their measured cost. The next picture \
                  holds the guests' own clocks against it."
                .to_owned(),
    }
}

fn speed(recording: &Recording) -> Picture {
    let line = |guest: &Watched| {
        let rounds = guest.console.rounds(recording.begin, recording.end);
        let mut bins: Vec<(u64, f64)> = Vec::new();
        for round in rounds {
            let middle = round.start + (round.end - round.start) / 2;
            let since = middle.saturating_duration_since(recording.begin);
            let bin = usize::try_from(since.as_millis() / SPEED_BIN.as_millis());
            let Ok(bin) = bin else { continue };
            if bins.len() <= bin {
                bins.resize(bin + 1, (0, 0.0));
            }
            bins[bin].0 += round.visits;
            bins[bin].1 += (round.end - round.start).as_secs_f64();
        }
        let points = bins.into_iter().enumerate().filter(|(_, bin)| bin.1 > 0.0);
        let points = points.map(|(index, (visits, took))| {
            let middle = (index as f64 + 0.5) * SPEED_BIN.as_secs_f64();
            (middle, visits as f64 / took)
        });
        Series::new(format!("VM {}", guest.vm), Look::Line, points)
    };
    let chart = Chart {
        title: "The guests' own speed, traced and not".to_owned(),
        subtitle: "Pages visited in a second of the guest's clock, mean over each second"
            .to_owned(),
        x: Axis::new("Time", Unit::Seconds).up_to(seconds(recording, recording.end)),
        y: Axis::new("Page visits per second", Unit::Count),
        shades: alone(recording),
        series: vec![line(&recording.steps), line(&recording.zipf)],
        markers: Vec::new(),
    };
    Picture {
        name: "speed",
        svg: chart.to_svg(),
        caption: "Whatever else runs on the host's CPUs shows here too. A scan's speed also depends on its \
                  size, by the caches it fits into."
            .to_owned(),
    }
}
