//! A fresh Debian that systemd boots: a directory by mmdebstrap, a container by systemd-nspawn.
//!
//! What the container writes is in memory, and gone with it.

use shadowbell_testing::wait;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_guest::host;

use super::tools::{need, output};

const SUITE: &str = "bookworm";
/// What a Debian has that boots, and no more: the package has to name what it needs.
const PACKAGES: &str = "systemd,systemd-sysv,dbus";
/// How long the boot may take.
const BOOT: Duration = Duration::from_secs(120);
/// How long one command in it may take.
const COMMAND_SECONDS: &str = "120";

/// The directory of a fresh Debian, in `directory`; it is fetched once.
pub(super) fn root(directory: &Path) -> Result<PathBuf> {
    host::prepare()?;
    need("systemd-nspawn", "systemd-container")?;
    let (root, partial) = (directory.join("root"), directory.join("root.partial"));
    if root.is_dir() {
        return Ok(root);
    }
    eprintln!("fetching a Debian that boots (once, less than a minute) ...");
    if partial.is_dir() {
        fs::remove_dir_all(&partial)?;
    }
    fs::create_dir_all(directory)?;
    let (mirror, keyring) = (host::debian_mirror()?, host::KEYRING);
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--variant=minbase", "--aptopt=APT::Install-Recommends \"false\""]);
    command.arg(format!("--include={PACKAGES}")).arg(SUITE).arg(&partial);
    command.arg(format!("deb [signed-by={keyring}] {mirror} {SUITE} main"));
    output(&mut command)?;
    fs::rename(&partial, &root)?;
    Ok(root)
}

/// A container that runs. Dropping it ends it.
pub(super) struct Machine {
    nspawn: Child,
    /// Its first process, as this machine numbers it.
    leader: u32,
}

impl Machine {
    /// Boots `root`; `shared` is `/shared` in it, to read.
    pub(super) fn boot(root: &Path, shared: &Path) -> Result<Self> {
        let log = shared.join("console");
        let file = File::create(&log)?;
        let mut command = Command::new("systemd-nspawn");
        // A machine whose systemd does not run has nobody to register with.
        command.args(["--quiet", "--register=no", "--keep-unit", "--volatile=overlay"]);
        command.args(["--private-network", "--boot", "--directory"]).arg(root);
        command.arg(format!("--bind-ro={}:/shared", shared.display()));
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let nspawn = command.spawn().context("systemd-nspawn")?;
        let mut machine = Self { nspawn, leader: 0 };
        let until = Instant::now() + BOOT;
        while !machine.is_up() {
            if machine.nspawn.try_wait()?.is_some() || Instant::now() > until {
                let said = fs::read(&log).unwrap_or_default();
                bail!("systemd does not boot here:\n{}", host::last_lines(&said, 12));
            }
            wait::pause();
        }
        Ok(machine)
    }

    /// Whether it has booted. A unit that failed on the way is none of ours.
    fn is_up(&mut self) -> bool {
        let Some(leader) = first_process(self.nspawn.id()) else { return false };
        self.leader = leader;
        let mut command = self.command("systemctl is-system-running");
        let said = command.stderr(Stdio::null()).output().map(|output| output.stdout);
        let said = said.unwrap_or_default();
        [&b"running\n"[..], b"degraded\n"].contains(&&said[..])
    }

    fn command(&self, script: &str) -> Command {
        let mut command = Command::new("timeout");
        let leader = format!("--target={}", self.leader);
        command.args(["--kill-after=5", COMMAND_SECONDS]);
        command.args(["nsenter", &leader, "--all", "--root"]);
        command.args(["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"]);
        command.args(["DEBIAN_FRONTEND=noninteractive", "sh", "-euc"]);
        command.arg(format!("cd /\n{script}"));
        command.stdin(Stdio::null());
        command
    }

    /// Runs a script of the shell in it. What it prints.
    pub(super) fn run(&self, script: &str) -> Result<String> {
        output(&mut self.command(script)).with_context(|| script.to_owned())
    }

    /// Runs one beside others.
    pub(super) fn start(&self, script: &str) -> Result<Child> {
        let mut command = self.command(script);
        Ok(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // It has its container shut down.
        let _ = kill_process(Pid::from_child(&self.nspawn), Signal::TERM);
        let until = wait::deadline();
        while Instant::now() < until {
            if self.nspawn.try_wait().is_ok_and(|ended| ended.is_some()) {
                return;
            }
            wait::pause();
        }
        let _ = self.nspawn.kill();
        let _ = self.nspawn.wait();
    }
}

/// The first process of the container of this nspawn, once it is systemd, in namespaces of its own:
/// what is done there must never be done here.
fn first_process(nspawn: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{nspawn}/task/{nspawn}/children")).ok()?;
    let leader: u32 = children.split_whitespace().next()?.parse().ok()?;
    let is_systemd = fs::read_to_string(format!("/proc/{leader}/comm")).ok()? == "systemd\n";
    let mounts = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let is_own = mounts(&leader.to_string())? != mounts("self")?;
    (is_systemd && is_own).then_some(leader)
}
