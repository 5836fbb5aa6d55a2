//! Initramfs of the guest: the first process, programs of the tools root, and their shared
//! libraries.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cpio::Archive;
use crate::host::last_lines;
use crate::roots::Roots;

/// Script of the first process, with the agent.
const INIT: &str = include_str!("init.sh");

/// Programs of a guest that only boots.
pub const MINIMAL: &[&str] = &["/usr/bin/busybox"];

/// Programs of a guest that uses a disk.
pub const FULL: &[&str] = &[
    "/usr/bin/busybox",
    "/usr/bin/cmp", // the `cmp` of busybox stops at the first difference
    "/usr/bin/fio",
    "/usr/sbin/nvme",
    "/usr/sbin/mkfs.ext4",
    "/usr/sbin/e2fsck",
    "/usr/sbin/blkdiscard",
    "/usr/bin/mount",
    "/usr/bin/umount",
];

/// Directories of the Debian root that are links into `/usr`.
const MERGED: &[&str] = &["bin", "sbin", "lib", "lib64"];

/// Directory of this project's programs in the guest.
const OURS: &str = "usr/sbin";

/// Directory of kernel modules in the guest.
pub const MODULES: &str = "/usr/lib/shadowbell/modules";

/// Mount point of a program's directory in the tools root while its libraries are looked up.
const LOOKUP_DIR: &str = "/run/shadowbell/program";

/// Files of a guest in addition to Debian's programs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Extra<'a> {
    /// Programs of the host for `/usr/sbin`, statically linked.
    pub programs: &'a [&'a Path],
    /// Dynamically linked programs of the host. The archive gets their shared libraries from the
    /// tools root.
    pub linked: &'a [&'a Path],
    /// Kernel modules for [`MODULES`].
    pub modules: &'a [PathBuf],
    /// Other files: path relative to the root, and contents.
    pub files: &'a [(&'a str, &'a [u8])],
    /// Script that runs as the first process, instead of the agent.
    pub init: Option<&'a str>,
}

/// Packs an archive without compression, because an emulated guest would take long to decompress
/// it.
///
/// `programs` are paths of the tools root.
pub fn pack(roots: &Roots, programs: &[&str], extra: Extra<'_>) -> Result<Vec<u8>> {
    let tools = roots.tools();
    let mut archive = Archive::new();
    for link in MERGED {
        archive.symlink(link, &format!("usr/{link}"));
    }
    for directory in ["dev", "proc", "sys", "tmp", "run", "mnt", "root", "etc", "opt/busybox"] {
        archive.directory(directory);
    }
    // The kernel opens /dev/console for the first process before any file system is mounted.
    archive.char_device("dev/console", 0o600, 5, 1);
    archive.char_device("dev/null", 0o666, 1, 3);
    archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n");
    archive.symlink("etc/mtab", "../proc/mounts");
    archive.file("init", 0o755, extra.init.unwrap_or(INIT).as_bytes());
    archive.symlink("usr/bin/sh", "busybox");
    let mut paths: Vec<String> = programs.iter().map(|&program| program.to_owned()).collect();
    let mut add = |found: Vec<String>| {
        paths.extend(found.into_iter().filter(|path| !path.starts_with(LOOKUP_DIR)));
        paths.sort();
        paths.dedup();
    };
    add(libraries(roots, &[], programs)?);
    for path in extra.linked {
        let directory = path.parent().context("a program without a directory")?;
        let name = path.file_name().context("a program without a name")?.to_string_lossy();
        add(libraries(roots, &[(directory, LOOKUP_DIR)], &[&format!("{LOOKUP_DIR}/{name}")])?);
    }
    for path in paths {
        let name = merged(&path);
        let from = tools.join(&name);
        let content = fs::read(&from).with_context(|| from.display().to_string())?;
        let mode = fs::metadata(&from)?.permissions().mode();
        archive.file(&name, mode, &content);
    }
    for path in extra.programs.iter().chain(extra.linked) {
        let name = path.file_name().context("a program without a name")?.to_string_lossy();
        let content = fs::read(path).with_context(|| path.display().to_string())?;
        archive.file(&format!("{OURS}/{name}"), 0o755, &content);
    }
    if !extra.modules.is_empty() {
        archive.directory(MODULES.trim_start_matches('/'));
    }
    for path in extra.modules {
        let name = path.file_name().context("a module without a name")?.to_string_lossy();
        let content = fs::read(path).with_context(|| path.display().to_string())?;
        archive.file(&format!("{}/{name}", MODULES.trim_start_matches('/')), 0o644, &content);
    }
    for (name, content) in extra.files {
        archive.file(name, 0o644, content);
    }
    Ok(archive.finish())
}

/// Paths of the shared libraries that `programs` need, as `ldd` of the root reports them.
fn libraries(roots: &Roots, binds: &[(&Path, &str)], programs: &[&str]) -> Result<Vec<String>> {
    let output = roots.command(binds, "ldd")?.args(programs).output().context("ldd")?;
    if !output.status.success() {
        bail!("ldd in the tools root: {}", last_lines(&output.stderr, 3));
    }
    parse_ldd(&String::from_utf8_lossy(&output.stdout))
}

/// Parses the output of ldd: each path once, in order.
fn parse_ldd(text: &str) -> Result<Vec<String>> {
    let mut paths: Vec<String> = Vec::new();
    for line in text.lines().filter(|line| line.starts_with(char::is_whitespace)) {
        if line.contains("not found") {
            bail!("a library is missing from the tools root: {}", line.trim());
        }
        let place = line.split_once("=> ").map_or(line, |(_, place)| place).trim();
        let path = place.split(" (").next().unwrap_or_default();
        if path.starts_with('/') && !paths.iter().any(|known| known == path) {
            paths.push(path.to_owned());
        }
    }
    Ok(paths)
}

/// Returns `path` relative to the root. If it begins with a link into `/usr`, such as `/lib`, the
/// link is resolved.
fn merged(path: &str) -> String {
    let path = path.trim_start_matches('/');
    match path.split_once('/') {
        Some((first, _)) if MERGED.contains(&first) => format!("usr/{path}"),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_named_once_and_the_loader_too() {
        let text = "/usr/bin/fio:\n\
                    \tlinux-vdso.so.1 (0x00007f)\n\
                    \tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n\
                    /usr/sbin/nvme:\n\
                    \tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007e)\n\
                    /usr/bin/static:\n\
                    \tstatically linked\n";
        let want = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(parse_ldd(text).unwrap(), want);
    }

    #[test]
    fn a_library_that_is_missing_is_an_error() {
        assert!(parse_ldd("/a:\n\tliba.so => not found\n").is_err());
    }

    #[test]
    fn links_into_usr_are_resolved() {
        assert_eq!(merged("/lib64/ld.so"), "usr/lib64/ld.so");
        assert_eq!(merged("/usr/bin/fio"), "usr/bin/fio");
        assert_eq!(merged("/library/x"), "library/x");
    }
}
