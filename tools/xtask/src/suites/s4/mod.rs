//! Every processor its own queue, and the disk for everyone else: the driver's attach banner, our disk
//! as `/dev/ublkbN` inside the guest, and the S4 table.
//!
//! Two controllers are driven, QEMU's and ours, first by the kernel's driver and then, through VFIO, by
//! ours. The guest has two processors, so readers and queues are spread.

mod device;
mod table;

use anyhow::{Context, Result, ensure};
use shadowbell_guest::{Device, Drive, Guest, Kernel, RunDir, config};

use super::vfio::{self, allow_unsafe_interrupts, boot, load, pack, shadowbell};
use super::{Lab, MINUTE, names};
use crate::report::Report;

/// The kernel's driver for block devices in user space.
const UBLK: &str = "ublk_drv";
/// Bytes of each disk.
const SIZE: u64 = 512 << 20;

pub(super) fn run(lab: &Lab, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    if lab.shadowbell.is_none() {
        println!("   left out: it is about our driver; give the program with --shadowbell");
        return Ok(());
    }
    if lab.roots.modules(kernel, &[UBLK]).is_empty() {
        println!("   left out: Debian's Linux {kernel} has no {UBLK}");
        return Ok(());
    }
    let modules: Vec<_> = vfio::MODULES.iter().copied().chain([UBLK]).collect();
    pack(lab, kernel, run, &[], &modules)?;
    run.image("a.img", SIZE)?;
    let ours = lab.serve(run, "s4", &[format!("mem:{SIZE}")], &["--poll-max", "1000"], None)?;
    let devices = vec![
        Device::QemuNvme { drive: Drive::Image("a.img".into()), dbcs: true },
        ours.device.clone(),
    ];
    let mut guest = boot(lab, run, kernel, devices, |config| config.memory_mib = 1536)?;
    // QEMU tells a vfio-user server of every page that its IOMMU maps: the fewer the better.
    guest.sh(
        "echo 64 >/proc/sys/vm/nr_hugepages && grep -q 'HugePages_Free: *64' /proc/meminfo",
        MINUTE,
    )?;
    let mut find = |index, name| {
        let (address, disk) = (config::pci_address(index), names(&mut guest, index)?.1);
        guest.sh(&format!("echo none >/sys/block/{disk}/queue/scheduler"), MINUTE)?;
        anyhow::Ok(Controller { name, address, disk })
    };
    let controllers = [find(0, "qemu")?, find(1, "shadowbell")?];
    let [qemu, ours_driven] = &controllers;
    // Where speed is not judged, one of them is enough.
    let measured =
        if lab.rounds == 1 { std::slice::from_ref(ours_driven) } else { &controllers[..] };
    report.check("every block is written before one is read", |_| {
        for controller in measured {
            guest.sh(
                &format!(
                    "fio --name=fill --filename=/dev/{} --rw=write --bs=1m --direct=1 \
                     --ioengine=psync --output-format=terse",
                    controller.disk
                ),
                2 * MINUTE,
            )?;
        }
        Ok(())
    });
    let mut rows = report
        .check("random and sequential reads by the kernel's driver", |_| {
            table::by_the_kernel(&mut guest, measured, lab.rounds)
        })
        .context("no figures")?;
    device::without_the_driver(report, &mut guest);
    report
        .check("VFIO's and ublk's modules load, and bind takes both controllers", |_| {
            load(&mut guest, &modules)?;
            allow_unsafe_interrupts(&mut guest)?;
            let addresses: Vec<_> = controllers.iter().map(|c| c.address.as_str()).collect();
            shadowbell(&mut guest, &format!("bind {}", addresses.join(" ")))?.success()
        })
        .context("there is no controller to go on with")?;
    for controller in &controllers {
        report.check(&format!("{}: the banner shows the queue map", controller.name), |_| {
            banner(&mut guest, controller)
        });
    }
    let more = report.check("random and sequential reads by our driver", |_| {
        table::by_our_driver(&mut guest, measured, lab.rounds)
    });
    rows.extend(more.into_iter().flatten());
    for controller in measured {
        let more = report.check(&format!("{}: readers through ublk", controller.name), |_| {
            table::through_ublk(&mut guest, controller, lab.rounds)
        });
        rows.extend(more.into_iter().flatten());
    }
    table::print(&rows);
    for row in &rows {
        report.row(row.json(kernel));
    }
    table::judge(report, &rows, measured.len());
    device::checks(report, &mut guest, ours_driven, qemu);
    report.check("the guest powers off", |_| guest.power_off(MINUTE));
    report.check("the server leaves cleanly", |_| ours.stop());
    Ok(())
}

/// One of the two controllers.
struct Controller {
    name: &'static str,
    address: String,
    /// Its block device, while the kernel has it.
    disk: String,
}

impl Controller {
    fn target(&self) -> String {
        format!("nvme://{}", self.address)
    }
}

/// What a person is told of queues, interrupts and processors, and what it looks like.
fn banner(guest: &mut Guest, controller: &Controller) -> Result<()> {
    let command =
        format!("bench {} --numjobs 2 --number-ios 10 --completion interrupt", controller.target());
    let text = shadowbell(guest, &command)?.success()?;
    for line in text.lines().take_while(|line| !line.contains("iops")).take(12) {
        println!("         {line}");
    }
    for word in [
        "2 queue pairs asked for, 2 got",
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
