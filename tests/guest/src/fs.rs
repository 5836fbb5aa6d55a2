//! File system, discards, and fio with checksums.

use anyhow::{Result, bail, ensure};
use shadowbell_guest::{Kernel, RunDir, Small};

use super::dmesg;
use super::setup::{ControllerKind, Setup, finish, names};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const SIZE: u64 = 1 << 30;

/// Checksum of every file, sorted by path. The files are the guest's own programs and libraries.
const SUMS: &str = "find usr -xdev -type f | sort | xargs sha256sum";

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let image = run.image("disk.img", SIZE)?;
    let mut disk = setup.disk(run, &image)?;
    let mut guest = setup.boot(run, kernel, vec![disk.device.clone()], |_| {})?;
    let (_, dev) = names(&mut guest, 0)?;

    report.check("mkfs.ext4, and a tree copied onto it", |_| {
        guest.sh(&format!("mkfs.ext4 -q -F /dev/{dev} && mount /dev/{dev} /mnt"), LIMIT)?;
        guest.sh(&format!("cd / && {SUMS} >/tmp/before && cp -a usr /mnt/ && sync"), LIMIT)
    });
    report.check("unmounted, clean, mounted again: the same checksums", |_| {
        guest.sh("umount /mnt && echo 3 >/proc/sys/vm/drop_caches", LIMIT)?;
        guest.sh(&format!("e2fsck -fn /dev/{dev}"), LIMIT)?;
        guest.sh(&format!("mount /dev/{dev} /mnt && cd /mnt && {SUMS} >/tmp/after"), LIMIT)?;
        guest.sh("[ -s /tmp/before ] && cmp /tmp/before /tmp/after", LIMIT)
    });
    report.check("files removed and trimmed, the file system stays clean", |_| {
        guest.sh("rm -r /mnt/usr/lib && sync && fstrim /mnt && umount /mnt", LIMIT)?;
        guest.sh(&format!("e2fsck -fn /dev/{dev}"), LIMIT)
    });
    report.check("blkdiscard of the whole disk, which gives the space back", |_| {
        guest.sh(&format!("blkdiscard -f /dev/{dev}"), LIMIT)?;
        // The file's allocated size, from blocks of 512 bytes in stat(2).
        let left = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&image)?) * 512;
        if left > SIZE / 100 {
            bail!("the image still holds {left} bytes");
        }
        Ok(())
    });
    report.check("discarded blocks read as zeroes", |_| {
        guest.sh(
            &format!("dd if=/dev/{dev} bs=1M count=64 iflag=direct | cmp -n 67108864 - /dev/zero"),
            LIMIT,
        )
    });
    report.check("blkdiscard --zeroout writes zeroes", |_| {
        guest.sh(
            &format!(
                "yes shadowbell | dd of=/dev/{dev} bs=1M count=8 iflag=fullblock oflag=direct && \
                 blkdiscard -f -z -o 1M -l 4M /dev/{dev} && \
                 dd if=/dev/{dev} bs=1M skip=1 count=4 iflag=direct | cmp -n 4194304 - /dev/zero && \
                 dd if=/dev/{dev} bs=1M count=1 iflag=direct | cmp -n 1048576 - /dev/zero; \
                 [ $? = 1 ]"
            ),
            LIMIT,
        )
    });
    report.check("fio --verify=crc32c, 4 jobs, 512 bytes to 256 KiB", |_| {
        guest.sh(
            &format!(
                "fio --name=verify --filename=/dev/{dev} --rw=randrw --bsrange=512-256k \
                 --blockalign=512 --verify=crc32c --verify_fatal=1 --do_verify=1 --numjobs=4 \
                 --size=48m --offset_increment=48m --iodepth=16 --direct=1 --ioengine=libaio \
                 --group_reporting --output-format=terse"
            ),
            LIMIT,
        )
    });
    report.check("fio writes, trims and verifies in between", |_| {
        guest.sh(
            &format!(
                "fio --name=trim --filename=/dev/{dev} --rw=randtrimwrite --bs=16k --size=32m \
                 --offset=512m --iodepth=8 --direct=1 --ioengine=libaio --output-format=terse && \
                 fio --name=mixed --filename=/dev/{dev} --rw=randwrite --bs=4k-64k --size=32m \
                 --offset=600m --verify=crc32c --verify_fatal=1 --verify_backlog=64 --iodepth=32 \
                 --fsync=32 --direct=1 --ioengine=libaio --output-format=terse"
            ),
            LIMIT,
        )
    });
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, 1));
    report.check("the server is running", |_| disk.check());
    finish(report, guest, disk);
    if setup.controller == ControllerKind::Shadowbell {
        report.check(
            "a full file system under the image: the guest gets an error, and can continue",
            |_| full_disk(setup, kernel, run),
        );
    }
    Ok(())
}

/// Tests a sparse image of 256 MiB on a file system of 48 MiB. When the file system is full, the
/// guest's writes fail with ENOSPC, and written data stay readable. After a discard, writes succeed
/// again.
fn full_disk(setup: &Setup, kernel: Kernel, run: &RunDir) -> Result<()> {
    let directory = run.file("small");
    std::fs::create_dir(&directory)?;
    let small = Small { directory: &directory, room: 48 << 20, image: 256 << 20 };
    let disks = [directory.join("disk.img").display().to_string()];
    let mut disk = setup.serve(run, "small", &disks, &[], Some(small))?;
    let mut guest = setup.boot(run, kernel, vec![disk.device.clone()], |_| {})?;
    let (_, dev) = names(&mut guest, 0)?;
    guest.sh("yes shadowbell | head -c 1048576 >/tmp/data", LIMIT)?;
    let fill = |mib: u32| {
        format!(
            "for at in $(seq 0 {}); do \
                dd if=/tmp/data of=/dev/{dev} bs=1M seek=$at count=1 oflag=direct || exit 1; \
             done",
            mib - 1
        )
    };
    let output = guest.run(&fill(256), LIMIT)?;
    let said_so = output.text.contains("No space left on device");
    ensure!(output.code == 1 && said_so, "the guest got: {}", output.text);
    disk.check()?;
    let reads = format!("dd if=/dev/{dev} of=/tmp/back bs=1M count=1 iflag=direct");
    guest.sh(&format!("{reads} && cmp /tmp/data /tmp/back"), LIMIT)?;
    guest.sh(&format!("blkdiscard -f -l 32M /dev/{dev}"), LIMIT)?;
    guest.sh(&fill(16), LIMIT)?;
    guest.power_off(LIMIT)?;
    disk.stop()
}
