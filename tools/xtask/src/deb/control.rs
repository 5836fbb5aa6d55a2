//! Metadata of the package: control file and changelog.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::tools::output;

pub(super) const MAINTAINER: &str = "Shadowbell maintainers <shadowbell@users.noreply.github.com>";

const DESCRIPTION: &str = "\
NVMe controllers for virtual machines and user-space programs
 Serves files, block devices, memory and network disks as NVMe controllers to
 virtual machines, over vfio-user sockets: to QEMU from 10.1 on, and to Cloud
 Hypervisor. Shadow doorbells spare the guest nearly all of its exits.
 .
 The server can be replaced and recovers from crashes while guests run. With it
 come a driver in user space for real and emulated SSDs, and tools that measure
 and verify them.";

/// Contents of the file `control`.
pub(super) fn control(program: &Path, version: &str, installed_kib: u64) -> Result<String> {
    let architecture = output(Command::new("dpkg").arg("--print-architecture"))?;
    let libraries = libraries(program)?;
    Ok(format!(
        "Package: shadowbell\n\
         Version: {version}\n\
         Architecture: {}\n\
         Maintainer: {MAINTAINER}\n\
         Installed-Size: {installed_kib}\n\
         Depends: {libraries}, systemd | systemd-standalone-sysusers, \
         systemd | systemd-standalone-tmpfiles\n\
         Suggests: librbd1, qemu-system-x86\n\
         Section: admin\n\
         Priority: optional\n\
         Homepage: https://github.com/shadowbell/shadowbell\n\
         Description: {DESCRIPTION}\n",
        architecture.trim()
    ))
}

/// Packages of the libraries that the program is linked with, by dpkg-shlibdeps.
fn libraries(program: &Path) -> Result<String> {
    let directory = tempfile::tempdir()?;
    // dpkg-shlibdeps needs a file debian/control.
    fs::create_dir(directory.path().join("debian"))?;
    let source = "Source: shadowbell\n\nPackage: shadowbell\nArchitecture: any\n";
    fs::write(directory.path().join("debian/control"), source)?;
    let mut command = Command::new("dpkg-shlibdeps");
    command.current_dir(directory.path()).arg("-O").arg("-e").arg(program);
    let printed = output(&mut command)?;
    let found = printed.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
    found.map(str::to_owned).context("dpkg-shlibdeps names no libraries")
}

/// Changelog in Debian's form, which refers to the project's own changelog.
pub(super) fn changelog(version: &str, seconds: u64) -> Result<String> {
    let mut command = Command::new("date");
    let date = output(command.env("LC_ALL", "C").args(["-u", "-R", "-d", &format!("@{seconds}")]))?;
    Ok(format!(
        "shadowbell ({version}) unstable; urgency=medium\n\n  \
         * See /usr/share/doc/shadowbell/NEWS.gz.\n\n \
         -- {MAINTAINER}  {}\n",
        date.trim()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_in_the_format_of_debian() {
        let text = changelog("1.2", 0).unwrap();
        assert!(text.starts_with("shadowbell (1.2) unstable; urgency=medium\n\n  * See"), "{text}");
        assert!(text.ends_with(">  Thu, 01 Jan 1970 00:00:00 +0000\n"), "{text}");
        assert!(DESCRIPTION.lines().skip(1).all(|line| line.starts_with(' ') && line.len() <= 80));
    }
}
