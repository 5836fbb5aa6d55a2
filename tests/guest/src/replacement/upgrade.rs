//! Restart for upgrade.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail, ensure};

use super::count::Count;

/// Restarts the server for upgrade once, with the same program, and counts the result in `count`.
pub(super) fn once(program: &Path, server: u32, count: &mut Count) -> Result<()> {
    let output = Command::new(program).args(["upgrade", &server.to_string()]).output()?;
    match output.status.code() {
        Some(0) => count.done += 1,
        Some(1) => {
            let why = String::from_utf8_lossy(&output.stderr);
            // The old process may continue after a timeout of the quiesce. Any other failure is an
            // error.
            ensure!(why.contains(" within "), "an upgrade has failed: {why}");
            count.cancelled += 1;
        }
        _ => bail!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)),
    }
    Ok(())
}

/// Restarts the server for upgrade, without counting the restart for a test. A cancelled upgrade is
/// tried again.
pub(crate) fn upgrade_worker(program: &Path, server: u32) -> Result<()> {
    let mut count = Count::default();
    while count.done == 0 {
        ensure!(count.cancelled < 20, "an upgrade was cancelled twenty times");
        once(program, server, &mut count)?;
    }
    Ok(())
}
