//! Adaptive polling: time that an idle I/O thread polls before it sleeps.

use crate::interrupt::HoldLimit;
use shadowbell_memory::{AdaptivePoll, YieldBackoff};
use std::time::{Duration, Instant};

/// Polling mode of an idle I/O thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// Polls for a window of at most this length, then sleeps. The window is adapted: it grows if
    /// work arrives soon after the thread has gone to sleep, and shrinks otherwise.
    Adaptive(Duration),
    /// Never sleeps. Each I/O thread uses a whole CPU, and hosts with shadow doorbells never have
    /// to write a doorbell register.
    Always,
    /// Sleeps as soon as there is no work.
    Never,
}

impl Polling {
    /// Maximum time for which an I/O thread in this mode holds an interrupt.
    pub(super) fn hold_limit(self) -> HoldLimit {
        match self {
            Self::Adaptive(most) => HoldLimit::of(most),
            Self::Always => HoldLimit::of(LONGEST_HOLD),
            Self::Never => HoldLimit::NONE,
        }
    }
}

impl Default for Polling {
    fn default() -> Self {
        Self::Adaptive(LONGEST_HOLD)
    }
}

/// Default maximum of the polling window and of the interrupt hold time.
const LONGEST_HOLD: Duration = Duration::from_micros(100);
/// Number of idle passes between two readings of the clock.
const PASSES: u32 = 64;
/// Number of idle passes (some microseconds) after which a thread that waits for a host's next
/// command yields the CPU. A host that polls for completions submits its next command earlier.
const YIELD_AFTER: u32 = 8 * PASSES;

/// Action of an I/O thread after an idle pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Poll again.
    PollAgain,
    /// Yield the CPU, then poll again. On a machine with few CPUs, the next command may depend on a
    /// thread that waits for this CPU: the VMM's thread that handles the interrupt, or the server
    /// of a disk.
    Yield,
    /// Sleep.
    Sleep,
}

/// Number of consecutive waits with requests in flight after which the thread assumes that a host
/// keeps its disks busy with several commands.
const BUSY_AFTER: u32 = 64;

/// Number of consecutive futile polls (polls that end in a sleep) after which polling is paused. A
/// window has grown to its maximum after half as many.
const VAIN: u32 = 8;
/// Length of the first polling pause, and maximum length, in waits. The maximum is a compromise: a
/// longer pause would delay the detection that a load has become quick (now some hundredths of a
/// second), and a shorter one would raise the average cost of futile polls (now about a microsecond
/// per wait).
const PAUSE: (u32, u32) = (64, 512);

/// Success of polls for one kind of event (host or disk).
///
/// After a short sleep, the window grows. But if an event always takes slightly longer than the
/// maximum window, polling never finds it. Polling may even be the cause: the kernel may complete a
/// disk's requests in a thread that is bound to this CPU, and that can run only while the I/O
/// thread sleeps. So polling is paused after some futile polls.
///
/// A poll for a disk also counts as futile if another thread was waiting for the CPU, because that
/// may be the disk's server.
#[derive(Debug, Default)]
struct Polls {
    /// Number of consecutive futile polls.
    vain: u32,
    /// Number of waits until the current pause ends, and the length of that pause, in waits.
    left: u32,
    pause: u32,
}

