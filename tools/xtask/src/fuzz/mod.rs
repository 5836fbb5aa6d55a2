//! `cargo xtask fuzz`: the bodies in `fuzz/bodies` under libFuzzer and the address sanitizer.
//!
//! An input of a target is called a program, because it encodes the steps of an untrusted side. The
//! table at the end has a row for each target: the number of programs, the number of their steps,
//! which the bodies write to a file, and libFuzzer's coverage. Runs start from the [`corpus`], and
//! the [`ledger`] adds them up.

mod corpus;
mod ledger;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use shadowbell_bench::table::Table;
use shadowbell_bench::workspace::{cargo, root};

use shadowbell_harness::Report;

/// Maximum size of a program in bytes.
const LONGEST: u32 = 4096;
/// Seconds after which a program counts as hung. Programs run for milliseconds at most; the limit
/// is long enough for a busy machine and for a suspended laptop.
const HUNG: u32 = 100;

pub(crate) const EXAMPLES: &str = "\
Examples:
  cargo xtask fuzz                              every target for a minute
  cargo xtask fuzz session queues --seconds 600
  cargo xtask fuzz --seconds 3600 --at-once 2   an hour of each, two at a time
  cargo xtask fuzz --plain --seconds 600        the same bodies at full speed, on any toolchain
  cargo xtask fuzz --seconds 600 --ledger       add the runs to docs/internals/fuzzing.md
  cargo xtask fuzz queues --input fuzz/artifacts/queues/crash-1234";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Targets to fuzz (files of fuzz/targets); the default is all of them, one after the other
    targets: Vec<String>,
    /// Duration per target
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Number of targets that run at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    at_once: u8,
    /// Run without libFuzzer and the address sanitizer, with random changes of the programs of
    /// the corpus: about ten times as many steps in the same time
    #[arg(long, conflicts_with = "input")]
    plain: bool,
    /// Add the runs to the ledger in docs/internals/fuzzing.md, instead of printing its rows
    #[arg(long, conflicts_with = "input")]
    ledger: bool,
    /// Run only this input, once
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
}

pub(crate) fn run(report: &mut Report, arguments: &Arguments) -> Result<()> {
    let all = targets()?;
    let wanted = if arguments.targets.is_empty() { &all } else { &arguments.targets };
    if let Some(unknown) = wanted.iter().find(|name| !all.contains(name)) {
        bail!("there is no target {unknown}: there are {}", all.join(", "));
    }
    let input = arguments.input.as_ref().map(std::fs::canonicalize).transpose();
    let input = input.context("the input")?;
    if input.is_some() && wanted.len() != 1 {
        bail!("name the target that the input is for");
    }
    if !arguments.plain {
        prepare()?;
    }
    report.begin("fuzz");
    if let (Some(input), [target]) = (&input, &wanted[..]) {
        report.check(&format!("{target} on {}", input.display()), |_| once(target, input));
        report.summary();
        return Ok(());
    }
    let began = Instant::now();
    let mut look: &(dyn Fn(&str, &mut TargetResult) -> Result<()> + Sync) =
        &|target, done| search(target, arguments.seconds, done);
    let plainly;
    if arguments.plain {
        let program = build_programs()?;
        plainly = move |target: &str, done: &mut TargetResult| {
            search_plainly(&program, target, arguments.seconds, done)
        };
        look = &plainly;
    }
    let outcomes = search_all(wanted, look, arguments.at_once.into());
    let mut table = table();
    let (mut steps, mut runs) = (0, Vec::new());
    let kind = if arguments.plain { ledger::Kind::Plain } else { ledger::Kind::Guided };
    for (target, done, outcome) in outcomes {
        steps += done.steps;
        done.add_to(&mut table, &target);
        // A target that does not build has not run.
        if !done.time.is_zero() {
            runs.push(done.row(&target, kind, outcome.is_err())?);
        }
        report.check(&format!("{target} for {} s", arguments.seconds), |_| outcome);
    }
    let took = began.elapsed().as_secs_f64();
    table.notes.push(format!("{steps} steps of programs in {took:.0} s."));
    report.table(table);
    report.summary();
    ledger::add(&runs, arguments.ledger)
}

/// Result of a target.
#[derive(Debug, Default)]
struct TargetResult {
    time: Duration,
    /// Number of executed programs, and of the steps of all these programs.
    programs: u64,
    steps: u64,
    /// Coverage that libFuzzer reports: number of edges, and number of features.
    coverage: u64,
    features: u64,
    /// Time of the last program with new coverage.
    last_new: Option<Instant>,
    /// Time since then, or the time of the whole run, when the run ends.
    quiet: Duration,
}

