//! Huge pages: SPDK allocates its shared memory from reserved huge pages only.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// MiB of huge pages for a target and a client.
const NEEDED: u64 = 1024;
const COUNT: &str = "/proc/sys/vm/nr_hugepages";

/// Reserved huge pages. Dropping restores the previous number and mounts.
#[derive(Debug)]
pub(crate) struct HugePages {
    /// Number of huge pages before the change. `None` if it was not changed.
    before: Option<u64>,
    /// Mount point of hugetlbfs, and true if this process has mounted it.
    mount_dir: PathBuf,
    mounted: bool,
}

impl HugePages {
    pub(crate) fn reserve() -> Result<Self> {
        let mounts = fs::read_to_string("/proc/mounts").context("/proc/mounts")?;
        let found = mount_point(&mounts).map(PathBuf::from);
        let mut pages = Self { before: None, mounted: false, mount_dir: PathBuf::new() };
        let state = State::read()?;
        let missing = state.missing();
        if missing > 0 {
            let why = || {
                format!(
                    "SPDK needs {NEEDED} MiB of huge pages, {missing} pages of {} KiB more than \
                     are free: as root, `sysctl vm.nr_hugepages={}`",
                    state.size_kib,
                    state.total + missing
                )
            };
            fs::write(COUNT, (state.total + missing).to_string()).with_context(why)?;
            pages.before = Some(state.total);
            // The kernel may have reserved fewer pages than requested.
            if State::read()?.missing() > 0 {
                bail!("the kernel reserved too few huge pages: {}", why());
            }
        }
        if let Some(mount_dir) = found {
            pages.mount_dir = mount_dir;
        } else {
            pages.mount_dir = "/dev/hugepages".into();
            fs::create_dir_all(&pages.mount_dir).context("/dev/hugepages")?;
            let mut mount = Command::new("mount");
            let status = mount.args(["-t", "hugetlbfs", "none"]).arg(&pages.mount_dir).status()?;
            if !status.success() {
                bail!("no hugetlbfs is mounted: as root, `mount -t hugetlbfs none /dev/hugepages`");
            }
            pages.mounted = true;
        }
        Ok(pages)
    }

    /// Directory for files in huge pages.
    pub(crate) fn mount_dir(&self) -> &Path {
        &self.mount_dir
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if self.mounted {
            let _ = Command::new("umount").arg(&self.mount_dir).status();
        }
        if let Some(count) = self.before {
            let _ = fs::write(COUNT, count.to_string());
        }
    }
}

/// Huge pages in /proc/meminfo.
#[derive(Debug, PartialEq, Eq)]
struct State {
    total: u64,
    free: u64,
    size_kib: u64,
}

impl State {
    fn read() -> Result<Self> {
        Self::parse(&fs::read_to_string("/proc/meminfo")?).context("this kernel has no huge pages")
    }

    fn parse(meminfo: &str) -> Option<Self> {
        let field = |name: &str| {
            let rest = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
            rest.split_whitespace().next()?.parse().ok()
        };
        Some(Self {
            total: field("HugePages_Total:")?,
            free: field("HugePages_Free:")?,
            size_kib: field("Hugepagesize:").filter(|size| *size > 0)?,
        })
    }

    /// Number of missing pages.
    fn missing(&self) -> u64 {
        (NEEDED << 10).div_ceil(self.size_kib).saturating_sub(self.free)
    }
}

/// First mount point of hugetlbfs.
fn mount_point(mounts: &str) -> Option<&str> {
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let mount_dir = words.next()?;
        (words.next()? == "hugetlbfs").then_some(mount_dir)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_parsed() {
        let text = |total, free| {
            format!(
                "MemTotal: 9 kB\nHugePages_Total: {total}\nHugePages_Free: {free}\n\
                 Hugepagesize:       2048 kB\n"
            )
        };
        let state = |total, free| State::parse(&text(total, free)).unwrap();
        assert_eq!(state(3, 2), State { total: 3, free: 2, size_kib: 2048 });
        assert_eq!(state(0, 0).missing(), 512);
        assert_eq!(state(600, 500).missing(), 12);
        assert_eq!(state(600, 600).missing(), 0);
        assert_eq!(State::parse("MemTotal: 9 kB\n"), None);
        let broken = text(1, 1).replace("2048", "0");
        assert_eq!(State::parse(&broken), None);
    }

    #[test]
    fn hugetlbfs_is_found_by_its_type() {
        let mounts = "a / ext4 rw\nnone /dev/hugepages hugetlbfs rw 0 0\n";
        assert_eq!(mount_point(mounts), Some("/dev/hugepages"));
        assert_eq!(mount_point("hugetlbfs /x tmpfs rw 0 0\n"), None);
    }
}
