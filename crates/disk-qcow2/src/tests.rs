//! Model of crashes. All changes of a file by a random workload are recorded. Then the process is
//! killed after any of them, or the power is lost: any of the changes since the last sync, in units
//! of sectors, are missing. The image must have no errors then, and its data must be right.

use crate::image::Image;
use crate::open::{ByPath, open};
use crate::storage::{Change, IoBuffer, Reach};
use shadowbell_disk::{DiskInfo, Op, Request};
use shadowbell_disk_file::{Aio, Direct, FileOptions};
use shadowbell_testing::disks::Random;
use shadowbell_testing::programs::skipped;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

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
    /// Number of changes before the request and after it.
    start: usize,
    end: usize,
}

struct Workload {
    /// Content of the file and of the disk at first.
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

fn open_image(path: &Path) -> Image {
    let mut options = FileOptions::default();
    (options.aio, options.direct, options.allow_backing) = (Aio::Threads, Direct::Off, true);
    let opened = open(path, &options, &mut ByPath).unwrap();
    Image::new(opened, DiskInfo::new(512, SIZE / 512), path.display().to_string())
}

fn content(image: &Image) -> Vec<u8> {
    let mut all = IoBuffer::new(SIZE as usize);
    image.run(&Request { op: Op::Read, offset: 0, len: SIZE }, Some(&mut all)).unwrap();
    all.to_vec()
}

fn run(path: &Path, random: &mut Random) -> Workload {
    let image = open_image(path);
    let disk = content(&image);
    let file = std::fs::read(path).unwrap();
    let log = &image.format.file.log;
    *log.lock() = Some(Vec::new());
    let len = || log.lock().as_ref().unwrap().len();
    let mut done = Vec::new();
    for _ in 0..OPS {
        let first = random.below(SIZE / BLOCK);
        let most = if random.below(4) == 0 { 256 } else { 16 };
        let blocks = 1 + random.below(most.min(SIZE / BLOCK - first));
        let (offset, size) = (first * BLOCK, blocks * BLOCK);
        let op = match random.below(10) {
            0..6 => Op::Write { fua: false },
            6 => Op::Discard,
            7 => Op::WriteZeroes { fua: false, deallocate: random.below(2) == 0 },
            _ => Op::Flush,
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
        if random.below(20) == 0 {
            image.settle();
        }
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
    /// Checks the image after a crash that has left `file`. `kept` is the number of requests whose
    /// result must be there, and `started` that of the requests that may have had an effect.
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

    /// Kills the process after a random change.
    fn kill(&self, path: &Path, random: &mut Random, context: &str) {
        let cut = random.below(self.changes.len() as u64 + 1) as usize;
        let mut file = self.file.clone();
        self.changes[..cut].iter().for_each(|change| apply(&mut file, change, || true));
        let kept = self.done.iter().take_while(|done| done.end <= cut).count();
        let started = self.done.iter().take_while(|done| done.start < cut).count();
        self.check(path, &file, kept, started.max(kept), &format!("{context}: killed at {cut}"));
    }

    /// Loses the power after a random change.
    fn lose_power(&self, path: &Path, random: &mut Random, context: &str) {
        let cut = random.below(self.changes.len() as u64 + 1) as usize;
        let changes = &self.changes[..cut];
        let is_sync = |change: &Change| matches!(change, Change::Sync);
        let synced = changes.iter().rposition(is_sync).map_or(0, |at| at + 1);
        let mut file = self.file.clone();
        // Probability, in eighths, that a change is on the storage.
        let odds = random.below(9);
        for (nth, change) in changes.iter().enumerate() {
            let is_durable = matches!(change, Change::Write { reach: Reach::Storage, .. });
            let is_there = nth < synced || is_durable && nth + 1 < cut;
            apply(&mut file, change, || is_there || random.below(8) < odds);
        }
        let flushed = |done: &&Done| done.op == Op::Flush && done.end <= cut;
        let kept = match self.done.iter().filter(flushed).map(|done| done.end).next_back() {
            Some(end) => self.done.iter().take_while(|done| done.end <= end).count(),
            None => 0,
        };
        let started = self.done.iter().take_while(|done| done.start < cut).count();
        let context = format!("{context}: no power at {cut}, {odds} of 8");
        self.check(path, &file, kept, started.max(kept), &context);
    }
}

/// Runs workloads on images that `fresh` creates, and lets each of them crash.
fn crashes(fresh: impl Fn(&Path) -> bool) {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path: PathBuf = directory.path().join("disk.qcow2");
    for seed in 1..4_u64 {
        let mut random = Random(seed * 7919);
        let _ = std::fs::remove_file(&path);
        if !fresh(&path) {
            return;
        }
        let workload = run(&path, &mut random);
        for round in 0..CRASHES {
            let context = format!("seed {seed} round {round}");
            workload.kill(&path, &mut random, &context);
            workload.lose_power(&path, &mut random, &context);
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

/// Creates an image with data, which is written to its file before.
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

/// The refcount table grows.
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

/// The tables of an answered write are in the file, and the order of writes has no exceptions for a
/// file that is overwritten while it is open.
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
