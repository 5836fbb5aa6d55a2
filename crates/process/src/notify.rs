//! Notifications to the service manager by the protocol of `sd_notify`: one datagram to the socket
//! that `NOTIFY_SOCKET` names.

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sendmsg_addr, sendto, socket_with,
};
use rustix::time::{ClockId, clock_gettime};
use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

/// Start-up or reload has finished.
pub const READY: &str = "READY=1";
/// Shutdown has begun.
pub const STOPPING: &str = "STOPPING=1";
/// Keep-alive of the watchdog.
pub const WATCHDOG: &str = "WATCHDOG=1";

/// Sends a notification, if there is a service manager. Ignores failures.
pub fn send(state: &str) {
    send_with_flags(state, SendFlags::NOSIGNAL);
}

/// Sends a notification without blocking. The notification is lost if the queue of the service
/// manager is full.
pub fn try_send(state: &str) {
    send_with_flags(state, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

fn send_with_flags(state: &str, flags: SendFlags) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET") {
        let _ = send_to(&socket, state, flags);
    }
}

/// Notification that start-up has finished, with a status text.
pub fn ready(status: &str) -> String {
    format!("{READY}\n{}", self::status(status))
}

/// Notification of a status text: `text` up to the first control character, because systemd also
/// ends an assignment at a carriage return.
pub fn status(text: &str) -> String {
    format!("STATUS={}", text.split(char::is_control).next().unwrap_or_default())
}

/// Notification that a reload has begun. [`READY`] ends it.
pub fn reloading() -> String {
    let now = clock_gettime(ClockId::Monotonic);
    let now = Duration::try_from(now).unwrap_or_default().as_micros();
    format!("RELOADING=1\nMONOTONIC_USEC={now}")
}

/// Interval at which [`WATCHDOG`] has to be sent. `None` if the service manager does not require
/// it.
pub fn watchdog() -> Option<Duration> {
    let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    let pid = number("WATCHDOG_PID").unwrap_or_else(|| std::process::id().into());
    interval(number("WATCHDOG_USEC")?, pid, std::process::id())
}

/// Half of the watchdog timeout `us` (microseconds), as systemd recommends. `None` if the watchdog
/// is for another process (`pid` differs from `own`) or the timeout is too short.
fn interval(us: u64, pid: u64, own: u32) -> Option<Duration> {
    // A shorter timeout is not supported: scheduling delays would exceed it.
    let fits = pid == u64::from(own) && us >= 1000;
    fits.then(|| Duration::from_micros(us / 2))
}

/// Sends a descriptor to the fd store of the service manager. `state` contains its name and
/// options.
///
/// # Errors
/// The message cannot be sent. The service manager does not report whether it stores the
/// descriptor.
pub fn store_fd(state: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
    let socket = std::env::var_os("NOTIFY_SOCKET").ok_or(io::ErrorKind::NotFound)?;
    let (ours, address) = socket_to(&socket)?;
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let bytes = [IoSlice::new(state.as_bytes())];
    sendmsg_addr(&ours, &address, &bytes, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn send_to(socket: &OsStr, state: &str, flags: SendFlags) -> rustix::io::Result<()> {
    let (ours, address) = socket_to(socket)?;
    sendto(&ours, state.as_bytes(), flags, &address)?;
    Ok(())
}

fn socket_to(socket: &OsStr) -> rustix::io::Result<(OwnedFd, SocketAddrUnix)> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name)?,
        None => SocketAddrUnix::new(socket)?,
    };
    let ours = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    Ok((ours, address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watchdog_is_for_the_process_that_it_names() {
        assert_eq!(interval(30_000_000, 7, 7), Some(Duration::from_secs(15)));
        assert_eq!(interval(30_000_000, 8, 7), None);
        assert_eq!(interval(999, 7, 7), None, "or it would do nothing else");
        assert_eq!(status("one\nREADY=0"), "STATUS=one");
        assert_eq!(status("one\rMAINPID=1"), "STATUS=one");
        let text = reloading();
        let time = text.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap();
        assert!(time.parse::<u64>().unwrap() > 0, "{text}");
    }
}
