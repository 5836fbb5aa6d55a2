//! What a service manager is told: `sd_notify`. The protocol is one datagram to the socket that
//! `NOTIFY_SOCKET` names, so it needs no library.

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::net::{sendto, socket_with};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// The service works.
pub(crate) const READY: &str = "READY=1";
/// It ends.
pub(crate) const STOPPING: &str = "STOPPING=1";

/// Tells the service manager, if there is one that wants to be told. A failure is its own.
pub(crate) fn tell(state: &str) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET") {
        let _ = tell_at(&socket, state);
    }
}

fn tell_at(socket: &OsStr, state: &str) -> rustix::io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name)?,
        None => SocketAddrUnix::new(socket)?,
    };
    let ours = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    sendto(&ours, state.as_bytes(), SendFlags::NOSIGNAL, &address)?;
    Ok(())
}
