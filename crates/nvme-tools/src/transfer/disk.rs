//! Byte streams from and to a namespace, with several commands in flight.

use crate::session::Session;
use anyhow::{Context, anyhow, bail};
use shadowbell_driver::{Admin, Buffer, Command, Controller, Namespace, QueuePair};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Bytes per command, if the controller's largest transfer permits.
const CHUNK: u64 = 1 << 20;
/// Granularity of zero detection: the cluster size of qcow2 images and a multiple of file system
/// blocks.
const PIECE: usize = 64 << 10;
/// Longest [`Piece::Zeroes`] in bytes. A longer hole is divided.
const HOLE: u64 = 1 << 30;
/// Largest number of allocated ranges that one query returns.
const RANGES: usize = 255;
/// Number of commands in flight per stream.
pub(super) const DEPTH: usize = 8;
/// Time limit of a command, after which the transfer fails.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Queue pair with its buffers, for one namespace.
struct Port {
    queue: QueuePair,
    namespace: Namespace,
    name: String,
    chunk: u64,
    spare: Vec<Buffer>,
    /// Request number of each slot of the queue. Numbers count all requests of the port.
    by_slot: Vec<u64>,
    made: u64,
}

impl Port {
    fn open(
        controller: &mut Controller,
        namespace: Namespace,
        name: String,
    ) -> anyhow::Result<Self> {
        let queue = controller
            .take_queue_pair()
            .ok_or_else(|| anyhow!("{name}: the controller grants no more queue pairs"))?;
        let block = u64::from(namespace.block_size());
        let chunk = (CHUNK.min(namespace.max_transfer_bytes()) / block).max(1) * block;
        let depth = DEPTH.min(queue.capacity());
        let pool = controller.buffers(depth, usize::try_from(chunk)?)?;
        let spare = std::iter::from_fn(|| pool.take()).take(depth).collect();
        let by_slot = vec![0; queue.capacity()];
        Ok(Self { queue, namespace, name, chunk, spare, by_slot, made: 0 })
    }

    fn block(&self) -> u64 {
        self.namespace.block_size().into()
    }

    /// Command for `len` bytes at byte `offset`, both multiples of the block size.
    fn command(&self, write: bool, offset: u64, len: u64) -> anyhow::Result<Command> {
        let lba = self.namespace.blocks_in(offset)?;
        let blocks = u32::try_from(self.namespace.blocks_in(len)?)?;
        Ok(if write {
            self.namespace.write(lba, blocks)?
        } else {
            self.namespace.read(lba, blocks)?
        })
    }

    /// Submits a command and returns its request number.
    fn submit(&mut self, command: Command, buffer: Option<Buffer>) -> anyhow::Result<u64> {
        let token = self.queue.submit(command, buffer).map_err(|e| anyhow!(e.reason))?;
        let number = self.made;
        self.made += 1;
        if let Some(entry) = self.by_slot.get_mut(token.index()) {
            *entry = number;
        }
        Ok(number)
    }

    /// Waits for the next completion and returns its request number and buffer.
    fn wait(&mut self) -> anyhow::Result<(u64, Option<Buffer>)> {
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        loop {
            self.queue.ring()?;
            if let Some(done) = self.queue.pop() {
                let number = self.by_slot.get(done.token.index()).copied().unwrap_or_default();
                if !done.status.is_success() {
                    bail!("{}: {}", self.name, done.status);
                }
                return Ok((number, done.buffer));
            }
            if !self.queue.wait(Some(deadline))? && Instant::now() >= deadline {
                bail!("{}: no command completed for {} s", self.name, REQUEST_TIMEOUT.as_secs());
            }
        }
    }
}

/// Stream of the bytes of a namespace.
pub(crate) struct DiskReader {
    port: Port,
    /// Offset of the next request, a multiple of the block size.
    next: u64,
    /// End of the last request, a multiple of the block size.
    end: u64,
    /// Requests in the order of their offsets.
    window: VecDeque<Request>,
    /// Number of bytes of the first block that precede the stream.
    skip: u64,
    /// Bytes left to deliver.
    left: u64,
    bytes: Vec<u8>,
    /// Allocation map, for skipping deallocated blocks.
    map: Option<Map>,
}

/// Piece of a stream.
pub(super) enum Piece<'a> {
    Bytes(&'a [u8]),
    /// Number of bytes that read as zeroes, and were not read.
    Zeroes(u64),
}

struct Request {
    offset: u64,
    len: u64,
    data: Data,
}

enum Data {
    /// Read in flight, with its request number.
    InFlight(u64),
    Here(Buffer),
    Zeroes,
}

