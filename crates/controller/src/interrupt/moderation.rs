//! How many completions an interrupt is worth.
//!
//! A host that keeps many commands in flight takes many completions with one interrupt, if they are
//! there; a host that waits for one command wants its interrupt at once. Which of both it is shows
//! in how many completions come close together, and that is learnt for each completion queue: an
//! interrupt is raised as soon as there are as many completions as there lately were, and held back
//! for a short *grace* while there are fewer and more keep coming. Now and then twice as many are
//! waited for, to find out whether there would be more; as long as that is in vain, it is tried
//! ever more rarely, so that a host that waits for each command is made to wait a little longer
//! once in a thousand times.
//!
//! Two things keep a host that submits many commands, one by one, from being taken for one of few:
//! * The pace of its submissions is learnt as well, and while they keep coming at that pace, the
//!   host is busy with them and not waiting: an interrupt would only stop it in its work.
//! * What is left at the end of such a run is fewer than an interrupt is worth, and says nothing:
//!   it counts together with what was announced before it.
//!
//! And a host is kept from its work now and then, by its own interrupts or by whatever else wants
//! its processor. That looks like the end of a run, so it takes two in a row to be believed.
//!
//! This is the controller's own choice, where the host has not made one: Interrupt Coalescing
//! (feature 08h), if the host sets it, is obeyed as it is.

use std::time::{Duration, Instant};

/// The most completions that are waited for.
const MOST: u32 = 64;
/// Interrupts between two attempts at more, at first and at most.
const PROBE_AFTER: (u32, u32) = (8, 1024);
/// A host that has not submitted anything for so many times its usual pace has come to an end.
const PACES: u32 = 12;
/// How many times as long a host is held off that is still submitting, and so not waiting.
const BUSY: u32 = 2;

/// How long interrupts may be held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HoldLimit {
    /// After the last completion.
    pub(crate) grace: Duration,
    /// After the first, if the host is not seen to be busy.
    pub(crate) most: Duration,
}

impl HoldLimit {
    /// Every completion is announced at once.
    pub(crate) const NONE: Self = Self { grace: Duration::ZERO, most: Duration::ZERO };

    /// A tenth of the time, `window`, that a worker spends on looking for the next command, and all
    /// of it for the sum: a worker that is willing to wait so long for a host takes it for awake.
    pub(crate) fn of(window: Duration) -> Self {
        Self { grace: window / 10, most: window }
    }
}

/// The interrupts of one completion queue.
#[derive(Debug)]
pub(crate) struct Moderation {
    limit: HoldLimit,
    /// Completions that are worth an interrupt.
    target: u32,
    /// Interrupts until twice as many are waited for.
    until_probe: u32,
    /// Interrupts between two such attempts.
    probe_after: u32,
    /// Completions that were announced last during the run under way, because there were enough.
    announced: u32,
    /// When that was done.
    announced_at: Option<Instant>,
    /// The host has submitted commands since the clock was looked at.
    has_submitted: bool,
    /// The usual time between two submissions during a run; zero while that is not known.
    pace: Duration,
    /// How far the last run went, if there was less than was waited for.
    missed: Option<u32>,
    held: Option<Held>,
}

/// An interrupt that is held back.
#[derive(Clone, Copy, Debug)]
struct Held {
    since: Instant,
    /// When the last completion was added to it.
    grown: Instant,
    /// When the host was last seen to submit.
    submitted: Option<Instant>,
    /// The most completions that there were to announce. The host may have found some of them by
    /// itself since.
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

    /// Whether an interrupt is held back.
    #[inline]
    pub(crate) fn is_holding(&self) -> bool {
        self.held.is_some()
    }

    /// The host has submitted commands to a queue whose completions these are.
    #[inline]
    pub(crate) fn submitted(&mut self) {
        self.has_submitted = true;
    }

    /// How many completions are waited for now.
    fn wanted(&self) -> u32 {
        if self.until_probe == 0 { (self.target * 2).min(MOST) } else { self.target }
    }

    /// How long after a submission the host is taken to be about to submit again. One that usually
    /// takes longer than the grace may as well wait for each of its commands.
    fn run_ends_after(&self) -> Duration {
        let HoldLimit { grace, most } = self.limit;
        if self.pace <= grace { self.pace.saturating_mul(PACES).clamp(grace, most) } else { grace }
    }