fn table() -> Table {
    let columns = ["target", "s", "programs", "in 1 s", "steps", "in 1 s", "coverage", "features"];
    Table::new("Fuzzed targets", &columns)
}

impl TargetResult {
    fn add_to(&self, table: &mut Table, target: &str) {
        let per_second = |count: u64| (count as f64 / self.time.as_secs_f64().max(0.001)) as u64;
        let Self { time, programs, steps, coverage, features, .. } = self;
        let cells = [
            time.as_secs(),
            *programs,
            per_second(*programs),
            *steps,
            per_second(*steps),
            *coverage,
            *features,
        ];
        let row = json!({
            "table": "fuzz",
            "target": target,
            "seconds": time.as_secs_f64(),
            "programs": programs,
            "steps": steps,
            "coverage": coverage,
            "features": features,
        });
        let name = std::iter::once(target.to_owned());
        table.push(name.chain(cells.map(|cell| cell.to_string())).collect(), row);
    }

    /// Row of the run for the ledger.
    fn row(&self, target: &str, kind: ledger::Kind, has_failed: bool) -> Result<ledger::Row> {
        Ok(ledger::Row {
            target: target.to_owned(),
            kind,
            code: ledger::code_of(target)?,
            steps: self.steps,
            seconds: self.time.as_secs(),
            date: ledger::today()?,
            coverage: self.coverage,
            quiet: self.quiet.as_secs(),
            failed: has_failed.into(),
        })
    }

    /// Records the end of a run that began at `began`.
    fn ends(&mut self, began: Instant) {
        self.time = began.elapsed();
        self.quiet = self.last_new.unwrap_or(began).elapsed();
    }

    /// Updates the result with a line of libFuzzer's output.
    fn read(&mut self, line: &str) {
        if line.starts_with('#') && line.contains("\tNEW ") {
            self.last_new = Some(Instant::now());
        }
        let number = |after: &str| {
            let rest = line.split_once(after)?.1.trim_start();
            rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u64>().ok()
        };
        self.coverage = number(" cov: ").unwrap_or(self.coverage);
        self.features = number(" ft: ").unwrap_or(self.features);
        self.programs = number("stat::number_of_executed_units:").unwrap_or(self.programs);
    }
}

/// Fuzzes the targets in their order, with up to `at_once` of them at the same time.
fn search_all(
    targets: &[String],
    look: &(dyn Fn(&str, &mut TargetResult) -> Result<()> + Sync),
    at_once: usize,
) -> Vec<(String, TargetResult, Result<()>)> {
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|threads| {
        for _ in 0..at_once.min(targets.len()) {
            threads.spawn(|| {
                while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut done = TargetResult::default();
                    let outcome = look(target, &mut done);
                    let mut outcomes = outcomes.lock().unwrap_or_else(PoisonError::into_inner);
                    outcomes.push((target.clone(), done, outcome));
                }
            });
        }
    });
    outcomes.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Names of all targets, by their files.
fn targets() -> Result<Vec<String>> {
    let files = std::fs::read_dir(root().join("fuzz/targets")).context("fuzz/targets")?;
    let names = files.flatten().filter_map(|file| {
        let path = file.path();
        let name = path.file_stem()?.to_str()?.to_owned();
        path.extension().is_some_and(|extension| extension == "rs").then_some(name)
    });
    let mut names: Vec<_> = names.collect();
    names.sort();
    Ok(names)
}

/// Command for cargo of the nightly toolchain, through rustup. Environment variables that select
/// the current toolchain are removed.
fn nightly() -> Command {
    let mut command = Command::new("cargo");
    command.arg("+nightly").current_dir(root()).stdin(Stdio::null());
    for name in ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTC", "CARGO_MANIFEST_DIR", "RUSTFLAGS"] {
        command.env_remove(name);
    }
    command
}

/// Installs the prerequisites of fuzzing, if they are missing.
fn prepare() -> Result<()> {
    let works = |arguments: &[&str]| {
        let output = nightly().args(arguments).stderr(Stdio::null()).stdout(Stdio::null()).status();
        output.is_ok_and(|status| status.success())
    };
    if !works(&["--version"]) {
        bail!("fuzzing needs nightly Rust: rustup toolchain install nightly");
    }
    if !works(&["fuzz", "--version"]) {
        eprintln!("installing cargo-fuzz ...");
        let installed = nightly().args(["install", "--locked", "cargo-fuzz"]).status();
        if !installed.is_ok_and(|status| status.success()) {
            bail!(
                "fuzzing needs cargo-fuzz, which could not be installed: cargo install cargo-fuzz"
            );
        }
    }
    Ok(())
}

