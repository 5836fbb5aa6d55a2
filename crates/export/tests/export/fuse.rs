//! FUSE export, mounted by the kernel. The tests are skipped without root or /dev/fuse.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FallocateFlags, SeekFrom, copy_file_range, fallocate, seek};
use rustix::io::Errno;
use shadowbell_block::{BlockDevice, BlockOptions};
use shadowbell_disk::{DiskError, Op};
use shadowbell_disk_layers::{ErrorPolicy, HoldingDisk};
use shadowbell_export::fuse::{Mount, MountError, Options, Session};
use shadowbell_testing::programs::skipped;
use shadowbell_testing::test_disk::TestDisk;
use shadowbell_testing::wait;
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tempfile::TempDir;

fn is_possible() -> bool {
    let possible = rustix::process::geteuid().is_root()
        && OpenOptions::new().read(true).write(true).open("/dev/fuse").is_ok();
    if !possible {
        skipped("this takes root and /dev/fuse");
    }
    possible
}

/// A mounted disk.
struct Mounted(Mount, Session);

impl Mounted {
    fn start(disk: &BlockDevice, path: &Path) -> Result<Self, MountError> {
        Self::start_with(disk, path, &Options::default(), || ())
    }

    fn start_with(
        disk: &BlockDevice,
        path: &Path,
        options: &Options,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        let (mount, device) = Mount::new(path, disk.geometry().read_only)?;
        Ok(Self(mount, Session::start(disk, device, options, on_end).unwrap()))
    }

    fn failures(&self) -> u64 {
        self.1.failures()
    }

    /// Unmounts the disk unless it was unmounted before, and waits for its users.
    fn stop(self) -> u64 {
        let Self(mount, session) = self;
        if !session.is_over() {
            mount.unmount();
        }
        let failures = session.finish();
        mount.remove_file();
        failures
    }
}

struct Rig {
    backing: TestDisk,
    mounted: Option<Mounted>,
    directory: TempDir,
    ended: Arc<AtomicU32>,
}

impl Rig {
    fn new(mebibytes: u64, read_only: bool) -> Self {
        Self::with(mebibytes, read_only, &Options::default())
    }

    fn with(mebibytes: u64, read_only: bool, mount: &Options) -> Self {
        Self::over(TestDisk::new(mebibytes << 11, 512), read_only, mount)
    }

    fn over(backing: TestDisk, read_only: bool, mount: &Options) -> Self {
        let mut options = BlockOptions::default();
        (options.read_only, options.queues) = (read_only, 2);
        let disk = BlockDevice::new(Arc::new(backing.clone()), &options).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let ended: Arc<AtomicU32> = Arc::default();
        let count = Arc::clone(&ended);
        let path = directory.path().join("disk");
        let on_end = move || _ = count.fetch_add(1, Ordering::SeqCst);
        let mounted = Some(Mounted::start_with(&disk, &path, mount, on_end).unwrap());
        Self { backing, mounted, directory, ended }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("disk")
    }

    fn open(&self) -> File {
        OpenOptions::new().read(true).write(true).open(self.path()).unwrap()
    }

    fn saw(&self, op: impl Fn(&Op) -> bool) -> usize {
        self.backing.seen().iter().filter(|seen| op(&seen.op)).count()
    }

    fn end(mut self) {
        assert_eq!(self.mounted.take().unwrap().stop(), 0);
        assert_eq!(self.ended.load(Ordering::SeqCst), 1);
        assert!(!self.path().exists(), "the file was made for the mount");
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.mounted.take().map(Mounted::stop);
    }
}

fn errno<T>(result: std::io::Result<T>) -> Option<Errno> {
    Errno::from_io_error(&result.err()?)
}

