//! Replay of writes that a restarted server may have lost.

use crate::receiver::Receiver;
use crate::stream::Patient;
use crate::subrequest::{Subrequest, Subrequests};
use crate::unflushed::Entry;
use shadowbell_nbd::wire::{NbdError, command};
use std::io::{self, Read, Write};
use std::sync::Arc;

/// Maximum number of requests in flight during a replay. Their replies fit in any socket buffer. So
/// the server never blocks on sending, and this process can send a batch before it reads replies.
const BATCH: usize = 16;

/// Error of a replay.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplayError {
    /// The connection ended. The replay has to be repeated on the next connection.
    #[error("{0}")]
    Lost(#[from] io::Error),
    /// The server refuses a request of the replay.
    #[error("the server refuses it with error {0}")]
    Refused(u32),
}

/// Sends a flush for all earlier writes, and waits for its reply.
pub(crate) fn flush(stream: &mut Patient<'_>, structured: bool) -> Result<(), ReplayError> {
    let (command, data) = (command::FLUSH, Arc::default());
    replay(stream, &[Entry { command, flags: 0, offset: 0, len: 0, data }], structured)
}

/// Sends `entries` in order, and waits for their replies.
pub(crate) fn replay(
    stream: &mut Patient<'_>,
    entries: &[Entry],
    structured: bool,
) -> Result<(), ReplayError> {
    let mut rest = entries;
    let mut receiver = Receiver::new(structured, None);
    let mut parts = Subrequests::default();
    while !rest.is_empty() {
        // A server may execute requests in flight in any order. So a batch ends before a request
        // that overlaps an earlier one.
        let clashes = |at: usize| {
            let (before, entry) = (rest.get(..at), rest.get(at));
            let overlaps =
                |entry: &Entry| before.is_some_and(|b| b.iter().any(|e| e.overlaps(entry)));
            entry.is_none_or(overlaps)
        };
        let count = (1..BATCH).find(|at| clashes(*at)).unwrap_or(BATCH).min(rest.len());
        let (batch, later) = rest.split_at(count);
        rest = later;
        for entry in batch {
            let Entry { command, flags, offset, len, data } = entry;
            let slot = parts.insert(Subrequest::new(*command, *flags, *offset, *len, Vec::new()));
            if let Some(part) = parts.get_mut(slot) {
                part.is_sent = true;
            }
            if let Some(request) = parts.request(slot) {
                stream.write_all(&request.encode())?;
            }
            stream.write_all(data)?;
        }
        let mut left = count;
        while left != 0 {
            let (_, room) = receiver.room(&mut parts);
            let received = match stream.read(room)? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                received => received,
            };
            receiver.received(received, 0);
            let mut refused = None;
            let outcome = receiver.advance(&mut parts, |_, error| {
                left -= 1;
                if error != 0 {
                    refused = Some(error);
                }
            });
            outcome.map_err(io::Error::other)?;
            match refused {
                None => {}
                Some(error) if error == NbdError::Shutdown as u32 => {
                    return Err(io::Error::from(io::ErrorKind::ConnectionAborted).into());
                }
                Some(error) => return Err(ReplayError::Refused(error)),
            }
        }
    }
    Ok(())
}
