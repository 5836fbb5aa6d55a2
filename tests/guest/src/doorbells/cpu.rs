//! Host CPU time per I/O on a file: of QEMU with its guest, and of the server if there is one.
//!
//! Shadowbell over vfio-user is compared with QEMU's own controller; both use shadow doorbells.
//! Each has its own image, opened with O_DIRECT and io_uring. Both are disks of one guest, and are
//! measured alternately.
//!
//! The measurement is repeated with all processes on one CPU. Then a wakeup does not have to wake a
//! halted CPU. Under some hypervisors, waking a halted CPU is the largest part of a wakeup's cost.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use shadowbell_guest::{Device, Drive, Guest, Kernel, RunDir, Server};

use super::usage::{Usage, pin_to_last_cpu};
use crate::comparison::Comparison;
use crate::fio::{BLOCK, Measured, random_reads};
use crate::setup::{Setup, names};
use shadowbell_bench::figures::count;
use shadowbell_bench::table::Table;
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

// Duration of a measurement. It is not a time limit.
const TIME: Duration = Duration::from_millis(2000);
/// Duration of the short run. The CPU time of this run is mostly for the start and the end of fio:
/// together they take almost a second in this guest. It is subtracted from the CPU time of the long
/// run.
const SHORT_RUN: Duration = Duration::from_millis(200);
const MIB: u64 = 128;
/// Number of attempts to measure one turn.
const TRIES: usize = 3;

struct Contestant {
    device: &'static str,
    server: Option<Server>,
    /// Name of the block device in the guest.
    dev: String,
}

impl Contestant {
    fn server(&self) -> Option<u32> {
        self.server.as_ref().map(Server::id)
    }
}

/// CPU time and sleeps of one process per I/O.
#[derive(Clone, Copy, Debug, PartialEq)]
struct CostPerIo {
    micros: f64,
    sleeps: f64,
}

/// Result of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cost {
    iops: f64,
    qemu: CostPerIo,
    server: CostPerIo,
}

impl Cost {
    fn both(&self) -> f64 {
        self.qemu.micros + self.server.micros
    }
}

/// CPUs that QEMU and the server may use.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CpuPlacement {
    Anywhere,
    OneProcessor,
}

impl CpuPlacement {
    fn depths(self) -> &'static [u32] {
        match self {
            Self::Anywhere => &[1, 32],
            Self::OneProcessor => &[1],
        }
    }

    fn table(self) -> &'static str {
        match self {
            Self::Anywhere => "S3",
            Self::OneProcessor => "S3, one processor",
        }
    }

    fn description(self) -> &'static str {
        match self {
            Self::Anywhere => "",
            Self::OneProcessor => ", all on one processor",
        }
    }
}

struct Row {
    device: &'static str,
    depth: u32,
    turns: Vec<Cost>,
}

impl Row {
    /// Cost of the turn that has the median of the total CPU time.
    fn median(&self) -> Result<Cost> {
        let mut turns = self.turns.clone();
        turns.sort_by(|a, b| a.both().total_cmp(&b.both()));
        turns.get(turns.len() / 2).copied().context("no turns")
    }

    fn json(&self, kernel: Kernel, placement: CpuPlacement) -> Result<Value> {
        let cost = self.median()?;
        Ok(json!({
            "table": placement.table(),
            "device": self.device,
            "doorbells": "shadow",
            "kernel": kernel.to_string(),
            "backing": "file",
            "rw": "randread",
            "iodepth": self.depth,
            "numjobs": 1,
            "bs": BLOCK,
            "iops": cost.iops,
            "host_cpu_ns_per_io": cost.both() * 1000.0,
            "qemu_cpu_ns_per_io": cost.qemu.micros * 1000.0,
            "server_cpu_ns_per_io": cost.server.micros * 1000.0,
            "qemu_sleeps_per_io": cost.qemu.sleeps,
            "server_sleeps_per_io": cost.server.sleeps,
        }))
    }
}

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let images = ["shadowbell.img", "qemu.img"].map(|name| run.file(name));
    for image in &images {
        fill(image)?;
    }
    let disks = [format!("{}?direct=on", images[0].display())];
    let shadowbell = setup.serve(run, "file", &disks, &["--no-supervisor"], None)?;
    let qemu = Device::QemuNvme { drive: Drive::Direct("qemu.img".into()), dbcs: true };
    let devices = vec![shadowbell.device, qemu];
    let mut guest = setup.boot(run, kernel, devices, |config| config.cpus = 1)?;
    let of = |device, server| Contestant { device, server, dev: String::new() };
    let mut contestants = [of("shadowbell", shadowbell.server), of("qemu", None)];
    for (index, contestant) in contestants.iter_mut().enumerate() {
        contestant.dev = names(&mut guest, index)?.1;
        let scheduler = format!("echo none >/sys/block/{}/queue/scheduler", contestant.dev);
        guest.sh(&scheduler, LIMIT)?;
    }
    for placement in [CpuPlacement::Anywhere, CpuPlacement::OneProcessor] {
        let of = "processor time of random reads of 4 KiB from a file, in turn";
        let rows = report.check(&format!("{of}{}", placement.description()), |_| {
            if placement == CpuPlacement::OneProcessor {
                pin_to_last_cpu(guest.id())?;
                contestants.iter().filter_map(Contestant::server).try_for_each(pin_to_last_cpu)?;
            }
            measure(&mut guest, &contestants, placement.depths(), 2 * setup.rounds + 1)
        });
        if let Some(rows) = rows {
            report.table(table(&rows, kernel, placement)?);
        }
    }
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    for server in contestants.into_iter().filter_map(|contestant| contestant.server) {
        report.check("the server ends without an error", |_| server.stop());
    }
    Ok(())
}

