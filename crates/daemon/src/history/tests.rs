use plimsoll_flow::{CurvePoint, LOG_ERRORS, PageCount, PageSize, WorkingSetBound};
use plimsoll_skip::{Lack, skip};
use std::os::unix::fs::FileExt;
use std::process::Command;

use plimsoll_protocol::curve_json::{MissesJson, PointJson};
use plimsoll_protocol::decision::{
    HoldingView, Initiator, Kind, Mode, State as Became, Step, StepState,
};
use plimsoll_protocol::plan::PlanInputs;
use tempfile::TempDir;

use super::form::{Curve, StoredSample, together};
use super::*;

const LIMITS: Limits = Limits {
    bytes_max: 16 << 20,
    keep: Duration::from_hours(24),
};
/// A time that is a multiple of the span.
const NOON_MS: u64 = 6_000_000 * SPAN_MS;
const TURN_MS: u64 = 30_000;

fn open(path: &Path) -> (History, Vec<String>) {
    History::open(path, LIMITS).unwrap()
}

fn opened_quietly(path: &Path) -> History {
    let (history, warnings) = open(path);
    assert_eq!(warnings, [""; 0]);
    assert!(!history.began_anew());
    history
}

fn sample(unix_ms: u64, direct_bytes: u64) -> Sample {
    Sample {
        unix_ms,
        direct_bytes,
        cache_bytes: 1,
        working_set_bytes: Some(direct_bytes / 2),
        misses_per_second: Some(10.0),
        lost: 1,
        ..Sample::default()
    }
}

fn moment(vm: &str, sample: Sample) -> TurnRecord<'_> {
    TurnRecord {
        vm,
        sample,
        heat: None,
        curve: None,
    }
}

fn decision(id: u64, vm: &str, state: Became) -> Decision {
    let holding = HoldingView::default();
    Decision {
        schema: plimsoll_protocol::SCHEMA,
        id,
        unix_ms: NOON_MS + id,
        kind: Kind::Divide,
        by: Initiator::Daemon,
        mode: Mode::Act,
        state,
        reason: format!("the reason of {id}"),
        inputs: None,
        plan: None,
        steps: vec![Step {
            vm: vm.to_owned(),
            from: holding,
            to: holding,
            now: holding,
            state: StepState::Waiting,
            error: None,
        }],
        checks: Vec::new(),
        takes_back: None,
        taken_back_by: None,
        ended_unix_ms: None,
    }
}

/// Longer than a part.
fn inputs() -> PlanInputs {
    let names = large(1, 50_000).reason.replace(['"', '\\'], "x");
    let demands = format!(
        r#"[{{"vm":"{names}","curve":null,"baseline_bytes":1,"current_bytes":1,"floor_bytes":1,
        "ceiling_bytes":null,"max_loss":0.0,"shares":1,"working_set_bytes":null}}]"#
    );
    let text = r#"{"schema":1,"page_bytes":4096,"policy":{"name":"esx","idle_tax":0.75},"rules":{"total_bytes":4096,
        "unit_bytes":4096,"step_bytes":null,"gain_min":0.0,"miss_ratio_min":0.001},"demands":DEMANDS}"#;
    serde_json::from_str(&text.replace("DEMANDS", &demands)).unwrap()
}

fn ids(decisions: &[Decision]) -> Vec<u64> {
    decisions.iter().map(|decision| decision.id).collect()
}

#[test]
fn turns_longer_than_a_span_keep_a_curve_of_every_vm() {
    let curve: CurveJson = serde_json::from_str(
        r#"{"schema":1,"vm":"web","page_bytes":4096,"references":7,"baseline_pages":5,"points":[
            {"size_pages":1,"miss_ratio":0.5,"low":0.4,"high":0.6}]}"#,
    )
    .unwrap();
    for turn_spans in [2, 12] {
        let history = History::nowhere();
        let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
        for turn in 0..6 {
            let now_ms = NOON_MS + turn * turn_spans * SPAN_MS;
            let records = names.map(|name| TurnRecord {
                curve: Some(&curve),
                ..moment(name, sample(now_ms, 5))
            });
            history.record_turn(&records);
        }
        for name in names {
            let kept = history.valid_curves(name, 0).len();
            assert!(kept >= 5, "{name}: {kept} of turns of {turn_spans} spans");
        }
    }
}