/// Allocation map of a namespace, as far as it was queried.
struct Map {
    admin: Admin,
    nsid: u32,
    block: u64,
    /// Allocated byte ranges in the result of the last query. The query has covered the bytes up to
    /// `known`.
    ranges: VecDeque<Range<u64>>,
    known: u64,
}

impl Map {
    /// Allocation map, if the controller reports allocated blocks and deallocated ones read as
    /// zeroes. With `None`, all blocks are read.
    fn of(admin: Admin, namespace: &Namespace) -> Option<Self> {
        let reads_zeroes = namespace.identity().dlfeat.drb() == 1;
        let is_there = reads_zeroes && admin.reports_allocated().unwrap_or(false);
        let (nsid, block) = (namespace.nsid(), u64::from(namespace.block_size()));
        is_there.then(|| Self { admin, nsid, block, ranges: VecDeque::new(), known: 0 })
    }

    /// Returns whether the extent at byte `at` is allocated, and its length up to `end` at most
    /// (`at` and `end` are multiples of the block size). `None` if the controller does not report
    /// it.
    fn extent_at(&mut self, at: u64, end: u64) -> Option<(bool, u64)> {
        if at >= self.known {
            let blocks = at / self.block..end / self.block;
            let found = self.admin.allocated_blocks(self.nsid, blocks, RANGES).ok()?;
            self.known = found.until.saturating_mul(self.block);
            let in_bytes = |range: Range<u64>| {
                range.start.saturating_mul(self.block)..range.end.saturating_mul(self.block)
            };
            self.ranges = found.ranges.into_iter().map(in_bytes).collect();
        }
        if at >= self.known {
            return None;
        }
        while self.ranges.front().is_some_and(|range| range.end <= at) {
            self.ranges.pop_front();
        }
        let (allocated, until) = match self.ranges.front() {
            Some(range) if range.start <= at => (true, range.end),
            Some(range) => (false, range.start),
            None => (false, self.known),
        };
        Some((allocated, until.min(end) - at))
    }
}

impl DiskReader {
    /// Stream of `len` bytes from byte `offset` on, which must be inside `namespace`.
    pub(crate) fn open(
        session: &mut Session,
        namespace: Namespace,
        offset: u64,
        len: u64,
    ) -> anyhow::Result<Self> {
        let name = session.target().with_nsid(namespace.nsid()).to_string();
        let port = Port::open(&mut session.controller, namespace, name)?;
        let window = VecDeque::with_capacity(DEPTH);
        let (next, end, skip, left) = (0, 0, 0, 0);
        let mut reader = Self { port, next, end, window, skip, left, bytes: Vec::new(), map: None };
        reader.seek(offset, len)?;
        Ok(reader)
    }

    /// Continues with `len` bytes from byte `offset` on. The stream must be at its end.
    pub(crate) fn seek(&mut self, offset: u64, len: u64) -> anyhow::Result<()> {
        let block = self.port.block();
        self.end = offset
            .checked_add(len)
            .and_then(|end| end.checked_next_multiple_of(block))
            .ok_or_else(|| anyhow!("the end of the range exceeds 64 bits"))?;
        self.skip = offset % block;
        self.next = offset - self.skip;
        self.left = len;
        Ok(())
    }

    /// Reads up to the end of the stream.
    pub(crate) fn rest(&mut self) -> anyhow::Result<Vec<u8>> {
        let mut all = Vec::new();
        while let Some(piece) = self.next()? {
            match piece {
                Piece::Bytes(bytes) => all.extend_from_slice(bytes),
                Piece::Zeroes(len) => all.resize(all.len() + usize::try_from(len)?, 0),
            }
        }
        Ok(all)
    }

    /// Skips deallocated blocks from now on, if the controller supports it.
    pub(super) fn skip_holes(&mut self, admin: Admin) {
        self.map = Map::of(admin, &self.port.namespace);
    }

