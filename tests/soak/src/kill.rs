//! `cargo xtask soak kill`: kills the server process repeatedly, and checks that clients lose no
//! data and no command.
//!
//! Each disk has a client in this process, which is not killed. The client keeps 128 commands in
//! flight and verifies each read: it must return the acknowledged write or a later one.
//!
//! The server process is killed at random moments, mostly by SIGKILL, sometimes by a signal that
//! simulates a crash. Sometimes the next server process is killed as well, during or shortly after
//! recovery. Each client measures the time without a completion: from the last completion before a
//! kill to the first one after it. The next kill follows when each client has received twice as
//! many completions as it keeps commands in flight, so that each client reads and writes between
//! two kills.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use rustix::process::Signal;
use serde_json::json;
use shadowbell_bench::table::Table;
use shadowbell_bench::workspace;

use super::clients::{self, Totals, wait_for_turnover};
use super::load::{Meter, Pace};
use super::phases::Phases;
use super::supervised::{DiskKind, SupervisedServer, signal};
use super::times::{Times, millis};
use shadowbell_harness::Report;
use shadowbell_hostile::random::Random;

/// Number of commands that each client has in flight.
const DEPTH: u32 = 128;
/// Interval of progress lines.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum time for which a server process serves before it is killed; a random time is added. It
/// is more than 50 ms, because the supervisor delays the restart of a process that has served for
/// less.
const MIN_SERVED: Duration = Duration::from_millis(60);
// Random part of the time before a kill.
const MAX_RANDOM_DELAY: Duration = Duration::from_millis(140);
/// Maximum of the random time between a kill and a second kill (of the next server process).
const MAX_SECOND_KILL_DELAY: Duration = Duration::from_millis(60);
/// Ratio of all kills to those with a signal other than SIGKILL, and to those that are followed by
/// a kill of the next server process.
const OTHER_SIGNAL_EVERY: u64 = 12;
const DOUBLE_KILL_EVERY: u64 = 8;
/// Number of disk types.
const KINDS: usize = DiskKind::ALL.len();

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of kills
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    kills: u32,
    /// Seed of the random moments and data
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of controllers. The disks are in turn: file with O_DIRECT, file through the page
    /// cache, memory, null
    #[arg(long, default_value_t = KINDS as u16, value_parser = clap::value_parser!(u16).range(1..=256))]
    controllers: u16,
    /// Disk types to use instead, in turn
    #[arg(long, value_name = "KIND")]
    disk: Vec<DiskKind>,
    /// One in this many commands is a flush; 0: none. Recovery waits for a flush in flight, so
    /// flushes lengthen the time without a completion
    #[arg(long, default_value_t = 0)]
    flush_every: u64,
    /// Number of I/O threads of the server
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    workers: u8,
    /// Control: write older data into an image from time to time, like a stale write. Passes if
    /// verification fails
    #[arg(long)]
    control: bool,
    /// Print the duration of each step of recovery (the server logs more)
    #[arg(long)]
    phases: bool,
    /// Path of a built shadowbell program; without it, one is built
    #[arg(long, value_name = "PATH")]
    shadowbell: Option<PathBuf>,
}

pub(crate) fn run(report: &mut Report, arguments: &Arguments) -> Result<()> {
    let binary = match &arguments.shadowbell {
        Some(path) => path.canonicalize()?,
        None => workspace::build_shadowbell()?,
    };
    soak(report, &binary, arguments);
    report.summary();
    Ok(())
}

/// Short run as a step of `cargo xtask test`: some kills, and the control.
pub fn test(report: &mut Report, binary: &Path) {
    let few = Arguments {
        kills: TEST_KILLS,
        seed: 1,
        controllers: KINDS as u16,
        disk: Vec::new(),
        flush_every: 4096,
        workers: 2,
        control: false,
        phases: false,
        shadowbell: None,
    };
    soak(report, binary, &few);
    soak(report, binary, &Arguments { kills: 10, control: true, ..few });
}

/// Run with a controller for each disk type.
pub(crate) fn all_kinds(report: &mut Report, binary: &Path, kills: u32, seed: u64) {
    let disk = DiskKind::value_variants().to_vec();
    let all = Arguments {
        kills,
        seed,
        controllers: disk.len() as u16,
        disk,
        flush_every: 4096,
        workers: 2,
        control: false,
        phases: false,
        shadowbell: None,
    };
    soak(report, binary, &all);
}

