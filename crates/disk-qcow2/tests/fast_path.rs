//! Tests of the fast path of qcow2: selection of requests, clusters that move while requests use
//! them, and malicious images.

mod common;

use common::{Random, check_whole, directory, flush, memory, open, qemu_img_does, read, run};
use common::{run_one, segments, try_open, write};
use shadowbell_disk::{Disk, DiskError, Op, Queue, Request};
use shadowbell_disk_qcow2::{OpenError, Qcow2Disk, create};
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

/// Returns true if reads of the first 4096 bytes of a cluster take the fast path, and true if
/// writes do.
fn fast_path(disk: &Qcow2Disk, cluster: u64) -> (bool, bool) {
    let at = cluster * CLUSTER;
    (disk.uses_fast_path(at, 4096, false), disk.uses_fast_path(at, 4096, true))
}

#[test]
fn allocated_clusters_take_the_fast_path() {
    let directory = directory();
    let path = image(directory.path(), 64 * MIB);
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    assert_eq!(read(&mut *queue, 0, 4096).unwrap(), [0; 4096]);
    assert_eq!(fast_path(&disk, 0), (false, false), "there is no cluster");
    write(&mut *queue, 0, &vec![1; 4 * CLUSTER as usize]).unwrap();
    assert_eq!((fast_path(&disk, 0), fast_path(&disk, 3)), ((true, true), (true, true)));
    assert!(disk.uses_fast_path(512, 4 * CLUSTER - 512, true), "in one piece");
    assert!(!disk.uses_fast_path(3 * CLUSTER, CLUSTER + 512, false));
    write(&mut *queue, 4096, &[2; 4096]).unwrap();
    assert_eq!(read(&mut *queue, 4096, 4096).unwrap(), [2; 4096]);
    let zeroes = Op::WriteZeroes { deallocate: false, fua: false };
    for (op, at) in [(Op::Discard, 0), (zeroes, CLUSTER)] {
        run_one(&mut *queue, op, at, CLUSTER, Segments::new()).unwrap();
        assert_eq!(fast_path(&disk, at / CLUSTER), (false, false), "{op:?}");
        assert_eq!(read(&mut *queue, at + 4096, 4096).unwrap(), [0; 4096]);
    }
    // A Write Zeroes to a part of a cluster writes zeroes in place, so requests to the cluster
    // still take the fast path.
    run_one(&mut *queue, zeroes, 3 * CLUSTER, 4096, Segments::new()).unwrap();
    assert_eq!(fast_path(&disk, 3), (true, true));
    assert_eq!(read(&mut *queue, 3 * CLUSTER, 4096).unwrap(), [0; 4096]);
    flush(&mut *queue).unwrap();
    drop((queue, disk));
    check_whole(&path);
    // When the image is opened again, no cluster is on the fast path. The first request adds its
    // own clusters, and many further ones at the same time.
    for (options, writes) in [("", true), ("?read-only=on", false)] {
        let disk = open(&path, options);
        assert_eq!(fast_path(&disk, 2), (false, false));
        read(&mut *disk.queue().unwrap(), 3 * CLUSTER, 4096).unwrap();
        assert_eq!(fast_path(&disk, 2), (true, writes), "{options}");
    }
    let disk = open(&path, "?aio=threads");
    read(&mut *disk.queue().unwrap(), 3 * CLUSTER, 4096).unwrap();
    assert_eq!(fast_path(&disk, 3), (false, false), "there is no io_uring");
}

#[test]
fn clusters_shared_with_a_snapshot_take_the_slow_path() {
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
    assert_eq!(fast_path(&disk, 0), (false, false));
    write(&mut *queue, 0, &[2; 4096]).unwrap();
    assert_eq!((fast_path(&disk, 0), fast_path(&disk, 1)), ((true, true), (false, false)));
    write(&mut *queue, 4096, &[3; 4096]).unwrap();
    drop((queue, disk));
    check_whole(&path);
    qemu_img_does(&["snapshot", "-a", "one", path.to_str().unwrap()]);
    let disk = open(&path, "");
    assert_eq!(read(&mut *disk.queue().unwrap(), 0, 8192).unwrap(), [1; 8192]);
}

