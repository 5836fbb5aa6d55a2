//! Memory of queues, one region that is shared with the device once; addresses and sizes.

use super::core::{Core, CoreConfig};
use super::doorbell::Doorbell;
use crate::dma::{DmaError, Region};
use crate::prp::{PrpLists, list_bytes};
use crate::transport::Transport;
use shadowbell_doorbell::RingSize;
use shadowbell_memory::{MapError, Ring, SharedBytes};
use shadowbell_spec::{Cqe, Sqe};
use std::sync::Arc;

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairShape {
    pub(crate) sq: RingSize,
    pub(crate) cq: RingSize,
    pub(crate) max_transfer: u64,
    /// Memory page size in use (CC.MPS), in bytes.
    pub(crate) page: u64,
}

impl PairShape {
    fn sq_bytes(self) -> u64 {
        (u64::from(self.sq.entries()) * Sqe::SIZE as u64).next_multiple_of(self.page)
    }

    fn cq_bytes(self) -> u64 {
        (u64::from(self.cq.entries()) * Cqe::SIZE as u64).next_multiple_of(self.page)
    }

    fn bytes(self) -> u64 {
        let slots = u64::from(self.sq.entries().min(self.cq.entries()) - 1);
        let lists = list_bytes(self.max_transfer, self.page) * slots;
        self.sq_bytes() + self.cq_bytes() + lists.next_multiple_of(self.page)
    }
}

/// Memory for several queue pairs of one shape, and for additional pages.
pub(crate) struct QueueMemory {
    region: Arc<Region>,
    /// Offset of the first memory page in the region. The region itself is aligned to 4096 bytes
    /// only.
    first: u64,
    shape: PairShape,
    pages: u64,
}

impl QueueMemory {
    pub(crate) fn new(
        transport: &Arc<dyn Transport>,
        shape: PairShape,
        pairs: u64,
        pages: u64,
    ) -> Result<Self, DmaError> {
        let len = shape
            .bytes()
            .checked_mul(pairs)
            .and_then(|bytes| bytes.checked_add((pages + 1) * shape.page))
            .ok_or(DmaError::Map(MapError::Shape {
                len: u64::MAX,
                offset: 0,
                why: "the queues do not fit the address space",
            }))?;
        let region = Region::new(transport, "shadowbell-queues", len)?;
        let first = region.iova().next_multiple_of(shape.page) - region.iova();
        Ok(Self { region, first, shape, pages })
    }

    fn piece(&self, offset: u64, len: u64) -> Option<(SharedBytes, u64)> {
        let offset = self.first + offset;
        let bytes =
            self.region.bytes().slice(usize::try_from(offset).ok()?, usize::try_from(len).ok()?)?;
        Some((bytes, self.region.iova() + offset))
    }

    /// The zeroed additional page `index`, with its IOVA.
    pub(crate) fn page(&self, index: u64) -> Option<(SharedBytes, u64)> {
        if index >= self.pages {
            return None;
        }
        let (bytes, iova) = self.piece(index * self.shape.page, self.shape.page)?;
        bytes.fill(0, bytes.len(), 0)?;
        Some((bytes, iova))
    }

    /// Sizes of the submission queue and completion queue of a pair with at most `sq` submission
    /// queue entries.
    pub(crate) fn sizes(&self, sq: RingSize) -> [RingSize; 2] {
        let shape = self.shape;
        [if sq.entries() < shape.sq.entries() { sq } else { shape.sq }, shape.cq]
    }

    /// Zeroes the memory of pair `index` and builds queue pair `qid` in it, with at most `sq`
    /// entries. Neither the driver nor the controller may still use the memory of pair `index`.
    pub(crate) fn pair(
        &self,
        index: u64,
        qid: u16,
        sq: RingSize,
        doorbells: [Doorbell; 2],
    ) -> Option<(Core, QueueLayout)> {
        let shape = self.shape;
        let start = self.pages * shape.page + index.checked_mul(shape.bytes())?;
        let (sq_bytes, sq_iova) = self.piece(start, shape.sq_bytes())?;
        let (cq_bytes, cq_iova) = self.piece(start + shape.sq_bytes(), shape.cq_bytes())?;
        let rings = shape.sq_bytes() + shape.cq_bytes();
        let (lists, lists_iova) = self.piece(start + rings, shape.bytes() - rings)?;
        // The memory is zeroed, because a stale entry of an earlier completion queue could look
        // like a new one.
        cq_bytes.fill(0, cq_bytes.len(), 0)?;
        sq_bytes.fill(0, sq_bytes.len(), 0)?;
        let [sq, _] = self.sizes(sq);
        let slots = sq.entries().min(shape.cq.entries()) as usize - 1;
        let [sq_doorbell, cq_doorbell] = doorbells;
        let core = Core::new(CoreConfig {
            qid,
            sq: Ring::over(&sq_bytes, sq.entries())?,
            sq_size: sq,
            cq: Ring::over(&cq_bytes, shape.cq.entries())?,
            cq_size: shape.cq,
            sq_doorbell,
            cq_doorbell,
            lists: PrpLists::new(lists, lists_iova, slots, shape.max_transfer, shape.page)?,
            max_transfer: shape.max_transfer,
        });
        let layout = QueueLayout { qid, sq, sq_iova, cq: shape.cq, cq_iova, interrupts: false };
        Some((core, layout))
    }

    /// Leaks the memory, because the controller may still use it. Returns its size in bytes.
    pub(crate) fn leak(&self) -> u64 {
        std::mem::forget(Arc::clone(&self.region));
        self.region.len()
    }
}

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