#[test]
fn history_follows_the_uuid_of_a_vm() {
    const WEB: &str = "c7a5fdbd-edaf-9455-926a-d65c16db1809";
    const OTHER: &str = "11111111-edaf-9455-926a-d65c16db1809";
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("history.redb");
    let found = |history: &History, vm: &str| {
        let kept = history.samples(vm, 0, u64::MAX, 100);
        let curve = history.curve_at(vm, u64::MAX).is_some();
        (kept.len(), curve, history.baseline(vm))
    };
    {
        let history = opened_quietly(&path);
        // Recorded before UUIDs were.
        let _ = history.put_baseline("web", 7);
        let curve = serde_json::from_str(
            r#"{"schema":1,"vm":"web","page_bytes":4096,"references":7,"baseline_pages":5,"points":[
                {"size_pages":1,"miss_ratio":0.5,"low":0.4,"high":0.6}]}"#,
        );
        let curve: CurveJson = curve.unwrap();
        for turn in 0..4 {
            let record = TurnRecord {
                curve: Some(&curve),
                ..moment("web", sample(NOON_MS + turn * SPAN_MS, 5))
            };
            history.record_turn(&[record]);
        }
        // Three hours later they are means.
        history.record_turn(&[moment("mail", sample(NOON_MS + 36 * SPAN_MS, 5))]);
        let before = found(&history, "web");
        assert_eq!(before, (4, true, Some(7)));
        history.identify("web", Some(WEB));
        assert_eq!(found(&history, "web"), before);
        // Renamed.
        history.identify("shop", Some(WEB));
        assert_eq!(found(&history, "shop"), before);
        // Another VM of its old name.
        history.identify("web", Some(OTHER));
        assert_eq!(found(&history, "web"), (0, false, None));
        let _ = history.put_baseline("web", 9);
        history.record_turn(&[moment("web", sample(NOON_MS + 37 * SPAN_MS, 5))]);
        assert_eq!(found(&history, "web"), (1, false, Some(9)));
        // The first has moved to another host.
        let departed = |since| history.departed(since, &[OTHER]);
        assert_eq!(departed(NOON_MS), [(WEB.to_owned(), 7)]);
        assert_eq!(departed(NOON_MS + 4 * SPAN_MS), []);
        assert_eq!(history.valid_curves(WEB, 0).len(), 2);
        history.flush();
    }
    let history = opened_quietly(&path);
    history.identify("web", Some(OTHER));
    history.identify("shop", Some(WEB));
    assert_eq!(found(&history, "web"), (1, false, Some(9)));
    assert_eq!(found(&history, "shop"), (4, true, Some(7)));
    // Without a UUID it is known by its name alone.
    history.identify("shop", None);
    assert_eq!(found(&history, "shop"), (0, false, None));
}

#[test]
fn the_last_turns_follow_a_vm_that_gets_a_uuid() {
    const WEB: &str = "c7a5fdbd-edaf-9455-926a-d65c16db1809";
    let folder = TempDir::new().unwrap();
    let history = opened_quietly(&folder.path().join("history.redb"));
    let _ = history.put_baseline("web", 7);
    for turn in 0..3 {
        let at = |bytes| sample(NOON_MS + turn * TURN_MS, bytes);
        history.record_turn(&[moment("web", at(5)), moment("mail", at(6))]);
    }
    history.identify("web", Some(WEB));
    let samples = |vm: &str| history.samples(vm, 0, u64::MAX, 100);
    assert_eq!(samples("web").len(), 3);
    assert_eq!(samples("mail").len(), 3);
    assert_eq!(samples("web")[0], sample(NOON_MS, 5));
    // They become means of the same VM.
    history.record_turn(&[moment("mail", sample(NOON_MS + 36 * SPAN_MS, 5))]);
    assert_eq!(samples("web").len(), 1);
    history.identify("web", None);
    assert_eq!(samples("web").len(), 0);
}

#[test]
fn what_was_kept_is_there_when_opened_again() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("new/history.redb");
    let change = SettingsChange {
        min_bytes: Some(4096),
        max_loss: Some(0.05),
        ..SettingsChange::default()
    };
    {
        let history = opened_quietly(&path);
        assert!(!history.paused());
        assert_eq!(history.next_id(), 1);
        assert_eq!(history.put_paused(true), Persistence::OnDisk);
        assert_eq!(history.phase(), None);
        assert_eq!(history.put_phase(Phase::Moving), Persistence::OnDisk);
        assert_eq!(history.put_settings("web", &change), Persistence::OnDisk);
        assert_eq!(history.put_settings("db", &change), Persistence::OnDisk);
        assert_eq!(
            history.put_settings("db", &SettingsChange::default()),
            Persistence::OnDisk
        );
        assert_eq!(history.put_baseline("web", 1 << 30), Persistence::OnDisk);
        assert_eq!(
            history.put_decision(&decision(5, "web", Became::Moving)),
            Persistence::OnDisk
        );
        history.record_turn(&[moment("web", sample(NOON_MS, 100))]);
    }
    let history = opened_quietly(&path);
    assert!(history.paused());
    assert_eq!(history.next_id(), 6);
    assert_eq!(history.phase(), Some(Phase::Moving));
    assert_eq!(history.settings("web"), change);
    assert_eq!(history.settings("db"), SettingsChange::default());
    assert_eq!(history.baseline("web"), Some(1 << 30));
    assert_eq!(history.baseline("db"), None);
    assert_eq!(ids(&history.unfinished()), [5]);
    assert_eq!(
        history.samples("web", 0, u64::MAX, 9),
        [sample(NOON_MS, 100)]
    );
    assert!(history.bytes().unwrap() > 0);
    assert_eq!(history.warnings(), [""; 0]);
}

