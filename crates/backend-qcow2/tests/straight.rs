//! Requests that go straight to the image's file: which do, what happens when the clusters under
//! them move, and what an image that somebody else has made can not do by them.

mod common;

use common::{Random, check_whole, directory, flush, memory, open, qemu_img_does, read, run};
use common::{run_one, segments, try_open, write};
use shadowbell_backend::{Disk, DiskError, Op, Queue, Request};
use shadowbell_backend_qcow2::{OpenError, Qcow2Disk, create};
use shadowbell_memory::Segments;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const CLUSTER: u64 = 64 << 10;
const COPIED: u64 = 1 << 63;

fn image(directory: &Path, size: u64) -> PathBuf {
    let path = directory.join("disk.qcow2");
    let _ = std::fs::remove_file(&path);
    create(&path, size).unwrap();
    path
}

/// Whether reads, and writes, of the first bytes of a cluster go straight.
fn straight(disk: &Qcow2Disk, cluster: u64) -> (bool, bool) {
    let at = cluster * CLUSTER;
    (disk.goes_straight(at, 4096, false), disk.goes_straight(at, 4096, true))
}

#[test]
fn what_is_allocated_goes_straight_until_it_is_given_back() {
    let directory = directory();
    let path = image(directory.path(), 64 * MIB);
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    assert_eq!(read(&mut *queue, 0, 4096).unwrap(), [0; 4096]);
    assert_eq!(straight(&disk, 0), (false, false), "there is no cluster");
    write(&mut *queue, 0, &vec![1; 4 * CLUSTER as usize]).unwrap();
    assert_eq!((straight(&disk, 0), straight(&disk, 3)), ((true, true), (true, true)));
    assert!(disk.goes_straight(512, 4 * CLUSTER - 512, true), "in one piece");
    assert!(!disk.goes_straight(3 * CLUSTER, CLUSTER + 512, false));
    write(&mut *queue, 4096, &[2; 4096]).unwrap();
    assert_eq!(read(&mut *queue, 4096, 4096).unwrap(), [2; 4096]);
    let zeroes = Op::WriteZeroes { deallocate: false, fua: false };
    for (op, at) in [(Op::Discard, 0), (zeroes, CLUSTER)] {
        run_one(&mut *queue, op, at, CLUSTER, Segments::new()).unwrap();
        assert_eq!(straight(&disk, at / CLUSTER), (false, false), "{op:?}");
        assert_eq!(read(&mut *queue, at + 4096, 4096).unwrap(), [0; 4096]);
    }
    // Zeroes in a part of a cluster are written there.
    run_one(&mut *queue, zeroes, 3 * CLUSTER, 4096, Segments::new()).unwrap();
    assert_eq!(straight(&disk, 3), (true, true));
    assert_eq!(read(&mut *queue, 3 * CLUSTER, 4096).unwrap(), [0; 4096]);
    flush(&mut *queue).unwrap();
    drop((queue, disk));
    check_whole(&path);
    // Another process learns a whole part of the disk with the first request.
    for (options, writes) in [("", true), ("?read-only=on", false)] {
        let disk = open(&path, options);
        assert_eq!(straight(&disk, 2), (false, false));
        read(&mut *disk.queue().unwrap(), 3 * CLUSTER, 4096).unwrap();
        assert_eq!(straight(&disk, 2), (true, writes), "{options}");
    }
    let disk = open(&path, "?aio=threads");
    read(&mut *disk.queue().unwrap(), 3 * CLUSTER, 4096).unwrap();
    assert_eq!(straight(&disk, 3), (false, false), "there is no io_uring");
}

#[test]
fn what_a_snapshot_shares_goes_the_long_way() {
    let directory = directory();
    let path = image(directory.path(), 64 * MIB);
    let disk = open(&path, "");
    write(&mut *disk.queue().unwrap(), 0, &vec![1; 4 * CLUSTER as usize]).unwrap();
    drop(disk);
    if !qemu_img_does(&["snapshot", "-c", "one", path.to_str().unwrap()]) {
        return;
    }
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    read(&mut *queue, 0, 4096).unwrap();
    assert_eq!(straight(&disk, 0), (false, false));
    write(&mut *queue, 0, &[2; 4096]).unwrap();
    assert_eq!((straight(&disk, 0), straight(&disk, 1)), ((true, true), (false, false)));
    write(&mut *queue, 4096, &[3; 4096]).unwrap();
    drop((queue, disk));
    check_whole(&path);
    qemu_img_does(&["snapshot", "-a", "one", path.to_str().unwrap()]);
    let disk = open(&path, "");
    assert_eq!(read(&mut *disk.queue().unwrap(), 0, 8192).unwrap(), [1; 8192]);
}

