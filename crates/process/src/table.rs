//! Text tables.

use std::fmt;
use std::io;

/// Minimum width to which a column is shortened.
const SHORTEST: usize = 8;

/// Table of text. Each column is as wide as its content. Columns of numbers are right-aligned,
/// except the first. On a terminal that is narrower than the table, the widest columns of words are
/// shortened.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
    /// Maximum width, if there is one.
    limit: Option<usize>,
}

impl Table {
    /// Creates a table with these headings, for standard output.
    pub fn new<S: Into<String>>(headings: impl IntoIterator<Item = S>) -> Self {
        let rows = vec![headings.into_iter().map(Into::into).collect()];
        Self { rows, limit: terminal_width() }
    }

    /// Adds a row.
    pub fn line<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// True for columns of numbers.
    fn figures(&self, columns: usize) -> Vec<bool> {
        // A UUID may begin with a digit, too.
        let is_figure = |cell: &String| {
            cell.starts_with(|c: char| c.is_ascii_digit() || "<-".contains(c))
                && cell.matches('-').count() != 4
        };
        let cells = |column: usize| self.rows.iter().skip(1).filter_map(move |row| row.get(column));
        (0..columns).map(|n| n > 0 && cells(n).all(is_figure)).collect()
    }

    /// Widths of the columns. Numbers are never shortened.
    fn widths(&self, figures: &[bool]) -> Vec<usize> {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let mut widths: Vec<usize> = (0..figures.len()).map(width).collect();
        let gaps = 2 * widths.len().saturating_sub(1);
        let limit = self.limit.unwrap_or(usize::MAX);
        while widths.iter().sum::<usize>() + gaps > limit {
            let words = widths.iter_mut().zip(figures).filter(|(_, is_figure)| !**is_figure);
            match words.map(|(width, _)| width).max_by_key(|width| **width) {
                Some(widest) if *widest > SHORTEST => *widest -= 1,
                _ => break,
            }
        }
        widths
    }
}

/// Width of the terminal of standard output, if it is one.
fn terminal_width() -> Option<usize> {
    let (columns, _) = terminal_size::terminal_size_of(io::stdout())?;
    Some(usize::from(columns.0)).filter(|columns| *columns != 0)
}

/// Shortens a cell to `width` characters. Of a path, the end is kept.
fn shortened(cell: &str, width: usize) -> String {
    let count = cell.chars().count();
    if count <= width {
        return cell.to_owned();
    }
    match cell.contains('/') {
        true => {
            let end: String = cell.chars().skip(count + 1 - width.max(1)).collect();
            format!("\u{2026}{end}")
        }
        false => {
            let begin: String = cell.chars().take(width.saturating_sub(1)).collect();
            format!("{begin}\u{2026}")
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let figures = self.figures(columns);
        let widths = self.widths(&figures);
        for row in &self.rows {
            let mut line = String::new();
            for (n, ((cell, width), right)) in row.iter().zip(&widths).zip(&figures).enumerate() {
                let cell = shortened(cell, *width);
                let padding = " ".repeat(width.saturating_sub(cell.chars().count()));
                let gap = if n == 0 { "" } else { "  " };
                let [before, after] = if *right { [&padding, ""] } else { ["", &padding] };
                line.extend([gap, before, &cell, after]);
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
    fn a_wide_table_fits_the_terminal() {
        let mut table = Table::new(["Controller", "Source", "Size", "UUID"]);
        let uuid = "0190163d-8694-739b-aea5-966c26f8ad91";
        table.line(["vm0", "/var/lib/libvirt/images/a-long-name/disk.img", "64.0 MiB", uuid]);
        assert_eq!(table.to_string().lines().next().unwrap().len(), 72);
        table.limit = Some(60);
        let text = table.to_string();
        let lines: Vec<_> = text.lines().collect();
        assert!(lines.iter().all(|line| line.chars().count() <= 60), "{text}");
        assert!(lines[1].contains("/disk.img  64.0 MiB  0190"), "{text}");
        assert!(lines[1].contains("\u{2026}") && lines[1].ends_with('\u{2026}'), "{text}");
        // Numbers and headings are never cut, even if the table stays too wide.
        table.limit = Some(5);
        assert!(table.to_string().contains("64.0 MiB"), "{table}");
    }

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
