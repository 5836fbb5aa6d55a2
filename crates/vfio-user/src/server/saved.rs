//! What one reactor tells another of a device that it serves.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::listener::SavedListener;
use crate::codec::{SavedDecoder, SavedQueue};
use crate::device::DeviceInfo;
use shadowbell_state::FdRef;

/// A device, its socket and its client, as [`Reactor::save`](super::Reactor::save) leaves them to
/// [`Reactor::restore`](super::Reactor::restore). Descriptors are beside it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SavedPort {
    /// None: there is one client, and no other comes.
    pub(super) listener: Option<SavedListener>,
    /// The client, if one is there.
    pub(super) session: Option<SavedSession>,
    pub(super) device: serde_json::Value,
    /// The client was there, and the device is to let go of it.
    #[serde(default)]
    pub(super) leaving: bool,
}

impl SavedPort {
    /// Where it listens, if it does.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        self.listener.as_ref().map(SavedListener::path)
    }

    /// Whether a client is there.
    #[must_use]
    pub fn has_client(&self) -> bool {
        self.session.is_some()
    }
}

/// A session at rest, on its way to another process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SavedSession {
    pub(super) socket: FdRef,
    pub(super) received: SavedDecoder,
    pub(super) link: SavedLink,
    /// It was recorded, and what it has received and not carried out is in the socket.
    #[serde(default)]
    pub(super) recorded: bool,
    #[serde(default)]
    pub(super) handled: Option<Handled>,
}

/// A message that was carried out and may still be in the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Handled {
    pub(super) len: u64,
    pub(super) hash: u64,
}

impl Handled {
    pub(super) fn new(bytes: &[u8]) -> Self {
        // FNV-1a: a message's identifier is part of it, so two are seldom alike.
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        Self { len: bytes.len() as u64, hash: bytes.iter().fold(0xcbf2_9ce4_8422_2325, step) }
    }
}

/// A link at rest, on its way to another process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SavedLink {
    pub(super) out: SavedQueue,
    pub(super) agreed: Option<Agreed>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Agreed {
    pub(super) max_xfer: u32,
    /// Descriptors that the client takes with one message.
    pub(super) max_fds: u32,
    pub(super) info: DeviceInfo,
}
