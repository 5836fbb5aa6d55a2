//! Upgrades of servers with disks that the next process has to open again.

use crate::disk_recovery::{Export, is_consistent, supervisor};
use crate::harness::{Server, image, until};
use crate::recover::assert_no_loss;
use crate::supervisor::worker;
use crate::upgrade::{Client, Load, fake, fake_worker_script, upgrade};
use shadowbell_disk_qcow2::create;

/// Replaces the server process several times under a verifying load.
fn replaced(server: &mut Server) {
    let load = Load::at(&server.socket(), 1);
    until("the load's queue", || server.stderr().contains("I/O queue"));
    let socket = server.socket().display().to_string();
    for _ in 0..3 {
        let before = worker(server);
        let (status, output, errors) = upgrade(&socket, None);
        assert_eq!(status, Some(0), "{output}{errors}\n{}", server.stderr());
        assert!(output.contains("serves"), "{output}");
        assert_ne!(worker(server), before);
    }
    load.assert_no_loss();
    assert_no_loss(server);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn a_server_with_a_qcow2_image_is_upgraded_under_load() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    create(&path, 16 << 20).unwrap();
    replaced(&mut Server::start(&[path.to_str().unwrap(), "mem:1MiB"], &["--supervisor"]));
    is_consistent(&path);
}

#[test]
fn a_server_with_an_nbd_disk_is_upgraded_under_load() {
    let directory = tempfile::tempdir().unwrap();
    let file = image(directory.path(), "disk.img", 16 << 20);
    let below = Export::start(file.to_str().unwrap());
    replaced(&mut supervisor(&below.uri("&settle=50ms")));
}

/// An upgrade with an NBD disk needs no settle time: when the old process has quiesced, the server
/// has answered all its requests.
#[test]
fn an_nbd_disk_without_settle_is_upgraded_under_load() {
    let directory = tempfile::tempdir().unwrap();
    let file = image(directory.path(), "disk.img", 16 << 20);
    let below = Export::start(file.to_str().unwrap());
    replaced(&mut supervisor(&below.uri("")));
}

#[test]
fn a_server_with_a_stacked_disk_is_upgraded_under_load() {
    let directory = tempfile::tempdir().unwrap();
    let file = image(directory.path(), "disk.img", 16 << 20);
    let below = Server::start(&[file.to_str().unwrap()], &[]);
    replaced(&mut supervisor(&format!("vfio-user:{}/1", below.socket().display())));
}

/// If a new program starts but cannot recover, the old program continues.
#[test]
fn the_old_program_continues_if_the_new_one_cannot_recover() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    create(&path, 16 << 20).unwrap();
    let mut server = Server::start(&[path.to_str().unwrap()], &["--supervisor"]);
    let mut client = Client::attach(&server.socket());
    client.write(1, 0, 7);
    let socket = server.socket().display().to_string();
    for _ in 0..2 {
        let program = fake(&server, &fake_worker_script("PK,ends"));
        let before = worker(&server);
        let (status, output, errors) = upgrade(&socket, Some(&program));
        assert_eq!(status, Some(1), "{output}{errors}");
        assert!(errors.contains("was ended by signal 6"), "{errors}");
        assert!(errors.contains("the previous program recovers the clients"), "{errors}");
        until("the one before", || server.stderr().contains("has recovered the clients, "));
        assert_eq!(client.read(1, 0), 7);
        client.write(1, 8, 8);
        assert_ne!(worker(&server), before);
    }
    // The server can still be upgraded to a working program.
    let (status, output, errors) = upgrade(&socket, None);
    assert_eq!(status, Some(0), "{output}{errors}");
    assert_eq!((client.read(1, 0), client.read(1, 8)), (7, 8));
    assert_no_loss(&server);
    drop(client);
    assert!(server.stop().success(), "{}", server.stderr());
    is_consistent(&path);
}

/// If the new program does not start, the old process continues to serve its clients.
#[test]
fn a_program_that_does_not_start_leaves_the_process_running() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    create(&path, 16 << 20).unwrap();
    let server = Server::start(&[path.to_str().unwrap()], &["--supervisor"]);
    let before = worker(&server);
    let program = fake(&server, "exit 3");
    let (status, _, errors) = upgrade(&server.socket().display().to_string(), Some(&program));
    assert_eq!(status, Some(1), "{errors}");
    assert_eq!(worker(&server), before);
}
