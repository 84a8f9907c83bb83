//! Block I/O requests as text, one a line, in the layouts of published traces.
//!
//! | layout | fields of a line | offset and length | device |
//! |---|---|---|---|
//! | `msr` | `Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime` | bytes | `Hostname,DiskNumber` |
//! | `alibaba` | `device_id,opcode,offset,length,timestamp` | bytes | `device_id` |
//! | `tencent` | `Timestamp,Offset,Size,IOType,VolumeID` | sectors of 512 bytes | `VolumeID` |
//! | `systor` | `Timestamp,Response,IOType,LUN,Offset,Size` | bytes | `LUN` |
//! | `spc` | `ASU,LBA,Size,Opcode,Timestamp`, then any others | sectors of 512 bytes, bytes | `ASU` |
//! | `fiu` | `time pid process LBA size operation major minor MD5` | sectors of 512 bytes | `major minor` |
//!
//! All traces but `systor` have no header; a header with these names is skipped. Fields are not
//! quoted. The order of the lines is the order of the requests; times are read only if asked for: `msr`'s in units of
//! 100 ns, `alibaba`'s in microseconds, `tencent`'s, `systor`'s and `spc`'s in seconds, `fiu`'s in nanoseconds.
//!
//! Source: the descriptions published with the traces (`docs/formats.md`).

use std::io::Read;

use plimsoll_flow::AccessKind;

use crate::TraceOption;
use crate::lines::{Lines, parse_digits, parse_seconds};
use crate::requests::{Request, Requests, SECTOR_BYTES};
use crate::row::{FormatRow, Opening};
use crate::spans::SpanSource;
use crate::spans::{Span, Spans};
use crate::{Options, SourceError};

/// The layout of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// MSR Cambridge, SNIA's IOTTA repository.
    Msr,
    /// Alibaba's block traces of 2020.
    Alibaba,
    /// Tencent's block traces of 2018.
    Tencent,
    /// Fujitsu's traces of a virtual desktop infrastructure, SYSTOR '17.
    Systor,
    /// The trace file format of the Storage Performance Council, as of the traces Financial and WebSearch.
    Spc,
    /// Florida International University's traces with hashes of contents.
    Fiu,
}

impl Layout {
    /// In the order in which they are declared.
    const ALL: [Self; 6] = [
        Self::Msr,
        Self::Alibaba,
        Self::Tencent,
        Self::Systor,
        Self::Spc,
        Self::Fiu,
    ];

