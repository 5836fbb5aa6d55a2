//! What can be done with a disk.

use crate::buffers::Lease;
use crate::device::BlockDevice;
use crate::error::BlockError;
use crate::locks::RangeGuard;
use crate::stream::Parts;
use shadowbell_driver::{Buffer, Command, Namespace, RequestError};
use shadowbell_spec::Status;
use shadowbell_spec::nvm::DsmRange;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// Bytes that are compared at a time, out of a buffer.
const COMPARE_STEP: usize = 512;

/// How bytes become zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zeroes {
    /// The blocks may be given back to the storage below.
    pub deallocate: bool,
    /// They are durable when the request completes.
    pub fua: bool,
    /// Only if the controller does it by itself ([`Geometry::write_zeroes`](crate::Geometry)): fail
    /// with [`BlockError::Unsupported`], before anything is written, rather than write zeroes.
    pub fast_only: bool,
}

impl BlockDevice {
    /// Fills `into` with the bytes from `offset` on.
    ///
    /// # Errors
    /// [`BlockError`].
    pub async fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        let range = self.range(offset, into.len() as u64)?;
        self.stream(range.start, range.end, None, &mut Read { offset, into }).await
    }

    /// Writes the bytes of `from` from `offset` on; with `fua`, they are durable when this completes.
    ///
    /// # Errors
    /// [`BlockError`]. Some of the bytes may be written then.
    pub async fn write(&self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        let range = self.change(offset, from.len() as u64)?;
        let Some(guard) = self.lock(&range).await else { return Ok(()) };
        let data = |at: u64| from.get((at - offset) as usize..).unwrap_or_default();
        for edge in range.edges() {
            self.modify(edge, data(edge.at), fua, &guard).await?;
        }
        let mut parts = Write { offset, from, fua };
        self.stream(range.first_whole, range.end_whole, Some(&guard), &mut parts).await
    }

    /// Makes `len` bytes from `offset` on zero.
    ///
    /// # Errors
    /// [`BlockError`]. Some of the bytes may be zero then.
    pub async fn write_zeroes(&self, offset: u64, len: u64, how: Zeroes) -> Result<(), BlockError> {
        let range = self.change(offset, len)?;
        let by_command = self.inner().zeroes.load(Ordering::Relaxed);
        if how.fast_only && !by_command {
            return Err(BlockError::Unsupported { command: "Write Zeroes" });
        }
        let Some(guard) = self.lock(&range).await else { return Ok(()) };
        let zeroes = [0; 4096];
        for edge in range.edges() {
            // A block may be longer than our zeroes, so its edge may come in parts.
            let mut edge = edge;
            while edge.len > 0 {
                let now = Edge { len: edge.len.min(zeroes.len()), ..edge };
                self.modify(now, &zeroes, how.fua, &guard).await?;
                edge = Edge { at: edge.at + now.len as u64, len: edge.len - now.len, ..edge };
            }
        }
        let (start, end) = (range.first_whole, range.end_whole);
        if by_command {
            let swept = self.sweep(start, end, &guard, |namespace, lba, blocks| {
                let command = namespace.write_zeroes(lba, blocks, how.deallocate)?;
                Ok(if how.fua { command.with_fua() } else { command })
            });
            match swept.await {
                Err(error) if is_refusal(&error) => {
                    self.forget_write_zeroes();
                    if how.fast_only {
                        return Err(BlockError::Unsupported { command: "Write Zeroes" });
                    }
                }
                outcome => return outcome,
            }
        }
        self.stream(start, end, Some(&guard), &mut Fill { fua: how.fua }).await
    }

    /// Tells the controller that nobody needs these `len` bytes any more. What they read as
    /// afterwards is the controller's choice; blocks that are not covered as a whole are left alone.
    ///
    /// # Errors
    /// [`BlockError::Unsupported`] if the controller has no such command, and others.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        let range = self.change(offset, len)?;
        if !self.geometry().discard {
            return Err(BlockError::Unsupported { command: "Dataset Management" });
        }
        if range.first_whole >= range.end_whole {
            return Ok(());
        }
        let guard =
            Arc::new(self.inner().locks.acquire(range.first_whole, range.end_whole, false).await);
        let namespace = self.namespace()?;
        let mut lba = namespace.blocks_in(range.first_whole)?;
        let mut left = namespace.blocks_in(range.end_whole - range.first_whole)?;
        while left > 0 {
            let blocks = u32::try_from(left).unwrap_or(u32::MAX);
            let part = DsmRange { attributes: 0, blocks, slba: lba };
            let mut lease = self.lane()?.small.take().await?;
            put(&mut lease, part.as_bytes())?;
            let command = namespace.deallocate(1)?;
            self.single(command, Some(lease), Some(Arc::clone(&guard))).await?;
            lba += u64::from(blocks);
            left -= u64::from(blocks);
        }
        Ok(())
    }

    /// Whether the bytes from `offset` on are those of `with`.
    ///
    /// # Errors
    /// [`BlockError`].
    pub async fn compare(&self, offset: u64, with: &[u8]) -> Result<bool, BlockError> {
        let range = self.range(offset, with.len() as u64)?;
        let by_command = self.geometry().compare && range.edges().next().is_none();
        let mut parts = Compare { offset, with, by_command, equal: true };
        match self.stream(range.start, range.end, None, &mut parts).await {
            Ok(()) => Ok(parts.equal),
            Err(error) if error.status().map(Status::code) == Some(Status::COMPARE_FAILURE) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Makes everything durable that was completed before, through any queue.
    ///
    /// # Errors
    /// [`BlockError`].
    pub async fn flush(&self) -> Result<(), BlockError> {
        let command = self.namespace()?.flush();
        self.single(command, None, None).await.map(drop)
    }

    /// The blocks that these bytes touch.
    pub(crate) fn range(&self, offset: u64, len: u64) -> Result<Range, BlockError> {
        let geometry = self.geometry();
        let size = geometry.bytes;
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(Range::of(offset, end, geometry.block_size.into())),
            _ => Err(BlockError::OutOfRange { offset, len, size }),
        }
    }

    /// The same for those that are to be changed.
    pub(crate) fn change(&self, offset: u64, len: u64) -> Result<Range, BlockError> {
        if self.geometry().read_only { Err(BlockError::ReadOnly) } else { self.range(offset, len) }
    }

    /// Waits until the range may be written; nothing if there is nothing in it.
    pub(crate) async fn lock(&self, range: &Range) -> Option<Arc<RangeGuard>> {
        if range.start == range.end {
            return None;
        }
        let alone = range.edges().next().is_some();
        Some(Arc::new(self.inner().locks.acquire(range.start, range.end, alone).await))
    }

    /// Changes a part of a block, which nobody else writes meanwhile.
    pub(crate) async fn modify(
        &self,
        edge: Edge,
        data: &[u8],
        fua: bool,
        guard: &Arc<RangeGuard>,
    ) -> Result<(), BlockError> {
        let lane = self.lane()?;
        let namespace = lane.disk.namespace();
        let lba = namespace.blocks_in(edge.block)?;
        let lease = lane.small.take().await?;
        let read = namespace.read(lba, 1)?;
        let lease = self.single(read, Some(lease), Some(Arc::clone(guard))).await?;
        let mut lease = lease.ok_or(BlockError::Buffer)?;
        let buffer = lease.buffer.as_mut().ok_or(BlockError::Buffer)?;
        let data = data.get(..edge.len).ok_or(BlockError::Buffer)?;
        if !buffer.copy_from((edge.at - edge.block) as usize, data) {
            return Err(BlockError::Buffer);
        }
        let write = namespace.write(lba, 1)?;
        let write = if fua { write.with_fua() } else { write };
        self.single(write, Some(lease), Some(Arc::clone(guard))).await.map(drop)
    }
}