#[test]
fn a_file_reads_and_writes_the_disk() {
    if !is_possible() {
        return;
    }
    let rig = Rig::new(8, false);
    let file = rig.open();
    assert_eq!(file.metadata().unwrap().len(), 8 << 20);
    file.write_all_at(b"any bytes", 1000).unwrap();
    let mut bytes = [1; 11];
    file.read_exact_at(&mut bytes, 999).unwrap();
    assert_eq!(&bytes, b"\0any bytes\0");
    rig.backing.mem.bytes().read_into(999, &mut bytes).unwrap();
    assert_eq!(&bytes, b"\0any bytes\0", "nothing is cached");
    let long: Vec<u8> = (0..3 << 20).map(|i: u32| (i ^ i >> 8) as u8).collect();
    file.write_all_at(&long, 12345).unwrap();
    let mut back = vec![0; long.len()];
    file.read_exact_at(&mut back, 12345).unwrap();
    assert!(back == long);
    // Reads and writes at the end of the file.
    assert_eq!(file.read_at(&mut [0; 100], (8 << 20) - 10).unwrap(), 10);
    assert_eq!(file.read_at(&mut [0; 100], 8 << 20).unwrap(), 0);
    assert_eq!(file.write_at(&[0; 100], (8 << 20) - 10).unwrap(), 10);
    assert_eq!(errno(file.write_at(&[0; 100], 8 << 20)), Some(Errno::NOSPC));
    file.sync_all().unwrap();
    file.sync_data().unwrap();
    assert_eq!(rig.saw(|op| *op == Op::Flush), 2);
    drop(file);
    rig.end();
}

#[test]
fn holes_are_punched_and_sizes_stay() {
    if !is_possible() {
        return;
    }
    let rig = Rig::new(8, false);
    let file = rig.open();
    file.write_all_at(&[7; 100_000], 0).unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, punch, 1000, 50_000).unwrap();
    fallocate(&file, FallocateFlags::ZERO_RANGE, 60_000, 10_000).unwrap();
    fallocate(&file, FallocateFlags::empty(), 0, 8 << 20).unwrap();
    assert!(rig.saw(|op| matches!(op, Op::WriteZeroes { deallocate: true, .. })) > 0);
    assert!(rig.saw(|op| matches!(op, Op::WriteZeroes { deallocate: false, .. })) > 0);
    let mut back = vec![0; 100_000];
    file.read_exact_at(&mut back, 0).unwrap();
    for (at, byte) in back.iter().enumerate() {
        let zero = (1000..51_000).contains(&at) || (60_000..70_000).contains(&at);
        assert_eq!(*byte == 0, zero, "byte {at}");
    }
    let grow = fallocate(&file, FallocateFlags::empty(), 0, (8 << 20) + 1);
    assert_eq!(grow, Err(Errno::NOSPC));
    let collapse = fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096);
    assert_eq!(collapse, Err(Errno::OPNOTSUPP));
    assert_eq!(errno(file.set_len(0)), Some(Errno::PERM));
    file.set_len(8 << 20).unwrap();
    drop(file);
    rig.end();
}

/// Copies with copy_file_range(2) until all bytes are copied.
fn copy_within(file: &File, mut from: u64, mut to: u64, mut len: u64) -> Result<(), Errno> {
    while len > 0 {
        match copy_file_range(file, Some(&mut from), file, Some(&mut to), len as usize)? {
            0 => panic!("{len} bytes from {from} on are not there"),
            copied => len -= copied as u64,
        }
    }
    Ok(())
}

