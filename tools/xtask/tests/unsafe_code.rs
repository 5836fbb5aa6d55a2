//! Check of the promise that `unsafe` code is confined to the crate `memory` and to modules named
//! `sys`: no other code of the workspace uses it or allows it.

use std::fs;
use std::path::{Path, PathBuf};

use shadowbell_bench::workspace::root;

/// Directories with code of the workspace.
const ALL_CODE: [&str; 5] = ["crates", "fuzz", "guest", "tests", "tools"];

/// Rust files below a directory, except those of build outputs.
fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// True if unsafe code is permitted in a file, whose path is relative to the root.
fn is_permitted(path: &Path) -> bool {
    let is_sys = |name: &std::ffi::OsStr| name == "sys" || name == "sys.rs";
    path.starts_with("crates/memory/src") || path.iter().any(is_sys)
}

/// Lines of a file with unsafe code, or with an attribute that permits it outside of `sys`.
fn violations(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    let is_module = |line: Option<&&str>| {
        line.is_some_and(|line| line.trim_start_matches("pub(crate) ").starts_with("mod sys"))
    };
    let mut found = Vec::new();
    for (nth, line) in lines.iter().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        let words = code.split(|c: char| !(c.is_alphanumeric() || "_-\"".contains(c)));
        let is_unsafe = words.clone().any(|word| word == "unsafe");
        let allows = ["allow", "expect", "warn"].iter().any(|level| code.contains(level))
            && words.clone().any(|word| word == "unsafe_code");
        if is_unsafe || allows && !is_module(lines.get(nth + 1)) {
            found.push((nth + 1, (*line).to_owned()));
        }
    }
    found
}

#[test]
fn unsafe_code_is_in_memory_and_in_modules_named_sys() {
    let (mut all, mut wrong) = (Vec::new(), Vec::new());
    ALL_CODE.iter().for_each(|directory| files(&root().join(directory), &mut all));
    assert!(all.len() > 800, "{} files", all.len());
    for path in all {
        let name = path.strip_prefix(root()).unwrap_or(&path);
        if !is_permitted(name) && !name.ends_with("tools/xtask/tests/unsafe_code.rs") {
            let text = fs::read_to_string(&path).unwrap();
            wrong.extend(
                violations(&text).into_iter().map(|(line, text)| (name.to_owned(), line, text)),
            );
        }
    }
    assert!(wrong.is_empty(), "unsafe code outside of `memory` and `sys`: {wrong:#?}");
}

#[test]
fn every_crate_forbids_unsafe_code() {
    let mut all = Vec::new();
    ALL_CODE.iter().for_each(|directory| files(&root().join(directory), &mut all));
    let is_root = |path: &&PathBuf| {
        path.parent().is_some_and(|parent| parent.ends_with("src"))
            && path.file_name().is_some_and(|name| name == "lib.rs" || name == "main.rs")
            && !path.ends_with("memory/src/lib.rs")
    };
    let roots: Vec<_> = all.iter().filter(is_root).collect();
    assert!(roots.len() > 30, "{} crates", roots.len());
    for path in roots {
        let text = fs::read_to_string(path).unwrap();
        let forbids = ["forbid", "deny"].map(|level| format!("#![{level}(unsafe_code)]"));
        assert!(forbids.iter().any(|line| text.contains(line)), "{}", path.display());
    }
}

#[test]
fn unsafe_code_is_detected() {
    for (text, count) in [
        ("fn f() { unsafe { g() } }", 1),
        ("unsafe impl Send for X {}", 1),
        ("// unsafe code\n#![forbid(unsafe_code)]", 0),
        ("#[allow(unsafe_code)]\nmod sys;", 0),
        ("#[allow(unsafe_code)]\nmod other;", 1),
        ("#![allow(unsafe_code)]", 1),
        ("#[derive(Debug)]\nstruct S { unsafe_shutdowns: u64 }", 0),
    ] {
        assert_eq!(violations(text).len(), count, "{text}");
    }
}
