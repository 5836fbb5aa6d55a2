//! Zoned namespaces with Linux's block layer and its tools, nvme-cli, fio and zonefs. One namespace
//! is in memory. The other is in a file, and its server process is killed.

use anyhow::{Context, Result, ensure};
use shadowbell_guest::initramfs::{self, Extra};
use shadowbell_guest::{Config, Guest, Kernel, RunDir, tool};
use std::fs::File;

use super::dmesg;
use super::nvme_cli::{nvme, refused};
use super::replacement::kill_worker;
use super::setup::{Setup, finish};
use super::vfio::load;
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

/// File name of the initial file system of the guest, and the modules that it contains for these
/// tests.
const ARCHIVE: &str = "initramfs-zoned.cpio";
const MODULES: &[&str] = &["zonefs"];
/// Options of the disks: 256 zones of 4 MiB, each with a capacity of 3 MiB.
const ZONES: &str = "zoned=4MiB&zone-capacity=3MiB&max-open=16&max-active=32&zone-extension=64";
const COUNT: u64 = 256;
/// Size of a zone in blocks of 512 bytes.
const SIZE: u64 = 8192;
const CAPACITY: u64 = 6144;

const INVALID_WRITE: u16 = 0x1bc;
const BOUNDARY: u16 = 0x1b8;
const INVALID_TRANSITION: u16 = 0x1bf;

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    if setup.shadowbell.is_none() {
        println!("   skipped: not about QEMU's own controller");
        return Ok(());
    }
    let image = run.file("zones.img");
    File::create(&image)?.set_len(COUNT << 22)?;
    let disks = [format!("mem:1GiB?{ZONES}"), format!("{}?{ZONES}", image.display())];
    let mut disk = setup.serve(run, "dut", &disks, &[], None)?;
    let tool = setup.directory().join(tool::NAME);
    let modules = setup.roots.modules(kernel, MODULES);
    let superblock = zonefs_superblock();
    let extra = Extra {
        programs: &[&tool],
        modules: &modules,
        files: &[("root/zonefs", &superblock)],
        ..Extra::default()
    };
    let programs: Vec<_> = initramfs::FULL.iter().chain(&["/usr/sbin/blkzone"]).copied().collect();
    std::fs::write(run.file(ARCHIVE), initramfs::pack(&setup.roots, &programs, extra)?)
        .context("the initramfs")?;
    let mut config = Config::new(kernel, vec![disk.device.clone()]);
    config.cpus = 2;
    let mut guest = Guest::boot(&setup.roots, run, &config, ARCHIVE)?;
    load(&mut guest, MODULES)?;
    let guest_ref = &mut guest;
    report.check("the namespaces are host-managed block devices", |_| {
        for name in ["nvme0n1", "nvme0n2"] {
            for (attribute, expected) in [
                ("zoned", "host-managed".to_owned()),
                ("nr_zones", COUNT.to_string()),
                ("chunk_sectors", SIZE.to_string()),
                ("max_open_zones", "16".to_owned()),
                ("max_active_zones", "32".to_owned()),
            ] {
                let path = format!("cat /sys/block/{name}/queue/{attribute}");
                let found = guest_ref.sh(&path, LIMIT)?;
                ensure!(found.trim() == expected, "{name}: {attribute} is {found}");
            }
        }
        Ok(())
    });
    for name in ["nvme0n1", "nvme0n2"] {
        report
            .check(&format!("{name}: nvme-cli's commands of zones"), |_| commands(guest_ref, name));
        report.check(&format!("{name}: blkzone"), |_| blkzone(guest_ref, name));
        report.check(&format!("{name}: fio writes and verifies"), |_| fio(guest_ref, name));
        report.check(&format!("{name}: zonefs has a file for each zone"), |_| {
            zonefs(guest_ref, name)
        });
    }
    report.check("data in a file survive a kill of the server process", |_| {
        guest_ref.sh(
            "blkzone reset /dev/nvme0n2 && dd if=/dev/urandom of=/tmp/data bs=1M count=2 \
             2>/dev/null && dd if=/tmp/data of=/dev/nvme0n2 bs=64k oflag=direct 2>/dev/null && \
             blkzone report /dev/nvme0n2 >/tmp/before",
            LIMIT,
        )?;
        kill_worker(disk.server.as_ref().context("there is a server")?.id())?;
        guest_ref
            .sh(
                "dd if=/dev/nvme0n2 bs=1M count=2 iflag=direct 2>/dev/null | cmp - /tmp/data && \
             blkzone report /dev/nvme0n2 | cmp - /tmp/before && \
             dd if=/tmp/data of=/dev/nvme0n2 bs=64k count=16 seek=32 oflag=direct 2>/dev/null",
                LIMIT,
            )
            .map(drop)
    });
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, 2));
    disk.check()?;
    finish(report, guest, disk);
    Ok(())
}

