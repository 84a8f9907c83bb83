//! `blkparse`: the default output of `blkparse` for a recorded `blktrace`.
//!
//! ```text
//!   8,0    3        1     0.000000000   697  Q   W 223490 + 8 [kjournald]
//!   device cpu sequence   time          pid  |   | sector + sectors [process]
//!                                       action   R or W, with D for discards, F for flushes
//! ```
//!
//! A request has several events; one kind of event is read, by default `Q`, when it
//! is queued: the request of the file system, before requests are merged.
//! Discards, flushes and pass-through commands yield no reference and are counted.
//! Messages and other events are skipped. The first line that begins with `CPU` or
//! `Total` starts the summary, in which only events are read; elsewhere a line that
//! is not an event is an error, because it may be a damaged event.

use std::fmt;
use std::io::Read;
use std::str::FromStr;

use plimsoll_flow::AccessKind;

use crate::TraceOption;
use crate::lines::{Lines, parse_digits, parse_seconds};
use crate::requests::{Request, Requests, SECTOR_BYTES};
use crate::row::{FormatRow, Opening};
use crate::spans::SpanSource;
use crate::spans::{Span, Spans};
use crate::{Options, SourceError};

/// The event of a block request that counts as its reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum BlockEvent {
    /// `Q`: the request was queued.
    #[default]
    Queue,
    /// `D`: the request, possibly merged with others, was issued to the driver.
    Issue,
    /// `C`: the request was completed.
    Complete,
}

impl BlockEvent {
    /// Every event.
    pub const ALL: [Self; 3] = [Self::Queue, Self::Issue, Self::Complete];

    /// The character that `blkparse` prints, and the event's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queue => "Q",
            Self::Issue => "D",
            Self::Complete => "C",
        }
    }
}

impl fmt::Display for BlockEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for BlockEvent {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let mut all = Self::ALL.into_iter();
        let event = all.find(|event| event.name() == name);
        event.ok_or_else(|| "events are Q (queued), D (issued) and C (completed)".to_owned())
    }
}

const EXPECTED: &str =
    "an event like '8,0 3 1 0.000000000 697 Q W 223490 + 8 [kjournald]', or the summary";

/// Reader of `blkparse` traces.
pub(crate) struct Reader<R> {
    lines: Lines<R>,
    requests: Requests,
    event: BlockEvent,
    in_summary: bool,
    with_times: bool,
}

impl<R: Read> Reader<R> {
    pub(crate) fn new(input: R, name: &str, options: &Options) -> Self {
        Self {
            lines: Lines::new(input, name),
            requests: Requests::new(options),
            event: options.block_event.unwrap_or_default(),
            in_summary: false,
            with_times: options.times,
        }
    }
}

impl<R: Read> Spans for Reader<R> {
    fn next_span(&mut self) -> Result<Option<Span>, SourceError> {
        while let Some(line) = self.lines.next()? {
            let placed = match Event::of(line) {
                Some(event) if event.action != self.event.name().as_bytes() => continue,
                Some(event) => {
                    let time_us = match self.with_times {
                        true => parse_seconds(event.time),
                        false => Some(0),
                    };
                    match (event.request(), time_us) {
                        (Some(request), Some(time_us)) => {
                            let span = self.requests.place(request);
                            span.map(|span| span.map(|span| Span { time_us, ..span }))
                        }
                        _ => Err(EXPECTED.to_owned()),
                    }
                }
                None if is_summary(line) => {
                    self.in_summary = true;
                    continue;
                }
                None if self.in_summary || is_empty(line) => continue,
                None => Err(EXPECTED.to_owned()),
            };
            match placed {
                Ok(None) => {}
                Ok(span) => return Ok(span),
                Err(expected) => {
                    let found = line.trim_ascii().to_vec();
                    return Err(self.lines.unexpected(expected, &found));
                }
            }
        }
        Ok(None)
    }

    fn skipped(&self) -> u64 {
        self.requests.skipped()
    }

    fn groups(&self) -> Vec<String> {
        self.requests.devices()
    }
}

/// Whether a line is an event; used to recognise the format.
pub(crate) fn is_event(line: &[u8]) -> bool {
    Event::of(line).is_some()
}

/// Whether a line can be skipped: the output of `blkparse` begins with the names of the files it reads.
fn is_empty(line: &[u8]) -> bool {
    let line = line.trim_ascii();
    line.is_empty() || line.starts_with(b"Input file ")
}

fn is_summary(line: &[u8]) -> bool {
    line.starts_with(b"CPU") || line.starts_with(b"Total")
}

