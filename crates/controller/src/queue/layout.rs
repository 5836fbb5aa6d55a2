//! Location and size of a queue in the host's memory.

use crate::shared::MAX_QUEUES;
use shadowbell_doorbell::RingSize;

/// Location and size of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueLayout {
    pub(crate) qid: u16,
    pub(crate) iova: u64,
    pub(crate) size: RingSize,
}

impl QueueLayout {
    /// Layout of a saved queue; `None` if it is invalid.
    pub(crate) fn restore(qid: u16, iova: u64, entries: u32) -> Option<Self> {
        let is_possible = usize::from(qid) < MAX_QUEUES;
        is_possible.then_some(Self { qid, iova, size: RingSize::new(entries)? })
    }
}
