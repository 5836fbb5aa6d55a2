//! Tests of the queue on files with unusual behaviour: pipes, which are slow and return short
//! reads; devices that are full or broken; file systems that lack certain calls.

mod namespace;

use super::flusher::Flusher;
use super::options::Aio;
use super::shared::{Alignment, FileShared, OpenHandle};
use super::task::{Step, Task};
use super::write_atomicity::WriteAtomicity;
use super::{FileDisk, open};
use crate::sys::{Call, EngineKind};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use shadowbell_disk::{Disk, DiskError, DiskInfo, Op, Queue, Request, Submitted};
use shadowbell_memory::{DmaSpace, Mapping, Segments, SharedBytes, View};
use shadowbell_testing::wait;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

thread_local! {
    /// Engine that the disks of this test use.
    static ENGINE: Cell<EngineKind> = const { Cell::new(EngineKind::Uring) };
}

pub(super) fn shared(file: impl Into<File>, bytes: u64) -> FileShared {
    let file = Arc::new(file.into());
    let flusher = Flusher::new(Arc::clone(&file), true);
    FileShared {
        atom: WriteAtomicity::Storage,
        ranges: None,
        handle: OpenHandle::new(&file, None, &flusher, false),
        flusher,
        file,
        info: DiskInfo {
            block_size: 512,
            blocks: bytes / 512,
            read_only: false,
            volatile_cache: true,
            discard: true,
            granularity: 1,
            metadata: None,
            zoned: None,
        },
        direct: None,
        engine: ENGINE.get(),
        no_uring: None,
        waits: false,
        regular: false,
        end: AtomicU64::new(bytes),
        full: AtomicU64::new(0),
        no_zero_range: AtomicBool::new(false),
        no_punch: AtomicBool::new(false),
        namespace: None,
        zeroes: Mapping::anonymous(MIB).unwrap().bytes(),
        #[cfg(feature = "scripted")]
        script: None,
    }
}

#[test]
fn a_disk_without_atomic_writes_has_a_remark() {
    let mut shared = shared(memfd(8192), 8192);
    assert_eq!(disk(shared.resized(shared.info.clone(), 8192)).remark(), None);
    shared.atom = WriteAtomicity::Nothing;
    let remark = disk(shared).remark().unwrap();
    assert!(remark.starts_with("test: a loss of power may leave a block"), "{remark}");
}

#[test]
fn single_block_writes_request_atomicity_if_needed() {
    let mut shared = shared(memfd(8192), 8192);
    (shared.info.block_size, shared.info.blocks) = (4096, 2);
    for (atom, op, len, expected) in [
        (WriteAtomicity::Requested, Op::Write { fua: false }, 4096, true),
        (WriteAtomicity::Requested, Op::Write { fua: true }, 4096, true),
        (WriteAtomicity::Requested, Op::Write { fua: false }, 8192, false),
        (WriteAtomicity::Storage, Op::Write { fua: false }, 4096, false),
    ] {
        shared.atom = atom;
        let (_, data) = buffer(len);
        let task = Task::new(1, &Request { op, offset: 0, len }, &data, &shared).unwrap();
        let call = task.call().unwrap().call;
        assert!(
            matches!(call, Call::Write { atomic, .. } if atomic == expected),
            "{atom:?} {call:?}"
        );
    }
}

fn disk(shared: FileShared) -> FileDisk {
    FileDisk { shared: Arc::new(shared), path: "test".into() }
}

/// Creates a disk on the reading end of a pipe. A read is in flight until the test writes data to
/// the other end.
fn pipe() -> (Box<dyn Queue>, File) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    (disk(shared(reader, 1 << 30)).queue().unwrap(), writer.into())
}

pub(super) fn memfd(bytes: u64) -> File {
    let fd = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd.into()
}

fn buffer(len: u64) -> (SharedBytes, Segments) {
    let bytes = Mapping::anonymous(len).unwrap().bytes().slice(0, len as usize).unwrap();
    let data = Segments::from_bytes(&bytes);
    (bytes, data)
}

fn read(offset: u64, len: u64) -> Request {
    Request { op: Op::Read, offset, len }
}

/// Waits until the wake descriptor is readable.
fn wait(queue: &dyn Queue) {
    wait::readable("a signal of the wake descriptor", queue.wake_fd().unwrap());
}

fn reap(queue: &mut dyn Queue) -> Vec<(u32, Result<(), DiskError>)> {
    let mut ended = Vec::new();
    queue.reap(&mut |tag, result, _| ended.push((tag, result)));
    ended
}

