//! One queue's thread: takes requests, carries them out on the disk, and answers them.
//!
//! It drives the disk's queue as well, if it may, and sleeps in the system call that hands its answers
//! over: what came in together goes to the controller together, and what has completed together is
//! answered together.

use super::request::{Ended, Job, carry_out, parse};
use super::sys::{Device, Event, Queue};
use crate::seat::Seat;
use rustix::io::Errno;
use shadowbell_block::{BlockDevice, BlockError};
use shadowbell_memory::EventFd;
use std::future::Future;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

/// Answers that wait for more of them, at most, while the disk keeps the thread busy.
const BATCH: usize = 32;

/// What a thread tells whoever started it, once: what ends its sleep, or why it could not start.
pub(super) type Started = io::Result<EventFd>;

/// What the threads of a device and its owner share.
#[derive(Default)]
pub(super) struct Notes {
    /// Requests that failed because the disk did.
    pub(super) failures: AtomicU64,
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
    notes: &Notes,
    started: &SyncSender<Started>,
) -> io::Result<()> {
    let depth = usize::from(device.info().depth);
    let begun = Queue::open(device, queue).and_then(|queue| {
        let mut server = Server {
            queue,
            seat: Seat::new(&disk, depth)?,
            disk,
            tags: vec![0; depth],
            left: depth,
            refused: None,
            bad: Vec::new(),
            done: Vec::with_capacity(depth),
            notes,
        };
        server.queue.enter(false)?;
        server.take(&carry_out)?;
        match server.refused.take() {
            Some(error) => Err(error),
            None => Ok((server.seat.alarm()?, server)),
        }
    });
    match begun {
        Ok((alarm, mut server)) => {
            let _ = started.send(Ok(alarm));
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
    seat: Seat<F>,
    disk: BlockDevice,
    /// The tag of the request in each place.
    tags: Vec<u16>,
    /// Tags with which requests may still come.
    left: usize,
    /// Why the kernel did not take a tag.
    refused: Option<io::Error>,
    /// Answers that need no disk.
    bad: Vec<(u16, Errno, Vec<u8>)>,
    /// Places whose requests are answered.
    done: Vec<usize>,
    notes: &'a Notes,
}

impl<F: Future<Output = Ended>> Server<'_, F> {
    fn run(&mut self, make: &impl Fn(BlockDevice, Job) -> F) -> io::Result<()> {
        loop {
            let rang = self.take(make)?;
            if rang {
                self.seat.look();
            }
            if let Some(error) = self.refused.take() {
                return Err(error);
            }
            let over = self.left == 0 && self.seat.tasks().reserved() == 0;
            if over || self.notes.quit.load(Ordering::Acquire) {
                return Ok(());
            }
            if self.answer()? {
                if self.queue.prepared() >= BATCH {
                    self.queue.enter(false)?;
                }
                continue;
            }
            if self.queue.prepared() > 0 && self.seat.tasks().reserved() > 0 {
                // To look for what is still under way takes time; these answers do not wait for it.
                self.queue.enter(false)?;
                continue;
            }
            if !self.seat.spin() && self.seat.prepare_timed_sleep() {
                self.queue.arm(self.seat.as_fd());
                self.queue.enter(true)?;
                self.seat.awake(false);
            }
        }
    }

    /// Begins with what has come. Whether the seat's descriptor rang.
    fn take(&mut self, make: &impl Fn(BlockDevice, Job) -> F) -> io::Result<bool> {
        let Self { queue, disk, seat, tags, left, refused, bad, .. } = self;
        let mut rang = false;
        queue.collect(|event| match event {
            Event::Request { tag, descriptor, buffer } => {
                match parse(&descriptor, disk.geometry(), buffer.len()) {
                    Ok((action, offset)) => {
                        // There are as many places as tags.
                        let Some(place) = seat.tasks().reserve() else {
                            return bad.push((tag, Errno::NOMEM, buffer));
                        };
                        if let Some(slot) = tags.get_mut(place) {
                            *slot = tag;
                        }
                        let job = Job { action, offset, buffer };
                        seat.tasks().start(place, make(disk.clone(), job));
                    }
                    Err(errno) => bad.push((tag, errno, buffer)),
                }
            }
            Event::Ended { tag, error } => {
                *left = left.saturating_sub(1);
                if let Some(error) = error {
                    tracing::debug!(tag, "not taken: {error}");
                    refused.get_or_insert(error);
                }
            }
            Event::Rang => rang = true,
        });
        for (tag, errno, buffer) in bad.drain(..) {
            queue.commit(tag, -errno.raw_os_error(), buffer)?;
        }
        Ok(rang)
    }

    /// Prepares the answers to what is done. Whether there was anything to do.
    fn answer(&mut self) -> io::Result<bool> {
        let Self { queue, seat, tags, done, notes, .. } = self;
        let mut outcome = Ok(());
        let busy = seat.turn(|place, ended| {
            done.push(place);
            let Ended { result, error, buffer } = ended;
            if let Some(error) = error {
                notes.failed(&error);
            }
            let tag = tags.get(place).copied().unwrap_or(u16::MAX);
            if let Err(error) = queue.commit(tag, result, buffer) {
                outcome = Err(error);
            }
        });
        done.drain(..).for_each(|place| seat.tasks().release(place));
        outcome.map(|()| busy)
    }
}

impl Notes {
    fn failed(&self, error: &BlockError) {
        if error.errno() == Errno::IO && self.failures.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::error!("a request failed, and further failures are only counted: {error}");
        }
    }
}
