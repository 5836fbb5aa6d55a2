//! Names in `ARCHITECTURE.md` and `docs/internals`: every path and function in backticks exists.
//!
//! A path is relative to the root of the repository or to `crates/`, and ends with `.rs` or `/`. A
//! function is written `name()` or `Type::name()`. It must be defined in the last `.rs` file that
//! its paragraph or list item has named before it, or anywhere in `crates/` if there is none.
//!
//! The table in `docs/internals/promises.md` has a row for each promise, with a test and a mutation
//! of the code that makes the test fail.

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

/// Contents of a file that a table names relative to the root or to `crates/`.
fn named_file(name: &str) -> Option<String> {
    let paths = [root().join(name), root().join("crates").join(name)];
    paths.iter().find_map(|path| fs::read_to_string(path).ok())
}

/// True if `source` has a test function of this name.
fn has_test(source: &str, name: &str) -> bool {
    let mark = format!("fn {name}(");
    source.match_indices(&mark).any(|(at, _)| {
        let before = source[..at].lines().rev().take(4);
        before.take_while(|line| !line.contains('}')).any(|line| line.contains("#[test]"))
    })
}

/// Files and functions in backticks of a table cell, each function with the file before it.
fn functions(cell: &str) -> Vec<(String, String)> {
    let (mut file, mut found) = (String::new(), Vec::new());
    for name in cell.split('`').skip(1).step_by(2) {
        match name.strip_suffix("()") {
            Some(function) => found.push((file.clone(), function.to_owned())),
            None if name.ends_with(".rs") => name.clone_into(&mut file),
            None => {}
        }
    }
    found
}

/// Errors in a row of the table of promises: its cells are the promise, the proof and the mutation.
fn errors_of_promise(row: &str) -> Vec<String> {
    let cells: Vec<_> = row.trim().trim_matches('|').split(" | ").map(str::trim).collect();
    let [_, proof, mutation] = cells[..] else { return vec![format!("not three cells: {row}")] };
    if proof.starts_with("No test: ") {
        return if mutation == "-" {
            Vec::new()
        } else {
            vec![format!("mutated without a test: {row}")]
        };
    }
    let mut errors = Vec::new();
    let tests = functions(proof);
    // The test program of the supervisor has no test functions.
    if tests.is_empty() && !proof.contains("`supervisor/tests/hostile.rs`") {
        errors.push(format!("no test: {row}"));
    }
    for (file, name) in tests {
        if !named_file(&file).is_some_and(|source| has_test(&source, &name)) {
            errors.push(format!("no test {name} in {file}"));
        }
    }
    if functions(mutation).is_empty() {
        errors.push(format!("no mutated function: {row}"));
    }
    errors
}

/// First words of each promise in the threat model, as they have to be in the table.
fn promises_of(threat_model: &str) -> Vec<String> {
    let mut found = Vec::new();
    for block in threat_model.replace("\n* ", "\n\n* ").split("\n\n") {
        let block = block.split_whitespace().collect::<Vec<_>>().join(" ");
        let promise = match block.strip_prefix("* Promised: ") {
            Some(promise) => promise,
            None => match block.strip_prefix("* *").and_then(|rest| rest.split_once(".* ")) {
                Some((title, _)) => title,
                None => continue,
            },
        };
        found.push(promise.split(' ').take(5).collect::<Vec<_>>().join(" "));
    }
    found
}

#[test]
fn every_promise_has_a_test_and_a_mutation() {
    let page = fs::read_to_string(root().join("docs/internals/promises.md")).unwrap();
    let rows: Vec<_> = page
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| promise |"))
        .collect();
    assert!(rows.len() > 30, "{} rows", rows.len());
    let errors: Vec<_> = rows.iter().flat_map(|row| errors_of_promise(row)).collect();
    assert!(errors.is_empty(), "{}", errors.join("\n"));
    let threat_model = fs::read_to_string(root().join("docs/threat-model.md")).unwrap();
    let promises = promises_of(&threat_model);
    assert!(promises.len() > 10, "{promises:?}");
    for promise in promises {
        assert!(page.contains(&promise), "no row of the table has the promise \"{promise}\"");
    }
}

#[test]
fn a_promise_without_a_proof_is_found() {
    let here = "`tools/xtask/tests/architecture.rs`";
    for (row, count) in [
        (
            format!(
                "| p | {here}, `a_wrong_name_is_found()` | {here}, `defines()`: returns true |"
            ),
            0,
        ),
        (format!("| p | {here}, `defines()` | {here}, `defines()`: returns true |"), 1),
        (format!("| p | {here}, `a_wrong_name_is_found()` | any |"), 1),
        (format!("| p | {here} | {here}, `defines()`: returns true |"), 1),
        (format!("| p | No test: a reason | {here}, `defines()`: returns true |"), 1),
        ("| p | No test: a reason | - |".to_owned(), 0),
        ("| p | No test: a reason |".to_owned(), 1),
    ] {
        let errors = errors_of_promise(&row);
        assert_eq!(errors.len(), count, "{row}: {errors:?}");
    }
    let text = "* Promised: a b\n  c d e f\n* Not promised: x\n\n* *Title of it.* More.\n";
    assert_eq!(promises_of(text), ["a b c d e", "Title of it"]);
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
