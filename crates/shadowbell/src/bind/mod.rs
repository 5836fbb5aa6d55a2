//! `bind` and `unbind`: who has a PCI device, a kernel driver or programs.
//!
//! A device is handed over by its `driver_override` in sysfs: with the name of a driver in it, only
//! that driver takes the device, and without, the usual one does. Neither verb changes anything
//! that outlives a reboot.

mod in_use;

use crate::exit;
use anyhow::{Context, anyhow, bail};
use shadowbell_driver::{PciAddress, PciFunction, SYSFS};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// The driver that hands devices to programs.
const VFIO: &str = "vfio-pci";

/// Take an NVMe controller from the kernel, for `nvme://` targets
///
/// Binds it to vfio-pci until `shadowbell unbind` or a reboot. Refuses a controller with a mounted
/// file system, active swap space, or another device (LVM, LUKS, RAID) on one of its namespaces.
#[derive(Clone, Debug, clap::Args)]
pub struct BindArgs {
    /// PCI addresses of the controllers: 0000:01:00.0
    #[arg(value_name = "ADDRESS", required = true, value_parser = parse_address)]
    pub addresses: Vec<PciAddress>,
}

/// Give an NVMe controller back to the kernel
#[derive(Clone, Debug, clap::Args)]
pub struct UnbindArgs {
    /// PCI addresses of the controllers: 0000:01:00.0
    #[arg(value_name = "ADDRESS", required = true, value_parser = parse_address)]
    pub addresses: Vec<PciAddress>,
}

/// An address, or the TARGET that it is part of.
fn parse_address(text: &str) -> Result<PciAddress, String> {
    let place = text.strip_prefix("nvme://").unwrap_or(text);
    place.split_once('/').map_or(place, |(address, _)| address).parse()
}

/// Runs `bind`.
///
/// # Errors
/// With exit status [`exit::BAD_INPUT`] if there is no such controller or it is in use; and what
/// the kernel refuses.
pub fn bind(args: &BindArgs) -> anyhow::Result<ExitCode> {
    each(&args.addresses, take)
}

/// Runs `unbind`.
///
/// # Errors
/// As [`bind`].
pub fn unbind(args: &UnbindArgs) -> anyhow::Result<ExitCode> {
    each(&args.addresses, give_back)
}

fn each(
    addresses: &[PciAddress],
    act: impl Fn(&Places, &dyn Kernel, PciAddress, &mut dyn Write) -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    let mut out = io::stdout().lock();
    for address in addresses {
        act(&Places::default(), &Linux, *address, &mut out).with_context(|| address.to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Where the kernel shows things.
#[derive(Debug)]
struct Places {
    sys: PathBuf,
    proc: PathBuf,
    dev: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self { sys: SYSFS.into(), proc: "/proc".into(), dev: "/dev".into() }
    }
}

impl Places {
    fn block(&self, name: &str) -> PathBuf {
        self.sys.join("class/block").join(name)
    }

    fn driver(&self, name: &str) -> PathBuf {
        self.sys.join("bus/pci/drivers").join(name)
    }

    fn find(&self, address: PciAddress) -> anyhow::Result<PciFunction> {
        PciFunction::find(&self.sys, address)
            .context("looking for it")?
            .ok_or_else(|| exit::bad_input(anyhow!("there is no such PCI device")))
    }
}

/// What is asked of the kernel.
trait Kernel {
    /// Writes into a file of sysfs.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
    /// Loads a module.
    fn load(&self, module: &str) -> io::Result<()>;
}

/// The one that runs.
struct Linux;

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
        Err(io::Error::other(text.trim().lines().last().unwrap_or("it failed").to_owned()))
    }
}

