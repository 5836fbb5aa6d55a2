//! State that a server and its connections share.

use super::admission::Admitted;
use super::handshake::Export;
use super::options::Options;
use crate::failures::FailureCount;
use parking_lot::{Condvar, Mutex};
use shadowbell_block::{BlockDevice, BlockError};
use shadowbell_memory::EventFd;
use shadowbell_tls::ServerTls;
use shadowbell_vfio_user::LogLimit;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Disk for the clients that connect from now on, and the properties of the disk as the protocol
/// transmits them.
#[derive(Clone)]
pub(super) struct Offer {
    pub(super) disk: BlockDevice,
    pub(super) export: Arc<Export>,
    /// Sequence number of the offer: 0 for the first offer.
    number: u64,
}

/// Current offer, and the threads of the server.
struct State {
    offer: Offer,
    /// For each thread, the number of the offer that its client got, and the eventfd that ends its
    /// sleep. For the listening thread, the number is `u64::MAX`.
    threads: BTreeMap<u64, (u64, EventFd)>,
}

pub(super) struct ServerShared {
    /// TLS configuration, if clients need TLS.
    pub(super) tls: Option<ServerTls>,
    ending: AtomicBool,
    state: Mutex<State>,
    /// Notified when a thread ends.
    left: Condvar,
    /// Number of the oldest offer whose clients may stay connected.
    oldest: AtomicU64,
    next: AtomicU64,
    pub(super) failures: FailureCount,
    pub(super) admitted: Arc<Admitted>,
    /// Rate limit of warnings that clients can trigger.
    pub(super) log: LogLimit,
}

/// Registration of a thread's waker. Dropping the value ends the registration.
pub(super) struct Registered {
    shared: Arc<ServerShared>,
    number: u64,
    /// Number of the offer that the thread's client got.
    offer: u64,
}

impl Registered {
    /// State of the server.
    pub(super) fn server(&self) -> &ServerShared {
        &self.shared
    }

    /// True if the connection must end, because the server ends or its disk was replaced.
    pub(super) fn is_ending(&self) -> bool {
        self.shared.is_ending() || self.offer < self.shared.oldest.load(Ordering::SeqCst)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.shared.state.lock().threads.remove(&self.number);
        self.shared.left.notify_all();
    }
}

impl ServerShared {
    /// Creates the state from the options.
    pub(super) fn new(disk: BlockDevice, options: &Options) -> Self {
        let export = Arc::new(Export::of(&disk, &options.name, &options.description));
        let offer = Offer { disk, export, number: 0 };
        Self {
            tls: options.tls.clone(),
            ending: AtomicBool::new(false),
            state: Mutex::new(State { offer, threads: BTreeMap::new() }),
            left: Condvar::new(),
            oldest: AtomicU64::new(0),
            next: AtomicU64::new(0),
            failures: FailureCount::default(),
            admitted: Admitted::new(options.max_clients),
            log: LogLimit::default(),
        }
    }

    /// True if all connections must end.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// Registers the `waker` of the listening thread. [`end`](Self::end) signals it.
    pub(super) fn register(self: &Arc<Self>, waker: EventFd) -> Registered {
        self.insert(&mut self.state.lock(), u64::MAX, waker)
    }

    /// Registers the `waker` of a client's thread, and returns the disk for the client.
    pub(super) fn register_client(self: &Arc<Self>, waker: EventFd) -> (Registered, Offer) {
        let mut state = self.state.lock();
        let offer = state.offer.clone();
        (self.insert(&mut state, offer.number, waker), offer)
    }

    fn insert(self: &Arc<Self>, state: &mut State, offer: u64, waker: EventFd) -> Registered {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        state.threads.insert(number, (offer, waker));
        Registered { shared: Arc::clone(self), number, offer }
    }

    /// Offers another `disk` to the clients that connect from now on. The connected clients keep
    /// the disk that they have. If `disconnects` is true, the requests of these clients are
    /// completed, and then the clients are disconnected.
    pub(super) fn replace_disk(&self, disk: BlockDevice, disconnects: bool) {
        let mut state = self.state.lock();
        let Export { name, description, .. } = &*state.offer.export;
        let export = Arc::new(Export::of(&disk, name, description));
        let number = state.offer.number + 1;
        state.offer = Offer { disk, export, number };
        if !disconnects {
            return;
        }
        self.oldest.store(number, Ordering::SeqCst);
        state.threads.values().for_each(|(_, waker)| waker.signal());
        while state.threads.values().any(|(offer, _)| *offer < number) {
            self.left.wait(&mut state);
        }
    }

    /// Counts a failed request, unless the request itself was invalid.
    pub(super) fn failed(&self, error: &BlockError) {
        if !matches!(error, BlockError::Unsupported { .. } | BlockError::OutOfRange { .. }) {
            self.failures.record(error);
        }
    }

    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.state.lock().threads.values().for_each(|(_, waker)| waker.signal());
    }
}
