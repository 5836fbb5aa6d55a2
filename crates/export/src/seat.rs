//! A thread's seat at the disk: its requests under way, the queue that they go through, which it
//! drives itself if it may, and what it sleeps on.
//!
//! A turn polls what was woken, so that everything that came in together goes to the controller with
//! one doorbell, and then takes whatever has completed, to be answered together.

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

/// Something of the seat's own has happened.
const NEWS: u64 = 0;
/// The queue's device may have gone.
const HANG_UP: u64 = 1;
/// The first number for others.
pub(crate) const FIRST: u64 = 2;
/// Descriptors of which a wait can tell at once.
const EVENTS: usize = 4;

/// What ended a wait, apart from the seat's own affairs: the number that belongs to a descriptor, and
/// what it is ready for.
pub(crate) type Readiness = (u64, EventFlags);

/// See the [module](self).
pub(crate) struct Seat<F> {
    tasks: Tasks<F>,
    queue: Option<AsyncQueue>,
    driver: Option<Driver>,
    /// The driver is prepared for a sleep.
    asleep: bool,
    timer: Timer,
    epoll: OwnedFd,
}

/// Ends the sleeps of event loops that keep no time.
#[derive(Default)]
struct Timer {
    fd: Option<OwnedFd>,
    /// When it goes off.
    at: Option<Instant>,
}

impl Timer {
    /// Has it go off at `until`, unless it goes off before that anyway.
    fn set(&mut self, epoll: &OwnedFd, until: Instant) -> Result<(), Errno> {
        let now = Instant::now();
        if self.at.is_some_and(|at| at > now && at <= until) {
            return Ok(());
        }
        if self.fd.is_none() {
            let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
            let fd = timerfd_create(TimerfdClockId::Monotonic, flags)?;
            epoll::add(epoll, &fd, EventData::new_u64(NEWS), EventFlags::IN | EventFlags::ET)?;
            self.fd = Some(fd);
        }
        let Some(fd) = &self.fd else { return Ok(()) };
        // Zero would stop it.
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

impl<F: Future> Seat<F> {
    /// A seat for `places` requests to `disk`.
    pub(crate) fn new(disk: &BlockDevice, places: usize) -> io::Result<Self> {
        let tasks = Tasks::new(places)?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let flags = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, tasks.event(), EventData::new_u64(NEWS), flags)?;
        let timer = Timer::default();
        Ok(Self { tasks, queue: disk.queue().cloned(), driver: None, asleep: false, timer, epoll })
    }

    /// The requests.
    pub(crate) fn tasks(&mut self) -> &mut Tasks<F> {
        &mut self.tasks
    }

    /// A handle that ends the thread's sleep.
    pub(crate) fn alarm(&self) -> io::Result<EventFd> {
        self.tasks.alarm()
    }

    /// Also wakes for `fd`, each time that it becomes ready for `flags`, under a number from
    /// [`FIRST`] on.
    pub(crate) fn watch(
        &self,
        fd: BorrowedFd<'_>,
        number: u64,
        flags: EventFlags,
    ) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(number), flags | EventFlags::ET)?)
    }

    /// Changes what a descriptor is watched for.
    pub(crate) fn rewatch(
        &self,
        fd: BorrowedFd<'_>,
        number: u64,
        flags: EventFlags,
    ) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, fd, EventData::new_u64(number), flags | EventFlags::ET)?)
    }

    /// Begins with what was started, submits, takes what has completed, and hands the futures that
    /// are ready to `done`. Whether there was anything.
    pub(crate) fn turn(&mut self, mut done: impl FnMut(usize, F::Output)) -> bool {
        let mut busy = self.tasks.run(&mut done);
        if self.driver.is_none() && self.tasks.reserved() > 0 {
            self.take_over();
        }
        if let Some(driver) = &mut self.driver {
            busy |= driver.step();
            busy |= self.tasks.run(done);
        }
        busy
    }

    /// Drives the queue, if that can be had.
    fn take_over(&mut self) {
        let Some(queue) = &self.queue else { return };
        let Some(driver) = queue.ask_to_drive() else { return };
        self.driver = Some(driver);
        let news = (queue.event(), NEWS, EventFlags::IN);
        let hang_up = queue.hang_up().map(|socket| (socket, HANG_UP, EventFlags::RDHUP));
        let watched = [Some(news), hang_up].into_iter().flatten();
        let mut watched = watched.map(|(fd, number, flags)| self.watch(fd, number, flags));
        if let Some(error) = watched.find_map(Result::err) {
            tracing::debug!("a queue can not be watched, so its own thread drives it: {error}");
            drop(watched);
            self.let_go();
        }
    }

    /// Leaves the queue to others.
    fn let_go(&mut self) {
        if self.driver.take().is_some()
            && let Some(queue) = &self.queue
        {
            for fd in [Some(queue.event()), queue.hang_up()].into_iter().flatten() {
                let _ = epoll::delete(&self.epoll, fd);
            }
        }
    }

    /// Looks for something to do, if something is under way, for as long as it is worth it. Whether
    /// there is.
    pub(crate) fn spin(&mut self) -> bool {
        match &mut self.driver {
            Some(driver) if !driver.is_idle() => driver.spin(|| self.tasks.is_ready()),
            _ => false,
        }
    }

    /// Whether there is nothing to do, and the thread may sleep on this: by [`wait`](Self::wait), or
    /// in an event loop that is not ours, which comes back to [`look`](Self::look).
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        let may = self.prepare();
        if !may {
            self.awake(false);
        }
        may
    }

    fn prepare(&mut self) -> bool {
        if let Some(driver) = &mut self.driver {
            // Nobody wakes us for others' commands if others can have the queue.
            if driver.is_over() || driver.is_idle() && driver.is_wanted() {
                self.let_go();
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

    /// As [`prepare_sleep`](Self::prepare_sleep), for an event loop that keeps no time.
    pub(crate) fn prepare_timed_sleep(&mut self) -> bool {
        if !self.prepare_sleep() {
            return false;
        }
        if let Some(until) = self.sleep_until()
            && let Err(errno) = self.timer.set(&self.epoll, until)
        {
            tracing::debug!("the deadlines of commands are not watched: {errno}");
        }
        true
    }

    /// After a sleep in an event loop that is not ours, if it was this that ended it.
    pub(crate) fn look(&mut self) {
        self.wait(Some(Instant::now()), |_| {});
    }

    /// When the sleep has to end, at the latest.
    fn sleep_until(&self) -> Option<Instant> {
        self.driver.as_ref().and_then(Driver::sleep_until)
    }

    /// Waits until there is something to do, or `until`. What others' descriptors are ready for goes
    /// to `ready`.
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
                NEWS => {}
                HANG_UP => gone = true,
                number => ready((number, event.flags)),
            }
        }
        self.awake(gone);
    }

    /// After a sleep, or one that did not come about.
    pub(crate) fn awake(&mut self, gone: bool) {
        self.tasks.awake(false);
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

impl<F> AsFd for Seat<F> {
    /// Readable when there is something to do: for an event loop that is not ours, together with
    /// [`Seat::wait`] without sleeping.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
