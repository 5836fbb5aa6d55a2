//! QEMU's NBD server on the host, as the storage of a guest's disk.

use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_guest::host::{in_path, install};

/// `qemu-nbd` with a raw image. Killed when dropped.
pub(crate) struct Exporter(ProcessGroup);

impl Exporter {
    pub(crate) fn start(image: &Path, socket: &Path) -> Result<Self> {
        if !in_path("qemu-nbd") {
            install(&["qemu-utils"])?;
        }
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "qemu-nbd", "--persistent", "--shared=0"]);
        command.args(["--format=raw", "--discard=unmap", "--socket"]).arg(socket).arg(image);
        let exporter = Self(ProcessGroup::spawn(&mut command).context("qemu-nbd")?);
        wait::until("a socket of qemu-nbd", || socket.exists());
        Ok(exporter)
    }

    /// Stops the server with SIGSTOP. It answers no request until [`Exporter::resume`].
    pub(crate) fn stall(&self) -> Result<()> {
        self.signal(Signal::STOP)?;
        // The signal is delivered asynchronously, and the server may still send a reply. So the
        // test polls the server's state in /proc until the server is stopped.
        let stat = format!("/proc/{}/stat", self.0.id());
        let deadline = wait::deadline();
        while !std::fs::read_to_string(&stat)?.contains(") T ") {
            ensure!(Instant::now() < deadline, "qemu-nbd does not stop");
            wait::pause();
        }
        Ok(())
    }

    /// Continues the server, which then answers the requests that arrived meanwhile.
    pub(crate) fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.0), signal).context("a signal for qemu-nbd")
    }
}
