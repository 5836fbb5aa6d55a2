//! Savings by shadow doorbells. Shadowbell's controller and QEMU's own, each with and without
//! shadow doorbells, are four disks of one guest and are measured in turn (rows of the table `S3`).
//!
//! The disks have no backing store: Shadowbell's is `null:`, and QEMU's uses the block driver
//! `null-co`. So the figures are the cost of the command path. IOPS are the median of several
//! rounds. Doorbells and interrupts are counted at the device in a separate run, because QEMU's
//! trace makes each of them slower. The counts are divided by the number of I/Os that fio has
//! completed.
//!
//! A second table has the host CPU time of an I/O on a file: see `cpu`.

mod cpu;
mod usage;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shadowbell_guest::trace::Stretch;
use shadowbell_guest::{Device, Drive, Guest, Kernel, RunDir, Server};

use crate::dmesg;
use crate::fio::{BLOCK, Measured, random_reads};
use crate::setup::{ControllerKind, Setup, names};
use shadowbell_bench::figures::count as short;
use shadowbell_bench::table::Table;
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

const DEPTHS: [u32; 5] = [1, 2, 4, 8, 32];
// Duration of a measurement. It is not a time limit.
const TIME: Duration = Duration::from_millis(1500);
const DISK_BYTES: u64 = 1 << 40;
/// Maximum poll time of the server, in microseconds.
const POLL_MAX: &str = "1000";

/// A disk that is compared.
struct Contestant {
    device: &'static str,
    doorbells: &'static str,
    server: Option<Server>,
    /// Name of the block device in the guest.
    dev: String,
}

/// Figures of one disk at one queue depth.
struct Row {
    device: &'static str,
    doorbells: &'static str,
    depth: u32,
    fio: Measured,
    commands: u64,
    doorbell_writes: u64,
    interrupts: u64,
}

impl Row {
    fn per_io(&self, count: u64) -> f64 {
        count as f64 / (self.commands.max(1)) as f64
    }

    fn mmio_per_io(&self) -> f64 {
        self.per_io(self.doorbell_writes)
    }

    fn json(&self, kernel: Kernel) -> Value {
        let [mean, p50, p99, p999] = self.fio.latency;
        json!({
            "table": "S3",
            "device": self.device,
            "doorbells": self.doorbells,
            "kernel": kernel.to_string(),
            "backing": "null",
            "iodepth": self.depth,
            "numjobs": 1,
            "bs": BLOCK,
            "iops": self.fio.iops,
            "bandwidth_bytes": self.fio.bandwidth,
            "latency_ns": { "mean": mean, "p50": p50, "p99": p99, "p999": p999 },
            "commands": self.commands,
            "doorbell_mmio_writes": self.doorbell_writes,
            "mmio_per_io": self.mmio_per_io(),
            "interrupts_per_io": self.per_io(self.interrupts),
        })
    }
}

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let mut contestants = Vec::new();
    let mut devices = Vec::new();
    let mut add = |device, doorbells, server, of_guest| {
        contestants.push(Contestant { device, doorbells, server, dev: String::new() });
        devices.push(of_guest);
    };
    if setup.controller == ControllerKind::Shadowbell {
        // An I/O takes about ten times as long in the emulated guest as in a real one, so the
        // maximum poll time of the I/O threads is ten times the default.
        let shadow = &["--poll-max", POLL_MAX][..];
        let mmio = &["--poll-max", POLL_MAX, "--no-shadow-doorbells"][..];
        for (doorbells, options) in [("shadow", shadow), ("mmio", mmio)] {
            let disks = [format!("null:{DISK_BYTES}")];
            let disk = setup.serve(run, doorbells, &disks, options, None)?;
            add("shadowbell", doorbells, disk.server, disk.device);
        }
    }
    for (doorbells, dbcs) in [("shadow", true), ("mmio", false)] {
        let drive = Drive::Null(DISK_BYTES);
        add("qemu", doorbells, None, Device::QemuNvme { drive, dbcs });
    }
    // The guest has one CPU, so the other CPU of the machine is free for the device.
    let mut guest = setup.boot(run, kernel, devices, |config| config.cpus = 1)?;
    for (index, contestant) in contestants.iter_mut().enumerate() {
        contestant.dev = names(&mut guest, index)?.1;
        guest.sh(&format!("echo none >/sys/block/{}/queue/scheduler", contestant.dev), LIMIT)?;
    }
    let rows = report
        .check("random reads of 4 KiB at every depth, on every disk in turn", |_| {
            measure(&mut guest, &mut contestants, setup.rounds)
        })
        .context("no figures")?;
    report.table(table(&rows, kernel));
    compare(report, &rows);
    let count = contestants.len();
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, count));
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    for server in contestants.into_iter().filter_map(|contestant| contestant.server) {
        report.check("the server ends without an error", |_| server.stop());
    }
    if setup.controller == ControllerKind::Shadowbell && setup.rounds > 0 {
        cpu::run(setup, report, kernel, run)?;
    }
    Ok(())
}

