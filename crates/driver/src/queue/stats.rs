//! What a queue pair did, in plain counters that belong to its thread.

/// Counters of one queue pair since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStats {
    /// Commands submitted.
    pub submitted: u64,
    /// Commands completed.
    pub completed: u64,
    /// Times that submissions were published.
    pub batches: u64,
    /// Submission queue tail doorbells that were written to the register (trapped).
    pub sq_doorbell_mmio_writes: u64,
    /// Completion queue head doorbells that were written to the register (trapped).
    pub cq_doorbell_mmio_writes: u64,
    /// Doorbells of either kind for which the shadow entry was enough.
    pub mmio_saved: u64,
    /// Looks at the completion queue, with or without a completion to be found there.
    pub polls: u64,
    /// Looks that found nothing.
    pub empty_polls: u64,
    /// Sleeps that an interrupt, or another thread's signal, ended.
    pub wakeups: u64,
    /// Sleeps in all.
    pub sleeps: u64,
    /// Completion queue entries for commands that are not outstanding: unknown or repeated command
    /// identifiers. They are ignored.
    pub unknown_completions: u64,
    /// Completion queue entries whose submission queue identifier can not be, and batches of them
    /// whose last head can not be. The fields are ignored.
    pub bad_sq_heads: u64,
    /// Commands that were not completed within [`Timeouts::io`](crate::Timeouts::io); each time
    /// that a command is submitted counts.
    pub late: u64,
    /// Times that a command was submitted again.
    pub repeated: u64,
    /// Commands that the driver ended, with Command Aborted By Host. They count as completed.
    pub ended: u64,
}

impl QueueStats {
    /// All doorbells that were written to a register.
    #[must_use]
    pub fn doorbell_mmio_writes(&self) -> u64 {
        self.sq_doorbell_mmio_writes + self.cq_doorbell_mmio_writes
    }

    /// Interrupts that ended a sleep.
    #[must_use]
    pub fn interrupts_waited(&self) -> u64 {
        self.wakeups
    }
}
