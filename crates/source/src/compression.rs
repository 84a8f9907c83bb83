//! Decompresses traces; the compression is recognised by magic bytes and not by the file's name.
//!
//! Concatenated members (gzip), streams (bzip2, xz) and frames (zstd) are read as one file, as
//! their own tools do; zeros after the last member of gzip are padding. The memory that a compressed file can make the decoder allocate is
//! bounded: by [`XZ_MEMORY_BYTES_MAX`], and for zstd by the window of 128 MiB that the
//! `zstd` tool itself accepts.

use std::fmt;
use std::io::{self, BufRead, BufReader, Cursor, Read};

use flate2::bufread::GzDecoder;

use crate::lines::read_some;

/// Memory limit for decoding xz: above the 65 MiB of `xz -9`.
const XZ_MEMORY_BYTES_MAX: u64 = 256 << 20;

/// The compression of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compression {
    /// No compression.
    Plain,
    /// bzip2.
    Bzip2,
    /// gzip, RFC 1952.
    Gzip,
    /// xz, the `.xz` file format.
    Xz,
    /// Zstandard, RFC 8878.
    Zstd,
}

impl Compression {
    /// The compression that the last extension of a file's name stands for, in lower case; `None` if it is another's.
    pub(crate) fn of_extension(extension: &str) -> Option<Self> {
        match extension {
            "bz2" => Some(Self::Bzip2),
            "gz" => Some(Self::Gzip),
            "xz" => Some(Self::Xz),
            "zst" => Some(Self::Zstd),
            _ => None,
        }
    }

    /// Determines the compression from the first six bytes, or all if there are fewer.
    fn of_head(head: &[u8]) -> Self {
        match head {
            // The size of the blocks, and the begin of a block or of the end.
            [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41] => Self::Bzip2,
            [b'B', b'Z', b'h', b'1'..=b'9', 0x17, 0x72] => Self::Bzip2,
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            // A skippable frame, which is the first frame in files of pzstd.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::Plain,
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "none",
            Self::Bzip2 => "bzip2",
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
        })
    }
}

/// Whether bytes that follow these may make a compression of them.
fn may_be_compressed(head: &[u8]) -> bool {
    match head {
        [] | [b'B'] | [b'B', b'Z'] | [b'B', b'Z', b'h'] | [b'B', b'Z', b'h', b'1'..=b'9', ..] => {
            true
        }
        [0x1f, rest @ ..] => b"\x8b".starts_with(rest),
        [0xfd, rest @ ..] => b"7zXZ\0".starts_with(rest),
        [0x28, rest @ ..] => b"\xb5\x2f\xfd".starts_with(rest),
        [0x50..=0x5f, rest @ ..] => b"\x2a\x4d\x18".starts_with(rest),
        _ => false,
    }
}

/// The reader returned by [`decompressed`].
pub(crate) type DecompressedReader<'a> = Box<dyn Read + Send + 'a>;

/// Returns a reader of the decompressed bytes, and the compression. It returns what it can decompress of the bytes that
/// have come, once those show which compression it is.
///
/// # Errors
///
/// The input's, and [`io::ErrorKind::OutOfMemory`] if a decoder cannot be made. The reader's are those of the input and of damaged data.
pub(crate) fn decompressed<'a>(
    mut input: impl Read + Send + 'a,
) -> io::Result<(DecompressedReader<'a>, Compression)> {
    let (mut head, mut length) = ([0; 6], 0);
    let is_open =
        |head: &[u8]| Compression::of_head(head) == Compression::Plain && may_be_compressed(head);
    while length < head.len() && is_open(&head[..length]) {
        match read_some(&mut input, &mut head[length..])? {
            0 => break,
            read => length += read,
        }
    }
    let compression = Compression::of_head(&head[..length]);
    let whole = Cursor::new(head).take(length as u64).chain(input);
    let reader: DecompressedReader = match compression {
        Compression::Plain => Box::new(whole),
        Compression::Bzip2 => Box::new(bzip2::read::MultiBzDecoder::new(whole)),
        Compression::Gzip => Box::new(GzipMembers::new(whole)),
        Compression::Xz => {
            let concatenated = liblzma::stream::CONCATENATED;
            let stream =
                liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY_BYTES_MAX, concatenated)?;
            Box::new(liblzma::read::XzDecoder::new_stream(whole, stream))
        }
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::new(whole)?;
            decoder.window_log_max(27)?;
            Box::new(decoder)
        }
    };
    Ok((reader, compression))
}

/// Decompresses the members of a gzip file, and ignores zeros after the last, with which tapes and copies by block pad it.
struct GzipMembers<R> {
    /// `None` only while the next one is made.
    member: Option<GzDecoder<BufReader<R>>>,
}

impl<R: Read> GzipMembers<R> {
    fn new(input: R) -> Self {
        let member = GzDecoder::new(BufReader::new(input));
        Self {
            member: Some(member),
        }
    }
}

