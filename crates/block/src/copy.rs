//! Copy of byte ranges, by the controller's Copy command or by reading and writing.

use crate::buffers::Lease;
use crate::error::BlockError;
use crate::in_flight::InFlight;
use crate::locks::RangeGuard;
use crate::operations::{Write, fill_buffer, is_refusal, modify, read};
use crate::range::Edge;
use crate::shared::Handle;
use crate::stream::{MAX_BLOCKS, Window, take_buffer, transfer};
use shadowbell_driver::{Command, CopyLimits};
use shadowbell_spec::nvm::CopyRange;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// A copy, and the direction that overlapping source and destination require.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CopyOrder {
    from: u64,
    to: u64,
    len: u64,
    /// True to copy the last bytes first, because the destination begins inside of the source.
    backward: bool,
    /// Maximum number of bytes that writes may be ahead of reads: the distance of source and
    /// destination if they overlap, otherwise no limit.
    distance: u64,
}

impl CopyOrder {
    fn of(from: u64, to: u64, len: u64) -> Self {
        let apart = from.abs_diff(to);
        let overlaps = apart < len;
        let distance = if overlaps { apart } else { u64::MAX };
        Self { from, to, len, backward: overlaps && to > from, distance }
    }

    /// The part of this copy that writes the bytes from `start` to `end`.
    fn part(self, start: u64, end: u64) -> Self {
        let from = start - self.to + self.from;
        Self { from, to: start, len: end.saturating_sub(start), ..self }
    }

    /// Source and destination offsets of the `len` bytes that are copied after the first `done`.
    fn at(self, done: u64, len: u64) -> (u64, u64) {
        let skip = if self.backward { self.len - done - len } else { done };
        (self.from + skip, self.to + skip)
    }
}

pub(crate) async fn copy(handle: &Handle, from: u64, to: u64, len: u64) -> Result<(), BlockError> {
    handle.range(from, len)?;
    let range = handle.range_to_change(to, len)?;
    if from == to {
        return Ok(());
    }
    let Some(guard) = handle.lock(&range).await else { return Ok(()) };
    let order = CopyOrder::of(from, to, len);
    let whole = order.part(range.first_whole, range.end_whole);
    // Partial blocks at both ends are copied in the same direction as the whole blocks.
    let before = |edge: &Edge| (edge.at < range.first_whole) != order.backward;
    for edge in range.edges().filter(before) {
        copy_edge(handle, order, edge, &guard).await?;
    }
    copy_whole(handle, whole, &guard).await?;
    for edge in range.edges().filter(|edge| !before(edge)) {
        copy_edge(handle, order, edge, &guard).await?;
    }
    Ok(())
}

async fn copy_edge(
    handle: &Handle,
    order: CopyOrder,
    edge: Edge,
    guard: &Arc<RangeGuard>,
) -> Result<(), BlockError> {
    let mut bytes = vec![0; edge.len];
    read(handle, edge.at - order.to + order.from, &mut bytes).await?;
    modify(handle, edge, &bytes, false, guard).await
}

async fn copy_whole(
    handle: &Handle,
    order: CopyOrder,
    guard: &Arc<RangeGuard>,
) -> Result<(), BlockError> {
    let mut done = 0;
    if let Some(limits) = copies_itself(handle, order) {
        let (copied, outcome) = copy_by_command(handle, order, limits, guard).await;
        match outcome {
            Err(error) if is_refusal(&error) => handle.forget_copy(),
            outcome => outcome?,
        }
        done = copied;
    }
    copy_by_hand(handle, order, done, guard).await
}

/// Limits of Copy commands for this copy; `None` if it must be done by reading and writing.
fn copies_itself(handle: &Handle, order: CopyOrder) -> Option<CopyLimits> {
    if !handle.shared.copy.load(Ordering::Relaxed) || order.len == 0 {
        return None;
    }
    let queue = handle.queue().ok()?;
    let block = u64::from(handle.geometry().block_size);
    // With overlap, a command copies no more than the distance. If the distance is small, reading
    // and writing needs fewer commands.
    let worth_it = order.distance >= queue.large.size() as u64;
    let limits = handle.namespace().ok()?.copy_limits()?;
    (order.from.is_multiple_of(block) && worth_it).then_some(CopyLimits {
        // The source ranges must fit into a small buffer.
        ranges: limits.ranges.min(queue.small.size() / size_of::<CopyRange>()),
        ..limits
    })
}

