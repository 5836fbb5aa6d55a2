//! The log under a client that fills it, with a reader that stands still.

use crate::harness::{Server, attach, image, program, run};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use shadowbell_driver::AttachOptions;
use shadowbell_spec::Status;
use shadowbell_testing::wait::LIMIT;
use shadowbell_vfio_user::Client;
use shadowbell_vfio_user::client::{Options, Share};
use std::io::{PipeReader, PipeWriter};
use std::process::Command;
use std::time::Instant;
use tempfile::TempDir;

/// What the server says of each map that it refuses.
const REFUSED: &str = "which is no multiple of 4096";

/// A server with two controllers, one for an honest client and one for another.
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

/// Has so many maps refused, each of which is a line of the log.
fn refused(client: &Client, maps: u64) {
    for _ in 0..maps {
        let share =
            Share { iova: 1, len: 4096, readable: true, writable: true, fd: None, fd_offset: 0 };
        client.dma_map(&share).unwrap_err();
    }
}

fn bad(server: &Server) -> Client {
    let options = Options { timeout: Some(LIMIT) };
    Client::connect(server.directory().join("bad.sock"), options).unwrap()
}

/// A pipe that takes nothing any more.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    let flags = fcntl_getfl(&writer).unwrap();
    fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&writer, &[b'x'; 512]).is_ok() {}
    fcntl_setfl(&writer, flags).unwrap();
    (reader, writer)
}

#[test]
fn a_reader_that_stands_still_holds_up_nobody() {
    let (mut command, directory) = command();
    let (_reader, writer) = full_pipe();
    command.stdout(writer.try_clone().unwrap()).stderr(writer);
    let mut server = Server::spawn_to(command, directory, &["good.sock", "bad.sock"]);
    let client = bad(&server);
    // More than what may wait for the reader.
    refused(&client, 5000);
    let good = server.directory().join("good.sock");
    let mut controller = attach(&good, &AttachOptions::default());
    let namespace = controller.namespace(1).unwrap().clone();
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(1, 4096).unwrap();
    let read = run(&mut queue, namespace.read(0, 1).unwrap(), pool.take());
    assert_eq!(read.status, Status::SUCCESS);
    controller.registers().unwrap();
    // The counters are a line of the log, said by the thread that waits for signals.
    server.signal(rustix::process::Signal::USR1);
    refused(&client, 10);
    drop((read, queue, pool));
    controller.detach().unwrap();
    assert!(server.stop().success());
}

#[test]
fn an_error_at_the_end_that_nobody_reads_is_no_reason_to_stay() {
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
fn what_a_client_causes_is_a_few_lines() {
    let (command, directory) = command();
    let mut server = Server::spawn(command, directory, &["good.sock", "bad.sock"]);
    let begun = Instant::now();
    let client = bad(&server);
    refused(&client, 40_000);
    drop(client);
    assert!(server.stop().success());
    let said = server.stderr();
    assert!(said.ends_with("ended\n"), "{said}");
    // Sixteen at once, and then one in ten seconds, which says how many were suppressed.
    let most = 16 + begun.elapsed().as_secs() as usize / 10 + 1;
    let lines = said.lines().filter(|line| line.contains(REFUSED)).count();
    assert!((16..=most).contains(&lines), "{lines} lines, of {most}");
}
