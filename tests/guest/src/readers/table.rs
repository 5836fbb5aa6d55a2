//! Speed of readers (rows of the table `S4`): 1, 2 and 4 readers with random reads of 512 bytes and
//! of 4 KiB, and sequential readers of the raw disk and through a file system. Each reader has one
//! read in flight.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shadowbell_guest::{Guest, Kernel};

use super::controller::{Controller, SIZE};
use super::device::Export;
use crate::comparison::{Comparison, MISSED, OPEN, REACHED};
use crate::fio::{self, Measured};
use crate::vfio::json_of;
use shadowbell_bench::figures::count;
use shadowbell_bench::table::Table;
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

/// Sizes of random reads in bytes.
const SMALL: [u32; 2] = [512, 4096];
const READERS: [u16; 3] = [1, 2, 4];
/// Size of sequential reads in bytes.
const LARGE: u32 = 128 << 10;
/// Numbers of sequential readers on the raw disk.
const RAW: [u16; 2] = [1, 5];
/// Numbers of sequential readers through a file system. Each reader has its own file.
const FILES: [u16; 2] = [1, 2];
/// Duration of the random reads of one turn. It is short, because a turn is repeated many times.
const TIME: Duration = Duration::from_millis(500);
/// Number of bytes that sequential readers read in one turn. The first number is the total of all
/// readers of the raw disk; the second is for each reader of a file.
const RAW_BYTES: u64 = 320 << 20;
const FILE_BYTES: u64 = 128 << 20;

/// A row of the table.
pub(crate) struct Row {
    controller: &'static str,
    /// Driver of the controller: `linux` or `shadowbell`.
    device: &'static str,
    /// Layer between the readers and the driver.
    through: &'static str,
    file_system: Option<&'static str>,
    rw: &'static str,
    bs: u32,
    readers: u16,
    iops: f64,
    bandwidth: f64,
    commands: u64,
    /// Rate that was measured in each turn, in the order of the turns.
    turns: Vec<f64>,
}

impl Row {
    fn of(controller: &Controller, what: Condition, figures: &Figures, turns: Vec<f64>) -> Self {
        let Condition { device, through, file_system, rw, bs, readers } = what;
        let Figures { iops, bandwidth, commands } = *figures;
        let controller = controller.name;
        Self {
            controller,
            device,
            through,
            file_system,
            rw,
            bs,
            readers,
            iops,
            bandwidth,
            commands,
            turns,
        }
    }

    fn json(&self, kernel: Kernel) -> Value {
        let mut row = json!({
            "table": "S4",
            "device": self.device,
            "controller": self.controller,
            "through": self.through,
            "kernel": kernel.to_string(),
            "rw": self.rw,
            "bs": self.bs,
            "iodepth": 1,
            "numjobs": self.readers,
            "iops": self.iops,
            "bandwidth_bytes": self.bandwidth,
            "commands": self.commands,
            "iops_of_turns": self.turns,
        });
        if let (Some(name), Some(row)) = (self.file_system, row.as_object_mut()) {
            row.insert("file_system".into(), name.into());
        }
        row
    }

    fn place(&self) -> String {
        match (self.through, self.file_system) {
            ("none", _) => "the driver itself".into(),
            (through, None) => format!("{through}, raw"),
            (through, Some(name)) => format!("{through}, {name}"),
        }
    }
}

/// Combination of parameters for which the speed is measured.
#[derive(Clone, Copy)]
struct Condition {
    device: &'static str,
    through: &'static str,
    file_system: Option<&'static str>,
    rw: &'static str,
    bs: u32,
    readers: u16,
}

#[derive(Clone, Copy)]
struct Figures {
    iops: f64,
    bandwidth: f64,
    commands: u64,
}

impl From<Measured> for Figures {
    fn from(measured: Measured) -> Self {
        let Measured { iops, bandwidth, total, .. } = measured;
        Self { iops, bandwidth, commands: total }
    }
}

/// Figures of the median round.
fn median(mut rounds: Vec<Figures>) -> Result<Figures> {
    rounds.sort_by(|a, b| a.bandwidth.total_cmp(&b.bandwidth));
    let middle = rounds.get(rounds.len() / 2).copied().context("no rounds")?;
    ensure!(middle.commands > 0 && middle.bandwidth > 0.0, "nothing was read");
    Ok(middle)
}

