//! `twitter`: requests of Twitter's caches, comma-separated.
//!
//! ```text
//! timestamp,anonymized key,key size,value size,client id,operation,TTL
//! 0,yDqF:3q:1AJrrJ1nnCJKKrnGx1A,27,0,5027,get,0
//! ```
//!
//! The page is the XXH3-64 hash (seed 0) of the key, in which commas may occur. Sizes are those of key and value together.
//! A client is a device; times are seconds. `get` and `gets` read, `delete` makes no reference and is counted, all other
//! operations write.
//!
//! Source: the description published with the traces (`docs/formats.md`).

use std::io::Read;

use plimsoll_flow::{AccessKind, PageNumber, ReferenceBatch, Source};
use xxhash_rust::xxh3::xxh3_64;

use crate::details::Wanted;
use crate::devices::Devices;
use crate::lines::{Lines, parse_digits};
use crate::row::{FormatRow, Opening};
use crate::spans::Reading;
use crate::{Grouping, Options, SourceError, TraceOption};

/// Operations that write.
const WRITES: [&[u8]; 8] = [
    b"set", b"add", b"replace", b"cas", b"append", b"prepend", b"incr", b"decr",
];

const EXPECTED: &str = "a request like '0,yDqF:3q:1AJrrJ1nnCJKKrnGx1A,27,0,5027,get,0': \
     time, key, size of key, size of value, client, operation, TTL";

/// A line.
struct Request<'a> {
    time_s: u64,
    key: &'a [u8],
    size_bytes: u32,
    client: &'a [u8],
    /// `None` for a request that neither reads nor writes.
    kind: Option<AccessKind>,
}

impl<'a> Request<'a> {
    fn of(line: &'a [u8]) -> Option<Self> {
        let first = memchr::memchr(b',', line)?;
        let (time, mut rest) = (&line[..first], &line[first + 1..]);
        // The other fields are counted from the end, because a key may contain commas.
        let mut last = || {
            let comma = memchr::memrchr(b',', rest)?;
            let field = rest[comma + 1..].trim_ascii();
            rest = &rest[..comma];
            Some(field)
        };
        let (ttl, operation, client) = (last()?, last()?, last()?);
        let (value, key_size) = (last()?, last()?);
        let number = |field: &[u8]| parse_digits(field, 10);
        number(ttl)?;
        number(client)?;
        let size = number(key_size)?.checked_add(number(value)?)?;
        Some(Self {
            time_s: number(time.trim_ascii())?,
            key: rest,
            size_bytes: u32::try_from(size).ok()?,
            client,
            kind: match operation {
                b"get" | b"gets" => Some(AccessKind::Read),
                b"delete" => None,
                operation if WRITES.contains(&operation) => Some(AccessKind::Write),
                _ => return None,
            },
        })
    }
}

/// Reader of `twitter` traces.
struct Reader<R> {
    lines: Lines<R>,
    clients: Devices,
    skipped: u64,
    wanted: Wanted,
    by_client: bool,
}

impl<R: Read> Reader<R> {
    fn new(input: R, name: &str, options: &Options) -> Self {
        let wanted = Wanted::of(options, Grouping::Device);
        Self {
            lines: Lines::new(input, name),
            clients: Devices::new(options.device.as_deref()),
            skipped: 0,
            wanted,
            by_client: wanted.groups || options.device.is_some(),
        }
    }
}

impl<R: Read> Source for Reader<R> {
    type Error = SourceError;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        batch.advance();
        while !batch.is_full() {
            let Some(line) = self.lines.next()? else {
                break;
            };
            if line.trim_ascii().is_empty() {
                continue;
            }
            let request = Request::of(line);
            let time_us = request
                .as_ref()
                .and_then(|r| r.time_s.checked_mul(1_000_000));
            let (Some(request), Some(time_us)) = (request, time_us) else {
                let found = line.to_vec();
                return Err(self.lines.unexpected(EXPECTED, &found));
            };
            let mut client = 0;
            if self.by_client {
                match self.clients.number_of(request.client) {
                    Ok(Some(number)) => client = number,
                    Ok(None) => continue,
                    Err(expected) => {
                        let found = line.to_vec();
                        return Err(self.lines.unexpected(expected, &found));
                    }
                }
            }
            let Some(kind) = request.kind else {
                self.skipped += 1;
                continue;
            };
            batch.push(PageNumber(xxh3_64(request.key)), kind);
            let size_bytes = request.size_bytes;
            self.wanted.push(time_us, size_bytes, client, batch);
        }
        Ok(!batch.is_empty())
    }
}

