//! Thread of one ublk queue: receives requests, executes them on the disk, and answers them.
//!
//! The thread also drives its queue of the disk. It sleeps in the system call that submits its
//! answers. Requests that arrive together are submitted together, and completions that arrive
//! together are answered together. For [zero-copy](super::zero_copy) requests, the same call
//! submits the operations on the image's file.

use super::request::{Action, Completed, Job, execute, parse};
use super::sys::{Device, Event, Queue};
use super::wire::{Descriptor, operation};
use super::zero_copy::{Next, ZeroCopy, errno, request};
use crate::failures::FailureCount;
use crate::io_thread::IoThread;
use rustix::io::Errno;
use shadowbell_block::{BlockDevice, BlockQueue};
use shadowbell_disk::DiskError;
use shadowbell_disk_file::RawFile;
use shadowbell_memory::EventFd;
use std::future::Future;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::Instant;

/// Largest number of prepared answers. A thread that always finds completed requests submits its
/// answers when it has this many.
const BATCH: usize = 32;

/// Report of a thread after its start: either the eventfd that ends its sleep, or an error.
pub(super) type Started = io::Result<EventFd>;

/// State that the threads of a device's queues and its owner share.
#[derive(Default)]
pub(super) struct QueueStatus {
    /// Number of requests that failed because of the disk.
    pub(super) failures: FailureCount,
    /// Number of zero-copy requests. `copied` is the number of other requests with data.
    pub(super) zero_copy: AtomicU64,
    pub(super) copied: AtomicU64,
    /// True if the threads must end, even with requests in flight.
    pub(super) quit: AtomicBool,
}

/// Parameters of a thread.
pub(super) struct Work {
    pub(super) device: Arc<Device>,
    pub(super) queue: u16,
    pub(super) disk: BlockDevice,
    /// File for zero-copy requests.
    pub(super) file: Option<RawFile>,
}

/// Serves a queue until the device is stopped. When the kernel has all tags of the queue, or after
/// an error, sends a report by `started`.
///
/// Returns an error if a system call that the queue needs has failed. The kernel may then still
/// have tags of the queue.
pub(super) fn serve(
    work: Work,
    status: &QueueStatus,
    started: &SyncSender<Started>,
) -> io::Result<()> {
    let Work { device, queue, disk, file } = work;
    let depth = usize::from(device.info().depth);
    let timeout = disk.options().timeout;
    let zero_copy = file.map(|file| ZeroCopy::new(file, disk.geometry(), timeout, depth));
    let image = zero_copy.as_ref().map(|zero_copy| zero_copy.file().as_fd());
    let begun = Queue::open(device, queue, image).and_then(|queue| {
        let event = EventFd::new()?;
        let waker = event.try_clone()?;
        let mut io = IoThread::new(depth, event)?;
        let disk = io.open(&disk)?;
        let mut server = Server {
            queue,
            io,
            disk,
            zero_copy,
            tags: vec![0; depth],
            left: depth,
            refused: None,
            events: Vec::with_capacity(depth),
            buffers: Vec::new(),
            done: Vec::with_capacity(depth),
            counts: (0, 0),
            status,
        };
        server.queue.enter(false)?;
        server.take(&execute)?;
        match server.refused.take() {
            Some(error) => Err(error),
            None => Ok((waker, server)),
        }
    });
    match begun {
        Ok((waker, mut server)) => {
            let _ = started.send(Ok(waker));
            server.run(&execute)
        }
        Err(error) => {
            let _ = started.send(Err(error));
            Ok(())
        }
    }
}

struct Server<'a, F> {
    /// Fields are dropped in order: the queue before `zero_copy`, whose file the queue's calls use.
    queue: Queue,
    io: IoThread<F>,
    disk: BlockQueue,
    zero_copy: Option<ZeroCopy>,
    /// Tag of the request in each slot.
    tags: Vec<u16>,
    /// Number of tags that can still get requests.
    left: usize,
    /// Error of a tag that the kernel has refused.
    refused: Option<io::Error>,
    /// Collected events. The list is empty between uses, and keeps its capacity.
    events: Vec<Event>,
    /// Unused buffers for data that the driver does not copy.
    buffers: Vec<Vec<u8>>,
    /// Slots of answered requests.
    done: Vec<usize>,
    /// Numbers of zero-copy requests and of copied requests that were not yet added to the status.
    counts: (u64, u64),
    status: &'a QueueStatus,
}

