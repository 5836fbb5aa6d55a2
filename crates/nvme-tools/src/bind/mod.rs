//! `bind` and `unbind`: binding of PCI functions to vfio-pci or to their kernel driver.
//!
//! The driver is selected by `driver_override` in sysfs: if the file holds a driver's name, only
//! that driver binds the function; if it is empty, the usual driver does. No change survives a
//! reboot.

mod in_use;
mod kernel;

use anyhow::{Context, anyhow, bail};
use kernel::{Kernel, KernelPaths, Linux};
use shadowbell_driver::{PciAddress, PciFunction};
use shadowbell_process::exit;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

/// Driver that gives user-space programs access to a PCI function.
const VFIO: &str = "vfio-pci";

/// Bind an NVMe controller to vfio-pci, for `nvme://` targets
///
/// The controller stays bound until `shadowbell unbind` or a reboot. Refuses a controller with a
/// mounted file system, active swap space, or another device (LVM, LUKS, RAID) on one of its
/// namespaces.
#[derive(Clone, Debug, clap::Args)]
pub struct BindArgs {
    /// PCI addresses of the controllers: 0000:01:00.0
    #[arg(value_name = "ADDRESS", required = true, value_parser = parse_address)]
    pub addresses: Vec<PciAddress>,
}

/// Return an NVMe controller to its kernel driver
#[derive(Clone, Debug, clap::Args)]
pub struct UnbindArgs {
    /// PCI addresses of the controllers: 0000:01:00.0
    #[arg(value_name = "ADDRESS", required = true, value_parser = parse_address)]
    pub addresses: Vec<PciAddress>,
}

/// Parses a PCI address, or a TARGET that contains one.
fn parse_address(text: &str) -> Result<PciAddress, String> {
    let address = text.strip_prefix("nvme://").unwrap_or(text);
    address.split_once('/').map_or(address, |(address, _)| address).parse()
}

/// Runs `bind`.
///
/// # Errors
/// With exit status [`exit::BAD_INPUT`] if there is no such controller or it is in use; otherwise
/// errors of the kernel.
pub fn bind(args: &BindArgs) -> anyhow::Result<ExitCode> {
    each(&args.addresses, bind_to_vfio)
}

/// Runs `unbind`.
///
/// # Errors
/// The same errors as of [`bind`].
pub fn unbind(args: &UnbindArgs) -> anyhow::Result<ExitCode> {
    each(&args.addresses, return_to_kernel)
}

