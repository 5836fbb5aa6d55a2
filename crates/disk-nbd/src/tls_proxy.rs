//! TLS proxy thread of a connection. An I/O thread serves many disks, and the cryptography for the
//! data in flight would block it for milliseconds. So I/O threads use a plain socket to the proxy
//! thread.

use crate::stream::Stream;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use shadowbell_memory::AbortOnPanic;
use shadowbell_tls::Session;
use std::io::{self, IoSlice, Read, Write};
use tracing::{debug, warn};

/// Buffer size in bytes per direction.
const BUFFER: usize = 128 << 10;

/// Starts a proxy thread for the TLS `session` with the server at the other end of `server`.
/// Returns the plain socket of the proxy. If either socket is closed, the proxy closes the other.
///
/// # Errors
/// The system's error.
pub(crate) fn start(server: Stream, session: Session, name: String) -> io::Result<Stream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let proxy = TlsProxy {
        server,
        session,
        user: Stream::new(far),
        incoming: vec![0; BUFFER],
        filled: 0,
        taken: 0,
        outgoing: vec![0; BUFFER],
        put: 0,
        held: 0,
    };
    std::thread::Builder::new().name("sb-nbd-tls".into()).spawn(move || {
        let _guard = AbortOnPanic::new();
        run(proxy, &name);
    })?;
    Ok(Stream::new(near))
}

struct TlsProxy {
    server: Stream,
    session: Session,
    user: Stream,
    /// Data from the server. Of the `filled` bytes, `taken` were passed to the I/O threads.
    incoming: Vec<u8>,
    filled: usize,
    taken: usize,
    /// Data from the I/O threads. Of the `held` bytes, `put` were passed to TLS.
    outgoing: Vec<u8>,
    held: usize,
    put: usize,
}

/// Main loop of the proxy thread. Runs until one of the two sockets is closed, then closes both.
fn run(mut proxy: TlsProxy, name: &str) {
    match proxy.forward() {
        Ok(()) => debug!("{name}: TLS connection closed"),
        // The I/O threads only see that the connection ends, so the reason is logged here.
        Err(error) => warn!("{name}: TLS connection to the server failed: {error}"),
    }
    proxy.session.close();
    let _ = proxy.session.flush(&mut Raw(&proxy.server));
    proxy.server.shut_down();
    proxy.user.shut_down();
}

impl TlsProxy {
    fn forward(&mut self) -> io::Result<()> {
        // Both directions are tried before the first wait. The session may hold bytes that it has
        // read from the socket already.
        let (mut from_server, mut from_user) = (true, true);
        loop {
            if from_server && self.taken == self.filled {
                (self.filled, self.taken) = (0, 0);
                match self.session.receive(&mut Raw(&self.server), &mut self.incoming) {
                    Ok(0) => return Ok(()),
                    Ok(count) => {
                        self.filled = count;
                        // A short read means that the socket is empty.
                        from_server = count == self.incoming.len() || self.session.has_ended();
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => from_server = false,
                    Err(error) => return Err(error),
                }
            }
            let mut user_blocks = false;
            if self.taken < self.filled {
                let rest = self.incoming.get(self.taken..self.filled).unwrap_or_default();
                match self.user.send(&[IoSlice::new(rest)]) {
                    Ok(count) => self.taken += count,
                    Err(Errno::AGAIN) => user_blocks = true,
                    Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                    Err(errno) => return Err(errno.into()),
                }
            }
            if from_user && self.put == self.held {
                (self.held, self.put) = (0, 0);
                match self.user.receive(&mut [], &mut self.outgoing) {
                    Ok(0) | Err(Errno::CONNRESET) => return Ok(()),
                    Ok(count) => {
                        // A short read means that the socket is empty.
                        from_user = count == self.outgoing.len();
                        self.held = count;
                    }
                    Err(Errno::AGAIN) => from_user = false,
                    Err(errno) => return Err(errno.into()),
                }
            }
            let is_out = self.session.flush(&mut Raw(&self.server))?;
            if is_out && self.put < self.held {
                let rest = self.outgoing.get(self.put..self.held).unwrap_or_default();
                self.put += self.session.put(&[IoSlice::new(rest)])?;
                self.session.flush(&mut Raw(&self.server))?;
            }
            let server_blocks = self.session.is_pending();
            let has_incoming = self.taken < self.filled;
            let has_outgoing = self.put < self.held;
            let goes_on = (from_server && !has_incoming)
                || (has_incoming && !user_blocks)
                || (from_user && !has_outgoing)
                || (has_outgoing && !server_blocks);
            if goes_on {
                continue;
            }
            let wants = |reads: bool, writes: bool| {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, reads);
                flags.set(PollFlags::OUT, writes);
                flags
            };
            // A socket without requested events is not polled, because `poll` always returns at
            // once if the peer has closed the socket.
            let server = wants(!has_incoming, server_blocks);
            let user = wants(!has_outgoing, user_blocks);
            let ends = [(&self.server, server), (&self.user, user)];
            let polled = ends.iter().filter(|(_, flags)| !flags.is_empty());
            let mut fds: Vec<_> = polled.map(|(end, flags)| PollFd::new(*end, *flags)).collect();
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let mut fds = fds.iter().map(PollFd::revents);
            let mut readable = |flags: PollFlags| {
                let out = PollFlags::OUT;
                !flags.is_empty() && fds.next().is_some_and(|found| !(found - out).is_empty())
            };
            from_server |= readable(server);
            from_user |= readable(user);
        }
    }
}

/// The server's socket, as transport of TLS records.
struct Raw<'a>(&'a Stream);

impl Read for Raw<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(self.0.receive(&mut [], into)?)
    }
}

impl Write for Raw<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(self.0.send(&[IoSlice::new(from)])?)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(self.0.send(parts)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
