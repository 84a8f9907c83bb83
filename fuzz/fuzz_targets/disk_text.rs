//! `msr`, `alibaba` and `tencent` agree with parsers written with `str::split`,
//! whatever pieces the text arrives in.
#![no_main]

use std::collections::HashMap;

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::AccessKind;
use plimsoll_fuzz::{REFERENCES_MAX, is_skippable_frame, naive_request_pages, outcome, text_of};
use plimsoll_source::{Format, Options};

const BLANKS: [char; 4] = [' ', '\t', '\r', '\x0c'];

/// Returns device, kind, first byte and length of a line.
fn naive_request(line: &str, format: Format) -> Option<(String, AccessKind, u128, u128)> {
    let fields: Vec<_> = line.split(',').collect();
    let number = |field: &str| {
        let field = field.trim_matches(BLANKS);
        let digits = !field.is_empty() && field.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| field.parse::<u64>().ok()).flatten()
    };
    let (device, kind, words, offset, length, unit) = match (format, &fields[..]) {
        (Format::MSR, [_, host, disk, kind, offset, length, _]) => {
            number(disk)?;
            (
                format!("{host},{disk}"),
                kind,
                ["read", "write"],
                offset,
                length,
                1,
            )
        }
        (Format::ALIBABA, [device, kind, offset, length, _]) => {
            number(device)?;
            (device.to_string(), kind, ["r", "w"], offset, length, 1)
        }
        (Format::TENCENT, [_, offset, length, kind, device]) => {
            number(device)?;
            (device.to_string(), kind, ["0", "1"], offset, length, 512)
        }
        _ => return None,
    };
    let kind = kind.trim_matches(BLANKS).to_ascii_lowercase();
    let kind = match words.iter().position(|&word| word == kind)? {
        0 => AccessKind::Read,
        _ => AccessKind::Write,
    };
    let [offset, length] = [offset, length].map(|field| Some(number(field)?.checked_mul(unit)?));
    let device = device.trim_matches(BLANKS).to_owned();
    (device.len() <= 128).then_some(())?;
    Some((device, kind, offset?.into(), length?.into()))
}

/// Returns the references before the first line that is none, and that line's number.
fn naive(text: &str, format: Format) -> (Vec<(u64, AccessKind)>, Option<u64>) {
    let header = match format {
        Format::MSR => "timestamp,hostname,disknumber,type,offset,size,responsetime",
        Format::ALIBABA => "device_id,opcode,offset,length,timestamp",
        _ => "timestamp,offset,size,iotype,volumeid",
    };
    let mut references = Vec::new();
    let mut devices = HashMap::new();
    let mut is_first = true;
    for (index, line) in text.split('\n').enumerate() {
        let trimmed = line.trim_matches(BLANKS);
        if trimmed.is_empty() {
            continue;
        }
        if std::mem::take(&mut is_first) && trimmed.to_ascii_lowercase() == header {
            continue;
        }
        let fault = Some(index as u64 + 1);
        let Some((device, kind, offset, length)) = naive_request(line, format) else {
            return (references, fault);
        };
        let number = devices.len() as u128;
        let device = *devices.entry(device).or_insert(number);
        if length == 0 {
            continue;
        }
        if naive_request_pages(&mut references, device, kind, offset, length).is_none() {
            return (references, fault);
        }
        if references.len() > 2 * REFERENCES_MAX {
            return (references, None);
        }
    }
    (references, None)
}

fuzz_target!(|bytes: &[u8]| {
    for format in [Format::MSR, Format::ALIBABA, Format::TENCENT] {
        let options = Options {
            format: Some(format),
            ..Options::default()
        };
        let (outcome, line) = outcome(bytes, &options);
        let Some(text) = text_of(bytes) else {
            return;
        };
        if is_skippable_frame(bytes) || outcome.references.len() > REFERENCES_MAX {
            return;
        }
        assert_eq!((outcome.references, line), naive(text, format));
    }
});
