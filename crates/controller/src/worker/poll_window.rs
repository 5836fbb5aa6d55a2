//! How long a worker that has found nothing to do goes on looking before it sleeps.

use crate::interrupt::HoldLimit;
use shadowbell_memory::GiveWay;
use std::time::{Duration, Instant};

/// When a worker that has found nothing to do goes to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// After a window that grows while work returns soon after it went to sleep and shrinks while
    /// it does not, up to this long.
    Adaptive(Duration),
    /// Never: a processor per worker, and no doorbell ever rings.
    Always,
    /// At once.
    Never,
}

impl Polling {
    /// How long interrupts may be held back by a worker that waits so.
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

/// How long a worker waits for the next command, and with it how long an interrupt is held back, if
/// nobody says otherwise.
const LONGEST_HOLD: Duration = Duration::from_micros(100);
/// Idle passes between two looks at the clock.
const PASSES: u32 = 64;
/// Idle passes after which a worker that waits for a host gives way to others: some microseconds,
/// in which a host that polls as well would have answered.
const POLITE_AFTER: u32 = 8 * PASSES;
/// The first window after a sleep that was worth spinning for.
const FIRST_WINDOW: Duration = Duration::from_micros(8);

/// What a worker does after a pass that found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// It looks again.
    Look,
    /// It looks again, and whoever else wants this processor goes first: on a small host that is
    /// the VMM's thread with the interrupt that the next command waits for, or the server that a
    /// disk is on.
    Yield,
    /// It goes to sleep.
    Sleep,
}

/// How often in a row a worker has to have waited for nothing but its disks until a host is taken
/// for one that keeps them busy.
const BUSY_AFTER: u32 = 64;

/// Polls in a row that ended in a sleep until polling is given up for a while. A window grows to
/// its longest in half as many.
const VAIN: u32 = 8;
/// How many waits that while is at first, and at most: who becomes quick is noticed after some
/// hundredths of a second, and what is polled in vain until then is a microsecond a wait.
const PAUSE: (u32, u32) = (64, 512);

/// Polls for one kind of thing, and what came of them.
///
/// A sleep that was short speaks for a longer window; but what takes a bit longer than the longest
/// is never caught by it. And a disk may be slow *because* it is polled for: the kernel may end its
/// requests in a thread of the processor that the worker does not leave, each time until just after
/// it does.
///
/// A poll for a disk in which somebody else wanted the processor counts as one in vain, too: a disk
/// may be on a server of this machine, and a worker that sleeps leaves the processor to that.
#[derive(Debug, Default)]
struct Polls {
    /// In vain, since the last that was not.
    vain: u32,
    /// Waits that are left without any, and how many they were.
    left: u32,
    pause: u32,
}

impl Polls {
    /// A wait begins.
    fn begin(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    /// What is polled for has come.
    fn succeed(&mut self) {
        *self = Self::default();
    }

    /// It has not.
    fn fail(&mut self) {
        self.vain += 1;
        if self.vain >= VAIN {
            // Half as many decide whether it is still so.
            self.vain = VAIN / 2;
            self.pause = (self.pause * 2).clamp(PAUSE.0, PAUSE.1);
            self.left = self.pause;
        }
    }

    fn is_paused(&self) -> bool {
        self.left != 0
    }
}

/// The polling of one worker.
///
/// A host's next command and a disk's answer take their own times, and each is learnt where it
/// shows: the host's while nothing is pending at any disk, the disks' while something is. To wait
/// for a disk by polling pays for a host that is as quick: it has its answer sooner by a wakeup.
/// One that takes longer than the longest window over its next command would not notice, and then
/// the processor does better with something else; unless it keeps several commands in flight, and
/// the disks busy.
#[derive(Debug)]
pub(super) struct PollWindow {
    polling: Polling,
    /// While nothing is pending.
    host: Duration,
    host_polls: Polls,
    /// While a disk has something in hand.
    disk: Duration,
    disk_polls: Polls,
    /// How often it has waited since it last waited for a host alone.
    busy: u32,
    /// Passes in a row that found nothing.
    idle: u32,
    /// Whether a disk has something in hand since then, and how many requests had ended before.
    pending: bool,
    ended: u64,
    /// When they began, or nearly.
    since: Instant,
    others: GiveWay,
    /// Somebody else wanted the processor since then, while a disk was waited for.
    crowded: bool,
}

impl PollWindow {
    pub(super) fn new(polling: Polling) -> Self {
        let none = Duration::ZERO;
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
            others: GiveWay::new(),
            crowded: false,
        }
    }

    pub(super) fn polling(&self) -> Polling {
        self.polling
    }

