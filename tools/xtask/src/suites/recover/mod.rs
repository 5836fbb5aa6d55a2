//! What is left when things go wrong, and what is not copied: our driver in the guest, through the
//! kernel's real VFIO.
//!
//! * `ladder`: the same load with every byte checked, on QEMU's controller, which does no wrong, and on
//!   ours, which does it on purpose; and on one that is beyond help.
//! * `stacked`: a controller of ours inside the guest, whose namespace is one of a controller below that
//!   the driver owns: the client's memory goes into the IOMMU, and nobody copies.

mod ladder;
mod stacked;

use anyhow::{Context, Result, ensure};
use shadowbell_guest::{Device, Drive, Firmware, Guest, Kernel, RunDir, Serve, Server, config};

use super::vfio::{IOMMU, MODULES, allow_unsafe_interrupts, boot, load, pack, shadowbell};
use super::{Lab, MINUTE};
use crate::report::Report;

/// Bytes of each disk.
const SIZE: u64 = 128 << 20;
/// The kernel's own driver, which would meet the faults first, and wait half a minute for each.
const NO_KERNEL_DRIVER: &str = "initcall_blacklist=nvme_init";

/// The controllers, in the order of their PCI addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    Qemu,
    Ours,
    /// Does wrong, again and again.
    Faulty,
    /// Vanishes in the middle of it.
    Doomed,
}

impl Which {
    const ALL: [Self; 4] = [Self::Qemu, Self::Ours, Self::Faulty, Self::Doomed];

    fn address(self) -> String {
        config::pci_address(Self::ALL.iter().position(|which| *which == self).unwrap_or_default())
    }

    fn target(self) -> String {
        format!("nvme://{}", self.address())
    }

    fn name(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::Ours => "ours",
            Self::Faulty => "faulty",
            Self::Doomed => "doomed",
        }
    }

    fn faults(self) -> Option<&'static str> {
        match self {
            Self::Qemu | Self::Ours => None,
            Self::Faulty => Some(ladder::FAULTS),
            Self::Doomed => Some(ladder::DOOM),
        }
    }
}

pub(super) fn run(lab: &Lab, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    if lab.shadowbell.is_none() {
        println!("   left out: it is about our driver; give the program with --shadowbell");
        return Ok(());
    }
    let faulty = lab.faulty()?;
    pack(lab, kernel, run, &[], MODULES)?;
    let (mut devices, mut servers) = (Vec::new(), Vec::new());
    for which in Which::ALL {
        if which == Which::Qemu {
            let name = "qemu.img";
            run.image(name, SIZE)?;
            devices.push(Device::QemuNvme { drive: Drive::Image(name.into()), dbcs: true });
            continue;
        }
        // A long look before anybody sleeps: emulated, the guest takes its time.
        let mut options = vec!["--poll-max", "1000"];
        options.extend(which.faults().into_iter().flat_map(|faults| ["--faults", faults]));
        let (name, disks) = (which.name(), [format!("mem:{SIZE}")]);
        let serve = Serve { binary: &faulty, name, disks: &disks, options: &options, small: None };
        servers.push(Server::start(run, &serve)?);
        devices.push(Device::VfioUser { socket: name.into() });
    }
    let mut guest = boot(lab, run, kernel, devices, |config| {
        config.firmware = Firmware::Direct { append: format!("{IOMMU} {NO_KERNEL_DRIVER}") };
    })?;
    report
        .check("VFIO's modules load, and bind takes controllers that nobody has", |_| {
            load(&mut guest, MODULES)?;
            allow_unsafe_interrupts(&mut guest)?;
            // QEMU tells a vfio-user server of every page that its IOMMU maps: the fewer the better.
            guest.sh("echo 32 >/proc/sys/vm/nr_hugepages", MINUTE)?;
            let addresses = Which::ALL.map(Which::address);
            shadowbell(&mut guest, &format!("bind {}", addresses.join(" ")))?.success()
        })
        .context("there is no controller to go on with")?;
    ladder::run(report, &mut guest, kernel);
    stacked::run(report, &mut guest);
    report.check("the IOMMU stopped nothing", |_| {
        let log = guest.dmesg()?;
        let faults: Vec<_> = log.lines().filter(|line| line.contains("DMAR: [DMA")).collect();
        ensure!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
        Ok(())
    });
    report.check("the guest powers off", |_| guest.power_off(MINUTE));
    for server in servers {
        report.check("the server leaves cleanly", |_| server.stop());
    }
    report.check("what went wrong is what was to go wrong", |_| ladder::injected(run));
    Ok(())
}

/// The words that a check of the guest's output is about, for its message.
fn number(row: &serde_json::Value, pointer: &str) -> Result<u64> {
    row.pointer(pointer)
        .and_then(serde_json::Value::as_u64)
        .with_context(|| format!("{pointer}: {row}"))
}

/// The row that `shadowbell verify` ends with, whatever came of it, and its exit status.
fn verify(guest: &mut Guest, arguments: &str) -> Result<(serde_json::Value, i32)> {
    let output = guest.run(&format!("shadowbell verify {arguments} --json"), 3 * MINUTE)?;
    let line = output.text.lines().rev().find(|line| line.starts_with('{'));
    let line = line.with_context(|| format!("no JSON: {:.2000}", output.text))?;
    let mut json: serde_json::Value = serde_json::from_str(line)?;
    Ok((json["rows"][0].take(), output.code))
}
