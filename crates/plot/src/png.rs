//! Rasterises vector graphics.

use std::sync::{Arc, LazyLock};

use plimsoll_output::Format;
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree, fontdb};

use crate::svg::{FONT, FONT_FAMILY};

/// Largest picture that is rasterised, in pixels: 256 MiB of memory.
const PIXELS_MAX: f64 = (1 << 26) as f64;

/// Why a picture could not be encoded; nothing was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// The SVG text could not be parsed.
    #[error("not a picture in SVG")]
    Svg(#[from] resvg::usvg::Error),
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
    static FONTS: LazyLock<Arc<fontdb::Database>> = LazyLock::new(|| {
        let mut fonts = fontdb::Database::new();
        fonts.load_font_data(FONT.to_vec());
        Arc::new(fonts)
    });
    let options = Options {
        font_family: FONT_FAMILY.to_owned(),
        fontdb: Arc::clone(&FONTS),
        ..Options::default()
    };
    let tree = Tree::from_str(svg, &options)?;
    let size = tree.size();
    let [width, height] =
        [size.width(), size.height()].map(|length| f64::from(length * scale).ceil());
    let fits = width >= 1.0 && height >= 1.0 && width * height <= PIXELS_MAX;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "both lengths are whole and between 1 and 2^26"
    )]
    let pixels = fits
        .then(|| Pixmap::new(width as u32, height as u32))
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
