//! SPDK's controller: `nvmf_tgt` with a vfio-user listener.

use shadowbell_testing::wait;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::{Value, json};
use shadowbell_guest::host::last_lines;
use shadowbell_guest::process::{Process, describe};
use tempfile::TempDir;

use super::tree::{DiskKind, MEMORY_BYTES, NQN, Tree};
use crate::server::child;

/// `--mem-size` of SPDK's target in MiB: huge pages for its buffer pools and its memory disk.
const MEMORY: u32 = 640;

/// Running SPDK target. It polls until it ends, so it is killed when the value is dropped.
#[derive(Debug)]
pub(crate) struct Target {
    process: Process,
    directory: TempDir,
}

impl Target {
    /// Serves a disk of this type, with the reactor on CPU `cpu`.
    pub(crate) fn start(tree: &Tree, kind: DiskKind, cpu: usize) -> Result<Self> {
        let directory = tempfile::tempdir().context("a directory for sockets")?;
        let path = |name: &str| directory.path().join(name);
        fs::create_dir(path("vm0")).context("a directory for the socket")?;
        fs::write(path("config.json"), config(kind, &path("vm0")).to_string())?;
        let log = File::create(path("log")).context("the target's log")?;
        let mut command = child(&tree.nvmf_tgt);
        command.args(["--cpumask", &format!("[{cpu}]"), "--no-pci", "--huge-unlink"]);
        command.args(["--mem-size", &MEMORY.to_string(), "--disable-cpumask-locks"]);
        command.arg("--config").arg(path("config.json"));
        command.arg("--rpc-socket").arg(path("rpc.sock"));
        command.stdout(log.try_clone()?).stderr(log);
        let process = Process::spawn("nvmf_tgt", &mut command)?;
        let mut target = Self { process, directory };
        target.wait_until_it_listens()?;
        Ok(target)
    }

    /// Waits until the program listens: it processes its configuration before it answers RPCs.
    fn wait_until_it_listens(&mut self) -> Result<()> {
        let deadline = wait::deadline();
        let socket = self.directory.path().join("rpc.sock");
        while !(self.directory().join("cntrl").exists() && UnixStream::connect(&socket).is_ok()) {
            if let Some(status) = self.process.ended()? {
                bail!("nvmf_tgt ended ({}): {}", describe(status), self.log());
            }
            if Instant::now() > deadline {
                bail!("nvmf_tgt does not listen: {}", self.log());
            }
            wait::pause();
        }
        Ok(())
    }

    /// Directory of the socket `cntrl`.
    pub(crate) fn directory(&self) -> std::path::PathBuf {
        self.directory.path().join("vm0")
    }

    /// Target string of the namespace.
    pub(crate) fn target(&self) -> String {
        format!("vfio-user:{}/cntrl/1", self.directory().display())
    }

    fn log(&self) -> String {
        last_lines(&fs::read(self.directory.path().join("log")).unwrap_or_default(), 8)
    }
}

impl Drop for Target {
    /// Sends SIGTERM, so that the program releases its huge pages, and SIGKILL if it does not end.
    fn drop(&mut self) {
        if self.process.signal(Signal::TERM).is_ok() {
            let _ = self.process.wait(wait::LIMIT);
        }
    }
}

/// Configuration file of `nvmf_tgt`.
fn config(kind: DiskKind, directory: &Path) -> Value {
    let bdev = match kind {
        DiskKind::Null => json!({
            "method": "bdev_null_create",
            "params": { "name": "disk", "block_size": 512, "num_blocks": (1u64 << 40) / 512 },
        }),
        DiskKind::Memory => json!({
            "method": "bdev_malloc_create",
            "params": { "name": "disk", "block_size": 512, "num_blocks": MEMORY_BYTES / 512 },
        }),
    };
    let subsystem = json!({
        "nqn": NQN, "allow_any_host": true, "serial_number": "BENCH", "max_namespaces": 1,
    });
    let listen = json!({
        "trtype": "VFIOUSER", "traddr": directory.display().to_string(), "trsvcid": "0",
    });
    json!({ "subsystems": [
        { "subsystem": "bdev", "config": [bdev] },
        { "subsystem": "nvmf", "config": [
            { "method": "nvmf_create_transport", "params": { "trtype": "VFIOUSER" } },
            { "method": "nvmf_create_subsystem", "params": subsystem },
            { "method": "nvmf_subsystem_add_ns", "params": {
                "nqn": NQN, "namespace": { "bdev_name": "disk", "nsid": 1 },
            } },
            { "method": "nvmf_subsystem_add_listener", "params": {
                "nqn": NQN, "listen_address": listen,
            } },
        ] },
    ] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_disk_and_the_listener() {
        for (kind, method, blocks) in [
            (DiskKind::Null, "bdev_null_create", 1u64 << 31),
            (DiskKind::Memory, "bdev_malloc_create", 1 << 19),
        ] {
            let config = config(kind, Path::new("/run/x"));
            let bdev = &config["subsystems"][0]["config"][0];
            assert_eq!(bdev["method"], method);
            assert_eq!(bdev["params"]["num_blocks"], blocks);
            let listener = &config["subsystems"][1]["config"][3]["params"]["listen_address"];
            assert_eq!(listener["traddr"], "/run/x");
        }
    }

    #[test]
    fn a_failed_start_reports_the_reason() {
        let program = |name: &str| Path::new("/bin").join(name);
        let tree = |name| Tree {
            directory: std::path::PathBuf::new(),
            nvmf_tgt: program(name),
            perf: program("true"),
            version: String::new(),
        };
        let error = Target::start(&tree("false"), DiskKind::Null, 0).unwrap_err().to_string();
        assert!(error.contains("nvmf_tgt ended (exit code 1)"), "{error}");
        // `echo` prints its arguments to the log, which the error contains.
        let error = Target::start(&tree("echo"), DiskKind::Null, 3).unwrap_err().to_string();
        assert!(error.contains("--cpumask [3]"), "{error}");
    }
}
