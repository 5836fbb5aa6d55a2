//! Storage that hangs for a while during a guest's I/O: other namespaces of the same I/O thread
//! continue, no acknowledged write is lost, and all commands complete when the storage resumes.

use crate::control::{ctl, ctl_json, http_request, request};
use crate::disk_recovery::Export;
use crate::disk_types::{PAGE, Page, check_content, fill};
use crate::exports::Nbd;
use crate::harness::{Server, complete, image, run, until};
use crate::supervisor::worker;
use rustix::process::Signal;
use shadowbell_driver::{
    AttachOptions, BufferPool, Completion, Controller, Namespace, QueuePair, Recovery, Timeouts,
};
use shadowbell_spec::Status;
use shadowbell_testing::outside::{self, Storage};
use shadowbell_testing::stalled::{Mount, run_daemon_if_requested};
use shadowbell_testing::wait::{LIMIT, short_pause};
use std::time::Duration;

/// Number of requests in flight, each to a page of its own.
const PAGES: usize = 64;
const BYTES: u64 = 16 << 20;

#[test]
fn fuse_daemon() {
    run_daemon_if_requested();
}

/// Storage that a test can stall and resume.
trait Stalls: Sync {
    fn stall(&self);
    fn resume(&self);
}

impl Stalls for Mount {
    fn stall(&self) {
        Mount::stall(self);
    }

    fn resume(&self) {
        Mount::resume(self);
    }
}

impl Stalls for Storage {
    fn stall(&self) {
        Storage::stall(self);
    }

    fn resume(&self) {
        Storage::resume(self);
    }
}

impl Stalls for Export {
    fn stall(&self) {
        Export::stall(self);
    }

    fn resume(&self) {
        self.signal(Signal::CONT);
    }
}

/// A guest of both namespaces, and the possible contents of the pages of namespace 1.
struct Guest {
    controller: Controller,
    queue: QueuePair,
    pool: BufferPool,
    namespace: Namespace,
    pages: Vec<Page>,
    last: u64,
}

impl Guest {
    /// Attaches to the server, and writes and flushes every page, so that each has known content.
    fn attach(server: &Server, options: AttachOptions) -> Self {
        let options = AttachOptions { queue_pairs: 2, queue_depth: 256, ..options };
        let mut controller = server.attach_with(&options);
        let queue = controller.take_queue_pair().unwrap();
        let namespace = controller.namespace(1).unwrap().clone();
        let pool = controller.buffers(PAGES, PAGE).unwrap();
        let pages = (0..PAGES).map(|_| Page::default()).collect();
        let mut guest = Self { controller, queue, pool, namespace, pages, last: 0 };
        for at in 0..PAGES {
            guest.submit(at, true);
        }
        guest.queue.ring().unwrap();
        guest.settle(&[Status::SUCCESS]);
        let flush = guest.namespace.flush();
        assert_eq!(run(&mut guest.queue, flush, None).status, Status::SUCCESS);
        guest
    }

    fn submit(&mut self, at: usize, is_write: bool) {
        let mut buffer = self.pool.take().unwrap();
        self.last += 1;
        fill(&mut buffer, self.last);
        let blocks = PAGE as u32 / self.namespace.block_size();
        let lba = at as u64 * u64::from(blocks);
        let (command, number) = match is_write {
            true => (self.namespace.write(lba, blocks), Some(self.last)),
            false => (self.namespace.read(lba, blocks), None),
        };
        let token = self.queue.submit(command.unwrap(), Some(buffer)).unwrap();
        self.pages[at].in_flight = Some((token, number));
    }

    /// Submits a read or a write of every page.
    fn submit_many(&mut self) {
        for at in 0..PAGES {
            self.submit(at, at % 3 != 0);
        }
        self.queue.ring().unwrap();
    }

    /// Waits until no command is in flight. Returns the number of failed commands.
    fn settle(&mut self, expected: &[Status]) -> usize {
        settle(&mut self.queue, &mut self.pages, expected)
    }