/// A parsed event line.
struct Event<'a> {
    device: &'a [u8],
    time: &'a [u8],
    action: &'a [u8],
    /// The rest of the line, whose form depends on the action.
    rest: &'a [u8],
}

impl<'a> Event<'a> {
    fn of(line: &'a [u8]) -> Option<Self> {
        let mut rest = line;
        let device = word(&mut rest);
        let comma = memchr::memchr(b',', device)?;
        let is_number = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
        if !is_number(&device[..comma]) || !is_number(&device[comma + 1..]) {
            return None;
        }
        let [cpu, sequence, time, process] = [(); 4].map(|()| word(&mut rest));
        let seconds = time
            .iter()
            .all(|byte| byte.is_ascii_digit() || *byte == b'.');
        if ![cpu, sequence, process].into_iter().all(is_number) || time.is_empty() || !seconds {
            return None;
        }
        let action = word(&mut rest);
        (!action.is_empty()).then_some(Self {
            device,
            time,
            action,
            rest,
        })
    }

    /// Parses the rest of a queued, issued or completed request: `W 223490 + 8 [kjournald]`.
    fn request(&self) -> Option<Request<'a>> {
        let mut rest = self.rest;
        let kind = kind_of(word(&mut rest));
        let mut request = Request {
            device: self.device,
            kind,
            offset_bytes: 0,
            length_bytes: 0,
        };
        let [sector, plus, sectors] = [(); 3].map(|()| word(&mut rest));
        // A request that neither reads nor writes may have any text here; a flush without data has only a process, and
        // a pass-through command its bytes in parentheses, `36 (12 00 00 00 24 00 ..) [udevd]`, without its length once
        // it is completed.
        let is_end = |word: &[u8]| word.starts_with(b"[") || word.starts_with(b"(");
        if kind.is_none() || is_end(sector) {
            return Some(request);
        }
        request.offset_bytes = parse_digits(sector, 10)?.checked_mul(SECTOR_BYTES)?;
        if plus == b"+" {
            request.length_bytes = parse_digits(sectors, 10)?.checked_mul(SECTOR_BYTES)?;
        } else if !is_end(plus) {
            return None;
        }
        Some(request)
    }
}

/// Removes and returns the next word.
fn word<'a>(rest: &mut &'a [u8]) -> &'a [u8] {
    let text = rest.trim_ascii_start();
    let end = text.iter().position(u8::is_ascii_whitespace);
    let (word, after) = text.split_at(end.unwrap_or(text.len()));
    *rest = after;
    word
}

/// Distinguishes reads from writes by the character of the operation, which may be preceded by an `F` if the
/// disk's cache is flushed first.
fn kind_of(letters: &[u8]) -> Option<AccessKind> {
    match letters.strip_prefix(b"F").unwrap_or(letters).first()? {
        b'R' => Some(AccessKind::Read),
        b'W' => Some(AccessKind::Write),
        _ => None,
    }
}