/// Waits until no request is pending, and returns the results.
fn drain(queue: &mut dyn Queue) -> Vec<(u32, Result<(), DiskError>)> {
    queue.commit();
    let mut ended = Vec::new();
    while queue.pending() > 0 {
        wait(queue);
        ended.append(&mut reap(queue));
    }
    ended
}

fn run(queue: &mut dyn Queue, op: Op, len: u64) -> Result<(), DiskError> {
    let (_, mut data) = buffer(len.max(512));
    run_at(queue, Request { op, offset: 0, len }, &mut data)
}

fn run_at(queue: &mut dyn Queue, request: Request, data: &mut Segments) -> Result<(), DiskError> {
    match queue.submit(7, &request, data) {
        Submitted::Done(result) => result,
        Submitted::Pending => match drain(queue)[..] {
            [(7, result)] => result,
            ref other => panic!("{other:?}"),
        },
    }
}

#[test]
fn short_reads_are_continued() {
    let (mut queue, mut writer) = pipe();
    let (bytes, mut data) = buffer(1024);
    assert_eq!(queue.submit(3, &read(0, 1024), &mut data), Submitted::Pending);
    assert_eq!(data.len(), 0, "the queue has the buffer");
    queue.commit();
    for part in [100, 23, 900] {
        assert_eq!(reap(&mut *queue), []);
        writer.write_all(&vec![part as u8; part]).unwrap();
        wait(&*queue);
        assert_eq!(reap(&mut *queue), []);
    }
    writer.write_all(&[1]).unwrap();
    assert_eq!(drain(&mut *queue), [(3, Ok(()))]);
    for (at, byte) in
        [(0, 100u8), (99, 100), (100, 23), (122, 23), (123, 132), (1022, 132), (1023, 1)]
    {
        assert_eq!(bytes.read::<u8>(at), Some(byte), "at {at}");
    }
}

#[test]
fn an_idle_disk_submits_an_incomplete_batch() {
    let (mut queue, mut writer) = pipe();
    writer.write_all(&[1; 1024]).unwrap();
    for tag in [3, 4] {
        let (_, mut data) = buffer(512);
        assert_eq!(queue.submit(tag, &read(0, 512), &mut data), Submitted::Pending);
        wait(&*queue);
        assert_eq!(reap(&mut *queue), [(tag, Ok(()))]);
    }
}