    /// Next piece in order; `None` at the end.
    pub(super) fn next(&mut self) -> anyhow::Result<Option<Piece<'_>>> {
        if self.left == 0 {
            return Ok(None);
        }
        self.submit_reads()?;
        let is_in_flight = |request: &Request| matches!(request.data, Data::InFlight(_));
        while self.window.front().is_none_or(is_in_flight) {
            if self.window.is_empty() {
                bail!("{}: the stream ended early", self.port.name);
            }
            let context = |at: Option<u64>| match at {
                Some(at) => format!("reading at byte {at}"),
                None => "reading".to_owned(),
            };
            let at = self.window.front().map(|request| request.offset);
            let (number, buffer) = self.port.wait().with_context(|| context(at))?;
            let is_it = |request: &&mut Request| matches!(request.data, Data::InFlight(other) if other == number);
            if let Some(request) = self.window.iter_mut().find(is_it)
                && let Some(buffer) = buffer
            {
                request.data = Data::Here(buffer);
            }
        }
        let Some(Request { len, data, .. }) = self.window.pop_front() else {
            bail!("{}: the stream ended early", self.port.name);
        };
        let skip = std::mem::take(&mut self.skip);
        let here = (len - skip).min(self.left);
        self.left -= here;
        let buffer = match data {
            Data::Here(buffer) => buffer,
            Data::InFlight(_) => bail!("{}: the stream ended early", self.port.name),
            Data::Zeroes => {
                self.submit_reads()?;
                return Ok(Some(Piece::Zeroes(here)));
            }
        };
        self.bytes.resize(usize::try_from(here)?, 0);
        if !buffer.copy_to(usize::try_from(skip)?, &mut self.bytes) {
            bail!("{}: a buffer is shorter than its request", self.port.name);
        }
        self.port.spare.push(buffer);
        // Read-ahead: the next requests run while the caller processes this piece.
        self.submit_reads()?;
        Ok(Some(Piece::Bytes(&self.bytes)))
    }

    /// Submits requests until the window is full.
    fn submit_reads(&mut self) -> anyhow::Result<()> {
        while self.next < self.end && self.window.len() < 2 * DEPTH {
            let (offset, rest) = (self.next, self.end - self.next);
            let known = self.map.as_mut().map(|map| map.extent_at(offset, self.end));
            let (is_read, len) = match known {
                Some(Some(known)) => known,
                Some(None) => {
                    self.map = None;
                    (true, rest)
                }
                None => (true, rest),
            };
            if !is_read {
                // The length of a hole is limited, because an interruption takes effect only
                // between two pieces.
                let len = len.min(HOLE);
                self.window.push_back(Request { offset, len, data: Data::Zeroes });
                self.next += len;
                continue;
            }
            let Some(buffer) = self.port.spare.pop() else { break };
            let len = self.port.chunk.min(len);
            let command = self.port.command(false, offset, len)?;
            let number = self.port.submit(command, Some(buffer))?;
            self.window.push_back(Request { offset, len, data: Data::InFlight(number) });
            self.next += len;
        }
        Ok(self.port.queue.ring()?)
    }
}

/// Stream into a namespace.
pub(super) struct DiskWriter {
    port: Port,
    /// Data of the next request. The request begins at byte `at`, a multiple of the block size.
    collected: Vec<u8>,
    at: u64,
    in_flight: usize,
    /// Largest number of requests in flight, one per buffer.
    depth: usize,
}

impl DiskWriter {
    /// Stream into `namespace` from byte `offset` on.
    pub(super) fn open(
        session: &mut Session,
        namespace: Namespace,
        offset: u64,
    ) -> anyhow::Result<Self> {
        let name = session.target().with_nsid(namespace.nsid()).to_string();
        let port = Port::open(&mut session.controller, namespace, name)?;
        let before = offset % port.block();
        let depth = port.spare.len().max(1);
        let at = offset - before;
        let mut writer = Self { port, collected: Vec::new(), at, in_flight: 0, depth };
        if before != 0 {
            let mut block = writer.read_block(writer.at)?;
            block.truncate(usize::try_from(before)?);
            writer.collected = block;
        }
        Ok(writer)
    }

    /// Appends `bytes`. They may still be in flight on return.
    pub(super) fn write(&mut self, mut bytes: &[u8]) -> anyhow::Result<()> {
        let chunk = usize::try_from(self.port.chunk)?;
        while !bytes.is_empty() {
            let room = chunk.saturating_sub(self.collected.len());
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.collected.extend_from_slice(now);
            bytes = later;
            if self.collected.len() == chunk {
                self.send()?;
            }
        }
        Ok(())
    }

    /// Appends `len` zeroes, with Write Zeroes for whole blocks, so that they need no storage. The
    /// commands may still be in flight on return.
    pub(super) fn write_zeroes(&mut self, mut len: u64) -> anyhow::Result<()> {
        let (block, chunk) = (self.port.block(), self.port.chunk);
        let has_zeroes = self.port.namespace.optional_commands().write_zeroes();
        while len != 0 {
            let collected = self.collected.len() as u64;
            if has_zeroes && collected == 0 && len >= block {
                let now = len.min(chunk) / block * block;
                self.send_zeroes(now)?;
                self.port.queue.ring()?;
                len -= now;
                continue;
            }
            // Zeroes that are less than a block are buffered up to the end of the block. Without
            // Write Zeroes, all zeroes are buffered, up to the end of the request.
            let room = if has_zeroes { block - collected % block } else { chunk - collected };
            let now = len.min(room);
            self.collected.resize(usize::try_from(collected + now)?, 0);
            len -= now;
            let is_whole = (collected + now).is_multiple_of(block);
            if is_whole && (len >= block || collected + now == chunk) {
                self.send()?;
            }
        }
        Ok(())
    }

