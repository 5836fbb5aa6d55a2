//! An upgrade.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail, ensure};

use super::count::Count;

/// One upgrade, to the same program.
pub(super) fn once(program: &Path, server: u32, count: &mut Count) -> Result<()> {
    let output = Command::new(program).args(["upgrade", &server.to_string()]).output()?;
    match output.status.code() {
        Some(0) => count.done += 1,
        Some(1) => {
            let why = String::from_utf8_lossy(&output.stderr);
            // The only reason that is none to worry about.
            ensure!(why.contains(" within "), "an upgrade has failed: {why}");
            count.put_off += 1;
        }
        _ => bail!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)),
    }
    Ok(())
}

/// The same, without a count: one that was put off is tried again.
pub(crate) fn upgrade_worker(program: &Path, server: u32) -> Result<()> {
    let mut count = Count::default();
    while count.done == 0 {
        ensure!(count.put_off < 20, "an upgrade was put off twenty times");
        once(program, server, &mut count)?;
    }
    Ok(())
}