#[test]
fn the_wake_descriptor_works_with_epoll() {
    let (mut queue, mut writer) = pipe();
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let fd = queue.wake_fd().unwrap();
    epoll::add(&set, fd, epoll::EventData::new_u64(5), epoll::EventFlags::IN).unwrap();
    let mut events =
        [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
    let mut ready = |time: Duration| {
        let timeout = Timespec::try_from(time).unwrap();
        rustix::io::retry_on_intr(|| epoll::wait(&set, &mut events, Some(&timeout))).unwrap()
    };
    for round in 0..3 {
        let (_, mut data) = buffer(512);
        assert_eq!(queue.submit(round, &read(0, 512), &mut data), Submitted::Pending);
        queue.commit();
        assert_eq!(reap(&mut *queue), []);
        assert_eq!(ready(Duration::ZERO), 0, "nothing has ended");
        let mut late = writer.try_clone().unwrap();
        let thread = std::thread::spawn(move || {
            wait::short_pause();
            late.write_all(&[1; 512]).unwrap();
        });
        let deadline = wait::deadline();
        assert!(ready(wait::LIMIT) == 1 && Instant::now() < deadline, "the sleeper is woken");
        assert_eq!(ready(Duration::ZERO), 1, "and again, until it has reaped");
        assert_eq!(reap(&mut *queue), [(round, Ok(()))]);
        assert_eq!(ready(Duration::ZERO), 0);
        thread.join().unwrap();
    }
    writer.flush().unwrap();
}

#[test]
fn pending_requests_are_cancelled() {
    let (mut queue, _writer) = pipe();
    for tag in 0..3 {
        let (_, mut data) = buffer(512);
        assert_eq!(queue.submit(tag, &read(0, 512), &mut data), Submitted::Pending);
    }
    queue.commit();
    queue.cancel(1);
    queue.cancel(99);
    wait(&*queue);
    assert_eq!(reap(&mut *queue), [(1, Err(DiskError::Cancelled))]);
    assert_eq!(queue.pending(), 2);
    // This request is submitted, but not committed, and is cancelled in this state.
    let (_, mut data) = buffer(512);
    assert_eq!(queue.submit(8, &read(0, 512), &mut data), Submitted::Pending);
    queue.cancel(8);
    wait(&*queue);
    assert_eq!(reap(&mut *queue), [(8, Err(DiskError::Cancelled))]);
    assert_eq!(queue.pending(), 2);
}

/// A reset, or Delete I/O Submission Queue, cancels all commands of a queue. Cancelling takes time
/// linear in their number. With quadratic time, this test would not end in acceptable time.
#[test]
fn a_hundred_thousand_waiting_requests_are_cancelled_at_once() {
    const MANY: u32 = 200_000;
    let (mut queue, _writer) = pipe();
    let (bytes, _) = buffer(512);
    for tag in 0..MANY {
        let mut data = Segments::from_bytes(&bytes);
        assert_eq!(queue.submit(tag, &read(0, 512), &mut data), Submitted::Pending);
    }
    queue.commit();
    // The last request is cancelled first: the worst order for a search from the front.
    (0..MANY).rev().for_each(|tag| queue.cancel(tag));
    (0..MANY).for_each(|tag| queue.cancel(tag));
    let mut ended = drain(&mut *queue);
    assert!(ended.iter().all(|(_, result)| *result == Err(DiskError::Cancelled)));
    ended.sort_unstable_by_key(|(tag, _)| *tag);
    assert!(ended.iter().map(|(tag, _)| *tag).eq(0..MANY), "each ends once");
    assert_eq!(queue.pending(), 0);
    // The tags are free again. The new request completes with its own result, so no cancelled
    // request is still in progress.
    let (_, mut data) = buffer(512);
    assert_eq!(queue.submit(7, &read(0, 512), &mut data), Submitted::Pending);
    queue.commit();
    queue.cancel(7);
    assert_eq!(drain(&mut *queue), [(7, Err(DiskError::Cancelled))]);
}

#[test]
fn a_cancelled_request_does_not_go_on_after_a_short_transfer() {
    let (mut queue, mut writer) = pipe();
    let (_, mut data) = buffer(1024);
    assert_eq!(queue.submit(1, &read(0, 1024), &mut data), Submitted::Pending);
    queue.commit();
    writer.write_all(&[1; 512]).unwrap();
    wait(&*queue);
    queue.cancel(1); // the call of this request ended short before the cancellation
    assert_eq!(drain(&mut *queue), [(1, Err(DiskError::Cancelled))]);
}

/// If the thread is allowed to block, `submit` executes buffered writes without FUA directly. Other
/// requests remain asynchronous.
#[test]
fn buffered_writes_complete_inline_on_a_blocking_thread() {
    let mut shared = shared(memfd(8192), 8192);
    shared.waits = true;
    let disk = disk(shared);
    let mut queue = disk.queue().unwrap();
    let bytes = Mapping::anonymous(4096).unwrap().bytes();
    let ask = |queue: &mut dyn Queue, op, byte: u8| {
        bytes.write_from(0, &[byte; 4096]).unwrap();
        let mut data = Segments::from_bytes(&bytes);
        let request = Request { op, offset: 4096, len: 4096 };
        let submitted = queue.submit(7, &request, &mut data);
        let ended = if submitted == Submitted::Pending { drain(queue) } else { Vec::new() };
        (submitted, data.len(), ended)
    };
    let write = Op::Write { fua: false };
    let later = (Submitted::Pending, 0, vec![(7, Ok(()))]);
    assert_eq!(ask(&mut *queue, write, 1), later);
    queue.may_wait();
    // The write completed within `submit`, so the caller has its buffer back.
    assert_eq!(ask(&mut *queue, write, 2), (Submitted::Done(Ok(())), 4096, Vec::new()));
    assert_eq!(ask(&mut *queue, Op::Read, 0), later);
    let mut found = [0; 4096];
    bytes.read_into(0, &mut found).unwrap();
    assert_eq!(found, [2; 4096]);
    // A write with FUA needs a sync by the flusher, so `submit` does not complete it.
    assert_eq!(ask(&mut *queue, Op::Write { fua: true }, 3), later);
    assert_eq!(ask(&mut *queue, Op::Read, 0), later);
    bytes.read_into(0, &mut found).unwrap();
    assert_eq!((found, queue.pending()), ([3; 4096], 0));
}

#[test]
fn requests_beyond_the_ring_wait_in_order() {
    const MANY: u32 = 5000;
    let (mut queue, mut writer) = pipe();
    let atomic = Mapping::anonymous(u64::from(MANY) * 512).unwrap().bytes();
    for tag in 0..MANY {
        let mut data = Segments::from_bytes(&atomic.slice(tag as usize * 512, 512).unwrap());
        assert_eq!(queue.submit(tag, &read(0, 512), &mut data), Submitted::Pending);
    }
    queue.commit();
    assert_eq!(queue.pending(), MANY as usize);
    // This request is at the end of a long list of waiting requests.
    queue.cancel(MANY - 1);
    wait(&*queue);
    assert_eq!(reap(&mut *queue), [(MANY - 1, Err(DiskError::Cancelled))]);
    let feeder = std::thread::spawn(move || {
        for tag in 0..MANY - 1 {
            writer.write_all(&[tag as u8; 512]).unwrap();
        }
        writer
    });
    let ended = drain(&mut *queue);
    let mut tags: Vec<u32> = ended.iter().map(|(tag, _)| *tag).collect();
    assert!(ended.iter().all(|(_, result)| result.is_ok()));
    tags.sort_unstable();
    assert!(tags.into_iter().eq(0..MANY - 1));
    feeder.join().unwrap();
}

#[test]
fn a_dropped_queue_writes_to_no_released_memory() {
    let (mut queue, mut writer) = pipe();
    let bytes = Mapping::anonymous(4096).unwrap().bytes();
    let mut space = DmaSpace::default();
    space.map(0, 4096, &bytes).unwrap();
    let view = View::new(Arc::clone(space.table()));
    let watch = view.watch();
    for tag in 0..3000 {
        let mut data = Segments::new();
        view.resolve_prps(0, 0, 512, 4096, true, &mut data).unwrap();
        assert_eq!(queue.submit(tag, &read(0, 512), &mut data), Submitted::Pending);
        if tag == 2000 {
            queue.commit(); // some requests are in the kernel, some are prepared, some wait
        }
    }
    drop(view);
    assert!(!watch.is_idle());
    drop(queue);
    assert!(watch.is_idle());
    // If a read were still in flight in the kernel, these bytes would reach the guest's memory. A
    // write error is ignored: it means that no read is in flight.
    let _ = writer.write_all(&[0xee; 512]);
    assert_eq!(bytes.read::<u64>(0), Some(0));
}

#[test]
fn a_full_disk_is_no_space_and_a_broken_one_its_error() {
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    let disk_of_full = disk(shared(full, MIB));
    let mut queue = disk_of_full.queue().unwrap();
    assert!(!disk_of_full.is_full());
    assert_eq!(run(&mut *queue, Op::Write { fua: false }, 4096), Err(DiskError::NoSpace));
    assert_eq!(run(&mut *queue, Op::Write { fua: true }, 4096), Err(DiskError::NoSpace));
    assert!(disk_of_full.is_full());
    // Address 0 of this process is not mapped, so reading the file at offset 0 fails.
    let broken = File::open("/proc/self/mem").unwrap();
    let mut queue = disk(shared(broken, MIB)).queue().unwrap();
    for op in [Op::Read, Op::Compare, Op::Verify] {
        assert_eq!(run(&mut *queue, op, 4096), Err(DiskError::Io(libc::EIO)), "{op:?}");
    }
    for (errno, error) in [
        (libc::EDQUOT, DiskError::NoSpace),
        (libc::EFBIG, DiskError::NoSpace),
        (libc::EROFS, DiskError::Io(libc::EROFS)),
    ] {
        assert_eq!(shared(memfd(512), 512).error(errno), error);
    }
}

/// Creates a disk whose syncs have the results that `scripted_result` returns.
fn answering(direct: bool, scripted_result: impl FnMut() -> i32 + Send + 'static) -> FileDisk {
    let mut shared = shared(memfd(4096), 4096);
    shared.direct = direct.then_some(Alignment { memory: 1, offset: 1 });
    shared.flusher = Flusher::new(Arc::clone(&shared.file), !direct);
    *shared.flusher.scripted_result.lock() = Some(Box::new(scripted_result));
    disk(shared)
}

/// The kernel reports the loss of unwritten data only once, and drops the data. So after a failed
/// sync, all later syncs of the disk must fail as well.
#[test]
fn a_sync_that_has_failed_is_not_made_good_by_the_next() {
    let (flush, fua) = (Op::Flush, Op::Write { fua: true });
    let zeroes = Op::WriteZeroes { deallocate: false, fua: true };
    let broken = DiskError::Io(libc::EIO);
    for first in [flush, fua, zeroes] {
        for (errno, error) in [(libc::EIO, broken), (libc::ENOSPC, DiskError::NoSpace)] {
            let mut answers = vec![-errno];
            let disk = answering(false, move || answers.pop().unwrap_or(0));
            let queues = &mut [disk.queue().unwrap(), disk.queue().unwrap()];
            assert_eq!(
                run(&mut *queues[0], first, if first == flush { 0 } else { 512 }),
                Err(error)
            );
            assert!(disk.has_lost_writes());
            for queue in queues {
                assert_eq!([(); 2].map(|()| run(&mut **queue, flush, 0)), [Err(error); 2]);
                assert_eq!(run(&mut **queue, fua, 512), Err(error));
                assert_eq!(run(&mut **queue, zeroes, 512), Err(error));
                assert_eq!(run(&mut **queue, Op::Write { fua: false }, 512), Ok(()));
                assert_eq!(run(&mut **queue, Op::Read, 512), Ok(()));
            }
        }
    }
    // With direct I/O, no data are in the page cache, so the kernel drops none, and a flush may
    // succeed after a failed one.
    let mut answers = vec![-libc::EIO];
    let disk = answering(true, move || answers.pop().unwrap_or(0));
    let queue = &mut *disk.queue().unwrap();
    assert_eq!([(); 2].map(|()| run(queue, flush, 0)), [Err(broken), Ok(())]);
    // An interrupted sync is repeated.
    let mut answers = vec![-libc::EINTR, -libc::EAGAIN];
    let disk = answering(false, move || answers.pop().unwrap_or(0));
    assert_eq!(run(&mut *disk.queue().unwrap(), flush, 0), Ok(()));
}

/// Only one sync is in flight at a time. The requests that arrive during a sync share the next one.
#[test]
fn concurrent_flushes_share_a_sync() {
    use std::sync::mpsc::channel;
    let ((begun, begins), (end, ended)) = (channel(), channel());
    let disk = answering(false, move || {
        begun.send(()).unwrap();
        ended.recv().unwrap()
    });
    let mut queues: Vec<_> = (0..4).map(|_| disk.queue().unwrap()).collect();
    let ask = |queue: &mut Box<dyn Queue>, tag| {
        let flush = Request { op: Op::Flush, offset: 0, len: 0 };
        assert_eq!(queue.submit(tag, &flush, &mut Segments::new()), Submitted::Pending);
        queue.commit();
    };
    ask(&mut queues[0], 0);
    begins.recv().unwrap();
    for queue in &mut queues {
        (1..100).for_each(|tag| ask(queue, tag));
    }
    // All these requests arrived during the first sync. So they need a second sync. It starts only
    // now.
    assert!(queues.iter_mut().all(|queue| reap(&mut **queue).is_empty()));
    end.send(0).unwrap();
    begins.recv().unwrap();
    end.send(-libc::EIO).unwrap();
    let error = Err(DiskError::Io(libc::EIO));
    for (n, queue) in queues.iter_mut().enumerate() {
        let mut ended = drain(&mut **queue);
        ended.sort_by_key(|(tag, _)| *tag);
        if n == 0 {
            assert_eq!(ended.remove(0), (0, Ok(())), "it began before");
        }
        assert_eq!(ended, (1..100).map(|tag| (tag, error)).collect::<Vec<_>>());
    }
    assert!(begins.try_recv().is_err());
}

#[test]
fn a_sync_that_does_not_end_is_cancelled_and_noted_all_the_same() {
    let (end, ended) = std::sync::mpsc::channel();
    let disk = answering(false, move || ended.recv().unwrap());
    let mut queue = disk.queue().unwrap();
    let flush = Request { op: Op::Flush, offset: 0, len: 0 };
    assert_eq!(queue.submit(7, &flush, &mut Segments::new()), Submitted::Pending);
    queue.commit();
    queue.cancel(7);
    assert_eq!(drain(&mut *queue), [(7, Err(DiskError::Cancelled))]);
    // Dropping a queue does not wait for its cancelled sync.
    drop(queue);
    end.send(-libc::EIO).unwrap();
    let mut queue = disk.queue().unwrap();
    assert_eq!(run(&mut *queue, Op::Write { fua: false }, 512), Ok(()));
    end.send(0).unwrap();
    assert_eq!(run(&mut *queue, Op::Flush, 0), Err(DiskError::Io(libc::EIO)));
}

#[test]
fn a_disk_is_no_longer_full_after_the_refused_request_succeeds() {
    let disk = disk(shared(memfd(MIB), MIB));
    let mut queue = disk.queue().unwrap();
    let mut ask = |op, offset, len| {
        let (_, mut data) = buffer(len);
        assert_eq!(run_at(&mut *queue, Request { op, offset, len }, &mut data), Ok(()));
        disk.is_full()
    };
    let request = |op, offset| Request { op, offset, len: 4096 };
    let write = Op::Write { fua: false };
    for op in [write, Op::WriteZeroes { deallocate: false, fua: false }] {
        disk.shared.note_room(&request(op, 8192), Err(DiskError::NoSpace));
        assert!(ask(write, 0, 8192), "before it");
        assert!(ask(write, 12288, 4096), "behind it");
        assert!(ask(Op::Read, 0, 65536), "reads need no room");
        assert!(ask(Op::Discard, 8192, 4096), "nor does a hole");
        assert!(ask(Op::WriteZeroes { deallocate: true, fua: false }, 8192, 4096));
        assert!(ask(Op::Flush, 0, 512));
        disk.shared.note_room(&request(write, 0), Err(DiskError::Io(5)));
        assert!(!ask(op, 4096, 8192));
    }
    let flush = Request { op: Op::Flush, offset: 0, len: 0 };
    disk.shared.note_room(&flush, Err(DiskError::NoSpace));
    assert!(ask(write, 0, MIB));
    assert!(!ask(Op::Flush, 0, 512));
}

#[test]
fn an_unexpected_end_of_file_is_an_io_error() {
    // The test marks the file as not regular, so the disk does not check its length. But the file
    // is shorter than the disk.
    let mut queue = disk(shared(memfd(4096), MIB)).queue().unwrap();
    assert_eq!(run(&mut *queue, Op::Read, 4096), Ok(()));
    assert_eq!(run(&mut *queue, Op::Read, 8192), Err(DiskError::Io(libc::EIO)));
}

#[test]
fn zeroes_are_written_if_the_file_system_has_no_zero_range() {
    // A memfd supports holes but not `FALLOC_FL_ZERO_RANGE`.
    for (no_punch, op) in [
        (false, Op::WriteZeroes { deallocate: false, fua: false }),
        (false, Op::WriteZeroes { deallocate: true, fua: true }),
        (true, Op::WriteZeroes { deallocate: true, fua: true }),
        (false, Op::Discard),
        (true, Op::Discard),
    ] {
        let mut file = memfd(4 * MIB);
        file.write_all(&vec![7; 4 * MIB as usize]).unwrap();
        let mut shared = shared(file.try_clone().unwrap(), 4 * MIB);
        shared.no_punch = AtomicBool::new(no_punch);
        let disk = disk(shared);
        let mut queue = disk.queue().unwrap();
        let (start, len) = (512, 3 * MIB + 512); // the range spans several writes
        let request = Request { op, offset: start, len };
        assert_eq!(run_at(&mut *queue, request, &mut Segments::new()), Ok(()));
        let mut content = Vec::new();
        file = {
            use std::io::Seek as _;
            file.rewind().unwrap();
            file
        };
        std::io::Read::read_to_end(&mut file, &mut content).unwrap();
        let (start, end) = (start as usize, (start + len) as usize);
        assert!(content[..start].iter().all(|b| *b == 7), "{op:?}");
        assert!(content[start..end].iter().all(|b| *b == 0), "{op:?}");
        assert!(content[end..].iter().all(|b| *b == 7), "{op:?}");
        assert_eq!(content.len() as u64, 4 * MIB);
        let keeps = matches!(op, Op::WriteZeroes { deallocate: false, .. });
        let no_zero_range = disk.shared.no_zero_range.load(Ordering::Relaxed);
        assert_eq!(no_zero_range, keeps || no_punch, "it is not tried again");
        let blocks = std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512;
        assert_eq!(blocks < 2 * MIB, !keeps && !no_punch, "{op:?} leaves {blocks} bytes");
    }
}

#[test]
fn the_zeroes_that_are_written_stay_zeroes() {
    let mut queue = disk(shared(memfd(MIB), MIB)).queue().unwrap();
    let (bytes, _) = buffer(4096);
    let request = |op| Request { op, offset: 0, len: 4096 };
    for op in [Op::Write { fua: false }, Op::Compare, Op::Verify] {
        let zeroes = request(Op::WriteZeroes { deallocate: false, fua: false });
        assert_eq!(run_at(&mut *queue, zeroes, &mut Segments::new()), Ok(()));
        let read = request(Op::Read);
        assert_eq!(run_at(&mut *queue, read, &mut Segments::from_bytes(&bytes)), Ok(()));
        assert_eq!(bytes.read::<[u8; 4096]>(0), Some([0; 4096]), "before {op:?}");
        // Checks that no request uses the shared buffer of zeroes as its own buffer. That request
        // would store the byte 7 in the shared buffer, and the next Write Zeroes would write this
        // byte.
        bytes.fill(0, 4096, 7).unwrap();
        for op in [Op::Write { fua: false }, op] {
            let data = &mut Segments::from_bytes(&bytes);
            assert_eq!(run_at(&mut *queue, request(op), data), Ok(()));
        }
    }
}

#[test]
fn an_unsupported_discard_changes_no_data() {
    let mut shared = shared(memfd(4096), 4096);
    shared.info.discard = false;
    shared.file.as_ref().write_all(&[7; 4096]).unwrap();
    let file = Arc::clone(&shared.file);
    let mut queue = disk(shared).queue().unwrap();
    let discard = Request { op: Op::Discard, offset: 0, len: 4096 };
    let done = queue.submit(0, &discard, &mut Segments::new());
    assert_eq!(done, Submitted::Done(Ok(())));
    let mut content = [0; 4096];
    std::os::unix::fs::FileExt::read_exact_at(&*file, &mut content, 0).unwrap();
    assert_eq!(content, [7; 4096]);
}

#[test]
fn many_bounced_requests_share_few_buffers() {
    let mut queue = disk(shared(memfd(64 * MIB), 64 * MIB)).queue().unwrap();
    for tag in 0..500 {
        // Each request is longer than a bounce buffer, so it makes several calls, and keeps its
        // buffer until the last one.
        let request = Request { op: Op::Verify, offset: u64::from(tag) * 512, len: MIB };
        assert_eq!(queue.submit(tag, &request, &mut Segments::new()), Submitted::Pending);
    }
    let ended = drain(&mut *queue);
    assert_eq!(ended.len(), 500);
    assert!(ended.iter().all(|(_, result)| result.is_ok()));
}

#[test]
fn a_thread_can_have_many_queues_and_a_disk_many_threads() {
    let disk = disk(shared(memfd(MIB), MIB));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut queues: Vec<_> = (0..4).map(|_| disk.queue().unwrap()).collect();
                for queue in &mut queues {
                    assert_eq!(run(&mut **queue, Op::Read, 4096), Ok(()));
                    assert_eq!(run(&mut **queue, Op::Flush, 0), Ok(()));
                }
            });
        }
    });
}

