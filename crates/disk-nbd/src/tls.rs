//! Blocking TLS connection for the handshakes. Afterwards, the proxy thread takes over.

use crate::stream::Patient;
use shadowbell_tls::Session;
use std::io::{self, IoSlice, Read, Write};

/// Connection through TLS, with a deadline and a stop signal.
pub(crate) struct TlsStream<'a> {
    patient: Patient<'a>,
    session: Session,
}

impl<'a> TlsStream<'a> {
    /// Performs the TLS handshake.
    ///
    /// # Errors
    /// The system's error, or a TLS error ([`Session::fault`]).
    pub(crate) fn agree(patient: Patient<'a>, session: Session) -> io::Result<Self> {
        let mut made = Self { patient, session };
        while made.session.is_handshaking() {
            made.flush()?;
            made.session.handshake(&mut made.patient).map_err(|error| made.farewell(error))?;
        }
        made.flush()?;
        Ok(made)
    }

    pub(crate) fn into_session(self) -> Session {
        self.session
    }

    /// Sends the TLS alert of the error, if possible.
    fn farewell(&mut self, error: io::Error) -> io::Error {
        let _ = self.session.flush(&mut self.patient);
        error
    }
}

impl Read for TlsStream<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        // Blocking is correct here, because the handshake reads whole messages.
        match self.session.receive(&mut self.patient, into) {
            Err(error) => Err(self.farewell(error)),
            count => count,
        }
    }
}

impl Write for TlsStream<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.flush()?;
        let count = self.session.put(&[IoSlice::new(from)])?;
        self.flush()?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.session.flush(&mut self.patient).map(drop)
    }
}
