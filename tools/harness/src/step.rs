//! Step of a chore: another program, run to its end.

use std::io::{BufRead, BufReader, pipe};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::processes;
use crate::report::Report;

/// Time without output after which a step counts as hung. The whole step has no time limit, because
/// compilation may take several times as long on a busy machine. But cargo prints a line for each
/// crate, unless it is quiet.
const SILENCE: Duration = Duration::from_secs(15 * 60);
/// Time for which the output may stay open after the step has ended.
const AFTERWARDS: Duration = Duration::from_secs(60);

/// Runs a command and shows its output. Adds the counts of the test programs in the output to the
/// report.
pub fn step(report: &mut Report, name: &str, command: &mut Command) {
    let mut counts = Counts::default();
    report.check(name, |_| {
        run(command, SILENCE, AFTERWARDS, |line| {
            println!("{line}");
            counts.read(line);
        })
    });
    report.add(counts.passed, &counts.failed);
    report.skip(counts.skipped);
}

/// Part of a chore that is a separate program, so that several parts can run concurrently.
pub struct Job {
    /// Name in the report.
    pub name: String,
    /// Program.
    pub command: Command,
    /// Form of the results that the program prints.
    pub output: Output,
}

/// Form in which a program prints the results of its checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// The summary of a [`Report`] at the end.
    Summary,
    /// The lines of a Rust test program, or of `cargo test`.
    Tests,
}