#[test]
fn copies_within_the_file_are_copies_of_the_disk() {
    if !is_possible() {
        return;
    }
    const MIB: u64 = 1 << 20;
    let rig = Rig::new(160, false);
    let file = rig.open();
    let mut model: Vec<u8> =
        (0..160 * MIB as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    rig.backing.mem.bytes().write_from(0, &model).unwrap();
    let mut copy = |from: u64, to: u64, len: u64| {
        copy_within(&file, from, to, len).unwrap();
        model.copy_within(from as usize..(from + len) as usize, to as usize);
        let mut bytes = vec![0; model.len()];
        rig.backing.mem.bytes().read_into(0, &mut bytes).unwrap();
        assert!(bytes == model, "{len} bytes from {from} to {to}");
    };
    // The kernel splits this copy into several requests.
    copy(0, 80 * MIB, 70 * MIB);
    // Copies of parts of blocks. Source and target have equal or different offsets within a block.
    copy(700, 9 * MIB + 188, 3 * MIB);
    copy(701, 9 * MIB, 3 * MIB);
    copy(5, 1000, 3);
    // Copies at the end of the file.
    copy(100, 160 * MIB - 5000, 5000);
    let at = |mut from: u64, mut to: u64, len| {
        copy_file_range(&file, Some(&mut from), &file, Some(&mut to), len)
    };
    assert_eq!(at(160 * MIB - 10, 0, 4096), Ok(10));
    assert_eq!(at(160 * MIB, 0, 4096), Ok(0));
    assert_eq!(at(0, 160 * MIB - 7, 4096), Ok(7));
    assert_eq!(at(0, 160 * MIB, 4096), Err(Errno::NOSPC));
    drop(file);
    rig.end();
}

#[test]
fn copies_that_fail_are_errors_to_the_program() {
    if !is_possible() {
        return;
    }
    let mut rig = Rig::new(8, false);
    let file = rig.open();
    rig.backing.instruct(|instructions| instructions.fail = Some(DiskError::Io(5)));
    assert_eq!(copy_within(&file, 0, 1 << 20, 1 << 19), Err(Errno::IO));
    assert_eq!(copy_within(&file, 1, 1 << 20, 1 << 19), Err(Errno::IO));
    rig.backing.instruct(|instructions| instructions.fail = Some(DiskError::NoSpace));
    assert_eq!(copy_within(&file, 0, 1 << 20, 1 << 19), Err(Errno::NOSPC));
    rig.backing.instruct(|instructions| instructions.fail = None);
    copy_within(&file, 0, 1 << 20, 1 << 19).unwrap();
    drop(file);
    assert_eq!(rig.mounted.take().unwrap().stop(), 2);
}

#[test]
fn a_read_only_disk_is_a_read_only_file() {
    if !is_possible() {
        return;
    }
    let rig = Rig::new(8, true);
    let file = File::open(rig.path()).unwrap();
    file.read_exact_at(&mut [0; 5], 3).unwrap();
    let writing = OpenOptions::new().write(true).open(rig.path());
    assert_eq!(errno(writing), Some(Errno::ROFS));
    drop(file);
    rig.end();
}

#[test]
fn a_disk_that_fails_is_an_error_to_the_program() {
    if !is_possible() {
        return;
    }
    let mut rig = Rig::new(8, false);
    let file = rig.open();
    rig.backing.instruct(|instructions| instructions.fail = Some(DiskError::Io(5)));
    assert_eq!(errno(file.write_at(&[1; 512], 0)), Some(Errno::IO));
    assert_eq!(errno(file.write_at(&[1; 512], 10)), Some(Errno::IO));
    rig.backing.instruct(|instructions| instructions.fail = None);
    file.write_all_at(&[1; 512], 0).unwrap();
    rig.backing.instruct(|instructions| instructions.unavailable = true);
    assert_eq!(errno(file.read_at(&mut [1; 512], 0)), Some(Errno::IO));
    assert_eq!(errno(file.sync_all()), Some(Errno::IO));
    drop(file);
    let mounted = rig.mounted.take().unwrap();
    assert_eq!(mounted.failures(), 4);
    assert_eq!(mounted.stop(), 4);
}

#[test]
fn concurrent_threads_read_their_own_writes() {
    if !is_possible() {
        return;
    }
    // One thread that reads requests, and two threads that wake each other.
    for threads in [1, 2] {
        let mut options = Options::default();
        options.threads = Some(threads);
        let rig = Rig::with(8, false, &options);
        write_and_read_by_many(&rig.open());
        rig.end();
    }
}

fn write_and_read_by_many(file: &File) {
    std::thread::scope(|scope| {
        for me in 0..8u64 {
            scope.spawn(move || {
                for round in 0..60u64 {
                    // The threads use the same blocks, but different bytes of them.
                    let at = (round * 8 + me) * 700;
                    let data = [(round ^ me) as u8; 700];
                    file.write_all_at(&data, at).unwrap();
                    let mut back = [0; 700];
                    file.read_exact_at(&mut back, at).unwrap();
                    assert_eq!(back, data);
                }
            });
        }
    });
    for round in 0..60u64 {
        for me in 0..8u64 {
            let mut back = [0; 700];
            file.read_exact_at(&mut back, (round * 8 + me) * 700).unwrap();
            assert_eq!(back, [(round ^ me) as u8; 700]);
        }
    }
}

/// Offset whose requests the disk holds. (A flush has offset 0.)
const HELD_AT: u64 = 1 << 20;

#[test]
fn requests_that_the_disk_holds_keep_no_other_waiting() {
    if !is_possible() {
        return;
    }
    // Number of requests that the disk holds: more than the number of the mount's threads.
    const HELD: usize = 40;
    let rig = Rig::new(8, false);
    let file = rig.open();
    rig.backing.instruct(|instructions| instructions.hold_at = Some(HELD_AT));
    std::thread::scope(|scope| {
        for _ in 0..HELD {
            scope.spawn(|| file.read_exact_at(&mut [0; 512], HELD_AT).unwrap());
        }
        rig.backing.expect(HELD);
        file.write_all_at(&[5; 700], 4000).unwrap();
        let mut back = [0; 700];
        file.read_exact_at(&mut back, 4000).unwrap();
        assert_eq!(back, [5; 700]);
        file.sync_all().unwrap();
        rig.backing.instruct(|instructions| instructions.hold_at = None);
    });
    drop(file);
    rig.end();
}

#[test]
fn requests_in_flight_end_when_the_mount_is_aborted() {
    if !is_possible() {
        return;
    }
    let mut rig = Rig::new(8, false);
    let file = rig.open();
    let device = rustix::fs::minor(file.metadata().unwrap().dev());
    let abort = format!("/sys/fs/fuse/connections/{device}/abort");
    if !Path::new(&abort).exists() {
        skipped(format_args!("there is no {abort}"));
        drop(file);
        return rig.end();
    }
    rig.backing.instruct(|instructions| instructions.hold_at = Some(HELD_AT));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| errno(file.read_at(&mut [0; 512], HELD_AT)));
        rig.backing.expect(1);
        std::fs::write(&abort, "1").unwrap();
        assert_eq!(reader.join().unwrap(), Some(Errno::CONNABORTED));
    });
    assert_eq!(errno(file.read_at(&mut [0; 512], 4096)), Some(Errno::NOTCONN));
    assert_eq!(rig.ended.load(Ordering::SeqCst), 0, "it has data of a request that goes on");
    rig.backing.instruct(|instructions| instructions.hold_at = None);
    drop(file);
    assert_eq!(rig.mounted.take().unwrap().stop(), 0);
    assert_eq!(rig.ended.load(Ordering::SeqCst), 1);
}

