//! What an I/O on a file costs this machine: processor time of QEMU, guest included, and of the server if
//! there is one. Ours over vfio-user against QEMU's own controller with shadow doorbells, each on an image
//! of its own, past the page cache and through io_uring both, in one guest and in turn.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use guest::{Device, Drive, Guest, Kernel, RunDir, Server};
use serde_json::{Value, json};

use super::super::fio::{Measured, random_reads};
use super::super::verdict::Verdict;
use super::super::{Lab, MINUTE, names};
use crate::report::Report;
use crate::table::{render, thousands};

const DEPTHS: [u32; 2] = [1, 32];
const TIME: Duration = Duration::from_millis(2000);
/// The beginning and the end of fio, which are a good part of a second here, and little else: what is
/// beyond that counts.
const SHORT: Duration = Duration::from_millis(200);
const MIB: u64 = 128;
/// How often a turn is tried.
const TRIES: usize = 3;

struct Contestant {
    device: &'static str,
    server: Option<Server>,
    /// Its name in the guest.
    dev: String,
}

/// Of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cost {
    iops: f64,
    /// Microseconds of each I/O: QEMU's, and the server's.
    qemu: f64,
    server: f64,
}

impl Cost {
    fn both(&self) -> f64 {
        self.qemu + self.server
    }
}

struct Row {
    device: &'static str,
    depth: u32,
    turns: Vec<Cost>,
}

impl Row {
    /// The turn in the middle.
    fn median(&self) -> Result<Cost> {
        let mut turns = self.turns.clone();
        turns.sort_by(|a, b| a.both().total_cmp(&b.both()));
        turns.get(turns.len() / 2).copied().context("no turns")
    }

    fn json(&self, kernel: Kernel) -> Result<Value> {
        let cost = self.median()?;
        Ok(json!({
            "table": "S3",
            "device": self.device,
            "doorbells": "shadow",
            "kernel": kernel.to_string(),
            "backing": "file",
            "rw": "randread",
            "iodepth": self.depth,
            "numjobs": 1,
            "bs": super::BLOCK,
            "iops": cost.iops,
            "host_cpu_ns_per_io": cost.both() * 1000.0,
            "qemu_cpu_ns_per_io": cost.qemu * 1000.0,
            "server_cpu_ns_per_io": cost.server * 1000.0,
        }))
    }
}

pub(super) fn run(lab: &Lab, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let images = ["ours.img", "theirs.img"].map(|name| run.file(name));
    for image in &images {
        fill(image)?;
    }
    let ours =
        lab.serve(run, "file", &[format!("{}?direct=on", images[0].display())], &[], None)?;
    let theirs = Device::QemuNvme { drive: Drive::Direct("theirs.img".into()), dbcs: true };
    let devices = vec![ours.device, theirs];
    let mut guest = lab.boot(run, kernel, devices, |config| config.cpus = 1)?;
    let of = |device, server| Contestant { device, server, dev: String::new() };
    let mut contestants = [of("shadowbell", ours.server), of("qemu", None)];
    for (index, contestant) in contestants.iter_mut().enumerate() {
        contestant.dev = names(&mut guest, index)?.1;
        let scheduler = format!("echo none >/sys/block/{}/queue/scheduler", contestant.dev);
        guest.sh(&scheduler, MINUTE)?;
    }
    let rows = report.check("processor time of random reads of 4 KiB from a file, in turn", |_| {
        measure(&mut guest, &contestants, 2 * lab.rounds + 1)
    });
    if let Some(rows) = rows {
        print(&rows)?;
        for row in &rows {
            report.row(row.json(kernel)?);
        }
    }
    report.check("the guest powers off", |_| guest.power_off(MINUTE));
    for server in contestants.into_iter().filter_map(|contestant| contestant.server) {
        report.check("the server leaves cleanly", |_| server.stop());
    }
    Ok(())
}

/// An image whose blocks are there.
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

