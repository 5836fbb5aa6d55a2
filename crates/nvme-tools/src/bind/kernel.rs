//! Interface of `bind` to the kernel: sysfs, procfs and modprobe.

use anyhow::{Context, anyhow};
use shadowbell_driver::{PciAddress, PciFunction, SYSFS};
use shadowbell_process::exit;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Mount points of sysfs, procfs and `/dev`; tests replace them by a temporary directory.
#[derive(Debug)]
pub(super) struct KernelPaths {
    pub(super) sys: PathBuf,
    pub(super) proc: PathBuf,
    pub(super) dev: PathBuf,
}

impl Default for KernelPaths {
    fn default() -> Self {
        Self { sys: SYSFS.into(), proc: "/proc".into(), dev: "/dev".into() }
    }
}

impl KernelPaths {
    pub(super) fn block(&self, name: &str) -> PathBuf {
        self.sys.join("class/block").join(name)
    }

    pub(super) fn driver(&self, name: &str) -> PathBuf {
        self.sys.join("bus/pci/drivers").join(name)
    }

    pub(super) fn find(&self, address: PciAddress) -> anyhow::Result<PciFunction> {
        PciFunction::find(&self.sys, address)
            .context("finding the PCI device")?
            .ok_or_else(|| exit::bad_input(anyhow!("there is no such PCI device")))
    }
}

/// Operations that change the state of the kernel.
pub(super) trait Kernel {
    /// Writes to a file of sysfs.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
    /// Loads a kernel module.
    fn load(&self, module: &str) -> io::Result<()>;
}

/// The running kernel.
pub(super) struct Linux;

impl Kernel for Linux {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
    }

    fn load(&self, module: &str) -> io::Result<()> {
        let mut modprobe = Command::new("modprobe");
        let output = modprobe.arg(module).stdin(Stdio::null()).stdout(Stdio::null()).output()?;
        if output.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&output.stderr);
        Err(io::Error::other(text.trim().lines().last().unwrap_or("modprobe failed").to_owned()))
    }
}
