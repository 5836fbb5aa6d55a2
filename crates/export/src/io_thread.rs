//! Event loop of a thread that serves requests: the requests in flight, their queue, and an epoll
//! set.
//!
//! The thread drives the queue itself if the driver permits it. A round first polls the woken
//! requests, so that all requests that arrived together are submitted with one doorbell write,
//! and then takes all completions, so that they are answered together.

use crate::queue_server::QueueServer;
use crate::tasks::Tasks;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use shadowbell_block::BlockDevice;
use shadowbell_driver::AsyncQueue;
use shadowbell_driver::async_queue::Driver;
use shadowbell_memory::EventFd;
use std::future::Future;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// A request was woken, the queue has completions, or the timer expired.
const OWN_EVENT: u64 = 0;
/// The queue's device may have disconnected.
const HANG_UP: u64 = 1;
/// The queues that this thread serves have pending work.
const SERVED: u64 = 2;
/// First number for descriptors of the caller.
pub(crate) const FIRST: u64 = 3;
/// Largest number of descriptors that a wait reports.
const EVENTS: usize = 5;

/// Readiness of a caller's descriptor after a wait: its number and flags.
pub(crate) type Readiness = (u64, EventFlags);

/// Event loop of a thread that serves requests; see the [module](self).
pub(crate) struct IoThread<F> {
    tasks: Tasks<F>,
    queue: Option<AsyncQueue>,
    driver: Option<Driver>,
    /// True while the driver is prepared for a sleep.
    asleep: bool,
    timer: Timer,
    /// True if the event of the queues that this thread serves was readable.
    served: bool,
    epoll: OwnedFd,
}

/// Timer that ends the sleep of event loops without a timeout of their own.
#[derive(Default)]
struct Timer {
    fd: Option<OwnedFd>,
    /// Time of expiry.
    at: Option<Instant>,
}

