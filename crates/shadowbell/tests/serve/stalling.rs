//! Two clients of one server. The memory and eventfds of the first client are files of a hung file
//! system. The server must serve the second client without delay.

use crate::harness::{Server, attach, program, run};
use shadowbell_driver::AttachOptions;
use shadowbell_spec::Status;
use shadowbell_testing::stalled::{Mount, run_daemon_if_requested};
use shadowbell_testing::wait::LIMIT;
use shadowbell_vfio_user::client::{ClientError, DmaRange, Options};
use shadowbell_vfio_user::device::irq;
use shadowbell_vfio_user::{Client, Errno};
use std::os::fd::AsFd;

#[test]
fn fuse_daemon() {
    run_daemon_if_requested();
}

#[test]
fn io_continues_beside_a_client_with_hung_memory() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("both.toml");
    std::fs::write(
        &config,
        "workers = 1\n\
         [[controller]]\nsocket = \"good.sock\"\ndisks = [\"mem:1MiB\"]\n\
         [[controller]]\nsocket = \"bad.sock\"\ndisks = [\"mem:1MiB\"]\n",
    )
    .unwrap();
    let mut command = program();
    command.arg("serve").arg("--config").arg(&config);
    let mut server = Server::spawn(command, directory, &["good.sock", "bad.sock"]);
    let Some(mount) = Mount::new("stalling::fuse_daemon") else { return };
    // Closing the file in this process would block as well.
    let file = std::mem::ManuallyDrop::new(mount.open());

    let good = server.directory().join("good.sock");
    let mut controller = attach(&good, &AttachOptions::default());
    let namespace = controller.namespace(1).unwrap().clone();
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(1, 4096).unwrap();
    let mut check = |value: u8| {
        let mut buffer = pool.take().unwrap();
        assert!(buffer.copy_from(0, &[value; 4096]));
        let written = run(&mut queue, namespace.write(0, 1).unwrap(), Some(buffer));
        assert_eq!(written.status, Status::SUCCESS);
        drop(written);
        let read = run(&mut queue, namespace.read(0, 1).unwrap(), pool.take());
        assert_eq!(read.status, Status::SUCCESS);
        let mut data = [0; 4096];
        assert!(read.buffer.unwrap().copy_to(0, &mut data));
        assert_eq!(data, [value; 4096]);
        // The reactor still works: it handles reads of registers.
        controller.registers().unwrap();
    };
    check(1);
    let bad = server.directory().join("bad.sock");
    let client = Client::connect(bad, Options { timeout: Some(LIMIT) }).unwrap();
    let fd = Some(file.as_fd());
    let share = DmaRange { iova: 0, len: 4096, readable: true, writable: true, fd, fd_offset: 0 };
    let inval = |outcome| match outcome {
        Err(ClientError::Refused { errno, .. }) => assert_eq!(errno, Errno::INVAL),
        other => panic!("{other:?}"),
    };
    for value in 2..6 {
        inval(client.dma_map(&share));
        check(value);
        inval(client.set_irq_eventfds(irq::MSIX, 0, &[file.as_fd()]));
        check(value);
    }
    assert!(server.stderr().contains("file system type fuse"), "{}", server.stderr());
    drop(client);
    check(6);
    drop((queue, controller));
    // While the file system hung, the server could not close its descriptors. They are closed when
    // the file system's daemon is dead, so the server can end.
    drop(mount);
    assert!(server.stop().success());
}