/// `blkparse`.
pub(crate) const ROW: FormatRow = FormatRow {
    name: "blkparse",
    is_named: |last, _| last == "blkparse",
    is_head: |head| head.line_is(is_event),
    also_named: &[],
    options: &[
        TraceOption::Device,
        TraceOption::Event,
        TraceOption::ByDevice,
        TraceOption::Times,
    ],
    opening: Opening::Stream(|input, name, options| {
        let reader = Reader::new(input, name, options);
        Ok(Box::new(SpanSource::new(reader, options)))
    }),
    writer: None,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drained::references_of;
    use crate::spans::{Reading, SpanSource};
    use AccessKind::{Read as R, Write as W};

    fn read(
        text: &str,
        event: &str,
        device: Option<&str>,
    ) -> Result<(Vec<(u64, AccessKind)>, u64), SourceError> {
        let options = Options {
            block_event: Some(event.parse().unwrap()),
            device: device.map(str::to_owned),
            ..Options::default()
        };
        let mut source = SpanSource::new(
            Reader::new(text.as_bytes(), "t.blkparse", &options),
            &options,
        );
        let all = references_of(&mut source)?;
        Ok((all, source.skipped()))
    }

    const TRACE: &str = "Input file sda.blktrace.0 added
  8,0    3        1     0.000000000   697  Q   W 223490 + 8 [kjournald]
  8,0    3        2     0.000001829   697  G   W 223490 + 8 [kjournald]
  8,0    3        3     0.000002197   697  P   N [kjournald]
  8,0    3        0     0.000002500     0  m   N cfq697 insert_request
  8,0    3        4     0.000006050   697  Q  RA 223498 + 1 [kjournald]
  8,0    3        5     0.000007050   697  M  RA 223498 + 1 [kjournald]
  8,0    3        6     0.000008050   697  Q FWFS 16 + 8 [kjournald]
  8,0    3        7     0.000008050   697  Q  FN [kjournald]
  8,0    3        7     0.000008050   697  Q FWS [kjournald]
  8,0    3        8     0.000009050   697  Q  DS 0 + 4096 [fstrim]
  8,1    3        9     0.000009090   697  Q  WS 16 + 8 [a name]
  8,0    3       10     0.000009100   697  A  WS 40 + 8 <- (8,1) 16
  8,0    3       11     0.000009300   697  X  WS 40 / 44 [a name]
  8,0    3       12     0.000013914   697  D   W 223490 + 9 [kjournald]
  8,0    3       13     0.000023914     0  C   W 223490 + 9 [0]
CPU3 (8,0):
 Reads Queued:           1,        1KiB\t Writes Queued:           3,       12KiB
Total (8,0):
Throughput (R/W): 0KiB/s / 0KiB/s
Events (8,0): 13 entries
Skips: 0 forward (0 -   0.0%)
";

    #[test]
    fn the_time_of_an_event_is_in_microseconds() {
        let time_us = |time: &str| {
            let line = format!("8,0 3 1 {time} 697 Q W 8 + 8 [x]");
            parse_seconds(Event::of(line.as_bytes()).unwrap().time)
        };
        assert_eq!(time_us("12.034567899"), Some(12_034_567));
        assert_eq!(time_us("12.5"), Some(12_500_000));
        assert_eq!(time_us("12"), Some(12_000_000));
        assert_eq!(time_us("1.2.3"), None);
        assert_eq!(time_us("99999999999999.0"), None);
    }

    #[test]
    fn one_event_of_each_request_makes_its_references() {
        let other = 1 << 48;
        // Sector 223490 is the third sector of page 27936, so eight sectors extend into the next page.
        let queued = vec![(27936, W), (27937, W), (27937, R), (2, W), (other + 2, W)];
        assert_eq!(read(TRACE, "Q", None).unwrap(), (queued, 3));
        let merged = vec![(27936, W), (27937, W)];
        assert_eq!(read(TRACE, "D", None).unwrap(), (merged.clone(), 0));
        assert_eq!(read(TRACE, "C", None).unwrap(), (merged, 0));
        assert_eq!(read(TRACE, "Q", Some("8,1")).unwrap(), (vec![(2, W)], 0));
        assert!("M".parse::<BlockEvent>().is_err());
    }

    #[test]
    fn pass_through_commands_yield_no_reference() {
        let text =
            "  8,16   1        9     0.331614356  4184  D   R 36 (12 00 00 00 24 00 ..) [ata_id]
  8,16   1       10     0.331630921    13  C   R (12 00 00 00 24 00 ..) [0]
  8,16   1       11     0.331640580  4184  D   R 512 [ata_id]
  8,16   1       12     0.331642169    13  C  WS 0 (    4813) [0]
";
        assert_eq!(read(text, "D", None).unwrap(), (vec![], 2));
        assert_eq!(read(text, "C", None).unwrap(), (vec![], 2));
    }

    #[test]
    fn a_line_that_may_have_been_an_event_is_named() {
        for wrong in [
            "8,0 3 1 0.0 697 Q W 1 8",
            "8,0 3 1 0.0 697 Q W x + 8",
            "8,0 3 1 0.0 697 Q W 36028797018963968 + 8",
            "8,0 3 1 0.0 697 Q W",
            "8,0 3 1 0.0",
            "8,0 3 1 0.0 697 Q W 0 + 8388608",
            "x",
        ] {
            let text = format!("8,0 3 1 0.0 697 Q W 8 + 8\n{wrong}\n");
            let error = read(&text, "Q", None).unwrap_err();
            assert!(
                matches!(error, SourceError::Line { line: 2, .. }),
                "{wrong}: {error}"
            );
        }
    }

    #[test]
    fn an_event_is_told_from_other_lines() {
        let lines = TRACE.lines().filter(|line| is_event(line.as_bytes()));
        assert_eq!(lines.count(), 15);
        for line in [
            "",
            "1,2",
            "8,0 3 1 0.0 697",
            "I  04001000,3",
            "8,0 3 x 0.0 697 Q W",
        ] {
            assert!(!is_event(line.as_bytes()), "{line}");
        }
    }
}
