//! HTML elements of a report.

use std::fmt::Write;

/// Escapes text for HTML.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Card of a report: one number in large type, its name and a note.
pub(super) struct Card {
    pub(super) name: &'static str,
    pub(super) figure: String,
    pub(super) note: String,
}

/// Row of cards.
pub(super) fn cards(cards: &[Card]) -> String {
    let mut html = String::from("<div class=\"cards\">\n");
    for Card { name, figure, note } in cards {
        let (figure, note) = (escape(figure), escape(note));
        let _ = writeln!(
            html,
            "<div class=\"card\"><span>{name}</span><b>{figure}</b><small>{note}</small></div>"
        );
    }
    html + "</div>\n"
}

/// Diagram with its title and the legend of its colours.
pub(super) fn figure(title: &str, keys: &[(&str, plotters::style::RGBColor)], svg: &str) -> String {
    let mut html = format!("<figure><figcaption><b>{}</b>", escape(title));
    for (name, plotters::style::RGBColor(r, g, b)) in keys {
        let name = escape(name);
        let _ = write!(
            html,
            " <span class=\"key\"><i style=\"background:rgb({r},{g},{b})\"></i>{name}</span>"
        );
    }
    html + "</figcaption>\n" + svg + "</figure>\n"
}

/// Table whose first column names the rows.
pub(super) fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
    let cells = |tag: &str, cells: &mut dyn Iterator<Item = &str>| {
        let cells: String = cells.map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let mut html = String::from("<table>\n<thead>");
    html += &cells("th", &mut headings.iter().copied());
    html += "</thead>\n<tbody>\n";
    for row in rows {
        html += &cells("td", &mut row.iter().map(String::as_str));
    }
    html + "</tbody>\n</table>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_characters_are_escaped() {
        assert_eq!(escape("<a href=\"x\">&"), "&lt;a href=&quot;x&quot;&gt;&amp;");
        let html = table(&["<"], &[vec![">".to_owned()]]);
        assert!(html.contains("<th>&lt;</th>") && html.contains("<td>&gt;</td>"), "{html}");
    }
}
