//! Ledger of the fuzz runs in `docs/internals/fuzzing.md`: a row for each target and kind of run.
//!
//! A row counts the steps since the last change of the target's code, which is identified by a hash
//! of the body and of the crates under test, without comments. So runs add up until that code
//! changes.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use shadowbell_bench::workspace::root;

/// Page with the ledger.
const PAGE: &str = "docs/internals/fuzzing.md";
/// Lines around the ledger.
const BEGIN: &str = "<!-- ledger -->";
const END: &str = "<!-- end of the ledger -->";

const HEAD: &str = "\
| target | run | code | steps | seconds | last run | coverage | seconds without new coverage | failed runs |
|---|---|---|---:|---:|---|---:|---:|---:|
";

/// Crates under test of each target, by their directories.
const CODE: [(&str, &[&str]); 15] = [
    ("chaos", &["controller", "disk-layers", "memory"]),
    ("client", &["vfio-user"]),
    ("decode", &["spec", "vfio-user"]),
    ("doorbell", &["doorbell"]),
    ("driver", &["driver"]),
    ("file", &["disk-file"]),
    ("nbd", &["block", "export", "nbd"]),
    ("qcow2", &["disk-qcow2"]),
    ("queues", &["controller", "memory"]),
    ("resets", &["controller"]),
    ("session", &["controller", "frontend", "memory", "vfio-user"]),
    ("shared", &["vfio-user"]),
    ("subsystem", &["controller"]),
    ("text", &["config", "disk", "nvme-tools"]),
    ("vhost", &["block", "export"]),
];

/// Kind of run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// libFuzzer with the address sanitizer.
    Guided,
    /// The bodies alone, with random changes of the corpus.
    Plain,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Guided => "guided",
            Self::Plain => "plain",
        }
    }

    fn of(name: &str) -> Option<Self> {
        [Self::Guided, Self::Plain].into_iter().find(|kind| kind.name() == name)
    }
}

/// Row of the ledger: one run, or the sum of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) target: String,
    pub(super) kind: Kind,
    /// Hash of the code.
    pub(super) code: String,
    pub(super) steps: u64,
    pub(super) seconds: u64,
    /// Date of the last run.
    pub(super) date: String,
    /// Number of covered edges that libFuzzer reports.
    pub(super) coverage: u64,
    /// Time since a run last found new coverage, in seconds of runs.
    pub(super) quiet: u64,
    /// Number of runs that failed.
    pub(super) failed: u64,
}

impl Row {
    /// Parses a line of the table. `None` if it is none of its rows.
    fn parse(line: &str) -> Option<Self> {
        let cells: Vec<_> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        let [target, kind, code, steps, seconds, date, coverage, quiet, failed] = cells[..] else {
            return None;
        };
        let number = |text: &str| text.parse::<u64>().ok();
        Some(Self {
            target: target.to_owned(),
            kind: Kind::of(kind)?,
            code: code.to_owned(),
            steps: number(steps)?,
            seconds: number(seconds)?,
            date: date.to_owned(),
            coverage: number(coverage)?,
            quiet: number(quiet)?,
            failed: number(failed)?,
        })
    }

    fn line(&self) -> String {
        let Self { target, kind, code, steps, seconds, date, coverage, quiet, failed } = self;
        let kind = kind.name();
        format!(
            "| {target} | {kind} | {code} | {steps} | {seconds} | {date} | {coverage} | {quiet} | {failed} |\n"
        )
    }

    /// Adds a later run. If the code has changed since, only the later run counts.
    fn add(&mut self, later: &Self) {
        let before = std::mem::replace(self, later.clone());
        if before.code != later.code {
            return;
        }
        self.steps += before.steps;
        self.seconds += before.seconds;
        self.failed += before.failed;
        self.coverage = later.coverage.max(before.coverage);
        if later.quiet >= later.seconds {
            self.quiet += before.quiet;
        }
    }
}

/// Adds runs to the rows between the marks of a page. Returns the page, and the changed rows.
fn update(page: &str, runs: &[Row]) -> Result<(String, String)> {
    let (before, rest) = page.split_once(BEGIN).context("the page has no ledger")?;
    let (table, after) = rest.split_once(END).context("the ledger has no end")?;
    let mut rows: Vec<Row> = table.lines().filter_map(Row::parse).collect();
    let mut changed = String::new();
    for run in runs {
        let is_it = |row: &&mut Row| row.target == run.target && row.kind == run.kind;
        match rows.iter_mut().find(is_it) {
            Some(row) => row.add(run),
            None => rows.push(run.clone()),
        }
        let row = rows.iter().find(|row| row.target == run.target && row.kind == run.kind);
        changed.extend(row.map(Row::line));
    }
    rows.sort_by(|one, other| (&one.target, one.kind).cmp(&(&other.target, other.kind)));
    let lines: String = rows.iter().map(Row::line).collect();
    let sum = |kind: Kind| -> u64 {
        rows.iter().filter(|row| row.kind == kind).map(|row| row.steps).sum::<u64>()
    };
    let mut new = format!("{before}{BEGIN}\n\n{HEAD}{lines}\n");
    let (guided, plain) = (sum(Kind::Guided), sum(Kind::Plain));
    write!(new, "Together: {guided} guided steps, {plain} plain steps.\n\n{END}{after}")?;
    Ok((new, changed))
}

