//! `cargo xtask soak qcow2`: repeatedly kills a process that writes to a qcow2 image, and then
//! checks the image, also with QEMU. The process is the example `soak` of the crate `disk-qcow2`,
//! which needs no server.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use shadowbell_bench::workspace::{cargo, executable};

use shadowbell_harness::Report;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of operations
    #[arg(long, default_value_t = 100_000_000)]
    operations: u64,
    /// Seed of the operations and the moments of the kills
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Control: all that a killed process has written is lost. Passes if that is detected
    #[arg(long)]
    control: bool,
    /// Directory of the image
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    directory: PathBuf,
}

pub(crate) fn run(report: &mut Report, arguments: &Arguments) -> Result<()> {
    let program = build()?;
    let directory = tempfile::tempdir_in(&arguments.directory)
        .with_context(|| arguments.directory.display().to_string())?;
    report.begin("soak qcow2");
    let what = match arguments.control {
        false => "the image has all completed data, and qemu-img finds no corruption",
        true => "lost acknowledged data are detected",
    };
    report.check(what, |_| {
        let status = Command::new(&program)
            .arg("watch")
            .arg(directory.path())
            .args([arguments.operations.to_string(), arguments.seed.to_string()])
            .arg(if arguments.control { "control" } else { "soak" })
            .status()?;
        if status.success() { Ok(()) } else { bail!("{status}") }
    });
    report.summary();
    Ok(())
}

fn build() -> Result<PathBuf> {
    let output = cargo()
        .args(["build", "--release", "--package", "shadowbell-disk-qcow2", "--example", "soak"])
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .context("cargo build")?;
    if !output.status.success() {
        bail!("the example does not build");
    }
    executable(&String::from_utf8_lossy(&output.stdout), "soak").context("cargo named no program")
}
