//! `cargo xtask soak wakeups`: exports of one disk. The clients of the exports would notice a lost
//! wakeup.
//!
//! Each client has one request in flight, so nothing else ends the sleep of a thread that misses
//! its completion. In the first half of the time, two NBD clients share the disk with VMs that
//! kick random chains and disconnect. In the second half, they share it with an honest VM.
//!
//! # Noise
//!
//! A request also takes long if a busy machine does not run the threads. A control thread with the
//! priority of the clients sleeps for short times, and records when it was woken late, and for how
//! long the server's threads were runnable without a CPU. Such delays, and the time for which its
//! client was runnable without a CPU, are subtracted from the time of a request before it is
//! compared with the limit. A thread that misses a wakeup is not runnable.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use shadowbell_bench::table::Table;
use shadowbell_bench::workspace;
use shadowbell_harness::Report;
use shadowbell_hostile::attack::Clock;
use shadowbell_hostile::peer::nbd::{FLUSH, NbdClient};
use shadowbell_hostile::peer::virtio::VirtioGuest;
use shadowbell_hostile::random::Random;
use shadowbell_hostile::server::Server;
use shadowbell_hostile::victim::{give_way, hurry};
use shadowbell_hostile::watch::{Threads, usage};
use shadowbell_testing::wait;

use super::supervised::make_qcow2;
use super::times::{Times, millis};
use shadowbell_hostile::storage_server;

/// Exported disk: name for the table, disk string, and preparation of its storage.
type Exported = (&'static str, &'static str, Option<fn(&Path) -> Result<()>>);

const DISKS: [Exported; 4] = [
    ("file, page cache", "DIR/cached.img=67108864?direct=off", None),
    ("file, O_DIRECT", "DIR/direct.img=67108864?direct=on", None),
    ("qcow2", "DIR/disk.qcow2?format=qcow2", Some(qcow2_image)),
    ("NBD, limited", "nbd+unix:///?socket=DIR/storage.sock&iops=20000:1", Some(storage_server)),
];
/// Directory of the images. It is in memory, because a slow disk would delay requests.
const DIRECTORY: &str = "/dev/shm";
/// Size of the part of the disk that the clients use. It is small, so that their requests overlap.
const BYTES: u64 = 1 << 20;
const SECTORS: u64 = BYTES / 512;
/// Maximum duration of a request. Normal requests take microseconds, and a request whose wakeup is
/// lost takes far longer than this limit.
const LONGEST: Duration = Duration::from_millis(100);
/// Duration of each sleep of the control thread.
const CONTROL: Duration = Duration::from_millis(10);
// Shortest delay that the control thread records. It is a small part of the time limit of a
// request.
const DELAY: Duration = Duration::from_millis(2);

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Duration in minutes, without start and end
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// Seed of the requests and chains
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Path of a built shadowbell program; without it, one is built
    #[arg(long, value_name = "PATH")]
    shadowbell: Option<PathBuf>,
}

pub(crate) fn run(report: &mut Report, arguments: &Arguments) -> Result<()> {
    if !(0.05..=10_000.0).contains(&arguments.minutes) {
        bail!("--minutes takes 0.05 to 10000");
    }
    let binary = match &arguments.shadowbell {
        Some(path) => path.canonicalize()?,
        None => workspace::build_shadowbell()?,
    };
    soak(report, &binary, Duration::from_secs_f64(arguments.minutes * 60.0), arguments.seed);
    report.summary();
    Ok(())
}

fn soak(report: &mut Report, binary: &Path, time: Duration, seed: u64) {
    report.begin("soak wakeups");
    let mut table = Table::new(
        "Requests to one disk by two exports, times in ms",
        &["disk", "VMs", "chains", "requests", "p50", "p99", "longest", "over 100 ms", "machine"],
    );
    let each = time / (2 * DISKS.len() as u32);
    for (name, disk, prepare) in DISKS {
        for vms in [Vms::Hostile, Vms::Honest] {
            report.check(&format!("{name}, {}", vms.name()), |_| {
                let directory = tempfile::tempdir_in(DIRECTORY).context(DIRECTORY)?;
                let server = Server::export_of(binary, directory, disk, prepare)?;
                let part = part(&server, vms, each, seed)?;
                add(&mut table, name, vms, &part);
                let late = part.late();
                ensure!(late.is_empty(), "requests over 100 ms: {}", late.join(", "));
                ensure!(part.requests.iter().all(|times| times.len() > 10), "hardly any request");
                Ok(())
            });
        }
    }
    report.table(table);
}

/// Makes a qcow2 image of 64 MiB.
fn qcow2_image(directory: &Path) -> Result<()> {
    make_qcow2(&directory.join("disk.qcow2"), 64 << 20)
}