    /// Writes the buffered bytes, waits for all commands, and flushes. If the stream ends within a
    /// block, the following bytes of this block are preserved.
    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        let block = usize::try_from(self.port.block())?;
        let odd = self.collected.len() % block;
        if odd != 0 {
            let last = self.at + (self.collected.len() - odd) as u64;
            let rest = self.read_block(last)?;
            self.collected.extend_from_slice(rest.get(odd..).unwrap_or_default());
        }
        if !self.collected.is_empty() {
            self.send()?;
        }
        while self.in_flight > 0 {
            self.reap()?;
        }
        let flush = self.port.namespace.flush();
        self.port.submit(flush, None)?;
        self.port.wait().context("flushing")?;
        Ok(())
    }

    fn send(&mut self) -> anyhow::Result<()> {
        let collected = std::mem::take(&mut self.collected);
        let mut rest = collected.as_slice();
        while !rest.is_empty() {
            let (is_zero, len) = self.run(rest);
            let (now, later) = rest.split_at(len);
            self.send_run(now, is_zero)?;
            rest = later;
        }
        self.port.queue.ring()?;
        self.collected = collected;
        self.collected.clear();
        Ok(())
    }

    /// Divides `bytes` into pieces of [`PIECE`] bytes. Returns true if the first piece has only
    /// zeroes, and the total length of the first piece and the following ones of the same kind
    /// (zeroes or data).
    fn run(&self, bytes: &[u8]) -> (bool, usize) {
        if !self.port.namespace.optional_commands().write_zeroes() {
            return (false, bytes.len());
        }
        let is_zero = |piece: &[u8]| piece.iter().all(|byte| *byte == 0);
        let mut pieces = bytes.chunks(PIECE);
        let Some(first) = pieces.next() else { return (false, 0) };
        let kind = is_zero(first);
        let others = pieces.take_while(|piece| is_zero(piece) == kind).map(<[u8]>::len);
        (kind, first.len() + others.sum::<usize>())
    }

    fn send_run(&mut self, bytes: &[u8], is_zero: bool) -> anyhow::Result<()> {
        let len = bytes.len() as u64;
        if is_zero {
            return self.send_zeroes(len);
        }
        while self.in_flight >= self.depth {
            self.reap()?;
        }
        let command = self.port.command(true, self.at, len)?;
        let Some(mut buffer) = self.port.spare.pop() else { bail!("there is no buffer") };
        if !buffer.copy_from(0, bytes) {
            bail!("{}: a buffer is shorter than its request", self.port.name);
        }
        self.port.submit(command, Some(buffer))?;
        self.in_flight += 1;
        self.at += len;
        Ok(())
    }

    /// Zeroes the next `len` bytes, which are whole blocks, and permits the controller to
    /// deallocate them, so that holes of the source need no storage in the destination.
    fn send_zeroes(&mut self, len: u64) -> anyhow::Result<()> {
        while self.in_flight >= self.depth {
            self.reap()?;
        }
        let lba = self.port.namespace.blocks_in(self.at)?;
        let blocks = u32::try_from(self.port.namespace.blocks_in(len)?)?;
        let command = self.port.namespace.write_zeroes(lba, blocks, true)?;
        self.port.submit(command, None)?;
        self.in_flight += 1;
        self.at += len;
        Ok(())
    }

    fn reap(&mut self) -> anyhow::Result<()> {
        let (_, buffer) =
            self.port.wait().with_context(|| format!("writing before byte {}", self.at))?;
        self.in_flight -= 1;
        self.port.spare.extend(buffer);
        Ok(())
    }

    /// Waits for all commands in flight, and then reads the block at byte `offset`.
    fn read_block(&mut self, offset: u64) -> anyhow::Result<Vec<u8>> {
        while self.in_flight > 0 {
            self.reap()?;
        }
        let block = self.port.block();
        let command = self.port.command(false, offset, block)?;
        let buffer = self.port.spare.pop();
        self.port.submit(command, buffer)?;
        let (_, buffer) = self.port.wait().with_context(|| format!("reading at byte {offset}"))?;
        let Some(buffer) = buffer else { bail!("{}: a buffer was lost", self.port.name) };
        let bytes = buffer.to_vec(usize::try_from(block)?);
        self.port.spare.push(buffer);
        Ok(bytes)
    }
}
