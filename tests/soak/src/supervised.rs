//! Server with a supervisor, and the servers of its disks.

use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait::{self, LIMIT};
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::slots::{DISK_BYTES, Persistence};
use shadowbell_hostile::server::{LogReader, Server};

/// Disk type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum)]
pub(crate) enum DiskKind {
    Direct,
    PageCache,
    Memory,
    Null,
    Qcow2,
    /// A namespace of another server. The soak does not kill that server.
    VfioUser,
    /// An export of an NBD server. The soak does not kill that server.
    Nbd,
}

/// Value of the option `settle`: for this time, an NBD server may still execute requests of a dead
/// process.
const SETTLE_TIME: &str = "50ms";

impl DiskKind {
    pub(crate) const ALL: [Self; 4] = [Self::Direct, Self::PageCache, Self::Memory, Self::Null];

    /// Disk type of the disk with this number.
    pub(crate) fn of(number: usize) -> Self {
        Self::ALL[number % Self::ALL.len()]
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Direct => "file, O_DIRECT",
            Self::PageCache => "file, page cache",
            Self::Memory => "mem:",
            Self::Null => "null:",
            Self::Qcow2 => "qcow2",
            Self::VfioUser => "vfio-user:",
            Self::Nbd => "nbd:",
        }
    }

    pub(crate) fn persistence(self) -> Persistence {
        match self {
            Self::Direct | Self::Memory | Self::Qcow2 | Self::VfioUser | Self::Nbd => {
                Persistence::Blocks
            }
            Self::PageCache => Persistence::Bytes,
            Self::Null => Persistence::Nothing,
        }
    }

    /// True if the disk is a raw file.
    fn is_file(self) -> bool {
        matches!(self, Self::Direct | Self::PageCache | Self::VfioUser | Self::Nbd)
    }

    /// True if the disk needs a connection to another server, which the sandbox does not allow.
    fn needs_server(self) -> bool {
        matches!(self, Self::VfioUser | Self::Nbd)
    }

    /// Starts the server of the disk's export or namespace, which listens on `socket`.
    fn backend(self, binary: &Path, image: &Path, socket: &Path) -> Result<Option<ProcessGroup>> {
        let mut command = Command::new(binary);
        let disk = format!("{}?direct=on", image.display());
        match self {
            Self::VfioUser => {
                command.args(["serve", "--no-supervisor", &disk, "--socket"]).arg(socket)
            }
            Self::Nbd => {
                let at = format!("unix:{}", socket.display());
                command.args(["export", "--no-supervisor", &disk, "--nbd", &at])
            }
            _ => return Ok(None),
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = ProcessGroup::spawn(&mut command).context("the backend server")?;
        let began = Instant::now();
        while UnixStream::connect(socket).is_err() {
            if began.elapsed() > LIMIT {
                bail!("the backend server does not serve {}", socket.display());
            }
            wait::pause();
        }
        Ok(Some(child))
    }

    /// Disk string for `serve`. `backend` is the socket of the disk's server.
    fn spec(self, image: &Path, backend: &Path) -> String {
        match self {
            Self::Qcow2 => format!("{}?direct=on&format=qcow2", image.display()),
            Self::VfioUser => format!("vfio-user:{}/1", backend.display()),
            Self::Nbd => {
                format!("nbd+unix:///?socket={}&settle={SETTLE_TIME}", backend.display())
            }
            Self::Direct => format!("{}?direct=on", image.display()),
            Self::PageCache => format!("{}?direct=off", image.display()),
            Self::Memory => format!("mem:{DISK_BYTES}"),
            Self::Null => format!("null:{DISK_BYTES}"),
        }
    }
}

/// A supervisor with its server processes. All are killed when the value is dropped.
#[derive(Debug)]
pub(crate) struct SupervisedServer {
    pub(crate) server: Server,
    kinds: Vec<DiskKind>,
    /// Servers of the disks that are exports or namespaces.
    _backends: Vec<ProcessGroup>,
}

