//! Timer that wakes a thread at a start time.

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Ticks per nanosecond. With this resolution, rounding errors are negligible, and 64 bits last for
/// years.
pub(super) const TICKS: u64 = 64;

/// Timer descriptor that becomes readable at a set time.
#[derive(Debug)]
pub(super) struct Timer {
    fd: OwnedFd,
    /// Expiry in ticks; `u64::MAX` if not armed.
    at: AtomicU64,
}

/// Minimum delay of the timer, in ticks (50 us). A request that may start earlier is started by a
/// thread that polls, or else when the timer expires.
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

    /// Arms the timer for `at`. The timer may expire up to 50 us later. It may also expire earlier,
    /// because an earlier expiry is not replaced; the caller then arms it again.
    pub(super) fn arm(&self, at: u64, now: u64) {
        let armed = self.at.load(Ordering::Relaxed);
        if armed > now && armed <= at.saturating_add(SHORTEST) {
            return;
        }
        let at = at.max(now.saturating_add(SHORTEST));
        self.at.store(at, Ordering::SeqCst);
        self.set((at - now) / TICKS);
    }

    /// Disarms the timer and makes the descriptor unreadable.
    pub(super) fn disarm(&self) {
        if self.at.swap(u64::MAX, Ordering::SeqCst) != u64::MAX {
            self.set(0);
        }
    }

    /// Makes the descriptor readable at once if the timer is armed. May be called by any thread.
    pub(super) fn fire(&self) {
        let waits = |at: u64| (at != u64::MAX).then_some(0);
        if self.at.fetch_update(Ordering::SeqCst, Ordering::SeqCst, waits).is_ok() {
            self.set(1);
            // If another thread has disarmed the timer meanwhile, the descriptor must not stay
            // readable.
            if self.at.load(Ordering::SeqCst) == u64::MAX {
                self.set(0);
            }
        }
    }

    /// Sets the expiry in `ns` nanoseconds; 0 disarms the timer.
    fn set(&self, ns: u64) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let (seconds, rest) = (ns / 1_000_000_000, ns % 1_000_000_000);
        let value = Timespec {
            tv_sec: i64::try_from(seconds).unwrap_or(i64::MAX),
            tv_nsec: rest.cast_signed(),
        };
        let time = Itimerspec { it_interval: zero, it_value: value };
        // `timerfd_settime` cannot fail: the descriptor is a timer, and the time is valid.
        let _ = timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &time);
    }
}
