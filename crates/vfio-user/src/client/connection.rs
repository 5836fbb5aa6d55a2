//! Connection of a client: a socket on which one request at a time is sent and its reply received.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::error::ClientError;
use crate::Errno;
use crate::codec::{Decoder, MAX_MESSAGE_FDS, Message, SendQueue};
use crate::descriptor::{Descriptor, Inspector};
use crate::socket::{Received, receive, send};
use crate::wire::{HEADER_LEN, Header, header_flags};

/// Maximum number of commands from the server that the client refuses while it waits for one reply.
/// One more command ends the connection.
const MAX_STRAY: u32 = 1024;

/// Payload of a successful reply, and its descriptors.
pub(super) struct Reply<'a> {
    pub(super) payload: &'a [u8],
    pub(super) fds: Vec<Descriptor>,
}

impl Reply<'_> {
    /// Splits the payload into the structure at its start and the rest.
    pub(super) fn split<T>(&self) -> Result<(T, &[u8]), String>
    where
        T: FromBytes + KnownLayout + Immutable,
    {
        T::read_from_prefix(self.payload)
            .map_err(|_| format!("its payload has only {} bytes", self.payload.len()))
    }
}

/// Connection to a server.
#[derive(Debug)]
pub(super) struct Connection {
    socket: Arc<OwnedFd>,
    inspector: Inspector,
    decoder: Decoder,
    next_id: u16,
    timeout: Option<Duration>,
    /// First bus addresses of the mapped memory ranges.
    pub(super) maps: BTreeSet<u64>,
    /// True while a request is in progress, and after a request has failed: then the connection is
    /// unusable.
    broken: bool,
}

/// Connects to the socket at `path`.
pub(super) fn connect(path: &Path, timeout: Option<Duration>) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The timeout is necessary because connect blocks while the server's backlog is full.
    set_socket_timeout(&socket, Timeout::Send, limit(timeout))?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

impl Connection {
    pub(super) fn new(
        socket: OwnedFd,
        timeout: Option<Duration>,
        max_data_xfer_size: u32,
    ) -> Result<Self, ClientError> {
        let failed = |errno: Errno| ClientError::Socket(errno.into());
        rustix::io::ioctl_fionbio(&socket, false).map_err(failed)?;
        set_socket_timeout(&socket, Timeout::Recv, limit(timeout)).map_err(failed)?;
        set_socket_timeout(&socket, Timeout::Send, limit(timeout)).map_err(failed)?;
        Ok(Self {
            socket: Arc::new(socket),
            inspector: Inspector::new(Arc::default(), Arc::default()),
            decoder: Decoder::new(max_data_xfer_size as usize),
            next_id: 0,
            timeout,
            maps: BTreeSet::new(),
            broken: false,
        })
    }