/// Fuzzes a target with libFuzzer.
fn search(target: &str, seconds: u32, done: &mut TargetResult) -> Result<()> {
    let found = corpus::working_directory(target)?;
    let corpus = corpus::directory(target);
    let mut command = nightly();
    command.args(["fuzz", "run", "--sanitizer", "address", target]);
    command.arg(found.path()).arg(&corpus);
    command.arg("--").arg(format!("-max_total_time={seconds}")).args(limits());
    command.args(["-len_control=0".into(), format!("-max_len={LONGEST}")]);
    let steps = tempfile::NamedTempFile::new().context("a file for the number of steps")?;
    command.env("BODIES_STEPS", steps.path());
    // The build with the address sanitizer takes minutes.
    let built = nightly().args(["fuzz", "build", "--sanitizer", "address", target]).status();
    if !built.is_ok_and(|status| status.success()) {
        bail!("{target} does not build");
    }
    let began = Instant::now();
    let outcome = run_and_print(target, &mut command, done);
    done.ends(began);
    let text = std::fs::read_to_string(steps.path()).unwrap_or_default();
    done.steps = text.trim().parse().unwrap_or(0);
    // The corpus also gets the programs of a run that has failed. Its failing program is not among
    // them.
    outcome.and(minimise(target, found.path()))
}

/// Replaces a target's corpus by a minimised set of the corpus and of the programs in `found`.
fn minimise(target: &str, found: &Path) -> Result<()> {
    let corpus = corpus::directory(target);
    let minimised = tempfile::tempdir().context("a directory for the minimised corpus")?;
    let mut command = nightly();
    command.args(["fuzz", "run", "--sanitizer", "address", target]).arg(minimised.path());
    command.arg(found).arg(&corpus).args(["--", "-set_cover_merge=1"]).args(limits());
    command.arg(format!("-max_len={LONGEST}"));
    run_and_print(target, &mut command, &mut TargetResult::default())
        .context("the corpus cannot be minimised")?;
    let (programs, bytes) = corpus::replace(&corpus, minimised.path())?;
    println!("{target}: the corpus has {programs} generated programs, {bytes} bytes");
    Ok(())
}

/// Builds the program that runs the bodies without libFuzzer, in the release profile.
fn build_programs() -> Result<PathBuf> {
    let mut command = cargo();
    command.args(["build", "--release", "-p", "shadowbell-fuzz-bodies", "--example", "programs"]);
    command.arg("--message-format=json-render-diagnostics");
    let output = command.stderr(Stdio::inherit()).output().context("cargo build")?;
    ensure!(output.status.success(), "the bodies do not build");
    let mut paths = output.stdout.split(|byte| *byte == b'\n').filter_map(|line| {
        let message: serde_json::Value = serde_json::from_slice(line).ok()?;
        Some(PathBuf::from(message.get("executable")?.as_str()?))
    });
    paths.next_back().context("cargo names no program")
}

/// Fuzzes a target without libFuzzer.
fn search_plainly(
    program: &Path,
    target: &str,
    seconds: u32,
    done: &mut TargetResult,
) -> Result<()> {
    let artifacts = root().join("fuzz/artifacts");
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = since_epoch.map_or(1, |time| time.as_millis() as u64);
    let mut command = Command::new(program);
    command.arg(target).arg("--corpus").arg(corpus::directory(target));
    command.arg("--artifacts").arg(artifacts.join(target));
    command.arg("--seconds").arg(seconds.to_string()).arg("--seed").arg(seed.to_string());
    command.arg("--longest").arg(LONGEST.to_string()).stdin(Stdio::null());
    let began = Instant::now();
    let output = command.stderr(Stdio::inherit()).output().context("the bodies")?;
    done.ends(began);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let input = artifacts.join(target);
        bail!("{target} fails, of seed {seed}; the program is in {}", input.display());
    }
    let last = text.lines().last().unwrap_or_default();
    let mut numbers = last.split_whitespace().filter_map(|word| word.parse().ok());
    done.programs = numbers.next().context("no number of programs")?;
    done.steps = numbers.next().context("no number of steps")?;
    Ok(())
}

/// Runs one input.
fn once(target: &str, input: &Path) -> Result<()> {
    let mut command = nightly();
    command.args(["fuzz", "run", "--sanitizer", "address", target]).arg(input);
    command.arg("--").args(limits());
    run_and_print(target, &mut command, &mut TargetResult::default())
}

