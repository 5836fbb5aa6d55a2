//! Where the repository is, and cargo in it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// The root of the repository.
pub fn root() -> PathBuf {
    // Cargo says where this package is now; what was true at compile time serves a binary that is
    // started by hand.
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.ancestors().nth(2).map_or_else(|| manifest.clone(), Path::to_path_buf)
}

/// Cargo, in the root of the repository.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// Builds the program as a user would, and says where it is.
pub fn build_shadowbell() -> Result<PathBuf> {
    eprintln!("building shadowbell ...");
    build(&["--release", "--package", "shadowbell", "--bin", "shadowbell"])
}

/// Builds the program as `cargo xtask test` builds it for the tests, so that nothing is built
/// twice: it can also do wrong on purpose. Nothing is to be measured with it.
pub fn build_for_tests() -> Result<PathBuf> {
    eprintln!("building shadowbell with faults ...");
    let faults = ["--features", "shadowbell/faults"];
    // With an example cargo chooses the features of dependencies as it does for tests. Without one
    // half of the crates would be built anew.
    let example = ["--workspace", "--bin", "shadowbell", "--example", "step"];
    build(&[&example[..], &faults].concat())
}

fn build(arguments: &[&str]) -> Result<PathBuf> {
    let output = cargo()
        .arg("build")
        .args(arguments)
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .context("cargo build")?;
    if !output.status.success() {
        bail!("shadowbell does not build");
    }
    executable(&String::from_utf8_lossy(&output.stdout), "shadowbell")
        .context("cargo build named no program")
}

/// The program of this name among cargo's messages.
pub fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message.pointer("/target/name").is_some_and(|found| found == name))
        .find_map(|message| Some(PathBuf::from(message.get("executable")?.as_str()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_found_among_cargos_messages() {
        let messages = "warning: not JSON\n\
            {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"anyhow\"},\"executable\":null}\n\
            {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"shadowbell\"},\"executable\":\"/t/shadowbell\"}\n";
        assert_eq!(executable(messages, "shadowbell"), Some("/t/shadowbell".into()));
        assert_eq!(executable(messages, "anyhow"), None);
    }

    #[test]
    fn the_root_holds_the_workspace() {
        assert!(root().join("tools/xtask/Cargo.toml").is_file());
    }
}
