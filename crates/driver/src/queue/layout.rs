//! Where the queues of a pair lie, and how long they are.

use shadowbell_doorbell::RingSize;

/// What the controller is given of a queue pair when it is created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLayout {
    pub(crate) qid: u16,
    pub(crate) sq: RingSize,
    pub(crate) sq_iova: u64,
    pub(crate) cq: RingSize,
    pub(crate) cq_iova: u64,
    /// Whether the completion queue interrupts, with the vector of its identifier.
    pub(crate) interrupts: bool,
}

impl QueueLayout {
    /// Entries of the submission queue, 0's based.
    pub(crate) fn sq_size0(&self) -> u16 {
        zero_based(self.sq)
    }

    /// Entries of the completion queue, 0's based.
    pub(crate) fn cq_size0(&self) -> u16 {
        zero_based(self.cq)
    }
}

fn zero_based(size: RingSize) -> u16 {
    u16::try_from(size.entries() - 1).unwrap_or(u16::MAX)
}
