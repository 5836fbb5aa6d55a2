//! A raw disk of the guest as `/dev/ublkbN`. Data move between the block layer's memory and the
//! disk with zero copy, or are copied. The suite writes data by one path and reads them by the
//! other, and measures both.
//!
//! The disks are namespaces of QEMU's controller, which the kernel's driver drives. One disk is
//! exported directly. The other has a file system with images.

mod measure;

use anyhow::{Context, Result, ensure};
use shadowbell_guest::{Device, Drive, Guest, Kernel, RunDir};

use super::readers::{Export, kernel_logged_no_warning, killed, refused};
use super::setup::{Setup, names};
use super::vfio::{boot, load, pack};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

/// The kernel's ublk driver.
const UBLK: &str = "ublk_drv";
const SIZE: u64 = 512 << 20;
/// Words in the log of an export with zero copy.
const ZERO_COPY: &str = "zero-copy I/O";
/// An image on the file system of the second disk.
const IMAGE: &str = "/img/disk.img";
const IMAGE_BYTES: u64 = 384 << 20;

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    if setup.shadowbell.is_none() {
        println!("   skipped: needs the program (--shadowbell)");
        return Ok(());
    }
    if setup.roots.modules(kernel, &[UBLK]).is_empty() {
        println!("   skipped: Debian's Linux {kernel} has no {UBLK}");
        return Ok(());
    }
    pack(setup, kernel, run, &[], &[UBLK])?;
    let devices = ["a.img", "b.img"].map(|name| -> Result<_> {
        run.image(name, SIZE)?;
        Ok(Device::QemuNvme { drive: Drive::Image(name.into()), dbcs: true })
    });
    let devices = devices.into_iter().collect::<Result<Vec<_>>>()?;
    let mut guest = boot(setup, run, kernel, devices, |config| {
        config.iommu = false;
        config.firmware = shadowbell_guest::Firmware::Direct { append: String::new() };
    })?;
    load(&mut guest, &[UBLK])?;
    let raw = format!("/dev/{}", names(&mut guest, 0)?.1);
    let other = names(&mut guest, 1)?.1;
    guest.sh(
        &format!(
            "mkfs.ext4 -q -F /dev/{other} && mkdir -p /img && mount /dev/{other} /img && \
             truncate -s {IMAGE_BYTES} {IMAGE}"
        ),
        LIMIT,
    )?;
    let mut check = |name: &str, run: &dyn Fn(&mut Guest) -> Result<()>| {
        report
            .check(name, |_| run(&mut guest).or_else(|error| clean_up(&mut guest).and(Err(error))))
    };
    check("zero copy on a block device, every byte verified", &|guest| content(guest, &raw, ""));
    check("copies on a block device, every byte verified", &|guest| {
        content(guest, &raw, "--ublk-copy")
    });
    check("a file system on an image is written, mounted again, trimmed, and clean", &file_system);
    check("requests of a disk with a limit are copied", &|guest| limited(guest, &raw));
    check("three kills under load: --recover recovers the device without data loss", &|guest| {
        killed(guest, &raw, ZERO_COPY)
    });
    check("a device is recovered with the other data path", &|guest| crossed(guest, &raw));
    if setup.rounds > 0 {
        let rows = report.check("speed with zero copy and with copies, in turn", |_| {
            measure::measure(&mut guest, &raw, setup.rounds)
        });
        if let Some(rows) = rows {
            report.table(measure::table(&rows, kernel));
        }
    }
    report.check("the kernel logs no warning", |_| kernel_logged_no_warning(&mut guest));
    // The kernel logs the errors of this check, so the kernel's log is checked before.
    report.check("a truncated image gives errors, never zeroes", |_| shrunk(&mut guest));
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    Ok(())
}

/// Removes what a failed check has left, so that the next check can use the disks.
fn clean_up(guest: &mut Guest) -> Result<()> {
    let script = "umount /mnt; for signal in TERM KILL; do \
            kill -$signal $(cat /tmp/pid0); \
            for i in $(seq 600); do [ -d /proc/$(cat /tmp/pid0) ] || exit 0; sleep 0.1; done; \
        done";
    guest.run(script, LIMIT).map(drop)
}

fn export_log(guest: &mut Guest) -> Result<String> {
    guest.sh("cat /tmp/export0", LIMIT)
}

/// Ends an export with zero copy. Returns the number of requests with zero copy, and of those with
/// copies.
fn stop(guest: &mut Guest, export: Export) -> Result<(u64, u64)> {
    export.stop(guest)?;
    counts(&export_log(guest)?)
}

