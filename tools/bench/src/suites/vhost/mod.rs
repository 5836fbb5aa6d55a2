//! vhost-user-blk: shadowbell, SPDK and qemu-storage-daemon, measured in turn with SPDK's virtio
//! initiator as the client.
//!
//! The client polls on one CPU, and the server has the other.

mod bdevperf;
mod relay;

use std::fs::{self, File};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::contest::{Contest, HEAD, Peer, Row};
use super::spdk::{HOW_TO_BUILD, HugePages, Tree};
use crate::machine;
use crate::server::{child, output};
use crate::settings::Settings;
use crate::table::Table;

const ROWS: [Row; 4] = [
    ("randread", 4096, 1),
    ("randread", 4096, 32),
    ("randwrite", 4096, 1),
    ("randwrite", 4096, 32),
];
/// Name of the server's socket in its directory.
const SOCKET: &str = "vhost.sock";
/// MiB of huge pages of SPDK's server, including its disk.
const MEMORY: u32 = 384;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    Shadowbell,
    Spdk,
    StorageDaemon,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Memory,
    /// A qcow2 image with all clusters allocated, opened with O_DIRECT.
    Qcow2,
}

/// Exported disks.
struct Disks {
    mebibytes: u64,
    /// File in tmpfs for QEMU, which has no memory disk that stores data.
    tmpfs: PathBuf,
    qcow2: PathBuf,
}

impl Disks {
    fn new(settings: &Settings) -> Result<Self> {
        let id = std::process::id();
        let disks = Self {
            mebibytes: if settings.quick { 16 } else { 64 },
            tmpfs: PathBuf::from(format!("/dev/shm/shadowbell-bench-vhost-{id}.img")),
            qcow2: settings.directory.canonicalize()?.join(format!("vhost-{id}.qcow2")),
        };
        // The whole file is written, because reads of unwritten blocks are faster.
        let bytes = vec![1; 1 << 20];
        let mut file = File::create(&disks.tmpfs)?;
        for _ in 0..disks.mebibytes {
            std::io::Write::write_all(&mut file, &bytes).context("a file of tmpfs")?;
        }
        Ok(disks)
    }

    /// Makes the qcow2 image and writes all of its clusters.
    fn make_qcow2(&self, settings: &Settings) -> Result<()> {
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", "qcow2"]).arg(&self.qcow2);
        command.arg(format!("{}M", self.mebibytes));
        anyhow::ensure!(command.status()?.success(), "qemu-img makes no image");
        let mut command = child(&settings.binary);
        let disk = format!("{}?direct=on", self.qcow2.display());
        command.args(["bench", &disk, "--rw=write", "--bs=1m", "--iodepth=4", "--force"]);
        command.args(["--json", &format!("--number-ios={}", self.mebibytes)]);
        let limit = Duration::from_secs(300);
        output("shadowbell bench (filling the image)", command, limit).map(drop)
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.tmpfs);
        let _ = fs::remove_file(&self.qcow2);
    }
}

impl Server {
    fn name(self) -> &'static str {
        match self {
            Self::Shadowbell => "shadowbell",
            Self::Spdk => "SPDK",
            Self::StorageDaemon => "qemu-storage-daemon",
        }
    }

    /// Starts the server on its CPU.
    fn start(self, settings: &Settings, tree: &Vhost, disks: &Disks, kind: Kind) -> Result<Peer> {
        let cpu = settings.cpus[0].to_string();
        let pinned = |program: &Path| {
            let mut command = child(Path::new("taskset"));
            command.args(["-c", &cpu]).arg(program);
            command
        };
        let command = |directory: &Path| {
            let socket = directory.join(SOCKET);
            match self {
                Self::Shadowbell => {
                    let disk = match kind {
                        Kind::Memory => format!("mem:{}MiB", disks.mebibytes),
                        Kind::Qcow2 => format!("{}?direct=on", disks.qcow2.display()),
                    };
                    let mut command = pinned(&settings.binary);
                    command.args([
                        "export",
                        "--no-supervisor",
                        &disk,
                        "--queues",
                        "1",
                        "--vhost-user-blk",
                    ]);
                    command.arg(socket);
                    command
                }
                Self::Spdk => {
                    let config = directory.join("config.json");
                    let _ = fs::write(&config, vhost_config(disks.mebibytes, &cpu).to_string());
                    let mut command = child(&tree.vhost);
                    command.args(["-g", "-m", &format!("[{cpu}]"), "-s", &MEMORY.to_string()]);
                    command.arg("--disable-cpumask-locks").arg("-S").arg(directory);
                    command.arg("-r").arg(directory.join("rpc.sock")).arg("-c").arg(config);
                    command
                }
                Self::StorageDaemon => {
                    let mut command = pinned(Path::new("qemu-storage-daemon"));
                    let file = |path: &Path, more: &str| {
                        format!("driver=file,filename={},aio=io_uring{more}", path.display())
                    };
                    match kind {
                        Kind::Memory => {
                            let disk = file(&disks.tmpfs, ",node-name=d");
                            command.args(["--blockdev", &disk]);
                        }
                        Kind::Qcow2 => {
                            let below = file(&disks.qcow2, ",node-name=f,cache.direct=on");
                            let image = "driver=qcow2,node-name=d,file=f,cache.direct=on";
                            command.args(["--blockdev", &below, "--blockdev", image]);
                        }
                    }
                    let export = "type=vhost-user-blk,id=e,node-name=d,writable=on,num-queues=1";
                    let socket = format!(",addr.type=unix,addr.path={}", socket.display());
                    command.args(["--export", &format!("{export}{socket}")]);
                    command
                }
            }
        };
        let is_there = |directory: &Path| {
            fs::metadata(directory.join(SOCKET)).is_ok_and(|file| file.file_type().is_socket())
        };
        let peer = Peer::start(self.name(), command, is_there)?;
        if self == Self::StorageDaemon {
            relay::start(peer.path(relay::RELAY), peer.path(SOCKET)).context("a relay")?;
        }
        Ok(peer)
    }

    /// Socket for the client.
    fn socket(self, peer: &Peer) -> PathBuf {
        peer.path(if self == Self::StorageDaemon { relay::RELAY } else { SOCKET })
    }
}

