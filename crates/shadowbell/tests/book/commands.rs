//! Commands of the book, run as tests.
//!
//! A block of `sh` is run line by line, in a temporary directory of the page that also stands
//! for `/run`, `/srv` and `/etc/shadowbell`. A block of `sh,no-run` cannot be run by the tests:
//! the reason stands above it, in italics. A comment `<!-- sh: COMMAND -->` is run and not
//! shown; `<!-- write: PATH -->` stores the block before it in a file. `shadowbell serve` runs
//! in the background until the page ends. A block of `output` after a block of `sh` is what its
//! commands print: numbers may differ, and `...` stands for any text, or alone for any lines. In no
//! other block does a line begin with a command.

use crate::pages::{Page, book};
use pulldown_cmark::Event;
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait;
use std::fmt::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Replaces the absolute paths of the book by paths in `directory`.
fn moved(text: &str, directory: &Path) -> String {
    let directory = directory.display().to_string();
    let mut moved = text.to_owned();
    for path in ["/run/", "/srv/", "/etc/shadowbell"] {
        for before in [" ", ":", "=", "\"", "'", "\n"] {
            let whole = format!("{before}{path}");
            moved = moved.replace(&whole, &format!("{before}{directory}{path}"));
        }
    }
    let escaped = directory.replace('/', "%2F");
    moved.replace("/%2Frun%2F", &format!("/{escaped}%2Frun%2F"))
}

/// Returns true if a command serves until a signal ends it.
fn serves(line: &str) -> bool {
    line.starts_with("shadowbell serve ") && !line.contains("--check")
}

/// Script of the page's commands, or `None` if the page has no command. If a block of commands is
/// followed by a block with the info string `output`, the script redirects the standard output of
/// the commands to the file `output.LINE`; LINE is the line number of the second block.
fn script(page: &Page, directory: &Path) -> Option<String> {
    let mut script = String::new();
    let mut last = String::new();
    let mut blocks = page.blocks().into_iter().peekable();
    for (event, range) in page.events() {
        match event {
            Event::Start(pulldown_cmark::Tag::CodeBlock(_)) => {
                let (info, text, line) = blocks.next().unwrap();
                assert_eq!(line, page.line(range.start));
                if info == "sh" {
                    let output = blocks.peek().filter(|(info, _, _)| info == "output");
                    if let Some((_, _, line)) = output {
                        let _ =
                            writeln!(script, "exec 4>&1 > {}/output.{line}", directory.display());
                    }
                    let output = output.is_some();
                    commands(&mut script, &moved(&format!("\n{text}"), directory));
                    if output {
                        let _ = writeln!(script, "exec >&4 4>&-");
                    }
                }
                last = text;
            }
            Event::Html(html) => {
                let comment =
                    html.trim().strip_prefix("<!-- ").and_then(|h| h.strip_suffix(" -->"));
                if let Some(command) = comment.and_then(|comment| comment.strip_prefix("sh: ")) {
                    commands(&mut script, &moved(&format!("\n{command}"), directory));
                } else if let Some(path) = comment.and_then(|c| c.strip_prefix("write: ")) {
                    let path = moved(&format!(" {path}"), directory);
                    let path = Path::new(path.trim());
                    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                    std::fs::write(path, moved(&last, directory)).unwrap();
                }
            }
            _ => {}
        }
    }
    (!script.is_empty()).then_some(script)
}

fn commands(script: &mut String, text: &str) {
    for line in text.replace("\\\n", " ").lines().filter(|line| !line.trim().is_empty()) {
        // Each command is printed before it runs, so that a failure names its command.
        let _ = writeln!(script, "echo '+ {}' >&2", line.replace('\'', "'\\''"));
        if !serves(line) {
            let _ = writeln!(script, "{line}");
            continue;
        }
        let line = line.split(" #").next().unwrap_or(line);
        let _ = writeln!(script, "{line} >> server.log 2>&1 & pids+=($!)");
        let mut words = line.split_whitespace().skip_while(|word| *word != "--socket").skip(1);
        let ready =
            words.next().map_or("shadowbell ctl status".to_owned(), |s| format!("[ -S {s} ]"));
        let _ = writeln!(
            script,
            "until {ready} > /dev/null 2>&1; do kill -0 $! 2> /dev/null; sleep 0.02; done"
        );
    }
}

