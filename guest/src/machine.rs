//! A running guest.

use shadowbell_testing::wait::LIMIT;
use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::agent::{self, Agent, Output};
use crate::config::{self, Config, Firmware, Inside};
use crate::host::last_lines;
use crate::process::{Process, describe};
use crate::qmp::Qmp;
use crate::roots::Roots;
use crate::rundir::RunDir;

/// Path of `target/guest` inside QEMU's chroot.
const KEPT_DIR: &str = "/run/shadowbell/kept";

/// A running Linux guest under QEMU. Dropping it kills QEMU.
#[derive(Debug)]
pub struct Guest {
    process: Process,
    agent: Agent,
    qmp: Qmp,
    console: PathBuf,
    trace: PathBuf,
    errors: PathBuf,
}

impl Guest {
    /// Starts QEMU and waits until the guest's agent answers.
    ///
    /// `initramfs` is the name of a file in the run's directory, with an archive from
    /// [`crate::initramfs::pack`]. Only one guest at a time may use the directory. A second guest,
    /// started after the end of the first, appends to the same logs.
    ///
    /// # Errors
    ///
    /// QEMU ended (the error has its messages), or the guest did not boot (the error has the end
    /// of its console).
    pub fn boot(roots: &Roots, run: &RunDir, config: &Config, initramfs: &str) -> Result<Self> {
        let kernel = roots.kernel(config.kernel)?;
        let kernel = kernel.strip_prefix(roots.directory()).context("the kernel's place")?;
        let inside = Inside {
            kernel: Path::new(KEPT_DIR).join(kernel),
            initramfs: Path::new(config::FILES).join(initramfs),
            uefi_variables: Path::new(config::FILES).join("uefi-variables.fd"),
        };
        if config.firmware == Firmware::Uefi {
            let empty = roots.tools().join("usr/share/OVMF/OVMF_VARS_4M.fd");
            fs::copy(&empty, run.file("uefi-variables.fd"))
                .with_context(|| empty.display().to_string())?;
        }
        let agent_socket = listen(run, "agent")?;
        let qmp_socket = listen(run, "qmp")?;
        let errors = run.file("qemu-stderr.log");
        let errors_file = File::options().create(true).append(true).open(&errors)?;

        let binds = [
            (run.files(), config::FILES),
            (run.sockets(), config::SOCKETS),
            (roots.directory(), KEPT_DIR),
        ];
        let mut command = roots.command(&binds, "qemu-system-x86_64")?;
        command.args(config::arguments(config, &inside));
        command.stdout(errors_file.try_clone()?).stderr(errors_file);
        let mut process = Process::spawn("QEMU", &mut command)?;

        let console = run.file("console.log");
        let mut check = || check(&mut process, &errors);
        // QEMU connects to these sockets in the order of its command line: the agent's socket is
        // before the socket for QMP.
        let mut agent = Agent::new(agent::accept(&agent_socket, LIMIT, &mut check)?)?;
        let qmp = Qmp::new(agent::accept(&qmp_socket, LIMIT, &mut check)?)?;
        agent
            .wait_hello(LIMIT, &mut check)
            .with_context(|| format!("the guest did not come up: {}", tail(&console)))?;
        Ok(Self { process, agent, qmp, console, trace: run.file("qemu-trace.log"), errors })
    }

    /// Runs a shell command in the guest; see [`Agent::run`].
    pub fn run(&mut self, command: &str, timeout: Duration) -> Result<Output> {
        let (process, errors) = (&mut self.process, &self.errors);
        self.agent
            .run(command, timeout, &mut || check(process, errors))
            .with_context(|| format!("the guest's console: {}", tail(&self.console)))
    }

    /// Runs a shell command that must succeed. Returns its output.
    pub fn sh(&mut self, command: &str, timeout: Duration) -> Result<String> {
        self.run(command, timeout)?.success().with_context(|| format!("in the guest: {command}"))
    }

    /// Process id of QEMU.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Sends a command after which the agent does not answer, such as a reboot.
    pub fn send(&mut self, command: &str) -> Result<()> {
        self.agent.send(command).map(drop)
    }

    /// Waits until the guest has rebooted in the same QEMU.
    pub fn wait_reboot(&mut self) -> Result<()> {
        let (process, errors) = (&mut self.process, &self.errors);
        self.agent
            .wait_hello(LIMIT, &mut || check(process, errors))
            .with_context(|| format!("the guest did not come back: {}", tail(&self.console)))
    }

    /// Kernel log with numeric levels as prefixes (`<4>[    1.2] ...`).
    pub fn dmesg(&mut self) -> Result<String> {
        self.sh("dmesg -r", LIMIT)
    }

    /// Runs a command of QEMU's control socket.
    pub fn qmp(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.qmp.execute(command, arguments, LIMIT)
    }

    /// Path of QEMU's trace log, from which [`crate::trace`] counts events.
    pub fn trace_log(&self) -> &Path {
        &self.trace
    }

    /// Kills QEMU, like a crash.
    pub fn kill(mut self) {
        self.process.kill();
    }

    /// Powers the guest off and waits for the end of QEMU.
    pub fn power_off(mut self, timeout: Duration) -> Result<()> {
        self.send("poweroff -f")?;
        let status = self.process.wait(timeout)?;
        if !status.success() {
            bail!("QEMU: {}", describe(status));
        }
        Ok(())
    }
}

fn listen(run: &RunDir, name: &str) -> Result<UnixListener> {
    let path = run.socket(name);
    // A previous guest may have left the socket.
    let _ = fs::remove_file(&path);
    UnixListener::bind(&path).with_context(|| path.display().to_string())
}

/// Fails if QEMU has ended.
fn check(process: &mut Process, errors: &Path) -> Result<()> {
    match process.ended()? {
        None => Ok(()),
        Some(status) => bail!("QEMU ended ({}): {}", describe(status), tail(errors)),
    }
}

fn tail(log: &Path) -> String {
    last_lines(&fs::read(log).unwrap_or_default(), 12)
}
