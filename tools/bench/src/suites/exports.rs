//! The suite `exports`: memory exported by NBD from shadowbell, nbdkit and qemu-nbd, plain and by
//! TLS, measured by the same client in turn; then as a file (FUSE) and by vhost-user-blk.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::contest::ROWS;
use super::spdk::Tree;
use super::{fuse, vhost};
use crate::certificates;
use crate::figures::{count, size, time};
use crate::fio::{self, Job, Source};
use crate::machine;
use crate::peers::{NbdServer, certificates_in};
use crate::process::time_of_all;
use crate::samples::{Rounds, Samples};
use crate::settings::Settings;
use crate::table::Table;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contestant {
    Shadowbell,
    Nbdkit,
    QemuNbd,
}

impl Contestant {
    fn name(self, tls: bool) -> &'static str {
        match (self, tls) {
            (Self::Shadowbell, false) => "shadowbell",
            (Self::Shadowbell, true) => "shadowbell, TLS",
            (Self::Nbdkit, false) => "nbdkit",
            (Self::Nbdkit, true) => "nbdkit, TLS",
            (Self::QemuNbd, _) => "qemu-nbd",
        }
    }

    fn start(self, memory: &Memory, home: Option<&Path>) -> Result<NbdServer> {
        match self {
            Self::Shadowbell => {
                let disk = format!("mem:{}MiB", memory.mebibytes);
                NbdServer::shadowbell(&memory.binary, &disk, home)
            }
            Self::Nbdkit => NbdServer::nbdkit(memory.mebibytes, home),
            Self::QemuNbd => NbdServer::qemu_nbd(&memory.image, "raw"),
        }
    }
}

/// Exported disks: the same size for all servers. qemu-nbd uses a file in tmpfs, because its memory
/// disk does not store data.
struct Memory {
    binary: PathBuf,
    mebibytes: u64,
    image: PathBuf,
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.image);
    }
}

/// A server, its results, and its ratio to the first server of its group.
struct Measured {
    contestant: Contestant,
    tls: bool,
    rounds: Vec<Rounds>,
    /// IOPS of shadowbell in percent of the server's, in each round.
    ours: Vec<Samples>,
}

pub(crate) fn run(settings: &Settings, tree: Option<&Tree>) -> Result<Vec<Table>> {
    let mut tables = vec![nbd(settings)?, fuse::table(settings)?];
    tables.extend(vhost::tables(settings, tree)?);
    Ok(tables)
}

fn nbd(settings: &Settings) -> Result<Table> {
    let may = !settings.quick;
    machine::need("fio", "fio", may).map_err(anyhow::Error::msg)?;
    let mut table = Table::new(
        "NBD exports of memory behind a UNIX socket, fio's nbd engine, in turn",
        &[
            "rw",
            "bs",
            "iodepth",
            "server",
            "IOPS",
            "ours/it",
            "p50",
            "p99",
            "server/IO",
            "client/IO",
        ],
    );
    let memory = Memory {
        binary: settings.binary.clone(),
        mebibytes: if settings.quick { 16 } else { 256 },
        image: PathBuf::from(format!("/dev/shm/shadowbell-bench-{}.img", std::process::id())),
    };
    File::create(&memory.image)?.set_len(memory.mebibytes << 20).context("a file of tmpfs")?;
    let directory = tempfile::tempdir()?;
    let mut contestants = vec![(Contestant::Shadowbell, false)];
    let mut add = |contestant, tls, needed: &[(&str, &str)]| {
        for (program, package) in needed {
            if let Err(why) = machine::need(program, package, may) {
                table.notes.push(format!("Not measured: {why}."));
                return false;
            }
        }
        contestants.push((contestant, tls));
        true
    };
    add(Contestant::Nbdkit, false, &[("nbdkit", "nbdkit")]);
    add(Contestant::QemuNbd, false, &[("qemu-nbd", "qemu-utils")]);
    if add(Contestant::Shadowbell, true, &[("openssl", "openssl")]) {
        certificates::make(&certificates_in(directory.path()))?;
        add(Contestant::Nbdkit, true, &[("nbdkit", "nbdkit")]);
    }
    let rows = settings.some(&ROWS);
    let mut measured: Vec<Measured> = contestants
        .into_iter()
        .map(|(contestant, tls)| Measured {
            contestant,
            tls,
            rounds: vec![Rounds::default(); rows.len()],
            ours: vec![Samples::default(); rows.len()],
        })
        .collect();
    for _ in 0..settings.rounds {
        // All servers are started before the first measurement, so that all contestants of a
        // condition are measured one after the other.
        let mut servers = Vec::new();
        for who in &measured {
            let home = who.tls.then_some(directory.path());
            let server = who.contestant.start(&memory, home)?;
            fill(settings, &server)?;
            servers.push(server);
        }
        for (at, &(rw, bs, depth)) in rows.iter().enumerate() {
            let mut ours = [0.0; 2];
            for (who, server) in measured.iter_mut().zip(&servers) {
                let row = measure(settings, server, rw, bs, depth)?;
                let iops = row.get("iops").and_then(Value::as_f64).unwrap_or_default();
                let own = &mut ours[usize::from(who.tls)];
                if who.contestant == Contestant::Shadowbell {
                    *own = iops;
                }
                if iops > 0.0 {
                    who.ours[at].push(*own / iops);
                }
                who.rounds[at].push(row);
            }
        }
    }
    for (at, &(rw, bs, depth)) in rows.iter().enumerate() {
        for who in &measured {
            let name = who.contestant.name(who.tls);
            let (rounds, ours) = (&who.rounds[at], &who.ours[at]);
            let figure = |name: &str| rounds.median(name);
            let mut row = rounds.row("exports");
            if let Some(fields) = row.as_object_mut() {
                fields.insert("device".into(), name.into());
                fields.insert("ours_by_it".into(), json!(ours.median()));
            }
            let is_ours = who.contestant == Contestant::Shadowbell;
            table.push(
                vec![
                    rw.into(),
                    size(bs),
                    depth.to_string(),
                    name.into(),
                    count(figure("iops")),
                    if is_ours { "-".into() } else { format!("{:.2}", ours.median()) },
                    time(figure("latency_ns/p50")),
                    time(figure("latency_ns/p99")),
                    time(figure("server_cpu_ns_per_io")),
                    time(figure("cpu_ns_per_io")),
                ],
                row,
            );
        }
    }
    Ok(table)
}

/// Writes the whole disk once, because memory that was never written would be read faster.
pub(crate) fn fill(settings: &Settings, server: &NbdServer) -> Result<()> {
    fio::run_once(settings, server).context("filling the export")
}

/// Measures the export with fio. Adds the server's CPU time per I/O to fio's row, and returns the
/// row.
pub(crate) fn measure(
    settings: &Settings,
    server: &NbdServer,
    rw: &str,
    bs: u32,
    depth: u32,
) -> Result<Value> {
    // There is no warm-up, because its CPU time would be counted.
    let plain = Settings { ramp: Duration::ZERO, ..settings.clone() };
    let before = time_of_all(server.id())?;
    let mut row = fio::run(&plain, &Job { source: Source::Nbd(server), rw, bs, depth })?;
    let after = time_of_all(server.id())?;
    let ios = row.get("commands").and_then(Value::as_f64).filter(|ios| *ios > 0.0);
    let time = after.saturating_sub(before).as_nanos() as f64;
    if let (Some(fields), Some(ios)) = (row.as_object_mut(), ios) {
        fields.insert("server_cpu_ns_per_io".into(), json!(time / ios));
    }
    Ok(row)
}
