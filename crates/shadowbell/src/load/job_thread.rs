//! The loop of a thread that has one job or several.

use super::io_source::{CheckSummary, IoSource};
use super::job::{Directions, Job};
use super::phase::{ABANDON, Now, Phase, Progress, RUN, STOP};
use super::timeline::{Recorder, Sample};
use crate::latency::histogram;
use anyhow::{Context, anyhow, bail};
use hdrhistogram::Histogram;
use rustix::thread::CpuSet;
use rustix::time::{ClockId, clock_gettime};
use shadowbell_memory::ThreadUsage;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// Polls for a completion in a row, with nothing in between.
const POLLS: u32 = 64;
/// So many times that in vain, and it is time to look at the clock and leave the processor to
/// others.
const ROUNDS: u32 = 64;
/// The longest sleep: a job notices that it is to stop after that at the latest.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
/// Latencies that are taken in a second, about.
const SAMPLES: f64 = 20_000.0;

/// A thread's counters at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Snapshot {
    pub(super) at: Instant,
    /// Processor time of the thread.
    pub(super) cpu: Duration,
    /// How much of it was spent waiting for I/Os to be due.
    pub(super) paced: Duration,
    /// What the thread has used, as the system accounts for it.
    pub(super) usage: ThreadUsage,
    pub(super) commands: u64,
    /// How many of the commands were writes, of a mixed workload.
    pub(super) mixed_writes: u64,
    pub(super) mmio_writes: u64,
    pub(super) interrupts: u64,
}

impl Snapshot {
    fn take<L: IoSource>(jobs: &[Job<L>]) -> Self {
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        let stats = || jobs.iter().map(Job::stats);
        Self {
            at: Instant::now(),
            cpu: Duration::new(cpu.tv_sec.unsigned_abs(), cpu.tv_nsec.unsigned_abs() as u32),
            paced: jobs.iter().map(Job::paced).sum(),
            usage: ThreadUsage::now(),
            commands: jobs.iter().map(Job::commands).sum(),
            mixed_writes: jobs.iter().map(Job::mixed_writes).sum(),
            mmio_writes: stats().map(|s| s.doorbell_mmio_writes()).sum(),
            interrupts: stats().map(|s| s.interrupts_waited()).sum(),
        }
    }
}

/// What a thread measured.
pub(super) struct ThreadReport {
    /// When measuring began and ended.
    pub(super) begin: Snapshot,
    pub(super) end: Snapshot,
    pub(super) latencies: Histogram<u64>,
    /// Those of reads and of writes, if there were both.
    pub(super) mixed: Option<Directions<Histogram<u64>>>,
    /// Doorbell registers written from the creation of the queues to the end.
    pub(super) mmio_writes: u64,
    pub(super) checks: Option<CheckSummary>,
    /// What each queue did over time, if that was asked for.
    pub(super) samples: Vec<(u16, Vec<Sample>)>,
}

/// How a thread is to measure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measuring {
    /// It sleeps when there is nothing to do.
    pub(super) sleeps: bool,
    /// It chooses how many I/Os to time.
    pub(super) choose_sample: bool,
    /// It keeps a timeline.
    pub(super) timeline: bool,
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

