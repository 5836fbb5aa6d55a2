//! `cargo xtask soak upgrade`: restarts the server for upgrade repeatedly, and checks that clients
//! lose no data and no command.
//!
//! Each controller has a client that keeps 32 commands in flight and verifies its data. Four of the
//! clients, one for each disk type, make only very short pauses, and measure the time without a
//! completion. The other clients make longer pauses, because otherwise their load would exceed the
//! CPUs of this machine. The duration of the longest command of all clients is reported.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;
use shadowbell_bench::table::Table;
use shadowbell_bench::workspace;

use super::clients::{self, Totals, wait_for_turnover};
use super::load::{Meter, Pace};
use super::supervised::{DiskKind, SupervisedServer};
use super::times::{Times, millis};
use shadowbell_harness::Report;
use shadowbell_hostile::random::Random;

/// Number of commands that each client has in flight.
const DEPTH: u32 = 32;
/// Number of clients with very short pauses.
const BUSY: usize = DiskKind::ALL.len();
// The pace of a client with very short pauses.
const SHORT_PAUSE: Duration = Duration::from_micros(500);
// The pace of the other clients.
const LONG_PAUSE: Duration = Duration::from_millis(50);
/// Interval of progress lines.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum time until the next upgrade; a random time is added.
const MIN_INTERVAL: Duration = Duration::from_millis(50);
// Random part of the time until the next upgrade.
const MAX_RANDOM_DELAY: Duration = Duration::from_millis(100);

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of upgrades
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    upgrades: u32,
    /// Seed of the random moments and data
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of controllers. The disks are in turn: file with O_DIRECT, file through the page
    /// cache, memory, null
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=256))]
    controllers: u16,
    /// One in this many commands is a flush; 0: none. The replacement waits for a flush in flight,
    /// so flushes lengthen the time without a completion
    #[arg(long, default_value_t = 0)]
    flush_every: u64,
    /// Number of I/O threads of the server
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    workers: u8,
    /// Path of the program of the previous release: the server alternates between both
    #[arg(long, value_name = "PATH")]
    previous: Option<PathBuf>,
    /// Path of a built shadowbell program; without it, one is built
    #[arg(long, value_name = "PATH")]
    shadowbell: Option<PathBuf>,
}

pub(crate) fn run(report: &mut Report, arguments: &Arguments) -> Result<()> {
    let binary = match &arguments.shadowbell {
        Some(path) => path.canonicalize()?,
        None => workspace::build_shadowbell()?,
    };
    let previous = arguments.previous.as_ref();
    let previous = previous.map(|path| path.canonicalize().context(path.display().to_string()));
    let programs = [Some(binary), previous.transpose()?];
    let programs: Vec<PathBuf> = programs.into_iter().flatten().collect();
    report.begin("soak upgrade");
    let mut measured = Measurements::default();
    report.check("no write is lost or overwritten by an older one, no error", |_| {
        let kinds: Vec<_> = (0..usize::from(arguments.controllers)).map(DiskKind::of).collect();
        let first = programs.first().context("no program")?;
        let mut supervised = SupervisedServer::serve(first, &[], &kinds, arguments.workers)?;
        let mut totals = Totals::default();
        let pace = |number| self::pace(arguments, number);
        let outcome = clients::work(
            &mut supervised,
            arguments.seed,
            pace,
            &mut totals,
            |supervised, meters| upgrade(supervised, arguments, &programs, meters, &mut measured),
        );
        measured.totals = totals;
        outcome
    });
    report.table(measured.table(arguments));
    report.summary();
    Ok(())
}

fn pace(arguments: &Arguments, number: usize) -> Pace {
    let rest = if number < BUSY { SHORT_PAUSE } else { LONG_PAUSE };
    Pace { depth: DEPTH, rest, flush_every: arguments.flush_every }
}

/// Measured times and outcomes.
#[derive(Debug, Default)]
struct Measurements {
    upgrades: u32,
    /// Number of upgrades in which a client did not quiesce in time, so that the next process had
    /// to wait for the fence.
    fenced: u32,
    /// Upgrades that were refused because the other program does not support the state's version.
    refused: u32,
    /// Time without a completion, by disk type.
    gaps: [Times; BUSY],
    /// Duration of the longest command of any client, for each upgrade.
    commands: Times,
    /// Time without a completion in the intervals between upgrades, for comparison.
    idle_gaps: Times,
    totals: Totals,
}

impl Measurements {
    fn add(&mut self, meters: &[Meter]) {
        let longest: Vec<_> = meters.iter().map(Meter::take).collect();
        for (times, longest) in self.gaps.iter_mut().zip(&longest) {
            times.push(longest.gap);
        }
        self.commands.push(longest.iter().map(|one| one.command).max().unwrap_or_default());
    }