#[test]
fn decisions_are_listed_newest_first_and_by_vm() {
    for history in [History::nowhere(), {
        let folder = TempDir::new().unwrap();
        opened_quietly(&folder.path().join("history.redb"))
    }] {
        for id in 1..=9 {
            let vm = if id % 2 == 0 { "even" } else { "odd" };
            let _ = history.put_decision(&decision(id, vm, Became::Kept));
        }
        assert_eq!(ids(&history.decisions(None, None, 3)), [9, 8, 7]);
        assert_eq!(ids(&history.decisions(None, Some(3), 9)), [2, 1]);
        assert_eq!(ids(&history.decisions(Some("even"), None, 2)), [8, 6]);
        assert_eq!(ids(&history.decisions(Some("even"), Some(6), 9)), [4, 2]);
        assert!(history.decisions(Some("other"), None, 9).is_empty());
        assert!(history.unfinished().is_empty());
        assert_eq!(history.decision(10), None);
        assert_eq!(history.next_id(), 10);
    }
}

#[test]
fn a_decision_keeps_its_inputs_whatever_becomes_of_it() {
    let history = History::nowhere();
    let mut one = decision(1, "web", Became::Moving);
    one.inputs = Some(inputs());
    let _ = history.put_decision(&one);
    assert_eq!(history.decisions(None, None, 1)[0].inputs, None);
    assert_eq!(history.unfinished(), [one.clone()]);

    let mut listed = history.decisions(None, None, 1).remove(0);
    listed.state = Became::Kept;
    let _ = history.put_decision(&listed);
    one.state = Became::Kept;
    assert_eq!(history.decision(1), Some(one));
    assert!(history.unfinished().is_empty());
}

#[test]
fn old_turns_become_means_and_very_old_ones_go() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("history.redb");
    let history = opened_quietly(&path);
    let turns = 26 * 120;
    for turn in 0..turns {
        let now = NOON_MS + turn * TURN_MS;
        history.record_turn(&[
            moment("web", sample(now, turn)),
            moment("db", sample(now, 7)),
        ]);
    }
    let end = NOON_MS + turns * TURN_MS;
    let all = history.samples("web", 0, u64::MAX, POINTS_MAX);
    assert!(all.is_sorted_by(|a, b| a.unix_ms < b.unix_ms));
    let fine = all.iter().filter(|sample| sample.lost == 1).count();
    assert!((240..=250).contains(&fine), "{fine}");
    // Each mean covers ten turns.
    let coarse: Vec<_> = all.iter().filter(|sample| sample.lost == 10).collect();
    assert_eq!(coarse.len() + fine, all.len());
    assert!((260..=265).contains(&coarse.len()), "{}", coarse.len());
    let first = coarse[0];
    assert!(first.unix_ms + 24 * 3_600_000 + 2 * SPAN_MS > end);
    assert_eq!((first.unix_ms - NOON_MS) / TURN_MS, first.direct_bytes);
    // Halves of the ten sizes up to the last, rounded down each: 2.25 below its half.
    assert_eq!(first.working_set_bytes, Some((first.direct_bytes - 5) / 2));
    assert_eq!(first.misses_per_second, Some(10.0));

    let few = history.samples("web", 0, u64::MAX, 10);
    assert!((5..=10).contains(&few.len()), "{}", few.len());
    let lost = |samples: &[Sample]| samples.iter().map(|sample| sample.lost).sum::<u64>();
    assert_eq!(lost(&few), lost(&all));
    assert_eq!(few.last().unwrap().direct_bytes, turns - 1);
    let some = history.samples("web", end - 10 * TURN_MS, end - 5 * TURN_MS, 99);
    assert_eq!(some.len(), 5);
    assert!(history.samples("web", 5, 5, 9).is_empty());
    assert!(history.samples("web", 9, 5, 9).is_empty());
    assert!(history.samples("nobody", 0, u64::MAX, 9).is_empty());
}

