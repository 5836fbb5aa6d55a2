//! What all clients of the vfio-user server need.

use crate::source::Source;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use shadowbell_memory::{EventFd, Mapping};
use shadowbell_testing::wait;
use shadowbell_vfio_user::server::Limits;
use std::os::fd::OwnedFd;
use std::time::Instant;

/// Most rings that this process may have: a thread keeps up to 64 to signal peers' eventfds with,
/// of which it makes one when it has another eventfd to signal and all are in use. Besides these
/// there are those of disks, which come and go.
const RINGS: usize = 80;

/// How many descriptors this process has, apart from rings. The first run leaves some for good, so
/// they are made before.
///
/// # Panics
/// There are more than [`RINGS`] rings.
pub(crate) fn descriptors() -> usize {
    static WARM: std::sync::Once = std::sync::Once::new();
    WARM.call_once(|| {
        // The first eventfd of a process that is signalled, and the first mapping of a file.
        let event = EventFd::new().and_then(OwnedFd::try_from).and_then(EventFd::from_fd);
        event.expect("an eventfd").signal();
        drop(Mapping::shared("warm", 4096));
    });
    let fds = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten();
    let is_ring = |path: std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|link| link.as_os_str() == "anon_inode:[io_uring]")
    };
    let (rings, others): (Vec<bool>, Vec<bool>) =
        fds.map(|fd| is_ring(fd.path())).partition(|is| *is);
    assert!(rings.len() <= RINGS, "{} rings", rings.len());
    others.len()
}

/// What they are of, for a message.
pub(crate) fn describe_descriptors() -> String {
    let fds = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten();
    let links = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    links.map(|link| format!("{} ", link.display())).collect()
}

/// What the server allows. In most programs descriptors are closed where they are found: then a
/// program does the same each time, and nobody waits for a thread.
pub(crate) fn limits(source: &mut Source<'_>) -> Limits {
    Limits { close_at_once: !source.rarely(16), ..Limits::default() }
}

fn new_socket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .expect("a socket")
}

/// Connects to a server, which has its turn as long as it has no room: descriptors of earlier
/// clients are closed by a thread, and nobody is let in before.
pub(crate) fn connect(listener: &OwnedFd, mut serve: impl FnMut()) -> OwnedFd {
    let name = rustix::net::getsockname(listener).expect("an address");
    let address = SocketAddrUnix::try_from(name).expect("a UNIX socket");
    let socket = new_socket();
    let until = wait::deadline();
    while let Err(errno) = rustix::net::connect(&socket, &address) {
        assert!(errno == Errno::AGAIN && Instant::now() < until, "a connection: {errno}");
        serve();
        std::thread::yield_now();
    }
    socket
}

/// A listening socket with a name that nobody else has.
pub(crate) fn listen() -> OwnedFd {
    let socket = new_socket();
    rustix::net::bind(&socket, &SocketAddrUnix::new_unnamed()).expect("a name");
    rustix::net::listen(&socket, 4).expect("to listen");
    socket
}
