//! Storage that is removed under a qcow2 image in mid-I/O and returns: flushed data are in the
//! image, and partial writes do not damage it.

mod common;

use common::{check, directory, file_options, flush, memory, open, read, segments, wait, write};
use shadowbell_disk::{Disk, DiskError, Op, Queue, Request, Submitted};
use shadowbell_disk_qcow2::{Qcow2Disk, create};
use shadowbell_testing::disks::Random;
use shadowbell_testing::stalled::{Mount, be_the_daemon};
use shadowbell_testing::wait;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;
const BLOCK: u64 = 4096;
/// Number of requests in flight.
const DEPTH: u32 = 32;

#[test]
fn fuse_daemon() {
    be_the_daemon();
}

/// Possible contents of each block: a number, zero at first.
struct Model {
    /// Contents at the last completed flush, and all data written since.
    blocks: Vec<Vec<u64>>,
    /// Only flushed data are guaranteed: in a cluster allocated since, any old contents of that
    /// place of the file may be read.
    is_rough: bool,
    /// All earlier contents of each block; with `is_rough`, only of blocks that were not flushed.
    older: Vec<Vec<u64>>,
    last: u64,
    random: Random,
}

/// A request in flight: a write, or a flush with the blocks that were written before it.
enum Sent {
    Write(usize),
    Flush(Vec<usize>),
}

impl Model {
    fn new(seed: u64, is_rough: bool) -> Self {
        let count = (SIZE / BLOCK) as usize;
        let (blocks, older) = (vec![vec![0]; count], vec![vec![0]; count]);
        Self { blocks, is_rough, older, last: 0, random: Random(seed) }
    }

    /// Keeps writes in flight, with occasional flushes, until a request fails. `end` removes the
    /// storage in time, and returns whether it has: later flushes do not count. Then waits for all
    /// requests, and returns the errors.
    fn load(&mut self, queue: &mut dyn Queue, mut end: impl FnMut() -> bool) -> Vec<DiskError> {
        let bytes = memory((u64::from(DEPTH) * BLOCK) as usize);
        let mut sent: Vec<Option<Sent>> = (0..DEPTH).map(|_| None).collect();
        let mut errors = Vec::new();
        loop {
            let has_ended = end();
            let is_over = !errors.is_empty();
            for tag in 0..DEPTH {
                if is_over || sent[tag as usize].is_some() {
                    continue;
                }
                let at = u64::from(tag) * BLOCK;
                let (request, what) = if self.random.below(40) == 0 {
                    let is_under_way = |block: &usize| {
                        let is = |sent: &Option<Sent>| matches!(sent, Some(Sent::Write(it)) if it == block);
                        sent.iter().any(is)
                    };
                    // A flush makes writes durable that completed before its submission.
                    let ended = (0..self.blocks.len())
                        .filter(|block| self.blocks[*block].len() > 1 && !is_under_way(block));
                    (Request { op: Op::Flush, offset: 0, len: 0 }, Sent::Flush(ended.collect()))
                } else {
                    let block = self.random.below(SIZE / BLOCK) as usize;
                    let is =
                        |sent: &Option<Sent>| matches!(sent, Some(Sent::Write(it)) if *it == block);
                    let is_flushing = sent.iter().any(|it| matches!(it, Some(Sent::Flush(_))));
                    if sent.iter().any(is) || is_flushing {
                        continue;
                    }
                    self.last += 1;
                    self.blocks[block].push(self.last);
                    let text = self.last.to_le_bytes().repeat(BLOCK as usize / 8);
                    bytes.write_from(at as usize, &text).unwrap();
                    let op = Op::Write { fua: false };
                    let request = Request { op, offset: block as u64 * BLOCK, len: BLOCK };
                    (request, Sent::Write(block))
                };
                let mut data = segments(&bytes, at as usize, request.len as usize);
                match queue.submit(tag, &request, &mut data) {
                    Submitted::Pending => sent[tag as usize] = Some(what),
                    Submitted::Done(result) => self.ended(what, result, has_ended, &mut errors),
                }
            }
            queue.commit();
            if queue.pending() == 0 && is_over {
                return errors;
            }
            if queue.pending() > 0 {
                wait(queue);
                queue.reap(&mut |tag, result, _| {
                    let what =
                        sent[tag as usize].take().expect("a completion of a request in flight");
                    self.ended(what, result, has_ended, &mut errors);
                });
            }
        }
    }

