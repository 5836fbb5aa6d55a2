//! The times of a run: when its threads measure and when they stop, and whether they get anywhere.

use super::args::Plan;
use super::job::Phase;
use super::server::ServerMeter;
use std::ops::ControlFlow;
use std::thread;
use std::time::{Duration, Instant};

/// How often whoever watches is told.
const TICK: Duration = Duration::from_millis(100);
/// How often to look whether the threads have got somewhere.
const LOOK: Duration = Duration::from_millis(1);
/// A run in which nothing has completed for so long may have lost its controller. A driver that
/// polls memory does not notice that by itself.
const SILENCE: Duration = Duration::from_secs(1);

/// A run as seen from outside, now and then.
#[derive(Clone, Copy, Debug)]
pub struct Tick {
    /// How much of it is over, from 0 to 1.
    pub done: f64,
    /// I/Os a second since the last tick.
    pub iops: f64,
}

/// Is told of a run now and then, and may end it.
pub type Watch<'a> = dyn FnMut(Tick) -> ControlFlow<()> + 'a;

/// What the threads of a run can be told and asked.
pub(super) struct Stage<'a> {
    pub(super) plan: &'a Plan,
    pub(super) phase: &'a Phase,
    /// How many threads have ended.
    pub(super) ended: &'a dyn Fn() -> usize,
    /// How many I/Os were completed.
    pub(super) commands: &'a dyn Fn() -> u64,
    /// Whether there still is a controller.
    pub(super) is_alive: &'a dyn Fn() -> anyhow::Result<()>,
}

/// Where the run is. A thread may take its time to do what it is told, on a machine that has other
/// things to do: each part begins when all threads have got there.
#[derive(Clone, Copy)]
enum Part {
    Starting,
    Ramp {
        since: Instant,
    },
    Told,
    Measuring {
        since: Instant,
    },
    /// Nothing more is submitted; or the threads stop by themselves.
    Ending,
}

/// Has the threads measure and stop at their times, until all have ended.
pub(super) fn conduct(
    stage: &Stage<'_>,
    watch: &mut Watch<'_>,
    server: &mut Option<ServerMeter>,
) -> anyhow::Result<()> {
    let Stage { plan, phase, .. } = *stage;
    let stop = |server: &mut Option<ServerMeter>| {
        server.as_mut().map(ServerMeter::end);
        phase.stop();
        Part::Ending
    };
    let threads = usize::from(plan.threads);
    let mut part = if plan.number_ios.is_some() { Part::Ending } else { Part::Starting };
    if plan.number_ios.is_some() {
        server.as_mut().map(ServerMeter::begin);
    }
    let mut ticks = Ticks::new();
    loop {
        let ended = (stage.ended)();
        if ended >= threads {
            server.as_mut().map(ServerMeter::end);
            return Ok(());
        }
        let now = Instant::now();
        if ended != 0 && plan.number_ios.is_none() {
            // One that ended by itself has failed.
            part = stop(server);
        }
        let left = |since: Instant, time: Duration| time.saturating_sub(now - since);
        let (mut wait, mut done) = (LOOK, 0.0);
        match part {
            Part::Starting if phase.seen() >= threads => part = Part::Ramp { since: now },
            Part::Ramp { since } if left(since, plan.ramp_time).is_zero() => {
                phase.run();
                part = Part::Told;
            }
            Part::Ramp { since } => wait = left(since, plan.ramp_time),
            Part::Told if phase.seen() >= 2 * threads => {
                server.as_mut().map(ServerMeter::begin);
                part = Part::Measuring { since: now };
            }
            Part::Measuring { since } if left(since, plan.runtime).is_zero() => {
                part = stop(server);
            }
            Part::Measuring { since } => {
                wait = left(since, plan.runtime);
                done = (now - since).as_secs_f64() / plan.runtime.as_secs_f64();
            }
            Part::Starting | Part::Told | Part::Ending => {}
        }
        if let Some(ios) = plan.number_ios {
            let whole = ios.saturating_mul(plan.numjobs.into());
            done = (stage.commands)() as f64 / whole as f64;
        }
        if let Some(iops) = ticks.tick(now, stage)?
            && watch(Tick { done: done.min(1.0), iops }).is_break()
        {
            part = stop(server);
        }
        thread::sleep(wait.min(TICK));
    }
}

/// Counts, now and then.
struct Ticks {
    at: Instant,
    commands: u64,
    /// When something was last seen to have completed, or the controller to be there.
    heard: Instant,
}

impl Ticks {
    fn new() -> Self {
        let now = Instant::now();
        Self { at: now, commands: 0, heard: now }
    }

    /// The rate since the last time, if it is time again.
    fn tick(&mut self, now: Instant, stage: &Stage<'_>) -> anyhow::Result<Option<f64>> {
        let elapsed = now.saturating_duration_since(self.at);
        if elapsed < TICK {
            return Ok(None);
        }
        let commands = (stage.commands)();
        let iops = commands.saturating_sub(self.commands) as f64 / elapsed.as_secs_f64();
        if commands != self.commands {
            self.heard = now;
        } else if now.saturating_duration_since(self.heard) >= SILENCE {
            if let Err(error) = (stage.is_alive)() {
                stage.phase.abandon();
                return Err(error);
            }
            self.heard = now;
        }
        (self.at, self.commands) = (now, commands);
        Ok(Some(iops))
    }
}
