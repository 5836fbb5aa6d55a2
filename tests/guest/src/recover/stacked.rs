//! A controller inside the guest, on a namespace of a second controller. Shadowbell's driver uses
//! the second controller through VFIO. The client of the first controller is the driver too, over
//! vfio-user. The client's memory is mapped into the IOMMU for the second controller.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shadowbell_guest::Guest;

use super::controllers::Which;
use super::verify::{number, verify};
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const SOCKET: &str = "/tmp/vm0.sock";
const STATISTICS: &str = "/tmp/serve.json";

pub(crate) fn run(report: &mut Report, guest: &mut Guest) {
    for which in [Which::Shadowbell, Which::Qemu] {
        let name = which.name();
        report.check(
            &format!("{name}, served again in the guest: verified, with zero copy"),
            |_| {
                let disk = stacked(guest, &which.target())?;
                let (there, copied) =
                    (number(&disk, "/commands_in_place")?, number(&disk, "/commands_copied")?);
                println!("         {there} commands in the client's memory, {copied} copied");
                ensure!(there > 1000 && copied == 0, "{disk}");
                ensure!(number(&disk, "/resets")? == 0, "{disk}");
                Ok(())
            },
        );
    }
    report.check(
        "after a client was killed with commands in flight, the next client's disk is intact",
        |_| {
            let disk = stacked_after_a_crash(guest, &Which::Shadowbell.target())?;
            ensure!(number(&disk, "/commands_copied")? == 0, "{disk}");
            Ok(())
        },
    );
    report.check("with zero-copy=off data are copied, and counted as copied", |_| {
        let disk = stacked(guest, &format!("{}/1?zero-copy=off", Which::Shadowbell.target()))?;
        ensure!(number(&disk, "/commands_in_place")? == 0, "{disk}");
        ensure!(number(&disk, "/commands_copied")? > 1000, "{disk}");
        Ok(())
    });
    report.check("data written through the stacked controller are on the controller below", |_| {
        below(guest)
    });
}

/// Serves `disk`, verifies it, and ends the server. Returns the counters of the disk.
fn stacked(guest: &mut Guest, disk: &str) -> Result<Value> {
    start(guest, disk)?;
    served(guest)
}

/// Serves `disk`, kills three clients with commands in flight, one after the other, and then
/// verifies as [`stacked`] does. The server must release the memory of a dead client only after all
/// DMA to it has ended.
fn stacked_after_a_crash(guest: &mut Guest, disk: &str) -> Result<Value> {
    start(guest, disk)?;
    let load = "--iodepth 128 --size 32m --max-bs 128k --runtime 60";
    for _ in 0..3 {
        guest.sh(
            &format!(
                "shadowbell verify --force vfio-user:{SOCKET} {load} >/tmp/client 2>&1 & \
                 client=$!; \
                 for i in $(seq 600); do grep -q 'queue pair' /tmp/client && break; sleep 0.1; done; \
                 sleep 0.4; kill -KILL $client || {{ cat /tmp/client; exit 1; }}"
            ),
            LIMIT,
        )?;
    }
    served(guest)
}

/// Verifies the served disk, and ends the server. Returns the counters of the disk.
fn served(guest: &mut Guest) -> Result<Value> {
    let load = "--iodepth 64 --numjobs 2 --size 32m --max-bs 128k --runtime 3";
    let verified = verify(guest, &format!("vfio-user:{SOCKET} {load}"));
    let statistics = stop(guest)?;
    let (row, code) = verified?;
    ensure!(code == 0 && number(&row, "/verify_errors")? == 0, "it ended with {code}: {row}");
    ensure!(number(&row, "/verified_blocks")? > 10_000, "{row}");
    ensure!(number(&row, "/recovery/late")? == 0, "{row}");
    let disk = statistics.pointer("/controllers/0/disks/0").context("no counters of a disk")?;
    Ok(disk.clone())
}

fn start(guest: &mut Guest, disk: &str) -> Result<()> {
    guest.sh(
        &format!(
            "shadowbell serve '{disk}' --socket {SOCKET} \
                >/tmp/served 2>&1 & echo $! >/tmp/served.pid; \
             for i in $(seq 600); do \
                [ -S {SOCKET} ] && exit 0; \
                [ -d /proc/$(cat /tmp/served.pid) ] || break; sleep 0.1; \
             done; cat /tmp/served; exit 1"
        ),
        LIMIT,
    )?;
    Ok(())
}

/// Ends the server in order. Returns its statistics.
fn stop(guest: &mut Guest) -> Result<Value> {
    let text = guest.sh(
        &format!(
            "shadowbell ctl -s {SOCKET} stats --json >{STATISTICS} || exit 1; \
             kill -TERM $(cat /tmp/served.pid); \
             for i in $(seq 600); do \
                [ -d /proc/$(cat /tmp/served.pid) ] || break; sleep 0.1; \
             done; \
             if [ -d /proc/$(cat /tmp/served.pid) ] || ! grep -q ended /tmp/served || \
                grep -qE 'ERROR|WARN|panicked' /tmp/served; then cat /tmp/served; exit 1; fi; \
             cat {STATISTICS}"
        ),
        LIMIT,
    )?;
    serde_json::from_str(&text).with_context(|| format!("the statistics: {text:.400}"))
}

fn below(guest: &mut Guest) -> Result<()> {
    let target = Which::Shadowbell.target();
    start(guest, &target)?;
    let written = guest.sh(
        &format!(
            "dd if=/dev/urandom of=/tmp/data bs=1M count=3 2>/dev/null && \
             head -c 777 /dev/urandom >>/tmp/data && \
             shadowbell write vfio-user:{SOCKET} --force --offset 1000001 -i /tmp/data"
        ),
        LIMIT,
    );
    stop(guest)?;
    written?;
    let length = 3 * (1 << 20) + 777;
    let read = format!("shadowbell read {target} --offset 1000001 --length {length} -o /tmp/back");
    guest.sh(&format!("{read} && cmp /tmp/data /tmp/back"), LIMIT)?;
    Ok(())
}
