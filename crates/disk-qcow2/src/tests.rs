//! Model of crashes. A random workload runs, and all changes of the file are recorded.
//!
//! Then, after a random change, the process is killed or the power is lost. After a power loss,
//! sectors that were changed since the last sync may have their old content. In each case, the
//! image must have no errors, and its data must be correct.

use crate::check::Check;
use crate::error::OpenError;
use crate::image::Image;
use crate::open::{ByPath, Opened, open};
use crate::storage::{Change, IoBuffer, Reach};
use shadowbell_disk::{DiskError, DiskInfo, Op, Request};
use shadowbell_disk_file::{Aio, Direct, FileOptions};
use shadowbell_testing::disks::Random;
use shadowbell_testing::programs::skipped;
use shadowbell_testing::wait;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

const SIZE: u64 = 3 << 20;
const BLOCK: u64 = 512;
const OPS: usize = 70;
/// Number of crashes of each kind per workload.
const CRASHES: usize = 10;

/// Executed request.
struct Done {
    op: Op,
    offset: u64,
    data: Vec<u8>,
    /// Number of recorded changes before the request began, and after it ended.
    start: usize,
    end: usize,
}

struct Workload {
    /// Content of the image file, and of the disk, before the workload.
    file: Vec<u8>,
    disk: Vec<u8>,
    changes: Vec<Change>,
    done: Vec<Done>,
}

fn qemu_img(arguments: &[&str]) -> Option<i32> {
    match Command::new("qemu-img").args(arguments).output() {
        Ok(output) => {
            let code = output.status.code();
            if code != Some(0) {
                println!("qemu-img {arguments:?}: {output:?}");
            }
            code
        }
        Err(error) => {
            skipped(format_args!("`qemu-img`: {error}; it is in Debian's qemu-utils"));
            None
        }
    }
}

fn try_open(path: &Path, read_only: bool) -> Result<Opened, OpenError> {
    let mut options = FileOptions::default();
    (options.aio, options.direct, options.allow_backing) = (Aio::Threads, Direct::Off, true);
    options.read_only = read_only;
    open(path, &options, &mut ByPath)
}

fn open_image(path: &Path) -> Image {
    image_of(try_open(path, false).unwrap(), path)
}

fn image_of(opened: Opened, path: &Path) -> Image {
    Image::new(opened, DiskInfo::new(512, SIZE / 512), path.display().to_string())
}

fn content(image: &Image) -> Vec<u8> {
    let mut all = IoBuffer::new(SIZE as usize);
    image.run(&Request { op: Op::Read, offset: 0, len: SIZE }, Some(&mut all)).unwrap();
    all.to_vec()
}

/// Random request; `None` lets the disk be idle.
fn any_request(random: &mut Random) -> Option<Request> {
    if random.below(20) == 0 {
        return None;
    }
    let first = random.below(SIZE / BLOCK);
    let most = if random.below(4) == 0 { 256 } else { 16 };
    let blocks = 1 + random.below(most.min(SIZE / BLOCK - first));
    let op = match random.below(10) {
        0..6 => Op::Write { fua: false },
        6 => Op::Discard,
        7 => Op::WriteZeroes { fua: false, deallocate: random.below(2) == 0 },
        _ => Op::Flush,
    };
    Some(Request { op, offset: first * BLOCK, len: blocks * BLOCK })
}

/// Executes requests and records the changes of the file.
fn run(path: &Path, random: &mut Random, requests: &[Option<Request>]) -> Workload {
    let image = open_image(path);
    let disk = content(&image);
    let file = std::fs::read(path).unwrap();
    let log = &image.format.file.log;
    *log.lock() = Some(Vec::new());
    let len = || log.lock().as_ref().unwrap().len();
    let mut done = Vec::new();
    for request in requests {
        let Some(Request { op, offset, len: size }) = *request else {
            image.settle();
            continue;
        };
        let start = len();
        let mut data = vec![0; size as usize];
        if op == Op::Flush {
            image.sync().unwrap();
        } else {
            let mut buffer = IoBuffer::new(size as usize);
            if matches!(op, Op::Write { .. }) {
                data = random.bytes(size as usize);
                buffer.copy_from_slice(&data);
            }
            image.run(&Request { op, offset, len: size }, Some(&mut buffer)).unwrap();
        }
        done.push(Done { op, offset, data, start, end: len() });
    }
    image.settle();
    let changes = log.lock().take().unwrap();
    Workload { file, disk, changes, done }
}

