//! Chores without a guest, and `cargo xtask test`, which runs all chores.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use shadowbell_bench::workspace::{TestProgram, build_for_tests, cargo, root, test_programs};
use shadowbell_guest::{Kernel, Roots, host};

use shadowbell_guest_suites::{ControllerKind, Setup, Suite};
use shadowbell_harness::Report;
use shadowbell_harness::{Job, Output, side_by_side, step};
use shadowbell_hostile as hostile;
use shadowbell_soak as soak;
use shadowbell_testing::programs::PROGRAMS;

use crate::{crates, deb, structure};

/// Test programs that run for half a minute and longer, the longest first.
const LONG_TESTS: [&str; 4] = [
    "crates/shadowbell/tests/serve/main.rs",
    "crates/supervisor/tests/hostile.rs",
    "crates/driver/tests/recovery/main.rs",
    "tools/xtask/tests/bench.rs",
];

/// Runs all steps, also after a failure. The report ends with the counts.
pub(crate) fn test(report: &mut Report, with_guest: bool) -> Result<()> {
    // Steps that take seconds come first.
    report.begin("format");
    step(report, "cargo fmt --check", cargo().args(["fmt", "--all", "--check"]));
    report.begin("structure");
    report.check("imports have no cycle, in every crate and between the crates", |_| {
        structure::check(&[])
    });
    report.begin("lints");
    step(
        report,
        "cargo clippy -D warnings",
        cargo().args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    );
    report.begin("docs");
    step(
        report,
        "cargo doc, no warning",
        cargo().env("RUSTDOCFLAGS", "-D warnings").args(["doc", "--workspace", "--no-deps"]),
    );
    book_step(report);
    // This step packages the crates without building them. `cargo xtask crates` also builds each
    // package, which takes minutes.
    crates::check(report, false);
    report.begin("tests");
    programs(report);
    // Downloads need little CPU time, and compilers nothing else.
    let downloads = with_guest.then(|| part("downloads", Part::Downloads, Path::new("-")));
    let downloads = downloads.map(|mut job| job.command.stdout(Stdio::null()).spawn());
    build_tests(report);
    if let Some(downloads) = downloads {
        report.check("downloads for the guests are complete", |_| {
            ensure!(downloads?.wait()?.success(), "the messages above have the reason");
            Ok(())
        });
    }
    tests(report);
    let program = report.check("the program is built for tests", |_| build_for_tests());
    if let Some(program) = &program {
        // The attacks compare delays of a neighbour, so no other step runs meanwhile.
        side_by_side(report, 1, vec![part("hostile", Part::Hostile, program)]);
        jobs(report, program, with_guest);
    } else {
        loom_models(report);
    }
    report.summary();
    Ok(())
}

/// `cargo xtask test --busy ROUNDS`.
pub(crate) fn test_busy(report: &mut Report, rounds: u32) -> Result<()> {
    report.begin("tests");
    programs(report);
    build_tests(report);
    for round in 1..=rounds {
        report.begin(&format!("round {round} beside busy loops"));
        let loops = report.check("busy loops are started", |_| BusyLoops::start());
        let (began, failed) = (Instant::now(), report.failed());
        tests(report);
        drop(loops);
        let (seconds, failed) = (began.elapsed().as_secs(), report.failed() - failed);
        println!("== round {round} of {rounds}: {failed} failed, {seconds} s");
    }
    report.summary();
    Ok(())
}

/// Processes that use all CPUs, until they are dropped or this process ends. Each has its own
/// session, because the kernel first divides CPU time between sessions (`sched_autogroup`), and a
/// common session would get too little.
struct BusyLoops(Vec<Child>);

impl BusyLoops {
    fn start() -> Result<Self> {
        let script = format!("while kill -0 {} 2> /dev/null; do :; done", std::process::id());
        let mut loops = Self(Vec::new());
        for _ in 0..cpus() {
            loops.0.push(Command::new("setsid").args(["sh", "-c", &script]).spawn()?);
        }
        Ok(loops)
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        for busy in &mut self.0 {
            // An error is ignored: it means that the process has already ended.
            let _ = busy.kill().and_then(|()| busy.wait());
        }
    }
}

fn build_tests(report: &mut Report) {
    step(report, "the tests are built", cargo().args(["test", "--workspace", "--no-run"]));
}

/// Installs programs that tests start. Without root, and on other systems than Debian, prints what
/// is missing; the tests that need it are skipped.
fn programs(report: &mut Report) {
    let missing = PROGRAMS.iter().filter(|(program, _)| !host::in_path(program));
    let packages: Vec<_> = missing.flat_map(|(_, packages)| packages.split(' ')).collect();
    if packages.is_empty() {
        return;
    }
    if rustix::process::geteuid().is_root() && host::in_path("apt-get") {
        report.check("programs that tests start are installed", |_| host::install(&packages));
    } else {
        println!("   some tests are skipped without these packages: {}", packages.join(" "));
    }
}