    fn ended(
        &mut self,
        what: Sent,
        result: Result<(), DiskError>,
        has_ended: bool,
        errors: &mut Vec<DiskError>,
    ) {
        match (what, result) {
            (_, Err(error)) => errors.push(error),
            (Sent::Write(_), Ok(())) => {}
            (Sent::Flush(_), Ok(())) if has_ended => {}
            (Sent::Flush(blocks), Ok(())) => {
                for block in blocks {
                    let last = self.blocks[block].len() - 1;
                    self.blocks[block].drain(..last);
                    self.older[block].clear();
                }
            }
        }
    }

    /// Reads the whole disk; its contents are the expected ones from here on.
    fn compare(&mut self, disk: &Qcow2Disk, context: &str) {
        let all = read(&mut *disk.queue().unwrap(), 0, SIZE as usize).unwrap();
        for (block, held) in all.chunks(BLOCK as usize).enumerate() {
            let number = u64::from_le_bytes(held[..8].try_into().unwrap());
            assert!(held.chunks(8).all(|part| part == &held[..8]), "{context}: {block} in parts");
            let (may, older) = (&mut self.blocks[block], &mut self.older[block]);
            let is_older = self.is_rough && older.contains(&number);
            let is_one = may.contains(&number) || is_older;
            assert!(is_one, "{context}: block {block} has {number}, not of {may:?} or {older:?}");
            if may.len() > 1 || is_older {
                older.append(may);
            }
            *may = vec![number];
        }
    }
}

/// Opens the image with `options`, after the previous holder has released its lock.
fn open_soon(path: &Path, options: &str) -> Qcow2Disk {
    wait::until_some("a free image", || Qcow2Disk::open(path, &file_options(options)).ok())
}

/// The daemon of the FUSE file system is killed at any moment.
#[test]
fn the_server_of_a_file_system_is_killed() {
    for options in ["", "?aio=threads"] {
        let directory = directory();
        let behind = directory.path().join("disk.qcow2");
        create(&behind, SIZE).unwrap();
        let mut model = Model::new(71, false);
        for round in 0..6_u64 {
            let context = format!("{options} round {round}");
            let Some(mount) = Mount::over("fuse_daemon", &behind) else { return };
            let disk = open(&mount.path(), options);
            let mut queue = disk.queue().unwrap();
            let (began, mut mount) = (Instant::now(), mount);
            // Random moment: any is good.
            let time = Duration::from_millis(20 + round * 37 % 120);
            let errors = model.load(&mut *queue, || {
                // The server of the file system ends at a moment that differs.
                let is_time = began.elapsed() > time;
                if is_time {
                    mount.end();
                }
                is_time
            });
            let is_gone = |error: &DiskError| {
                matches!(error, DiskError::Io(libc::ENOTCONN | libc::ECONNABORTED))
            };
            assert!(errors.iter().all(is_gone), "{context}: {errors:?}");
            for error in [
                read(&mut *queue, SIZE - BLOCK, 4096).unwrap_err(),
                write(&mut *queue, 0, &[1; 4096]).unwrap_err(),
                flush(&mut *queue).unwrap_err(),
            ] {
                assert!(is_gone(&error), "{context}: {error:?}");
            }
            // The image is closed without its storage.
            drop((queue, disk, mount));
            model.compare(&open_soon(&behind, options), &context);
            check(&behind);
        }
    }
}

