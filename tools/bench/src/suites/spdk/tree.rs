//! A built SPDK tree, and the disks of both projects.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Instructions how to build a suitable tree.
pub(crate) const HOW_TO_BUILD: &str = "--spdk DIR names a built tree of SPDK: in it, after `git submodule \
    update --init`, `./configure --with-vfio-user && make`";

/// Disk type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskKind {
    Null,
    Memory,
}

/// NQN of SPDK's subsystem. Shadowbell accepts this name in addition to its own.
pub(crate) const NQN: &str = "nqn.2016-06.io.spdk:bench";

/// Memory disk: several times the size of the caches.
const MEMORY: &str = "mem:256MiB";
pub(crate) const MEMORY_BYTES: u64 = 256 << 20;

impl DiskKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Memory => "memory",
        }
    }

    /// Disk string for `shadowbell serve`.
    pub(crate) fn disk(self) -> &'static str {
        match self {
            Self::Null => "null:1TiB",
            Self::Memory => MEMORY,
        }
    }
}

/// A built SPDK tree.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) directory: PathBuf,
    pub(crate) nvmf_tgt: PathBuf,
    pub(crate) perf: PathBuf,
    pub(crate) version: String,
}

impl Tree {
    /// Checks that the needed programs were built.
    pub(crate) fn new(directory: &Path) -> Result<Self> {
        let program = |name: &str| {
            let path = directory.join("build/bin").join(name);
            if !path.is_file() {
                bail!("{} is not there: {HOW_TO_BUILD}", path.display());
            }
            path.canonicalize().with_context(|| path.display().to_string())
        };
        let (nvmf_tgt, perf) = (program("nvmf_tgt")?, program("spdk_nvme_perf")?);
        let version = std::fs::read_to_string(directory.join("VERSION")).unwrap_or_default();
        Ok(Self {
            directory: directory.canonicalize().with_context(|| directory.display().to_string())?,
            nvmf_tgt,
            perf,
            version: version.trim().to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unbuilt_tree_is_refused_with_build_instructions() {
        let directory = tempfile::tempdir().unwrap();
        let error = Tree::new(directory.path()).unwrap_err().to_string();
        assert!(error.contains("nvmf_tgt") && error.contains("--with-vfio-user"), "{error}");
        let programs = directory.path().join("build/bin");
        std::fs::create_dir_all(&programs).unwrap();
        std::fs::write(programs.join("nvmf_tgt"), "").unwrap();
        let error = Tree::new(directory.path()).unwrap_err().to_string();
        assert!(error.contains("spdk_nvme_perf"), "{error}");
        std::fs::write(programs.join("spdk_nvme_perf"), "").unwrap();
        std::fs::write(directory.path().join("VERSION"), "26.09-pre\n").unwrap();
        assert_eq!(Tree::new(directory.path()).unwrap().version, "26.09-pre");
    }
}