/// Fast requests on clusters that another queue gives back, zeroes, allocates anew and writes. What
/// a unit holds is the unit's own at any time, and none of it is in a table.
fn race(path: &Path, cluster: u64, millis: u64) {
    const UNIT: u64 = 4096;
    const UNITS: u64 = 256;
    let disk = open(path, "");
    let over = AtomicBool::new(false);
    // The length of the load.
    let until = Instant::now() + Duration::from_millis(millis);
    let batch = |queue: &mut dyn Queue, random: &mut Random, moves: bool| {
        let bytes = memory((UNITS * UNIT) as usize);
        let mut unit = Vec::new();
        let mut requests = Vec::new();
        for _ in 0..16 {
            let at = random.below(UNITS);
            let op = match random.below(if moves { 8 } else { 4 }) {
                0 => Op::Read,
                4..6 => Op::Discard,
                6 => Op::WriteZeroes { deallocate: false, fua: false },
                _ => Op::Write { fua: false },
            };
            let units = |from: u64, len: u64| (from * UNIT, len * UNIT);
            // A few units, or the whole cluster; a lane each, so that buffers do not overlap.
            let (offset, len) = match op {
                Op::Read | Op::Write { .. } => units(at, 1),
                _ => (at * UNIT / cluster * cluster, cluster.max(UNIT)),
            };
            if requests.iter().any(|(other, _): &(Request, Segments)| other.offset == offset) {
                continue;
            }
            let data = match op {
                Op::Read | Op::Write { .. } => segments(&bytes, offset as usize, len as usize),
                _ => Segments::new(),
            };
            if matches!(op, Op::Write { .. }) {
                let word = (at + 1) << 32 | random.below(1 << 32);
                unit.clear();
                (0..UNIT / 8).for_each(|_| unit.extend(word.to_le_bytes()));
                bytes.write_from(offset as usize, &unit).unwrap();
            }
            requests.push((Request { op, offset, len }, data));
        }
        let plan: Vec<Request> = requests.iter().map(|(request, _)| *request).collect();
        assert!(run(queue, requests).iter().all(Result::is_ok));
        for Request { offset, .. } in plan.iter().filter(|request| request.op == Op::Read) {
            let mut unit = vec![0; UNIT as usize];
            bytes.read_into(*offset as usize, &mut unit).unwrap();
            // Of writes that race a unit may hold parts, but of no other unit.
            let odd = unit.chunks_exact(8).find(|word| {
                let word = u64::from_le_bytes((*word).try_into().unwrap());
                word != 0 && word >> 32 != offset / UNIT + 1
            });
            assert_eq!(odd, None, "unit {}", offset / UNIT);
        }
    };
    std::thread::scope(|scope| {
        let (disk, over, batch) = (&disk, &over, &batch);
        for seed in 1..4_u64 {
            scope.spawn(move || {
                let mut queue = disk.queue().unwrap();
                let mut random = Random(seed);
                while Instant::now() < until && !over.load(Ordering::Relaxed) {
                    // One of them has the clusters move.
                    batch(&mut *queue, &mut random, seed == 1);
                }
                over.store(true, Ordering::Relaxed);
            });
        }
    });
    drop(disk);
    check_whole(path);
}

#[test]
fn clusters_that_move_under_requests() {
    let directory = directory();
    race(&image(directory.path(), MIB), CLUSTER, 400);
    let path = directory.path().join("small.qcow2");
    if qemu_img_does(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=4k",
        path.to_str().unwrap(),
        "1M",
    ]) {
        race(&path, 4096, 400);
    }
}