#[test]
fn force_unit_access_reaches_the_call() {
    let (_, data) = buffer(512);
    for (fua, direct) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut shared = shared(memfd(4096), 4096);
        shared.direct = direct.then_some(Alignment { memory: 1, offset: 1 });
        let request = Request { op: Op::Write { fua }, offset: 0, len: 512 };
        let mut task = Task::new(0, &request, &data, &shared).unwrap();
        let from = crate::sys::Memory::Data;
        let call = task.call().unwrap().call;
        assert_eq!(call, Call::Write { from, dsync: fua && direct, atomic: false });
        let next = task.outcome(512, &shared);
        assert_eq!(next == Step::Call && task.call().is_none(), fua && !direct);
        let request = Request { op: Op::WriteZeroes { deallocate: true, fua }, ..request };
        let mut task = Task::new(0, &request, &data, &shared).unwrap();
        let next = task.outcome(0, &shared);
        assert_eq!(next == Step::Call && task.call().is_none(), fua);
        assert_eq!(next == Step::End(Ok(())), !fua);
    }
}

#[test]
fn interrupted_calls_are_repeated_but_not_for_ever() {
    let shared = shared(memfd(4096), 4096);
    let (_, data) = buffer(512);
    let mut task = Task::new(0, &read(0, 512), &data, &shared).unwrap();
    let mut times = 0;
    while task.outcome(-libc::EINTR, &shared) == Step::Call {
        times += 1;
        assert!(times < 1000);
    }
    assert!(times > 10);
    let mut task = Task::new(0, &read(0, 512), &data, &shared).unwrap();
    assert_eq!(task.outcome(-libc::EAGAIN, &shared), Step::Call);
    assert_eq!(task.outcome(512, &shared), Step::End(Ok(())));
}