    /// There are `count` completions to announce at `now`, some of them new. Whether that is to be
    /// done; if not, ask [`is_due`](Self::is_due) again soon.
    pub(crate) fn add(&mut self, count: u32, now: Instant) -> bool {
        if self.limit.grace.is_zero() {
            return true;
        }
        if self.announced_at.is_some_and(|at| now.duration_since(at) > self.run_ends_after()) {
            self.announced = 0;
        }
        if count >= self.wanted() {
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

    /// Whether what is held back is to be announced at `now` after all.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        self.see_submissions(now);
        let Some(held) = self.held else { return false };
        let busy = held.submitted.is_some_and(|at| now.duration_since(at) < self.run_ends_after());
        let most = if busy { self.limit.most * BUSY } else { self.limit.most };
        let due = now.duration_since(held.since) >= most
            || !busy && now.duration_since(held.grown) >= self.limit.grace;
        if due {
            self.late(held.peak);
        }
        due
    }

    /// What was held back is announced, or of no interest any more.
    pub(crate) fn let_go(&mut self) {
        self.held = None;
    }

    /// Learns the pace of the host. Only while something is held back is the clock looked at often
    /// enough for that, and the host not kept from its work by interrupts.
    fn see_submissions(&mut self, now: Instant) {
        if !std::mem::take(&mut self.has_submitted) {
            return;
        }
        let Some(held) = &mut self.held else { return };
        if let Some(before) = held.submitted.replace(now) {
            let sample = now.duration_since(before).min(self.limit.most);
            self.pace = if self.pace.is_zero() { sample } else { (self.pace * 7 + sample) / 8 };
        }
    }

    fn reached(&mut self) {
        self.missed = None;
        if self.until_probe == 0 {
            // There were more, so there may be still more.
            self.target = self.wanted();
            self.probe_after = PROBE_AFTER.0;
            self.until_probe = self.probe_after;
        } else {
            self.until_probe -= 1;
        }
    }

    /// There were only `count`.
    fn late(&mut self, count: u32) {
        let in_vain = self.until_probe == 0 && count <= self.target;
        if in_vain {
            self.probe_after = (self.probe_after * 2).min(PROBE_AFTER.1);
        } else if count > self.target {
            self.probe_after = PROBE_AFTER.0;
        }
        // While each is announced alone, there is nothing to tell runs by; and an attempt in vain
        // has shown how far this one goes.
        let alone = self.target == 1 || in_vain;
        let run = if alone { count } else { self.announced.saturating_add(count) };
        let kept = match self.missed.take() {
            // A host that was late once, because something kept it from its work, is not given up.
            None => {
                self.missed = Some(run);
                self.target * 7 / 8
            }
            Some(before) => before,
        };
        self.target = run.max(kept).clamp(1, MOST);
        self.until_probe = self.probe_after;
        self.announced = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(1000);

    /// A host that has `depth` completions come close together, for `interrupts` of them: how many
    /// it got with each, and how often it had to wait for the end of the grace.
    fn bursts(moderation: &mut Moderation, depth: u32, interrupts: usize) -> (Vec<u32>, usize) {
        let (mut sizes, mut waits) = (Vec::new(), 0);
        while sizes.len() < interrupts {
            let raised = (1..=depth).find(|count| moderation.add(*count, Instant::now()));
            let size = raised.unwrap_or_else(|| {
                waits += 1;
                assert!(moderation.is_due(Instant::now() + GRACE));
                depth
            });
            moderation.let_go();
            sizes.push(size);
        }
        (sizes, waits)
    }

    fn moderation() -> Moderation {
        Moderation::new(HoldLimit { grace: GRACE, most: GRACE * 10 })
    }

    #[test]
    fn one_at_a_time_is_announced_at_once() {
        let mut moderation = moderation();
        let (sizes, waits) = bursts(&mut moderation, 1, 100_000);
        assert!(sizes.iter().all(|size| *size == 1));
        // Eight attempts until there are a thousand interrupts between two of them.
        assert!(waits <= 8 + 100_000 / 1024, "{waits}");
        assert!(bursts(&mut moderation, 1, 1000).1 <= 1, "and that is how it stays");
    }

    #[test]
    fn a_deep_queue_gets_few_interrupts() {
        let mut moderation = moderation();
        let (sizes, _) = bursts(&mut moderation, 32, 100);
        assert_eq!(sizes.last(), Some(&32));
        let (sizes, waits) = bursts(&mut moderation, 32, 1000);
        assert!(sizes.iter().all(|size| *size == 32));
        assert!(waits < 20, "{waits}");
        // Where it is not deep any more, that is believed the second time, a short wait for each;
        // what was announced before the first of them counted with it.
        assert_eq!(bursts(&mut moderation, 1, 4), (vec![1; 4], 4));
        assert_eq!(bursts(&mut moderation, 1, 7), (vec![1; 7], 0));
        let (sizes, waits) = bursts(&mut moderation, 1, 1000);
        assert!(sizes.iter().all(|size| *size == 1));
        // The attempts of any host that waits for each.
        assert!(waits <= 8, "{waits}");
    }

    #[test]
    fn nothing_is_held_for_ever() {
        let mut moderation = Moderation::new(HoldLimit { grace: GRACE, most: GRACE * 2 });
        bursts(&mut moderation, 32, 100);
        assert!(!moderation.add(1, Instant::now()));
        let start = Instant::now();
        assert!(!moderation.is_due(start));
        assert!(moderation.is_due(start + GRACE + Duration::from_secs(1)));
        moderation.let_go();
        assert!(!moderation.is_holding());
        // Not even if completions keep coming, one in each grace.
        bursts(&mut moderation, 32, 100);
        assert!(!moderation.add(1, Instant::now()));
        moderation.held =
            moderation.held.map(|held| Held { since: held.since - GRACE * 2, ..held });
        assert!(moderation.add(2, Instant::now()));
    }

    /// What a run of a guest came to.
    struct Outcome {
        interrupts: u32,
        completions: u32,
        /// Microseconds from a submission to when the guest has its completion in hand.
        p99: u64,
    }

    impl Outcome {
        fn each(&self) -> f64 {
            f64::from(self.interrupts) / f64::from(self.completions)
        }
    }

    /// A guest with one processor that keeps `depth` commands in flight on a disk that answers at
    /// once: it takes `least` and a little to submit one, now and then much longer (as Linux with
    /// fio does under emulation: one time in a hundred a third of a millisecond, one in a
    /// thousand more than one), is stopped by every interrupt for 40 us and 4 us a completion,
    /// and submits as many as it has had interrupts for. Microseconds of virtual time.
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
            // If nothing is to be submitted, it can only wait.
            let end = if to_submit == 0 { u64::MAX } else { time + submission() };
            // The controller looks about once in a microsecond.
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
                moderation.let_go();
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
        // Doorbells in memory, and trapped ones; a machine for itself, and one with others on it.
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
                "one that waits for each gets one for each"
            );
        }
    }

    #[test]
    fn a_host_slower_than_the_grace_is_not_waited_for() {
        // Commands that come of themselves, each waited for by somebody, 15 us apart.
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
            moderation.let_go();
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
