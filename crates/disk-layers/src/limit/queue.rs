//! Waiting requests of one rate-limited queue.
//!
//! Waiting requests of different submission queues of the host are served in turn, one request each
//! (round robin). Only the first waiting request takes a start time from the limiter. So other
//! users of the same limit get start times in between.

use super::counts::Counts;
use super::limiter::Limiter;
use super::timer::Timer;
use shadowbell_disk::{
    DiskError, Lists, Metadata, Op, Queue, Request, Submitted, Tasks, merge, submit_any,
};
use shadowbell_memory::{AfterChange, Segments, View, ViewChange};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Index of the list of submission queues in [`LimitedQueue::sources`].
const SOURCES: u32 = 0;

struct Waiting {
    request: Request,
    metadata: Option<Metadata>,
    data: Segments,
    /// Submission queue of the host that the request came from.
    source: u32,
    /// True if the request was submitted as a [replay](Queue::set_replays).
    is_replay: bool,
    /// True if guest memory that contains the data was unmapped. The request then ends with an
    /// error.
    is_unmapped: bool,
}

/// Start time that was taken for the first waiting request, and the generation of the limits from
/// which it was computed.
struct Slot {
    at: u64,
    generation: u64,
}

pub(super) struct LimitedQueue {
    inner: Box<dyn Queue>,
    limiters: Arc<[Arc<Limiter>]>,
    timer: Arc<Timer>,
    /// Epoll descriptor that is readable while this queue's timer or that of the disk below is
    /// readable; `None` if the disk below has no timer.
    merged: Option<OwnedFd>,
    waiting: Tasks<Waiting>,
    /// Keys of waiting requests, one list per submission queue.
    by_source: Lists,
    /// Submission queues with waiting requests. The first one is served next.
    sources: Lists,
    /// Start time that was taken for the first waiting request: the first one of the first
    /// submission queue in `sources`.
    slot: Option<Slot>,
    /// Submission queue of the host from which requests are being submitted now.
    source: u32,
    /// True if the requests that are being submitted now are replays.
    replays: bool,
    cancelled: Vec<(u32, Segments)>,
    /// True if all waiting requests have to be submitted now, without limits, because a change of
    /// guest memory waits for them.
    is_urgent: bool,
    counts: Counts,
}