    fn header(self) -> &'static str {
        match self {
            Self::Msr => "Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime",
            Self::Alibaba => "device_id,opcode,offset,length,timestamp",
            Self::Tencent => "Timestamp,Offset,Size,IOType,VolumeID",
            Self::Systor => "Timestamp,Response,IOType,LUN,Offset,Size",
            Self::Spc => "ASU,LBA,Size,Opcode,Timestamp",
            Self::Fiu => "time pid process LBA size operation major minor MD5",
        }
    }

    fn expected(self) -> &'static str {
        match self {
            Self::Msr => {
                "a request like '128166372003061629,usr,0,Read,7014609920,24576,41286': \
                 time, host, disk, Read or Write, offset, size, response time"
            }
            Self::Alibaba => {
                "a request like '419,W,8792731648,16384,1577808144360767': \
                 device, R or W, offset, length, time"
            }
            Self::Tencent => {
                "a request like '1538323200,12910952,128,0,1063': \
                 time, offset and size in sectors, 0 or 1, volume"
            }
            Self::Systor => {
                "a request like '1456095145.133076000,0.000806000,R,0,899056122368,131072': \
                 time, response time, R, W or nothing, LUN, offset, size"
            }
            Self::Spc => {
                "a request like '0,20941264,8192,W,0.551706': \
                 unit, offset in sectors, size in bytes, R or W, time"
            }
            Self::Fiu => {
                "a request like '89968195792462 20782 gzip 283193184 8 R 6 0 56f11b711d91a065a2b6458eca924523': \
                 time, process, its name, offset and size in sectors, R or W, device, hash"
            }
        }
    }

    /// Determines the layout from a line, header or request; no line matches two layouts.
    pub(crate) fn of_line(line: &[u8]) -> Option<Self> {
        let line = line.trim_ascii();
        Self::ALL.into_iter().find(|&layout| {
            layout.is_header(line) || layout.request(line).is_some() && layout.is_typical(line)
        })
    }

    fn is_header(self, line: &[u8]) -> bool {
        line.trim_ascii()
            .eq_ignore_ascii_case(self.header().as_bytes())
    }

    /// Whether a request is distinguishable from all other kinds of CSV: five numbers are recognised as Tencent's only
    /// if the first is a time in seconds after the year 2001, and SPC's by a time with a fraction.
    fn is_typical(self, line: &[u8]) -> bool {
        let of_ten_digits = |time: &[u8]| time.len() == 10 && time.iter().all(u8::is_ascii_digit);
        match self {
            Self::Msr | Self::Alibaba | Self::Systor | Self::Fiu => true,
            Self::Tencent => fields::<5>(line).is_some_and(|[time, ..]| of_ten_digits(time)),
            Self::Spc => {
                self.time_us(line).is_some()
                    && first_fields::<5>(line).is_some_and(|fields| fields[4].contains(&b'.'))
            }
        }
    }

    /// The time of a line that is a request.
    fn time_us(self, line: &[u8]) -> Option<u64> {
        let (time, scale): (_, fn(u64) -> Option<u64>) = match self {
            Self::Msr => (fields::<7>(line)?[0], |time| Some(time / 10)),
            Self::Alibaba => (fields::<5>(line)?[4], Some),
            Self::Tencent => (fields::<5>(line)?[0], |time| time.checked_mul(1_000_000)),
            Self::Systor => return parse_seconds(fields::<6>(line)?[0].trim_ascii()),
            Self::Spc => return parse_seconds(first_fields::<5>(line)?[4].trim_ascii()),
            Self::Fiu => (words(line)?.time, |time| Some(time / 1000)),
        };
        scale(parse_digits(time.trim_ascii(), 10)?)
    }

    /// Parses a line.
    fn request(self, line: &[u8]) -> Option<Request<'_>> {
        let number = |field: &[u8]| parse_digits(field.trim_ascii(), 10);
        let sectors = |field: &[u8]| number(field)?.checked_mul(SECTOR_BYTES);
        let request = match self {
            Self::Msr => {
                let [time, host, disk, kind, offset, size, _] = fields(line)?;
                number(disk)?;
                let device = &line[time.len() + 1..][..host.len() + 1 + disk.len()];
                Request {
                    device,
                    kind: Some(kind_of(kind, b"read", b"write")?),
                    offset_bytes: number(offset)?,
                    length_bytes: number(size)?,
                }
            }
            Self::Alibaba => {
                let [device, kind, offset, length, _] = fields(line)?;
                number(device)?;
                Request {
                    device,
                    kind: Some(kind_of(kind, b"r", b"w")?),
                    offset_bytes: number(offset)?,
                    length_bytes: number(length)?,
                }
            }
            Self::Tencent => {
                let [_, offset, size, kind, device] = fields(line)?;
                number(device)?;
                Request {
                    device,
                    kind: Some(kind_of(kind, b"0", b"1")?),
                    offset_bytes: sectors(offset)?,
                    length_bytes: sectors(size)?,
                }
            }
            Self::Systor => {
                let [_, _, kind, device, offset, size] = fields(line)?;
                number(device)?;
                let is_unknown = kind.trim_ascii().is_empty();
                Request {
                    device,
                    // Of one without a response it was not recorded.
                    kind: match is_unknown {
                        true => None,
                        false => Some(kind_of(kind, b"r", b"w")?),
                    },
                    offset_bytes: number(offset)?,
                    length_bytes: number(size)?,
                }
            }
            Self::Spc => {
                let [device, offset, size, kind, _] = first_fields(line)?;
                number(device)?;
                Request {
                    device,
                    kind: Some(kind_of(kind, b"r", b"w")?),
                    offset_bytes: sectors(offset)?,
                    length_bytes: number(size)?,
                }
            }
            Self::Fiu => {
                let words = words(line)?;
                Request {
                    device: words.device,
                    kind: Some(kind_of(words.kind, b"r", b"w")?),
                    offset_bytes: sectors(words.offset)?,
                    length_bytes: sectors(words.size)?,
                }
            }
        };
        Some(Request {
            device: request.device.trim_ascii(),
            ..request
        })
    }
}

/// Splits a line at its commas into exactly `N` fields.
fn fields<const N: usize>(line: &[u8]) -> Option<[&[u8]; N]> {
    let mut rest = Some(line);
    let fields = next_fields(&mut rest)?;
    rest.is_none().then_some(fields)
}

/// Splits a line at its commas into `N` fields, and any others, which are ignored.
fn first_fields<const N: usize>(line: &[u8]) -> Option<[&[u8]; N]> {
    next_fields(&mut Some(line))
}