#[test]
fn an_unmount_ends_the_export() {
    if !is_possible() {
        return;
    }
    let rig = Rig::new(8, false);
    rustix::mount::unmount(rig.path(), rustix::mount::UnmountFlags::empty()).unwrap();
    while rig.ended.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    rig.end();
}

#[test]
fn a_file_that_is_in_use_is_waited_for() {
    if !is_possible() {
        return;
    }
    let mut rig = Rig::new(8, false);
    let file = rig.open();
    let mounted = rig.mounted.take().unwrap();
    let stopping = std::thread::spawn(move || mounted.stop());
    // Waits until the path no longer shows the mounted file. `file` remains open, so the mount
    // still exists.
    while std::fs::metadata(rig.path()).is_ok_and(|about| about.len() != 0) {
        std::thread::yield_now();
    }
    file.write_all_at(b"late", 100).unwrap();
    file.sync_all().unwrap();
    assert!(!stopping.is_finished());
    drop(file);
    stopping.join().unwrap();
    let mut bytes = [0; 4];
    rig.backing.mem.bytes().read_into(100, &mut bytes).unwrap();
    assert_eq!(&bytes, b"late");
}

#[test]
fn invalid_mount_points_are_refused_and_unchanged() {
    if !is_possible() {
        return;
    }
    let rig = Rig::new(8, false);
    let disk = Arc::new(TestDisk::new(64, 512));
    let disk = BlockDevice::new(disk, &BlockOptions::default()).unwrap();
    let start = |path: &Path| Mounted::start(&disk, path).err().unwrap();
    let error = start(rig.directory.path());
    assert!(matches!(error, MountError::NotAFile(_)), "{error}");
    let error = start(&rig.directory.path().join("no/such/directory"));
    assert!(matches!(error, MountError::File { .. }), "{error}");
    // A file that existed before the mount is kept.
    let file = rig.directory.path().join("mine");
    std::fs::write(&file, "mine").unwrap();
    let mounted = Mounted::start(&disk, &file).unwrap();
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 64 * 512);
    assert_eq!(mounted.stop(), 0);
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    rig.end();
}

