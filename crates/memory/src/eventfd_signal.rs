//! Cost of signals to peers' eventfds, accounted per peer.
//!
//! A signal wakes all waiters of the eventfd before it returns. A peer can create a million
//! waiters: epoll instances, or one epoll instance with that many duplicates of the descriptor.
//! With 18,000 waiters, a signal takes 3 ms; with the single waiter of an honest peer, it takes a
//! microsecond. The cost cannot be reduced, so it is moved to another thread. If a signal to a peer
//! has taken longer than [`EXPENSIVE`], and one of the next signals has used that much processor
//! time, the signals to this peer are expensive. The thread `signals` of this process then sends
//! them for the time [`PENALTY`], so that no I/O thread waits for them. Elapsed time alone does not
//! prove that a signal is expensive, because the signalling thread may not have been scheduled.
//!
//! While a signal is queued, further signals to the same eventfd are merged with it.

use crate::notifier::{self, raise};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Upper bound for the duration of a signal to an honest peer.
const EXPENSIVE: Duration = Duration::from_micros(300);

/// Number of signals whose processor time is measured after a signal that took longer than
/// [`EXPENSIVE`].
const MEASURED_SIGNALS: u32 = 256;

/// Time for which the thread `signals` sends the signals to a peer, after the last expensive
/// signal.
const PENALTY: Duration = Duration::from_secs(60);

/// Idle time after which the thread ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Descriptor that a peer sent. Its owner defers the close, because the peer can make a close take
/// any time.
pub type PeerDescriptor = Arc<dyn AsFd + Send + Sync>;

/// Cost account of a peer's eventfds.
#[derive(Clone, Debug, Default)]
pub struct Signals(Arc<Account>);

#[derive(Debug, Default)]
struct Account {
    /// End of the penalty, in milliseconds since `START`; 0 for none.
    expensive_until: AtomicU64,
    /// Remaining signals whose processor time is measured.
    measured: AtomicU32,
}

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

impl Signals {
    /// True if signals to this peer are expensive at the moment, so that the `signals` thread sends
    /// them.
    #[must_use]
    pub fn are_expensive(&self) -> bool {
        self.0.is_expensive(Instant::now())
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Account {
    fn is_expensive(&self, now: Instant) -> bool {
        let until = self.expensive_until.load(Ordering::Relaxed);
        until != 0 && millis(now.saturating_duration_since(*START)) < until
    }

    /// Executes `signal` and accounts its cost.
    fn count(&self, began: Instant, signal: impl FnOnce()) {
        if self.measured.load(Ordering::Relaxed) == 0 {
            signal();
            if began.elapsed() > EXPENSIVE {
                self.measured.store(MEASURED_SIGNALS, Ordering::Relaxed);
            }
            return;
        }
        let used = processor_time();
        signal();
        if processor_time().saturating_sub(used) > EXPENSIVE {
            let until = began.saturating_duration_since(*START).saturating_add(PENALTY);
            self.expensive_until.store(millis(until), Ordering::Relaxed);
            self.measured.store(MEASURED_SIGNALS, Ordering::Relaxed);
        } else {
            // Concurrent threads may lose a decrement. This only prolongs the measurement.
            let left = self.measured.load(Ordering::Relaxed);
            self.measured.store(left.saturating_sub(1), Ordering::Relaxed);
        }
    }
}

/// Processor time of the calling thread.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Eventfd of a peer.
pub(crate) struct PeerEvent {
    fd: PeerDescriptor,
    id: notifier::Id,
    account: Arc<Account>,
    /// True while the event is in the queue of the `signals` thread.
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
        if self.account.is_expensive(began) && THREAD.signal(self) {
            return;
        }
        self.signal_directly(began);
    }

    fn signal_directly(&self, began: Instant) {
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

/// Thread that sends expensive signals. It is started on demand and ends when idle.
struct Thread {
    state: Mutex<ThreadState>,
    wake: Condvar,
}

#[derive(Default)]
struct ThreadState {
    /// Queued events. Each event is queued at most once, so the queue is no longer than the number
    /// of eventfds.
    queue: VecDeque<Arc<PeerEvent>>,
    runs: bool,
}

static THREAD: LazyLock<Thread> =
    LazyLock::new(|| Thread { state: Mutex::default(), wake: Condvar::new() });

impl Thread {
    /// Queues `event` for the thread. Returns false if the thread cannot be started.
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
                // The flag is cleared first: a signal that is requested after that must be sent
                // separately.
                event.queued.store(false, Ordering::Release);
                event.signal_directly(Instant::now());
                drop(event);
                state = self.state.lock();
            }
            let timed_out = self.wake.wait_for(&mut state, IDLE_TIMEOUT).timed_out();
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

    /// The thread `signals` sends the signals to an expensive peer, loses none of them, and does
    /// not send the signals to other peers.
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
        // First a signal that takes long without processor time, then one that uses processor time.
        dear.0.count(Instant::now(), || std::thread::sleep(EXPENSIVE * 2));
        assert!(!dear.are_expensive());
        let began = processor_time();
        dear.0.count(Instant::now(), || while processor_time() - began < EXPENSIVE * 2 {});
        assert!(dear.are_expensive() && !cheap.are_expensive());
        for _ in 0..100 {
            to_dear.signal();
            assert!(of_dear.wait(Some(LIMIT)).unwrap());
            assert!(of_dear.drain() >= 1);
        }
        assert!(THREAD.state.lock().runs);
        to_cheap.signal();
        assert_eq!(of_cheap.drain(), 1, "this one at once");
        // A new descriptor of the same peer is also signalled by the thread.
        let (to_dear, of_dear) = event(&dear);
        to_dear.signal();
        assert!(of_dear.wait(Some(LIMIT)).unwrap());
    }

    /// Signals to an eventfd with many waiters become expensive. The waiters are epoll entries,
    /// which cost the peer nothing, but each signal has to notify all of them.
    #[test]
    fn many_waiters_on_an_eventfd_are_detected() {
        const EPOLLS: usize = 100;
        const COPIES: usize = 400;
        let ours = EventFd::new().unwrap();
        let theirs: OwnedFd = ours.try_clone().unwrap().try_into().unwrap();
        let signals = Signals::default();
        let event = EventFd::of_peer(Arc::new(theirs), &signals).unwrap();
        let epolls = [(); EPOLLS].map(|()| epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
        let mut copies = Vec::new();
        while !signals.are_expensive() {
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
