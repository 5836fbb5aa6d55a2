//! A guest in which programs, among them the program under test, drive devices through Linux VFIO.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::Value;
use shadowbell_guest::initramfs::{self, Extra};
use shadowbell_guest::{Config, Device, Firmware, Guest, Kernel, Output, RunDir, tool};
use shadowbell_testing::wait::LIMIT;

use super::setup::Setup;

/// File name of the guest's archive, in the run's directory of files.
const ARCHIVE: &str = "initramfs-vfio.cpio";
/// VFIO modules, in the order of their dependencies. Not every kernel has all of them.
pub(crate) const MODULES: &[&str] =
    &["irqbypass", "vfio", "vfio_virqfd", "vfio_iommu_type1", "vfio-pci-core", "vfio-pci"];
/// Kernel parameters: the IOMMU is on, with pass-through for the kernel's own drivers.
pub(crate) const IOMMU: &str = "intel_iommu=on iommu=pt";

/// Packs a guest with these modules, the program under test, and these programs in addition to the
/// usual ones.
pub(crate) fn pack(
    setup: &Setup,
    kernel: Kernel,
    run: &RunDir,
    more: &[&str],
    modules: &[&str],
) -> Result<()> {
    pack_with(setup, kernel, run, more, modules, &[])
}

/// Packs a guest as [`pack`] does, and adds programs of the host.
pub(crate) fn pack_with(
    setup: &Setup,
    kernel: Kernel,
    run: &RunDir,
    more: &[&str],
    modules: &[&str],
    programs: &[PathBuf],
) -> Result<()> {
    let shadowbell = setup.shadowbell.as_deref().context("this needs the shadowbell program")?;
    let tool = setup.directory().join(tool::NAME);
    let modules = setup.roots.modules(kernel, modules);
    let linked: Vec<_> =
        std::iter::once(shadowbell).chain(programs.iter().map(PathBuf::as_path)).collect();
    let extra =
        Extra { programs: &[&tool], linked: &linked, modules: &modules, ..Extra::default() };
    let programs: Vec<_> = initramfs::FULL.iter().chain(more).copied().collect();
    std::fs::write(run.file(ARCHIVE), initramfs::pack(&setup.roots, &programs, extra)?)
        .context("the initramfs")
}

pub(crate) fn boot(
    setup: &Setup,
    run: &RunDir,
    kernel: Kernel,
    devices: Vec<Device>,
    adjust: impl FnOnce(&mut Config),
) -> Result<Guest> {
    let mut config = Config::new(kernel, devices);
    config.iommu = true;
    config.firmware = Firmware::Direct { append: IOMMU.into() };
    adjust(&mut config);
    Guest::boot(&setup.roots, run, &config, ARCHIVE)
}

/// Loads kernel modules. This IOMMU does not remap interrupts, so VFIO rejects devices until
/// [`allow_unsafe_interrupts`] is called.
pub(crate) fn load(guest: &mut Guest, modules: &[&str]) -> Result<()> {
    let names = modules.join(" ");
    let directory = initramfs::MODULES;
    guest.sh(
        &format!(
            "cd {directory} && for name in {names}; do \
                for file in $name.ko*; do [ -f $file ] || continue; \
                    case $file in *.xz) xzcat $file >/tmp/$name.ko;; *) cp $file /tmp/$name.ko;; esac; \
                    insmod /tmp/$name.ko || exit 1; \
                done; done"
        ),
        LIMIT,
    )?;
    Ok(())
}

/// Allows VFIO devices without interrupt remapping.
pub(crate) fn allow_unsafe_interrupts(guest: &mut Guest) -> Result<()> {
    let file = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";
    guest.sh(&format!("echo 1 >{file}"), LIMIT).map(drop)
}

pub(crate) fn shadowbell(guest: &mut Guest, arguments: &str) -> Result<Output> {
    guest.run(&format!("shadowbell {arguments}"), LIMIT)
}

/// Last line of JSON that the program prints.
pub(crate) fn json_of(guest: &mut Guest, arguments: &str) -> Result<Value> {
    let text = guest.sh(&format!("shadowbell {arguments} --json"), LIMIT)?;
    let line = text.lines().rev().find(|line| line.starts_with('{')).context("no JSON")?;
    serde_json::from_str(line).with_context(|| format!("the output: {text:.600}"))
}
