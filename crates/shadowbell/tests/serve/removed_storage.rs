//! Storage that is removed during a guest's I/O and returns: a FUSE file system whose daemon is
//! killed. Also a memory disk for which there is too little memory.

use crate::control::ctl;
use crate::disk_recovery::is_consistent;
use crate::harness::{Server, complete, image, program, run, until};
use crate::supervisor::worker;
use crate::upgrade::Client;
use shadowbell_disk_qcow2::create;
use shadowbell_driver::{AttachOptions, Recovery};
use shadowbell_spec::Status;
use shadowbell_testing::programs::skipped;
use shadowbell_testing::stalled::{Mount, run_daemon_if_requested};
use std::path::{Path, PathBuf};
use std::process::Command;

const BYTES: u64 = 16 << 20;

#[test]
fn fuse_daemon() {
    run_daemon_if_requested();
}

/// Serves an image on a FUSE file system, and kills the daemon of the file system. The guest gets
/// media errors; its other namespace and the controller continue to work. When the storage is
/// available again, an operator reopens the image.
fn survives_removal_and_return(behind: &Path, options: &str) {
    let Some(mut mount) = Mount::over("removed_storage::fuse_daemon", behind) else { return };
    let disk = format!("{}{options}", mount.path().display());
    let mut server = Server::start(&[&disk, "mem:1MiB"], &["--supervisor"]);
    let recovery = Recovery { repeats: 0, ..Recovery::default() };
    let mut controller =
        server.attach_with(&AttachOptions { recovery, ..AttachOptions::default() });
    let mut queue = controller.take_queue_pair().unwrap();
    let [gone, there] = [1, 2].map(|nsid| controller.namespace(nsid).unwrap().clone());
    let pool = controller.buffers(64, 4096).unwrap();
    let filled = |byte| {
        let mut buffer = pool.take().unwrap();
        buffer.fill(byte);
        Some(buffer)
    };
    let write = |at: u64| gone.write(at * 8, 8).unwrap();
    assert_eq!(run(&mut queue, write(0), filled(7)).status, Status::SUCCESS);
    assert_eq!(run(&mut queue, gone.flush(), None).status, Status::SUCCESS);

    // Many writes are in flight when the storage is removed.
    mount.stall();
    for at in 1..32 {
        queue.submit(write(at * 16), filled(1)).unwrap();
        queue.submit(gone.read(at * 8, 8).unwrap(), pool.take()).unwrap();
    }
    queue.ring().unwrap();
    shadowbell_testing::wait::short_pause();
    mount.end();
    for _ in 1..63 {
        let status = complete(&mut queue).status;
        let is_one = [Status::SUCCESS, Status::WRITE_FAULT, Status::UNRECOVERED_READ];
        assert!(is_one.contains(&status.code()), "{options}: {status:?}");
    }
    for _ in 0..2 {
        assert_eq!(run(&mut queue, write(0), filled(9)).status.code(), Status::WRITE_FAULT);
        assert_eq!(run(&mut queue, gone.flush(), None).status.code(), Status::WRITE_FAULT);
        let zeroes = gone.write_zeroes(0, 8, true).unwrap();
        assert_eq!(run(&mut queue, zeroes, None).status.code(), Status::WRITE_FAULT);
        let read = run(&mut queue, gone.read(0, 8).unwrap(), pool.take()).status;
        assert_eq!(read.code(), Status::UNRECOVERED_READ);
        let other = there.write(0, 8).unwrap();
        assert_eq!(run(&mut queue, other, filled(5)).status, Status::SUCCESS);
        // Many writes are in flight at the reset.
        for at in 1..32 {
            queue.submit(write(at), filled(1)).unwrap();
        }
        queue.ring().unwrap();
        controller.reset().unwrap();
        for _ in 1..32 {
            let status = complete(&mut queue).status.code();
            assert!([Status::WRITE_FAULT, Status::ABORTED_BY_HOST].contains(&status), "{status:?}");
        }
    }

    // The storage is available again; the server reopens it only on request.
    drop(mount);
    let Some(mount) = Mount::over("removed_storage::fuse_daemon", behind) else { return };
    let read = run(&mut queue, gone.read(0, 8).unwrap(), pool.take()).status;
    assert_eq!(read.code(), Status::UNRECOVERED_READ);
    let disk = format!("{}{options}", mount.path().display());
    let (status, _, errors) = ctl(&server, &["disk", "replace", "vm.sock/1", &disk, "--force"]);
    // The last flush of the old disk fails, because its storage is gone, unless the kernel has
    // reported the loss to a flush of the guest.
    let is_reported = errors.contains("the change is made, but data written to");
    let is_done = status == Some(0) || status == Some(1) && is_reported;
    assert!(is_done, "{errors}\n{}", server.stderr());
    let read = run(&mut queue, gone.read(0, 8).unwrap(), pool.take());
    assert_eq!(read.status, Status::SUCCESS);
    assert_eq!(read.buffer.unwrap().to_vec(4096), [7; 4096]);
    assert_eq!(run(&mut queue, write(3), filled(3)).status, Status::SUCCESS);
    assert_eq!(run(&mut queue, gone.flush(), None).status, Status::SUCCESS);
    let read = run(&mut queue, there.read(0, 8).unwrap(), pool.take());
    assert_eq!(read.buffer.unwrap().to_vec(4096), [5; 4096]);
    drop((queue, pool));
    controller.detach().unwrap();
    assert!(server.is_alive());
    server.stop();
    drop(mount);
}

