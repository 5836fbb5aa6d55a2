//! Tables as text: words to the left, figures to the right.

/// Lays out rows under a head. Rows may be shorter than the head.
pub(crate) fn render(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    // A column is one of figures when all that is in it begins like one.
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

/// A number of operations a second in thousands, as the published tables have it.
pub(crate) fn thousands(value: f64) -> String {
    format!("{:.1} K", value / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_go_left_and_figures_right() {
        let rows = vec![
            vec!["ours".into(), "100".into(), "1.00".into()],
            vec!["a longer name".into(), "-5".into(), "22.50".into()],
        ];
        let want = "device           n   mmio\n\
                    -------------  ---  -----\n\
                    ours           100   1.00\n\
                    a longer name   -5  22.50\n";
        assert_eq!(render(&["device", "n", "mmio"], &rows), want);
    }

    #[test]
    fn a_short_row_is_no_error() {
        assert_eq!(render(&["a", "b"], &[vec!["x".into()]]), "a  b\n-  -\nx\n");
        assert_eq!(render(&["a"], &[]), "a\n-\n");
    }

    #[test]
    fn thousands_are_rounded() {
        assert_eq!(thousands(99_840.0), "99.8 K");
    }
}