/// Tables that refer beyond the end of the file: those clusters read as zeroes, and the image
/// is not damaged. An entry with an impossible offset does not extend the file.
#[test]
fn a_file_shorter_than_its_tables_is_extended() {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    create(&path, SIZE).unwrap();
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    for n in 0..8 {
        write(&mut *queue, n * MIB, &[n as u8 + 1; 65536]).unwrap();
    }
    flush(&mut *queue).unwrap();
    drop((queue, disk));
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(len - (3 << 16)).unwrap();
    let disk = open_soon(&path, "");
    let mut queue = disk.queue().unwrap();
    let first = |queue: &mut dyn Queue, n: u64| read(queue, n * MIB, 4096).unwrap()[0];
    let held: Vec<u8> = (0..8).map(|n| first(&mut *queue, n)).collect();
    assert_eq!(held, [1, 2, 3, 4, 5, 0, 0, 0]);
    drop((queue, disk));
    assert_eq!(file.metadata().unwrap().len(), len);
    check(&path);
    // A file that ends within its last cluster is valid.
    file.set_len(len - 4096).unwrap();
    drop(open_soon(&path, ""));
    assert_eq!(file.metadata().unwrap().len(), len - 4096);
    file.set_len(len).unwrap();
    // An entry of the first L2 table, the only one.
    let mut entry = [0; 8];
    file.read_exact_at(&mut entry, 40).unwrap();
    let l1 = u64::from_be_bytes(entry);
    file.read_exact_at(&mut entry, l1).unwrap();
    let l2 = u64::from_be_bytes(entry) & 0x00ff_ffff_ffff_fe00;
    file.write_all_at(&(1_u64 << 63 | 1 << 30).to_be_bytes(), l2 + 8 * 100).unwrap();
    drop(open_soon(&path, ""));
    assert_eq!(file.metadata().unwrap().len(), len);
}

/// Undoes a mount or a loop device on drop.
struct Undo(Vec<String>);

impl Drop for Undo {
    fn drop(&mut self) {
        let _ = Command::new(&self.0[0]).args(&self.0[1..]).output();
    }
}

fn does(program: &str, arguments: &[&str]) -> Option<String> {
    match Command::new(program).args(arguments).output() {
        Ok(output) if output.status.success() => {
            Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        }
        other => {
            eprintln!("skipped: `{program} {}`: {other:?}", arguments.join(" "));
            None
        }
    }
}

/// A file system is shut down at any moment, which loses data that are not on its device.
#[test]
fn a_file_system_is_shut_down() {
    let directory = directory();
    let behind = directory.path().join("fs.img");
    std::fs::File::create(&behind).unwrap().set_len(256 * MIB).unwrap();
    let Some(device) = does("losetup", &["-f", "--show", behind.to_str().unwrap()]) else { return };
    let _detach = Undo(["losetup", "-d", &device].map(str::to_owned).into());
    let name = directory.path().join("mount");
    std::fs::create_dir(&name).unwrap();
    let name = name.to_str().unwrap();
    if does("xfs_io", &["-V"]).is_none() || does("mkfs.ext4", &["-q", &device]).is_none() {
        return;
    }
    for options in ["", "?direct=off", "?aio=threads"] {
        let path = Path::new(name).join(format!("disk{}.qcow2", options.len()));
        let mut model = Model::new(72, true);
        for round in 0..4_u64 {
            let context = format!("{options} round {round}");
            if does("mount", &[&device, name]).is_none() {
                return;
            }
            let _unmount = Undo(["umount", name].map(str::to_owned).into());
            if round == 0 {
                create(&path, SIZE).unwrap();
                std::fs::File::open(&path).unwrap().sync_all().unwrap();
                std::fs::File::open(name).unwrap().sync_all().unwrap();
            }
            model.compare(&open_soon(&path, options), &context);
            check(&path);
            let disk = open_soon(&path, options);
            model.compare(&disk, &context);
            let mut queue = disk.queue().unwrap();
            // Random moment: any is good.
            let time = Duration::from_millis(20 + round * 37 % 120);
            let (began, mut is_shut) = (Instant::now(), false);
            let errors = model.load(&mut *queue, || {
                // The server of the file system ends at a moment that differs.
                if began.elapsed() > time && !is_shut {
                    is_shut = does("xfs_io", &["-x", "-c", "shutdown", name]).is_some();
                    assert!(is_shut, "`xfs_io` cannot shut the file system down");
                }
                is_shut
            });
            // The file system may report itself as read-only.
            let is_gone =
                |error: &DiskError| matches!(error, DiskError::Io(libc::EIO | libc::EROFS));
            assert!(errors.iter().all(is_gone), "{context}: {errors:?}");
            assert!(is_gone(&flush(&mut *queue).unwrap_err()), "{context}");
            drop((queue, disk));
            // A process that another test begins has all files until it is another program.
            wait::until("an unmount", || {
                Command::new("umount").arg(name).output().unwrap().status.success()
            });
        }
    }
}
