//! The loop of a thread that has one job or several.

use super::lane::{Lane, histogram};
use super::load::{Load, Verdict};
use anyhow::{Context, anyhow, bail};
use hdrhistogram::Histogram;
use rustix::thread::CpuSet;
use rustix::time::{ClockId, clock_gettime};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Looks for a completion in a row, with nothing in between.
const LOOKS: u32 = 64;
/// So many times that in vain, and it is time to look at the clock and leave the processor to others.
const ROUNDS: u32 = 64;
/// The longest sleep: a job that is told to stop hears of it after that at the latest.
const NAP: Duration = Duration::from_secs(1);
/// Latencies that are taken in a second, about.
const SAMPLES: f64 = 20_000.0;

/// What part of the run it is: written by who watches, looked at by all jobs.
#[derive(Debug)]
pub(super) struct Phase {
    now: AtomicU8,
    /// A device that completes nothing for so long is given up.
    patience: Duration,
    /// Jobs that have taken notice: of the start, and of measuring.
    seen: AtomicU32,
}

const RAMP: u8 = 0;
const RUN: u8 = 1;
const STOP: u8 = 2;
const ABANDON: u8 = 3;

impl Phase {
    pub(super) fn ramp(patience: Duration) -> Self {
        Self { now: AtomicU8::new(RAMP), patience, seen: AtomicU32::new(0) }
    }

    /// What comes from now on is measured.
    pub(super) fn run(&self) {
        self.now.store(RUN, Ordering::Relaxed);
    }

    /// Nothing more is submitted.
    pub(super) fn stop(&self) {
        self.now.store(STOP, Ordering::Relaxed);
    }

    /// What is in flight will never complete.
    pub(super) fn abandon(&self) {
        self.now.store(ABANDON, Ordering::Relaxed);
    }

    /// How often a thread has begun to work, or to measure. On a machine that has other things to
    /// do that can be long after it was told to.
    pub(super) fn seen(&self) -> usize {
        self.seen.load(Ordering::Acquire) as usize
    }

    fn see(&self) {
        self.seen.fetch_add(1, Ordering::Release);
    }

    #[inline]
    fn get(&self) -> u8 {
        self.now.load(Ordering::Relaxed)
    }
}

/// How many I/Os a thread has completed, for who watches. On a cache line of its own: nobody else's
/// counter makes it wait.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Progress(AtomicU64);

impl Progress {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A thread's counters at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Snapshot {
    pub(super) at: Instant,
    /// Processor time of the thread.
    pub(super) cpu: Duration,
    /// How much of it was spent waiting for I/Os to be due.
    pub(super) paced: Duration,
    pub(super) commands: u64,
    pub(super) mmio_writes: u64,
    pub(super) interrupts: u64,
}

impl Snapshot {
    fn take<L: Load>(lanes: &[Lane<L>]) -> Self {
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        let stats = || lanes.iter().map(Lane::stats);
        Self {
            at: Instant::now(),
            cpu: Duration::new(cpu.tv_sec.unsigned_abs(), cpu.tv_nsec.unsigned_abs() as u32),
            paced: lanes.iter().map(Lane::paced).sum(),
            commands: lanes.iter().map(Lane::commands).sum(),
            mmio_writes: stats().map(|s| s.doorbell_mmio_writes()).sum(),
            interrupts: stats().map(|s| s.interrupts_waited()).sum(),
        }
    }
}

/// What a thread has to tell in the end.
pub(super) struct JobReport {
    /// When measuring began and ended.
    pub(super) begin: Snapshot,
    pub(super) end: Snapshot,
    pub(super) latencies: Histogram<u64>,
    /// Doorbell registers written from the creation of the queues to the end.
    pub(super) mmio_writes: u64,
    pub(super) verdict: Option<Verdict>,
}

/// Has the calling thread run on processor `cpu` alone.
pub(super) fn pin(cpu: usize) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    if cpu >= CpuSet::MAX_CPU {
        bail!("there is no processor {cpu} to pin a thread to");
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)
        .with_context(|| format!("a thread can not run on processor {cpu}"))
}