#[test]
fn a_raw_image_survives_the_removal_of_its_file_system() {
    let directory = tempfile::tempdir().unwrap();
    let behind = image(directory.path(), "disk.img", BYTES);
    for options in ["?format=raw", "?format=raw&direct=off", "?format=raw&aio=threads"] {
        survives_removal_and_return(&behind, options);
    }
}

#[test]
fn a_qcow2_image_survives_the_removal_of_its_file_system() {
    let directory = tempfile::tempdir().unwrap();
    let behind = directory.path().join("disk.qcow2");
    create(&behind, BYTES).unwrap();
    for options in ["", "?aio=threads"] {
        survives_removal_and_return(&behind, options);
        is_consistent(&behind);
    }
}

/// A memory control group (version 1), removed on drop.
struct Group(PathBuf);

impl Group {
    fn new(bytes: u64) -> Option<Self> {
        let name = format!("shadowbell-test-{}", std::process::id());
        let group = Self(Path::new("/sys/fs/cgroup/memory").join(name));
        if std::fs::create_dir(&group.0).is_err() || !group.limit(bytes) {
            skipped("it takes a control group of memory, and root");
            return None;
        }
        Some(group)
    }

    fn limit(&self, bytes: u64) -> bool {
        std::fs::write(self.0.join("memory.limit_in_bytes"), bytes.to_string()).is_ok()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        until("the end of the group", || std::fs::remove_dir(&self.0).is_ok());
    }
}

/// Fills the `nth` MiB of the first namespace with `byte`, if there is one. Then reads this MiB,
/// checks that all of its bytes are equal, and returns this byte.
fn mebibyte(client: &mut Client, nth: u64, byte: Option<u8>) -> u8 {
    let (queue, controller) = client.parts();
    let namespace = controller.namespace(1).unwrap();
    let pool = controller.buffers(1, 1 << 20).unwrap();
    let mut buffer = pool.take().unwrap();
    let command = match byte {
        Some(byte) => {
            buffer.fill(byte);
            namespace.write(nth * 2048, 2048)
        }
        None => namespace.read(nth * 2048, 2048),
    };
    let done = run(queue, command.unwrap(), Some(buffer));
    assert_eq!(done.status, Status::SUCCESS);
    let bytes = done.buffer.unwrap().to_vec(1 << 20);
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

/// If a memory disk exceeds the available memory, the kernel kills the server process, and the next
/// process recovers with the same disk. When enough memory is available again, no data are lost.
#[test]
fn a_memory_disk_survives_an_out_of_memory_kill() {
    let Some(group) = Group::new(64 << 20) else { return };
    let mut command = Command::new("sh");
    let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", group.0.display());
    command.args(["-c", &enter, "sh"]).arg(program().get_program());
    command.args(["serve", "mem:256MiB", "--supervisor", "--socket", "vm.sock"]);
    let mut server = Server::spawn(command, tempfile::tempdir().unwrap(), &["vm.sock"]);
    let mut client = Client::attach(&server.socket());
    client.write(1, 0, 7);
    let before = worker(&server);
    let filling = std::thread::spawn(move || {
        for mib in 1..128 {
            assert_eq!(mebibyte(&mut client, mib, Some(mib as u8)), mib as u8);
        }
        client
    });
    until("a death", || server.stderr().contains("was ended by signal 9"));
    assert!(group.limit(1 << 30));
    let mut client = filling.join().unwrap();
    assert_ne!(worker(&server), before);
    assert_eq!(client.read(1, 0), 7);
    for mib in 1..128 {
        assert_eq!(mebibyte(&mut client, mib, None), mib as u8);
    }
    drop(client);
    assert!(server.stop().success(), "{}", server.stderr());
    drop(server);
}