/// Of an image that is kept for the next process, a cluster is overwritten past the format only
/// when the table that names it is in the file.
#[test]
fn a_kept_image_is_overwritten_when_its_tables_are_saved() {
    let directory = directory();
    let path = image(directory.path(), 64 * MIB);
    let disk = open(&path, "");
    disk.keep(&mut shadowbell_state::Descriptors::default()).unwrap();
    let mut queue = disk.queue().unwrap();
    for n in 0..20_u8 {
        let at = u64::from(n) * CLUSTER;
        write(&mut *queue, at, &[n + 1; 4096]).unwrap();
        let goes_straight = disk.goes_straight(at, 4096, true);
        write(&mut *queue, at + 4096, &[n + 1; 4096]).unwrap();
        let copy = path.with_extension("copy");
        std::fs::copy(&path, &copy).unwrap();
        let there = read(&mut *open(&copy, "").queue().unwrap(), at, 8192).unwrap();
        assert_eq!(there, [n + 1; 8192], "{n}, straight: {goes_straight}");
        assert!(disk.goes_straight(at, 8192, true), "{n}");
    }
}

/// An image with data in its first clusters, and where its tables are.
struct Tables {
    path: PathBuf,
    bytes: Vec<u8>,
    l1: u64,
    l2: u64,
    refcounts: u64,
    block: u64,
}

impl Tables {
    fn new(directory: &Path) -> Self {
        let path = image(directory, 1024 * MIB);
        let disk = open(&path, "");
        write(&mut *disk.queue().unwrap(), 0, &vec![1; 8 * CLUSTER as usize]).unwrap();
        drop(disk);
        let bytes = std::fs::read(&path).unwrap();
        let mut tables = Self { path, bytes, l1: 0, l2: 0, refcounts: 0, block: 0 };
        (tables.l1, tables.refcounts) = (tables.number(40), tables.number(48));
        (tables.l2, tables.block) =
            (tables.number(tables.l1) & !COPIED, tables.number(tables.refcounts));
        tables
    }

