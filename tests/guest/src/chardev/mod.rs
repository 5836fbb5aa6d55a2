//! NVMe character devices (`/dev/ng0n1`) as disks of a server that runs inside the guest.
//!
//! The server passes the commands of its clients by io_uring to the kernel's NVMe driver, which
//! sends them to a controller outside of the guest: Shadowbell's or QEMU's.

mod tests;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shadowbell_bench::table::Table;
use shadowbell_guest::{Device, Drive, Guest, Kernel, RunDir, Serve, Server};

use super::readers::Export;
use super::recover::{number, verify};
use super::setup::{Setup, character_device};
use super::vfio::{boot, json_of, load, pack, shadowbell};
use super::{disk_types, dmesg};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const SIZE: u64 = 128 << 20;
const SOCKET: &str = "/tmp/vm0.sock";
/// Injected faults: some reads and writes end with Unrecovered Read Error or Internal Error.
const FAULTS: &str = "seed=7,status=0x281:queue=1:rate=1/40,status=0x281:queue=2:rate=1/40";
/// The kernel's ublk driver.
const UBLK: &str = "ublk_drv";
const LOAD: &str = "--iodepth 64 --numjobs 2 --size 32m --max-bs 512k";
/// Number of kills of the server process, and number of upgrades.
const EVENTS: usize = 3;

/// Controllers, in the order of their PCI addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    Ours,
    Large,
    Faulty,
    Metadata,
    Zoned,
    Qemu,
}

impl Which {
    const ALL: [Self; 6] =
        [Self::Ours, Self::Large, Self::Faulty, Self::Metadata, Self::Zoned, Self::Qemu];

    fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Large => "large-blocks",
            Self::Faulty => "faulty",
            Self::Metadata => "metadata",
            Self::Zoned => "zoned",
            Self::Qemu => "qemu",
        }
    }

    fn options(self) -> &'static str {
        match self {
            Self::Large => "?block-size=4096",
            Self::Metadata => "?metadata=8",
            Self::Zoned => "?zoned=16MiB",
            _ => "",
        }
    }

    /// Character device of the controller in the guest.
    fn device(self, guest: &mut Guest) -> Result<String> {
        let index = Self::ALL.iter().position(|which| *which == self).unwrap_or_default();
        character_device(guest, index)
    }
}

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    if setup.shadowbell.is_none() {
        println!("   skipped: needs the program (--shadowbell)");
        return Ok(());
    }
    on_devices(setup, report, kernel, run)?;
    tests::run(setup, report, kernel, run)
}