/// Measures the disks. Without rounds, speeds are not wanted, and only the counts that [`compare`]
/// checks are taken.
fn measure(guest: &mut Guest, contestants: &mut [Contestant], rounds: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let is_wanted = |contestant: &Contestant| rounds > 0 || contestant.doorbells == "shadow";
    let mut contestants: Vec<_> = contestants.iter_mut().filter(|one| is_wanted(one)).collect();
    for depth in DEPTHS {
        // The disks are measured in turn, so that other load of this machine affects all of them.
        let mut runs: Vec<Vec<Measured>> = contestants.iter().map(|_| Vec::new()).collect();
        for _ in 0..rounds {
            for (contestant, measured) in contestants.iter().zip(&mut runs) {
                measured.push(random_reads(guest, &contestant.dev, depth, TIME)?);
            }
        }
        for (contestant, measured) in contestants.iter_mut().zip(runs) {
            let Counted { fio, doorbell_writes, interrupts } = count(guest, contestant, depth)?;
            let commands = fio.total;
            rows.push(Row {
                device: contestant.device,
                doorbells: contestant.doorbells,
                depth,
                // With zero rounds, every run has QEMU's trace, so the speed comes from the run
                // that counts doorbells.
                fio: median(measured).unwrap_or(fio),
                commands,
                doorbell_writes,
                interrupts,
            });
        }
    }
    Ok(rows)
}

/// Counts of one run.
struct Counted {
    fio: Measured,
    /// Number of trapped doorbell writes.
    doorbell_writes: u64,
    interrupts: u64,
}

/// Runs random reads, and counts trapped doorbell writes and interrupts.
fn count(guest: &mut Guest, contestant: &mut Contestant, depth: u32) -> Result<Counted> {
    let Some(server) = &mut contestant.server else {
        let stretch = Stretch::begin(guest)?;
        let measured = random_reads(guest, &contestant.dev, depth, TIME);
        let counts = stretch.end(guest)?;
        let doorbell_writes = counts.sq_doorbells + counts.cq_doorbells;
        return Ok(Counted { fio: measured?, doorbell_writes, interrupts: counts.interrupts });
    };
    let before = server.stats()?;
    let fio = random_reads(guest, &contestant.dev, depth, TIME)?;
    let after = server.stats()?;
    let grown = |name: &str| {
        let of = |stats: &Value| stats.get(name).and_then(Value::as_u64).context(name.to_owned());
        Ok::<u64, anyhow::Error>(of(&after)?.saturating_sub(of(&before)?))
    };
    let (commands, total) = (grown("commands")?, fio.total);
    // The kernel may read a little of the disk besides fio, so the number of commands may be
    // slightly higher than fio's number of I/Os.
    let close = commands >= total && commands <= total + total / 50 + 20;
    ensure!(close, "the server counted {commands} commands where fio did {total} I/Os");
    let (doorbell_writes, interrupts) = (grown("doorbell_mmio_writes")?, grown("interrupts")?);
    Ok(Counted { fio, doorbell_writes, interrupts })
}

