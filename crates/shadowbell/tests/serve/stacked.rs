//! Stacked controllers: the disk is a namespace of a controller that another server serves.

use crate::control::ctl_json;
use crate::harness::{Server, finish, program, run, until};
use shadowbell_driver::{AttachOptions, Controller, QueuePair};
use shadowbell_spec::Status;

fn ssd(disk: &str) -> (Server, String) {
    let server = Server::start(&[disk], &[]);
    let uri = format!("vfio-user:{}/1", server.socket().display());
    (server, uri)
}

fn attach(server: &Server) -> (Controller, QueuePair) {
    let mut controller = server.attach();
    let queue = controller.take_queue_pair().unwrap();
    (controller, queue)
}

#[test]
fn every_command_reaches_the_other_controller() {
    for options in ["", "?zero-copy=off"] {
        let (mut below, uri) = ssd("mem:64MiB");
        let mut server = Server::start(&[&format!("{uri}{options}")], &["-v"]);
        let (controller, mut queue) = attach(&server);
        let namespace = controller.namespace(1).unwrap().clone();
        assert_eq!(namespace.bytes(), 64 << 20);
        let len = 512 << 10;
        let pool = controller.buffers(2, len).unwrap();
        let mut buffer = pool.take().unwrap();
        let data: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        assert!(buffer.copy_from(0, &data));
        let mut ok = |command, buffer| {
            let done = run(&mut queue, command, buffer);
            assert_eq!(done.status, Status::SUCCESS);
            done.buffer
        };
        let buffer = ok(namespace.write(1000, 1024).unwrap(), Some(buffer));
        ok(namespace.compare(1000, 1024).unwrap(), buffer);
        ok(namespace.flush(), None);
        ok(namespace.write_zeroes(1001, 1, false).unwrap(), None);
        let mut ranges = pool.take().unwrap();
        // The range has attributes, length in blocks, and first block (NVM 1.1, "Dataset
        // Management").
        let range = [&0u32.to_le_bytes()[..], &1u32.to_le_bytes(), &1003u64.to_le_bytes()].concat();
        assert!(ranges.copy_from(0, &range));
        ok(namespace.deallocate(1).unwrap(), Some(ranges));
        let read = ok(namespace.read(1000, 1024).unwrap(), pool.take()).unwrap().to_vec(len);
        let mut expected = data;
        expected[512..1024].fill(0);
        expected[1536..2048].fill(0);
        assert!(read == expected);
        drop((queue, pool));
        controller.detach().unwrap();
        // With zero copy, the lower server accesses the guest's memory directly, which the log
        // says.
        assert_eq!(server.stderr().contains("accesses guest memory directly"), options.is_empty());
        // What the guest wrote is on the lower server's disk after the upper server has ended.
        assert!(server.stop().success());
        let (controller, mut queue) = attach(&below);
        let pool = controller.buffers(1, len).unwrap();
        let namespace = controller.namespace(1).unwrap();
        let read = run(&mut queue, namespace.read(1000, 1024).unwrap(), pool.take());
        assert!(read.buffer.unwrap().to_vec(len) == expected);
        drop((queue, pool));
        controller.detach().unwrap();
        assert!(below.stop().success());
    }
}

#[test]
fn a_dead_lower_controller_gives_the_guest_an_error() {
    let (below, uri) = ssd("mem:64MiB");
    let mut server = Server::start(&[&uri, "mem:1MiB"], &[]);
    let (controller, mut queue) = attach(&server);
    let (gone, there) =
        (controller.namespace(1).unwrap().clone(), controller.namespace(2).unwrap().clone());
    let pool = controller.buffers(1, 4096).unwrap();
    let read = gone.read(0, 8).unwrap();
    assert_eq!(run(&mut queue, read, pool.take()).status, Status::SUCCESS);
    drop(below);
    until("an error", || !run(&mut queue, read, pool.take()).status.is_success());
    assert!(!run(&mut queue, gone.flush(), None).status.is_success());
    let fine = run(&mut queue, there.read(0, 8).unwrap(), pool.take()).status;
    assert_eq!(fine, Status::SUCCESS, "the other namespace still works");
    drop((queue, pool));
    controller.detach().unwrap();
    // The state is the same for a guest that attaches again, and the server ends on a signal.
    let (controller, mut queue) = attach(&server);
    let pool = controller.buffers(1, 4096).unwrap();
    assert!(!run(&mut queue, read, pool.take()).status.is_success());
    drop((queue, pool));
    controller.detach().unwrap();
    server.stop();
}

