//! Disk whose completions and errors the test controls.

use shadowbell_disk::{Disk, DiskError, DiskInfo, Request, Submitted};
use shadowbell_disk_file::MemDisk;
use shadowbell_memory::{EventFd, Segments};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Instructions of the test for a [`Late`] disk, and a record of what happened to the disk.
#[derive(Debug, Default)]
pub(crate) struct Instructions {
    /// True if the disk holds its requests.
    pub(crate) hold: AtomicBool,
    /// True if the disk was removed, so that it must not be used.
    pub(crate) removed: AtomicBool,
    /// True if the disk was used after its removal.
    pub(crate) used_after: AtomicBool,
    /// Number of queues that the test still allows to be opened.
    pub(crate) queues: AtomicUsize,
    pub(crate) seen: Mutex<Vec<Request>>,
    pub(crate) cancelled: AtomicUsize,
    pub(crate) events: Mutex<Vec<EventFd>>,
}

/// Disk that completes its requests only when they are reaped, and in another order than they were
/// submitted. A cancelled request completes normally.
#[derive(Clone, Debug)]
pub(crate) struct Late {
    pub(crate) inner: Arc<dyn Disk>,
    pub(crate) volatile: bool,
    pub(crate) instructions: Arc<Instructions>,
}

impl Late {
    pub(crate) fn new(inner: impl Disk + 'static) -> Self {
        Self::of(Arc::new(inner))
    }

    pub(crate) fn of(inner: Arc<dyn Disk>) -> Self {
        let instructions = Instructions { queues: 1000.into(), ..Instructions::default() };
        Self { inner, volatile: false, instructions: Arc::new(instructions) }
    }

    pub(crate) fn memory(blocks: u64) -> Self {
        Self::new(MemDisk::recoverable(blocks, 512).unwrap())
    }

    pub(crate) fn of_blocks(&self, blocks: u64) -> Self {
        Self::of(self.inner.resized(Some(blocks * 512)).unwrap())
    }

    pub(crate) fn shared(&self) -> Arc<dyn Disk> {
        Arc::new(self.clone())
    }

    pub(crate) fn hold(&self, hold: bool) {
        self.instructions.hold.store(hold, Ordering::SeqCst);
        self.instructions.events.lock().unwrap().iter().for_each(|event| event.signal());
    }

    pub(crate) fn seen(&self) -> Vec<Request> {
        self.instructions.seen.lock().unwrap().clone()
    }

    pub(crate) fn is_removed(&self) {
        self.instructions.removed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn was_used_after(&self) -> bool {
        self.instructions.used_after.load(Ordering::SeqCst)
    }
}

impl Disk for Late {
    fn info(&self) -> DiskInfo {
        let mut info = self.inner.info();
        info.volatile_cache = self.volatile;
        info
    }

    fn queue(&self) -> io::Result<Box<dyn shadowbell_disk::Queue>> {
        let take = |left: usize| left.checked_sub(1);
        let taken = self.instructions.queues.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
        taken.map_err(|_| io::Error::other("no queue is left"))?;
        let event = EventFd::new()?;
        self.instructions.events.lock().unwrap().push(event.try_clone()?);
        let (disk, inner) = (self.clone(), self.inner.queue()?);
        Ok(Box::new(LateQueue { disk, inner, event, held: Vec::new() }))
    }

    fn name(&self) -> String {
        "late".into()
    }
}

pub(crate) struct LateQueue {
    disk: Late,
    inner: Box<dyn shadowbell_disk::Queue>,
    event: EventFd,
    held: Vec<(u32, Request, Segments)>,
}

impl LateQueue {
    fn used(&self) {
        let Instructions { removed, used_after, .. } = &*self.disk.instructions;
        used_after.fetch_or(removed.load(Ordering::SeqCst), Ordering::SeqCst);
    }
}

impl shadowbell_disk::Queue for LateQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        self.used();
        self.disk.instructions.seen.lock().unwrap().push(*request);
        self.held.push((tag, *request, data.take()));
        self.event.signal();
        Submitted::Pending
    }

    fn longest_inline(&self) -> u64 {
        4096
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        self.event.drain();
        if self.disk.instructions.hold.load(Ordering::SeqCst) {
            return;
        }
        while let Some((tag, request, mut data)) = self.held.pop() {
            self.used();
            let Submitted::Done(outcome) = self.inner.submit(tag, &request, &mut data) else {
                panic!("memory does not wait");
            };
            done(tag, outcome, data);
        }
    }

    fn cancel(&mut self, tag: u32) {
        assert!(self.held.iter().any(|(of, ..)| *of == tag), "the cancelled request is pending");
        self.disk.instructions.cancelled.fetch_add(1, Ordering::SeqCst);
    }

    fn pending(&self) -> usize {
        self.held.len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }
}

impl Drop for LateQueue {
    fn drop(&mut self) {
        self.used();
    }
}