/// Copies whole blocks by Copy commands, several in flight. Returns when no command is in flight:
/// the number of bytes that were copied in the order of `order`, and the first failure.
async fn copy_by_command(
    handle: &Handle,
    order: CopyOrder,
    limits: CopyLimits,
    guard: &Arc<RangeGuard>,
) -> (u64, Result<(), BlockError>) {
    let block = u64::from(handle.geometry().block_size);
    let most = u64::from(limits.most()).min(MAX_BLOCKS) * block;
    let step = most.min(order.distance / block * block).max(block);
    let mut window = Window::new(handle.shared.window);
    let (mut done, mut next) = (0, 0);
    loop {
        while window.has_room() && next < order.len {
            let end = order.len.min(next + step);
            // The next command must not overwrite the source of a command in flight.
            if end - done > order.distance {
                break;
            }
            let lease = match copy_buffer(handle, window.is_empty()).await {
                Ok(Some(lease)) => lease,
                Ok(None) => break,
                Err(error) => {
                    window.record(Err(error));
                    break;
                }
            };
            let (places, len) = (order.at(next, end - next), end - next);
            window.begin(end, copy_command(handle, places, len, limits, lease, guard)).await;
            next = end;
        }
        let Some((end, outcome)) = window.oldest().await else { break };
        if window.outcome.is_ok() && outcome.is_ok() {
            done = end;
        }
        window.record(outcome.map(drop));
    }
    (done, window.outcome)
}

/// Takes a buffer for source ranges.
async fn copy_buffer(handle: &Handle, first: bool) -> Result<Option<Lease>, BlockError> {
    take_buffer(&handle.queue()?.small, first).await
}

fn copy_command(
    handle: &Handle,
    (from, to): (u64, u64),
    len: u64,
    limits: CopyLimits,
    mut lease: Lease,
    guard: &Arc<RangeGuard>,
) -> Result<InFlight, BlockError> {
    let namespace = handle.namespace()?;
    // Cannot saturate: `len` is within `limits`, which have 32 bits.
    let blocks = u32::try_from(namespace.blocks_in(len)?).unwrap_or(u32::MAX);
    let sources: Vec<CopyRange> = limits.split(namespace.blocks_in(from)?, blocks).collect();
    fill_buffer(&mut lease, sources.as_bytes())?;
    let command: Command = namespace.copy(namespace.blocks_in(to)?, &sources)?;
    handle.command(command, Some(lease), Some(Arc::clone(guard)))
}

/// Copies whole blocks by reading and writing, after the first `done` bytes of `order`.
async fn copy_by_hand(
    handle: &Handle,
    order: CopyOrder,
    mut done: u64,
    guard: &Arc<RangeGuard>,
) -> Result<(), BlockError> {
    if done >= order.len {
        return Ok(());
    }
    // A piece is the amount that can be in flight at once. A piece is read before it is written.
    let piece = handle.queue()?.large.size().saturating_mul(handle.shared.window) as u64;
    let mut memory = vec![0; usize::try_from(piece.min(order.len - done)).unwrap_or(0)];
    while done < order.len {
        let len = piece.min(order.len - done);
        let (from, to) = order.at(done, len);
        let data = memory.get_mut(..len as usize).ok_or(BlockError::Buffer)?;
        read(handle, from, data).await?;
        let mut parts = Write { offset: to, from: data, fua: false };
        transfer(handle, to, to + len, Some(guard), &mut parts).await?;
        done += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_is_copied_in_the_order_that_reads_before_it_writes() {
        let order = |from, to, len| {
            let CopyOrder { backward, distance, .. } = CopyOrder::of(from, to, len);
            (backward, distance)
        };
        assert_eq!(order(0, 1000, 1000), (false, u64::MAX));
        assert_eq!(order(1000, 0, 1000), (false, u64::MAX));
        assert_eq!(order(0, 999, 1000), (true, 999));
        assert_eq!(order(999, 0, 1000), (false, 999));
        assert_eq!(order(0, 1, 1000), (true, 1));
    }

    #[test]
    fn parts_keep_the_distance() {
        let part = CopyOrder::of(100, 1000, 50).part(1010, 1030);
        assert_eq!((part.from, part.to, part.len), (110, 1010, 20));
        assert_eq!((part.at(0, 5), part.at(15, 5)), ((110, 1010), (125, 1025)));
        let part = CopyOrder::of(980, 1000, 50).part(1010, 1030);
        assert_eq!((part.at(0, 5), part.at(15, 5)), ((1005, 1025), (990, 1010)));
        // No whole block between two partial blocks.
        assert_eq!(CopyOrder::of(100, 1000, 5).part(1024, 1024).len, 0);
    }

    proptest::proptest! {
        /// Copying piece by piece in this order has the same result as copying all at once.
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
