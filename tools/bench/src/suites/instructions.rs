//! The suite `instructions`: instructions per I/O of each side, counted by callgrind.
//!
//! A driver and a controller take turns on one thread (`crates/frontend/examples/step.rs`): the
//! driver takes completions and submits as many reads, and the controller makes one pass. There are
//! no waits, so every run executes the same instructions. The counts of two runs of different
//! length are subtracted. This excludes the first access to everything.
//!
//! The figures depend on the compiler, whose version is recorded with them.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::machine;
use crate::server::{child, output};
use crate::table::Table;
use crate::workspace::{self, cargo, root};

/// Use of the recorded figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recorded {
    /// Print the differences from the recorded figures.
    Show,
    /// Fail if a side needs more instructions than recorded.
    Check,
    /// Record the new figures.
    Replace,
}

/// Queue depths, all below the number of queue entries. The result of only one depth is recorded.
const DEPTHS: [u32; 4] = [1, 8, 32, 120];
const RECORDED_DEPTH: u32 = 32;
/// Allowed difference from the recorded figures, in percent.
const TOLERANCE: f64 = 3.0;
/// Functions of each side, as patterns for callgrind.
const DRIVER: &str = "*driver_side*";
const CONTROLLER: &str = "*controller_side*";

/// Instructions per I/O.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PerIo {
    driver: f64,
    controller: f64,
}

/// Counts at all depths, or only at the recorded one.
pub(crate) fn run(quick: bool, what: Recorded) -> Result<Vec<Table>> {
    machine::need("valgrind", "valgrind", true).map_err(anyhow::Error::msg)?;
    let program = build("shadowbell-frontend", "step")?;
    let depths = if quick { vec![RECORDED_DEPTH] } else { DEPTHS.to_vec() };
    let mut table = Table {
        title: "Instructions per I/O, null disk, 4 KiB random read".into(),
        head: vec!["iodepth", "driver", "controller", "recorded", "difference"],
        ..Table::default()
    };
    let mut outcome = Ok(());
    for depth in &depths {
        let found = PerIo {
            driver: count(&program, DRIVER, *depth)?,
            controller: count(&program, CONTROLLER, *depth)?,
        };
        let mut row = vec![
            depth.to_string(),
            format!("{:.1}", found.driver),
            format!("{:.1}", found.controller),
        ];
        if *depth == RECORDED_DEPTH {
            if what == Recorded::Replace {
                record(&found)?;
            }
            let recorded = recorded()?;
            if let Some(recorded) = &recorded {
                row.push(format!("{:.1}, {:.1}", recorded.driver, recorded.controller));
                let [driver, controller] = differences(&found, recorded);
                row.push(format!("{driver:+.1} %, {controller:+.1} %"));
            }
            let (compared, notes) = compare(&found, recorded.as_ref());
            table.notes.extend(notes);
            if what == Recorded::Check {
                outcome = compared;
            }
        }
        table.rows.push(row);
        table.json.push(json!({
            "table": "instructions", "device": "shadowbell", "doorbells": "shadow",
            "iodepth": depth, "numjobs": 1, "bs": 4096, "rw": "randread",
            "instructions_driver": found.driver, "instructions_controller": found.controller,
        }));
    }
    if outcome.is_err() {
        // The table shows the reason of the failure.
        print!("{table}");
    }
    outcome.map(|()| vec![table])
}

/// Operations on a number of objects that a host chooses, each with the number for the first run.
/// The second run has twice as many objects. The DMA map is changed in chunks of up to 512 ranges,
/// so its numbers are large: only then is the work proportional.
const DOUBLED: [(&str, u32); 8] = [
    ("reset", 500),
    ("delete", 500),
    ("abort", 500),
    ("ranges", 50),
    ("map", 8000),
    ("unmap", 4000),
    ("preempt", 900),
    ("register", 900),
];
/// Maximum ratio of the instructions for twice the number of objects.
const DOUBLE: f64 = 2.3;

