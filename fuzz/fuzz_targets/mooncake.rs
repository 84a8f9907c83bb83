//! `mooncake` agrees with a parser that walks JSON values, whatever pieces the text arrives in.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::AccessKind;
use plimsoll_fuzz::{REFERENCES_MAX, is_skippable_frame, outcome, text_of};
use plimsoll_source::{Format, Options};
use serde_json::Value;

/// Returns the blocks of a line. Fields that occur twice, and objects written as lists, are left to the parser under test.
fn naive_request(line: &str) -> Option<Vec<u64>> {
    let value: Value = serde_json::from_str(line).ok()?;
    if let Some(time) = value.get("timestamp").filter(|time| !time.is_null()) {
        time.as_f64()?;
    }
    let blocks = value.get("hash_ids")?.as_array()?.iter();
    blocks.map(Value::as_u64).collect()
}

fn is_left_out(line: &str) -> bool {
    let names = ["timestamp", "hash_ids"];
    let is_twice = names.iter().any(|name| line.matches(name).count() > 1);
    // Values are nested to a limit, fields that are ignored to none.
    let is_deep = line.matches(['[', '{']).count() > 100;
    line.trim_start().starts_with('[') || is_twice || is_deep || line.contains('\\')
}

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        format: Some(Format::MOONCAKE),
        ..Options::default()
    };
    let (outcome, line) = outcome(bytes, &options);
    let Some(text) = text_of(bytes) else {
        return;
    };
    if is_skippable_frame(bytes)
        || outcome.references.len() > REFERENCES_MAX
        || text.split('\n').any(is_left_out)
    {
        return;
    }
    let mut references = Vec::new();
    let mut fault = None;
    for (index, line) in text.split('\n').enumerate() {
        if line.trim_matches([' ', '\t', '\r', '\x0c']).is_empty() {
            continue;
        }
        match naive_request(line) {
            Some(blocks) => {
                references.extend(blocks.iter().map(|&block| (block, AccessKind::Read)))
            }
            None => {
                fault = Some(index as u64 + 1);
                break;
            }
        }
    }
    assert_eq!((outcome.references, line), (references, fault));
});
