//! Driving a queue from a thread that has futures on it.

use super::AsyncQueue;
use super::state::{ANY, TRIED};
use super::worker::Worker;
use std::fmt;
use std::time::Instant;

/// The right to drive a queue, and the duty: while this lives, nobody else does. See the
/// [module](super).
///
/// Whoever has it calls [`step`](Self::step) again and again, and sleeps only after
/// [`prepare_sleep`](Self::prepare_sleep) (or by [`sleep`](Self::sleep)). It can be dropped at any
/// time, and taken again.
pub struct Driver {
    /// Not here any more when the queue does not work.
    worker: Option<Box<Worker>>,
    queue: AsyncQueue,
}

impl Driver {
    pub(super) fn new(queue: AsyncQueue) -> Option<Self> {
        let Some(mut worker) = queue.inner().unpark() else {
            queue.inner().wish(TRIED);
            return None;
        };
        worker.forget_wait();
        Some(Self { worker: Some(worker), queue })
    }

    /// The queue.
    #[must_use]
    pub fn queue(&self) -> &AsyncQueue {
        &self.queue
    }

    /// Submits what futures have left, with one doorbell or none, takes completions and wakes their
    /// futures. Whether there was anything to do.
    pub fn step(&mut self) -> bool {
        let Some(worker) = &mut self.worker else { return false };
        let busy = worker.step(self.queue.inner());
        if worker.has_failed() {
            self.give_back();
        }
        busy
    }

    /// How many commands are with the controller.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.worker.as_ref().map_or(0, |worker| worker.outstanding())
    }

    /// Whether nothing is under way, and nobody waits for a place. If so, whoever drives has nothing
    /// to do for the queue.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.worker.as_ref().is_none_or(|worker| !worker.has_work()) && !self.has_news()
    }

    /// Whether futures have left something.
    fn has_news(&self) -> bool {
        self.worker.is_some() && self.queue.inner().has_news()
    }

    /// Whether somebody else has tried to drive the queue since this was called last. Who has nothing
    /// under way had best let go then.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.queue.inner().take_wish(ANY)
    }

    /// Looks for something to do, here or as far as `also` knows, for as long as the queue's
    /// [`SpinPolicy`](crate::SpinPolicy) says. Whether there is.
    pub fn spin(&mut self, also: impl FnMut() -> bool) -> bool {
        let Some(worker) = &mut self.worker else { return false };
        worker.spin(self.queue.inner(), also)
    }

    /// To be called before sleeping on [`AsyncQueue::event`]: whether there is nothing to do yet. If
    /// so, the event will be signalled for whatever comes, the sleep must not last longer than
    /// [`sleep_until`](Self::sleep_until), and [`awake`](Self::awake) has to follow it.
    #[must_use]
    pub fn prepare_sleep(&mut self) -> bool {
        match &mut self.worker {
            Some(worker) => worker.prepare_sleep(self.queue.inner()),
            None => true,
        }
    }

    /// When a sleep has to end at the latest.
    #[must_use]
    pub fn sleep_until(&self) -> Option<Instant> {
        self.worker.as_ref().and_then(|worker| worker.sleep_until())
    }

    /// To be called after a sleep that was prepared.
    pub fn awake(&mut self) {
        if let Some(worker) = &mut self.worker {
            worker.awake();
        }
    }

    /// Sleeps until there is something to do for the queue, or until `deadline`. Not at all if there
    /// is something to do as far as `also` knows; what makes that change later has to
    /// [nudge](AsyncQueue::nudge) the queue.
    pub fn sleep(&mut self, deadline: Option<Instant>, also: impl FnOnce() -> bool) {
        if let Some(worker) = &mut self.worker {
            worker.sleep(self.queue.inner(), deadline, also);
        }
    }

    /// Whether the queue does not work any more: there is nothing left to drive.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.worker.is_none()
    }

    /// To be called when [`AsyncQueue::hang_up`] has hung up: if the device has gone, this fails
    /// everything that is under way.
    pub fn check_gone(&mut self) {
        if let Some(worker) = &mut self.worker {
            worker.check_gone(self.queue.inner());
        }
    }

    /// Takes back what the event was signalled for so far. For those who can watch it by its level
    /// only, after each sleep.
    pub fn drain_event(&mut self) {
        self.queue.inner().event().drain();
    }

    fn give_back(&mut self) {
        if let Some(worker) = self.worker.take() {
            self.queue.inner().park(worker);
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("outstanding", &self.outstanding()).finish_non_exhaustive()
    }
}