/// Keeps the queues of `jobs` full until the phase says to stop or all is done, then reads back
/// what is to be checked.
pub(super) fn run<L: IoSource>(
    jobs: &mut [Job<L>],
    measuring: Measuring,
    phase: &Phase,
    progress: &Progress,
) -> anyhow::Result<ThreadReport> {
    let Measuring { sleeps, choose_sample, timeline } = measuring;
    let mut recorder = if timeline { Some(Recorder::new(jobs)?) } else { None };
    let mut begin = Snapshot::take(jobs);
    jobs.iter_mut().try_for_each(Job::fill)?;
    phase.reach();
    let mut last = Now::START;
    let mut end = None;
    let mut idle = Idle::new(sleeps, jobs.iter().any(Job::is_paced), phase.stall_timeout);
    loop {
        let now = phase.get();
        if now != last {
            let before = std::mem::replace(&mut last, now);
            if now.part() == ABANDON {
                return Err(abandoned());
            }
            if now.part() == before.part() {
                if let Some(recorder) = &mut recorder {
                    recorder.end_interval(before.intervals(), jobs)?;
                }
            } else if now.part() == RUN {
                let ramp = std::mem::replace(&mut begin, Snapshot::take(jobs));
                let every = choose_sample.then(|| sample_every(&ramp, &begin));
                jobs.iter_mut().for_each(|job| job.restart_latencies(every));
                if let Some(recorder) = &mut recorder {
                    recorder.restart(jobs);
                }
                phase.reach();
            } else {
                end = Some(Snapshot::take(jobs));
                if let Some(recorder) = &mut recorder {
                    recorder.end_interval(before.intervals(), jobs)?;
                }
            }
        }
        let mut found = 0;
        for job in &mut *jobs {
            found += job.turn(now.part() != STOP)?;
        }
        if found != 0 {
            idle.reset();
            progress.add(found);
        } else if idle.poll(jobs)? {
            if now.part() == STOP && jobs.iter().all(Job::is_empty) {
                break;
            }
            if jobs.iter().all(Job::is_finished) {
                break;
            }
        }
    }
    if end.is_none()
        && let Some(recorder) = &mut recorder
    {
        recorder.end_interval(last.intervals(), jobs)?;
    }
    let end = end.unwrap_or_else(|| Snapshot::take(jobs));
    let mut latencies = histogram()?;
    for job in &*jobs {
        latencies.add(job.latencies()).context("adding up the latencies")?;
    }
    let mut mixed: Option<Directions<Histogram<u64>>> = None;
    for of_job in jobs.iter().filter_map(Job::mixed_latencies) {
        match &mut mixed {
            Some(sum) => sum.add(of_job)?,
            None => mixed = Some(of_job.clone()),
        }
    }
    let mut samples = Vec::new();
    if let Some((recorded, of_queues)) = recorder.map(Recorder::finish) {
        latencies.add(recorded).context("adding up the latencies")?;
        samples = of_queues;
    }
    read_back(jobs, sleeps, phase, progress)?;
    let mut checks: Option<CheckSummary> = None;
    for job in &*jobs {
        if let Some(of_job) = job.checks() {
            checks.get_or_insert_default().add(of_job);
        }
    }
    for job in &*jobs {
        tracing::debug!("{:?}", job.stats());
    }
    let mmio_writes = Snapshot::take(jobs).mmio_writes;
    Ok(ThreadReport { begin, end, latencies, mixed, mmio_writes, checks, samples })
}

fn abandoned() -> anyhow::Error {
    anyhow!("the controller is gone")
}

fn read_back<L: IoSource>(
    jobs: &mut [Job<L>],
    sleeps: bool,
    phase: &Phase,
    progress: &Progress,
) -> anyhow::Result<()> {
    let mut any = false;
    for job in &mut *jobs {
        any |= job.read_back();
    }
    if !any {
        return Ok(());
    }
    jobs.iter_mut().try_for_each(Job::fill)?;
    let mut idle = Idle::new(sleeps, false, phase.stall_timeout);
    while !jobs.iter().all(Job::is_empty) {
        let mut found = 0;
        for job in &mut *jobs {
            found += job.turn(true)?;
        }
        if found != 0 {
            idle.reset();
            progress.add(found);
        } else if idle.poll(jobs)? && phase.get().part() == ABANDON {
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
    /// Polls in a row: one only if the clock decides when there is something to do.
    polls: u32,
    rounds: u32,
    since: Option<Instant>,
    stall_timeout: Duration,
}

impl Idle {
    fn new(sleeps: bool, paced: bool, stall_timeout: Duration) -> Self {
        if paced && sleeps {
            // A thread's timers may be late by 50 us otherwise, which is more than an I/O takes.
            let slack = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
            if let Err(errno) = slack {
                tracing::debug!("timers stay imprecise: {errno}");
            }
        }
        Self { sleeps, polls: if paced { 1 } else { POLLS }, rounds: 0, since: None, stall_timeout }
    }

    #[inline]
    fn reset(&mut self) {
        self.rounds = 0;
        self.since = None;
    }

    /// Nothing was found: polls for a while, or sleeps. True if there still is nothing, and it is
    /// time to ask whether that will stay so.
    #[inline]
    fn poll<L: IoSource>(&mut self, jobs: &mut [Job<L>]) -> anyhow::Result<bool> {
        if self.sleeps {
            self.sleep(jobs)?;
            return Ok(true);
        }
        for _ in 0..self.polls {
            if jobs.iter().any(Job::is_ready) {
                return Ok(false);
            }
            std::hint::spin_loop();
        }
        self.rounds = self.rounds.wrapping_add(1);
        if self.rounds.is_multiple_of(ROUNDS * POLLS / self.polls) {
            self.check(jobs)?;
            // Where the controller has no processor of its own, this is what lets it work.
            std::thread::yield_now();
        }
        Ok(true)
    }

    #[cold]
    fn check<L: IoSource>(&mut self, jobs: &[Job<L>]) -> anyhow::Result<()> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > self.stall_timeout && !jobs.iter().all(Job::is_empty) {
            bail!("the controller has completed nothing for {} s", self.stall_timeout.as_secs());
        }
        Ok(())
    }

    fn sleep<L: IoSource>(&mut self, jobs: &mut [Job<L>]) -> anyhow::Result<()> {
        self.check(jobs)?;
        match jobs {
            [job] => job.wait(LONGEST_SLEEP),
            _ => Ok(()),
        }
    }
}