    /// Checks that I/O on namespace 2, by the other queue, completes.
    fn check_other_queue(&mut self, queue: &mut QueuePair, pool: &BufferPool) {
        let other = self.controller.namespace(2).unwrap().clone();
        let blocks = PAGE as u32 / other.block_size();
        for number in 1..20 {
            let mut buffer = pool.take().unwrap();
            fill(&mut buffer, number);
            let written = run(queue, other.write(0, blocks).unwrap(), Some(buffer));
            assert_eq!(written.status, Status::SUCCESS);
            drop(written);
            let read = run(queue, other.read(0, blocks).unwrap(), pool.take());
            assert_eq!(read.status, Status::SUCCESS);
            let mut page = Page { may: vec![number], ..Page::default() };
            check_content(&mut page, &read.buffer.unwrap());
        }
    }

    /// Checks that all acknowledged data are on the disk.
    fn assert_no_loss(mut self) {
        for at in 0..PAGES {
            self.submit(at, false);
        }
        self.queue.ring().unwrap();
        self.settle(&[Status::SUCCESS]);
        let Self { controller, queue, pool, .. } = self;
        drop((queue, pool));
        controller.detach().unwrap();
    }
}

/// Checks a completion, whose status must be one of `expected`.
fn take(pages: &mut [Page], completion: Completion, expected: &[Status]) -> Status {
    let Completion { token, status, buffer, .. } = completion;
    let is = |page: &&mut Page| page.in_flight.as_ref().is_some_and(|(it, _)| *it == token);
    let page = pages.iter_mut().find(is).expect("a completion of a request in flight");
    let (_, number) = page.in_flight.take().unwrap();
    assert!(expected.contains(&status), "{status:?}");
    match (status, number) {
        (Status::SUCCESS, Some(number)) => page.may = vec![number],
        (Status::SUCCESS, None) => check_content(page, &buffer.unwrap()),
        (_, number) => page.may.extend(number),
    }
    status
}

/// Waits until no command is in flight. Returns the number of failed commands.
fn settle(queue: &mut QueuePair, pages: &mut [Page], expected: &[Status]) -> usize {
    let mut failed = 0;
    while pages.iter().any(|page| page.in_flight.is_some()) {
        let completion = complete(queue);
        failed += usize::from(take(pages, completion, expected) != Status::SUCCESS);
    }
    failed
}

/// Checks that commands on hung storage complete when it resumes, and that commands on other
/// storage do not wait.
fn check_waiting_commands(server: &Server, storage: &dyn Stalls) {
    let mut guest = Guest::attach(server, AttachOptions::default());
    let mut other = guest.controller.take_queue_pair().unwrap();
    // The buffers stay mapped until the end, because unmapping them would wait for all commands in
    // flight.
    let pool = guest.controller.buffers(1, PAGE).unwrap();
    storage.stall();
    guest.submit_many();
    guest.check_other_queue(&mut other, &pool);
    short_pause();
    assert!(guest.queue.pop().is_none(), "a command completed on hung storage");
    guest.check_other_queue(&mut other, &pool);
    storage.resume();
    guest.settle(&[Status::SUCCESS]);
    drop((other, pool));
    guest.assert_no_loss();
}

/// Checks that a reset waits only for operations that may still reach the disk or the guest's
/// memory.
fn check_reset(server: &Server, storage: &dyn Stalls) {
    // Without repeats, the driver does not resubmit commands that a reset has ended.
    let recovery = Recovery { repeats: 0, ..Recovery::default() };
    let mut guest = Guest::attach(server, AttachOptions { recovery, ..AttachOptions::default() });
    storage.stall();
    guest.submit_many();
    short_pause();
    std::thread::scope(|scope| {
        let reset = scope.spawn(|| guest.controller.reset());
        until("the reset's begin", || !guest.controller.registers().unwrap().cc.en());
        storage.resume();
        reset.join().unwrap().unwrap();
    });
    let ended = guest.settle(&[Status::SUCCESS, Status::ABORTED_BY_HOST]);
    assert!(ended > 0, "no reset came in mid-I/O");
    // Checks that no write that the reset ended still reaches the disk later and overwrites newer
    // data.
    for _ in 0..3 {
        guest.submit_many();
        guest.settle(&[Status::SUCCESS]);
    }
    guest.assert_no_loss();
}