/// The run of median speed.
fn median(mut runs: Vec<Measured>) -> Option<Measured> {
    runs.sort_by(|a, b| a.iops.total_cmp(&b.iops));
    let middle = runs.len() / 2;
    runs.into_iter().nth(middle)
}

/// Checks the targets of the table.
fn compare(report: &mut Report, rows: &[Row]) {
    let find = |device: &str, depth: u32| {
        rows.iter()
            .find(|row| (row.device, row.doorbells, row.depth) == (device, "shadow", depth))
            .with_context(|| format!("no row of {device} at {depth}"))
    };
    if find("shadowbell", 1).is_err() {
        return;
    }
    report.check("fewer doorbells per I/O than QEMU with dbcs=on, at each queue depth", |_| {
        for depth in DEPTHS {
            let (shadowbell, qemu) =
                (find("shadowbell", depth)?.mmio_per_io(), find("qemu", depth)?.mmio_per_io());
            ensure!(shadowbell < qemu, "iodepth {depth}: {shadowbell:.3}, QEMU's {qemu:.3}");
        }
        Ok(())
    });
    // Speeds are printed and not checked, because they depend on other load of this machine.
    for depth in DEPTHS {
        if let (Ok(shadowbell), Ok(qemu)) = (find("shadowbell", depth), find("qemu", depth)) {
            println!(
                "   iodepth {depth}: {:.2} times the IOPS of QEMU with dbcs=on",
                shadowbell.fio.iops / qemu.fio.iops
            );
        }
    }
}

fn table(rows: &[Row], kernel: Kernel) -> Table {
    let head = ["iodepth", "device", "doorbells", "IOPS", "MMIO/IO", "interrupts/IO", "p50 us"];
    let mut table = Table::new("", &head);
    for row in rows {
        let cells = vec![
            row.depth.to_string(),
            row.device.to_owned(),
            row.doorbells.to_owned(),
            short(row.fio.iops),
            format!("{:.3}", row.mmio_per_io()),
            format!("{:.3}", row.per_io(row.interrupts)),
            format!("{:.0}", row.fio.latency[1] / 1000.0),
        ];
        table.push(cells, row.json(kernel));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(iops: f64) -> Measured {
        Measured { iops, bandwidth: iops * 4096.0, total: 100, latency: [1.0, 2.0, 3.0, 4.0] }
    }

    #[test]
    fn the_median_is_in_the_middle() {
        let runs = [3.0, 1.0, 2.0].map(measured).to_vec();
        assert!((median(runs).unwrap().iops - 2.0).abs() < f64::EPSILON);
        assert_eq!(median(Vec::new()), None);
    }

    fn row(device: &'static str, depth: u32, iops: f64, doorbell_writes: u64) -> Row {
        let fio = measured(iops);
        Row {
            device,
            doorbells: "shadow",
            depth,
            fio,
            commands: 100,
            doorbell_writes,
            interrupts: 9,
        }
    }

    #[test]
    fn rows_have_the_agreed_names() {
        let json = row("qemu", 8, 50.0, 46).json(Kernel::V7_2);
        assert_eq!(json["mmio_per_io"], 0.46);
        assert_eq!(json["interrupts_per_io"], 0.09);
        assert_eq!((&json["iodepth"], &json["bs"]), (&json!(8), &json!(4096)));
        assert_eq!(json["latency_ns"]["p999"], 4.0);
    }

    #[test]
    fn a_missed_target_fails() {
        let rows = |iops: f64, doorbells: u64| {
            DEPTHS
                .iter()
                .flat_map(|&depth| {
                    [row("qemu", depth, 100.0, 50), row("shadowbell", depth, iops, doorbells)]
                })
                .collect::<Vec<_>>()
        };
        for (iops, doorbells, failed) in [(200.0, 0, 0), (90.0, 0, 0), (200.0, 50, 1)] {
            let mut report = Report::default();
            compare(&mut report, &rows(iops, doorbells));
            assert_eq!(report.failed(), failed);
        }
    }
}
