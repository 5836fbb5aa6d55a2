//! Tables: text for people, JSON rows for programs. All benchmarks and guest suites use them.

use std::fmt;

use serde_json::{Value, json};

/// A table. Text and JSON are added together, but may have different numbers of rows.
#[derive(Debug, Default)]
pub struct Table {
    /// Title above the table; none if empty.
    pub title: String,
    /// Names of the columns.
    pub head: Vec<&'static str>,
    /// Cells. A row may be shorter than the head.
    pub rows: Vec<Vec<String>>,
    /// JSON rows.
    pub json: Vec<Value>,
    /// Notes below the table.
    pub notes: Vec<String>,
}

impl Table {
    /// An empty table.
    pub fn new(title: impl Into<String>, head: &[&'static str]) -> Self {
        Self { title: title.into(), head: head.to_vec(), ..Self::default() }
    }

    /// Adds a row in both forms.
    pub fn push(&mut self, cells: Vec<String>, json: Value) {
        self.rows.push(cells);
        self.json.push(json);
    }
}

/// Last line with `--json`: `{"rows":[...]}`.
pub fn json_line(rows: &[Value]) -> String {
    json!({ "rows": rows }).to_string()
}

impl fmt::Display for Table {
    /// Prints title, columns (text left-aligned, figures right-aligned) and notes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f)?;
        if !self.title.is_empty() {
            writeln!(f, "== {}\n", self.title)?;
        }
        if !self.head.is_empty() {
            f.write_str(&columns(&self.head, &self.rows))?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

fn columns(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    // A column is right-aligned if all of its cells begin like figures.
    let figures: Vec<bool> = (0..widths.len())
        .map(|column| {
            let mut cells = rows.iter().filter_map(|row| row.get(column)).peekable();
            cells.peek().is_some()
                && cells.all(|cell| cell.starts_with(|c: char| c.is_ascii_digit() || c == '-'))
        })
        .collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for ((cell, &width), &figure) in cells.zip(&widths).zip(&figures) {
            if !text.is_empty() {
                text += "  ";
            }
            let padded = if figure { format!("{cell:>width$}") } else { format!("{cell:<width$}") };
            text += &padded;
        }
        text.trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut head.iter().copied());
    let rule: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
    text += &line(&mut rule.iter().map(String::as_str));
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_left_aligned_and_figures_right_aligned() {
        let rows = vec![
            vec!["qemu".into(), "100".into(), "1.00".into()],
            vec!["a longer name".into(), "-5".into(), "22.50".into()],
        ];
        let want = "device           n   mmio\n\
                    -------------  ---  -----\n\
                    qemu           100   1.00\n\
                    a longer name   -5  22.50\n";
        assert_eq!(columns(&["device", "n", "mmio"], &rows), want);
    }

    #[test]
    fn a_short_row_is_no_error() {
        assert_eq!(columns(&["a", "b"], &[vec!["x".into()]]), "a  b\n-  -\nx\n");
        assert_eq!(columns(&["a"], &[]), "a\n-\n");
    }

    #[test]
    fn title_and_notes_stand_around_the_columns() {
        let mut table = Table::new("Speed", &["n"]);
        table.push(vec!["1".into()], json!({ "n": 1 }));
        table.notes.push("Fast.".into());
        assert_eq!(table.to_string(), "\n== Speed\n\nn\n-\n1\nFast.\n");
        assert_eq!(Table::new("", &["n"]).to_string(), "\nn\n-\n");
        assert_eq!(json_line(&table.json), r#"{"rows":[{"n":1}]}"#);
    }
}