    /// A pass has found something. `ended` says how many requests have ended at the disks so far.
    #[inline]
    pub(super) fn found(&mut self, ended: impl FnOnce() -> u64) {
        if self.idle != 0 {
            self.idle = 0;
            if !self.pending {
                self.host_polls.succeed();
            } else if ended() != self.ended {
                // And not only the host's next command.
                self.disk_polls.succeed();
            }
        }
    }

    /// A pass has found nothing. `pending` says whether a disk has something in hand, which does
    /// not change until a pass finds something, and how many requests have ended at the disks
    /// so far.
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
            Polling::Always => return Next::Look,
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
            return Next::Look;
        }
        let now = clock();
        if self.idle == PASSES {
            self.since = now;
        }
        let waited = now.duration_since(self.since);
        if waited >= width {
            Next::Sleep
        } else if self.pending && waited >= GiveWay::AFTER || self.idle >= POLITE_AFTER {
            Next::Yield
        } else {
            Next::Look
        }
    }

    /// Others go first who want this processor. What to do then.
    pub(super) fn give_way(&mut self) -> Next {
        let crowded = self.others.give_way(GiveWay::AFTER);
        self.gave_way(crowded)
    }

    /// The same, after somebody has run if `crowded`.
    fn gave_way(&mut self, crowded: bool) -> Next {
        // A host that wants this processor has just had it, and is quick most of the time.
        if !crowded || !self.pending {
            return Next::Look;
        }
        self.crowded = true;
        self.disk_polls.fail();
        Next::Sleep
    }

    /// How long it looks this time.
    fn width(&self) -> Duration {
        let host = if self.host_polls.is_paused() { Duration::ZERO } else { self.host };
        if !self.pending {
            host
        } else if self.disk_polls.is_paused() || host.is_zero() && self.busy < BUSY_AFTER {
            Duration::ZERO
        } else {
            self.disk
        }
    }

    /// The worker has slept for so long.
    pub(super) fn slept(&mut self, slept: Duration) {
        let Polling::Adaptive(most) = self.polling else { return };
        // Or that counts already.
        let in_vain = !self.width().is_zero() && !self.crowded;
        let (width, polls) = if self.pending {
            (&mut self.disk, &mut self.disk_polls)
        } else {
            (&mut self.host, &mut self.host_polls)
        };
        *width = adapt(*width, slept, most);
        if in_vain {
            polls.fail();
        }
    }

    /// It set out to sleep, whether it slept or not, and begins to wait anew.
    pub(super) fn restart(&mut self) {
        self.idle = 0;
        self.crowded = false;
    }
}