fn counts(export_log: &str) -> Result<(u64, u64)> {
    let words = || {
        export_log
            .split("zero-copy for ")
            .nth(1)
            .with_context(|| format!("no counts: {export_log}"))
    };
    let mut numbers = words()?.split_whitespace().filter_map(|word| word.parse().ok());
    Ok((
        numbers.next().context("no count of zero-copy requests")?,
        numbers.next().context("no count of copied requests")?,
    ))
}

fn content(guest: &mut Guest, raw: &str, options: &str) -> Result<()> {
    let export = Export::start(guest, raw, options)?;
    let is_straight = options.is_empty();
    let text = export_log(guest)?;
    ensure!(text.contains(ZERO_COPY) == is_straight, "{text}");
    ensure!(text.contains("data is copied: an option requests it") != is_straight, "{text}");
    let disk = &export.disk;
    let fio = "--direct=1 --ioengine=libaio --verify=crc32c --verify_fatal=1 --output-format=terse";
    guest.sh(
        &format!(
            "fio --name=verify --filename=/dev/{disk} --rw=randrw --bsrange=512-512k \
             --blockalign=512 --do_verify=1 --numjobs=2 --size=16m --offset_increment=16m \
             --iodepth=16 --fsync=32 {fio}"
        ),
        LIMIT,
    )?;
    // The steps are writes with FUA, Write Zeroes between blocks that are not zero, a discard, and
    // a write through the page cache.
    guest.sh(
        &format!(
            "fio --name=durable --filename=/dev/{disk} --rw=randwrite --bs=16k --sync=dsync \
             --offset=96m --size=2m --do_verify=1 {fio}"
        ),
        LIMIT,
    )?;
    guest.sh(
        &format!(
            "head -c 3000000 /dev/urandom >/tmp/data && \
             yes shadowbell | dd of=/dev/{disk} bs=64k seek=640 count=64 iflag=fullblock \
                oflag=direct && \
             blkdiscard -f -z -o 41M -l 2M /dev/{disk} && \
             dd if=/dev/{disk} bs=1M skip=41 count=2 iflag=direct | cmp -n 2097152 - /dev/zero && \
             blkdiscard -f -o 43M -l 1M /dev/{disk} && \
             dd if=/tmp/data of=/dev/{disk} bs=1M seek=64"
        ),
        LIMIT,
    )?;
    if is_straight {
        let (zero_copy, copied) = stop(guest, export)?;
        println!("         {zero_copy} requests with zero copy, {copied} copied");
        ensure!(zero_copy > 100 && copied == 0, "{zero_copy} requests straight, {copied} copied");
    } else {
        export.stop(guest)?;
    }
    // The disk itself contains the data that were written through ublk.
    guest.sh(
        &format!(
            "dd if={raw} bs=1M skip=64 count=3 iflag=direct | cmp -n 3000000 - /tmp/data && \
             yes shadowbell | head -c 65536 >/tmp/yes && \
             dd if={raw} bs=64k skip=640 count=1 iflag=direct | cmp - /tmp/yes"
        ),
        LIMIT,
    )?;
    Ok(())
}

/// Checksum of every file, sorted by path, for a comparison.
const SUMS: &str = "find usr/sbin -xdev -type f | sort | xargs sha256sum";

fn file_system(guest: &mut Guest) -> Result<()> {
    let export = Export::start(guest, IMAGE, "")?;
    let disk = export.disk.clone();
    guest.sh(&format!("mkfs.ext4 -q -F /dev/{disk} && mount /dev/{disk} /mnt"), LIMIT)?;
    guest.sh(
        &format!("cd / && {SUMS} >/tmp/before && mkdir /mnt/usr && cp -a usr/sbin /mnt/usr/ && umount /mnt"),
        LIMIT,
    )?;
    let (zero_copy, copied) = stop(guest, export)?;
    ensure!(zero_copy > 100 && copied == 0, "{zero_copy} requests straight, {copied} copied");
    // The export is started again with the other data path.
    let export = Export::start(guest, IMAGE, "--ublk-copy")?;
    guest.sh(&format!("mount /dev/{disk} /mnt && cd /mnt && {SUMS} >/tmp/after"), LIMIT)?;
    guest.sh("[ -s /tmp/before ] && cmp /tmp/before /tmp/after && umount /mnt", LIMIT)?;
    export.stop(guest)?;
    let export = Export::start(guest, IMAGE, "")?;
    guest.sh(&format!("mount /dev/{disk} /mnt && cd /mnt && {SUMS} >/tmp/after"), LIMIT)?;
    guest.sh("cmp /tmp/before /tmp/after", LIMIT)?;
    guest.sh("rm -r /mnt/usr/sbin && fstrim /mnt && umount /mnt", LIMIT)?;
    guest.sh(&format!("e2fsck -fn /dev/{disk}"), LIMIT)?;
    stop(guest, export).map(drop)
}

