//! Counters of a queue pair: plain integers, owned by its thread.

/// Counters of one queue pair since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStats {
    /// Commands submitted.
    pub submitted: u64,
    /// Commands completed.
    pub completed: u64,
    /// Publications of the submission queue tail.
    pub batches: u64,
    /// Register writes of submission queue tail doorbells (trapped).
    pub sq_doorbell_mmio_writes: u64,
    /// Register writes of completion queue head doorbells (trapped).
    pub cq_doorbell_mmio_writes: u64,
    /// Doorbell updates of both kinds that needed no register write.
    pub mmio_saved: u64,
    /// Polls of the completion queue, with or without a completion.
    pub polls: u64,
    /// Polls that found no completion.
    pub empty_polls: u64,
    /// Sleeps that ended with an interrupt or a signal of another thread.
    pub wakeups: u64,
    /// Sleeps of any outcome.
    pub sleeps: u64,
    /// Completion queue entries with a command identifier that is unknown, or that was completed
    /// before. The driver ignores these entries.
    pub unknown_completions: u64,
    /// Completion queue entries with an impossible submission queue identifier, and batches whose
    /// last entry has an impossible submission queue head. The fields are ignored.
    pub bad_sq_heads: u64,
    /// Commands that did not complete within [`Timeouts::io`](crate::Timeouts::io). Each submission
    /// of a command counts.
    pub late: u64,
    /// Submissions of commands after the first one.
    pub repeated: u64,
    /// Commands that the driver ended with Command Aborted By Host. Included in `completed`.
    pub ended: u64,
}

impl QueueStats {
    /// The number of register writes of doorbells.
    #[must_use]
    pub fn doorbell_mmio_writes(&self) -> u64 {
        self.sq_doorbell_mmio_writes + self.cq_doorbell_mmio_writes
    }

    /// The number of sleeps that ended with an interrupt or a signal of another thread.
    #[must_use]
    pub fn interrupts_waited(&self) -> u64 {
        self.wakeups
    }
}