#[test]
fn misaligned_memory_uses_a_bounce_buffer_with_direct_io() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(MIB).unwrap();
    let flags = rustix::fs::fcntl_getfl(file.as_fd()).unwrap();
    if rustix::fs::fcntl_setfl(file.as_fd(), flags | rustix::fs::OFlags::DIRECT).is_err() {
        shadowbell_testing::programs::skipped(
            "no direct I/O on the file system of temporary files",
        );
        return;
    }
    // The disk wrongly assumes that any address is aligned.
    let mut shared = shared(file, MIB);
    shared.direct = Some(Alignment { memory: 1, offset: 512 });
    let mut queue = disk(shared).queue().unwrap();
    let bytes = Mapping::anonymous(MIB).unwrap().bytes();
    let odd = bytes.slice(1, 600 * 1024).unwrap();
    odd.fill(0, odd.len(), 0x5a).unwrap();
    let request = Request { op: Op::Write { fua: false }, offset: 512, len: 600 * 1024 };
    assert_eq!(run_at(&mut *queue, request, &mut Segments::from_bytes(&odd)), Ok(()));
    odd.fill(0, odd.len(), 0).unwrap();
    let request = Request { op: Op::Read, ..request };
    assert_eq!(run_at(&mut *queue, request, &mut Segments::from_bytes(&odd)), Ok(()));
    let mut back = vec![0; odd.len()];
    odd.read_into(0, &mut back).unwrap();
    assert!(back.iter().all(|b| *b == 0x5a));
}

