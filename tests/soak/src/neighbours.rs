//! `cargo xtask soak neighbours`: one server with hundreds of controllers. An eighth of them
//! belongs to attackers.

use shadowbell_testing::wait::LIMIT;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use shadowbell_bench::workspace;

use super::attackers::{Attacker, Disk};
use super::counters::{Counters, value};
use super::honest::{self, DISK, DISK_BYTES, HonestGuest, TIMEOUT, drive};
use shadowbell_harness::Report;
use shadowbell_hostile::server::{LogReader, Server, Setup};
use shadowbell_hostile::watch::{Usage, usage};

/// Ratio of all controllers to those of attackers.
const HOSTILE: usize = 8;
/// Number of threads that run the honest guests.
const DRIVERS: usize = 4;
/// Interval of progress lines.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// Interval between two measurements of the server's memory.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum time from SIGTERM to the end of the server, and maximum growth of the server's memory
/// and page tables per attacker, in bytes.
const MAX_STOP_TIME: Duration = Duration::from_secs(5);
const MAX_GROWTH: u64 = 64 << 20;
/// Maximum number of descriptors that the attackers use.
const DESCRIPTORS: u64 = 1 << 18;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Duration in minutes, without start and end
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// Number of controllers; every eighth is attacked
    #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u16).range(8..=4000))]
    controllers: u16,
    /// Number of I/O threads of the server
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    workers: u8,
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
    report.begin("soak neighbours");
    let mut soak = Soak::begin(&binary, arguments)?;
    let end = soak.work(Duration::from_secs_f64(arguments.minutes * 60.0));
    soak.check_results(report, end);
    report.summary();
    Ok(())
}

/// A server and its clients.
struct Soak {
    server: Server,
    honest: Vec<HonestGuest>,
    attackers: Vec<Attacker>,
    counters: Counters,
    /// Resource usage of the server before the first attack, and the maximum during the attacks.
    before: Usage,
    peak: Usage,
    began: Instant,
}

/// Results at the end.
struct EndResults {
    /// Result of the check at the end: a new client attaches and executes commands.
    final_check: Result<()>,
    /// Time from SIGTERM to the end of the server, while attacks run. `None` if the server has not
    /// ended.
    end: Result<Option<Duration>>,
}

impl Soak {
    /// Starts the server, and attaches the honest guests.
    fn begin(binary: &std::path::Path, arguments: &Arguments) -> Result<Self> {
        let count = usize::from(arguments.controllers);
        let is_hostile = |number: usize| number % HOSTILE == HOSTILE - 1;
        let disk = |number: usize| match number {
            _ if is_hostile(number) => Disk::of(number / HOSTILE).target(number),
            _ if number.is_multiple_of(2) => format!("mem:{DISK}"),
            _ => format!("DIR/honest{number}.img={DISK_BYTES}"),
        };
        let disks: Vec<String> = (0..count).map(disk).collect();
        let began = Instant::now();
        // The server inherits the default descriptor limit. So this process raises its own limit
        // only after it has started the server.
        let workers = usize::from(arguments.workers);
        let setup = Setup { workers, ..Setup::default() };
        let server = Server::serve_with(binary, &disks, setup, LogReader::File)?;
        raise_descriptor_limit();
        let mut honest = Vec::new();
        for number in (0..count).filter(|number| !is_hostile(*number)) {
            let guest = HonestGuest::attach(number as u64, server.socket(number));
            honest.push(guest.with_context(|| format!("controller {number}"))?);
        }
        let attackers: Vec<Attacker> = (0..count)
            .filter(|number| is_hostile(*number))
            .map(|number| Attacker {
                number: number / HOSTILE,
                socket: server.socket(number),
                disk: Disk::of(number / HOSTILE),
            })
            .collect();
        let before = usage(&server.processes())?;
        println!(
            "{} honest controllers and {} that are attacked, {workers} workers; started in {:.1} s",
            honest.len(),
            attackers.len(),
            began.elapsed().as_secs_f64()
        );
        let (counters, peak) = (Counters::default(), before);
        Ok(Self { server, honest, attackers, counters, before, peak, began: Instant::now() })
    }