/// The next window, after a sleep of `slept`. As KVM's haltpoll does it: grow when spinning a bit
/// longer would have saved the sleep, shrink when it would have been in vain.
fn adapt(window: Duration, slept: Duration, most: Duration) -> Duration {
    if slept < most {
        (window * 2).max(FIRST_WINDOW).min(most)
    } else if window <= FIRST_WINDOW {
        Duration::ZERO
    } else {
        window / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The length of a window.
    const MOST: Duration = Duration::from_micros(100);
    /// What a pass takes that finds nothing.
    const PASS: Duration = Duration::from_nanos(50);

    /// A worker in virtual time.
    struct Worker {
        window: PollWindow,
        now: Instant,
        polled: Duration,
        sleeps: u32,
        ended: u64,
    }

    impl Worker {
        fn new() -> Self {
            let window = PollWindow::new(Polling::Adaptive(MOST));
            Self { window, now: Instant::now(), polled: Duration::ZERO, sleeps: 0, ended: 0 }
        }

        /// Finds nothing for so many microseconds.
        fn looks(&mut self, pending: bool, micros: u64) {
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

        /// Nothing is to be done for so many microseconds, and then there is what was waited for.
        fn waits(&mut self, pending: bool, micros: u64) {
            self.looks(pending, micros);
            self.finds(pending);
        }

        /// The host's next command comes, while the disk is at work.
        fn waits_for_command(&mut self, micros: u64) {
            self.looks(true, micros);
            self.finds(false);
        }

        /// A disk that ends nothing before the worker has slept for so many microseconds.
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

        /// The commands of a host that has one at a time in flight: the shares of the time that the
        /// worker waited awake, and the sleeps a command.
        fn serves(&mut self, commands: u32, host: u64, disk: u64) -> (f64, f64) {
            // What it was used to does not count.
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
    fn the_window_follows_the_load() {
        let mut window = Duration::ZERO;
        for _ in 0..10 {
            window = adapt(window, Duration::from_micros(20), MOST);
        }
        assert_eq!(window, MOST);
        for _ in 0..10 {
            window = adapt(window, Duration::from_secs(1), MOST);
        }
        assert_eq!(window, Duration::ZERO);
    }

    #[test]
    fn a_host_that_takes_its_time_is_not_polled_for_nor_its_disk() {
        let mut worker = Worker::new();
        assert_eq!(worker.serves(1000, 400, 60), (0.0, 2.0));
        // And one that answers at once is: nobody sleeps.
        let (awake, sleeps) = worker.serves(1000, 15, 60);
        assert!(awake > 0.99 && sleeps == 0.0, "{awake} {sleeps}");
        // And back.
        assert_eq!(worker.serves(1000, 400, 60), (0.0, 2.0));
    }

    #[test]
    fn a_disk_that_takes_its_time_is_not_polled() {
        let mut worker = Worker::new();
        let (awake, sleeps) = worker.serves(1000, 15, 300);
        assert!((0.04..0.05).contains(&awake), "the host's part of the time: {awake}");
        assert_eq!(sleeps, 1.0, "while the disk works");
    }

    #[test]
    fn what_takes_a_bit_longer_than_the_longest_window_is_not_polled_for_ever() {
        // Each sleep is short, so the window stays at its longest.
        for (host, disk) in [(110, 20), (20, 110)] {
            let mut worker = Worker::new();
            worker.serves(100, 20, 20);
            worker.serves(2000, host, disk);
            let (awake, sleeps) = worker.serves(10_000, host, disk);
            let rest = 20.0 / 130.0;
            assert!(awake < rest + 0.02, "{host} and {disk}: awake {awake}");
            assert!((0.9..=2.0).contains(&sleeps), "{host} and {disk}: {sleeps} sleeps");
            // And polling comes back with what it is good for.
            worker.serves(5000, 20, 20);
            let (awake, sleeps) = worker.serves(1000, 20, 20);
            assert!(awake > 0.99 && sleeps == 0.0, "{awake} {sleeps}");
        }
    }

    #[test]
    fn a_disk_that_is_slow_because_it_is_polled_for_is_left_alone() {
        let mut worker = Worker::new();
        (0..BUSY_AFTER + 10).for_each(|_| worker.waits(true, 20));
        let turns = |worker: &mut Worker| {
            let polled = worker.polled;
            for _ in 0..1000 {
                // What it answers has the host submit the next at once, which is found by polling.
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
    fn nobody_is_kept_from_the_processor_who_wants_it_each_time() {
        let mut worker = Worker::new();
        worker.serves(1000, 15, 40);
        // Whom the disk waits for wants this processor, and answers from it.
        let answers = |worker: &mut Worker, crowded: bool| {
            worker.waits(false, 15);
            loop {
                match worker.step(true) {
                    Next::Look => {}
                    Next::Yield if worker.window.gave_way(crowded) == Next::Look => {}
                    Next::Yield | Next::Sleep => break,
                }
            }
            // It is there before the worker has gone to sleep.
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
        // Now and then is chance.
        let mut worker = Worker::new();
        worker.serves(1000, 15, 40);
        for _ in 0..1000 {
            answers(&mut worker, true);
            (0..VAIN).for_each(|_| worker.waits(true, 40));
            assert!(!worker.window.disk_polls.is_paused());
        }
        // And who has gone does not count for ever.
        for _ in 0..1000 {
            answers(&mut worker, true);
        }
        assert!(worker.window.disk_polls.is_paused());
        worker.serves(1000, 15, 40);
        let (awake, sleeps) = worker.serves(1000, 15, 40);
        assert!(awake > 0.99 && sleeps == 0.0, "{awake} {sleeps}");
    }

    #[test]
    fn disks_that_are_kept_busy_are_polled_whatever_the_host_did_before() {
        let mut worker = Worker::new();
        worker.serves(100, 400, 60);
        (0..BUSY_AFTER + 10).for_each(|_| worker.waits(true, 20));
        worker.sleeps = 0;
        (0..1000).for_each(|_| worker.waits(true, 20));
        assert_eq!(worker.sleeps, 0);
    }

    #[test]
    fn nothing_is_learnt_where_nothing_is_to_be() {
        let mut window = PollWindow::new(Polling::Always);
        assert!((0..10_000).all(|_| window.next(|| (true, 0)) == Next::Look));
        let mut window = PollWindow::new(Polling::Never);
        for _ in 0..100 {
            assert_eq!(window.next(|| (false, 0)), Next::Sleep);
            window.slept(Duration::from_micros(1));
            window.restart();
        }
    }
}
