//! State shared by all connections of a disk.

use crate::export::Export;
use crate::unflushed::{Flush, Unflushed};
use crate::user::User;
use parking_lot::Mutex;
use shadowbell_disk::Orphans;
use shadowbell_memory::EventFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

pub(crate) struct Shared {
    /// Name of the disk in messages.
    pub(crate) name: String,
    pub(crate) unflushed: Mutex<Unflushed>,
    /// Writes at the server whose commands were cancelled.
    pub(crate) orphans: Arc<Orphans>,
    /// Latest known properties of the export.
    pub(crate) export: Mutex<Export>,
    /// True from the loss of a connection until the unflushed writes were replayed. During that
    /// time, no other request is sent.
    is_recovering: AtomicBool,
    /// True if the server has announced that it shuts down. The reconnection thread then ends all
    /// connections.
    is_server_ending: AtomicBool,
    /// Number of lost connections.
    pub(crate) losses: AtomicU64,
    /// Time of the last loss of a connection with writes in flight.
    writes_lost_at: Mutex<Option<Instant>>,
    /// Number of connections that replaced lost ones.
    pub(crate) reconnections: AtomicU64,
    /// True if the last write failed for lack of space.
    pub(crate) is_full: AtomicBool,
    /// Event that wakes the reconnection thread.
    pub(crate) wake: EventFd,
    /// Ends all waits of the reconnection thread, because the disk is closed.
    pub(crate) stop: EventFd,
    /// All queues.
    pub(crate) users: Mutex<Vec<Weak<User>>>,
    /// Callback for lost data.
    pub(crate) on_loss: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
}

impl Shared {
    pub(crate) fn new(name: String, export: Export, unflushed: Unflushed) -> std::io::Result<Self> {
        Ok(Self {
            name,
            unflushed: Mutex::new(unflushed),
            orphans: Arc::default(),
            export: Mutex::new(export),
            is_recovering: AtomicBool::new(false),
            is_server_ending: AtomicBool::new(false),
            losses: AtomicU64::new(0),
            writes_lost_at: Mutex::default(),
            reconnections: AtomicU64::new(0),
            is_full: AtomicBool::new(false),
            wake: EventFd::new()?,
            stop: EventFd::new()?,
            users: Mutex::default(),
            on_loss: Mutex::default(),
        })
    }

    pub(crate) fn is_recovering(&self) -> bool {
        self.is_recovering.load(Ordering::Acquire)
    }

    /// Records a lost connection. The caller holds the lock of that connection. Senders test the
    /// flag under the lock of their connection, and the reconnection thread then takes each of
    /// these locks. So that thread finds all requests that were sent before the loss, and no
    /// further requests are sent.
    pub(crate) fn connection_lost(&self) {
        self.count_loss();
        self.wake.signal();
    }

    /// Records that writes were in flight on a lost connection. The server may still execute them.
    pub(crate) fn writes_lost(&self) {
        *self.writes_lost_at.lock() = Some(Instant::now());
    }

    /// Returns the rest of the time `settle` for which the server may still execute writes of lost
    /// connections.
    pub(crate) fn unsettled(&self, settle: Duration) -> Option<Duration> {
        let lost_at = (*self.writes_lost_at.lock())?;
        settle.checked_sub(lost_at.elapsed()).filter(|rest| !rest.is_zero())
    }

    fn count_loss(&self) {
        self.losses.fetch_add(1, Ordering::AcqRel);
        self.is_recovering.store(true, Ordering::Release);
    }

    /// Records that the server refuses requests because it ends. The server may wait until its
    /// clients have disconnected, so the reconnection thread ends all connections. The caller holds
    /// the lock of a connection.
    pub(crate) fn server_ends(&self) {
        // The loss is counted before the flag is set. If the thread saw the flag without the loss,
        // it would not wait for requests in flight, and would disconnect only idle connections.
        self.count_loss();
        self.is_server_ending.store(true, Ordering::Release);
        self.wake.signal();
    }

    pub(crate) fn is_server_ending(&self) -> bool {
        self.is_server_ending.load(Ordering::Acquire)
    }

    /// Returns and resets [`is_server_ending`](Self::is_server_ending).
    pub(crate) fn take_server_ending(&self) -> bool {
        self.is_server_ending.swap(false, Ordering::AcqRel)
    }

    /// Ends the recovery. Returns false, and has no effect, if another connection was lost after
    /// the caller read `losses`.
    pub(crate) fn recovered(&self, losses: u64) -> bool {
        self.is_recovering.store(false, Ordering::SeqCst);
        if self.losses.load(Ordering::SeqCst) == losses {
            return true;
        }
        self.is_recovering.store(true, Ordering::SeqCst);
        false
    }

    /// Requests an automatic flush if there are enough unflushed writes.
    pub(crate) fn flush_soon(&self, unflushed: &mut Unflushed) {
        if unflushed.needs_flush() {
            unflushed.flush = Flush::Requested;
            self.wake.signal();
        }
    }

    /// Discards the unflushed writes as lost. The caller must not hold the lock of `unflushed`.
    pub(crate) fn set_lost(&self) {
        let can_continue = self.unflushed.lock().set_lost();
        if let Some(changed) = &*self.on_loss.lock() {
            changed();
        }
        if can_continue {
            self.wake_users();
        }
    }

    /// Wakes all queues.
    pub(crate) fn wake_users(&self) {
        let mut users = self.users.lock();
        users.retain(|user| user.strong_count() != 0);
        users.iter().filter_map(Weak::upgrade).for_each(|user| user.completions.signal());
    }
}
