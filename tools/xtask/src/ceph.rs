//! `cargo xtask ceph`: tests of `rbd:` disks on a Ceph cluster on this machine.
//!
//! The cluster has one monitor and three OSDs, uses the loopback device, and needs no
//! authentication. The OSDs keep their objects in memory. There is no manager, because I/O does not
//! need one.

use std::fmt::Write as _;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_bench::workspace::cargo;
use shadowbell_guest::host::{in_path, install, last_lines};

use shadowbell_harness::Report;
use shadowbell_harness::step;

/// Programs, and the Debian package of each.
const PROGRAMS: [(&str, &str); 5] = [
    ("ceph-mon", "ceph-mon"),
    ("ceph-osd", "ceph-osd"),
    ("ceph", "ceph-common"),
    ("rbd", "ceph-common"),
    ("monmaptool", "ceph-common"),
];
const OSDS: u32 = 3;
/// Time limit of the monitor's start.
const START: Duration = Duration::from_secs(60);

/// Options: parts in addition to the tests.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Run the guest suite `disk-types` with an RBD image as well: file systems, discards, fio
    /// with checksums, kills and upgrades. Takes some minutes
    #[arg(long)]
    guest: bool,
    /// Measure a disk next to fio's rbd engine, in this number of rounds
    #[arg(long, value_name = "ROUNDS")]
    bench: Option<u32>,
    /// Path of a built shadowbell program for --bench; without it, one is built
    #[arg(long, value_name = "PATH", requires = "bench")]
    shadowbell: Option<PathBuf>,
}

/// Starts a cluster, runs the tests, and stops the cluster.
pub(crate) fn run(report: &mut Report, arguments: &Arguments) -> Result<()> {
    report.begin("ceph");
    let Some(cluster) = report.check("a cluster starts", |_| Cluster::start()) else {
        report.summary();
        return Ok(());
    };
    let conf = cluster.conf();
    let test = || {
        let mut command = cargo();
        command.args(["test", "--package", "shadowbell-disk-rbd", "--test", "cluster"]);
        command.env("SHADOWBELL_CEPH_CONF", &conf);
        command
    };
    step(report, "tests on the cluster", &mut test());
    let mut stopped = test();
    // The tests run one after the other, because they stop the same daemons of the cluster.
    let names = ["a_hung_cluster", "--", "--test-threads=1"];
    stopped.env("SHADOWBELL_CEPH_STOP", "1").args(names);
    step(report, "a cluster that does not answer", &mut stopped);
    let mut full = cargo();
    full.args(["test", "--package", "shadowbell-disk-rbd", "--test", "full"]);
    full.env("SHADOWBELL_CEPH_CONF", &conf).env("SHADOWBELL_CEPH_FILL", "1");
    step(report, "a cluster that is full", &mut full);
    let mut serve = cargo();
    serve.args(["test", "--package", "shadowbell", "--test", "serve", "ceph::"]);
    serve.env("SHADOWBELL_CEPH_CONF", &conf);
    step(report, "a server is killed and replaced under a verifying load", &mut serve);
    if arguments.guest {
        let mut guest = cargo();
        guest.args(["xtask", "guest", "disk-types"]).env("SHADOWBELL_CEPH_CONF", &conf);
        step(report, "a Linux guest on an image", &mut guest);
    }
    if let Some(rounds) = arguments.bench {
        report.check("next to fio", |_| {
            let name = "bench";
            cluster.call("rbd", &["create", name, "--size", "256M"])?;
            // The image is filled first, because reads of objects that do not exist are faster.
            let io = ["--io-type", "write", "--io-size", "1M", "--io-total", "256M"];
            cluster.call("rbd", &[&["bench", name, "--io-pattern", "seq"], &io[..]].concat())?;
            let program = arguments.shadowbell.as_deref();
            print!("{}", shadowbell_bench::rbd(program, &conf, name, rounds)?);
            Ok(())
        });
    }
    // This test comes last, because it kills an OSD, and so leaves a degraded cluster.
    let victim = cluster.directory.path().join("run/osd.0.pid");
    let mut deadly = test();
    deadly.env("SHADOWBELL_CEPH_VICTIM", victim).arg("a_writer_survives_a_killed_osd");
    step(report, "an OSD is killed under load", &mut deadly);
    report.summary();
    Ok(())
}

/// Running cluster. Stopped when dropped.
struct Cluster {
    directory: tempfile::TempDir,
}