impl LimitedQueue {
    pub(super) fn new(
        inner: Box<dyn Queue>,
        limiters: Arc<[Arc<Limiter>]>,
        counts: Counts,
    ) -> io::Result<Self> {
        let timer = Arc::new(Timer::new()?);
        limiters.iter().for_each(|limiter| limiter.add(&timer));
        let merged = inner.timer_fd().map(|of_disk| merge([of_disk, timer.fd()])).transpose()?;
        Ok(Self {
            merged,
            inner,
            limiters,
            timer,
            waiting: Tasks::default(),
            by_source: Lists::default(),
            sources: Lists::default(),
            slot: None,
            source: 0,
            replays: false,
            cancelled: Vec::new(),
            is_urgent: false,
            counts,
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

    /// Takes a start time from each limiter and returns the latest.
    fn take_time(&self, request: &Request, now: u64) -> Slot {
        let generation = self.generation();
        let times = self.limiters.iter().map(|limiter| limiter.take(request, now));
        Slot { at: times.max().unwrap_or(0), generation }
    }

    fn wait(&mut self, tag: u32, request: &Request, metadata: Option<&Metadata>, data: Segments) {
        let source = self.source;
        self.counts.delayed.fetch_add(1, Ordering::Relaxed);
        self.counts.waiting.fetch_add(1, Ordering::Relaxed);
        let key = self.waiting.insert(
            tag,
            Waiting {
                request: *request,
                metadata: metadata.copied(),
                data,
                source,
                is_replay: self.replays,
                is_unmapped: false,
            },
        );
        self.by_source.push_back(source, key);
        if !self.sources.contains(source) {
            self.sources.push_back(SOURCES, source);
        }
    }

    /// First waiting request: its submission queue and its key.
    fn first(&self) -> Option<(u32, u32)> {
        let source = self.sources.first(SOURCES)?;
        Some((source, self.by_source.first(source)?))
    }

    /// Removes and returns the first waiting request. Its submission queue moves to the end of the
    /// list.
    fn pop(&mut self) -> Option<(u32, Waiting)> {
        let (source, key) = self.first()?;
        let taken = self.take(key);
        if self.sources.remove(source) {
            self.sources.push_back(SOURCES, source);
        }
        self.slot = None;
        taken
    }

    /// Removes a waiting request.
    fn take(&mut self, key: u32) -> Option<(u32, Waiting)> {
        let (tag, waiting) = self.waiting.remove(key)?;
        self.counts.waiting.fetch_sub(1, Ordering::Relaxed);
        self.by_source.remove(key);
        if self.by_source.is_empty(waiting.source) {
            self.sources.remove(waiting.source);
        }
        Some((tag, waiting))
    }

    /// Submits the waiting requests whose start time has come, and arms the timer for the next one.
    fn release(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        loop {
            let first = self.first().and_then(|(_, key)| self.waiting.get_mut(key));
            let Some(request) = first.map(|first| first.request) else {
                self.is_urgent = false;
                return self.timer.disarm();
            };
            let now = self.now();
            let generation = self.generation();
            let slot = match self.slot.take() {
                Some(slot) if slot.generation == generation => slot,
                _ => self.take_time(&request, now),
            };
            if slot.at > now && !self.is_open() {
                self.timer.arm(slot.at, now);
                self.slot = Some(slot);
                // If the limits have changed after the start time was computed, the change may have
                // fired the timer before it was armed. So the start time is computed again.
                if self.generation() == generation {
                    return;
                }
                continue;
            }
            let Some((tag, waiting)) = self.pop() else { return };
            let Waiting { request, metadata, mut data, is_replay, is_unmapped, .. } = waiting;
            if is_unmapped {
                done(tag, Err(DiskError::BadBuffer), data);
                continue;
            }
            if is_replay {
                self.inner.set_replays(true);
            }
            let submitted =
                submit_any(&mut *self.inner, tag, &request, metadata.as_ref(), &mut data);
            if is_replay {
                self.inner.set_replays(self.replays);
            }
            match submitted {
                Submitted::Done(outcome) => done(tag, outcome, data),
                Submitted::Pending => {}
            }
        }
    }

    fn take_in(
        &mut self,
        tag: u32,
        request: &Request,
        metadata: Option<&Metadata>,
        data: &mut Segments,
    ) -> Submitted {
        if self.waiting.is_empty() {
            let now = self.now();
            let slot = self.take_time(request, now);
            if slot.at <= now || self.is_open() {
                return submit_any(&mut *self.inner, tag, request, metadata, data);
            }
            self.timer.arm(slot.at, now);
            self.slot = Some(slot);
            if self.slot.as_ref().is_some_and(|slot| slot.generation != self.generation()) {
                self.timer.fire();
            }
        }
        self.wait(tag, request, metadata, data.take());
        Submitted::Pending
    }
}

impl Drop for LimitedQueue {
    fn drop(&mut self) {
        self.counts.waiting.fetch_sub(self.waiting.len() as u64, Ordering::Relaxed);
    }
}

impl Queue for LimitedQueue {
    fn inner(&self) -> Option<&dyn Queue> {
        Some(&*self.inner)
    }

    fn inner_mut(&mut self) -> Option<&mut dyn Queue> {
        Some(&mut *self.inner)
    }

    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        if request.op == Op::Flush {
            return self.inner.submit(tag, request, data);
        }
        self.take_in(tag, request, None, data)
    }

    fn submit_with_metadata(
        &mut self,
        tag: u32,
        request: &Request,
        metadata: &Metadata,
        data: &mut Segments,
    ) -> Submitted {
        self.take_in(tag, request, Some(metadata), data)
    }

    fn schedules_sources(&self) -> bool {
        true
    }

    fn begin_turn(&mut self, source: u32) {
        self.source = source;
    }

    fn set_replays(&mut self, replays: bool) {
        self.replays = replays;
        self.inner.set_replays(replays);
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        for (tag, data) in self.cancelled.drain(..) {
            done(tag, Err(DiskError::Cancelled), data);
        }
        self.inner.reap(done);
        self.release(done);
        // Requests to the disk below that this call has submitted must be started before it
        // returns.
        self.inner.commit();
    }

    fn cancel(&mut self, tag: u32) {
        if let Some(key) = self.waiting.find(tag) {
            if self.first().is_some_and(|(_, first)| first == key) {
                self.slot = None;
            }
            let taken = self.take(key);
            self.cancelled.extend(taken.map(|(tag, waiting)| (tag, waiting.data)));
            return self.timer.fire();
        }
        self.inner.cancel(tag);
    }

    fn memory_changed(&mut self, view: &View) {
        self.inner.memory_changed(view);
        // The caller completes a change of guest memory only when no request uses the old memory.
        // If a waiting request may use old memory, all waiting requests are submitted without
        // limits, so that they end soon.
        let mut change = ViewChange::new(view);
        let keys: Vec<_> = self.waiting.keys().collect();
        let mut must_end = false;
        for key in keys {
            let Some(waiting) = self.waiting.get_mut(key) else { continue };
            let state = waiting.data.move_to(&mut change);
            waiting.is_unmapped |= state == AfterChange::Unmapped;
            must_end |= state == AfterChange::Unknown;
        }
        if must_end {
            self.is_urgent = true;
            self.timer.fire();
        }
    }

    fn pending(&self) -> usize {
        self.inner.pending() + self.waiting.len() + self.cancelled.len()
    }

    fn timer_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.merged.as_ref().map_or(self.timer.fd(), |merged| merged.as_fd()))
    }
}