/// Starts the jobs in their order, at most `lanes` at a time. Prints the output of a job when the
/// job has ended, and adds its counts to the report.
pub fn side_by_side(report: &mut Report, lanes: usize, jobs: Vec<Job>) {
    let lanes = lanes.clamp(1, jobs.len().max(1));
    let jobs = Mutex::new(jobs.into_iter());
    let (sender, results) = channel();
    thread::scope(|scope| {
        for _ in 0..lanes {
            let (jobs, sender) = (&jobs, sender.clone());
            scope.spawn(move || {
                loop {
                    let next = jobs.lock().expect("no lane panics with the lock").next();
                    let Some(Job { name, mut command, output }) = next else { break };
                    let (began, mut lines) = (Instant::now(), Vec::new());
                    let result =
                        run(&mut command, SILENCE, AFTERWARDS, |line| lines.push(line.to_owned()));
                    let ended = (name, output, lines, result, began.elapsed());
                    if sender.send(ended).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        for (name, output, lines, result, time) in results {
            lines.iter().for_each(|line| println!("{line}"));
            println!("   {name}: {:.1} s", time.as_secs_f64());
            let counts = match output {
                Output::Summary => summary(&lines),
                Output::Tests => test_counts(&name, &lines, report)
                    // A program without Rust's test harness prints no counts, and counts as one
                    // check.
                    .or_else(|| result.is_ok().then(|| (1, Vec::new()))),
            };
            let ended = counts.is_some();
            let (passed, failed) = counts.unwrap_or_default();
            report.include(passed, &failed);
            // A job that has reported failed checks also has a failing exit status. This status is
            // not reported in addition.
            if !ended || failed.is_empty() && result.is_err() {
                report.begin(&name);
                report.check("the program ends with a summary", |_| -> Result<()> {
                    result.and_then(|()| bail!("its output has no summary"))
                });
            }
        }
    });
}

/// Parses the summary of a report: the number of passed checks, and the names of failed ones.
fn summary(lines: &[String]) -> Option<(u64, Vec<String>)> {
    let counts = |line: &String| {
        let (passed, failed) = line.strip_suffix(" failed")?.split_once(" passed, ")?;
        failed.parse::<u64>().ok()?;
        passed.parse().ok()
    };
    let passed = lines.iter().rev().find_map(counts)?;
    let failed = lines.iter().filter_map(|line| line.strip_prefix("failed: "));
    Some((passed, failed.map(str::to_owned).collect()))
}

/// Parses the output of test programs: the number of passed tests, and the names of failed ones.
/// `None` if no test program has printed its result. Adds the skipped tests to the report.
fn test_counts(name: &str, lines: &[String], report: &mut Report) -> Option<(u64, Vec<String>)> {
    let mut counts = Counts::default();
    lines.iter().for_each(|line| counts.read(line));
    report.skip(counts.skipped);
    let failed = counts.failed.iter().map(|test| format!("{name}: {test}")).collect();
    (counts.results > 0).then_some((counts.passed, failed))
}

/// Runs a command to its end, and calls `each` with each line of its standard output and standard
/// error.
///
/// Fails if the command fails, if it prints nothing for the time `silence`, or if its output is
/// still open at the time `afterwards` after its end. In the last two cases, the processes are
/// listed and killed.
fn run(
    command: &mut Command,
    silence: Duration,
    afterwards: Duration,
    mut each: impl FnMut(&str),
) -> Result<()> {
    let (output, end) = pipe().context("a pipe")?;
    let inode = rustix::fs::fstat(&output).context("the output")?.st_ino;
    command.stdin(Stdio::null()).stdout(end.try_clone().context("a pipe")?).stderr(end);
    let child = command.spawn();
    // The value `command` contains a copy of the writing end of the pipe. This copy would prevent
    // the end of file at the reading end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = child.with_context(|| command.get_program().display().to_string())?;
    let (sender, lines) = channel();
    let mut output = BufReader::new(output);
    thread::spawn(move || {
        let mut line = Vec::new();
        // A guest's console and a failed test may print bytes that are not UTF-8.
        while output.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end_matches('\n').trim_end_matches('\r').to_owned();
            line.clear();
            if sender.send(text).is_err() {
                break;
            }
        }
    });
    let (mut heard, mut ended) = (Instant::now(), None);
    let status = loop {
        match lines.recv_timeout(Duration::from_millis(100)) {
            Ok(line) => {
                each(&line);
                heard = Instant::now();
            }
            Err(RecvTimeoutError::Disconnected) => break child.wait()?,
            Err(RecvTimeoutError::Timeout) => {}
        }
        match child.try_wait()? {
            Some(status) if ended.get_or_insert_with(Instant::now).elapsed() > afterwards => {
                let left = processes::kill_holders(inode);
                bail!("{status}, and processes left behind:\n{}", processes::list(&left));
            }
            None if heard.elapsed() > silence => {
                let hung = processes::descendants(child.id());
                processes::kill(&hung);
                child.kill()?;
                child.wait()?;
                processes::kill_holders(inode);
                let seconds = silence.as_secs();
                bail!("no output for {seconds} s; processes:\n{}", processes::list(&hung));
            }
            _ => {}
        }
    };
    if status.success() { Ok(()) } else { bail!("{status}") }
}

/// Counts of `cargo test`.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    /// Number of test programs that have printed a result.
    results: u64,
    passed: u64,
    failed: Vec<String>,
    skipped: Vec<String>,
}

impl Counts {
    /// Parses lines `test NAME ... FAILED` and `skipped: NAME: REASON`, and the last line `test
    /// result: ...; N passed; ...` of each test program.
    fn read(&mut self, line: &str) {
        self.skipped.extend(line.strip_prefix("skipped: ").map(str::to_owned));
        if let Some(name) = line.strip_prefix("test ").and_then(|l| l.strip_suffix(" ... FAILED")) {
            self.failed.push(name.to_owned());
        }
        if let Some(result) = line.strip_prefix("test result: ") {
            let passed = result.split([';', '.']).find_map(|part| {
                part.trim().strip_suffix(" passed").and_then(|number| number.trim().parse().ok())
            });
            self.passed += passed.unwrap_or(0);
            self.results += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A limit that no run reaches.
    const NEVER: Duration = Duration::from_secs(3600);

    #[test]
    fn a_process_left_behind_fails_the_step_and_is_killed() {
        let mut lines = Vec::new();
        let mut shell = Command::new("sh");
        // A loop in a subshell, because a program has no command line for a moment while the
        // shell's child executes it.
        shell.args(["-c", "while :; do sleep 3600; done & echo $!"]);
        let error = run(&mut shell, NEVER, Duration::ZERO, |line| lines.push(line.to_owned()));
        let error = error.unwrap_err().to_string();
        let [sleeper] = &lines[..] else { panic!("{lines:?}") };
        assert!(error.contains(&format!("{sleeper} sh -c while")), "{error}");
        shadowbell_testing::wait::until("the process is killed", || {
            !Command::new("kill").args(["-0", sleeper]).status().unwrap().success()
        });
    }

    #[test]
    fn a_process_left_behind_cannot_keep_the_step_alive_by_its_output() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "while echo; do :; done & exit 0"]);
        let error = run(&mut shell, NEVER, Duration::ZERO, |_| {}).unwrap_err().to_string();
        assert!(error.contains("processes left behind"), "{error}");
    }

    #[test]
    fn all_output_is_read_whatever_bytes_it_contains() {
        let mut lines = Vec::new();
        let mut shell = Command::new("sh");
        shell.args(["-c", r"printf 'one\n\377\ntwo\r\n'; echo three >&2; printf four"]);
        run(&mut shell, NEVER, NEVER, |line| lines.push(line.to_owned())).unwrap();
        assert_eq!(lines, ["one", "\u{fffd}", "two", "three", "four"]);
    }

    #[test]
    fn a_silent_step_fails_and_its_processes_are_listed() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 3600; true"]);
        let error = run(&mut shell, Duration::from_millis(1), NEVER, |_| {}).unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with("no output for 0 s"), "{error}");
    }

    #[test]
    fn jobs_side_by_side_add_their_counts_and_failures() {
        let job = |name: &str, script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            Job { name: name.to_owned(), command, output: Output::Summary }
        };
        let tests = |name: &str, script: &str| Job { output: Output::Tests, ..job(name, script) };
        let mut report = Report::default();
        side_by_side(
            &mut report,
            3,
            vec![
                job("good", "echo; echo '3 passed, 0 failed'"),
                job("bad", "echo 'failed: part: check'; echo '4 passed, 1 failed'; exit 1"),
                job("dead", "echo '== part'; exit 3"),
                job("killed", "echo '2 passed, 0 failed'; kill -9 $$"),
                job("silent", "exit 0"),
                job("noisy", "echo '1 passed, 0 failed'; echo 'a device has failed' >&2"),
                tests("unit", "echo 'test result: ok. 20 passed; 0 failed'"),
                tests(
                    "broken",
                    "echo 'test a ... FAILED'; echo 'test result: FAILED. 0 passed; 1 failed'; exit 101",
                ),
                tests("own harness", "echo done"),
                tests("crashed", "echo 'running 2 tests'; kill -9 $$"),
            ],
        );
        let (passed, failures) = report.results();
        assert_eq!(passed, 31);
        let mut failures = failures.to_vec();
        failures.sort();
        assert_eq!(
            failures,
            [
                "broken: a",
                "crashed: the program ends with a summary: signal: 9 (SIGKILL)",
                "dead: the program ends with a summary: exit status: 3",
                "killed: the program ends with a summary: signal: 9 (SIGKILL)",
                "part: check",
                "silent: the program ends with a summary: its output has no summary"
            ]
        );
    }

    #[test]
    fn counts_of_test_programs_are_added_up() {
        let mut counts = Counts::default();
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test a::c ... FAILED",
            "skipped: a::b: it needs root",
            "test src/lib.rs - x (line 3) ... FAILED",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
            "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
        ] {
            counts.read(line);
        }
        let failed = vec!["a::c".to_owned(), "src/lib.rs - x (line 3)".to_owned()];
        let skipped = vec!["a::b: it needs root".to_owned()];
        assert_eq!(counts, Counts { results: 2, passed: 13, failed, skipped });
    }
}