/// Checks that zone `nth` has the state `wanted` in nvme-cli's report.
fn state(guest: &mut Guest, name: &str, nth: u64, wanted: &str) -> Result<()> {
    let slba = nth * SIZE;
    let report =
        nvme(guest, &format!("zns report-zones /dev/{name} --start-lba={slba} --descs=1"))?;
    // Numbers of the zone states in nvme-cli's report (ZNS 1.1, "Zone Descriptor Data
    // Structure").
    let number = match wanted {
        "EMPTY" => "0x10",
        "IMP_OPENED" => "0x20",
        "EXP_OPENED" => "0x30",
        "CLOSED" => "0x40",
        _ => "0xe0",
    };
    let is_so = report.contains(&format!("State: {number} ")) || report.contains(wanted);
    ensure!(is_so, "zone {nth} is not {wanted}: {report}");
    Ok(())
}

fn commands(guest: &mut Guest, name: &str) -> Result<()> {
    let id = nvme(guest, &format!("zns id-ns /dev/{name} -o json"))?;
    ensure!(id.contains("\"mar\":31") && id.contains("\"mor\":15"), "zns id-ns: {id}");
    nvme(guest, "zns id-ctrl /dev/nvme0")?;
    let zns = |command: &str, nth: u64, more: &str| {
        format!("zns {command} /dev/{name} --start-lba={} {more}", nth * SIZE)
    };
    state(guest, name, 0, "EMPTY")?;
    nvme(guest, &zns("open-zone", 0, ""))?;
    state(guest, name, 0, "EXP_OPENED")?;
    nvme(guest, &zns("close-zone", 0, ""))?;
    state(guest, name, 0, "CLOSED")?;
    guest.sh("dd if=/dev/urandom of=/tmp/block bs=4096 count=1 2>/dev/null", LIMIT)?;
    for nth in 0..2 {
        let append = "--data-size=4096 --data=/tmp/block";
        let append = format!("zns zone-append /dev/{name} --zslba={SIZE} {append}");
        let done = nvme(guest, &append)?;
        let place = SIZE + nth * 8;
        // nvme-cli prints the LBA in hexadecimal, without a prefix.
        let is_there = done.contains(&format!("LBA {place:x}"));
        ensure!(is_there, "append {nth} is not at {place}: {done}");
    }
    state(guest, name, 1, "IMP_OPENED")?;
    let io = |command: &str, slba: u64, file: &str| {
        format!(
            "{command} /dev/{name} --start-block={slba} --block-count=7 --data-size=4096 \
             --data={file}"
        )
    };
    nvme(guest, &io("read", SIZE + 8, "/tmp/back"))?;
    guest.sh("cmp /tmp/block /tmp/back", LIMIT)?;
    refused(guest, &io("write", SIZE + 8, "/tmp/block"), &[INVALID_WRITE])?;
    refused(guest, &io("read", SIZE - 4, "/tmp/back"), &[BOUNDARY])?;
    nvme(guest, &zns("finish-zone", 1, ""))?;
    state(guest, name, 1, "FULL")?;
    refused(guest, &zns("open-zone", 1, ""), &[INVALID_TRANSITION])?;
    refused(guest, &zns("offline-zone", 1, ""), &[INVALID_TRANSITION])?;
    nvme(guest, &zns("reset-zone", 1, ""))?;
    state(guest, name, 1, "EMPTY")?;
    guest.sh("head -c 64 /tmp/block >/tmp/extension", LIMIT)?;
    nvme(guest, &zns("set-zone-desc", 2, "--data=/tmp/extension"))?;
    let extended =
        nvme(guest, &format!("zns report-zones /dev/{name} --start-lba={} -d 1 -e", 2 * SIZE))?;
    ensure!(
        extended.contains("0x40") || extended.contains("CLOSED"),
        "the extended report: {extended}"
    );
    nvme(guest, &format!("zns reset-zone /dev/{name} --select-all"))?;
    state(guest, name, 2, "EMPTY")
}

