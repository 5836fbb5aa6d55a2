//! Storage that fails under a guest: the guest gets an error status, and the server continues.

use crate::harness::{Server, image, run};
use shadowbell_driver::{Controller, QueuePair};
use shadowbell_spec::Status;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

const SIZE: u64 = 64 << 20;

/// Writes and reads 8 blocks at `lba`. Returns the statuses of write and read.
fn write_and_read(controller: &Controller, queue: &mut QueuePair, lba: u64) -> (Status, Status) {
    let namespace = controller.namespace(1).unwrap().clone();
    let pool = controller.buffers(2, 4096).unwrap();
    let mut buffer = pool.take().unwrap();
    buffer.fill(7);
    let write = run(queue, namespace.write(lba, 8).unwrap(), Some(buffer)).status;
    let read = run(queue, namespace.read(lba, 8).unwrap(), pool.take()).status;
    (write, read)
}

#[test]
fn a_shrunken_image_gives_lba_out_of_range() {
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path(), "disk.img", SIZE);
    let mut server = Server::start_in(directory, &["disk.img"], &[]);
    let mut controller = server.attach();
    let mut queue = controller.take_queue_pair().unwrap();
    let last = SIZE / 512 - 8;
    assert_eq!(write_and_read(&controller, &mut queue, last), (Status::SUCCESS, Status::SUCCESS));
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(SIZE / 2).unwrap();
    let namespace = controller.namespace(1).unwrap().clone();
    let pool = controller.buffers(1, 4096).unwrap();
    let read = run(&mut queue, namespace.read(last, 8).unwrap(), pool.take()).status;
    // Blocks beyond the end of the truncated file fail, and must not read as zeroes.
    assert_eq!(read.code(), Status::LBA_OUT_OF_RANGE);
    assert_eq!(write_and_read(&controller, &mut queue, 0), (Status::SUCCESS, Status::SUCCESS));
    drop((queue, pool));
    controller.detach().unwrap();
    assert!(server.is_alive());
    drop(server.attach());
    // The last flush fails when the server stops. The exit status and the log report it.
    assert_eq!(server.stop().code(), Some(1));
    assert!(server.stderr().contains("cannot flush disk.img"), "{}", server.stderr());
}

/// Checks a server on full storage. The storage has room only for the first half of the disk.
fn check_full_storage(mut server: Server) {
    let mut controller = server.attach();
    let mut queue = controller.take_queue_pair().unwrap();
    assert_eq!(write_and_read(&controller, &mut queue, 0), (Status::SUCCESS, Status::SUCCESS));
    let (write, read) = write_and_read(&controller, &mut queue, SIZE / 512 - 8);
    assert_eq!(write.code(), Status::CAPACITY_EXCEEDED, "{write:?}");
    assert_eq!(read, Status::SUCCESS, "what could not be written is still readable");
    assert_eq!(write_and_read(&controller, &mut queue, 8), (Status::SUCCESS, Status::SUCCESS));
    drop(queue);
    controller.detach().unwrap();
    assert!(server.stop().success());
}

/// Serves `disk.img` of `directory`. `command` prepares the environment, and then starts the
/// server.
fn serve_through(mut command: Command, directory: TempDir, script: Option<&str>) -> Server {
    if let Some(script) = script {
        command.args(["sh", "-c", script, "sh"]);
    }
    command
        .arg(env!("CARGO_BIN_EXE_shadowbell"))
        .args(["serve", "disk.img", "--socket", "vm.sock"]);
    Server::spawn(command, directory, &["vm.sock"])
}

#[test]
fn a_limit_on_the_size_of_files_is_a_full_disk() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "disk.img", SIZE);
    let mut command = Command::new("prlimit");
    command.arg(format!("--fsize={}", SIZE / 2));
    check_full_storage(serve_through(command, directory, None));
}