/// VMs beside the NBD clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Vms {
    /// VMs that kick random descriptor chains and disconnect.
    Hostile,
    /// A VM that reads and writes.
    Honest,
}

impl Vms {
    fn name(self) -> &'static str {
        match self {
            Self::Hostile => "hostile VMs",
            Self::Honest => "an honest VM",
        }
    }
}

/// A period of time.
type Period = (Instant, Instant);

/// A request of an honest client.
#[derive(Debug, Clone, Copy)]
struct Request {
    began: Instant,
    ended: Instant,
    /// Time during the request for which the client could run but had no CPU.
    waited: Duration,
}

impl Request {
    fn time(&self) -> Duration {
        self.ended - self.began
    }
}

/// Measures how long each request of the calling thread takes, one request at a time.
struct Requests {
    own: Threads,
    all: Vec<Request>,
}

impl Requests {
    fn new() -> Result<Self> {
        Ok(Self { own: Threads::calling()?, all: Vec::new() })
    }

    /// Executes a request, and records it.
    fn measure(&mut self, request: impl FnOnce() -> Result<()>) -> Result<()> {
        let (waited, began) = (self.own.waited(), Instant::now());
        request()?;
        let ended = Instant::now();
        let waited = self.own.waited().saturating_sub(waited);
        self.all.push(Request { began, ended, waited });
        Ok(())
    }
}

/// Results of one server.
#[derive(Debug, Default)]
struct Part {
    /// Requests of each honest client.
    requests: Vec<Vec<Request>>,
    /// Periods in which the machine delayed the control thread or threads of the server.
    delays: Vec<Period>,
    /// Number of descriptor chains that hostile VMs have submitted.
    chains: u64,
}

impl Part {
    /// Requests that took too long: the time of each, and true if the machine was the cause and not
    /// the server.
    fn long(&self) -> Vec<(Duration, bool)> {
        let all = self.requests.iter().flatten();
        let long = all.filter(|request| request.time() > LONGEST);
        long.map(|Request { began, ended, waited }| {
            let covered: Duration = self
                .delays
                .iter()
                .map(|(from, to)| (*to).min(*ended).saturating_duration_since((*from).max(*began)))
                .sum();
            let time = *ended - *began;
            (time, time.saturating_sub(covered + *waited) <= LONGEST)
        })
        .collect()
    }

    /// Requests that the server delayed.
    fn late(&self) -> Vec<String> {
        let late = self.long().into_iter().filter(|(_, by_machine)| !by_machine);
        late.map(|(time, _)| format!("{:.0} ms", millis(time))).collect()
    }
}

/// Runs all clients of one server for `time`.
fn part(server: &Server, vms: Vms, time: Duration, seed: u64) -> Result<Part> {
    let (nbd, blk) = (server.directory().join("disk.sock"), server.directory().join("blk.sock"));
    let clock = Clock::start(time);
    let part = Mutex::new(Part::default());
    let record = |requests: Vec<Request>| {
        part.lock().unwrap_or_else(std::sync::PoisonError::into_inner).requests.push(requests);
    };
    let (mut chains, mut delays) = (0, Vec::new());
    scope(|threads| {
        let mut all = Vec::new();
        for number in 0..2 {
            let (clock, nbd, record) = (&clock, &nbd, &record);
            all.push(threads.spawn(move || {
                hurry();
                record(nbd_client(nbd, clock, Random::new(seed * 8 + number))?);
                Ok(())
            }));
        }
        let random = Random::new(seed * 8 + 2);
        all.push(match vms {
            Vms::Hostile => threads.spawn(|| {
                give_way();
                chains = hostile_vms(&blk, &clock, random)?;
                Ok(())
            }),
            Vms::Honest => threads.spawn(|| {
                hurry();
                record(honest_vm(&blk, &clock, random)?);
                Ok(())
            }),
        });
        let control = threads.spawn(|| {
            hurry();
            control(&clock, server)
        });
        let panicked = |_| bail!("a client panicked");
        let outcomes: Vec<Result<()>> =
            all.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect();
        clock.stop();
        delays = control.join().unwrap_or_default();
        outcomes.into_iter().collect::<Result<()>>()
    })?;
    let part = part.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    Ok(Part { chains, delays, ..part })
}

/// Periods in which the machine had too few CPUs: this thread slept far longer than requested, or
/// threads of the server could run but had no CPU.
fn control(clock: &Clock, server: &Server) -> Vec<Period> {
    let waited = || usage(&server.processes()).map_or(Duration::ZERO, |usage| usage.waited);
    let (mut delays, mut before) = (Vec::new(), waited());
    while !clock.is_over() {
        let wanted = Instant::now() + CONTROL;
        // The interval of the control.
        sleep(CONTROL);
        let (now, runnable) = (Instant::now(), waited());
        let late = now.saturating_duration_since(wanted);
        let late = late.max(runnable.saturating_sub(before));
        before = runnable;
        if late > DELAY {
            delays.push((now.checked_sub(late).unwrap_or(now), now));
        }
    }
    delays
}

