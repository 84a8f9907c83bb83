//! The record of a counter stack: every count, and the curve of any window derived from it.
//!
//! Counts from all starting times determine the curve of every part of the stream. For a window `from..to`, the
//! counters that began at `from` or later are those of that part taken as a stream of its own, whose first
//! references miss. Pages last used before `from` are distinguished by the counter that began
//! there or, if it was pruned, to within its neighbours.
//!
//! **Bytes.** Little-endian; `varint` is 7 bits a byte, low ones first, the high bit set on all bytes but the last, of at
//! most 10 bytes; `zigzag` is a varint of `(n << 1) ^ (n >> 63)`.
//!
//! ```text
//! header, 36 bytes
//!    0  8  magic "PLIMCSTK"
//!    8  4  version, 2; 1 is read too
//!   12  2  precision
//!   14  2  binary logarithm of the bytes in a page; 0 in version 1, which does not record it
//!   16  4  interval, in references
//!   20  4  delta, in 2^-24
//!   24  8  seed
//!   32  4  CRC-32 (IEEE) of the 32 bytes before
//! record, one for each interval
//!    varint  length of the payload in bytes
//!    payload
//!    4       CRC-32 of the payload, begun with the previous record's (the header's, for the first)
//! payload
//!    varint  references << 1 | last. All but the last record have as many as the interval.
//!    varint  distinct pages of the interval
//!    varint  entries of the list that follows: reuses within the interval, by distance
//!            varint buckets skipped, varint reuses in this one (at least 1)
//!    zigzag  for each level counted and each of its counters, younger ones first: the next younger
//!            one's rise minus this one's
//! ```
//!
//! A distance below 32 is its own bucket; above, each power of two has 16. Which levels are counted after which
//! interval, and which counters exist, follows from the counts (`ladder`). The last record counts all levels.
//!
//! A record that is truncated or broken ends the stream, because later records cannot be decoded without it.
//! The number of lost bytes is reported. Memory is allocated only in proportion to the available bytes.
//!
//! Source: [Wires14] §3.2, §4 (windows, and the record of counts instead of counters).

mod coding;
mod column;
mod player;
mod reader;
mod window;
mod writer;

pub use reader::CounterStream;
pub use window::StreamWindow;
pub use writer::StreamWriter;

use std::io;

use plimsoll_flow::CurveError;

use super::CounterStacksError;

const VERSION: u32 = 2;
const HEADER_BYTES: usize = 36;
const CRC_BYTES: usize = 4;