impl Cluster {
    fn start() -> Result<Self> {
        let mut missing: Vec<_> = PROGRAMS
            .iter()
            .filter(|(name, _)| !in_path(name))
            .map(|(_, package)| *package)
            .collect();
        if !missing.is_empty() {
            missing.push("librbd1");
            missing.dedup();
            install(&missing)?;
        }
        let cluster = Self { directory: tempfile::tempdir()? };
        let at = cluster.directory.path().to_owned();
        for name in ["mon", "run", "log"] {
            fs::create_dir(at.join(name))?;
        }
        let fsid = fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned();
        let (one, two) = (free_port()?, free_port()?);
        let address = format!("[v2:127.0.0.1:{one},v1:127.0.0.1:{two}]");
        fs::write(cluster.conf(), configuration(&at, &fsid, &address)?)?;
        let map = at.join("monmap");
        let map = map.to_string_lossy();
        call("monmaptool", &["--create", "--fsid", &fsid, "--addv", "a", &address, &map])?;
        cluster.call("ceph-mon", &["--mkfs", "-i", "a", "--monmap", &map])?;
        cluster.call("ceph-mon", &["-i", "a"])?;
        let until = Instant::now() + START;
        // The command itself waits for a monitor that is slow. But it fails while the monitor's
        // socket does not exist, so it is repeated.
        while let Err(error) = cluster.call("ceph", &["--connect-timeout", "5", "quorum_status"]) {
            if Instant::now() > until {
                return Err(error);
            }
        }
        for _ in 0..OSDS {
            cluster.add_osd()?;
        }
        cluster.call("ceph", &["osd", "pool", "create", "rbd", "8"])?;
        cluster.call("rbd", &["pool", "init", "rbd"])?;
        Ok(cluster)
    }

    fn conf(&self) -> PathBuf {
        self.directory.path().join("ceph.conf")
    }

    fn call(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let conf = self.conf();
        call(program, &[&["-c", &conf.to_string_lossy()], arguments].concat())
    }

    fn add_osd(&self) -> Result<()> {
        let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned();
        let id = self.call("ceph", &["osd", "new", &uuid])?.trim().to_owned();
        fs::create_dir(self.directory.path().join(format!("osd{id}")))?;
        self.call("ceph-osd", &["-i", &id, "--mkfs", "--osd-uuid", &uuid])?;
        self.call("ceph-osd", &["-i", &id])?;
        let name = format!("osd.{id}");
        self.call("ceph", &["osd", "crush", "add", &name, "1.0", "root=default", "host=h"])?;
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let Ok(list) = fs::read_dir(self.directory.path().join("run")) else { return };
        let pids = list.flatten().map(|entry| entry.path());
        for path in pids.filter(|path| path.extension().is_some_and(|e| e == "pid")) {
            let pid = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
            if let Some(pid) = pid.filter(|pid| is_of(*pid, self.directory.path()))
                && let Some(pid) = Pid::from_raw(pid)
            {
                // The daemons are killed, because an orderly end would take long: each would wait
                // for the others. Their data are not needed any more.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// True if the process belongs to this cluster. The process id alone does not show it, because ids
/// are reused.
fn is_of(pid: i32, directory: &Path) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).contains(&*directory.to_string_lossy())
}

/// A TCP port that is free at present.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn configuration(at: &Path, fsid: &str, address: &str) -> Result<String> {
    let at = at.to_string_lossy();
    let mut text = String::from("[global]\n");
    for (name, value) in [
        ("fsid", fsid),
        ("mon_host", address),
        ("auth_cluster_required", "none"),
        ("auth_service_required", "none"),
        ("auth_client_required", "none"),
        ("osd_pool_default_size", "2"),
        ("osd_pool_default_min_size", "1"),
        ("osd_crush_chooseleaf_type", "0"),
        ("osd_objectstore", "memstore"),
        ("memstore_device_bytes", "1073741824"),
        // Without this option, Ceph stores an object that is written at random offsets as many
        // small pieces, so that reads of the object are slow.
        ("memstore_page_set", "true"),
        ("osd_memory_target", "939524096"),
        ("osd_pool_default_pg_num", "8"),
        ("osd_pool_default_pg_autoscale_mode", "off"),
        // A killed OSD is detected within seconds.
        ("osd_heartbeat_grace", "4"),
        ("mon_osd_min_down_reporters", "1"),
        ("public_addr", "127.0.0.1"),
        ("cluster_addr", "127.0.0.1"),
    ] {
        writeln!(text, "{name} = {value}")?;
    }
    for (name, path) in [
        ("mon_data", "mon"),
        ("osd_data", "osd$id"),
        ("run_dir", "run"),
        ("admin_socket", "run/$name.asok"),
        ("log_file", "log/$name.log"),
        ("pid_file", "run/$name.pid"),
    ] {
        writeln!(text, "{name} = {at}/{path}")?;
    }
    Ok(text)
}

fn call(program: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("timeout");
    // A daemon keeps the standard input that it inherits. So it gets /dev/null, and not the
    // standard input of this process.
    let output = command
        .args(["60", program])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| program.to_owned())?;
    if !output.status.success() {
        bail!("{program} {}: {}", arguments.join(" "), last_lines(&output.stderr, 5));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
