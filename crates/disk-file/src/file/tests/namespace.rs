//! Tests of the code for NVMe character devices, without such a device. `/dev/null` accepts every
//! io_uring command and reports success. A regular file accepts none.

use super::super::flusher::Syncs;
use super::super::namespace::NamespaceFacts;
use super::*;
use crate::sys::NVME_STATUS;
use serde_json::json;

fn facts() -> NamespaceFacts {
    serde_json::from_value(json!({
        "nsid": 1, "block_size": 512, "blocks": 1 << 21, "max_transfer": 128 << 10,
        "is_protected": false,
        "has_cache": true, "deallocates": true, "writes_zeroes": true, "zeroes_deallocate": true,
        "atom": 512, "granularity": 512,
    }))
    .unwrap()
}

fn namespace(file: File, engine: EngineKind, facts: NamespaceFacts) -> FileShared {
    let mut shared = shared(file, facts.bytes());
    shared.direct = Some(Alignment { memory: 4, offset: 512 });
    shared.engine = engine;
    shared.flusher =
        Flusher::after(Arc::clone(&shared.file), Syncs::Commands { nsid: facts.nsid }, 0);
    shared.namespace = Some(facts);
    shared
}

fn null() -> File {
    File::options().read(true).write(true).open("/dev/null").unwrap()
}

/// Result of one request.
fn outcome(queue: &mut dyn Queue, op: Op, len: u64) -> Result<(), DiskError> {
    let (_, mut data) = buffer(len.clamp(4096, MIB));
    match queue.submit(1, &Request { op, offset: 4096, len }, &mut data) {
        Submitted::Done(result) => return result,
        Submitted::Pending => queue.commit(),
    }
    let mut ended = None;
    while ended.is_none() {
        wait(queue);
        queue.reap(&mut |_, result, _| ended = Some(result));
    }
    ended.unwrap()
}

#[test]
fn requests_end_with_their_last_command() {
    let mut queue = disk(namespace(null(), EngineKind::Uring, facts())).queue().unwrap();
    for (op, len) in [
        (Op::Read, 4096),
        (Op::Read, MIB),
        (Op::Write { fua: true }, 200 << 10),
        (Op::Verify, MIB),
        (Op::Discard, 512 << 20),
        (Op::WriteZeroes { deallocate: true, fua: false }, 512 << 20),
        (Op::WriteZeroes { deallocate: false, fua: false }, 4096),
    ] {
        assert_eq!(outcome(&mut *queue, op, len), Ok(()), "{op:?} {len}");
    }
    assert_eq!(outcome(&mut *queue, Op::Read, 2 << 30), Err(DiskError::OutOfRange));
    // A flush is an `ioctl`, which `/dev/null` does not implement.
    assert_eq!(outcome(&mut *queue, Op::Flush, 0), Err(DiskError::Io(libc::ENOTTY)));
    let facts = NamespaceFacts { has_cache: false, ..facts() };
    let mut queue = disk(namespace(null(), EngineKind::Uring, facts)).queue().unwrap();
    assert_eq!(outcome(&mut *queue, Op::Flush, 0), Ok(()), "it has no cache");
}

#[test]
fn a_file_without_nvme_commands_fails_all_requests() {
    for (engine, errno) in
        [(EngineKind::Uring, libc::EOPNOTSUPP), (EngineKind::Threads, libc::ENOTTY)]
    {
        let mut queue = disk(namespace(memfd(MIB), engine, facts())).queue().unwrap();
        assert_eq!(outcome(&mut *queue, Op::Read, 4096), Err(DiskError::Io(errno)));
        // The queue must not fall back to calls that a regular file supports.
        assert_eq!(outcome(&mut *queue, Op::Write { fua: false }, 512), Err(DiskError::Io(errno)));
    }
}

/// A system call of the disk, with its offset and its length.
type Made = (Call, u64, u64);

/// Lists the calls that a request makes. Each call ends with the result that `end` returns.
fn calls(
    shared: &FileShared,
    op: Op,
    len: u64,
    end: impl Fn(&Call, u64) -> i32,
) -> (Vec<Made>, Result<(), DiskError>) {
    let (_, data) = buffer(len.min(MIB));
    let request = Request { op, offset: 0, len };
    let mut task = Task::new(1, &request, &data, shared).unwrap();
    let mut made = Vec::new();
    loop {
        let next = task.call().unwrap();
        made.push((next.call, next.offset, next.len));
        match task.outcome(end(&next.call, next.len), shared) {
            Step::Call => {}
            Step::Piece => assert_eq!(task.finish_piece(), Step::Call),
            Step::End(result) => return (made, result),
        }
    }
}

#[test]
fn a_command_that_is_for_a_part_is_followed_by_others() {
    let shared = namespace(null(), EngineKind::Uring, facts());
    let (made, result) = calls(&shared, Op::Discard, 80 << 20, |_, len| len.min(32 << 20) as i32);
    let offsets: Vec<_> = made.iter().map(|(_, offset, len)| (offset >> 20, len >> 20)).collect();
    assert_eq!((offsets, result), (vec![(0, 80), (32, 48), (64, 16)], Ok(())));
    assert!(made.iter().all(|(call, ..)| *call == Call::Deallocate));
}

#[test]
fn refused_device_commands_have_a_fallback_and_failures_keep_their_status() {
    let shared = namespace(null(), EngineKind::Uring, facts());
    let refused = |of: Call| {
        move |call: &Call, len: u64| {
            if *call == of { -(NVME_STATUS + 0x4001) } else { len.min(MIB) as i32 }
        }
    };
    let (made, result) = calls(&shared, Op::Discard, 4096, refused(Call::Deallocate));
    assert_eq!(
        made.iter().map(|(call, ..)| *call).collect::<Vec<_>>(),
        [Call::Deallocate, Call::Punch]
    );
    assert_eq!(result, Ok(()));
    let zeroes = Op::WriteZeroes { deallocate: true, fua: false };
    let (made, result) = calls(&shared, zeroes, 2 * MIB, refused(Call::Punch));
    assert!(matches!(made[..], [(Call::Punch, ..), (Call::Write { .. }, 0, _), (_, MIB, _)]));
    assert_eq!(result, Ok(()));
    let (made, result) = calls(&shared, Op::Read, 4096, |_, _| -(NVME_STATUS + 0x4281));
    assert_eq!((made.len(), result), (1, Err(DiskError::Device(0x4281))));
    // The kernel itself generates this status after a reset of the device. The host must not get
    // it.
    let (made, result) = calls(&shared, Op::Read, 4096, |_, _| -(NVME_STATUS + 0x371));
    assert_eq!((made.len(), result), (65, Err(DiskError::Io(libc::EIO))));
}
