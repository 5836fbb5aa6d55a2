//! A server under a keeper, and the disks that it serves.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::places::{DISK_BYTES, Keeps};
use crate::hostile::server::{LogReader, Server};

/// How long a worker may take to come.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a disk keeps its bytes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DiskKind {
    Direct,
    PageCache,
    Memory,
    Null,
}

impl DiskKind {
    pub(crate) const ALL: [Self; 4] = [Self::Direct, Self::PageCache, Self::Memory, Self::Null];

    /// Of the disk with this number.
    pub(crate) fn of(number: usize) -> Self {
        Self::ALL[number % Self::ALL.len()]
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Direct => "file, O_DIRECT",
            Self::PageCache => "file, page cache",
            Self::Memory => "mem:",
            Self::Null => "null:",
        }
    }

    pub(crate) fn keeps(self) -> Keeps {
        match self {
            Self::Direct | Self::Memory => Keeps::Blocks,
            Self::PageCache => Keeps::Bytes,
            Self::Null => Keeps::Nothing,
        }
    }

    fn is_file(self) -> bool {
        matches!(self, Self::Direct | Self::PageCache)
    }

    /// As `serve` takes it.
    fn spec(self, image: &Path) -> String {
        match self {
            Self::Direct => format!("{}?direct=on", image.display()),
            Self::PageCache => format!("{}?direct=off", image.display()),
            Self::Memory => format!("mem:{DISK_BYTES}"),
            Self::Null => format!("null:{DISK_BYTES}"),
        }
    }
}

/// A server under a keeper. Dropping it kills both.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) server: Server,
    kinds: Vec<DiskKind>,
}

impl Kept {
    /// With a controller for each of the disks. `options` stand before the verb.
    ///
    /// # Errors
    /// It does not serve.
    pub(crate) fn serve(
        binary: &Path,
        options: &[&str],
        kinds: &[DiskKind],
        workers: u8,
    ) -> Result<Self> {
        let directory = tempfile::tempdir().context("a directory for sockets and images")?;
        let mut config = format!("workers = {workers}\n");
        for (n, kind) in kinds.iter().enumerate() {
            let image = image(directory.path(), n);
            if kind.is_file() {
                File::create(&image)?.set_len(DISK_BYTES)?;
            }
            let socket = directory.path().join(format!("vm{n}.sock"));
            let disk = kind.spec(&image);
            config += &format!("[[controller]]\nsocket = {socket:?}\ndisks = [{disk:?}]\n");
        }
        let file = directory.path().join("serve.toml");
        fs::write(&file, config).context("the configuration")?;
        let arguments = [options, &["serve", "--keeper", "--config"]].concat();
        let mut arguments: Vec<_> = arguments.into_iter().map(str::to_owned).collect();
        arguments.push(file.display().to_string());
        let server = Server::start(binary, &arguments, directory, LogReader::File)?;
        for n in 0..kinds.len() {
            server.await_socket(&server.socket(n))?;
        }
        Ok(Self { server, kinds: kinds.to_vec() })
    }

    /// What is behind each controller.
    pub(crate) fn kinds(&self) -> &[DiskKind] {
        &self.kinds
    }

    /// The image of this disk, if it is a file.
    pub(crate) fn image(&self, number: usize) -> Option<PathBuf> {
        let kind = self.kinds.get(number).filter(|kind| kind.is_file());
        kind.map(|_| image(self.server.directory(), number))
    }

    /// The processes that serve, or are to: the newest last.
    fn workers(&self) -> Vec<u32> {
        let keeper = self.server.id();
        let list = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children"));
        list.unwrap_or_default().split_whitespace().flat_map(str::parse).collect()
    }

    /// The worker that is none of these, when there is one.
    pub(crate) fn next_worker(&mut self, before: Option<u32>) -> Result<u32> {
        let began = Instant::now();
        loop {
            let newest = self.workers().last().copied().filter(|pid| Some(*pid) != before);
            if let Some(pid) = newest {
                return Ok(pid);
            }
            self.server.check()?;
            if began.elapsed() > PATIENCE {
                bail!("no other worker has come after {before:?}: {}", self.server.log());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

fn image(directory: &Path, number: usize) -> PathBuf {
    directory.join(format!("{number}.img"))
}

/// Sends a signal to a worker.
pub(crate) fn signal(worker: u32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(worker.cast_signed()).context("a process number")?;
    kill_process(pid, signal).with_context(|| format!("a signal for process {worker}"))
}
