//! Descriptors of files on a client's own file system, on which system calls hang. The server must
//! still serve its other clients.

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
fn fuse_daemon() {
    stalled::run_daemon_if_requested();
}

fn mount() -> Option<Mount> {
    Mount::new("fuse_daemon")
}

/// Checks that the reactor serves another client.
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

/// Opens a file of the mount. Its descriptor is never closed, because the close would hang.
fn trap(mount: &Mount) -> BorrowedFd<'static> {
    let fd: &'static OwnedFd = Box::leak(Box::new(mount.open()));
    fd.as_fd()
}

#[test]
fn hung_descriptors_of_a_client_delay_no_other() {
    let (server, path, _shared) = Server::with_device(Limits::default());
    let (other, ..) = server.add("other");
    // If the reactor hangs in a system call, the unmount ends it. So the mount must be dropped
    // before the server.
    let Some(mount) = mount() else { return };
    let file = trap(&mount);
    // Each command is sent with the file, even commands that do not accept descriptors.
    let mut raw = Raw::attach(&path);
    assert_eq!(dma_map(&mut raw, 0, &[file]).errno(), rustix::io::Errno::INVAL);
    assert_served(&other);
    for command in [command::DEVICE_SET_IRQS, command::DEVICE_RESET, command::DMA_UNMAP, 77] {
        let bytes = raw.message(command, 0, &[&[0; 32]]);
        raw.send_with_fds(&bytes, &[file]);
        raw.reply();
        assert_served(&other);
    }
    // The client's valid requests still succeed.
    assert!(dma_map(&mut raw, 0, &[memfd(0x1000).as_fd()]).errno_or_ok().is_ok());
    // The file is sent with a posted message, with half a message, and with garbage.
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
fn a_client_with_too_many_hung_descriptors_is_not_accepted() {
    let (server, path, shared) = Server::with_device(Limits::default());
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
    // A new connection of this client is not accepted, because the close of its descriptors hangs.
    // Clients of the other device are accepted.
    let mut again = Raw::connect(&path);
    for _ in 0..10 {
        assert_served(&other);
    }
    again.assert_silent();
    // After the daemon ends, the close of the files no longer hangs.
    mount.end();
    again.negotiate();
    again.write(0, &[1]).ok();
}

/// The server closes two sockets whose queues still contain hung descriptors: the socket of a
/// client that disconnects, and the socket of a client that was never accepted. The close hangs,
/// but the server still serves other clients.
#[test]
fn unreceived_hung_descriptors_delay_no_client() {
    let (mut server, path, _shared) = Server::with_device(Limits::default());
    let (other, ..) = server.add("other");
    let Some(mount) = mount() else { return };
    let file = trap(&mount);
    let mut raw = Raw::attach(&path);
    let waiting = Raw::connect(&path);
    // The descriptor of the file is in the queue of one socket, and this socket is in the queue of
    // another one.
    let (nest, egg) = std::os::unix::net::UnixStream::pair().unwrap();
    Raw::new(egg).send_with_fds(&[0], &[file]);
    for socket in [&raw, &waiting] {
        socket.send_with_fds(&[0; 16], &[nest.as_fd(), file]);
        // The server closes the connection after the first message, so the other messages are never
        // received.
        for _ in 0..3 {
            let _ = rustix::net::send(&socket.stream, &[1], rustix::net::SendFlags::NOSIGNAL);
        }
    }
    raw.assert_closed();
    assert_served(&other);
    server.stop();
    drop((raw, waiting));
}

/// The server maps a descriptor only if it is memory, and signals it only if it is an eventfd.
#[test]
fn descriptors_are_checked_for_their_type() {
    let (_server, path, shared) = Server::with_device(Limits::default());
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
    // A regular file counts as memory, unless it is in the overlay of a container.
    let file = std::fs::File::open(env!("CARGO_MANIFEST_DIR").to_owned() + "/Cargo.toml").unwrap();
    match dma_map(&mut raw, 0x1000, &[file.as_fd()]).errno_or_ok() {
        Ok(()) => assert_eq!(shared.maps.lock().unwrap().len(), 2),
        Err(errno) => assert_eq!(errno, inval),
    }
}

/// A client refuses a server's descriptors on which system calls may hang, and remains usable.
#[test]
fn a_client_refuses_hung_descriptors_of_a_server() {
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