/// A range of bytes, and the blocks that it touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// The first byte of the first block.
    start: u64,
    /// The byte after the last block.
    end: u64,
    /// The whole blocks in the range: its first byte, or where they end if there are none.
    pub(crate) first_whole: u64,
    pub(crate) end_whole: u64,
    block: u64,
    offset: u64,
    offset_end: u64,
}

/// A part of a block that is not the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Edge {
    /// The first byte of the block.
    block: u64,
    /// The first byte of the part.
    pub(crate) at: u64,
    /// How many bytes.
    pub(crate) len: usize,
}

impl Range {
    fn of(offset: u64, offset_end: u64, block: u64) -> Self {
        let down = |at: u64| at / block * block;
        // The end of the disk is a whole block, so this does not pass it.
        let up = |at: u64| at.div_ceil(block).saturating_mul(block);
        if offset == offset_end {
            let at = down(offset);
            return Self {
                start: at,
                end: at,
                first_whole: at,
                end_whole: at,
                block,
                offset: at,
                offset_end: at,
            };
        }
        let (start, end) = (down(offset), up(offset_end));
        let first_whole = up(offset);
        let end_whole = down(offset_end).max(first_whole);
        Self { start, end, first_whole, end_whole, block, offset, offset_end }
    }

    /// The parts of blocks at both ends.
    pub(crate) fn edges(&self) -> impl Iterator<Item = Edge> + use<> {
        let Self { start, block, offset, offset_end, first_whole, end_whole, .. } = *self;
        let edge = |block, from: u64, to: u64| Edge { block, at: from, len: (to - from) as usize };
        let head = (start < first_whole)
            .then(|| edge(start, offset, offset_end.min(start.saturating_add(block))));
        let tail = (offset_end > end_whole).then(|| edge(end_whole, end_whole, offset_end));
        head.into_iter().chain(tail)
    }
}