/// Random range of a request: offset and length. Some ranges are not whole blocks of the file
/// system, and ranges often overlap.
fn range(random: &mut Random) -> (u64, usize) {
    let len = if random.below(4) == 0 { 1 + random.below(5000) } else { 4096 };
    let unit = if random.below(4) == 0 { 1 } else { 4096 };
    (random.below((BYTES - 8192) / unit) * unit, len as usize)
}

/// NBD client that reads, writes and flushes. Returns its requests.
fn nbd_client(socket: &Path, clock: &Clock, mut random: Random) -> Result<Vec<Request>> {
    let mut client = NbdClient::attach(socket)?;
    client.stream.set_read_timeout(Some(wait::LIMIT))?;
    let mut requests = Requests::new()?;
    while !clock.is_over() {
        let (offset, len) = range(&mut random);
        let mut data = vec![random.below(256) as u8; len];
        let kind = random.below(16);
        requests
            .measure(|| match kind {
                0 => {
                    client.send(FLUSH, 0, 0, &[])?;
                    client.receive(&mut [])
                }
                1..=8 => client.read(offset, &mut data),
                _ => client.write(offset, &data),
            })
            .context("an NBD client")?;
        // This pause sets the pace of the client. Without it, the server's threads would never
        // sleep, and no wakeup would be tested.
        sleep(Duration::from_micros(random.below(300)));
    }
    Ok(requests.all)
}

/// VM that reads and writes. Returns its requests.
fn honest_vm(socket: &Path, clock: &Clock, mut random: Random) -> Result<Vec<Request>> {
    let mut guest = VirtioGuest::attach(socket)?;
    let mut requests = Requests::new()?;
    while !clock.is_over() {
        let kind = random.below(2) as u32;
        let sectors = 1 + random.below(16);
        let sector = random.below(SECTORS - sectors);
        requests.measure(|| {
            let deadline = wait::deadline();
            guest.submit(kind, sector, sectors as u32 * 512)?;
            while guest.outstanding() != 0 {
                ensure!(Instant::now() < deadline, "a request of the honest VM has no completion");
                // This sleep is short, because it lengthens the request whose duration is measured.
                sleep(Duration::from_micros(50));
            }
            Ok(())
        })?;
        // This pause sets the pace of the VM. Without it, the server's threads would never sleep,
        // and no wakeup would be tested.
        sleep(Duration::from_micros(random.below(300)));
    }
    Ok(requests.all)
}

/// VMs, one after the other, that kick random chains and disconnect. Returns the number of chains.
fn hostile_vms(socket: &Path, clock: &Clock, mut random: Random) -> Result<u64> {
    let mut chains = 0;
    while !clock.is_over() {
        let mut guest = VirtioGuest::attach(socket)?;
        for _ in 0..random.below(8) {
            // The chains are counted even if the device has already disconnected this VM, so that
            // they have no effect.
            chains += guest.offer_random(&mut random, &(0..SECTORS))?;
            // The pace of the attack.
            sleep(Duration::from_micros(random.below(2000)));
        }
    }
    Ok(chains)
}

fn add(table: &mut Table, disk: &str, vms: Vms, part: &Part) {
    let times = Times::of(part.requests.iter().flatten().map(Request::time));
    let long = part.long();
    let by_machine = long.iter().filter(|(_, by_machine)| *by_machine).count();
    let mut cells = vec![
        disk.to_owned(),
        vms.name().to_owned(),
        part.chains.to_string(),
        times.count().to_string(),
    ];
    cells.extend(times.cells());
    cells.extend([(long.len() - by_machine).to_string(), by_machine.to_string()]);
    let longest = times.at(1.0).as_nanos() as u64;
    table.push(
        cells,
        json!({
            "table": "wakeups",
            "disk": disk,
            "vms": vms.name(),
            "chains": part.chains,
            "requests": times.count(),
            "longest_ns": longest,
            "over": long.len() - by_machine,
            "by_machine": by_machine,
        }),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_by_the_machine_are_subtracted_from_the_time_of_a_request() {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let request = |from, to| Request { began: at(from), ended: at(to), waited: Duration::ZERO };
        let mut part = Part {
            requests: vec![vec![request(0, 50), request(100, 300), request(1000, 2000)]],
            delays: vec![(at(0), at(160)), (at(1150), at(2000))],
            chains: 0,
        };
        assert_eq!(part.late(), ["200 ms", "1000 ms"]);
        part.delays.push((at(250), at(290)));
        assert_eq!(part.late(), ["1000 ms"]);
        part.requests[0][2].waited = Duration::from_millis(60);
        assert!(part.late().is_empty());
    }
}
