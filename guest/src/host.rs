//! Checks of the prerequisites for guests on this machine: programs, packages and a Debian mirror.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Path of the Debian archive's keys on a Debian machine.
pub const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Programs of the host, and the Debian package of each.
const TOOLS: &[(&str, &str)] = &[
    ("mmdebstrap", "mmdebstrap"),
    ("unshare", "util-linux"),
    ("setpriv", "util-linux"),
    ("chroot", "coreutils"),
    ("apt-get", "apt"),
];

/// Checks that a guest can be downloaded and started on this machine. As root on Debian, missing
/// packages are installed; otherwise the error names them.
pub fn prepare() -> Result<()> {
    let mut missing: Vec<_> =
        TOOLS.iter().filter(|(tool, _)| !in_path(tool)).map(|(_, package)| *package).collect();
    if !std::path::Path::new(KEYRING).exists() {
        missing.push("debian-archive-keyring");
    }
    missing.dedup();
    if !rustix::process::getuid().is_root() {
        let install = if missing.is_empty() {
            String::new()
        } else {
            format!(" and these packages: apt-get install {}", missing.join(" "))
        };
        bail!("the test guest needs root (its tools live in a chroot of their own){install}");
    }
    if missing.is_empty() {
        return Ok(());
    }
    install(&missing)
}

/// Installs Debian packages on this machine; needs root.
pub fn install(packages: &[&str]) -> Result<()> {
    let line = format!("apt-get install {}", packages.join(" "));
    if !rustix::process::getuid().is_root() || !in_path("apt-get") {
        bail!("missing on this machine, install it first: {line}");
    }
    eprintln!("installing: {}", packages.join(" "));
    apt_get(&["update"])
        .and_then(|()| {
            let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
            arguments.extend(packages);
            apt_get(&arguments)
        })
        .with_context(|| format!("could not install the missing packages; try: {line}"))
}

fn apt_get(arguments: &[&str]) -> Result<()> {
    let output = Command::new("apt-get")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output()
        .context("apt-get")?;
    if !output.status.success() {
        bail!("apt-get {}: {}", arguments.join(" "), last_lines(&output.stderr, 5));
    }
    Ok(())
}

/// True if a program with this name is in PATH.
pub fn in_path(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|directory| directory.join(tool).is_file())
}

/// URL of the Debian archive from which this machine installs packages.
/// `SHADOWBELL_DEBIAN_MIRROR` overrides it, for other distributions.
pub fn debian_mirror() -> Result<String> {
    if let Ok(mirror) = std::env::var("SHADOWBELL_DEBIAN_MIRROR") {
        return Ok(mirror);
    }
    let output = Command::new("apt-get")
        .args([
            "indextargets",
            "--format",
            "$(REPO_URI)|$(RELEASE)|$(LABEL)",
            "Created-By: Packages",
        ])
        .stdin(Stdio::null())
        .output()
        .context("apt-get indextargets")?;
    choose_mirror(&String::from_utf8_lossy(&output.stdout)).context(
        "the package sources of this machine name no Debian archive; \
         say which to use with SHADOWBELL_DEBIAN_MIRROR=URI",
    )
}

/// Selects the archive from lines `URI|release|label`. Before the first `apt-get update`, the label
/// is the unexpanded format. In that case, the name of the Debian release decides.
fn choose_mirror(targets: &str) -> Option<String> {
    let rows = || {
        targets.lines().filter_map(|line| {
            let mut words = line.split('|');
            Some((words.next()?, words.next()?, words.next()?))
        })
    };
    let releases = ["bookworm", "trixie", "forky", "sid", "stable", "testing", "unstable"];
    rows()
        .find(|(_, _, label)| *label == "Debian")
        .or_else(|| {
            rows().find(|(_, release, label)| label.contains("LABEL") && releases.contains(release))
        })
        .map(|(uri, _, _)| uri.to_owned())
}

/// Last lines of a program's output, for an error message.
pub fn last_lines(bytes: &[u8], count: usize) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines.get(lines.len().saturating_sub(count)..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_main_debian_archive_is_chosen_as_mirror() {
        let targets = "http://a/debian-security/|bookworm-security|Debian-Security\n\
                       http://b/cloud|cloud-sdk|cloud-sdk\n\
                       http://c/debian/|bookworm|Debian\n";
        assert_eq!(choose_mirror(targets).unwrap(), "http://c/debian/");
    }

    #[test]
    fn before_the_first_update_the_release_has_to_do() {
        let targets = "http://a/debian-security/|bookworm-security|$(LABEL)\n\
                       http://c/debian/|bookworm|$(LABEL)\n";
        assert_eq!(choose_mirror(targets).unwrap(), "http://c/debian/");
        assert_eq!(choose_mirror("http://u/ubuntu/|noble|Ubuntu\n"), None);
        assert_eq!(choose_mirror(""), None);
    }

    #[test]
    fn the_last_lines_are_the_last() {
        assert_eq!(last_lines(b"a\nb\n\nc\n", 2), "b\nc");
        assert_eq!(last_lines(b"", 2), "");
    }
}