pub(crate) fn put(lease: &mut Lease, bytes: &[u8]) -> Result<(), BlockError> {
    let buffer = lease.buffer.as_mut().ok_or(BlockError::Buffer)?;
    if buffer.copy_from(0, bytes) { Ok(()) } else { Err(BlockError::Buffer) }
}

/// Whether the controller does not do this at all, or not that much at once.
pub(crate) fn is_refusal(error: &BlockError) -> bool {
    matches!(
        error.status().map(Status::code),
        Some(Status::INVALID_OPCODE | Status::INVALID_FIELD | Status::COMMAND_SIZE_LIMIT_EXCEEDED)
    )
}

/// Where the bytes from `at` to `at + len` and those from `offset` on, `count` of them, have some
/// in common: first byte in the former, first in the latter, how many.
fn overlap(at: u64, len: usize, offset: u64, count: usize) -> (usize, usize, usize) {
    let from = at.max(offset);
    let to = (at + len as u64).min(offset + count as u64).max(from);
    ((from - at) as usize, (from - offset) as usize, (to - from) as usize)
}

struct Read<'a> {
    offset: u64,
    into: &'a mut [u8],
}

impl Parts for Read<'_> {
    fn command(&self, ns: &Namespace, lba: u64, blocks: u32) -> Result<Command, RequestError> {
        ns.read(lba, blocks)
    }

    fn fill(&mut self, _: u64, _: usize, _: &mut Buffer) -> Result<(), BlockError> {
        Ok(())
    }

    fn drain(&mut self, at: u64, len: usize, buffer: &Buffer) -> Result<(), BlockError> {
        let (here, there, count) = overlap(at, len, self.offset, self.into.len());
        let into = self.into.get_mut(there..there + count).ok_or(BlockError::Buffer)?;
        if buffer.copy_to(here, into) { Ok(()) } else { Err(BlockError::Buffer) }
    }
}

/// Whole blocks.
pub(crate) struct Write<'a> {
    pub(crate) offset: u64,
    pub(crate) from: &'a [u8],
    pub(crate) fua: bool,
}

impl Parts for Write<'_> {
    fn command(&self, ns: &Namespace, lba: u64, blocks: u32) -> Result<Command, RequestError> {
        let command = ns.write(lba, blocks)?;
        Ok(if self.fua { command.with_fua() } else { command })
    }

    fn fill(&mut self, at: u64, len: usize, buffer: &mut Buffer) -> Result<(), BlockError> {
        let from = (at - self.offset) as usize;
        let data = self.from.get(from..from + len).ok_or(BlockError::Buffer)?;
        if buffer.copy_from(0, data) { Ok(()) } else { Err(BlockError::Buffer) }
    }

    fn drain(&mut self, _: u64, _: usize, _: &Buffer) -> Result<(), BlockError> {
        Ok(())
    }
}