    pub(super) fn socket(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.socket)
    }

    /// Sends a command, waits for the reply, and parses it with `read`.
    pub(super) fn request<T>(
        &mut self,
        command: u16,
        payload: &[&[u8]],
        fds: &[BorrowedFd<'_>],
        read: impl FnOnce(&mut Reply<'_>) -> Result<T, String>,
    ) -> Result<T, ClientError> {
        let started = self.begin()?;
        let outcome = self.exchange(command, payload, fds, started, read);
        self.finish();
        outcome
    }

    /// Sends a command that requests no reply (NO_REPLY).
    pub(super) fn post(&mut self, command: u16, payload: &[&[u8]]) -> Result<(), ClientError> {
        let started = self.begin()?;
        let outcome = self.send(command, header_flags::NO_REPLY, payload, &[], started);
        if outcome.is_ok() {
            self.broken = false;
        }
        self.finish();
        outcome.map(drop)
    }

    fn begin(&mut self) -> Result<Instant, ClientError> {
        if std::mem::replace(&mut self.broken, true) {
            return Err(ClientError::Broken);
        }
        Ok(Instant::now())
    }

    /// Shuts down a broken connection, so that the server notices the end immediately.
    fn finish(&self) {
        if self.broken {
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
    }

    fn exchange<T>(
        &mut self,
        command: u16,
        payload: &[&[u8]],
        fds: &[BorrowedFd<'_>],
        started: Instant,
        read: impl FnOnce(&mut Reply<'_>) -> Result<T, String>,
    ) -> Result<T, ClientError> {
        let id = self.send(command, 0, payload, fds, started)?;
        let bad = |why: String| ClientError::BadReply { command, why };
        let mut strays = 0;
        loop {
            // The caller has exclusive access to the connection. So the message is either the reply
            // or a command of the server.
            let Some(message) = self.decoder.decode().map_err(|error| bad(error.to_string()))?
            else {
                self.receive(command, started, strays != 0)?;
                continue;
            };
            let Message { header, payload, fds } = message;
            if !header.is_reply() {
                strays += 1;
                if strays > MAX_STRAY {
                    return Err(bad("the server floods the client with commands".into()));
                }
                drop(fds);
                refuse(&self.socket, &header)?;
                continue;
            }
            if header.id != id || header.command != command {
                let Header { id: got, command: to, .. } = header;
                return Err(bad(format!("it is for message {got}, command {to}, instead of {id}")));
            }
            if header.flags & header_flags::ERROR != 0 {
                let errno = match i32::try_from(header.error) {
                    Ok(number @ 1..=4095) => Errno::from_raw_os_error(number),
                    _ => Errno::IO,
                };
                self.broken = false;
                return Err(ClientError::Refused { command, errno });
            }
            let value = read(&mut Reply { payload, fds }).map_err(bad)?;
            self.broken = false;
            return Ok(value);
        }
    }

    fn send(
        &mut self,
        command: u16,
        flags: u32,
        payload: &[&[u8]],
        fds: &[BorrowedFd<'_>],
        started: Instant,
    ) -> Result<u16, ClientError> {
        let unsendable = |why| ClientError::Unsendable { command, why };
        let len = HEADER_LEN + payload.iter().map(|part| part.len()).sum::<usize>();
        let Ok(size) = u32::try_from(len) else {
            self.broken = false;
            return Err(unsendable("more data than fits into one message"));
        };
        if fds.len() > MAX_MESSAGE_FDS {
            self.broken = false;
            return Err(unsendable("too many descriptors"));
        }
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let header = Header { id, command, size, flags: header_flags::COMMAND | flags, error: 0 };
        let mut parts = [header.as_bytes(), &[], &[]];
        for (part, from) in parts.iter_mut().skip(1).zip(payload) {
            *part = from;
        }
        let mut fds = fds;
        let mut left = len;
        loop {
            let sent = match send(self.socket.as_fd(), &parts, fds) {
                Ok(sent) => sent,
                Err(Errno::AGAIN) => return Err(self.timed_out(command)),
                Err(errno) => return Err(ClientError::Socket(errno.into())),
            };
            // The kernel has sent the descriptors with the first byte, so later sends have none.
            fds = &[];
            left = left.saturating_sub(sent);
            if left == 0 {
                return Ok(id);
            }
            skip(&mut parts, sent);
            if self.timeout.is_some_and(|limit| started.elapsed() > limit) {
                return Err(self.timed_out(command));
            }
        }
    }

    fn receive(
        &mut self,
        command: u16,
        started: Instant,
        strayed: bool,
    ) -> Result<(), ClientError> {
        let gone = || ClientError::Socket(std::io::ErrorKind::ConnectionReset.into());
        let is_partial = self.decoder.is_partial();
        if (is_partial || strayed)
            && let Some(limit) = self.timeout
        {
            // The socket's timeout restarts with each receive. So the time since the start of the
            // request is limited too. Otherwise a server could keep the client waiting with single
            // bytes, or with messages other than the reply.
            let end = if is_partial { limit.saturating_mul(2) } else { limit };
            let left = end.saturating_sub(started.elapsed());
            let time = Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut socket = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut socket, Some(&time)) {
                Ok(0) => return Err(self.timed_out(command)),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(ClientError::Socket(errno.into())),
            }
        }
        let received = receive(self.socket.as_fd(), &mut self.decoder, &self.inspector);
        if self.inspector.closer().is_overloaded() {
            let why = "too many descriptors of the server wait to be closed".to_owned();
            return Err(ClientError::BadReply { command, why });
        }
        match received {
            Ok(Received::Bytes { .. }) => Ok(()),
            Ok(Received::Closed) | Err(Errno::CONNRESET) => Err(gone()),
            Ok(Received::FdsLost) => Err(ClientError::Socket(Errno::MFILE.into())),
            Err(Errno::AGAIN) => Err(self.timed_out(command)),
            Err(errno) => Err(ClientError::Socket(errno.into())),
        }
    }

    fn timed_out(&self, command: u16) -> ClientError {
        ClientError::Timeout { command, limit: self.timeout.unwrap_or_default() }
    }
}

/// Timeout for the socket, at least 1 µs, because 0 would disable it.
fn limit(timeout: Option<Duration>) -> Option<Duration> {
    timeout.map(|time| time.max(Duration::from_micros(1)))
}

/// Refuses a command of the server. Servers send commands for DMA by message, which this client
/// does not support.
fn refuse(socket: &OwnedFd, to: &Header) -> Result<(), ClientError> {
    let mut out = SendQueue::default();
    out.put_error(to, Errno::OPNOTSUPP);
    while !out.is_empty() {
        let (bytes, _) = out.front();
        let sent = send(socket.as_fd(), &[bytes], &[])
            .map_err(|errno| ClientError::Socket(errno.into()))?;
        out.sent(sent);
    }
    Ok(())
}

/// Removes the first `len` bytes of `parts`.
fn skip(parts: &mut [&[u8]], mut len: usize) {
    for part in parts {
        let here = len.min(part.len());
        *part = part.get(here..).unwrap_or_default();
        len -= here;
    }
}

#[cfg(test)]
mod tests {
    use super::skip;

    #[test]
    fn sent_bytes_are_skipped_at_any_position() {
        let whole = b"abcdefghi";
        for sent in 0..=whole.len() {
            let mut parts: [&[u8]; 3] = [b"abc", b"", b"defghi"];
            skip(&mut parts, sent);
            assert_eq!(parts.concat(), whole[sent..]);
        }
    }
}
