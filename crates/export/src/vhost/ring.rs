//! Configuration of a virtio queue. The frontend can change it while a thread serves the queue.

use ::shadowbell_memory::EventFd;
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Time limit for the thread of a disabled queue to stop taking requests. It is long, because the
/// submission of a request to a disk may take long.
const PASS: Duration = Duration::from_secs(60);

/// Configuration of a queue.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Config {
    /// Number of entries, a power of two.
    pub(super) size: u16,
    /// True from SET_VRING_KICK, which starts the queue, until GET_VRING_BASE.
    pub(super) ready: bool,
    pub(super) enabled: bool,
    pub(super) event_idx: bool,
    /// Guest addresses of the descriptor table and of both rings.
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    /// Positions of the next request in the available ring, and of the next answer in the used
    /// ring.
    pub(super) next_available: u16,
    pub(super) next_used: u16,
}

impl Config {
    /// True if requests may be taken from the queue.
    pub(super) fn runs(&self) -> bool {
        self.enabled && self.ready
    }
}

/// Configuration and eventfds of a queue, shared by the threads of the queue and of the socket.
pub(super) struct Ring {
    config: Mutex<Config>,
    kick: RwLock<Option<EventFd>>,
    call: RwLock<Option<EventFd>>,
    /// Number of changes of the configuration, the guest's memory or the features.
    changes: AtomicU64,
    /// Ends the sleep of the queue's thread.
    event: EventFd,
    /// True while the queue's thread takes requests without holding the lock of the configuration.
    serving: Mutex<bool>,
    served: Condvar,
}

/// Guard of a thread that takes requests without holding the lock of the configuration.
pub(super) struct Serving<'a>(&'a Ring);

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        self.0.end_serving();
    }
}

impl Ring {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            config: Mutex::default(),
            kick: RwLock::default(),
            call: RwLock::default(),
            changes: AtomicU64::new(0),
            event: EventFd::new()?,
            serving: Mutex::default(),
            served: Condvar::new(),
        })
    }

    pub(super) fn config(&self) -> MutexGuard<'_, Config> {
        self.config.lock()
    }

    /// Changes the configuration. If this stops or disables the queue, no more requests are taken
    /// from it after the return of this function.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Config) -> T) -> T {
        let (outcome, runs) = {
            let mut config = self.config.lock();
            (change(&mut config), config.runs())
        };
        self.changed();
        if !runs {
            let mut serving = self.serving.lock();
            let _ = self.served.wait_while_for(&mut serving, |serving| *serving, PASS);
        }
        outcome
    }

    /// Notifies the thread of a change.
    pub(super) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        self.event.signal();
    }

    /// Counter that each change increments.
    #[inline]
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Event that is signalled by each change, and that ends the sleep of the thread.
    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }

    /// Registers the thread as one that takes requests. After this call, the thread has to read
    /// [`changes`](Self::changes) first, and then check that the queue [`runs`](Config::runs). It
    /// must stop taking requests when `changes` no longer returns the value that was read.
    pub(super) fn begin_serving(&self) -> Serving<'_> {
        *self.serving.lock() = true;
        Serving(self)
    }

    /// Records that no thread takes requests any more.
    pub(super) fn end_serving(&self) {
        *self.serving.lock() = false;
        self.served.notify_all();
    }

    /// Replaces the eventfd of the guest's notifications.
    pub(super) fn set_kick(&self, kick: Option<EventFd>) {
        *self.kick.write() = kick;
    }

    /// Replaces the eventfd that interrupts the guest.
    pub(super) fn set_call(&self, call: Option<EventFd>) {
        *self.call.write() = call;
    }

    /// Eventfd of the guest's notifications.
    pub(super) fn kick(&self) -> Option<EventFd> {
        self.kick.read().as_ref().and_then(|kick| kick.try_clone().ok())
    }

    /// Interrupts the guest.
    pub(super) fn signal(&self) {
        if let Some(call) = &*self.call.read() {
            call.signal();
        }
    }

    /// Stores the positions in the two rings at which a thread has stopped (`now`). The thread
    /// started at the positions `began`. A position that the frontend has changed meanwhile is not
    /// replaced.
    pub(super) fn give_back(&self, began: (u16, u16), now: (u16, u16)) {
        let mut config = self.config.lock();
        if config.next_available == began.0 {
            config.next_available = now.0;
        }
        if config.next_used == began.1 {
            config.next_used = now.1;
        }
    }
}