impl Arguments {
    /// Disk types. The controllers use them in turn.
    fn kinds(&self) -> &[DiskKind] {
        if self.disk.is_empty() { &DiskKind::ALL } else { &self.disk }
    }
}

/// Number of kills in `cargo xtask test`.
const TEST_KILLS: u32 = 200;

fn soak(report: &mut Report, binary: &Path, arguments: &Arguments) {
    let what = if arguments.control { ", with old data written into an image" } else { "" };
    report.begin(&format!("soak kill{what}"));
    let single = vec![Times::default(); arguments.kinds().len()];
    let mut gaps = Gaps { single, ..Gaps::default() };
    if arguments.control {
        report.check("old data are detected", |_| match work(binary, arguments, &mut gaps) {
            Err(error) if format!("{error:#}").contains("which was acknowledged") => {
                println!("   {error:#}");
                Ok(())
            }
            Err(error) => Err(error),
            Ok(_) => bail!("the old data were not detected"),
        });
        return;
    }
    report.check("no acknowledged write is lost or overwritten by an older one, no error", |_| {
        work(binary, arguments, &mut gaps).map(drop)
    });
    report.table(gaps.table(arguments));
    if let Some(phases) = gaps.phases {
        report.table(phases.table());
    }
}

/// Measured times without a completion.
#[derive(Debug, Default)]
struct Gaps {
    kills: u32,
    /// Time without a completion after a single kill, by disk type.
    single: Vec<Times>,
    /// Time without a completion after a double kill. Its second kill is for the next server
    /// process, which may not have started serving.
    double: Times,
    /// Time from a kill until the next server process exists.
    until_next: Times,
    /// Time without a completion in the intervals between kills, for comparison.
    idle_gaps: Times,
    phases: Option<Phases>,
    totals: Totals,
}

impl Gaps {
    fn add(&mut self, meters: &[Meter], is_double: bool) {
        for (number, meter) in meters.iter().enumerate() {
            let gap = meter.take().gap;
            if is_double {
                self.double.push(gap);
            } else {
                let kinds = self.single.len();
                self.single.iter_mut().skip(number % kinds).take(1).for_each(|t| t.push(gap));
            }
        }
    }

    /// Times without a completion after a single kill, of all disk types together.
    fn all(&self) -> Times {
        let mut all = Times::default();
        self.single.iter().for_each(|times| all.append(times));
        all
    }

    fn table(&self, arguments: &Arguments) -> Table {
        let mut table = Table::new(
            "time without a completion around a kill, ms",
            &["disk", "kills", "p50", "p99", "longest"],
        );
        let kinds = arguments.kinds().iter().map(|kind| kind.name()).zip(&self.single);
        let all = self.all();
        let rest = [
            ("all disk types", &all),
            ("next process killed, too", &self.double),
            ("until the next process exists", &self.until_next),
            ("without a kill", &self.idle_gaps),
        ];
        for (name, times) in kinds.chain(rest) {
            let cells = [vec![name.to_owned(), times.count().to_string()], times.cells()].concat();
            let [p50, p99, longest] = [0.5, 0.99, 1.0].map(|share| millis(times.at(share)));
            let json = json!({
                "table": "soak kill", "disk": name, "kills": times.count(), "p50_ms": p50,
                "p99_ms": p99, "longest_ms": longest,
            });
            table.push(cells, json);
        }
        table.notes.push(format!(
            "{} kills of {} controllers in {:.0} s; {} commands, {} blocks verified. Targets: p50 50 \
             ms, p99 250 ms.",
            self.kills,
            arguments.controllers,
            self.totals.seconds,
            self.totals.commands,
            self.totals.blocks
        ));
        table
    }
}

/// Kills the server process as often as requested, and verifies the disks.
fn work(binary: &Path, arguments: &Arguments, gaps: &mut Gaps) -> Result<()> {
    let kinds = arguments.kinds().iter().copied().cycle();
    let kinds: Vec<_> = kinds.take(arguments.controllers.into()).collect();
    let options: &[&str] = if arguments.phases { &["-v"] } else { &[] };
    let mut supervised = SupervisedServer::serve(binary, options, &kinds, arguments.workers)?;
    let mut totals = Totals::default();
    let outcome = clients::work(
        &mut supervised,
        arguments.seed,
        |_| pace(arguments),
        &mut totals,
        |supervised, meters| kill(supervised, arguments, meters, gaps),
    );
    let outcome = outcome.and_then(|()| supervised.check_images());
    gaps.totals = totals;
    if arguments.phases {
        let log = fs::read_to_string(supervised.server.directory().join("log"))?;
        gaps.phases = Some(Phases::read(&log));
    }
    outcome
}

