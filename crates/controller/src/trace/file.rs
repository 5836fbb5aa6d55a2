//! Trace file: writer and reader.

use super::record::{
    HEADER_BYTES, Header, Kind, Layout, MAGIC, PAGE, RECORD_BYTES, RawRecord, Record, VERSION,
};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime};
use zerocopy::{FromBytes, IntoBytes};

/// Trace file that is being written. The mapping is removed when this value and all [`TraceRing`]s
/// of the file are dropped.
#[derive(Debug)]
pub struct TraceFile {
    mapping: Arc<Mapping>,
    layout: Layout,
    started: Instant,
    /// Flag for each ring: true if the ring is taken by a thread.
    taken: Box<[AtomicBool]>,
    /// File, and the numbers of the spare rings. Space for a spare ring is allocated only when the
    /// ring is taken.
    file: File,
    spare: Range<u32>,
}

impl TraceFile {
    /// Creates the file at `path`, with rings for `workers` I/O threads and for the control plane.
    /// Each ring has `records_per_worker` records (rounded up to a power of two, at least 1024).
    /// The space is allocated immediately. So a full file system causes an error here and not
    /// later.
    ///
    /// An older trace at `path` is replaced.
    ///
    /// # Errors
    /// An OS error; `AlreadyExists` if another file than a trace is at `path` (this file stays
    /// unchanged); `InvalidInput` if the file would be larger than 1 GiB.
    pub fn create(path: &Path, workers: u16, records_per_worker: u32) -> io::Result<Arc<Self>> {
        Self::create_with_spare(path, workers, 0, records_per_worker)
    }

    /// Creates the file like [`create`](Self::create), with rings for up to `spare` more threads,
    /// as far as the maximum file size permits. Spare rings are for the threads with the highest
    /// numbers: these threads may never start. So the space of a spare ring is allocated when its
    /// thread takes it.
    ///
    /// # Errors
    /// Those of [`create`](Self::create).
    pub fn create_with_spare(
        path: &Path,
        workers: u16,
        spare: u16,
        records_per_worker: u32,
    ) -> io::Result<Arc<Self>> {
        let mut is_made = false;
        let make = || Self::create_file(path).inspect(|_| is_made = true);
        let outcome = Self::create_in(make, workers, spare, records_per_worker);
        if outcome.is_err() && is_made {
            let _ = std::fs::remove_file(path);
        }
        outcome
    }

    /// Checks in advance that a trace can be created at `path`.
    ///
    /// # Errors
    /// An OS error; `AlreadyExists` if another file than a trace is at `path`.
    pub fn check(path: &Path) -> io::Result<()> {
        is_there(path).map(drop)
    }

