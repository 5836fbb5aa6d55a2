//! Schedule of a run: begin and end of the measurement, time line, stall detection, and request
//! rate.

use super::config::LoadConfig;
use super::phase::Phase;
use super::server_cpu::ServerCpu;
use std::ops::ControlFlow;
use std::thread;
use std::time::{Duration, Instant};

/// Interval between calls of [`OnTick`].
const TICK_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between checks whether the threads have reached the next step.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Time without completions after which the controller is checked. A driver that polls memory does
/// not notice by itself that the controller is gone.
const STALL_CHECK: Duration = Duration::from_secs(1);

/// Progress of a run.
#[derive(Clone, Copy, Debug)]
pub struct Tick {
    /// Fraction of the run that is over, from 0 to 1.
    pub done: f64,
    /// I/Os per second since the last tick.
    pub iops: f64,
}

/// Callback during a run; `Break` ends the run.
pub(super) type OnTick<'a> = dyn FnMut(Tick) -> ControlFlow<()> + 'a;

/// Threads of a run, as the schedule accesses them.
pub(super) struct Threads<'a> {
    pub(super) config: &'a LoadConfig,
    pub(super) phase: &'a Phase,
    /// Returns the number of threads that have ended.
    pub(super) ended: &'a dyn Fn() -> usize,
    /// Returns the number of completed I/Os.
    pub(super) commands: &'a dyn Fn() -> u64,
    /// Returns an error if the controller is gone.
    pub(super) check_alive: &'a dyn Fn() -> anyhow::Result<()>,
}

/// Step of the schedule. On a busy machine, threads notice a change of the phase with delay. So
/// `Ramp` and `Measuring` begin only when all threads have reached that phase.
#[derive(Clone, Copy)]
enum Step {
    Starting,
    Ramp {
        since: Instant,
    },
    /// Waiting for all threads to begin the measurement.
    Switching,
    Measuring {
        since: Instant,
    },
    /// Waiting for the threads to end, on request or after their number of I/Os.
    Ending,
}

/// Controls the phases of the run until all threads have ended.
pub(super) fn run_schedule(
    threads: &Threads<'_>,
    on_tick: &mut OnTick<'_>,
    server: &mut Option<ServerCpu>,
) -> anyhow::Result<()> {
    let Threads { config, phase, .. } = *threads;
    let stop = |server: &mut Option<ServerCpu>| {
        server.as_mut().map(ServerCpu::end);
        phase.stop();
        Step::Ending
    };
    let count = usize::from(config.threads);
    let mut step = if config.number_ios.is_some() { Step::Ending } else { Step::Starting };
    if config.number_ios.is_some() {
        server.as_mut().map(ServerCpu::begin);
    }
    let mut ticks = Ticks::new();
    let mut interval_ends = None;
    loop {
        let ended = (threads.ended)();
        if ended >= count {
            server.as_mut().map(ServerCpu::end);
            return Ok(());
        }
        let now = Instant::now();
        if ended != 0 && config.number_ios.is_none() {
            // Without a fixed number of I/Os, only a thread that has failed ends before it is
            // stopped.
            step = stop(server);
        }
        let left = |since: Instant, time: Duration| time.saturating_sub(now - since);
        let (mut wait, mut done) = (CHECK_INTERVAL, 0.0);
        match step {
            Step::Starting if phase.reached() >= count => step = Step::Ramp { since: now },
            Step::Ramp { since } if left(since, config.ramp_time).is_zero() => {
                phase.run();
                step = Step::Switching;
            }
            Step::Ramp { since } => wait = left(since, config.ramp_time),
            Step::Switching if phase.reached() >= 2 * count => {
                server.as_mut().map(ServerCpu::begin);
                step = Step::Measuring { since: now };
            }
            Step::Measuring { since } if left(since, config.runtime).is_zero() => {
                step = stop(server);
            }
            Step::Measuring { since } => {
                wait = left(since, config.runtime);
                done = (now - since).as_secs_f64() / config.runtime.as_secs_f64();
            }
            Step::Starting | Step::Switching | Step::Ending => {}
        }
        if let Some(ios) = config.number_ios {
            let whole = ios.saturating_mul(config.numjobs.into());
            done = (threads.commands)() as f64 / whole as f64;
        }
        if let Some(interval) = config.timeline
            && (matches!(step, Step::Measuring { .. }) || config.number_ios.is_some())
        {
            let ends = interval_ends.get_or_insert(now + interval);
            if *ends <= now {
                phase.end_interval();
                *ends = now + interval;
            }
            wait = wait.min(*ends - now);
        }
        if let Some(iops) = ticks.tick(now, threads)?
            && on_tick(Tick { done: done.min(1.0), iops }).is_break()
        {
            step = stop(server);
        }
        thread::sleep(wait.min(TICK_INTERVAL));
    }
}

