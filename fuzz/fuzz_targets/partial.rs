//! A partial state of any bytes is refused, or is that of a slice: it can be written, read and merged again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_estimator::Partial;
use xxhash_rust::xxh3::xxh3_64;

fuzz_target!(|bytes: &[u8]| {
    let _ = Partial::from_bytes(bytes);
    // The same with a checksum that is right, so that the contents are looked at.
    let summed = [bytes, &xxh3_64(bytes).to_le_bytes()].concat();
    let Ok(partial) = Partial::from_bytes(&summed) else {
        return;
    };
    let (references, curve) = (partial.references(), partial.curve());
    let written = partial.into_bytes();
    let mut again = Partial::from_bytes(&written).expect("what was written can be read");
    assert_eq!(again.references(), references);
    assert_eq!(again.curve(), curve);
    let next = Partial::parse(&written).expect("what was written can be read");
    if again.append(next).is_ok() {
        assert_eq!(again.references(), 2 * references);
    }
});