impl Polls {
    /// Begins a wait.
    fn begin(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    /// Records that polling has found the event.
    fn succeed(&mut self) {
        *self = Self::default();
    }

    /// Records a futile poll.
    fn fail(&mut self) {
        self.vain += 1;
        if self.vain >= VAIN {
            // After the pause, only half as many futile polls are needed for the next pause.
            self.vain = VAIN / 2;
            self.pause = (self.pause * 2).clamp(PAUSE.0, PAUSE.1);
            self.left = self.pause;
        }
    }

    fn is_paused(&self) -> bool {
        self.left != 0
    }
}

/// Polling state of one I/O thread.
///
/// There are two polling windows. The host window is used and adapted while no request is in
/// flight, when the thread waits for the host's next command. The disk window is used and adapted
/// while requests are in flight, when it waits for completions of disks. Polling for a disk saves
/// one wakeup per command, which matters only to a quick host. So while the host window is zero,
/// because the host takes too long for its next command, the thread does not poll for disks either.
/// An exception is a host that always has commands in flight.
#[derive(Debug)]
pub(super) struct IdlePolicy {
    polling: Polling,
    /// Window while no request is in flight.
    host: AdaptivePoll,
    host_polls: Polls,
    /// Window while requests are in flight.
    disk: AdaptivePoll,
    disk_polls: Polls,
    /// Number of consecutive waits with requests in flight.
    busy: u32,
    /// Number of consecutive idle passes.
    idle: u32,
    /// State at the first idle pass of the current wait: true if requests were in flight, and the
    /// number of requests that had ended.
    pending: bool,
    ended: u64,
    /// Time of the first idle pass, at most [`PASSES`] passes late.
    since: Instant,
    yield_backoff: YieldBackoff,
    /// True if another thread wanted the CPU during the current wait for a disk.
    crowded: bool,
}

impl IdlePolicy {
    pub(super) fn new(polling: Polling) -> Self {
        let most = if let Polling::Adaptive(most) = polling { most } else { Duration::ZERO };
        let none = AdaptivePoll::new(most, Duration::ZERO);
        let since = Instant::now();
        Self {
            polling,
            host: none,
            host_polls: Polls::default(),
            disk: none,
            disk_polls: Polls::default(),
            busy: 0,
            idle: 0,
            pending: false,
            ended: 0,
            since,
            yield_backoff: YieldBackoff::new(),
            crowded: false,
        }
    }

    pub(super) fn polling(&self) -> Polling {
        self.polling
    }

    /// Records a pass that has found work. `ended` is the number of ended requests so far.
    #[inline]
    pub(super) fn found(&mut self, ended: impl FnOnce() -> u64) {
        if self.idle != 0 {
            self.idle = 0;
            if !self.pending {
                self.host_polls.succeed();
            } else if ended() != self.ended {
                // The pass has found the end of a request, and not just the host's next command.
                self.disk_polls.succeed();
            }
        }
    }

    /// Selects the action after an idle pass. `pending` returns two values: true if requests are in
    /// flight, and the number of requests that have ended so far. It is called only in the first
    /// idle pass, because neither changes until a pass finds work.
    #[inline]
    pub(super) fn next(&mut self, pending: impl FnOnce() -> (bool, u64)) -> Next {
        self.next_by(Instant::now, pending)
    }

    #[inline]
    fn next_by(
        &mut self,
        clock: impl FnOnce() -> Instant,
        pending: impl FnOnce() -> (bool, u64),
    ) -> Next {
        match self.polling {
            Polling::Always => return Next::PollAgain,
            Polling::Never => return Next::Sleep,
            Polling::Adaptive(_) => {}
        }
        self.idle = self.idle.wrapping_add(1);
        if self.idle == 1 {
            (self.pending, self.ended) = pending();
            let polls = if self.pending { &mut self.disk_polls } else { &mut self.host_polls };
            polls.begin();
            self.busy = if self.pending { self.busy.saturating_add(1) } else { 0 };
        }
        let width = self.width();
        if width.is_zero() {
            return Next::Sleep;
        }
        if !self.idle.is_multiple_of(PASSES) {
            return Next::PollAgain;
        }
        let now = clock();
        if self.idle == PASSES {
            self.since = now;
        }
        let waited = now.duration_since(self.since);
        if waited >= width {
            Next::Sleep
        } else if self.pending && waited >= YieldBackoff::MIN_WAIT || self.idle >= YIELD_AFTER {
            Next::Yield
        } else {
            Next::PollAgain
        }
    }

    /// Yields the CPU to other threads. Returns the next action.
    pub(super) fn yield_cpu(&mut self) -> Next {
        let crowded = self.yield_backoff.backoff(YieldBackoff::MIN_WAIT);
        self.after_yield(crowded)
    }

    /// Next action after a yield; `crowded` is true if another thread has run.
    fn after_yield(&mut self, crowded: bool) -> Next {
        // Without a request in flight, the thread that has run is most likely a thread of the host,
        // and will soon submit a command.
        if !crowded || !self.pending {
            return Next::PollAgain;
        }
        self.crowded = true;
        self.disk_polls.fail();
        Next::Sleep
    }

    /// Polling window of the current wait.
    fn width(&self) -> Duration {
        let host = if self.host_polls.is_paused() { Duration::ZERO } else { self.host.window() };
        if !self.pending {
            host
        } else if self.disk_polls.is_paused() || host.is_zero() && self.busy < BUSY_AFTER {
            Duration::ZERO
        } else {
            self.disk.window()
        }
    }

