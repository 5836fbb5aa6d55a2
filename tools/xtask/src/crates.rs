//! `cargo xtask crates`: packages of the published crates.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use shadowbell_bench::workspace::cargo;

use shadowbell_harness::Report;
use shadowbell_harness::step;

/// Packages all published crates. With `verify`, builds each from its package alone.
pub(crate) fn run(report: &mut Report, verify: bool) -> Result<()> {
    check(report, verify);
    report.summary();
    Ok(())
}

/// Packages all published crates, without a summary.
pub(crate) fn check(report: &mut Report, verify: bool) {
    report.begin("packages");
    let Some(unpublished) = report.check("cargo lists the unpublished crates", |_| unpublished())
    else {
        return;
    };
    let mut command = cargo();
    // Uncommitted changes are allowed, because nothing is uploaded.
    command.args(["package", "--workspace", "--allow-dirty"]);
    command.args(unpublished.iter().flat_map(|name| ["--exclude", name]));
    command.args((!verify).then_some("--no-verify"));
    step(report, "cargo package", &mut command);
}

/// The packages of the workspace with `publish = false`.
fn unpublished() -> Result<Vec<String>> {
    let output = cargo()
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()
        .context("cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let metadata = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    Ok(without_registry(&metadata))
}

/// Names of the packages that must not be published.
fn without_registry(metadata: &Value) -> Vec<String> {
    let packages = metadata.get("packages").and_then(Value::as_array);
    packages
        .into_iter()
        .flatten()
        .filter(|package| package.get("publish") == Some(&Value::Array(Vec::new())))
        .filter_map(|package| Some(package.get("name")?.as_str()?.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unpublished_packages_are_listed() {
        let metadata = json!({ "packages": [
            { "name": "a", "publish": null },
            { "name": "b", "publish": [] },
            { "name": "c", "publish": ["elsewhere"] },
        ]});
        assert_eq!(without_registry(&metadata), ["b"]);
        assert!(unpublished().unwrap().contains(&"xtask".to_owned()));
    }
}