impl<F: Future<Output = Completed>> Server<'_, F> {
    fn run(&mut self, make: &impl Fn(BlockQueue, Job) -> F) -> io::Result<()> {
        loop {
            let readable = self.take(make)?;
            if readable {
                self.io.take_events();
            }
            if let Some(error) = self.refused.take() {
                return Err(error);
            }
            let over = self.left == 0 && self.io.tasks().reserved() == 0;
            if over || self.status.quit.load(Ordering::Acquire) {
                return Ok(());
            }
            if self.reply()? {
                if self.queue.prepared() >= BATCH {
                    self.queue.enter(false)?;
                }
                continue;
            }
            if self.queue.prepared() > 0 && self.io.tasks().reserved() > 0 {
                // The prepared answers are submitted before the thread polls for the requests in
                // flight, because the polling takes time.
                self.queue.enter(false)?;
                continue;
            }
            if !self.io.spin() && self.io.prepare_timed_sleep() {
                self.queue.arm(self.io.as_fd());
                if self.zero_copy.as_ref().is_some_and(|zero_copy| zero_copy.pending() > 0) {
                    self.queue.tick();
                }
                self.count();
                let began = Instant::now();
                self.queue.enter(true)?;
                self.io.slept(began.elapsed());
            }
        }
    }

    /// Processes the events of the ring. Returns true if the polled descriptor became readable.
    fn take(&mut self, make: &impl Fn(BlockQueue, Job) -> F) -> io::Result<bool> {
        let mut readable = false;
        let mut events = std::mem::take(&mut self.events);
        self.queue.collect(|event| events.push(event));
        for event in events.drain(..) {
            match event {
                Event::Request { tag, descriptor, buffer } => {
                    self.begin(tag, &descriptor, buffer, make)?;
                }
                Event::Called { tag, result } => {
                    if let Some(next) =
                        self.zero_copy.as_mut().and_then(|zero_copy| zero_copy.ended(tag, result))
                    {
                        match &next {
                            Next::Call(_) => {}
                            Next::Reply(outcome) => self.disk.count_end(outcome.map(drop)),
                            Next::Disk(..) => self.disk.count_end(Ok(())),
                        }
                        self.perform(tag, next, Vec::new(), make)?;
                    }
                }
                Event::TagDone { tag, error } => {
                    self.left = self.left.saturating_sub(1);
                    // The driver returns a tag when the device is stopped.
                    self.io.limit_holds();
                    if let Some(error) = error {
                        tracing::debug!(tag, "tag refused: {error}");
                        self.refused.get_or_insert(error);
                    }
                }
                Event::Tick => self.cancel_late(),
                Event::Readable => readable = true,
            }
        }
        self.events = events;
        Ok(readable)
    }

    /// Starts a request.
    fn begin(
        &mut self,
        tag: u16,
        descriptor: &Descriptor,
        buffer: Vec<u8>,
        make: &impl Fn(BlockQueue, Job) -> F,
    ) -> io::Result<()> {
        let (action, offset) = match parse(descriptor, self.disk.geometry(), self.queue.room()) {
            Ok(parsed) => parsed,
            Err(errno) => return self.queue.commit(tag, -errno.raw_os_error(), buffer),
        };
        let is_registered = descriptor.op_flags & operation::NOT_REGISTERED == 0;
        let next = match &mut self.zero_copy {
            Some(zero_copy) if is_registered => zero_copy.begin(tag, action, offset),
            _ => Next::Disk(action, offset),
        };
        if let (Next::Call(_), Some(request)) = (&next, request(action, offset)) {
            self.disk.count(&request);
        }
        self.perform(tag, next, buffer, make)
    }

    fn perform(
        &mut self,
        tag: u16,
        next: Next,
        buffer: Vec<u8>,
        make: &impl Fn(BlockQueue, Job) -> F,
    ) -> io::Result<()> {
        match next {
            Next::Call(call) => self.queue.call(tag, &call),
            Next::Reply(outcome) => {
                self.counts.0 += 1;
                let result = match outcome {
                    Ok(moved) => i32::try_from(moved).unwrap_or(i32::MAX),
                    Err(error) => self.failed(&error),
                };
                self.queue.commit(tag, result, buffer)
            }
            Next::Disk(action, offset) => match self.equip(tag, action, buffer) {
                Ok((slot, buffer)) => {
                    if let Some(slot) = self.tags.get_mut(slot) {
                        *slot = tag;
                    }
                    self.counts.1 += u64::from(action.moves() > 0);
                    let job = Job { action, offset, buffer };
                    self.io.tasks().start(slot, make(self.disk.clone(), job));
                    Ok(())
                }
                Err((errno, buffer)) => self.queue.commit(tag, -errno.raw_os_error(), buffer),
            },
        }
    }

    /// Reserves a slot for a request that the disk executes, and provides its data buffer.
    fn equip(
        &mut self,
        tag: u16,
        action: Action,
        mut buffer: Vec<u8>,
    ) -> Result<(usize, Vec<u8>), (Errno, Vec<u8>)> {
        let device = self.queue.device();
        if !device.copies() && action.moves() > 0 {
            buffer = self.buffers.pop().unwrap_or_default();
            if buffer.len() < action.moves() {
                buffer.resize(action.moves(), 0);
            }
            if let Action::Write { len, .. } = action {
                let to = buffer.get_mut(..len).unwrap_or_default();
                if let Err(errno) = device.copy_from(self.queue.number(), tag, to) {
                    return Err((errno, buffer));
                }
            }
        }
        // A slot is always free, because there are as many slots as tags.
        match self.io.tasks().reserve() {
            Some(slot) => Ok((slot, buffer)),
            None => Err((Errno::NOMEM, buffer)),
        }
    }

    /// Converts an error of the disk's file into the result for the answer, and counts the error.
    fn failed(&self, error: &DiskError) -> i32 {
        let errno = errno(error);
        if errno == Errno::IO {
            self.status.failures.record(error);
        }
        -errno.raw_os_error()
    }

    fn cancel_late(&mut self) {
        let Self { zero_copy: Some(zero_copy), queue, .. } = self else { return };
        for tag in zero_copy.cancel_late(Instant::now()) {
            tracing::debug!(tag, "a request takes too long");
            queue.cancel(tag);
        }
    }

    /// Prepares the answers to completed requests. Returns true if there was any work.
    fn reply(&mut self) -> io::Result<bool> {
        let Self { queue, io, tags, done, status, buffers, .. } = self;
        let mut outcome = Ok(());
        let busy = io.run_once(|slot, completed| {
            done.push(slot);
            let Completed { mut result, error, mut buffer, read } = completed;
            if let Some(error) = error.filter(|error| error.errno() == Errno::IO) {
                status.failures.record(&error);
            }
            let tag = tags.get(slot).copied().unwrap_or(u16::MAX);
            if !queue.device().copies() {
                let from = buffer.get(..read).unwrap_or_default();
                if let Err(errno) = queue.device().copy_to(queue.number(), tag, from) {
                    tracing::debug!(
                        tag,
                        "the data of a read cannot be copied to the kernel: {errno}"
                    );
                    result = -errno.raw_os_error();
                }
                if !buffer.is_empty() && buffers.len() < BATCH {
                    buffers.push(std::mem::take(&mut buffer));
                }
            }
            if let Err(error) = queue.commit(tag, result, buffer) {
                outcome = Err(error);
            }
        });
        done.drain(..).for_each(|slot| io.tasks().release(slot));
        outcome.map(|()| busy)
    }
}

impl<F> Server<'_, F> {
    /// Adds the counted requests to the shared status.
    fn count(&mut self) {
        let (zero_copy, copied) = std::mem::take(&mut self.counts);
        for (count, of) in [(zero_copy, &self.status.zero_copy), (copied, &self.status.copied)] {
            if count > 0 {
                of.fetch_add(count, Ordering::Relaxed);
            }
        }
    }
}

impl<F> Drop for Server<'_, F> {
    fn drop(&mut self) {
        self.count();
    }
}