/// Takes `N` fields from the rest of a line; `None` is left after the last one.
fn next_fields<'a, const N: usize>(rest: &mut Option<&'a [u8]>) -> Option<[&'a [u8]; N]> {
    let mut fields = [&b""[..]; N];
    for field in &mut fields {
        let here = (*rest)?;
        let end = here.iter().position(|&byte| byte == b',');
        *field = &here[..end.unwrap_or(here.len())];
        *rest = end.map(|end| &here[end + 1..]);
    }
    Some(fields)
}

/// Of a line of `fiu`.
struct Words<'a> {
    time: &'a [u8],
    offset: &'a [u8],
    size: &'a [u8],
    kind: &'a [u8],
    /// Its numbers, with what is between them.
    device: &'a [u8],
}

/// Splits a line of `fiu` at its blanks, from both ends: the name of a process may have some.
fn words(line: &[u8]) -> Option<Words<'_>> {
    let line = line.trim_ascii();
    let mut last: [std::ops::Range<usize>; 6] = Default::default();
    let mut rest = line;
    for word in last.iter_mut().rev() {
        let start = rest.iter().rposition(u8::is_ascii_whitespace)? + 1;
        *word = start..rest.len();
        rest = rest[..start].trim_ascii_end();
    }
    let [offset, size, kind, major, minor, hash] = last;
    let is_hash = hash.len() == 32 && line[hash].iter().all(u8::is_ascii_hexdigit);
    let numbers = [&line[major.clone()], &line[minor.clone()]];
    let are_numbers = numbers
        .iter()
        .all(|number| parse_digits(number, 10).is_some());
    // The number and the name of the process follow.
    let time_bytes = rest.iter().position(u8::is_ascii_whitespace)?;
    (is_hash && are_numbers).then(|| Words {
        time: &line[..time_bytes],
        offset: &line[offset],
        size: &line[size],
        kind: &line[kind],
        device: &line[major.start..minor.end],
    })
}

fn kind_of(field: &[u8], read: &[u8], write: &[u8]) -> Option<AccessKind> {
    let field = field.trim_ascii();
    if field.eq_ignore_ascii_case(read) {
        Some(AccessKind::Read)
    } else if field.eq_ignore_ascii_case(write) {
        Some(AccessKind::Write)
    } else {
        None
    }
}

/// Reader of requests in one layout.
pub(crate) struct Reader<R> {
    lines: Lines<R>,
    layout: Layout,
    requests: Requests,
    with_times: bool,
    is_first: bool,
}

impl<R: Read> Reader<R> {
    pub(crate) fn new(input: R, name: &str, layout: Layout, options: &Options) -> Self {
        Self {
            lines: Lines::new(input, name),
            layout,
            requests: Requests::new(options),
            with_times: options.times,
            is_first: true,
        }
    }
}

