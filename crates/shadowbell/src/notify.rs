//! What a service manager is told: `sd_notify`. The protocol is one datagram to the socket that
//! `NOTIFY_SOCKET` names, so it needs no library.

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

/// The service works.
pub(crate) const READY: &str = "READY=1";
/// It ends.
pub(crate) const STOPPING: &str = "STOPPING=1";
/// It is alive.
pub(crate) const WATCHDOG: &str = "WATCHDOG=1";

/// Tells the service manager, if there is one that wants to be told. A failure is its own.
pub(crate) fn tell(state: &str) {
    tell_with(state, SendFlags::NOSIGNAL);
}

/// The same, from a thread that waits for nobody: a service manager that does not listen misses it.
pub(crate) fn tell_now(state: &str) {
    tell_with(state, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

fn tell_with(state: &str, flags: SendFlags) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET") {
        let _ = tell_at(&socket, state, flags);
    }
}

/// The service works, and does this.
pub(crate) fn ready(status: &str) -> String {
    format!("{READY}\n{}", self::status(status))
}

/// What it does, in a sentence; of that, the first line.
pub(crate) fn status(text: &str) -> String {
    format!("STATUS={}", text.lines().next().unwrap_or_default())
}

/// It reads its configuration, and says [`READY`] when it has.
pub(crate) fn reloading() -> String {
    let now = clock_gettime(ClockId::Monotonic);
    let now = Duration::try_from(now).unwrap_or_default().as_micros();
    format!("RELOADING=1\nMONOTONIC_USEC={now}")
}

/// How often this process is to say that it is [alive](WATCHDOG), if it is.
pub(crate) fn watchdog() -> Option<Duration> {
    let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    let pid = number("WATCHDOG_PID").unwrap_or_else(|| std::process::id().into());
    interval(number("WATCHDOG_USEC")?, pid, std::process::id())
}

/// Half of the time that the service manager waits, as it advises. `us`: that time; `pid`: whom
/// it waits for.
fn interval(us: u64, pid: u64, own: u32) -> Option<Duration> {
    // Less is no time in which a thread has to come to a processor.
    let fits = pid == u64::from(own) && us >= 1000;
    fits.then(|| Duration::from_micros(us / 2))
}

/// Gives the service manager a descriptor to keep, as `state` says.
///
/// # Errors
/// It can not be sent. That the service manager does not keep it is not known.
pub(crate) fn keep(state: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
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

fn tell_at(socket: &OsStr, state: &str, flags: SendFlags) -> rustix::io::Result<()> {
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
        let text = reloading();
        let time = text.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap();
        assert!(time.parse::<u64>().unwrap() > 0, "{text}");
    }
}