impl<R: Read> Reading for Reader<R> {
    fn skipped(&self) -> u64 {
        self.skipped
    }

    fn groups(&self) -> Vec<String> {
        self.clients.names()
    }
}

/// `twitter`.
pub(crate) const ROW: FormatRow = FormatRow {
    name: "twitter",
    is_named: |_, _| false,
    is_head: |head| head.line_is(|line| Request::of(line).is_some()),
    also_named: &["csv"],
    options: &[
        TraceOption::Device,
        TraceOption::ByDevice,
        TraceOption::Times,
        TraceOption::Sizes,
    ],
    opening: Opening::Stream(|input, name, options| {
        Ok(Box::new(Reader::new(input, name, options)))
    }),
    writer: None,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::DEVICES_MAX;
    use crate::drained::references_of;
    use AccessKind::{Read as R, Write as W};

    const TRACE: &str = "0,a:b,3,7,11,get,0\r\n\n1,k,x,3,100,12,set,3600\n2,a:b,3,7,11,delete,0\n\
                         3,a:b,3,0,12,incr,0\n";

    fn read(options: &Options) -> (Vec<(u64, AccessKind)>, Reader<&'static [u8]>) {
        let mut reader = Reader::new(TRACE.as_bytes(), "t.csv", options);
        (references_of(&mut reader).unwrap(), reader)
    }

    #[test]
    fn keys_are_hashed_and_may_contain_commas() {
        let [first, second] = [&b"a:b"[..], b"k,x"].map(xxh3_64);
        let (references, reader) = read(&Options::default());
        assert_eq!(references, [(first, R), (second, W), (first, W)]);
        assert_eq!(reader.skipped(), 1);
        let only = Options {
            device: Some("12".to_owned()),
            ..Options::default()
        };
        let (references, reader) = read(&only);
        assert_eq!(
            (references, reader.skipped()),
            (vec![(second, W), (first, W)], 0)
        );
    }

    #[test]
    fn times_sizes_and_clients_are_read_if_asked_for() {
        let options = Options {
            times: true,
            sizes: true,
            groups: Some(Grouping::Device),
            ..Options::default()
        };
        let mut batch = ReferenceBatch::new();
        let mut reader = Reader::new(TRACE.as_bytes(), "t.csv", &options);
        assert!(reader.next_batch(&mut batch).unwrap());
        let details = batch.details();
        assert_eq!(details.times_us, [0, 1_000_000, 3_000_000]);
        assert_eq!(details.sizes_bytes, [10, 103, 3]);
        assert_eq!(details.groups, [0, 1, 1]);
        assert_eq!(reader.groups(), ["11", "12"]);
    }

    #[test]
    fn clients_are_counted_only_if_they_are_asked_for() {
        let requests = (0..=DEVICES_MAX).map(|client| format!("0,k,1,1,{client},get,0\n"));
        let text: String = requests.collect();
        let references = |groups| {
            let options = Options {
                groups,
                ..Options::default()
            };
            references_of(&mut Reader::new(text.as_bytes(), "t.csv", &options))
        };
        assert_eq!(references(None).unwrap().len(), DEVICES_MAX + 1);
        let error = references(Some(Grouping::Device)).unwrap_err().to_string();
        assert!(
            error.contains("line 65537: expected at most 65536"),
            "{error}"
        );
    }

    #[test]
    fn a_line_of_another_shape_is_named() {
        for wrong in [
            "0,k,3,7,11,got,0",
            "0,k,3,7,11,get",
            "x,k,3,7,11,get,0",
            "0,k,3,4294967296,11,get,0",
            "18446744073709551615,k,3,7,11,get,0",
            "0,k,3,7,c,get,0",
        ] {
            let mut reader = Reader::new(wrong.as_bytes(), "t.csv", &Options::default());
            let error = references_of(&mut reader).unwrap_err().to_string();
            assert!(
                error.starts_with("t.csv, line 1: expected a request like"),
                "{error}"
            );
        }
    }
}
