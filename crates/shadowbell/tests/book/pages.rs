//! Pages of the book, and their contents.

use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, Options, Parser, Tag, TagEnd};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Page of the book: its path relative to the repository's root, and its text after the insertion
/// of mdBook's includes.
pub(crate) struct Page {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

impl Page {
    /// Opens the page at this path from the root.
    pub(crate) fn open(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let full = root().join(&path);
        let text = std::fs::read_to_string(&full).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        Self { text: include(&text, full.parent().unwrap()), path }
    }

    pub(crate) fn events(&self) -> impl Iterator<Item = (Event<'_>, std::ops::Range<usize>)> {
        Parser::new_ext(&self.text, Options::ENABLE_TABLES).into_offset_iter()
    }

    /// Line number, from 1, at an offset.
    pub(crate) fn line(&self, offset: usize) -> usize {
        self.text[..offset].lines().count() + 1
    }

    /// Link targets of the page.
    pub(crate) fn links(&self) -> Vec<String> {
        let target = |(event, _)| match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                Some(dest_url.to_string())
            }
            _ => None,
        };
        self.events().filter_map(target).collect()
    }

    /// Headings of the page, as text.
    pub(crate) fn headings(&self) -> Vec<(HeadingLevel, String)> {
        let (mut headings, mut inside) = (Vec::new(), false);
        for (event, _) in self.events() {
            match event {
                Event::Start(Tag::Heading { level, .. }) => {
                    headings.push((level, String::new()));
                    inside = true;
                }
                Event::End(TagEnd::Heading(_)) => inside = false,
                Event::Text(text) | Event::Code(text) if inside => {
                    headings.last_mut().unwrap().1.push_str(&text);
                }
                _ => {}
            }
        }
        headings
    }

    /// Anchors of the headings.
    pub(crate) fn anchors(&self) -> BTreeSet<String> {
        self.headings().iter().map(|(_, text)| anchor(text)).collect()
    }

    /// Code blocks: info string, text, and line.
    pub(crate) fn blocks(&self) -> Vec<(String, String, usize)> {
        let mut blocks: Vec<(String, String, usize)> = Vec::new();
        let mut inside = false;
        for (event, range) in self.events() {
            match event {
                Event::Start(Tag::CodeBlock(kind)) => {
                    let info = match kind {
                        CodeBlockKind::Fenced(info) => info.to_string(),
                        CodeBlockKind::Indented => String::new(),
                    };
                    blocks.push((info, String::new(), self.line(range.start)));
                    inside = true;
                }
                Event::End(TagEnd::CodeBlock) => inside = false,
                Event::Text(text) if inside => blocks.last_mut().unwrap().1.push_str(&text),
                _ => {}
            }
        }
        blocks
    }
}

/// Anchor of a heading, as GitHub and mdBook derive it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().trim().to_lowercase().replace(' ', "-")
}

/// Resolves mdBook's includes: `{{#include PATH}}` or `{{#include PATH:ANCHOR}}`.
fn include(text: &str, directory: &Path) -> String {
    let line = |line: &str| {
        let Some(what) = line.strip_prefix("{{#include ").and_then(|w| w.strip_suffix("}}")) else {
            return line.to_owned();
        };
        let (path, name) = what.split_once(':').map_or((what, None), |(p, n)| (p, Some(n)));
        let path = directory.join(path);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        let Some(name) = name else { return text };
        let (begin, end) = (format!("ANCHOR: {name} "), format!("ANCHOR_END: {name} "));
        let inside = text.lines().skip_while(|line| !line.contains(&begin)).skip(1);
        inside.take_while(|line| !line.contains(&end)).collect::<Vec<_>>().join("\n")
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n") + "\n"
}

/// Pages of the summary, in its order.
pub(crate) fn book() -> Vec<Page> {
    let summary = Page::open("docs/SUMMARY.md");
    summary.links().iter().map(|link| Page::open(Path::new("docs").join(link))).collect()
}

/// Collects the files below a directory of the repository.
fn files(directory: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in std::fs::read_dir(root().join(directory)).unwrap() {
        let entry = entry.unwrap();
        let path = directory.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            files(&path, found);
        } else {
            found.insert(path);
        }
    }
}

#[test]
fn the_operators_book_has_at_most_16000_words_of_prose() {
    let summary = Page::open("docs/SUMMARY.md");
    let (operators, _) = summary.text.split_once("\n# Programming").unwrap();
    let operators = Page { path: summary.path.clone(), text: operators.to_owned() };
    let (mut words, mut pages) = (0, String::new());
    for link in operators.links() {
        let page = Page::open(Path::new("docs").join(&link));
        let (mut count, mut is_code) = (0, false);
        for (event, _) in page.events() {
            match event {
                Event::Start(Tag::CodeBlock(_)) => is_code = true,
                Event::End(TagEnd::CodeBlock) => is_code = false,
                Event::Text(text) | Event::Code(text) if !is_code => {
                    count += text.split_whitespace().count();
                }
                _ => {}
            }
        }
        words += count;
        pages += &format!("{count:6} {link}\n");
    }
    println!("{pages}{words:6} in all");
    assert!(words > 5000 && words <= 16_000, "{words} words\n{pages}");
}

#[test]
fn every_page_is_in_the_summary_once() {
    let listed: Vec<_> = book().into_iter().map(|page| page.path).collect();
    let unique: BTreeSet<_> = listed.iter().cloned().collect();
    assert_eq!(unique.len(), listed.len(), "twice in the summary");
    let mut pages = BTreeSet::new();
    files(Path::new("docs"), &mut pages);
    pages.retain(|path| {
        path.extension().is_some_and(|e| e == "md") && !path.ends_with("SUMMARY.md")
    });
    assert_eq!(pages, unique);
    // mdBook and the tests must read the same folder.
    let book = std::fs::read_to_string(root().join("book.toml")).unwrap();
    let book: toml::Table = book.parse().unwrap();
    assert_eq!(book["book"]["src"].as_str(), Some("docs"));
}

#[test]
fn anchors_are_made_as_github_makes_them() {
    assert_eq!(anchor("Where it is"), "where-it-is");
    assert_eq!(anchor("Processors: workers, pinning, NUMA"), "processors-workers-pinning-numa");
    assert_eq!(anchor("`--trace` and a file"), "--trace-and-a-file");
}
