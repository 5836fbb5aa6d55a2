//! `shadowbell serve` for a guest.

use shadowbell_testing::wait;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::Value;

use crate::host::last_lines;
use crate::process::{Process, describe};
use crate::rundir::RunDir;

/// A running server. Killed when dropped; [`Server::stop`] ends it by SIGTERM.
#[derive(Debug)]
pub struct Server {
    process: Process,
    log: PathBuf,
    binary: PathBuf,
    control: PathBuf,
}

/// Script that mounts a small file system, makes an image on it, and starts the server by exec.
const MAKE_SMALL: &str = r#"mount -t tmpfs -o size="$1" tmpfs "$0" &&
truncate -s "$2" "$0/disk.img" && shift 2 && exec "$@""#;

/// Parameters of a server.
#[derive(Debug, Clone, Copy)]
pub struct Serve<'a> {
    /// Path of the program.
    pub binary: &'a Path,
    /// Name of the socket in the run's directory of sockets, and of the log, `serve-<name>.log`.
    pub name: &'a str,
    /// Disk specifications.
    pub disks: &'a [String],
    /// Additional options.
    pub options: &'a [&'a str],
    /// Small file system to create for an image. `disks` names the image.
    pub small: Option<Small<'a>>,
}

/// A file system with less space than the size of its image.
#[derive(Debug, Clone, Copy)]
pub struct Small<'a> {
    /// Mount point, in the server's own mount namespace.
    pub directory: &'a Path,
    /// Size of the file system in bytes.
    pub room: u64,
    /// Size in bytes of the image on the file system, `disk.img`.
    pub image: u64,
}

impl Server {
    /// Starts `shadowbell serve`, and waits until the server answers on its socket. A connection
    /// alone is no proof, because the supervisor makes the socket before a server process exists.
    pub fn start(run: &RunDir, serve: &Serve<'_>) -> Result<Self> {
        let name = serve.name;
        let socket = run.socket(name);
        let log = run.file(&format!("serve-{name}.log"));
        let log_file = File::options().create(true).append(true).open(&log)?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if let Some(small) = serve.small {
            // The mount ends with the process. Each program in the chain replaces itself by the
            // next one (exec).
            command.args([
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                MAKE_SMALL,
            ]);
            command.arg(small.directory).arg(small.room.to_string()).arg(small.image.to_string());
        }
        command.arg(serve.binary).arg("serve").args(serve.disks);
        command.arg("--socket").arg(&socket).args(serve.options);
        command.stdin(Stdio::null()).stdout(log_file.try_clone()?).stderr(log_file);
        let process = Process::spawn("shadowbell serve", &mut command)?;
        let mut options = serve.options.iter().skip_while(|word| **word != "--control-socket");
        let control = options.nth(1).map_or_else(|| socket.clone(), PathBuf::from);
        let binary = serve.binary.to_owned();
        let mut server = Self { process, log, binary, control: control.clone() };
        let deadline = wait::deadline();
        let has_supervisor = !serve.options.contains(&"--no-supervisor");
        let answers = || {
            let mut ctl = Command::new(serve.binary);
            ctl.arg("ctl").arg("-s").arg(&control).arg("status");
            ctl.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            ctl.status().is_ok_and(|status| status.success())
        };
        while !socket.exists() || has_supervisor && !answers() {
            server.check()?;
            if Instant::now() > deadline {
                bail!("shadowbell serve does not serve: {}", server.log_tail());
            }
            wait::pause();
        }
        Ok(server)
    }

    /// Fails if the server has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.process.ended()? {
            None => Ok(()),
            Some(status) => {
                bail!("shadowbell serve ended ({}): {}", describe(status), self.log_tail())
            }
        }
    }

    /// Process id of the server.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Current counters of the server.
    pub fn stats(&mut self) -> Result<Value> {
        self.check()?;
        let mut ctl = Command::new(&self.binary);
        ctl.arg("ctl").arg("-s").arg(&self.control).args(["stats", "--json"]).stdin(Stdio::null());
        let output = ctl.output().context("shadowbell ctl stats")?;
        if !output.status.success() {
            bail!("shadowbell ctl stats: {}", String::from_utf8_lossy(&output.stderr));
        }
        serde_json::from_slice(&output.stdout).context("the statistics of shadowbell serve")
    }

    /// Sends SIGTERM. The server must end soon with exit code 0.
    pub fn stop(mut self) -> Result<()> {
        self.process.signal(Signal::TERM)?;
        let status = self.process.wait(wait::LIMIT)?;
        if !status.success() {
            bail!("shadowbell serve: {}: {}", describe(status), self.log_tail());
        }
        Ok(())
    }

    /// Output of all servers with this name in this run.
    pub fn log(&self) -> Result<String> {
        let bytes = fs::read(&self.log).with_context(|| self.log.display().to_string())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn log_tail(&self) -> String {
        last_lines(&fs::read(&self.log).unwrap_or_default(), 8)
    }
}