    /// Creates an empty file for a trace at `path`. An older trace is replaced.
    ///
    /// # Errors
    /// An OS error; `AlreadyExists` if another file than a trace is at `path`.
    pub fn create_file(path: &Path) -> io::Result<File> {
        replace(path)?;
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o644).open(path)
    }

    /// Creates a trace like [`create_with_spare`](Self::create_with_spare), in a
    /// [file](Self::create_file) that `make` creates. `make` is called only if the size is
    /// permitted. If the file system has no space for the rings, the file stays empty.
    ///
    /// # Errors
    /// Those of [`create`](Self::create).
    pub fn create_in(
        make: impl FnOnce() -> io::Result<File>,
        workers: u16,
        spare: u16,
        records_per_worker: u32,
    ) -> io::Result<Arc<Self>> {
        let layout = Self::layout(workers, spare, records_per_worker, |_| true)?;
        let file = make()?;
        let other = file.try_clone()?;
        Self::fill(file, layout, workers.into()).inspect_err(|_| drop(other.set_len(0)))
    }

    /// Creates a trace in anonymous memory, for `workers` threads, with as many spare rings as fit
    /// into [`MAX_IN_MEMORY`](Self::MAX_IN_MEMORY) bytes.
    ///
    /// # Errors
    /// An OS error; `InvalidInput` if the trace without spare rings would exceed that size.
    pub fn in_memory(workers: u16, spare: u16, records_per_worker: u32) -> io::Result<Arc<Self>> {
        let small = |layout: &Layout| layout.bytes() <= Self::MAX_IN_MEMORY;
        let layout = Self::layout(workers, spare, records_per_worker, small)?;
        let flags = MemfdFlags::CLOEXEC;
        Self::fill(memfd_create("shadowbell-trace", flags)?.into(), layout, workers.into())
    }

    /// Maximum size of a trace in memory, in bytes.
    pub const MAX_IN_MEMORY: u64 = 256 << 20;

    /// Layout with one ring for each of `workers` I/O threads, one for the control plane, and at
    /// most `spare` more: as many as `fits` permits.
    fn layout(
        workers: u16,
        spare: u16,
        records_per_worker: u32,
        fits: impl Fn(&Layout) -> bool,
    ) -> io::Result<Layout> {
        let too_large = || {
            let text = format!(
                "a trace of {records_per_worker} records for each of {workers} I/O threads is too large"
            );
            io::Error::new(io::ErrorKind::InvalidInput, text)
        };
        let capacity =
            records_per_worker.max(1024).checked_next_power_of_two().ok_or_else(too_large)?;
        let layout = |spare: u32| Layout::new(u32::from(workers) + spare + 1, capacity);
        let mut all = (0..=u32::from(spare)).rev().filter_map(layout);
        all.find(fits).ok_or_else(too_large)
    }

    /// Length of the file in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.layout.bytes()
    }

    /// Always false, because the file has a header.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Copies the file from `offset` on, while threads may be writing. Records that may have been
    /// overwritten during the copy are zeroed. `offset` and the length of `to` must be multiples of
    /// 4096. Successive calls up to the end of the file copy a trace that [`read_trace`] can read.
    /// The trace contains at least the records that were written before the first call and not
    /// overwritten since.
    ///
    /// # Errors
    /// An OS error; `InvalidInput` for another offset or length.
    pub fn copy_at(&self, offset: u64, to: &mut [u8]) -> io::Result<usize> {
        if !offset.is_multiple_of(PAGE) || !to.len().is_multiple_of(PAGE as usize) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let count = self.file.read_at(to, offset)?;
        let records = to[..count].chunks_exact_mut(RECORD_BYTES);
        let Some(first) = offset.checked_sub(self.layout.records(0)) else {
            // The header and the counts are copied unchanged. This call copies nothing of the
            // rings: their records are checked below, in a later call.
            return Ok(count.min((self.layout.records(0) - offset) as usize));
        };
        let capacity = u64::from(self.layout.capacity);
        for (at, record) in (first / RECORD_BYTES as u64..).zip(records) {
            let ring = (at / capacity) as u32;
            // The count of records written to the ring is read after the copy. If this count shows
            // that the record was not overwritten, the copy is complete.
            let count = self.mapping.bytes().load_u64_acquire(Layout::count(ring) as usize);
            let is_kept = RawRecord::read_from_bytes(record)
                .is_ok_and(|raw| count.is_some_and(|count| raw.sequence + capacity > count));
            if !is_kept {
                record.fill(0);
            }
        }
        Ok(count)
    }

    fn fill(file: File, layout: Layout, workers: u32) -> io::Result<Arc<Self>> {
        let spare = workers..layout.rings - 1;
        file.set_len(layout.bytes())?;
        allocate(&file, 0..layout.records(spare.start))?;
        allocate(&file, layout.records(spare.end)..layout.bytes())?;
        let mapping = Mapping::from_fd(&file, 0, layout.bytes(), Protection::ReadWrite)
            .map_err(io::Error::other)?;
        // Both clocks are read directly one after the other, because readers convert times from one
        // clock to the other.
        let started = Instant::now();
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            record_bytes: RECORD_BYTES as u32,
            rings: layout.rings,
            capacity: layout.capacity,
            started: since.as_nanos() as u64,
            reserved: [0; 32],
        };
        mapping.bytes().write(0, &header).ok_or_else(out_of_range)?;
        let taken = (0..layout.rings).map(|_| AtomicBool::new(false)).collect();
        Ok(Arc::new(Self { mapping, layout, started, taken, file, spare }))
    }

    /// Takes the ring of I/O thread `index` for writing. `None` if the file has no ring with this
    /// index, if the ring is already taken, or if it is a spare ring and the file system has no
    /// space for it.
    #[must_use]
    pub fn worker(&self, index: u16) -> Option<TraceRing> {
        let index = u32::from(index);
        if index + 1 >= self.layout.rings {
            return None;
        }
        if self.spare.contains(&index) {
            let records = self.layout.records(index)..self.layout.records(index + 1);
            allocate(&self.file, records).ok()?;
        }
        self.ring(index)
    }

    /// Takes the rings of all I/O threads, except spare rings and rings that are already taken.
    #[must_use]
    pub fn workers(&self) -> Vec<TraceRing> {
        (0..self.spare.start).filter_map(|index| self.ring(index)).collect()
    }

    /// Takes the ring of the control plane. `None` if it is already taken.
    #[must_use]
    pub fn control(&self) -> Option<TraceRing> {
        self.ring(self.layout.rings - 1)
    }

    fn ring(&self, index: u32) -> Option<TraceRing> {
        let bytes = self.mapping.bytes();
        let count = bytes.slice(Layout::count(index) as usize, 8)?;
        let len = self.layout.ring_bytes() as usize;
        let records = bytes.slice(self.layout.records(index) as usize, len)?;
        let before = self.taken.get(index as usize)?.swap(true, Ordering::Relaxed);
        let mask = u64::from(self.layout.capacity) - 1;
        (!before).then(|| TraceRing { records, count, next: 0, mask, started: self.started })
    }
}