impl<R: Read> Spans for Reader<R> {
    fn next_span(&mut self) -> Result<Option<Span>, SourceError> {
        while let Some(line) = self.lines.next()? {
            if line.trim_ascii().is_empty() {
                continue;
            }
            if std::mem::take(&mut self.is_first) && self.layout.is_header(line) {
                continue;
            }
            let time_us = match self.with_times {
                true => self.layout.time_us(line),
                false => Some(0),
            };
            let placed = match (self.layout.request(line), time_us) {
                (Some(request), Some(time_us)) => {
                    let span = self.requests.place(request);
                    span.map(|span| span.map(|span| Span { time_us, ..span }))
                }
                _ => Err(self.layout.expected().to_owned()),
            };
            match placed {
                Ok(None) => {}
                Ok(span) => return Ok(span),
                Err(expected) => {
                    let found = line.to_vec();
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

/// The row of the layout at `LAYOUT` in [`Layout::ALL`], which its content identifies, also in a file named `.csv`.
const fn row<const LAYOUT: usize>(name: &'static str) -> FormatRow {
    FormatRow {
        name,
        is_named: |_, _| false,
        is_head: |head| head.line_is(|line| Layout::of_line(line) == Some(Layout::ALL[LAYOUT])),
        also_named: &["csv"],
        options: &[
            TraceOption::Device,
            TraceOption::ByDevice,
            TraceOption::Times,
        ],
        opening: Opening::Stream(|input, name, options| {
            let reader = Reader::new(input, name, Layout::ALL[LAYOUT], options);
            Ok(Box::new(SpanSource::new(reader, options)))
        }),
        writer: None,
    }
}

/// `msr`.
pub(crate) const MSR: FormatRow = row::<{ Layout::Msr as usize }>("msr");

/// `alibaba`.
pub(crate) const ALIBABA: FormatRow = row::<{ Layout::Alibaba as usize }>("alibaba");

/// `tencent`.
pub(crate) const TENCENT: FormatRow = row::<{ Layout::Tencent as usize }>("tencent");

/// `systor`.
pub(crate) const SYSTOR: FormatRow = row::<{ Layout::Systor as usize }>("systor");

/// `spc`.
pub(crate) const SPC: FormatRow = FormatRow {
    is_named: |last, _| last == "spc",
    ..row::<{ Layout::Spc as usize }>("spc")
};

/// `fiu`.
pub(crate) const FIU: FormatRow = FormatRow {
    // As which they were published, although `blkparse` has not written them.
    also_named: &["blkparse"],
    ..row::<{ Layout::Fiu as usize }>("fiu")
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drained::references_of;
    use crate::spans::{Reading, SpanSource};
    use AccessKind::{Read as R, Write as W};
    use plimsoll_flow::{ReferenceBatch, Source as _};

    fn read(
        text: &str,
        layout: Layout,
        device: Option<&str>,
    ) -> Result<(Vec<(u64, AccessKind)>, u64), SourceError> {
        let options = Options {
            device: device.map(str::to_owned),
            ..Options::default()
        };
        let reader = Reader::new(text.as_bytes(), "t.csv", layout, &options);
        let mut source = SpanSource::new(reader, &options);
        let all = references_of(&mut source)?;
        Ok((all, source.skipped()))
    }

    const OTHER: u64 = 1 << 48;

    #[test]
    fn the_same_requests_read_alike_in_every_layout() {
        let msr = "128166372003061629,usr,0,Read,4096,8192,41286\r\n\
                   128166372003061630,usr,1,Write,512,512,1\r\n\
                   128166372003061631,usr,1,write,0,0,1\r\n\
                   128166372003061632,usr,0,READ,4095,1,1\r\n";
        let alibaba = "3,R,4096,8192,1577808000000626\n\n7,W,512,512,1577808000000627\n\
                       7,W,0,0,1577808000000627\n3,r,0,4096,1577808000000629\n";
        let tencent = "1538323200,8,16,0,1063\n1538323200,1,1,1,1064\n\
                       1538323200,1,0,1,1064\n 1538323201 , 0 , 8 , 0 , 1063 ";
        let systor = "1456095145.133076000,0.000806000,R,3,4096,8192\n1456095145.2,0.1,W,4,512,512\n\
                      1456095145.3,,,4,512,512\n1456095145.4,0.1,r,3,0,4096\n";
        let fiu = "89968195792462 20782 gzip 8 16 R 6 0 56f11b711d91a065a2b6458eca924523\n\
                   89968195792463 7 kjournald 0 1 1 W 8 1 56f11b711d91a065a2b6458eca924523\n\
                   89968195792464 7 x 1 0 W 8 1 56f11b711d91a065a2b6458eca924523\n\
                   89968195792465 7 x 0 8 R 6 0 56f11b711d91a065a2b6458eca924523\n";
        let expected = vec![(1, R), (2, R), (OTHER, W), (0, R)];
        for (layout, text, device) in [
            (Layout::Msr, msr, "usr,1"),
            (Layout::Alibaba, alibaba, "7"),
            (Layout::Tencent, tencent, "1064"),
            (Layout::Systor, systor, "4"),
            (Layout::Fiu, fiu, "8 1"),
        ] {
            let whole = (expected.clone(), 1);
            assert_eq!(read(text, layout, None).unwrap(), whole, "{layout:?}");
            let header = format!("{}\n{text}", layout.header());
            assert_eq!(read(&header, layout, None).unwrap(), whole, "{layout:?}");
            let one = (vec![(0, W)], 1);
            assert_eq!(read(text, layout, Some(device)).unwrap(), one, "{layout:?}");
            assert_eq!(read("", layout, None).unwrap(), (vec![], 0));
            for line in [text, &header] {
                let line = line.lines().next().unwrap();
                assert_eq!(Layout::of_line(line.as_bytes()), Some(layout), "{line}");
            }
        }
    }

    #[test]
    fn further_fields_of_spc_are_ignored() {
        let spc = "0,8,8192,W,0.551706,Alpha/NT\n1,1,512,r,0.554041\n\
                   1, 1, 0, R, 1.250720,0x123,5.99,test\n0,7,1,w,2\n";
        let expected = (vec![(1, W), (2, W), (OTHER, R), (0, W)], 1);
        assert_eq!(read(spc, Layout::Spc, None).unwrap(), expected);
        assert_eq!(
            Layout::of_line(spc.lines().next().unwrap().as_bytes()),
            Some(Layout::Spc)
        );
    }

    #[test]
    fn times_are_microseconds_in_every_layout_and_must_be_numbers() {
        let options = Options {
            times: true,
            ..Options::default()
        };
        for (layout, text, times) in [
            (Layout::Msr, "70,usr,0,Read,0,8192,1\n", [7, 7]),
            (Layout::Alibaba, "3,R,0,8192,7\n", [7, 7]),
            (Layout::Tencent, "7,0,16,0,3\n", [7_000_000, 7_000_000]),
            (
                Layout::Systor,
                "7.000001999,1,R,0,0,8192\n",
                [7_000_001, 7_000_001],
            ),
            (Layout::Spc, "3,0,8192,R,0.000007\n", [7, 7]),
            (
                Layout::Fiu,
                "7999 7 x 0 16 R 6 0 56f11b711d91a065a2b6458eca924523\n",
                [7, 7],
            ),
        ] {
            let wrong = match layout {
                Layout::Alibaba | Layout::Spc => text.replace("7\n", "x\n"),
                _ => format!("x{text}"),
            };
            let text = text.to_owned() + &wrong;
            let reader = Reader::new(text.as_bytes(), "t.csv", layout, &options);
            let mut source = SpanSource::new(reader, &options);
            let mut batch = ReferenceBatch::new();
            let error = source.next_batch(&mut batch).unwrap_err();
            assert!(matches!(error, SourceError::Line { line: 2, .. }));
            assert_eq!(batch.details().times_us, times, "{layout:?}");
        }
    }

    #[test]
    fn a_line_of_another_shape_is_named() {
        let error = read("3,R,0,1,2\n3,T,0,1,2\n", Layout::Alibaba, None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "t.csv, line 2: expected a request like '419,W,8792731648,16384,1577808144360767': \
             device, R or W, offset, length, time, found '3,T,0,1,2'"
        );
        for (layout, wrong) in [
            (Layout::Msr, "1,usr,0,Read,0,1"),
            (Layout::Msr, "1,usr,0,Read,0,1,2,3"),
            (Layout::Msr, "1,usr,x,Read,0,1,2"),
            (Layout::Msr, "1,usr,0,Read,-1,1,2"),
            (Layout::Msr, "1,usr,0,Read,18446744073709551615,2,2"),
            (Layout::Alibaba, "3,R,0,4294967296,2"),
            (Layout::Alibaba, "3,R,1152921504606846976,1,2"),
            (Layout::Tencent, "1,36028797018963968,1,0,2"),
            (Layout::Tencent, "1,0,1,2,2"),
            (Layout::Tencent, "Timestamp"),
            (Layout::Systor, "1.0,1,T,0,0,1"),
            (Layout::Systor, "1.0,1,R,x,0,1"),
            (Layout::Systor, "1.0,1,R,0,0,1,"),
            (Layout::Spc, "0,8,512,W"),
            (Layout::Spc, "x,8,512,W,1"),
            (Layout::Spc, "0,8,512,,1"),
            (Layout::Fiu, "1 7 x 0 8 R 6 0 56f1"),
            (Layout::Fiu, "1 0 8 R 6 0 56f11b711d91a065a2b6458eca924523"),
            (
                Layout::Fiu,
                "1 7 x 0 8 R 6 x 56f11b711d91a065a2b6458eca924523",
            ),
            (
                Layout::Fiu,
                "1 7 x 0 8 D 6 0 56f11b711d91a065a2b6458eca924523",
            ),
        ] {
            assert!(read(wrong, layout, None).is_err(), "{wrong}");
        }
    }

    #[test]
    fn other_comma_separated_lines_are_none_of_these() {
        for line in [
            "version,time,op,size,lbn",
            "1,5633898,2a,512,42932745",
            "page,op",
            "1,2,3,0,5",
            "1538323200,8,16,2,1063",
            "1,2,3,R,5",
            "8,0 3 1 0.0 697 Q W 8 + 8 [x]",
            "",
        ] {
            assert_eq!(Layout::of_line(line.as_bytes()), None, "{line}");
        }
    }
}
