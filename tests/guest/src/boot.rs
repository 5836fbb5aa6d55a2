//! UEFI boot: OVMF starts a kernel from the disk under test.

use anyhow::{Result, bail};
use shadowbell_guest::{Firmware, Kernel, RunDir, esp};

use super::dmesg;
use super::setup::{MINIMAL, Setup, finish, names};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const SIZE: u64 = 256 << 20;

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let image = run.file("boot.img");
    // QEMU passes no kernel and no command line to the guest. So if this word is in the kernel's
    // command line, the kernel was started from the image.
    let word = format!("shadowbell.boot={}", std::process::id());
    report.check("a disk with a kernel on an EFI system partition", |_| {
        let initramfs = std::fs::read(setup.roots.directory().join(MINIMAL))?;
        esp::build(&setup.roots, run, "boot.img", SIZE, kernel, &word, &initramfs)
    });
    let disk = setup.disk(run, &image)?;
    let devices = vec![disk.device.clone()];
    let mut guest = report
        .check("OVMF starts it, and the kernel reaches its first process", |_| {
            setup.boot(run, kernel, devices, |config| config.firmware = Firmware::Uefi)
        })
        .ok_or_else(|| anyhow::anyhow!("the disk image was not made"))?;
    report.check("the running kernel is that of the disk", |_| {
        let line = guest.sh("cat /proc/cmdline; ls -d /sys/firmware/efi; uname -r", LIMIT)?;
        let release = setup.roots.release(kernel)?;
        if !line.contains(&word) || line.lines().last().map(str::trim) != Some(&release) {
            bail!("another kernel than {release}: {line}");
        }
        Ok(())
    });
    report.check("the kernel sees the disk and its partition", |_| {
        let dev = names(&mut guest, 0)?.1;
        let text = guest.sh(
            &format!("cat /sys/block/{dev}/size; dd if=/dev/{dev}p1 bs=512 count=1 | strings"),
            LIMIT,
        )?;
        if !text.starts_with(&format!("{}\n", SIZE / 512)) || !text.contains("FAT") {
            bail!("another disk: {text}");
        }
        Ok(())
    });
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, 1));
    finish(report, guest, disk);
    Ok(())
}
