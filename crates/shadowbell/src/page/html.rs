//! Pieces of a page.

use std::fmt::Write;

/// Text as HTML has it.
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

/// A figure that is large on the page: what it is, the figure, and a word about it.
pub(super) struct Card {
    pub(super) name: &'static str,
    pub(super) figure: String,
    pub(super) note: String,
}

/// Figures in a row.
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

/// A diagram with its title, and what its colours mean.
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

/// A table, the first column of which names its rows.
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
    fn what_people_write_is_text_on_the_page() {
        assert_eq!(escape("<a href=\"x\">&"), "&lt;a href=&quot;x&quot;&gt;&amp;");
        let html = table(&["<"], &[vec![">".to_owned()]]);
        assert!(html.contains("<th>&lt;</th>") && html.contains("<td>&gt;</td>"), "{html}");
    }
}