    fn number(&self, at: u64) -> u64 {
        let at = at as usize;
        u64::from_be_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    /// The image with other numbers at these places.
    fn with(&self, numbers: &[(u64, u64)]) -> &Path {
        let mut bytes = self.bytes.clone();
        for (at, number) in numbers {
            bytes[*at as usize..*at as usize + 8].copy_from_slice(&number.to_be_bytes());
        }
        std::fs::write(&self.path, bytes).unwrap();
        &self.path
    }
}

#[test]
fn an_image_that_names_its_tables_as_data_is_not_written() {
    let directory = directory();
    let tables = Tables::new(directory.path());
    let Tables { l1, l2, refcounts, block, .. } = tables;
    let compressed = |at: u64| 1 << 62 | at;
    for (what, at, number) in [
        ("data in the L1 table", l2, COPIED | l1),
        ("data in the L2 table", l2 + 8, COPIED | l2),
        ("data in the refcount table", l2 + 16, COPIED | refcounts),
        ("data in a block of counts, shared", l2 + 24, block),
        ("zeroes that are allocated there", l2 + 24, COPIED | block | 1),
        ("compressed data in the L1 table", l2, compressed(l1 + 77)),
        ("compressed data that reach it", l2, compressed(l1 - 512) | 1 << 54),
        ("an L2 table twice", l1 + 8, COPIED | l2),
        ("an L2 table in the L1 table", l1 + 8, COPIED | l1),
        ("a block of counts in the L2 table", refcounts + 8, l2),
    ] {
        let path = tables.with(&[(at, number)]);
        let before = std::fs::read(path).unwrap();
        let error = try_open(path, "").err().unwrap_or_else(|| panic!("{what}: it is open"));
        assert!(matches!(error, OpenError::Damaged { .. }), "{what}: {error}");
        assert!(std::fs::read(path).unwrap() == before, "{what}: it was written");
        // To read it does no harm.
        let disk = open(path, "?read-only=on");
        let _ = read(&mut *disk.queue().unwrap(), 0, 65536);
        assert!(!disk.goes_straight(0, 512, true));
    }
}

#[test]
fn an_image_that_names_a_cluster_twice_is_not_written_straight() {
    let directory = directory();
    let tables = Tables::new(directory.path());
    let Tables { l2, .. } = tables;
    let (data, compressed) = (tables.number(l2), 1 << 62 | (tables.number(l2 + 56) & !COPIED));
    for (what, number) in [("twice", data), ("and compressed", compressed)] {
        let disk = open(tables.with(&[(l2 + 24, number)]), "");
        let mut queue = disk.queue().unwrap();
        read(&mut *queue, 0, 4096).unwrap();
        assert_eq!(straight(&disk, 0), (true, false), "{what}");
        write(&mut *queue, 0, &[5; 4096]).unwrap();
        assert_eq!(straight(&disk, 0), (true, false), "{what}");
        assert_eq!(read(&mut *queue, 0, 4096).unwrap(), [5; 4096]);
    }
}

#[test]
fn places_that_are_none_are_not_gone_to() {
    let directory = directory();
    let tables = Tables::new(directory.path());
    let l2 = tables.l2;
    // Behind the end of the file, where it is in the counts still; there; where no cluster begins.
    for (what, place) in [("behind", 1 << 30), ("unaligned", 8 * CLUSTER + 512)] {
        let len = tables.bytes.len() as u64;
        let path = tables.with(&[(l2, COPIED | place)]);
        let disk = open(path, "");
        let mut queue = disk.queue().unwrap();
        let _ = read(&mut *queue, 0, 4096);
        assert_eq!(straight(&disk, 0), (false, false), "{what}");
        assert_eq!(std::fs::metadata(path).unwrap().len(), len);
        // Of a table that makes no sense nothing is read.
        if place.is_multiple_of(CLUSTER) {
            assert_eq!(read(&mut *queue, CLUSTER, 4096).unwrap(), [1; 4096]);
            assert_eq!(straight(&disk, 1), (true, true), "{what}");
        }
    }
    let far = tables.with(&[(l2, COPIED | 1 << 55)]);
    assert!(matches!(try_open(far, ""), Err(OpenError::Damaged { .. })));
    let disk = open(far, "?read-only=on");
    assert_eq!(read(&mut *disk.queue().unwrap(), 0, 512).unwrap(), [0; 512]);
    assert_eq!(straight(&disk, 0), (false, false));
}

/// Tables whose own clusters count as free are given to nobody.
#[test]
fn tables_that_are_not_counted_are_kept() {
    let directory = directory();
    let tables = Tables::new(directory.path());
    for place in [0, tables.l1, tables.l2, tables.refcounts, tables.block] {
        // Four counts of 16 bits each are in a number.
        let nth = place / CLUSTER;
        let at = tables.block + nth / 4 * 8;
        let counts = tables.number(at) & !(0xffff << (48 - nth % 4 * 16));
        let path = tables.with(&[(at, counts)]);
        let disk = open(path, "");
        let mut queue = disk.queue().unwrap();
        write(&mut *queue, MIB, &vec![9; 16 * CLUSTER as usize]).unwrap();
        write(&mut *queue, 600 * MIB, &[9; 4096]).unwrap();
        drop((queue, disk));
        check_whole(path);
        let disk = open(path, "");
        let mut queue = disk.queue().unwrap();
        assert_eq!(read(&mut *queue, 0, 4096).unwrap(), [1; 4096], "{nth}");
        assert_eq!(read(&mut *queue, 600 * MIB, 4096).unwrap(), [9; 4096], "{nth}");
    }
}

/// A file that ends where a cluster was is looked into, whatever way a request went.
#[test]
fn a_file_that_has_become_shorter_is_noticed() {
    let directory = directory();
    for writes in [false, true] {
        let path = image(directory.path(), 4 * MIB);
        let disk = open(&path, "");
        let mut queue = disk.queue().unwrap();
        write(&mut *queue, 0, &vec![1; MIB as usize]).unwrap();
        flush(&mut *queue).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(MIB / 2).unwrap();
        let at = 512 << 10;
        assert!(disk.goes_straight(at, 4096, writes));
        let outcome = match writes {
            true => write(&mut *queue, at, &[2; 4096]),
            false => read(&mut *queue, at, 4096).map(drop),
        };
        assert_eq!(outcome, Err(DiskError::Io(libc::EIO)));
        assert!(disk.has_lost());
        drop((queue, disk));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB / 2);
    }
}
