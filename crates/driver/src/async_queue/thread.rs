//! The thread that owns the queue pair.

use super::state::{Freed, Inner, OpState};
use crate::command::Command;
use crate::dma::Buffer;
use crate::error::{IoError, IoErrorKind, QueueError};
use crate::queue::{Completion, QueuePair};
use std::io;
use std::sync::Arc;
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a sleep is while commands are outstanding on a queue without an interrupt.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Looks between two looks at the clock.
const LOOKS_PER_CLOCK: u32 = 64;

pub(super) fn spawn(queue: QueuePair, inner: Arc<Inner>) -> io::Result<JoinHandle<()>> {
    let name = format!("shadowbell-q{}", queue.qid());
    std::thread::Builder::new().name(name).spawn(move || Worker::new(queue, inner).run())
}

struct Worker {
    queue: QueuePair,
    inner: Arc<Inner>,
    /// The place of the command in each slot.
    place_of_slot: Box<[u32]>,
    // Kept for their capacity: a batch allocates nothing.
    batch: Vec<(u32, Command, Option<Buffer>)>,
    done: Vec<(u32, Result<Completion, IoError>)>,
    wakers: Vec<Waker>,
    dropped: Vec<Result<Completion, IoError>>,
    freed: Vec<Freed>,
    next_scan: Option<Instant>,
    /// Since when the queue is to be closed.
    closing: Option<Instant>,
}

impl Worker {
    fn new(queue: QueuePair, inner: Arc<Inner>) -> Self {
        let capacity = queue.capacity();
        Self {
            queue,
            inner,
            place_of_slot: vec![0; capacity].into(),
            batch: Vec::with_capacity(capacity),
            done: Vec::with_capacity(capacity),
            wakers: Vec::with_capacity(capacity),
            dropped: Vec::new(),
            freed: Vec::new(),
            next_scan: None,
            closing: None,
        }
    }

    fn run(mut self) {
        if let Err(error) = self.work() {
            self.fail(error);
        }
        let mut state = self.inner.lock();
        state.stats = self.queue.stats();
        // Whoever comes late finds a queue that does not work.
        state.failed.get_or_insert(QueueError::Detached { qid: self.inner.qid });
        let freed = state.leave(None);
        drop(state);
        freed.pass_on();
        // The queue pair is dropped here, and with it deleted.
    }

    fn work(&mut self) -> Result<(), QueueError> {
        let mut sleeper = self.inner.sleeper();
        loop {
            if self.step()? {
                continue;
            }
            if self.is_over() {
                return Ok(());
            }
            let began = Instant::now();
            if self.spin(began) {
                continue;
            }
            self.inner.lock().stats = self.queue.stats();
            self.queue.prepare_sleep()?;
            let mut fenced = sleeper.prepare().fence();
            fenced.note(self.inner.has_news() || self.queue.is_ready());
            if let Some(asleep) = fenced.settle() {
                self.queue.block(self.sleep_until())?;
                drop(asleep);
            }
            self.queue.spin_mut().waited(began.elapsed());
        }
    }

    /// Whether the queue is to be closed, and what is outstanding is done or never will be.
    fn is_over(&self) -> bool {
        self.closing.is_some_and(|since| {
            self.queue.outstanding() == 0 || since.elapsed() >= self.inner.timeout
        })
    }

    /// Submits what is in the inbox, and delivers what has completed. Whether there was anything.
    fn step(&mut self) -> Result<bool, QueueError> {
        let mut busy = false;
        if self.inner.has_news() {
            busy |= self.take_inbox();
            self.submit()?;
        }
        while self.done.len() < self.queue.capacity()
            && let Some(completion) = self.queue.pop()
        {
            let place = self.place_of_slot.get(completion.token.index()).copied();
            self.done.push((place.unwrap_or(u32::MAX), Ok(completion)));
        }
        self.queue.settle()?;
        busy |= !self.done.is_empty();
        self.deliver();
        self.expire();
        Ok(busy)
    }

