//! Upgrades of the server process, and failed upgrades, which change nothing.

use crate::harness::{Server, complete, finish, image, program, program_with_sighup, run, until};
use crate::supervisor::{children, has_ended, signal, worker};
use rustix::process::Signal;
use shadowbell_driver::{AdminData, AttachOptions, BufferPool, Controller, QueuePair};
use shadowbell_spec::{Sqe, Status};
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait::LIMIT;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// Runs `shadowbell upgrade`, to the program `binary` if given. Returns exit status, output and
/// errors.
pub(crate) fn upgrade(target: &str, binary: Option<&Path>) -> (Option<i32>, String, String) {
    let binary = binary.map(|path| ["--binary", path.to_str().unwrap()]);
    upgrade_with(target, binary.as_slice().as_flattened())
}

/// Runs `shadowbell upgrade` with options. Returns exit status, output and errors.
pub(crate) fn upgrade_with(target: &str, options: &[&str]) -> (Option<i32>, String, String) {
    let mut command = program();
    command.args(["upgrade", target]).args(options);
    finish(command)
}

/// Starts a server with a supervisor and several controllers, each with a file and a memory disk.
pub(crate) fn server(controllers: usize, options: &[&str]) -> Server {
    server_with(controllers, options, &[])
}

/// Like `server`, with environment variables.
pub(crate) fn server_with(
    controllers: usize,
    options: &[&str],
    variables: &[(&str, &str)],
) -> Server {
    let directory = tempfile::tempdir().unwrap();
    let mut file = String::from("workers = 2\n");
    for n in 0..controllers {
        image(directory.path(), &format!("{n}.img"), 16 << 20);
        file += &format!(
            "[[controller]]\nsocket = \"vm{n}.sock\"\ndisks = [\"{n}.img\", \"mem:16MiB\"]\n"
        );
    }
    std::fs::write(directory.path().join("vms.toml"), file).unwrap();
    let mut command = program_with_sighup();
    command.args(["serve", "--supervisor", "--config", "vms.toml"]).args(options);
    command.envs(variables.iter().copied());
    let last = format!("vm{}.sock", controllers - 1);
    Server::spawn(command, directory, &["vm0.sock", &last])
}

pub(crate) fn socket(server: &Server, controller: usize) -> PathBuf {
    server.directory().join(format!("vm{controller}.sock"))
}

/// `shadowbell verify` in a process of its own. It runs until the test ends it.
pub(crate) struct Load(ProcessGroup);

impl Load {
    pub(crate) fn start(server: &Server, controller: usize, namespace: u32) -> Self {
        Self::at(&socket(server, controller), namespace)
    }

