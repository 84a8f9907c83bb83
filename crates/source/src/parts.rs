//! A stream of lines in parts, read ahead by a thread of its own.
//!
//! A writer that is faster than the reader waits in its pipe: nothing is lost.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;

use crate::compression::decompressed;

/// Bytes that are read at once, and parts of the stream that may wait.
const PART_BYTES: usize = 64 << 10;
const PARTS_MAX: usize = 16;

/// The decompressed lines of a file, or of standard input for `-`, in parts that end with a line, as they come. The sender is gone
/// at the end of the stream, and after an error.
///
/// # Errors
///
/// If the file cannot be opened, or no thread started.
pub fn parts(path: &Path) -> io::Result<Receiver<io::Result<Vec<u8>>>> {
    let input: Box<dyn Read + Send> = match path == Path::new("-") {
        true => Box::new(io::stdin()),
        false => Box::new(File::open(path)?),
    };
    let (sender, parts) = mpsc::sync_channel(PARTS_MAX);
    thread::Builder::new()
        .name("stream".to_owned())
        .spawn(move || match decompressed(input) {
            Ok((input, _)) => send_parts(input, &sender),
            Err(error) => {
                let _ = sender.send(Err(error));
            }
        })?;
    Ok(parts)
}

fn send_parts(mut input: impl Read, parts: &SyncSender<io::Result<Vec<u8>>>) {
    let mut rest: Vec<u8> = Vec::new();
    loop {
        let begin = rest.len();
        rest.resize(begin + PART_BYTES, 0);
        let read = match input.read(&mut rest[begin..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            result => result.map(Some),
        };
        rest.truncate(begin + read.as_ref().map_or(0, |read| read.unwrap_or(0)));
        let part = match read {
            Ok(Some(0)) => {
                if !rest.is_empty() {
                    let _ = parts.send(Ok(rest));
                }
                return;
            }
            Ok(_) => match rest[begin..].iter().rposition(|&byte| byte == b'\n') {
                Some(end) => {
                    let later = rest.split_off(begin + end + 1);
                    Ok(std::mem::replace(&mut rest, later))
                }
                // A line that never ends is no line.
                None if rest.len() > PART_BYTES => Err(io::Error::other("a line is too long")),
                None => continue,
            },
            Err(error) => Err(error),
        };
        let is_last = part.is_err();
        if parts.send(part).is_err() || is_last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a reader gets of a stream.
    fn received(input: &[u8]) -> Vec<io::Result<Vec<u8>>> {
        let (sender, parts) = mpsc::sync_channel(PARTS_MAX);
        thread::scope(|scope| {
            scope.spawn(move || send_parts(input, &sender));
            parts.iter().collect()
        })
    }

    #[test]
    fn parts_end_with_a_line_and_are_together_the_stream() {
        let line = |number: usize| format!("{number}\n");
        let mut text: String = (0..30_000).map(line).collect();
        text.push_str("last");
        let parts: Vec<_> = received(text.as_bytes()).into_iter().flatten().collect();
        assert_eq!(parts.concat(), text.as_bytes());
        let (last, whole) = parts.split_last().unwrap();
        assert_eq!(last, b"last");
        assert!(whole.len() > 1 && whole.iter().all(|part| part.ends_with(b"\n")));
        assert!(received(b"").is_empty());
    }

    #[test]
    fn a_line_that_never_ends_is_an_error() {
        let text = vec![b'1'; 3 * PART_BYTES];
        let mut parts = received(&text);
        let error = parts.pop().unwrap().unwrap_err();
        assert_eq!(error.to_string(), "a line is too long");
        assert!(parts.is_empty());
    }
}