    fn take_inbox(&mut self) -> bool {
        let now = Instant::now();
        let deadline = now.checked_add(self.inner.timeout);
        let mut state = self.inner.lock();
        self.inner.take_news();
        if state.closing && self.closing.is_none() {
            self.closing = Some(now);
        }
        while let Some(place) = state.inbox.pop_front() {
            let Some(op) = state.op(place) else { continue };
            match std::mem::replace(&mut op.state, OpState::Submitted) {
                OpState::Queued(command, buffer) => {
                    op.deadline = deadline;
                    self.batch.push((place, command, buffer));
                }
                // Its future was dropped before it got here.
                _ => self.freed.push(state.release(place)),
            }
        }
        drop(state);
        if self.next_scan.is_none() && !self.batch.is_empty() {
            self.next_scan = now.checked_add(self.scan_interval());
        }
        let any = !self.batch.is_empty() || !self.freed.is_empty();
        self.freed.drain(..).for_each(Freed::pass_on);
        any
    }

    fn submit(&mut self) -> Result<(), QueueError> {
        if self.batch.is_empty() {
            return Ok(());
        }
        for (place, command, buffer) in self.batch.drain(..) {
            match self.queue.submit(command, buffer) {
                Ok(token) => {
                    if let Some(slot) = self.place_of_slot.get_mut(token.index()) {
                        *slot = place;
                    }
                }
                Err(refused) => {
                    let kind = IoErrorKind::Queue(refused.reason);
                    self.done.push((place, Err(IoError { kind, buffer: refused.buffer })));
                }
            }
        }
        self.queue.ring()
    }

    fn deliver(&mut self) {
        if self.done.is_empty() {
            return;
        }
        let mut state = self.inner.lock();
        for (place, outcome) in self.done.drain(..) {
            let Some(op) = state.op(place) else { continue };
            op.deadline = None;
            match op.state {
                OpState::Submitted | OpState::Expired => {
                    op.state = OpState::Done(outcome);
                    self.wakers.extend(op.waker.take());
                }
                // Nobody waits: the buffer goes back to its pool, outside of the lock.
                _ => {
                    self.freed.push(state.release(place));
                    self.dropped.push(outcome);
                }
            }
        }
        drop(state);
        self.dropped.clear();
        self.freed.drain(..).for_each(Freed::pass_on);
        self.wakers.drain(..).for_each(Waker::wake);
    }

    fn scan_interval(&self) -> Duration {
        self.inner.timeout / 8
    }

    /// Tells the futures of commands that take too long.
    fn expire(&mut self) {
        let Some(scan) = self.next_scan else { return };
        if self.queue.outstanding() == 0 {
            self.next_scan = None;
            return;
        }
        let now = Instant::now();
        if now < scan {
            return;
        }
        self.next_scan = now.checked_add(self.scan_interval());
        let mut state = self.inner.lock();
        for op in &mut state.ops {
            if matches!(op.state, OpState::Submitted) && op.deadline.is_some_and(|d| d <= now) {
                op.state = OpState::Expired;
                self.wakers.extend(op.waker.take());
            }
        }
        drop(state);
        if !self.wakers.is_empty() {
            tracing::warn!(
                qid = self.inner.qid,
                "{} commands were not completed within {:?}",
                self.wakers.len(),
                self.inner.timeout
            );
        }
        self.wakers.drain(..).for_each(Waker::wake);
    }

    /// Polls for as long as the policy says. Whether there is something to do.
    fn spin(&mut self, began: Instant) -> bool {
        let window = self.queue.spin_mut().window();
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                if self.queue.is_ready() || self.inner.has_news() {
                    let waited = began.elapsed();
                    self.queue.spin_mut().waited(waited);
                    return true;
                }
                std::hint::spin_loop();
            }
            if began.elapsed() >= window {
                return false;
            }
        }
    }

    fn sleep_until(&self) -> Option<Instant> {
        if self.queue.outstanding() == 0 {
            // Idle: no timer.
            return None;
        }
        if self.queue.has_interrupt() {
            return self.next_scan;
        }
        Instant::now().checked_add(POLL_INTERVAL)
    }

    /// The queue does not work any more. What was not submitted gets its buffer back.
    fn fail(&mut self, error: QueueError) {
        let mut state = self.inner.lock();
        state.failed = Some(error.clone());
        for (place, _, buffer) in self.batch.drain(..) {
            if let Some(op) = state.op(place) {
                let kind = IoErrorKind::Queue(error.clone());
                op.state = OpState::Done(Err(IoError { kind, buffer }));
            }
        }
        for op in &mut state.ops {
            self.wakers.extend(op.waker.take());
        }
        state.inbox.clear();
        drop(state);
        self.deliver();
        self.wakers.drain(..).for_each(Waker::wake);
    }
}