    pub(crate) fn at(socket: &Path, namespace: u32) -> Self {
        let target = format!("vfio-user:{}/{namespace}", socket.display());
        let mut command = program();
        // `--force` skips the check of the disk's contents, so the load attaches once.
        command.args(["verify", &target, "--runtime", "3600", "--iodepth", "32", "--json"]);
        command.arg("--force");
        // The load uses half of the disk. The other half is for other clients.
        command.args(["--size", "8MiB", "--timeout", "300"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(ProcessGroup::spawn(&mut command).unwrap())
    }

    /// Ends the load, and expects no error.
    pub(crate) fn assert_no_loss(self) {
        let row = self.end();
        assert!(row["commands"].as_u64() > Some(0), "{row}");
        for key in ["verify_errors", "failed", "retried"] {
            assert_eq!(row[key], 0, "{key}: {row}");
        }
        for (key, count) in row["recovery"].as_object().unwrap() {
            assert_eq!(*count, 0, "{key}: {row}");
        }
    }

    /// Ends the load; returns its report.
    pub(crate) fn end(self) -> serde_json::Value {
        self.0.signal(Signal::INT);
        let output = self.0.output();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        let text = String::from_utf8(output.stdout).unwrap();
        let line = text.lines().last().unwrap_or_default();
        let report: serde_json::Value = serde_json::from_str(line).expect(&errors);
        report["rows"][0].clone()
    }
}

/// A client that stays connected.
pub(crate) struct Client {
    controller: Controller,
    queue: QueuePair,
    /// Additional buffer pools, each shared with the server by a message of its own.
    shared: Vec<BufferPool>,
}

impl Client {
    pub(crate) fn attach(socket: &Path) -> Self {
        let mut controller = crate::harness::attach(socket, &AttachOptions::default());
        let queue = controller.take_queue_pair().unwrap();
        Self { controller, queue, shared: Vec::new() }
    }

    #[track_caller]
    pub(crate) fn write(&mut self, nsid: u32, lba: u64, byte: u8) {
        assert_eq!(self.try_write(nsid, lba, byte), Status::SUCCESS);
    }

    pub(crate) fn try_write(&mut self, nsid: u32, lba: u64, byte: u8) -> Status {
        let pool = self.controller.buffers(1, 4096).unwrap();
        let mut buffer = pool.take().unwrap();
        assert!(buffer.copy_from(0, &[byte; 4096]));
        let command = self.controller.namespace(nsid).unwrap().write(lba, 8).unwrap();
        run(&mut self.queue, command, Some(buffer)).status
    }

    /// Returns the queue and the controller.
    pub(crate) fn parts(&mut self) -> (&mut QueuePair, &Controller) {
        (&mut self.queue, &self.controller)
    }

    /// Sets a feature that transfers data.
    #[track_caller]
    pub(crate) fn set_feature(&self, fid: u32, cdw11: u32, data: &[u8]) {
        let sqe = Sqe { cdw10: fid, cdw11, ..Sqe::new(0x09, 0, 0) };
        let set = self.controller.admin().execute(sqe, AdminData::ToController(data), LIMIT);
        assert_eq!(set.unwrap().status, Status::SUCCESS);
    }

    /// Shares `count` pieces of memory.
    pub(crate) fn share(&mut self, count: usize) {
        let pools = (0..count).map(|_| self.controller.buffers(1, 4096).unwrap());
        self.shared.extend(pools);
    }

    /// Unmaps `count` shared pieces of memory from index `from` on, and shares as many new ones.
    pub(crate) fn replace_shared(&mut self, from: usize, count: usize) {
        drop(self.shared.drain(from..from + count));
        self.share(count);
    }

    /// Writes from each shared piece, and reads into it.
    #[track_caller]
    pub(crate) fn use_shared(&mut self, byte: u8) {
        for (nth, pool) in self.shared.iter().enumerate() {
            let byte = byte.wrapping_add(nth as u8);
            let namespace = self.controller.namespace(1).unwrap();
            let mut buffer = pool.take().unwrap();
            assert!(buffer.copy_from(0, &[byte; 4096]));
            let done = run(&mut self.queue, namespace.write(64, 8).unwrap(), Some(buffer));
            assert_eq!(done.status, Status::SUCCESS, "{nth}");
            let done = run(&mut self.queue, namespace.read(64, 8).unwrap(), done.buffer);
            assert_eq!(done.status, Status::SUCCESS, "{nth}");
            assert_eq!(done.buffer.unwrap().to_vec(4096), [byte; 4096], "{nth}");
        }
    }

    #[track_caller]
    pub(crate) fn read(&mut self, nsid: u32, lba: u64) -> u8 {
        let pool = self.controller.buffers(1, 4096).unwrap();
        let command = self.controller.namespace(nsid).unwrap().read(lba, 8).unwrap();
        let done = run(&mut self.queue, command, pool.take());
        assert_eq!(done.status, Status::SUCCESS);
        done.buffer.unwrap().to_vec(4096)[17]
    }
}

#[test]
fn a_verifying_load_survives_twenty_upgrades() {
    let mut server = server(4, &[]);
    let mut client = Client::attach(&socket(&server, 2));
    client.write(1, 0, 1);
    client.write(2, 0, 2);
    let loads = [(0, 1), (1, 2), (3, 1)];
    let loads = loads.map(|(controller, nsid)| Load::start(&server, controller, nsid));
    until("the loads' clients", || server.stderr().matches("a client is attached").count() >= 4);
    let mut pids = vec![worker(&server)];
    for n in 0..20_u8 {
        let target = match n % 3 {
            0 => socket(&server, 1).display().to_string(),
            1 => server.pid().to_string(),
            _ => pids.last().unwrap().to_string(),
        };
        let (status, output, errors) = upgrade(&target, None);
        assert_eq!(status, Some(0), "{errors}");
        assert!(output.contains("serves"), "{output}");
        until("the old one's end", || children(server.pid()).len() == 1);
        let now = worker(&server);
        assert!(!pids.contains(&now), "{now} of {pids:?}");
        pids.push(now);
        assert_eq!((client.read(1, 0), client.read(2, 0)), (n + 1, n + 2));
        client.write(1, 0, n + 2);
        client.write(2, 0, n + 3);
        // Each process serves some load before the next upgrade.
        std::thread::sleep(Duration::from_millis(50));
    }
    loads.into_iter().for_each(Load::assert_no_loss);
    drop(client);
    // A later client reaches the last process.
    assert_eq!(Client::attach(&socket(&server, 2)).read(1, 0), 21);
    let mut top = program();
    top.env("SHADOWBELL_RUN_DIR", server.directory().join("run"));
    top.args(["top", "--json", "--count", "2", "--interval", "50ms"]);
    let (status, output, errors) = finish(top);
    assert!(status == Some(0) && output.contains("vm2.sock"), "{errors}");
    assert!(server.stop().success(), "{}", server.stderr());
    for n in 0..4 {
        assert!(!socket(&server, n).exists());
    }
}

/// A command completes if it is in flight during an upgrade, or is submitted while no process
/// serves.
#[test]
fn a_command_in_flight_during_an_upgrade_completes() {
    let server = server(1, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    let pool = client.controller.buffers(8, 4096).unwrap();
    for _ in 0..5 {
        // Commands complete during the whole upgrade. The process that has requested the upgrade
        // gets the result later.
        let target = server.pid().to_string();
        let asker = std::thread::spawn(move || upgrade(&target, None));
        let read = client.controller.namespace(1).unwrap().read(0, 8).unwrap();
        while !asker.is_finished() {
            client.queue.submit(read, pool.take()).unwrap();
            client.queue.ring().unwrap();
            assert_eq!(complete(&mut client.queue).status, Status::SUCCESS);
        }
        let (status, _, errors) = asker.join().unwrap();
        assert_eq!(status, Some(0), "{errors}");
    }
}

/// Creates a program that runs `script`.
pub(crate) fn fake(server: &Server, script: &str) -> PathBuf {
    let path = server.directory().join("fake");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Environment variable that makes this test program act as the new server process of an upgrade.
/// Its value names the messages that the process sends, and whether it hangs or dies afterwards.
const FAKE: &str = "SHADOWBELL_TEST_FAKE_WORKER";

/// Entry point of a child process; not a test of its own. It acts as the new server process of an
/// upgrade: it sends the messages that [`FAKE`] names, and then hangs or dies.
#[test]
fn fake_worker() {
    let Ok(how) = std::env::var(FAKE) else { return };
    let (letters, then) = how.split_once(',').unwrap();
    let link = std::io::stdin();
    for letter in letters.as_bytes().chunks(1) {
        let mut control = rustix::net::SendAncillaryBuffer::default();
        let flags = rustix::net::SendFlags::empty();
        let bytes = [IoSlice::new(letter)];
        rustix::net::sendmsg(link.as_fd(), &bytes, &mut control, flags).unwrap();
    }
    match then {
        "hangs" => loop {
            std::thread::park();
        },
        // In this time, the checkpoint usually arrives.
        _ => std::thread::sleep(Duration::from_millis(100)),
    }
    std::process::abort();
}

/// Script of a new program that starts without an error. It sends the messages that `how` names,
/// and then hangs or dies.
pub(crate) fn fake_worker_script(how: &str) -> String {
    let test = std::env::current_exe().unwrap();
    let test = test.display();
    format!("export {FAKE}='{how}'\nexec {test} --exact upgrade::fake_worker --nocapture >&2")
}

#[test]
fn a_new_program_that_fails_changes_nothing() {
    let mut server = server(2, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    client.write(1, 0, 7);
    client.write(2, 8, 8);
    let before = worker(&server);
    for (script, why) in [
        ("exit 3".to_owned(), "ended with exit status 3 before it could recover"),
        ("kill -9 $$".to_owned(), "was ended by signal 9 before it could recover"),
        (fake_worker_script("P,ends"), "was ended by signal 6 before it could recover"),
        (fake_worker_script("P,hangs"), "did not check the checkpoint within 10 s"),
    ] {
        let path = fake(&server, &script);
        let (status, _, errors) = upgrade(&before.to_string(), Some(&path));
        assert_eq!(status, Some(1), "{script}: {errors}");
        assert!(errors.contains(why), "{script}: {errors}");
        assert_eq!(worker(&server), before, "{script}");
        assert_eq!((client.read(1, 0), client.read(2, 8)), (7, 8), "{script}");
        client.write(1, 0, 7);
    }
    // An upgrade is still possible.
    let (status, _, errors) = upgrade(&server.pid().to_string(), None);
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!((client.read(1, 0), client.read(2, 8)), (7, 8));
    assert!(server.stop().success());
}

/// If the new program fails after the old process has quiesced, the old program recovers from the
/// same checkpoint.
#[test]
fn the_previous_program_recovers_if_the_new_one_ends_or_hangs() {
    let mut server = server(2, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    client.write(1, 0, 7);
    for (how, why) in [
        ("PK,ends", "was ended by signal 6"),
        ("PK,hangs", "the new process did not recover within 30 s"),
    ] {
        let before = worker(&server);
        let path = fake(&server, &fake_worker_script(how));
        let (status, _, errors) = upgrade(&server.pid().to_string(), Some(&path));
        assert_eq!(status, Some(1), "{how}: {errors}");
        assert!(errors.contains(why), "{how}: {errors}");
        assert!(errors.contains("the previous program recovers the clients"), "{errors}");
        assert_eq!(client.read(1, 0), 7, "{how}");
        client.write(1, 0, 7);
        assert_ne!(worker(&server), before, "{how}");
    }
    let (status, _, errors) = upgrade(&server.pid().to_string(), None);
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!(client.read(1, 0), 7);
    assert!(!server.stderr().contains("have lost"), "{}", server.stderr());
    assert!(server.stop().success());
}

#[test]
fn an_upgrade_to_a_hung_program_is_abandoned() {
    let server = server(1, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    let before = worker(&server);
    let path = fake(&server, "exec sleep 1000");
    let (status, _, errors) = upgrade(&before.to_string(), Some(&path));
    assert_eq!(status, Some(1), "{errors}");
    assert!(errors.contains("was not ready within 10 s"), "{errors}");
    assert_eq!(children(server.pid()), [before]);
    client.write(1, 0, 1);
    assert_eq!(client.read(1, 0), 1);
}

#[test]
fn an_upgrade_with_another_configuration_is_refused() {
    let server = self::server(1, &[]);
    let file = server.directory().join("vms.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("mem:16MiB", "mem:8MiB")).unwrap();
    let (status, _, errors) = upgrade(&server.pid().to_string(), None);
    assert_eq!(status, Some(1), "{errors}");
    assert!(errors.contains("is to serve 0.img, mem:8MiB at "), "{errors}");
    std::fs::write(&file, "nonsense").unwrap();
    let (status, _, errors) = upgrade(&server.pid().to_string(), None);
    assert_eq!(status, Some(1), "{errors}");
    assert!(errors.contains("vms.toml:1"), "{errors}");
    Client::attach(&socket(&server, 0)).write(1, 0, 1);
}

#[test]
fn sigterm_during_an_upgrade_ends_the_server() {
    for wait in [0, 1, 2, 5, 10, 20, 40, 80] {
        let mut server = server(2, &[]);
        let mut client = Client::attach(&socket(&server, 0));
        client.write(1, 0, 1);
        server.signal(Signal::USR2);
        // The signal comes at an arbitrary moment of the upgrade.
        std::thread::sleep(Duration::from_millis(wait));
        let all = children(server.pid());
        server.signal(Signal::TERM);
        assert_eq!(server.wait().code(), Some(0), "{wait} ms: {}", server.stderr());
        until("the end of all", || all.iter().all(|pid| has_ended(*pid)));
        assert!(!socket(&server, 0).exists());
        until("the lock of the image", || {
            let disk = server.directory().join("0.img");
            shadowbell_disk_file::open(disk.to_str().unwrap()).is_ok()
        });
    }
}

#[test]
fn a_supervisor_killed_during_an_upgrade_leaves_no_process() {
    for wait in [0, 10, 30, 60] {
        let mut server = server(2, &[]);
        server.signal(Signal::USR2);
        // The kill comes at an arbitrary moment of the upgrade.
        std::thread::sleep(Duration::from_millis(wait));
        let all = children(server.pid());
        server.signal(Signal::KILL);
        server.wait();
        until("the end of all", || all.iter().all(|pid| has_ended(*pid)));
    }
}

#[test]
fn a_server_process_killed_during_an_upgrade_is_restarted() {
    for wait in [0, 10, 30, 60] {
        let mut server = server(2, &[]);
        let before = worker(&server);
        server.signal(Signal::USR2);
        // The kill comes at an arbitrary moment of the upgrade.
        std::thread::sleep(Duration::from_millis(wait));
        if !has_ended(before) {
            signal(before, Signal::KILL);
        }
        // When the old process died, the next process may have been prepared already. It may have
        // the sockets for a moment before it ends.
        until("one worker that stays", || {
            let worker = |all: &[u32]| all.len() == 1 && all != [before];
            let serves = || {
                (0..2).all(|nth| {
                    std::os::unix::net::UnixStream::connect(socket(&server, nth)).is_ok()
                })
            };
            let all = children(server.pid());
            let found = worker(&all) && serves();
            // The process stays if it still exists after this time.
            std::thread::sleep(Duration::from_millis(300));
            found && children(server.pid()) == all && serves()
        });
        Client::attach(&socket(&server, 0)).write(1, 0, 1);
        assert!(server.stop().success(), "{}", server.stderr());
    }
}