/// Measures each condition once per turn on every controller. So other load of this machine affects
/// all controllers. Every second turn has the reverse order, so that a condition does not always
/// follow the same other condition.
fn in_turn<'a>(
    controllers: &'a [Controller],
    turns: usize,
    things: &[Condition],
    mut measure: impl FnMut(&'a Controller, Condition) -> Result<Figures>,
) -> Result<Vec<Row>> {
    let all = things.iter().flat_map(|what| controllers.iter().map(|c| (c, *what)));
    let mut found: Vec<_> = all.map(|(controller, what)| (controller, what, Vec::new())).collect();
    for turn in 0..turns {
        let mut measure =
            |(controller, what, figures): &mut (&'a Controller, Condition, Vec<_>)| {
                figures.push(measure(controller, *what)?);
                anyhow::Ok(())
            };
        if turn % 2 == 0 {
            found.iter_mut().try_for_each(&mut measure)?;
        } else {
            found.iter_mut().rev().try_for_each(&mut measure)?;
        }
    }
    let rows = found.into_iter().map(|(controller, what, figures)| {
        let turns = figures.iter().map(|turn| turn.iops).collect();
        Ok(Row::of(controller, what, &median(figures)?, turns))
    });
    rows.collect()
}

/// Groups conditions that differ only in the size of random reads. The conditions of a group are
/// compared with each other, so they are measured in the same turns.
fn together(things: impl Iterator<Item = Condition>) -> Vec<Vec<Condition>> {
    let mut groups: Vec<Vec<Condition>> = Vec::new();
    for what in things {
        match groups.last_mut() {
            Some(group) if group.iter().all(|g| (g.rw, g.readers) == (what.rw, what.readers)) => {
                group.push(what);
            }
            _ => groups.push(vec![what]),
        }
    }
    groups
}

/// Number of turns of a group. Random reads take only half a second each, so they have more turns.
fn turns(group: &[Condition], rounds: usize) -> usize {
    if group.iter().all(|what| what.rw == "randread") { 2 * rounds + 1 } else { rounds }
}

/// fio's arguments for `what.readers` readers of a raw disk.
fn raw_readers(disk: &str, what: Condition) -> String {
    let readers = u64::from(what.readers);
    let common = format!(
        "--filename=/dev/{disk} --bs={} --numjobs={readers} --direct=1 --ioengine=psync",
        what.bs
    );
    if what.rw == "randread" {
        let time = TIME.as_millis();
        return format!(
            "{common} --norandommap --randrepeat=0 --time_based --runtime={time}ms --name=random"
        );
    }
    let each = RAW_BYTES / readers / u64::from(LARGE) * u64::from(LARGE);
    format!("{common} --size={each} --offset_increment={each} --name=sequential")
}

/// All conditions on a raw disk: random and sequential.
fn raw(device: &'static str, through: &'static str) -> impl Iterator<Item = Condition> {
    let what =
        move |rw, bs, readers| Condition { device, through, file_system: None, rw, bs, readers };
    let random =
        READERS.into_iter().flat_map(move |readers| SMALL.map(|bs| what("randread", bs, readers)));
    random.chain(RAW.map(|readers| what("read", LARGE, readers)))
}

pub(crate) fn by_the_kernel(
    guest: &mut Guest,
    controllers: &[Controller],
    rounds: usize,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for group in together(raw("linux", "kernel")) {
        rows.extend(in_turn(controllers, turns(&group, rounds), &group, |controller, what| {
            Ok(fio::run(guest, what.rw, &raw_readers(&controller.disk, what), TIME)?.into())
        })?);
    }
    Ok(rows)
}

pub(crate) fn by_the_driver(
    guest: &mut Guest,
    controllers: &[Controller],
    rounds: usize,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for group in together(raw("shadowbell", "none")) {
        rows.extend(in_turn(controllers, turns(&group, rounds), &group, |controller, what| {
            let ios = RAW_BYTES / u64::from(LARGE) / u64::from(what.readers);
            let length = match what.rw {
                "randread" => format!("--runtime {}ms --ramp-time 100ms", TIME.as_millis()),
                _ => format!("--number-ios {ios}"),
            };
            let command = format!(
                "bench {} --rw {} --bs {} --numjobs {} --iodepth 1 --completion adaptive {length}",
                controller.target(),
                what.rw,
                what.bs,
                what.readers
            );
            let row = json_of(guest, &command)?["rows"][0].take();
            let number = |name: &str| row[name].as_f64().with_context(|| format!("{name}: {row}"));
            let commands = row["commands"].as_u64().with_context(|| format!("commands: {row}"))?;
            Ok(Figures { iops: number("iops")?, bandwidth: number("bandwidth_bytes")?, commands })
        })?);
    }
    Ok(rows)
}

/// Random and sequential reads of the disk as a ublk device, and of files on it.
pub(crate) fn through_ublk(
    guest: &mut Guest,
    controller: &Controller,
    rounds: usize,
) -> Result<Vec<Row>> {
    let export = Export::start(guest, &controller.target(), "")?;
    let rows = through(guest, controller, rounds, &export);
    // The file system is unmounted also after a failure, so that the controller is free.
    guest.sh("! grep -q ' /mnt ' /proc/mounts || umount /mnt", LIMIT)?;
    let stopped = export.stop(guest);
    rows.and_then(|rows| stopped.map(|()| rows))
}

