//! Loop of a thread that drives one job or several.

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

/// Number of polls for a completion in one round.
const POLLS: u32 = 64;
/// Rounds without a completion before the thread checks for a stall and yields the CPU.
const ROUNDS: u32 = 64;
/// Longest sleep. A job may notice the end of the warm-up or of the measurement with this delay.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
/// Target number of latency samples per second and thread.
const SAMPLES: f64 = 20_000.0;

/// Counters of a thread at one point in time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Snapshot {
    pub(super) at: Instant,
    /// CPU time of the thread.
    pub(super) cpu: Duration,
    /// Part of `cpu` spent spinning until an I/O was due.
    pub(super) paced: Duration,
    /// Resource usage of the thread as reported by the kernel.
    pub(super) usage: ThreadUsage,
    pub(super) commands: u64,
    /// Writes among `commands`, in a mixed workload.
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

/// Results of a thread.
pub(super) struct ThreadReport {
    /// Counters when the measurement began; `end` has the counters when it ended.
    pub(super) begin: Snapshot,
    pub(super) end: Snapshot,
    pub(super) latencies: Histogram<u64>,
    /// Separate latencies of reads and writes in a mixed workload.
    pub(super) mixed: Option<Directions<Histogram<u64>>>,
    /// Doorbell register writes since the creation of the queues.
    pub(super) mmio_writes: u64,
    pub(super) checks: Option<CheckSummary>,
    /// Time line of each queue, if requested.
    pub(super) samples: Vec<(u16, Vec<Sample>)>,
}

/// Measuring options of a thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct MeasureOptions {
    /// True if an idle thread sleeps; otherwise it polls.
    pub(super) sleeps: bool,
    /// True if the sampling interval depends on the rate of I/Os.
    pub(super) choose_sample: bool,
    /// True if a time line is recorded.
    pub(super) timeline: bool,
}

/// Pins the calling thread to one CPU.
pub(super) fn pin(cpu: usize) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    if cpu >= CpuSet::MAX_CPU {
        bail!("there is no processor {cpu} to pin a thread to");
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)
        .with_context(|| format!("cannot pin a thread to CPU {cpu}"))
}

/// Drives `jobs` until the phase changes to `STOP` or all I/Os are done, then runs the verification
/// pass.
pub(super) fn run<L: IoSource>(
    jobs: &mut [Job<L>],
    measuring: MeasureOptions,
    phase: &Phase,
    progress: &Progress,
) -> anyhow::Result<ThreadReport> {
    let MeasureOptions { sleeps, choose_sample, timeline } = measuring;
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
                return Err(unreachable_controller());
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

fn unreachable_controller() -> anyhow::Error {
    anyhow!("the controller is unreachable")
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
            return Err(unreachable_controller());
        }
    }
    Ok(())
}

/// Sampling interval of latencies, in I/Os, computed from the rate during warm-up. The number is
/// odd, so that samples do not always hit the same position of the queue.
fn sample_every(ramp: &Snapshot, now: &Snapshot) -> u32 {
    let seconds = (now.at - ramp.at).as_secs_f64();
    if seconds <= 0.0 {
        return 1;
    }
    let rate = (now.commands - ramp.commands) as f64 / seconds;
    (rate / SAMPLES).clamp(1.0, 1024.0) as u32 | 1
}

/// Waiting strategy of a thread without completions.
struct Idle {
    sleeps: bool,
    /// Polls per round: only one if I/Os are paced, because after each poll the clock shows whether
    /// the next I/O is due.
    polls: u32,
    rounds: u32,
    since: Option<Instant>,
    stall_timeout: Duration,
}

impl Idle {
    fn new(sleeps: bool, paced: bool, stall_timeout: Duration) -> Self {
        if paced && sleeps {
            // Reduces the timer slack: its default of 50 us is longer than an I/O takes.
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

    /// Polls for a while, or sleeps. Returns false if a completion was found by polling. After
    /// true, the caller has to check whether its jobs are finished.
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
            // If the controller shares this CPU, it only runs if this thread yields.
            std::thread::yield_now();
        }
        Ok(true)
    }

    #[cold]
    fn check<L: IoSource>(&mut self, jobs: &[Job<L>]) -> anyhow::Result<()> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > self.stall_timeout && !jobs.iter().all(Job::is_empty) {
            bail!("the controller completed no command for {} s", self.stall_timeout.as_secs());
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
