//! Packages of the workspace, and the layers of crates.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::modules::Target;

/// Directories below `crates/`, from the bottom layer to the top. A crate may depend only on crates
/// that precede it in this list. Packages outside of `crates/` (tests, tools) may depend on every
/// crate, and no crate may depend on them.
pub(super) const LAYERS: [&str; 30] = [
    "spec",
    "doorbell",
    "uring",
    "state",
    "nbd",
    "tls",
    "signature",
    "memory",
    "process",
    "vfio-user",
    "disk",
    "disk-file",
    "disk-layers",
    "controller",
    "driver",
    "frontend",
    "testing",
    "disk-nvme",
    "disk-nbd",
    "disk-qcow2",
    "disk-rbd",
    "config",
    "control-api",
    "storage",
    "supervisor",
    "block",
    "export",
    "server",
    "nvme-tools",
    "shadowbell",
];

/// Package of the workspace.
#[derive(Debug)]
pub(super) struct Package {
    pub(super) name: String,
    /// Directory, relative to the workspace's root.
    pub(super) directory: PathBuf,
    pub(super) targets: Vec<Target>,
    /// Directories of its dependencies without dev-dependencies, relative to the workspace's
    /// root.
    builds_on: Vec<PathBuf>,
}

impl Package {
    /// True if `name` is a name of this package or of its directory.
    pub(super) fn is_called(&self, name: &str) -> bool {
        self.name == name || self.directory == Path::new(name) || self.directory.ends_with(name)
    }
}

/// Parses the packages in the output of `cargo metadata --no-deps`.
pub(super) fn packages(metadata: &[u8]) -> Result<Vec<Package>> {
    let metadata: Value =
        serde_json::from_slice(metadata).context("the output of cargo metadata")?;
    let root = text(&metadata, "workspace_root")?;
    let relative = |path: &str| {
        let path = Path::new(path);
        path.strip_prefix(root).unwrap_or(path).to_path_buf()
    };
    let mut packages = Vec::new();
    for package in list(&metadata, "packages") {
        let manifest = relative(text(package, "manifest_path")?);
        let mut targets = Vec::new();
        for target in list(package, "targets") {
            let is = |kind: &str| list(target, "kind").any(|found| found == kind);
            if ["test", "example", "bench", "custom-build"].into_iter().any(is) {
                continue;
            }
            targets.push(Target {
                name: text(target, "name")?.replace('-', "_"),
                is_library: !is("bin"),
                path: text(target, "src_path")?.into(),
            });
        }
        let builds_on = list(package, "dependencies")
            .filter(|dependency| dependency.get("kind").is_none_or(|kind| kind != "dev"))
            .filter_map(|dependency| Some(relative(dependency.get("path")?.as_str()?)))
            .collect();
        packages.push(Package {
            name: text(package, "name")?.to_owned(),
            directory: manifest.parent().map(Path::to_path_buf).unwrap_or_default(),
            targets,
            builds_on,
        });
    }
    Ok(packages)
}

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value.get(key).and_then(Value::as_array).into_iter().flatten()
}

fn text<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    let Some(text) = value.get(key).and_then(Value::as_str) else {
        bail!("cargo metadata printed no {key}");
    };
    Ok(text)
}

/// Errors in the dependencies of a package, one sentence each.
pub(super) fn misplaced(package: &Package) -> Vec<String> {
    let name = package.directory.display();
    if !package.directory.starts_with("crates") {
        return Vec::new();
    }
    let Some(own) = layer(&package.directory) else {
        return vec![format!(
            "{name} is in no layer: add it to LAYERS in tools/xtask/src/structure/packages.rs"
        )];
    };
    package
        .builds_on
        .iter()
        .filter(|below| layer(below).is_none_or(|below| below >= own))
        .map(|below| {
            let below = below.display();
            format!("{name} builds on {below}, which is not below it: turn the dependency around")
        })
        .collect()
}

fn layer(directory: &Path) -> Option<usize> {
    let name = directory.strip_prefix("crates").ok()?;
    LAYERS.iter().position(|layer| name == Path::new(layer))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(directory: &str, builds_on: &[&str]) -> Package {
        Package {
            name: directory.replace('/', "-"),
            directory: directory.into(),
            targets: Vec::new(),
            builds_on: builds_on.iter().map(PathBuf::from).collect(),
        }
    }

    #[test]
    fn a_crate_depends_on_lower_layers_only() {
        assert!(misplaced(&package("crates/memory", &["crates/spec"])).is_empty());
        let wrong = misplaced(&package("crates/spec", &["crates/memory", "guest"]));
        assert_eq!(
            wrong,
            [
                "crates/spec builds on crates/memory, which is not below it: \
                 turn the dependency around",
                "crates/spec builds on guest, which is not below it: turn the dependency around",
            ]
        );
        assert!(misplaced(&package("tools/xtask", &["guest", "crates/shadowbell"])).is_empty());
    }

    #[test]
    fn a_crate_has_a_layer() {
        assert!(misplaced(&package("crates/new", &[]))[0].starts_with("crates/new is in no layer"));
    }

    #[test]
    fn a_package_is_found_by_its_short_name() {
        let package = package("fuzz/bodies", &[]);
        assert!(["fuzz/bodies", "bodies", "fuzz-bodies"].iter().all(|n| package.is_called(n)));
        assert!(!package.is_called("fuzz"));
    }
}
