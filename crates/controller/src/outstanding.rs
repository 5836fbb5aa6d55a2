//! Outstanding commands of all controllers of an I/O thread at one time.
//!
//! A sample is requested by a message, which the thread answers between two passes over its queues.
//! So a sample costs a few hundred instructions of the thread, and a command costs none.

use shadowbell_memory::ThreadUsage;
use std::sync::mpsc::Sender;
use std::time::Instant;

/// Outstanding commands of a controller on one I/O thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outstanding {
    /// [Number](crate::Controller::number) of the controller.
    pub controller: u32,
    /// Commands in submission queues that are not fetched.
    pub queued: u32,
    /// Part of `queued` that cannot be fetched now: the completion queue has no room, or an
    /// in-flight limit of the controller is reached.
    pub held_back: u32,
    /// Commands that are fetched and not completed.
    pub in_flight: u32,
    /// Maximum number of commands that the submission queues can hold.
    pub capacity: u32,
    /// Requests in flight at the disk of each namespace: NSID and number. Disks without requests
    /// are left out.
    pub requests: Vec<(u32, u64)>,
}

/// Sample of an I/O thread.
#[derive(Clone, Debug)]
pub struct ThreadSample {
    /// Number of the I/O thread.
    pub worker: usize,
    /// Time at which the sample was requested.
    pub requested: Instant,
    /// Time at which the thread answered.
    pub answered: Instant,
    /// Resource usage of the thread so far.
    pub usage: ThreadUsage,
    /// Controllers that the thread polls, in no particular order.
    pub controllers: Vec<Outstanding>,
}

/// Request for a sample of an I/O thread.
pub(crate) struct SampleRequest {
    requested: Instant,
    answer: Sender<ThreadSample>,
}

impl SampleRequest {
    /// Creates a request that is answered through the channel.
    pub(crate) fn new(answer: &Sender<ThreadSample>) -> Self {
        Self { requested: Instant::now(), answer: answer.clone() }
    }

    /// Answers as the I/O thread `worker`.
    pub(crate) fn answer(&self, worker: usize, controllers: Vec<Outstanding>) {
        let (requested, answered) = (self.requested, Instant::now());
        let usage = ThreadUsage::now();
        let sample = ThreadSample { worker, requested, answered, usage, controllers };
        // The receiver may have ended.
        let _ = self.answer.send(sample);
    }
}
