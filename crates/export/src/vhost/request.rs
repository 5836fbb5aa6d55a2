//! virtio-blk requests in the guest's memory (Virtio 1.2, 5.2.6 "Device Operation").

use super::memory::Snapshot;
use shadowbell_block::{BlockDevice, BlockError, Geometry, Zeroes};
use std::io::{Read as _, Write as _};
use virtio_queue::DescriptorChain;
use virtio_queue::desc::split::Descriptor;

/// Descriptor chain of a request, with a snapshot of the guest's memory.
pub(super) type Chain = DescriptorChain<Snapshot>;

/// Largest queue size in entries.
pub(super) const QUEUE_SIZE: usize = 1024;
/// Size of a request header in bytes: type, four reserved bytes, sector.
pub(super) const HEADER: usize = 16;
/// Unit of offsets and lengths in bytes, independent of the disk's block size.
pub(super) const SECTOR: u64 = 512;
/// Largest number of data bytes per request.
pub(super) const MAX_DATA: usize = 32 << 20;
/// Largest number of memory pieces per request: a chain is no longer than the longest queue,
/// including indirect descriptor tables (Virtio 1.2, 2.7.5.3.1).
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

/// Disk operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Read,
    Write {
        fua: bool,
    },
    Flush,
    Discard {
        len: u64,
    },
    WriteZeroes {
        len: u64,
        how: Zeroes,
    },
    /// No disk operation: the answer is already in the data.
    Answer,
}

/// Validated request, with its data or a buffer.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) action: Action,
    pub(super) offset: u64,
    pub(super) data: Vec<u8>,
}

/// Result of a job. `for_guest` is true if the data is to be copied to the guest.
pub(super) struct Completed {
    pub(super) outcome: Result<(), BlockError>,
    pub(super) data: Vec<u8>,
    pub(super) for_guest: bool,
}

/// Reason for the refusal of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The request is answered with this status.
    Status(Status),
    /// The request has no room for a status.
    NoRoom,
}

/// Validation rules that depend on the disk and the negotiated features.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub(super) geometry: Geometry,
    /// True if the guest's driver does not flush, so that every write must be durable at once.
    pub(super) write_through: bool,
}

/// Size of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    /// Number of data bytes, at most [`MAX_DATA`].
    pub(super) bytes: usize,
    /// Number of memory pieces.
    pub(super) pieces: usize,
}

/// Measures a request, up to the limits.
pub(super) fn measure(chain: &Chain) -> Size {
    let lengths = chain.clone().take(MAX_PIECES + 1);
    let lengths = lengths.map(|descriptor: Descriptor| u64::from(descriptor.len()));
    let (total, pieces) = lengths.fold((0, 0), |(total, n), len| (total + len, n + 1));
    Size { bytes: usize::try_from(total).unwrap_or(usize::MAX).min(MAX_DATA), pieces }
}

/// Reads a request from the guest's memory, once, and validates it. A request that has grown
/// since [`measure`] is refused.
pub(super) fn parse(chain: &Chain, rules: &Rules, id: &[u8], size: Size) -> Result<Job, Refusal> {
    let memory = chain.memory();
    let writer = chain.clone().writer(memory).map_err(|_| Refusal::NoRoom)?;
    // The last writable byte is for the status.
    let room = writer.available_bytes().checked_sub(1).ok_or(Refusal::NoRoom)?;
    let bad = Refusal::Status(Status::IoError);
    if size.pieces > MAX_PIECES {
        return Err(bad);
    }
    let mut reader = chain.clone().reader(memory).map_err(|_| bad)?;
    let mut header = [0; HEADER];
    reader.read_exact(&mut header).map_err(|_| bad)?;
    let given = reader.available_bytes();
    let segment = || {
        let mut segment = [0; SEGMENT];
        reader.read_exact(&mut segment).ok().map(|()| segment)
    };
    let (action, offset) = understand(header, (given, room), rules, segment)?;
    let data = match action {
        Action::Read if room <= size.bytes => vec![0; room],
        Action::Write { .. } if given <= size.bytes => {
            let mut data = vec![0; given];
            reader.read_exact(&mut data).map_err(|_| bad)?;
            data
        }
        Action::Read | Action::Write { .. } => return Err(bad),
        Action::Answer => identifier(id, room),
        Action::Flush | Action::Discard { .. } | Action::WriteZeroes { .. } => Vec::new(),
    };
    Ok(Job { action, offset, data })
}

/// Answer to a request for the serial number, cut to the available room.
pub(super) fn identifier(id: &[u8], room: usize) -> Vec<u8> {
    let mut data = id.get(..ID.min(id.len())).unwrap_or_default().to_vec();
    data.resize(ID.min(room), 0);
    data
}

/// Decodes a request header to the operation and its offset. `given` is the number of data bytes
/// that the device reads, `segment` returns the first of them, and `room` is the number of data
/// bytes that the device may write.
pub(super) fn understand(
    header: [u8; HEADER],
    (given, room): (usize, usize),
    rules: &Rules,
    segment: impl FnOnce() -> Option<[u8; SEGMENT]>,
) -> Result<(Action, u64), Refusal> {
    let bad = Refusal::Status(Status::IoError);
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
        0 if whole(room) => Ok((Action::Read, offset)),
        1 if whole(given) => changes((Action::Write { fua: rules.write_through }, offset)),
        4 => Ok((Action::Flush, 0)),
        8 => Ok((Action::Answer, 0)),
        // The configuration space allows one segment per request.
        11 | 13 if given == SEGMENT => changes(range(kind == 11, segment().ok_or(bad)?, rules)?),
        0 | 1 | 11 | 13 => Err(bad),
        _ => Err(Refusal::Status(Status::Unsupported)),
    }
}

