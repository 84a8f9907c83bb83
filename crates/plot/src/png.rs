//! Rasterises vector graphics.

use std::fmt::Write;

use plimsoll_flow::Whole as _;
use plimsoll_output::Format;
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{self, Options, Tree, roxmltree};
use roxmltree::{Document, Node};
use ttf_parser::OutlineBuilder;

use crate::svg::{EscapedText, FONT, advance, text_width};

/// Largest picture that is rasterised, in pixels: 256 MiB of memory.
const PIXELS_MAX: f64 = (1 << 26) as f64;

/// Why a picture could not be encoded; nothing was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// The SVG text could not be parsed.
    #[error("not a picture in SVG")]
    Svg(#[from] usvg::Error),
    /// The picture has no pixels, or too many.
    #[error("a picture of {width:.0} x {height:.0} pixels cannot be made: at most 2^26 pixels")]
    Size {
        /// Requested width, in pixels.
        width: f64,
        /// Requested height, in pixels.
        height: f64,
    },
    /// The pixels could not be compressed.
    #[error("cannot encode the picture as PNG: {reason}")]
    Encode {
        /// The encoder's error.
        reason: String,
    },
}

/// Pixels for each unit of the graphics, enough for print and high-resolution screens.
const SCALE: f32 = 2.0;

/// Encodes the picture in a format: rasterised for [`Format::Png`], unchanged for every other.
///
/// # Errors
///
/// [`PlotError`] if `svg` is not valid, or the picture would be empty or beyond 2^26 pixels.
pub fn encode(svg: String, format: Format) -> Result<Vec<u8>, PlotError> {
    match format {
        Format::Png => svg_to_png(&svg, SCALE),
        _ => Ok(svg.into_bytes()),
    }
}

/// Rasterises vector graphics with `scale` pixels for each of their units.
pub(crate) fn svg_to_png(svg: &str, scale: f32) -> Result<Vec<u8>, PlotError> {
    let svg = with_outlines(svg).map_err(usvg::Error::ParsingFailed)?;
    let tree = Tree::from_str(&svg, &Options::default())?;
    let size = tree.size();
    let [width, height] =
        [size.width(), size.height()].map(|length| f64::from(length * scale).ceil());
    let fits = width >= 1.0 && height >= 1.0 && width * height <= PIXELS_MAX;
    let pixels = fits
        .then(|| Pixmap::new(u32::whole(width), u32::whole(height)))
        .flatten();
    let mut pixels = pixels.ok_or(PlotError::Size { width, height })?;
    resvg::render(
        &tree,
        Transform::from_scale(scale, scale),
        &mut pixels.as_mut(),
    );
    pixels.encode_png().map_err(|error| PlotError::Encode {
        reason: error.to_string(),
    })
}

/// The graphics with glyph outlines instead of `text` elements.
///
/// What charts need: one line of text at `x` and `y`, with `text-anchor` and `font-size`; other attributes are kept.
fn with_outlines(svg: &str) -> Result<String, roxmltree::Error> {
    let document = Document::parse(svg)?;
    let mut outlined = String::with_capacity(svg.len());
    let mut copied = 0;
    for node in document
        .descendants()
        .filter(|node| node.has_tag_name("text"))
    {
        outlined.push_str(&svg[copied..node.range().start]);
        copied = node.range().end;
        outlined.push_str("<path");
        for attribute in node.attributes() {
            let (name, value) = (attribute.name(), attribute.value());
            if !["x", "y", "text-anchor", "font-size", "font-family"].contains(&name) {
                // Writing to a string cannot fail.
                let _ = write!(outlined, " {name}=\"{}\"", EscapedText(value));
            }
        }
        outlined.push_str(" d=\"");
        outline(node, &mut outlined);
        outlined.push_str("\"/>");
    }
    outlined.push_str(&svg[copied..]);
    Ok(outlined)
}

/// Writes the glyph outlines of a text as the commands of a path.
fn outline(node: Node<'_, '_>, path: &mut String) {
    let number = |name, missing| {
        let value: Option<f64> = node.attribute(name).and_then(|text| text.parse().ok());
        value.unwrap_or(missing)
    };
    let (text, size) = (node.text().unwrap_or_default(), number("font-size", 12.0));
    let Some(font) = &*FONT else { return };
    let before = match node.attribute("text-anchor") {
        Some("middle") => text_width(text, size) / 2.0,
        Some("end") => text_width(text, size),
        _ => 0.0,
    };
    let mut pen = Pen {
        path,
        x: number("x", 0.0) - before,
        y: number("y", 0.0),
        scale: size / f64::from(font.units_per_em()),
    };
    for letter in text.chars() {
        // The first glyph of a font is drawn for characters that it lacks.
        font.outline_glyph(font.glyph_index(letter).unwrap_or_default(), &mut pen);
        pen.x += advance(letter) * size;
    }
}

/// Writes outlines, which are in units of the font and upwards, from a point of the picture.
struct Pen<'a> {
    path: &'a mut String,
    x: f64,
    y: f64,
    /// Pixels of a unit of the font.
    scale: f64,
}

impl Pen<'_> {
    fn command(&mut self, name: char, points: &[(f32, f32)]) {
        self.path.push(name);
        for (x, y) in points {
            let x = self.x + f64::from(*x) * self.scale;
            let y = self.y - f64::from(*y) * self.scale;
            // Writing to a string cannot fail.
            let _ = write!(self.path, "{x:.3} {y:.3} ");
        }
    }
}

impl OutlineBuilder for Pen<'_> {
    fn move_to(&mut self, x: f32, y: f32) {
        self.command('M', &[(x, y)]);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        self.command('L', &[(x, y)]);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        self.command('Q', &[(x1, y1), (x, y)]);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        self.command('C', &[(x1, y1), (x2, y2), (x, y)]);
    }

    fn close(&mut self) {
        self.command('Z', &[]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(content: &str) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"40\" height=\"20\">{content}</svg>"
        )
    }

    fn inked(svg: &str) -> usize {
        let png = svg_to_png(svg, 2.0).unwrap();
        let pixels = Pixmap::decode_png(&png).unwrap();
        assert_eq!((pixels.width(), pixels.height()), (80, 40));
        pixels
            .pixels()
            .iter()
            .filter(|pixel| pixel.alpha() > 0)
            .count()
    }

    #[test]
    fn shapes_and_text_leave_ink_without_any_font_on_the_machine() {
        assert_eq!(inked(&picture("")), 0);
        assert_eq!(inked(&picture("<rect width=\"10\" height=\"10\"/>")), 400);
        let text = "<text y=\"15\" font-family=\"Ubuntu\">9 MiB</text>";
        assert!(inked(&picture(text)) > 50);
        let other = "<text y=\"15\" font-family=\"Ubuntu, Arial\">9 MiB</text>";
        assert_eq!(inked(&picture(text)), inked(&picture(other)));
    }

    #[test]
    fn what_cannot_be_drawn_is_an_error() {
        assert!(matches!(svg_to_png("no svg", 1.0), Err(PlotError::Svg(_))));
        for scale in [0.0, -1.0, 1e5, f32::NAN, f32::INFINITY] {
            let result = svg_to_png(&picture(""), scale);
            assert!(matches!(result, Err(PlotError::Size { .. })), "{scale}");
        }
    }
}
