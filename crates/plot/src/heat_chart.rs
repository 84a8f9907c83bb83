//! Heatmaps: activity by position and time. Darker cells are busier.

use super::chart::draw_axes;
use crate::axis::{Axis, End, Scale};
use crate::svg::{MARGIN, SMALL, Svg, WIDTH, text_width};

const PLOT_HEIGHT: f64 = 330.0;
/// Maximum number of cells in a row and of rows: more would be narrower than three pixels.
const CELLS_MAX: usize = 220;
const ROWS_MAX: usize = 110;
/// Number of distinct shades.
const SHADES: f64 = 24.0;

/// A heatmap; build it field by field and draw it with [`to_svg`](Self::to_svg).
#[derive(Debug, Clone, PartialEq)]
pub struct HeatChart {
    /// The heading.
    pub title: String,
    /// Second line of the heading: the source, and the value of the darkest cell.
    pub subtitle: String,
    /// The axis from left to right, over [`columns_to`](Self::columns_to).
    pub x: Axis,
    /// The axis from bottom to top, over the rows' ends.
    pub y: Axis,
    /// End of the last cell on the x axis; the first begins at 0.
    pub columns_to: f64,
    /// Rows from bottom to top: the end of each on the y axis, and the activity of each of its cells, 0.0 to 1.0.
    pub rows: Vec<(f64, Vec<f64>)>,
}

impl HeatChart {
    /// Draws the chart. Cells and rows too narrow to be visible are merged and take their largest value.
    pub fn to_svg(&self) -> String {
        let last = self.rows.last().map_or(0.0, |(end, _)| *end);
        let y = Scale::new(&self.y, [last].into_iter(), End::AtData, 6.0);
        let x = Scale::new(&self.x, [self.columns_to].into_iter(), End::AtData, 8.0);
        let labels = y.ticks.iter().map(|(_, text)| text_width(text, SMALL));
        let left = MARGIN + 20.0 + labels.fold(0.0, f64::max) + 8.0;
        let right = WIDTH - MARGIN - 8.0;
        let mut heading = Svg::new(WIDTH, 0.0, "");
        let width = WIDTH - 2.0 * MARGIN;
        let top = heading.heading(MARGIN, width, &self.title, &self.subtitle) + 14.0;
        let bottom = top + PLOT_HEIGHT;
        let (x, y) = (x.laid(left, right), y.laid(bottom, top));

        let mut svg = Svg::new(WIDTH, bottom + 62.0, &self.title);
        svg.heading(MARGIN, width, &self.title, &self.subtitle);
        draw_axes(&mut svg, &x, &y, (left, right), (top, bottom));
        let columns = self.rows.iter().map(|(_, cells)| cells.len()).max();
        let columns = columns.unwrap_or(0).max(1);
        let mut from = 0.0;
        for rows in self.rows.chunks(self.rows.len().div_ceil(ROWS_MAX).max(1)) {
            let to = rows.last().map_or(from, |(end, _)| *end);
            let (low, high) = (y.within(from), y.within(to));
            from = to;
            let shades = shades(rows, columns);
            let of = |column: usize| column as f64 / shades.len() as f64 * self.columns_to;
            let mut column = 0;
            for run in shades.chunk_by(PartialEq::eq) {
                let (begin, end) = (x.within(of(column)), x.within(of(column + run.len())));
                column += run.len();
                if run[0] > 0.0 {
                    svg.put(format_args!(
                        "<rect x=\"{begin:.2}\" y=\"{high:.2}\" width=\"{:.2}\" height=\"{:.2}\" \
                         fill=\"#0072b2\" fill-opacity=\"{:.3}\"/>",
                        end - begin,
                        low - high,
                        run[0]
                    ));
                }
            }
        }
        svg.finish()
    }
}

/// The rows as drawn: each merged cell has the largest value of its cells, rounded to a shade.
fn shades(rows: &[(f64, Vec<f64>)], columns: usize) -> Vec<f64> {
    let merged = columns.div_ceil(CELLS_MAX);
    let mut shades = vec![0.0f64; columns.div_ceil(merged)];
    for (_, cells) in rows {
        for (busiest, cells) in shades.iter_mut().zip(cells.chunks(merged)) {
            *busiest = cells.iter().copied().fold(*busiest, f64::max);
        }
    }
    for shade in &mut shades {
        *shade = (shade.clamp(0.0, 1.0) * SHADES).ceil() / SHADES;
    }
    shades
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Unit;
    use crate::png::svg_to_png;

    fn chart(rows: Vec<(f64, Vec<f64>)>) -> HeatChart {
        HeatChart {
            title: "Heat".to_owned(),
            subtitle: String::new(),
            x: Axis::new("RAM", Unit::Bytes),
            y: Axis::new("Time", Unit::Seconds),
            columns_to: 4096.0,
            rows,
        }
    }

    fn cells(svg: &str) -> usize {
        svg.matches("fill-opacity").count()
    }

    #[test]
    fn cells_of_one_shade_are_drawn_as_one_and_idle_ones_not_at_all() {
        let svg = chart(vec![(5.0, vec![1.0, 1.0, 0.0, 0.5]), (10.0, vec![0.0; 4])]).to_svg();
        assert_eq!(cells(&svg), 2);
        assert!(svg_to_png(&svg, 0.5).is_ok());
    }

    #[test]
    fn rows_of_any_length_and_number_make_a_picture_of_bounded_size() {
        let busy = |at: usize| if at.is_multiple_of(2) { 1.0 } else { f64::NAN };
        let rows = (0..1000).map(|row| (f64::from(row), (0..5000).map(busy).collect()));
        assert!(cells(&chart(rows.collect()).to_svg()) <= CELLS_MAX * ROWS_MAX);
        assert_eq!(cells(&chart(Vec::new()).to_svg()), 0);
        assert_eq!(
            cells(&chart(vec![(f64::NAN, vec![]), (1.0, vec![2.0])]).to_svg()),
            1
        );
    }
}