/// Makes an image whose blocks are all allocated.
fn fill(path: &Path) -> Result<()> {
    let context = || path.display().to_string();
    let mut file = File::create(path).with_context(context)?;
    let mut block = vec![0; 1 << 20];
    for n in 0..MIB {
        block.iter_mut().zip(0u64..).for_each(|(byte, at)| *byte = ((at * 31 + n) >> 3) as u8);
        file.write_all(&block).with_context(context)?;
    }
    file.sync_all().with_context(context)
}

fn measure(
    guest: &mut Guest,
    contestants: &[Contestant],
    depths: &[u32],
    turns: usize,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &depth in depths {
        let mut costs: Vec<Vec<Cost>> = contestants.iter().map(|_| Vec::new()).collect();
        for _ in 0..turns {
            for (contestant, costs) in contestants.iter().zip(&mut costs) {
                costs.push(cost(guest, contestant, depth)?);
            }
        }
        rows.extend(contestants.iter().zip(costs).map(|(contestant, turns)| {
            let device = contestant.device;
            Row { device, depth, turns }
        }));
    }
    Ok(rows)
}

/// Cost per I/O: the difference between the costs of a long run and a short run, divided by the
/// difference between their numbers of I/Os.
fn cost(guest: &mut Guest, contestant: &Contestant, depth: u32) -> Result<Cost> {
    for _ in 0..TRIES {
        let short = timed(guest, contestant, depth, SHORT_RUN)?;
        let run = timed(guest, contestant, depth, TIME)?;
        let ios = run.0.total.saturating_sub(short.0.total);
        let each = |run: Usage, short: Usage| {
            let Usage { seconds, sleeps } = run.since(short);
            let ios = ios.max(1) as f64;
            CostPerIo { micros: seconds / ios * 1e6, sleeps: sleeps / ios }
        };
        let (qemu, server) = (each(run.1, short.1), each(run.2, short.2));
        // If there was no progress or no CPU time, the machine was suspended, and the run is
        // discarded.
        if ios > 100 && qemu.micros > 0.0 {
            return Ok(Cost { iops: run.0.iops, qemu, server });
        }
    }
    bail!("{}, iodepth {depth}: {TRIES} times nothing that could be measured", contestant.device)
}

/// Executes a run. Returns its result, and the CPU time that QEMU and the server used meanwhile.
fn timed(
    guest: &mut Guest,
    contestant: &Contestant,
    depth: u32,
    time: Duration,
) -> Result<(Measured, Usage, Usage)> {
    let (qemu, server) = (guest.id(), contestant.server());
    let used = || {
        let server = server.map_or(Ok(Usage::default()), Usage::of)?;
        Ok::<_, anyhow::Error>((Usage::of(qemu)?, server))
    };
    let before = used()?;
    let measured = random_reads(guest, &contestant.dev, depth, time)?;
    let after = used()?;
    Ok((measured, after.0.since(before.0), after.1.since(before.1)))
}

fn table(rows: &[Row], kernel: Kernel, placement: CpuPlacement) -> Result<Table> {
    let head = [
        "iodepth",
        "device",
        "IOPS",
        "us of CPU/IO",
        "of QEMU and guest",
        "of the server",
        "sleeps/IO",
    ];
    let mut table = Table::new("", &head);
    for row in rows {
        let cost = row.median()?;
        let cells = vec![
            row.depth.to_string(),
            row.device.to_owned(),
            count(cost.iops),
            format!("{:.1}", cost.both()),
            format!("{:.1}", cost.qemu.micros),
            format!("{:.1}", cost.server.micros),
            format!("{:.2} + {:.2}", cost.qemu.sleeps, cost.server.sleeps),
        ];
        table.push(cells, row.json(kernel, placement)?);
    }
    for &depth in placement.depths() {
        let turns = |device| -> Vec<f64> {
            let row = rows.iter().find(|row| (row.device, row.depth) == (device, depth));
            row.into_iter().flat_map(|row| row.turns.iter().map(Cost::both)).collect()
        };
        let compared = Comparison::of(&turns("qemu"), &turns("shadowbell"), 1.0);
        table.notes.push(format!(
            "iodepth {depth}{}: with QEMU's own controller an I/O costs {:.2} times the processor \
             time ({:.2} to {:.2} in {} turns); at least as much: {}",
            placement.description(),
            compared.ratio,
            compared.least,
            compared.most,
            turns("qemu").len(),
            compared.outcome()
        ));
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_row_has_the_median_turn() {
        let share = |micros| CostPerIo { micros, sleeps: 2.0 };
        let cost = |qemu| Cost { iops: 1.0, qemu: share(qemu), server: share(1.0) };
        let turns = [3.0, 1.0, 2.0].map(cost).to_vec();
        let row = Row { device: "qemu", depth: 1, turns };
        assert_eq!(row.median().unwrap(), cost(2.0));
        let json = row.json(Kernel::V7_2, CpuPlacement::Anywhere).unwrap();
        assert_eq!(json["host_cpu_ns_per_io"], 3000.0);
        assert_eq!(json["server_sleeps_per_io"], 2.0);
        assert!(Row { turns: Vec::new(), ..row }.median().is_err());
    }
}