/// Repeats the tests with the threads engine. Tests with a pipe are left out, because this engine
/// uses positioned reads, which a pipe does not support.
mod by_threads {
    use super::*;

    macro_rules! again {
        ($($test:ident)*) => {$(
            #[test]
            fn $test() {
                ENGINE.set(EngineKind::Threads);
                super::$test();
            }
        )*};
    }

    again! {
        a_full_disk_is_no_space_and_a_broken_one_its_error
        an_unexpected_end_of_file_is_an_io_error
        zeroes_are_written_if_the_file_system_has_no_zero_range
        the_zeroes_that_are_written_stay_zeroes
        an_unsupported_discard_changes_no_data
        many_bounced_requests_share_few_buffers
        a_thread_can_have_many_queues_and_a_disk_many_threads
        misaligned_memory_uses_a_bounce_buffer_with_direct_io
    }

    #[test]
    fn the_wake_descriptor_is_readable_only_while_completions_are_pending() {
        ENGINE.set(EngineKind::Threads);
        let mut queue = disk(shared(memfd(MIB), MIB)).queue().unwrap();
        let is_readable = |queue: &dyn Queue| {
            let fd = queue.wake_fd().unwrap();
            let mut fds = [PollFd::new(&fd, PollFlags::IN)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut fds, Some(&now)).unwrap() == 1
        };
        for tag in 0..100 {
            assert!(!is_readable(&*queue));
            let (_, mut data) = buffer(512);
            assert_eq!(queue.submit(tag, &read(0, 512), &mut data), Submitted::Pending);
            queue.commit();
            wait(&*queue);
            assert!(is_readable(&*queue), "until it is reaped");
            assert_eq!(reap(&mut *queue), [(tag, Ok(()))]);
        }
        assert!(!is_readable(&*queue));
    }

