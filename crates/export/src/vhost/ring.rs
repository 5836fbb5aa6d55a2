//! A virtio queue, as rust-vmm keeps it, with the memory and the eventfds of a frontend that is not
//! trusted.

use super::memory::{Current, Snapshot, look};
use ::shadowbell_memory::EventFd;
use parking_lot::RwLock;
use std::fs::File;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, RwLockReadGuard, RwLockWriteGuard};
use vhost_user_backend::{VringRwLock, VringState, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::{Error, QueueT};

/// A queue. rust-vmm's own has the queue's state and the descriptor that its thread waits for;
/// whatever touches memory, or reads or writes an eventfd, is done here.
#[derive(Clone)]
pub(super) struct Ring {
    state: VringRwLock<Current>,
    memory: Current,
    /// A read or a write of an eventfd can wait for another process that has it; these do not.
    kick: Arc<RwLock<Option<EventFd>>>,
    call: Arc<RwLock<Option<EventFd>>>,
}

impl Ring {
    pub(super) fn memory(&self) -> Snapshot {
        look(&self.memory)
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
        Ok(Self { state, memory, kick: Arc::default(), call: Arc::default() })
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
        if let Some(call) = &*self.call.read() {
            call.signal();
        }
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
    }

    fn set_queue_info(&self, descriptors: u64, available: u64, used: u64) -> Result<(), Error> {
        self.state.set_queue_info(descriptors, available, used)
    }

    fn queue_next_avail(&self) -> u16 {
        self.state.queue_next_avail()
    }

    fn set_queue_next_avail(&self, base: u16) {
        self.state.set_queue_next_avail(base);
    }

    fn set_queue_next_used(&self, index: u16) {
        self.state.set_queue_next_used(index);
    }

    fn queue_used_idx(&self) -> Result<u16, Error> {
        let memory = self.memory();
        let index = self.get_ref().get_queue().used_idx(&*memory, Ordering::Relaxed)?;
        Ok(index.0)
    }

    fn set_queue_size(&self, size: u16) {
        self.state.set_queue_size(size);
    }

    fn set_queue_event_idx(&self, enabled: bool) {
        self.state.set_queue_event_idx(enabled);
    }

    fn set_queue_ready(&self, ready: bool) {
        self.state.set_queue_ready(ready);
        // Its thread is to look once: there may be requests of a process before, of which nobody
        // notifies it any more.
        if ready && let Some(kick) = &*self.kick.read() {
            kick.signal();
        }
    }

    fn set_kick(&self, file: Option<File>) {
        self.state.set_kick(take(&self.kick, file));
    }

    fn read_kick(&self) -> io::Result<bool> {
        if let Some(kick) = &*self.kick.read() {
            kick.drain();
        }
        Ok(self.get_ref().is_enabled())
    }

    fn set_call(&self, file: Option<File>) {
        take(&self.call, file);
    }

    fn set_err(&self, file: Option<File>) {
        self.state.set_err(file);
    }
}
