//! What all connections of a disk share.

use crate::export::Export;
use crate::journal::{Flush, Journal};
use crate::user::User;
use parking_lot::Mutex;
use shadowbell_memory::EventFd;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub(crate) struct Shared {
    /// What a person calls the disk.
    pub(crate) name: String,
    pub(crate) journal: Mutex<Journal>,
    /// What the server has said last of its export.
    pub(crate) export: Mutex<Export>,
    /// A connection was lost, and nothing is sent until what may be lost with it was written again.
    is_recovering: AtomicBool,
    /// How many connections were lost.
    pub(crate) losses: AtomicU64,
    /// How many were made in place of others.
    pub(crate) reconnections: AtomicU64,
    /// The last write found no room.
    pub(crate) is_full: AtomicBool,
    /// Wakes the caretaker.
    pub(crate) wake: EventFd,
    /// Ends whatever the caretaker waits for.
    pub(crate) stop: EventFd,
    /// All queues.
    pub(crate) users: Mutex<Vec<Weak<User>>>,
    /// Who is to know that something was lost.
    pub(crate) on_loss: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
}

impl Shared {
    pub(crate) fn new(name: String, export: Export, journal: Journal) -> std::io::Result<Self> {
        Ok(Self {
            name,
            journal: Mutex::new(journal),
            export: Mutex::new(export),
            is_recovering: AtomicBool::new(false),
            losses: AtomicU64::new(0),
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

    /// A connection was lost. Called with its lock, so that the caretaker, which takes it, finds
    /// either what was sent before or this.
    pub(crate) fn lost(&self) {
        self.losses.fetch_add(1, Ordering::AcqRel);
        self.is_recovering.store(true, Ordering::Release);
        self.wake.signal();
    }

    /// Everything was written again; nothing, if another connection was lost since `losses` was
    /// counted.
    pub(crate) fn recovered(&self, losses: u64) -> bool {
        self.is_recovering.store(false, Ordering::SeqCst);
        if self.losses.load(Ordering::SeqCst) == losses {
            return true;
        }
        self.is_recovering.store(true, Ordering::SeqCst);
        false
    }

    /// Has the caretaker flush, if there is enough to be flushed.
    pub(crate) fn flush_soon(&self, journal: &mut Journal) {
        if journal.wants_flush() {
            journal.flush = Flush::Wanted;
            self.wake.signal();
        }
    }

    /// What was not flushed is given up. Not to be called with the journal's lock.
    pub(crate) fn lose(&self) {
        let goes_on = self.journal.lock().lose();
        if let Some(changed) = &*self.on_loss.lock() {
            changed();
        }
        if goes_on {
            self.wake_users();
        }
    }

    /// Has all queues look at what they have to do.
    pub(crate) fn wake_users(&self) {
        let mut users = self.users.lock();
        users.retain(|user| user.strong_count() != 0);
        users.iter().filter_map(Weak::upgrade).for_each(|user| user.signal());
    }
}