/// Adds runs to the ledger. If `is_written`, the page is changed; otherwise the rows that would
/// change are printed.
pub(super) fn add(runs: &[Row], is_written: bool) -> Result<()> {
    let path = root().join(PAGE);
    let page = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let (page, changed) = update(&page, runs)?;
    if is_written {
        fs::write(&path, page).with_context(|| path.display().to_string())?;
        println!("updated the ledger in {PAGE}");
    } else {
        println!("\nRows for the ledger in {PAGE} (`--ledger` adds them):\n{HEAD}{changed}");
    }
    Ok(())
}

/// Date of today (UTC).
pub(super) fn today() -> Result<String> {
    let output = std::process::Command::new("date").args(["-u", "+%F"]).output().context("date")?;
    ensure!(output.status.success(), "date failed");
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Hash of a target's code.
pub(super) fn code_of(target: &str) -> Result<String> {
    let (_, crates) = CODE
        .iter()
        .find(|(name, _)| *name == target)
        .with_context(|| format!("the ledger does not know the crates of {target}"))?;
    let bodies = root().join("fuzz/bodies/src");
    let mut files = vec![bodies.join(format!("{target}.rs"))];
    collect(&bodies.join(target), &mut files);
    crates
        .iter()
        .for_each(|name| collect(&root().join("crates").join(name).join("src"), &mut files));
    files.sort();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for file in files {
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let name = file.strip_prefix(root()).unwrap_or(&file).display().to_string();
        let code = text.lines().map(str::trim).filter(|line| is_code(line));
        for line in std::iter::once(&*name).chain(code) {
            for byte in line.bytes().chain([b'\n']) {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
    }
    Ok(format!("{:08x}", hash >> 32))
}

/// True for a line that is neither empty nor a comment.
fn is_code(line: &str) -> bool {
    !line.is_empty() && !line.starts_with("//")
}

/// Adds the Rust files below a directory, except those that contain only tests.
fn collect(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if stem == "tests" || stem.ends_with("_model") {
            continue;
        }
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(code: &str, steps: u64, seconds: u64, quiet: u64) -> Row {
        Row {
            target: "nbd".to_owned(),
            kind: Kind::Guided,
            code: code.to_owned(),
            steps,
            seconds,
            date: "2026-01-02".to_owned(),
            coverage: steps / 10,
            quiet,
            failed: 0,
        }
    }

    #[test]
    fn runs_of_the_same_code_add_up() {
        let empty = format!("# Page\n\n{BEGIN}\n{END}\n\nMore.\n");
        let first = row("0001", 100, 60, 10);
        let (page, changed) = update(&empty, std::slice::from_ref(&first)).unwrap();
        assert_eq!(changed, first.line());
        assert!(page.starts_with("# Page\n") && page.ends_with("\n\nMore.\n"), "{page}");
        assert_eq!(Row::parse(&first.line()), Some(first));
        // A run without new coverage extends the time without new coverage; another restarts it.
        let quiet = row("0001", 50, 30, 30);
        let (page, changed) = update(&page, &[quiet]).unwrap();
        assert_eq!(changed, Row { coverage: 10, ..row("0001", 150, 90, 40) }.line());
        let plain = Row { kind: Kind::Plain, failed: 1, ..row("0001", 7, 1, 1) };
        let (page, _) = update(&page, &[row("0001", 10, 30, 5), plain]).unwrap();
        let rows: Vec<_> = page.lines().filter_map(Row::parse).collect();
        assert_eq!((rows.len(), rows[0].steps, rows[0].quiet), (2, 160, 5));
        assert!(page.contains("Together: 160 guided steps, 7 plain steps."), "{page}");
        // Other code: only its own run counts.
        let (page, _) = update(&page, &[row("0002", 3, 1, 1)]).unwrap();
        let rows: Vec<_> = page.lines().filter_map(Row::parse).collect();
        assert_eq!((rows[0].steps, rows[1].failed), (3, 1));
        assert_eq!(page.matches("| target |").count(), 1);
    }

    #[test]
    fn the_ledger_of_the_book_is_complete() {
        let page = fs::read_to_string(root().join(PAGE)).unwrap();
        let rows: Vec<_> = page.lines().filter_map(Row::parse).collect();
        let targets = fs::read_dir(root().join("fuzz/targets")).unwrap().count();
        assert_eq!(targets, CODE.len(), "each target has its crates");
        for (target, crates) in CODE {
            assert!(root().join(format!("fuzz/targets/{target}.rs")).exists(), "{target}");
            let exists = |name: &&str| root().join("crates").join(name).join("src").is_dir();
            assert!(crates.iter().all(exists), "{target}");
            assert_eq!(code_of(target).unwrap().len(), 8);
            for kind in [Kind::Guided, Kind::Plain] {
                let its = rows.iter().filter(|row| row.target == target && row.kind == kind);
                assert_eq!(its.count(), 1, "{target}: rows for {} runs", kind.name());
            }
        }
        assert_eq!(update(&page, &[]).unwrap().0, page, "the sums are current");
    }

    #[test]
    fn comments_are_no_code() {
        assert!(is_code("let x = 1; // one") && !is_code("// one") && !is_code("//! One."));
    }
}
