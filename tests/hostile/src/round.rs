//! One round of an attack: server, victim, attackers, and the outcome.

use shadowbell_testing::wait::LIMIT;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::attack::{Attack, Clock, Field, Kind};
use super::server::{LogReader, Server, Setup};
use super::victim::{Seen, Victim, give_way, hurry};
use super::watch::{Serving, Usage, usage};

/// Interval between two measurements of the server's memory.
const POLL: Duration = Duration::from_millis(20);

/// Durations of the steps of a round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// Duration of the measurement of the victim without an attack.
    pub baseline: Duration,
    pub attacked: Duration,
    /// Duration of the second attack before SIGTERM.
    pub before_end: Duration,
}

/// Outcome of a round.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub baseline: Seen,
    pub attacked: Seen,
    /// Maximum growth of the server's own memory and page tables, in bytes.
    pub memory: u64,
    pub page_tables: u64,
    pub log_rate: Option<u64>,
    /// Longest reset of an attacker.
    pub reset: Option<Duration>,
    /// Time from SIGTERM to the server's end; `None` if the server did not end.
    pub end: Option<Duration>,
    /// Time for which the server's threads were runnable without a CPU during the attack.
    pub waited: Duration,
    pub done: u64,
    pub refused: u64,
    /// Reason for an early end of the attack.
    pub gave_up: Option<String>,
    /// Failures other than exceeded bounds, such as a refused reset.
    pub wrong: Vec<String>,
    pub hostile: Option<Kind>,
}

/// Executes one round.
pub(crate) fn round(binary: &Path, attack: &Attack, times: Times) -> Result<Outcome> {
    let (mut server, mut victim) = begin(binary, attack)?;
    let mut outcome = Outcome { hostile: Some(attack.kind), ..Outcome::default() };
    let served_by = Serving::of(server.worker())?;
    // Warm-up, whose figures are discarded: it fills caches, and the I/O thread learns its poll
    // time.
    observe(&mut victim, Duration::from_millis(50), &served_by)?;
    outcome.baseline =
        observe(&mut victim, times.baseline, &served_by).context("the victim alone")?;

    let before = usage(&server.processes())?;
    let logged = server.logged();
    let began = Instant::now();
    let mut field = field(binary, &server, attack, Clock::start(times.attacked));
    let (seen, ran, peak) = under_attack(&server, (&mut victim, &served_by), attack, &mut field);
    let after = usage(&server.processes()).unwrap_or_default();
    outcome.waited = after.waited.saturating_sub(before.waited);
    outcome.memory = peak.memory.saturating_sub(before.memory);
    outcome.page_tables = peak.page_tables.saturating_sub(before.page_tables);
    if attack.log == LogReader::File {
        let bytes = server.logged().saturating_sub(logged) as f64;
        // The log's rate limit lets one second's amount pass at once. An attack shorter than one
        // second counts as one second.
        outcome.log_rate = Some((bytes / began.elapsed().as_secs_f64().max(1.0)) as u64);
    }
    match seen {
        Ok(seen) => outcome.attacked = seen,
        Err(error) => outcome.wrong.push(format!("the victim: {error:#}")),
    }
    outcome.wrong.append(&mut field.found);
    let checked = match attack.kind {
        Kind::Counted => server.await_process(),
        _ => Ok(()),
    };
    if let Err(error) = checked.and_then(|()| server.check()) {
        outcome.wrong.push(error.to_string());
        return Ok(outcome);
    }
    (outcome.done, outcome.refused) = (field.done, field.refused);
    outcome.gave_up = ran.err().map(|error| format!("{error:#}"));
    if !outcome.attacked.lost {
        reset_all(&mut field, &mut outcome);
        end_under_attack(&mut server, attack, field, times, &mut outcome)?;
    }
    Ok(outcome)
}