/// Test programs of all crates, and the examples in the documentation. One more runs than the
/// machine has CPUs, because tests mostly wait for processes: those of `serve` use 0.6 CPUs.
fn tests(report: &mut Report) {
    let Some(mut programs) = report.check("the tests are found", |_| test_programs()) else {
        return;
    };
    // The longest start first, so that no CPU is idle at the end.
    programs.sort_by_key(|program| {
        LONG_TESTS.iter().position(|source| *source == program.source).unwrap_or(LONG_TESTS.len())
    });
    let mut jobs = vec![Job {
        name: "examples in the documentation".into(),
        command: cargo(),
        output: Output::Tests,
    }];
    jobs[0].command.args(["test", "--workspace", "--doc", "--no-fail-fast"]);
    jobs.extend(programs.into_iter().map(|TestProgram { source, package, program }| {
        let mut command = xtask();
        if source == LONG_TESTS[0] {
            // Each of these tests mostly waits for the processes that it starts.
            command.env("RUST_TEST_THREADS", (2 * cpus()).to_string());
        }
        command.args(["run-alone", "--"]).arg(program);
        command.current_dir(&package).env("CARGO_MANIFEST_DIR", &package);
        Job { name: source, command, output: Output::Tests }
    }));
    in_own_directories(report, cpus() + 1, jobs);
}

/// Number of CPUs of the machine.
fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs jobs side by side, at most `lanes` at a time, each with a directory of its own for control
/// sockets. `shadowbell ctl -s SOCKET` asks every server in the directory of the sockets. In a
/// common directory it would wake the servers of other jobs. Some of these servers have to be idle.
fn in_own_directories(report: &mut Report, lanes: usize, mut jobs: Vec<Job>) {
    let Some(sockets) = report.check("a directory for sockets", |_| Ok(tempfile::tempdir()?))
    else {
        return;
    };
    for (number, job) in jobs.iter_mut().enumerate() {
        job.command.env("SHADOWBELL_RUN_DIR", sockets.path().join(number.to_string()));
    }
    side_by_side(report, lanes, jobs);
}

/// `cargo xtask book`.
pub(crate) fn book(report: &mut Report) -> Result<()> {
    report.begin("book");
    book_step(report);
    report.summary();
    Ok(())
}

fn book_step(report: &mut Report) {
    step(
        report,
        "the book is built",
        cargo()
            .args(["run", "--locked", "--manifest-path", "tools/book/Cargo.toml"])
            // The tool has its own target directory, so that cargo does not build it again after a
            // change of this workspace.
            .arg("--target-dir")
            .arg(root().join("target/book-tool"))
            .arg("--")
            .arg(root()),
    );
}

/// Licences, sources, duplicates and vulnerabilities of the dependencies, by `deny.toml`.
pub(crate) fn deny(report: &mut Report) -> Result<()> {
    report.begin("dependencies");
    let mut installed = cargo();
    installed.args(["deny", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    if !installed.status().is_ok_and(|status| status.success()) {
        step(
            report,
            "cargo-deny is installed",
            cargo().args(["install", "--locked", "cargo-deny"]),
        );
    }
    let deny = |manifest: &str, check: &[&str]| {
        let mut command = cargo();
        // One file has the rules of all three workspaces.
        command.args(["deny", "--manifest-path", manifest, "--config"]);
        command.arg(root().join("deny.toml")).arg("check").args(check);
        command
    };
    let has_database = cargo().args(["deny", "fetch", "db"]).status();
    let has_database = has_database.is_ok_and(|status| status.success());
    for manifest in ["Cargo.toml", "fuzz/Cargo.toml", "tools/book/Cargo.toml"] {
        let name = format!("{manifest}: licences, sources and duplicates");
        step(report, &name, &mut deny(manifest, &["bans", "licenses", "sources"]));
        if has_database {
            let name = format!("{manifest}: no known vulnerability");
            step(report, &name, &mut deny(manifest, &["advisories"]));
        }
    }
    if !has_database {
        println!("   skipped: known vulnerabilities (the RustSec database is unreachable)");
    }
    report.summary();
    Ok(())
}

/// `cargo xtask campaign`.
pub(crate) fn campaign(report: &mut Report, messages: u64, attacks: &[String]) -> Result<()> {
    report.begin("campaign");
    let test = ["test", "--package", "shadowbell-supervisor", "--test", "hostile", "--"];
    let mut command = cargo();
    command.args(test).arg(messages.to_string()).args(attacks);
    step(report, "a supervisor withstands its server process", &mut command);
    report.summary();
    Ok(())
}

/// `cargo xtask loom`.
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
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .args(["test", "--release", "--package", "shadowbell-doorbell", "--test", "loom"])
            // Other compiler flags need other object files. In a shared target directory, cargo
            // would build them again each time.
            .arg("--target-dir")
            .arg(root().join("target/loom")),
    );
}

