//! A recorded counter stack of any bytes opens or says why not, and gives curves of its windows.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_estimator::CounterStream;

fuzz_target!(|bytes: &[u8]| {
    let Ok(stream) = CounterStream::open(bytes) else {
        return;
    };
    let (references, interval) = (stream.references(), u64::from(stream.options().interval));
    let middle = references / 2 / interval * interval;
    for window in [0..references, 0..middle, middle..references, 1..references] {
        if let Ok(curve) = stream.curve(window.clone()) {
            assert_eq!(curve.references(), window.end - window.start);
        }
    }
});
