//! Queue override: an alternative implementation that serves a controller's queues.
//!
//! Fault injection implements it. Without an override, a batch of commands costs a check of an
//! empty `Option`.

use super::observer::Observer;
use super::queue_set::QueueSet;

/// Serves the queues of one controller on one I/O thread. `sq` is a submission queue's index.
pub(crate) trait QueueOverride: Send {
    /// Fetches and starts commands of `sq`, whose tail is `tail`. Returns their number.
    fn fetch(
        &mut self,
        set: &mut QueueSet,
        sq: usize,
        tail: u16,
        trace: &mut Option<Observer>,
    ) -> u32;

    /// Completes commands that have ended. True if there were any, or if further work is possible
    /// at once.
    fn reap(&mut self, set: &mut QueueSet) -> bool;

    /// Executes delayed work that is due. Called in every pass while
    /// [`is_waiting`](Self::is_waiting).
    fn tick(&mut self, set: &mut QueueSet);

    /// True if delayed work waits for its time.
    fn is_waiting(&self) -> bool;

    /// Handles an Abort. True if the command was held by the override, which has aborted it.
    fn abort(&mut self, set: &mut QueueSet, sq: usize, cid: u16) -> bool;

    /// Deletes a submission queue: its held commands end without a completion.
    fn delete_sq(&mut self, set: &mut QueueSet, sq: usize);

    /// Resets the controller.
    fn reset(&mut self);
}
