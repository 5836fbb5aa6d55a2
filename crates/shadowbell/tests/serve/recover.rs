//! A server whose process is killed, and whose clients notice nothing.

use crate::disk_kinds::Export;
use crate::harness::{Server, finish, program, until};
use crate::keeper::{children, has_ended, signal, worker};
use crate::upgrade::{Client, Load, server, socket, upgrade};
use rustix::process::Signal;
use shadowbell_testing::wait::LIMIT;
use shadowbell_vfio_user::client::{Client as Peer, Options};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Kills the worker, and returns when another one serves.
pub(crate) fn kill(server: &Server, how: Signal) -> u32 {
    let before = worker(server);
    let deaths = said(server, "goes on with the clients");
    signal(before, how);
    until("another worker", || said(server, "goes on with the clients") > deaths);
    let now = worker(server);
    assert_ne!(now, before);
    now
}

fn said(server: &Server, words: &str) -> usize {
    server.stderr().matches(words).count()
}

pub(crate) fn lost_nothing(server: &Server) {
    let log = server.stderr();
    assert!(!log.contains("have lost"), "{log}");
}

#[test]
fn a_verifying_load_goes_on_through_twenty_kills() {
    let mut server = server(4, &["--stats-socket", "top.sock"]);
    let mut client = Client::attach(&socket(&server, 2));
    client.write(1, 0, 1);
    client.write(2, 0, 2);
    let loads = [(0, 1), (1, 2), (3, 1)];
    let loads = loads.map(|(controller, nsid)| Load::start(&server, controller, nsid));
    until("the loads' clients", || said(&server, "a client is attached") >= 4);
    for n in 0..20_u8 {
        // Load time of each server process.
        std::thread::sleep(Duration::from_millis(100));
        kill(&server, Signal::KILL);
        assert_eq!((client.read(1, 0), client.read(2, 0)), (n + 1, n + 2));
        client.write(1, 0, n + 2);
        client.write(2, 0, n + 3);
    }
    loads.into_iter().for_each(Load::lost_nothing);
    lost_nothing(&server);
    drop(client);
    // Whoever comes later comes to the last of them, and so does who upgrades.
    let (status, _, errors) = upgrade(&server.pid().to_string(), None);
    assert_eq!(status, Some(0), "{errors}");
    until("the old one's end", || children(server.pid()).len() == 1);
    assert_eq!(Client::attach(&socket(&server, 2)).read(1, 0), 21);
    let mut top = program();
    top.arg("top").arg(server.directory().join("top.sock")).args(["--json", "--count", "2"]);
    top.args(["--interval", "50ms"]);
    let (status, output, errors) = finish(top);
    assert!(status == Some(0) && output.contains("vm2.sock"), "{errors}");
    assert!(server.stop().success(), "{}", server.stderr());
    assert!((0..4).all(|n| !socket(&server, n).exists()));
}

