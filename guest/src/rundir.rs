//! The files of one run: disk images, logs, sockets. They go when the run is over.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// Two temporary directories: large files beside the roots, sockets where their path is short
/// (`sun_path` holds 108 bytes, and a repository may lie deep).
#[derive(Debug)]
pub struct RunDir {
    files: TempDir,
    sockets: TempDir,
}

impl RunDir {
    /// Makes both. `parent` takes the large files.
    pub fn new(parent: &Path) -> Result<Self> {
        let runs = parent.join("run");
        fs::create_dir_all(&runs).with_context(|| runs.display().to_string())?;
        Ok(Self {
            files: TempDir::new_in(&runs).context("a directory for the files of this run")?,
            sockets: TempDir::with_prefix("shadowbell-guest-")
                .context("a directory for the sockets of this run")?,
        })
    }

    /// Where large files are, seen from the host.
    pub fn files(&self) -> &Path {
        self.files.path()
    }

    /// Where sockets are, seen from the host.
    pub fn sockets(&self) -> &Path {
        self.sockets.path()
    }

    /// A file of this run.
    pub fn file(&self, name: &str) -> PathBuf {
        self.files().join(name)
    }

    /// A socket of this run.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.sockets().join(name)
    }

    /// An empty sparse file of this run.
    pub fn image(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        let path = self.file(name);
        fs::File::create(&path)
            .and_then(|file| file.set_len(bytes))
            .with_context(|| path.display().to_string())?;
        Ok(path)
    }

    /// Copies the logs of this run to where they outlive it.
    pub fn keep_logs(&self, to: &Path) -> Result<()> {
        fs::create_dir_all(to).with_context(|| to.display().to_string())?;
        for entry in fs::read_dir(self.files())? {
            let path = entry?.path();
            if let (Some(name), Some("log")) =
                (path.file_name(), path.extension().and_then(|e| e.to_str()))
            {
                fs::copy(&path, to.join(name)).with_context(|| path.display().to_string())?;
            }
        }
        Ok(())
    }
}
