//! List of the guest suites.

use anyhow::Context;
use clap::ValueEnum;
use shadowbell_guest::{Kernel, RunDir};

use super::replacement::{self, Event};
use super::setup::Setup;
use super::{
    boot, chardev, cloud_hypervisor, disk_types, doorbells, driver, fs, namespaces, pool, readers,
    recover, reservations, reset, shared, smoke, ublk, zoned,
};
use shadowbell_harness::Report;

/// Guest suites, by their names on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// Basic test with the kernel and nvme-cli: Identify, log pages, features, refusals
    Smoke,
    /// File system, discards, and fio with checksums
    Fs,
    /// Disk types other than files (qcow2, NBD, a namespace of another server), all in one guest:
    /// file systems, discards, and fio while the server process is killed and upgraded
    DiskTypes,
    /// Resets, reboots and a killed QEMU under load: no acknowledged write is lost
    Reset,
    /// Repeated restart for upgrade while the guest boots, writes and resets: nothing is lost,
    /// and the guest logs no warning
    Upgrade,
    /// Repeated `kill -9` of the server process under the load of `upgrade`
    Kill,
    /// Upgrades and kills under Cloud Hypervisor, which runs nested in the guest
    CloudHypervisor,
    /// Namespaces are added, resized and removed under load: time until the event, and until the
    /// guest has updated its disk
    Namespaces,
    /// Namespace Management, Format NVM and Sanitize by nvme-cli
    Pool,
    /// Zoned namespaces: nvme-cli, blkzone, fio and zonefs
    Zoned,
    /// One disk behind two controllers: ANA states, path loss under load, and reservations
    Shared,
    /// Reservations of two guests that share one disk
    Reservations,
    /// UEFI boot: OVMF starts a kernel from a disk of shadowbell's
    Boot,
    /// The driver through VFIO inside the guest, and its speed next to the kernel's driver and
    /// QEMU's `nvme://`
    Driver,
    /// Shadow doorbells next to MMIO doorbells, shadowbell's controller next to QEMU's: IOPS,
    /// doorbell writes, interrupts and host CPU time per I/O
    Doorbells,
    /// The driver through VFIO on controllers with injected faults: every recovery step, with
    /// every byte verified; and zero-copy of a disk on an SSD
    Recover,
    /// NVMe character devices (/dev/ng0n1) as disks of a server in the guest: data verified,
    /// kills, upgrades, errors and refusals; and tests of the crates on such disks, with cancels,
    /// resets and hung storage
    Chardev,
    /// One and several readers of a ublk device inside the guest: integrity, recovery and speed
    Readers,
    /// Zero copy of ublk on a raw disk inside the guest: data verified, kills, a truncated image,
    /// and speed next to copies
    Ublk,
}

impl Suite {
    /// Name of the suite on the command line.
    pub fn name(self) -> String {
        name_of(&self)
    }

    /// Runs the suite on one kernel. An error becomes a failed check.
    pub fn run(self, setup: &Setup, report: &mut Report, kernel: Kernel) {
        let (suite, controller) = (self.name(), name_of(&setup.controller));
        let release = setup.roots.release(kernel).unwrap_or_else(|_| kernel.to_string());
        report.begin(&format!("guest {suite}, Linux {release}, {controller}"));
        report.check(&format!("{suite} ran to its end"), |report| {
            let run = RunDir::new(setup.roots.directory())?;
            let result = match self {
                Self::Smoke => smoke::run(setup, report, kernel, &run),
                Self::Fs => fs::run(setup, report, kernel, &run),
                Self::DiskTypes => disk_types::run(setup, report, kernel, &run),
                Self::Reset => reset::run(setup, report, kernel, &run),
                Self::Upgrade => replacement::run(setup, report, kernel, &run, Event::Upgrade),
                Self::Kill => replacement::run(setup, report, kernel, &run, Event::Kill),
                Self::CloudHypervisor => cloud_hypervisor::run(setup, report, kernel, &run),
                Self::Namespaces => namespaces::run(setup, report, kernel, &run),
                Self::Pool => pool::run(setup, report, kernel, &run),
                Self::Zoned => zoned::run(setup, report, kernel, &run),
                Self::Shared => shared::run(setup, report, kernel, &run),
                Self::Reservations => reservations::run(setup, report, kernel, &run),
                Self::Boot => boot::run(setup, report, kernel, &run),
                Self::Driver => driver::run(setup, report, kernel, &run),
                Self::Recover => recover::run(setup, report, kernel, &run),
                Self::Chardev => chardev::run(setup, report, kernel, &run),
                Self::Doorbells => doorbells::run(setup, report, kernel, &run),
                Self::Readers => readers::run(setup, report, kernel, &run),
                Self::Ublk => ublk::run(setup, report, kernel, &run),
            };
            let logs = setup.roots.directory().join(format!("logs/{suite}-{kernel}-{controller}"));
            run.keep_logs(&logs)?;
            result.with_context(|| format!("logs are in {}", logs.display()))
        });
    }
}

/// Name of a value on the command line.
fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}
