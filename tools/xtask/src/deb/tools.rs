//! Functions that building and testing share.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use shadowbell_bench::workspace::root;
use shadowbell_guest::host;

/// Installs a Debian package on this machine if a program is missing.
pub(super) fn need(program: &str, package: &str) -> Result<()> {
    if host::in_path(program) { Ok(()) } else { host::install(&[package]) }
}

/// Directory of built packages.
pub(super) fn directory() -> PathBuf {
    root().join("target/debian")
}

/// Runs a command. Returns its output, or an error with its messages.
pub(super) fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| name.clone())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if !output.status.success() {
        let (printed, errors) = (text(&output.stdout), text(&output.stderr));
        bail!("{name} ({}):\n{printed}{errors}", output.status);
    }
    Ok(text(&output.stdout))
}
