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

/// Setup of `shadowbell serve`.
#[derive(Debug, Clone, Copy)]
pub struct Setup<'a> {
    /// Number of I/O threads.
    pub workers: usize,
    /// Further options.
    pub options: &'a [&'a str],
    /// Preparation in the directory of the server's files.
    pub prepare: Option<fn(&Path) -> Result<()>>,
}

impl Default for Setup<'_> {
    fn default() -> Self {
        Self { workers: 1, options: &[], prepare: None }
    }
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
        Self::serve_with(binary, disks, Setup::default(), reader)
    }

    /// Starts `shadowbell serve` with this setup.
    pub fn serve_with(
        binary: &Path,
        disks: &[String],
        setup: Setup<'_>,
        reader: LogReader,
    ) -> Result<Self> {
        let Setup { workers, options, prepare } = setup;
        let directory = tempfile::tempdir().context("a directory for sockets")?;
        prepare.map_or(Ok(()), |prepare| prepare(directory.path())).context("the preparation")?;
        let mut config = format!("workers = {workers}\n");
        for (n, disk) in disks.iter().enumerate() {
            let socket = directory.path().join(format!("vm{n}.sock"));
            let storage = match disk.strip_prefix("pool:") {
                Some(pool) => format!("pool = {:?}", place(pool, directory.path())?),
                None => format!("disks = [{:?}]", place(disk, directory.path())?),
            };
            config += &format!("[[controller]]\nsocket = {socket:?}\n{storage}\n");
        }
        let file = directory.path().join("serve.toml");
        fs::write(&file, config).context("the configuration")?;
        let file = file.display().to_string();
        let arguments = [&["serve", "--config", &file], options].concat();
        let arguments: Vec<_> = arguments.into_iter().map(str::to_owned).collect();
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
            if let Some(pid) = worker_of(self.id()) {
                return Ok(pid);
            }
            self.check()?;
            if Instant::now() > deadline {
                bail!("no server process was started: {}", self.log());
            }
            wait::pause();
        }
    }

    /// Waits until one server process is left, after an attack that replaces it.
    pub fn await_process(&mut self) -> Result<()> {
        self.worker = Some(server_process(self.id())?);
        Ok(())
    }

    /// Starts `shadowbell export` of a memory disk, by NBD (`disk.sock`) and as a virtio disk
    /// (`blk.sock`).
    pub fn export(binary: &Path) -> Result<Self> {
        let directory = tempfile::tempdir().context("a directory for sockets")?;
        Self::export_of(binary, directory, "local:mem:16MiB", None)
    }

    /// Starts `shadowbell export` of a disk, by NBD (`disk.sock`) and as a virtio disk
    /// (`blk.sock`). `DIR` and a size are as in an attack's disks.
    pub fn export_of(
        binary: &Path,
        directory: TempDir,
        disk: &str,
        prepare: Option<fn(&Path) -> Result<()>>,
    ) -> Result<Self> {
        prepare.map_or(Ok(()), |prepare| prepare(directory.path())).context("the preparation")?;
        let disk = place(disk, directory.path())?;
        let (nbd, vhost) = (directory.path().join("disk.sock"), directory.path().join("blk.sock"));
        let nbd_address = format!("unix:{}", nbd.display());
        let vhost_path = vhost.display().to_string();
        let arguments = ["export", &disk, "--nbd", &nbd_address, "--vhost-user-blk", &vhost_path];
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
        // The time is measured, and evaluated elsewhere.
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

/// Disk string with `DIR` replaced by the directory. For `DIR/name=BYTES`, makes a file of this
/// size; for `DIR/name=BYTES?options`, the disk string has these options.
fn place(disk: &str, directory: &Path) -> Result<String> {
    let disk = disk.replace("DIR", &directory.display().to_string());
    let (disk, options) = disk.split_once('?').map_or((&*disk, None), |(d, o)| (d, Some(o)));
    let (file, size) = disk.split_once('=').map_or((disk, None), |(f, size)| (f, Some(size)));
    if let Some(size) = size {
        File::create(file)?.set_len(size.parse()?)?;
    }
    Ok(options.map_or_else(|| file.to_owned(), |options| format!("{file}?{options}")))
}

/// Process id of a server process of this supervisor.
pub fn worker_of(supervisor: u32) -> Option<u32> {
    children(supervisor).into_iter().find(|pid| has_thread(*pid, "sb-reactor"))
}

/// Waits until this supervisor has one process, which serves. Returns its process id. Fails once
/// the supervisor has ended.
pub fn server_process(supervisor: u32) -> Result<u32> {
    let deadline = wait::deadline();
    loop {
        if has_ended(supervisor) {
            bail!("the supervisor {supervisor} has ended");
        }
        if let [pid] = *children(supervisor)
            && has_thread(pid, "sb-reactor")
        {
            return Ok(pid);
        }
        if Instant::now() > deadline {
            bail!("the supervisor has the processes {:?}", children(supervisor));
        }
        wait::pause();
    }
}

/// True if the process has ended, even if its parent has not waited for it. A zombie has no
/// program.
fn has_ended(pid: u32) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_err()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supervisor_that_has_ended_is_not_waited_for() {
        let mut ended = Command::new("true").spawn().unwrap();
        let error = server_process(ended.id()).unwrap_err().to_string();
        ended.wait().unwrap();
        assert!(error.ends_with("has ended"), "the wait reached its limit: {error}");
    }
}