#[test]
fn settings_of_an_earlier_version_are_read_and_all_bounds_are_kept() {
    let settings = (
        Some(1_u64),
        None::<u64>,
        None::<u64>,
        None::<u32>,
        Some(0.05),
        None::<bool>,
    );
    let packed = postcard::to_stdvec(&(None::<u64>, Some(settings), 7_u64)).unwrap();
    let whole = [&packed[..], &VmRecord::NOTHING_MORE].concat();
    let record = postcard::from_bytes::<VmRecord>(&whole).unwrap();
    let change = SettingsChange {
        min_bytes: Some(1),
        max_loss: Some(0.05),
        ..SettingsChange::default()
    };
    assert_eq!((record.change(), record.seen_unix_ms), (change, 7));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("history.redb");
    let change = SettingsChange {
        max_misses_per_second: Some(20.0),
        max_stall: Some(0.01),
        ..SettingsChange::default()
    };
    let kept = opened_quietly(&path).put_settings("web", &change);
    assert_eq!(kept, Persistence::OnDisk);
    assert_eq!(opened_quietly(&path).settings("web"), change);
}

#[test]
fn a_curve_of_an_earlier_version_has_no_misses_per_second() {
    let earlier = (
        4096_u64,
        77_u64,
        Some(5_u64),
        vec![(10_u64, 0.5_f32, 0.25_f32, 1.0_f32)],
    );
    let packed = postcard::to_stdvec(&earlier).unwrap();
    let whole = [&packed[..], &Curve::UNKNOWN].concat();
    let curve = postcard::from_bytes::<Curve>(&whole)
        .unwrap()
        .into_json("web");
    assert_eq!(
        (curve.references, curve.vcpu_seconds_per_second),
        (77, None)
    );
    let point = PointJson {
        size_pages: 10,
        miss_ratio: 0.5,
        low: 0.25,
        high: 1.0,
        misses: None,
    };
    assert_eq!(curve.points, [point]);
}

#[test]
fn kept_curves_have_what_is_uncertain_of_their_sizes() {
    let curve: CurveJson = serde_json::from_str(
        r#"{"schema":1,"vm":"web","page_bytes":4096,"references":7,"baseline_pages":5,"uncertain_pages":300,"points":[
            {"size_pages":1,"miss_ratio":0.5,"low":0.25,"high":0.75}]}"#,
    )
    .unwrap();
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("history.redb");
    opened_quietly(&path).keep_last_curves(NOON_MS, std::slice::from_ref(&curve));
    let kept = opened_quietly(&path).curve_at("web", u64::MAX);
    assert_eq!(kept, Some((NOON_MS, curve)));

    // That of the version before.
    let errors = [1_i16; LOG_ERRORS];
    let before = (
        (4096_u64, 7_u64, Some(5_u64)),
        vec![(1_u64, 0.5_f32, 0.25_f32, 0.75_f32)],
        (Some(1.5), Vec::<(f32, f32, f32)>::new(), vec![errors]),
    );
    let packed = postcard::to_stdvec(&before).unwrap();
    let whole = [&packed[..], &Curve::UNKNOWN].concat();
    let curve = postcard::from_bytes::<Curve>(&whole).unwrap();
    let curve = curve.into_json("web");
    assert_eq!(
        (curve.log_errors_permille, curve.uncertain_pages),
        (vec![errors], 0)
    );
}