fn each(
    addresses: &[PciAddress],
    act: impl Fn(&KernelPaths, &dyn Kernel, PciAddress, &mut dyn Write) -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    let mut out = io::stdout().lock();
    for address in addresses {
        act(&KernelPaths::default(), &Linux, *address, &mut out)
            .with_context(|| address.to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn bind_to_vfio(
    paths: &KernelPaths,
    kernel: &dyn Kernel,
    address: PciAddress,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let function = paths.find(address)?;
    if !function.is_nvme() {
        return Err(exit::bad_input(anyhow!(
            "not an NVMe controller: its class code is {:06x}h instead of 010802h",
            function.class
        )));
    }
    if function.is_for_programs() {
        let driver = function.driver.as_deref().unwrap_or(VFIO);
        writeln!(out, "{address}: already bound to {driver}; nothing to do")?;
        return hints(&function, out);
    }
    let disks = in_use::disks(paths, &function).context("finding its namespaces")?;
    let uses = in_use::uses(paths, &disks).context("finding users of its disks")?;
    if !uses.is_empty() {
        return Err(exit::bad_input(anyhow!("in use: {}; stop this use first", uses.join(", "))));
    }
    // The descriptors stay open until the kernel driver has released the disks, so that none is
    // mounted meanwhile.
    let _claims = in_use::open_exclusively(paths, &disks)
        .context("claiming its disks")?
        .map_err(|why| exit::bad_input(anyhow!("in use: {why}; stop this use first")))?;
    if !paths.driver(VFIO).exists() {
        kernel.load(VFIO).with_context(|| format!("loading the kernel module {VFIO}"))?;
    }
    let change = |path: &Path, text: &str| {
        kernel.write(path, text).with_context(|| format!("writing {}", path.display()))
    };
    let override_file = function.directory().join("driver_override");
    change(&override_file, VFIO)?;
    let old = function.driver.as_deref();
    let handed_over = old
        .map_or(Ok(()), |old| change(&paths.driver(old).join("unbind"), &address.to_string()))
        .and_then(|()| change(&paths.sys.join("bus/pci/drivers_probe"), &address.to_string()))
        .and_then(|()| match paths.find(address)?.driver {
            Some(driver) if driver == VFIO => Ok(()),
            _ => Err(anyhow!("{VFIO} was not bound; see the kernel log (dmesg)")),
        });
    if let Err(error) = handed_over {
        // Binding has failed, so the function is returned to its previous driver. If this fails as
        // well, only the first error is reported.
        let _ = kernel.write(&override_file, "\n");
        let _ = kernel.write(&paths.sys.join("bus/pci/drivers_probe"), &address.to_string());
        return Err(error);
    }
    match old {
        Some(old) if disks.is_empty() => writeln!(out, "{address}: unbound from {old}")?,
        Some(old) => {
            let disks: Vec<_> = disks.iter().map(String::as_str).collect();
            writeln!(out, "{address}: unbound from {old}, with unused {}", disks.join(", "))?;
        }
        None => writeln!(out, "{address}: had no driver")?,
    }
    writeln!(out, "{address}: bound to {VFIO} until `shadowbell unbind {address}` or a reboot")?;
    hints(&paths.find(address)?, out)
}

/// Prints the next steps for the user.
fn hints(function: &PciFunction, out: &mut dyn Write) -> anyhow::Result<()> {
    let address = function.address;
    let Some(group) = function.group else {
        let why = "no IOMMU: boot with intel_iommu=on or amd_iommu=on to use the controller";
        return Ok(writeln!(out, "{address}: {why}")?);
    };
    for (other, driver) in function.blocking_devices().context("reading its IOMMU group")? {
        writeln!(
            out,
            "{address}: {other} of the same IOMMU group is bound to {driver}; bind it as well"
        )?;
    }
    Ok(writeln!(out, "{address}: use it as nvme://{address} (/dev/vfio/{group} requires root)")?)
}

fn return_to_kernel(
    paths: &KernelPaths,
    kernel: &dyn Kernel,
    address: PciAddress,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let function = paths.find(address)?;
    match function.driver.as_deref() {
        Some(driver) if !function.is_for_programs() => {
            writeln!(out, "{address}: already bound to {driver}; nothing to do")?;
            return Ok(());
        }
        _ => {}
    }
    if let Some(group) = function.group.filter(|_| function.is_for_programs()) {
        // A function that a program has open is refused, because the write to `unbind` would block
        // until the program closes the function.
        let path = paths.dev.join(format!("vfio/{group}"));
        if fs::OpenOptions::new().read(true).write(true).open(&path).is_err_and(|error| {
            error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error())
        }) {
            return Err(exit::bad_input(anyhow!(
                "in use by a program ({}); end the program first",
                path.display()
            )));
        }
    }
    let change = |path: &Path, text: &str| {
        kernel.write(path, text).with_context(|| format!("writing {}", path.display()))
    };
    // An empty line clears the override.
    change(&function.directory().join("driver_override"), "\n")?;
    if let Some(old) = function.driver.as_deref() {
        change(&paths.driver(old).join("unbind"), &address.to_string())?;
        writeln!(out, "{address}: unbound from {old}")?;
    }
    change(&paths.sys.join("bus/pci/drivers_probe"), &address.to_string())?;
    match paths.find(address)?.driver {
        Some(driver) => writeln!(out, "{address}: bound to {driver}")?,
        None => bail!("no kernel driver was bound; is the module `nvme` loaded?"),
    }
    Ok(())
}

#[cfg(test)]
mod tests;
