//! Wake-up of a queue's owner from another thread.

use super::threads::ThreadsShared;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Handle that makes the wake descriptor of a queue readable, from any thread.
pub(crate) enum Waker {
    Alarm(Arc<Alarm>),
    Threads(Arc<ThreadsShared>),
    None,
}

impl Waker {
    /// Creates a waker without effect.
    pub(crate) fn none() -> Self {
        Self::None
    }

    /// Wakes the owner, because it has to take a result: of a sync, or of a wait for a range lock.
    pub(crate) fn wake(&self) {
        match self {
            Self::Alarm(alarm) => {
                alarm.due.fetch_add(1, Ordering::SeqCst);
                alarm.ring_in(Duration::ZERO);
            }
            Self::Threads(shared) => shared.wake(),
            Self::None => {}
        }
    }

    /// Records that `count` announced results were taken.
    pub(crate) fn taken(&self, count: usize) {
        if let Self::Alarm(alarm) = self {
            alarm.due.fetch_sub(count, Ordering::SeqCst);
        }
    }
}

/// Timer whose descriptor becomes readable when it expires. The queues of a thread share it.
pub(crate) struct Alarm {
    timer: OwnedFd,
    /// Number of announced results that were not taken yet.
    due: AtomicUsize,
}

impl Alarm {
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Self { timer, due: AtomicUsize::new(0) })
    }

    /// Sets the timer. This replaces an earlier expiry.
    pub(super) fn ring_in(&self, time: Duration) {
        let time = time.max(Duration::from_nanos(1));
        let it_value =
            Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Fails only for an invalid time, and this time is valid.
        let _ = timerfd_settime(
            &self.timer,
            TimerfdTimerFlags::empty(),
            &Itimerspec { it_interval, it_value },
        );
    }

    /// Makes the descriptor unreadable until the timer is set again.
    pub(super) fn quieten(&self) {
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
    }

    /// Sets the timer again if a result was not taken. A call of [`quieten`](Self::quieten) for one
    /// queue may have cleared the wake-up of another.
    pub(super) fn ring_if_due(&self) {
        if self.due.load(Ordering::SeqCst) != 0 {
            self.ring_in(Duration::ZERO);
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}