/// Checks that a guest with a short timeout recovers. Its driver aborts the commands, then deletes
/// the queue, and resets the controller if that times out too. The driver submits the commands
/// again, and they succeed.
fn is_unusable_after_timeout(server: &Server, storage: &dyn Stalls, check_reset: bool) {
    // The test requires that I/O commands time out. Admin commands must time out only if a reset is
    // expected; otherwise their timeout is long.
    let admin = if check_reset { Duration::from_secs(2) } else { LIMIT };
    // The timeouts are short, because the test waits until they expire.
    let timeouts = Timeouts { io: Duration::from_millis(300), admin, ..Timeouts::default() };
    // While the storage hangs, each recovery step may submit a command again. With this limit, the
    // driver does not give up.
    let recovery = Recovery { repeats: 100, ..Recovery::default() };
    let options = AttachOptions { timeouts, recovery, ..AttachOptions::default() };
    let mut guest = Guest::attach(server, options);
    storage.stall();
    guest.submit_many();
    let Guest { controller, queue, pages, .. } = &mut guest;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            until("a queue or a controller that is given up", || {
                let stats = controller.recovery_stats();
                if check_reset { stats.resets > 0 } else { stats.queues_recreated > 0 }
            });
            storage.resume();
        });
        settle(queue, pages, &[Status::SUCCESS]);
    });
    let stats = guest.controller.recovery_stats();
    assert!(stats.late > 0 && stats.aborts > 0 && stats.failed == 0, "{stats:?}");
    assert!(stats.queues_recreated > 0 || check_reset, "{stats:?}");
    assert!(stats.resets > 0 || !check_reset, "{stats:?}");
    guest.assert_no_loss();
}