    /// Runs attackers and honest guests for the duration `time`, checks that the server answers a
    /// new client, and ends the server.
    fn work(&mut self, time: Duration) -> EndResults {
        let Self { server, honest, attackers, counters, peak, began, .. } = self;
        let (server, counters) = (server, &*counters);
        *began = Instant::now();
        let until = *began + time;
        let (stop, exclusive) = (AtomicBool::new(false), Mutex::new(()));
        let directory = server.directory().to_owned();
        let (stop, exclusive, directory) = (&stop, &exclusive, directory.as_path());
        scope(|threads| {
            for attacker in attackers.iter() {
                threads.spawn(move || attacker.run(directory, stop, exclusive, counters));
            }
            let share = honest.len().div_ceil(DRIVERS);
            let drivers: Vec<_> = honest
                .chunks_mut(share)
                .map(|guests| threads.spawn(move || drive(guests, until, counters)))
                .collect();
            let mut line = *began + LINE_INTERVAL;
            while drivers.iter().any(|driver| !driver.is_finished()) {
                sleep(POLL_INTERVAL);
                let now = usage(&server.processes()).unwrap_or_default();
                peak.memory = peak.memory.max(now.memory);
                peak.page_tables = peak.page_tables.max(now.page_tables);
                if Instant::now() >= line {
                    line += LINE_INTERVAL;
                    print_line(counters, began.elapsed(), now, server.logged());
                }
            }
            if drivers.into_iter().any(|driver| driver.join().is_err()) {
                counters.error("a thread of honest guests panicked".to_owned());
            }
            let final_check =
                server.check().and_then(|()| honest::check_responds(&server.socket(0)));
            // The attacks continue while the server ends.
            let end = server.terminate(LIMIT);
            if !matches!(end, Ok(Some(_))) {
                server.kill();
            }
            stop.store(true, Ordering::Relaxed);
            EndResults { final_check, end }
        })
    }

    fn check_results(&self, report: &mut Report, end: EndResults) {
        let counters = &self.counters;
        println!(
            "{} commands, {} blocks verified, {} reconnects; the longest of these took {:.0} ms",
            value(&counters.commands),
            value(&counters.blocks),
            value(&counters.attached),
            counters.longest().as_secs_f64() * 1e3
        );
        println!(
            "{} attacks, of which {} ended early{}; longest reset {:.0} ms",
            value(&counters.attacks),
            value(&counters.aborted),
            counters.last_aborted().map_or_else(String::new, |why| format!(" (the last: {why})")),
            counters.longest_reset().as_secs_f64() * 1e3
        );
        let memory = self.peak.memory.saturating_sub(self.before.memory);
        let page_tables = self.peak.page_tables.saturating_sub(self.before.page_tables);
        println!(
            "the server grew by {} MiB, disks in memory included, and {} MiB of page tables, and logged \
             {} KiB",
            memory >> 20,
            page_tables >> 20,
            self.server.logged() >> 10
        );
        let name = format!("no error, and no command that takes {} s", TIMEOUT.as_secs());
        report.check(&name, |_| match value(&counters.errors) {
            0 if value(&counters.commands) > 0 => Ok(()),
            errors => bail!("{errors} errors:\n{}", counters.messages().join("\n")),
        });
        report.check("every block has the data that were written", |_| {
            match value(&counters.bad_blocks) {
                0 if value(&counters.blocks) > 0 => Ok(()),
                bad => bail!("{bad} bad blocks:\n{}", counters.messages().join("\n")),
            }
        });
        let bound = MAX_GROWTH * self.attackers.len() as u64;
        report.check("the server grows by at most 64 MiB for each attacker", |_| {
            if memory + page_tables > bound {
                bail!("by {} MiB", (memory + page_tables) >> 20);
            }
            Ok(())
        });
        report.check("the server answers a new client at the end", |_| end.final_check);
        report.check("SIGTERM ends the server within 5 s, under attack", |_| match end.end? {
            Some(time) if time <= MAX_STOP_TIME => Ok(()),
            Some(time) => bail!("it took {time:.1?}"),
            None => bail!("not within {LIMIT:?}"),
        });
    }
}

fn print_line(counters: &Counters, time: Duration, now: Usage, logged: u64) {
    println!(
        "{:6.0} s  {} commands, {} errors, {} bad blocks, longest since the last line {:.0} ms; {} attacks; the \
         server has {} MiB, {} MiB of page tables and {} KiB of log",
        time.as_secs_f64(),
        value(&counters.commands),
        value(&counters.errors),
        value(&counters.bad_blocks),
        counters.longest_since_last_call().as_secs_f64() * 1e3,
        value(&counters.attacks),
        now.memory >> 20,
        now.page_tables >> 20,
        logged >> 10
    );
}

/// Raises the descriptor limit to the number that the attackers use, if permitted.
fn raise_descriptor_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= DESCRIPTORS) {
        return;
    }
    let wanted = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
    let has_enough = maximum.is_none_or(|maximum| maximum >= DESCRIPTORS);
    let raised = !has_enough && setrlimit(Resource::Nofile, wanted).is_ok();
    if !raised {
        // Without privilege, the limit can be raised only to the hard limit. Attacks that need more
        // descriptors then end early with an error.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
}
