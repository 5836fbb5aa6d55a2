//! Reading a trace.

use super::layout::{HEADER_BYTES, Header, Layout, MAGIC, VERSION};
use super::record::{RECORD_BYTES, RawRecord, Record};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use zerocopy::{FromBytes, IntoBytes};

/// Why a trace can not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The system's reason.
    #[error("the trace can not be read: {0}")]
    Io(#[from] io::Error),
    /// It is some other file.
    #[error("this is not a trace")]
    NotATrace,
    /// It is of another version of this program.
    #[error("this is a trace of version {0}, and only version {VERSION} can be read")]
    Version(u32),
    /// The header is that of a trace, and says what can not be.
    #[error("the trace is damaged: {0}")]
    Damaged(&'static str),
    /// The file ends before the rings that the header tells of.
    #[error("the trace is cut off: it has {actual} bytes of {expected}")]
    CutOff {
        /// How many bytes there are.
        actual: u64,
        /// How many there should be.
        expected: u64,
    },
}

/// The records of the trace at `path`, in the order of their time. A trace that is being written
/// may be read; records that are overwritten meanwhile are left out, as are damaged ones.
///
/// # Errors
/// [`TraceError`], if it is not a trace or not all there.
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
    // Stable: what one ring recorded within the same nanosecond stays in its order.
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
        return Err(TraceError::Damaged("the size of a record"));
    }
    let layout = Layout::new(header.rings, header.capacity)
        .ok_or(TraceError::Damaged("the number or the size of its rings"))?;
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

/// Appends what ring `index` has, the oldest first.
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
    // What was never written need not be read.
    let used = end.min(capacity) as usize;
    let mut ring = vec![RawRecord::default(); used];
    file.read_exact_at(ring.as_mut_bytes(), layout.records(index))?;
    // A record of these may have been overwritten while the ring was read; that the oldest of a
    // full ring is among them is also right for a writer that died in the middle of the next
    // one.
    let after = count(file, index)?;
    let stale = |sequence| after.checked_sub(capacity).is_some_and(|oldest| sequence <= oldest);
    records.extend((start..end).filter(|sequence| !stale(*sequence)).filter_map(|sequence| {
        let raw = ring.get((sequence % capacity) as usize)?;
        (raw.sequence == sequence).then(|| Record::new(raw, worker)).flatten()
    }));
    Ok(())
}
