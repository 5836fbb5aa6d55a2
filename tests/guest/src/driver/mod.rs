//! The driver through Linux VFIO, inside a guest with an emulated IOMMU.
//!
//! The driver attaches to four controllers: QEMU's own with and without shadow doorbells,
//! Shadowbell's over vfio-user, and Shadowbell's with blocks of 4096 bytes. Two more controllers
//! share one IOMMU group. A second guest measures speed (module `table`). A third guest has a
//! virtio disk whose backend is the driver on the host (module `vhost`).

mod refusals;
mod table;
mod target;
mod vhost;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use shadowbell_guest::{Device, Drive, Guest, Kernel, RunDir, config};

use self::target::target;
use super::vfio::{MODULES, allow_unsafe_interrupts, boot, json_of, load, pack, shadowbell};
use crate::setup::{Setup, names};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const SIZE: u64 = 256 << 20;

/// A controller that the driver attaches to.
struct Driven {
    what: &'static str,
    doorbells: &'static str,
    block_size: u32,
}

/// The controllers, in the order of their PCI addresses.
const DRIVEN: [Driven; 4] = [
    Driven { what: "QEMU's with shadow doorbells", doorbells: "shadow", block_size: 512 },
    Driven { what: "QEMU's without", doorbells: "mmio", block_size: 512 },
    Driven { what: "shadowbell's over vfio-user", doorbells: "shadow", block_size: 512 },
    Driven {
        what: "shadowbell's with blocks of 4096 bytes",
        doorbells: "shadow",
        block_size: 4096,
    },
];

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    if setup.shadowbell.is_none() {
        println!("   skipped: needs the program (--shadowbell)");
        return Ok(());
    }
    let modules: Vec<_> = MODULES.iter().copied().chain([vhost::MODULE]).collect();
    pack(setup, kernel, run, &["/usr/bin/qemu-img"], &modules)?;
    driving(setup, report, kernel, run)?;
    table::run(setup, report, kernel, run)?;
    vhost::run(setup, report, kernel, run)
}

fn driving(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let mut devices = Vec::new();
    for (name, dbcs) in [("a.img", true), ("b.img", false)] {
        run.image(name, SIZE)?;
        devices.push(Device::QemuNvme { drive: Drive::Image(name.into()), dbcs });
    }
    let mut servers = Vec::new();
    for (name, disk) in
        [("shadow", format!("mem:{SIZE}")), ("shadow4k", format!("mem:{SIZE}?block-size=4096"))]
    {
        let served = setup.serve(run, name, &[disk], &["--poll-max", "1000"], None)?;
        devices.push(served.device.clone());
        servers.push(served);
    }
    let mut guest = boot(setup, run, kernel, devices, |config| config.more = in_one_group())?;
    for index in 0..DRIVEN.len() {
        names(&mut guest, index)?;
    }
    report.check("VFIO's modules load, and the guest has an IOMMU", |_| {
        load(&mut guest, MODULES)?;
        guest.sh("ls -d /sys/kernel/iommu_groups/0 && [ -c /dev/vfio/vfio ]", LIMIT)
    });
    refusals::while_bound_to_the_kernel(report, &mut guest);
    report
        .check("bind takes every controller from the kernel's driver, and reports it", |_| {
            bind_all(&mut guest)
        })
        .context("no controller was bound to VFIO")?;
    refusals::while_distrusted(report, &mut guest);
    report.check("VFIO trusts devices without interrupt remapping", |_| {
        allow_unsafe_interrupts(&mut guest)
    });
    refusals::while_bound_to_vfio(report, &mut guest);
    for (index, driven) in DRIVEN.iter().enumerate() {
        drive(report, &mut guest, index, driven);
    }
    report.check("buffers are in huge pages, if there are any", |_| huge_pages(&mut guest));
    report.check("unbind returns the controllers, and the kernel reads the written data", |_| {
        rebind_kernel_driver(&mut guest)
    });
    report.check("the IOMMU reports no unexpected fault", |_| faults(&mut guest));
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    for server in servers {
        report.check("the server ends without an error", |_| server.stop());
    }
    Ok(())
}

/// QEMU's arguments for two controllers that are functions of one PCI device. The functions share
/// an IOMMU group, because there is no ACS between them.
fn in_one_group() -> Vec<String> {
    let mut arguments = Vec::new();
    for function in 0..2 {
        let node = format!("together{function}");
        let drive = json!({ "driver": "null-co", "node-name": node, "size": 1 << 20 });
        let device = json!({
            "driver": "nvme", "drive": node, "serial": node, "multifunction": true,
            "addr": format!("10.{function}"),
        });
        for (option, value) in [("-blockdev", drive), ("-device", device)] {
            arguments.extend([option.to_owned(), value.to_string()]);
        }
    }
    arguments
}

fn bind_all(guest: &mut Guest) -> Result<()> {
    let addresses: Vec<_> = (0..DRIVEN.len()).map(config::pci_address).collect();
    let output = shadowbell(guest, &format!("bind {}", addresses.join(" ")))?.success()?;
    for address in &addresses {
        ensure!(
            output.contains(&format!("{address}: unbound from nvme, with unused nvme")),
            "{output}"
        );
        ensure!(output.contains(&format!("use it as nvme://{address}")), "{output}");
        let link = format!("readlink /sys/bus/pci/devices/{address}/driver");
        ensure!(guest.sh(&link, LIMIT)?.trim().ends_with("/vfio-pci"), "{address} is elsewhere");
    }
    let again = shadowbell(guest, &format!("bind {}", addresses.join(" ")))?.success()?;
    ensure!(again.matches("already").count() == addresses.len(), "{again}");
    Ok(())
}

