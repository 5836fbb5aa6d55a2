//! Event loop of a thread that serves requests: the requests in flight, the thread's queue of the
//! disk, and an epoll set.
//!
//! A round first polls all woken requests, so that requests that arrive together are submitted
//! together. Then it takes all completions, so that they are answered together.

#[cfg(all(test, feature = "vhost"))]
mod model;

use crate::poll_window::PollWindow;
use crate::tasks::Tasks;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
#[cfg(feature = "ublk")]
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use shadowbell_block::{BlockDevice, BlockQueue};
use shadowbell_memory::EventFd;
use std::future::Future;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Number of the thread's own descriptor in the epoll set. The descriptor is ready when a request
/// was woken, the queue has completions, or the timer has expired.
const OWN_EVENT: u64 = 0;
/// Lowest epoll number for descriptors that the caller adds.
pub(crate) const FIRST: u64 = 1;
/// Largest number of descriptors that a wait reports.
const EVENTS: usize = 5;

/// Readiness of a caller's descriptor after a wait: its number and flags.
pub(crate) type Readiness = (u64, EventFlags);

/// Event loop of a thread that serves requests; see the [module](self).
pub(crate) struct IoThread<F> {
    tasks: Tasks<F>,
    queue: Option<BlockQueue>,
    window: PollWindow,
    #[cfg(feature = "ublk")]
    timer: Timer,
    epoll: OwnedFd,
}

/// Timer that ends the sleep of event loops without a timeout of their own.
#[cfg(feature = "ublk")]
#[derive(Default)]
struct Timer {
    fd: Option<OwnedFd>,
    /// Time of expiry.
    at: Option<Instant>,
}

