//! Tests of the metadata cache and of changes of guest memory.

use super::MetadataDisk;
use shadowbell_disk::{
    Disk, DiskError, Metadata, MetadataBuffer, MetadataFormat, Op, Queue, Request, Submitted,
};
use shadowbell_memory::{DmaSpace, Mapping, Segments, View};
use shadowbell_spec::nvm::{PRINFO_GUARD, PRINFO_PRACT, PRINFO_REFTAG};
use shadowbell_spec::protection::ProtectionFields;
use shadowbell_testing::test_disk::TestDisk;
use std::os::fd::AsFd;
use std::sync::Arc;

const BLOCK: u64 = 512;

fn on(disk: &Arc<dyn Disk>) -> MetadataDisk {
    let options = [("metadata", "8"), ("pi", "1")];
    let format = MetadataFormat::parse(options.into_iter()).unwrap().unwrap();
    MetadataDisk::new(Arc::clone(disk), format).unwrap()
}

/// Executes `op` from block `lba` on. PRACT is set, so the disk generates or checks the protection
/// information.
fn run(queue: &mut dyn Queue, op: Op, lba: u64, data: &mut Segments) {
    let mut metadata = Metadata { buffer: MetadataBuffer::None, ..Metadata::default() };
    let prinfo = PRINFO_PRACT | PRINFO_GUARD | PRINFO_REFTAG;
    metadata.fields = ProtectionFields { prinfo, ref_tag: lba, ..metadata.fields };
    let request = Request { op, offset: lba * BLOCK, len: data.len() as u64 };
    let mut outcome = match queue.submit_with_metadata(1, &request, &metadata, data) {
        Submitted::Done(outcome) => Some(outcome),
        Submitted::Pending => None,
    };
    queue.commit();
    while outcome.is_none() {
        queue.reap(&mut |_, result, back| {
            outcome = Some(result);
            *data = back;
        });
        let fds = [queue.wake_fd(), queue.timer_fd()].into_iter().flatten();
        let mut fds: Vec<_> = fds.map(|fd| fd.as_fd().try_clone_to_owned().unwrap()).collect();
        let flags = rustix::event::PollFlags::IN;
        let mut fds: Vec<_> =
            fds.iter_mut().map(|fd| rustix::event::PollFd::new(fd, flags)).collect();
        let soon = rustix::event::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        if outcome.is_none() {
            let _ = rustix::event::poll(&mut fds, Some(&soon));
        }
    }
    assert_eq!(outcome, Some(Ok(())), "{op:?} of block {lba}");
}

fn write(queue: &mut dyn Queue, lba: u64, blocks: u64, byte: u8) {
    let bytes = Mapping::anonymous(blocks * BLOCK).unwrap().bytes();
    bytes.fill(0, bytes.len(), byte).unwrap();
    run(queue, Op::Write { fua: false }, lba, &mut Segments::from_bytes(&bytes));
}

/// Reads and checks blocks. Each of them must contain one byte value only.
fn read(queue: &mut dyn Queue, lba: u64, blocks: u64) {
    let bytes = Mapping::anonymous(blocks * BLOCK).unwrap().bytes();
    run(queue, Op::Read, lba, &mut Segments::from_bytes(&bytes));
    let mut found = vec![0; bytes.len()];
    bytes.read_into(0, &mut found).unwrap();
    for block in found.chunks(BLOCK as usize) {
        assert!(block.iter().all(|byte| *byte == block[0]), "a block of two writes");
    }
}

/// Writes and reads the same few blocks by several queues at once. The metadata of all these blocks
/// are in one or two blocks of the lower disk, so the updates compete.
fn race(below: &Arc<dyn Disk>) {
    const THREADS: u64 = 4;
    let disk = on(below);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let disk = &disk;
            scope.spawn(move || {
                let mut queue = disk.queue().unwrap();
                let mut random = (thread + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                for turn in 0..400 {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let (lba, blocks) = (random >> 8 & 63, (random >> 16 & 7) + 1);
                    // Byte value that is different for each thread, so that a mixture of two writes
                    // is detected.
                    let byte = (turn % 60) as u8 * 4 + thread as u8 + 1;
                    match random & 3 {
                        0 => write(&mut *queue, lba, blocks, byte),
                        1 => write(&mut *queue, lba, 1, byte),
                        _ => read(&mut *queue, lba, blocks),
                    }
                }
            });
        }
    });
    let mut queue = on(below).queue().unwrap();
    (0..64).for_each(|lba| read(&mut *queue, lba, 1));
}

/// Concurrent writers never leave older metadata in the cache than on the disk.
#[test]
fn queues_that_race_find_whole_blocks_on_memory() {
    race(&shadowbell_disk_file::open("mem:1MiB").unwrap());
}

#[test]
fn queues_that_race_find_whole_blocks_in_a_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    race(&shadowbell_disk_file::open(&file.path().display().to_string()).unwrap());
}

/// An unmap of guest memory does not wait for a hung disk below. Requests that wait for their
/// blocks and whose buffers are in the unmapped memory fail at once.
#[test]
fn an_unmap_does_not_wait_for_requests_in_the_metadata_layer() {
    let storage = TestDisk::new(64, BLOCK as u32);
    let below: Arc<dyn Disk> = Arc::new(storage.clone());
    let disk = MetadataDisk::new(below, MetadataFormat::new(8).unwrap()).unwrap();
    let mut queue = disk.queue().unwrap();
    let mut space = DmaSpace::default();
    for iova in [0, 8192] {
        space.map(iova, 4096, &Mapping::anonymous(4096).unwrap().bytes()).unwrap();
    }
    let view = View::new(Arc::clone(space.table()));
    let metadata_at = disk.info().blocks * BLOCK;
    storage.instruct(|instructions| instructions.hold_at = Some(metadata_at));
    let write = Op::Write { fua: false };
    // The data of both reads are read, their metadata are in flight. The writes wait for block 0.
    for (tag, op, block, iova) in
        [(1, Op::Read, 0, 0), (2, write, 0, 0), (3, write, 0, 8192), (4, Op::Read, 1, 8192)]
    {
        let mut data = Segments::new();
        data.resolve_ranges(&view, &[(iova, BLOCK as usize)], op == Op::Read).unwrap();
        let request = Request { op, offset: block * BLOCK, len: BLOCK };
        assert_eq!(queue.submit(tag, &request, &mut data), Submitted::Pending);
    }
    let watch = view.watch();
    drop(view);
    space.unmap(8192, 4096).unwrap();
    queue.memory_changed(&View::new(Arc::clone(space.table())));
    assert!(watch.is_idle(), "a request holds the memory");
    let mut ended = Vec::new();
    queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
    assert_eq!(ended, [(3, Err(DiskError::BadBuffer))]);
    storage.instruct(|instructions| instructions.hold_at = None);
    for _ in 0..4 {
        queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
    }
    ended.sort_unstable_by_key(|(tag, _)| *tag);
    let failed = Err(DiskError::BadBuffer);
    assert_eq!(ended, [(1, Ok(())), (2, Ok(())), (3, failed), (4, failed)]);
}
