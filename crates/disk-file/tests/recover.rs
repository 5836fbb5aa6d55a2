//! Tests of recovering disks of a dead process.

mod common;

use common::{Host, directory, image, run_one};
use rustix::event::{PollFd, PollFlags, poll};
use shadowbell_disk::{Disk, Op, OpenError, Request, Submitted};
use shadowbell_disk_file::{fence, open_recoverable, recover};
use shadowbell_state::{Descriptors, FdRef, Parcel};
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::programs::skipped;
use shadowbell_testing::wait::{self, LIMIT};
use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LEN: usize = 4096;

/// Environment variable for the child process: its disk, and the request that is in flight when it
/// dies.
const CHILD_OPERATION: &str = "BACKEND_TEST_DIES";

/// State that a dead process has left.
struct DeadProcess {
    state: serde_json::Value,
    fds: Descriptors,
    /// Fence. It becomes readable when all requests in flight have ended.
    fence: OwnedFd,
}

/// Entry point of a child process; not a test of its own. It sends its state to its standard input,
/// submits a request, and kills itself while the request is in flight.
#[test]
fn child_process() {
    let Ok(what) = std::env::var(CHILD_OPERATION) else { return };
    let (op, spec) = what.split_once(' ').unwrap();
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut parcel = Parcel::new();
    let end = parcel.descriptors().add(fence().unwrap());
    let disk = open_recoverable(spec).unwrap();
    let state = disk.checkpoint(parcel.descriptors()).unwrap();
    parcel.add("disk", true, &(state, end)).unwrap();
    parcel.send(&socket).unwrap();
    let host = Host::new(MIB);
    host.bytes.fill(0, LEN, 0xaa).unwrap();
    let mut queue = disk.queue().unwrap();
    let op = if op == "read" { Op::Read } else { Op::Write { fua: false } };
    let mut data = host.buffer(&[(0, LEN)], op == Op::Read);
    // The read is far from the start of the disk. The start may be in the page cache, and a cached
    // read would complete at once.
    let offset = if op == Op::Read { 8 * MIB } else { 0 };
    let request = Request { op, offset, len: LEN as u64 };
    let submitted = queue.submit(1, &request, &mut data);
    assert_eq!(submitted, Submitted::Pending);
    queue.commit();
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        .unwrap();
}

/// Runs a process that dies with a request in flight at `spec`. Returns the state that it has left.
fn run_child(op: &str, spec: &str) -> DeadProcess {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "child_process", "--nocapture"])
        .env(CHILD_OPERATION, format!("{op} {spec}"));
    command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
    let mut child = ProcessGroup::spawn(&mut command).unwrap();
    drop(command);
    let mut parcel = Parcel::receive(&ours).unwrap();
    assert_eq!(child.wait().signal(), Some(9));
    let (state, end): (serde_json::Value, FdRef) = parcel.take("disk").unwrap().unwrap();
    let fence = parcel.descriptors().take(end).unwrap();
    DeadProcess { state, fds: std::mem::take(parcel.descriptors()), fence }
}

