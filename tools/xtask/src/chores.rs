//! The chores that need no guest, and all of them together.

use std::path::Path;
use std::process::Stdio;

use anyhow::Result;
use clap::ValueEnum;
use shadowbell_bench::workspace::{build_for_tests, cargo, root};
use shadowbell_guest::Kernel;

use crate::report::Report;
use crate::step::step;
use crate::suites::{ControllerKind, Setup, Suite};
use crate::{crates, deb, hostile, soak, structure};

/// Everything that must pass, whatever fails on the way. The report ends with the counts.
pub(crate) fn test(report: &mut Report, with_guest: bool) -> Result<()> {
    // What takes seconds comes first.
    report.begin("format");
    step(report, "cargo fmt --check", cargo().args(["fmt", "--all", "--check"]));
    report.begin("structure");
    report.check("imports go one way, in every crate and between the crates", |_| {
        structure::check(&[])
    });
    report.begin("lints");
    step(
        report,
        "cargo clippy -D warnings",
        cargo()
            .args(["clippy", "--workspace", "--all-targets", "--quiet"])
            .args(["--", "-D", "warnings"]),
    );
    report.begin("docs");
    step(
        report,
        "cargo doc, no warning",
        cargo().env("RUSTDOCFLAGS", "-D warnings").args([
            "doc",
            "--workspace",
            "--no-deps",
            "--quiet",
        ]),
    );
    book_step(report);
    // Whether each package builds alone takes minutes: `cargo xtask crates` looks.
    crates::check(report, false);
    report.begin("tests");
    step(report, "the tests are built", cargo().args(["test", "--workspace", "--no-run"]));
    step(
        report,
        "cargo test",
        cargo().args(["test", "--workspace", "--no-fail-fast", "--config"]).arg(format!(
            // By the file that runs, whatever a build puts in its place meanwhile. Not by an
            // environment variable: tests that start programs would take it for theirs, too.
            "target.'cfg(all())'.runner = ['/proc/{}/exe', 'run-alone']",
            std::process::id()
        )),
    );
    let program = report.check("the program is built for tests", |_| build_for_tests());
    if let Some(program) = &program {
        hostile::test(report, program);
        soak::kill::test(report, program);
    }
    loom_models(report);
    if let Some(program) = program.filter(|_| with_guest) {
        deb::test(report, &program);
        guest(report, &program);
    }
    report.summary();
    Ok(())
}

/// The book alone.
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
            .args(["run", "--quiet", "--locked", "--manifest-path", "tools/book/Cargo.toml"])
            // A workspace of its own, which is not to be rebuilt with each change of ours.
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
    let checks = ["check", "bans", "licenses", "sources"];
    step(report, "licences, sources and duplicates", cargo().arg("deny").args(checks));
    if cargo().args(["deny", "fetch", "db"]).status().is_ok_and(|status| status.success()) {
        step(report, "no known vulnerability", cargo().args(["deny", "check", "advisories"]));
    } else {
        println!("   left out: known vulnerabilities, since the RustSec database is not reachable");
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
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .args(["test", "--release", "--package", "shadowbell-doorbell", "--test", "loom"])
            // Other flags make other objects: sharing a directory would rebuild both every time.
            .arg("--target-dir")
            .arg(root().join("target/loom")),
    );
}

/// What needs root and Debian packages: the instruction counts, and the suites on both kernels.
fn guest(report: &mut Report, program: &Path) {
    // Needs valgrind, which is installed as what the guest needs is.
    report.begin("instructions");
    report.check("an I/O costs no more instructions than recorded", |_| {
        shadowbell_bench::check_instructions()
    });
    report.check("twice as much of what a host chooses is twice the work", |_| {
        shadowbell_bench::check_doubling()
    });
    report.begin("guest");
    let setup = report.check("what the guest needs is here", |_| {
        let mut setup = Setup::new(ControllerKind::Shadowbell, Some(program.into()), &Kernel::ALL)?;
        // Speeds are not judged, and doorbells can be counted in one round.
        setup.rounds = 1;
        Ok(setup)
    });
    let Some(setup) = setup else { return };
    for kernel in Kernel::ALL {
        for suite in Suite::value_variants() {
            // Minutes long, and what they are about is the driver's end: the newer kernel is
            // enough. `cargo xtask guest driver` runs it with both.
            let newer_only = matches!(
                suite,
                Suite::Driver
                    | Suite::Recover
                    | Suite::Readers
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
            // By name alone: two minutes, of which the unit tests of the crate have what needs no
            // device.
            let by_name_only = matches!(suite, Suite::Chardev);
            if by_name_only || newer_only && kernel != Kernel::V7_2 {
                continue;
            }
            suite.run(&setup, report, kernel);
        }
    }
}
