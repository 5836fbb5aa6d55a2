//! Disk operations other than copy.

use crate::buffers::Buffer;
use crate::engine::Data;
use crate::error::BlockError;
use crate::locks::RangeGuard;
use crate::queue::BlockQueue;
use crate::range::Edge;
use crate::stream::{buffer_of, run_without_data, transfer};
use shadowbell_disk::{DiskError, Op, Request};
use shadowbell_memory::Segments;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Maximum size in bytes of a disk request with segments of the caller. Longer transfers are split
/// into several requests. Every disk supports requests of this size.
const SEGMENTS_STEP: usize = 1 << 20;
/// Zeroes for partial blocks.
static ZEROES: [u8; 4096] = [0; 4096];

/// Options of a request to zero bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zeroes {
    /// The disk may deallocate the blocks.
    pub deallocate: bool,
    /// The zeroes are durable when the request completes (Force Unit Access).
    pub fua: bool,
    /// True to fail with [`BlockError::Unsupported`], before anything is written, if the disk
    /// cannot zero a range by itself ([`Geometry::write_zeroes`](crate::Geometry)).
    pub fast_only: bool,
}

impl BlockQueue {
    /// Reads the bytes from `offset` on into all of `into`.
    ///
    /// # Errors
    /// [`BlockError`].
    pub async fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        let range = self.range(offset, into.len() as u64)?;
        let mut copy = |at: u64, len: usize, buffer: &mut Buffer| {
            let (here, there, count) = overlap(at, len, offset, into.len());
            let into = into.get_mut(there..there + count).ok_or(BlockError::Buffer)?;
            fits(buffer.copy_to(here, into))
        };
        transfer(self, Op::Read, (range.start, range.end), None, &mut copy).await
    }

    /// Writes all of `from` to the bytes from `offset` on. With `fua`, the bytes are durable when
    /// the write completes.
    ///
    /// # Errors
    /// [`BlockError`]; some of the bytes may have been written.
    pub async fn write(&self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        let range = self.range_to_change(offset, from.len() as u64)?;
        let Some(guard) = self.lock(&range).await else { return Ok(()) };
        let data = |at: u64| from.get((at - offset) as usize..).unwrap_or_default();
        for edge in range.edges() {
            modify(self, edge, data(edge.at), fua, &guard).await?;
        }
        let blocks = (range.first_whole, range.end_whole);
        let mut copy = copy_of(from, offset);
        transfer(self, Op::Write { fua }, blocks, Some(&guard), &mut copy).await
    }

    /// Reads from `offset` on into all of `data`, a description of the caller's memory. Returns the
    /// segments.
    ///
    /// # Errors
    ///
    /// [`BlockError`]; some of the bytes may have been read.
    pub async fn read_to(&self, offset: u64, data: Segments) -> Result<Segments, BlockError> {
        let len = data.len();
        let range = self.range(offset, len as u64)?;
        if self.is_whole(offset, len as u64) {
            return run_with_segments(self, Op::Read, offset, data, None).await;
        }
        let mut copy = |at: u64, part: usize, buffer: &mut Buffer| {
            let (here, there, count) = overlap(at, part, offset, len);
            let bytes = buffer.bytes().ok_or(BlockError::Buffer)?;
            data.copy_from(there, bytes, here, count).ok_or(BlockError::Buffer)
        };
        transfer(self, Op::Read, (range.start, range.end), None, &mut copy).await?;
        Ok(data)
    }

    /// Writes all of `data`, a description of the caller's memory, to the bytes from `offset` on.
    /// Returns the segments. `fua` is as for [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// [`BlockError`]; some of the bytes may have been written.
    pub async fn write_from(
        &self,
        offset: u64,
        data: Segments,
        fua: bool,
    ) -> Result<Segments, BlockError> {
        let len = data.len();
        let range = self.range_to_change(offset, len as u64)?;
        let Some(guard) = self.lock(&range).await else { return Ok(data) };
        if self.is_whole(offset, len as u64) {
            return run_with_segments(self, Op::Write { fua }, offset, data, Some(guard)).await;
        }
        for edge in range.edges() {
            let mut bytes = vec![0; edge.len];
            data.read_into((edge.at - offset) as usize, &mut bytes).ok_or(BlockError::Buffer)?;
            modify(self, edge, &bytes, fua, &guard).await?;
        }
        let blocks = (range.first_whole, range.end_whole);
        let mut copy = |at: u64, len: usize, buffer: &mut Buffer| {
            let bytes = buffer.bytes().ok_or(BlockError::Buffer)?;
            data.copy_to((at - offset) as usize, bytes, 0, len).ok_or(BlockError::Buffer)
        };
        transfer(self, Op::Write { fua }, blocks, Some(&guard), &mut copy).await?;
        Ok(data)
    }

    /// Zeroes `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`BlockError`]; some of the bytes may have been zeroed.
    pub async fn write_zeroes(&self, offset: u64, len: u64, how: Zeroes) -> Result<(), BlockError> {
        let range = self.range_to_change(offset, len)?;
        let by_disk = self.device().write_zeroes.load(Ordering::Relaxed);
        if how.fast_only && !by_disk {
            return Err(BlockError::Unsupported { operation: "write zeroes" });
        }
        let Some(guard) = self.lock(&range).await else { return Ok(()) };
        for edge in range.edges() {
            // A block may be longer than `ZEROES`. Then a partial block is zeroed in several steps.
            let mut edge = edge;
            while edge.len > 0 {
                let now = Edge { len: edge.len.min(ZEROES.len()), ..edge };
                modify(self, now, &ZEROES, how.fua, &guard).await?;
                edge = Edge { at: edge.at + now.len as u64, len: edge.len - now.len, ..edge };
            }
        }
        let (start, end) = (range.first_whole, range.end_whole);
        if by_disk {
            let op = Op::WriteZeroes { deallocate: how.deallocate, fua: how.fua };
            match run_without_data(self, op, start, end, &guard).await {
                Err(BlockError::Disk(DiskError::Unsupported)) => {
                    self.device().forget_write_zeroes();
                    if how.fast_only {
                        return Err(BlockError::Unsupported { operation: "write zeroes" });
                    }
                }
                outcome => return outcome,
            }
        }
        let mut zero = |_: u64, _: usize, buffer: &mut Buffer| {
            buffer.fill(0);
            Ok(())
        };
        transfer(self, Op::Write { fua: how.fua }, (start, end), Some(&guard), &mut zero).await
    }

    /// Discards the whole blocks within `len` bytes from `offset` on. Partial blocks at the ends
    /// remain unchanged.
    ///
    /// # Errors
    ///
    /// [`BlockError::Unsupported`] if the disk cannot discard; other errors.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        let range = self.range_to_change(offset, len)?;
        if !self.geometry().discard {
            return Err(BlockError::Unsupported { operation: "discard" });
        }
        let (start, end) = (range.first_whole, range.end_whole);
        if start >= end {
            return Ok(());
        }
        let guard = Arc::new(self.device().locks.acquire(start, end, false).await);
        run_without_data(self, Op::Discard, start, end, &guard).await
    }

    /// Makes all writes durable that have completed on any queue.
    ///
    /// # Errors
    ///
    /// [`BlockError`].
    pub async fn flush(&self) -> Result<(), BlockError> {
        let request = Request { op: Op::Flush, offset: 0, len: 0 };
        self.request(request, Data::NONE, None).await.map(drop)
    }
}