#[test]
fn curves_and_heat_of_the_past_are_found() {
    let points = (0..1000_u32).map(|at| PointJson {
        size_pages: u64::from(at) * 10,
        miss_ratio: 1.0 - f64::from(at) / 1000.0,
        low: 0.0,
        high: 1.0,
        misses: Some(MissesJson {
            misses_per_second: 2000.0 - f64::from(at),
            misses_low_per_second: 512.0,
            misses_high_per_second: 4096.0,
        }),
    });
    let curve = CurveJson {
        schema: 1,
        vm: "web".to_owned(),
        page_bytes: 4096,
        references: 77,
        baseline_pages: Some(5),
        vcpu_seconds_per_second: Some(1.5),
        uncertain_pages: 0,
        // Of the first 500 points, the number of the point.
        log_errors_permille: (0..500).map(|at| [at; LOG_ERRORS]).collect(),
        points: points.collect(),
    };
    let history = History::nowhere();
    let mut row = HeatRow {
        unix_ms: 0,
        pages: vec![0, 0, 9],
    };
    for turn in 0..41 {
        let now = NOON_MS + turn * TURN_MS;
        row.pages[0] = u32::try_from(turn).unwrap();
        history.record_turn(&[TurnRecord {
            heat: Some((1 << 20, &row)),
            curve: Some(&curve),
            ..moment("web", sample(now, 1))
        }]);
    }
    let (made, kept) = history.curve_at("web", u64::MAX).unwrap();
    assert!(made > NOON_MS && made.is_multiple_of(SPAN_MS));
    assert_eq!((kept.references, kept.baseline_pages), (77, Some(5)));
    assert!(
        (40..=48).contains(&kept.points.len()),
        "{}",
        kept.points.len()
    );
    let last = kept.points.last().unwrap();
    assert_eq!(last.size_pages, 9990);
    let errors = &kept.log_errors_permille;
    assert!((12..=24).contains(&errors.len()), "{}", errors.len());
    for (point, errors) in kept.points.iter().zip(errors) {
        assert_eq!(u64::from(errors[0].unsigned_abs()) * 10, point.size_pages);
    }
    assert_eq!(
        Some(last.misses),
        curve.points.last().map(|last| last.misses)
    );
    assert_eq!(kept.vcpu_seconds_per_second, Some(1.5));
    // A third of the steps follows each of size, ratio and its logarithm.
    for pair in kept.points.windows(2) {
        assert!(pair[0].miss_ratio - pair[1].miss_ratio < 0.07);
    }
    let (older, _) = history.curve_at("web", made - 1).unwrap();
    assert_eq!(older, made - 2 * SPAN_MS);
    assert!(history.curve_at("web", NOON_MS - 1).is_none());

    let heat = history.heat("web", 0, u64::MAX).unwrap();
    assert_eq!(heat.cell_bytes, 1 << 20);
    let rows: Vec<_> = heat.rows.into_iter().map(|row| row.pages).collect();
    assert_eq!(
        rows,
        [[0, 0, 9], [10, 0, 9], [20, 0, 9], [30, 0, 9], [40, 0, 9]]
    );
    assert!(history.heat("db", 0, u64::MAX).is_none());
}

#[test]
fn a_leap_of_the_clock_drops_nothing_for_a_day() {
    const DAY_SPANS: u64 = 24 * 12;
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("history");
    let record = |history: &History, spans: u64| {
        history.record_turn(&[moment("web", sample(NOON_MS + spans * SPAN_MS, 5))]);
    };
    let oldest = |history: &History| history.samples("web", 0, u64::MAX, 1_000_000)[0].unix_ms;
    let history = opened_quietly(&path);
    (0..12).for_each(|span| record(&history, span));
    let leap = 400 * DAY_SPANS;
    (0..3).for_each(|span| record(&history, leap + span));
    assert_eq!(oldest(&history), NOON_MS);
    // Nor after a restart, or when it is set right.
    drop(history);
    let history = opened_quietly(&path);
    record(&history, leap + 3);
    assert_eq!(oldest(&history), NOON_MS);
    (12..15).for_each(|span| record(&history, span));
    assert_eq!(oldest(&history), NOON_MS);
    // Records grow old again after a day.
    (15..2 * DAY_SPANS).for_each(|span| record(&history, span));
    assert!(oldest(&history) > NOON_MS);
    // A leap that stays is believed in the end.
    (2 * leap..2 * leap + DAY_SPANS - 1).for_each(|span| record(&history, span));
    assert!(oldest(&history) < NOON_MS + leap * SPAN_MS);
    (2 * leap + DAY_SPANS - 1..=2 * leap + DAY_SPANS).for_each(|span| record(&history, span));
    assert!(oldest(&history) > NOON_MS + leap * SPAN_MS);
}

#[test]
fn a_decision_that_a_wrong_clock_dated_ahead_keeps_no_others_beyond_their_age() {
    const HOUR_SPANS: u64 = 12;
    let folder = TempDir::new().unwrap();
    let history = opened_quietly(&folder.path().join("history"));
    let put = |id: u64, unix_ms: u64| {
        let one = Decision {
            unix_ms,
            ..decision(id, "web", Became::Kept)
        };
        let _ = history.put_decision(&one);
    };
    put(1, NOON_MS + 1000 * DAY_MS);
    for hour in 0..48 {
        put(2 + hour, NOON_MS + hour * HOUR_SPANS * SPAN_MS);
    }
    put(50, NOON_MS + 1000 * DAY_MS);
    for spans in 0..=48 * HOUR_SPANS {
        history.record_turn(&[moment("web", sample(NOON_MS + spans * SPAN_MS, 5))]);
    }
    // Of the last day; and the last one, whose true age is unknown.
    let expected: Vec<u64> = (26..=50).rev().collect();
    assert_eq!(ids(&history.decisions(None, None, 1000)), expected);
}