fn shrunk(guest: &mut Guest) -> Result<()> {
    let image = "/img/shrinks.img";
    guest.sh(&format!("truncate -s 16M {image}"), LIMIT)?;
    let export = Export::start(guest, image, "")?;
    let disk = export.disk.clone();
    ensure!(export_log(guest)?.contains(ZERO_COPY), "the data are copied");
    let dd = |arguments: &str| format!("dd {arguments} bs=64k");
    guest.sh(
        &format!(
            "yes shadowbell | {}",
            dd(&format!("of=/dev/{disk} iflag=fullblock count=256 oflag=direct"))
        ),
        LIMIT,
    )?;
    guest.sh(&format!("truncate -s {} {image}", (8 << 20) + 32768), LIMIT)?;
    let read = |at: u32| dd(&format!("if=/dev/{disk} of=/tmp/read iflag=direct count=1 skip={at}"));
    guest.sh(
        &format!("{} && head -c 65536 /dev/zero | cmp -s - /tmp/read && exit 1 || true", read(127)),
        LIMIT,
    )?;
    // Reads across the end of the file and behind it fail, also after the file has its old size
    // again.
    for at in [128, 200] {
        ensure!(guest.run(&read(at), LIMIT)?.code != 0, "block {at} is read from beyond the end");
    }
    guest.sh(&format!("truncate -s 16M {image}"), LIMIT)?;
    ensure!(guest.run(&read(200), LIMIT)?.code != 0, "lost data are read as zeroes");
    guest.sh(&read(127), LIMIT)?;
    export.signal(guest, "TERM")?;
    let export_log = export.ended(guest)?;
    ensure!(
        export_log.contains("requests failed") || export_log.contains("may not be durable"),
        "{export_log}"
    );
    guest.sh(&format!("rm {image}"), LIMIT).map(drop)
}

fn limited(guest: &mut Guest, raw: &str) -> Result<()> {
    let export = Export::start(guest, &format!("'{raw}?iops=2000'"), "")?;
    ensure!(!export_log(guest)?.contains(ZERO_COPY), "requests bypass the limit");
    let disk = &export.disk;
    guest.sh(&format!("dd if=/dev/{disk} of=/dev/null bs=1M count=4 iflag=direct"), LIMIT)?;
    export.stop(guest)
}

/// Recovery by a process with the other data path. A device that was created for zero copy is
/// recovered by a process that copies, and by a process whose disk is not a file. A device that was
/// created for copies continues to copy.
fn crossed(guest: &mut Guest, raw: &str) -> Result<()> {
    for (made, then, words) in [
        ("", "--ublk-copy", "an option requests it"),
        ("--ublk-copy", "", "created without zero copy"),
    ] {
        let export = Export::start(guest, raw, &format!("{made} --recover"))?;
        guest.sh(
            &format!("dd if=/tmp/data of=/dev/{} bs=1M seek=100 conv=fsync", export.disk),
            LIMIT,
        )?;
        export.signal(guest, "KILL")?;
        export.ended(guest)?;
        refused(guest, &format!("{raw} --ublk --ublk-id 0"), &["ublkb0"])?;
        let export = Export::start(guest, raw, &format!("{then} --recover"))?;
        let text = export_log(guest)?;
        ensure!(text.contains(": recovered") && text.contains(words), "{text}");
        let disk = &export.disk;
        guest.sh(
            &format!(
                "dd if=/dev/{disk} bs=1M skip=100 count=3 iflag=direct | cmp -n 3000000 - /tmp/data"
            ),
            LIMIT,
        )?;
        guest.sh(
            &format!(
                "fio --name=crossed --filename=/dev/{disk} --rw=randrw --bsrange=512-256k \
                 --blockalign=512 --do_verify=1 --size=8m --iodepth=16 --direct=1 \
                 --ioengine=libaio --verify=crc32c --verify_fatal=1 --output-format=terse"
            ),
            LIMIT,
        )?;
        export.stop(guest)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_counts_are_parsed_from_the_log() {
        let export_log = "INFO: zero-copy for 4711 requests, and copies for 8\nINFO: ended";
        assert_eq!(counts(export_log).unwrap(), (4711, 8));
        assert!(counts("INFO: ended").is_err());
    }
}
