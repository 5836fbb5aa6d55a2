//! Resets, reboots and a killed QEMU while the guest writes. No acknowledged write may be lost, and
//! no DMA may reach memory that the guest has freed.

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::json;
use shadowbell_guest::{Guest, Kernel, RunDir, config};

use super::dmesg;
use super::setup::{Setup, finish, names};
use super::writer::{SLOTS, Writer, patrol};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const SIZE: u64 = 256 << 20;

/// Starts large reads, so that DMA to the guest is always in flight. They are at offsets after the
/// slots of the [`Writer`], and may fail during a reset.
fn start_reads(guest: &mut Guest, dev: &str) -> Result<()> {
    guest
        .sh(
            &format!(
                "fio --name=reads --filename=/dev/{dev} --rw=randread --bs=128k --offset=64m \
                 --iodepth=16 --direct=1 --ioengine=libaio --time_based --runtime=600 \
                 >/tmp/reads.out 2>&1 &"
            ),
            LIMIT,
        )
        .map(drop)
}

fn stop_reads(guest: &mut Guest) -> Result<()> {
    let stop = "killall fio; for try in $(seq 600); do pidof fio >/dev/null || exit 0; sleep 0.1; \
                done; echo fio does not end; exit 1";
    guest.sh(stop, LIMIT).map(drop)
}

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let image = run.image("disk.img", SIZE)?;
    let mut disk = setup.disk(run, &image)?;
    let mut writer = Writer::new(run, &image);
    let mut guest = setup.boot(run, kernel, vec![disk.device.clone()], |_| {})?;
    let (controller, mut dev) = names(&mut guest, 0)?;
    let address = config::pci_address(0);

    for (what, trigger) in [
        ("controller reset", format!("/sys/class/nvme/{controller}/reset_controller")),
        ("function level reset", format!("/sys/bus/pci/devices/{address}/reset")),
    ] {
        report.check(&format!("{what}, four times under load"), |_| {
            start_reads(&mut guest, &dev)?;
            writer.start(&mut guest, &dev, 4)?;
            guest.sh(
                &format!("for i in 1 2 3 4; do echo 1 >{trigger} || exit 1; sleep 0.4; done"),
                LIMIT,
            )?;
            writer.join(&mut guest)?;
            stop_reads(&mut guest)?;
            patrol(&mut guest)?;
            writer.verify()
        });
    }
    report.check("resets cause no warning in the kernel's log", |_| dmesg::clean(&mut guest, 1));

    report.check("driver unbound under load and bound again", |_| {
        start_reads(&mut guest, &dev)?;
        writer.start(&mut guest, &dev, 2)?;
        writer.join(&mut guest)?;
        guest.sh(&format!("echo {address} >/sys/bus/pci/drivers/nvme/unbind"), LIMIT)?;
        // All reads have ended, some of them with an error, and the guest has freed their memory.
        stop_reads(&mut guest)?;
        patrol(&mut guest)?;
        writer.verify()?;
        guest.sh(&format!("echo {address} >/sys/bus/pci/drivers/nvme/bind"), LIMIT)?;
        dev = names(&mut guest, 0)?.1;
        writer.start(&mut guest, &dev, 2)?;
        writer.join(&mut guest)?;
        writer.verify()
    });

    report.check("the guest reboots during I/O, the server continues", |_| {
        start_reads(&mut guest, &dev)?;
        writer.start(&mut guest, &dev, 60)?;
        guest.send("reboot -f")?;
        wait_for_boot(&mut guest, &mut dev)?;
        disk.check()?;
        patrol(&mut guest)?;
        writer.verify()
    });
    report.check("the machine is reset during I/O, without a notification of the guest", |_| {
        start_reads(&mut guest, &dev)?;
        writer.start(&mut guest, &dev, 60)?;
        guest.qmp("system_reset", json!({}))?;
        wait_for_boot(&mut guest, &mut dev)?;
        disk.check()?;
        patrol(&mut guest)?;
        writer.verify()
    });

    let mut guest = report
        .check("QEMU is killed during I/O, and a new one attached", |_| {
            start_reads(&mut guest, &dev)?;
            writer.start(&mut guest, &dev, 60)?;
            guest.kill();
            disk.check()?;
            let mut guest = setup.boot(run, kernel, vec![disk.device.clone()], |_| {})?;
            dev = names(&mut guest, 0)?.1;
            Ok(guest)
        })
        .ok_or_else(|| anyhow::anyhow!("the disk image was not made"))?;
    report.check("no acknowledged write is lost", |_| writer.verify());
    report.check("the new guest reads the image's data", |_| {
        let in_guest = guest.sh(
            &format!("dd if=/dev/{dev} bs=4k count={SLOTS} iflag=direct 2>/dev/null | md5sum"),
            LIMIT,
        )?;
        let in_image = std::process::Command::new("sh")
            .args(["-c", &format!("head -c {} \"$1\" | md5sum", SLOTS * 4096), "sh"])
            .arg(&image)
            .output()?;
        if in_guest.trim() != String::from_utf8_lossy(&in_image.stdout).trim() {
            bail!("the guest reads something else");
        }
        Ok(())
    });
    report.check("the new guest writes", |_| {
        writer.start(&mut guest, &dev, 2)?;
        writer.join(&mut guest)?;
        writer.verify()
    });
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, 1));
    finish(report, guest, disk);
    report.check("at the end, no acknowledged write is lost", |_| writer.verify());
    Ok(())
}

/// Waits for the next boot in the same QEMU. After the boot, the disk may have another name.
fn wait_for_boot(guest: &mut Guest, dev: &mut String) -> Result<()> {
    guest.wait_reboot()?;
    *dev = names(guest, 0)?.1;
    // The block device may exist before it works, so the check reads from it.
    guest
        .sh(&format!("dd if=/dev/{dev} of=/dev/null bs=4k count=1 iflag=direct"), LIMIT)
        .map(drop)?;
    // Each boot runs under load for this time.
    std::thread::sleep(Duration::from_millis(100));
    Ok(())
}