#[test]
fn what_a_wrong_clock_dated_ahead_is_dropped_before_the_oldest() {
    const DAY_SPANS: u64 = 24 * 12;
    let folder = TempDir::new().unwrap();
    let limits = Limits {
        bytes_max: 4 << 20,
        keep: Duration::from_hours(24 * 365),
    };
    let (history, _) = History::open(&folder.path().join("history"), limits).unwrap();
    let record = |spans: u64| {
        history.record_turn(&[moment("web", sample(NOON_MS + spans * SPAN_MS, 5))]);
    };
    (0..12).for_each(record);
    record(3000 * DAY_SPANS);
    (12..2 * DAY_SPANS).for_each(record);
    for id in 1..=100 {
        history.put_decision(&large(id, 50_000));
        record(2 * DAY_SPANS + id);
    }
    let left = history.samples("web", 0, u64::MAX, 1_000_000);
    let days = |sample: &Sample| (sample.unix_ms - NOON_MS) / SPAN_MS / DAY_SPANS;
    assert!(ids(&history.decisions(None, None, 1000)).len() < 95);
    assert_eq!(days(left.last().unwrap()), 2);
    assert!(left.len() > 200, "{}", left.len());
}

/// A decision with this many random characters.
fn large(id: u64, letters: usize) -> Decision {
    let mut noise = id;
    let mut one = decision(id, "web", Became::Kept);
    one.unix_ms = NOON_MS + id * SPAN_MS / 2;
    one.reason = std::iter::repeat_with(|| {
        noise = noise
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        char::from(b' ' + (noise >> 58).to_le_bytes()[0])
    })
    .take(letters)
    .collect();
    one
}

#[test]
fn bytes_are_bounded_the_oldest_going_first() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("history.redb");
    let limits = Limits {
        bytes_max: 4 << 20,
        ..LIMITS
    };
    let (history, _) = History::open(&path, limits).unwrap();
    for id in 1..=200 {
        let one = large(id, 50_000);
        assert_eq!(history.put_decision(&one), Persistence::OnDisk);
        history.record_turn(&[moment("web", sample(one.unix_ms, id))]);
        let bytes = history.bytes().unwrap();
        assert!(bytes <= limits.bytes_max, "{bytes} after {id}");
    }
    let left = ids(&history.decisions(None, None, 1000));
    assert_eq!(left[0], 200);
    assert!((20..150).contains(&left.len()), "{}", left.len());
    assert_eq!(*left.last().unwrap(), 201 - left.len() as u64);
    let samples = history.samples("web", 0, u64::MAX, POINTS_MAX);
    assert_eq!(samples.last().unwrap().direct_bytes, 200);
}

#[test]
fn memory_is_bounded_too() {
    let history = History::nowhere();
    for id in 1..=100 {
        let one = large(id, 200_000);
        assert_eq!(history.put_decision(&one), Persistence::InMemory);
        history.record_turn(&[moment("web", sample(one.unix_ms, id))]);
    }
    let left = ids(&history.decisions(None, None, 1000));
    assert_eq!(left[0], 100);
    assert!((20..60).contains(&left.len()), "{}", left.len());
    let state = history.state();
    let memory = state.memory.as_ref().unwrap();
    assert!(memory.bytes_taken().unwrap() <= MEMORY_BYTES_MAX);
    drop(state);
    assert_eq!(history.bytes(), None);
    assert_eq!(history.warnings(), [""; 0]);
}

#[test]
fn a_file_that_is_not_what_was_written_is_set_aside() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("history.redb");
    for damage in 0..6_u64 {
        {
            let history = History::open(&path, LIMITS).unwrap().0;
            for id in 1..200 {
                let _ = history.put_decision(&decision(id, "web", Became::Kept));
            }
        }
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        let length = file.metadata().unwrap().len();
        match damage {
            0 => fs::write(&path, "no history").unwrap(),
            1 => file.set_len(length / 2).unwrap(),
            2 => file.set_len(100).unwrap(),
            3 => file.write_all_at(&[0x5a; 4096], 0).unwrap(),
            4 => file.set_len(0).unwrap(),
            _ => {
                for page in 1..length / 4096 {
                    file.write_all_at(&[0x5a; 64], page * 4096 + 700).unwrap();
                }
            }
        }
        let damaged = fs::read(&path).unwrap();
        let (history, warnings) = open(&path);
        assert!(
            warnings[0].contains("it is kept as"),
            "{damage}: {warnings:?}"
        );
        assert!(history.began_anew());
        assert_eq!(history.warnings(), [""; 0]);
        assert!(history.decisions(None, None, 9).is_empty());
        assert_eq!(
            history.put_decision(&decision(7, "web", Became::Kept)),
            Persistence::OnDisk
        );
        let aside = warnings[0].split("kept as ").nth(1).unwrap();
        let aside = aside.split(" and a new").next().unwrap();
        assert_eq!(fs::read(aside).unwrap(), damaged, "{damage}");
        // It stays paused until it is resumed, whoever opens it next, who can say why.
        drop(history);
        let (history, warnings) = open(&path);
        assert_eq!(warnings, [""; 0]);
        assert!(history.paused() && history.began_anew());
        let _ = history.put_paused(false);
        drop(history);
        assert!(!opened_quietly(&path).paused());
        fs::remove_file(&path).unwrap();
    }
    let files = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 6);
}