/// Allocates space for this part of the file, if the file system supports that.
fn allocate(file: &File, part: Range<u64>) -> io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), part.start, part.end - part.start) {
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        other => Ok(other?),
    }
}

/// Removes the trace at `path`, if there is one. The file is unlinked and not overwritten, because
/// other processes may still write or read it.
fn replace(path: &Path) -> io::Result<()> {
    if is_there(path)? { std::fs::remove_file(path) } else { Ok(()) }
}

/// True if an older trace exists at `path`.
fn is_there(path: &Path) -> io::Result<bool> {
    // `symlink_metadata` does not follow symbolic links. The file is not opened, because opening a
    // FIFO could block.
    let metadata = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other?,
    };
    let not_a_trace = || {
        let text = format!("{} exists and is not a trace; it was not changed", path.display());
        io::Error::new(io::ErrorKind::AlreadyExists, text)
    };
    if !metadata.is_file() {
        return Err(not_a_trace());
    }
    let mut magic = [0; MAGIC.len()];
    let ours = metadata.size() >= HEADER_BYTES as u64
        && File::open(path)?.read_exact(&mut magic).is_ok()
        && magic == MAGIC;
    if !ours && metadata.size() != 0 {
        return Err(not_a_trace());
    }
    Ok(true)
}

fn out_of_range() -> io::Error {
    io::Error::other("the trace file is smaller than its layout")
}

/// Ring of a trace, for its only writing thread. Traced code has an `Option` of it, so a disabled
/// trace costs one branch.
#[derive(Debug)]
pub struct TraceRing {
    records: SharedBytes,
    count: SharedBytes,
    next: u64,
    mask: u64,
    started: Instant,
}

impl TraceRing {
    /// Records an event of a queue of a controller, with the current time. The meaning of `value`
    /// and `extra` depends on the [`Kind`]; for a completion queue, `qid` has the bit
    /// [`COMPLETION_QUEUE`](super::COMPLETION_QUEUE).
    #[inline]
    pub fn record(&mut self, kind: Kind, controller: u16, qid: u16, value: u32, extra: u32) {
        let record = RawRecord {
            time_ns: self.started.elapsed().as_nanos() as u64,
            sequence: self.next,
            value,
            extra,
            controller,
            qid,
            kind: kind as u8,
            reserved: [0; 3],
        };
        let at = (self.next & self.mask) as usize * RECORD_BYTES;
        // Both stores are always within the mapping, so their results need no check.
        let _ = self.records.write(at, &record);
        self.next += 1;
        // The record is written before the count, which makes the record valid.
        let _ = self.count.store_u64_release(0, self.next);
    }
}

