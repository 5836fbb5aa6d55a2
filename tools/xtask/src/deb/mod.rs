//! `cargo xtask package`: the Debian package and its test.
//!
//! This module assembles the file tree, and `dpkg-deb` packs it. cargo-deb does not fit: its build
//! takes minutes, and its systemd scripts restart the service, but this service is upgraded without
//! a restart.

mod boot;
mod control;
mod guest;
pub(crate) mod libvirt;
mod licences;
mod tools;
mod tree;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use shadowbell_bench::workspace::{build_shadowbell, root};

use shadowbell_harness::Report;
use tools::{directory, need, output};

pub(crate) const EXAMPLES: &str = "\
Examples:
  cargo xtask package                           target/debian/shadowbell_VERSION_ARCH.deb
  cargo xtask package --test                    and installs, upgrades, removes it in a fresh Debian
  cargo xtask package --version 1.2.3+local1    as another version";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Version of the package; the default is the program's
    #[arg(long)]
    version: Option<String>,
    /// Directory of the package
    #[arg(long, value_name = "DIRECTORY")]
    out: Option<PathBuf>,
    /// Path of a built shadowbell program; without it, one is built
    #[arg(long, value_name = "PATH")]
    shadowbell: Option<PathBuf>,
    /// Check the package with lintian and the alerting rules with promtool, install it in a new
    /// Debian system booted by systemd, use, upgrade and remove it
    #[arg(long)]
    test: bool,
}

/// Builds the package, and tests it with --test.
pub(crate) fn run(report: &mut Report, arguments: &Arguments) -> Result<()> {
    need("dpkg-shlibdeps", "dpkg-dev")?;
    let program = match &arguments.shadowbell {
        Some(path) => path.canonicalize().with_context(|| path.display().to_string())?,
        None => build_shadowbell()?,
    };
    let version = arguments.version.as_deref().unwrap_or(env!("CARGO_PKG_VERSION"));
    let out = arguments.out.clone().unwrap_or_else(directory);
    let package = tree::build(&program, version, &out)?;
    println!("{}", package.display());
    if arguments.test {
        report.begin("package");
        report.check("lintian finds no error", |_| lintian(&package));
        report.check("the alerting rules are valid (promtool)", |_| alerts());
        check(report, &program, &package, version);
        report.summary();
    }
    Ok(())
}

/// Downloads the Debian in which the package is tested.
pub(crate) fn fetch() -> Result<()> {
    guest::root().map(drop)
}

/// Packages `program` and tests the package, as a step of `cargo xtask test`.
pub(crate) fn test(report: &mut Report, program: &Path) {
    report.begin("package");
    let version = env!("CARGO_PKG_VERSION");
    let package = report.check("the package is built", |_| {
        need("dpkg-shlibdeps", "dpkg-dev")?;
        tree::build(program, version, &directory())
    });
    if let Some(package) = package {
        check(report, program, &package, version);
    }
}

fn check(report: &mut Report, program: &Path, package: &Path, version: &str) {
    report.check("the units' exposure level is low (systemd-analyze security)", |_| exposure());
    let newer = report.check("a newer package is built", |_| {
        tree::build(program, &format!("{version}+newer"), &directory().join("newer"))
    });
    if let Some(newer) = newer {
        guest::test(report, package, &newer);
    }
}

fn lintian(package: &Path) -> Result<()> {
    need("lintian", "lintian")?;
    let arguments = ["--fail-on", "error", "--tag-display-limit", "0", "--allow-root"];
    let printed = output(Command::new("lintian").args(arguments).arg(package))?;
    print!("{printed}");
    Ok(())
}

fn alerts() -> Result<()> {
    need("promtool", "prometheus")?;
    let rules = root().join("docs/alerts.yml");
    output(Command::new("promtool").args(["check", "rules"]).arg(rules)).map(drop)
}

/// Maximum exposure level of `systemd-analyze security`, from 0 to 10.
const EXPOSURE: f64 = 1.6;

fn exposure() -> Result<()> {
    need("systemd-analyze", "systemd")?;
    for unit in ["shadowbell.service", "shadowbell@.service"] {
        let printed = output(
            Command::new("systemd-analyze")
                .args(["security", "--offline=yes", "--no-pager"])
                .arg(root().join("packaging").join(unit)),
        )?;
        let found =
            overall(&printed).with_context(|| format!("no overall exposure in:\n{printed}"))?;
        println!("         {unit}: {found}");
        if found > EXPOSURE {
            bail!("{unit}: {found} is more than {EXPOSURE}");
        }
    }
    Ok(())
}

/// Parses the exposure level in the last line of `systemd-analyze security`.
fn overall(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.contains("Overall exposure level"))?;
    line.rsplit_once(": ")?.1.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overall_exposure_is_parsed() {
        let text = "  NAME DESCRIPTION EXPOSURE\n\u{2717} PrivateNetwork= has access 0.5\n\n\
                    \u{2192} Overall exposure level for shadowbell.service: 1.6 OK :-)\n";
        assert_eq!(overall(text), Some(1.6));
        assert_eq!(overall("nothing"), None);
    }
}
