//! The suite `disks`: an NBD disk next to fio on the same server, and qcow2 next to raw and to
//! qemu-storage-daemon's export of the same image.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::contest::ROWS;
use super::exports::{fill, measure};
use crate::figures::{count, size, time};
use crate::fio::{self, Job, Source};
use crate::load::{Load, Waiting};
use crate::machine;
use crate::peers::NbdServer;
use crate::samples::{Rounds, Samples};
use crate::server::{child, output};
use crate::settings::Settings;
use crate::table::Table;

/// Two contestants that are measured in turn.
#[derive(Default)]
struct Pair {
    first: Rounds,
    second: Rounds,
    /// Ratio of the first to the second, in each round.
    ratio: Samples,
}

impl Pair {
    fn push(&mut self, first: Value, second: Value) {
        let iops = |row: &Value| row.get("iops").and_then(Value::as_f64).unwrap_or_default();
        if iops(&second) > 0.0 {
            self.ratio.push(iops(&first) / iops(&second));
        }
        self.first.push(first);
        self.second.push(second);
    }

    fn show(&self, table: &mut Table, row: (&str, u32, u32), names: [&str; 2]) {
        let (rw, bs, depth) = row;
        for (name, rounds, is_first) in
            [(names[0], &self.first, true), (names[1], &self.second, false)]
        {
            let mut json = rounds.row("disks");
            if let Some(fields) = json.as_object_mut() {
                fields.insert("device".into(), name.into());
                fields.insert("ratio".into(), json!(self.ratio.median()));
            }
            let ratio = if is_first { format!("{:.2}", self.ratio.median()) } else { "-".into() };
            table.push(
                vec![
                    rw.into(),
                    size(bs),
                    depth.to_string(),
                    name.into(),
                    count(rounds.median("iops")),
                    ratio,
                    time(rounds.median("latency_ns/p50")),
                    time(rounds.median("latency_ns/p99")),
                ],
                json,
            );
        }
    }
}

const HEAD: [&str; 8] = ["rw", "bs", "iodepth", "contestant", "IOPS", "ratio", "p50", "p99"];

pub(crate) fn run(settings: &Settings) -> Result<Vec<Table>> {
    let may = !settings.quick;
    for (program, package) in [("fio", "fio"), ("nbdkit", "nbdkit"), ("qemu-img", "qemu-utils")] {
        machine::need(program, package, may).map_err(anyhow::Error::msg)?;
    }
    Ok(vec![nbd(settings)?, qcow2(settings)?, exported(settings)?])
}

fn nbd(settings: &Settings) -> Result<Table> {
    let title = "A disk nbd: of nbdkit's memory, behind the controller, next to fio's nbd engine";
    let mut table = Table::new(title, &HEAD);
    let rows = settings.some(&ROWS);
    let mut pairs: Vec<Pair> = rows.iter().map(|_| Pair::default()).collect();
    let server = NbdServer::nbdkit(if settings.quick { 16 } else { 256 }, None)?;
    fill(settings, &server)?;
    let uri = server.uri();
    for _ in 0..settings.rounds {
        for (pair, &(rw, bs, depth)) in pairs.iter_mut().zip(&rows) {
            let waiting = Waiting::Adaptive;
            let load = Load { disk: &uri, rw, bs, depth, waiting, ..Load::default() };
            let ours = load.measure(settings)?;
            let job = Job { source: Source::Nbd(&server), rw, bs, depth };
            pair.push(ours, fio::run(settings, &job)?);
        }
    }
    for (pair, &row) in pairs.iter().zip(&rows) {
        pair.show(&mut table, row, ["shadowbell, nbd:", "fio, nbd"]);
    }
    Ok(table)
}

/// An image with all blocks allocated, raw and as qcow2.
struct Images {
    raw: PathBuf,
    qcow2: PathBuf,
}

impl Images {
    fn new(settings: &Settings) -> Result<Self> {
        let directory = settings.directory.canonicalize()?;
        let file = |end: &str| directory.join(format!("disks-{}.{end}", std::process::id()));
        let images = Self { raw: file("img"), qcow2: file("qcow2") };
        let mebibytes = if settings.quick { 16 } else { 512 };
        let make = |format: &str, path: &Path| -> Result<()> {
            let mut command = Command::new("qemu-img");
            command.args(["create", "-q", "-f", format]).arg(path).arg(format!("{mebibytes}M"));
            anyhow::ensure!(command.status()?.success(), "qemu-img makes no {format} image");
            // Clusters are allocated by writing them.
            let spec = match format {
                "raw" => format!("file:{}", path.display()),
                _ => path.display().to_string(),
            };
            let mut command = child(&settings.binary);
            command.args(["bench", &spec, "--rw=write", "--bs=1m", "--iodepth=4", "--force"]);
            command.args(["--json", &format!("--number-ios={mebibytes}")]);
            let limit = Duration::from_secs(300);
            output("shadowbell bench (filling the image)", command, limit).map(drop)
        };
        make("raw", &images.raw).and_then(|()| make("qcow2", &images.qcow2)).context("images")?;
        Ok(images)
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        for path in [&self.raw, &self.qcow2] {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn qcow2(settings: &Settings) -> Result<Table> {
    let title = "A qcow2 image whose clusters are allocated, past the page cache, next to raw";
    let mut table = Table::new(title, &HEAD);
    let images = Images::new(settings)?;
    let [raw, qcow2] = [&images.raw, &images.qcow2];
    let (raw, qcow2) =
        (format!("file:{}?direct=on", raw.display()), format!("{}?direct=on", qcow2.display()));
    let rows = settings.some(&ROWS);
    let mut pairs: Vec<Pair> = rows.iter().map(|_| Pair::default()).collect();
    for _ in 0..settings.rounds {
        for (pair, &(rw, bs, depth)) in pairs.iter_mut().zip(&rows) {
            let load = |disk| {
                let waiting = Waiting::Adaptive;
                Load { disk, rw, bs, depth, waiting, ..Load::default() }.measure(settings)
            };
            pair.push(load(&qcow2)?, load(&raw)?);
        }
    }
    for (pair, &row) in pairs.iter().zip(&rows) {
        pair.show(&mut table, row, ["shadowbell, qcow2", "shadowbell, raw"]);
    }
    Ok(table)
}

fn exported(settings: &Settings) -> Result<Table> {
    let title = "The same qcow2 image by NBD: ours and qemu-storage-daemon's, fio's nbd engine";
    let mut table = Table::new(title, &HEAD);
    let needed = machine::need("qemu-storage-daemon", "qemu-system-common", !settings.quick);
    if let Err(why) = needed {
        table.notes.push(format!("Not measured: {why}."));
        return Ok(table);
    }
    let images = Images::new(settings)?;
    let rows = settings.some(&ROWS);
    let mut pairs: Vec<Pair> = rows.iter().map(|_| Pair::default()).collect();
    for _ in 0..settings.rounds {
        for (pair, &(rw, bs, depth)) in pairs.iter_mut().zip(&rows) {
            // Only one server runs at a time, because each locks the image.
            let disk = format!("{}?direct=on", images.qcow2.display());
            let server = NbdServer::shadowbell(&settings.binary, &disk, None)?;
            let ours = measure(settings, &server, rw, bs, depth)?;
            drop(server);
            let server = NbdServer::storage_daemon(&images.qcow2)?;
            pair.push(ours, measure(settings, &server, rw, bs, depth)?);
        }
    }
    for (pair, &row) in pairs.iter().zip(&rows) {
        pair.show(&mut table, row, ["shadowbell export", "qemu-storage-daemon"]);
    }
    Ok(table)
}