/// Checks that work is at most proportional to a number that a host chooses: cancelling and ending
/// commands in flight, finding one of them, completing ranges, mapping and unmapping, preempting
/// and registering (`crates/controller/examples/doubling.rs`).
pub(crate) fn check_doubling() -> Result<()> {
    machine::need("valgrind", "valgrind", true).map_err(anyhow::Error::msg)?;
    // A ratio of two counts does not depend on the profile.
    let program = workspace::build_example_for_tests("doubling")?;
    let mut wrong = Vec::new();
    for (operation, count) in DOUBLED {
        let work = |count: u32| {
            let arguments = [operation.to_owned(), count.to_string()];
            callgrind(&program, "*measured*", &arguments).map(|(_, instructions)| instructions)
        };
        let (once, twice) = (work(count)?, work(2 * count)?);
        let grows =
            format!("{operation}: {once:.0} instructions for {count}, {twice:.0} for twice that");
        eprintln!("{grows}");
        if twice > once * DOUBLE {
            wrong.push(grows);
        }
    }
    if wrong.is_empty() { Ok(()) } else { bail!("more than in proportion: {}", wrong.join("; ")) }
}

/// Builds an example with a rustix that uses the C library, because Valgrind does not support all
/// system calls that are made without it.
fn build(package: &str, example: &str) -> Result<PathBuf> {
    eprintln!("building the example {example} ...");
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    let output = cargo()
        .env("RUSTFLAGS", format!("{flags} --cfg=rustix_use_libc"))
        .args(["build", "--release", "--package", package, "--example", example])
        .arg("--message-format=json-render-diagnostics")
        // A separate target directory: with these compiler flags, cargo would rebuild the object
        // files in the common directory, and each other build would rebuild them again.
        .arg("--target-dir")
        .arg(root().join("target/instructions"))
        .stderr(Stdio::inherit())
        .output()
        .context("cargo build")?;
    if !output.status.success() {
        bail!("the example {example} does not build");
    }
    workspace::executable(&String::from_utf8_lossy(&output.stdout), example)
        .context("cargo build named no program")
}

/// Instructions per I/O of the functions that match `pattern`, including their callees.
fn count(program: &Path, pattern: &str, depth: u32) -> Result<f64> {
    // Each run at the recorded depth wraps the rings a whole number of times. So work that is done
    // once per wrap is included in proportion.
    let rounds = [(1 << 14) / depth.max(1), (3 << 14) / depth.max(1)];
    let mut found = Vec::new();
    for rounds in rounds {
        let (text, instructions) =
            callgrind(program, pattern, &[rounds.to_string(), depth.to_string()])?;
        let ios = completed(&text);
        let ios = ios.with_context(|| format!("the stepping example printed `{text}`"))?;
        found.push((ios, instructions));
    }
    match found.as_slice() {
        [(few, a), (many, b)] if many > few => Ok((b - a) / (many - few)),
        _ => bail!("a longer run has no more I/Os: {found:?}"),
    }
}

/// One run. Returns its output, and the instructions of the functions that match `pattern`.
fn callgrind(program: &Path, pattern: &str, arguments: &[String]) -> Result<(String, f64)> {
    let directory = tempfile::tempdir()?;
    let out = directory.path().join("callgrind.out");
    let mut command = child(Path::new("valgrind"));
    command.args(["--tool=callgrind", "--quiet", "--collect-atstart=no"]);
    command.arg(format!("--toggle-collect={pattern}"));
    command.arg(format!("--callgrind-out-file={}", out.display()));
    command.arg(program).args(arguments);
    let text = output("valgrind", command, Duration::from_secs(300))?;
    let profile = std::fs::read_to_string(&out).context("callgrind's output")?;
    let instructions = total(&profile).context("callgrind's output has no totals")?;
    if instructions == 0.0 {
        bail!("no function of the program is called {pattern}");
    }
    Ok((text, instructions))
}