fn vhost_config(mebibytes: u64, cpu: &str) -> Value {
    json!({ "subsystems": [
        { "subsystem": "bdev", "config": [{ "method": "bdev_malloc_create", "params": {
            "name": "disk", "block_size": 512, "num_blocks": mebibytes << 11,
        } }] },
        { "subsystem": "vhost_blk", "config": [{
            "method": "vhost_create_blk_controller",
            "params": { "ctrlr": SOCKET, "dev_name": "disk", "cpumask": format!("[{cpu}]") },
        }] },
    ] })
}

/// SPDK's programs for vhost-user.
struct Vhost {
    vhost: PathBuf,
    bdevperf: PathBuf,
}

impl Vhost {
    fn of(tree: &Tree) -> Result<Self> {
        let program = |name: &str| {
            let path = tree.directory.join("build").join(name);
            if !path.is_file() {
                bail!("{} is not there", path.display());
            }
            Ok(path)
        };
        Ok(Self { vhost: program("bin/vhost")?, bdevperf: program("examples/bdevperf")? })
    }
}

/// Tables of the suite; without a tree, a note that there is none.
pub(crate) fn tables(settings: &Settings, tree: Option<&Tree>) -> Result<Vec<Table>> {
    let nothing = |why: String| {
        let title = "vhost-user-blk: not measured".to_owned();
        vec![Table { title, notes: vec![why], ..Table::default() }]
    };
    let Some(tree) = tree else {
        return Ok(nothing(format!("its client is SPDK's bdevperf; {HOW_TO_BUILD}")));
    };
    let tree = match Vhost::of(tree) {
        Ok(tree) => tree,
        Err(why) => return Ok(nothing(format!("{why}; {HOW_TO_BUILD}"))),
    };
    let pages = HugePages::reserve()?;
    let disks = Disks::new(settings)?;
    let qemu = machine::need("qemu-storage-daemon", "qemu-system-common", !settings.quick);
    let mut tables = Vec::new();
    for (kind, title) in [
        (Kind::Memory, "vhost-user-blk exports of memory, SPDK's virtio initiator, in turn"),
        (
            Kind::Qcow2,
            "The same of a qcow2 image whose clusters are allocated, past the page cache",
        ),
    ] {
        let mut table = Table::new(title, &HEAD);
        let mut servers = vec![Server::Shadowbell];
        if kind == Kind::Memory {
            servers.push(Server::Spdk);
        } else {
            disks.make_qcow2(settings)?;
        }
        match &qemu {
            Ok(()) => servers.push(Server::StorageDaemon),
            Err(why) => table.notes.push(format!("Not measured: {why}.")),
        }
        contest(settings, (&tree, &pages, &disks), kind, &servers)?.show(&mut table, "vhost");
        tables.push(table);
    }
    Ok(tables)
}

fn contest(
    settings: &Settings,
    (tree, pages, disks): (&Vhost, &HugePages, &Disks),
    kind: Kind,
    servers: &[Server],
) -> Result<Contest> {
    let rows = settings.some(&ROWS);
    let names = servers.iter().map(|server| server.name().to_owned()).collect();
    let mut contest = Contest::new(&rows, names);
    for _ in 0..settings.rounds {
        for (at, &row) in rows.iter().enumerate() {
            // Only one server runs at a time: a polling server uses the whole CPU, and only one
            // process can have the image open.
            let found = servers.iter().map(|server| {
                let peer = server.start(settings, tree, disks, kind)?;
                let socket = server.socket(&peer);
                let run = |row| bdevperf::run(settings, &tree.bdevperf, pages, &socket, row);
                if kind == Kind::Memory && *server != Server::StorageDaemon {
                    run(("write", 65536, 8)).context("filling the disk")?;
                }
                peer.measured(|| run(row)).with_context(|| server.name())
            });
            contest.push(at, found.collect::<Result<Vec<Value>>>()?);
        }
    }
    Ok(contest)
}
