//! Chores without a guest, and `cargo xtask test`, which runs all chores.

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
    // The build of each package takes minutes, so only `cargo xtask crates` does it.
    crates::check(report, false);
    report.begin("tests");
    step(report, "the tests are built", cargo().args(["test", "--workspace", "--no-run"]));
    step(
        report,
        "cargo test",
        cargo().args(["test", "--workspace", "--no-fail-fast", "--config"]).arg(format!(
            // The runner is named by /proc/PID/exe, because a build may replace the program's
            // file meanwhile. An environment variable would be inherited by tests that start
            // programs.
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
            .args(["run", "--quiet", "--locked", "--manifest-path", "tools/book/Cargo.toml"])
            // The tool has a target directory of its own, so that changes of this workspace do
            // not rebuild it.
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
        println!("   skipped: known vulnerabilities (the RustSec database is unreachable)");
    }
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
            // Other flags give other objects: a shared target directory would be rebuilt each
            // time.
            .arg("--target-dir")
            .arg(root().join("target/loom")),
    );
}

/// Steps that need root and Debian packages: instruction counts, and the suites on both kernels.
fn guest(report: &mut Report, program: &Path) {
    // The counts need valgrind, which is installed like the other packages of the guest.
    report.begin("instructions");
    report.check("an I/O costs no more instructions than recorded", |_| {
        shadowbell_bench::check_instructions()
    });
    report.check("work is proportional to the numbers that a host chooses", |_| {
        shadowbell_bench::check_doubling()
    });
    report.begin("guest");
    let setup = report.check("the guest's prerequisites are installed", |_| {
        let mut setup = Setup::new(ControllerKind::Shadowbell, Some(program.into()), &Kernel::ALL)?;
        // Speeds are not checked, and one round is enough to count doorbells.
        setup.rounds = 1;
        Ok(setup)
    });
    let Some(setup) = setup else { return };
    for kernel in Kernel::ALL {
        for suite in Suite::value_variants() {
            // These suites take minutes and test mostly the host's side, so the newer kernel is
            // enough. `cargo xtask guest NAME` runs them with both.
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
            // Run only on request: the suite takes two minutes, and unit tests of the crate cover
            // most of it without a device.
            let by_name_only = matches!(suite, Suite::Chardev);
            if by_name_only || newer_only && kernel != Kernel::V7_2 {
                continue;
            }
            suite.run(&setup, report, kernel);
        }
    }
}
