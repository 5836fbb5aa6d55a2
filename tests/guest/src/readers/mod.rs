//! Several readers of one disk, with a queue pair for each CPU. The suite checks the banner that
//! the driver prints when it attaches, and the disk as `/dev/ublkbN` inside the guest. It measures
//! the speed of one and several readers (rows of the table `S4`).
//!
//! There are two controllers, QEMU's and Shadowbell's. First the kernel's driver drives them, and
//! then Shadowbell's driver, through VFIO. The guest has two CPUs, so readers and queues run on
//! both.

mod controller;
mod device;
mod table;

use anyhow::{Context, Result, ensure};
use shadowbell_guest::{Device, Drive, Guest, Kernel, RunDir, config};

use self::controller::{Controller, SIZE};
pub(super) use self::device::{Export, kernel_logged_no_warning, killed, refused};
use super::vfio::{self, allow_unsafe_interrupts, boot, load, pack, shadowbell};
use crate::setup::{Setup, names};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

/// The kernel's ublk driver.
const UBLK: &str = "ublk_drv";

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    if setup.shadowbell.is_none() {
        println!("   skipped: needs the program (--shadowbell)");
        return Ok(());
    }
    if setup.roots.modules(kernel, &[UBLK]).is_empty() {
        println!("   skipped: Debian's Linux {kernel} has no {UBLK}");
        return Ok(());
    }
    let modules: Vec<_> = vfio::MODULES.iter().copied().chain([UBLK]).collect();
    pack(setup, kernel, run, &[], &modules)?;
    run.image("a.img", SIZE)?;
    let shadowbell_disk =
        setup.serve(run, "readers", &[format!("mem:{SIZE}")], &["--poll-max", "1000"], None)?;
    let devices = vec![
        Device::QemuNvme { drive: Drive::Image("a.img".into()), dbcs: true },
        shadowbell_disk.device.clone(),
    ];
    let mut guest = boot(setup, run, kernel, devices, |config| config.memory_mib = 1536)?;
    // QEMU sends a vfio-user server one message for each page that the IOMMU maps. Huge pages keep
    // the number of messages low.
    guest.sh(
        "echo 64 >/proc/sys/vm/nr_hugepages && grep -q 'HugePages_Free: *64' /proc/meminfo",
        LIMIT,
    )?;
    let mut find = |index, name| {
        let (address, disk) = (config::pci_address(index), names(&mut guest, index)?.1);
        guest.sh(&format!("echo none >/sys/block/{disk}/queue/scheduler"), LIMIT)?;
        anyhow::Ok(Controller { name, address, disk })
    };
    let controllers = [find(0, "qemu")?, find(1, "shadowbell")?];
    let [qemu, shadowbell_controller] = &controllers;
    // With one round, only one controller is measured; with zero rounds, none. The measured speeds
    // are not checked.
    let measured = match setup.rounds {
        0 => &[][..],
        1 => std::slice::from_ref(shadowbell_controller),
        _ => &controllers[..],
    };
    report.check("every block is written before one is read", |_| {
        for controller in measured {
            guest.sh(
                &format!(
                    "fio --name=fill --filename=/dev/{} --rw=write --bs=1m --direct=1 \
                     --ioengine=psync --output-format=terse",
                    controller.disk
                ),
                LIMIT,
            )?;
        }
        Ok(())
    });
    let mut rows = Vec::new();
    if !measured.is_empty() {
        let some = report.check("random and sequential reads by the kernel's driver", |_| {
            table::by_the_kernel(&mut guest, measured, setup.rounds)
        });
        rows.extend(some.into_iter().flatten());
    }
    device::kernel_driver_only(report, &mut guest);
    report
        .check("VFIO's and ublk's modules load, and bind takes both controllers", |_| {
            load(&mut guest, &modules)?;
            allow_unsafe_interrupts(&mut guest)?;
            let addresses: Vec<_> = controllers.iter().map(|c| c.address.as_str()).collect();
            shadowbell(&mut guest, &format!("bind {}", addresses.join(" ")))?.success()
        })
        .context("no controller was bound to VFIO")?;
    for controller in &controllers {
        report.check(&format!("{}: the banner shows the queue map", controller.name), |_| {
            banner(&mut guest, controller)
        });
    }
    if !measured.is_empty() {
        let more = report.check("random and sequential reads by the driver under test", |_| {
            table::by_the_driver(&mut guest, measured, setup.rounds)
        });
        rows.extend(more.into_iter().flatten());
    }
    for controller in measured {
        let more = report.check(&format!("{}: readers through ublk", controller.name), |_| {
            table::through_ublk(&mut guest, controller, setup.rounds)
        });
        rows.extend(more.into_iter().flatten());
    }
    if !measured.is_empty() {
        report.table(table::table(&rows, kernel));
        table::check_targets(report, &rows, measured.len());
    }
    device::checks(report, &mut guest, shadowbell_controller, qemu);
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    report.check("the server ends without an error", |_| shadowbell_disk.stop());
    Ok(())
}

/// Checks the banner of `bench`: the assignment of queues and interrupts to CPUs.
fn banner(guest: &mut Guest, controller: &Controller) -> Result<()> {
    let command =
        format!("bench {} --numjobs 2 --number-ios 10 --completion interrupt", controller.target());
    let text = shadowbell(guest, &command)?.success()?;
    for line in text.lines().take_while(|line| !line.contains("iops")).take(12) {
        println!("         {line}");
    }
    for word in [
        "2 queue pairs requested, 2 granted",
        "NVMe ",
        "MQES",
        "serial",
        "namespace 1",
        "queue map: 1 to 2 (processors 0 to 1, each its own); their interrupts go there",
    ] {
        ensure!(text.contains(word), "no `{word}` in: {text}");
    }
    Ok(())
}
