//! Recovery after kills of the server process, without an error for its clients.

use crate::control::ctl_json;
use crate::disk_recovery::Export;
use crate::harness::{Server, complete, finish, image, program, until};
use crate::supervisor::{children, has_ended, signal, worker};
use crate::upgrade::{Client, Load, server, server_with, socket, upgrade, upgrade_with};
use rustix::fs::{
    FlockOperation, MemfdFlags, SealFlags, fcntl_add_seals, fcntl_lock, ftruncate, memfd_create,
};
use rustix::process::Signal;
use shadowbell_testing::stalled::Mount;
use shadowbell_testing::wait::LIMIT;
use shadowbell_vfio_user::client::{Client as Peer, DmaRange, Options};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Kills the server process by this signal, and waits until another one has recovered. Returns the
/// id of the new process.
pub(crate) fn kill(server: &Server, how: Signal) -> u32 {
    let before = worker(server);
    let deaths = log_count(server, "has recovered the clients");
    signal(before, how);
    until("another worker", || log_count(server, "has recovered the clients") > deaths);
    let now = worker(server);
    assert_ne!(now, before);
    now
}

fn log_count(server: &Server, words: &str) -> usize {
    server.stderr().matches(words).count()
}

pub(crate) fn assert_no_loss(server: &Server) {
    let log = server.stderr();
    assert!(!log.contains("have lost") && !log.contains("is disconnected"), "{log}");
}

#[test]
fn a_verifying_load_survives_twenty_kills() {
    let mut server = server(4, &[]);
    let mut client = Client::attach(&socket(&server, 2));
    client.write(1, 0, 1);
    client.write(2, 0, 2);
    let loads = [(0, 1), (1, 2), (3, 1)];
    let loads = loads.map(|(controller, nsid)| Load::start(&server, controller, nsid));
    until("the loads' clients", || log_count(&server, "a client is attached") >= 4);
    for n in 0..20_u8 {
        // Each process serves some load before it is killed.
        std::thread::sleep(Duration::from_millis(100));
        kill(&server, Signal::KILL);
        assert_eq!((client.read(1, 0), client.read(2, 0)), (n + 1, n + 2));
        client.write(1, 0, n + 2);
        client.write(2, 0, n + 3);
    }
    loads.into_iter().for_each(Load::assert_no_loss);
    assert_no_loss(&server);
    drop(client);
    // The last process serves further clients and can be upgraded.
    let (status, _, errors) = upgrade(&server.pid().to_string(), None);
    assert_eq!(status, Some(0), "{errors}");
    until("the old one's end", || children(server.pid()).len() == 1);
    assert_eq!(Client::attach(&socket(&server, 2)).read(1, 0), 21);
    let mut top = program();
    top.env("SHADOWBELL_RUN_DIR", server.directory().join("run"));
    top.args(["top", "--json", "--count", "2", "--interval", "50ms"]);
    let (status, output, errors) = finish(top);
    assert!(status == Some(0) && output.contains("vm2.sock"), "{errors}");
    assert!(server.stop().success(), "{}", server.stderr());
    assert!((0..4).all(|n| !socket(&server, n).exists()));
}

