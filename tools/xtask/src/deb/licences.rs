//! Licences of the crates that the program is linked with.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;
use shadowbell_bench::workspace::cargo;

use super::tools::output;

/// Licence of each crate, and the licence texts of all crates, each text once.
pub(super) fn all() -> Result<String> {
    let arguments = ["metadata", "--format-version", "1", "--filter-platform"];
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let metadata = output(cargo().args(arguments).arg(target))?;
    let metadata = serde_json::from_str(&metadata).context("cargo metadata")?;
    let mut crates = String::new();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in linked(&metadata, "shadowbell") {
        let text = |key: &str| package.get(key).and_then(Value::as_str).unwrap_or_default();
        if package.get("source").is_none_or(Value::is_null) {
            // Crates of this workspace have the licence of the package.
            continue;
        }
        let name = format!("{} {}", text("name"), text("version"));
        writeln!(crates, "{name}: {} ({})", text("license"), text("repository"))?;
        let directory = Path::new(text("manifest_path")).parent().unwrap_or(Path::new(""));
        for text in licence_texts(directory)? {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    let mut all = format!("Shadowbell is linked with these crates.\n\n{crates}");
    for (text, crates) in texts {
        write!(all, "\n{}\n{}\n\n{}\n", "-".repeat(80), crates.join(", "), text.trim_end())?;
    }
    Ok(all)
}

/// Packages that `name` is linked with, itself included.
fn linked<'a>(metadata: &'a Value, name: &str) -> Vec<&'a Value> {
    let array = |value: Option<&'a Value>| value.and_then(Value::as_array).into_iter().flatten();
    let id = |value: &'a Value| value.get("id").and_then(Value::as_str);
    let packages: BTreeMap<_, _> =
        array(metadata.get("packages")).filter_map(|one| Some((id(one)?, one))).collect();
    let nodes: BTreeMap<_, _> = array(metadata.pointer("/resolve/nodes"))
        .filter_map(|node| Some((id(node)?, node)))
        .collect();
    let is_named = |one: &&Value| one.get("name").and_then(Value::as_str) == Some(name);
    let mut waiting: Vec<_> = packages.values().copied().filter(is_named).filter_map(id).collect();
    let mut seen = BTreeSet::new();
    while let Some(next) = waiting.pop() {
        if !seen.insert(next) {
            continue;
        }
        for dependency in array(nodes.get(next).and_then(|node| node.get("deps"))) {
            // The dependency kind null means that the package is linked; other kinds are for builds
            // and tests.
            let is_linked =
                array(dependency.get("dep_kinds")).any(|one| one.get("kind") == Some(&Value::Null));
            if is_linked {
                waiting.extend(dependency.get("pkg").and_then(Value::as_str));
            }
        }
    }
    seen.iter().filter_map(|id| packages.get(id).copied()).collect()
}

/// Licence files of a crate.
fn licence_texts(directory: &Path) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    let listed = fs::read_dir(directory).with_context(|| directory.display().to_string())?;
    for entry in listed {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        let is_licence = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"]
            .iter()
            .any(|start| name.starts_with(start));
        if is_licence && entry.path().is_file() {
            texts.push(String::from_utf8_lossy(&fs::read(entry.path())?).into_owned());
        }
    }
    texts.sort();
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn build_and_dev_dependencies_are_not_linked() {
        let deps = |id: &str, kind: Value| json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] });
        let metadata = json!({
            "packages": [
                { "id": "1", "name": "a" }, { "id": "2", "name": "b" },
                { "id": "3", "name": "c" }, { "id": "4", "name": "d" },
            ],
            "resolve": { "nodes": [
                { "id": "1", "deps": [deps("2", Value::Null), deps("3", json!("dev"))] },
                { "id": "2", "deps": [deps("1", Value::Null), deps("4", json!("build"))] },
            ]},
        });
        let names: Vec<_> = linked(&metadata, "a").into_iter().map(|one| &one["name"]).collect();
        assert_eq!(names, ["a", "b"]);
    }

    #[test]
    fn linked_crates_have_licence_texts() {
        let all = all().unwrap();
        assert!(all.contains("\nclap 4.") && all.contains("Permission is hereby granted"));
        assert!(!all.contains("\nproptest "), "it is for tests");
    }
}
