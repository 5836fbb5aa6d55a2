//! A seam: what may serve the queues of a controller in place of the worker's own code.
//!
//! Fault injection is what fills it. Where nothing does, a batch of commands costs one look at an
//! empty option.

use super::observer::Observer;
use super::queue_set::QueueSet;

/// Serves the queues of one controller on one worker instead. `sq` is a submission queue's index.
pub(crate) trait QueueOverride: Send {
    /// Fetches and starts commands of `sq`, whose tail is `tail`. How many.
    fn fetch(
        &mut self,
        set: &mut QueueSet,
        sq: usize,
        tail: u16,
        trace: &mut Option<Observer>,
    ) -> u32;

    /// Completes what the disks have ended. Whether there was anything, or is more to do at once.
    fn reap(&mut self, set: &mut QueueSet) -> bool;

    /// Does what is due by now. Called in every pass while [`is_waiting`](Self::is_waiting).
    fn tick(&mut self, set: &mut QueueSet);

    /// Whether something waits for its time.
    fn is_waiting(&self) -> bool;

    /// An Abort: whether it was for a command that is kept here, which has ended then.
    fn abort(&mut self, set: &mut QueueSet, sq: usize, cid: u16) -> bool;

    /// A submission queue is being deleted: what is kept of it ends without a completion.
    fn delete_sq(&mut self, set: &mut QueueSet, sq: usize);

    /// The controller is reset.
    fn reset(&mut self);
}