fn on_devices(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let faulty = setup.faulty()?;
    let has_ublk = !setup.roots.modules(kernel, &[UBLK]).is_empty();
    pack(setup, kernel, run, &[], &[UBLK])?;
    let (mut devices, mut servers) = (Vec::new(), Vec::new());
    for which in Which::ALL {
        let name = which.name();
        if which == Which::Qemu {
            let image = format!("{name}.img");
            run.image(&image, SIZE)?;
            devices.push(Device::QemuNvme { drive: Drive::Image(image), dbcs: true });
            continue;
        }
        let options = if which == Which::Faulty { &["--faults", FAULTS][..] } else { &[] };
        let disks = [format!("mem:{SIZE}{}", which.options())];
        let serve = Serve { binary: &faulty, name, disks: &disks, options, small: None };
        servers.push(Server::start(run, &serve)?);
        devices.push(Device::VfioUser { socket: name.into() });
    }
    // Multipath is off, because with it, two paths to a namespace have one character device. The
    // test needs one for each controller.
    let mut guest = boot(setup, run, kernel, devices, |config| {
        config.iommu = false;
        config.firmware =
            shadowbell_guest::Firmware::Direct { append: "nvme_core.multipath=0".into() };
    })?;
    for which in [Which::Ours, Which::Large, Which::Qemu] {
        let name = which.name();
        report.check(&format!("{name}: every byte verified, with the sandbox"), |_| {
            let device = which.device(&mut guest)?;
            start(&mut guest, &device)?;
            let verified = verify(&mut guest, &format!("vfio-user:{SOCKET} {LOAD} --runtime 4"));
            let log = stop(&mut guest)?;
            let (row, code) = verified?;
            ensure!(code == 0 && number(&row, "/verify_errors")? == 0, "{code}: {row}");
            for kind in ["read", "write", "flush", "write-zeroes", "compare"] {
                ensure!(number(&row, &format!("/by_kind/{kind}"))? > 0, "no {kind}: {row}");
            }
            println!("         {} commands", number(&row, "/commands")?);
            // If the kernel supports Landlock, the sandbox must be on, so the supervisor has opened
            // the device.
            ensure!(log.contains("sandbox on: "), "the sandbox is off: {log}");
            ensure!(!log.contains("uses threads"), "io_uring takes no commands: {log}");
            Ok(())
        });
        report.check(
            &format!("{name}: data written through the server are on the block device"),
            |_| same_bytes(&mut guest, which),
        );
    }
    report.check("aio=threads: every byte verified", |_| {
        let device = Which::Ours.device(&mut guest)?;
        start(&mut guest, &format!("{device}?aio=threads"))?;
        let verified = verify(&mut guest, &format!("vfio-user:{SOCKET} {LOAD} --runtime 3"));
        stop(&mut guest)?;
        let (row, code) = verified?;
        ensure!(code == 0 && number(&row, "/verify_errors")? == 0, "{code}: {row}");
        Ok(())
    });
    for is_kill in [true, false] {
        let what = if is_kill { "killed" } else { "upgraded" };
        report.check(&format!("the process is {what} {EVENTS} times: no data are lost"), |_| {
            while_it_verifies(&mut guest, is_kill)
        });
    }
    report.check("an error of the device is returned to the client with its status", |_| {
        let device = Which::Faulty.device(&mut guest)?;
        start(&mut guest, &device)?;
        let output =
            shadowbell(&mut guest, &format!("read vfio-user:{SOCKET} --length 64m -o /dev/null"));
        stop(&mut guest)?;
        let output = output?;
        ensure!(output.code != 0, "the error was not returned: {}", output.text);
        ensure!(output.text.contains("Unrecovered Read Error"), "{}", output.text);
        Ok(())
    });
    report.check("namespaces with metadata or zones, and controllers, are refused", |_| {
        let metadata = Which::Metadata.device(&mut guest)?;
        let zoned = Which::Zoned.device(&mut guest)?;
        let controller = Which::Ours.device(&mut guest)?.replace("/ng", "/nvme").replace("n1", "");
        for (device, why) in [
            (metadata, "8 bytes of metadata"),
            (zoned, "zoned namespace"),
            (controller, "a character device"),
        ] {
            let refused =
                guest.run(&format!("shadowbell serve {device} --socket /tmp/x"), LIMIT)?;
            ensure!(refused.code == 2 && refused.text.contains(why), "{device}: {}", refused.text);
        }
        Ok(())
    });
    report.check("memory disk: a file system, discards, and fio's checksums", |_| {
        let block = Which::Ours.device(&mut guest)?.replace("/ng", "/nvme");
        disk_types::file_system(&mut guest, &block)?;
        disk_types::discard(&mut guest, &block)?;
        let fio = disk_types::fio(&[block]).replace("--offset=512m", "--offset=64m");
        guest.sh(&format!("{fio} --size=12m"), LIMIT).map(drop)
    });
    if has_ublk {
        report.check("ublk's module is there", |_| load(&mut guest, &[UBLK]));
        for which in [Which::Ours, Which::Qemu] {
            let name = which.name();
            let what = "a file system, discards, and fio's checksums, by ublk";
            report.check(&format!("{name}: {what}"), |_| by_ublk(&mut guest, which));
        }
    } else {
        println!("   Debian's Linux {kernel} has no {UBLK}: no file system on an export");
    }
    report.check("a namespace whose block device is mounted is refused", |_| {
        let device = Which::Ours.device(&mut guest)?;
        let block = device.replace("/ng", "/nvme");
        guest.sh(&format!("mkfs.ext4 -q -F {block} && mount {block} /mnt"), LIMIT)?;
        let refused = guest.run(&format!("shadowbell serve {device} --socket /tmp/x"), LIMIT);
        guest.sh("umount /mnt", LIMIT)?;
        let refused = refused?;
        ensure!(refused.code != 0 && refused.text.contains("mounted"), "{}", refused.text);
        Ok(())
    });
    report.check("next to the block device", |report| {
        report.table(next_to_the_block_device(&mut guest, kernel, setup.rounds)?);
        Ok(())
    });
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, 1));
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    for server in servers {
        report.check("the server ends without an error", |_| server.stop());
    }
    Ok(())
}

fn start(guest: &mut Guest, disk: &str) -> Result<()> {
    guest.sh(
        &format!(
            "shadowbell serve '{disk}' --socket {SOCKET} >/tmp/served 2>&1 & \
             echo $! >/tmp/served.pid; \
             for i in $(seq 600); do \
                [ -S {SOCKET} ] && exit 0; \
                [ -d /proc/$(cat /tmp/served.pid) ] || break; sleep 0.1; \
             done; cat /tmp/served; exit 1"
        ),
        LIMIT,
    )?;
    Ok(())
}

/// Ends the server in order. Returns its log.
fn stop(guest: &mut Guest) -> Result<String> {
    guest.sh(
        "kill -TERM $(cat /tmp/served.pid); \
         for i in $(seq 600); do \
            [ -d /proc/$(cat /tmp/served.pid) ] || break; sleep 0.1; \
         done; cat /tmp/served; \
         if [ -d /proc/$(cat /tmp/served.pid) ] || grep -q panicked /tmp/served; then exit 1; fi",
        LIMIT,
    )
}

