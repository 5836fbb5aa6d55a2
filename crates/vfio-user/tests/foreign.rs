//! Descriptors of what a client can stall, and the clients next to it.

mod common;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use common::*;
use shadowbell_testing::stalled::{self, Mount};
use shadowbell_vfio_user::Client;
use shadowbell_vfio_user::server::Limits;
use shadowbell_vfio_user::wire::{self, command, header_flags};
use zerocopy::IntoBytes;

#[test]
fn the_daemon() {
    stalled::be_the_daemon();
}

fn mount() -> Option<Mount> {
    Mount::new("the_daemon")
}

/// The reactor looks after another client.
fn assert_served(path: &Path) {
    let mut raw = Raw::connect(path);
    raw.negotiate();
    raw.write(3, &[42]).ok();
    assert_eq!(raw.read(3, 1).ok()[16..], [42]);
}

fn dma_map(raw: &mut Raw, iova: u64, fds: &[BorrowedFd<'_>]) -> Reply {
    let flags = wire::dma_map_flags::READ | wire::dma_map_flags::WRITE;
    let map = wire::DmaMap { argsz: 32, flags, offset: 0, address: iova, size: 0x1000 };
    let bytes = raw.message(command::DMA_MAP, 0, &[map.as_bytes()]);
    raw.send_with_fds(&bytes, fds);
    raw.reply()
}

/// The file stays open here: closing it would wait, too.
fn trap(mount: &Mount) -> BorrowedFd<'static> {
    let fd: &'static OwnedFd = Box::leak(Box::new(mount.open()));
    fd.as_fd()
}

#[test]
fn a_file_of_a_clients_own_file_system_stalls_nobody() {
    let (server, path, _shared) = Server::with_toy(Limits::default());
    let (other, ..) = server.add("other");
    // Ends before the server: a reactor that is stalled after all is let go then.
    let Some(mount) = mount() else { return };
    let file = trap(&mount);
    // With every command, among them those that take descriptors and those that drop them.
    let mut raw = Raw::attach(&path);
    assert_eq!(dma_map(&mut raw, 0, &[file]).errno(), rustix::io::Errno::INVAL);
    assert_served(&other);
    for command in [command::DEVICE_SET_IRQS, command::DEVICE_RESET, command::DMA_UNMAP, 77] {
        let bytes = raw.message(command, 0, &[&[0; 32]]);
        raw.send_with_fds(&bytes, &[file]);
        raw.reply();
        assert_served(&other);
    }
    // The client itself goes on with what is in order.
    assert!(dma_map(&mut raw, 0, &[memfd(0x1000).as_fd()]).errno_or_ok().is_ok());
    // With a message that nobody answers, with half a message, and with garbage.
    let posted = raw.message(command::DEVICE_RESET, header_flags::NO_REPLY, &[]);
    raw.send_with_fds(&posted, &[file]);
    raw.send_with_fds(&posted[..9], &[file]);
    drop(raw);
    assert_served(&other);
    let raw = Raw::attach(&path);
    raw.send_with_fds(&[0xff; 64], &[file]);
    assert_served(&other);
    drop(raw);
    assert_served(&path);
}

#[test]
fn who_brings_more_than_can_be_closed_waits_outside_and_alone() {
    let (server, path, shared) = Server::with_toy(Limits::default());
    let (other, ..) = server.add("other");
    let Some(mut mount) = mount() else { return };
    let file = trap(&mount);
    let mut raw = Raw::attach(&path);
    assert_eq!(dma_map(&mut raw, 0, &[file; 10]).errno(), rustix::io::Errno::INVAL);
    raw.write(0, &[1]).ok();
    let bytes = raw.message(command::DEVICE_RESET, 0, &[]);
    raw.send_with_fds(&bytes, &[file; 60]);
    raw.assert_closed();
    assert!(!shared.log().contains(&"reset".to_owned()));
    // It comes back, and is not let in. Others are.
    let mut again = Raw::connect(&path);
    for _ in 0..10 {
        assert_served(&other);
    }
    again.assert_silent();
    // The daemon gives in.
    mount.end();
    again.negotiate();
    again.write(0, &[1]).ok();
}

