//! Validation and execution of an NBD request.

use super::handshake::Agreed;
use crate::data::Data;
use shadowbell_block::{BlockError, BlockQueue, Buffer, Extent, Geometry, Zeroes};
use shadowbell_nbd::wire::{MAX_PAYLOAD, NbdError, Request, allocation, command, flag};

/// Disk operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Read,
    Write {
        fua: bool,
    },
    Flush,
    Trim,
    /// Cache request, without an operation: prefetching has no use for an SSD.
    Cache,
    WriteZeroes(Zeroes),
    BlockStatus {
        /// True if a single extent is requested.
        one: bool,
    },
}

/// Validated request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Checked {
    pub(super) action: Action,
    pub(super) fua: bool,
    pub(super) offset: u64,
    pub(super) len: u32,
}

/// Refusal: the protocol's error, and a message.
pub(super) type Refusal = (NbdError, &'static str);

/// Validates a request of a client.
pub(super) fn check(
    request: &Request,
    geometry: &Geometry,
    agreed: Agreed,
) -> Result<Checked, Refusal> {
    let Request { flags, command, offset, len, .. } = *request;
    let fua = flags & flag::FUA != 0;
    let zeroes = Zeroes {
        deallocate: flags & flag::NO_HOLE == 0,
        fua,
        fast_only: flags & flag::FAST_ZERO != 0,
    };
    let (action, allowed) = match command {
        command::READ => (Action::Read, if agreed.structured { flag::DF } else { 0 }),
        command::WRITE => (Action::Write { fua }, 0),
        command::FLUSH => (Action::Flush, 0),
        command::TRIM => (Action::Trim, 0),
        command::CACHE => (Action::Cache, 0),
        command::WRITE_ZEROES => (Action::WriteZeroes(zeroes), flag::NO_HOLE | flag::FAST_ZERO),
        command::BLOCK_STATUS => {
            (Action::BlockStatus { one: flags & flag::REQ_ONE != 0 }, flag::REQ_ONE)
        }
        _ => return Err((NbdError::Inval, "unknown command")),
    };
    // After the negotiation of FUA, the flag is allowed in every request.
    if flags & !(allowed | flag::FUA) != 0 {
        return Err((NbdError::Inval, "unknown flag for this command"));
    }
    let changes = matches!(action, Action::Write { .. } | Action::Trim | Action::WriteZeroes(_));
    if changes && geometry.read_only {
        return Err((NbdError::Perm, "the export is read-only"));
    }
    match action {
        Action::Flush => return Ok(Checked { action, fua, offset: 0, len: 0 }),
        Action::Trim if !geometry.discard => {
            return Err((NbdError::NotSup, "the disk cannot discard"));
        }
        Action::BlockStatus { .. } if !agreed.allocation => {
            return Err((NbdError::Inval, "no metadata context was selected"));
        }
        Action::BlockStatus { .. } if len == 0 => {
            return Err((NbdError::Inval, "the length is 0"));
        }
        Action::Read if len > MAX_PAYLOAD => {
            return Err((NbdError::Inval, "the request is longer than 32 MiB"));
        }
        _ => {}
    }
    if offset.checked_add(len.into()).is_none_or(|end| end > geometry.bytes) {
        let error = match action {
            Action::Write { .. } | Action::WriteZeroes(_) => NbdError::NoSpc,
            _ => NbdError::Inval,
        };
        return Err((error, "the request exceeds the end of the export"));
    }
    Ok(Checked { action, fua, offset, len })
}

/// Largest number of extents in a reply. `EXTENT` is the size of one in bytes.
const MAX_EXTENTS: usize = 128;
const EXTENT: usize = 8;
/// Buffer size for the extents of a reply, in bytes.
pub(super) const EXTENTS: usize = MAX_EXTENTS * EXTENT;

/// Request with its data, or with a buffer for its data.
pub(super) struct Job {
    pub(super) request: Checked,
    pub(super) data: Data,
}

/// Result of a job, with the job's data buffer.
pub(super) struct Completed {
    pub(super) outcome: Result<(), BlockError>,
    /// Data buffer; empty if a failed operation has consumed the buffer.
    pub(super) data: Data,
    /// Number of extents in the data.
    pub(super) extents: u32,
}

/// Executes a job.
pub(super) async fn execute(disk: BlockQueue, job: Job) -> Completed {
    let Job { request, data } = job;
    let mut data = match data {
        Data::Own(data) => data,
        Data::Shared(buffer) => return execute_direct(&disk, request, buffer).await,
    };
    let Checked { action, fua, offset, len } = request;
    let mut extents = 0;
    // The `get` calls cannot fail, because the buffer is at least as long as the request.
    let outcome = match action {
        Action::Read => disk.read(offset, data.get_mut(..len as usize).unwrap_or_default()).await,
        Action::Write { fua } => {
            disk.write(offset, data.get(..len as usize).unwrap_or_default(), fua).await
        }
        Action::Flush => disk.flush().await,
        Action::WriteZeroes(how) => disk.write_zeroes(offset, len.into(), how).await,
        Action::Trim => match disk.discard(offset, len.into()).await {
            // A discard has no Force Unit Access, so a flush follows.
            Ok(()) if fua => disk.flush().await,
            outcome => outcome,
        },
        Action::BlockStatus { one } => {
            let most = if one { 1 } else { MAX_EXTENTS };
            let found = disk.extents(offset, len.into(), most).await;
            found.map(|found| extents = put_extents(&found, &mut data))
        }
        Action::Cache => Ok(()),
    };
    Completed { outcome, data: Data::Own(data), extents }
}

/// Reads or writes whole blocks. Only these operations use shared buffers.
async fn execute_direct(disk: &BlockQueue, request: Checked, buffer: Buffer) -> Completed {
    let Checked { action, offset, len, .. } = request;
    let moved = match action {
        Action::Write { fua } => disk.write_direct(offset, len as usize, buffer, fua).await,
        _ => disk.read_direct(offset, len as usize, buffer).await,
    };
    let (outcome, data) = match moved {
        Ok(buffer) => (Ok(()), Data::Shared(buffer)),
        Err(error) => (Err(error), Data::default()),
    };
    Completed { outcome, data, extents: 0 }
}

/// Encodes extents into the data of the reply. Returns the number of extents that fit.
fn put_extents(found: &[Extent], data: &mut [u8]) -> u32 {
    let mut count = 0;
    for (extent, into) in found.iter().zip(data.chunks_exact_mut(EXTENT)) {
        // The length fits, because an extent is no longer than the request, whose length has 32
        // bits.
        let len = u32::try_from(extent.len).unwrap_or(u32::MAX);
        let state = if extent.is_hole { allocation::HOLE | allocation::ZERO } else { 0 };
        let bytes = u64::from(len) << 32 | u64::from(state);
        into.copy_from_slice(&bytes.to_be_bytes());
        count += 1;
    }
    count
}

/// NBD error number for an error of the disk.
pub(super) fn number(error: &BlockError) -> NbdError {
    use rustix::io::Errno;
    match error.errno() {
        Errno::PERM => NbdError::Perm,
        Errno::INVAL => NbdError::Inval,
        Errno::NOTSUP => NbdError::NotSup,
        Errno::NOSPC => NbdError::NoSpc,
        Errno::NOMEM => NbdError::NoMem,
        _ => NbdError::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 20;

    fn geometry() -> Geometry {
        Geometry {
            bytes: SIZE,
            block_size: 512,
            read_only: false,
            volatile_cache: true,
            write_zeroes: true,
            discard: true,
        }
    }

    fn ask(command: u16, flags: u16, offset: u64, len: u32) -> Request {
        Request { flags, command, cookie: 1, offset, len }
    }

    fn error(request: Request, geometry: &Geometry, agreed: Agreed) -> NbdError {
        check(&request, geometry, agreed).unwrap_err().0
    }

    #[test]
    fn invalid_requests_are_refused_with_the_protocols_error() {
        let plain = Agreed::default();
        let all = Agreed { structured: true, allocation: true };
        let g = geometry();
        use command::*;
        for (request, agreed, expected) in [
            (ask(99, 0, 0, 0), all, NbdError::Inval),
            (ask(READ, 1 << 9, 0, 512), all, NbdError::Inval),
            (ask(READ, flag::DF, 0, 512), plain, NbdError::Inval),
            (ask(WRITE, flag::NO_HOLE, 0, 512), all, NbdError::Inval),
            (ask(READ, 0, SIZE, 1), all, NbdError::Inval),
            (ask(READ, 0, u64::MAX, 1), all, NbdError::Inval),
            (ask(READ, 0, 0, MAX_PAYLOAD + 1), all, NbdError::Inval),
            (ask(WRITE, 0, SIZE - 1, 2), all, NbdError::NoSpc),
            (ask(WRITE_ZEROES, 0, SIZE - 1, 2), all, NbdError::NoSpc),
            (ask(TRIM, 0, SIZE - 1, 2), all, NbdError::Inval),
            (ask(CACHE, 0, SIZE, 1), all, NbdError::Inval),
            (ask(BLOCK_STATUS, 0, 0, 512), plain, NbdError::Inval),
            (ask(BLOCK_STATUS, 0, 0, 0), all, NbdError::Inval),
        ] {
            assert_eq!(error(request, &g, agreed), expected, "{request:?}");
        }
        let read_only = Geometry { read_only: true, ..g };
        for command in [WRITE, WRITE_ZEROES, TRIM] {
            assert_eq!(error(ask(command, 0, 0, 512), &read_only, all), NbdError::Perm);
        }
        let no_discard = Geometry { discard: false, ..g };
        assert_eq!(error(ask(TRIM, 0, 0, 512), &no_discard, all), NbdError::NotSup);
    }

    #[test]
    fn extents_are_encoded_as_the_protocol_requires() {
        let some = [Extent { len: 512, is_hole: false }, Extent { len: 1 << 30, is_hole: true }];
        let mut data = vec![9; EXTENTS];
        assert_eq!(put_extents(&some, &mut data), 2);
        assert_eq!(data[..16], *b"\0\0\x02\0\0\0\0\0\x40\0\0\0\0\0\0\x03");
        assert_eq!(put_extents(&some, &mut data[..8]), 1);
        let status = |flags| {
            let all = Agreed { structured: true, allocation: true };
            check(&ask(command::BLOCK_STATUS, flags, 0, 512), &geometry(), all).unwrap().action
        };
        assert_eq!(status(0), Action::BlockStatus { one: false });
        assert_eq!(status(flag::REQ_ONE), Action::BlockStatus { one: true });
    }

    #[test]
    fn request_flags_are_decoded() {
        let all = Agreed { structured: true, allocation: true };
        let zeroes = |flags| {
            let request = ask(command::WRITE_ZEROES, flags, 0, 512);
            match check(&request, &geometry(), all).unwrap().action {
                Action::WriteZeroes(zeroes) => zeroes,
                other => panic!("{other:?}"),
            }
        };
        let how = |deallocate, fua, fast_only| Zeroes { deallocate, fua, fast_only };
        assert_eq!(zeroes(0), how(true, false, false));
        assert_eq!(zeroes(flag::NO_HOLE | flag::FUA), how(false, true, false));
        assert_eq!(zeroes(flag::FAST_ZERO), how(true, false, true));
        let read = check(&ask(command::READ, flag::FUA | flag::DF, 0, 0), &geometry(), all);
        assert_eq!(read.unwrap().action, Action::Read);
    }
}
