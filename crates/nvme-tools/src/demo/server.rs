//! `shadowbell serve` as a child process for the duration of the demonstration.

use anyhow::{Context, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use shadowbell_control_api::client::Client;
use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time limit for the server to start or to end.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between checks whether the server has started or ended.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Running server. Dropping it ends the server.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    directory: TempDir,
}

impl Server {
    /// Starts this program as a server of `disks` and waits for its socket.
    pub(super) fn start(disks: &[&str], options: &[&str]) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("finding the path of this program")?;
        let directory = tempfile::Builder::new()
            .prefix("shadowbell-demo-")
            .tempdir()
            .context("creating a temporary directory")?;
        let log = File::create(directory.path().join("log"))?;
        let mut command = Command::new(program);
        // Without a supervisor, the server is one process, whose CPU time is measured.
        command.args(["serve", "--no-supervisor"]).args(disks).args(options);
        command.arg("--socket").arg(directory.path().join("socket"));
        command.arg("--control-socket").arg(directory.path().join("control"));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // A process group of its own: Ctrl-C must end only this process, which then ends the
        // server.
        command.process_group(0);
        let child = command.spawn().context("starting the server")?;
        let mut server = Self { child, directory };
        let deadline = Instant::now() + TIMEOUT;
        // The socket's path exists before the server listens on it, so only a connection proves the
        // start.
        while UnixStream::connect(server.socket()).is_err() {
            server.check()?;
            if Instant::now() > deadline {
                bail!("the server did not create its socket: {}", server.log());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(server)
    }

    /// Process ID of the server.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Path of the server's socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    /// Doorbell writes of I/O queues so far, by MMIO or by eventfd.
    pub(super) fn doorbell_writes(&self) -> anyhow::Result<u64> {
        let control = Client::new(&self.directory.path().join("control"));
        let counters: Value =
            control.get("/v1/stats").context("reading the server's statistics")?;
        let count = |name| counters.get(name).and_then(Value::as_u64);
        count("doorbell_mmio_writes")
            .and_then(|writes| Some(writes + count("doorbell_events")?))
            .ok_or_else(|| anyhow!("the server's statistics have no doorbell writes"))
    }

    /// Returns an error if the server has ended.
    fn check(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait().context("waiting for the server")? {
            None => Ok(()),
            Some(status) => bail!("the server has ended ({status}): {}", self.log()),
        }
    }

    /// Last five lines of the server's log.
    fn log(&self) -> String {
        let text = fs::read(self.directory.path().join("log")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        lines.get(lines.len().saturating_sub(5)..).unwrap_or_default().join("; ")
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let id = id.ok_or_else(|| io::Error::other("it has no process identifier"))?;
        Ok(kill_process(id, signal)?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The child is not reaped, so its PID cannot belong to another process.
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = self.signal(Signal::TERM);
        }
        let deadline = Instant::now() + TIMEOUT;
        while self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            if Instant::now() > deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}
