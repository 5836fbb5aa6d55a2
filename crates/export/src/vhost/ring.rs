//! A virtio queue, as rust-vmm keeps it, with the memory and the eventfds of a frontend that is not
//! trusted.

use super::memory::{Current, Snapshot, look};
use ::shadowbell_memory::EventFd;
use parking_lot::{Condvar, Mutex, RwLock};
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use vhost_user_backend::{VringRwLock, VringState, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::{Error, QueueT};

/// How long a queue that is not enabled any more is waited for, until its thread takes nothing from
/// it: a disk may take its time with what is handed to it.
const PASS: Duration = Duration::from_secs(60);

/// A queue. rust-vmm's own has the queue's state and the descriptor that its thread waits for;
/// whatever touches memory, or reads or writes an eventfd, is done here.
#[derive(Clone)]
pub(super) struct Ring {
    state: VringRwLock<Current>,
    memory: Current,
    /// A read or a write of an eventfd can wait for another process that has it; these do not.
    kick: Arc<RwLock<Option<EventFd>>>,
    call: Arc<RwLock<Option<EventFd>>>,
    changes: Arc<Changes>,
}

/// How often a queue was set up in another way, which whoever serves it has to notice.
struct Changes {
    count: AtomicU64,
    event: EventFd,
    /// Whether somebody takes requests until he notices a change.
    serving: Mutex<bool>,
    served: Condvar,
}

impl Changes {
    fn add(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.event.signal();
    }

    fn end_serving(&self) {
        *self.serving.lock() = false;
        self.served.notify_all();
    }
}

/// Somebody serves a queue, and looks for changes only now and then.
pub(super) struct Serving(Arc<Changes>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.end_serving();
    }
}

impl Ring {
    pub(super) fn memory(&self) -> Snapshot {
        look(&self.memory)
    }

    pub(super) fn current(&self) -> &Current {
        &self.memory
    }

    /// Whether requests may be taken from it.
    pub(super) fn runs(&self) -> bool {
        let state = self.state.get_ref();
        state.is_enabled() && state.get_queue().ready()
    }

    /// A number that changes when anything is changed here.
    #[inline]
    pub(super) fn changes(&self) -> u64 {
        self.changes.count.load(Ordering::SeqCst)
    }

    /// Is signalled then.
    pub(super) fn changed(&self) -> &EventFd {
        &self.changes.event
    }

    /// For somebody who takes requests until [`changes`](Self::changes) is another number, which he
    /// is to look at after this, and whether it [`runs`](Self::runs) after that.
    pub(super) fn begin_serving(&self) -> Serving {
        *self.changes.serving.lock() = true;
        Serving(Arc::clone(&self.changes))
    }

    /// Takes none any more.
    pub(super) fn end_serving(&self) {
        self.changes.end_serving();
    }

    /// What the guest notifies by.
    pub(super) fn kick(&self) -> Option<EventFd> {
        self.kick.read().as_ref().and_then(|kick| kick.try_clone().ok())
    }

    /// Notifies the guest.
    pub(super) fn signal(&self) {
        if let Some(call) = &*self.call.read() {
            call.signal();
        }
    }

    /// The places in the two rings where somebody is who began at others: unless the frontend has
    /// put the queue somewhere else meanwhile.
    pub(super) fn give_back(&self, began: (u16, u16), now: (u16, u16)) {
        let mut state = self.state.get_mut();
        let queue = state.get_queue_mut();
        if queue.next_avail() == began.0 {
            queue.set_next_avail(now.0);
        }
        if queue.next_used() == began.1 {
            queue.set_next_used(now.1);
        }
    }
}

/// The frontend's eventfd, and the file for the thread that waits for it.
fn take(event: &RwLock<Option<EventFd>>, file: Option<File>) -> Option<File> {
    let taken = file.and_then(|file| {
        let event = file.try_clone().and_then(|copy| EventFd::from_fd(copy.into()));
        event
            .inspect_err(|error| tracing::warn!("a frontend's eventfd can not be used: {error}"))
            .ok()
            .map(|event| (event, file))
    });
    let (taken, file) = taken.unzip();
    *event.write() = taken;
    file
}

impl<'a> VringStateGuard<'a, Current> for Ring {
    type G = RwLockReadGuard<'a, VringState<Current>>;
}

