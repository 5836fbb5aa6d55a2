//! Helpers that all clients of the vfio-user server use.

use crate::source::Source;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use shadowbell_memory::{EventFd, Mapping};
use shadowbell_testing::wait;
use shadowbell_vfio_user::server::Limits;
use std::os::fd::OwnedFd;
use std::time::Instant;

/// Maximum number of io_uring instances of this process. To signal eventfds of peers, a thread
/// keeps up to 64 instances, and creates one more if all are in use for other eventfds. Disks also
/// create some and close them again.
const RINGS: usize = 80;

/// Number of open descriptors of this process, without io_uring instances. The process opens some
/// descriptors at its first run and keeps them; this function opens them before it counts.
///
/// # Panics
///
/// If there are more than [`RINGS`] io_uring instances.
pub(crate) fn descriptors() -> usize {
    static WARM: std::sync::Once = std::sync::Once::new();
    WARM.call_once(|| {
        // The process opens some descriptors when it first signals an eventfd and first maps a
        // file, and keeps them. They are no leaks, so they are opened before the first count.
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

/// Targets of the open descriptors, for an error message.
pub(crate) fn describe_descriptors() -> String {
    let fds = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten();
    let links = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    links.map(|link| format!("{} ", link.display())).collect()
}

/// Limits of the server. In most programs, the server closes descriptors itself and not on the
/// closer thread. Then no turn depends on another thread, and the same program always has the same
/// result.
pub(crate) fn limits(source: &mut Source<'_>) -> Limits {
    Limits { close_at_once: !source.rarely(16), ..Limits::default() }
}

fn new_socket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .expect("a socket")
}

/// Connects to a server, and calls `serve` until the server accepts the client. Before that, the
/// closer thread has to close the descriptors of earlier clients.
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

/// A listening socket with a unique name.
pub(crate) fn listen() -> OwnedFd {
    let socket = new_socket();
    rustix::net::bind(&socket, &SocketAddrUnix::new_unnamed()).expect("a name");
    rustix::net::listen(&socket, 4).expect("to listen");
    socket
}