    fn all(&self) -> Times {
        let mut all = Times::default();
        self.gaps.iter().for_each(|times| all.append(times));
        all
    }

    fn table(&self, arguments: &Arguments) -> Table {
        let mut table = Table::new(
            "time without a completion around an upgrade, ms",
            &["disk", "upgrades", "p50", "p99", "longest"],
        );
        let all = self.all();
        let kinds = DiskKind::ALL.map(DiskKind::name).into_iter().zip(&self.gaps);
        let rest = [
            ("all disk types", &all),
            ("longest command of any controller", &self.commands),
            ("without an upgrade", &self.idle_gaps),
        ];
        for (name, times) in kinds.chain(rest) {
            let cells = [vec![name.to_owned(), times.count().to_string()], times.cells()].concat();
            let [p50, p99, longest] = [0.5, 0.99, 1.0].map(|share| millis(times.at(share)));
            let json = json!({
                "table": "soak upgrade", "disk": name, "upgrades": times.count(), "p50_ms": p50,
                "p99_ms": p99, "longest_ms": longest,
            });
            table.push(cells, json);
        }
        table.notes.push(format!(
            "{} upgrades of {} controllers in {:.0} s, {} of them fenced, {} refused; {} commands, {} \
             blocks verified. Targets: p50 15 ms, p99 50 ms.",
            self.upgrades,
            arguments.controllers,
            self.totals.seconds,
            self.fenced,
            self.refused,
            self.totals.commands,
            self.totals.blocks
        ));
        table
    }
}

/// Outcome of an upgrade.
enum Outcome {
    Done,
    /// The upgrade is done, but a client did not quiesce in time, so the next process waited for
    /// the fence.
    Fenced,
    Refused(String),
}

fn upgrade(
    supervised: &mut SupervisedServer,
    arguments: &Arguments,
    programs: &[PathBuf],
    meters: &[Meter],
    measured: &mut Measurements,
) -> Result<()> {
    let mut random = Random::new(arguments.seed);
    let (began, mut line) = (Instant::now(), Instant::now() + LINE_INTERVAL);
    let mut next = programs.iter().cycle().skip(1);
    wait_for_turnover(supervised, meters, |number| pace(arguments, number))?;
    while measured.upgrades + measured.refused < arguments.upgrades {
        for meter in meters {
            let _ = meter.take();
        }
        // Random moment of the upgrade, because clients must lose nothing at any moment.
        sleep(MIN_INTERVAL + MAX_RANDOM_DELAY.mul_f64(random.share()));
        measured
            .idle_gaps
            .append(&Times::of(meters.iter().take(BUSY).map(|meter| meter.take().gap)));
        let program = next.next().context("no program")?;
        let requester = programs.first().context("no program")?;
        match request_upgrade(requester, supervised.server.id(), program)? {
            Outcome::Done => measured.upgrades += 1,
            Outcome::Fenced => {
                measured.upgrades += 1;
                measured.fenced += 1;
            }
            Outcome::Refused(why) => {
                if measured.refused == 0 {
                    println!("   {why}");
                }
                measured.refused += 1;
            }
        }
        wait_for_turnover(supervised, meters, |number| pace(arguments, number))
            .with_context(|| format!("after {} upgrades", measured.upgrades))?;
        measured.add(meters);
        if Instant::now() >= line {
            line += LINE_INTERVAL;
            print_line(measured, &Totals::of(meters, began));
        }
    }
    Ok(())
}

/// Requests an upgrade from the supervisor, and waits for the outcome.
fn request_upgrade(requester: &Path, supervisor: u32, program: &Path) -> Result<Outcome> {
    let mut command = Command::new(requester);
    command.args(["upgrade", &supervisor.to_string(), "--binary"]).arg(program);
    let output = command.output().context("shadowbell upgrade")?;
    let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    match output.status.code() {
        Some(0) if String::from_utf8_lossy(&output.stdout).contains("did not quiesce") => {
            Ok(Outcome::Fenced)
        }
        Some(0) => Ok(Outcome::Done),
        Some(1) if why.contains("this program reads versions") => Ok(Outcome::Refused(why)),
        _ => bail!("shadowbell upgrade: {}: {why}", output.status),
    }
}

fn print_line(measured: &Measurements, totals: &Totals) {
    let all = measured.all();
    println!(
        "{:6.0} s  {} upgrades, {} of them fenced, {} refused, {} commands, {} blocks verified; time \
         without a completion: p50 {:.1} ms, p99 {:.1} ms, longest {:.1} ms",
        totals.seconds,
        measured.upgrades,
        measured.fenced,
        measured.refused,
        totals.commands,
        totals.blocks,
        millis(all.at(0.5)),
        millis(all.at(0.99)),
        millis(all.at(1.0)),
    );
}
