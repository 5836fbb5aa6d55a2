//! Where a queue is in the host's memory.

use shadowbell_doorbell::RingSize;

/// Where the entries of a queue are, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueLayout {
    pub(crate) qid: u16,
    pub(crate) iova: u64,
    pub(crate) size: RingSize,
}