    /// Adapts the window after a sleep of this length.
    pub(super) fn slept(&mut self, slept: Duration) {
        // If another thread wanted the CPU, `after_yield` has already counted this poll as futile.
        let in_vain = !self.width().is_zero() && !self.crowded;
        let (width, polls) = if self.pending {
            (&mut self.disk, &mut self.disk_polls)
        } else {
            (&mut self.host, &mut self.host_polls)
        };
        width.slept(slept);
        if in_vain {
            polls.fail();
        }
    }

    /// Begins a new wait, after a sleep or a decision to sleep.
    pub(super) fn restart(&mut self) {
        self.idle = 0;
        self.crowded = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maximum length of the polling window.
    const MAX_WINDOW: Duration = Duration::from_micros(100);
    /// Duration of an idle pass.
    const PASS: Duration = Duration::from_nanos(50);

    /// Simulated I/O thread in virtual time.
    struct Worker {
        window: IdlePolicy,
        now: Instant,
        polled: Duration,
        sleeps: u32,
        ended: u64,
    }

    impl Worker {
        fn new() -> Self {
            let window = IdlePolicy::new(Polling::Adaptive(MAX_WINDOW));
            Self { window, now: Instant::now(), polled: Duration::ZERO, sleeps: 0, ended: 0 }
        }

        /// Simulates `micros` microseconds without work.
        fn simulate_idle(&mut self, pending: bool, micros: u64) {
            let end = self.now + Duration::from_micros(micros);
            while self.now < end {
                if self.step(pending) == Next::Sleep {
                    self.sleeps(end - self.now);
                }
            }
        }

        fn step(&mut self, pending: bool) -> Next {
            let (now, ended) = (self.now, self.ended);
            let next = self.window.next_by(|| now, || (pending, ended));
            if next != Next::Sleep {
                self.now += PASS;
                self.polled += PASS;
            }
            next
        }

        fn sleeps(&mut self, slept: Duration) {
            self.sleeps += 1;
            self.window.slept(slept);
            self.window.restart();
            self.now += slept;
        }

        /// Simulates `micros` microseconds without work, then the expected event.
        fn waits(&mut self, pending: bool, micros: u64) {
            self.simulate_idle(pending, micros);
            self.finds(pending);
        }

        /// Simulates the arrival of the host's next command while a request is in flight.
        fn waits_for_command(&mut self, micros: u64) {
            self.simulate_idle(true, micros);
            self.finds(false);
        }

        /// Simulates a disk that completes nothing until the thread has slept for `micros`.
        fn starves(&mut self, micros: u64) {
            while self.step(true) != Next::Sleep {}
            self.sleeps(Duration::from_micros(micros));
            self.finds(true);
        }

        fn finds(&mut self, of_disk: bool) {
            self.ended += u64::from(of_disk);
            let ended = self.ended;
            self.window.found(|| ended);
        }

        /// Simulates a host with one command in flight at a time. Returns the share of time spent
        /// polling, and the number of sleeps per command.
        fn simulate_host(&mut self, commands: u32, host: u64, disk: u64) -> (f64, f64) {
            // Warm-up, which replaces the result of earlier adaptation.
            (0..100).for_each(|_| {
                self.waits(false, host);
                self.waits(true, disk);
            });
            (self.polled, self.sleeps) = (Duration::ZERO, 0);
            let start = self.now;
            (0..commands).for_each(|_| {
                self.waits(false, host);
                self.waits(true, disk);
            });
            let whole = (self.now - start).as_secs_f64();
            (self.polled.as_secs_f64() / whole, f64::from(self.sleeps) / f64::from(commands))
        }
    }

    #[test]
    fn neither_a_slow_host_nor_its_disk_is_polled() {
        let mut worker = Worker::new();
        assert_eq!(worker.simulate_host(1000, 400, 60), (0.0, 2.0));
        // A host that submits at once: the thread polls for it and never sleeps.
        let (awake, sleeps) = worker.simulate_host(1000, 15, 60);
        assert!(awake > 0.99 && sleeps == 0.0, "{awake} {sleeps}");
        // The host takes 400 us again, so the thread stops polling, as in the first simulation.
        assert_eq!(worker.simulate_host(1000, 400, 60), (0.0, 2.0));
    }

    #[test]
    fn a_slow_disk_is_not_polled() {
        let mut worker = Worker::new();
        let (awake, sleeps) = worker.simulate_host(1000, 15, 300);
        assert!((0.04..0.05).contains(&awake), "share of the host's time: {awake}");
        assert_eq!(sleeps, 1.0, "one sleep per disk request");
    }

    #[test]
    fn latencies_above_the_longest_window_end_polling() {
        // Each sleep is short, so the window stays at its maximum.
        for (host, disk) in [(110, 20), (20, 110)] {
            let mut worker = Worker::new();
            worker.simulate_host(100, 20, 20);
            worker.simulate_host(2000, host, disk);
            let (awake, sleeps) = worker.simulate_host(10_000, host, disk);
            let rest = 20.0 / 130.0;
            assert!(awake < rest + 0.02, "{host} and {disk}: awake {awake}");
            assert!((0.9..=2.0).contains(&sleeps), "{host} and {disk}: {sleeps} sleeps");
            // Polling resumes when the load becomes quick again.
            worker.simulate_host(5000, 20, 20);
            let (awake, sleeps) = worker.simulate_host(1000, 20, 20);
            assert!(awake > 0.99 && sleeps == 0.0, "{awake} {sleeps}");
        }
    }

    #[test]
    fn a_disk_that_polling_slows_down_is_not_polled() {
        let mut worker = Worker::new();
        (0..BUSY_AFTER + 10).for_each(|_| worker.waits(true, 20));
        let turns = |worker: &mut Worker| {
            let polled = worker.polled;
            for _ in 0..1000 {
                // After each completion, the host submits its next command at once. Polling finds
                // it.
                worker.starves(5);
                worker.finds(false);
                worker.waits_for_command(3);
            }
            (worker.polled - polled).as_micros() / 1000
        };
        turns(&mut worker);
        let polled = turns(&mut worker);
        assert!(polled < 5, "{polled} us of each turn");
    }

    #[test]
    fn polling_yields_to_a_thread_that_needs_the_cpu() {
        let mut worker = Worker::new();
        worker.simulate_host(1000, 15, 40);
        // The disk's server needs this CPU to complete the request.
        let answers = |worker: &mut Worker, crowded: bool| {
            worker.waits(false, 15);
            loop {
                match worker.step(true) {
                    Next::PollAgain => {}
                    Next::Yield if worker.window.after_yield(crowded) == Next::PollAgain => {}
                    Next::Yield | Next::Sleep => break,
                }
            }
            // The request completes before the I/O thread has gone to sleep.
            worker.window.restart();
            worker.finds(true);
        };
        let polled = |worker: &mut Worker| {
            let before = worker.polled;
            (0..10_000).for_each(|_| answers(worker, true));
            (worker.polled - before) / 10_000
        };
        polled(&mut worker);
        let polled = polled(&mut worker);
        assert!(polled < Duration::from_micros(16), "{polled:?}, 15 us of it for the host");
        // If another thread wants the CPU only occasionally, polling continues.
        let mut worker = Worker::new();
        worker.simulate_host(1000, 15, 40);
        for _ in 0..1000 {
            answers(&mut worker, true);
            (0..VAIN).for_each(|_| worker.waits(true, 40));
            assert!(!worker.window.disk_polls.is_paused());
        }
        // Polling resumes when the other thread no longer wants the CPU.
        for _ in 0..1000 {
            answers(&mut worker, true);
        }
        assert!(worker.window.disk_polls.is_paused());
        worker.simulate_host(1000, 15, 40);
        let (awake, sleeps) = worker.simulate_host(1000, 15, 40);
        assert!(awake > 0.99 && sleeps == 0.0, "{awake} {sleeps}");
    }

    #[test]
    fn busy_disks_are_polled_after_any_host_behaviour() {
        let mut worker = Worker::new();
        worker.simulate_host(100, 400, 60);
        (0..BUSY_AFTER + 10).for_each(|_| worker.waits(true, 20));
        worker.sleeps = 0;
        (0..1000).for_each(|_| worker.waits(true, 20));
        assert_eq!(worker.sleeps, 0);
    }

    #[test]
    fn fixed_polling_modes_do_not_adapt() {
        let mut window = IdlePolicy::new(Polling::Always);
        assert!((0..10_000).all(|_| window.next(|| (true, 0)) == Next::PollAgain));
        let mut window = IdlePolicy::new(Polling::Never);
        for _ in 0..100 {
            assert_eq!(window.next(|| (false, 0)), Next::Sleep);
            window.slept(Duration::from_micros(1));
            window.restart();
        }
    }
}