fn range(discard: bool, segment: [u8; SEGMENT], rules: &Rules) -> Result<(Action, u64), Refusal> {
    let bad = Refusal::Status(Status::IoError);
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = segment;
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let len = u64::from(u32::from_le_bytes([n0, n1, n2, n3])) * SECTOR;
    let flags = u32::from_le_bytes(flags);
    // The only flag is "unmap", and a discard must not have it (Virtio 1.2, 5.2.6.2).
    if flags & !1 != 0 || (discard && flags != 0) || (discard && !rules.geometry.discard) {
        return Err(Refusal::Status(Status::Unsupported));
    }
    let offset = sector.checked_mul(SECTOR).ok_or(bad)?;
    if offset.checked_add(len).is_none_or(|end| end > rules.geometry.bytes) {
        return Err(bad);
    }
    let action = if discard {
        Action::Discard { len }
    } else {
        let fua = rules.write_through;
        let how = Zeroes { deallocate: flags & 1 != 0, fua, fast_only: false };
        Action::WriteZeroes { len, how }
    };
    Ok((action, offset))
}

/// Executes a job.
pub(super) async fn carry_out(disk: BlockDevice, job: Job) -> Completed {
    let Job { action, offset, mut data } = job;
    let outcome = match action {
        Action::Read => disk.read(offset, &mut data).await,
        Action::Write { fua } => disk.write(offset, &data, fua).await,
        Action::Flush => disk.flush().await,
        Action::Discard { len } => disk.discard(offset, len).await,
        Action::WriteZeroes { len, how } => disk.write_zeroes(offset, len, how).await,
        Action::Answer => Ok(()),
    };
    Completed { outcome, data, for_guest: matches!(action, Action::Read | Action::Answer) }
}

/// Writes data and status to the guest's memory. Returns the number of bytes for the used ring.
pub(super) fn put(chain: &Chain, data: &[u8], status: Status) -> u32 {
    let Ok(mut writer) = chain.clone().writer(chain.memory()) else { return 0 };
    let Some(room) = writer.available_bytes().checked_sub(1) else { return 0 };
    let Ok(mut last) = writer.split_at(room) else { return 0 };
    let (written, status) = match writer.write_all(data) {
        Ok(()) => (data.len(), status),
        Err(_) => (0, Status::IoError),
    };
    if last.write_all(&[status as u8]).is_err() {
        return 0;
    }
    u32::try_from(written + 1).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::memory::{Current, Memory};
    use super::*;
    use virtio_queue::{Queue, QueueT};
    use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

    const SIZE: u64 = 1 << 20;

    /// Guest with one read request.
    struct Guest(Current);

    impl Guest {
        fn new(room: u32) -> Self {
            let memory = Memory::from_ranges(&[(GuestAddress(0), SIZE as usize)]).unwrap();
            let guest = Self(Current::new(memory));
            guest.descriptor(0, 0x8000, 16, 1, 1);
            guest.ask_for(room);
            guest.descriptor(2, 0x9000, 1, 2, 0);
            guest.write(0x2002, &1u16.to_le_bytes());
            guest
        }

        fn write(&self, at: u64, bytes: &[u8]) {
            self.0.memory().write_slice(bytes, GuestAddress(at)).unwrap();
        }

        fn descriptor(&self, index: u64, at: u64, len: u32, flags: u16, next: u16) {
            let mut bytes = at.to_le_bytes().to_vec();
            bytes.extend(len.to_le_bytes());
            bytes.extend([flags, next].map(u16::to_le_bytes).concat());
            self.write(0x1000 + 16 * index, &bytes);
        }

        fn ask_for(&self, room: u32) {
            self.descriptor(1, 0x10000, room, 1 | 2, 2);
        }

        fn chain(&self) -> Chain {
            let mut queue = Queue::new(16).unwrap();
            queue.set_desc_table_address(Some(0x1000), Some(0));
            queue.set_avail_ring_address(Some(0x2000), Some(0));
            queue.set_used_ring_address(Some(0x3000), Some(0));
            queue.set_ready(true);
            queue.pop_descriptor_chain(self.0.memory()).unwrap()
        }
    }

    #[test]
    fn a_request_that_grows_while_it_is_looked_at_is_refused() {
        let geometry = Geometry {
            block_size: 512,
            bytes: 1 << 30,
            read_only: false,
            volatile_cache: false,
            write_zeroes: true,
            discard: true,
            compare: true,
            copy: true,
        };
        let rules = Rules { geometry, write_through: false };
        let guest = Guest::new(4096);
        let chain = guest.chain();
        let held = measure(&chain);
        assert_eq!(parse(&chain, &rules, b"", held).unwrap().data.len(), 4096);
        guest.ask_for(64 << 10);
        assert_eq!(parse(&chain, &rules, b"", held).unwrap_err(), Refusal::Status(Status::IoError));
        guest.ask_for(512);
        assert_eq!(parse(&chain, &rules, b"", held).unwrap().data.len(), 512);
    }
}