impl Timer {
    /// Sets the timer to `until`, unless it expires earlier.
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
        // A value of zero would stop the timer.
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
    /// Creates the event loop for at most `slots` requests to `disk` in flight.
    pub(crate) fn new(disk: &BlockDevice, slots: usize) -> io::Result<Self> {
        let tasks = Tasks::new(slots)?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let flags = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, tasks.event(), EventData::new_u64(OWN_EVENT), flags)?;
        let timer = Timer::default();
        let queue = disk.queue().cloned();
        Ok(Self { tasks, queue, driver: None, asleep: false, timer, served: false, epoll })
    }

    /// Registers `server`, which serves queues on this thread. Must be called before its first
    /// turn.
    pub(crate) fn serves(&self, server: &dyn QueueServer) -> io::Result<()> {
        self.add_fd(server.event(), SERVED, EventFlags::IN)
    }

    /// Removes `server`, whose queues this thread does not serve any more.
    pub(crate) fn serves_no_more(&mut self, server: &dyn QueueServer) {
        let _ = epoll::delete(&self.epoll, server.event());
        self.served = false;
    }

    /// Requests in flight.
    pub(crate) fn tasks(&mut self) -> &mut Tasks<F> {
        &mut self.tasks
    }

    /// Event that ends the thread's sleep.
    pub(crate) fn waker(&self) -> io::Result<EventFd> {
        self.tasks.waker()
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

    /// Runs one round: starts requests, submits commands, takes completions, and passes the
    /// results of completed futures to `done`. Returns true if there was any work.
    ///
    /// With a `server`, this thread also executes the commands.
    pub(crate) fn run_once(
        &mut self,
        server: Option<&mut (dyn QueueServer + '_)>,
        mut done: impl FnMut(usize, F::Output),
    ) -> bool {
        let mut busy = self.tasks.run(&mut done);
        if self.driver.is_none() && self.tasks.reserved() > 0 {
            self.start_driving();
        }
        if let Some(driver) = &mut self.driver {
            busy |= driver.step();
        }
        if let Some(server) = server
            && server.turn()
        {
            busy = true;
            if let Some(driver) = &mut self.driver {
                driver.step();
            }
        }
        busy |= self.tasks.run(done);
        busy
    }

    /// Starts to drive the queue, if the driver permits it.
    fn start_driving(&mut self) {
        let Some(queue) = &self.queue else { return };
        let Some(driver) = queue.ask_to_drive() else { return };
        self.driver = Some(driver);
        let completions = (queue.event(), OWN_EVENT, EventFlags::IN);
        let hang_up = queue.hang_up().map(|socket| (socket, HANG_UP, EventFlags::RDHUP));
        let fds = [Some(completions), hang_up].into_iter().flatten();
        let mut added = fds.map(|(fd, number, flags)| self.add_fd(fd, number, flags));
        if let Some(error) = added.find_map(Result::err) {
            tracing::debug!(
                "the queue thread drives a queue that cannot be added to the epoll set: {error}"
            );
            drop(added);
            self.stop_driving();
        }
    }

    /// Stops to drive the queue, so that another thread can do it.
    fn stop_driving(&mut self) {
        if self.driver.take().is_some()
            && let Some(queue) = &self.queue
        {
            for fd in [Some(queue.event()), queue.hang_up()].into_iter().flatten() {
                let _ = epoll::delete(&self.epoll, fd);
            }
        }
    }

    /// Polls for completions for an adaptive time, if commands are in flight. Returns true if
    /// there is work.
    pub(crate) fn spin(&mut self) -> bool {
        match &mut self.driver {
            Some(driver) if !driver.is_idle() => driver.spin(|| self.tasks.is_ready()),
            _ => false,
        }
    }

    /// Prepares a sleep. Returns true if no work is pending, so that the thread may sleep by
    /// [`wait`](Self::wait), or in another event loop that calls
    /// [`take_events`](Self::take_events) afterwards.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        let may = self.prepare();
        if !may {
            self.after_sleep(false);
        }
        may
    }

    fn prepare(&mut self) -> bool {
        if let Some(driver) = &mut self.driver {
            // Another thread's commands do not wake this one if that thread can drive the queue
            // itself.
            if driver.is_over() || driver.is_idle() && driver.is_wanted() {
                self.stop_driving();
            }
        }
        if !self.tasks.prepare_sleep() {
            return false;
        }
        if let Some(driver) = &mut self.driver {
            self.asleep = driver.prepare_sleep();
            return self.asleep;
        }
        true
    }

    /// Prepares a sleep like [`prepare_sleep`](Self::prepare_sleep), for an event loop without a
    /// timeout.
    pub(crate) fn prepare_timed_sleep(&mut self) -> bool {
        if !self.prepare_sleep() {
            return false;
        }
        if let Some(until) = self.sleep_until()
            && let Err(errno) = self.timer.set(&self.epoll, until)
        {
            tracing::debug!("the timer for command timeouts cannot be set: {errno}");
        }
        true
    }

    /// Takes the events after a sleep in another event loop that this descriptor ended.
    pub(crate) fn take_events(&mut self) {
        self.wait(Some(Instant::now()), |_| {});
    }

    /// Latest time for the end of the sleep.
    fn sleep_until(&self) -> Option<Instant> {
        self.driver.as_ref().and_then(Driver::sleep_until)
    }

    /// Waits like [`wait`](Self::wait), on a thread that serves queues.
    pub(crate) fn wait_serving(
        &mut self,
        server: &mut dyn QueueServer,
        until: Option<Instant>,
        mut ready: impl FnMut(Readiness),
    ) {
        let slept = server.sleep(&mut |limit| {
            let limit = limit.and_then(|limit| Instant::now().checked_add(limit));
            let until = match (until, limit) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            self.wait(until, &mut ready);
            std::mem::take(&mut self.served)
        });
        if !slept {
            self.after_sleep(false);
        }
    }

    /// Waits until there is work, or until `until`. Passes the readiness of the caller's
    /// descriptors to `ready`.
    pub(crate) fn wait(&mut self, until: Option<Instant>, mut ready: impl FnMut(Readiness)) {
        let until = match (self.sleep_until(), until) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.map(timespec);
        let mut events = [const { MaybeUninit::uninit() }; EVENTS];
        let found = match epoll::wait(&self.epoll, &mut events[..], left.as_ref()) {
            Ok((found, _)) => found,
            Err(Errno::INTR) => &mut [],
            Err(errno) => {
                tracing::warn!("waiting for requests failed: {errno}");
                std::thread::sleep(Duration::from_millis(1));
                &mut []
            }
        };
        let mut gone = false;
        for event in found {
            match event.data.u64() {
                OWN_EVENT => {}
                HANG_UP => gone = true,
                SERVED => self.served = true,
                number => ready((number, event.flags)),
            }
        }
        self.after_sleep(gone);
    }

    /// Ends the preparation, after a sleep or instead of one.
    pub(crate) fn after_sleep(&mut self, gone: bool) {
        self.tasks.after_sleep();
        if let Some(driver) = &mut self.driver {
            if std::mem::take(&mut self.asleep) {
                driver.awake();
            }
            if gone {
                driver.check_gone();
            }
        }
    }
}

impl<F> AsFd for IoThread<F> {
    /// Descriptor that is readable when there is work, for another event loop, which calls
    /// [`IoThread::take_events`] then.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
