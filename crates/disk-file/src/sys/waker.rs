//! Wake-up of a queue's owner from another thread.

use super::threads::ThreadsShared;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Handle that makes the wake descriptor of a queue readable, from any thread.
pub(crate) enum Waker {
    Alarm(Arc<Alarm>),
    Threads(Arc<ThreadsShared>),
    #[cfg(test)]
    None,
}

impl Waker {
    /// Creates a waker without effect.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self::None
    }

    pub(crate) fn wake(&self) {
        match self {
            Self::Alarm(alarm) => alarm.ring_in(Duration::ZERO),
            Self::Threads(shared) => shared.wake(),
            #[cfg(test)]
            Self::None => {}
        }
    }
}

/// Timer whose descriptor becomes readable when it expires.
pub(crate) struct Alarm(OwnedFd);

impl Alarm {
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Sets the timer. This replaces an earlier expiry.
    pub(super) fn ring_in(&self, time: Duration) {
        let time = time.max(Duration::from_nanos(1));
        let it_value =
            Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Fails only for an invalid time, and this time is valid.
        let _ = timerfd_settime(
            &self.0,
            TimerfdTimerFlags::empty(),
            &Itimerspec { it_interval, it_value },
        );
    }

    /// Makes the descriptor unreadable until the timer is set again.
    pub(super) fn quieten(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
