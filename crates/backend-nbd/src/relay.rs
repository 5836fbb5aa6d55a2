//! TLS for a connection that is in use: a thread of its own between the server and whoever has the
//! connection. Workers serve many disks, and cryptography of a whole window of data would keep them
//! for milliseconds; so they have a socket without TLS to this thread.

use crate::stream::Stream;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use shadowbell_memory::AbortOnPanic;
use shadowbell_tls::Session;
use std::io::{self, IoSlice, Read, Write};
use tracing::{debug, warn};

/// Bytes that are carried at once in each direction.
const BUFFER: usize = 128 << 10;

/// Starts a thread that carries what comes to and from the server at `server`, with which
/// `session` was agreed on. The other end of it, which ends when the server's does, and has that
/// end.
///
/// # Errors
/// The system's.
pub(crate) fn start(server: Stream, session: Session, name: String) -> io::Result<Stream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let relay = Relay {
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
        run(relay, &name);
    })?;
    Ok(Stream::new(near))
}

struct Relay {
    server: Stream,
    session: Session,
    user: Stream,
    /// What came from the server: so much, of which the user has so much.
    incoming: Vec<u8>,
    filled: usize,
    taken: usize,
    /// What came from the user: so much, of which TLS has so much.
    outgoing: Vec<u8>,
    held: usize,
    put: usize,
}

/// Until one end ends, and then both do.
fn run(mut relay: Relay, name: &str) {
    match relay.carry() {
        Ok(()) => debug!("{name}: TLS has come to its end"),
        // Whoever has the connection sees no more than its end.
        Err(error) => warn!("{name}: TLS with the server is over: {error}"),
    }
    relay.session.close();
    let _ = relay.session.flush(&mut Raw(&relay.server));
    relay.server.end();
    relay.user.end();
}

impl Relay {
    fn carry(&mut self) -> io::Result<()> {
        // The session may have bytes that the socket had before.
        let (mut from_server, mut from_user) = (true, true);
        loop {
            if from_server && self.taken == self.filled {
                (self.filled, self.taken) = (0, 0);
                match self.session.receive(&mut Raw(&self.server), &mut self.incoming) {
                    Ok(0) => return Ok(()),
                    Ok(count) => {
                        self.filled = count;
                        // Less than there was room for: the socket had no more.
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
                        // Less than there was room for: there is no more.
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
            // An end from which nothing can be taken at the moment would be ready for ever, if it
            // has hung up.
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

/// The server's socket as TLS uses it.
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