#[test]
fn a_later_schema_is_set_aside() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("history.redb");
    {
        let store = Store::open(&path, 1 << 20).unwrap();
        store.write(true, &|txn| store::put_schema(txn, 2)).unwrap();
    }
    let (_, warnings) = open(&path);
    assert!(
        warnings[0].contains("its schema is 2; this plimsolld supports 1"),
        "{warnings:?}"
    );
}

#[test]
fn a_second_daemon_is_refused() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("history.redb");
    let first = opened_quietly(&path);
    let error = History::open(&path, LIMITS).unwrap_err();
    assert!(
        error.to_string().contains("another plimsolld has"),
        "{error}"
    );
    assert_eq!(first.put_paused(true), Persistence::OnDisk);
}

#[test]
fn without_a_place_to_write_it_goes_on_in_memory() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("file/history.redb");
    fs::write(folder.path().join("file"), "").unwrap();
    let (history, warnings) = open(&path);
    assert!(
        warnings[0].contains("history is kept in memory"),
        "{warnings:?}"
    );
    assert_eq!(history.warnings(), warnings);
    assert_eq!(
        history.put_decision(&decision(3, "web", Became::Moving)),
        Persistence::InMemory
    );
    assert_eq!(ids(&history.unfinished()), [3]);
    fs::remove_file(folder.path().join("file")).unwrap();
    history.state().retry_at = Instant::now();
    assert_eq!(history.put_paused(true), Persistence::OnDisk);
    assert_eq!(history.warnings(), [""; 0]);
    drop(history);
    let history = opened_quietly(&path);
    assert_eq!(ids(&history.unfinished()), [3]);
    assert!(history.paused());
}

#[test]
fn a_file_that_is_removed_is_made_again_with_what_vms_had() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("history.redb");
    let history = opened_quietly(&path);
    assert_eq!(history.put_baseline("web", 5), Persistence::OnDisk);
    fs::remove_file(&path).unwrap();
    assert_eq!(history.put_paused(true), Persistence::InMemory);
    let problem = history.warnings().remove(0);
    assert!(problem.contains("it was removed or replaced"), "{problem}");
    history.state().retry_at = Instant::now();
    assert_eq!(history.put_phase(Phase::Whole), Persistence::OnDisk);
    assert_eq!(history.warnings(), [""; 0]);
    drop(history);
    let history = opened_quietly(&path);
    assert_eq!(history.baseline("web"), Some(5));
    assert!(history.paused());
}

#[test]
fn a_full_disk_is_survived_in_memory_and_caught_up_with() {
    let folder = TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(folder.path()) else {
        return;
    };
    let path = folder.path().join("history.redb");
    let history = opened_quietly(&path);
    assert_eq!(history.put_baseline("web", 5), Persistence::OnDisk);
    let mut id = 0;
    let put = |id| history.put_decision(&large(id, 16_000));
    while history.warnings().is_empty() {
        id += 1;
        assert!(id < 10_000);
        let kept = put(id);
        assert_eq!(kept == Persistence::OnDisk, history.warnings().is_empty());
    }
    let problem = history.warnings().remove(0);
    assert!(problem.contains("No space left on device"), "{problem}");
    assert!(problem.contains("history is kept in memory"), "{problem}");
    for more in 1..=3 {
        assert_eq!(put(id + more), Persistence::InMemory);
        history.state().retry_at = Instant::now();
    }
    id += 3;
    // Records on disk and in memory are returned together.
    let expected: Vec<u64> = (1..=id).rev().take(1000).collect();
    assert_eq!(ids(&history.decisions(None, None, 1000)), expected);
    assert_eq!(history.baseline("web"), Some(5));

    disk.enlarge();
    history.state().retry_at = Instant::now();
    assert_eq!(put(id + 1), Persistence::OnDisk);
    assert_eq!(history.warnings(), [""; 0]);
    let all: Vec<u64> = (1..=id + 1).rev().take(1000).collect();
    assert_eq!(ids(&history.decisions(None, None, 1000)), all);
    drop(history);
    let history = opened_quietly(&path);
    assert_eq!(ids(&history.decisions(None, None, 1000)), all);
    assert_eq!(history.baseline("web"), Some(5));
    drop(history);
}