/// Runs requests on the fast path while another queue frees, zeroes, allocates and writes the same
/// clusters. Checks that a read of a unit (4096 bytes) never returns data of another unit or of a
/// table.
fn race(path: &Path, cluster: u64, millis: u64) {
    const UNIT: u64 = 4096;
    const UNITS: u64 = 256;
    let disk = open(path, "");
    let over = AtomicBool::new(false);
    // Time for which the load runs.
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
            // Reads and writes cover one unit, and other operations a whole cluster. Each request
            // has its own buffer.
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
            // A unit may contain parts of several concurrent writes to it, but no data of another
            // unit.
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
                    // Only the first queue moves clusters.
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
fn fast_requests_survive_moving_clusters() {
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

/// In a recoverable image, the fast path may overwrite a cluster only if the table that refers to
/// the cluster has already been written to the file.
#[test]
fn a_recoverable_image_is_overwritten_after_its_tables_are_saved() {
    let directory = directory();
    let path = image(directory.path(), 64 * MIB);
    let disk = open(&path, "");
    disk.checkpoint(&mut shadowbell_state::Descriptors::default()).unwrap();
    let mut queue = disk.queue().unwrap();
    for n in 0..20_u8 {
        let at = u64::from(n) * CLUSTER;
        write(&mut *queue, at, &[n + 1; 4096]).unwrap();
        let uses_fast_path = disk.uses_fast_path(at, 4096, true);
        write(&mut *queue, at + 4096, &[n + 1; 4096]).unwrap();
        let copy = path.with_extension("copy");
        std::fs::copy(&path, &copy).unwrap();
        let there = read(&mut *open(&copy, "").queue().unwrap(), at, 8192).unwrap();
        assert_eq!(there, [n + 1; 8192], "{n}, fast path: {uses_fast_path}");
        assert!(disk.uses_fast_path(at, 8192, true), "{n}");
    }
}

/// Image with data in its first clusters, and the offsets of its tables.
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

    /// Writes the image to its file, after replacing the 64-bit numbers at these offsets.
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
fn a_table_is_never_data() {
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
    ] {
        let path = tables.with(&[(at, number)]);
        let before = std::fs::read(path).unwrap();
        let disk = open(path, "");
        let mut queue = disk.queue().unwrap();
        let bad = (at - l2) / 8 * CLUSTER;
        for _ in 0..2 {
            assert_eq!(read(&mut *queue, bad, 512), Err(DiskError::Io(libc::EIO)), "{what}");
            let outcome = write(&mut *queue, bad, &[9; 512]);
            assert_eq!(outcome, Err(DiskError::Io(libc::EIO)), "{what}");
            assert_eq!(fast_path(&disk, (at - l2) / 8), (false, false), "{what}");
        }
        // The other clusters of the table work normally.
        assert_eq!(read(&mut *queue, 5 * CLUSTER, 4096), Ok(vec![1; 4096]), "{what}");
        write(&mut *queue, 5 * CLUSTER, &[1; 512]).unwrap();
        drop((queue, disk));
        assert!(std::fs::read(path).unwrap() == before, "{what}: a table was modified");
    }
    for (what, at, number) in [
        ("an L2 table twice", l1 + 8, COPIED | l2),
        ("an L2 table in the L1 table", l1 + 8, COPIED | l1),
        ("a block of counts in the L2 table", refcounts + 8, l2),
    ] {
        let path = tables.with(&[(at, number)]);
        let before = std::fs::read(path).unwrap();
        let error =
            try_open(path, "").err().unwrap_or_else(|| panic!("{what}: the image was opened"));
        assert!(matches!(error, OpenError::Damaged { .. }), "{what}: {error}");
        assert!(std::fs::read(path).unwrap() == before, "{what}: the image was modified");
        // A read-only disk may be opened, because it writes nothing.
        let disk = open(path, "?read-only=on");
        assert_eq!(read(&mut *disk.queue().unwrap(), 0, 65536), Ok(vec![1; 65536]));
        assert!(!disk.uses_fast_path(0, 512, true));
    }
}

#[test]
fn invalid_cluster_offsets_are_not_accessed() {
    let directory = directory();
    let tables = Tables::new(directory.path());
    let l2 = tables.l2;
    // The table entry contains an offset beyond the end of the file, which has no refcount, or an
    // unaligned offset.
    for (what, place) in [("behind", 1 << 30), ("unaligned", 8 * CLUSTER + 512)] {
        let len = tables.bytes.len() as u64;
        let path = tables.with(&[(l2, COPIED | place)]);
        let disk = open(path, "");
        let mut queue = disk.queue().unwrap();
        let _ = read(&mut *queue, 0, 4096);
        assert_eq!(fast_path(&disk, 0), (false, false), "{what}");
        assert_eq!(std::fs::metadata(path).unwrap().len(), len);
        // The other clusters of a table with an invalid entry work normally.
        assert_eq!(read(&mut *queue, CLUSTER, 4096).unwrap(), [1; 4096]);
        assert_eq!(fast_path(&disk, 1), (true, true), "{what}");
    }
    for options in ["", "?read-only=on"] {
        let disk = open(tables.with(&[(l2, COPIED | 1 << 55)]), options);
        let outcome = read(&mut *disk.queue().unwrap(), 0, 512);
        assert_eq!(outcome, Err(DiskError::Io(libc::EIO)));
        assert_eq!(fast_path(&disk, 0), (false, false));
    }
}

/// A cluster of a table is never allocated, even if its reference count is zero.
#[test]
fn uncounted_tables_are_not_allocated() {
    let directory = directory();
    let tables = Tables::new(directory.path());
    for place in [0, tables.l1, tables.l2, tables.refcounts, tables.block] {
        // Each 64-bit number contains four counts of 16 bits.
        let nth = place / CLUSTER;
        let at = tables.block + nth / 4 * 8;
        let counts = tables.number(at) & !(0xffff << (48 - nth % 4 * 16));
        let path = tables.with(&[(at, counts)]);
        let disk = open(path, "");
        let mut queue = disk.queue().unwrap();
        write(&mut *queue, MIB, &vec![9; 16 * CLUSTER as usize]).unwrap();
        write(&mut *queue, 600 * MIB, &[9; 4096]).unwrap();
        drop((queue, disk));
        let disk = open(path, "");
        let mut queue = disk.queue().unwrap();
        assert_eq!(read(&mut *queue, 0, 4096).unwrap(), [1; 4096], "{nth}");
        assert_eq!(read(&mut *queue, 600 * MIB, 4096).unwrap(), [9; 4096], "{nth}");
    }
}

/// In a damaged image, a cluster with data has the refcount 0, so it is allocated again, for a
/// table. From then on, the fast path must not access this cluster.
#[test]
fn data_that_become_a_table_leave_the_fast_path() {
    let directory = directory();
    let tables = Tables::new(directory.path());
    let nth = (tables.number(tables.l2) & !COPIED) / CLUSTER;
    let at = tables.block + nth / 4 * 8;
    let counts = tables.number(at) & !(0xffff << (48 - nth % 4 * 16));
    let path = tables.with(&[(at, counts)]);
    let disk = open(path, "");
    let mut queue = disk.queue().unwrap();
    assert_eq!(read(&mut *queue, 0, 4096).unwrap(), [1; 4096]);
    assert_eq!(fast_path(&disk, 0), (true, true));
    write(&mut *queue, 600 * MIB, &[9; 4096]).unwrap();
    assert_eq!(fast_path(&disk, 0), (false, false));
    assert_eq!(write(&mut *queue, 0, &[0xff; 512]), Err(DiskError::Io(libc::EIO)));
    assert_eq!(read(&mut *queue, 600 * MIB, 4096).unwrap(), [9; 4096]);
}

/// The fast path also detects that the file was truncated.
#[test]
fn a_truncated_file_is_detected_on_the_fast_path() {
    let directory = directory();
    for writes in [false, true] {
        let path = image(directory.path(), 4 * MIB);
        let disk = open(&path, "");
        let mut queue = disk.queue().unwrap();
        write(&mut *queue, 0, &vec![1; MIB as usize]).unwrap();
        flush(&mut *queue).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(MIB / 2).unwrap();
        let at = 512 << 10;
        assert!(disk.uses_fast_path(at, 4096, writes));
        let outcome = match writes {
            true => write(&mut *queue, at, &[2; 4096]),
            false => read(&mut *queue, at, 4096).map(drop),
        };
        assert_eq!(outcome, Err(DiskError::Io(libc::EIO)));
        assert!(disk.has_lost_writes());
        drop((queue, disk));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB / 2);
    }
}
