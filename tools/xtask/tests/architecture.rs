//! Names in `ARCHITECTURE.md` and `docs/internals`: every path and function in backticks exists.
//!
//! A path is relative to the root of the repository or to `crates/`, and ends with `.rs` or `/`. A
//! function is written `name()` or `Type::name()`. It must be defined in the last `.rs` file that
//! its paragraph or list item has named before it, or anywhere in `crates/` if there is none.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Contents of all Rust files below a directory.
fn sources(directory: &Path, text: &mut String) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&fs::read_to_string(path).unwrap());
        }
    }
}

/// True if `source` defines the function: its name follows `fn`, and no letter follows its name.
fn defines(source: &str, name: &str) -> bool {
    source.match_indices(&format!("fn {name}")).any(|(at, found)| {
        let next = source[at + found.len()..].chars().next();
        next.is_some_and(|next| next == '(' || next == '<')
    })
}

/// Returns the number of names that were checked, and the names that do not exist.
fn check(text: &str, all: &str) -> (usize, Vec<String>) {
    let (mut checked, mut wrong) = (0, Vec::new());
    // A block begins at a list item, or after an empty line.
    let blocks = text.replace("\n* ", "\n\n").replace("\n| ", "\n\n");
    let is_number = |line: &str| line.trim_start().starts_with(|c: char| c.is_ascii_digit());
    let lines =
        blocks.lines().map(|line| if is_number(line) { "\n" } else { "" }.to_owned() + line);
    let blocks = lines.collect::<Vec<_>>().join("\n");
    for block in blocks.split("\n\n") {
        let mut file: Option<String> = None;
        for name in block.split('`').skip(1).step_by(2).filter(|name| !name.contains([' ', '\n'])) {
            if let Some(function) = name.strip_suffix("()") {
                let function = function.rsplit("::").next().unwrap_or(function);
                checked += 1;
                if !defines(file.as_deref().unwrap_or(all), function) {
                    wrong.push(format!("no function {name}"));
                }
            } else if name.contains('/')
                && !name.contains("://")
                && (name.ends_with(".rs") || name.ends_with('/'))
            {
                checked += 1;
                let paths = [root().join(name), root().join("crates").join(name)];
                match paths.into_iter().find(|path| path.exists()) {
                    Some(path) if path.is_file() => file = fs::read_to_string(path).ok(),
                    Some(_) => {}
                    None => wrong.push(format!("no file or directory {name}")),
                }
            }
        }
    }
    (checked, wrong)
}

#[test]
fn names_in_the_architecture_exist() {
    let mut all = String::new();
    sources(&root().join("crates"), &mut all);
    let internals = fs::read_dir(root().join("docs/internals")).unwrap();
    let mut pages: Vec<_> = internals.map(|entry| entry.unwrap().path()).collect();
    pages.push(root().join("ARCHITECTURE.md"));
    let (mut checked, mut wrong) = (0, Vec::new());
    for page in pages {
        let (count, found) = check(&fs::read_to_string(&page).unwrap(), &all);
        checked += count;
        wrong.extend(found.into_iter().map(|name| format!("{}: {name}", page.display())));
    }
    assert!(checked > 150, "{checked}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_wrong_name_is_found() {
    let here = "`tools/xtask/tests/architecture.rs`";
    let cases = [
        (format!("{here}, `defines()`"), 0),
        (format!("{here}, `Type::defines()` and `sources()`"), 0),
        (format!("{here}, `defin()`"), 1),
        (format!("{here}, `elsewhere()`"), 1),
        (format!("* {here}\n* `elsewhere()`"), 0),
        (format!("1. {here}\n2. `elsewhere()`, `nowhere()`"), 1),
        ("`tools/xtask/tests/nothing.rs`, `docs/nothing/`, `docs/internals/`".to_owned(), 2),
    ];
    // The text is assembled here, because a literal would be a definition in this file.
    let all = format!("fn {}<T>()", "elsewhere");
    for (text, count) in cases {
        let (_, wrong) = check(&text, &all);
        assert_eq!(wrong.len(), count, "{text}: {wrong:?}");
    }
}