/// Normalizes a line of output for a comparison: each number is `0`, and space between words is one
/// blank.
fn plain(line: &str) -> String {
    let mut plain = String::new();
    let mut characters = line.split_whitespace().collect::<Vec<_>>().join(" ");
    characters.push(' ');
    let mut characters = characters.chars().peekable();
    while let Some(character) = characters.next() {
        let is_number = |next: &char| next.is_ascii_digit() || *next == '.';
        if character.is_ascii_digit() {
            while characters.next_if(is_number).is_some() {}
            plain.push('0');
        } else if character != '-' || !plain.ends_with('-') {
            plain.push(character);
        }
    }
    plain.trim_end().to_owned()
}

/// True if `line` matches the pattern `shown`. In the pattern, `...` stands for any text.
fn is_like(shown: &str, line: &str) -> bool {
    // `plain` takes dots after a number as part of it, so `...` is replaced first.
    let shown = plain(&shown.replace("...", "\u{2026}"));
    let line = plain(line);
    let mut parts = shown.split('\u{2026}').map(str::trim);
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    let parts: Vec<_> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.ends_with(last)
}

/// True if `lines` match the pattern `shown`. A line `...` of the pattern stands for any number of
/// lines.
fn are_like(shown: &[&str], lines: &[&str]) -> bool {
    match shown.split_first() {
        None => lines.is_empty(),
        Some((&"...", shown)) => (0..=lines.len()).any(|skip| are_like(shown, &lines[skip..])),
        Some((first, shown)) => lines
            .split_first()
            .is_some_and(|(line, lines)| is_like(first, line) && are_like(shown, lines)),
    }
}

/// Compares each block `output` of the page with the actual output of the block of commands before
/// it.
fn compare(page: &Page, directory: &Path) -> Result<(), String> {
    for (info, shown, line) in page.blocks() {
        let path = directory.join(format!("output.{line}"));
        if info != "output" {
            continue;
        }
        let text = std::fs::read_to_string(path).map_err(|e| {
            format!("{}:{line}: no block of `sh` before it: {e}", page.path.display())
        })?;
        let text = text.replace(&directory.display().to_string(), "");
        let (shown, lines): (Vec<_>, Vec<_>) = (shown.lines().collect(), text.lines().collect());
        if !are_like(&shown, &lines) {
            return Err(format!("{}:{line}: the commands print:\n{text}", page.path.display()));
        }
    }
    Ok(())
}

#[test]
fn outputs_are_compared() {
    for (shown, line) in [
        ("vm0  12 MiB", "vm0 7 MiB"),
        ("serial ..., UUID ...", "serial SB1, UUID 0e"),
        ("1.5 s", "12 s"),
        ("a  -----", "a  --"),
    ] {
        assert!(is_like(shown, line), "{shown}: {line}");
    }
    for (shown, line) in
        [("vm0 yes", "vm0 no"), ("a ... b", "a c"), ("a", "a b"), ("5 MiB", "5 GiB"), ("", "a")]
    {
        assert!(!is_like(shown, line), "{shown}: {line}");
    }
    assert!(are_like(&["a", "...", "b"], &["a", "x", "y", "b"]));
    assert!(!are_like(&["a", "...", "b"], &["a", "x"]) && !are_like(&["a"], &["a", "b"]));
    let page = |output: &str| Page {
        path: "page.md".into(),
        text: format!(
            "```sh\necho 5 blocks > /srv/a\ncat /srv/a\n```\n\n```output\n{output}\n```\n"
        ),
    };
    run(&page("7 blocks")).unwrap();
    assert!(run(&page("7 bytes")).is_err());
}

