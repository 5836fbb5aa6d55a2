//! Disk operations other than copy.

use crate::buffers::Lease;
use crate::error::BlockError;
use crate::locks::RangeGuard;
use crate::range::Edge;
use crate::shared::Handle;
use crate::stream::{Parts, run_without_data, transfer};
use shadowbell_driver::{Buffer, Command, Namespace, RequestError};
use shadowbell_spec::Status;
use shadowbell_spec::nvm::DsmRange;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// Number of bytes that are copied from the buffer and compared at a time.
const COMPARE_STEP: usize = 512;

/// Options of a request to zero bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zeroes {
    /// The controller may deallocate the blocks.
    pub deallocate: bool,
    /// The zeroes are durable when the request completes (Force Unit Access).
    pub fua: bool,
    /// Only if the controller has Write Zeroes ([`Geometry::write_zeroes`](crate::Geometry)):
    /// otherwise the request fails with [`BlockError::Unsupported`] before anything is written.
    pub fast_only: bool,
}

pub(crate) async fn read(handle: &Handle, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
    let range = handle.range(offset, into.len() as u64)?;
    transfer(handle, range.start, range.end, None, &mut Read { offset, into }).await
}

pub(crate) async fn write(
    handle: &Handle,
    offset: u64,
    from: &[u8],
    fua: bool,
) -> Result<(), BlockError> {
    let range = handle.range_to_change(offset, from.len() as u64)?;
    let Some(guard) = handle.lock(&range).await else { return Ok(()) };
    let data = |at: u64| from.get((at - offset) as usize..).unwrap_or_default();
    for edge in range.edges() {
        modify(handle, edge, data(edge.at), fua, &guard).await?;
    }
    let mut parts = Write { offset, from, fua };
    transfer(handle, range.first_whole, range.end_whole, Some(&guard), &mut parts).await
}

pub(crate) async fn write_zeroes(
    handle: &Handle,
    offset: u64,
    len: u64,
    how: Zeroes,
) -> Result<(), BlockError> {
    let range = handle.range_to_change(offset, len)?;
    let by_command = handle.shared.write_zeroes.load(Ordering::Relaxed);
    if how.fast_only && !by_command {
        return Err(BlockError::Unsupported { command: "Write Zeroes" });
    }
    let Some(guard) = handle.lock(&range).await else { return Ok(()) };
    let zeroes = [0; 4096];
    for edge in range.edges() {
        // A block may be longer than `zeroes`, so a partial block is zeroed in several steps.
        let mut edge = edge;
        while edge.len > 0 {
            let now = Edge { len: edge.len.min(zeroes.len()), ..edge };
            modify(handle, now, &zeroes, how.fua, &guard).await?;
            edge = Edge { at: edge.at + now.len as u64, len: edge.len - now.len, ..edge };
        }
    }
    let (start, end) = (range.first_whole, range.end_whole);
    if by_command {
        let zeroed = run_without_data(handle, start, end, &guard, |namespace, lba, blocks| {
            let command = namespace.write_zeroes(lba, blocks, how.deallocate)?;
            Ok(if how.fua { command.with_fua() } else { command })
        });
        match zeroed.await {
            Err(error) if is_refusal(&error) => {
                handle.forget_write_zeroes();
                if how.fast_only {
                    return Err(BlockError::Unsupported { command: "Write Zeroes" });
                }
            }
            outcome => return outcome,
        }
    }
    transfer(handle, start, end, Some(&guard), &mut Fill { fua: how.fua }).await
}

pub(crate) async fn discard(handle: &Handle, offset: u64, len: u64) -> Result<(), BlockError> {
    let range = handle.range_to_change(offset, len)?;
    if !handle.geometry().discard {
        return Err(BlockError::Unsupported { command: "Dataset Management" });
    }
    if range.first_whole >= range.end_whole {
        return Ok(());
    }
    let guard =
        Arc::new(handle.shared.locks.acquire(range.first_whole, range.end_whole, false).await);
    let namespace = handle.namespace()?;
    let mut lba = namespace.blocks_in(range.first_whole)?;
    let mut left = namespace.blocks_in(range.end_whole - range.first_whole)?;
    while left > 0 {
        let blocks = u32::try_from(left).unwrap_or(u32::MAX);
        let part = DsmRange { attributes: 0, blocks, slba: lba };
        let mut lease = handle.queue()?.small.take().await?;
        fill_buffer(&mut lease, part.as_bytes())?;
        let command = namespace.deallocate(1)?;
        handle.command(command, Some(lease), Some(Arc::clone(&guard)))?.await?;
        lba += u64::from(blocks);
        left -= u64::from(blocks);
    }
    Ok(())
}

pub(crate) async fn compare(handle: &Handle, offset: u64, with: &[u8]) -> Result<bool, BlockError> {
    let range = handle.range(offset, with.len() as u64)?;
    let by_command = handle.geometry().compare && range.edges().next().is_none();
    let mut parts = Compare { offset, with, by_command, equal: true };
    match transfer(handle, range.start, range.end, None, &mut parts).await {
        Ok(()) => Ok(parts.equal),
        Err(error) if error.status().map(Status::code) == Some(Status::COMPARE_FAILURE) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

pub(crate) async fn flush(handle: &Handle) -> Result<(), BlockError> {
    let command = handle.namespace()?.flush();
    handle.command(command, None, None)?.await.map(drop)
}

/// Read-modify-write of a partial block, which the caller has locked exclusively.
pub(crate) async fn modify(
    handle: &Handle,
    edge: Edge,
    data: &[u8],
    fua: bool,
    guard: &Arc<RangeGuard>,
) -> Result<(), BlockError> {
    let queue = handle.queue()?;
    let namespace = queue.disk.namespace();
    let lba = namespace.blocks_in(edge.block)?;
    let lease = queue.small.take().await?;
    let read = namespace.read(lba, 1)?;
    let lease = handle.command(read, Some(lease), Some(Arc::clone(guard)))?.await?;
    let mut lease = lease.ok_or(BlockError::Buffer)?;
    let buffer = lease.buffer.as_mut().ok_or(BlockError::Buffer)?;
    let data = data.get(..edge.len).ok_or(BlockError::Buffer)?;
    if !buffer.copy_from((edge.at - edge.block) as usize, data) {
        return Err(BlockError::Buffer);
    }
    let write = namespace.write(lba, 1)?;
    let write = if fua { write.with_fua() } else { write };
    handle.command(write, Some(lease), Some(Arc::clone(guard)))?.await.map(drop)
}

/// Copies `bytes` to the beginning of the buffer.
pub(crate) fn fill_buffer(lease: &mut Lease, bytes: &[u8]) -> Result<(), BlockError> {
    let buffer = lease.buffer.as_mut().ok_or(BlockError::Buffer)?;
    if buffer.copy_from(0, bytes) { Ok(()) } else { Err(BlockError::Buffer) }
}

/// True if the controller does not support the command, or not with this size.
pub(crate) fn is_refusal(error: &BlockError) -> bool {
    matches!(
        error.status().map(Status::code),
        Some(Status::INVALID_OPCODE | Status::INVALID_FIELD | Status::COMMAND_SIZE_LIMIT_EXCEEDED)
    )
}

/// Intersection of the `len` bytes at `at` and the `count` bytes at `offset`: its start relative to
/// `at`, its start relative to `offset`, and its length.
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

/// Write of whole blocks.
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

/// Write of zeroes to whole blocks.
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
