//! Wakes a thread at a time.

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Ticks in a nanosecond: few enough that 64 bits have years of them, and enough that what is rounded
/// does not matter.
pub(super) const TICKS: u64 = 64;

/// A descriptor that becomes readable at a time.
#[derive(Debug)]
pub(super) struct Timer {
    fd: OwnedFd,
    /// When that is or was, in ticks; `u64::MAX` if never.
    at: AtomicU64,
}

/// The shortest time for which a thread is woken, in ticks, 50 us: what comes sooner is found by
/// looking, or goes together with what comes then.
const SHORTEST: u64 = 50_000 * TICKS;

impl Timer {
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Self { fd, at: AtomicU64::new(u64::MAX) })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Becomes readable at `at`, or somewhat later; if it does earlier, this is to be called again
    /// then.
    pub(super) fn arm(&self, at: u64, now: u64) {
        let armed = self.at.load(Ordering::Relaxed);
        if armed > now && armed <= at.saturating_add(SHORTEST) {
            return;
        }
        let at = at.max(now.saturating_add(SHORTEST));
        self.at.store(at, Ordering::SeqCst);
        self.set((at - now) / TICKS);
    }

    /// Nobody waits for it: it is readable no more.
    pub(super) fn disarm(&self) {
        if self.at.swap(u64::MAX, Ordering::SeqCst) != u64::MAX {
            self.set(0);
        }
    }

    /// Becomes readable now, if anybody waits for it. For any thread.
    pub(super) fn fire(&self) {
        let waits = |at: u64| (at != u64::MAX).then_some(0);
        if self.at.fetch_update(Ordering::SeqCst, Ordering::SeqCst, waits).is_ok() {
            self.set(1);
            // Nobody does any more: it would be readable for ever.
            if self.at.load(Ordering::SeqCst) == u64::MAX {
                self.set(0);
            }
        }
    }

    /// In so many nanoseconds; 0: never.
    fn set(&self, ns: u64) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let (seconds, rest) = (ns / 1_000_000_000, ns % 1_000_000_000);
        let value = Timespec {
            tv_sec: i64::try_from(seconds).unwrap_or(i64::MAX),
            tv_nsec: rest.cast_signed(),
        };
        let time = Itimerspec { it_interval: zero, it_value: value };
        // The descriptor is a timer, and the time is one.
        let _ = timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &time);
    }
}
