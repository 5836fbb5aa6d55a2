//! Disks with the error policy `stop`. While the storage is full, failed requests are held; they
//! are submitted again when the disk is resumed.

use crate::control::{ctl, ctl_json, http_request, request};
use crate::disk_recovery::Export;
use crate::exports::Nbd;
use crate::harness::{Server, attach, complete, finish, image, program, run, until};
use crate::recover::kill;
use crate::supervisor::worker;
use crate::upgrade::upgrade;
use rustix::process::Signal;
use shadowbell_driver::{
    AttachOptions, BufferPool, Controller, Namespace, QueuePair, Recovery, Timeouts,
};
use shadowbell_spec::Status;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

// Size of the disk. The limit on the size of files is half of it, and must be larger than the
// memory files that the processes share.
const SIZE: u64 = 64 << 30;
/// First block without room.
const FULL_FROM: u64 = SIZE / 2 / 512;

/// Serves `disk.img` with the error policy `stop`. A limit on the size of files simulates full
/// storage: writes to the second half of the disk fail for lack of space.
fn start(options: &[&str]) -> Server {
    let words = ["disk.img?on-error=stop", "--socket", "vm.sock", "--workers", "1"];
    serve(tempfile::tempdir().unwrap(), &[&words, options].concat())
}

fn serve(directory: TempDir, words: &[&str]) -> Server {
    image(directory.path(), "disk.img", SIZE);
    let mut command = Command::new("prlimit");
    command.arg(format!("--fsize={}:unlimited", SIZE / 2));
    command.arg(program().get_program()).args(["serve", "--supervisor"]).args(words);
    Server::spawn(command, directory, &["vm.sock"])
}

/// Makes room on the storage.
fn make_room(server: &Server) {
    for pid in [server.pid(), worker(server)] {
        let mut command = Command::new("prlimit");
        command.args(["--pid", &pid.to_string(), "--fsize=unlimited:unlimited"]);
        let (status, _, errors) = finish(command);
        assert_eq!(status, Some(0), "{errors}");
    }
}

/// A guest of the disk.
struct Guest {
    controller: Controller,
    queue: QueuePair,
    pool: BufferPool,
    namespace: Namespace,
}

impl Guest {
    fn attach(server: &Server, options: &AttachOptions) -> Self {
        let mut controller = attach(&server.directory().join("vm.sock"), options);
        let queue = controller.take_queue_pair().unwrap();
        let namespace = controller.namespace(1).unwrap().clone();
        let pool = controller.buffers(8, 4096).unwrap();
        Self { controller, queue, pool, namespace }
    }

    /// Submits a write of 4 KiB.
    fn submit(&mut self, lba: u64, value: u8) {
        let mut buffer = self.pool.take().unwrap();
        buffer.fill(value);
        self.queue.submit(self.namespace.write(lba, 8).unwrap(), Some(buffer)).unwrap();
        self.queue.ring().unwrap();
    }

    /// Submits a write for which the storage has no space, and waits until the write is held.
    fn hold(&mut self, server: &Server) {
        self.submit(FULL_FROM, 9);
        until("a stopped disk", || disk(server)["held"] == 1);
        assert!(self.queue.pop().is_none());
    }

    /// Reads the first byte at `lba`.
    fn read(&mut self, lba: u64) -> u8 {
        let command = self.namespace.read(lba, 8).unwrap();
        let read = run(&mut self.queue, command, self.pool.take());
        assert_eq!(read.status, Status::SUCCESS);
        let mut byte = [0];
        assert!(read.buffer.unwrap().copy_to(0, &mut byte));
        byte[0]
    }
}

/// The last disk of the server.
fn disk(server: &Server) -> serde_json::Value {
    let disks = ctl_json(server, &["disk", "ls"]);
    disks.as_array().unwrap().last().unwrap().clone()
}

/// Removes the limit of the storage, resumes the disk, and checks that the write that
/// [`Guest::hold`] has submitted succeeds.
fn resume(server: &Server, guest: &mut Guest) {
    make_room(server);
    let id = disk(server)["id"].as_str().unwrap().to_owned();
    ctl_json(server, &["disk", "resume", &id]);
    assert_eq!(complete(&mut guest.queue).status, Status::SUCCESS);
    assert_eq!(guest.read(FULL_FROM), 9);
    until("the end of the stop", || disk(server)["stopped"].is_null());
    server.wait_for_log("is resumed, after");
}