/// A controller whose disk is a namespace of another controller gets an I/O thread of its own,
/// unless the configuration assigns one. The reason: a lower controller that hangs blocks the
/// thread for ten seconds at a time, and other controllers must not wait meanwhile.
#[test]
fn a_disk_of_another_controller_is_served_by_a_thread_of_its_own() {
    let (below, other_below) = (ssd("mem:1MiB"), ssd("mem:1MiB"));
    let directory = tempfile::tempdir().unwrap();
    let table = |n: usize, rest: &str| {
        format!("[[controller]]\nid = \"vm{n}\"\nsocket = \"vm{n}.sock\"\ndisks = [{rest}\n")
    };
    let config = [
        "workers = 1\n".to_owned(),
        table(0, "\"mem:1MiB\"]"),
        table(1, &format!("\"mem:1MiB\", \"{}\"]", below.1)),
        table(2, &format!("\"{}\"]\nworker = 0", other_below.1)),
        table(3, "\"mem:1MiB\"]"),
    ];
    std::fs::write(directory.path().join("vms.toml"), config.concat()).unwrap();
    let mut command = program();
    command.args(["serve", "--config", "vms.toml", "--name", "vm"]);
    let mut server = Server::spawn(command, directory, &["vm0.sock", "vm3.sock"]);
    let guests = [0, 1, 2, 3].map(|n| {
        let path = server.directory().join(format!("vm{n}.sock"));
        let options = AttachOptions { queue_pairs: 1, ..AttachOptions::default() };
        let mut guest = crate::harness::attach(&path, &options);
        let mut queue = guest.take_queue_pair().unwrap();
        let pool = guest.buffers(1, 4096).unwrap();
        let read = guest.namespace(1).unwrap().read(0, 8).unwrap();
        assert_eq!(run(&mut queue, read, pool.take()).status, Status::SUCCESS);
        (guest, queue)
    });
    let workers = || {
        let stats = ctl_json(&server, &["stats"]);
        [0, 1, 2, 3].map(|n| stats["controllers"][n]["workers"][0]["worker"].clone())
    };
    assert_eq!(workers(), [0, 1, 0, 0]);
    // If an NVMe disk is attached later to a controller, the controller moves to an I/O thread of
    // its own.
    let third = ssd("mem:1MiB");
    ctl_json(&server, &["namespace", "attach", "vm3", "2", &third.1]);
    until("vm3 has moved", || workers() == [0, 1, 0, 2]);
    drop(guests);
    assert!(server.stop().success());
}

#[test]
fn a_read_only_stacked_disk_is_read_only_for_the_guest() {
    let (_below, uri) = ssd("mem:1MiB");
    let server = Server::start(&[&uri], &["--read-only"]);
    let controller = server.attach_with(&AttachOptions::default());
    assert!(controller.namespace(1).unwrap().is_read_only());
}

#[test]
fn a_missing_lower_controller_is_refused_as_bad_input() {
    let (_below, uri) = ssd("mem:1MiB");
    let directory = tempfile::tempdir().unwrap();
    let other = uri.strip_suffix("/1").unwrap().to_owned() + "/2";
    for (disk, words, expected) in [
        // The socket may exist later, so the exit status is 1: a systemd unit restarts the service.
        ("vfio-user:/nonexistent/ssd.sock/1", "no controller behind /nonexistent/ssd.sock", 1),
        (other.as_str(), "there is no namespace 2", 2),
        ("nvme://0000:ff:1f.7/1", "0000:ff:1f.7", 2),
    ] {
        let mut command = program();
        command.args(["serve", disk, "--socket"]).arg(directory.path().join("vm.sock"));
        let (status, _, errors) = finish(command);
        assert_eq!(status, Some(expected), "{disk}: {errors}");
        assert!(errors.contains(words), "{disk}: {errors}");
    }
}