/// Transfers whole blocks directly between the disk and memory of the caller.
async fn run_with_segments(
    queue: &BlockQueue,
    op: Op,
    offset: u64,
    data: Segments,
    guard: Option<Arc<RangeGuard>>,
) -> Result<Segments, BlockError> {
    let len = data.len();
    if len <= SEGMENTS_STEP {
        if len == 0 {
            return Ok(data);
        }
        let request = Request { op, offset, len: len as u64 };
        return segments_of(queue.request(request, Data::Segments(data), guard).await?);
    }
    let mut part = Segments::new();
    let mut done = 0;
    while done < len {
        let now = (len - done).min(SEGMENTS_STEP);
        data.select((done, now), 0, 1, &mut part).ok_or(BlockError::Buffer)?;
        let request = Request { op, offset: offset + done as u64, len: now as u64 };
        let moved = queue.request(request, Data::Segments(part), guard.clone()).await?;
        part = segments_of(moved)?;
        done += now;
    }
    Ok(data)
}

fn segments_of(data: Data) -> Result<Segments, BlockError> {
    match data {
        Data::Segments(segments) => Ok(segments),
        Data::Buffer(_) => Err(BlockError::Buffer),
    }
}

/// Read-modify-write of a partial block, which the caller has locked exclusively.
pub(crate) async fn modify(
    queue: &BlockQueue,
    edge: Edge,
    data: &[u8],
    fua: bool,
    guard: &Arc<RangeGuard>,
) -> Result<(), BlockError> {
    let len = queue.geometry().block_size.into();
    let buffer = queue.small().wait().await?;
    let read = Request { op: Op::Read, offset: edge.block, len };
    let read = queue.request(read, Data::Buffer(buffer), Some(Arc::clone(guard)));
    let mut buffer = buffer_of(read.await?)?;
    let data = data.get(..edge.len).ok_or(BlockError::Buffer)?;
    if !buffer.copy_from((edge.at - edge.block) as usize, data) {
        return Err(BlockError::Buffer);
    }
    let write = Request { op: Op::Write { fua }, offset: edge.block, len };
    queue.request(write, Data::Buffer(buffer), Some(Arc::clone(guard))).await.map(drop)
}

/// Intersection of the `len` bytes at `at` and the `count` bytes at `offset`. Returns its start
/// relative to `at`, its start relative to `offset`, and its length.
fn overlap(at: u64, len: usize, offset: u64, count: usize) -> (usize, usize, usize) {
    let from = at.max(offset);
    let to = (at + len as u64).min(offset + count as u64).max(from);
    ((from - at) as usize, (from - offset) as usize, (to - from) as usize)
}

fn fits(fits: bool) -> Result<(), BlockError> {
    if fits { Ok(()) } else { Err(BlockError::Buffer) }
}

/// Copy of the bytes `from`, which start at `offset`, into the buffers of writes.
pub(crate) fn copy_of(
    from: &[u8],
    offset: u64,
) -> impl FnMut(u64, usize, &mut Buffer) -> Result<(), BlockError> {
    move |at, len, buffer| {
        let start = (at - offset) as usize;
        let data = from.get(start..start + len).ok_or(BlockError::Buffer)?;
        fits(buffer.copy_from(0, data))
    }
}
