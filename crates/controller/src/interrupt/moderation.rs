//! Interrupt moderation: adapts the number of completions per interrupt.
//!
//! A host with many commands in flight can handle many completions per interrupt. A host that waits
//! for a single command needs its interrupt at once. The two hosts differ in the number of
//! completions that arrive close together. This number is learnt for each completion queue; in the
//! code it is the *target*. An interrupt is raised as soon as the learnt number of completions is
//! posted. If fewer are posted, the interrupt is held for a short *grace* after each completion.
//! From time to time, the queue waits for twice the learnt number (a *probe*), to find out if more
//! completions would arrive. Each failed probe makes probes rarer. So for a host with one command
//! in flight, finally only one of about a thousand interrupts is delayed.
//!
//! A host that submits many commands one by one can look like a host with few commands in flight.
//! Two rules distinguish them:
//! * The pace of the host's submissions is learnt, too. While the host submits at that pace, it is
//!   busy and not waiting, and an interrupt would only disturb it.
//! * At the end of a run of submissions at that pace, fewer completions than the learnt number are
//!   left. This does not reduce the learnt number, because these completions are added to those
//!   that the last full interrupt of the same run has announced.
//!
//! A host also stops submitting occasionally, because of its own interrupts or other load on its
//! CPU. That looks like the end of a run. So the learnt number drops substantially only after two
//! short runs in a row.
//!
//! Moderation is the controller's own choice. The host's settings have precedence: Interrupt
//! Coalescing (feature 08h), and coalescing disabled for the vector (feature 09h).

use std::time::{Duration, Instant};

/// Maximum number of completions per interrupt.
const MAX_TARGET: u32 = 64;
/// Number of interrupts between two probes: initial and maximum.
const PROBE_AFTER: (u32, u32) = (8, 1024);
/// Pause that ends a run of submissions, as a multiple of the host's pace (the usual time between
/// two submissions).
const PACES: u32 = 12;
/// Factor for the maximum hold time while the host is submitting: a submitting host does not wait
/// for completions, so its interrupt may be held longer.
const BUSY: u32 = 2;

/// Maximum hold times of an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HoldLimit {
    /// Maximum hold time after the latest completion.
    grace: Duration,
    /// Maximum hold time after the first completion, unless the host is busy submitting.
    pub(crate) max_hold: Duration,
}

impl HoldLimit {
    /// Limits without holding: every completion is announced at once.
    pub(crate) const NONE: Self = Self { grace: Duration::ZERO, max_hold: Duration::ZERO };

    /// Limits for an I/O thread that polls for up to `window`: a tenth of the window after each
    /// completion, the whole window in total. A long window means that the host is expected to be
    /// active.
    pub(crate) fn of(window: Duration) -> Self {
        Self { grace: window / 10, max_hold: window }
    }
}

/// Interrupt moderation of one completion queue.
#[derive(Debug)]
pub(crate) struct Moderation {
    limit: HoldLimit,
    /// Learnt number of completions per interrupt.
    target: u32,
    /// Number of interrupts until the next probe.
    until_probe: u32,
    /// Number of interrupts between two probes.
    probe_after: u32,
    /// Number of completions of the last interrupt that was raised because the target was reached;
    /// 0 if there was none in the current run of submissions.
    announced: u32,
    /// Time of the interrupt that `announced` refers to.
    announced_at: Option<Instant>,
    /// True if the host has submitted commands since the last reading of the clock.
    has_submitted: bool,
    /// Usual time between two submissions of a run; zero if unknown.
    pace: Duration,
    /// Number of completions of the last run, if it ended below the target.
    missed: Option<u32>,
    held: Option<Held>,
}

/// Interrupt that is held.
#[derive(Clone, Copy, Debug)]
struct Held {
    since: Instant,
    /// Time of the latest completion that the interrupt will announce.
    grown: Instant,
    /// Time of the host's last submission.
    submitted: Option<Instant>,
    /// Highest number of completions that waited for the interrupt at any time of the hold. The
    /// number can also drop, because the host may consume completions without an interrupt.
    peak: u32,
}

impl Moderation {
    pub(crate) fn new(limit: HoldLimit) -> Self {
        let probe_after = PROBE_AFTER.0;
        Self {
            limit,
            target: 1,
            until_probe: probe_after,
            probe_after,
            announced: 0,
            announced_at: None,
            has_submitted: false,
            pace: Duration::ZERO,
            missed: None,
            held: None,
        }
    }

