//! Tests of a log that a client floods, and of a log whose pipe is not read.

use crate::harness::{Server, attach, image, program, run};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use shadowbell_driver::AttachOptions;
use shadowbell_spec::Status;
use shadowbell_testing::wait::LIMIT;
use shadowbell_vfio_user::Client;
use shadowbell_vfio_user::client::{DmaRange, Options};
use std::io::{PipeReader, PipeWriter};
use std::process::Command;
use std::time::Instant;
use tempfile::TempDir;

/// Text that is in the log line of each refused map.
const REFUSED: &str = "which is no multiple of 4096";

/// Command of a server with two controllers, one for an honest client and one for a hostile one.
fn command() -> (Command, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("both.toml");
    let text = "workers = 1\n\
                [[controller]]\nsocket = \"good.sock\"\ndisks = [\"mem:1MiB\"]\n\
                [[controller]]\nsocket = \"bad.sock\"\ndisks = [\"mem:1MiB\"]\n";
    std::fs::write(&config, text).unwrap();
    let mut command = program();
    command.arg("serve").arg("--config").arg(&config);
    (command, directory)
}

/// Sends `maps` invalid maps, each of which logs a line.
fn send_invalid_maps(client: &Client, maps: u64) {
    for _ in 0..maps {
        let share =
            DmaRange { iova: 1, len: 4096, readable: true, writable: true, fd: None, fd_offset: 0 };
        client.dma_map(&share).unwrap_err();
    }
}

fn connect_bad(server: &Server) -> Client {
    let options = Options { timeout: Some(LIMIT) };
    Client::connect(server.directory().join("bad.sock"), options).unwrap()
}

/// Creates a pipe whose buffer is full.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    let flags = fcntl_getfl(&writer).unwrap();
    fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&writer, &[b'x'; 512]).is_ok() {}
    fcntl_setfl(&writer, flags).unwrap();
    (reader, writer)
}

#[test]
fn a_stalled_log_reader_does_not_block_io() {
    let (mut command, directory) = command();
    let (_reader, writer) = full_pipe();
    command.stdout(writer.try_clone().unwrap()).stderr(writer);
    let mut server = Server::spawn_to(command, directory, &["good.sock", "bad.sock"]);
    let client = connect_bad(&server);
    // The client causes more log lines than the log's queue holds.
    send_invalid_maps(&client, 5000);
    let good = server.directory().join("good.sock");
    let mut controller = attach(&good, &AttachOptions::default());
    let namespace = controller.namespace(1).unwrap().clone();
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(1, 4096).unwrap();
    let read = run(&mut queue, namespace.read(0, 1).unwrap(), pool.take());
    assert_eq!(read.status, Status::SUCCESS);
    controller.registers().unwrap();
    // SIGUSR1 makes the signal thread log the counters. The full pipe must not block this thread.
    server.signal(rustix::process::Signal::USR1);
    send_invalid_maps(&client, 10);
    drop((read, queue, pool));
    controller.detach().unwrap();
    assert!(server.stop().success());
}

#[test]
fn an_unread_error_message_does_not_keep_the_server_alive() {
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path(), "disk.img", 1 << 20);
    let mut command = program();
    command.args(["serve", "disk.img", "--socket", "vm.sock"]);
    let (_reader, writer) = full_pipe();
    command.stdout(writer.try_clone().unwrap()).stderr(writer);
    let mut server = Server::spawn_to(command, directory, &["vm.sock"]);
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
    assert_eq!(server.stop().code(), Some(1));
}

#[test]
fn log_lines_caused_by_a_client_are_rate_limited() {
    let (command, directory) = command();
    let mut server = Server::spawn(command, directory, &["good.sock", "bad.sock"]);
    let begun = Instant::now();
    let client = connect_bad(&server);
    send_invalid_maps(&client, 40_000);
    drop(client);
    assert!(server.stop().success());
    let printed = server.stderr();
    assert!(printed.ends_with("ended\n"), "{printed}");
    // Rate limit of these lines: 16 at once, and then one line every ten seconds. That line
    // contains the number of suppressed lines.
    let most = 16 + begun.elapsed().as_secs() as usize / 10 + 1;
    let lines = printed.lines().filter(|line| line.contains(REFUSED)).count();
    assert!((16..=most).contains(&lines), "{lines} lines, of {most}");
}