/// A client that shares its memory in many pieces: these are not in each record, and there after a
/// death, an upgrade, and a death after that, but for those that were taken back.
#[test]
fn memory_in_many_pieces_is_there_in_the_next_process() {
    let mut server = server(1, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    client.share(200);
    let maps = || std::fs::read_to_string(format!("/proc/{}/maps", worker(&server))).unwrap();
    assert!(maps().contains("client-ranges"), "{}", maps());
    // What the keeper has of it, who hears of it a moment later.
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
        client.share_anew(usize::from(n) * 20, 10);
    }
    lost_nothing(&server);
    // The keeper has let go of what the client has taken back, and then of all of it.
    until("as many as before", || held() <= most);
    drop(client);
    until("none", || held() == 0);
    kill(&server, Signal::KILL);
    Client::attach(&socket(&server, 0)).write(1, 0, 1);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// Of any signal, after an upgrade, and with nobody there.
#[test]
fn whatever_kills_it_and_whoever_it_is() {
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
    lost_nothing(&server);
    drop(client);
    kill(&server, Signal::KILL);
    Client::attach(&socket(&server, 0)).write(1, 0, 1);
    assert!(server.stop().success(), "{}", server.stderr());
    assert!(!socket(&server, 0).exists());
}

/// Where a controller is served was said in the file; the next process says so again.
#[test]
fn a_controller_that_has_its_worker_keeps_it() {
    let directory = tempfile::tempdir().unwrap();
    let table = |n, worker| {
        format!(
            "[[controller]]\nsocket = \"vm{n}.sock\"\ndisks = [\"mem:1MiB\"]\nworker = {worker}\n"
        )
    };
    let text = format!("workers = 2\n{}{}", table(0, "\"own\""), table(1, "1"));
    std::fs::write(directory.path().join("vms.toml"), text).unwrap();
    let mut command = program();
    command.args(["serve", "--keeper", "--config", "vms.toml"]);
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
    lost_nothing(&server);
    drop(clients);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn who_goes_on_may_be_killed_on_the_way() {
    let server = server(2, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    client.write(1, 0, 7);
    client.write(2, 0, 8);
    for wait in [0, 5, 10, 20, 40] {
        let before = worker(&server);
        let deaths = said(&server, "goes on with the clients");
        signal(before, Signal::KILL);
        until("the next one", || children(server.pid()).iter().any(|pid| *pid != before));
        let next = worker(&server);
        // Random moment of the recovery.
        std::thread::sleep(Duration::from_millis(wait));
        if said(&server, "goes on with the clients") == deaths && !has_ended(next) {
            signal(next, Signal::KILL);
        }
        until("one that goes on", || said(&server, "goes on with the clients") > deaths);
        assert_eq!((client.read(1, 0), client.read(2, 0)), (7, 8), "after {wait} ms");
        // Nothing of this counts as a crash loop.
        std::thread::sleep(Duration::from_millis(60));
    }
    lost_nothing(&server);
}

/// The next process has another configuration: it says why it does not go on, and begins anew.
#[test]
fn who_can_not_go_on_says_why_and_begins_anew() {
    let server = server(1, &[]);
    let client = Client::attach(&socket(&server, 0));
    let file = server.directory().join("vms.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("mem:16MiB", "mem:8MiB")).unwrap();
    let before = worker(&server);
    signal(before, Signal::KILL);
    server.says("is to serve 0.img, mem:8MiB at ");
    server.says("have lost their controllers");
    drop(client);
    until("another one's socket", || {
        !children(server.pid()).contains(&before) && UnixStream::connect(socket(&server, 0)).is_ok()
    });
    Client::attach(&socket(&server, 0)).write(2, 0, 1);
}

#[test]
fn what_nobody_can_go_on_with_is_said() {
    let below = Export::start("mem:4MiB");
    let server = Server::start(&[&below.uri("")], &["--keeper"]);
    server.says("can not be gone on with if the server dies: an NBD server may carry out a write");
    signal(worker(&server), Signal::KILL);
    server.says("have lost their controllers");
}

/// A keeper that stands still for so long that the worker gives it up. It never hears that what it
/// holds is old; the next worker knows it all the same, and begins anew.
#[test]
fn what_a_keeper_missed_is_not_gone_on_with() {
    let server = server(1, &[]);
    let mut client = Client::attach(&socket(&server, 0));
    client.share(200);
    signal(server.pid(), Signal::STOP);
    while said(&server, "the keeper does not take what it is to hold") == 0 {
        client.share_anew(0, 100);
    }
    signal(worker(&server), Signal::KILL);
    signal(server.pid(), Signal::CONT);
    server.says("what the keeper holds is old");
    server.says("have lost their controllers");
    assert_eq!(said(&server, "goes on with the clients"), 0, "{}", server.stderr());
    drop(client);
    until("another one", || UnixStream::connect(socket(&server, 0)).is_ok());
    Client::attach(&socket(&server, 0)).write(2, 0, 1);
}

/// Clients that do nothing but ask: whatever the worker is at when it is killed, each request is
/// answered, and once. Some change the controller, and some are answered with descriptors.
#[test]
fn each_request_is_answered_once_whenever_the_worker_is_killed() {
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
            // Random moment, late enough that the death does not count towards a crash loop.
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
    lost_nothing(&server);
}