    pub(crate) fn limit(&self) -> HoldLimit {
        self.limit
    }

    /// True if an interrupt is held.
    #[inline]
    pub(crate) fn is_holding(&self) -> bool {
        self.held.is_some()
    }

    /// Records that the host has submitted commands which complete in this queue.
    #[inline]
    pub(crate) fn submitted(&mut self) {
        self.has_submitted = true;
    }

    /// Number of completions at which the next interrupt is raised; twice the target during a
    /// probe.
    fn next_target(&self) -> u32 {
        if self.until_probe == 0 { (self.target * 2).min(MAX_TARGET) } else { self.target }
    }

    /// Time after a submission within which the next one is expected. If the pace of the host is
    /// slower than the grace, the host may be waiting for each of its commands. Then the time is
    /// only the grace.
    fn run_ends_after(&self) -> Duration {
        let HoldLimit { grace, max_hold } = self.limit;
        if self.pace <= grace {
            self.pace.saturating_mul(PACES).clamp(grace, max_hold)
        } else {
            grace
        }
    }

    /// Handles new completions at `now`; `count` completions in total are to be announced. Returns
    /// true if the interrupt has to be raised. Otherwise it is held, and [`is_due`](Self::is_due)
    /// has to be called again soon.
    pub(crate) fn add(&mut self, count: u32, now: Instant) -> bool {
        if self.limit.grace.is_zero() {
            return true;
        }
        if self.announced_at.is_some_and(|at| now.duration_since(at) > self.run_ends_after()) {
            self.announced = 0;
        }
        if count >= self.next_target() {
            self.see_submissions(now);
            self.announced = count;
            self.announced_at = Some(now);
            self.reached();
            return true;
        }
        let held =
            self.held.get_or_insert(Held { since: now, grown: now, submitted: None, peak: 0 });
        held.grown = now;
        held.peak = held.peak.max(count);
        self.is_due(now)
    }