/// Whole blocks of zeroes.
struct Fill {
    fua: bool,
}

impl Parts for Fill {
    fn command(&self, ns: &Namespace, lba: u64, blocks: u32) -> Result<Command, RequestError> {
        let command = ns.write(lba, blocks)?;
        Ok(if self.fua { command.with_fua() } else { command })
    }

    fn fill(&mut self, _: u64, _: usize, buffer: &mut Buffer) -> Result<(), BlockError> {
        buffer.fill(0);
        Ok(())
    }

    fn drain(&mut self, _: u64, _: usize, _: &Buffer) -> Result<(), BlockError> {
        Ok(())
    }
}

struct Compare<'a> {
    offset: u64,
    with: &'a [u8],
    by_command: bool,
    equal: bool,
}

impl Parts for Compare<'_> {
    fn command(&self, ns: &Namespace, lba: u64, blocks: u32) -> Result<Command, RequestError> {
        if self.by_command { ns.compare(lba, blocks) } else { ns.read(lba, blocks) }
    }

    fn fill(&mut self, at: u64, len: usize, buffer: &mut Buffer) -> Result<(), BlockError> {
        if !self.by_command {
            return Ok(());
        }
        let from = (at - self.offset) as usize;
        let data = self.with.get(from..from + len).ok_or(BlockError::Buffer)?;
        if buffer.copy_from(0, data) { Ok(()) } else { Err(BlockError::Buffer) }
    }

    fn drain(&mut self, at: u64, len: usize, buffer: &Buffer) -> Result<(), BlockError> {
        if self.by_command || !self.equal {
            return Ok(());
        }
        let (mut here, there, count) = overlap(at, len, self.offset, self.with.len());
        let with = self.with.get(there..there + count).ok_or(BlockError::Buffer)?;
        let mut bytes = [0; COMPARE_STEP];
        for part in with.chunks(COMPARE_STEP) {
            let bytes = bytes.get_mut(..part.len()).ok_or(BlockError::Buffer)?;
            if !buffer.copy_to(here, bytes) {
                return Err(BlockError::Buffer);
            }
            self.equal &= bytes == part;
            here += part.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_edges_where_they_do_not_cover_blocks() {
        let edges = |from, to| {
            let range = Range::of(from, to, 512);
            let edges = range.edges().map(|e| (e.block, e.at, e.len));
            (edges.collect::<Vec<_>>(), range.first_whole..range.end_whole)
        };
        assert_eq!(edges(0, 1024), (vec![], 0..1024));
        assert_eq!(edges(1, 2), (vec![(0, 1, 1)], 512..512));
        assert_eq!(edges(0, 2), (vec![(0, 0, 2)], 0..0).clone());
        assert_eq!(edges(511, 513), (vec![(0, 511, 1), (512, 512, 1)], 512..512));
        assert_eq!(edges(600, 2000), (vec![(512, 600, 424), (1536, 1536, 464)], 1024..1536));
        assert_eq!(edges(512, 2000), (vec![(1536, 1536, 464)], 512..1536));
        assert_eq!(edges(600, 1536), (vec![(512, 600, 424)], 1024..1536));
        assert_eq!(edges(700, 700).0, vec![]);
    }

    proptest::proptest! {
        #[test]
        fn edges_and_whole_blocks_are_the_range(from in 0u64..5000, len in 0u64..5000) {
            let range = Range::of(from, from + len, 512);
            let mut bytes: Vec<u64> = (range.first_whole..range.end_whole).collect();
            for edge in range.edges() {
                assert!(edge.len < 512 && edge.at - edge.block + edge.len as u64 <= 512);
                assert_eq!(edge.block % 512, 0);
                bytes.extend(edge.at..edge.at + edge.len as u64);
            }
            bytes.sort_unstable();
            assert_eq!(bytes, (from..from + len).collect::<Vec<_>>());
        }
    }
}
