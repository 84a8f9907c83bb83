//! Lines on the console: `plimsoll: EVENT key=value key=value`.
//!
//! A line is built whole and written by one call, so that those of several
//! threads do not mix. Values hold no blanks, except that of a last key set by
//! [`Line::rest`], which reaches to the end of the line.

use std::fmt::{Display, Write as _};
use std::io::Write as _;

/// A line in the making.
pub struct Line(String);

impl Line {
    /// Starts a line for `event`.
    pub fn new(event: &str) -> Self {
        Self(format!("plimsoll: {event}"))
    }

    /// Adds a key with a value that holds no blank.
    pub fn with(mut self, key: &str, value: impl Display) -> Self {
        // Writing into a String cannot fail.
        let _ = write!(self.0, " {key}={value}");
        self
    }

    /// Adds the last key, with a value of any text; its line breaks become blanks.
    pub fn rest(self, key: &str, value: impl Display) -> Self {
        let text = value.to_string().replace(['\n', '\r'], " ");
        self.with(key, text)
    }

    /// Bytes of it so far.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Writes the line. Errors of the console are ignored: there is no other place to report them.
    pub fn print(mut self) {
        self.0.push('\n');
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(self.0.as_bytes());
        let _ = out.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_an_event_and_its_keys() {
        let line = Line::new("step").with("index", 2).with("pages", 7);
        assert_eq!(line.0, "plimsoll: step index=2 pages=7");
    }

    #[test]
    fn a_text_over_several_lines_stays_one_line() {
        let line = Line::new("error").rest("message", "one\ntwo\r\nthree");
        assert_eq!(line.0, "plimsoll: error message=one two  three");
    }
}
