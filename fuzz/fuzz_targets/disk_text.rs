//! Layouts of block requests agree with parsers written with `str::split`, whatever pieces the text arrives in.
#![no_main]

use std::collections::HashMap;

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::AccessKind;
use plimsoll_fuzz::{REFERENCES_MAX, is_skippable_frame, naive_request_pages, outcome, text_of};
use plimsoll_source::{Format, Options};

const BLANKS: [char; 4] = [' ', '\t', '\r', '\x0c'];

/// Returns device, kind (`None` if it is not known), first byte and length of a line.
fn naive_request(line: &str, format: Format) -> Option<(String, Option<AccessKind>, u128, u128)> {
    let fields: Vec<_> = match format {
        Format::FIU => line.split(BLANKS).filter(|word| !word.is_empty()).collect(),
        _ => line.split(',').collect(),
    };
    let number = |field: &str| {
        let field = field.trim_matches(BLANKS);
        let digits = !field.is_empty() && field.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| field.parse::<u64>().ok()).flatten()
    };
    let (device, kind, words, offset, length, units) = match (format, &fields[..]) {
        (Format::MSR, [_, host, disk, kind, offset, length, _]) => {
            number(disk)?;
            (
                format!("{host},{disk}"),
                kind,
                ["read", "write"],
                offset,
                length,
                [1, 1],
            )
        }
        (Format::ALIBABA, [device, kind, offset, length, _]) => {
            number(device)?;
            (device.to_string(), kind, ["r", "w"], offset, length, [1, 1])
        }
        (Format::TENCENT, [_, offset, length, kind, device]) => {
            number(device)?;
            (
                device.to_string(),
                kind,
                ["0", "1"],
                offset,
                length,
                [512, 512],
            )
        }
        (Format::SYSTOR, [_, _, kind, device, offset, length]) => {
            number(device)?;
            (device.to_string(), kind, ["r", "w"], offset, length, [1, 1])
        }
        (Format::SPC, [device, offset, length, kind, _, ..]) => {
            number(device)?;
            (
                device.to_string(),
                kind,
                ["r", "w"],
                offset,
                length,
                [512, 1],
            )
        }
        (Format::FIU, [_, _, .., offset, length, kind, major, minor, hash]) => {
            let is_hash = hash.len() == 32 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
            (is_hash && number(major).is_some() && number(minor).is_some()).then_some(())?;
            // With what is between them.
            let line = line.trim_matches(BLANKS);
            let line = line.strip_suffix(hash)?.trim_matches(BLANKS);
            let before = line.strip_suffix(minor)?.trim_end_matches(BLANKS);
            let device = &line[before.strip_suffix(major)?.len()..];
            (
                device.to_owned(),
                kind,
                ["r", "w"],
                offset,
                length,
                [512, 512],
            )
        }
        _ => return None,
    };
    let kind = kind.trim_matches(BLANKS).to_ascii_lowercase();
    let kind = match words.iter().position(|&word| word == kind) {
        Some(0) => Some(AccessKind::Read),
        Some(_) => Some(AccessKind::Write),
        None => (format == Format::SYSTOR && kind.is_empty()).then_some(None)?,
    };
    let in_bytes = |field: &str, unit| Some(number(field)?.checked_mul(unit)?);
    let (offset, length) = (in_bytes(offset, units[0]), in_bytes(length, units[1]));
    let device = device.trim_matches(BLANKS).to_owned();
    (device.len() <= 128).then_some(())?;
    Some((device, kind, offset?.into(), length?.into()))
}

/// Returns the references before the first line that is none, and that line's number.
fn naive(text: &str, format: Format) -> (Vec<(u64, AccessKind)>, Option<u64>) {
    let header = match format {
        Format::MSR => "timestamp,hostname,disknumber,type,offset,size,responsetime",
        Format::ALIBABA => "device_id,opcode,offset,length,timestamp",
        Format::SYSTOR => "timestamp,response,iotype,lun,offset,size",
        Format::SPC => "asu,lba,size,opcode,timestamp",
        Format::FIU => "time pid process lba size operation major minor md5",
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
        let Some(kind) = kind.filter(|_| length > 0) else {
            continue;
        };
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
    for format in [
        Format::MSR,
        Format::ALIBABA,
        Format::TENCENT,
        Format::SYSTOR,
        Format::SPC,
        Format::FIU,
    ] {
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