/// A client that was thrown out has sent more than was looked at, and a client that was never let
/// in.
#[test]
fn what_nobody_has_received_stalls_nobody() {
    let (mut server, path, _shared) = Server::with_toy(Limits::default());
    let (other, ..) = server.add("other");
    let Some(mount) = mount() else { return };
    let file = trap(&mount);
    let mut raw = Raw::attach(&path);
    let waiting = Raw::connect(&path);
    // A socket in whose queue there is a socket, in whose queue there is the file.
    let (nest, egg) = std::os::unix::net::UnixStream::pair().unwrap();
    Raw::new(egg).send_with_fds(&[0], &[file]);
    for socket in [&raw, &waiting] {
        socket.send_with_fds(&[0; 16], &[nest.as_fd(), file]);
        // It ends at the first; these stay.
        for _ in 0..3 {
            let _ = rustix::net::send(&socket.stream, &[1], rustix::net::SendFlags::NOSIGNAL);
        }
    }
    raw.assert_closed();
    assert_served(&other);
    server.stop();
    drop((raw, waiting));
}

/// What is no memory is not mapped, and what is no eventfd is not signalled.
#[test]
fn each_kind_is_taken_for_what_it_is() {
    let (_server, path, shared) = Server::with_toy(Limits::default());
    let mut raw = Raw::attach(&path);
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
    let event = eventfds(1).remove(0);
    let memory = memfd(0x1000);
    let inval = rustix::io::Errno::INVAL;
    for fd in [pipe.as_fd(), null.as_fd(), socket.as_fd(), event.as_fd()] {
        assert_eq!(dma_map(&mut raw, 0, &[fd]).errno(), inval);
    }
    let set = wire::SetIrqs { argsz: 20, flags: 0x24, index: 2, start: 0, count: 1 };
    let mut set_irqs = |fd: BorrowedFd<'_>| {
        let bytes = raw.message(command::DEVICE_SET_IRQS, 0, &[set.as_bytes()]);
        raw.send_with_fds(&bytes, &[fd]);
        raw.reply().errno_or_ok()
    };
    for fd in [pipe.as_fd(), null.as_fd(), socket.as_fd(), memory.as_fd()] {
        assert_eq!(set_irqs(fd), Err(inval));
    }
    set_irqs(event.as_fd()).unwrap();
    dma_map(&mut raw, 0, &[memory.as_fd()]).ok();
    // A file on a disk is a machine's memory, too; unless this is in a container.
    let file = std::fs::File::open(env!("CARGO_MANIFEST_DIR").to_owned() + "/Cargo.toml").unwrap();
    match dma_map(&mut raw, 0x1000, &[file.as_fd()]).errno_or_ok() {
        Ok(()) => assert_eq!(shared.maps.lock().unwrap().len(), 2),
        Err(errno) => assert_eq!(errno, inval),
    }
}

/// A server that hands out what stalls is not believed, and its client goes on.
#[test]
fn a_client_does_not_wait_for_a_daemon_either() {
    use shadowbell_vfio_user::client::{ClientError, Options};
    let Some(mount) = mount() else { return };
    let file = trap(&mount);
    for count in [1, 40] {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut server = Raw::new(theirs);
        let server = std::thread::spawn(move || {
            for fds in [0, count] {
                let to = server.reply().header;
                let flags = header_flags::REPLY;
                let header = wire::Header { id: to.id, command: to.command, flags, ..to };
                let info = wire::RegionInfo {
                    argsz: 32,
                    flags: wire::region_flags::MMAP,
                    index: 0,
                    cap_offset: 0,
                    size: 0x1000,
                    offset: 0,
                };
                let mut out = shadowbell_vfio_user::codec::SendQueue::default();
                match fds {
                    0 => out.put(header, &[&[0, 0, 1, 0]]),
                    _ => out.put(header, &[info.as_bytes()]),
                }
                let (bytes, _) = out.front();
                server.send_with_fds(bytes, &vec![file; fds]);
            }
        });
        let client = Client::from_stream(ours.into(), Options::default()).unwrap();
        let error = client.region_info(0).unwrap_err();
        assert!(matches!(error, ClientError::BadReply { .. }), "{error}");
        drop(client);
        server.join().unwrap();
    }
}
