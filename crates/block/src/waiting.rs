//! Blocking execution of futures on a thread that also drives its queues.

use crate::queue::BlockQueue;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use shadowbell_memory::EventFd;
use std::future::Future;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// Waker of a thread that executes one future.
struct Sleeper {
    woken: AtomicBool,
    event: EventFd,
    thread: ThreadId,
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // If the thread itself calls the waker, it is awake and needs no signal.
        if !self.woken.swap(true, Ordering::AcqRel) && std::thread::current().id() != self.thread {
            self.event.signal();
        }
    }
}

/// Sleeper, and an epoll set of all descriptors that end its sleep.
struct Sleep {
    sleeper: Arc<Sleeper>,
    epoll: OwnedFd,
}

impl Sleep {
    fn new(queues: &[&BlockQueue]) -> io::Result<Self> {
        let event = EventFd::new()?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let add = |fd: BorrowedFd<'_>, edges: bool| {
            let flags = if edges { EventFlags::ET } else { EventFlags::empty() };
            epoll::add(&epoll, fd, EventData::new_u64(0), EventFlags::IN | flags)
        };
        add(event.as_fd(), true)?;
        for queue in queues {
            queue.watch(add)?;
        }
        let thread = std::thread::current().id();
        let sleeper = Arc::new(Sleeper { woken: AtomicBool::new(false), event, thread });
        Ok(Self { sleeper, epoll })
    }

    fn wait(&self, limit: Option<Duration>) {
        let limit = limit.map(|limit| Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        let mut events = [const { MaybeUninit::uninit() }; 8];
        match epoll::wait(&self.epoll, &mut events[..], limit.as_ref()) {
            // EINTR occurs because the kernel interrupts a sleeping thread to deliver io_uring
            // completions.
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                tracing::warn!("waiting for requests failed: {errno}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Runs a future to completion on this thread. The thread also drives `queues`.
///
/// # Errors
///
/// The system's error if no descriptor is available.
pub fn block_on<F: Future>(queues: &[&BlockQueue], future: F) -> io::Result<F::Output> {
    let mut future = pin!(future);
    loop {
        // Without a deadline, `run` returns only with an output.
        if let Some(output) = run(queues, future.as_mut(), None)? {
            return Ok(output);
        }
    }
}

fn run<F: Future>(
    queues: &[&BlockQueue],
    mut future: std::pin::Pin<&mut F>,
    deadline: Option<Instant>,
) -> io::Result<Option<F::Output>> {
    let sleep = Sleep::new(queues)?;
    let waker = Waker::from(Arc::clone(&sleep.sleeper));
    let is_woken = || sleep.sleeper.woken.load(Ordering::Acquire);
    let mut context = Context::from_waker(&waker);
    loop {
        // This has to be a swap, not a store. If another thread has found the flag set and sent no
        // signal, the swap makes that thread's earlier writes visible to the poll.
        sleep.sleeper.woken.swap(false, Ordering::AcqRel);
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Ok(Some(output));
        }
        loop {
            let any = queues.iter().fold(false, |any, queue| queue.turn() | any);
            if is_woken() {
                break;
            }
            if any || !queues.iter().all(|queue| queue.may_sleep()) {
                continue;
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            let limits = queues.iter().filter_map(|queue| queue.sleep_limit()).chain(left);
            sleep.wait(limits.min());
            queues.iter().for_each(|queue| queue.after_sleep());
        }
    }
}

impl BlockQueue {
    /// Runs a future to completion on this thread. The thread also drives the queue.
    ///
    /// # Panics
    ///
    /// If the system has no descriptor left.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        match block_on(&[self], future) {
            Ok(output) => output,
            Err(error) => panic!("cannot wait for a request: {error}"),
        }
    }

    /// Like [`block_on`](Self::block_on), with a timeout.
    ///
    /// # Panics
    /// If the system has no descriptor left.
    pub fn block_on_for<F: Future>(&self, future: F, timeout: Duration) -> Option<F::Output> {
        match run(&[self], pin!(future), Instant::now().checked_add(timeout)) {
            Ok(output) => output,
            Err(error) => panic!("cannot wait for a request: {error}"),
        }
    }
}
