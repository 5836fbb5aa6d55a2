//! Recovery of the driver through VFIO, and zero-copy of a stacked controller, in a guest.
//!
//! * `recovery_steps`: one load, with verification of every byte, on three controllers: QEMU's
//!   controller (without faults), Shadowbell's controller (with injected faults), and a controller
//!   that is removed.
//! * `stacked`: a Shadowbell controller inside the guest. Its namespace is a namespace of another
//!   controller, and the driver owns that other controller. The client's memory is mapped into the
//!   IOMMU, so data are not copied.

mod controllers;
mod recovery_steps;
mod stacked;
mod verify;

use anyhow::{Context, Result, ensure};
use shadowbell_guest::{Device, Drive, Firmware, Kernel, RunDir, Serve, Server};

pub(super) use self::verify::{number, verify};

use self::controllers::Which;
use super::vfio::{IOMMU, MODULES, allow_unsafe_interrupts, boot, load, pack, shadowbell};
use crate::setup::Setup;
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

/// Size of each disk in bytes.
const SIZE: u64 = 128 << 20;
/// Disables the kernel's NVMe driver. Otherwise it would attach first, and wait half a minute for
/// each injected fault.
const NO_KERNEL_DRIVER: &str = "initcall_blacklist=nvme_init";

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    if setup.shadowbell.is_none() {
        println!("   skipped: needs the program (--shadowbell)");
        return Ok(());
    }
    let faulty = setup.faulty()?;
    pack(setup, kernel, run, &[], MODULES)?;
    let (mut devices, mut servers) = (Vec::new(), Vec::new());
    for which in Which::ALL {
        if which == Which::Qemu {
            let name = "qemu.img";
            run.image(name, SIZE)?;
            devices.push(Device::QemuNvme { drive: Drive::Image(name.into()), dbcs: true });
            continue;
        }
        // Threads poll for a long time before they sleep, because the emulated guest is slow.
        let mut options = vec!["--poll-max", "1000"];
        options.extend(which.faults().into_iter().flat_map(|faults| ["--faults", faults]));
        let (name, disks) = (which.name(), [format!("mem:{SIZE}")]);
        let serve = Serve { binary: &faulty, name, disks: &disks, options: &options, small: None };
        servers.push(Server::start(run, &serve)?);
        devices.push(Device::VfioUser { socket: name.into() });
    }
    let mut guest = boot(setup, run, kernel, devices, |config| {
        config.firmware = Firmware::Direct { append: format!("{IOMMU} {NO_KERNEL_DRIVER}") };
    })?;
    report
        .check("VFIO's modules load, and bind takes controllers without a driver", |_| {
            load(&mut guest, MODULES)?;
            allow_unsafe_interrupts(&mut guest)?;
            // QEMU sends a vfio-user server one message for each page that the IOMMU maps. Huge
            // pages keep the number of messages low.
            guest.sh("echo 32 >/proc/sys/vm/nr_hugepages", LIMIT)?;
            let addresses = Which::ALL.map(Which::address);
            shadowbell(&mut guest, &format!("bind {}", addresses.join(" ")))?.success()
        })
        .context("no controller was bound to VFIO")?;
    recovery_steps::run(report, &mut guest, kernel);
    stacked::run(report, &mut guest);
    report.check("the IOMMU reports no fault", |_| {
        let log = guest.dmesg()?;
        let faults: Vec<_> = log.lines().filter(|line| line.contains("DMAR: [DMA")).collect();
        ensure!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
        Ok(())
    });
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    for server in servers {
        report.check("the server ends without an error", |_| server.stop());
    }
    report.check("every fault was injected", |_| recovery_steps::injected(run));
    Ok(())
}
