//! Check of the language of comments, pages and messages: a first line must name its subject, and
//! some phrases are forbidden.
//!
//! A first line that begins with a pronoun or a question word can be understood only together with
//! the text above it.

use std::fs;
use std::path::{Path, PathBuf};

use shadowbell_bench::workspace::root;

/// Words with which no first line begins.
const FIRST: [&str; 20] = [
    "What", "Who", "Whoever", "Whose", "How", "Where", "Which", "Why", "When", "Whether", "It",
    "Its", "Those", "These", "They", "Nothing", "Nobody", "Somebody", "The same", "There",
];
/// Phrases that are forbidden because a reader has to guess their meaning. In this list, `~`
/// separates the parts of a word, so that the check does not find the list itself.
const RIDDLES: [&str; 19] = [
    "go~es on",
    "go~ on",
    "we~nt on",
    "go~ing on",
    "go~ne on",
    "no~body",
    "some~body",
    "who~ever",
    "under~ way",
    "can~ not",
    "be~fell",
    "be~fall",
    "come~ to rest",
    "comes~ to rest",
    "came~ to rest",
    "at~ rest",
    "let~ in",
    "in~ hand",
    "as~ it is now",
];
/// Nouns of machines, after which "who" is forbidden.
const MACHINES: [&str; 9] =
    ["thread", "process", "worker", "server", "client", "queue", "controller", "driver", "peer"];

/// A finding: file, line, text.
type Finding = (PathBuf, usize, String);

#[derive(Default)]
struct Found {
    /// Doc comments, headings and descriptions.
    items: usize,
    first: Vec<Finding>,
    words: usize,
    riddles: Vec<Finding>,
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// True if `text` contains `phrase` as whole words, and `follows` accepts the text after it.
fn has(text: &str, phrase: &str, follows: impl Fn(&str) -> bool) -> bool {
    text.match_indices(phrase).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + phrase.len()..]);
        !before.ends_with(is_word) && !after.starts_with(is_word) && follows(after)
    })
}

fn is_riddle(text: &str) -> bool {
    let text = text.to_lowercase();
    let plain = |phrase: &str| {
        let phrase = phrase.replace('~', "");
        has(&text, &phrase, |after| {
            // Before a noun with an article, the phrase names a place ("on the bus"), which is
            // allowed. Without one, it is a riddle.
            let place = ["a", "the", "to"].iter().any(|w| {
                has(&format!("{w} "), w, |_| {
                    after.strip_prefix(' ').is_some_and(|after| after.starts_with(&format!("{w} ")))
                })
            });
            !(phrase.ends_with(" on") && place)
        })
    };
    let of_machine = |noun: &&str| {
        let phrases = [format!("{noun} who"), format!("{noun}s who"), format!("{noun}, who")];
        phrases.iter().any(|phrase| has(&text, phrase, |_| true))
    };
    RIDDLES.iter().any(|phrase| plain(phrase)) || MACHINES.iter().any(of_machine)
}

fn is_pronoun(text: &str) -> bool {
    FIRST.iter().any(|word| {
        text.strip_prefix(word).is_some_and(|rest| !rest.starts_with(|c| is_word(c) || c == '\''))
    })
}

impl Found {
    fn text(&mut self, at: (&Path, usize), text: &str) {
        self.words += text.split_whitespace().count();
        if is_riddle(text) {
            self.riddles.push((at.0.to_owned(), at.1, text.to_owned()));
        }
    }

    fn first_line(&mut self, at: (&Path, usize), text: &str) {
        self.items += 1;
        if is_pronoun(text) {
            self.first.push((at.0.to_owned(), at.1, text.to_owned()));
        }
    }