/// Attaches to one controller in every completion mode, and writes and verifies data.
fn drive(report: &mut Report, guest: &mut Guest, index: usize, driven: &Driven) {
    let (target, what) = (target(index), driven.what);
    report.check(&format!("{what}: attached and identified"), |_| {
        let list = json_of(guest, &format!("list {target}"))?;
        let device = list.pointer("/Devices/0").context("no namespace")?;
        ensure!(device["SectorSize"] == driven.block_size, "{device}");
        ensure!(device["PhysicalSize"] == SIZE, "{device}");
        let identity = json_of(guest, &format!("id-ctrl {target}"))?;
        ensure!(identity.get("mn").is_some() && identity.get("sn").is_some(), "{identity}");
        Ok(())
    });
    report.check(&format!("{what}: the banner shows the controller"), |_| {
        let command = format!("bench {target} --number-ios 10");
        let text = shadowbell(guest, &command)?.success()?;
        for word in ["NVMe ", "MQES", "serial", "namespace 1", "queue pair", driven.doorbells] {
            ensure!(text.contains(word), "no `{word}` in: {text}");
        }
        Ok(())
    });
    for completion in ["poll", "interrupt", "adaptive"] {
        report.check(&format!("{what}: written, read and verified, {completion}"), |_| {
            let command = format!(
                "bench {target} --force --rw randrw --bs 8k --iodepth 16 --size 16m --runtime 2 \
                 --ramp-time 100ms --verify on --completion {completion}"
            );
            let row = json_of(guest, &command)?["rows"][0].take();
            let number = |name: &str| row[name].as_f64().with_context(|| format!("no {name}"));
            ensure!(row["doorbells"] == driven.doorbells, "{row}");
            ensure!(row["verify_errors"] == 0 && number("verified_blocks")? > 100.0, "{row}");
            match completion {
                "poll" => ensure!(number("interrupts_per_io")? == 0.0, "{row}"),
                "interrupt" => ensure!(number("interrupts_per_io")? > 0.0, "{row}"),
                _ => {}
            }
            Ok(())
        });
    }
    report.check(&format!("{what}: large commands, and bytes that end within a block"), |_| {
        // The data are random: 3 MiB and 777 bytes. Their transfer needs PRP lists, and its end is
        // not at the end of a block.
        guest.sh(
            "for i in 1 2 3; do dd if=/dev/urandom bs=1M count=1; done >/tmp/data 2>/dev/null; \
             head -c 777 /dev/urandom >>/tmp/data",
            LIMIT,
        )?;
        shadowbell(guest, &format!("write {target} --force --offset 1000001 -i /tmp/data"))?
            .success()?;
        let length = 3 * (1 << 20) + 777;
        let read = format!("read {target} --offset 1000001 --length {length} -o /tmp/back");
        shadowbell(guest, &read)?.success()?;
        guest.sh(&format!("cmp /tmp/data /tmp/back && cp /tmp/data /tmp/data{index}"), LIMIT)
    });
}

/// Checks that buffers of 4 MiB in total (64 of 64 KiB) use two huge pages of 2 MiB, and that the
/// end of the program releases these pages.
fn huge_pages(guest: &mut Guest) -> Result<()> {
    let target = target(2);
    guest.sh(
        &format!(
            "free() {{ sed -n 's/HugePages_Free: *//p' /proc/meminfo; }}; \
             echo 8 >/proc/sys/vm/nr_hugepages; [ $(free) = 8 ] || exit 1; \
             shadowbell bench {target} --bs 64k --iodepth 64 --runtime 2 >/tmp/huge 2>&1 & \
             for i in $(seq 600); do [ $(free) -le 6 ] && used=1 && break; sleep 0.1; done; \
             wait $! || exit 1; [ \"$used\" = 1 ] && [ $(free) = 8 ]; code=$?; \
             echo 0 >/proc/sys/vm/nr_hugepages; cat /tmp/huge; exit $code"
        ),
        LIMIT,
    )?;
    Ok(())
}

fn rebind_kernel_driver(guest: &mut Guest) -> Result<()> {
    let addresses: Vec<_> = (0..DRIVEN.len()).map(config::pci_address).collect();
    let output = shadowbell(guest, &format!("unbind {}", addresses.join(" ")))?.success()?;
    for (index, address) in addresses.iter().enumerate() {
        ensure!(output.contains(&format!("{address}: bound to nvme")), "{output}");
        let disk = names(guest, index)?.1;
        guest.sh(
            &format!(
                "dd if=/dev/{disk} iflag=skip_bytes,count_bytes,fullblock bs=64k skip=1000001 \
                 count=$(stat -c %s /tmp/data{index}) of=/tmp/seen && cmp /tmp/seen /tmp/data{index}"
            ),
            LIMIT,
        )?;
    }
    let other = shadowbell(guest, &format!("list {}", target(0)))?;
    ensure!(other.code == 2, "a controller of the kernel's driver is accepted: {other:?}");
    Ok(())
}

/// Checks that the kernel's log has few lines about IOMMU faults. Up to four per controller are
/// expected: the kernel's driver leaves a translation behind, but this does not prevent attaching.
/// More lines would show faults that Shadowbell's driver has caused.
fn faults(guest: &mut Guest) -> Result<()> {
    let log = guest.dmesg()?;
    let faults: Vec<_> =
        log.lines().filter(|line| line.contains("DMAR") && line.contains("fault")).collect();
    if faults.len() > 4 * DRIVEN.len() {
        bail!("{} faults:\n{}", faults.len(), faults.join("\n"));
    }
    Ok(())
}
