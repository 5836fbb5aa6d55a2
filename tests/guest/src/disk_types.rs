//! Disk types other than files, all in one Linux guest: a qcow2 image, an export of qemu-nbd, and a
//! namespace of another server. If `SHADOWBELL_CEPH_CONF` names a Ceph cluster (`cargo xtask ceph
//! --guest` sets it), an RBD image as well. The suite runs file systems, discards and fio with
//! checksums, and then kills and upgrades the server process while fio runs.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shadowbell_guest::{Guest, Kernel, RunDir};

use super::dmesg;
use super::exporter::Exporter;
use super::replacement::{kill_worker, upgrade_worker};
use super::setup::{Setup, finish, names};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const SIZE: u64 = 1 << 30;
/// Disk type of each disk of the server, and its namespace identifier.
const KINDS: [(&str, u32); 4] = [("qcow2", 1), ("nbd", 2), ("vfio-user", 3), ("rbd", 4)];
/// Number of kills, and number of upgrades.
const EVENTS: u32 = 3;

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let Some(program) = setup.shadowbell.clone() else {
        println!("   QEMU's own controller has QEMU's own disks");
        return Ok(());
    };
    let (qcow2, socket) = (run.file("disk.qcow2"), run.socket("nbd"));
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]).arg(&qcow2).arg(SIZE.to_string());
    ensure!(create.status()?.success(), "qemu-img makes no image");
    let exporter = Exporter::start(&run.image("exported.img", SIZE)?, &socket)?;
    let image = run.image("below.img", SIZE)?.display().to_string();
    let mut below = setup.serve(run, "below", &[image], &[], None)?;
    let mut disks = vec![
        qcow2.display().to_string(),
        format!("nbd+unix:///?socket={}&settle=100ms", socket.display()),
        format!("vfio-user:{}/1", run.socket("below").display()),
    ];
    disks.extend(ceph()?);
    let kinds = &KINDS[..disks.len()];
    let mut disk = setup.serve(run, "dut", &disks, &[], None)?;
    let server = disk.server.as_ref().context("no server")?.id();
    let mut guest = setup.boot(run, kernel, vec![disk.device.clone()], |_| {})?;
    let (controller, _) = names(&mut guest, 0)?;
    let device = |nsid: u32| format!("/dev/{controller}n{nsid}");

    for (kind, nsid) in kinds {
        let dev = device(*nsid);
        report
            .check(&format!("{kind}: a file system is made, filled, checked and trimmed"), |_| {
                file_system(&mut guest, &dev)
            });
        report.check(&format!("{kind}: discarded blocks read as zeroes"), |_| {
            discard(&mut guest, &dev)
        });
    }
    let all: Vec<_> = kinds.iter().map(|(_, nsid)| device(*nsid)).collect();
    report.check("fio writes and verifies, all at once", |_| {
        guest.sh(&format!("{} --size=6m", fio(&all)), LIMIT)
    });
    for (what, is_kill) in [("killed", true), ("upgraded", false)] {
        report.check(&format!("the process is {what} {EVENTS} times under fio"), |_| {
            let load = format!(
                "{} --size=6m --time_based --runtime=20 >/tmp/fio.log 2>&1; echo $? >/tmp/fio.code",
                fio(&all)
            );
            guest.sh(
                &format!("rm -f /tmp/fio.code; ({load}) </dev/null >/dev/null 2>&1 &"),
                LIMIT,
            )?;
            for _ in 0..EVENTS {
                // Time for which each server process serves before it is killed or upgraded.
                std::thread::sleep(Duration::from_millis(1500));
                if is_kill { kill_worker(server)? } else { upgrade_worker(&program, server)? }
            }
            let code = guest.sh(
                "[ -e /tmp/fio.code ] && echo early; for i in $(seq 900); do \
                 [ -e /tmp/fio.code ] && break; sleep 0.1; done; cat /tmp/fio.code",
                LIMIT,
            )?;
            ensure!(code.trim() == "0", "fio: {code} {}", guest.sh("cat /tmp/fio.log", LIMIT)?);
            Ok(())
        });
    }
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, 1));
    report.check("the servers are running", |_| disk.check().and_then(|()| below.check()));
    finish(report, guest, disk);
    report.check("the server below ends without an error", |_| below.stop());
    drop(exporter);
    report.check("qemu-img check finds no corruption in the qcow2 image", |_| {
        let status =
            Command::new("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(&qcow2).status()?;
        // A kill may leave leaked qcow2 clusters, for which `qemu-img check` has exit status 3.
        ensure!(matches!(status.code(), Some(0 | 3)), "qemu-img check: {status}");
        Ok(())
    });
    Ok(())
}

/// Creates an image in the Ceph cluster, if a cluster is configured. Returns its disk string.
fn ceph() -> Result<Option<String>> {
    let Some(conf) = std::env::var_os("SHADOWBELL_CEPH_CONF") else { return Ok(None) };
    // Number of the next image: each guest gets a new image.
    static IMAGES: AtomicU32 = AtomicU32::new(0);
    let name = format!("guest-{}", IMAGES.fetch_add(1, Ordering::Relaxed));
    let mut rbd = Command::new("rbd");
    rbd.arg("-c").arg(&conf).args(["create", &name, "--size", &format!("{}M", SIZE >> 20)]);
    ensure!(rbd.status().context("rbd")?.success(), "rbd makes no image");
    Ok(Some(format!("rbd:rbd/{name}?conf={}", conf.to_string_lossy())))
}

pub(super) fn file_system(guest: &mut Guest, dev: &str) -> Result<()> {
    guest.sh(
        &format!(
            "mkfs.ext4 -q -F {dev} && mount {dev} /mnt && cp -a /usr/bin /mnt/ && umount /mnt && \
             echo 3 >/proc/sys/vm/drop_caches && e2fsck -fn {dev} && mount {dev} /mnt && \
             diff -r /usr/bin /mnt/bin && rm -r /mnt/bin && sync && fstrim /mnt && umount /mnt && \
             e2fsck -fn {dev}"
        ),
        LIMIT,
    )
    .map(drop)
}

pub(super) fn discard(guest: &mut Guest, dev: &str) -> Result<()> {
    guest
        .sh(
            &format!(
                "yes shadowbell | dd of={dev} bs=1M count=32 iflag=fullblock oflag=direct && \
             blkdiscard -f {dev} && dd if={dev} bs=1M count=64 iflag=direct | \
             cmp -n 67108864 - /dev/zero"
            ),
            LIMIT,
        )
        .map(drop)
}

/// fio job that writes and verifies on each of these devices.
pub(super) fn fio(devices: &[String]) -> String {
    let mut line = "fio --rw=randwrite --bsrange=512-64k --blockalign=512 --verify=crc32c \
                    --verify_fatal=1 --verify_backlog=64 --offset=512m --iodepth=16 --direct=1 \
                    --ioengine=libaio --output-format=terse"
        .to_owned();
    for (nth, device) in devices.iter().enumerate() {
        line += &format!(" --name=disk{nth} --filename={device}");
    }
    line
}
