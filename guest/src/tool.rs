//! Builds the program that runs inside the guest.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use crate::host::last_lines;

/// File name of the program, also inside the guest.
pub const NAME: &str = "shadowbell-guest-tool";

/// Source files of the program, in this crate.
const SOURCES: &[&str] = &["src/bin/shadowbell-guest-tool.rs", "src/ack/sector.rs"];

/// Compiles the program statically into `directory`, unless it exists and is newer than its
/// sources. `workspace` is the root of the repository.
pub fn build(workspace: &Path, directory: &Path) -> Result<PathBuf> {
    let binary = directory.join(NAME);
    let sources: Vec<_> = SOURCES.iter().map(|name| workspace.join("guest").join(name)).collect();
    let time = |path: &Path| std::fs::metadata(path).and_then(|m| m.modified()).ok();
    let newest: Option<SystemTime> = sources.iter().filter_map(|path| time(path)).max();
    if time(&binary) > newest {
        return Ok(binary);
    }
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let source = sources.first().context("no source")?;
    let output = Command::new(&compiler)
        .args(["--edition=2024", "-Copt-level=3", "-Ctarget-feature=+crt-static"])
        .args(["--target=x86_64-unknown-linux-gnu", "--cap-lints=allow", "-o"])
        .arg(&binary)
        .arg(source)
        .stdin(Stdio::null())
        .output()
        .with_context(|| compiler.display().to_string())?;
    if !output.status.success() {
        bail!("compiling {NAME}: {}", last_lines(&output.stderr, 12));
    }
    Ok(binary)
}
