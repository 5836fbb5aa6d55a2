//! Snapshot of the supervisor's state: for the same process after exec, and for another process
//! after a crash. Its format is that of `shadowbell-state`: a version and sections. An unknown
//! section is refused if it is mandatory.
//!
//! A snapshot is sent over a packet socket together with its descriptors. The first packet has a
//! memfd with the serialized state, and the number of descriptors that follow. Each packet has a
//! sequence number, by which a reader recognizes duplicates.

use crate::checkpoint::{content_of, memory_of};
use crate::checkpoint_codec::Fds;
use crate::protocol::{MAX_FDS, Packet, send_bytes};
use shadowbell_state::{Parcel, StateError};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Type of a snapshot's first packet.
const RECORD: u8 = b'D';
/// Type of a packet with further descriptors of a snapshot.
const MORE: u8 = b'd';

/// A serialized snapshot.
pub(super) struct Snapshot<'a> {
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Fds<'a>,
}

impl Snapshot<'_> {
    /// Sends the snapshot. `number` is the sequence number of its first packet, and is advanced by
    /// the number of packets.
    ///
    /// # Errors
    /// A system call fails, or the socket buffer is full.
    pub(super) fn send(&self, socket: impl AsFd, number: &mut u64) -> io::Result<()> {
        let memory = memory_of(&self.bytes)?;
        let mut body = number.to_le_bytes().to_vec();
        body.extend((self.fds.len() as u32).to_le_bytes());
        send_bytes(&socket, RECORD, &body, &[memory.as_fd()], true)?;
        *number = number.saturating_add(1);
        for some in self.fds.chunks(MAX_FDS) {
            send_bytes(&socket, MORE, &number.to_le_bytes(), some, true)?;
            *number = number.saturating_add(1);
        }
        Ok(())
    }
}

/// A partly received snapshot.
pub(super) struct PartialSnapshot {
    memory: OwnedFd,
    count: usize,
    fds: Vec<OwnedFd>,
}

impl PartialSnapshot {
    /// Adds a packet to the incomplete snapshot `before`, or begins a new one. Returns `None` if
    /// the packet belongs to neither.
    pub(super) fn take(before: Option<Self>, packet: Packet) -> Option<Self> {
        let body = packet.body.get(8..)?;
        let mut fds = packet.fds;
        match (packet.code, before) {
            (RECORD, _) => {
                let count = u32::from_le_bytes(*body.first_chunk()?) as usize;
                let memory = fds.pop()?;
                Some(Self { memory, count, fds })
            }
            (MORE, Some(mut record)) => {
                record.fds.extend(fds);
                Some(record)
            }
            _ => None,
        }
    }

    /// Returns true if the packet belongs to a snapshot.
    pub(super) fn is_of(packet: &Packet) -> bool {
        matches!(packet.code, RECORD | MORE)
    }

    pub(super) fn is_complete(&self) -> bool {
        self.fds.len() >= self.count
    }

    /// Decodes the sections.
    ///
    /// # Errors
    /// The bytes or descriptors do not make up a valid state.
    pub(super) fn read(self) -> Result<Parcel, StateError> {
        Parcel::decode(&content_of(self.memory)?, self.fds)
    }
}