#[test]
fn a_history_that_could_not_be_created_on_a_full_disk_is_not_a_damaged_one() {
    let folder = TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(folder.path()) else {
        return;
    };
    let path = folder.path().join("history.redb");
    assert!(fs::write(folder.path().join("full"), vec![1; 8 << 20]).is_err());
    let (history, warnings) = open(&path);
    assert!(warnings[0].contains("No space left"), "{warnings:?}");
    drop(history);
    disk.enlarge();
    let history = opened_quietly(&path);
    assert!(!history.paused());
}

/// A file system of limited size, until dropped.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    /// `None` after saying why the test is skipped.
    fn mount(at: &'a Path) -> Option<Self> {
        let options = ["-t", "tmpfs", "-o", "size=4m", "plimsoll-test"];
        if !run("mount", &options, at) {
            skip(
                Lack::Root,
                "a small file system can be mounted by root alone",
            );
            return None;
        }
        Some(Self(at))
    }

    fn enlarge(&self) {
        assert!(run("mount", &["-o", "remount,size=64m"], self.0));
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        run("umount", &["--lazy"], self.0);
    }
}

fn run(command: &str, arguments: &[&str], path: &Path) -> bool {
    let output = Command::new(command).args(arguments).arg(path).output();
    output.is_ok_and(|output| output.status.success())
}

#[test]
fn the_bound_of_a_working_set_is_kept_and_a_mean_of_bounds_is_one() {
    use WorkingSetBound::{AtLeast, AtMost, Estimate};
    let of = |bytes, bound| Sample {
        working_set_bytes: Some(bytes),
        working_set_bound: bound,
        ..sample(1, 8)
    };
    for bound in [None, Some(AtLeast), Some(AtMost), Some(Estimate)] {
        for bytes in [0, 12, (1 << 62) - 1] {
            let stored = StoredSample(of(bytes, bound));
            let packed = postcard::to_stdvec(&stored).unwrap();
            assert_eq!(
                postcard::from_bytes::<StoredSample>(&packed).unwrap(),
                stored
            );
        }
    }
    let mean = |parts: &[(u64, Option<WorkingSetBound>)]| {
        let parts: Vec<_> = parts
            .iter()
            .map(|(bytes, bound)| of(*bytes, *bound))
            .collect();
        let mean = together(&parts).unwrap();
        (mean.working_set_bytes.unwrap(), mean.working_set_bound)
    };
    assert_eq!(mean(&[(2, None), (4, None)]), (3, None));
    assert_eq!(mean(&[(2, Some(Estimate)), (4, None)]), (3, Some(Estimate)));
    assert_eq!(
        mean(&[(2, Some(Estimate)), (4, Some(AtMost))]),
        (3, Some(AtMost))
    );
    let mixed = [(2, Some(Estimate)), (90, Some(AtMost)), (4, Some(AtLeast))];
    assert_eq!(mean(&mixed), (2, Some(AtLeast)));
}

/// Needs are judged by few misses, where a curve falls by little.
#[test]
fn a_kept_curve_tells_where_few_misses_are_left() {
    let step = 2048;
    let points = (1..=200).map(|index: u64| {
        let ratio = (-0.1 * (index - 1) as f64).exp();
        CurvePoint::exact(PageCount(index * step), ratio)
    });
    let whole = MissRatioCurve::new(points.collect(), 100_000).unwrap();
    let baseline = Some(PageCount(200 * step));
    let json = CurveJson::new("web", PageSize::FOUR_KIB, baseline, &whole);
    let kept = Curve::thinned(&json).into_json("web");
    assert!(kept.points.len() <= 48, "{}", kept.points.len());
    let kept = kept.to_curve().unwrap();
    for ratio in [0.5, 0.1, 0.02, 0.005, 0.001] {
        let (found, truth) = (
            kept.size_for(ratio).unwrap(),
            whole.size_for(ratio).unwrap(),
        );
        let over = found.0 as f64 / truth.0 as f64;
        assert!((1.0..1.25).contains(&over), "{ratio}: {over}");
    }
}

#[test]
fn what_a_daemon_recorded_of_a_balloon_is_that_of_its_process() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("history.redb");
    let process = |start_ticks| ProcessId {
        pid: 7,
        start_ticks,
    };
    let record = BalloonRecord {
        total_excludes_balloon: true,
        former_interval_s: Some(7),
    };
    let history = opened_quietly(&path);
    let _ = history.put_baseline("web", 1 << 20);
    let _ = history.put_balloon("web", process(1), record);
    drop(history);
    let history = opened_quietly(&path);
    assert_eq!(history.balloon("web", process(1)), record);
    let none = BalloonRecord::default();
    assert_eq!(history.balloon("web", process(2)), none);
}
