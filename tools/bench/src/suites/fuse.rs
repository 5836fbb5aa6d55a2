//! Exports of memory as a file (FUSE): shadowbell and qemu-storage-daemon, with the same fio job.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::contest::{Contest, HEAD, Peer, ROWS};
use crate::fio::{self, Job, Source};
use crate::machine;
use crate::server::child;
use crate::settings::Settings;
use crate::table::Table;

#[derive(Clone, Copy)]
enum Server {
    Shadowbell,
    StorageDaemon,
}

/// A file in tmpfs for QEMU, because QEMU's memory disk does not store data.
struct Image(PathBuf);

impl Drop for Image {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Name of the exported file.
const DISK: &str = "disk";

impl Server {
    fn start(self, settings: &Settings, mebibytes: u64, image: &Path) -> Result<Peer> {
        let is_mounted = move |directory: &Path| {
            fs::metadata(directory.join(DISK)).is_ok_and(|file| file.len() == mebibytes << 20)
        };
        match self {
            Self::Shadowbell => Peer::start(
                "shadowbell export",
                |directory| {
                    let mut command = child(&settings.binary);
                    command.args([
                        "export",
                        "--no-supervisor",
                        &format!("mem:{mebibytes}MiB"),
                        "--fuse",
                    ]);
                    command.arg(directory.join(DISK));
                    command
                },
                is_mounted,
            ),
            Self::StorageDaemon => Peer::start(
                "qemu-storage-daemon",
                |directory| {
                    // qemu-storage-daemon mounts over an existing file.
                    let file = directory.join(DISK);
                    let _ = File::create(&file);
                    let mut command = child(Path::new("qemu-storage-daemon"));
                    let below = format!("driver=file,node-name=d,filename={}", image.display());
                    command.args(["--blockdev", &format!("{below},aio=io_uring"), "--export"]);
                    let export = "type=fuse,id=e,node-name=d,writable=on,mountpoint=";
                    command.arg(format!("{export}{}", file.display()));
                    command
                },
                is_mounted,
            ),
        }
    }
}

pub(crate) fn table(settings: &Settings) -> Result<Table> {
    let title = "Exports of memory as a file (FUSE), fio with io_uring and O_DIRECT, in turn";
    let mut table = Table::new(title, &HEAD);
    let may = !settings.quick;
    machine::need("fio", "fio", may).map_err(anyhow::Error::msg)?;
    if !Path::new("/dev/fuse").exists() {
        table.notes.push("Not measured: there is no /dev/fuse.".into());
        return Ok(table);
    }
    let mebibytes = if settings.quick { 16 } else { 256 };
    let image = format!("/dev/shm/shadowbell-bench-fuse-{}.img", std::process::id());
    let image = Image(PathBuf::from(image));
    File::create(&image.0)?.set_len(mebibytes << 20).context("a file of tmpfs")?;
    let mut servers = vec![(Server::Shadowbell, "shadowbell".to_owned())];
    match machine::need("qemu-storage-daemon", "qemu-system-common", may) {
        Ok(()) => servers.push((Server::StorageDaemon, "qemu-storage-daemon".to_owned())),
        Err(why) => table.notes.push(format!("Not measured: {why}.")),
    }
    let rows = settings.some(&ROWS);
    let names = servers.iter().map(|(_, name)| name.clone()).collect();
    let mut contest = Contest::new(&rows, names);
    // There is no warm-up, because its CPU time would be counted.
    let plain = Settings { ramp: Duration::ZERO, ..settings.clone() };
    for _ in 0..settings.rounds {
        let peers = servers.iter().map(|(server, _)| {
            let peer = server.start(settings, mebibytes, &image.0)?;
            // The whole file is written first, because reads of memory that was never written are
            // faster.
            let path = peer.path(DISK);
            fio::fill(settings, &path).context("filling the file")?;
            Ok(peer)
        });
        let peers = peers.collect::<Result<Vec<Peer>>>()?;
        for (at, &(rw, bs, depth)) in rows.iter().enumerate() {
            let found = peers.iter().map(|peer| {
                let path = peer.path(DISK);
                let job = Job { source: Source::File(&path), rw, bs, depth };
                peer.measured(|| fio::run(&plain, &job))
            });
            contest.push(at, found.collect::<Result<Vec<Value>>>()?);
        }
    }
    contest.show(&mut table, "fuse");
    Ok(table)
}
