//! What signalling a peer's eventfds costs, and who pays for it.
//!
//! A signal wakes everybody who waits for it before it returns, and a peer can have a million wait:
//! an epoll instance each, or one with as many duplicates of the descriptor. 18,000 of them take
//! 3 ms, where an honest peer's one takes a microsecond. Nothing makes that cheaper, so it moves: a
//! peer of whom a signal has taken longer than [`DEAR`], and then another one that much of the
//! processor's time, is signalled by a thread of this process's own from then on, for [`PENALTY`],
//! and nobody else waits for it. (Time alone would not do: the thread that signals may just not
//! have been running.)
//!
//! A signal that is not out yet stands for those that follow, as they would add up in the count of
//! the eventfd.

use crate::notifier::{self, raise};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// What a signal of an honest peer's does not take.
const DEAR: Duration = Duration::from_micros(300);

/// Of so many signals after one that took longer, the processor's time is looked at.
const WATCHED: u32 = 256;

/// How long the other thread does it after the last one that took too long.
const PENALTY: Duration = Duration::from_secs(60);

/// How long the other thread waits for something to do before it ends.
const IDLE: Duration = Duration::from_secs(10);

/// A descriptor that a peer sent, held by something that knows how to close it: closing one may
/// take as long as the peer likes.
pub type PeerDescriptor = Arc<dyn AsFd + Send + Sync>;

/// The account of a peer whose eventfds are signalled.
#[derive(Clone, Debug, Default)]
pub struct Signals(Arc<Account>);

#[derive(Debug, Default)]
struct Account {
    /// In milliseconds since this process first looked; 0 for never.
    dear_until: AtomicU64,
    /// Signals of which the processor's time is still to be looked at.
    watched: AtomicU32,
}

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

impl Signals {
    /// Whether another thread signals this peer at the moment, because that takes long.
    #[must_use]
    pub fn are_dear(&self) -> bool {
        self.0.is_dear(Instant::now())
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Account {
    fn is_dear(&self, now: Instant) -> bool {
        let until = self.dear_until.load(Ordering::Relaxed);
        until != 0 && millis(now.saturating_duration_since(*START)) < until
    }

    /// Carries a signal out, and counts what it takes.
    fn count(&self, began: Instant, signal: impl FnOnce()) {
        if self.watched.load(Ordering::Relaxed) == 0 {
            signal();
            if began.elapsed() > DEAR {
                self.watched.store(WATCHED, Ordering::Relaxed);
            }
            return;
        }
        let used = processor_time();
        signal();
        if processor_time().saturating_sub(used) > DEAR {
            let until = began.saturating_duration_since(*START).saturating_add(PENALTY);
            self.dear_until.store(millis(until), Ordering::Relaxed);
            self.watched.store(WATCHED, Ordering::Relaxed);
        } else {
            // Several threads at once may miss some of them.
            let left = self.watched.load(Ordering::Relaxed);
            self.watched.store(left.saturating_sub(1), Ordering::Relaxed);
        }
    }
}

/// What this thread has used of the processor.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// An eventfd of a peer's.
pub(crate) struct PeerEvent {
    fd: PeerDescriptor,
    id: notifier::Id,
    account: Arc<Account>,
    /// The other thread is about to signal it.
    queued: AtomicBool,
}

impl PeerEvent {
    pub(crate) fn new(fd: PeerDescriptor, signals: &Signals) -> Self {
        LazyLock::force(&START);
        let account = Arc::clone(&signals.0);
        Self { fd, id: notifier::Id::new(), account, queued: AtomicBool::new(false) }
    }

    pub(crate) fn signal(self: &Arc<Self>) {
        let began = Instant::now();
        if self.account.is_dear(began) && THREAD.signal(self) {
            return;
        }
        self.signal_here(began);
    }

    fn signal_here(&self, began: Instant) {
        self.account.count(began, || {
            if notifier::is_available() {
                notifier::notify(self.fd.as_fd(), &self.id);
            } else {
                raise(self.fd.as_fd());
            }
        });
    }
}

impl AsFd for PeerEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl std::fmt::Debug for PeerEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerEvent").field("fd", &self.fd.as_fd()).finish_non_exhaustive()
    }
}