#[test]
fn a_full_file_system_gives_an_error_until_space_is_freed() {
    let directory = tempfile::tempdir().unwrap();
    // The image is on a small tmpfs in a mount namespace of its own.
    let mut command = Command::new("unshare");
    command.args(["--mount", "--map-root-user"]);
    let probe = Command::new("unshare")
        .args(["--mount", "--map-root-user", "mount", "-t", "tmpfs", "tmpfs", "/mnt"])
        .output();
    if !probe.is_ok_and(|output| output.status.success()) {
        eprintln!("not tried: this system gives us no mount namespace");
        return;
    }
    std::fs::create_dir(directory.path().join("fs")).unwrap();
    let script = "mount -t tmpfs -o size=1m tmpfs fs && truncate -s 64M fs/disk.img && \
                  dd if=/dev/zero of=fs/filler bs=4k count=200 status=none && ln -s fs/disk.img . && \
                  exec \"$@\"";
    let server = serve_through(command, directory, Some(script));
    let mut controller = server.attach();
    let mut queue = controller.take_queue_pair().unwrap();
    let health = |controller: &Controller| {
        let log = controller.admin().smart_log().unwrap();
        (log.critical_warning.spare(), log.available_spare)
    };
    assert_eq!(health(&controller), (false, 100));
    let mut refused = 0;
    for n in 0..128 {
        let (write, read) = write_and_read(&controller, &mut queue, n * 64);
        let is_full = write.code() == Status::CAPACITY_EXCEEDED;
        assert!(write == Status::SUCCESS || is_full, "{write:?}");
        assert_eq!(read, Status::SUCCESS);
        refused += u32::from(is_full);
    }
    assert!((64..128).contains(&refused), "{refused} writes were refused");
    // A full file system is no media failure, so it does not change the SMART / Health log page.
    // The server logs the cause once.
    assert_eq!(health(&controller), (false, 100));
    server.wait_for_log("there is no room left for namespace 1, disk.img");
    assert_eq!(server.stderr().matches("there is no room left").count(), 1);
    assert!(server.stderr().contains("Make room on its file system"));
    // With free space again, writes succeed.
    let namespace = controller.namespace(1).unwrap().clone();
    let zeroes = namespace.write_zeroes(0, 1 << 13, true).unwrap();
    assert_eq!(run(&mut queue, zeroes, None).status, Status::SUCCESS);
    assert_eq!(write_and_read(&controller, &mut queue, 127 * 64).0, Status::SUCCESS);
    assert_eq!(health(&controller), (false, 100));
}

/// A loop device, detached on drop.
struct Loop(String);

impl Loop {
    /// The loop device whose name is in the file `loop` of `directory`.
    fn named_in(directory: &Path) -> Option<Self> {
        let name = std::fs::read_to_string(directory.join("loop")).ok()?;
        Some(Self(name.trim().to_owned())).filter(|device| !device.0.is_empty())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

/// The kernel reports a failed writeback of a block device only once. Every later Flush must fail
/// nevertheless.
#[test]
fn every_flush_fails_after_failed_writeback() {
    let directory = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o size=1m tmpfs fs && truncate -s 64M fs/disk.img && \
                  losetup -f --show fs/disk.img > loop && ln -s $(cat loop) disk.img";
    std::fs::create_dir(directory.path().join("fs")).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &format!("{script} && exec \"$@\""), "sh"]);
    let mut probe = Command::new("unshare");
    probe.args(["--mount", "sh", "-c", script]).current_dir(directory.path());
    let is_possible = probe.output().is_ok_and(|output| output.status.success());
    drop(Loop::named_in(directory.path()));
    if !is_possible {
        eprintln!("not tried: this system gives us no loop device");
        return;
    }
    std::fs::remove_file(directory.path().join("disk.img")).unwrap();
    command.arg(env!("CARGO_BIN_EXE_shadowbell")).args([
        "serve",
        "disk.img?direct=off",
        "--socket",
        "vm.sock",
    ]);
    let mut server = Server::spawn(command, directory, &["vm.sock"]);
    let device = Loop::named_in(server.directory());
    assert!(device.is_some());
    let mut controller = server.attach();
    let mut queue = controller.take_queue_pair().unwrap();
    let namespace = controller.namespace(1).unwrap().clone();
    assert_eq!(run(&mut queue, namespace.flush(), None).status, Status::SUCCESS);
    let pool = controller.buffers(1, 1 << 20).unwrap();
    let blocks = (1 << 20) / namespace.block_size();
    for n in 0..4 {
        let write = namespace.write(n * u64::from(blocks), blocks).unwrap();
        assert_eq!(run(&mut queue, write, pool.take()).status, Status::SUCCESS);
    }
    // Each repeated Flush must fail as well.
    for _ in 0..3 {
        let status = run(&mut queue, namespace.flush(), None).status;
        assert_eq!(status.code(), Status::WRITE_FAULT);
    }
    server.wait_for_log("some of it may be lost");
    assert_eq!(server.stderr().matches("may be lost").count(), 1);
    drop((queue, pool));
    controller.detach().unwrap();
    assert_eq!(server.stop().code(), Some(1));
    drop(device);
}