    #[test]
    fn more_requests_than_threads_end_all_and_with_their_own_data() {
        ENGINE.set(EngineKind::Threads);
        const REQUESTS: u32 = 3000;
        let len = u64::from(REQUESTS) * 512;
        let file = memfd(len);
        let content: Vec<u8> = (0..len).map(|at| (at / 512 % 251) as u8).collect();
        std::os::unix::fs::FileExt::write_all_at(&file, &content, 0).unwrap();
        let mut queue = disk(shared(file, len)).queue().unwrap();
        let (bytes, _) = buffer(len);
        for tag in 0..REQUESTS {
            let at = u64::from(tag) * 512;
            let mut data = Segments::from_bytes(&bytes.slice(at as usize, 512).unwrap());
            assert_eq!(queue.submit(tag, &read(at, 512), &mut data), Submitted::Pending);
        }
        let mut ended = drain(&mut *queue);
        ended.sort_by_key(|(tag, _)| *tag);
        assert!(ended.iter().map(|(tag, _)| *tag).eq(0..REQUESTS));
        assert!(ended.iter().all(|(_, result)| result.is_ok()));
        let mut read = vec![0; len as usize];
        bytes.read_into(0, &mut read).unwrap();
        assert!(read == content);
    }

    #[test]
    fn threads_replace_a_refused_io_uring_unless_it_is_required() {
        let refused = || Err(io::Error::from_raw_os_error(libc::EPERM));
        let (engine, why) = open::engine(Aio::Auto, refused).unwrap();
        assert_eq!(engine, EngineKind::Threads);
        let mut shared = shared(memfd(512), 512);
        shared.no_uring = why;
        let remark = disk(shared).remark().unwrap();
        for words in ["test: uses threads", "not permitted", "io_uring_disabled=0"] {
            assert!(remark.contains(words), "{remark}");
        }
        assert_eq!(open::engine(Aio::Threads, refused).unwrap(), (EngineKind::Threads, None));
        assert_eq!(open::engine(Aio::Auto, || Ok(())).unwrap(), (EngineKind::Uring, None));
        let error = open::engine(Aio::IoUring, refused).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    }
}
