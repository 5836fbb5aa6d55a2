//! Addresses and sizes of a queue pair.

use shadowbell_doorbell::RingSize;

/// Parameters of a queue pair for the commands that create it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLayout {
    pub(crate) qid: u16,
    pub(crate) sq: RingSize,
    pub(crate) sq_iova: u64,
    pub(crate) cq: RingSize,
    pub(crate) cq_iova: u64,
    /// True if the completion queue has interrupts, with the queue identifier as vector.
    pub(crate) interrupts: bool,
}

impl QueueLayout {
    /// Number of submission queue entries, 0's based.
    pub(crate) fn sq_size0(&self) -> u16 {
        zero_based(self.sq)
    }

    /// Number of completion queue entries, 0's based.
    pub(crate) fn cq_size0(&self) -> u16 {
        zero_based(self.cq)
    }
}

fn zero_based(size: RingSize) -> u16 {
    u16::try_from(size.entries() - 1).unwrap_or(u16::MAX)
}
