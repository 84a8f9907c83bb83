//! Rows under a heading: aligned for a reader, separated by commas for a program.

use std::fmt::Write;

/// Alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

/// A table whose columns are as wide as their widest cells.
#[derive(Debug)]
pub struct Columns {
    heads: Vec<(&'static str, Side)>,
    rows: Vec<Vec<String>>,
}

impl Columns {
    /// An empty table with these column heads.
    #[must_use]
    pub fn new(heads: &[(&'static str, Side)]) -> Self {
        Self {
            heads: heads.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    ///
    /// # Panics
    ///
    /// If there is not one cell for each head.
    pub fn row<const CELLS: usize>(&mut self, cells: [String; CELLS]) {
        assert_eq!(CELLS, self.heads.len(), "a cell for each column");
        self.rows.push(cells.into());
    }

    /// The table as lines; a column whose cells are all empty is left out.
    #[must_use]
    pub fn text(&self) -> String {
        let widths: Vec<_> = (0..self.heads.len())
            .map(|column| {
                let cells = self.rows.iter().map(|row| row[column].chars().count());
                match cells.max().unwrap_or(0) {
                    0 => 0,
                    widest => widest.max(self.heads[column].0.chars().count()),
                }
            })
            .collect();
        let heads: Vec<_> = self.heads.iter().map(|(head, _)| *head).collect();
        let rows = self.rows.iter().map(|row| row.iter().map(|cell| &**cell));
        let mut text = String::new();
        let mut line = |cells: &mut dyn Iterator<Item = &str>| {
            let mut line = String::new();
            for ((cell, &width), (_, side)) in cells.zip(&widths).zip(&self.heads) {
                let _ = match (width, side) {
                    (0, _) => Ok(()),
                    (_, Side::Left) => write!(line, "{cell:<width$}  "),
                    (_, Side::Right) => write!(line, "{cell:>width$}  "),
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        };
        line(&mut heads.into_iter());
        for mut row in rows {
            line(&mut row);
        }
        text
    }
}

/// A line of comma-separated values (RFC 4180, with a bare line end).
#[must_use]
pub fn csv<'a>(cells: impl IntoIterator<Item = &'a str>) -> String {
    let mut line = String::new();
    for (index, cell) in cells.into_iter().enumerate() {
        if index > 0 {
            line.push(',');
        }
        if cell.contains([',', '"', '\n', '\r']) {
            let _ = write!(line, "\"{}\"", cell.replace('"', "\"\""));
        } else {
            line.push_str(cell);
        }
    }
    line + "\n"
}

/// A column of a CSV table: its head, and its cell of a row.
pub type CsvColumn<'a, T> = (&'static str, &'a dyn Fn(&T) -> String);

/// Rows as comma-separated values under a line of heads.
#[must_use]
pub fn csv_table<T>(rows: impl IntoIterator<Item = T>, columns: &[CsvColumn<'_, T>]) -> String {
    let mut text = csv(columns.iter().map(|(head, _)| *head));
    for row in rows {
        let cells: Vec<_> = columns.iter().map(|(_, cell)| cell(&row)).collect();
        text.push_str(&csv(cells.iter().map(String::as_str)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::or_empty;

    #[test]
    fn columns_are_as_wide_as_their_cells_and_empty_ones_are_left_out() {
        let heads = [
            ("VM", Side::Left),
            ("none", Side::Left),
            ("size", Side::Right),
        ];
        let mut columns = Columns::new(&heads);
        columns.row(["web".into(), String::new(), "1 MiB".into()]);
        columns.row(["a long name".into(), String::new(), "16 MiB".into()]);
        let expected = "\
VM             size
web           1 MiB
a long name  16 MiB
";
        assert_eq!(columns.text(), expected);
    }

    #[test]
    fn a_cell_with_a_comma_or_a_quote_stays_one_cell() {
        assert_eq!(
            csv(["a,b", "c", "say \"x\"", ""]),
            "\"a,b\",c,\"say \"\"x\"\"\",\n"
        );
    }

    #[test]
    fn a_csv_table_has_its_heads_even_without_rows() {
        let columns: [CsvColumn<'_, u32>; 2] = [
            ("n", &|n| n.to_string()),
            ("even", &|n| or_empty(n.is_multiple_of(2).then_some("yes"))),
        ];
        assert_eq!(csv_table([1, 2], &columns), "n,even\n1,\n2,yes\n");
        assert_eq!(csv_table([], &columns), "n,even\n");
    }
}