fn check_disk_type(disk: &str, storage: &dyn Stalls) {
    // One I/O thread serves both namespaces.
    let options = ["--supervisor", "--workers", "1"];
    let mut server = Server::start(&[disk, "mem:1MiB"], &options);
    check_waiting_commands(&server, storage);
    check_reset(&server, storage);
    is_unusable_after_timeout(&server, storage, false);
    is_unusable_after_timeout(&server, storage, true);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// A reset does not wait for a hung NBD server. Later commands wait for the writes that the server
/// may still execute.
#[test]
fn a_reset_does_not_wait_for_a_hung_nbd_server() {
    let storage = Export::start("mem:16MiB");
    let options = ["--supervisor", "--workers", "1"];
    let mut server = Server::start(&[&storage.uri("&settle=50ms"), "mem:1MiB"], &options);
    let stalled = || ctl_json(&server, &["status"])["stalled_writes"].as_u64().unwrap();
    // Without repeats, the driver does not resubmit commands that a reset has ended.
    let recovery = Recovery { repeats: 0, ..Recovery::default() };
    let mut guest = Guest::attach(&server, AttachOptions { recovery, ..AttachOptions::default() });
    assert_eq!(stalled(), 0);
    storage.stall();
    guest.submit_many();
    short_pause();
    guest.controller.reset().unwrap();
    assert_eq!(guest.settle(&[Status::ABORTED_BY_HOST]), PAGES);
    assert!(stalled() > 0, "no write was at the server");
    guest.submit_many();
    short_pause();
    assert!(guest.queue.pop().is_none(), "a command completed on hung storage");
    storage.resume();
    guest.settle(&[Status::SUCCESS]);
    until("the answers to the orphans", || stalled() == 0);
    guest.assert_no_loss();
    assert!(server.stop().success(), "{}", server.stderr());
}

/// A replacement of a disk takes effect for new commands and for exports, even if commands in
/// flight do not end. The old disk stays open until it can be flushed.
#[test]
fn a_disk_is_replaced_although_its_storage_hangs() {
    let directory = tempfile::tempdir().unwrap();
    let behind = image(directory.path(), "disk.img", BYTES);
    let Some(storage) = Mount::over("hung_storage::fuse_daemon", &behind) else { return };
    let disk = format!("{}?format=raw&direct=off", storage.path().display());
    let options = ["--supervisor", "--sandbox", "off", "--workers", "1"];
    let mut server = Server::start(&[&disk, "mem:1MiB"], &options);
    let mut guest = Guest::attach(&server, AttachOptions::default());
    let id = ctl_json(&server, &["disk", "ls"])[0]["id"].as_str().unwrap().to_owned();
    let export = ["export", "add", "e", &id, "--nbd", "unix:e.sock", "--read-only"];
    assert_eq!(ctl(&server, &export).0, Some(0), "{}", server.stderr());
    storage.stall();
    guest.submit_many();
    let new = format!("mem:{}", 2 * BYTES);
    let (code, _, errors) = ctl(&server, &["disk", "replace", &id, &new, "--force"]);
    assert_eq!(code, Some(1), "{errors}");
    let kept = format!("{id}.old");
    assert!(errors.contains(&format!("stays open as the disk {kept}, until")), "{errors}");
    assert_eq!(Nbd::connect(&server.directory().join("e.sock")).size(), 2 * BYTES);
    let is_open = |id: &str| {
        let all = ctl_json(&server, &["disk", "ls"]);
        all.as_array().unwrap().iter().any(|disk| disk["id"] == id)
    };
    assert!(is_open(&kept));
    let tasks = format!("/proc/{}/task", worker(&server));
    until("the sleep of the thread that accepts clients", || {
        let tasks = std::fs::read_dir(&tasks).unwrap().flatten();
        let mut states = tasks.flat_map(|task| std::fs::read_to_string(task.path().join("stat")));
        states.any(|state| state.contains(" (nbd) S"))
    });
    storage.resume();
    guest.settle(&[Status::SUCCESS]);
    assert_eq!(ctl(&server, &["disk", "remove", &kept]).0, Some(0), "{}", server.stderr());
    assert!(!is_open(&kept));
    drop(guest);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// A disk whose storage hangs is shown as stalled in the log, the API and metrics until the storage
/// answers.
#[test]
fn a_disk_is_stalled_until_its_storage_answers() {
    let storage = Export::start("mem:16MiB");
    let options = ["--supervisor", "--workers", "1", "--stalled-after", "1"];
    let mut server = Server::start(&[&storage.uri("&settle=50ms"), "mem:1MiB"], &options);
    let mut guest = Guest::attach(&server, AttachOptions::default());
    let disk = |nth: usize| ctl_json(&server, &["disk", "ls"])[nth].clone();
    until("the end of the requests", || disk(0)["in_flight"] == 0);
    assert!(disk(0)["stalled"] == false && !server.stderr().contains("stalled"));
    storage.stall();
    guest.submit_many();
    until("a stalled disk", || disk(0)["stalled"] == true);
    let (hung, other) = (disk(0), disk(1));
    assert!(hung["in_flight"] == PAGES && hung["oldest_ms"].as_u64().unwrap() >= 1000, "{hung}");
    assert!(other["stalled"] == false && other["in_flight"] == 0, "{other}");
    let (_, table, _) = ctl(&server, &["disk", "ls"]);
    assert!(table.contains(" is stalled: 64 requests in flight, the oldest for"), "{table}");
    let (_, status, _) = ctl(&server, &["status"]);
    assert!(status.contains("stalled      1 disk"), "{status}");
    server.wait_for_log("is stalled: its storage has not answered 64 requests for");
    let (_, metrics) = http_request(&server, &request("GET", "/metrics", ""));
    let sample = |name: &str| {
        let all = metrics.lines().filter(|line| line.starts_with(&format!("{name}{{")));
        let values = all.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
        values.max()
    };
    assert_eq!(sample("shadowbell_disk_stalled"), Some(1), "{metrics}");
    assert_eq!(sample("shadowbell_disk_requests_in_flight"), Some(PAGES as u64), "{metrics}");
    assert!(sample("shadowbell_disk_oldest_request_seconds") >= Some(1), "{metrics}");
    let (_, snapshot) = http_request(&server, &request("GET", "/v1/snapshot", ""));
    assert!(snapshot.contains(r#""stalled":true"#), "{snapshot}");
    storage.resume();
    guest.settle(&[Status::SUCCESS]);
    server.wait_for_log("answers again, after");
    until("the end of the stall", || disk(0)["stalled"] == false && disk(0)["in_flight"] == 0);
    assert_eq!(server.stderr().matches(" is stalled").count(), 1, "{}", server.stderr());
    guest.assert_no_loss();
    assert!(server.stop().success(), "{}", server.stderr());
}

/// A reset cancels the requests of a stalled disk. Their ends must not count as an answer of the
/// storage.
#[test]
fn a_disk_is_stalled_over_a_reset_until_its_storage_answers() {
    let storage = Export::start("mem:16MiB");
    let options = ["--supervisor", "--workers", "1", "--stalled-after", "1"];
    let mut server = Server::start(&[&storage.uri("&settle=50ms"), "mem:1MiB"], &options);
    let disk = || ctl_json(&server, &["disk", "ls"])[0].clone();
    let recovery = Recovery { repeats: 0, ..Recovery::default() };
    let mut guest = Guest::attach(&server, AttachOptions { recovery, ..AttachOptions::default() });
    storage.stall();
    guest.submit_many();
    until("a stalled disk", || disk()["stalled"] == true && disk()["in_flight"] == PAGES);
    guest.controller.reset().unwrap();
    assert_eq!(guest.settle(&[Status::ABORTED_BY_HOST]), PAGES);
    let is_seen = |now: &serde_json::Value| now["in_flight"].as_u64().unwrap() < PAGES as u64;
    until("a scan after the reset", || is_seen(&disk()));
    assert!(disk()["stalled"] == true && disk()["in_flight"] != 0, "{}", disk());
    assert!(!server.stderr().contains("answers again"), "{}", server.stderr());
    storage.resume();
    server.wait_for_log("answers again, after");
    guest.assert_no_loss();
    assert!(server.stop().success(), "{}", server.stderr());
}

/// A disk whose requests wait for a rate limit is not stalled.
#[test]
fn a_throttled_disk_is_not_stalled() {
    let options = ["--supervisor", "--workers", "1", "--stalled-after", "1"];
    // The bandwidth limit lets one read end every two seconds. A disk counts as stalled after one
    // second.
    let mut server = Server::start(&["mem:1MiB?bandwidth=2KiB:1"], &options);
    let mut guest = server.attach();
    let mut queue = guest.take_queue_pair().unwrap();
    let pool = guest.buffers(16, 4096).unwrap();
    let read = guest.namespace(1).unwrap().read(0, 8).unwrap();
    for _ in 0..4 {
        queue.submit(read, pool.take()).unwrap();
    }
    queue.ring().unwrap();
    let disk = || ctl_json(&server, &["disk", "ls"])[0].clone();
    until("a request of some age", || disk()["oldest_ms"].as_u64().unwrap() > 2500);
    assert!(disk()["stalled"] == false && !server.stderr().contains("stalled"));
    (0..4).for_each(|_| assert_eq!(complete(&mut queue).status, Status::SUCCESS));
    drop((queue, pool, guest));
    assert!(server.stop().success(), "{}", server.stderr());
}

/// Checks that SIGTERM ends the service although storage hangs, and that the log reports the
/// unanswered requests with the text `words`.
fn check_stop(disk: &str, storage: &dyn Stalls, words: &str) {
    // The stop timeout is short, because the test waits until it has expired.
    let options = ["--supervisor", "--workers", "1", "--stop-timeout", "10"];
    let mut server = Server::start(&[disk, "mem:1MiB"], &options);
    let mut guest = Guest::attach(&server, AttachOptions::default());
    storage.stall();
    guest.submit_many();
    short_pause();
    let status = server.stop();
    let log = server.stderr();
    assert_eq!(status.code(), Some(5), "{log}");
    let name = disk.split('?').next().unwrap();
    assert!(log.lines().any(|line| line.contains(name) && line.contains(words)), "{log}");
    storage.resume();
}

#[test]
fn the_service_ends_although_an_nbd_server_hangs() {
    let storage = Export::start("mem:16MiB");
    check_stop(&storage.uri("&settle=50ms"), &storage, "cancelled writes have not been answered");
}

#[test]
fn the_service_ends_although_a_file_system_hangs() {
    let directory = tempfile::tempdir().unwrap();
    let behind = image(directory.path(), "disk.img", BYTES);
    let Some(mount) = Mount::over("hung_storage::fuse_daemon", &behind) else { return };
    let disk = format!("{}?format=raw&direct=off", mount.path().display());
    check_stop(&disk, &mount, "requests have not been answered");
}

#[test]
fn a_raw_image_passes() {
    let directory = tempfile::tempdir().unwrap();
    let behind = image(directory.path(), "disk.img", BYTES);
    for options in ["?format=raw", "?format=raw&direct=off", "?format=raw&aio=threads"] {
        let Some(mount) = Mount::over("hung_storage::fuse_daemon", &behind) else { return };
        check_disk_type(&format!("{}{options}", mount.path().display()), &mount);
    }
}

#[test]
fn character_device_namespaces_pass() {
    for device in outside::namespaces() {
        let storage = Storage::new();
        for options in ["", "?aio=threads"] {
            check_disk_type(&format!("{device}{options}"), &storage);
        }
    }
}