fn pace(arguments: &Arguments) -> Pace {
    Pace { depth: DEPTH, rest: Duration::ZERO, flush_every: arguments.flush_every }
}

fn kill(
    supervised: &mut SupervisedServer,
    arguments: &Arguments,
    meters: &[Meter],
    gaps: &mut Gaps,
) -> Result<()> {
    let mut random = Random::new(arguments.seed);
    let (began, mut line) = (Instant::now(), Instant::now() + LINE_INTERVAL);
    let mut worker = supervised.next_worker(None)?;
    wait_for_turnover(supervised, meters, |_| pace(arguments))?;
    while gaps.kills < arguments.kills {
        for meter in meters {
            let _ = meter.take();
        }
        // Random moment of the kill, because clients must lose nothing at any moment.
        sleep(MIN_SERVED + MAX_RANDOM_DELAY.mul_f64(random.share()));
        let old = arguments.control.then(|| OldData::read(supervised)).flatten();
        gaps.idle_gaps.append(&Times::of(meters.iter().map(|meter| meter.take().gap)));
        let how = match random.below(OTHER_SIGNAL_EVERY) {
            0 if random.below(2) == 0 => Signal::ABORT,
            0 => Signal::ILL,
            _ => Signal::KILL,
        };
        let is_last = gaps.kills + 1 == arguments.kills;
        let is_double = how == Signal::KILL && random.below(DOUBLE_KILL_EVERY) == 0 && !is_last;
        let killed = Instant::now();
        signal(worker, how)?;
        gaps.kills += 1;
        worker = supervised.next_worker(Some(worker))?;
        if !is_double {
            gaps.until_next.push(killed.elapsed());
        }
        if is_double {
            // Random moment of the second kill, because clients must lose nothing at any moment.
            sleep(MAX_SECOND_KILL_DELAY.mul_f64(random.share()));
            signal(worker, Signal::KILL)?;
            gaps.kills += 1;
            worker = supervised.next_worker(Some(worker))?;
        }
        wait_for_turnover(supervised, meters, |_| pace(arguments)).with_context(|| {
            let again = if is_double { ", and once more" } else { "" };
            format!("after {} kills, of which the last was {how:?}{again}", gaps.kills)
        })?;
        gaps.add(meters, is_double);
        if let Some(old) = old {
            old.restore()?;
        }
        if Instant::now() >= line {
            line += LINE_INTERVAL;
            print_line(gaps, &Totals::of(meters, began));
        }
    }
    if arguments.control {
        wait_for_turnover(supervised, meters, |_| pace(arguments))?;
    }
    Ok(())
}

/// Content of an image at an earlier time, for the control run.
struct OldData {
    image: PathBuf,
    bytes: Vec<u8>,
}

impl OldData {
    /// Reads the whole image of the last disk that has one.
    fn read(supervised: &SupervisedServer) -> Option<Self> {
        let image =
            (0..supervised.kinds().len()).rev().find_map(|number| supervised.image(number))?;
        let bytes = fs::read(&image).ok()?;
        Some(Self { image, bytes })
    }

    /// Writes the older data into the image, like a stale write.
    fn restore(&self) -> Result<()> {
        use std::os::unix::fs::FileExt;
        let file = fs::OpenOptions::new().write(true).open(&self.image)?;
        file.write_all_at(&self.bytes, 0).context("putting old data back")
    }
}

fn print_line(gaps: &Gaps, totals: &Totals) {
    let all = gaps.all();
    println!(
        "{:6.0} s  {} kills, {} commands, {} blocks verified; time without a completion: p50 {:.0} \
         ms, p99 {:.0} ms, longest {:.0} ms",
        totals.seconds,
        gaps.kills,
        totals.commands,
        totals.blocks,
        millis(all.at(0.5)),
        millis(all.at(0.99)),
        millis(all.at(1.0)),
    );
}