impl<'a> VringStateMutGuard<'a, Current> for Ring {
    type G = RwLockWriteGuard<'a, VringState<Current>>;
}

impl VringT<Current> for Ring {
    fn new(memory: Current, max_queue_size: u16) -> Result<Self, Error> {
        let state = VringRwLock::new(memory.clone(), max_queue_size)?;
        // rust-vmm has no error for that.
        let event = EventFd::new().map_err(|_| Error::QueueNotReady)?;
        let (serving, served) = (Mutex::new(false), Condvar::new());
        let changes = Arc::new(Changes { count: AtomicU64::new(0), event, serving, served });
        Ok(Self { state, memory, kick: Arc::default(), call: Arc::default(), changes })
    }

    fn get_ref(&self) -> RwLockReadGuard<'_, VringState<Current>> {
        self.state.get_ref()
    }

    fn get_mut(&self) -> RwLockWriteGuard<'_, VringState<Current>> {
        self.state.get_mut()
    }

    fn add_used(&self, index: u16, len: u32) -> Result<(), Error> {
        let memory = self.memory();
        self.get_mut().get_queue_mut().add_used(&*memory, index, len)
    }

    fn signal_used_queue(&self) -> io::Result<()> {
        self.signal();
        Ok(())
    }

    fn enable_notification(&self) -> Result<bool, Error> {
        let memory = self.memory();
        self.get_mut().get_queue_mut().enable_notification(&*memory)
    }

    fn disable_notification(&self) -> Result<(), Error> {
        let memory = self.memory();
        self.get_mut().get_queue_mut().disable_notification(&*memory)
    }

    fn needs_notification(&self) -> Result<bool, Error> {
        let memory = self.memory();
        self.get_mut().get_queue_mut().needs_notification(&*memory)
    }

    fn set_enabled(&self, enabled: bool) {
        self.state.set_enabled(enabled);
        self.changes.add();
        if enabled {
            // A notification that came while it was not may have been read.
            if let Some(kick) = &*self.kick.read() {
                kick.signal();
            }
            return;
        }
        // When the frontend has its answer, nothing is taken any more.
        let mut serving = self.changes.serving.lock();
        let _ = self.changes.served.wait_while_for(&mut serving, |serving| *serving, PASS);
    }

    fn set_queue_info(&self, descriptors: u64, available: u64, used: u64) -> Result<(), Error> {
        let outcome = self.state.set_queue_info(descriptors, available, used);
        self.changes.add();
        outcome
    }

    fn queue_next_avail(&self) -> u16 {
        self.state.queue_next_avail()
    }

    fn set_queue_next_avail(&self, base: u16) {
        self.state.set_queue_next_avail(base);
        self.changes.add();
    }

    fn set_queue_next_used(&self, index: u16) {
        self.state.set_queue_next_used(index);
        self.changes.add();
    }

    fn queue_used_idx(&self) -> Result<u16, Error> {
        let memory = self.memory();
        let index = self.get_ref().get_queue().used_idx(&*memory, Ordering::Relaxed)?;
        Ok(index.0)
    }

    fn set_queue_size(&self, size: u16) {
        self.state.set_queue_size(size);
        self.changes.add();
    }

    fn set_queue_event_idx(&self, enabled: bool) {
        self.state.set_queue_event_idx(enabled);
        self.changes.add();
    }

    fn set_queue_ready(&self, ready: bool) {
        self.state.set_queue_ready(ready);
        self.changes.add();
        // Its thread is to look once: there may be requests of a process before, of which nobody
        // notifies it any more.
        if ready && let Some(kick) = &*self.kick.read() {
            kick.signal();
        }
    }

    fn set_kick(&self, file: Option<File>) {
        self.state.set_kick(take(&self.kick, file));
        self.changes.add();
    }

    fn read_kick(&self) -> io::Result<bool> {
        if let Some(kick) = &*self.kick.read() {
            kick.drain();
        }
        Ok(self.get_ref().is_enabled())
    }

    fn set_call(&self, file: Option<File>) {
        take(&self.call, file);
        self.changes.add();
    }

    fn set_err(&self, file: Option<File>) {
        self.state.set_err(file);
    }
}