/// Keeps the queues of `lanes` full until the phase says to stop or all is done, then reads back
/// what is to be checked.
pub(super) fn run<L: Load>(
    lanes: &mut [Lane<L>],
    sleeps: bool,
    choose_sample: bool,
    phase: &Phase,
    progress: &Progress,
) -> anyhow::Result<JobReport> {
    let mut begin = Snapshot::take(lanes);
    lanes.iter_mut().try_for_each(Lane::fill)?;
    phase.see();
    let mut last = RAMP;
    let mut end = None;
    let mut idle = Idle::new(sleeps, lanes.iter().any(Lane::is_paced), phase.patience);
    loop {
        let now = phase.get();
        if now != last {
            last = now;
            if now == ABANDON {
                return Err(abandoned());
            }
            if now == RUN {
                let ramp = std::mem::replace(&mut begin, Snapshot::take(lanes));
                let every = choose_sample.then(|| sample_every(&ramp, &begin));
                lanes.iter_mut().for_each(|lane| lane.restart_latencies(every));
                phase.see();
            } else {
                end = Some(Snapshot::take(lanes));
            }
        }
        let mut found = 0;
        for lane in &mut *lanes {
            found += lane.turn(now != STOP)?;
        }
        if found != 0 {
            idle.reset();
            progress.0.store(progress.get() + found, Ordering::Relaxed);
        } else if idle.look(lanes)? {
            if now == STOP && lanes.iter().all(Lane::is_empty) {
                break;
            }
            if lanes.iter().all(Lane::is_finished) {
                break;
            }
        }
    }
    let end = end.unwrap_or_else(|| Snapshot::take(lanes));
    let mut latencies = histogram()?;
    for lane in &*lanes {
        latencies.add(lane.latencies()).context("adding up the latencies")?;
    }
    read_back(lanes, sleeps, phase, progress)?;
    let mut verdict: Option<Verdict> = None;
    for lane in &*lanes {
        if let Some(of_lane) = lane.verdict() {
            verdict.get_or_insert_default().add(of_lane);
        }
    }
    for lane in &*lanes {
        tracing::debug!("{:?}", lane.stats());
    }
    let mmio_writes = Snapshot::take(lanes).mmio_writes;
    Ok(JobReport { begin, end, latencies, mmio_writes, verdict })
}

fn abandoned() -> anyhow::Error {
    anyhow!("the controller is gone")
}

fn read_back<L: Load>(
    lanes: &mut [Lane<L>],
    sleeps: bool,
    phase: &Phase,
    progress: &Progress,
) -> anyhow::Result<()> {
    let mut any = false;
    for lane in &mut *lanes {
        any |= lane.read_back();
    }
    if !any {
        return Ok(());
    }
    lanes.iter_mut().try_for_each(Lane::fill)?;
    let mut idle = Idle::new(sleeps, false, phase.patience);
    while !lanes.iter().all(Lane::is_empty) {
        let mut found = 0;
        for lane in &mut *lanes {
            found += lane.turn(true)?;
        }
        if found != 0 {
            idle.reset();
            progress.0.store(progress.get() + found, Ordering::Relaxed);
        } else if idle.look(lanes)? && phase.get() == ABANDON {
            return Err(abandoned());
        }
    }
    Ok(())
}

/// One I/O in how many to time, given how many there were while ramping up. Odd, so that it does
/// not keep step with the depth of the queue.
fn sample_every(ramp: &Snapshot, now: &Snapshot) -> u32 {
    let seconds = (now.at - ramp.at).as_secs_f64();
    if seconds <= 0.0 {
        return 1;
    }
    let rate = (now.commands - ramp.commands) as f64 / seconds;
    (rate / SAMPLES).clamp(1.0, 1024.0) as u32 | 1
}

/// What a thread does when there is nothing to do.
struct Idle {
    sleeps: bool,
    /// Looks in a row: one only if the clock decides when there is something to do.
    looks: u32,
    rounds: u32,
    since: Option<Instant>,
    patience: Duration,
}

impl Idle {
    fn new(sleeps: bool, paced: bool, patience: Duration) -> Self {
        if paced && sleeps {
            // A thread's timers may be late by 50 us otherwise, which is more than an I/O takes.
            let slack = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
            if let Err(errno) = slack {
                tracing::debug!("timers stay imprecise: {errno}");
            }
        }
        Self { sleeps, looks: if paced { 1 } else { LOOKS }, rounds: 0, since: None, patience }
    }

    #[inline]
    fn reset(&mut self) {
        self.rounds = 0;
        self.since = None;
    }

    /// Nothing was found: looks for a while, or sleeps. True if there still is nothing, and it is
    /// time to ask whether that will stay so.
    #[inline]
    fn look<L: Load>(&mut self, lanes: &mut [Lane<L>]) -> anyhow::Result<bool> {
        if self.sleeps {
            self.sleep(lanes)?;
            return Ok(true);
        }
        for _ in 0..self.looks {
            if lanes.iter().any(Lane::is_ready) {
                return Ok(false);
            }
            std::hint::spin_loop();
        }
        self.rounds = self.rounds.wrapping_add(1);
        if self.rounds.is_multiple_of(ROUNDS * LOOKS / self.looks) {
            self.check(lanes)?;
            // Where the controller has no processor of its own, this is what lets it work.
            std::thread::yield_now();
        }
        Ok(true)
    }

    #[cold]
    fn check<L: Load>(&mut self, lanes: &[Lane<L>]) -> anyhow::Result<()> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > self.patience && !lanes.iter().all(Lane::is_empty) {
            bail!("the controller has completed nothing for {} s", self.patience.as_secs());
        }
        Ok(())
    }

    fn sleep<L: Load>(&mut self, lanes: &mut [Lane<L>]) -> anyhow::Result<()> {
        self.check(lanes)?;
        match lanes {
            [lane] => lane.wait(NAP),
            _ => Ok(()),
        }
    }
}
