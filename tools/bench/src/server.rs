//! `shadowbell serve` for one measurement.

use shadowbell_testing::wait::{self, LIMIT};
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::Value;
use shadowbell_guest::host::last_lines;
use shadowbell_guest::process::{Process, describe};
use tempfile::TempDir;

/// A server and the directory of its sockets. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Server {
    process: Process,
    binary: PathBuf,
    directory: TempDir,
}

impl Server {
    /// Serves these disks as one controller. `options` pin the I/O thread.
    pub(crate) fn start(binary: &Path, disks: &[&str], options: &[String]) -> Result<Self> {
        // There is no supervisor, so the time and memory of the process are those of the server.
        Self::start_by(binary, disks, &[&["--no-supervisor".to_owned()], options].concat())
    }

    /// Serves these disks with a supervisor, so that acknowledged writes survive a crash.
    pub(crate) fn start_supervised(
        binary: &Path,
        disks: &[&str],
        options: &[String],
    ) -> Result<Self> {
        Self::start_by(binary, disks, options)
    }

    fn start_by(binary: &Path, disks: &[&str], options: &[String]) -> Result<Self> {
        let directory = tempfile::tempdir().context("a directory for sockets")?;
        let mut command = child(binary);
        command.arg("serve").args(disks).args(options);
        command.arg("--socket").arg(directory.path().join("vm0.sock"));
        Self::spawn(binary, command, directory)
    }

    /// Serves `count` controllers with one disk each. `head` is the beginning of the
    /// configuration file.
    pub(crate) fn start_many(binary: &Path, disk: &str, count: usize, head: &str) -> Result<Self> {
        let directory = tempfile::tempdir().context("a directory for sockets")?;
        let mut config = format!("{head}\n");
        for n in 0..count {
            let socket = directory.path().join(format!("vm{n}.sock"));
            config += &format!(
                "[[controller]]\nsocket = {:?}\ndisks = [{disk:?}]\nserial = \"BENCH{n}\"\n",
                socket.display().to_string()
            );
        }
        let file = directory.path().join("bench.toml");
        fs::write(&file, config).context("the configuration")?;
        let mut command = child(binary);
        command.args(["serve", "--no-supervisor", "--config"]).arg(file);
        Self::spawn(binary, command, directory)
    }

    fn spawn(binary: &Path, mut command: Command, directory: TempDir) -> Result<Self> {
        let log = File::create(directory.path().join("log")).context("the server's log")?;
        command.arg("--control-socket").arg(directory.path().join("control"));
        command.stdout(log.try_clone()?).stderr(log);
        let process = Process::spawn("shadowbell serve", &mut command)?;
        let mut server = Self { process, binary: binary.to_owned(), directory };
        let deadline = wait::deadline();
        // The file of the socket exists before the server listens.
        while UnixStream::connect(server.socket(0)).is_err() {
            server.check()?;
            if Instant::now() > deadline {
                bail!("shadowbell serve does not listen: {}", server.log());
            }
            wait::pause();
        }
        Ok(server)
    }

    fn check(&mut self) -> Result<()> {
        match self.process.ended()? {
            None => Ok(()),
            Some(status) => {
                bail!("shadowbell serve ended ({}): {}", describe(status), self.log())
            }
        }
    }

    /// Control socket.
    pub(crate) fn control(&self) -> PathBuf {
        self.directory.path().join("control")
    }

    /// Socket of a controller.
    pub(crate) fn socket(&self, index: usize) -> PathBuf {
        self.directory.path().join(format!("vm{index}.sock"))
    }

    /// Target string of the first namespace of a controller.
    pub(crate) fn target(&self, index: usize) -> String {
        format!("vfio-user:{}/1", self.socket(index).display())
    }

    /// Process id of the server.
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Ends the server with SIGTERM. Returns its counters.
    pub(crate) fn stop(mut self) -> Result<Value> {
        let mut ctl = child(&self.binary);
        ctl.args(["ctl", "-s"]).arg(self.control()).args(["stats", "--json"]);
        let counters = output("shadowbell ctl stats", ctl, LIMIT)?;
        self.process.signal(Signal::TERM)?;
        let status = self.process.wait(LIMIT)?;
        if !status.success() {
            bail!("shadowbell serve: {}: {}", describe(status), self.log());
        }
        serde_json::from_str(&counters).context("its counters")
    }

    fn log(&self) -> String {
        last_lines(&fs::read(self.directory.path().join("log")).unwrap_or_default(), 8)
    }
}

/// Command whose process is killed when this process ends.
pub(crate) fn child(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program).env_remove("RUST_LOG");
    command.stdin(std::process::Stdio::null());
    command
}

/// Runs a command. Returns its output. Fails if the command fails or takes longer than `limit`.
pub(crate) fn output(name: &str, mut command: Command, limit: Duration) -> Result<String> {
    let directory = tempfile::tempdir()?;
    let file = |name: &str| directory.path().join(name);
    command.stdout(File::create(file("out"))?).stderr(File::create(file("err"))?);
    let mut process = Process::spawn(name, &mut command)?;
    let status = process.wait(limit)?;
    if !status.success() {
        let complaint = last_lines(&fs::read(file("err"))?, 8);
        bail!("{name}: {}: {complaint}", describe(status));
    }
    fs::read_to_string(file("out")).with_context(|| format!("what {name} printed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = child(Path::new("sh"));
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_command_is_run_to_its_end_or_its_limit() {
        assert_eq!(output("sh", shell("echo a; echo b >&2"), LIMIT).unwrap(), "a\n");
        let error = output("sh", shell("echo why >&2; exit 3"), LIMIT).unwrap_err().to_string();
        assert!(error.contains("exit code 3: why"), "{error}");
        // Short limit: the test waits for its expiry.
        assert!(output("sh", shell("sleep 1000"), Duration::from_millis(30)).is_err());
    }

    #[test]
    fn a_failed_start_reports_the_reason() {
        let error = Server::start(Path::new("false"), &[], &[]).unwrap_err().to_string();
        assert!(error.contains("ended (exit code 1)"), "{error}");
    }
}
