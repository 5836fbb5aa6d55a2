//! A connection's TLS: bytes in and out of it, without waiting.

use crate::error::SessionError;
use rustls::Connection;
use std::io::{self, IoSlice, Read, Write};

/// Bytes that are taken from the socket at once.
const INPUT: usize = 64 << 10;
/// The most bytes that a session holds for the socket. One that holds some takes no more.
pub const MOST_PENDING: usize = 256 << 10;

/// One end of a connection. It has no socket: it is given one that does not block, for each call.
pub struct Session {
    connection: Connection,
    /// What came from the socket and was not looked at.
    input: Box<[u8]>,
    from: usize,
    to: usize,
    /// The other end sends no more.
    ended: bool,
    /// What is wrong with what it sent: nothing more is looked at.
    fault: Option<SessionError>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("handshaking", &self.is_handshaking())
            .field("pending", &self.is_pending())
            .finish_non_exhaustive()
    }
}

fn broken(error: SessionError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Session {
    pub(crate) fn new(mut connection: Connection) -> Self {
        connection.set_buffer_limit(Some(MOST_PENDING));
        Self { connection, input: vec![0; INPUT].into(), from: 0, to: 0, ended: false, fault: None }
    }

    /// Whether the two ends have not agreed yet.
    #[must_use]
    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// Whether there is no more to come, for whatever reason: [`receive`](Self::receive) says so
    /// when what came before is read, although the socket will not be ready again.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended || self.fault.is_some()
    }

    /// Whether there are bytes for the socket: [`flush`](Self::flush) sends them.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.connection.wants_write()
    }

    /// Receives what there is room for in `into`, which is as much as the socket has, unless the
    /// room is too little. Nothing is the end.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock), if there is nothing; the socket's; and, as the
    /// inner error, a [`SessionError`]. What is to be told to the other end then is
    /// [pending](Self::is_pending).
    pub fn receive(&mut self, socket: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        let mut got = 0;
        loop {
            while let Some(room) = into.get_mut(got..).filter(|room| !room.is_empty()) {
                match self.connection.reader().read(room) {
                    // An orderly end.
                    Ok(0) => {
                        self.ended = true;
                        return Ok(got);
                    }
                    Ok(count) => got += count,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    // The socket's end without one. NBD knows by itself what it has not got.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(got),
                    Err(error) => return Err(error),
                }
            }
            if got == into.len() {
                return Ok(got);
            }
            match self.advance(socket) {
                Ok(()) => {}
                // What came before counts first; the next call says the same again.
                Err(_) if got > 0 => return Ok(got),
                Err(error) => return Err(error),
            }
        }
    }

    /// Goes on with the handshake, as far as the socket has bytes.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn handshake(&mut self, socket: &mut impl Read) -> io::Result<()> {
        while self.is_handshaking() {
            self.advance(socket)?;
            if self.ended && self.from == self.to {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // The other end waits for an answer.
            if self.is_pending() {
                break;
            }
        }
        Ok(())
    }

    /// Takes a step: looks at what came, and takes more from the socket if there is nothing.
    fn advance(&mut self, socket: &mut impl Read) -> io::Result<()> {
        if let Some(fault) = &self.fault {
            return Err(broken(fault.clone()));
        }
        if self.from == self.to && !self.ended {
            let count = loop {
                match socket.read(&mut self.input) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    outcome => break outcome?,
                }
            };
            (self.from, self.to) = (0, count);
            self.ended = count == 0;
        }
        let mut rest = self.input.get(self.from..self.to).unwrap_or_default();
        let before = rest.len();
        // Of nothing it learns that the socket has ended.
        self.connection.read_tls(&mut rest)?;
        let used = before - rest.len();
        self.from += used;
        if used == 0 {
            // What follows an orderly end is nobody's.
            (self.from, self.to, self.ended) = (0, 0, true);
        }
        if let Err(error) = self.connection.process_new_packets() {
            let fault = SessionError::new(&error);
            self.fault = Some(fault.clone());
            return Err(broken(fault));
        }
        Ok(())
    }

    /// Takes what there is room for of `parts`, and how much that was: nothing as long as
    /// something is [pending](Self::is_pending). To be followed by [`flush`](Self::flush).
    ///
    /// # Errors
    /// None but those of memory.
    pub fn put(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.is_pending() {
            return Ok(0);
        }
        self.connection.writer().write_vectored(parts)
    }

    /// Sends what is pending, as much as the socket takes. Whether that is all.
    ///
    /// # Errors
    /// The socket's, but not [`WouldBlock`](io::ErrorKind::WouldBlock).
    pub fn flush(&mut self, socket: &mut impl Write) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Says that nothing more is sent; that is pending then.
    pub fn close(&mut self) {
        self.connection.send_close_notify();
    }

    /// What of an error of [`receive`](Self::receive) is TLS's; nothing if it is the socket's.
    #[must_use]
    pub fn fault(error: &io::Error) -> Option<&SessionError> {
        error.get_ref()?.downcast_ref()
    }
}
