//! NBD servers of other projects and ours, for the suites about exports.

use shadowbell_testing::wait;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use shadowbell_guest::host::last_lines;
use shadowbell_guest::process::{Process, describe};
use tempfile::TempDir;

use crate::server::child;

/// An NBD server on a UNIX socket. Killed when dropped.
#[derive(Debug)]
pub(crate) struct NbdServer {
    process: Process,
    directory: TempDir,
    home: Option<PathBuf>,
}

/// Directory in which libnbd searches for certificates, below the home directory of a user. It is
/// used because the URI cannot name a directory: fio and other programs do not support that.
pub(crate) fn certificates_in(home: &Path) -> PathBuf {
    home.join(".pki/libnbd")
}

impl NbdServer {
    /// Starts the command that `command` returns for a socket path, and waits until the server
    /// accepts clients.
    pub(crate) fn start(
        name: &str,
        home: Option<&Path>,
        command: impl FnOnce(&Path) -> Command,
    ) -> Result<Self> {
        let directory = tempfile::tempdir().context("a directory for a socket")?;
        let socket = directory.path().join("nbd");
        let log = File::create(directory.path().join("log"))?;
        let mut command = command(&socket);
        command.stdout(log.try_clone()?).stderr(log);
        let mut process = Process::spawn(name, &mut command)?;
        let deadline = wait::deadline();
        while UnixStream::connect(&socket).is_err() {
            let log = || {
                let bytes = fs::read(directory.path().join("log")).unwrap_or_default();
                last_lines(&bytes, 8)
            };
            if let Some(status) = process.ended()? {
                bail!("{name} ended ({}): {}", describe(status), log());
            }
            if Instant::now() > deadline {
                bail!("{name} does not accept clients: {}", log());
            }
            wait::pause();
        }
        let home = home.map(Path::to_path_buf);
        Ok(Self { process, directory, home })
    }

    /// `shadowbell export` of a disk.
    pub(crate) fn shadowbell(binary: &Path, disk: &str, home: Option<&Path>) -> Result<Self> {
        Self::start("shadowbell export", home, |socket| {
            let mut command = child(binary);
            command
                .args(["export", "--no-supervisor", disk, "--nbd"])
                .arg(format!("unix:{}", socket.display()));
            if let Some(home) = home {
                command.arg("--tls-certificates").arg(certificates_in(home));
            }
            command
        })
    }

    /// `nbdkit` with a memory disk of this many MiB.
    pub(crate) fn nbdkit(mebibytes: u64, home: Option<&Path>) -> Result<Self> {
        Self::start("nbdkit", home, |socket| {
            let mut command = child(Path::new("nbdkit"));
            command.args(["--foreground", "--unix"]).arg(socket);
            if let Some(home) = home {
                let directory = certificates_in(home);
                command.arg(format!("--tls-certificates={}", directory.display()));
                command.args(["--tls=require", "--tls-verify-peer"]);
            }
            command.arg("memory").arg(format!("{mebibytes}M"));
            command
        })
    }

    /// `qemu-nbd` of an image in the page cache.
    pub(crate) fn qemu_nbd(image: &Path, format: &str) -> Result<Self> {
        Self::start("qemu-nbd", None, |socket| {
            let mut command = child(Path::new("qemu-nbd"));
            command.args(["--persistent", "--shared=8", "--aio=io_uring", "--socket"]).arg(socket);
            command.arg(format!("--format={format}")).arg(image);
            command
        })
    }

    /// NBD export of `qemu-storage-daemon` of a qcow2 image with O_DIRECT.
    pub(crate) fn storage_daemon(image: &Path) -> Result<Self> {
        // The start is repeated: after a kill of the previous server, its image stays locked until
        // the kernel has released its io_uring.
        let until = wait::deadline();
        loop {
            match Self::storage_daemon_now(image) {
                Err(error) if error.to_string().contains("Failed to") && Instant::now() < until => {
                    wait::pause();
                }
                outcome => return outcome,
            }
        }
    }

    fn storage_daemon_now(image: &Path) -> Result<Self> {
        Self::start("qemu-storage-daemon", None, |socket| {
            let mut command = child(Path::new("qemu-storage-daemon"));
            let file = format!(
                "driver=file,node-name=f,filename={},aio=io_uring,cache.direct=on",
                image.display()
            );
            command.args(["--blockdev", &file]);
            command.args(["--blockdev", "driver=qcow2,node-name=q,file=f,cache.direct=on"]);
            let socket = format!("addr.type=unix,addr.path={}", socket.display());
            command.args(["--nbd-server", &socket]);
            command.args(["--export", "type=nbd,id=e,node-name=q,name=,writable=on"]);
            command
        })
    }

    /// URI of the export.
    pub(crate) fn uri(&self) -> String {
        let scheme = if self.home.is_some() { "nbds+unix" } else { "nbd+unix" };
        format!("{scheme}:///?socket={}", self.directory.path().join("nbd").display())
    }

    /// Home directory with client certificates, if the server requires TLS.
    pub(crate) fn home(&self) -> Option<&Path> {
        self.home.as_deref()
    }

    /// Process id of the server.
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_start_reports_the_reason() {
        let error = NbdServer::start("sh", None, |_| {
            let mut command = child(Path::new("sh"));
            command.args(["-c", "echo no room >&2; exit 4"]);
            command
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("sh ended (exit code 4): no room"), "{error}");
    }
}