/// Returns true if the fence becomes readable within this time.
fn has_ended(fence: &OwnedFd, within: Duration) -> bool {
    let timeout = rustix::event::Timespec::try_from(within).unwrap();
    poll(&mut [PollFd::new(fence, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

fn first_byte(disk: &dyn Disk) -> u8 {
    let host = Host::new(MIB);
    let mut queue = disk.queue().unwrap();
    let data = host.buffer(&[(0, LEN)], true);
    assert_eq!(run_one(&mut *queue, Op::Read, 0, LEN as u64, data), Ok(()));
    host.bytes.read(0).unwrap()
}

/// Slow block device whose data are in a file that the test can read.
struct Slow {
    server: ProcessGroup,
    directory: tempfile::TempDir,
    device: PathBuf,
}

impl Slow {
    /// Starts the device. Returns `None` if the machine lacks the tools.
    fn start(seconds: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
            return None;
        }
        let directory = directory();
        let backing = image(directory.path(), 16 * MIB);
        let mount = directory.path().join("slow");
        std::fs::create_dir(&mount).unwrap();
        let file = mount.join("nbd");
        std::fs::write(&file, "").unwrap();
        let mut server = Command::new("nbdfuse");
        server.arg(&file).args(["[", "nbdkit", "--exit-with-parent", "--filter=delay", "file"]);
        server.arg(&backing).args([&format!("rdelay={seconds}"), &format!("wdelay={seconds}")]);
        server.arg("]").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let server = ProcessGroup::spawn(&mut server).ok()?;
        let mut slow = Self { server, directory, device: PathBuf::new() };
        let mut ended = false;
        wait::until("the file of nbdfuse", || {
            ended = slow.server.try_wait().unwrap().is_some();
            ended || std::fs::metadata(&file).map_or(0, |file| file.len()) == 16 * MIB
        });
        if ended {
            return None;
        }
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&file).output().ok()?;
        let device = String::from_utf8(output.stdout).ok()?;
        slow.device = device.trim().into();
        (output.status.success() && slow.device.exists()).then_some(slow)
    }

    /// Returns the first byte of the file below the device.
    fn contains(&self) -> u8 {
        std::fs::read(self.directory.path().join("disk.img")).unwrap()[0]
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        if !self.device.as_os_str().is_empty() {
            let _ = Command::new("losetup").arg("-d").arg(&self.device).status();
        }
        let mount = self.directory.path().join("slow/nbd");
        let _ = Command::new("umount").args(["-l"]).arg(mount).status();
        self.server.kill();
    }
}

/// Recovery of a dead process's disk waits until a write that is still in flight has ended.
#[test]
fn recovery_waits_for_a_write_of_the_dead_process() {
    let Some(slow) = Slow::start("6") else {
        return skipped("it needs root, nbdkit, nbdfuse and a loop device");
    };
    let spec = format!("{}?direct=on&aio=io_uring", slow.device.display());
    let mut left = run_child("write", &spec);
    assert!(
        slow.contains() == 0 && !has_ended(&left.fence, Duration::ZERO),
        "the write is still in flight"
    );
    let waited = Cell::new(0);
    let wait = |_: shadowbell_disk::WaitReason<'_>| {
        waited.set(waited.get() + 1);
        wait::pause();
        true
    };
    let disk = recover(&spec, &left.state, &mut left.fds, &wait).unwrap();
    assert_eq!(slow.contains(), 0xaa, "the late write has reached the disk");
    assert!(waited.get() > 10);
    assert!(has_ended(&left.fence, LIMIT));
    assert_eq!(first_byte(&*disk), 0xaa);
}

/// The lock of the image does not delay recovery here: a dead reader's lock does not exclude
/// another reader. So recovery needs the fence to wait for the read.
#[test]
fn the_fence_waits_for_a_read_of_the_dead_process() {
    let Some(slow) = Slow::start("6") else {
        return skipped("it needs root, nbdkit, nbdfuse and a loop device");
    };
    let spec = format!("{}?direct=on&aio=io_uring&read-only=on", slow.device.display());
    let left = run_child("read", &spec);
    wait::short_pause();
    assert!(!has_ended(&left.fence, Duration::ZERO), "the read is in flight");
    assert!(has_ended(&left.fence, LIMIT));
}

#[test]
fn recovery_waits_for_the_lock_of_an_image() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    let spec = format!("{}?direct=off", path.display());
    let mut left = run_child("write", &spec);
    assert!(has_ended(&left.fence, LIMIT));
    std::fs::write(&path, vec![0xaa; MIB as usize]).unwrap();
    let holder = Cell::new(Some(open_recoverable(&spec).unwrap()));
    let waited = Cell::new(0);
    let wait = |_: shadowbell_disk::WaitReason<'_>| {
        waited.set(waited.get() + 1);
        wait::pause();
        if waited.get() == 700 {
            drop(holder.take());
        }
        true
    };
    let state = left.state;
    // The image was renamed after the crash, and another file has its old name.
    std::fs::rename(&path, directory.path().join("other")).unwrap();
    image(directory.path(), 2 * MIB);
    let disk = recover(&spec, &state, &mut left.fds, &wait).unwrap();
    assert!(waited.get() >= 700, "for longer than a disk that is opened");
    assert_eq!((disk.info().bytes(), first_byte(&*disk)), (MIB, 0xaa));
    // If the callback returns false, recovery fails.
    let mut fds = Descriptors::default();
    let again = disk.checkpoint(&mut fds).unwrap();
    let error = recover(&spec, &again, &mut fds, &|_| false).unwrap_err();
    assert!(matches!(error, OpenError::Busy { .. }), "{error}");
}

#[test]
fn recovery_keeps_a_loss_and_ignores_guest_data() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    let spec = format!("{}?direct=off", path.display());
    let disk = open_recoverable(&spec).unwrap();
    let mut fds = Descriptors::default();
    let mut state = disk.checkpoint(&mut fds).unwrap();
    drop(disk);
    state["lost"] = 5.into();
    std::fs::write(&path, b"QFI\xfb\0\0\0\x03").unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(MIB / 2).unwrap();
    let disk = recover(&spec, &state, &mut fds, &|_| true).unwrap();
    assert!(disk.has_lost_writes());
    assert_eq!(disk.info().bytes(), MIB, "the guest's disk keeps its size");
    assert_eq!(first_byte(&*disk), b'Q');
    let host = Host::new(MIB);
    let mut queue = disk.queue().unwrap();
    let data = || host.buffer(&[(0, LEN)], true);
    assert!(run_one(&mut *queue, Op::Read, MIB / 2, LEN as u64, data()).is_err());
    assert!(run_one(&mut *queue, Op::Flush, 0, 0, host.buffer(&[], true)).is_err());
    drop((queue, disk));
    // A checkpoint of another disk type is refused.
    let error = recover("mem:1MiB", &state, &mut fds, &|_| true).unwrap_err();
    assert!(matches!(error, OpenError::NotThatDisk { .. }), "{error}");
}

#[test]
fn a_memory_disk_recovers_without_waiting() {
    for spec in ["mem:1MiB", "null:1MiB?read-zeroes=on"] {
        let disk = open_recoverable(spec).unwrap();
        let host = Host::new(MIB);
        host.bytes.fill(0, LEN, 7).unwrap();
        let mut queue = disk.queue().unwrap();
        let write = Op::Write { fua: false };
        let data = host.buffer(&[(0, LEN)], false);
        assert_eq!(run_one(&mut *queue, write, 0, LEN as u64, data), Ok(()));
        let mut fds = Descriptors::default();
        let state = disk.checkpoint(&mut fds).unwrap();
        let next = recover(spec, &state, &mut fds, &|_| panic!("recovery waits without a reason"))
            .unwrap();
        assert_eq!(first_byte(&*next), if spec.starts_with("mem") { 7 } else { 0 });
    }
}
