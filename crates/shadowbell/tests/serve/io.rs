//! I/O on disks that store data.

use crate::harness::{Server, attach, complete, image, run};
use shadowbell_driver::{AttachOptions, Doorbells, SpinPolicy};
use shadowbell_spec::Status;
use shadowbell_testing::wait::{deadline, short_pause};
use std::os::unix::fs::FileExt;
use std::time::Instant;

#[test]
fn file_and_memory_disks_store_written_data() {
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path(), "disk.img", 8 << 20);
    let mut server = Server::start_in(directory, &["disk.img", "mem:16MiB?block-size=4096"], &[]);
    let mut controller = server.attach();
    assert_eq!(controller.doorbells(), Doorbells::Shadow);
    assert_eq!(controller.namespaces().len(), 2);
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(4, 65536).unwrap();
    for (nsid, block) in [(1, 512), (2, 4096)] {
        let namespace = controller.namespace(nsid).unwrap().clone();
        assert_eq!(namespace.block_size(), block);
        let blocks = 65536 / block;
        let mut buffer = pool.take().unwrap();
        buffer.fill(0xa0 + nsid as u8);
        let done = run(&mut queue, namespace.write(7, blocks).unwrap(), Some(buffer));
        assert_eq!(done.status, Status::SUCCESS);
        drop(done);
        let buffer = pool.take().unwrap();
        let done = run(&mut queue, namespace.read(7, blocks).unwrap(), Some(buffer));
        assert_eq!(done.status, Status::SUCCESS);
        assert!(done.buffer.unwrap().to_vec(65536).iter().all(|b| *b == 0xa0 + nsid as u8));
        assert_eq!(run(&mut queue, namespace.flush(), None).status, Status::SUCCESS);
    }
    drop(queue);
    controller.detach().unwrap();
    assert!(server.stop().success());
    let mut bytes = vec![0; 65536];
    std::fs::File::open(path).unwrap().read_exact_at(&mut bytes, 7 * 512).unwrap();
    assert!(bytes.iter().all(|b| *b == 0xa1));
    assert!(!server.socket().exists(), "the socket is removed");
}

#[test]
fn every_kind_of_doorbell_works() {
    for (option, expected) in
        [("shadow", Doorbells::Shadow), ("mmio", Doorbells::Mmio), ("mapped", Doorbells::Mapped)]
    {
        let server = Server::start(&["mem:4MiB"], &["--doorbells", option]);
        let mut controller = server.attach();
        assert_eq!(controller.doorbells(), expected, "{option}");
        let namespace = controller.namespace(1).unwrap().clone();
        let mut queue = controller.take_queue_pair().unwrap();
        let pool = controller.buffers(16, 4096).unwrap();
        // There are more commands than queue entries, so the queue wraps.
        for round in 0u64..40 {
            for n in 0..8 {
                let mut buffer = pool.take().unwrap();
                assert!(buffer.copy_from(0, &(round * 8 + n).to_le_bytes()));
                queue.submit(namespace.write(n * 8, 8).unwrap(), Some(buffer)).unwrap();
            }
            queue.ring().unwrap();
            for _ in 0..8 {
                assert_eq!(complete(&mut queue).status, Status::SUCCESS);
            }
        }
        let buffer = pool.take().unwrap();
        let done = run(&mut queue, namespace.read(56, 8).unwrap(), Some(buffer));
        assert_eq!(done.buffer.unwrap().to_vec(8), (39u64 * 8 + 7).to_le_bytes());
    }
}

#[test]
fn options_reach_the_controller() {
    let server = Server::start(
        &["mem:4MiB"],
        &[
            "--queues",
            "3",
            "--queue-entries",
            "64",
            "--serial",
            "S1",
            "--model",
            "A model",
            "--no-shadow-doorbells",
            "--max-transfer",
            "2MiB",
            "--read-only",
        ],
    );
    let options = AttachOptions {
        queue_pairs: 8,
        queue_depth: 1024,
        max_transfer_bytes: 1 << 24,
        ..AttachOptions::default()
    };
    let controller = attach(&server.socket(), &options);
    assert_eq!(controller.queue_pairs(), 3);
    assert_eq!(controller.queue_depth(), 64);
    assert_eq!(controller.doorbells(), Doorbells::Mmio);
    assert_eq!(controller.max_transfer_bytes(), 2 << 20);
    assert!(controller.namespace(1).unwrap().is_read_only());
    let identity = controller.identity();
    assert_eq!(identity.sn.as_slice().trim_ascii_end(), b"S1");
    assert_eq!(identity.mn.as_slice().trim_ascii_end(), b"A model");
}

#[test]
fn a_disk_keeps_uuid_and_serial_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "disk.img", 1 << 20);
    let disk = directory.path().join("disk.img");
    let socket = directory.path().join("vm.sock");
    let identity = |disk: &str| {
        let mut command = crate::harness::program();
        command.args(["serve", disk, "--socket"]).arg(&socket);
        let other = tempfile::tempdir().unwrap();
        let mut server = Server::spawn(command, other, &[socket.to_str().unwrap()]);
        let controller = attach(&socket, &AttachOptions::default());
        let found = (controller.namespace(1).unwrap().uuid().unwrap(), controller.identity().sn);
        controller.detach().unwrap();
        assert!(server.stop().success());
        found
    };
    let before = identity(disk.to_str().unwrap());
    assert_eq!(identity(&format!("file:{}", disk.display())), before);
    assert_ne!(identity("mem:1MiB"), before);
}

#[test]
fn a_sleeping_driver_gets_an_error_when_the_server_dies() {
    let mut server = Server::start(&["mem:4MiB"], &["--no-supervisor"]);
    let options = AttachOptions { spin: SpinPolicy::SLEEP, ..AttachOptions::default() };
    let mut controller = server.attach_with(&options);
    let mut queue = controller.take_queue_pair().unwrap();
    let flush = controller.namespace(1).unwrap().flush();
    assert_eq!(run(&mut queue, flush, None).status, Status::SUCCESS);
    let pid = server.pid();
    let killer = std::thread::spawn(move || {
        short_pause();
        let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    });
    let deadline = deadline();
    let error = loop {
        match queue.wait(Some(deadline)) {
            Ok(_) => assert!(Instant::now() < deadline, "the loss of the server is not seen"),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("lost the connection"), "{error}");
    killer.join().unwrap();
    // Later submissions fail with the same error.
    let error = queue.submit(flush, None).unwrap_err().reason.to_string();
    assert!(error.contains("lost the connection"), "{error}");
    assert!(queue.wait(Some(deadline)).is_err());
    server.wait();
}