/// Options of the address sanitizer. For the driver, leaks are ignored: it never frees memory to
/// which a controller may still write. The quarantine of freed memory is small: with a large
/// quarantine, allocations would use new pages all the time, and the first access to a page makes a
/// step slow.
fn sanitizer(target: &str) -> String {
    let leaks = u8::from(target != "driver");
    format!("detect_leaks={leaks}:quarantine_size_mb=32")
}

/// Options of libFuzzer. Its own leak check after each program is off, because some threads free
/// memory only after the program has ended. The address sanitizer checks for leaks when the process
/// ends.
fn limits() -> [String; 4] {
    let hung = format!("-timeout={HUNG}");
    [hung, "-rss_limit_mb=4096".into(), "-print_final_stats=1".into(), "-detect_leaks=0".into()]
}

/// Runs a command, and prints the relevant lines of its output.
fn run_and_print(target: &str, command: &mut Command, done: &mut TargetResult) -> Result<()> {
    command.env("ASAN_OPTIONS", sanitizer(target));
    let suppressions = root().join("fuzz/leaks.txt");
    command.env("LSAN_OPTIONS", format!("suppressions={}", suppressions.display()));
    let mut child = command.stderr(Stdio::piped()).spawn().context("cargo fuzz")?;
    let mut found = None;
    for line in BufReader::new(child.stderr.take().context("no output")?).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        if let Some((_, path)) = line.split_once("Test unit written to ") {
            found = Some(path.trim().to_owned());
        }
        done.read(&line);
        if is_worth_showing(&line) {
            eprintln!("{line}");
        }
    }
    if child.wait()?.success() {
        return Ok(());
    }
    match found {
        Some(path) => bail!(
            "{target} fails; the input is {path}, and this runs it again:\n\
             cargo xtask fuzz {target} --input {path}"
        ),
        None => bail!("{target} fails, or does not build"),
    }
}

/// True if a line of libFuzzer's output is relevant. Lines about new coverage and dictionary
/// words are not.
fn is_worth_showing(line: &str) -> bool {
    let chatter =
        line.starts_with('#') && ["NEW", "REDUCE", "RELOAD"].iter().any(|w| line.contains(w));
    let chatter = chatter || line.starts_with("MERGE-");
    !chatter && !line.trim_start().starts_with("NEW_FUNC") && !line.starts_with('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_registered() {
        let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
        let manifest = read("fuzz/Cargo.toml");
        let (bodies, replay) =
            (read("fuzz/bodies/src/lib.rs"), read("fuzz/bodies/tests/replay.rs"));
        let programs = read("fuzz/bodies/examples/programs.rs");
        let targets = targets().unwrap();
        assert!(targets.contains(&"session".to_owned()));
        for name in &targets {
            assert!(manifest.contains(&format!("path = \"targets/{name}.rs\"")), "{name}");
            assert!(bodies.contains(&format!("pub mod {name};")), "{name}");
            assert!(replay.contains(&format!("    {name}: ")), "{name}");
            assert!(programs.contains(&format!(" {name} ")), "{name}");
            let wrapper = read(&format!("fuzz/targets/{name}.rs"));
            assert!(wrapper.contains(&format!("bodies::{name}::run")), "{name}");
        }
        assert_eq!(manifest.matches("[[bin]]").count(), targets.len());
        assert_eq!(bodies.matches("pub mod ").count(), targets.len());
    }

    #[test]
    fn the_output_of_libfuzzer_is_parsed() {
        let mut done = TargetResult::default();
        done.read("#7\tNEW    cov: 12 ft: 34 corp: 2/2b exec/s: 0");
        done.read("#81920\tDONE   cov: 1371 ft: 7215 corp: 598/640Kb lim: 4096 exec/s: 20");
        done.read("stat::number_of_executed_units: 81920");
        done.read("stat::average_exec_per_sec:     20");
        assert_eq!((done.coverage, done.features, done.programs), (1371, 7215, 81920));
        assert!(done.last_new.is_some());
    }

    #[test]
    fn lines_about_new_coverage_are_not_shown() {
        assert!(!is_worth_showing("#7\tNEW    cov: 12 ft: 12 corp: 2/2b"));
        assert!(!is_worth_showing("\tNEW_FUNC[1/2]: 0x55 in f"));
        assert!(!is_worth_showing("\"\\001\" # Uses: 9"));
        assert!(is_worth_showing("#65536\tpulse  cov: 12"));
        assert!(is_worth_showing("thread panicked"));
    }
}