fn take(
    places: &Places,
    kernel: &dyn Kernel,
    address: PciAddress,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let function = places.find(address)?;
    if !function.is_nvme() {
        return Err(exit::bad_input(anyhow!(
            "it is not an NVMe controller: its class code is {:06x}h and not 010802h",
            function.class
        )));
    }
    if function.is_for_programs() {
        let driver = function.driver.as_deref().unwrap_or(VFIO);
        writeln!(out, "{address}: {driver} has it already; nothing to do")?;
        return hints(&function, out);
    }
    let disks = in_use::disks(places, &function).context("looking for its namespaces")?;
    let uses = in_use::uses(places, &disks).context("looking for what uses it")?;
    if !uses.is_empty() {
        return Err(exit::bad_input(anyhow!("it is in use: {}; stop that first", uses.join(", "))));
    }
    // Kept until the kernel driver has let go of the disks.
    let _claims = in_use::claim(places, &disks)
        .context("making sure that nobody uses it")?
        .map_err(|why| exit::bad_input(anyhow!("it is in use: {why}; stop that first")))?;
    if !places.driver(VFIO).exists() {
        kernel.load(VFIO).with_context(|| format!("loading the kernel module {VFIO}"))?;
    }
    let change = |path: &Path, text: &str| {
        kernel.write(path, text).with_context(|| format!("writing {}", path.display()))
    };
    let override_file = function.directory().join("driver_override");
    change(&override_file, VFIO)?;
    let old = function.driver.as_deref();
    let handed_over = old
        .map_or(Ok(()), |old| change(&places.driver(old).join("unbind"), &address.to_string()))
        .and_then(|()| change(&places.sys.join("bus/pci/drivers_probe"), &address.to_string()))
        .and_then(|()| match places.find(address)?.driver {
            Some(driver) if driver == VFIO => Ok(()),
            _ => Err(anyhow!("{VFIO} did not take it; see the kernel's log (dmesg)")),
        });
    if let Err(error) = handed_over {
        // As it was, as far as that can be had.
        let _ = kernel.write(&override_file, "\n");
        let _ = kernel.write(&places.sys.join("bus/pci/drivers_probe"), &address.to_string());
        return Err(error);
    }
    match old {
        Some(old) if disks.is_empty() => writeln!(out, "{address}: taken from {old}")?,
        Some(old) => {
            let disks: Vec<_> = disks.iter().map(String::as_str).collect();
            writeln!(out, "{address}: taken from {old}, with {}, unused", disks.join(", "))?;
        }
        None => writeln!(out, "{address}: no driver had it")?,
    }
    writeln!(out, "{address}: bound to {VFIO} until `shadowbell unbind {address}` or a reboot")?;
    hints(&places.find(address)?, out)
}

/// What a person does next.
fn hints(function: &PciFunction, out: &mut dyn Write) -> anyhow::Result<()> {
    let address = function.address;
    let Some(group) = function.group else {
        let why = "there is no IOMMU: boot with intel_iommu=on or amd_iommu=on to use it";
        return Ok(writeln!(out, "{address}: {why}")?);
    };
    for (other, driver) in function.in_the_way().context("looking at its IOMMU group")? {
        writeln!(
            out,
            "{address}: {driver} has {other} of the same IOMMU group; bind that as well"
        )?;
    }
    Ok(writeln!(out, "{address}: drive it as nvme://{address} (/dev/vfio/{group} is root's)")?)
}

fn give_back(
    places: &Places,
    kernel: &dyn Kernel,
    address: PciAddress,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let function = places.find(address)?;
    match function.driver.as_deref() {
        Some(driver) if !function.is_for_programs() => {
            writeln!(out, "{address}: {driver} has it; nothing to give back")?;
            return Ok(());
        }
        _ => {}
    }
    if let Some(group) = function.group.filter(|_| function.is_for_programs()) {
        // The kernel would wait for that program, for ever if need be.
        let path = places.dev.join(format!("vfio/{group}"));
        if fs::OpenOptions::new().read(true).write(true).open(&path).is_err_and(|error| {
            error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error())
        }) {
            return Err(exit::bad_input(anyhow!(
                "a program has it open ({}); end that one first",
                path.display()
            )));
        }
    }
    let change = |path: &Path, text: &str| {
        kernel.write(path, text).with_context(|| format!("writing {}", path.display()))
    };
    // An empty line takes the override away.
    change(&function.directory().join("driver_override"), "\n")?;
    if let Some(old) = function.driver.as_deref() {
        change(&places.driver(old).join("unbind"), &address.to_string())?;
        writeln!(out, "{address}: taken from {old}")?;
    }
    change(&places.sys.join("bus/pci/drivers_probe"), &address.to_string())?;
    match places.find(address)?.driver {
        Some(driver) => writeln!(out, "{address}: given back to {driver}")?,
        None => bail!("no kernel driver took it back; is `nvme` loaded?"),
    }
    Ok(())
}

#[cfg(test)]
mod tests;