/// A client shares its memory in many pieces. Later checkpoints do not contain these pieces again.
/// Recovery after a crash, an upgrade and another crash maps all pieces that the client has not
/// unmapped.
#[test]
fn memory_in_many_pieces_is_mapped_after_recovery() {
    let mut server = server(1, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    client.share(200);
    let maps = || std::fs::read_to_string(format!("/proc/{}/maps", worker(&server))).unwrap();
    assert!(maps().contains("client-ranges"), "{}", maps());
    // Number of descriptors of guest memory that the supervisor holds. The supervisor may receive a
    // descriptor only after the server has answered the client.
    let held = || {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap();
        let files = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        files.filter(|file| file.to_string_lossy().contains("shadowbell-buffers")).count()
    };
    until("all of them", || held() >= 200);
    let most = held() + 4;
    for n in 0..6_u8 {
        if n % 2 == 1 {
            let (status, _, errors) = upgrade(&server.pid().to_string(), None);
            assert_eq!(status, Some(0), "{errors}");
            until("the old one's end", || children(server.pid()).len() == 1);
        } else {
            kill(&server, Signal::KILL);
        }
        client.use_shared(n);
        assert!(maps().contains("client-ranges"));
        client.replace_shared(usize::from(n) * 20, 10);
    }
    assert_no_loss(&server);
    // The supervisor closes the descriptors of unmapped pieces, and after the client has
    // disconnected, all of them.
    until("as many as before", || held() <= most);
    drop(client);
    until("none", || held() == 0);
    kill(&server, Signal::KILL);
    Client::attach(&socket(&server, 0)).write(1, 0, 1);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// Recovery works after a kill by any of several signals, after an upgrade, and while no client is
/// attached.
#[test]
fn recovery_works_after_any_signal_and_after_an_upgrade() {
    let mut server = server(1, &[]);
    drop(Client::attach(&socket(&server, 0)));
    kill(&server, Signal::KILL);
    let mut client = Client::attach(&socket(&server, 0));
    client.write(2, 8, 1);
    for (n, how) in [Signal::ABORT, Signal::ILL, Signal::KILL].into_iter().enumerate() {
        let (status, _, errors) = upgrade(&server.pid().to_string(), None);
        assert_eq!(status, Some(0), "{errors}");
        until("the old one's end", || children(server.pid()).len() == 1);
        kill(&server, how);
        assert_eq!(client.read(2, 8), n as u8 + 1);
        client.write(2, 8, n as u8 + 2);
    }
    assert_no_loss(&server);
    drop(client);
    kill(&server, Signal::KILL);
    Client::attach(&socket(&server, 0)).write(1, 0, 1);
    assert!(server.stop().success(), "{}", server.stderr());
    assert!(!socket(&server, 0).exists());
}

/// The I/O thread that the configuration file assigns to a controller is the same in the next
/// process.
#[test]
fn a_controller_keeps_its_io_thread_after_recovery() {
    let directory = tempfile::tempdir().unwrap();
    let table = |n, worker| {
        format!(
            "[[controller]]\nsocket = \"vm{n}.sock\"\ndisks = [\"mem:1MiB\"]\nworker = {worker}\n"
        )
    };
    let text = format!("workers = 2\n{}{}", table(0, "\"own\""), table(1, "1"));
    std::fs::write(directory.path().join("vms.toml"), text).unwrap();
    let mut command = program();
    command.args(["serve", "--supervisor", "--config", "vms.toml"]);
    let mut server = Server::spawn(command, directory, &["vm0.sock", "vm1.sock"]);
    let mut clients = [0, 1].map(|n| Client::attach(&socket(&server, n)));
    clients.iter_mut().for_each(|client| client.write(1, 0, 7));
    kill(&server, Signal::KILL);
    clients.iter_mut().for_each(|client| assert_eq!(client.read(1, 0), 7));
    let (status, _, errors) = upgrade(&server.pid().to_string(), None);
    assert_eq!(status, Some(0), "{errors}");
    clients.iter_mut().for_each(|client| assert_eq!(client.read(1, 0), 7));
    until("the old one's end", || children(server.pid()).len() == 1);
    kill(&server, Signal::KILL);
    clients.iter_mut().for_each(|client| assert_eq!(client.read(1, 0), 7));
    assert_no_loss(&server);
    drop(clients);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn a_recovering_process_may_be_killed() {
    let server = server(2, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    client.write(1, 0, 7);
    client.write(2, 0, 8);
    for wait in [0, 5, 10, 20, 40] {
        let before = worker(&server);
        let deaths = log_count(&server, "has recovered the clients");
        signal(before, Signal::KILL);
        until("the next one", || children(server.pid()).iter().any(|pid| *pid != before));
        let next = worker(&server);
        // The kill comes at an arbitrary moment before recovery.
        std::thread::sleep(Duration::from_millis(wait));
        if log_count(&server, "has recovered the clients") == deaths && !has_ended(next) {
            signal(next, Signal::KILL);
        }
        until("the recovery", || log_count(&server, "has recovered the clients") > deaths);
        assert_eq!((client.read(1, 0), client.read(2, 0)), (7, 8), "after {wait} ms");
        // The process serves for a while, so that the kills are not a crash loop.
        std::thread::sleep(Duration::from_millis(60));
    }
    assert_no_loss(&server);
}

/// A server process whose configuration does not fit the checkpoint reports the reason and ends.
/// The next process starts without the checkpoint.
#[test]
fn a_process_that_cannot_recover_reports_why_and_starts_afresh() {
    let server = server(1, &[]);
    let client = Client::attach(&socket(&server, 0));
    let file = server.directory().join("vms.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("mem:16MiB", "mem:8MiB")).unwrap();
    // The supervisor reads the file only after SIGHUP.
    signal(server.pid(), Signal::HUP);
    server.wait_for_log("would lose the controller");
    let before = worker(&server);
    signal(before, Signal::KILL);
    server.wait_for_log("is to serve 0.img, mem:8MiB at ");
    server.wait_for_log("have lost their controllers");
    drop(client);
    until("another one's socket", || {
        !children(server.pid()).contains(&before) && UnixStream::connect(socket(&server, 0)).is_ok()
    });
    Client::attach(&socket(&server, 0)).write(2, 0, 1);
}

/// A check of the configuration, and an upgrade that is refused, read the configuration file. But
/// the supervisor still restarts the server with the previous configuration.
#[test]
fn a_refused_upgrade_does_not_install_its_configuration() {
    let server = server(1, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    client.write(1, 0, 7);
    let file = server.directory().join("vms.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("mem:16MiB", "mem:8MiB")).unwrap();
    for options in [&["--check"][..], &[]] {
        let (status, output, errors) = upgrade_with(&server.pid().to_string(), options);
        assert_eq!(status, Some(1), "{output}{errors}");
        assert!(errors.contains("is to serve 0.img, mem:8MiB at "), "{errors}");
    }
    kill(&server, Signal::KILL);
    assert_eq!(client.read(1, 0), 7);
    assert_no_loss(&server);
}

#[test]
fn an_unrecoverable_disk_is_reported() {
    let below = Export::start("mem:4MiB");
    let server = Server::start(&[&below.uri("")], &["--supervisor"]);
    server
        .wait_for_log("cannot be recovered after a server crash: an NBD server may still execute");
    let client = Client::attach(&server.socket());
    kill(&server, Signal::KILL);
    server.wait_for_log("its client cannot be recovered, and is disconnected");
    drop(client);
    // The next client is served.
    Client::attach(&server.socket()).write(1, 0, 1);
}

/// Attaches a client that seals its memory after sharing it, so that no other process can map the
/// memory.
fn sealed_client(server: &Server) -> Peer {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    let memory = memfd_create("sealed", flags).unwrap();
    ftruncate(&memory, 1 << 20).unwrap();
    let peer = Peer::connect(socket(server, 1), Options { timeout: Some(LIMIT) }).unwrap();
    let fd = Some(memory.as_fd());
    let share =
        DmaRange { iova: 0, len: 1 << 20, readable: true, writable: true, fd, fd_offset: 0 };
    peer.dma_map(&share).unwrap();
    fcntl_add_seals(&memory, SealFlags::FUTURE_WRITE).unwrap();
    peer
}

/// After an upgrade and after a crash, only the client whose memory cannot be mapped is
/// disconnected.
#[test]
fn a_client_with_unmappable_memory_is_dropped_alone() {
    let server = server(3, &[]);
    let mut others = [0, 2].map(|n| Client::attach(&socket(&server, n)));
    let target = server.pid().to_string();
    for by_upgrade in [true, false] {
        others.iter_mut().for_each(|other| other.write(1, 0, 7));
        let peer = sealed_client(&server);
        let before = worker(&server);
        if by_upgrade {
            let (status, output, errors) = upgrade_with(&target, &["--check"]);
            assert_eq!(status, Some(1), "{output}{errors}");
            assert!(errors.contains("vm1.sock: its client cannot be recovered"), "{errors}");
            assert!(!errors.contains("vm0.sock") && !errors.contains("vm2.sock"), "{errors}");
            until("the new one's end", || children(server.pid()) == [before]);
            let (status, output, errors) = upgrade(&target, None);
            assert_eq!(status, Some(0), "{errors}");
            assert!(output.contains("warning: vm1.sock: its client"), "{output}");
            until("the old one's end", || has_ended(before));
        } else {
            kill(&server, Signal::KILL);
        }
        server.wait_for_log("vm1.sock: its client cannot be recovered, and is disconnected: ");
        let mut byte = [0];
        until("the end of the client", || peer.region_read(0, 0, &mut byte).is_err());
        for other in &mut others {
            assert_eq!(other.read(1, 0), 7);
        }
        drop(peer);
        Client::attach(&socket(&server, 1)).write(1, 0, 1);
    }
    let (status, output, errors) = upgrade_with(&target, &["--check"]);
    assert_eq!(status, Some(0), "{errors}");
    assert!(output.contains("can recover all clients"), "{output}");
}

/// After a crash and after an upgrade, only the client whose state cannot be decoded is
/// disconnected.
#[test]
fn a_client_with_an_undecodable_state_is_dropped_alone() {
    // Checkpoint items with the state of the second controller, and with the state of its socket.
    for item in ["controller/1", "port/1"] {
        for by_upgrade in [false, true] {
            let fault = format!("undecodable:{item}");
            let mut server = server_with(3, &[], &[("SHADOWBELL_ITEM_FAULT", &fault)]);
            let mut others = [0, 2].map(|n| Client::attach(&socket(&server, n)));
            others.iter_mut().for_each(|other| other.write(1, 0, 7));
            let client = Client::attach(&socket(&server, 1));
            if by_upgrade {
                let (status, output, errors) = upgrade(&server.pid().to_string(), None);
                assert_eq!(status, Some(0), "{errors}");
                assert!(output.contains("warning: vm1.sock: its client"), "{output}");
            } else {
                kill(&server, Signal::KILL);
            }
            server.wait_for_log(
                "vm1.sock: its client cannot be recovered, and is disconnected: cannot decode",
            );
            others.iter_mut().for_each(|other| assert_eq!(other.read(1, 0), 7));
            assert_eq!(log_count(&server, "is disconnected: "), 1, "{}", server.stderr());
            drop(client);
            Client::attach(&socket(&server, 1)).write(1, 0, 1);
            drop(others);
            assert!(server.stop().success(), "{}", server.stderr());
            assert!(!socket(&server, 1).exists());
        }
    }
}

/// The recovery of one client crashes the server process. After three crashes, this client is
/// disconnected, and no other. This also holds if its controller waits for its disks while others
/// are already served.
#[test]
fn a_client_whose_recovery_crashes_is_dropped_alone() {
    for waits in [false, true] {
        // Recovery decodes the item `controller/1` before it opens the disks, and `port/1` only
        // afterwards.
        let fault = if waits { "panic:port/1" } else { "panic:controller/1" };
        let mut server = server_with(3, &[], &[("SHADOWBELL_ITEM_FAULT", fault)]);
        let mut others = [0, 2].map(|n| Client::attach(&socket(&server, n)));
        others.iter_mut().for_each(|other| other.write(1, 0, 7));
        let client = Client::attach(&socket(&server, 1));
        let thief = waits.then(|| Thief::of(server.directory().join("1.img")));
        signal(worker(&server), Signal::KILL);
        if let Some(thief) = thief {
            thief.locked.recv().unwrap();
            server.wait_for_log("warning: vm1.sock: waiting for ");
            others.iter_mut().for_each(|other| assert_eq!(other.read(1, 0), 7));
            thief.release.send(()).unwrap();
        }
        server.wait_for_log(
            "vm1.sock: its client cannot be recovered, and is disconnected: server processes \
             have crashed during its recovery or its first message",
        );
        others.iter_mut().for_each(|other| assert_eq!(other.read(1, 0), 7));
        let log = server.stderr();
        // Four deaths: one by the kill of the test, and three crashes during recovery.
        assert_eq!(log.matches("another process recovers its clients").count(), 4, "{log}");
        assert_eq!(log.matches("is disconnected: ").count(), 1, "{log}");
        assert!(!log.contains("have lost"), "{log}");
        drop(client);
        Client::attach(&socket(&server, 1)).write(1, 0, 1);
        // Further recoveries are not affected.
        kill(&server, Signal::KILL);
        others.iter_mut().for_each(|other| assert_eq!(other.read(1, 0), 7));
        assert_eq!(log_count(&server, "is disconnected: "), 1, "{}", server.stderr());
        drop(others);
        assert!(server.stop().success(), "{}", server.stderr());
    }
}

/// If the check before an upgrade crashes in the new program, the upgrade is refused. Later
/// recoveries disconnect no client.
#[test]
fn a_check_that_crashes_refuses_the_upgrade() {
    let server = server_with(2, &[], &[("SHADOWBELL_ITEM_FAULT", "panic:controller/1")]);
    let mut clients = [0, 1].map(|n| Client::attach(&socket(&server, n)));
    clients.iter_mut().for_each(|client| client.write(1, 0, 7));
    let before = worker(&server);
    for _ in 0..4 {
        let (status, output, errors) = upgrade(&server.pid().to_string(), None);
        assert_eq!(status, Some(1), "{output}{errors}");
        assert!(errors.contains("before it could recover"), "{errors}");
        clients.iter_mut().for_each(|client| assert_eq!(client.read(1, 0), 7));
    }
    assert_eq!(worker(&server), before);
    assert_eq!(log_count(&server, "is disconnected: "), 0, "{}", server.stderr());
}

/// Simulation of another program that waits for the lock of an image, and gets the lock when the
/// server process releases it.
pub(crate) struct Thief {
    pub(crate) locked: std::sync::mpsc::Receiver<()>,
    pub(crate) release: std::sync::mpsc::Sender<()>,
}

impl Thief {
    pub(crate) fn of(image: std::path::PathBuf) -> Self {
        let (lock, locked) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let file = std::fs::OpenOptions::new().read(true).write(true).open(image).unwrap();
            // This type of lock belongs to a process, and conflicts with the lock of the server.
            fcntl_lock(&file, FlockOperation::LockExclusive).unwrap();
            lock.send(()).unwrap();
            let _ = released.recv();
        });
        Self { locked, release }
    }
}

/// Checks that all commands that list controllers show vm1.sock, and the reason why it waits: its
/// image is locked.
fn check_visibility(server: &Server) {
    let lists = |words: &[&str]| crate::control::ctl(server, words).1;
    until("the reason", || {
        let all = lists(&["controllers"]);
        let mut lines = all.lines().filter(|line| line.contains("waits for its disks: "));
        lines.any(|line| line.contains("1.img: another program has it open (`fuser -v "))
    });
    let disks = lists(&["disk", "ls"]);
    assert!(disks.contains("controllers that wait for their disks: 1;"), "{disks}");
    let get = |path: &str| {
        let control = server.directory().join("run/vms/control.sock");
        let mut stream = UnixStream::connect(control).unwrap();
        stream.write_all(crate::control::request("GET", path, "").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split_once("\r\n\r\n").expect(&answer).1.to_owned()
    };
    let id = socket(server, 1).canonicalize().unwrap();
    let sample = format!("shadowbell_controller_waiting{{controller=\"{}\"}} 1", id.display());
    assert!(get("/metrics").lines().any(|line| line == sample), "{sample}");
    let snapshot: serde_json::Value = serde_json::from_str(&get("/v1/snapshot")).unwrap();
    let rows = snapshot["controllers"].as_array().unwrap().clone();
    let waiting: Vec<_> = rows.iter().filter(|row| row["waiting"] == true).collect();
    assert!(rows.len() == 3 && waiting.len() == 1, "{rows:?}");
}

/// Another program has locked the image of one controller. Only this controller waits, also during
/// further crashes and upgrades. It is served when the lock is released.
#[test]
fn a_controller_with_a_locked_image_waits_alone() {
    let mut server = server(3, &[]);
    let mut clients = [0, 1, 2].map(|n| Client::attach(&socket(&server, n)));
    let target = server.pid().to_string();
    for by_upgrade in [false, true] {
        for client in &mut clients {
            client.write(1, 0, 7);
            client.write(2, 0, 8);
        }
        // The buffer is shared before the kill. Afterwards, the message that shares memory would
        // have to wait for the controller.
        let pool = clients[1].parts().1.buffers(1, 4096).unwrap();
        let thief = Thief::of(server.directory().join("1.img"));
        let words = "process: vm1.sock, commands in flight";
        let recovered = log_count(&server, words);
        let mut output = String::new();
        // The kill is repeated until the thief has the lock: on a busy machine, the next server
        // process may be the first to get it.
        until("the lock of the thief", || {
            // In this time, the thief begins to wait for the lock in the kernel. It is also long
            // enough that the supervisor does not detect a crash loop.
            std::thread::sleep(Duration::from_millis(100));
            if by_upgrade {
                let (status, text, errors) = upgrade(&target, None);
                assert_eq!(status, Some(0), "{errors}");
                output = text;
            } else {
                kill(&server, Signal::KILL);
            }
            thief.locked.try_recv().is_ok()
        });
        if by_upgrade {
            assert!(output.contains("warning: vm1.sock waits for its disks"), "{output}");
        }
        let [first, second, third] = &mut clients;
        let read = second.parts().1.namespace(1).unwrap().read(0, 8).unwrap();
        let (queue, _) = second.parts();
        queue.submit(read, pool.take()).unwrap();
        queue.ring().unwrap();
        let mut others_continue = || {
            for other in [&mut *first, &mut *third] {
                assert_eq!((other.read(1, 0), other.read(2, 0)), (7, 8));
            }
        };
        others_continue();
        until("its state", || {
            let all = ctl_json(&server, &["controllers"]);
            let states = all.as_array().unwrap().iter();
            states.filter(|one| one["state"] == "waiting").count() == 1
        });
        assert_eq!(ctl_json(&server, &["status"])["waiting"], 1);
        check_visibility(&server);
        server.wait_for_log("previous process ended (not all: see the warnings above)");
        let (code, _, errors) = crate::control::ctl(&server, &["shutdown"]);
        assert!(code == Some(4) && errors.contains("which waits for its disks"), "{errors}");
        // The process serves for a while, so that its death is not part of a crash loop.
        std::thread::sleep(Duration::from_millis(80));
        kill(&server, Signal::KILL);
        others_continue();
        let (status, output, errors) = upgrade(&target, None);
        assert_eq!(status, Some(0), "{errors}");
        assert!(output.contains("warning: vm1.sock waits for its disks"), "{output}");
        others_continue();
        thief.release.send(()).unwrap();
        assert_eq!(complete(queue).status, shadowbell_spec::Status::SUCCESS);
        until("its recovery", || log_count(&server, words) > recovered);
        let [_, second, _] = &mut clients;
        assert_eq!((second.read(1, 0), second.read(2, 0)), (7, 8));
        assert_eq!(ctl_json(&server, &["status"])["waiting"], 0);
        kill(&server, Signal::KILL);
        for client in &mut clients {
            assert_eq!((client.read(1, 0), client.read(2, 0)), (7, 8));
        }
    }
    assert_no_loss(&server);
    drop(clients);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// Opening the image of one controller hangs. Only this controller waits, and is served when the
/// storage responds again.
#[test]
fn a_controller_with_a_hung_image_waits_alone() {
    let directory = tempfile::tempdir().unwrap();
    let behind = image(directory.path(), "behind", 16 << 20);
    let Some(mount) = Mount::over("hung_storage::fuse_daemon", &behind) else { return };
    let mut text = String::from("workers = 2\n");
    for n in 0..3 {
        let own = image(directory.path(), &format!("{n}.img"), 16 << 20);
        let disk = if n == 1 { mount.path() } else { own };
        text += &format!("[[controller]]\nsocket = \"vm{n}.sock\"\ndisks = [{disk:?}]\n");
    }
    std::fs::write(directory.path().join("vms.toml"), text).unwrap();
    let mut command = program();
    command.args(["serve", "--supervisor", "--config", "vms.toml"]);
    let mut server = Server::spawn(command, directory, &["vm0.sock", "vm2.sock"]);
    let mut clients = [0, 1, 2].map(|n| Client::attach(&socket(&server, n)));
    clients.iter_mut().for_each(|client| client.write(1, 0, 7));
    for by_upgrade in [false, true] {
        let recovered = log_count(&server, "process: vm1.sock, commands in flight");
        let hold = Mount::hold_opens(&behind);
        if by_upgrade {
            let (status, output, errors) = upgrade(&server.pid().to_string(), None);
            assert_eq!(status, Some(0), "{errors}");
            assert!(output.contains("warning: vm1.sock waits for its disks"), "{output}");
        } else {
            signal(worker(&server), Signal::KILL);
        }
        let [first, _, third] = &mut clients;
        for other in [first, third] {
            assert_eq!(server.with_hang_report(|| other.read(1, 0)), 7);
        }
        until("its state", || ctl_json(&server, &["status"])["waiting"] == 1);
        std::fs::remove_file(hold).unwrap();
        let words = "process: vm1.sock, commands in flight";
        until("its recovery", || log_count(&server, words) > recovered);
        assert_eq!(clients[1].read(1, 0), 7);
    }
    assert_no_loss(&server);
    drop(clients);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// The supervisor is stopped for so long that the server process continues without sending it
/// changes. The next server process detects that the supervisor's checkpoint is outdated, and
/// starts without it.
/// A UUID that is derived from the path of an image does not change for a guest that has seen it,
/// even if the image was deleted.
#[test]
fn a_guest_keeps_a_namespace_whose_image_was_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path(), "a.img", 1 << 20);
    let mut command = program();
    command.args(["serve", "a.img", "--socket", "vm0.sock"]);
    let mut server = Server::spawn(command, directory, &["vm0.sock"]);
    let mut client = Client::attach(&socket(&server, 0));
    client.write(1, 0, 7);
    std::fs::remove_file(image).unwrap();
    kill(&server, Signal::KILL);
    assert_eq!(client.read(1, 0), 7);
    assert_eq!(upgrade(&socket(&server, 0).display().to_string(), None).0, Some(0));
    assert_eq!(client.read(1, 0), 7);
    assert_no_loss(&server);
    drop(client);
    assert!(server.stop().success());
}

#[test]
fn an_outdated_checkpoint_is_not_recovered() {
    let server = server(1, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    client.share(200);
    signal(server.pid(), Signal::STOP);
    while log_count(&server, "the supervisor does not accept the checkpoint") == 0 {
        client.replace_shared(0, 100);
    }
    signal(worker(&server), Signal::KILL);
    signal(server.pid(), Signal::CONT);
    server.wait_for_log("the checkpoint is outdated");
    server.wait_for_log("have lost their controllers");
    assert_eq!(log_count(&server, "has recovered the clients"), 0, "{}", server.stderr());
    drop(client);
    until("another one", || UnixStream::connect(socket(&server, 0)).is_ok());
    Client::attach(&socket(&server, 0)).write(2, 0, 1);
}

/// Clients send requests in a loop while the server process is killed at arbitrary times. Each
/// request is answered exactly once. Some of the requests change the controller's state, and some
/// replies contain descriptors.
#[test]
fn each_request_is_answered_once_across_kills() {
    const AQA: u64 = 0x24;
    let server = server(4, &[]);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let peers: Vec<_> = (0..4)
            .map(|n| {
                let (path, over) = (socket(&server, n), &over);
                scope.spawn(move || {
                    let timeout = Some(LIMIT);
                    let peer = Peer::connect(path, Options { timeout }).unwrap();
                    let mut asked = 0_u32;
                    while !over.load(Ordering::Relaxed) {
                        let mut read = [0; 4];
                        let before = ((asked / 16) & 0xfff).to_le_bytes();
                        peer.region_read(0, AQA, &mut read).map(|()| assert_eq!(read, before))?;
                        asked += 1;
                        if asked.is_multiple_of(16) {
                            peer.region_write(0, AQA, &((asked / 16) & 0xfff).to_le_bytes())?;
                        }
                        if asked % 64 == 1 {
                            peer.region_info(0)?;
                        }
                    }
                    Ok::<_, shadowbell_vfio_user::client::ClientError>(asked)
                })
            })
            .collect();
        for n in 0..40 {
            // The time before a kill is arbitrary, but long enough that the kills are not a crash
            // loop.
            std::thread::sleep(Duration::from_millis(60 + n % 7));
            if peers.iter().any(std::thread::ScopedJoinHandle::is_finished) {
                break;
            }
            kill(&server, Signal::KILL);
        }
        over.store(true, Ordering::Relaxed);
        for peer in peers {
            let asked = peer.join().unwrap().expect("an answer");
            assert!(asked > 0, "no request");
        }
    });
    assert_no_loss(&server);
}
