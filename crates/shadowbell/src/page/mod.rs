//! What was measured as a page for a browser: one file with everything in it, which asks nobody for
//! anything more.

mod chart;
mod measurement;

pub(crate) use measurement::{Measured, measurement, overview};

use anyhow::Context;
use std::fmt::Write;
use std::path::Path;
use std::time::SystemTime;

const STYLE: &str = include_str!("style.css");

/// Text as HTML has it.
fn escape(text: &str) -> String {
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
struct Card {
    name: &'static str,
    figure: String,
    note: String,
}

fn cards(cards: &[Card]) -> String {
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
fn figure(title: &str, keys: &[(&str, plotters::style::RGBColor)], svg: &str) -> String {
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

fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
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

/// Which machine this is.
fn machine() -> String {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("processors", |(_, model)| model.trim());
    let kernel = rustix::system::uname();
    format!("{cpus} × {model}, Linux {}", kernel.release().to_string_lossy())
}

/// Writes a page to `path`. `lead` is a sentence below the title, `body` is HTML.
///
/// # Errors
/// The file's.
pub(crate) fn write(path: &Path, title: &str, lead: &str, body: &str) -> anyhow::Result<()> {
    let (title, lead) = (escape(title), escape(lead));
    let (machine, when) = (escape(&machine()), httpdate::fmt_http_date(SystemTime::now()));
    let version = env!("CARGO_PKG_VERSION");
    let page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" \
         content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>{title}</h1>\n<p>{lead}</p>\n{body}\
         <footer>{machine} · {when} · shadowbell {version}</footer>\n</body>\n</html>\n"
    );
    let name = path.display();
    std::fs::write(path, page)
        .with_context(|| format!("the report can not be written to {name}"))?;
    tracing::info!("the report is in {name}");
    Ok(())
}

/// Sees that a report can be written before there is something to write.
///
/// # Errors
/// With exit status `exit::BAD_INPUT`, if it can not be.
pub(crate) fn check(path: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    // Not truncated: if the measurement fails, an older report stays.
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
    let name = path.display();
    opened.map(drop).map_err(|error| {
        crate::exit::bad_input(anyhow::anyhow!("the report can not be written to {name}: {error}"))
    })
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

    #[test]
    fn a_page_asks_nobody_for_anything() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("page.html");
        write(&path, "a <title>", "lead", "<p>body</p>\n").unwrap();
        let page = std::fs::read_to_string(&path).unwrap();
        assert!(page.contains("<title>a &lt;title&gt;</title>"), "{page}");
        for word in ["src=", "href=", "url(", "@import", "<script"] {
            assert!(!page.contains(word), "{word}");
        }
        check(Some(&path)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), page, "it is still there");
        let missing = directory.path().join("no/such");
        assert!(check(Some(&missing)).is_err() && check(None).is_ok());
    }
}
