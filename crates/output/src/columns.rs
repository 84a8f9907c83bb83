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
pub fn csv(cells: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let mut line = String::new();
    for (index, cell) in cells.into_iter().enumerate() {
        let cell = cell.as_ref();
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

/// A value in a cell of a table.
pub trait Cell {
    /// The value as text; empty if there is none.
    fn cell(&self) -> String;
}

impl<T: Cell> Cell for Option<T> {
    fn cell(&self) -> String {
        self.as_ref().map_or_else(String::new, Cell::cell)
    }
}

impl<T: Cell + ?Sized> Cell for &T {
    fn cell(&self) -> String {
        (**self).cell()
    }
}

macro_rules! cells {
    ($($type:ty),*) => {$(
        impl Cell for $type {
            fn cell(&self) -> String {
                self.to_string()
            }
        }
    )*};
}

cells!(str, String, bool, u8, u16, u32, u64, usize, f64);

/// Rows as aligned [`Columns`]: `table!(rows, |row| { Left "name": row.name, Right "pages": row.pages })`. Each column has
/// its [`Side`], its head and its [`Cell`] of a row.
#[macro_export]
macro_rules! table {
    ($rows:expr, |$row:pat_param| { $($side:ident $head:tt: $cell:expr),+ $(,)? }) => {{
        let mut columns = $crate::Columns::new(&[$(($head, $crate::Side::$side)),+]);
        for $row in $rows {
            columns.row([$($crate::Cell::cell(&$cell)),+]);
        }
        columns.text()
    }};
}

/// Rows as comma-separated values under a line of heads: `csv_table!(rows, |row| { "pages": row.pages })`. Each column has
/// its head and its [`Cell`] of a row.
#[macro_export]
macro_rules! csv_table {
    ($rows:expr, |$row:pat_param| { $($head:tt: $cell:expr),+ $(,)? }) => {{
        let mut text = $crate::csv([$($head),+]);
        for $row in $rows {
            text.push_str(&$crate::csv([$($crate::Cell::cell(&$cell)),+]));
        }
        text
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_cells_and_empty_ones_are_left_out() {
        let rows = [("web", "1 MiB"), ("a long name", "16 MiB")];
        let text = table!(rows, |(name, size)| {
            Left "VM": name,
            Left "none": None::<u64>,
            Right "size": size,
        });
        let expected = "\
VM             size
web           1 MiB
a long name  16 MiB
";
        assert_eq!(text, expected);
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
        let of = |numbers: &[u32]| csv_table!(numbers, |n| { "n": n, "even": n.is_multiple_of(2).then_some("yes") });
        assert_eq!(of(&[1, 2]), "n,even\n1,\n2,yes\n");
        assert_eq!(of(&[]), "n,even\n");
    }
}