fn through(
    guest: &mut Guest,
    controller: &Controller,
    rounds: usize,
    export: &Export,
) -> Result<Vec<Row>> {
    let disk = &export.disk;
    let one = std::slice::from_ref(controller);
    let mut rows = Vec::new();
    // Random reads of 4 KiB are measured only without ublk, by Shadowbell's driver itself.
    for what in raw("shadowbell", "ublk").filter(|what| what.bs != 4096) {
        let turns = turns(&[what], rounds);
        let asleep = export.sleeps(guest)?;
        let row = in_turn(one, turns, &[what], |_, what| {
            Ok(fio::run(guest, what.rw, &raw_readers(disk, what), TIME)?.into())
        })?;
        if (what.rw, what.readers) == ("randread", 1) {
            // The number of reads in all turns is not known exactly: it is estimated as the number
            // in the median turn, times the number of turns.
            let reads = row.iter().map(|row| row.commands).sum::<u64>() * turns as u64;
            let each = export.sleeps(guest)?.saturating_sub(asleep) as f64 / reads.max(1) as f64;
            println!(
                "   {}: one reader through ublk, {each:.2} sleeps of its server for each read",
                controller.name
            );
        }
        rows.extend(row);
    }
    guest.sh(&format!("mkfs.ext4 -q -F /dev/{disk} && mount /dev/{disk} /mnt"), LIMIT)?;
    for file in FILES.into_iter().enumerate().map(|(index, _)| index) {
        let mib = FILE_BYTES >> 20;
        let write = format!("dd if=/dev/zero of=/mnt/{file} bs=1M count={mib} conv=fsync");
        guest.sh(&write, LIMIT)?;
    }
    for readers in FILES {
        let file_system = Some("ext4");
        let (device, through, rw, bs) = ("shadowbell", "ublk", "read", LARGE);
        let what = Condition { device, through, file_system, rw, bs, readers };
        rows.extend(in_turn(one, rounds, &[what], |_, _| {
            let mount = "umount /mnt && echo 3 >/proc/sys/vm/drop_caches";
            guest.sh(&format!("{mount} && mount /dev/{disk} /mnt"), LIMIT)?;
            let mut words = format!("--bs={bs} --direct=0 --ioengine=psync --size={FILE_BYTES}");
            for file in 0..readers {
                words += &format!(" --name=file{file} --filename=/mnt/{file}");
            }
            Ok(fio::run(guest, rw, &words, TIME)?.into())
        })?);
    }
    Ok(rows)
}

/// Prints the targets of the table. They depend on other load of this machine, so the only check is
/// that every row was measured.
pub(crate) fn check_targets(report: &mut Report, rows: &[Row], controllers: usize) {
    report.check("every row was measured", |_| {
        // Each controller has rows of the kernel's driver, of Shadowbell's driver, of ublk, and of
        // files.
        let each = 2 * (READERS.len() * SMALL.len() + RAW.len())
            + (READERS.len() + RAW.len())
            + FILES.len();
        let all = controllers * each;
        ensure!(rows.len() == all, "{} of {all} rows", rows.len());
        ensure!(RAW_BYTES <= SIZE && 2 * FILE_BYTES < SIZE, "the disk is too small");
        Ok(())
    });
    let find = |like: &Row, bs, readers, file_system| {
        rows.iter().find(|row| {
            (row.controller, row.device, row.through)
                == (like.controller, like.device, like.through)
                && (row.rw, row.bs, row.readers) == (like.rw, bs, readers)
                && row.file_system == file_system
        })
    };
    let mut comparisons = Vec::new();
    for row in rows {
        let other = match (row.rw, row.bs, row.readers, row.file_system) {
            ("randread", 512, readers, None) => find(row, 4096, readers, None),
            ("read", bs, 5, None) | ("read", bs, 1 | 2, Some(_)) => find(row, bs, 1, None),
            _ => None,
        };
        let Some(other) = other else { continue };
        let target = match (row.rw, row.file_system) {
            ("randread", _) => Target::SMALL,
            (_, None) => Target::FIVE,
            (_, Some(_)) => Target::FILES,
        };
        let compared = target.compare(row, other);
        println!(
            "   {} {}, {}, {} readers: {:.2} times {} ({:.2} to {:.2} in {} turns): {}",
            row.controller,
            row.device,
            row.place(),
            row.readers,
            compared.ratio,
            target.of,
            compared.least,
            compared.most,
            row.turns.len(),
            compared.outcome()
        );
        comparisons.push((target, compared));
    }
    for target in [Target::SMALL, Target::FIVE, Target::FILES] {
        let of = |outcome: &str| {
            let these = comparisons.iter().filter(|(t, c)| *t == target && c.outcome() == outcome);
            these.count()
        };
        println!(
            "   {}, at least {:.1} times {}: reached {} times, open {}, missed {}",
            target.what,
            target.least,
            target.of,
            of(REACHED),
            of(OPEN),
            of(MISSED)
        );
    }
}