fn apply(file: &mut Vec<u8>, change: &Change, mut keeps: impl FnMut() -> bool) {
    match change {
        Change::Write { offset, bytes, .. } => {
            for (nth, sector) in bytes.chunks(512).enumerate() {
                let at = *offset as usize + nth * 512;
                if keeps() {
                    file.resize(file.len().max(at + sector.len()), 0);
                    file[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        Change::Len(len) if keeps() => file.resize(*len as usize, 0),
        Change::Len(_) | Change::Sync => {}
    }
}

impl Workload {
    /// Checks the image after a crash that has left the content `file`. The image must contain the
    /// results of the first `kept` requests. The first `started` requests may have had an effect.
    fn check(&self, path: &Path, file: &[u8], kept: usize, started: usize, context: &str) {
        std::fs::write(path, file).unwrap();
        let name = path.to_str().unwrap();
        let code = qemu_img(&["check", "-f", "qcow2", name]);
        assert!(matches!(code, Some(0 | 3)), "{context}: qemu-img check: {code:?}");
        let image = open_image(path);
        let found = content(&image);
        let mut wanted = self.disk.clone();
        let mut is_open = vec![false; (SIZE / BLOCK) as usize];
        for (nth, done) in self.done[..started].iter().enumerate() {
            if done.op == Op::Flush {
                continue;
            }
            let at = done.offset as usize;
            if nth < kept {
                wanted[at..at + done.data.len()].copy_from_slice(&done.data);
            } else {
                is_open[at / 512..(at + done.data.len()) / 512].fill(true);
            }
        }
        for (nth, is_open) in is_open.iter().enumerate() {
            let at = nth * 512..nth * 512 + 512;
            let same = found[at.clone()] == wanted[at];
            assert!(same || *is_open, "{context}: block {nth} differs");
        }
        // A further write needs consistent counts.
        let mut buffer = IoBuffer::new(128 << 10);
        let request = Request { op: Op::Write { fua: false }, offset: 1 << 20, len: 128 << 10 };
        image.run(&request, Some(&mut buffer)).unwrap();
        image.settle();
        drop(image);
        let code = qemu_img(&["check", "-f", "qcow2", name]);
        assert!(matches!(code, Some(0 | 3)), "{context}: after a write: {code:?}");
    }

    /// Simulates a kill of the process after a random number of changes.
    fn kill(&self, path: &Path, random: &mut Random, context: &str) {
        let cut = random.below(self.changes.len() as u64 + 1) as usize;
        let mut file = self.file.clone();
        self.changes[..cut].iter().for_each(|change| apply(&mut file, change, || true));
        let kept = self.done.iter().take_while(|done| done.end <= cut).count();
        let started = self.done.iter().take_while(|done| done.start < cut).count();
        self.check(path, &file, kept, started.max(kept), &format!("{context}: killed at {cut}"));
    }

    /// Simulates a power loss after a random number of changes.
    fn lose_power_at_random(&self, path: &Path, random: &mut Random, context: &str) {
        let cut = random.below(self.changes.len() as u64 + 1) as usize;
        // Probability, in eighths, that a sector that was changed since the last sync has reached
        // the storage.
        let odds = random.below(9);
        let context = format!("{context}: {odds} of 8");
        self.lose_power(path, cut, &mut |_| random.below(8) < odds, &context);
    }

    /// Number of durable changes among the first `cut` changes: all up to and including the last
    /// sync.
    fn synced(&self, cut: usize) -> usize {
        let is_sync = |change: &Change| matches!(change, Change::Sync);
        self.changes[..cut].iter().rposition(is_sync).map_or(0, |at| at + 1)
    }

    /// Simulates a power loss after `cut` changes. For each sector that was changed since the last
    /// sync, `keeps` is called with the number of the change. It returns true if the sector has
    /// reached the storage.
    fn lose_power(
        &self,
        path: &Path,
        cut: usize,
        keeps: &mut dyn FnMut(usize) -> bool,
        context: &str,
    ) {
        let (changes, synced) = (&self.changes[..cut], self.synced(cut));
        let mut file = self.file.clone();
        for (nth, change) in changes.iter().enumerate() {
            let is_durable = matches!(change, Change::Write { reach: Reach::Storage, .. });
            let is_there = nth < synced || is_durable && nth + 1 < cut;
            apply(&mut file, change, || is_there || keeps(nth));
        }
        let flushed = |done: &&Done| done.op == Op::Flush && done.end <= cut;
        let kept = match self.done.iter().filter(flushed).map(|done| done.end).next_back() {
            Some(end) => self.done.iter().take_while(|done| done.end <= end).count(),
            None => 0,
        };
        let started = self.done.iter().take_while(|done| done.start < cut).count();
        let context = format!("{context}: no power at {cut}");
        self.check(path, &file, kept, started.max(kept), &context);
    }
}

/// Runs workloads on images that `fresh` creates, and simulates crashes in each workload.
fn crashes(fresh: impl Fn(&Path) -> bool) {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path: PathBuf = directory.path().join("disk.qcow2");
    for seed in 1..4_u64 {
        let mut random = Random(seed * 7919);
        let _ = std::fs::remove_file(&path);
        if !fresh(&path) {
            return;
        }
        let requests: Vec<_> = (0..OPS).map(|_| any_request(&mut random)).collect();
        let workload = run(&path, &mut random, &requests);
        for round in 0..CRASHES {
            let context = format!("seed {seed} round {round}");
            workload.kill(&path, &mut random, &context);
            workload.lose_power_at_random(&path, &mut random, &context);
        }
    }
}

fn create(path: &Path, options: &str, more: &[&str]) -> bool {
    let (name, size) = (path.to_str().unwrap(), SIZE.to_string());
    let arguments =
        [&["create", "-q", "-f", "qcow2", "-o", options], more, &[name, &size]].concat();
    match qemu_img(&arguments) {
        None => false,
        code => {
            assert_eq!(code, Some(0));
            true
        }
    }
}

/// Creates an image with a backing file that is half as long and full of data.
fn create_overlay(path: &Path, options: &str) -> bool {
    let base = path.with_extension("base");
    std::fs::write(&base, Random(3).bytes(SIZE as usize / 2)).unwrap();
    create(path, options, &["-b", base.to_str().unwrap(), "-F", "raw"])
}

/// Fills the first half of an image with data, and releases the clusters that the image has
/// reserved but not used.
fn with_data(path: &Path) {
    let image = open_image(path);
    let mut data = IoBuffer::new(SIZE as usize / 2);
    data.copy_from_slice(&Random(5).bytes(SIZE as usize / 2));
    let request = Request { op: Op::Write { fua: false }, offset: 0, len: SIZE / 2 };
    image.run(&request, Some(&mut data)).unwrap();
    image.settle();
}

#[test]
fn crashes_of_an_own_image() {
    crashes(|path| {
        crate::create(path, SIZE).unwrap();
        qemu_img(&["--version"]).is_some()
    });
}

#[test]
fn crashes_of_an_overlay() {
    crashes(|path| create_overlay(path, "cluster_size=16k"));
}

#[test]
fn crashes_of_an_overlay_in_version_2() {
    crashes(|path| create_overlay(path, "compat=0.10,cluster_size=4k"));
}

#[test]
fn crashes_with_subclusters() {
    crashes(|path| create_overlay(path, "extended_l2=on,cluster_size=32k"));
}

/// Small clusters and wide refcounts, with which the writes make the refcount table grow.
#[test]
fn crashes_with_wide_counts() {
    crashes(|path| create(path, "cluster_size=512,refcount_bits=64", &[]));
}

#[test]
fn crashes_with_narrow_counts() {
    crashes(|path| create(path, "cluster_size=1k,refcount_bits=1", &[]));
}

#[test]
fn crashes_with_a_snapshot() {
    crashes(|path| {
        let is_here = create(path, "cluster_size=4k", &[]);
        if is_here {
            with_data(path);
            let name = path.to_str().unwrap();
            assert_eq!(qemu_img(&["snapshot", "-c", "one", name]), Some(0));
        }
        is_here
    });
}

#[test]
fn crashes_with_compressed_clusters() {
    crashes(|path| {
        let raw = path.with_extension("raw");
        let data: Vec<u8> = (0..SIZE).map(|at| (at >> 10) as u8).collect();
        std::fs::write(&raw, data).unwrap();
        let (raw, name) = (raw.to_str().unwrap(), path.to_str().unwrap());
        let options = ["-o", "cluster_size=8k", "-f", "raw", "-O", "qcow2", raw, name];
        qemu_img(&[&["convert", "-c"], &options[..]].concat()).is_some()
    });
}

/// Before an allocation uses freed clusters, their release is written after a sync. Otherwise a
/// power loss could leave the new refcounts on the storage together with old tables, which still
/// refer to the freed clusters.
#[test]
fn crashes_between_the_release_and_the_use_of_clusters() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("disk.qcow2");
    if !create(&path, "cluster_size=4k", &[]) {
        return;
    }
    with_data(&path);
    let request = |op, offset, len| Some(Request { op, offset, len });
    let write = Op::Write { fua: false };
    let requests = [
        request(Op::Discard, 0, 512 << 10),
        request(write, 2 << 20, 64 << 10),
        request(Op::Discard, 512 << 10, 512 << 10),
        None,
        request(write, 0, 64 << 10),
    ];
    let workload = run(&path, &mut Random(11), &requests);
    let is_end = |cut: &usize| matches!(workload.changes.get(*cut), None | Some(Change::Sync));
    for cut in (1..=workload.changes.len()).filter(is_end) {
        for nth in workload.synced(cut)..cut {
            let context = format!("only {nth}");
            workload.lose_power(&path, cut, &mut |change| change == nth, &context);
            let context = format!("without {nth}");
            workload.lose_power(&path, cut, &mut |change| change != nth, &context);
        }
    }
}

/// After a discard and a flush, a write uses the released cluster at once. It does not search the
/// refcounts of all other clusters.
#[test]
fn released_clusters_are_found_without_a_search() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    if !create(&path, "cluster_size=512", &[]) {
        return;
    }
    let image = open_image(&path);
    let request = |op, offset, len| Request { op, offset, len };
    let mut all = IoBuffer::new(SIZE as usize);
    image.run(&request(Op::Write { fua: false }, 0, SIZE), Some(&mut all)).unwrap();
    let mut cycle = |n: u64| {
        image.run(&request(Op::Discard, n * BLOCK, BLOCK), None).unwrap();
        image.sync().unwrap();
        image.run(&request(Op::Write { fua: false }, n * BLOCK, BLOCK), Some(&mut all)).unwrap();
    };
    cycle(0);
    let before = image.format.meta().counts.searched;
    let len = image.format.file.len();
    const CYCLES: u64 = 500;
    (1..=CYCLES).for_each(&mut cycle);
    let searched = image.format.meta().counts.searched - before;
    assert!(searched <= 8 * CYCLES, "{searched} counts");
    assert_eq!(image.format.file.len(), len, "released clusters are used again");
}

#[test]
fn an_open_image_has_no_errors() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("disk.qcow2");
    crate::create(&path, SIZE).unwrap();
    let image = open_image(&path);
    let mut data = IoBuffer::new(4096);
    data.fill(7);
    let request = Request { op: Op::Write { fua: false }, offset: 1 << 20, len: 4096 };
    image.run(&request, Some(&mut data)).unwrap();
    let copy = path.with_extension("copy");
    std::fs::copy(&path, &copy).unwrap();
    let held = content(&open_image(&copy));
    assert!(held[1 << 20..][..4096].iter().all(|byte| *byte == 7));
    let header = std::fs::File::open(&path).unwrap();
    let mut features = [0; 8];
    header.read_exact_at(&mut features, 72).unwrap();
    assert_eq!(features, [0; 8], "no dirty bit is needed");
}

/// The repair of a dirty image reads a table that snapshots share only once, but counts a reference
/// from each of them.
#[test]
fn tables_that_snapshots_share_are_read_once() {
    const SNAPSHOTS: u64 = 200;
    const CLUSTER: u64 = 4096;
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("disk.qcow2");
    if !create(&path, "cluster_size=4k", &[]) {
        return;
    }
    with_data(&path);
    let before = content(&open_image(&path));
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut l1_offset = [0; 8];
    file.read_exact_at(&mut l1_offset, 40).unwrap();
    let mut l1 = [0; 16];
    file.read_exact_at(&mut l1, u64::from_be_bytes(l1_offset)).unwrap();
    (l1[0], l1[8]) = (l1[0] & 0x7f, l1[8] & 0x7f);
    let first = file.metadata().unwrap().len().next_multiple_of(CLUSTER);
    let table = first + SNAPSHOTS * CLUSTER;
    let mut entries = Vec::new();
    for nth in 0..SNAPSHOTS {
        let at = first + nth * CLUSTER;
        file.write_all_at(&l1, at).unwrap();
        let id = format!("{nth:08}");
        entries.extend(at.to_be_bytes());
        entries.extend([0, 0, 0, 2, 0, 8, 0, 0]);
        entries.extend([0; 20]);
        entries.extend(16_u32.to_be_bytes());
        entries.extend([0; 8]);
        entries.extend(SIZE.to_be_bytes());
        entries.extend(id.as_bytes());
    }
    file.write_all_at(&entries, table).unwrap();
    let end = (table + entries.len() as u64).next_multiple_of(CLUSTER);
    file.set_len(end).unwrap();
    file.write_all_at(&(SNAPSHOTS as u32).to_be_bytes(), 60).unwrap();
    file.write_all_at(&table.to_be_bytes(), 64).unwrap();
    file.write_all_at(&[1], 79).unwrap();
    let image = open_image(&path);
    // The scan reads the header, the entry of each snapshot, its L1 table, and the tables that the
    // snapshots share.
    let reads = image.format.file.reads.load(Ordering::Relaxed);
    assert!(reads < 3 * SNAPSHOTS, "{reads} reads");
    assert!(content(&image) == before);
    drop(image);
    assert_eq!(qemu_img(&["check", "-f", "qcow2", path.to_str().unwrap()]), Some(0));
}

/// Opening a valid image reads no L2 table, however many there are.
#[test]
fn a_valid_image_is_opened_without_a_check() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("disk.qcow2");
    if !create(&path, "cluster_size=512", &[]) {
        return;
    }
    with_data(&path);
    let image = open_image(&path);
    // Opening reads some empty refcount blocks at the end of the image, but none of its 48 L2
    // tables.
    let reads = image.format.file.reads.load(Ordering::Relaxed);
    assert!(reads < 48, "{reads} reads");
}