impl<R: Read> Read for GzipMembers<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let read = member.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            let rest = member.get_mut();
            match rest.fill_buf()?.first() {
                None => return Ok(0),
                Some(0) => return skip_zeros(rest).map(|()| 0),
                Some(_) => {
                    let member = self.member.take().map(GzDecoder::into_inner);
                    self.member = member.map(GzDecoder::new);
                }
            }
        }
        Ok(0)
    }
}

/// Reads to the end.
///
/// # Errors
///
/// The input's, and [`io::ErrorKind::InvalidData`] at the first byte that is not zero.
fn skip_zeros(input: &mut impl BufRead) -> io::Result<()> {
    loop {
        let bytes = input.fill_buf()?;
        if bytes.iter().any(|&byte| byte != 0) {
            let why = "zeros and other bytes follow the compressed data";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        match bytes.len() {
            0 => return Ok(()),
            zeros => input.consume(zeros),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn bzip2(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn xz(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 1);
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        zstd::encode_all(bytes, 1).unwrap()
    }

    fn read_all(bytes: &[u8]) -> io::Result<(Vec<u8>, Compression)> {
        let (mut reader, compression) = decompressed(bytes)?;
        let mut all = Vec::new();
        reader.read_to_end(&mut all)?;
        Ok((all, compression))
    }

    #[test]
    fn every_compression_is_told_by_its_content_and_members_read_as_one() {
        let twice =
            |compress: fn(&[u8]) -> Vec<u8>| [compress(b"1\n2\n"), compress(b"3\n")].concat();
        for (twice, compression) in [
            (twice(<[u8]>::to_vec), Compression::Plain),
            (twice(bzip2), Compression::Bzip2),
            (twice(gzip), Compression::Gzip),
            (twice(xz), Compression::Xz),
            (twice(zstd), Compression::Zstd),
        ] {
            assert_eq!(
                read_all(&twice).unwrap(),
                (b"1\n2\n3\n".to_vec(), compression)
            );
        }
    }

    /// Bytes one at a time, after which nothing comes for now.
    struct Dripping<'a>(&'a [u8]);

    impl Read for Dripping<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let (first, rest) = self.0.split_first().expect("a wait for more bytes");
            self.0 = rest;
            buffer[0] = *first;
            Ok(1)
        }
    }

    #[test]
    fn no_more_bytes_are_awaited_than_show_the_compression() {
        for (bytes, compression) in [
            (&b"1\n"[..], Compression::Plain),
            (b"(1", Compression::Plain),
            (b"Page", Compression::Plain),
            (b"BZh9no", Compression::Plain),
            (&bzip2(b"1")[..6], Compression::Bzip2),
            // Its decoder reads the header at once.
            (&gzip(b"1")[..10], Compression::Gzip),
            (&xz(b"1")[..6], Compression::Xz),
            (&zstd(b"1")[..4], Compression::Zstd),
        ] {
            assert_eq!(decompressed(Dripping(bytes)).unwrap().1, compression);
        }
    }

    #[test]
    fn short_inputs_are_plain() {
        for bytes in [&b""[..], b"1", b"\x1f", b"\x28\xb5"] {
            assert_eq!(
                read_all(bytes).unwrap(),
                (bytes.to_vec(), Compression::Plain)
            );
        }
    }

    #[test]
    fn a_zstd_file_may_begin_with_a_skippable_frame() {
        let mut bytes = b"\x50\x2a\x4d\x18\x02\0\0\0ab".to_vec();
        bytes.extend(zstd(b"7\n"));
        assert_eq!(
            read_all(&bytes).unwrap(),
            (b"7\n".to_vec(), Compression::Zstd)
        );
    }

    #[test]
    fn zeros_after_a_gzip_file_are_padding_and_other_bytes_an_error() {
        let members = [gzip(b"1\n2\n"), gzip(b"3\n")].concat();
        // Ends within a buffer of the reader, and beyond several.
        for zeros in [1, 9, 512, 100_000] {
            let padded = [&members[..], &vec![0; zeros]].concat();
            assert_eq!(
                read_all(&padded).unwrap(),
                (b"1\n2\n3\n".to_vec(), Compression::Gzip),
                "{zeros}"
            );
            for further in [&b"\x01"[..], &gzip(b"4\n")] {
                assert!(read_all(&[&padded[..], further].concat()).is_err());
            }
        }
        for garbage in [&b"4"[..], b"4\0\0", b"\x1f\x8b", b"\x1f"] {
            let text = [&members[..], garbage].concat();
            assert!(read_all(&text).is_err(), "{garbage:?}");
        }
    }

    #[test]
    fn a_compressed_file_cut_short_is_an_error() {
        let text: Vec<u8> = (0..10_000u32).flat_map(u32::to_le_bytes).collect();
        for whole in [bzip2(&text), gzip(&text), xz(&text), zstd(&text)] {
            assert!(read_all(&whole[..whole.len() - 5]).is_err());
        }
    }
}