/// Starts a server for the attack, and attaches the victim.
fn begin(binary: &Path, attack: &Attack) -> Result<(Server, Victim)> {
    if matches!(attack.kind, Kind::Export | Kind::CountedExport) {
        let server = Server::export(binary)?;
        let victim = Victim::attach_nbd(&server.directory().join("disk.sock"));
        return Ok((server, victim.context("the victim")?));
    }
    let disks: Vec<String> = std::iter::once("mem:16MiB")
        .chain(attack.disks.iter().copied())
        .map(str::to_owned)
        .collect();
    let setup = Setup { options: attack.options, prepare: attack.prepare, ..Setup::default() };
    let server = Server::serve_with(binary, &disks, setup, attack.log)?;
    let victim = Victim::attach(&server.socket(0)).context("the victim")?;
    Ok((server, victim))
}

fn field(binary: &Path, server: &Server, attack: &Attack, clock: Clock) -> Field {
    let sockets = (0..attack.disks.len()).map(|n| server.socket(n + 1)).collect();
    let mut field = Field::new(sockets, server.directory(), clock);
    (field.binary, field.server) = (binary.to_owned(), server.id());
    field
}

/// Measures the victim for the duration `time`, on a thread with high priority.
fn observe(victim: &mut Victim, time: Duration, served_by: &Serving) -> Result<Seen> {
    scope(|threads| {
        let watcher = threads.spawn(|| {
            hurry();
            victim.watch(&Clock::start(time), served_by)
        });
        watcher.join().unwrap_or_else(|_| anyhow::bail!("it panicked"))
    })
}

/// Runs the attack and the victim concurrently. Returns their results and the server's maximum
/// memory.
fn under_attack(
    server: &Server,
    (victim, served_by): (&mut Victim, &Serving),
    attack: &Attack,
    field: &mut Field,
) -> (Result<Seen>, Result<()>, Usage) {
    let clock = field.clock.clone();
    let over = AtomicBool::new(false);
    let pids = server.processes();
    scope(|threads| {
        let attacker = threads.spawn(|| {
            give_way();
            (attack.run)(field)
        });
        let memory = threads.spawn(|| {
            let mut peak = Usage::default();
            while !over.load(Ordering::Relaxed) {
                let now = usage(&pids).unwrap_or_default();
                peak.memory = peak.memory.max(now.memory);
                peak.page_tables = peak.page_tables.max(now.page_tables);
                sleep(POLL);
            }
            peak
        });
        let seen = threads.spawn(move || {
            hurry();
            victim.watch(&clock, served_by)
        });
        let panicked = || anyhow::anyhow!("it panicked");
        let seen = seen.join().unwrap_or_else(|_| Err(panicked()));
        let ran = attacker.join().unwrap_or_else(|_| Err(panicked()));
        over.store(true, Ordering::Relaxed);
        (seen, ran, memory.join().unwrap_or_default())
    })
}

/// Resets the controllers of the attackers that are still attached, with all their commands in
/// flight.
fn reset_all(field: &mut Field, outcome: &mut Outcome) {
    let mut resets = std::mem::take(&mut field.resets);
    for guest in &mut field.guests {
        match guest.reset() {
            Ok(time) => resets.push(time),
            // A disconnected attacker has no controller to reset.
            Err(error) if format!("{error:#}").contains("closed") => {}
            Err(error) => outcome.wrong.push(format!("an attacker's reset: {error:#}")),
        }
    }
    field.guests.clear();
    outcome.reset = resets.into_iter().max();
}

/// Runs the attack once more, and sends SIGTERM to the server during the attack.
fn end_under_attack(
    server: &mut Server,
    attack: &Attack,
    mut field: Field,
    times: Times,
    outcome: &mut Outcome,
) -> Result<()> {
    let clock = Clock::start(times.before_end * 20);
    field.clock = clock.clone();
    let run = attack.run;
    // The attack's thread ends after the server, so it is joined after the server's end.
    let attacker = std::thread::spawn(move || {
        give_way();
        run(&mut field)
    });
    // Duration of a load, not a limit: the attack runs this long before SIGTERM.
    sleep(times.before_end);
    outcome.end = server.terminate(LIMIT)?;
    if outcome.end.is_none() {
        server.kill();
    }
    // Attackers that only wait for completions do not notice the end of the server, so the clock
    // stops them.
    clock.stop();
    let _ = attacker.join();
    Ok(())
}