fn measure(guest: &mut Guest, contestants: &[Contestant], turns: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for depth in DEPTHS {
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

/// What a run costs beyond a short one.
fn cost(guest: &mut Guest, contestant: &Contestant, depth: u32) -> Result<Cost> {
    for _ in 0..TRIES {
        let short = timed(guest, contestant, depth, SHORT)?;
        let run = timed(guest, contestant, depth, TIME)?;
        let ios = run.0.total.saturating_sub(short.0.total);
        let each = |of: fn(&(Measured, f64, f64)) -> f64| {
            (of(&run) - of(&short)) / ios.max(1) as f64 * 1e6
        };
        let cost = Cost { iops: run.0.iops, qemu: each(|r| r.1), server: each(|r| r.2) };
        // A machine that stood still meanwhile says nothing.
        if ios > 100 && cost.qemu > 0.0 {
            return Ok(cost);
        }
    }
    bail!("{}, iodepth {depth}: {TRIES} times nothing that could be measured", contestant.device)
}

/// A run, and the seconds of processor time that QEMU and the server used meanwhile.
fn timed(
    guest: &mut Guest,
    contestant: &Contestant,
    depth: u32,
    time: Duration,
) -> Result<(Measured, f64, f64)> {
    let (qemu, server) = (guest.id(), contestant.server.as_ref().map(Server::id));
    let used = || Ok::<_, anyhow::Error>((seconds(qemu)?, server.map_or(Ok(0.0), seconds)?));
    let before = used()?;
    let measured = random_reads(guest, &contestant.dev, depth, time)?;
    let after = used()?;
    Ok((measured, after.0 - before.0, after.1 - before.1))
}

/// The processor time of a process so far, in the kernel and outside, threads that have ended included.
fn seconds(process: u32) -> Result<f64> {
    let path = format!("/proc/{process}/stat");
    let text = fs::read_to_string(&path).context(path)?;
    let ticks = ticks(&text).context("no times in /proc/PID/stat")?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// The fields 14 and 15, of which the second, a name in parentheses, may contain anything.
fn ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

fn print(rows: &[Row]) -> Result<()> {
    let mut cells = Vec::new();
    for row in rows {
        let cost = row.median()?;
        cells.push(vec![
            row.depth.to_string(),
            row.device.to_owned(),
            thousands(cost.iops),
            format!("{:.1}", cost.both()),
            format!("{:.1}", cost.qemu),
            format!("{:.1}", cost.server),
        ]);
    }
    let head = ["iodepth", "device", "IOPS", "us of CPU/IO", "of QEMU and guest", "of the server"];
    println!("\n{}", render(&head, &cells));
    for depth in DEPTHS {
        let turns = |device| -> Vec<f64> {
            let row = rows.iter().find(|row| (row.device, row.depth) == (device, depth));
            row.into_iter().flat_map(|row| row.turns.iter().map(Cost::both)).collect()
        };
        let verdict = Verdict::of(&turns("qemu"), &turns("shadowbell"), 1.0);
        println!(
            "   iodepth {depth}: with QEMU's own controller an I/O costs {:.2} times the processor time \
             ({:.2} to {:.2} in {} turns); at least as much: {}",
            verdict.ratio,
            verdict.least,
            verdict.most,
            turns("qemu").len(),
            verdict.words()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_found_behind_any_name() {
        let stat = "7 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 140 15 16 17";
        assert_eq!(ticks(stat), Some(155));
        assert_eq!(ticks("7 (a) S 1"), None);
        assert!(seconds(std::process::id()).unwrap() >= 0.0);
    }

    #[test]
    fn the_row_is_the_turn_in_the_middle() {
        let cost = |qemu| Cost { iops: 1.0, qemu, server: 1.0 };
        let turns = [3.0, 1.0, 2.0].map(cost).to_vec();
        let row = Row { device: "qemu", depth: 1, turns };
        assert_eq!(row.median().unwrap(), cost(2.0));
        assert_eq!(row.json(Kernel::V7_2).unwrap()["host_cpu_ns_per_io"], 3000.0);
        assert!(Row { turns: Vec::new(), ..row }.median().is_err());
    }
}
