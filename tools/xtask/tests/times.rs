//! Check of test code: every sleep, short limit and asserted duration has a comment with its
//! reason, on the same line or directly above the statement.
//!
//! The other waits of a test are waits for an event, by `shadowbell_testing::wait` and with the one
//! limit of that module, because a busy machine may exceed any shorter limit.

use std::path::{Path, PathBuf};

/// Directories with only test code, in addition to those named `tests`.
const TEST_CODE: [&str; 3] = ["crates/testing/src", "guest/src", "tools/xtask/src/deb"];
const ALL_CODE: [&str; 5] = ["crates", "fuzz/bodies", "guest", "tests", "tools"];
/// Minimum limit in seconds, which even a busy machine does not exceed.
const LONG: u64 = 60;
/// Minimum number of iterations of a shell loop that waits. Each iteration sleeps for 0.1 s.
const TURNS: u64 = 600;
/// Words that mark a duration on the same line as a limit.
const OF_LIMITS: [&str; 14] = [
    "Instant::now()",
    "timeout",
    "wait(",
    "wait_for(",
    "deadline",
    "until",
    "limit",
    "linger",
    "const ",
    "io:",
    "admin:",
    "ready:",
    "elapsed()",
    "patience",
];

fn files(directory: &Path, all: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() && !entry.ends_with("target") {
            files(&entry, all);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            all.push(entry);
        }
    }
}

/// True if the line contains a sleep. A sleep for the time of a named constant does not count,
/// because the reason is at the constant's definition.
fn is_sleep(line: &str) -> bool {
    line.match_indices("sleep(").any(|(at, word)| {
        let before = line[..at].chars().next_back().is_none_or(|c| ": ({|".contains(c));
        let constant = |c: char| c.is_ascii_uppercase() || c == '_';
        let of = &line[at + word.len()..];
        let is_constant = of.trim_start_matches(constant).starts_with(')') && !of.starts_with(')');
        before && !is_constant && !line[..at].ends_with("fn ")
    })
}

/// True if the line contains a duration that is shorter than the minimum limit.
fn is_short(line: &str) -> bool {
    let short = |word: &str, scale: u64| {
        line.match_indices(word).any(|(at, _)| {
            let digits =
                line[at + word.len()..].chars().take_while(|c| c.is_ascii_digit() || *c == '_');
            let digits: String = digits.filter(char::is_ascii_digit).collect();
            digits.parse::<u64>().map_or(scale > 1, |number| number / scale < LONG)
        })
    };
    short("Duration::from_secs(", 1)
        || short("Duration::from_secs_f64(", 1)
        || short("Duration::new(", 1)
        || short("tv_sec: ", 1)
        || short("Duration::from_millis(", 1000)
        || short("Duration::from_micros(", 1_000_000)
}

/// True if the line contains a shell loop with fewer iterations than a wait must have. A loop of
/// very few iterations does not count, because it does not wait.
fn is_short_loop(line: &str) -> bool {
    line.match_indices(" in $(seq ").any(|(at, word)| {
        let digits = line[at + word.len()..].chars().take_while(char::is_ascii_digit);
        digits.collect::<String>().parse().is_ok_and(|turns: u64| (20..TURNS).contains(&turns))
    })
}

fn depends_on_a_time(line: &str) -> bool {
    if is_short_loop(line) {
        return true;
    }
    let is_limit = OF_LIMITS.iter().any(|word| line.contains(word)) && is_short(line);
    let is_limit = is_limit && !line.contains("Polling::Adaptive(");
    let compares = [" < ", " > ", " >= "].iter().any(|sign| line.contains(sign));
    let compares = line.contains("elapsed()") && compares;
    if line.starts_with('"') {
        return false;
    }
    // A comparison with the field `timeout` of a test's host is allowed, because the value is
    // checked where it is set.
    let is_checked =
        ["LIMIT", "host.timeout", "self.timeout"].iter().any(|word| line.contains(word));
    is_sleep(line) || is_limit || compares && !is_checked
}

#[test]
fn no_test_depends_on_a_time_without_a_reason() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let mut all = Vec::new();
    ALL_CODE.iter().for_each(|directory| files(&root.join(directory), &mut all));
    let mut found = Vec::new();
    for path in all {
        let name = path.strip_prefix(&root).unwrap();
        let is_test = name.components().any(|part| part.as_os_str() == "tests");
        let is_test = is_test || name.ends_with("tests.rs");
        let mut is_test = is_test || TEST_CODE.iter().any(|directory| name.starts_with(directory));
        let text = std::fs::read_to_string(&path).unwrap();
        let (mut has_reason, mut has_attribute) = (false, false);
        for (line, number) in text.lines().map(str::trim).zip(1..) {
            // The tests of a file are in its last module, so all lines from here on are test code.
            is_test |= has_attribute && line.starts_with("mod ") && line.ends_with('{');
            has_attribute = line.starts_with("#[cfg(") && line.contains("test");
            let code = line.split("//").next().unwrap();
            // A comment above a function or an attribute is not the reason for a statement in it.
            has_reason &= !line.contains("fn ") && !line.starts_with('#');
            has_reason |= line.contains("//");
            if is_test && !has_reason && depends_on_a_time(code) {
                found.push(format!("{}:{number}: {line}", name.display()));
            }
            has_reason &= !code.is_empty() || line.starts_with("//");
            has_reason &= !code.ends_with(';') && !code.trim_end().ends_with(';');
        }
    }
    let list = found.join("\n");
    assert!(found.is_empty(), "wait for an event, or say in a comment why not:\n{list}");
}

#[test]
fn dependence_on_a_time_is_detected() {
    for line in [
        "std::thread::sleep(Duration::from_millis(5));",
        "sleep(pause);",
        "let until = Instant::now() + Duration::from_secs(59);",
        "socket.set_read_timeout(Some(Duration::from_millis(59_999))).unwrap();",
        "const SOON: Duration = Duration::from_secs(20);",
        "assert!(began.elapsed() < SOON);",
        "host.timeout = Duration::from_secs(10);",
        "link.set_patience(Duration::from_millis(500))?;",
        "let until = Instant::now() + Duration::new(5, 0);",
        "\"for try in $(seq 100); do [ -e /tmp/done ] && exit 0; sleep 0.1; done\"", // An example.
    ] {
        assert!(depends_on_a_time(line), "{line}");
    }
    for line in [
        "wait::short_pause();",
        "turns.sleep();",
        "std::thread::sleep(PAUSE);",
        "let until = Instant::now() + Duration::from_secs(60);",
        "assert!(began.elapsed() < LIMIT);",
        "let now = now + Duration::from_micros(5);",
        "\"for try in $(seq 600); do [ -e /tmp/done ] && exit 0; sleep 0.1; done\"",
        "\"for n in $(seq 16); do printf 1; done\"",
    ] {
        assert!(!depends_on_a_time(line), "{line}");
    }
}
