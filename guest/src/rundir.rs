//! Files of one run: disk images, logs, sockets. They are removed after the run.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// Prefix of the directory of sockets.
const SOCKETS: &str = "shadowbell-guest-";
/// Lock file of a run's directory, locked as long as the run lasts.
const LOCK: &str = "lock";

/// Two temporary directories. The one for large files is beside the downloaded
/// [roots](crate::roots). The one for sockets has a short path, because `sun_path` has 108 bytes
/// and the repository's path may be longer.
#[derive(Debug)]
pub struct RunDir {
    files: TempDir,
    sockets: TempDir,
    _locks: [File; 2],
}

impl RunDir {
    /// Makes the two directories, and removes the directories of killed runs. The directory for
    /// large files is made in `parent`.
    pub fn new(parent: &Path) -> Result<Self> {
        let runs = parent.join("run");
        fs::create_dir_all(&runs).with_context(|| runs.display().to_string())?;
        sweep(&runs, "");
        sweep(&std::env::temp_dir(), SOCKETS);
        let files = TempDir::with_prefix_in("run-", &runs)
            .context("a directory for the files of this run")?;
        let sockets =
            TempDir::with_prefix(SOCKETS).context("a directory for the sockets of this run")?;
        let locks = [lock(files.path())?, lock(sockets.path())?];
        Ok(Self { files, sockets, _locks: locks })
    }

    /// Directory of large files, as a host path.
    pub fn files(&self) -> &Path {
        self.files.path()
    }

    /// Directory of sockets, as a host path.
    pub fn sockets(&self) -> &Path {
        self.sockets.path()
    }

    /// Path of a file of this run.
    pub fn file(&self, name: &str) -> PathBuf {
        self.files().join(name)
    }

    /// Path of a socket of this run.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.sockets().join(name)
    }

    /// Makes a sparse file of this run.
    pub fn image(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        let path = self.file(name);
        fs::File::create(&path)
            .and_then(|file| file.set_len(bytes))
            .with_context(|| path.display().to_string())?;
        Ok(path)
    }

    /// Copies the logs of this run to the directory `to`, which is not deleted after the run.
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

fn lock(directory: &Path) -> Result<File> {
    // The file gets its final name only after it is locked. Otherwise the sweep of another run
    // could remove the directory before the lock is taken.
    let unlocked = directory.join("lock.new");
    File::create(&unlocked)
        .and_then(|file| {
            file.lock()?;
            fs::rename(&unlocked, directory.join(LOCK))?;
            Ok(file)
        })
        .context("the lock of this run")
}

/// Removes the directories in `parent` whose names have the prefix `prefix` and whose lock is free.
/// The kernel releases the lock of a killed run.
fn sweep(parent: &Path, prefix: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let abandoned = || File::open(entry.path().join(LOCK)).is_ok_and(|f| f.try_lock().is_ok());
        if entry.file_name().to_string_lossy().starts_with(prefix) && abandoned() {
            // If the removal fails, the next run removes the directory.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_killed_runs_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let living = RunDir::new(parent.path()).unwrap();
        let dead = parent.path().join("run/run-dead");
        fs::create_dir(&dead).unwrap();
        File::create(dead.join(LOCK)).unwrap();
        let stranger = parent.path().join("run/stranger");
        fs::create_dir(&stranger).unwrap();
        let other = RunDir::new(parent.path()).unwrap();
        assert!(!dead.exists() && stranger.exists());
        assert!(living.files().exists() && living.sockets().exists());
        drop(other);
    }
}