/// Why a recorded stream yields no curve. The stream is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// Reading failed.
    #[error("cannot read the recorded stream")]
    Read(#[source] io::Error),
    /// The file is not a recorded stream, or its header is damaged.
    #[error("this is not a recorded counter stream, or its header is damaged")]
    NoStream,
    /// Recorded by a later version of this program.
    #[error("the recorded stream has version {version}; only those up to {VERSION} are supported")]
    Version {
        /// The version in its header.
        version: u32,
    },
    /// The recorded options are invalid.
    #[error("the recorded stream's options are invalid")]
    Options(#[source] CounterStacksError),
    /// A window does not begin or end at an interval border or at the stream's end.
    #[error("a window cannot begin or end at reference {at}, inside an interval of {interval}")]
    InsideInterval {
        /// The requested start or end of the window.
        at: u64,
        /// Length of an interval, in references.
        interval: u32,
    },
    /// The window is empty or reaches beyond the end.
    #[error("the window {from}..{to} is empty or not within the {references} references recorded")]
    NoWindow {
        /// First reference of the window.
        from: u64,
        /// First reference after it.
        to: u64,
        /// Number of recorded references that can be read.
        references: u64,
    },
    /// The window has no references.
    #[error(transparent)]
    Curve(#[from] CurveError),
}

#[cfg(test)]
mod tests {
    use super::coding::{bucket_of, floor_of, put_varint, put_zigzag, take_varint, take_zigzag};
    use super::*;
    use crate::curve::counter_stacks::{
        CounterStacks, CounterStacksOptions, DELTA_MAX, INTERVAL_MAX,
    };
    use crate::curve::lru::ExactLru;
    use crate::estimator::Estimator as _;
    use crate::parts::streams::{Random, batch_of, curve_of, cycle, uniform, zipf};
    use plimsoll_flow::MissRatioCurve;
    use plimsoll_flow::{PageCount, PageSize};
    use proptest::prelude::*;
    use std::io::Write;

    const PAGE_SIZE: PageSize = PageSize::FOUR_KIB;

    fn options(interval: u32, delta: f64, seed: u64) -> CounterStacksOptions {
        CounterStacksOptions {
            precision: 12,
            interval,
            delta,
            seed,
        }
    }

    fn recorded(options: CounterStacksOptions, pages: &[u64]) -> Vec<u8> {
        let mut writer = StreamWriter::new(options, PAGE_SIZE, Vec::new()).unwrap();
        writer.observe(&batch_of(pages.iter().copied()));
        writer.finish().unwrap()
    }

    fn counted(options: CounterStacksOptions, pages: &[u64]) -> MissRatioCurve {
        let mut stacks = CounterStacks::new(options).unwrap();
        curve_of(&mut stacks, pages.iter().copied())
    }

    /// Where records begin, and where the last one ends.
    fn borders(bytes: &[u8]) -> Vec<usize> {
        let mut at = HEADER_BYTES;
        let mut borders = vec![at];
        while at < bytes.len() {
            let mut rest = &bytes[at..];
            let length = take_varint(&mut rest).unwrap() as usize;
            at = bytes.len() - rest.len() + length + CRC_BYTES;
            borders.push(at);
        }
        borders
    }

    /// The same records with valid checksums, whatever their contents.
    fn resealed(bytes: &[u8], payloads: &[Vec<u8>]) -> Vec<u8> {
        let mut sealed = bytes[..HEADER_BYTES].to_vec();
        let mut crc = u32::from_le_bytes(bytes[32..36].try_into().unwrap());
        for payload in payloads {
            put_varint(&mut sealed, payload.len() as u64);
            sealed.extend(payload);
            let mut hasher = crc32fast::Hasher::new_with_initial(crc);
            hasher.update(payload);
            crc = hasher.finalize();
            sealed.extend(crc.to_le_bytes());
        }
        sealed
    }

    fn assert_same(a: &MissRatioCurve, b: &MissRatioCurve) {
        assert_eq!(a.references(), b.references());
        for size in (0..400).chain((400..200_000).step_by(97)).map(PageCount) {
            let (a, b) = (a.at(size), b.at(size));
            for (a, b) in [
                (a.miss_ratio, b.miss_ratio),
                (a.low, b.low),
                (a.high, b.high),
            ] {
                assert!((a - b).abs() < 1e-9, "{size:?}: {a} {b}");
            }
        }
    }

    #[test]
    fn the_whole_stream_has_the_curve_that_was_counted() {
        // Within intervals of 32, distances have buckets of their own.
        let pages: Vec<_> = zipf(3_000, 0.9, 1).take(30_010).collect();
        for delta in [0.05, 0.3] {
            let options = options(32, delta, 4);
            let stream = CounterStream::open(recorded(options, &pages).as_slice()).unwrap();
            assert!(stream.is_finished());
            assert_eq!((stream.references(), stream.lost_bytes()), (30_010, 0));
            assert_same(&stream.curve(0..30_010).unwrap(), &counted(options, &pages));
        }
    }

    #[test]
    fn a_window_from_the_first_reference_is_a_shorter_stream() {
        let pages: Vec<_> = zipf(3_000, 0.9, 1).take(32_768).collect();
        let options = options(32, 0.1, 4);
        let stream = CounterStream::open(recorded(options, &pages).as_slice()).unwrap();
        // A power of two of intervals: every level is counted there.
        let window = stream.curve(0..16_384).unwrap();
        assert_same(&window, &counted(options, &pages[..16_384]));
    }

    /// Mean absolute error of windows against exact LRU over the window alone, and the share of sizes in the band.
    fn windows(pages: &[u64], interval: u32, cut: Option<usize>) -> (f64, f64) {
        let length = pages.len() as u64;
        let step = u64::from(interval);
        let (mut error, mut held, mut count) = (0.0, 0, 0);
        for seed in 0..5 {
            let mut bytes = recorded(options(interval, 0.05, seed), pages);
            if let Some(records) = cut {
                bytes.truncate(borders(&bytes)[records] + 3);
            }
            let stream = CounterStream::open(bytes.as_slice()).unwrap();
            assert_eq!(stream.lost_bytes(), if cut.is_some() { 3 } else { 0 });
            let end = stream.references();
            let third = end / 3 / step * step;
            for (from, to) in [(third, 2 * third), (third + step, end), (5 * step, third)] {
                let truth = &pages[from as usize..to as usize];
                let mut lru = ExactLru::new();
                let truth = curve_of(&mut lru, truth.iter().copied());
                let curve = stream.curve(from..to).unwrap();
                assert_eq!(curve.references(), to - from);
                let sizes = (1..=240).map(|part| PageCount((part * lru.distinct() / 200).max(1)));
                let distance = curve.distance(&truth, sizes.clone()).unwrap();
                error += distance.mean_absolute_error;
                for size in sizes {
                    let (point, truth) = (curve.at(size), truth.miss_ratio(size));
                    held += i32::from(point.low - 1e-9 <= truth && truth <= point.high + 1e-9);
                    count += 1;
                }
            }
            assert!(end <= length);
        }
        (error / 15.0, f64::from(held) / f64::from(count))
    }

    #[test]
    fn any_window_is_right_as_a_stream_of_its_own() {
        let flips = (0..600_000_u64).map(|at| match at / 50_000 % 3 {
            0 => at % 5_000,
            1 => 5_000 + at * 7 % 20_000,
            _ => at / 3 % 500,
        });
        let saw = (0..600_000_u64).map(|at| (at % 40_000).abs_diff(20_000));
        let streams: [(&str, Vec<u64>, f64); 6] = [
            ("even", uniform(20_000, 1).take(600_000).collect(), 0.01),
            (
                "zipf 0.8",
                zipf(50_000, 0.8, 1).take(600_000).collect(),
                0.01,
            ),
            (
                "zipf 1.2",
                zipf(50_000, 1.2, 1).take(600_000).collect(),
                0.01,
            ),
            ("loop", cycle(20_000).take(600_000).collect(), 0.05),
            ("saw", saw.collect(), 0.03),
            ("flips", flips.collect(), 0.06),
        ];
        for (name, pages, bound) in streams {
            let (error, held) = windows(&pages, 1_000, None);
            assert!(error <= bound, "{name}: {error}");
            assert!(held >= 0.95, "{name}: {held}");
            // In a truncated record, the oldest counters were last counted some time before the end.
            let (error, held) = windows(&pages, 1_000, Some(490));
            assert!(error <= bound, "{name}, cut: {error}");
            assert!(held >= 0.95, "{name}, cut: {held}");
        }
    }

    #[test]
    fn a_window_of_one_interval_is_exact() {
        let pages: Vec<_> = zipf(500, 0.8, 1).take(3_200).collect();
        let stream = recorded(options(32, 0.05, 1), &pages);
        let stream = CounterStream::open(stream.as_slice()).unwrap();
        for at in [0, 32, 1_600, 3_168] {
            let window = pages[at..at + 32].iter().copied();
            let exact = curve_of(&mut ExactLru::new(), window);
            let curve = stream.curve(at as u64..at as u64 + 32).unwrap();
            for size in (0..64).map(PageCount) {
                let difference = curve.miss_ratio(size) - exact.miss_ratio(size);
                assert!(difference.abs() < 1e-9, "{at} {size:?}");
            }
        }
    }

    #[test]
    fn what_is_no_window_is_refused() {
        let stream = recorded(options(100, 0.1, 0), &[1; 450]);
        let stream = CounterStream::open(stream.as_slice()).unwrap();
        assert!(stream.curve(0..450).is_ok());
        assert!(stream.curve(400..450).is_ok());
        for (from, to) in [(100, 100), (200, 100), (0, 500), (0, u64::MAX)] {
            let refused = stream.curve(from..to).unwrap_err();
            assert!(
                matches!(refused, StreamError::NoWindow { .. }),
                "{from} {to}"
            );
        }
        for (from, to) in [(50, 100), (0, 449), (1, 450)] {
            let refused = stream.curve(from..to).unwrap_err();
            assert!(
                matches!(refused, StreamError::InsideInterval { .. }),
                "{from} {to}"
            );
        }
    }

    #[test]
    fn a_stream_of_nothing_is_one() {
        let stream = recorded(CounterStacksOptions::default(), &[]);
        let stream = CounterStream::open(stream.as_slice()).unwrap();
        assert!(stream.is_finished());
        assert_eq!(stream.references(), 0);
        assert!(stream.curve(0..0).is_err());
    }

    #[test]
    fn a_stream_cut_anywhere_ends_at_the_last_whole_record() {
        let pages: Vec<_> = zipf(300, 0.9, 1).take(3_000).collect();
        let bytes = recorded(options(100, 0.2, 3), &pages);
        let borders = borders(&bytes);
        assert_eq!(borders.len(), 32);
        for end in 0..bytes.len() {
            let Ok(stream) = CounterStream::open(&bytes[..end]) else {
                assert!(end < HEADER_BYTES);
                continue;
            };
            let records = borders.iter().filter(|&&border| border <= end).count() - 1;
            assert_eq!(stream.references(), (100 * records as u64).min(3_000));
            assert_eq!(stream.lost_bytes(), (end - borders[records]) as u64);
            assert!(!stream.is_finished());
            if records > 0 {
                stream.curve(0..stream.references()).unwrap();
            }
        }
    }

    #[test]
    fn a_flipped_bit_ends_the_stream_where_it_is() {
        let pages: Vec<_> = zipf(300, 0.9, 1).take(2_000).collect();
        let bytes = recorded(options(100, 0.2, 3), &pages);
        let borders = borders(&bytes);
        for at in 0..bytes.len() {
            let mut broken = bytes.clone();
            broken[at] ^= 1 << (at % 8);
            let Ok(stream) = CounterStream::open(broken.as_slice()) else {
                assert!(at < HEADER_BYTES);
                continue;
            };
            assert!(at >= HEADER_BYTES);
            let whole = borders.iter().filter(|&&border| border <= at).count() - 1;
            assert_eq!(stream.references(), 100 * whole as u64, "byte {at}");
            assert_eq!(stream.lost_bytes(), (bytes.len() - borders[whole]) as u64);
        }
    }

    #[test]
    fn later_versions_and_impossible_options_are_told_apart() {
        let bytes = recorded(options(100, 0.2, 3), &[1, 2, 3]);
        let with = |at: usize, value: u32| {
            let mut bytes = bytes.clone();
            if (at, value) == (8, 1) {
                // That has no size of pages.
                bytes[14..16].fill(0);
            }
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let crc = crc32fast::hash(&bytes[..32]);
            bytes[32..36].copy_from_slice(&crc.to_le_bytes());
            CounterStream::open(bytes.as_slice()).map(|stream| stream.page_size())
        };
        assert_eq!(with(8, 2).unwrap(), Some(PAGE_SIZE));
        assert_eq!(with(8, 1).unwrap(), None);
        for version in [0, 3] {
            let error = with(8, version).unwrap_err();
            assert!(matches!(error, StreamError::Version { version: told } if told == version));
        }
        for (at, value) in [
            (12, 3),
            (12, 19),
            (16, 0),
            (16, u32::MAX),
            (20, DELTA_MAX + 1),
        ] {
            assert!(
                matches!(with(at, value), Err(StreamError::Options(_))),
                "{at}"
            );
        }
        assert!(matches!(with(0, 0), Err(StreamError::NoStream)));
        // Pages of 2^64 bytes.
        assert!(matches!(
            with(12, 12 | 64 << 16),
            Err(StreamError::NoStream)
        ));
    }

    /// Takes 100 bytes, then fails.
    #[derive(Debug)]
    struct FullDevice(usize);

    impl Write for FullDevice {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            if self.0 > 100 {
                return Err(io::Error::from(io::ErrorKind::StorageFull));
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_writer_that_fails_stops_the_record_and_not_the_counting() {
        let pages: Vec<_> = cycle(50).take(1_000).collect();
        let options = options(100, 0.1, 0);
        let mut writer = StreamWriter::new(options, PAGE_SIZE, FullDevice(0)).unwrap();
        writer.observe(&batch_of(pages.iter().copied()));
        assert_same(&writer.curve().unwrap(), &counted(options, &pages));
        assert!(writer.bytes() <= 100);
        let error = writer.finish().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }

    proptest! {
        #[test]
        fn numbers_come_back(value in any::<u64>(), shift in 0_u32..64) {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value >> shift);
            put_zigzag(&mut bytes, value.cast_signed() >> shift);
            let mut rest = bytes.as_slice();
            prop_assert_eq!(take_varint(&mut rest), Some(value >> shift));
            prop_assert_eq!(take_zigzag(&mut rest), Some(value.cast_signed() >> shift));
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn a_bucket_of_distances_is_narrow(distance in 0..INTERVAL_MAX) {
            let bucket = u64::from(bucket_of(distance));
            let (floor, next) = (floor_of(bucket), floor_of(bucket + 1));
            prop_assert!((floor..next).contains(&u64::from(distance)));
            prop_assert!(next - floor <= (floor / 16).max(1));
        }

        #[test]
        fn borders_of_batches_leave_no_trace(
            pages in prop::collection::vec(0_u64..400, 1..2_000),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
            interval in 1_u32..300,
        ) {
            let options = options(interval, 0.2, 1);
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(pages.len())).collect();
            cuts.extend([0, pages.len()]);
            cuts.sort_unstable();
            let mut writer = StreamWriter::new(options, PAGE_SIZE, Vec::new()).unwrap();
            for cut in cuts.windows(2) {
                writer.observe(&batch_of(pages[cut[0]..cut[1]].iter().copied()));
            }
            prop_assert_eq!(writer.finish().unwrap(), recorded(options, &pages));
        }

        #[test]
        fn broken_records_under_right_sums_are_no_danger(
            seed in any::<u64>(),
            changes in 1_usize..8,
            interval in prop_oneof![Just(1_u32), Just(2), 3_u32..200],
            delta in prop_oneof![Just(0.0), 0.05_f64..0.5],
        ) {
            let pages: Vec<_> = zipf(300, 0.9, seed).take(1_500).collect();
            let bytes = recorded(options(interval, delta, 3), &pages);
            let borders = borders(&bytes);
            let mut payloads: Vec<Vec<u8>> = borders.windows(2).map(|border| {
                let mut rest = &bytes[border[0]..border[1] - CRC_BYTES];
                take_varint(&mut rest).unwrap();
                rest.to_vec()
            }).collect();
            let mut random = Random::new(seed);
            for _ in 0..changes {
                let index = (random.share() * payloads.len() as f64) as usize;
                let payload = &mut payloads[index];
                let at = (random.share() * payload.len() as f64) as usize;
                match random.next() % 4 {
                    0 => payload[at] = random.next() as u8,
                    1 => payload.truncate(at),
                    // The largest possible number.
                    2 => drop(payload.splice(at..=at, [255; 9].into_iter().chain([1]))),
                    _ => payload.insert(at, 0),
                }
                if payload.is_empty() {
                    payload.push(0);
                }
            }
            let stream = CounterStream::open(resealed(&bytes, &payloads).as_slice()).unwrap();
            if stream.references() > 0 {
                let curve = stream.curve(0..stream.references()).unwrap();
                prop_assert_eq!(curve.references(), stream.references());
            }
        }

        #[test]
        fn bytes_of_any_kind_are_no_danger(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            with_header in any::<bool>(),
        ) {
            let mut stream = Vec::new();
            if with_header {
                stream.extend(&recorded(options(7, 0.1, 0), &[])[..HEADER_BYTES]);
            }
            stream.extend(bytes);
            let _ = CounterStream::open(stream.as_slice());
        }
    }
}
