//! Trace reader.

use super::layout::{HEADER_BYTES, Header, Layout, MAGIC, VERSION};
use super::record::{RECORD_BYTES, RawRecord, Record};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use zerocopy::{FromBytes, IntoBytes};

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
/// time; records that are overwritten meanwhile are left out, as are damaged ones.
///
/// # Errors
/// A [`TraceError`], if the file is no trace or is incomplete.
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
    // A stable sort: records of one ring with the same time keep their order.
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
    // The part of the ring that was never written is not read.
    let used = end.min(capacity) as usize;
    let mut ring = vec![RawRecord::default(); used];
    file.read_exact_at(ring.as_mut_bytes(), layout.records(index))?;
    // Records that may have been overwritten during the read are left out. For a full ring, the
    // oldest record is among them, because a writer may have died in the middle of the next one.
    let after = count(file, index)?;
    let stale = |sequence| after.checked_sub(capacity).is_some_and(|oldest| sequence <= oldest);
    records.extend((start..end).filter(|sequence| !stale(*sequence)).filter_map(|sequence| {
        let raw = ring.get((sequence % capacity) as usize)?;
        (raw.sequence == sequence).then(|| Record::new(raw, worker)).flatten()
    }));
    Ok(())
}
