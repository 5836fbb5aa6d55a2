//! The chores that need no guest, and all of them together.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use shadowbell_bench as bench;
use shadowbell_bench::workspace::{cargo, root};
use shadowbell_guest::Kernel;

use crate::report::Report;
use crate::suites::{ControllerKind, Setup, Suite};

/// The seconds after which a step is taken for hung.
const STEP_LIMIT: &str = "1500";

/// The program as it is tested: it can also serve a controller that misbehaves on purpose.
const FAULTS: [&str; 2] = ["--features", "shadowbell/faults"];

/// Everything that must pass, whatever fails on the way. The report ends with the counts.
pub(crate) fn test(report: &mut Report, with_guest: bool) -> Result<()> {
    report.begin("format");
    step(report, "cargo fmt --check", cargo().args(["fmt", "--all", "--check"]));
    report.begin("lints");
    step(
        report,
        "cargo clippy -D warnings",
        cargo()
            .args(["clippy", "--workspace", "--all-targets", "--quiet"])
            .args(FAULTS)
            .args(["--", "-D", "warnings"]),
    );
    report.begin("tests");
    step(
        report,
        "cargo test",
        cargo().args(["test", "--workspace", "--no-fail-fast"]).args(FAULTS),
    );
    loom_models(report);
    if with_guest {
        // Needs valgrind, which is installed as what the guest needs is.
        report.begin("instructions");
        report.check("an I/O costs no more instructions than recorded", |_| {
            bench::check_instructions()
        });
        report.begin("guest");
        let setup = report.check("what the guest needs is here", |_| {
            let mut setup = Setup::new(ControllerKind::Shadowbell, None, &Kernel::ALL)?;
            // Speeds are not judged, and doorbells can be counted in one round.
            setup.rounds = 1;
            Ok(setup)
        });
        for kernel in Kernel::ALL.into_iter().filter(|_| setup.is_some()) {
            for suite in Suite::value_variants() {
                // Minutes long, and what they are about is the driver's end: the newer kernel is
                // enough. `cargo xtask guest s2` runs it with both.
                if matches!(suite, Suite::S2 | Suite::Recover | Suite::S4) && kernel != Kernel::V7_2
                {
                    continue;
                }
                if let Some(setup) = &setup {
                    suite.run(setup, report, kernel);
                }
            }
        }
    }
    report.summary();
    Ok(())
}

/// The loom models alone.
pub(crate) fn loom(report: &mut Report) -> Result<()> {
    loom_models(report);
    report.summary();
    Ok(())
}

fn loom_models(report: &mut Report) {
    report.begin("loom models");
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    step(
        report,
        "cargo test --cfg loom",
        cargo()
            .env("RUSTFLAGS", format!("{flags} --cfg loom"))
            // Explored in seconds either way; what takes long is to optimise across all crates.
            .env("CARGO_PROFILE_RELEASE_LTO", "false")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .args(["test", "--release", "--package", "shadowbell-doorbell", "--test", "loom"])
            // Other flags make other objects: sharing a directory would rebuild both every time.
            .arg("--target-dir")
            .arg(root().join("target/loom")),
    );
}

/// Runs a command to its end or its limit and shows its output; takes over the counts of the test
/// runners in it.
fn step(report: &mut Report, name: &str, command: &mut Command) {
    let mut counts = Counts::default();
    report.check(name, |_| {
        let mut limited = Command::new("timeout");
        limited.args(["--kill-after=10", STEP_LIMIT]).arg(command.get_program());
        limited.args(command.get_args()).stdin(Stdio::null()).stdout(Stdio::piped());
        if let Some(directory) = command.get_current_dir() {
            limited.current_dir(directory);
        }
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => limited.env(key, value),
                None => limited.env_remove(key),
            };
        }
        let mut child = limited.spawn().context("timeout")?;
        for line in BufReader::new(child.stdout.take().context("no output")?).lines() {
            let line = line.context("reading what it prints")?;
            println!("{line}");
            counts.read(&line);
        }
        let status = child.wait()?;
        match status.code() {
            Some(0) => Ok(()),
            Some(124 | 137) => bail!("did not end within {STEP_LIMIT} s"),
            _ => bail!("{status}"),
        }
    });
    report.add(counts.passed, &counts.failed);
}

/// What `cargo test` counted.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: Vec<String>,
}

impl Counts {
    /// Takes `test NAME ... FAILED` and the closing `test result: ...; N passed; ...` of each
    /// runner.
    fn read(&mut self, line: &str) {
        if let Some(name) = line.strip_prefix("test ").and_then(|l| l.strip_suffix(" ... FAILED")) {
            self.failed.push(name.to_owned());
        }
        if let Some(result) = line.strip_prefix("test result: ") {
            let passed = result.split([';', '.']).find_map(|part| {
                part.trim().strip_suffix(" passed").and_then(|number| number.trim().parse().ok())
            });
            self.passed += passed.unwrap_or(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runners_counts_are_added_up() {
        let mut counts = Counts::default();
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test a::c ... FAILED",
            "test src/lib.rs - x (line 3) ... FAILED",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
            "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
        ] {
            counts.read(line);
        }
        let failed = vec!["a::c".to_owned(), "src/lib.rs - x (line 3)".to_owned()];
        assert_eq!(counts, Counts { passed: 13, failed });
    }
}
