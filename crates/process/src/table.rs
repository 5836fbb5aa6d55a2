//! Text tables.

use std::fmt;

/// Table of text. Each column is as wide as its content. Columns of numbers are right-aligned,
/// except the first.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with these headings.
    pub fn new<S: Into<String>>(headings: impl IntoIterator<Item = S>) -> Self {
        Self { rows: vec![headings.into_iter().map(Into::into).collect()] }
    }

    /// Adds a row.
    pub fn line<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let is_figure =
            |cell: &String| cell.starts_with(|c: char| c.is_ascii_digit() || "<-".contains(c));
        let cells = |column: usize| self.rows.iter().skip(1).filter_map(move |row| row.get(column));
        let figures: Vec<bool> = (0..columns).map(|n| n > 0 && cells(n).all(is_figure)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (n, ((cell, width), right)) in row.iter().zip(&widths).zip(&figures).enumerate() {
                let padding = " ".repeat(width.saturating_sub(cell.chars().count()));
                let gap = if n == 0 { "" } else { "  " };
                let [before, after] = if *right { [&padding, ""] } else { ["", &padding] };
                line.extend([gap, before, cell, after]);
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_lines_up() {
        let mut table = Table::new(["iodepth", "IOPS"]);
        table.line(["1", "25.1 K"]);
        table.line(["32", "9"]);
        assert_eq!(table.to_string(), "iodepth    IOPS\n1        25.1 K\n32            9\n");
        let mut table = Table::new(["Target", "Serial", "Namespace"]);
        table.line(["a", "SB1", "10"]);
        assert_eq!(table.to_string(), "Target  Serial  Namespace\na       SB1            10\n");
    }
}
