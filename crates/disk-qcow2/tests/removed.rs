//! Storage that is removed during I/O on a qcow2 image, and then returns. Flushed data must be in
//! the image, and writes that were interrupted must not have damaged it.

mod common;

use common::{check, directory, file_options, flush, memory, open, read, segments, wait, write};
use shadowbell_disk::{Disk, DiskError, Op, Queue, Request, Submitted};
use shadowbell_disk_qcow2::{Qcow2Disk, create};
use shadowbell_testing::disks::Random;
use shadowbell_testing::programs::skipped;
use shadowbell_testing::stalled::{Mount, run_daemon_if_requested};
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
    run_daemon_if_requested();
}

/// Possible contents of each block. The content of a block is a number, which is zero at first.
struct Model {
    /// For each block: its content at the last completed flush, and all contents that were written
    /// since.
    blocks: Vec<Vec<u64>>,
    /// True if the storage may lose everything that was not flushed. Then a cluster that was
    /// allocated since the last flush may contain old data, from any earlier use of its place in
    /// the file.
    is_rough: bool,
    /// All earlier contents of each block. With `is_rough`, only for blocks that were not flushed.
    older: Vec<Vec<u64>>,
    last: u64,
    random: Random,
}

/// Request in flight: a write, or a flush with the blocks whose writes had completed before it.
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

    /// Keeps writes in flight, with some flushes, until a request fails. `end` removes the storage
    /// at some time, and returns true if it has done so; a flush that completes after that makes
    /// nothing durable. Finally waits for all requests, and returns their errors.
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
                    // A flush makes a write durable only if the write has completed before the
                    // flush is submitted.
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

    /// Reads the whole disk, and checks its contents. The contents that were found are the expected
    /// contents from then on.
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

/// Opens the image with `options`. Waits until the previous owner has released its lock.
fn open_soon(path: &Path, options: &str) -> Qcow2Disk {
    wait::until_some("a free image", || Qcow2Disk::open(path, &file_options(options)).ok())
}

/// The daemon of a FUSE file system is killed at a random moment.
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
            // Time of the kill. Any moment is suitable.
            let time = Duration::from_millis(20 + round * 37 % 120);
            let errors = model.load(&mut *queue, || {
                // Kills the daemon when the time has come.
                let is_time = began.elapsed() > time;
                if is_time {
                    mount.end();
                }
                is_time
            });
            let is_removal = |error: &DiskError| {
                matches!(error, DiskError::Io(libc::ENOTCONN | libc::ECONNABORTED))
            };
            assert!(errors.iter().all(is_removal), "{context}: {errors:?}");
            for error in [
                read(&mut *queue, SIZE - BLOCK, 4096).unwrap_err(),
                write(&mut *queue, 0, &[1; 4096]).unwrap_err(),
                flush(&mut *queue).unwrap_err(),
            ] {
                assert!(is_removal(&error), "{context}: {error:?}");
            }
            // The image is closed while its storage is removed.
            drop((queue, disk, mount));
            model.compare(&open_soon(&behind, options), &context);
            check(&behind);
        }
    }
}

/// A file that is shorter than its tables require is an incomplete copy. It is opened only for
/// reading, and requests on the missing clusters fail.
#[test]
fn a_file_shorter_than_its_tables_is_only_read() {
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
    let error = Qcow2Disk::open(&path, &file_options("")).unwrap_err().to_string();
    assert!(error.contains(&format!("ends {} bytes before", 3 << 16)), "{error}");
    assert_eq!(file.metadata().unwrap().len(), len - (3 << 16));
    let disk = open_soon(&path, "?read-only=on");
    let mut queue = disk.queue().unwrap();
    for n in 0..8 {
        let held = read(&mut *queue, n * MIB, 4096);
        let wanted =
            if n < 5 { Ok(vec![n as u8 + 1; 4096]) } else { Err(DiskError::Io(libc::EIO)) };
        assert_eq!(held, wanted, "{n}");
    }
    drop((queue, disk));
    // The error message contains a command that extends the file. The test extends it in the same
    // way.
    assert!(error.contains(&format!("truncate -s {len} ")), "{error}");
    file.set_len(len).unwrap();
    let disk = open_soon(&path, "");
    assert_eq!(read(&mut *disk.queue().unwrap(), 7 * MIB, 4096), Ok(vec![0; 4096]));
    drop(disk);
    check(&path);
    // A file may end within its last cluster.
    file.set_len(len - 4096).unwrap();
    drop(open_soon(&path, ""));
    assert_eq!(file.metadata().unwrap().len(), len - 4096);
    file.set_len(len).unwrap();
    // Changes an entry of the first and only L2 table: only that cluster is damaged.
    let mut entry = [0; 8];
    file.read_exact_at(&mut entry, 40).unwrap();
    let l1 = u64::from_be_bytes(entry);
    file.read_exact_at(&mut entry, l1).unwrap();
    let l2 = u64::from_be_bytes(entry) & 0x00ff_ffff_ffff_fe00;
    file.write_all_at(&(1_u64 << 63 | 1 << 30).to_be_bytes(), l2 + 8 * 100).unwrap();
    let disk = open_soon(&path, "");
    let mut queue = disk.queue().unwrap();
    let bad = 100 << 16;
    assert_eq!(read(&mut *queue, bad, 4096), Err(DiskError::Io(libc::EIO)));
    assert_eq!(write(&mut *queue, bad, &[1; 4096]), Err(DiskError::Io(libc::EIO)));
    for n in [99, 101] {
        assert_eq!(read(&mut *queue, n << 16, 4096), Ok(vec![0; 4096]));
        write(&mut *queue, n << 16, &[1; 4096]).unwrap();
    }
    assert!(!disk.has_lost_writes());
    drop((queue, disk));
    assert_eq!(file.metadata().unwrap().len(), len + (2 << 16));
}

/// Commands that undo a mount or a loop device. They run on drop.
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
            skipped(format_args!("`{program} {}`: {other:?}", arguments.join(" ")));
            None
        }
    }
}

/// A file system is shut down at a random moment. It loses all data that are not on its device.
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
            // Time of the shutdown. Any moment is suitable.
            let time = Duration::from_millis(20 + round * 37 % 120);
            let (began, mut is_shut) = (Instant::now(), false);
            let errors = model.load(&mut *queue, || {
                // Shuts the file system down when the time has come.
                if began.elapsed() > time && !is_shut {
                    is_shut = does("xfs_io", &["-x", "-c", "shutdown", name]).is_some();
                    assert!(is_shut, "`xfs_io` cannot shut the file system down");
                }
                is_shut
            });
            // After the shutdown, the file system may report that it is read-only.
            let is_removal =
                |error: &DiskError| matches!(error, DiskError::Io(libc::EIO | libc::EROFS));
            assert!(errors.iter().all(is_removal), "{context}: {errors:?}");
            assert!(is_removal(&flush(&mut *queue).unwrap_err()), "{context}");
            drop((queue, disk));
            // Another test may just have forked a child process. It holds all open files until it
            // executes its program, so the unmount is repeated.
            wait::until("an unmount", || {
                Command::new("umount").arg(name).output().unwrap().status.success()
            });
        }
    }
}
