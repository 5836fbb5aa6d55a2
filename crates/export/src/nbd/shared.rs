//! State that a server and its connections share.

use super::admission::Admitted;
use super::handshake::Export;
use super::options::Options;
use crate::failures::FailureCount;
use parking_lot::Mutex;
use shadowbell_block::BlockError;
use shadowbell_memory::EventFd;
use shadowbell_tls::ServerTls;
use shadowbell_vfio_user::LogLimit;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub(super) struct ServerShared {
    pub(super) export: Arc<Export>,
    /// TLS configuration, if clients need TLS.
    pub(super) tls: Option<ServerTls>,
    ending: AtomicBool,
    /// Events that end the sleep of the threads, one for each thread.
    wakers: Mutex<BTreeMap<u64, EventFd>>,
    next: AtomicU64,
    pub(super) failures: FailureCount,
    pub(super) admitted: Arc<Admitted>,
    /// Rate limit of warnings that clients can trigger.
    pub(super) log: LogLimit,
}

/// Registration of a thread's waker, which ends when the value is dropped.
pub(super) struct Registered {
    shared: Arc<ServerShared>,
    number: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.shared.wakers.lock().remove(&self.number);
    }
}

impl ServerShared {
    /// Creates the state from the options.
    pub(super) fn new(export: Export, options: &Options) -> Self {
        Self {
            export: Arc::new(export),
            tls: options.tls.clone(),
            ending: AtomicBool::new(false),
            wakers: Mutex::default(),
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

    /// Registers `waker`, which [`end`](Self::end) signals.
    pub(super) fn register(self: &Arc<Self>, waker: EventFd) -> Registered {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.wakers.lock().insert(number, waker);
        Registered { shared: Arc::clone(self), number }
    }

    /// Counts a failed request, unless the request itself was invalid.
    pub(super) fn failed(&self, error: &BlockError) {
        if !matches!(error, BlockError::Unsupported { .. } | BlockError::OutOfRange { .. }) {
            self.failures.record(error);
        }
    }

    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.wakers.lock().values().for_each(EventFd::signal);
    }
}
