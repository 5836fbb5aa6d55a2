//! Paths of the repository, and cargo commands.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Root directory of the repository.
pub fn root() -> PathBuf {
    // If cargo runs this program, the environment variable has the current path of the package.
    // Otherwise the path at compile time is used.
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.ancestors().nth(2).map_or_else(|| manifest.clone(), Path::to_path_buf)
}

/// Cargo command in the root directory.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).stdin(Stdio::null());
    // Removes the variables that cargo sets for a program that it runs. With them, cargo would run
    // some build scripts again (the build script of the crate `ring` reads them), and compile all
    // dependents again.
    for (name, _) in std::env::vars_os() {
        let bytes = name.as_encoded_bytes();
        if bytes.starts_with(b"CARGO_PKG_") || bytes.starts_with(b"CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    command
}

/// Builds the program in the release profile. Returns its path.
pub fn build_shadowbell() -> Result<PathBuf> {
    eprintln!("building shadowbell ...");
    build("shadowbell", &["--release", "--package", "shadowbell", "--bins"])
}

/// Builds the program with the flags of `cargo test`, so that cargo builds nothing twice: in the
/// dev profile, with fault injection. The program is not for measurements.
pub fn build_for_tests() -> Result<PathBuf> {
    eprintln!("building shadowbell for tests ...");
    // The example makes cargo enable the features of dev-dependencies, as for tests. Without it,
    // half of the crates would be built a second time, with other features.
    build("shadowbell", &["--workspace", "--bin", "shadowbell*", "--example", "step"])
}

/// Builds an example with the flags of `cargo test`, as [`build_for_tests`] does.
pub fn build_example_for_tests(example: &str) -> Result<PathBuf> {
    build(example, &["--workspace", "--example", example])
}

/// Restarts the process in the release profile, unless it already runs in it, because an
/// unoptimized load generator would dominate the measurement. Returns only if no restart is needed,
/// or with an error.
pub fn run_optimised() -> Result<()> {
    if !cfg!(debug_assertions) {
        return Ok(());
    }
    eprintln!("building this chore in the release profile, which may take some minutes ...");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["run", "--quiet", "--release", "--package", "xtask", "--manifest-path"]);
    command.arg(root().join("Cargo.toml")).arg("--").args(std::env::args_os().skip(1));
    Err(command.exec()).context("cargo run")
}

/// Runs `cargo build`. Returns the path of `program`.
fn build(program: &str, arguments: &[&str]) -> Result<PathBuf> {
    let output = cargo()
        .arg("build")
        .args(arguments)
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .context("cargo build")?;
    if !output.status.success() {
        bail!("{program} does not build");
    }
    executable(&String::from_utf8_lossy(&output.stdout), program)
        .context("cargo build named no program")
}

/// Program of tests: a file of a package's `tests`, or the unit tests of a crate.
#[derive(Debug, PartialEq, Eq)]
pub struct TestProgram {
    /// Path of the source, relative to the root of the repository.
    pub source: String,
    /// Directory of the package, in which cargo starts the program.
    pub package: PathBuf,
    /// Path of the program.
    pub program: PathBuf,
}

/// Test programs of the workspace, from `cargo test --workspace`, which builds them if necessary.
pub fn test_programs() -> Result<Vec<TestProgram>> {
    let output = cargo()
        .args(["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"])
        .stderr(Stdio::inherit())
        .output()
        .context("cargo test")?;
    if !output.status.success() {
        bail!("the tests do not build");
    }
    Ok(test_programs_in(&String::from_utf8_lossy(&output.stdout), &root()))
}

fn test_programs_in(messages: &str, root: &Path) -> Vec<TestProgram> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = |message: Value| {
        if message.pointer("/profile/test") != Some(&Value::Bool(true)) {
            return None;
        }
        let source = Path::new(message.pointer("/target/src_path")?.as_str()?);
        let source = source.strip_prefix(root).unwrap_or(source).display().to_string();
        let package = Path::new(message.get("manifest_path")?.as_str()?).parent()?.to_owned();
        Some(TestProgram { source, package, program: message.get("executable")?.as_str()?.into() })
    };
    messages.filter_map(program).collect()
}

/// Builds test programs as `cargo xtask test` does, so that nothing is built twice. Returns their
/// paths. `sources` are relative to the root of the repository.
pub fn build_tests(sources: &[&str]) -> Result<Vec<PathBuf>> {
    eprintln!("building the tests ...");
    let mut command = cargo();
    command.args(["test", "--no-run", "--workspace"]);
    for source in sources {
        command.arg("--test").arg(target(source)?);
    }
    let output = command
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .context("cargo test")?;
    if !output.status.success() {
        bail!("the tests do not build");
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let path = |source: &&str| {
        test_executable(&messages, source).with_context(|| format!("cargo test has no {source}"))
    };
    sources.iter().map(path).collect()
}

/// Name of the test target of a source file: its file name, or the directory of its `main.rs`.
fn target(source: &str) -> Result<&str> {
    let path = source.strip_suffix("/main.rs").or_else(|| source.strip_suffix(".rs"));
    path.and_then(|path| path.rsplit('/').next()).with_context(|| format!("no test: {source}"))
}

/// Path of the test program of this source, from cargo's messages.
fn test_executable(messages: &str, source: &str) -> Option<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| {
            let found = message.pointer("/target/src_path").and_then(Value::as_str);
            found.is_some_and(|path| Path::new(path).ends_with(source))
        })
        .find_map(|message| Some(PathBuf::from(message.get("executable")?.as_str()?)))
}

/// Path of the program with this name, from cargo's messages.
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
    fn test_programs_are_listed_with_their_packages() {
        let messages = "{\"manifest_path\":\"/w/x/Cargo.toml\",\"target\":{\"src_path\":\"/w/x/src/lib.rs\"},\
            \"profile\":{\"test\":false},\"executable\":null}\n\
            {\"manifest_path\":\"/w/x/Cargo.toml\",\"target\":{\"src_path\":\"/w/x/tests/a.rs\"},\
            \"profile\":{\"test\":true},\"executable\":\"/t/a\"}\n";
        let found = test_programs_in(messages, Path::new("/w"));
        let expected = TestProgram {
            source: "x/tests/a.rs".into(),
            package: "/w/x".into(),
            program: "/t/a".into(),
        };
        assert_eq!(found, [expected]);
    }

    #[test]
    fn a_test_is_found_by_its_source() {
        let messages = "{\"target\":{\"src_path\":\"/w/other/tests/a.rs\"},\"executable\":\"/t/b\"}\n\
            {\"target\":{\"src_path\":\"/w/crates/x/tests/a.rs\"},\"executable\":\"/t/a\"}\n";
        assert_eq!(test_executable(messages, "crates/x/tests/a.rs"), Some("/t/a".into()));
        assert_eq!(test_executable(messages, "crates/y/tests/a.rs"), None);
        assert_eq!(target("crates/x/tests/a.rs").unwrap(), "a");
        assert_eq!(target("crates/x/tests/many/main.rs").unwrap(), "many");
        assert!(target("crates/x/tests").is_err());
    }

    #[test]
    fn the_root_holds_the_workspace() {
        assert!(root().join("tools/xtask/Cargo.toml").is_file());
    }
}