/// Runs the parts of `cargo xtask test` that use a CPU only half of the time: instruction counts,
/// the package, the guest suites, kills and loom models. As many run side by side as the machine
/// has CPUs.
fn jobs(report: &mut Report, program: &Path, with_guest: bool) {
    let (mut jobs, mut suites) = (Vec::new(), Vec::new());
    if with_guest {
        report.begin("guest");
        // Packages and files that several jobs need are made once, before the jobs start.
        let prepared = report.check("the guest's prerequisites are installed", |_| {
            Setup::new(ControllerKind::Shadowbell, Some(program.into()), &Kernel::ALL)
        });
        jobs.push(part("instructions", Part::Instructions, program));
        jobs.push(part("package", Part::Package, program));
        if prepared.is_some() {
            suites = guests(program);
        }
    }
    jobs.extend([part("loom", Part::Loom, program), part("soak kill", Part::Kill, program)]);
    jobs.extend(suites);
    in_own_directories(report, cpus(), jobs);
}

/// Suites on both kernels. The longest start first, so that no CPU is idle at the end.
fn guests(program: &Path) -> Vec<Job> {
    let mut jobs = Vec::new();
    let long = [Suite::Recover, Suite::DiskTypes, Suite::Driver, Suite::Ublk, Suite::Readers];
    let others = Suite::value_variants().iter().filter(|suite| !long.contains(suite));
    for suite in long.iter().chain(others) {
        for kernel in Kernel::ALL {
            // These suites take minutes and mostly test the host's side, so they run only on the
            // newer kernel. `cargo xtask guest NAME` runs them on both.
            let newer_only = matches!(
                suite,
                Suite::Driver
                    | Suite::Recover
                    | Suite::Readers
                    | Suite::Reset
                    | Suite::Ublk
                    | Suite::Upgrade
                    | Suite::Kill
                    | Suite::CloudHypervisor
                    | Suite::Namespaces
                    | Suite::Shared
                    | Suite::Reservations
                    | Suite::Zoned
                    | Suite::DiskTypes
            );
            // This suite runs only if it is named: it takes two minutes, and the crate's unit tests
            // cover most of it without a device.
            let by_name_only = matches!(suite, Suite::Chardev);
            if by_name_only || newer_only && kernel != Kernel::V7_2 {
                continue;
            }
            let mut command = alone();
            command.arg("guest").arg(suite.name()).args(["--kernel", &kernel.to_string()]);
            // With 0 rounds, only counts are measured. Speeds are not checked.
            command.args(["--rounds", "0", "--shadowbell"]).arg(program);
            let name = format!("guest {}, Linux {kernel}", suite.name());
            jobs.push(Job { name, command, output: Output::Summary });
        }
    }
    jobs
}

/// Parts of `cargo xtask test` without a name of their own on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Part {
    /// Attacks on a server
    Hostile,
    /// Short soak of kills
    Kill,
    /// Loom models
    Loom,
    /// Instructions per I/O, next to the recorded ones
    Instructions,
    /// Debian package, built and installed
    Package,
    /// Downloads of the guest suites and of the package's test
    Downloads,
}

impl Part {
    /// Runs the part. The report ends with the counts.
    pub(crate) fn run(self, report: &mut Report, program: &Path) -> Result<()> {
        match self {
            Self::Hostile => hostile::test(report, program),
            Self::Kill => soak::kill::test(report, program),
            Self::Loom => loom_models(report),
            Self::Package => deb::test(report, program),
            Self::Downloads => {
                report.begin("downloads");
                report.check("roots and kernels of the guests", |_| {
                    Roots::fetch(&root(), &Kernel::ALL).map(drop)
                });
                report.check("a Debian that boots", |_| deb::fetch());
            }
            Self::Instructions => {
                report.begin("instructions");
                report.check("an I/O costs no more instructions than recorded", |_| {
                    shadowbell_bench::check_instructions()
                });
                report.check("work is proportional to the numbers that a host chooses", |_| {
                    shadowbell_bench::check_doubling()
                });
            }
        }
        report.summary();
        Ok(())
    }
}

fn part(name: &str, part: Part, program: &Path) -> Job {
    let mut command = alone();
    let value = part.to_possible_value();
    command.arg("part").args(value.as_ref().map(|value| value.get_name())).arg(program);
    Job { name: name.to_owned(), command, output: Output::Summary }
}

/// Command that runs this program, and fails if the program leaves a process behind.
fn alone() -> Command {
    let mut command = xtask();
    command.args(["run-alone", "--", "/proc/self/exe"]);
    command
}

/// Command that runs this program. It is started by `/proc/self/exe`, because a build may replace
/// its file.
fn xtask() -> Command {
    Command::new("/proc/self/exe")
}
