//! `cargo xtask soak front-ends`: kills the server process of each front end, under clients that
//! verify what was acknowledged. The disk types alternate.
//!
//! | front end | client | disks | next process |
//! |---|---|---|---|
//! | vfio-user | as `soak kill` | all types of `soak kill` | of the supervisor |
//! | NBD | `shadowbell verify` on an NBD disk | raw, qcow2, qcow2 on a backing file | of a service manager |
//! | vhost-user-blk | a machine of the tests | the same | of a service manager |
//! | FUSE | a program with the mounted file | the same, and an NBD disk | of the supervisor |
//!
//! The last three are tests of `crates/shadowbell/tests/export`, with more kills.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use shadowbell_bench::workspace;
use shadowbell_harness::Report;

use super::kill;

/// Environment variable of the tests with the number of kills.
const KILLS: &str = "SHADOWBELL_EXPORT_KILLS";
/// Front ends with the names of their tests.
const TESTS: [(&str, &str); 3] = [
    ("NBD", "nbd_killed::a_load_over_nbd_survives_kills_of_the_export"),
    ("vhost-user-blk", "vhost_killed::a_vhost_process_may_be_killed_at_any_moment"),
    ("FUSE", "fuse_killed::a_load_on_a_mounted_file_survives_kills_of_the_server_process"),
];

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of kills of each front end
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    kills: u32,
    /// Seed of the random moments and data of vfio-user
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Path of a built shadowbell program for vfio-user; without it, one is built
    #[arg(long, value_name = "PATH")]
    shadowbell: Option<PathBuf>,
    /// Path of the built test program `export` of the package `shadowbell`; without it, all tests
    /// are built
    #[arg(long, value_name = "PATH")]
    tests: Option<PathBuf>,
}

pub(crate) fn run(report: &mut Report, arguments: &Arguments) -> Result<()> {
    let binary = match &arguments.shadowbell {
        Some(path) => path.canonicalize()?,
        None => workspace::build_shadowbell()?,
    };
    let tests = match &arguments.tests {
        Some(path) => path.canonicalize()?,
        None => tests()?,
    };
    let began = Instant::now();
    kill::all_kinds(report, &binary, arguments.kills, arguments.seed);
    print_time("vfio-user", began, arguments.kills);
    report.begin("soak front-ends");
    for (front_end, test) in TESTS {
        let began = Instant::now();
        report.check(&format!("{front_end}: no acknowledged write is lost"), |_| {
            let mut command = Command::new(&tests);
            command.args(["--exact", test, "--nocapture"]).stdin(Stdio::null());
            let output = command.env(KILLS, arguments.kills.to_string()).output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            ensure!(text.contains("1 passed"), "{test}: {}: {text}{errors}", output.status);
            if let Some(why) = errors.lines().find(|line| line.contains("skipped")) {
                bail!("{why}");
            }
            Ok(())
        });
        print_time(front_end, began, arguments.kills);
    }
    report.summary();
    Ok(())
}

fn print_time(front_end: &str, began: Instant, kills: u32) {
    let each = began.elapsed().as_secs_f64() / f64::from(kills);
    println!("   {front_end}: {kills} kills, {:.0} ms for each", each * 1000.0);
}

/// Path of the test program.
fn tests() -> Result<PathBuf> {
    let all = workspace::test_programs()?;
    let own = all.into_iter().find(|test| test.source.ends_with("shadowbell/tests/export/main.rs"));
    Ok(own.context("cargo named no test program `export`")?.program)
}