const _: () = assert!(PAGE.is_multiple_of(RECORD_BYTES as u64));

/// Error of reading a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// OS error.
    #[error("the trace cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The file is not a trace.
    #[error("this is not a trace")]
    NotATrace,
    /// The trace has another format version.
    #[error("unsupported trace version {0}; this program reads version {VERSION}")]
    Version(u32),
    /// The header has an invalid field.
    #[error("the trace is damaged: {0}")]
    Damaged(&'static str),
    /// The file is shorter than its header says.
    #[error("the trace is truncated: {actual} of {expected} bytes")]
    CutOff {
        /// Length of the file in bytes.
        actual: u64,
        /// Length according to the header.
        expected: u64,
    },
}

/// Reads the records of the trace at `path`, ordered by time. The trace may be written at the same
/// time. Damaged records, and records that are overwritten during the read, are omitted.
///
/// # Errors
/// A [`TraceError`], if the file is not a trace or is incomplete.
pub fn read_trace(path: &Path) -> Result<impl Iterator<Item = Record> + use<>, TraceError> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(TraceError::NotATrace);
    }
    let file = File::open(path)?;
    let layout = layout(&file)?;
    let mut records = Vec::new();
    for index in 0..layout.rings {
        read_ring(&file, layout, index, &mut records)?;
    }
    // The sort is stable, so records of one ring with the same time keep their order.
    records.sort_by_key(|record| record.time_ns);
    Ok(records.into_iter())
}

fn layout(file: &File) -> Result<Layout, TraceError> {
    let actual = file.metadata()?.len();
    if actual < HEADER_BYTES as u64 {
        return Err(TraceError::NotATrace);
    }
    let mut bytes = [0; HEADER_BYTES];
    file.read_exact_at(&mut bytes, 0)?;
    let header = Header::read_from_bytes(&bytes).map_err(|_| TraceError::NotATrace)?;
    if header.magic != MAGIC {
        return Err(TraceError::NotATrace);
    }
    if header.version != VERSION {
        return Err(TraceError::Version(header.version));
    }
    if header.record_bytes as usize != RECORD_BYTES {
        return Err(TraceError::Damaged("invalid record size"));
    }
    let layout = Layout::new(header.rings, header.capacity)
        .ok_or(TraceError::Damaged("invalid number or size of rings"))?;
    let expected = layout.bytes();
    if actual < expected {
        return Err(TraceError::CutOff { actual, expected });
    }
    Ok(layout)
}

fn count(file: &File, index: u32) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, Layout::count(index))?;
    Ok(u64::from_le_bytes(bytes))
}

/// Appends the records of ring `index`, oldest first.
fn read_ring(
    file: &File,
    layout: Layout,
    index: u32,
    records: &mut Vec<Record>,
) -> Result<(), TraceError> {
    let worker = (index + 1 < layout.rings).then_some(index as u16);
    let capacity = u64::from(layout.capacity);
    let end = count(file, index)?;
    let start = end.saturating_sub(capacity);
    // A ring that has not wrapped around yet is read only up to its last record.
    let used = end.min(capacity) as usize;
    let mut ring = vec![RawRecord::default(); used];
    file.read_exact_at(ring.as_mut_bytes(), layout.records(index))?;
    // Records that may have been overwritten during the read are omitted. In a full ring this
    // includes the oldest record, because the writer may have died while it overwrote that record.
    let after = count(file, index)?;
    let stale = |sequence| after.checked_sub(capacity).is_some_and(|oldest| sequence <= oldest);
    records.extend((start..end).filter(|sequence| !stale(*sequence)).filter_map(|sequence| {
        let raw = ring.get((sequence % capacity) as usize)?;
        (raw.sequence == sequence).then(|| Record::new(raw, worker)).flatten()
    }));
    Ok(())
}
