//! A Debian system in a container, for tests of the package: root directory by mmdebstrap, boot
//! by systemd-nspawn.
//!
//! Changes within the container are in memory and are lost when it ends.

use shadowbell_testing::wait;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_guest::host;

use super::tools::{need, output};

/// Recipe of a Debian system that boots.
pub(super) struct Debian {
    /// Name of its root directory.
    pub(super) name: &'static str,
    pub(super) suite: &'static str,
    /// Suite whose packages take precedence.
    pub(super) backports: Option<&'static str>,
    /// Packages besides those that boot, each with a comma before its name. All other packages must
    /// be dependencies of the tested package.
    pub(super) packages: &'static str,
}

/// Time limit of the boot.
const BOOT: Duration = Duration::from_secs(120);
/// Time limit of one command in the container, in seconds.
const COMMAND_SECONDS: &str = "120";

/// Root directory of a Debian system in `directory`, which is downloaded once.
pub(super) fn root(directory: &Path, debian: &Debian) -> Result<PathBuf> {
    let Debian { name, suite, backports, packages } = debian;
    host::prepare()?;
    need("systemd-nspawn", "systemd-container")?;
    let (root, partial) = (directory.join(name), directory.join(format!("{name}.partial")));
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
    if let Some(backports) = backports {
        command.arg(format!("--aptopt=APT::Default-Release \"{backports}\""));
    }
    command.arg(format!("--include=systemd,systemd-sysv,dbus{packages}")).arg(suite).arg(&partial);
    for suite in [suite].into_iter().chain(backports) {
        command.arg(format!("deb [signed-by={keyring}] {mirror} {suite} main"));
    }
    output(&mut command)?;
    fs::rename(&partial, &root)?;
    Ok(root)
}

/// Path, in the container, of a block device, if this machine has loop devices.
pub(super) const BLOCK_DEVICE: &str = "/dev/disk0";

/// Loop device over a file. Detached when dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    /// Creates the device over the new file `file`. `None` if this machine has no loop devices.
    fn over(file: &Path) -> Option<Self> {
        File::create(file).and_then(|file| file.set_len(64 << 20)).ok()?;
        let mut command = Command::new("losetup");
        let printed = output(command.args(["--find", "--show"]).arg(file)).ok()?;
        Some(Self(PathBuf::from(printed.trim())))
    }

    /// Creates another node of the device, whose owner the container can change.
    fn make_node(&self, node: &Path) -> Result<()> {
        let name = self.0.file_name().context("a loop device has a name")?;
        let numbers = fs::read_to_string(Path::new("/sys/class/block").join(name).join("dev"))?;
        let numbers = numbers.trim().split(':');
        if node.exists() {
            fs::remove_file(node)?;
        }
        output(Command::new("mknod").arg(node).arg("b").args(numbers)).map(drop)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = output(Command::new("losetup").arg("--detach").arg(&self.0));
    }
}

/// Running container. Shut down when dropped.
pub(super) struct Machine {
    nspawn: Child,
    /// Block device of the container. It is detached after the container's end.
    _device: Option<LoopDevice>,
    /// Process id, on this machine, of the container's first process.
    leader: u32,
}

impl Machine {
    /// Boots `root`. The directory `shared` is `/shared` in the container, read-only.
    pub(super) fn boot(root: &Path, shared: &Path) -> Result<Self> {
        let log = shared.join("console");
        let file = File::create(&log)?;
        let mut command = Command::new("systemd-nspawn");
        // `--register=no`: a machine without systemd has no systemd-machined to register with.
        command.args(["--quiet", "--register=no", "--keep-unit", "--volatile=overlay"]);
        command.args(["--private-network", "--boot", "--directory"]).arg(root);
        command.arg(format!("--bind-ro={}:/shared", shared.display()));
        // Exports of files use FUSE.
        if Path::new("/dev/fuse").exists() {
            command.arg("--bind=/dev/fuse");
        }
        let device = LoopDevice::over(&shared.join("disk0.img"));
        if let Some(device) = &device {
            let node = shared.join("disk0");
            device.make_node(&node)?;
            command.arg(format!("--bind={}:{BLOCK_DEVICE}", node.display()));
        }
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let nspawn = command.spawn().context("systemd-nspawn")?;
        let mut machine = Self { nspawn, _device: device, leader: 0 };
        let until = Instant::now() + BOOT;
        while !machine.is_up() {
            if machine.nspawn.try_wait()?.is_some() || Instant::now() > until {
                let printed = fs::read(&log).unwrap_or_default();
                bail!("systemd does not boot here:\n{}", host::last_lines(&printed, 12));
            }
            wait::pause();
        }
        Ok(machine)
    }

    /// True if the container has booted. Units of the container may have failed.
    fn is_up(&mut self) -> bool {
        let Some(leader) = first_process(self.nspawn.id()) else { return false };
        self.leader = leader;
        let mut command = self.command("systemctl is-system-running");
        let printed = command.stderr(Stdio::null()).output().map(|output| output.stdout);
        let printed = printed.unwrap_or_default();
        [&b"running\n"[..], b"degraded\n"].contains(&&printed[..])
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

    /// Runs a shell script in the container. Returns its output.
    pub(super) fn run(&self, script: &str) -> Result<String> {
        output(&mut self.command(script)).with_context(|| script.to_owned())
    }

    /// Starts a shell script in the container, and does not wait for it.
    pub(super) fn start(&self, script: &str) -> Result<Child> {
        let mut command = self.command(script);
        Ok(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // systemd-nspawn shuts its container down on SIGTERM.
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

/// Process id of the container's first process, as soon as this process is systemd and has its own
/// namespaces. Earlier, commands would run in the namespaces of this machine.
fn first_process(nspawn: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{nspawn}/task/{nspawn}/children")).ok()?;
    let leader: u32 = children.split_whitespace().next()?.parse().ok()?;
    let is_systemd = fs::read_to_string(format!("/proc/{leader}/comm")).ok()? == "systemd\n";
    let mounts = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let is_own = mounts(&leader.to_string())? != mounts("self")?;
    (is_systemd && is_own).then_some(leader)
}