#[test]
fn a_file_of_a_running_export_is_not_mounted_over() {
    if !is_possible() {
        return;
    }
    let rig = Rig::new(8, false);
    let file = rig.open();
    file.write_all_at(b"first", 0).unwrap();
    let disk = Arc::new(TestDisk::new(64, 512));
    let disk = BlockDevice::new(disk, &BlockOptions::default()).unwrap();
    let link = rig.directory.path().join("link");
    std::os::unix::fs::symlink(rig.path(), &link).unwrap();
    let error = |path: &Path| Mounted::start(&disk, path).err().unwrap();
    assert!(matches!(error(&rig.path()), MountError::InUse(_)));
    assert!(matches!(error(&link), MountError::NotAFile(_)), "a link is not followed");
    let mut bytes = [0; 5];
    File::open(rig.path()).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"first");
    drop(file);
    rig.end();
}

#[test]
fn holes_of_the_disk_are_holes_of_the_file() {
    if !is_possible() {
        return;
    }
    const MIB: u64 = 1 << 20;
    let rig = Rig::over(TestDisk::sparse(64 << 11, 512), false, &Options::default());
    let file = rig.open();
    let data = |at| seek(&file, SeekFrom::Data(at));
    let hole = |at| seek(&file, SeekFrom::Hole(at));
    assert_eq!((hole(0), data(0)), (Ok(0), Err(Errno::NXIO)));
    file.write_all_at(b"abc", 33 * MIB + 5).unwrap();
    // The extent may be larger than the write: with huge pages, the memory disk allocates up to 2
    // MiB at once.
    let first = data(0).unwrap();
    assert!(first > 31 * MIB && first <= 33 * MIB, "{first}");
    let end = hole(first).unwrap();
    assert!(end > 33 * MIB && end < 36 * MIB, "{end}");
    assert_eq!((hole(0), data(33 * MIB)), (Ok(0), Ok(33 * MIB)));
    assert_eq!((data(end), hole(end + 7)), (Err(Errno::NXIO), Ok(end + 7)));
    file.write_all_at(&[1], 64 * MIB - 1).unwrap();
    assert_eq!(hole(64 * MIB - 1), Ok(64 * MIB), "the end of the file");
    assert_eq!(data(64 * MIB), Err(Errno::NXIO));
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 64 * MIB).unwrap();
    assert_eq!((hole(33 * MIB), data(0)), (Ok(33 * MIB), Err(Errno::NXIO)));
    drop(file);
    rig.end();
}

#[test]
fn a_mount_continues_with_the_session_of_another_process() {
    if !is_possible() {
        return;
    }
    let backing = TestDisk::new(8 << 11, 512);
    let disk = BlockDevice::new(Arc::new(backing), &BlockOptions::default()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let (mount, device) = Mount::new(&directory.path().join("disk"), false).unwrap();
    let session = || {
        let device = device.try_clone().unwrap();
        Session::start(&disk, device, &Options::default(), || ()).unwrap()
    };
    let first = session();
    let file = OpenOptions::new().read(true).write(true).open(mount.path()).unwrap();
    file.write_all_at(b"before", 700).unwrap();
    if !Session::resend(device.as_fd()) {
        skipped("the kernel does not send requests again (Linux 6.9 does)");
        drop(file);
        mount.unmount();
        return mount.remove_file();
    }
    // The file stays mounted after its first session has ended.
    drop(first);
    let second = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut bytes = [0; 6];
            file.read_exact_at(&mut bytes, 700).map(|()| bytes)
        });
        // Simulates a process that dies with an unanswered request: the test takes the request from
        // the device and does not answer it.
        let mut fds = [PollFd::new(&device, PollFlags::IN)];
        poll(&mut fds, None).unwrap();
        rustix::io::read(&device, &mut vec![0; 2 << 20]).unwrap();
        assert!(Session::resend(device.as_fd()));
        let second = session();
        assert_eq!(&reader.join().unwrap().unwrap(), b"before");
        file.write_all_at(b"after", 700).unwrap();
        let mut bytes = [0; 6];
        file.read_exact_at(&mut bytes, 700).unwrap();
        assert_eq!(&bytes, b"aftere");
        assert!(!second.is_over());
        second
    });
    // Closing the file sends a request to the second session as well.
    drop(file);
    mount.unmount();
    assert_eq!(second.stop(), 0);
    mount.remove_file();
    assert!(!mount.path().exists());
}