#[test]
fn more_tables_than_fit_into_the_file_are_refused() {
    const TABLES: u64 = 32768;
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("disk.qcow2");
    crate::create(&path, SIZE).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    // The L1 table refers to consecutive L2 tables. All of these are in a hole of the file. So the
    // file occupies little space.
    let l1: Vec<u8> = (0..TABLES).flat_map(|n| ((1 << 30) + (n << 16)).to_be_bytes()).collect();
    file.write_all_at(&l1, 1 << 20).unwrap();
    file.write_all_at(&(TABLES as u32).to_be_bytes(), 36).unwrap();
    file.write_all_at(&(1_u64 << 20).to_be_bytes(), 40).unwrap();
    file.set_len(4 << 30).unwrap();
    let Err(error) = try_open(&path, false) else { panic!("the image was opened") };
    assert!(error.to_string().contains("more tables than fit"), "{error}");
    let image = image_of(try_open(&path, true).unwrap(), &path);
    assert!(content(&image).iter().all(|byte| *byte == 0));
}

#[test]
fn requests_wait_for_the_check_of_the_tables() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("disk.qcow2");
    crate::create(&path, SIZE).unwrap();
    for passes in [true, false] {
        let mut opened = try_open(&path, false).unwrap();
        let (sender, receiver) = channel();
        opened.check = Check::run("x", move |_| receiver.recv().unwrap()).unwrap();
        let image = image_of(opened, &path);
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let read = scope.spawn(|| {
                let request = Request { op: Op::Read, offset: 0, len: 4096 };
                let result = image.run(&request, Some(&mut IoBuffer::new(4096)));
                ended.store(true, Ordering::SeqCst);
                result
            });
            wait::short_pause();
            assert!(!ended.load(Ordering::SeqCst), "a request has not waited");
            let mut extents = Vec::new();
            image.extents(0, SIZE, &mut |extent| {
                extents.push((extent.len, extent.allocated));
                true
            });
            assert_eq!(extents, [(SIZE, true)]);
            let why = || OpenError::Damaged { path: "x".to_owned(), why: String::new() };
            sender.send(if passes { Ok(()) } else { Err(why()) }).unwrap();
            let wanted = if passes { Ok(()) } else { Err(DiskError::Io(libc::EIO)) };
            assert_eq!(read.join().unwrap(), wanted);
        });
        assert_eq!(image.has_lost_writes(), !passes);
    }
}

/// Requests on the slow path and on the fast path exclude each other, so that blocks are atomic.
#[test]
fn the_slow_path_waits_for_requests_of_the_fast_path() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("disk.qcow2");
    crate::create(&path, SIZE).unwrap();
    let mut options = FileOptions::default();
    options.direct = Direct::Off;
    let image = image_of(open(&path, &options, &mut ByPath).unwrap(), &path);
    let run = |op| image.run(&Request { op, offset: 0, len: 4096 }, Some(&mut IoBuffer::new(4096)));
    let write = Op::Write { fua: true };
    run(write).unwrap();
    let Some(map) = &image.map else { return skipped("no io_uring here") };
    let (host, entered) = map.enter(0, 4096, true).unwrap();
    map.leave(entered);
    for (op, by_write) in [(Op::Read, true), (write, false), (Op::Compare, true)] {
        let fast = image.format.locks.get().unwrap().lock(host + 512, 512, by_write);
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| {
                let result = run(op);
                ended.store(true, Ordering::SeqCst);
                result
            });
            wait::short_pause();
            assert!(!ended.load(Ordering::SeqCst), "{op:?} has not waited");
            drop(fast);
            slow.join().unwrap().unwrap();
        });
    }
}
