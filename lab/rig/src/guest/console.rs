//! The console of a guest: a thread reads its lines as they come, and consumers wait for them.

use std::collections::VecDeque;
use std::io::{self, BufRead as _, BufReader, Read};
use std::process::ChildStdout;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use plimsoll_vm::{ConsoleEvent, ConsoleLine};

/// Bytes kept of a console line; the workload's own have under 200, those of our programs in a guest a few thousand.
const LINE_BYTES_MAX: usize = 16 << 10;
/// Console lines kept until they are read: about two hours of a workload's.
const LINES_MAX: usize = 1 << 16;
/// Maximum lines in error messages.
const LAST_LINES: usize = 8;

/// Lines between the thread that reads them and their consumers.
#[derive(Debug, Default)]
pub(super) struct Console {
    lines: Mutex<Lines>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Lines {
    waiting: VecDeque<ConsoleLine>,
    /// The newest lines, taken or not.
    last: VecDeque<String>,
    lost: u64,
    ended: bool,
}

/// The result of a wait for a line.
pub(super) enum ConsoleItem {
    Line(ConsoleLine),
    Nothing,
    Ended,
}

impl Console {
    fn lock(&self) -> MutexGuard<'_, Lines> {
        // Lines are whole at every point where a holder could panic.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn read_from(&self, output: ChildStdout) {
        let mut output = BufReader::new(output);
        while let Ok(Some(text)) = read_line(&mut output) {
            self.put(text, Instant::now());
        }
    }

    fn put(&self, text: String, at: Instant) {
        let line = ConsoleLine {
            at,
            event: ConsoleEvent::parse(&text),
            text: text.clone(),
        };
        let mut lines = self.lock();
        if lines.waiting.len() == LINES_MAX {
            lines.waiting.pop_front();
            lines.lost += 1;
        }
        if lines.last.len() == LAST_LINES {
            lines.last.pop_front();
        }
        lines.last.push_back(text);
        lines.waiting.push_back(line);
        self.changed.notify_all();
    }

    pub(super) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    pub(super) fn take(&self, deadline: Instant) -> ConsoleItem {
        let mut lines = self.lock();
        loop {
            if let Some(line) = lines.waiting.pop_front() {
                return ConsoleItem::Line(line);
            }
            if lines.ended {
                return ConsoleItem::Ended;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return ConsoleItem::Nothing;
            }
            let waited = self.changed.wait_timeout(lines, left);
            lines = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Number of lines dropped because nothing consumed them.
    pub(super) fn lost_lines(&self) -> u64 {
        self.lock().lost
    }

    pub(super) fn last_lines(&self) -> Vec<String> {
        self.lock().last.iter().cloned().collect()
    }
}

/// Reads a line, keeps at most its first [`LINE_BYTES_MAX`] bytes; `None` at the end.
fn read_line(output: &mut impl io::BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    let mut limited = output.by_ref().take(LINE_BYTES_MAX as u64);
    limited.read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    if line.last() != Some(&b'\n') {
        // Cut off, or the end of the output.
        output.skip_until(b'\n')?;
    }
    let text = String::from_utf8_lossy(&line);
    Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_end_is_cut_and_the_next_one_is_whole() {
        let mut bytes = vec![b'x'; LINE_BYTES_MAX * 3];
        bytes.extend(b"\nplimsoll: populated ms=1\r\n\nrest");
        let mut bytes = &bytes[..];
        let mut next = || read_line(&mut bytes).unwrap();
        assert_eq!(next().map(|line| line.len()), Some(LINE_BYTES_MAX));
        assert_eq!(next().as_deref(), Some("plimsoll: populated ms=1"));
        assert_eq!(next().as_deref(), Some(""));
        assert_eq!(next().as_deref(), Some("rest"));
        assert_eq!(next(), None);
    }

    #[test]
    fn the_oldest_lines_give_way_to_the_newest() {
        let console = Console::default();
        for number in 0..LINES_MAX + 3 {
            console.put(number.to_string(), Instant::now());
        }
        assert_eq!(console.lock().lost, 3);
        assert!(
            matches!(console.take(Instant::now()), ConsoleItem::Line(line) if line.text == "3")
        );
        let last = console.last_lines();
        assert_eq!(last.len(), LAST_LINES);
        assert_eq!(last[LAST_LINES - 1], (LINES_MAX + 2).to_string());
    }

    #[test]
    fn a_console_that_ended_says_so_after_its_last_line() {
        let console = Console::default();
        console.put("bye".into(), Instant::now());
        assert!(matches!(console.take(Instant::now()), ConsoleItem::Line(_)));
        assert!(matches!(console.take(Instant::now()), ConsoleItem::Nothing));
        console.end();
        assert!(matches!(console.take(Instant::now()), ConsoleItem::Ended));
    }
}
