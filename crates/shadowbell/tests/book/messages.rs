//! The page of messages explains only messages that the program has.

use crate::pages::{Page, root};
use pulldown_cmark::HeadingLevel;
use std::path::Path;

/// Appends all source files below a directory to `text`, without line breaks in strings.
fn source(directory: &Path, text: &mut String) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            source(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let file = std::fs::read_to_string(&path).unwrap();
            // A continued string resumes at the first character of the next line.
            let mut parts = file.split("\\\n");
            text.push_str(parts.next().unwrap_or_default());
            parts.for_each(|part| text.push_str(part.trim_start()));
        }
    }
}

#[test]
fn every_message_that_is_explained_is_in_the_program() {
    let mut text = String::new();
    for name in std::fs::read_dir(root().join("crates")).unwrap() {
        let directory = name.unwrap().path().join("src");
        if directory.is_dir() {
            source(&directory, &mut text);
        }
    }
    let page = Page::open("docs/reference/messages.md");
    let headings = page.headings();
    let messages: Vec<_> = headings.iter().filter(|(l, _)| *l == HeadingLevel::H3).collect();
    assert!(messages.len() > 20);
    for (_, message) in messages {
        let parts = message.split("...").map(|part| part.trim_matches([' ', ':', ';', '`']));
        let parts: Vec<_> = parts.filter(|part| part.len() > 2).collect();
        assert!(parts.iter().any(|part| part.len() > 9), "too little to find: {message}");
        for part in parts {
            assert!(text.contains(part), "no message has {part:?}: {message}");
        }
    }
}
