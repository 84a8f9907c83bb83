//! `mooncake`: requests to language models, each with the blocks of its prompt, a JSON object a line.
//!
//! ```text
//! {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
//! ```
//!
//! A block of tokens (512 in the published traces) is a page, and a request reads its blocks in order. The number of a block stands
//! for all tokens up to its end, so that equal numbers have equal beginnings. Times are milliseconds. Other fields
//! are ignored.
//!
//! Source: the traces published with Mooncake (`docs/formats.md`).

use std::io::Read;

use plimsoll_flow::{AccessKind, PageNumber, ReferenceBatch, Source, Whole as _};
use serde::Deserialize;

use crate::details::Wanted;
use crate::lines::Lines;
use crate::row::{FormatRow, Opening};
use crate::spans::Reading;
use crate::{Grouping, Options, SourceError, TraceOption};

const EXPECTED: &str = "a request like '{\"timestamp\": 27482, \"hash_ids\": [46, 47]}': \
     a JSON object with the blocks as numbers from 0";

/// A line.
#[derive(Debug, Deserialize)]
struct Request {
    timestamp: Option<f64>,
    hash_ids: Vec<u64>,
}

impl Request {
    /// The time, if it is one.
    fn time_us(&self) -> Option<u64> {
        let time_us = self.timestamp? * 1_000.0;
        (0.0..9.2e18)
            .contains(&time_us)
            .then(|| u64::whole(time_us))
    }
}

/// Reader of `mooncake` traces.
struct Reader<R> {
    lines: Lines<R>,
    /// Blocks of the last request that did not fit into the batch.
    pending: std::vec::IntoIter<u64>,
    time_us: u64,
    /// The number of the last request, from 1, modulo 2^32.
    request: u32,
    skipped: u64,
    wanted: Wanted,
}

impl<R: Read> Reader<R> {
    fn new(input: R, name: &str, options: &Options) -> Self {
        Self {
            lines: Lines::new(input, name),
            pending: Vec::new().into_iter(),
            time_us: 0,
            request: 0,
            skipped: 0,
            wanted: Wanted::of(options, Grouping::Request),
        }
    }

    /// Reads the next request; `false` at the end.
    fn next_request(&mut self) -> Result<bool, SourceError> {
        while let Some(line) = self.lines.next()? {
            if line.trim_ascii().is_empty() {
                continue;
            }
            let request = serde_json::from_slice::<Request>(line).ok();
            let time_us = request.as_ref().and_then(Request::time_us);
            let (Some(request), true) = (request, time_us.is_some() || !self.wanted.times) else {
                let found = line.to_vec();
                return Err(self.lines.unexpected(EXPECTED, &found));
            };
            self.time_us = time_us.unwrap_or_default();
            self.request = self.request.wrapping_add(1);
            if request.hash_ids.is_empty() {
                self.skipped += 1;
                continue;
            }
            self.pending = request.hash_ids.into_iter();
            return Ok(true);
        }
        Ok(false)
    }
}

impl<R: Read> Source for Reader<R> {
    type Error = SourceError;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        batch.advance();
        while !batch.is_full() {
            let Some(block) = self.pending.next() else {
                if !self.next_request()? {
                    break;
                }
                continue;
            };
            batch.push(PageNumber(block), AccessKind::Read);
            // Blocks have no sizes, and the format takes no option that asks for them.
            self.wanted.push(self.time_us, 0, self.request, batch);
        }
        Ok(!batch.is_empty())
    }
}

impl<R: Read> Reading for Reader<R> {
    fn skipped(&self) -> u64 {
        self.skipped
    }
}

/// `mooncake`.
pub(crate) const ROW: FormatRow = FormatRow {
    name: "mooncake",
    is_named: |last, _| last == "jsonl",
    is_head: |head| {
        head.line_is(|line| {
            line.trim_ascii_start().starts_with(b"{")
                && memchr::memmem::find(line, b"\"hash_ids\"").is_some()
        })
    },
    also_named: &[],
    options: &[TraceOption::Times, TraceOption::ByRequest],
    opening: Opening::Stream(|input, name, options| {
        Ok(Box::new(Reader::new(input, name, options)))
    }),
    writer: None,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drained::references_of;

    fn request(time_ms: u64, blocks: &[u64]) -> String {
        format!(
            "{{\"timestamp\": {time_ms}, \"input_length\": 9, \"output_length\": 1, \"hash_ids\": {blocks:?}}}\n"
        )
    }

    #[test]
    fn blocks_are_read_in_order_with_the_time_and_number_of_their_request() {
        let trace = request(5, &[1, 2]) + "\r\n" + &request(6, &[]) + &request(7, &[1, u64::MAX]);
        let options = Options {
            times: true,
            groups: Some(Grouping::Request),
            ..Options::default()
        };
        let mut batch = ReferenceBatch::new();
        let mut reader = Reader::new(trace.as_bytes(), "t.jsonl", &options);
        assert!(reader.next_batch(&mut batch).unwrap());
        assert_eq!(batch.pages(), [1, 2, 1, u64::MAX].map(PageNumber));
        assert_eq!(batch.details().times_us, [5_000, 5_000, 7_000, 7_000]);
        assert_eq!(batch.details().groups, [1, 1, 3, 3]);
        assert_eq!(reader.skipped(), 1);
        assert!(!reader.next_batch(&mut batch).unwrap());
    }

    #[test]
    fn a_request_of_more_blocks_than_a_batch_is_continued_in_the_next() {
        let blocks: Vec<_> = (0..9_000).collect();
        let trace = request(0, &blocks) + &request(1, &blocks);
        let options = Options {
            groups: Some(Grouping::Request),
            ..Options::default()
        };
        let mut reader = Reader::new(trace.as_bytes(), "t.jsonl", &options);
        let mut batch = ReferenceBatch::new();
        let mut groups = Vec::new();
        while reader.next_batch(&mut batch).unwrap() {
            assert!(batch.len() <= ReferenceBatch::CAPACITY);
            groups.extend_from_slice(&batch.details().groups);
        }
        assert_eq!(groups, [vec![1; 9_000], vec![2; 9_000]].concat());
    }

    #[test]
    fn what_is_no_request_is_named() {
        for wrong in [
            "{\"timestamp\": 1}",
            "{\"hash_ids\": [-1]}",
            "{\"hash_ids\": [1]",
            "[1]",
            "{\"hash_ids\": [18446744073709551616]}",
        ] {
            let mut reader = Reader::new(wrong.as_bytes(), "t", &Options::default());
            let error = references_of(&mut reader).unwrap_err().to_string();
            assert!(
                error.starts_with("t, line 1: expected a request like"),
                "{error}"
            );
        }
        let without_time = "{\"hash_ids\": [1]}";
        let mut reader = Reader::new(without_time.as_bytes(), "t", &Options::default());
        assert_eq!(references_of(&mut reader).unwrap().len(), 1);
        for wrong in [without_time, "{\"timestamp\": -1, \"hash_ids\": [1]}"] {
            let options = Options {
                times: true,
                ..Options::default()
            };
            let mut reader = Reader::new(wrong.as_bytes(), "t", &options);
            assert!(references_of(&mut reader).is_err(), "{wrong}");
        }
    }
}
