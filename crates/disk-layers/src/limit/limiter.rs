//! Rate limiter: decides when the next request may start.
//!
//! Each limit is a virtual clock, in [ticks](TICKS), that holds the start time of the next request.
//! A request takes that time and advances the clock by its cost: its number of units (one request,
//! or its bytes) divided by the rate. If the clock is more than one burst in the past, it is first
//! set to one burst ago. So the requests of all users of a limit start in the order in which they
//! took their start times. While the limits are suspended, requests start before their times, but
//! advance the clock too, so later ones have to wait longer.

use super::rates::Limits;
use super::timer::{TICKS, Timer};
use parking_lot::Mutex;
use shadowbell_disk::{Op, Request};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

const SECOND: u64 = TICKS * 1_000_000_000;
/// Default burst: the number of units that the rate permits in 10 ms. So a thread that is scheduled
/// up to 10 ms late still reaches the rate.
const BURST: u64 = SECOND / 100;

/// Clock in nanoseconds, with an arbitrary origin.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Rate limiter, which all users of the limits share. The limits can be changed at any time.
pub struct Limiter {
    buckets: [Bucket; 6],
    limits: Mutex<Limits>,
    /// Number of changes of the limits.
    generation: AtomicU64,
    /// True while limits are suspended: requests start at once, but are counted.
    is_open: AtomicBool,
    clock: Clock,
    /// Timers of waiting queues.
    timers: Mutex<Vec<Weak<Timer>>>,
}

/// One limit.
#[derive(Default)]
struct Bucket {
    /// Start time of the next request, in ticks.
    next: AtomicU64,
    /// Units per second; 0 if there is no limit.
    rate: AtomicU64,
    /// Maximum time, in ticks, that `next` may be in the past: the size of a burst as a duration at
    /// this rate.
    burst: AtomicU64,
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter").field("limits", &*self.limits.lock()).finish_non_exhaustive()
    }
}

impl Limiter {
    /// Creates a limiter.
    #[must_use]
    pub fn new(limits: Limits) -> Arc<Self> {
        Self::with_clock(limits, Arc::new(monotonic))
    }

    /// Creates a limiter with a clock that the caller provides. All limiters of a disk must have
    /// the same clock.
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

    /// Current limits.
    #[must_use]
    pub fn limits(&self) -> Limits {
        *self.limits.lock()
    }

    /// Replaces the limits. The new limits also apply to waiting requests.
    pub fn set(&self, limits: Limits) {
        *self.limits.lock() = limits;
        let now = self.now();
        for (bucket, rate) in self.buckets.iter().zip(limits.rates()) {
            let burst = rate.map_or(0, |rate| {
                rate.burst.map_or(BURST, |burst| time_of(burst, rate.per_second))
            });
            bucket.burst.store(burst, Ordering::Relaxed);
            // An old, lower rate may have set the start time far in the future. Then it is reset to
            // now.
            bucket.next.fetch_min(now, Ordering::Relaxed);
            bucket.rate.store(rate.map_or(0, |rate| rate.per_second.max(1)), Ordering::Relaxed);
        }
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    /// Suspends the limits or enforces them again. They are suspended during a quiesce: otherwise
    /// the quiesce would have to wait for the delayed requests. Requests that start meanwhile are
    /// counted, so later ones have to wait longer.
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

    /// Current time in ticks.
    pub(super) fn now(&self) -> u64 {
        (self.clock)().saturating_mul(TICKS)
    }

    /// Takes the next start time for a request and returns it, in ticks. It is before `now` only if
    /// a burst is left.
    pub(super) fn take(&self, request: &Request, now: u64) -> u64 {
        let Some((is_write, bytes)) = class(request) else { return now };
        let [all, reads, writes, bytes_of_all, bytes_read, bytes_written] = &self.buckets;
        let (count, size) = if is_write { (writes, bytes_written) } else { (reads, bytes_read) };
        let times = [(all, 1), (count, 1), (bytes_of_all, bytes), (size, bytes)];
        times.iter().map(|(bucket, cost)| bucket.take(*cost, now)).max().unwrap_or(now)
    }

    /// Registers `timer`. A change of the limits wakes it.
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
        // The cost of the request itself is part of the burst.
        let burst = self.burst.load(Ordering::Relaxed).saturating_sub(cost);
        let earliest = now.saturating_sub(burst);
        let next = |next: u64| Some(next.max(earliest).saturating_add(cost));
        let before = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        before.unwrap_or(0).max(earliest)
    }
}

fn monotonic() -> u64 {
    static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
    // The clock starts at one hour instead of zero, so that subtracting the first burst does not
    // underflow.
    let since = BEGAN.elapsed() + Duration::from_secs(3600);
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Time in ticks that `amount` units take at a rate of `rate` units per second.
fn time_of(amount: u64, rate: u64) -> u64 {
    let time = u128::from(amount) * u128::from(SECOND) / u128::from(rate.max(1));
    u64::try_from(time).unwrap_or(u64::MAX)
}

/// Classifies a request. Returns true for a write, and the number of bytes that count; `None` if
/// the request is not limited.
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
