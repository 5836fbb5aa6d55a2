//! `shadowbell serve` beside a guest.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::Value;

use crate::host::last_lines;
use crate::process::{Process, describe};
use crate::rundir::RunDir;

/// A running server. Dropping it kills it; [`Server::stop`] ends it as an operator would.
#[derive(Debug)]
pub struct Server {
    process: Process,
    log: PathBuf,
    stats: PathBuf,
}

impl Server {
    /// Starts `binary serve DISKS --socket ...` and waits for the socket `name` of `run`. The log is
    /// `serve-<name>.log`.
    pub fn start(
        binary: &Path,
        run: &RunDir,
        name: &str,
        disks: &[String],
        options: &[&str],
    ) -> Result<Self> {
        let socket = run.socket(name);
        let log = run.file(&format!("serve-{name}.log"));
        let stats = run.file(&format!("serve-{name}.json"));
        let log_file = File::options().create(true).append(true).open(&log)?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(binary).arg("serve").args(disks);
        command.arg("--socket").arg(&socket).arg("--stats-json").arg(&stats).args(options);
        command.stdin(Stdio::null()).stdout(log_file.try_clone()?).stderr(log_file);
        let process = Process::spawn("shadowbell serve", &mut command)?;
        let mut server = Self { process, log, stats };
        let deadline = Instant::now() + Duration::from_secs(20);
        while !socket.exists() {
            server.check()?;
            if Instant::now() > deadline {
                bail!("shadowbell serve made no socket: {}", server.log_tail());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    /// An error once it has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.process.ended()? {
            None => Ok(()),
            Some(status) => {
                bail!("shadowbell serve ended ({}): {}", describe(status), self.log_tail())
            }
        }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Its counters now.
    pub fn stats(&mut self) -> Result<Value> {
        // The file is replaced as a whole: another inode is a new one.
        let inode = |path: &Path| fs::metadata(path).map(|m| (m.ino(), m.mtime_nsec())).ok();
        let before = inode(&self.stats);
        self.process.signal(Signal::USR1)?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while inode(&self.stats) == before {
            self.check()?;
            if Instant::now() > deadline {
                bail!("shadowbell serve wrote no statistics on SIGUSR1: {}", self.log_tail());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let text = fs::read(&self.stats).with_context(|| self.stats.display().to_string())?;
        serde_json::from_slice(&text).context("the statistics of shadowbell serve")
    }

    /// Ends it with SIGTERM; it must leave with exit code 0 soon.
    pub fn stop(mut self) -> Result<()> {
        self.process.signal(Signal::TERM)?;
        let status = self.process.wait(Duration::from_secs(10))?;
        if !status.success() {
            bail!("shadowbell serve: {}: {}", describe(status), self.log_tail());
        }
        Ok(())
    }

    /// What it has printed so far, in all its lives in this run.
    pub fn log(&self) -> Result<String> {
        let bytes = fs::read(&self.log).with_context(|| self.log.display().to_string())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn log_tail(&self) -> String {
        last_lines(&fs::read(&self.log).unwrap_or_default(), 8)
    }
}
