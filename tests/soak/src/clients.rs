//! Clients that verify their disks while the server is killed or upgraded.

use shadowbell_testing::wait;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::scope;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::counters::value;
use super::load::{Load, Meter, Pace, STALL};
use super::slots::SlotMap;
use super::supervised::SupervisedServer;

/// Totals of all clients.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Totals {
    pub(crate) commands: u64,
    pub(crate) blocks: u64,
    pub(crate) seconds: f64,
}

impl Totals {
    pub(crate) fn of(meters: &[Meter], began: Instant) -> Self {
        Self {
            commands: meters.iter().map(|meter| value(&meter.commands)).sum(),
            blocks: meters.iter().map(|meter| value(&meter.blocks)).sum(),
            seconds: began.elapsed().as_secs_f64(),
        }
    }
}

/// Runs a client on each disk while `meanwhile` runs. Then each client reads its whole disk, the
/// server ends, and the images are compared with the written data.
///
/// # Errors
///
/// Data were lost, a command failed or took too long, or `meanwhile` failed.
pub(crate) fn work(
    supervised: &mut SupervisedServer,
    seed: u64,
    pace: impl Fn(usize) -> Pace,
    totals: &mut Totals,
    meanwhile: impl FnOnce(&mut SupervisedServer, &[Meter]) -> Result<()>,
) -> Result<()> {
    let mut loads = Vec::new();
    for (number, kind) in supervised.kinds().iter().enumerate() {
        let name = format!("controller {number} ({})", kind.name());
        let slots = SlotMap::new(number as u64, kind.persistence(), seed, pace(number).flush_every);
        let load = Load::attach(&name, &supervised.server.socket(number), slots, pace(number));
        loads.push(load.with_context(|| name.clone())?);
    }
    let meters: Vec<Meter> = loads.iter().map(|_| Meter::default()).collect();
    let stop = AtomicBool::new(false);
    let began = Instant::now();
    let (outcome, slots) = scope(|threads| {
        let (meters, stop) = (&meters, &stop);
        let loads = loads.into_iter().zip(meters);
        let loads: Vec<_> =
            loads.map(|(load, meter)| threads.spawn(move || load.run(stop, meter))).collect();
        let outcome = meanwhile(supervised, meters);
        stop.store(true, Ordering::Relaxed);
        if outcome.is_err() {
            // After a failed run the server is killed, so that the clients do not wait for
            // completions of a server that may hang.
            supervised.server.kill();
        }
        let slots: Vec<_> = loads.into_iter().map(|load| load.join().ok().flatten()).collect();
        (outcome, slots)
    });
    *totals = Totals::of(&meters, began);
    outcome?;
    if let Some(failure) = meters.iter().find_map(Meter::failure) {
        bail!("at the end, {failure}; the log ends with:\n{}", supervised.server.log());
    }
    supervised.server.check()?;
    ensure!(supervised.server.terminate(STALL)?.is_some(), "SIGTERM does not end the server");
    // The images are read after the end of the server, so the data were really written and are not
    // from a cache of the server.
    for (number, slots) in slots.into_iter().enumerate() {
        let mut slots = slots.with_context(|| format!("controller {number} has no client"))?;
        if let Some(image) = supervised.image(number) {
            let bytes = fs::read(&image).with_context(|| image.display().to_string())?;
            slots.compare(&bytes).with_context(|| image.display().to_string())?;
        }
    }
    Ok(())
}

/// Waits until each client has received twice as many completions as it keeps commands in flight.
/// Then all commands in flight were submitted after this function was called.
///
/// # Errors
///
/// A client has failed.
pub(crate) fn wait_for_turnover(
    supervised: &mut SupervisedServer,
    meters: &[Meter],
    pace: impl Fn(usize) -> Pace,
) -> Result<()> {
    let began = Instant::now();
    let enough = |(number, meter): (usize, &Meter)| {
        value(&meter.commands) + u64::from(2 * pace(number).depth)
    };
    let until: Vec<u64> = meters.iter().enumerate().map(enough).collect();
    loop {
        if let Some(failure) = meters.iter().find_map(Meter::failure) {
            bail!("{failure}; the log ends with:\n{}", supervised.server.log());
        }
        if meters.iter().zip(&until).all(|(meter, until)| value(&meter.commands) >= *until) {
            return Ok(());
        }
        supervised.server.check()?;
        // Twice the time without a completion at which the clients themselves report a failure.
        if began.elapsed() > 2 * STALL {
            bail!("a client has no completions; the log ends with:\n{}", supervised.server.log());
        }
        wait::pause();
    }
}