#[cfg(feature = "ublk")]
impl Timer {
    /// Sets the timer to `until`, unless it is already set to an earlier time.
    fn set(&mut self, epoll: &OwnedFd, until: Instant) -> Result<(), Errno> {
        let now = Instant::now();
        if self.at.is_some_and(|at| at > now && at <= until) {
            return Ok(());
        }
        if self.fd.is_none() {
            let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
            let fd = timerfd_create(TimerfdClockId::Monotonic, flags)?;
            epoll::add(epoll, &fd, EventData::new_u64(OWN_EVENT), EventFlags::IN | EventFlags::ET)?;
            self.fd = Some(fd);
        }
        let Some(fd) = &self.fd else { return Ok(()) };
        // A time of zero would stop the timer.
        let left = until.saturating_duration_since(now).max(Duration::from_nanos(1));
        let once = Itimerspec { it_interval: Timespec::default(), it_value: timespec(left) };
        timerfd_settime(fd, TimerfdTimerFlags::empty(), &once)?;
        self.at = Some(until);
        Ok(())
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

impl<F: Future> IoThread<F> {
    /// Creates the event loop for at most `slots` requests in flight. A signal to `event` ends the
    /// sleep of the thread.
    pub(crate) fn new(slots: usize, event: EventFd) -> io::Result<Self> {
        let tasks = Tasks::new(slots, event);
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let flags = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, tasks.event(), EventData::new_u64(OWN_EVENT), flags)?;
        Ok(Self {
            tasks,
            queue: None,
            window: PollWindow::new(Duration::ZERO),
            #[cfg(feature = "ublk")]
            timer: Timer::default(),
            epoll,
        })
    }

    /// Opens the thread's queue on `disk`.
    pub(crate) fn open(&mut self, disk: &BlockDevice) -> io::Result<BlockQueue> {
        let queue = disk.queue()?;
        queue.watch(|fd, edges| {
            let flags = if edges { EventFlags::IN | EventFlags::ET } else { EventFlags::IN };
            epoll::add(&self.epoll, fd, EventData::new_u64(OWN_EVENT), flags)
        })?;
        self.window = PollWindow::new(disk.options().poll);
        self.queue = Some(queue.clone());
        Ok(queue)
    }

    /// True if the disk holds requests of this thread after an error of its storage.
    #[cfg(any(feature = "nbd", feature = "fuse"))]
    pub(crate) fn holds_requests(&self) -> bool {
        self.queue.as_ref().is_some_and(BlockQueue::holds_requests)
    }

    /// Ends the requests that the disk holds after an error of its storage, if there are any.
    #[cfg(feature = "nbd")]
    pub(crate) fn cancel_held(&self) {
        if let Some(queue) = self.queue.as_ref().filter(|queue| queue.holds_requests()) {
            queue.cancel_all();
        }
    }

    /// Applies the timeout to held requests as well, because the queue is to be closed.
    #[cfg(any(feature = "fuse", feature = "ublk"))]
    pub(crate) fn limit_holds(&self) {
        if let Some(queue) = &self.queue {
            queue.limit_holds();
        }
    }

    /// Requests in flight.
    pub(crate) fn tasks(&mut self) -> &mut Tasks<F> {
        &mut self.tasks
    }

    /// Adds `fd` to the epoll set, edge-triggered, for `flags`. `number` identifies it and is at
    /// least [`FIRST`].
    pub(crate) fn add_fd(
        &self,
        fd: BorrowedFd<'_>,
        number: u64,
        flags: EventFlags,
    ) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(number), flags | EventFlags::ET)?)
    }

    /// Changes the flags of a descriptor.
    pub(crate) fn modify_fd(
        &self,
        fd: BorrowedFd<'_>,
        number: u64,
        flags: EventFlags,
    ) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, fd, EventData::new_u64(number), flags | EventFlags::ET)?)
    }

    /// Runs one round: starts requests, submits them, takes completions, and passes the results of
    /// completed futures to `done`. Returns true if there was any work.
    pub(crate) fn run_once(&mut self, mut done: impl FnMut(usize, F::Output)) -> bool {
        let mut busy = self.tasks.run(&mut done);
        if let Some(queue) = &self.queue {
            busy |= queue.turn();
        }
        busy |= self.tasks.run(done);
        if busy {
            self.window.found();
        }
        busy
    }

    /// Starts a future in a reserved slot, and polls it at once. Returns the result if it is ready.
    /// The slot stays reserved in either case.
    #[cfg(feature = "vhost")]
    pub(crate) fn start_now(&mut self, slot: usize, future: F) -> Option<F::Output> {
        self.tasks.start_now(slot, future)
    }

    /// Records that a round found work outside of [`run_once`](Self::run_once).
    #[cfg(feature = "vhost")]
    pub(crate) fn found(&mut self) {
        self.window.found();
    }

    /// True if the thread should look for work once more before it sleeps. Called after a round
    /// without work.
    #[cfg(feature = "vhost")]
    pub(crate) fn polls_again(&mut self) -> bool {
        self.window.polls_again()
    }

    /// As [`polls_again`](Self::polls_again), for a thread that looks for work by a system call.
    #[cfg(any(feature = "nbd", feature = "fuse"))]
    pub(crate) fn polls_again_by_call(&mut self) -> bool {
        self.window.polls_again_by_call()
    }

    /// As [`polls_again`](Self::polls_again), for a thread that polls only for completions: false
    /// if no request of the disk is pending.
    #[cfg(feature = "ublk")]
    pub(crate) fn spin(&mut self) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.pending() > 0) && self.window.polls_again()
    }

    /// Prepares a sleep. Returns true if no work is pending. Then the thread may sleep by
    /// [`wait`](Self::wait), or in another event loop that calls [`take_events`](Self::take_events)
    /// afterwards.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        let may =
            self.queue.as_ref().is_none_or(BlockQueue::may_sleep) && self.tasks.prepare_sleep();
        if !may {
            self.tasks.after_sleep();
        }
        may
    }

    /// As [`prepare_sleep`](Self::prepare_sleep), for another event loop that sleeps without a
    /// timeout. Sets a timer that ends the sleep when the disk's queue requires it.
    #[cfg(feature = "ublk")]
    pub(crate) fn prepare_timed_sleep(&mut self) -> bool {
        if !self.prepare_sleep() {
            return false;
        }
        if let Some(limit) = self.sleep_limit()
            && let Some(until) = Instant::now().checked_add(limit)
            && let Err(errno) = self.timer.set(&self.epoll, until)
        {
            tracing::debug!("timeouts of requests are not enforced: {errno}");
        }
        true
    }

    /// Takes the events that made this loop's descriptor readable in another event loop.
    #[cfg(feature = "ublk")]
    pub(crate) fn take_events(&mut self) {
        self.poll(Some(Duration::ZERO), |_| {});
    }

    /// Longest duration of a sleep that the disk's queue permits.
    fn sleep_limit(&self) -> Option<Duration> {
        self.queue.as_ref().and_then(BlockQueue::sleep_limit)
    }

    /// Waits until there is work, or until `until`. Passes the readiness of the caller's
    /// descriptors to `ready`.
    pub(crate) fn wait(&mut self, until: Option<Instant>, ready: impl FnMut(Readiness)) {
        let began = Instant::now();
        let until = until.map(|until| until.saturating_duration_since(began));
        let limit = until.into_iter().chain(self.sleep_limit()).min();
        self.poll(limit, ready);
        self.window.slept(began.elapsed());
    }

    /// Ends a prepared sleep that took `time` in another event loop.
    #[cfg(feature = "ublk")]
    pub(crate) fn slept(&mut self, time: Duration) {
        self.window.slept(time);
        self.after_sleep();
    }

    fn poll(&mut self, limit: Option<Duration>, mut ready: impl FnMut(Readiness)) {
        let limit = limit.map(timespec);
        let mut events = [const { MaybeUninit::uninit() }; EVENTS];
        let found = match epoll::wait(&self.epoll, &mut events[..], limit.as_ref()) {
            Ok((found, _)) => found,
            // The kernel interrupts a sleeping thread to deliver io_uring completions.
            Err(Errno::INTR) => &mut [],
            Err(errno) => {
                tracing::warn!("waiting for requests failed: {errno}");
                std::thread::sleep(Duration::from_millis(1));
                &mut []
            }
        };
        for event in found {
            match event.data.u64() {
                OWN_EVENT => {}
                number => ready((number, event.flags)),
            }
        }
        self.after_sleep();
    }

    /// Ends a prepared sleep.
    fn after_sleep(&mut self) {
        self.tasks.after_sleep();
        if let Some(queue) = &self.queue {
            queue.after_sleep();
        }
    }
}

impl<F> AsFd for IoThread<F> {
    /// Descriptor that becomes readable when there is work. Another event loop that polls it then
    /// calls [`IoThread::take_events`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