impl SupervisedServer {
    /// Starts a server with a controller for each of the disks. `options` precede the subcommand.
    ///
    /// # Errors
    ///
    /// The server does not start.
    pub(crate) fn serve(
        binary: &Path,
        options: &[&str],
        kinds: &[DiskKind],
        workers: u8,
    ) -> Result<Self> {
        let directory = tempfile::tempdir().context("a directory for sockets and images")?;
        let mut config = format!("workers = {workers}\n");
        let mut backends = Vec::new();
        for (n, kind) in kinds.iter().enumerate() {
            let image = image(directory.path(), n);
            if kind.is_file() {
                File::create(&image)?.set_len(DISK_BYTES)?;
            }
            let socket = directory.path().join(format!("vm{n}.sock"));
            if *kind == DiskKind::Qcow2 {
                make_qcow2(&image, DISK_BYTES)?;
            }
            let backend_socket = directory.path().join(format!("backend{n}"));
            backends.extend(kind.backend(binary, &image, &backend_socket)?);
            let disk = kind.spec(&image, &backend_socket);
            config += &format!("[[controller]]\nsocket = {socket:?}\ndisks = [{disk:?}]\n");
        }
        let file = directory.path().join("serve.toml");
        fs::write(&file, config).context("the configuration")?;
        let needs_server = kinds.iter().any(|kind| kind.needs_server());
        let sandbox: &[&str] = if needs_server { &["--sandbox", "off"] } else { &[] };
        let arguments = [options, &["serve"], sandbox, &["--config"]].concat();
        let mut arguments: Vec<_> = arguments.into_iter().map(str::to_owned).collect();
        arguments.push(file.display().to_string());
        let server = Server::start(binary, &arguments, directory, LogReader::File)?;
        for n in 0..kinds.len() {
            server.await_socket(&server.socket(n))?;
        }
        Ok(Self { server, kinds: kinds.to_vec(), _backends: backends })
    }

    /// Disk type of each controller.
    pub(crate) fn kinds(&self) -> &[DiskKind] {
        &self.kinds
    }

    /// Checks all qcow2 images, which must not be open in any process. Leaked clusters are allowed.
    pub(crate) fn check_images(&self) -> Result<()> {
        for (number, _) in self.kinds.iter().enumerate().filter(|(_, k)| **k == DiskKind::Qcow2) {
            let mut command = Command::new("qemu-img");
            command.args(["check", "-f", "qcow2"]).arg(image(self.server.directory(), number));
            let output = command.output().context("`qemu-img`")?;
            let text = String::from_utf8_lossy(&output.stdout);
            ensure!(matches!(output.status.code(), Some(0 | 3)), "`qemu-img check`: {text}");
        }
        Ok(())
    }

    /// Path of the disk's image, if the disk is a raw file.
    pub(crate) fn image(&self, number: usize) -> Option<PathBuf> {
        let kind = self.kinds.get(number).filter(|kind| kind.is_file());
        kind.map(|_| image(self.server.directory(), number))
    }

    /// Process ids of the server processes, the newest last.
    fn workers(&self) -> Vec<u32> {
        let supervisor = self.server.id();
        let list = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children"));
        list.unwrap_or_default().split_whitespace().flat_map(str::parse).collect()
    }

    /// Waits for a server process with another process id than `before`. Returns its process id.
    pub(crate) fn next_worker(&mut self, before: Option<u32>) -> Result<u32> {
        let began = Instant::now();
        loop {
            let newest = self.workers().last().copied().filter(|pid| Some(*pid) != before);
            if let Some(pid) = newest {
                return Ok(pid);
            }
            self.server.check()?;
            if began.elapsed() > LIMIT {
                bail!("no server process was started after {before:?}: {}", self.server.log());
            }
            // This sleep is short, because it adds to the time that is measured.
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Makes a qcow2 image.
pub(crate) fn make_qcow2(image: &Path, bytes: u64) -> Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]).arg(image).arg(bytes.to_string());
    let status = command.status().context("`qemu-img`, which is in Debian's qemu-utils")?;
    ensure!(status.success(), "`qemu-img create` has failed");
    Ok(())
}

fn image(directory: &Path, number: usize) -> PathBuf {
    directory.join(format!("{number}.img"))
}

/// Sends a signal to a server process.
pub(crate) fn signal(worker: u32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(worker.cast_signed()).context("a process number")?;
    kill_process(pid, signal).with_context(|| format!("a signal for process {worker}"))
}
