//! Handshake with a client over its socket.

use super::admission::{Admission, Peer};
use super::handshake::{Agreed, Export, Handshake, Security, Step};
use super::shared::{Registered, ServerShared};
use super::socket::{ClientSocket, ConnectionError, NEGOTIATION_TIMEOUT};
use crate::io_thread::IoThread;
use crate::vectors::Part;
use rustix::io::Errno;
use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

/// Negotiates with a client. Returns the result and the client's admission, or `None` if the
/// client has disconnected.
pub(super) fn negotiate<F: Future>(
    socket: &mut ClientSocket,
    io: &mut IoThread<F>,
    export: Arc<Export>,
    registered: &Registered,
    peer: Peer,
) -> Result<Option<(Agreed, Admission)>, ConnectionError> {
    let deadline = Instant::now() + NEGOTIATION_TIMEOUT;
    let shared = registered.server();
    let security = if shared.tls.is_some() { Security::Required } else { Security::None };
    let mut handshake = Handshake::new(export, security);
    let mut out = Handshake::greeting();
    let mut over: Option<Step> = None;
    let mut admission = None;
    loop {
        if !out.is_empty() && !socket.blocked {
            match socket.send(&[Part::of(&out)]) {
                Ok(sent) => drop(out.drain(..sent.min(out.len()))),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => socket.block(io)?,
                // A client that only checks whether a server exists disconnects before it reads the
                // answer.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(None),
                Err(errno) => return Err(socket.error(errno)),
            }
            continue;
        }
        // TLS itself has pending output, such as handshake messages.
        if !socket.blocked && socket.has_pending() {
            match socket.flush() {
                Ok(true) => {}
                Ok(false) => socket.block(io)?,
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(None),
                Err(errno) => return Err(socket.error(errno)),
            }
        }
        if out.is_empty() {
            match over.take() {
                Some(Step::BeginTls) => begin_tls(socket, shared)?,
                Some(Step::Transmission(agreed)) => {
                    return Ok(admission.map(|admission| (agreed, admission)));
                }
                Some(Step::Over(None)) => {
                    socket.close();
                    return Ok(None);
                }
                Some(Step::Over(Some(why))) => return Err(ConnectionError::Protocol(why)),
                _ => {}
            }
            let (used, step) = handshake.advance(socket.input.rest(), &mut out);
            socket.input.consume(used);
            match step {
                Step::More if used > 0 => continue,
                Step::More => {}
                step => {
                    // The client is admitted before it gets the positive reply.
                    if matches!(step, Step::Transmission(_)) {
                        admission =
                            Some(shared.admitted.take(peer).ok_or(ConnectionError::TooMany)?);
                    }
                    over = Some(step);
                    continue;
                }
            }
        }
        if registered.is_ending() {
            return Ok(None);
        }
        if Instant::now() >= deadline {
            return Err(ConnectionError::Slow);
        }
        if out.is_empty() && socket.readable {
            match socket.receive() {
                Ok(0) => return Ok(None),
                Ok(count) => socket.input.to += count,
                Err(Errno::AGAIN) => socket.readable = false,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(None),
                Err(errno) => return Err(socket.error(errno)),
            }
            continue;
        }
        if io.prepare_sleep() {
            socket.wait(io, Some(deadline))?;
        }
    }
}

fn begin_tls(socket: &mut ClientSocket, shared: &ServerShared) -> Result<(), ConnectionError> {
    // Plaintext after STARTTLS, which a man in the middle may have injected, must not be taken for
    // data of the TLS session.
    if !socket.input.rest().is_empty() {
        let why = "the client, or a man in the middle, sent data before TLS started";
        return Err(ConnectionError::Protocol(why.into()));
    }
    if let Some(tls) = &shared.tls {
        socket.begin_tls(tls.session().map_err(ConnectionError::Tls)?);
    }
    Ok(())
}