/// Writes through the server and reads through the kernel's block device, and vice versa. Discarded
/// and zeroed blocks must read as zeroes on the block device.
fn same_bytes(guest: &mut Guest, which: Which) -> Result<()> {
    let device = which.device(guest)?;
    let block = device.replace("/ng", "/nvme");
    start(guest, &device)?;
    let written = guest.sh(
        &format!(
            "dd if=/dev/urandom of=/tmp/data bs=1M count=5 2>/dev/null && \
             shadowbell write vfio-user:{SOCKET} --force --offset 4m -i /tmp/data && \
             echo 3 >/proc/sys/vm/drop_caches && \
             dd if={block} bs=1M skip=4 count=5 iflag=direct 2>/dev/null | cmp - /tmp/data && \
             dd if=/tmp/data of={block} bs=1M seek=20 count=5 oflag=direct 2>/dev/null && \
             shadowbell read vfio-user:{SOCKET} --offset 20m --length 5m -o /tmp/back && \
             cmp /tmp/data /tmp/back"
        ),
        LIMIT,
    );
    let log = stop(guest)?;
    written.with_context(|| log)?;
    Ok(())
}

/// A file system and fio on the ublk device of an exported namespace.
fn by_ublk(guest: &mut Guest, which: Which) -> Result<()> {
    let device = which.device(guest)?;
    let export = Export::start(guest, &device, "")?;
    let block = format!("/dev/{}", export.disk);
    disk_types::file_system(guest, &block)?;
    disk_types::discard(guest, &block)?;
    let fio = disk_types::fio(&[block]).replace("--offset=512m", "--offset=64m");
    guest.sh(&format!("{fio} --size=12m"), LIMIT)?;
    export.stop(guest)
}

/// Several clients verify their data while the server process is replaced repeatedly.
fn while_it_verifies(guest: &mut Guest, is_kill: bool) -> Result<()> {
    let device = Which::Ours.device(guest)?;
    start(guest, &device)?;
    guest.sh(
        &format!(
            "rm -f /tmp/code; (shadowbell verify vfio-user:{SOCKET} {LOAD} --runtime 25 --force \
             --timeout 40 >/tmp/verified 2>&1; echo $? >/tmp/code) </dev/null >/dev/null 2>&1 &"
        ),
        LIMIT,
    )?;
    let worker = "supervisor=$(cat /tmp/served.pid); children() { \
                      for process in /proc/[0-9]*; do \
                          grep -q \"^PPid:[[:space:]]*$supervisor$\" $process/status 2>/dev/null && \
                          basename $process; \
                      done; }; \
                  worker() { children | tail -n 1; }";
    for _ in 0..EVENTS {
        // Time for which each server process serves the load.
        std::thread::sleep(Duration::from_secs(4));
        let event = if is_kill {
            "before=$(worker); kill -KILL $before && for i in $(seq 600); do \
                 now=$(worker); [ -n \"$now\" ] && [ $now != $before ] && exit 0; sleep 0.1; \
             done; cat /tmp/served; exit 1"
                .to_owned()
        } else {
            "shadowbell upgrade $supervisor || { cat /tmp/served; exit 1; }".to_owned()
        };
        guest.sh(&format!("{worker}; [ -e /tmp/code ] && exit 9; {event}"), LIMIT)?;
    }
    let code = guest.sh(
        "for i in $(seq 900); do [ -e /tmp/code ] && break; sleep 0.1; done; cat /tmp/code",
        LIMIT,
    )?;
    let log = stop(guest)?;
    let verified = guest.sh("cat /tmp/verified", LIMIT)?;
    ensure!(code.trim() == "0", "it ended with {code}: {verified}\n{log}");
    Ok(())
}

/// Measures the same load on the character device and on the block device of a namespace,
/// alternately.
fn next_to_the_block_device(guest: &mut Guest, kernel: Kernel, rounds: usize) -> Result<Table> {
    let device = Which::Ours.device(guest)?;
    let disks = [device.clone(), device.replace("/ng", "/nvme")];
    let mut rates = vec![(Vec::new(), Vec::new()); disks.len()];
    for _ in 0..rounds.max(1) {
        for (disk, (reads, writes)) in disks.iter().zip(&mut rates) {
            start(guest, disk)?;
            let measured = measure(guest, "randread")
                .and_then(|read| Ok((read, measure(guest, "randwrite")?)));
            stop(guest)?;
            let (read, write) = measured?;
            reads.push(read);
            writes.push(write);
        }
    }
    let mut table = Table::new("", &["disk", "4 KiB random reads a second", "writes"]);
    for (disk, (reads, writes)) in disks.iter().zip(rates) {
        let (reads, writes) = (median(reads), median(writes));
        table.push(
            vec![disk.clone(), format!("{reads:.0}"), format!("{writes:.0}")],
            json!({"table": "chardev", "disk": disk, "kernel": kernel.to_string(),
                   "read_iops": reads, "write_iops": writes}),
        );
    }
    Ok(table)
}

fn measure(guest: &mut Guest, rw: &str) -> Result<f64> {
    let load = format!("bench vfio-user:{SOCKET} --rw {rw} --iodepth 32 --runtime 2 --force");
    let json = json_of(guest, &load)?;
    let row = json.pointer("/rows/0").context("no row")?;
    row.get("iops").and_then(Value::as_f64).with_context(|| row.to_string())
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or_default()
}