/// A stopped disk does not delay the end of a process. The next process executes the requests that
/// the disk held.
#[test]
fn the_next_process_executes_requests_of_a_stopped_disk() {
    if !is_possible() {
        return;
    }
    let backing = TestDisk::new(8 << 11, 512);
    let disk = HoldingDisk::wrap(Arc::new(backing.clone()), ErrorPolicy::Stop);
    let block = BlockDevice::new(Arc::clone(&disk), &BlockOptions::default()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let (mount, device) = Mount::new(&directory.path().join("disk"), false).unwrap();
    let session = || {
        let device = device.try_clone().unwrap();
        Session::start(&block, device, &Options::default(), || ()).unwrap()
    };
    let first = session();
    let file = OpenOptions::new().read(true).write(true).open(mount.path()).unwrap();
    if !Session::resend(device.as_fd()) {
        skipped("the kernel does not send requests again (Linux 6.9 does)");
        drop(file);
        mount.unmount();
        return mount.remove_file();
    }
    let second = std::thread::scope(|scope| {
        backing.instruct(|instructions| instructions.fail = Some(DiskError::NoSpace));
        let writer = scope.spawn(|| file.write_all_at(&[7; 512], 512));
        wait::until("a held write", || disk.stopped().is_some());
        assert_eq!((first.leave(), disk.stopped()), (0, None));
        assert!(!writer.is_finished());
        backing.instruct(|instructions| instructions.fail = None);
        assert!(Session::resend(device.as_fd()));
        let second = session();
        writer.join().unwrap().unwrap();
        second
    });
    let mut byte = [0];
    file.read_exact_at(&mut byte, 512).unwrap();
    assert_eq!(byte, [7]);
    drop(file);
    mount.unmount();
    assert_eq!(second.stop(), 0);
    mount.remove_file();
}

/// Reverts what a test has changed, in the reverse order, even if the test fails.
#[derive(Default)]
struct Undo(Vec<Vec<String>>);

impl Undo {
    fn later(&mut self, command: &[&str]) {
        self.0.push(command.iter().map(|word| (*word).to_owned()).collect());
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        while let Some(command) = self.0.pop() {
            if let [program, arguments @ ..] = &command[..] {
                let _ = Command::new(program).args(arguments).output();
            }
        }
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output().map_err(|e| e.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        Err(format!("{program} {arguments:?}: {out} {err}"))
    }
}

#[test]
fn a_file_system_on_a_loop_device_survives() {
    if !is_possible() {
        return;
    }
    for program in ["losetup", "mkfs.ext4", "fsck.ext4"] {
        let there = ["/sbin", "/usr/sbin", "/bin", "/usr/bin"];
        if !there.iter().any(|directory| Path::new(directory).join(program).exists()) {
            skipped(format_args!("there is no {program} here"));
            return;
        }
    }
    let rig = Rig::new(64, false);
    let (disk, point) = (rig.path(), rig.directory.path().join("point"));
    std::fs::create_dir(&point).unwrap();
    let (disk, point) = (disk.to_str().unwrap(), point.to_str().unwrap());
    let mut undo = Undo::default();
    let device = match run("losetup", &["--find", "--show", disk]) {
        Ok(device) => device,
        Err(error) => {
            skipped(format_args!("no loop device is to be had: {error}"));
            drop(undo);
            return rig.end();
        }
    };
    undo.later(&["losetup", "-d", &device]);
    run("mkfs.ext4", &["-q", "-F", &device]).unwrap();
    let data: Vec<u8> =
        (0..20u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for round in 0..2 {
        run("mount", &["-o", "discard", &device, point]).unwrap();
        undo.later(&["umount", point]);
        let copy = Path::new(point).join("copy");
        if round == 0 {
            std::fs::write(&copy, &data).unwrap();
            std::fs::write(Path::new(point).join("gone"), &data[..1 << 20]).unwrap();
            File::open(&copy).unwrap().sync_all().unwrap();
            assert!(rig.saw(|op| *op == Op::Flush) > 0);
            std::fs::remove_file(Path::new(point).join("gone")).unwrap();
            run("fstrim", &[point]).unwrap();
            assert!(rig.saw(|op| matches!(op, Op::WriteZeroes { .. })) > 0, "of the trim");
        } else {
            assert!(std::fs::read(&copy).unwrap() == data);
        }
        run("umount", &[point]).unwrap();
        undo.0.pop();
        run("fsck.ext4", &["-f", "-n", &device]).unwrap();
    }
    run("losetup", &["-d", &device]).unwrap();
    undo.0.pop();
    drop(undo);
    rig.end();
}