#[test]
fn a_write_to_a_full_storage_is_held_until_the_disk_is_resumed() {
    let mut server = start(&["--stalled-after", "1"]);
    let mut guest = Guest::attach(&server, &AttachOptions::default());
    guest.hold(&server);
    let about = disk(&server);
    assert_eq!(about["stopped"], "no space is left on the storage below", "{about}");
    let id = about["id"].as_str().unwrap();
    server.wait_for_log(&format!("run `shadowbell ctl disk resume {id}`"));
    // Other requests of the disk succeed while a request is held.
    guest.submit(0, 3);
    assert_eq!(complete(&mut guest.queue).status, Status::SUCCESS);
    assert_eq!((guest.read(0), guest.read(FULL_FROM)), (3, 0));
    let (_, table, _) = ctl(&server, &["disk", "ls"]);
    assert!(table.contains("is stopped: no space is left on the storage below; 1 request is held"));
    let mut command = program();
    command.arg("ls").env("SHADOWBELL_RUN_DIR", server.directory().join("run"));
    let (_, listed, errors) = finish(command);
    assert!(listed.contains("64.0 GiB, stopped"), "{listed}{errors}");
    let (_, status, _) = ctl(&server, &["status"]);
    assert!(status.contains("stopped      1 disk"), "{status}");
    let (_, metrics) = http_request(&server, &request("GET", "/metrics", ""));
    for name in ["shadowbell_disk_stopped", "shadowbell_disk_requests_held"] {
        let sample = metrics.lines().find(|line| line.starts_with(&format!("{name}{{")));
        assert!(sample.is_some_and(|line| line.ends_with(" 1")), "{metrics}");
    }
    let (_, snapshot) = http_request(&server, &request("GET", "/v1/snapshot", ""));
    assert!(snapshot.contains(r#""stopped":true"#), "{snapshot}");
    // If the storage is still full after a resume, the request fails again and is held again.
    ctl_json(&server, &["disk", "resume", id]);
    until("another stop", || server.stderr().matches(" is stopped: ").count() == 2);
    assert_eq!(disk(&server)["held"], 1);
    // A request that is held for long does not make the disk count as stalled, because the storage
    // answers.
    until("an old request", || disk(&server)["oldest_ms"].as_u64().unwrap() > 1500);
    assert!(disk(&server)["stalled"] == false && !server.stderr().contains("stalled"));
    resume(&server, &mut guest);
    assert_eq!(ctl(&server, &["disk", "resume", "none"]).0, Some(3));
    drop(guest);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn held_writes_are_repeated_after_a_kill_and_an_upgrade() {
    let mut server = start(&[]);
    let mut guest = Guest::attach(&server, &AttachOptions::default());
    guest.hold(&server);
    kill(&server, Signal::KILL);
    until("a stopped disk after the kill", || disk(&server)["held"] == 1);
    let before = worker(&server);
    let socket = server.directory().join("vm.sock");
    let (status, output, errors) = upgrade(socket.to_str().unwrap(), None);
    assert_eq!(status, Some(0), "{output}{errors}");
    until("another process", || worker(&server) != before);
    until("a stopped disk after the upgrade", || disk(&server)["held"] == 1);
    assert!(guest.queue.pop().is_none());
    resume(&server, &mut guest);
    drop(guest);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn abort_reset_and_disconnection_end_held_requests() {
    let mut server = start(&[]);
    let is_over = || until("the end of the stop", || disk(&server)["stopped"].is_null());
    // Without repeats, the driver does not submit an ended command again.
    let recovery = Recovery { repeats: 0, ..Recovery::default() };
    let options = AttachOptions { recovery, ..AttachOptions::default() };
    // The driver aborts a command that exceeds this limit.
    let timeouts = Timeouts { io: Duration::from_secs(8), ..Timeouts::default() };
    let mut guest = Guest::attach(&server, &AttachOptions { timeouts, ..options.clone() });
    guest.hold(&server);
    assert_ne!(complete(&mut guest.queue).status, Status::SUCCESS);
    let stats = guest.controller.recovery_stats();
    assert!(stats.aborts > 0 && stats.resets == 0 && stats.queues_recreated == 0, "{stats:?}");
    is_over();
    drop(guest);

    let mut guest = Guest::attach(&server, &options);
    guest.hold(&server);
    guest.controller.reset().unwrap();
    assert_eq!(complete(&mut guest.queue).status, Status::ABORTED_BY_HOST);
    is_over();

    // An unmap of other guest memory does not wait for held requests, and does not end them.
    guest.hold(&server);
    drop(guest.controller.buffers(1, 4096).unwrap());
    assert_eq!(disk(&server)["held"], 1);
    drop(guest);
    is_over();
    drop(Guest::attach(&server, &options));
    assert!(server.stop().success(), "{}", server.stderr());
}

/// A write is at slow storage when its disk is replaced, so the disk is not stopped. After its
/// failure, a resume would not reach the replaced disk.
#[test]
fn a_replaced_disk_holds_no_request() {
    let directory = tempfile::tempdir().unwrap();
    let export = Export::start(image(directory.path(), "far.img", SIZE).to_str().unwrap());
    export.limit_files(SIZE / 2);
    let mut server = Server::start(&[&export.uri("&on-error=stop")], &[]);
    let recovery = Recovery { repeats: 0, ..Recovery::default() };
    let options = AttachOptions { recovery, ..AttachOptions::default() };
    let mut guest = Guest::attach(&server, &options);
    export.stall();
    guest.submit(FULL_FROM, 9);
    until("a write in flight", || disk(&server)["in_flight"] == 1);
    let (id, before) = (disk(&server)["id"].clone(), disk(&server)["source"].clone());
    let replace =
        |source| ctl(&server, &["disk", "replace", id.as_str().unwrap(), source, "--force"]);
    std::thread::scope(|scope| {
        let replaced = scope.spawn(|| replace("mem:1MiB"));
        until("another disk", || disk(&server)["source"] != before);
        export.signal(Signal::CONT);
        let (status, _, errors) = replaced.join().unwrap();
        assert_eq!(status, Some(0), "{errors}");
    });
    assert_eq!(complete(&mut guest.queue).status.code(), Status::CAPACITY_EXCEEDED);
    let (status, _, errors) = replace("mem:2MiB");
    assert_eq!(status, Some(0), "{errors}");
    drop(guest);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn a_client_of_an_export_waits_for_a_held_write() {
    let directory = tempfile::tempdir().unwrap();
    let file = "[[controller]]\nsocket = \"vm.sock\"\ndisks = [\"mem:1MiB\"]\n\
                [[disk]]\nid = \"data\"\nsource = \"disk.img\"\non-error = \"stop-on-full\"\n\
                [[export]]\nid = \"data\"\ndisk = \"data\"\nnbd = \"unix:data.sock\"\n";
    std::fs::write(directory.path().join("vm.toml"), file).unwrap();
    let mut server = serve(directory, &["--config", "vm.toml"]);
    let socket = server.directory().join("data.sock");
    let mut client = Nbd::connect(&socket);
    client.send(1, FULL_FROM * 512, &[5; 512]);
    until("a stopped disk", || disk(&server)["held"] == 1);
    // The disconnection of a client ends its held requests.
    drop(client);
    until("the end of the stop", || disk(&server)["stopped"].is_null());
    let mut client = Nbd::connect(&socket);
    client.send(1, FULL_FROM * 512, &[6; 512]);
    until("a stopped disk", || disk(&server)["held"] == 1);
    assert!(!client.has_reply());
    make_room(&server);
    ctl_json(&server, &["disk", "resume", "data"]);
    assert_eq!(client.reply(), 0);
    let file = std::fs::File::open(server.directory().join("disk.img")).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, FULL_FROM * 512).unwrap();
    assert_eq!(byte, [6]);
    drop(client);
    assert!(server.stop().success(), "{}", server.stderr());
}