/// Number of completed I/Os, from the counters of the driver's queue pair. It is not the number of
/// rounds times the depth, because a deep queue takes more than one pass of the controller.
fn completed(text: &str) -> Option<f64> {
    let (_, rest) = text.split_once(" completed: ")?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn total(profile: &str) -> Option<f64> {
    let line = profile
        .lines()
        .find_map(|line| line.strip_prefix("totals:").or_else(|| line.strip_prefix("summary:")))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Path of the recorded figures.
fn path() -> PathBuf {
    root().join("tools/bench/instructions.json")
}

fn recorded() -> Result<Option<PerIo>> {
    match std::fs::read_to_string(path()) {
        Ok(text) => parse(&text).map(Some),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).context("tools/bench/instructions.json"),
    }
}

fn parse(text: &str) -> Result<PerIo> {
    let json: Value = serde_json::from_str(text).context("tools/bench/instructions.json")?;
    let figure = |name: &str| {
        let value = json.get(name).and_then(Value::as_f64).filter(|value| *value > 0.0);
        value.with_context(|| format!("tools/bench/instructions.json has no {name}"))
    };
    Ok(PerIo {
        driver: figure("instructions_driver")?,
        controller: figure("instructions_controller")?,
    })
}

fn record(found: &PerIo) -> Result<()> {
    let version = output(
        "rustc",
        {
            let mut command = child(Path::new("rustc"));
            command.arg("--version").current_dir(root());
            command
        },
        Duration::from_secs(60),
    )?;
    let round = |value: f64| (value * 10.0).round() / 10.0;
    let json = json!({
        "what": "instructions per I/O of a 4 KiB read of a null disk; `cargo xtask bench instructions`",
        "iodepth": RECORDED_DEPTH,
        "instructions_driver": round(found.driver),
        "instructions_controller": round(found.controller),
        "compiler": version.trim(),
    });
    let text = serde_json::to_string_pretty(&json)? + "\n";
    std::fs::write(path(), text).context("tools/bench/instructions.json")
}

/// Differences of the figures from the recorded ones in percent: driver, controller.
fn differences(found: &PerIo, recorded: &PerIo) -> [f64; 2] {
    [(found.driver, recorded.driver), (found.controller, recorded.controller)]
        .map(|(found, recorded)| (found / recorded - 1.0) * 100.0)
}

/// Outcome of the comparison, an error if a side needs more instructions, and notes for the table.
fn compare(found: &PerIo, recorded: Option<&PerIo>) -> (Result<()>, Vec<String>) {
    const RECORD: &str = "record that with `cargo xtask bench instructions --record`";
    let Some(recorded) = recorded else {
        let missing = format!("Nothing is recorded yet: {RECORD}.");
        return (Err(anyhow::Error::msg(missing.clone())), vec![missing]);
    };
    let (mut outcome, mut notes) = (Ok(()), Vec::new());
    for (side, difference) in ["driver", "controller"].into_iter().zip(differences(found, recorded))
    {
        if difference > TOLERANCE {
            let worse = format!(
                "The {side} needs {difference:.1} % more instructions per I/O than recorded; if \
                 they are worth it, {RECORD}."
            );
            notes.push(worse.clone());
            outcome = outcome.and(Err(anyhow::Error::msg(worse)));
        } else if difference < -TOLERANCE {
            let less = -difference;
            notes.push(format!(
                "The {side} needs {less:.1} % fewer instructions per I/O than recorded: {RECORD}."
            ));
        }
    }
    (outcome, notes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_percent_are_tolerated() {
        let recorded = PerIo { driver: 200.0, controller: 100.0 };
        let differ = |driver: f64, controller: f64| {
            let (outcome, notes) = compare(&PerIo { driver, controller }, Some(&recorded));
            (outcome.is_ok(), notes.len())
        };
        assert_eq!(differ(200.0, 100.0), (true, 0));
        assert_eq!(differ(205.9, 97.1), (true, 0));
        assert_eq!(differ(206.1, 100.0), (false, 1));
        assert_eq!(differ(200.0, 103.1), (false, 1));
        assert_eq!(differ(190.0, 104.0), (false, 2));
        assert_eq!(differ(190.0, 90.0), (true, 2));
        assert!(compare(&recorded, None).0.is_err());
    }

    #[test]
    fn completed_ios_are_found() {
        let text = "3200\nQueueStats { submitted: 3232, completed: 3168, batches: 101 }\n";
        assert_eq!(completed(text), Some(3168.0));
        assert_eq!(completed("3200\n"), None);
    }

    #[test]
    fn callgrinds_totals_are_found() {
        assert_eq!(total("version: 1\nevents: Ir\nsummary: 1234\n\nfn=(1) a\n"), Some(1234.0));
        assert_eq!(total("events: Ir\ntotals: 77\n"), Some(77.0));
        assert_eq!(total("events: Ir\n"), None);
    }

    #[test]
    fn recorded_figures_are_parsed() {
        let text = r#"{"instructions_driver": 180.5, "instructions_controller": 240.0}"#;
        assert_eq!(parse(text).unwrap(), PerIo { driver: 180.5, controller: 240.0 });
        assert!(parse(r#"{"instructions_driver": 180.5}"#).is_err());
        assert!(parse(r#"{"instructions_driver": 0, "instructions_controller": 1}"#).is_err());
        if path().exists() {
            assert!(recorded().unwrap().is_some());
        }
    }
}
