//! Where a queue is in the host's memory.

use crate::shared::MAX_QUEUES;
use shadowbell_doorbell::RingSize;

/// Where the entries of a queue are, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueLayout {
    pub(crate) qid: u16,
    pub(crate) iova: u64,
    pub(crate) size: RingSize,
}

impl QueueLayout {
    /// The layout of a queue that was written down, if it is one.
    pub(crate) fn restore(qid: u16, iova: u64, entries: u32) -> Option<Self> {
        let is_possible = usize::from(qid) < MAX_QUEUES;
        is_possible.then_some(Self { qid, iova, size: RingSize::new(entries)? })
    }
}
