//! What a keeper is, written down: for the same process with another program, and for another
//! process after its death. It is a state as those of servers are (`shadowbell-state`): sections,
//! of which one that is not known is refused if it is mandatory, and a version.
//!
//! It travels through a socket for packets, together with its descriptors: the first packet has a
//! memfd with the bytes, and says how many descriptors follow. Each packet has a number, by which
//! one that is there twice is known.

use crate::keeper_link::{MOST_FDS, Packet, send_bytes};
use crate::saved_items::Fds;
use rustix::fs::{MemfdFlags, memfd_create};
use shadowbell_state::{Parcel, StateError};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};

/// The first packet of a record.
const RECORD: u8 = b'D';
/// More of its descriptors.
const MORE: u8 = b'd';

/// A record that was written.
pub(super) struct Record<'a> {
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Fds<'a>,
}

impl Record<'_> {
    /// Its bytes, in memory that another process can read.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn memory(&self) -> io::Result<OwnedFd> {
        let mut file = File::from(memfd_create("shadowbell-keeper", MemfdFlags::CLOEXEC)?);
        file.write_all(&self.bytes)?;
        Ok(file.into())
    }

    /// Sends it, its packets numbered from `number` on, which is that of the next one then.
    ///
    /// # Errors
    /// The system's; there was no room.
    pub(super) fn send(&self, socket: impl AsFd, number: &mut u64) -> io::Result<()> {
        let memory = self.memory()?;
        let mut body = number.to_le_bytes().to_vec();
        body.extend((self.fds.len() as u32).to_le_bytes());
        send_bytes(&socket, RECORD, &body, &[memory.as_fd()], true)?;
        *number = number.saturating_add(1);
        for some in self.fds.chunks(MOST_FDS) {
            send_bytes(&socket, MORE, &number.to_le_bytes(), some, true)?;
            *number = number.saturating_add(1);
        }
        Ok(())
    }
}

/// A record that arrives.
pub(super) struct Arriving {
    memory: OwnedFd,
    count: usize,
    fds: Vec<OwnedFd>,
}

impl Arriving {
    /// Takes a packet: of a record that begins, or one more of it.
    pub(super) fn take(before: Option<Self>, packet: Packet) -> Option<Self> {
        let body = packet.body.get(8..)?;
        let mut fds = packet.fds;
        match (packet.letter, before) {
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

    /// Whether this packet is one of a record.
    pub(super) fn is_of(packet: &Packet) -> bool {
        matches!(packet.letter, RECORD | MORE)
    }

    pub(super) fn is_complete(&self) -> bool {
        self.fds.len() >= self.count
    }

    /// Its sections.
    ///
    /// # Errors
    /// [`StateError`].
    pub(super) fn read(self) -> Result<Parcel, StateError> {
        Parcel::decode(&bytes_in(self.memory)?, self.fds)
    }
}

/// What is in this memory.
///
/// # Errors
/// The system's.
pub(super) fn bytes_in(memory: OwnedFd) -> io::Result<Vec<u8>> {
    let mut file = File::from(memory);
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}
