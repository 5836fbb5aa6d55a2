//! virtio queue based on rust-vmm's state, for memory and eventfds of an untrusted frontend.

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

/// Time limit until the thread of a disabled queue stops taking requests. It is long, because the
/// submission of a request to a disk may take long.
const PASS: Duration = Duration::from_secs(60);

/// virtio queue. rust-vmm's vring has the queue's state and the descriptor on which the queue's
/// thread waits. This type implements all accesses to memory and eventfds.
#[derive(Clone)]
pub(super) struct Ring {
    state: VringRwLock<Current>,
    memory: Current,
    /// Eventfd of the guest's notifications. `call` is that of its interrupts. Reads and writes of
    /// both do not block, even if another process shares the open file.
    kick: Arc<RwLock<Option<EventFd>>>,
    call: Arc<RwLock<Option<EventFd>>>,
    changes: Arc<Changes>,
}

/// Counter of configuration changes of a queue. The thread that serves the queue compares it.
struct Changes {
    count: AtomicU64,
    event: EventFd,
    /// True while a thread takes requests. The thread stops when it notices a change.
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

/// Guard of a thread that serves a queue. The thread checks for changes only from time to time.
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

    /// True if requests may be taken from the queue.
    pub(super) fn runs(&self) -> bool {
        let state = self.state.get_ref();
        state.is_enabled() && state.get_queue().ready()
    }

    /// Number that changes with each change of the configuration.
    #[inline]
    pub(super) fn changes(&self) -> u64 {
        self.changes.count.load(Ordering::SeqCst)
    }

    /// Event that is signalled by each change.
    pub(super) fn changed(&self) -> &EventFd {
        &self.changes.event
    }

    /// Registers a thread that takes requests until [`changes`](Self::changes) returns another
    /// value. After this call, the thread has to read `changes` first, and then check that the
    /// queue [`runs`](Self::runs).
    pub(super) fn begin_serving(&self) -> Serving {
        *self.changes.serving.lock() = true;
        Serving(Arc::clone(&self.changes))
    }

    /// Records that the thread takes no more requests.
    pub(super) fn end_serving(&self) {
        self.changes.end_serving();
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

    /// Stores the current positions in the two rings, for a thread that started at the positions
    /// `began`. If the frontend has changed the positions in the meantime, nothing is stored.
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

/// Stores the frontend's eventfd, and returns the file on which the thread waits.
fn take(event: &RwLock<Option<EventFd>>, file: Option<File>) -> Option<File> {
    let taken = file.and_then(|file| {
        let event = file.try_clone().and_then(|copy| EventFd::from_fd(copy.into()));
        event
            .inspect_err(|error| tracing::warn!("a frontend's eventfd cannot be used: {error}"))
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
        // `QueueNotReady` is used, because rust-vmm's error type has no value for a failed eventfd.
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
            // While the queue was disabled, the thread may have drained a notification. This signal
            // replaces it.
            if let Some(kick) = &*self.kick.read() {
                kick.signal();
            }
            return;
        }
        // The frontend's request is answered after this function. From then on, no more requests
        // may be taken.
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
        // The thread has to check the queue once. Requests of a dead process may be pending, for
        // which the guest sends no other notification.
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