#[test]
fn the_commands_of_every_page_work() {
    std::thread::scope(|scope| {
        let pages = book().into_iter();
        let runs: Vec<_> = pages.map(|page| scope.spawn(move || run(&page))).collect();
        let failed: Vec<_> = runs.into_iter().filter_map(|run| run.join().unwrap().err()).collect();
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    });
}

/// Runs the commands of a page. The error is their output.
fn run(page: &Page) -> Result<(), String> {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    for name in ["run", "srv", "etc"] {
        std::fs::create_dir(directory.join(name)).unwrap();
    }
    let Some(script) = script(page, directory) else { return Ok(()) };
    let program = Path::new(env!("CARGO_BIN_EXE_shadowbell")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let head =
        "set -euo pipefail\npids=()\ntrap 'kill \"${pids[@]}\" 2> /dev/null || true; wait' EXIT\n";
    let file = directory.join("page.sh");
    std::fs::write(&file, format!("{head}{script}")).unwrap();
    let out = || std::fs::OpenOptions::new().append(true).create(true).open(directory.join("out"));
    let mut command = Command::new("bash");
    command
        .arg(&file)
        .current_dir(directory)
        .env("PATH", path)
        .env("SHADOWBELL_RUN_DIR", directory.join("run/shadowbell"))
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .stdout(out().unwrap())
        .stderr(out().unwrap());
    let mut child = ProcessGroup::spawn(&mut command).unwrap();
    let deadline = wait::deadline();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if Instant::now() > deadline {
            break None;
        }
        wait::pause();
    };
    // Ends the background processes of the page, too.
    child.kill();
    let read = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap_or_default();
    let (name, out, log) = (page.path.display(), read("out"), read("server.log"));
    let fine = status.is_some_and(|status| status.success());
    if !fine {
        return Err(format!("{name}: {status:?}\n{out}\nlog of the server:\n{log}"));
    }
    compare(page, directory)
}

#[test]
fn a_command_that_fails_is_found() {
    let run = |text: &str| run(&Page { path: "page.md".into(), text: text.to_owned() });
    run("```sh\ntrue\n```\n").unwrap();
    run("```sh,no-run\nfalse\n```\n").unwrap();
    for text in [
        "```sh\nfalse\ntrue\n```\n",
        "<!-- sh: false -->\n",
        "```sh\nshadowbell ctl status\n```\n",
        "```sh\nshadowbell serve mem:1MiB --no-such-option\n```\n",
        "```sh\nfalse | cat\n```\n",
    ] {
        assert!(run(text).is_err(), "{text}");
    }
    let text = "```text\nwritten\n```\n<!-- write: /srv/file -->\n```sh\ngrep written /srv/file\n\
                shadowbell serve mem:1MiB --socket /run/a.sock\n\
                shadowbell list vfio-user:/run/a.sock\n```\n";
    run(text).unwrap();
}

#[test]
fn every_block_that_is_not_run_has_a_reason() {
    for page in book() {
        let lines: Vec<_> = page.text.lines().collect();
        for (info, text, line) in page.blocks() {
            let place = format!("{}:{line}", page.path.display());
            let commands =
                ["shadowbell ", "curl ", "cargo ", "qemu-", "systemctl ", "sudo ", "nvme "];
            let is_command = |line: &str| commands.iter().any(|word| line.trim().starts_with(word));
            match info.as_str() {
                "sh" | "output" => {}
                "sh,no-run" => {
                    let above = lines[..line - 1].iter().rev().find(|line| !line.is_empty());
                    let reason = above.is_some_and(|l| l.starts_with("*Not run by the tests"));
                    assert!(reason, "{place}: no reason above the block");
                }
                _ => {
                    // Lines with several blanks in a row are skipped: they are rows of a table, and
                    // a row may begin with the name of a command.
                    let found = text.lines().find(|line| is_command(line) && !line.contains("  "));
                    assert!(found.is_none(), "{place}: a command that is not run: {found:?}");
                }
            }
        }
    }
}
