//! Validation of virtio-blk requests (Virtio 1.2, 5.2.6 "Device Operation").

use shadowbell_block::Geometry;
use shadowbell_disk::Op;

/// Largest queue size in entries.
pub(super) const QUEUE_SIZE: usize = 1024;
/// Size of a request header in bytes: type, four reserved bytes, sector.
pub(super) const HEADER: usize = 16;
/// Unit of offsets and lengths in bytes, independent of the disk's block size.
pub(super) const SECTOR: u64 = 512;
/// Largest number of data bytes per request.
pub(super) const MAX_DATA: usize = 32 << 20;
/// Largest number of memory pieces per request. A chain, including an indirect descriptor table, is
/// no longer than the longest queue (Virtio 1.2, 2.7.5.3.1).
pub(super) const MAX_PIECES: usize = QUEUE_SIZE;
/// Length of the device's serial number in bytes.
pub(super) const ID: usize = 20;
/// Size of a discard or write zeroes segment in bytes: sector, number of sectors, flags.
pub(super) const SEGMENT: usize = 16;

/// Status byte of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// Operation of a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Job {
    Disk {
        op: Op,
        offset: u64,
        len: u64,
    },
    /// Query of the serial number, with `room` bytes for the answer.
    Identify {
        room: usize,
    },
}

/// Validation rules that depend on the disk and the negotiated features.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub(super) geometry: Geometry,
    /// True if the guest's driver does not send flushes. Then every write must be durable when it
    /// completes.
    pub(super) write_through: bool,
}

/// Answer to a request for the serial number, cut to at most `room` bytes.
pub(super) fn identifier(id: &[u8], room: usize) -> Vec<u8> {
    let mut data = id.get(..ID.min(id.len())).unwrap_or_default().to_vec();
    data.resize(ID.min(room), 0);
    data
}

/// Decodes a request header to the operation, or returns the status of a refusal.
/// `given` is the number of data bytes that the device reads, `segment` returns the first of these
/// bytes, and `room` is the number of data bytes that the device may write.
pub(super) fn understand(
    header: [u8; HEADER],
    (given, room): (usize, usize),
    rules: &Rules,
    segment: impl FnOnce() -> Option<[u8; SEGMENT]>,
) -> Result<Job, Status> {
    let bad = Status::IoError;
    let [k0, k1, k2, k3, _, _, _, _, sector @ ..] = header;
    let kind = u32::from_le_bytes([k0, k1, k2, k3]);
    let offset = u64::from_le_bytes(sector).checked_mul(SECTOR).ok_or(bad)?;
    let whole = |len: usize| {
        let end = offset.checked_add(len as u64);
        len <= MAX_DATA
            && (len as u64).is_multiple_of(SECTOR)
            && end.is_some_and(|end| end <= rules.geometry.bytes)
    };
    let changes = |found| if rules.geometry.read_only { Err(bad) } else { Ok(found) };
    match kind {
        0 if whole(room) => Ok(Job::Disk { op: Op::Read, offset, len: room as u64 }),
        1 if whole(given) => {
            let op = Op::Write { fua: rules.write_through };
            changes(Job::Disk { op, offset, len: given as u64 })
        }
        4 => Ok(Job::Disk { op: Op::Flush, offset: 0, len: 0 }),
        8 => Ok(Job::Identify { room }),
        // The configuration space permits only one segment per request.
        11 | 13 if given == SEGMENT => changes(range(kind == 11, segment().ok_or(bad)?, rules)?),
        0 | 1 | 11 | 13 => Err(bad),
        _ => Err(Status::Unsupported),
    }
}

fn range(discard: bool, segment: [u8; SEGMENT], rules: &Rules) -> Result<Job, Status> {
    let bad = Status::IoError;
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = segment;
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let len = u64::from(u32::from_le_bytes([n0, n1, n2, n3])) * SECTOR;
    let flags = u32::from_le_bytes(flags);
    // The only defined flag is "unmap". A discard must not have it (Virtio 1.2, 5.2.6.2).
    if flags & !1 != 0 || (discard && flags != 0) || (discard && !rules.geometry.discard) {
        return Err(Status::Unsupported);
    }
    let offset = sector.checked_mul(SECTOR).ok_or(bad)?;
    if offset.checked_add(len).is_none_or(|end| end > rules.geometry.bytes) {
        return Err(bad);
    }
    let op = if discard {
        Op::Discard
    } else {
        Op::WriteZeroes { deallocate: flags & 1 != 0, fua: rules.write_through }
    };
    Ok(Job::Disk { op, offset, len })
}