    fn rust(&mut self, path: &Path, text: &str) {
        let mut was_doc = false;
        for (number, line) in text.lines().enumerate() {
            let (at, line) = ((path, number + 1), line.trim());
            let doc = ["///", "//!"].iter().find_map(|mark| line.strip_prefix(mark));
            if let Some(comment) = doc.or_else(|| line.strip_prefix("//")) {
                let comment = comment.trim();
                let heading = comment.strip_prefix('#').map(|text| text.trim_start_matches('#'));
                if doc.is_some() && !comment.is_empty() && (!was_doc || heading.is_some()) {
                    self.first_line(at, heading.unwrap_or(comment).trim());
                }
                self.text(at, comment);
            } else {
                // Help texts of derived command lines are doc comments, and are checked as doc
                // comments. All other help texts begin after one of the marks in this list.
                for mark in ["description = \"", "about = \"", "help = \"", "# HELP "] {
                    if let Some((_, text)) = line.split_once(mark) {
                        self.first_line(at, text);
                    }
                }
                // The line is split at quotation marks, so every second part is the content of a
                // string.
                for string in line.split('"').skip(1).step_by(2).filter(|s| s.len() >= 12) {
                    self.text(at, string);
                }
            }
            was_doc = doc.is_some();
        }
    }

    fn page(&mut self, path: &Path, text: &str) {
        let mut fenced = false;
        for (number, line) in text.lines().enumerate() {
            let (at, line) = ((path, number + 1), line.trim());
            fenced ^= line.starts_with("```");
            if fenced || line.starts_with("```") {
                continue;
            }
            if line.starts_with("# ") || line.starts_with("## ") || line.starts_with("### ") {
                // A heading that quotes a message begins with a backtick, so it never begins with a
                // forbidden word.
                self.first_line(at, line.trim_start_matches('#').trim());
            }
            self.text(at, line);
        }
    }

    fn walk(&mut self, path: &Path) {
        if path.is_dir() {
            if path.ends_with("target") {
                return;
            }
            let mut entries: Vec<_> =
                fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
            entries.sort();
            entries.iter().for_each(|entry| self.walk(entry));
            return;
        }
        let extension = path.extension().and_then(|extension| extension.to_str());
        let read = || fs::read_to_string(path).unwrap_or_default();
        match extension {
            Some("rs") => self.rust(path, &read()),
            Some("md" | "toml" | "sh" | "service") => self.page(path, &read()),
            _ => {}
        }
    }
}

fn list(findings: &[Finding]) -> String {
    let lines = findings.iter().map(|(path, line, text)| {
        let path = path.strip_prefix(root()).unwrap_or(path).display();
        format!("{path}:{line}: {text}\n")
    });
    lines.collect()
}

#[test]
fn first_lines_name_their_subject_and_texts_have_no_riddles() {
    let mut found = Found::default();
    for place in [
        "crates",
        "tools",
        "guest",
        "tests",
        "fuzz/bodies",
        "docs",
        "packaging",
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
    ] {
        found.walk(&root().join(place));
    }
    assert!(found.items > 10_000 && found.words > 100_000, "the tree was not found");
    let (most_first, most_riddles) = (found.items / 50, found.words / 5000);
    assert!(
        found.first.len() <= most_first,
        "{} first lines begin with a pronoun or a question word, at most {most_first}:\n{}",
        found.first.len(),
        list(&found.first)
    );
    assert!(
        found.riddles.len() <= most_riddles,
        "{} texts have a phrase that a reader must guess, at most {most_riddles}:\n{}",
        found.riddles.len(),
        list(&found.riddles)
    );
}

#[test]
fn pronouns_and_riddles_are_recognised() {
    for text in ["What a queue has.", "Its size.", "The same for reads."] {
        assert!(is_pronoun(text), "{text}");
    }
    for text in ["Items of a queue.", "Therefore it waits.", "Whatever is left."] {
        assert!(!is_pronoun(text), "{text}");
    }
    for phrase in RIDDLES.map(|phrase| phrase.replace('~', "")) {
        assert!(is_riddle(&format!("a guest {phrase}, and waits")), "{phrase}");
    }
    assert!(is_riddle("a queue who waits"));
    assert!(!is_riddle("the lamp goes on the table, and a handy tool is let inside"));
}