/// The thread that signals those of whom it takes long. It comes and goes with the need for it.
struct Thread {
    state: Mutex<ThreadState>,
    wake: Condvar,
}

#[derive(Default)]
struct ThreadState {
    /// Each is there once, so a peer has as many as it has eventfds.
    queue: VecDeque<Arc<PeerEvent>>,
    runs: bool,
}

static THREAD: LazyLock<Thread> =
    LazyLock::new(|| Thread { state: Mutex::default(), wake: Condvar::new() });

impl Thread {
    /// Has the thread signal `event`. Not if there is none to be had.
    fn signal(&'static self, event: &Arc<PeerEvent>) -> bool {
        if event.queued.swap(true, Ordering::AcqRel) {
            return true;
        }
        let mut state = self.state.lock();
        if !state.runs {
            let thread = std::thread::Builder::new().name("signals".into());
            state.runs = thread.spawn(|| self.run()).is_ok();
        }
        if state.runs {
            state.queue.push_back(Arc::clone(event));
            self.wake.notify_one();
        } else {
            event.queued.store(false, Ordering::Release);
        }
        state.runs
    }

    fn run(&self) {
        let _guard = crate::AbortOnPanic::new();
        let mut state = self.state.lock();
        loop {
            while let Some(event) = state.queue.pop_front() {
                drop(state);
                // What is signalled from here on is another signal.
                event.queued.store(false, Ordering::Release);
                event.signal_here(Instant::now());
                drop(event);
                state = self.state.lock();
            }
            let timed_out = self.wake.wait_for(&mut state, IDLE).timed_out();
            if timed_out && state.queue.is_empty() {
                state.runs = false;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EventFd;
    use rustix::event::epoll;
    use shadowbell_testing::wait::LIMIT;
    use std::os::fd::OwnedFd;

    /// No signal is lost on the way of the other thread, and none of another peer goes there.
    #[test]
    fn a_peer_whose_signals_take_long_is_signalled_by_another_thread() {
        let (dear, cheap) = (Signals::default(), Signals::default());
        let event = |signals: &Signals| {
            let ours = EventFd::new().unwrap();
            let theirs: OwnedFd = ours.try_clone().unwrap().try_into().unwrap();
            (EventFd::of_peer(Arc::new(theirs), signals).unwrap(), ours)
        };
        let (to_dear, of_dear) = event(&dear);
        let (to_cheap, of_cheap) = event(&cheap);
        to_dear.signal();
        assert_eq!(of_dear.drain(), 1);
        // One that only seems long, and one that is.
        dear.0.count(Instant::now(), || std::thread::sleep(DEAR * 2));
        assert!(!dear.are_dear());
        let began = processor_time();
        dear.0.count(Instant::now(), || while processor_time() - began < DEAR * 2 {});
        assert!(dear.are_dear() && !cheap.are_dear());
        for _ in 0..100 {
            to_dear.signal();
            assert!(of_dear.wait(Some(LIMIT)).unwrap());
            assert!(of_dear.drain() >= 1);
        }
        assert!(THREAD.state.lock().runs);
        to_cheap.signal();
        assert_eq!(of_cheap.drain(), 1, "this one at once");
        // A new descriptor of the same peer is no way out.
        let (to_dear, of_dear) = event(&dear);
        to_dear.signal();
        assert!(of_dear.wait(Some(LIMIT)).unwrap());
    }

    /// Waiting costs a peer nothing, and whoever signals has to wake them all.
    #[test]
    fn a_crowd_that_waits_is_noticed() {
        const EPOLLS: usize = 100;
        const COPIES: usize = 400;
        let ours = EventFd::new().unwrap();
        let theirs: OwnedFd = ours.try_clone().unwrap().try_into().unwrap();
        let signals = Signals::default();
        let event = EventFd::of_peer(Arc::new(theirs), &signals).unwrap();
        let epolls = [(); EPOLLS].map(|()| epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
        let mut copies = Vec::new();
        while !signals.are_dear() {
            assert!(copies.len() < COPIES, "40,000 are not noticed");
            let copy = ours.try_clone().unwrap();
            for epoll in &epolls {
                let data = epoll::EventData::new_u64(0);
                epoll::add(epoll, &copy, data, epoll::EventFlags::IN).unwrap();
            }
            copies.push(copy);
            event.signal();
            ours.drain();
        }
    }
}
