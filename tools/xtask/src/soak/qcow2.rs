//! A qcow2 image is worked on by a process that is killed, again and again: what is in it then, and
//! whether QEMU agrees. The work is the example `soak` of the crate `backend-qcow2`, which needs
//! nothing of a server.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use shadowbell_bench::workspace::{cargo, executable};

use crate::report::Report;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// It ends when there were so many.
    #[arg(long, default_value_t = 100_000_000)]
    operations: u64,
    /// Chooses the operations and the moments.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Do not keep the disk for the next process, and judge it as if it were: what was answered and
    /// is lost has to be noticed, and that is what passes.
    #[arg(long)]
    control: bool,
    /// Where the image is made.
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    directory: PathBuf,
}

pub(crate) fn run(report: &mut Report, arguments: &Arguments) -> Result<()> {
    let program = build()?;
    let directory = tempfile::tempdir_in(&arguments.directory)
        .with_context(|| arguments.directory.display().to_string())?;
    report.begin("soak qcow2");
    let what = match arguments.control {
        false => "the image holds what it may, and qemu-img finds no corruption",
        true => "what was answered and is lost is noticed",
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
        .args(["build", "--release", "--package", "shadowbell-backend-qcow2", "--example", "soak"])
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .context("cargo build")?;
    if !output.status.success() {
        bail!("the example does not build");
    }
    executable(&String::from_utf8_lossy(&output.stdout), "soak").context("cargo named no program")
}
