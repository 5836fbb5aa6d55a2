//! `cargo xtask structure`: checks that imports between files of a crate, and between crates,
//! have no cycle.

mod cycles;
mod imports;
mod modules;
mod names;
mod packages;
mod syntax;
#[cfg(test)]
mod tests;

use std::path::Path;

use anyhow::{Context, Result, bail};

use cycles::Arrows;
use modules::Tree;
use packages::{Package, misplaced, packages};
use shadowbell_bench::workspace::{cargo, root};

pub(crate) const EXAMPLES: &str = "\
Examples:
  cargo xtask structure                         every crate of the workspace
  cargo xtask structure controller guest        these two
  cargo xtask structure --order controller      its files, bottom up";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Print the files of one crate bottom up, each with its height, without checks
    #[arg(long, value_name = "CRATE", conflicts_with = "crates")]
    order: Option<String>,
    /// Crates to check, by directory or package; the default is all of them
    crates: Vec<String>,
}

/// Prints one line for each correct crate, and the errors of the others.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if let Some(name) = &arguments.order {
        for package in named(std::slice::from_ref(name))? {
            for (height, file) in arrows(&package, &root())?.order() {
                println!("{height:3}  {file}");
            }
        }
        return Ok(());
    }
    check(&arguments.crates)
}

/// Prints one line for each correct crate. Returns the errors of all other crates as one error.
pub(crate) fn check(crates: &[String]) -> Result<()> {
    let mut wrong = Vec::new();
    for package in named(crates)? {
        let name = package.directory.display().to_string();
        let arrows = arrows(&package, &root())?;
        let faults: Vec<String> =
            misplaced(&package).into_iter().chain(cycles(&name, &arrows)).collect();
        if faults.is_empty() {
            println!("{name}: {} files, {} arrows, no cycle", arrows.files(), arrows.count());
        }
        wrong.extend(faults);
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        bail!("imports form cycles, or violate the order of the layers\n{}", wrong.join("\n"))
    }
}

/// Packages with these names, or all packages.
fn named(names: &[String]) -> Result<Vec<Package>> {
    let metadata = cargo()
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()
        .context("cargo metadata")?;
    if !metadata.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&metadata.stderr).trim());
    }
    let mut packages = packages(&metadata.stdout)?;
    for name in names {
        if !packages.iter().any(|package| package.is_called(name)) {
            let known: Vec<_> = packages.iter().map(|package| package.name.as_str()).collect();
            bail!("the workspace has no crate {name}; it has {}", known.join(", "));
        }
    }
    packages.retain(|package| names.is_empty() || names.iter().any(|name| package.is_called(name)));
    Ok(packages)
}

fn arrows(package: &Package, root: &Path) -> Result<Arrows> {
    let root = root.canonicalize().with_context(|| root.display().to_string())?;
    Ok(imports::arrows(&Tree::load(&package.targets)?, &root))
}

/// Errors in the imports of a crate's files.
fn cycles(name: &str, arrows: &Arrows) -> Vec<String> {
    let describe = |cycle| {
        let text = arrows.describe(cycle);
        let files = cycle.len();
        let advice = "move what they share to a file below them";
        format!("{name}: {files} files import in a cycle; {advice}:\n{}", text.trim_end())
    };
    arrows.cycles().iter().map(describe).collect()
}