    /// True if the held interrupt has to be raised at `now`.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        self.see_submissions(now);
        let Some(held) = self.held else { return false };
        let busy = held.submitted.is_some_and(|at| now.duration_since(at) < self.run_ends_after());
        let max_hold = if busy { self.limit.max_hold * BUSY } else { self.limit.max_hold };
        let due = now.duration_since(held.since) >= max_hold
            || !busy && now.duration_since(held.grown) >= self.limit.grace;
        if due {
            self.record_timeout(held.peak);
        }
        due
    }

    /// Ends the holding, because the interrupt was raised or is not needed any more.
    pub(crate) fn release(&mut self) {
        self.held = None;
    }

    /// Learns the submission pace. Only while an interrupt is held, the clock is read often enough,
    /// and no interrupts disturb the host.
    fn see_submissions(&mut self, now: Instant) {
        if !std::mem::take(&mut self.has_submitted) {
            return;
        }
        let Some(held) = &mut self.held else { return };
        if let Some(before) = held.submitted.replace(now) {
            let sample = now.duration_since(before).min(self.limit.max_hold);
            self.pace = if self.pace.is_zero() { sample } else { (self.pace * 7 + sample) / 8 };
        }
    }

    fn reached(&mut self) {
        self.missed = None;
        if self.until_probe == 0 {
            // The probe was successful, so there may be even more completions to wait for.
            self.target = self.next_target();
            self.probe_after = PROBE_AFTER.0;
            self.until_probe = self.probe_after;
        } else {
            self.until_probe -= 1;
        }
    }

    /// Handles an interrupt that was raised at the end of its hold time, with only `count`
    /// completions.
    fn record_timeout(&mut self, count: u32) {
        let in_vain = self.until_probe == 0 && count <= self.target;
        if in_vain {
            self.probe_after = (self.probe_after * 2).min(PROBE_AFTER.1);
        } else if count > self.target {
            self.probe_after = PROBE_AFTER.0;
        }
        // In two cases, `count` is the size of the whole run: a target of 1 means that nothing was
        // announced earlier in the run, and a failed probe has waited for the end of the run.
        // Otherwise, the completions that the run has announced earlier are added.
        let alone = self.target == 1 || in_vain;
        let run = if alone { count } else { self.announced.saturating_add(count) };
        let kept = match self.missed.take() {
            // A single short run may be caused by other load on the host, so the target drops only
            // slightly.
            None => {
                self.missed = Some(run);
                self.target * 7 / 8
            }
            Some(before) => before,
        };
        self.target = run.max(kept).clamp(1, MAX_TARGET);
        self.until_probe = self.probe_after;
        self.announced = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(1000);

    /// Simulates a host with bursts of `depth` completions until `interrupts` interrupts were
    /// raised. Returns the number of completions of each interrupt, and the number of waits for the
    /// whole grace.
    fn bursts(moderation: &mut Moderation, depth: u32, interrupts: usize) -> (Vec<u32>, usize) {
        let (mut sizes, mut waits) = (Vec::new(), 0);
        while sizes.len() < interrupts {
            let raised = (1..=depth).find(|count| moderation.add(*count, Instant::now()));
            let size = raised.unwrap_or_else(|| {
                waits += 1;
                assert!(moderation.is_due(Instant::now() + GRACE));
                depth
            });
            moderation.release();
            sizes.push(size);
        }
        (sizes, waits)
    }

    fn moderation() -> Moderation {
        Moderation::new(HoldLimit { grace: GRACE, max_hold: GRACE * 10 })
    }

    #[test]
    fn one_at_a_time_is_announced_at_once() {
        let mut moderation = moderation();
        let (sizes, waits) = bursts(&mut moderation, 1, 100_000);
        assert!(sizes.iter().all(|size| *size == 1));
        // There are eight probes until the interval between two probes is about a thousand
        // interrupts.
        assert!(waits <= 8 + 100_000 / 1024, "{waits}");
        assert!(bursts(&mut moderation, 1, 1000).1 <= 1, "the interval stays long");
    }

    #[test]
    fn a_deep_queue_gets_few_interrupts() {
        let mut moderation = moderation();
        let (sizes, _) = bursts(&mut moderation, 32, 100);
        assert_eq!(sizes.last(), Some(&32));
        let (sizes, waits) = bursts(&mut moderation, 32, 1000);
        assert!(sizes.iter().all(|size| *size == 32));
        assert!(waits < 20, "{waits}");
        // When the depth of the queue drops to 1, the target drops at the second short run. Each
        // short run costs a short wait. The first short run includes the completions that were
        // announced before it.
        assert_eq!(bursts(&mut moderation, 1, 4), (vec![1; 4], 4));
        assert_eq!(bursts(&mut moderation, 1, 7), (vec![1; 7], 0));
        let (sizes, waits) = bursts(&mut moderation, 1, 1000);
        assert!(sizes.iter().all(|size| *size == 1));
        // The only waits are the probes that every host with one command in flight gets.
        assert!(waits <= 8, "{waits}");
    }

    #[test]
    fn a_held_interrupt_is_raised_after_its_limit() {
        let mut moderation = Moderation::new(HoldLimit { grace: GRACE, max_hold: GRACE * 2 });
        bursts(&mut moderation, 32, 100);
        assert!(!moderation.add(1, Instant::now()));
        let start = Instant::now();
        assert!(!moderation.is_due(start));
        assert!(moderation.is_due(start + GRACE + Duration::from_secs(1)));
        moderation.release();
        assert!(!moderation.is_holding());
        // The maximum hold time also applies if completions keep arriving, one in each grace
        // period.
        bursts(&mut moderation, 32, 100);
        assert!(!moderation.add(1, Instant::now()));
        moderation.held =
            moderation.held.map(|held| Held { since: held.since - GRACE * 2, ..held });
        assert!(moderation.add(2, Instant::now()));
    }

    /// Result of a simulated guest.
    struct Outcome {
        interrupts: u32,
        completions: u32,
        /// 99th percentile of the time from a submission until the guest handles the completion, in
        /// microseconds.
        p99: u64,
    }

    impl Outcome {
        fn each(&self) -> f64 {
            f64::from(self.interrupts) / f64::from(self.completions)
        }
    }

    /// Simulates a guest with one CPU that keeps `depth` commands in flight on a disk that
    /// completes inline. A submission takes slightly more than `least`, and occasionally much
    /// longer, as with Linux and fio under emulation: one in a hundred takes a third of a
    /// millisecond, one in a thousand more than a millisecond. Every interrupt stops the guest for
    /// 40 us plus 4 us per completion; then the guest submits as many commands as were completed.
    /// `stolen` makes the longest submissions more frequent. All times are microseconds of virtual
    /// time.
    fn guest(moderation: &mut Moderation, depth: u32, least: u64, stolen: u64) -> Outcome {
        let start = Instant::now();
        let at = |time: u64| start + Duration::from_micros(time);
        let (mut time, mut context) = (0u64, 0x9e37_79b9_7f4a_7c15u64);
        let mut random = move |below: u64| {
            context ^= context << 13;
            context ^= context >> 7;
            context ^= context << 17;
            (context >> 33) % below
        };
        let mut submission = move || {
            least
                + match random(1000) {
                    0..700 => random(4),
                    700..880 => 4 + random(14),
                    880..940 => 15 + random(40),
                    940..980 => 40 + random(90),
                    rare if rare < 996 - stolen => 100 + random(400),
                    _ => 500 + random(1200),
                }
        };
        let mut in_flight = std::collections::VecDeque::new();
        let (mut unannounced, mut known, mut to_submit) = (0u32, 0u32, depth);
        let (mut interrupts, mut completions, mut latencies) = (0, 0, Vec::new());
        while completions < 30_000 {
            // Without commands to submit, the guest only waits for an interrupt.
            let end = if to_submit == 0 { u64::MAX } else { time + submission() };
            // The controller polls about once per microsecond.
            let mut raised = false;
            while time < end && !raised {
                time += 1;
                raised = unannounced != 0 && moderation.is_holding() && moderation.is_due(at(time));
                assert!(raised || end != u64::MAX || moderation.is_holding(), "it hangs");
            }
            if !raised {
                to_submit -= 1;
                unannounced += 1;
                in_flight.push_back(time);
                moderation.submitted();
                raised = moderation.add(unannounced, at(time));
            }
            if raised {
                moderation.release();
                interrupts += 1;
                completions += unannounced;
                time += 40 + 4 * u64::from(unannounced);
                known += std::mem::take(&mut unannounced);
            }
            if to_submit == 0 {
                time += 40 + 3 * u64::from(known);
                latencies.extend(in_flight.drain(..known as usize).map(|since| time - since));
                to_submit = std::mem::take(&mut known);
            }
        }
        latencies.sort_unstable();
        Outcome { interrupts, completions, p99: latencies[latencies.len() * 99 / 100] }
    }

    #[test]
    fn a_slow_guest_is_not_stopped_in_its_work() {
        let patient = || Moderation::new(HoldLimit::of(Duration::from_millis(1)));
        // `least` for shadow doorbells and for trapped doorbells; `stolen` for an idle machine and
        // one with other load.
        for (least, stolen) in [(20, 0), (20, 8), (38, 0), (38, 8)] {
            for (depth, at_most) in [(2, 0.6), (4, 0.35), (8, 0.2), (32, 0.065)] {
                let each = guest(&mut patient(), depth, least, stolen).each();
                assert!(each <= at_most, "{least}, {stolen}, iodepth {depth}: {each:.3} per I/O");
            }
            let (with, without) = (&mut patient(), &mut Moderation::new(HoldLimit::NONE));
            let (with, without) =
                (guest(with, 32, least, stolen).p99, guest(without, 32, least, stolen).p99);
            assert!(with < without * 3 / 4, "latency with {with} us, without {without} us");
            let one = guest(&mut patient(), 1, least, stolen);
            assert_eq!(
                one.interrupts, one.completions,
                "one interrupt per command at a queue depth of 1"
            );
        }
    }

    #[test]
    fn a_host_slower_than_the_grace_is_not_waited_for() {
        // Independent commands, one every 15 us. The submitter of each waits for its completion.
        let mut moderation = Moderation::new(HoldLimit::of(Duration::from_micros(100)));
        let start = Instant::now();
        let (mut interrupts, mut held_for) = (0, Duration::ZERO);
        for command in 0..10_000u32 {
            let now = start + Duration::from_micros(15) * command;
            moderation.submitted();
            let mut due = moderation.add(1, now);
            for later in (0..14).map(|us| now + Duration::from_micros(us)) {
                due = due || moderation.is_due(later);
                held_for += if due { Duration::ZERO } else { Duration::from_micros(1) };
            }
            interrupts += u32::from(due);
            moderation.release();
        }
        assert_eq!(interrupts, 10_000);
        assert!(held_for < Duration::from_millis(1), "{held_for:?}");
    }

    #[test]
    fn without_a_limit_every_completion_is_announced() {
        let mut moderation = Moderation::new(HoldLimit::NONE);
        assert!((0..10_000).all(|_| moderation.add(1, Instant::now())));
        assert!(!moderation.is_holding());
    }
}
