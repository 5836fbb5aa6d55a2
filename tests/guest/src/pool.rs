//! Namespace Management, Format NVM and Sanitize by nvme-cli in a Linux guest.

use shadowbell_testing::wait;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use serde_json::Value;
use shadowbell_guest::{Guest, Kernel, RunDir};

use super::dmesg;
use super::nvme_cli::{json, number, nvme, refused};
use super::protection;
use super::setup::{Setup, finish};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const INSUFFICIENT_CAPACITY: u16 = 0x115;
const ALREADY_ATTACHED: u16 = 0x118;
const NOT_ATTACHED: u16 = 0x11a;
const INVALID_NAMESPACE: u16 = 0x00b;

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    if setup.shadowbell.is_none() {
        println!("   QEMU's own controller has no such pool");
        return Ok(());
    }
    let pool = format!("{}?capacity=256MiB", run.file("pool").display());
    let mut disk = setup.serve(run, "dut", &[], &["--pool", &pool], None)?;
    let mut guest = setup.boot(run, kernel, vec![disk.device.clone()], |config| config.cpus = 2)?;
    let guest_ref = &mut guest;
    report.check(
        "Identify Controller reports Namespace Management, Format NVM and Sanitize",
        |_| {
            let id = json(guest_ref, "id-ctrl /dev/nvme0")?;
            let oacs = number(&id, "oacs")?;
            ensure!(oacs & 0b1010 == 0b1010, "oacs is {oacs:#x}");
            ensure!(number(&id, "tnvmcap")? == 256 << 20 && number(&id, "unvmcap")? == 256 << 20);
            Ok(())
        },
    );
    report.check("a namespace is created, attached and used", |_| {
        refused(
            guest_ref,
            "create-ns /dev/nvme0 --nsze=1000000 --ncap=1000000 --flbas=0",
            &[INSUFFICIENT_CAPACITY],
        )?;
        for flbas in [0, 1] {
            let blocks = (64 << 20) / if flbas == 0 { 512 } else { 4096 };
            nvme(
                guest_ref,
                &format!("create-ns /dev/nvme0 --nsze={blocks} --ncap={blocks} --flbas={flbas}"),
            )?;
        }
        ensure!(allocated(guest_ref)? == 2, "list-ns --all");
        refused(guest_ref, "detach-ns /dev/nvme0 -n 1 -c 1", &[NOT_ATTACHED])?;
        nvme(guest_ref, "attach-ns /dev/nvme0 -n 1 -c 1")?;
        refused(guest_ref, "attach-ns /dev/nvme0 -n 1 -c 1", &[ALREADY_ATTACHED])?;
        nvme(guest_ref, "attach-ns /dev/nvme0 -n 2 -c 1")?;
        wait_for_disk(guest_ref, "nvme0n1", Some(512))?;
        wait_for_disk(guest_ref, "nvme0n2", Some(4096))?;
        guest_ref.sh(
            "dd if=/dev/urandom of=/tmp/data bs=1M count=4 2>/dev/null && \
             for disk in nvme0n1 nvme0n2; do \
                dd if=/tmp/data of=/dev/$disk bs=1M oflag=direct 2>/dev/null && \
                dd if=/dev/$disk bs=1M count=4 iflag=direct 2>/dev/null | cmp - /tmp/data || exit 1; \
             done",
            LIMIT,
        )?;
        Ok(())
    });
    report.check("a detached namespace keeps its data", |_| {
        nvme(guest_ref, "detach-ns /dev/nvme0 -n 2 -c 1")?;
        wait_for_disk(guest_ref, "nvme0n2", None)?;
        nvme(guest_ref, "attach-ns /dev/nvme0 -n 2 -c 1")?;
        wait_for_disk(guest_ref, "nvme0n2", Some(4096))?;
        let same = "dd if=/dev/nvme0n2 bs=1M count=4 iflag=direct 2>/dev/null | cmp - /tmp/data";
        guest_ref.sh(same, LIMIT).map(drop)
    });
    report.check("a format changes the block size and zeroes the namespace", |_| {
        nvme(guest_ref, "format /dev/nvme0 -n 1 --lbaf=1 --ses=1 --force")?;
        wait_for_disk(guest_ref, "nvme0n1", Some(4096))?;
        zeroes(guest_ref, "nvme0n1")
    });
    report.check("a sanitize operation erases all namespaces", |_| {
        // Block Erase and Overwrite. Only Overwrite has a number of passes.
        for how in ["--sanact=0x02", "--sanact=0x03 --owpass=2"] {
            guest_ref
                .sh("dd if=/tmp/data of=/dev/nvme0n1 bs=1M oflag=direct 2>/dev/null", LIMIT)?;
            nvme(guest_ref, &format!("sanitize /dev/nvme0 {how}"))?;
            sanitized(guest_ref)?;
            for name in ["nvme0n1", "nvme0n2"] {
                wait_for_disk(guest_ref, name, Some(4096))?;
                zeroes(guest_ref, name)?;
            }
        }
        Ok(())
    });
    report.check("protection information is generated and checked", |_| {
        protection::check(guest_ref, 3, "nvme0n3")
    });
    report.check("a deleted namespace does not exist any more", |_| {
        nvme(guest_ref, "delete-ns /dev/nvme0 -n 1")?;
        wait_for_disk(guest_ref, "nvme0n1", None)?;
        refused(guest_ref, "delete-ns /dev/nvme0 -n 1", &[INVALID_NAMESPACE])?;
        ensure!(allocated(guest_ref)? == 1, "list-ns --all");
        Ok(())
    });
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, 1));
    disk.check()?;
    finish(report, guest, disk);
    Ok(())
}

/// Number of allocated namespaces, attached or not.
fn allocated(guest: &mut Guest) -> Result<usize> {
    let list = json(guest, "list-ns /dev/nvme0 --all")?;
    let all = list.get("nsid_list").and_then(Value::as_array);
    Ok(all.map_or(0, Vec::len))
}

/// Waits until the guest has this disk with the given block size, or (`None`) no longer has it.
fn wait_for_disk(guest: &mut Guest, name: &str, block_size: Option<u32>) -> Result<()> {
    let wanted = match block_size {
        Some(bytes) => format!("[ \"$(blockdev --getss /dev/{name} 2>/dev/null)\" = {bytes} ]"),
        None => format!("[ ! -b /dev/{name} ]"),
    };
    let script = format!(
        "for try in $(seq 600); do {wanted} && exit 0; sleep 0.1; done; nvme list; ls /dev; exit 1"
    );
    guest.sh(&script, LIMIT).map(drop)
}

fn zeroes(guest: &mut Guest, name: &str) -> Result<()> {
    let script = format!("cmp -n 4194304 /dev/zero /dev/{name}");
    guest.sh(&format!("echo 3 >/proc/sys/vm/drop_caches; {script}"), LIMIT).map(drop)
}

/// Waits for the end of a sanitize operation.
fn sanitized(guest: &mut Guest) -> Result<()> {
    let deadline = wait::deadline();
    while Instant::now() < deadline {
        let log = nvme(guest, "sanitize-log /dev/nvme0 -o json")?;
        // The layout of the JSON depends on the version of nvme-cli. But every version prints the
        // progress, which is 65535 at the end.
        if log.contains("65535") {
            return Ok(());
        }
        wait::pause();
    }
    bail!("it does not end: {}", nvme(guest, "sanitize-log /dev/nvme0")?)
}
