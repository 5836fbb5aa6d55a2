//! A virtio disk whose backend uses Shadowbell's driver on the host: `shadowbell export
//! --vhost-user-blk` serves QEMU's `vhost-user-blk-pci`, and reads from a controller of another
//! process.
//!
//! The rows belong to the table `S2`, but are measured in a guest of their own, without an NVMe
//! controller.

use shadowbell_testing::wait;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::json;
use shadowbell_guest::process::{Process, describe};
use shadowbell_guest::{Guest, Kernel, RunDir, config};

use super::table::{PATTERNS, seconds};
use crate::setup::Setup;
use crate::vfio::{boot, load};
use shadowbell_bench::figures::count;
use shadowbell_bench::table::Table;
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

/// Kernel module of the guest's virtio driver.
pub(crate) const MODULE: &str = "virtio_blk";
const SIZE: u64 = 512 << 20;

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let shadowbell = setup.shadowbell.as_deref().context("this needs the shadowbell program")?;
    // Threads poll for a long time before they sleep, as in the measurements of `table`.
    let look = ["--poll-max", "1000"];
    let disk = setup.serve(run, "behind", &[format!("mem:{SIZE}")], &look, None)?;
    let export = export(shadowbell, run, &look)?;
    let mut guest = boot(setup, run, kernel, Vec::new(), |config| {
        config.cpus = 1;
        config.more = device();
    })?;
    report.check("a virtio disk on the driver stores written data", |_| {
        load(&mut guest, &[MODULE])?;
        let size = guest.sh("cat /sys/block/vda/size", LIMIT)?;
        ensure!(size.trim() == (SIZE / 512).to_string(), "{size} sectors");
        guest.sh(
            "fio --name=verify --filename=/dev/vda --rw=randrw --bsrange=512-128k --blockalign=512 \
             --size=16m --iodepth=16 --fsync=32 --direct=1 --ioengine=libaio --verify=crc32c \
             --verify_fatal=1 --do_verify=1 --output-format=terse",
            LIMIT,
        )
    });
    let rows = report.check("sequential reads through vhost-user-blk", |_| {
        let mut rows = Vec::new();
        for (depth, bs, ios, _) in PATTERNS {
            let mut times = Vec::new();
            for _ in 0..setup.rounds.max(1) {
                times.push(time(&mut guest, depth, bs, ios)?);
            }
            times.sort_by(f64::total_cmp);
            rows.push((depth, bs, ios, *times.get(times.len() / 2).context("no rounds")?));
        }
        Ok(rows)
    });
    let mut table = Table::new("", &["iodepth", "bytes", "seconds", "IOPS"]);
    for (depth, bs, ios, seconds) in rows.unwrap_or_default() {
        let iops = ios as f64 / seconds.max(1e-9);
        let cells = vec![depth.to_string(), bs.to_string(), format!("{seconds:.3}"), count(iops)];
        let row = json!({
            "table": "S2", "device": "shadowbell", "controller": "shadowbell",
            "completion": "adaptive", "through": "vhost-user-blk", "doorbells": "shadow",
            "kernel": kernel.to_string(), "backing": "mem", "rw": "read", "iodepth": depth,
            "numjobs": 1, "bs": bs, "commands": ios, "seconds": seconds, "iops": iops,
            "bandwidth_bytes": iops * f64::from(bs),
        });
        table.push(cells, row);
    }
    report.table(table);
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    report.check("the export and the server end without an error", |_| {
        stop(export)?;
        disk.stop()
    });
    Ok(())
}

/// QEMU's arguments for the virtio disk.
fn device() -> Vec<String> {
    let path = format!("{}/vhost", config::SOCKETS);
    let words = [
        "-chardev".to_owned(),
        format!("socket,id=vhost,path={path}"),
        "-device".to_owned(),
        "vhost-user-blk-pci,chardev=vhost,num-queues=1,addr=12.0".to_owned(),
    ];
    words.to_vec()
}

/// Starts the export, and waits for its socket.
fn export(program: &Path, run: &RunDir, options: &[&str]) -> Result<Process> {
    let (socket, log) = (run.socket("vhost"), run.file("export.log"));
    let log_file = File::create(&log).with_context(|| log.display().to_string())?;
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program).arg("export");
    command.arg(format!("vfio-user:{}", run.socket("behind").display()));
    command.arg("--vhost-user-blk").arg(&socket).args(["--queues", "1"]).args(options);
    command.stdin(Stdio::null()).stdout(log_file.try_clone()?).stderr(log_file);
    let mut process = Process::spawn("shadowbell export", &mut command)?;
    let deadline = wait::deadline();
    while !socket.exists() {
        if process.ended()?.is_some() || Instant::now() > deadline {
            bail!("no socket: {}", std::fs::read_to_string(&log).unwrap_or_default());
        }
        wait::pause();
    }
    Ok(process)
}

fn stop(mut export: Process) -> Result<()> {
    export.signal(Signal::TERM)?;
    let status = export.wait(wait::LIMIT)?;
    ensure!(status.success(), "shadowbell export: {}", describe(status));
    Ok(())
}

/// Seconds that `ios` reads take.
fn time(guest: &mut Guest, depth: u32, bs: u32, ios: u64) -> Result<f64> {
    let command =
        format!("qemu-img bench -f raw -c {ios} -d {depth} -s {bs} -t none -i native -n /dev/vda");
    let text = guest.sh(&command, LIMIT)?;
    seconds(&text).with_context(|| format!("qemu-img bench: {text:.400}"))
}
