//! Writes scalable vector graphics, and measures the width of text.
//!
//! Only attributes and elements that all viewers draw alike are used, and no
//! `id`, so that several pictures can be embedded in one page.

use std::fmt::{self, Write};
use std::sync::LazyLock;

use ttf_parser::Face;

/// Width of every picture, in pixels.
pub(super) const WIDTH: f64 = 760.0;
/// Margin on each side, in pixels.
pub(super) const MARGIN: f64 = 24.0;
/// Font size of all text except the heading, in pixels.
pub(super) const SMALL: f64 = 12.0;

/// The embedded font; its family is called [`FONT_FAMILY`].
pub(super) static FONT: LazyLock<Option<Face<'_>>> =
    LazyLock::new(|| Face::parse(epaint_default_fonts::UBUNTU_LIGHT, 0).ok());
/// Family name of [`FONT`].
const FONT_FAMILY: &str = "Ubuntu";

/// Colour of titles and labels.
pub(super) const INK: &str = "#1a1a1a";
/// Colour of ticks, axes and other secondary text and lines.
pub(super) const FAINT_INK: &str = "#555555";
/// Colour of grid lines.
pub(super) const GRID: &str = "#e4e4e4";
/// Colours of series in order, after Okabe and Ito; the light yellow is left out.
pub(super) const PALETTE: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5195", "#8a6d3b",
];

/// Alignment of a text relative to its anchor point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Anchor {
    /// The text begins at the point.
    Start,
    /// The text is centred at the point.
    Middle,
    /// The text ends at the point.
    End,
}

/// A picture being written.
#[derive(Debug)]
pub(super) struct Svg(String);

impl Svg {
    /// Starts a picture with a white background; `name` is its accessible name for screen readers.
    pub(super) fn new(width: f64, height: f64, name: &str) -> Self {
        let mut svg = Self(String::new());
        svg.put(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-label=\"{}\" \
             font-family=\"{FONT_FAMILY}, 'Helvetica Neue', Helvetica, Arial, sans-serif\">",
            EscapedText(name)
        ));
        svg.put(format_args!(
            "<rect width=\"{width:.0}\" height=\"{height:.0}\" fill=\"#ffffff\"/>"
        ));
        svg
    }

    /// Appends one element, or an opening or closing tag.
    pub(super) fn put(&mut self, element: fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{element}");
    }

    /// Adds a text; `attributes`, such as a rotation, are written unchanged.
    pub(super) fn text(
        &mut self,
        (x, y): (f64, f64),
        anchor: Anchor,
        (size, color): (f64, &str),
        attributes: &str,
        text: &str,
    ) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        self.put(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" \
             fill=\"{color}\"{attributes}>{}</text>",
            EscapedText(text)
        ));
    }

    /// Adds a straight line.
    pub(super) fn line(
        &mut self,
        (x1, y1): (f64, f64),
        (x2, y2): (f64, f64),
        (width, color): (f64, &str),
        attributes: &str,
    ) {
        self.put(format_args!(
            "<line x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\" \
             stroke=\"{color}\" stroke-width=\"{width}\"{attributes}/>"
        ));
    }

    /// Adds title and subtitle from the upper left, and returns the height they take.
    pub(super) fn heading(&mut self, left: f64, width: f64, title: &str, subtitle: &str) -> f64 {
        let mut baseline = 16.0;
        for line in wrapped(title, 17.0, width) {
            baseline += 16.0;
            // The font has only one weight; an outline in the same colour makes it semi-bold.
            let outline = format!(" stroke=\"{INK}\" stroke-width=\"0.45\"");
            self.text(
                (left, baseline),
                Anchor::Start,
                (17.0, INK),
                &outline,
                &line,
            );
            baseline += 5.0;
        }
        for line in wrapped(subtitle, 12.5, width) {
            baseline += 14.0;
            self.text(
                (left, baseline),
                Anchor::Start,
                (12.5, FAINT_INK),
                "",
                &line,
            );
            baseline += 3.0;
        }
        baseline + 4.0
    }

    /// Ends the picture.
    pub(super) fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

/// Text escaped for XML; characters that XML cannot represent become replacement characters.
#[derive(Debug, Clone, Copy)]
pub struct EscapedText<'a>(pub &'a str);

impl fmt::Display for EscapedText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                letter if letter.is_control() || matches!(letter, '\u{fffe}' | '\u{ffff}') => {
                    f.write_char('\u{fffd}')?;
                }
                letter => f.write_char(letter)?,
            }
        }
        Ok(())
    }
}

/// Returns the width of a text in pixels at a font size, in [`FONT`].
pub(super) fn text_width(text: &str, size: f64) -> f64 {
    text.chars().map(advance).sum::<f64>() * size
}

/// The width of a character in [`FONT`], in em; 1 for one that the font lacks, which is wider than most.
pub(super) fn advance(letter: char) -> f64 {
    let known = FONT.as_ref().and_then(|font| {
        let glyph = font.glyph_index(letter)?;
        let advance = font.glyph_hor_advance(glyph)?;
        Some(f64::from(advance) / f64::from(font.units_per_em()))
    });
    known.unwrap_or(1.0)
}

/// Breaks a text at its spaces into lines of at most `width` pixels; a longer word gets a line of its own.
pub(super) fn wrapped(text: &str, size: f64, width: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        match lines.last_mut() {
            Some(line) if text_width(&format!("{line} {word}"), size) <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_font_inside_the_program_measures_text() {
        assert!(FONT.is_some());
        assert_eq!(text_width("", 10.0), 0.0);
        let (narrow, wide) = (text_width("iiii", 10.0), text_width("MMMM", 10.0));
        assert!(0.0 < narrow && narrow < wide && wide < 40.0);
        assert!((text_width("MMMM", 20.0) - 2.0 * wide).abs() < 1e-9);
    }

    #[test]
    fn names_from_outside_cannot_break_the_picture() {
        assert_eq!(
            EscapedText("<b a=\"1\">&\u{0}\u{7}").to_string(),
            "&lt;b a=&quot;1&quot;&gt;&amp;\u{fffd}\u{fffd}"
        );
    }

    #[test]
    fn lines_break_at_spaces_and_lose_nothing() {
        let text = "one two three four five six";
        let lines = wrapped(text, 12.0, 60.0);
        assert!(lines.len() > 1);
        assert_eq!(lines.join(" "), text);
        assert!(lines.iter().all(|line| text_width(line, 12.0) <= 60.0));
        assert_eq!(wrapped("unbreakable", 12.0, 5.0), ["unbreakable"]);
        assert!(wrapped("", 12.0, 5.0).is_empty());
    }
}
