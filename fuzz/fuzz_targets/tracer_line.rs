//! What a tracer prints: a line is refused, or its numbers are within their ranges, and what is written of it is read as the
//! same. A curve in it can be drawn at any size.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_protocol::byte_curve::ByteCurve;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::tracer::TracerLine;

fn check(curve: &CurveJson) {
    let Ok(curve) = ByteCurve::new(curve) else {
        return;
    };
    let end_bytes = curve.end_bytes();
    for bytes in [0, 1, 4096, end_bytes / 2, end_bytes, u64::MAX] {
        let point = curve.at(bytes);
        assert!((0.0..=1.0).contains(&point.miss_ratio), "{point:?}");
        for baseline_bytes in [0, end_bytes, u64::MAX] {
            if let Some(relative) = curve.relative(bytes, baseline_bytes) {
                assert!(relative.expected >= 0.0, "{relative:?}");
            }
        }
    }
    assert!(curve.sizes(end_bytes, 12, &[7]).len() <= 25);
}

fuzz_target!(|bytes: &[u8]| {
    if let Ok(curve) = serde_json::from_slice(bytes) {
        check(&curve);
    }
    let Ok(line) = TracerLine::read(bytes) else {
        return;
    };
    let text = line.write().unwrap();
    assert_eq!(TracerLine::read(text.as_bytes()).unwrap(), line, "{text}");
    match &line {
        TracerLine::Period(period) => {
            assert!(period.seconds > 0.0 && period.tracking_rate > 0.0);
            period.curve.iter().flatten().for_each(check);
        }
        TracerLine::Final(last) => last.curve.iter().chain(&last.aet_curve).for_each(check),
    }
});
