//! Server under attack.

use shadowbell_testing::wait;
use std::fs::{self, File};
use std::io::PipeReader;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use shadowbell_guest::process::{Process, describe};
use tempfile::TempDir;

/// Nice value of the server's threads. Only the victim has a higher priority.
pub const SERVER_PRIORITY: i32 = -18;

/// Destination of the server's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogReader {
    /// A file, which never blocks.
    File,
    /// A pipe from which no process reads.
    Nobody,
}

/// A server, and the directory of its sockets and images. Killed when dropped.
#[derive(Debug)]
pub struct Server {
    process: Process,
    /// Process id of the server process, if the started process is its supervisor.
    worker: Option<u32>,
    directory: TempDir,
    _unread: Option<PipeReader>,
}

impl Server {
    /// Starts `shadowbell serve` with a controller for each of the disks, and one I/O thread.
    pub fn serve(binary: &Path, disks: &[String], reader: LogReader) -> Result<Self> {
        Self::serve_with(binary, disks, 1, reader)
    }

    /// Starts `shadowbell serve` with this number of I/O threads.
    pub fn serve_with(
        binary: &Path,
        disks: &[String],
        workers: usize,
        reader: LogReader,
    ) -> Result<Self> {
        let directory = tempfile::tempdir().context("a directory for sockets")?;
        let mut config = format!("workers = {workers}\n");
        for (n, disk) in disks.iter().enumerate() {
            let socket = directory.path().join(format!("vm{n}.sock"));
            let disk = disk.replace("DIR", &directory.path().display().to_string());
            if let Some((file, size)) = disk.split_once('=') {
                File::create(file)?.set_len(size.parse()?)?;
            }
            let disk = disk.split('=').next().unwrap_or_default();
            config += &format!("[[controller]]\nsocket = {socket:?}\ndisks = [{disk:?}]\n");
        }
        let file = directory.path().join("serve.toml");
        fs::write(&file, config).context("the configuration")?;
        let arguments = ["serve", "--config"].map(str::to_owned);
        let arguments = [&arguments[..], &[file.display().to_string()]].concat();
        let mut server = Self::start(binary, &arguments, directory, reader)?;
        server.worker = Some(server.await_worker()?);
        for n in 0..disks.len() {
            server.await_socket(&server.socket(n))?;
        }
        Ok(server)
    }

    /// Waits for the server process. The supervisor listens on the socket before the server process
    /// exists.
    fn await_worker(&mut self) -> Result<u32> {
        let deadline = wait::deadline();
        loop {
            let serves = |pid: &u32| has_thread(*pid, "sb-reactor");
            if let Some(pid) = children(self.id()).into_iter().find(serves) {
                return Ok(pid);
            }
            self.check()?;
            if Instant::now() > deadline {
                bail!("no server process was started: {}", self.log());
            }
            wait::pause();
        }
    }

    /// Starts `shadowbell export` of a memory disk, by NBD (`disk.sock`) and as a virtio disk
    /// (`blk.sock`).
    pub fn export(binary: &Path) -> Result<Self> {
        let directory = tempfile::tempdir().context("a directory for sockets")?;
        let (nbd, vhost) = (directory.path().join("disk.sock"), directory.path().join("blk.sock"));
        let nbd_address = format!("unix:{}", nbd.display());
        let vhost_path = vhost.display().to_string();
        let arguments =
            ["export", "local:mem:16MiB", "--nbd", &nbd_address, "--vhost-user-blk", &vhost_path];
        let arguments = arguments.map(str::to_owned);
        let server = Self::start(binary, &arguments, directory, LogReader::File)?;
        server.await_socket(&nbd)?;
        server.await_socket(&vhost)?;
        Ok(server)
    }

    /// Starts the program with these arguments and a high priority.
    pub fn start(
        binary: &Path,
        arguments: &[String],
        directory: TempDir,
        reader: LogReader,
    ) -> Result<Self> {
        let mut command = Command::new("nice");
        let nice = SERVER_PRIORITY.to_string();
        command.args(["-n", &nice, "setpriv", "--pdeathsig", "KILL"]).arg(binary).args(arguments);
        command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null());
        let mut unread = None;
        match reader {
            LogReader::File => {
                command.stderr(File::create(directory.path().join("log"))?);
            }
            LogReader::Nobody => {
                let (reader, writer) = std::io::pipe()?;
                command.stderr(writer);
                unread = Some(reader);
            }
        }
        let process = Process::spawn("shadowbell", &mut command)?;
        Ok(Self { process, worker: None, directory, _unread: unread })
    }

    /// Waits until a process listens on the socket.
    pub fn await_socket(&self, path: &Path) -> Result<()> {
        let deadline = wait::deadline();
        while UnixStream::connect(path).is_err() {
            if Instant::now() > deadline {
                bail!("no server listens at {}: {}", path.display(), self.log());
            }
            wait::pause();
        }
        Ok(())
    }

    pub fn socket(&self, index: usize) -> PathBuf {
        self.directory.path().join(format!("vm{index}.sock"))
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Process id of the started process: the supervisor, if there is one.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Process id of the server process.
    pub fn worker(&self) -> u32 {
        self.worker.unwrap_or_else(|| self.id())
    }

    /// Process ids of all processes of the server.
    pub fn processes(&self) -> Vec<u32> {
        [Some(self.id()), self.worker].into_iter().flatten().collect()
    }

    /// Number of bytes logged so far.
    pub fn logged(&self) -> u64 {
        fs::metadata(self.directory.path().join("log")).map_or(0, |about| about.len())
    }

    /// End of the log.
    pub fn log(&self) -> String {
        let log = fs::read(self.directory.path().join("log")).unwrap_or_default();
        shadowbell_guest::host::last_lines(&log, 5)
    }

    /// Fails if a process of the server has ended.
    ///
    /// A server process that the supervisor would restart counts as well.
    pub fn check(&mut self) -> Result<()> {
        match self.process.ended()? {
            None if self.worker.is_none_or(|pid| children(self.id()) == [pid]) => Ok(()),
            None => bail!("the process that serves has died: {}", self.log()),
            Some(status) => bail!("the server has ended ({}): {}", describe(status), self.log()),
        }
    }

    /// Sends SIGTERM. Returns the time until the server's end, or `None` if the server has not
    /// ended within `limit`.
    pub fn terminate(&mut self, limit: Duration) -> Result<Option<Duration>> {
        let began = Instant::now();
        self.process.signal(Signal::TERM)?;
        // The time is measured, and judged elsewhere.
        while began.elapsed() < limit {
            if self.process.ended()?.is_some() {
                return Ok(Some(began.elapsed()));
            }
            wait::pause();
        }
        Ok(None)
    }

    /// Kills the server.
    pub fn kill(&mut self) {
        self.process.kill();
    }
}

/// Process ids of the running child processes of `pid`.
fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

fn has_thread(pid: u32, name: &str) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.any(|its| its.trim() == name)
}
