//! When the next request may go.
//!
//! Each limit has a time, in [ticks](TICKS), at which the next request may go. A request takes that
//! time and moves it on by what it costs: a second, divided by the rate. A time that is long past
//! is as good as one that is a burst ago. So the order of the requests is that in which they took
//! their times, whoever they are of, and what went too early is missing later.

use super::rates::Limits;
use super::timer::{TICKS, Timer};
use crate::request::{Op, Request};
use parking_lot::Mutex;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

const SECOND: u64 = TICKS * 1_000_000_000;
/// What may come at once if nothing is said: 10 ms, so that a thread that comes late has lost
/// nothing.
const BURST: u64 = SECOND / 100;

/// Tells the time in nanoseconds, from any moment on.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Says when requests may go; shared by all whose limit it is. Limits can be changed at any time.
pub struct Limiter {
    buckets: [Bucket; 6],
    limits: Mutex<Limits>,
    /// How often the limits were changed.
    generation: AtomicU64,
    /// Everything goes at once, and is counted.
    is_open: AtomicBool,
    clock: Clock,
    /// Who waits for its time.
    timers: Mutex<Vec<Weak<Timer>>>,
}

/// One limit.
#[derive(Default)]
struct Bucket {
    /// When the next request may go.
    next: AtomicU64,
    /// A second; 0 if there is no limit.
    rate: AtomicU64,
    /// How long ago `next` may be.
    burst: AtomicU64,
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter").field("limits", &*self.limits.lock()).finish_non_exhaustive()
    }
}

impl Limiter {
    /// One with these limits.
    #[must_use]
    pub fn new(limits: Limits) -> Arc<Self> {
        Self::with_clock(limits, Arc::new(monotonic))
    }

    /// One with a clock of the caller's. All limits of a disk have the same clock.
    #[must_use]
    pub fn with_clock(limits: Limits, clock: Clock) -> Arc<Self> {
        let limiter = Arc::new(Self {
            buckets: Default::default(),
            limits: Mutex::default(),
            generation: AtomicU64::new(0),
            is_open: AtomicBool::new(false),
            clock,
            timers: Mutex::default(),
        });
        limiter.set(limits);
        limiter
    }

    /// What is allowed.
    #[must_use]
    pub fn limits(&self) -> Limits {
        *self.limits.lock()
    }

    /// Allows something else from here on, also for requests that wait.
    pub fn set(&self, limits: Limits) {
        *self.limits.lock() = limits;
        let now = self.now();
        for (bucket, rate) in self.buckets.iter().zip(limits.rates()) {
            let burst = rate.map_or(0, |rate| {
                rate.burst.map_or(BURST, |burst| time_of(burst, rate.per_second))
            });
            bucket.burst.store(burst, Ordering::Relaxed);
            // Who waited long for a low rate does not wait for it any more.
            bucket.next.fetch_min(now, Ordering::Relaxed);
            bucket.rate.store(rate.map_or(0, |rate| rate.per_second.max(1)), Ordering::Relaxed);
        }
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    /// Lets everything go at once, or no longer: whoever has to come to rest does not wait for
    /// limits. What goes is counted, and missing later.
    pub fn open(&self, is_open: bool) {
        self.is_open.store(is_open, Ordering::SeqCst);
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::SeqCst)
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Now, in ticks.
    pub(super) fn now(&self) -> u64 {
        (self.clock)().saturating_mul(TICKS)
    }

    /// Takes a time for this request, not before `now`, unless a burst allows that. When it may go.
    pub(super) fn take(&self, request: &Request, now: u64) -> u64 {
        let Some((is_write, bytes)) = class(request) else { return now };
        let [all, reads, writes, bytes_of_all, bytes_read, bytes_written] = &self.buckets;
        let (count, size) = if is_write { (writes, bytes_written) } else { (reads, bytes_read) };
        let times = [(all, 1), (count, 1), (bytes_of_all, bytes), (size, bytes)];
        times.iter().map(|(bucket, cost)| bucket.take(*cost, now)).max().unwrap_or(now)
    }

    /// From here on `timer` is woken when something else is allowed.
    pub(super) fn add(&self, timer: &Arc<Timer>) {
        let mut timers = self.timers.lock();
        timers.retain(|timer| timer.strong_count() != 0);
        timers.push(Arc::downgrade(timer));
    }

    fn wake(&self) {
        self.timers.lock().iter().filter_map(Weak::upgrade).for_each(|timer| timer.fire());
    }
}

impl Bucket {
    fn take(&self, amount: u64, now: u64) -> u64 {
        let rate = self.rate.load(Ordering::Relaxed);
        if rate == 0 || amount == 0 {
            return 0;
        }
        let cost = time_of(amount, rate);
        // The request itself is one of the burst.
        let burst = self.burst.load(Ordering::Relaxed).saturating_sub(cost);
        let earliest = now.saturating_sub(burst);
        let next = |next: u64| Some(next.max(earliest).saturating_add(cost));
        let before = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        before.unwrap_or(0).max(earliest)
    }
}

fn monotonic() -> u64 {
    static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
    // Far from zero, so that a burst before the beginning is one.
    let since = BEGAN.elapsed() + Duration::from_secs(3600);
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// How long so much takes at this rate.
fn time_of(amount: u64, rate: u64) -> u64 {
    let time = u128::from(amount) * u128::from(SECOND) / u128::from(rate.max(1));
    u64::try_from(time).unwrap_or(u64::MAX)
}

/// Whether it is a write, and how many bytes of data it has; nothing of what is not limited.
fn class(request: &Request) -> Option<(bool, u64)> {
    match request.op {
        Op::Read | Op::Compare | Op::Verify => Some((false, request.len)),
        Op::Write { .. } | Op::CompareAndWrite { .. } | Op::Append { .. } => {
            Some((true, request.len))
        }
        Op::Zone { .. } => Some((true, 0)),
        Op::WriteZeroes { .. } | Op::Discard => Some((true, 0)),
        Op::Flush => None,
    }
}
