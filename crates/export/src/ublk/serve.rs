//! One queue's thread: takes requests, carries them out on the disk, and answers them.
//!
//! It drives the disk's queue as well, if it may, and sleeps in the system call that hands its
//! answers over: what came in together goes to the controller together, and what has completed
//! together is answered together.

use super::request::{Completed, Job, carry_out, parse};
use super::sys::{Device, Event, Queue};
use crate::failures::FailureCount;
use crate::io_thread::IoThread;
use rustix::io::Errno;
use shadowbell_block::BlockDevice;
use shadowbell_memory::EventFd;
use std::future::Future;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;

/// Answers that wait for more of them, at most, while the disk keeps the thread busy.
const BATCH: usize = 32;

/// What a thread reports once: what ends its sleep, or why it could not start.
pub(super) type Started = io::Result<EventFd>;

/// What the threads of a device's queues and its owner share.
#[derive(Default)]
pub(super) struct QueueStatus {
    /// Requests that failed because the disk did.
    pub(super) failures: FailureCount,
    /// The threads are to give up, whatever the kernel still wants of them.
    pub(super) quit: AtomicBool,
}

/// Serves a queue until the device is stopped. Says on `started` when the kernel has all of the
/// queue's tags, or why not.
///
/// # Errors
/// The kernel does not work with us any more. It still has the queue's tags.
pub(super) fn serve(
    device: Arc<Device>,
    queue: u16,
    disk: BlockDevice,
    status: &QueueStatus,
    started: &SyncSender<Started>,
) -> io::Result<()> {
    let depth = usize::from(device.info().depth);
    let begun = Queue::open(device, queue).and_then(|queue| {
        let mut server = Server {
            queue,
            io: IoThread::new(&disk, depth)?,
            disk,
            tags: vec![0; depth],
            left: depth,
            refused: None,
            bad: Vec::new(),
            done: Vec::with_capacity(depth),
            status,
        };
        server.queue.enter(false)?;
        server.take(&carry_out)?;
        match server.refused.take() {
            Some(error) => Err(error),
            None => Ok((server.io.waker()?, server)),
        }
    });
    match begun {
        Ok((waker, mut server)) => {
            let _ = started.send(Ok(waker));
            server.run(&carry_out)
        }
        Err(error) => {
            let _ = started.send(Err(error));
            Ok(())
        }
    }
}

struct Server<'a, F> {
    queue: Queue,
    io: IoThread<F>,
    disk: BlockDevice,
    /// The tag of the request in each slot.
    tags: Vec<u16>,
    /// Tags with which requests may still come.
    left: usize,
    /// Why the kernel did not take a tag.
    refused: Option<io::Error>,
    /// Answers that need no disk.
    bad: Vec<(u16, Errno, Vec<u8>)>,
    /// Slots whose requests are answered.
    done: Vec<usize>,
    status: &'a QueueStatus,
}

impl<F: Future<Output = Completed>> Server<'_, F> {
    fn run(&mut self, make: &impl Fn(BlockDevice, Job) -> F) -> io::Result<()> {
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
            if self.answer()? {
                if self.queue.prepared() >= BATCH {
                    self.queue.enter(false)?;
                }
                continue;
            }
            if self.queue.prepared() > 0 && self.io.tasks().reserved() > 0 {
                // To look for what is still under way takes time; these answers do not wait for it.
                self.queue.enter(false)?;
                continue;
            }
            if !self.io.spin() && self.io.prepare_timed_sleep() {
                self.queue.arm(self.io.as_fd());
                self.queue.enter(true)?;
                self.io.after_sleep(false);
            }
        }
    }

    /// Begins with what has come. Whether the thread's descriptor became readable.
    fn take(&mut self, make: &impl Fn(BlockDevice, Job) -> F) -> io::Result<bool> {
        let Self { queue, disk, io, tags, left, refused, bad, .. } = self;
        let mut readable = false;
        queue.collect(|event| match event {
            Event::Request { tag, descriptor, buffer } => {
                match parse(&descriptor, disk.geometry(), buffer.len()) {
                    Ok((action, offset)) => {
                        // There are as many slots as tags.
                        let Some(slot) = io.tasks().reserve() else {
                            return bad.push((tag, Errno::NOMEM, buffer));
                        };
                        if let Some(slot) = tags.get_mut(slot) {
                            *slot = tag;
                        }
                        let job = Job { action, offset, buffer };
                        io.tasks().start(slot, make(disk.clone(), job));
                    }
                    Err(errno) => bad.push((tag, errno, buffer)),
                }
            }
            Event::TagDone { tag, error } => {
                *left = left.saturating_sub(1);
                if let Some(error) = error {
                    tracing::debug!(tag, "not taken: {error}");
                    refused.get_or_insert(error);
                }
            }
            Event::Readable => readable = true,
        });
        for (tag, errno, buffer) in bad.drain(..) {
            queue.commit(tag, -errno.raw_os_error(), buffer)?;
        }
        Ok(readable)
    }

    /// Prepares the answers to what is done. Whether there was anything to do.
    fn answer(&mut self) -> io::Result<bool> {
        let Self { queue, io, tags, done, status, .. } = self;
        let mut outcome = Ok(());
        let busy = io.run_once(None, |slot, completed| {
            done.push(slot);
            let Completed { result, error, buffer } = completed;
            if let Some(error) = error.filter(|error| error.errno() == Errno::IO) {
                status.failures.record(&error);
            }
            let tag = tags.get(slot).copied().unwrap_or(u16::MAX);
            if let Err(error) = queue.commit(tag, result, buffer) {
                outcome = Err(error);
            }
        });
        done.drain(..).for_each(|slot| io.tasks().release(slot));
        outcome.map(|()| busy)
    }
}
