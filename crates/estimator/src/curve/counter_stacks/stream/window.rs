//! A part of a recorded stream.

use std::ops::Range;
use std::str::FromStr;

use super::CounterStream;

/// A window of a stream, in references from its beginning: `FROM..TO`, either of which may be omitted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamWindow {
    from: u64,
    to: Option<u64>,
}

impl StreamWindow {
    /// The range of references in the window; may extend beyond the stream's end.
    pub fn of(self, stream: &CounterStream) -> Range<u64> {
        self.from..self.to.unwrap_or(stream.references())
    }
}

impl FromStr for StreamWindow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| match text {
            "" => Ok(None),
            text => text.parse().map(Some),
        };
        text.split_once("..")
            .and_then(|(from, to)| Some((number(from).ok()?, number(to).ok()?)))
            .map(|(from, to)| Self {
                from: from.unwrap_or(0),
                to,
            })
            .ok_or_else(|| format!("'{text}' is no window such as 0..1000000 or 500000.."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_may_be_open_at_either_end() {
        let window = |from, to| Ok(StreamWindow { from, to });
        assert_eq!("10..20".parse(), window(10, Some(20)));
        assert_eq!("..20".parse(), window(0, Some(20)));
        assert_eq!("10..".parse(), window(10, None));
        assert_eq!("..".parse(), window(0, None));
        for wrong in ["", "10", "a..b", "1..2..3", "-1..2"] {
            assert!(wrong.parse::<StreamWindow>().is_err(), "{wrong}");
        }
    }
}