fn blkzone(guest: &mut Guest, name: &str) -> Result<()> {
    guest.sh(
        &format!("dd if=/dev/zero of=/dev/{name} bs=1M count=1 oflag=direct 2>/dev/null"),
        LIMIT,
    )?;
    let report = |guest: &mut Guest| guest.sh(&format!("blkzone report -c 1 /dev/{name}"), LIMIT);
    let written = report(guest)?;
    ensure!(written.contains("wptr 0x000800") && written.contains("(oi)"), "{written}");
    ensure!(written.contains(&format!("cap 0x{CAPACITY:06x}")), "{written}");
    guest.sh(&format!("blkzone finish -c 1 /dev/{name}"), LIMIT)?;
    let full = report(guest)?;
    ensure!(full.contains("(fu)"), "{full}");
    guest.sh(&format!("blkzone reset /dev/{name}"), LIMIT)?;
    let empty = report(guest)?;
    ensure!(empty.contains("(em)"), "{empty}");
    Ok(())
}

fn fio(guest: &mut Guest, name: &str) -> Result<()> {
    for job in [
        "--rw=write --bs=128k --size=64m",
        "--rw=randwrite --bs=16k --size=128m --io_size=32m --max_open_zones=8",
    ] {
        let script = format!(
            "fio --name=zones --filename=/dev/{name} --zonemode=zbd --direct=1 --ioengine=libaio \
             --iodepth=8 --verify=crc32c --do_verify=1 --verify_fatal=1 {job}"
        );
        guest.sh(&script, LIMIT)?;
    }
    guest.sh(&format!("blkzone reset /dev/{name}"), LIMIT).map(drop)
}

/// Checks zonefs, in which each zone is a file whose length shows how much was written to the zone.
fn zonefs(guest: &mut Guest, name: &str) -> Result<()> {
    let last = COUNT - 1;
    guest.sh(
        &format!(
            "blkzone reset /dev/{name} && \
             dd if=/root/zonefs of=/dev/{name} bs=4096 count=1 oflag=direct 2>/dev/null && \
             mkdir -p /tmp/zones && {{ mount -t zonefs -o explicit-open /dev/{name} /tmp/zones || \
             {{ dmesg | tail -n 3; false; }}; }} && \
             cd /tmp/zones/seq && [ $(ls | wc -l) = {last} ] && \
             dd if=/dev/urandom of=/tmp/data bs=64k count=48 2>/dev/null && \
             dd if=/tmp/data of=0 bs=64k oflag=direct conv=notrunc 2>/dev/null && \
             dd if=/tmp/data of=7 bs=64k count=5 oflag=direct conv=notrunc 2>/dev/null && \
             cmp 0 /tmp/data && [ $(stat -c %s 7) = 327680 ] && \
             truncate -s 0 0 && [ $(stat -c %s 0) = 0 ] && \
             cd / && umount /tmp/zones && \
             mount -t zonefs /dev/{name} /tmp/zones && \
             cmp -n 327680 /tmp/zones/seq/7 /tmp/data; code=$?; umount /tmp/zones; exit $code"
        ),
        LIMIT,
    )?;
    guest.sh(&format!("blkzone reset /dev/{name}"), LIMIT).map(drop)
}

/// The zonefs superblock, which is in the first zone.
fn zonefs_superblock() -> [u8; 4096] {
    let mut block = [0; 4096];
    block[..4].copy_from_slice(&0x5a4f_4653_u32.to_le_bytes());
    block[8..16].copy_from_slice(b"zonefs\0\0");
    block[72..88].copy_from_slice(&[7; 16]);
    // Permissions of the files.
    block[104..108].copy_from_slice(&0o640_u32.to_le_bytes());
    let sum = block.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            sum >> 1 ^ if sum & 1 != 0 { 0xedb8_8320 } else { 0 }
        })
    });
    block[4..8].copy_from_slice(&sum.to_le_bytes());
    block
}
