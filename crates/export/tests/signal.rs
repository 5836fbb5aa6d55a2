//! A reply to a disconnected client raises SIGPIPE, unless the server prevents it; the default
//! action of this signal ends a program.
//!
//! This is a test program of its own, because signal actions apply to a whole process.

#[allow(dead_code)]
#[path = "export/client.rs"]
mod client;

use client::{Client, serve};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_export::nbd::Options;
use shadowbell_export::nbd::wire::{command, option, put_option};
use shadowbell_testing::test_disk::TestDisk;
use shadowbell_testing::wait::LIMIT;
use signal_hook::consts::SIGPIPE;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Waits until the server has tried to reply and has closed the connection.
fn until_hung_up(socket: &UnixStream) {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    let timeout = Timespec::try_from(LIMIT).unwrap();
    assert_eq!(poll(&mut fds, Some(&timeout)), Ok(1));
}

#[test]
fn a_disconnected_client_raises_no_sigpipe() {
    let signalled = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGPIPE, Arc::clone(&signalled)).unwrap();
    let backing = Arc::new(TestDisk::new(4096, 512));
    let options = shadowbell_block::BlockOptions::default();
    let disk = shadowbell_block::BlockDevice::new(backing, &options);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd");
    let server = serve(disk.unwrap(), &path, &Options::default());
    let mut client = Client::connect(&path, false);
    client.socket.shutdown(Shutdown::Read).unwrap();
    client.ask(command::READ, 0, 0, 512, b"");
    until_hung_up(&client.socket);
    // The client disconnects during option negotiation.
    let mut client = Client::greeted(&path);
    client.socket.shutdown(Shutdown::Read).unwrap();
    let mut list = Vec::new();
    put_option(&mut list, option::LIST, b"");
    client.socket.write_all(&list).unwrap();
    until_hung_up(&client.socket);
    let _ = server.stop();
    assert!(!signalled.load(Ordering::SeqCst));
}
