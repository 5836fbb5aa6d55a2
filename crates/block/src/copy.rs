//! Copy of byte ranges by reads and writes.

use crate::error::BlockError;
use crate::locks::RangeGuard;
use crate::operations::{copy_of, modify};
use crate::queue::BlockQueue;
use crate::range::Edge;
use crate::stream::transfer;
use shadowbell_disk::Op;
use std::sync::Arc;

/// Ranges of a copy, and its direction. If the ranges overlap, only one direction reads each source
/// byte before it is overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CopyOrder {
    from: u64,
    to: u64,
    len: u64,
    /// True to copy the last bytes first, because the destination begins inside of the source.
    backward: bool,
}

impl CopyOrder {
    fn of(from: u64, to: u64, len: u64) -> Self {
        Self { from, to, len, backward: from < to && to - from < len }
    }

    /// The part of this copy that writes the bytes from `start` to `end` of the destination.
    fn part(self, start: u64, end: u64) -> Self {
        let from = start - self.to + self.from;
        Self { from, to: start, len: end.saturating_sub(start), ..self }
    }

    /// Source and destination offsets of the next `len` bytes, after `done` bytes were copied.
    fn at(self, done: u64, len: u64) -> (u64, u64) {
        let skip = if self.backward { self.len - done - len } else { done };
        (self.from + skip, self.to + skip)
    }
}

impl BlockQueue {
    /// Copies `len` bytes from `from` to `to` by reading and writing. The ranges may overlap:
    /// afterwards the destination has the content that the source had before.
    ///
    /// A concurrent write to a block of the source takes effect either before or after the copy of
    /// that block, as with a read. Requests that overlap the destination are ordered as with a
    /// write.
    ///
    /// # Errors
    /// [`BlockError`]. Some of the bytes may have been copied; if source and destination overlap, a
    /// part of the source may be overwritten.
    pub async fn copy(&self, from: u64, to: u64, len: u64) -> Result<(), BlockError> {
        self.range(from, len)?;
        let range = self.range_to_change(to, len)?;
        if from == to {
            return Ok(());
        }
        let Some(guard) = self.lock(&range).await else { return Ok(()) };
        let order = CopyOrder::of(from, to, len);
        let whole = order.part(range.first_whole, range.end_whole);
        // The partial blocks at the ends are copied before or after the whole blocks, according to
        // the direction of the copy.
        let before = |edge: &Edge| (edge.at < range.first_whole) != order.backward;
        for edge in range.edges().filter(before) {
            copy_edge(self, order, edge, &guard).await?;
        }
        copy_blocks(self, whole, &guard).await?;
        for edge in range.edges().filter(|edge| !before(edge)) {
            copy_edge(self, order, edge, &guard).await?;
        }
        Ok(())
    }
}

async fn copy_edge(
    queue: &BlockQueue,
    order: CopyOrder,
    edge: Edge,
    guard: &Arc<RangeGuard>,
) -> Result<(), BlockError> {
    let mut bytes = vec![0; edge.len];
    queue.read(edge.at - order.to + order.from, &mut bytes).await?;
    modify(queue, edge, &bytes, false, guard).await
}

/// Copies whole blocks.
async fn copy_blocks(
    queue: &BlockQueue,
    order: CopyOrder,
    guard: &Arc<RangeGuard>,
) -> Result<(), BlockError> {
    // The copy proceeds in pieces: each is read completely, then written. A piece has the maximum
    // number of bytes that the queue may have in flight.
    let piece =
        queue.large().buffer_size().saturating_mul(queue.device().options.window.max(1)) as u64;
    let mut memory = vec![0; usize::try_from(piece.min(order.len)).unwrap_or(0)];
    let mut done = 0;
    while done < order.len {
        let len = piece.min(order.len - done);
        let (from, to) = order.at(done, len);
        let data = memory.get_mut(..len as usize).ok_or(BlockError::Buffer)?;
        queue.read(from, data).await?;
        let (write, mut copy) = (Op::Write { fua: false }, copy_of(data, to));
        transfer(queue, write, (to, to + len), Some(guard), &mut copy).await?;
        done += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_copies_go_backward_only_if_the_destination_is_inside_the_source() {
        let is_backward = |from, to, len| CopyOrder::of(from, to, len).backward;
        assert!(!is_backward(0, 1000, 1000));
        assert!(!is_backward(1000, 0, 1000));
        assert!(is_backward(0, 999, 1000));
        assert!(!is_backward(999, 0, 1000));
        assert!(is_backward(0, 1, 1000));
    }

    #[test]
    fn parts_keep_their_places() {
        let part = CopyOrder::of(100, 1000, 50).part(1010, 1030);
        assert_eq!((part.from, part.to, part.len), (110, 1010, 20));
        assert_eq!((part.at(0, 5), part.at(15, 5)), ((110, 1010), (125, 1025)));
        let part = CopyOrder::of(980, 1000, 50).part(1010, 1030);
        assert_eq!((part.at(0, 5), part.at(15, 5)), ((1005, 1025), (990, 1010)));
        // The destination consists of two partial blocks, so no bytes are left for the copy of
        // whole blocks.
        assert_eq!(CopyOrder::of(100, 1000, 5).part(1024, 1024).len, 0);
    }

    proptest::proptest! {
        /// A copy in pieces, in the order of `CopyOrder`, gives the same bytes as a copy of all
        /// bytes at once.
        #[test]
        fn the_order_is_right(
            from in 0usize..64,
            to in 0usize..64,
            len in 0usize..64,
            piece in 1u64..9,
        ) {
            let mut bytes: Vec<usize> = (0..128).collect();
            let mut expected = bytes.clone();
            expected.copy_within(from..from + len, to);
            let order = CopyOrder::of(from as u64, to as u64, len as u64);
            let mut done = 0;
            while done < order.len {
                let now = piece.min(order.len - done);
                let (from, to) = order.at(done, now);
                bytes.copy_within(from as usize..(from + now) as usize, to as usize);
                done += now;
            }
            assert_eq!(bytes, expected);
        }
    }
}