/// A target of the project for one comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Target {
    what: &'static str,
    of: &'static str,
    least: f64,
}

impl Target {
    const SMALL: Self =
        Self { what: "random reads of 512 bytes", of: "the rate of 4 KiB", least: 1.0 };
    const FIVE: Self = Self { what: "five sequential readers", of: "one", least: 1.5 };
    const FILES: Self =
        Self { what: "sequential readers of files", of: "one on the raw disk", least: 0.8 };

    fn compare(self, row: &Row, other: &Row) -> Comparison {
        Comparison::of(&row.turns, &other.turns, self.least)
    }
}

pub(crate) fn table(rows: &[Row], kernel: Kernel) -> Table {
    let head = ["controller", "driver", "through", "rw", "bytes", "readers", "IOPS", "MB/s"];
    let mut table = Table::new("", &head);
    for row in rows {
        let cells = vec![
            row.controller.to_owned(),
            row.device.to_owned(),
            row.place(),
            row.rw.to_owned(),
            row.bs.to_string(),
            row.readers.to_string(),
            count(row.iops),
            format!("{:.1}", row.bandwidth / 1e6),
        ];
        table.push(cells, row.json(kernel));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn what(rw: &'static str, bs: u32, readers: u16) -> Condition {
        Condition { device: "shadowbell", through: "ublk", file_system: None, rw, bs, readers }
    }

    #[test]
    fn sequential_readers_share_the_disk() {
        let text = raw_readers("ublkb0", what("read", LARGE, 5));
        assert!(text.contains("--size=67108864 --offset_increment=67108864"), "{text}");
        let text = raw_readers("ublkb0", what("randread", 512, 2));
        assert!(text.contains("--time_based") && !text.contains("--size"), "{text}");
    }

    #[test]
    fn rows_have_the_agreed_names() {
        let controller = Controller { name: "qemu", address: String::new(), disk: String::new() };
        let figures = Figures { iops: 2.0, bandwidth: 1024.0, commands: 7 };
        let mut row = Row::of(&controller, what("read", 512, 5), &figures, vec![2.0]);
        let json = row.json(Kernel::V7_2);
        assert_eq!((&json["table"], &json["device"]), (&json!("S4"), &json!("shadowbell")));
        assert_eq!((&json["bandwidth_bytes"], &json["numjobs"]), (&json!(1024.0), &json!(5)));
        assert_eq!(json.get("file_system"), None);
        row.file_system = Some("ext4");
        assert_eq!(row.json(Kernel::V7_2)["file_system"], "ext4");
    }

    #[test]
    fn a_round_without_reads_is_an_error() {
        let figures = |bandwidth| Figures { iops: 1.0, bandwidth, commands: bandwidth as u64 };
        let rounds = vec![figures(3.0), figures(1.0), figures(2.0)];
        assert_eq!(median(rounds).unwrap().commands, 2);
        assert!(median(Vec::new()).is_err());
        assert!(median(vec![figures(0.0)]).is_err());
    }

    #[test]
    fn compared_conditions_are_measured_together_in_alternating_order() {
        let groups = together(raw("linux", "kernel"));
        let sizes: Vec<usize> = groups.iter().map(Vec::len).collect();
        assert_eq!(sizes, [2, 2, 2, 1, 1]);
        assert_eq!((turns(&groups[0], 3), turns(&groups[4], 3)), (7, 3));
        let controllers =
            ["a", "b"].map(|name| Controller { name, address: String::new(), disk: String::new() });
        let mut order = Vec::new();
        let rows = in_turn(&controllers, 2, &groups[0], |controller, what| {
            order.push(format!("{}{}", controller.name, what.bs));
            Ok(Figures { iops: order.len() as f64, bandwidth: 1.0, commands: 1 })
        });
        assert_eq!(order.join(" "), "a512 b512 a4096 b4096 b4096 a4096 b512 a512");
        let rows = rows.unwrap();
        assert_eq!(
            rows.iter().map(|row| row.turns.clone()).collect::<Vec<_>>(),
            [[1.0, 8.0], [2.0, 7.0], [3.0, 6.0], [4.0, 5.0]]
        );
    }

    #[test]
    fn missing_rows_are_a_failure() {
        let mut report = Report::default();
        check_targets(&mut report, &[], 1);
        assert_eq!(report.failed(), 1);
    }
}
