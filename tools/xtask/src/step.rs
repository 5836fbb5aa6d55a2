//! A step of a chore: another program, run to its end or its limit.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::report::Report;

/// The seconds after which a step is taken for hung.
const STEP_LIMIT: &str = "1500";
/// How long the output may stay open when the step has ended. Somebody whom it has started, and not
/// ended, has it: then nothing more is waited for, and the step has failed.
const AFTERWARDS: Duration = Duration::from_secs(5);

/// Runs a command and shows its output; takes over the counts of the test runners in it.
pub(crate) fn step(report: &mut Report, name: &str, command: &mut Command) {
    let mut counts = Counts::default();
    report.check(name, |_| {
        run(command, |line| {
            println!("{line}");
            counts.read(line);
        })
    });
    report.add(counts.passed, &counts.failed);
}

/// Runs a command to its end or its limit. `each` gets the lines of its standard output; what it
/// writes to standard error is shown.
fn run(command: &Command, mut each: impl FnMut(&str)) -> Result<()> {
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
    let output = BufReader::new(child.stdout.take().context("no output")?);
    let (sender, lines) = channel();
    thread::spawn(move || output.lines().try_for_each(|line| sender.send(line).map_err(drop)));
    let mut ended = None;
    let status = loop {
        match lines.recv_timeout(Duration::from_millis(100)) {
            Ok(line) => each(&line.context("reading what it prints")?),
            Err(RecvTimeoutError::Disconnected) => break child.wait()?,
            Err(RecvTimeoutError::Timeout) => {
                let Some(status) = child.try_wait()? else { continue };
                if ended.get_or_insert_with(Instant::now).elapsed() > AFTERWARDS {
                    bail!("{status}, and a process that it has left behind goes on");
                }
            }
        }
    };
    match status.code() {
        Some(0) => Ok(()),
        Some(124 | 137) => bail!("did not end within {STEP_LIMIT} s"),
        _ => bail!("{status}"),
    }
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
    fn who_is_left_behind_is_not_waited_for() {
        let mut lines = Vec::new();
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 60 & echo $!"]);
        let error = run(&shell, |line| lines.push(line.to_owned())).unwrap_err();
        assert!(error.to_string().contains("left behind"), "{error}");
        let [sleeper] = &lines[..] else { panic!("{lines:?}") };
        assert!(Command::new("kill").arg(sleeper).status().unwrap().success());
    }

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
