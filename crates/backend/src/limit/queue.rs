//! The requests of one queue that wait.
//!
//! Submission queues of a host take turns, a request each. Only the first request that waits has
//! taken a time of the limiter, so that whoever shares the limit takes turns with this queue.

use super::limiter::Limiter;
use super::timer::Timer;
use crate::disk::Queue;
use crate::request::{DiskError, Op, Request, Submitted};
use shadowbell_memory::{DmaTable, Segments};
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

struct Waiting {
    tag: u32,
    request: Request,
    data: Segments,
}

/// The requests that came from one submission queue.
struct Source {
    number: u32,
    waiting: VecDeque<Waiting>,
}

/// The time that the next request has.
struct Slot {
    at: u64,
    generation: u64,
}

pub(super) struct LimitedQueue {
    inner: Box<dyn Queue>,
    limiters: Arc<[Arc<Limiter>]>,
    timer: Arc<Timer>,
    /// Those with something that waits; the first one is next.
    sources: VecDeque<Source>,
    /// Of the first request of the first source.
    slot: Option<Slot>,
    /// Whose requests come now.
    source: u32,
    waits: usize,
    cancelled: Vec<(u32, Segments)>,
    /// What waits is to go.
    is_urgent: bool,
    /// How many have waited.
    delayed: Arc<AtomicU64>,
}

impl LimitedQueue {
    pub(super) fn new(
        inner: Box<dyn Queue>,
        limiters: Arc<[Arc<Limiter>]>,
        delayed: Arc<AtomicU64>,
    ) -> io::Result<Self> {
        let timer = Arc::new(Timer::new()?);
        limiters.iter().for_each(|limiter| limiter.add(&timer));
        Ok(Self {
            inner,
            limiters,
            timer,
            sources: VecDeque::new(),
            slot: None,
            source: 0,
            waits: 0,
            cancelled: Vec::new(),
            is_urgent: false,
            delayed,
        })
    }

    fn now(&self) -> u64 {
        self.limiters.first().map_or(0, |limiter| limiter.now())
    }

    fn generation(&self) -> u64 {
        self.limiters.iter().fold(0, |sum, limiter| sum.wrapping_add(limiter.generation()))
    }

    fn is_open(&self) -> bool {
        self.is_urgent || self.limiters.iter().any(|limiter| limiter.is_open())
    }

    /// Takes a time for a request, of all whose limit it has to keep.
    fn take(&self, request: &Request, now: u64) -> Slot {
        let generation = self.generation();
        let times = self.limiters.iter().map(|limiter| limiter.take(request, now));
        Slot { at: times.max().unwrap_or(0), generation }
    }

    fn wait(&mut self, waiting: Waiting) {
        let number = self.source;
        self.waits += 1;
        self.delayed.fetch_add(1, Ordering::Relaxed);
        match self.sources.iter_mut().find(|source| source.number == number) {
            Some(source) => source.waiting.push_back(waiting),
            None => self.sources.push_back(Source { number, waiting: [waiting].into() }),
        }
    }

    /// The first of those that wait, if there is one; its source is the last one then.
    fn pop(&mut self) -> Option<Waiting> {
        let mut source = self.sources.pop_front()?;
        let waiting = source.waiting.pop_front();
        if !source.waiting.is_empty() {
            self.sources.push_back(source);
        }
        self.waits -= usize::from(waiting.is_some());
        self.slot = None;
        waiting
    }

    /// Gives the disk what may go, and wakes the thread for the rest.
    fn release(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        loop {
            let Some(first) = self.sources.front().and_then(|source| source.waiting.front()) else {
                self.is_urgent = false;
                return self.timer.disarm();
            };
            let now = self.now();
            let generation = self.generation();
            let slot = match self.slot.take() {
                Some(slot) if slot.generation == generation => slot,
                _ => self.take(&first.request, now),
            };
            if slot.at > now && !self.is_open() {
                self.timer.arm(slot.at, now);
                self.slot = Some(slot);
                // Somebody may have allowed something else, and woken us, before this was armed.
                if self.generation() == generation {
                    return;
                }
                continue;
            }
            let Some(Waiting { tag, request, mut data }) = self.pop() else { return };
            match self.inner.submit(tag, &request, &mut data) {
                Submitted::Done(outcome) => done(tag, outcome, data),
                Submitted::Pending => {}
            }
        }
    }
}

impl Queue for LimitedQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        if request.op == Op::Flush {
            return self.inner.submit(tag, request, data);
        }
        if self.waits == 0 {
            let now = self.now();
            let slot = self.take(request, now);
            if slot.at <= now || self.is_open() {
                return self.inner.submit(tag, request, data);
            }
            self.timer.arm(slot.at, now);
            self.slot = Some(slot);
            if self.slot.as_ref().is_some_and(|slot| slot.generation != self.generation()) {
                self.timer.fire();
            }
        }
        self.wait(Waiting { tag, request: *request, data: data.take() });
        Submitted::Pending
    }

    fn takes_turns(&self) -> bool {
        true
    }

    fn begin_turn(&mut self, source: u32) {
        self.source = source;
    }

    fn wants_prefetch_hints(&self) -> bool {
        self.inner.wants_prefetch_hints()
    }

    fn prefetch_hint(&self, op: Op, offset: u64, len: usize, distance: u32) {
        self.inner.prefetch_hint(op, offset, len, distance);
    }

    fn longest_inline(&self) -> u64 {
        self.inner.longest_inline()
    }

    fn commit(&mut self) {
        self.inner.commit();
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        for (tag, data) in self.cancelled.drain(..) {
            done(tag, Err(DiskError::Cancelled), data);
        }
        self.inner.reap(done);
        self.release(done);
    }

    fn cancel(&mut self, tag: u32) {
        for (nth, source) in self.sources.iter_mut().enumerate() {
            let Some(place) = source.waiting.iter().position(|waiting| waiting.tag == tag) else {
                continue;
            };
            if let Some(waiting) = source.waiting.remove(place) {
                self.cancelled.push((tag, waiting.data));
            }
            let is_empty = source.waiting.is_empty();
            if (nth, place) == (0, 0) {
                self.slot = None;
            }
            if is_empty {
                self.sources.remove(nth);
            }
            self.waits -= 1;
            return self.timer.fire();
        }
        self.inner.cancel(tag);
    }

    fn memory_changed(&mut self, table: &DmaTable) {
        self.inner.memory_changed(table);
        // Somebody waits until nobody uses the memory of before.
        if self.waits != 0 {
            self.is_urgent = true;
            self.timer.fire();
        }
    }

    fn pending(&self) -> usize {
        self.inner.pending() + self.waits + self.cancelled.len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }

    fn wakes_by_edges(&self) -> bool {
        self.inner.wakes_by_edges()
    }

    fn timer_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.fd())
    }
}