/// Measurement of the I/O rate, and stall detection.
struct Ticks {
    at: Instant,
    commands: u64,
    /// Last time of a completion or a successful check of the controller.
    last_progress: Instant,
}

impl Ticks {
    fn new() -> Self {
        let now = Instant::now();
        Self { at: now, commands: 0, last_progress: now }
    }

    /// Returns I/Os per second since the last tick if [`TICK_INTERVAL`] has passed, and checks for
    /// a stall.
    fn tick(&mut self, now: Instant, threads: &Threads<'_>) -> anyhow::Result<Option<f64>> {
        let elapsed = now.saturating_duration_since(self.at);
        if elapsed < TICK_INTERVAL {
            return Ok(None);
        }
        let commands = (threads.commands)();
        let iops = commands.saturating_sub(self.commands) as f64 / elapsed.as_secs_f64();
        if commands != self.commands {
            self.last_progress = now;
        } else if now.saturating_duration_since(self.last_progress) >= STALL_CHECK {
            if let Err(error) = (threads.check_alive)() {
                threads.phase.abandon();
                return Err(error);
            }
            self.last_progress = now;
        }
        (self.at, self.commands) = (now, commands);
        Ok(Some(iops))
    }
}

/// Fixed rate of I/Os at equal intervals. Times are nanoseconds since an epoch of the caller.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    rate: u64,
    /// Start time of the next I/O; `None` before the first.
    due: Option<u64>,
    /// Fraction of a nanosecond by which `due` is too early, in units of `1 / rate` ns.
    rest: u64,
}

/// Nanoseconds per second.
const SECOND: u64 = 1_000_000_000;

impl Pace {
    /// Pace of `rate` I/Os per second, from 1 to a billion.
    pub(super) fn new(rate: u64) -> Self {
        Self { rate: rate.clamp(1, SECOND), due: None, rest: 0 }
    }

    /// Start time of the next I/O. The first one is due `now`.
    #[inline]
    pub(super) fn due(&mut self, now: u64) -> u64 {
        *self.due.get_or_insert(now)
    }

    /// Sets the start time of the next I/O. It does not depend on a delay of the previous I/O.
    #[inline]
    pub(super) fn advance(&mut self) {
        let Some(due) = &mut self.due else { return };
        *due = due.saturating_add(SECOND / self.rate);
        self.rest += SECOND % self.rate;
        if self.rest >= self.rate {
            self.rest -= self.rate;
            *due = due.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_the_requested_number_of_ios() {
        for rate in [1, 3, 7, 30_000, 333_333, 999_999_999, 1_000_000_000] {
            let mut pace = Pace::new(rate);
            let first = pace.due(17);
            let steps = rate.min(2_000_000);
            for _ in 0..steps {
                pace.advance();
            }
            let expected = u128::from(steps) * u128::from(SECOND) / u128::from(rate);
            assert_eq!(u128::from(pace.due(0) - first), expected, "{rate}");
        }
    }

    #[test]
    fn a_late_io_does_not_delay_the_next() {
        let mut pace = Pace::new(1000);
        assert_eq!(pace.due(5), 5);
        assert_eq!(pace.due(900), 5);
        pace.advance();
        assert_eq!(pace.due(90_000_000), 1_000_005);
    }
}
