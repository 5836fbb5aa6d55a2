//! TLS session of one connection, with non-blocking input and output.

use crate::error::SessionError;
use rustls::Connection;
use std::io::{self, IoSlice, Read, Write};

/// Maximum number of bytes that one call reads from the socket.
const INPUT: usize = 64 << 10;
/// Number of pending output bytes at which a session accepts no more data.
pub const MOST_PENDING: usize = 256 << 10;

/// TLS session of one side of a connection. The session has no socket: the caller passes a
/// non-blocking socket to each method.
pub struct Session {
    connection: Connection,
    /// Received bytes. Those in `from..to` are not processed yet.
    input: Box<[u8]>,
    from: usize,
    to: usize,
    /// True if the peer sends no more data.
    ended: bool,
    /// Error in the peer's data. No data is processed after it.
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

    /// True until the handshake is complete.
    #[must_use]
    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// True if no more data will arrive from the peer. [`receive`](Self::receive) may still return
    /// data that arrived earlier, although the socket does not become readable again.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended || self.fault.is_some()
    }

    /// True if output is pending, which [`flush`](Self::flush) sends.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.connection.wants_write()
    }

    /// Receives data into `into` until the buffer is full or the socket has no more. Returns 0 at
    /// the end of the stream.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if there is no data, or an error of the socket.
    /// For a TLS error, the inner error is a [`SessionError`], and an alert for the peer is
    /// [pending](Self::is_pending).
    pub fn receive(&mut self, socket: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        let mut got = 0;
        loop {
            while let Some(room) = into.get_mut(got..).filter(|room| !room.is_empty()) {
                match self.connection.reader().read(room) {
                    // The peer has closed the session by `close_notify`.
                    Ok(0) => {
                        self.ended = true;
                        return Ok(got);
                    }
                    Ok(count) => got += count,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    // The connection ended without `close_notify`. This is permitted, because NBD
                    // itself detects incomplete messages.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(got),
                    Err(error) => return Err(error),
                }
            }
            if got == into.len() {
                return Ok(got);
            }
            match self.advance(socket) {
                Ok(()) => {}
                // The data before the error is returned first. The next call returns the error.
                Err(_) if got > 0 => return Ok(got),
                Err(error) => return Err(error),
            }
        }
    }

    /// Continues the handshake with the bytes that the socket has.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn handshake(&mut self, socket: &mut impl Read) -> io::Result<()> {
        while self.is_handshaking() {
            self.advance(socket)?;
            if self.ended && self.from == self.to {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // The peer does not continue before it gets the pending output.
            if self.is_pending() {
                break;
            }
        }
        Ok(())
    }

    /// Processes received bytes. If none are left, first reads from the socket.
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
        // If `rest` is empty, this call notifies rustls that the connection has ended.
        self.connection.read_tls(&mut rest)?;
        let used = before - rest.len();
        self.from += used;
        if used == 0 {
            // Bytes after `close_notify` are discarded.
            (self.from, self.to, self.ended) = (0, 0, true);
        }
        if let Err(error) = self.connection.process_new_packets() {
            let fault = SessionError::new(&error);
            self.fault = Some(fault.clone());
            return Err(broken(fault));
        }
        Ok(())
    }

    /// Encrypts data of `parts`. Returns the number of accepted bytes: 0 while output is
    /// [pending](Self::is_pending). The caller has to call [`flush`](Self::flush) next.
    ///
    /// # Errors
    ///
    /// Only if memory is exhausted.
    pub fn put(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.is_pending() {
            return Ok(0);
        }
        self.connection.writer().write_vectored(parts)
    }

    /// Sends as much pending output as the socket accepts. Returns true if all was sent.
    ///
    /// # Errors
    ///
    /// An error of the socket, except [`WouldBlock`](io::ErrorKind::WouldBlock).
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

    /// Ends the output. Afterwards a `close_notify` is pending.
    pub fn close(&mut self) {
        self.connection.send_close_notify();
    }

    /// TLS error inside an error of [`receive`](Self::receive), or `None` for an error of the
    /// socket.
    #[must_use]
    pub fn fault(error: &io::Error) -> Option<&SessionError> {
        error.get_ref()?.downcast_ref()
    }
}
