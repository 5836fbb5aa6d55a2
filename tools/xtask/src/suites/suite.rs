//! The list of the suites.

use anyhow::Context;
use clap::ValueEnum;
use shadowbell_guest::{Kernel, RunDir};

use super::replacement::{self, Event};
use super::setup::Setup;
use super::{
    boot, chardev, cloud_hypervisor, disk_types, doorbells, driver, fs, namespaces, pool, readers,
    recover, reservations, reset, shared, smoke, ublk, zoned,
};
use crate::report::Report;

/// The suites, by their names on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Suite {
    /// The kernel and nvme-cli find a sane controller, and it refuses what it must.
    Smoke,
    /// A file system, discards, and fio with checksums.
    Fs,
    /// A qcow2 image, an export and a namespace of another server at once: file systems, discards,
    /// and fio while the process that serves is killed and upgraded.
    DiskTypes,
    /// Resets, reboots and a killed QEMU under load: no acknowledged write is lost.
    Reset,
    /// The server is replaced again and again under a guest that boots, writes and resets: nothing
    /// is lost, and the guest does not notice.
    Upgrade,
    /// The same, with the process that serves killed.
    Kill,
    /// The same two under Cloud Hypervisor, which runs a guest of its own in the guest.
    CloudHypervisor,
    /// Namespaces come, grow and go while the guest reads and writes: how soon it is told, and how
    /// soon it sees it.
    Namespaces,
    /// The guest makes namespaces with nvme-cli, formats, sanitizes and deletes them.
    Pool,
    /// Zoned namespaces: nvme-cli, blkzone, fio, and a file system that knows zones.
    Zoned,
    /// One disk behind two controllers: paths that are good, bad, or go away under load, and
    /// reservations.
    Shared,
    /// Two guests that have one disk, and fight for it by reservations.
    Reservations,
    /// OVMF starts a kernel from a disk of shadowbell's.
    Boot,
    /// The driver through VFIO, inside the guest, and the S2 table: against the kernel's driver and
    /// QEMU's `nvme://`.
    Driver,
    /// The S3 table: shadow doorbells against trapped ones, shadowbell's against QEMU's.
    Doorbells,
    /// The driver through VFIO on controllers that do wrong on purpose: every step of recovery,
    /// with every byte checked; and a disk on an SSD whose data nobody copies.
    Recover,
    /// A server in the guest whose disks are namespaces by their character devices (/dev/ng0n1):
    /// every byte checked, kills, upgrades, errors, and what is refused; and tests of the crates on
    /// such disks, with cancels, resets, and storage that does not answer for a while.
    Chardev,
    /// The disk as a block device (ublk) inside the guest, and the S4 table: readers, one and many.
    Readers,
    /// A raw disk as a block device (ublk) inside the guest, whose data go straight or are copied:
    /// every byte checked, kills, a shrinking image, and both ways compared.
    Ublk,
}

impl Suite {
    /// Runs the suite on one kernel. What goes wrong is a failed check.
    pub(crate) fn run(self, setup: &Setup, report: &mut Report, kernel: Kernel) {
        let (suite, controller) = (name_of(&self), name_of(&setup.controller));
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

/// What a value is called on the command line.
fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}
