//! Serialized state of a port (a device, its socket and its client), for the next server process.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::listener::SavedListener;
use crate::codec::SavedQueue;
use crate::device::DeviceInfo;
use shadowbell_state::{Bytes, FdRef};

/// Checkpoint of a device with its sockets and its client. A
/// [`PortRecorder`](super::PortRecorder) stores it, and [`RestoredPort`](super::RestoredPort)
/// restores it. Descriptors are passed separately.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SavedPort {
    /// Listening socket; `None` if the port has a single client and accepts no other.
    pub(super) listener: Option<SavedListener>,
    /// Attached client, if any.
    pub(super) session: Option<SavedSession>,
    pub(super) device: serde_json::Value,
    /// True if the client has disconnected, and the device has not yet released it.
    #[serde(default)]
    pub(super) leaving: bool,
}

impl SavedPort {
    /// Path of the listening socket, if any.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        self.listener.as_ref().map(SavedListener::path)
    }

    /// State of the device; null if there was a client whose state could not be saved.
    #[must_use]
    pub fn device(&self) -> &serde_json::Value {
        &self.device
    }

    /// True if a client is attached.
    #[must_use]
    pub fn has_client(&self) -> bool {
        self.session.is_some()
    }
}

/// Serialized state of a session between two requests.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SavedSession {
    pub(super) socket: FdRef,
    pub(super) link: SavedLink,
    /// Last executed message. Messages that are not executed are still in the socket.
    #[serde(default)]
    pub(super) handled: Option<Handled>,
}

/// Length and hash of an executed message that may still be in the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Handled {
    pub(super) len: u64,
    pub(super) hash: u64,
}

impl Handled {
    pub(super) fn new(bytes: &[u8]) -> Self {
        // The hash is FNV-1a. Equal hashes of different messages are unlikely, because the bytes
        // contain the message's identifier.
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        Self { len: bytes.len() as u64, hash: bytes.iter().fold(0xcbf2_9ce4_8422_2325, step) }
    }
}

/// Serialized state of a link between two requests.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SavedLink {
    pub(super) out: SavedQueue,
    pub(super) agreed: Option<Agreed>,
    /// Header and payload of each unmap that has no reply yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) unmaps: Vec<(Bytes, Bytes)>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Agreed {
    pub(super) max_xfer: u32,
    /// Maximum number of descriptors per message to the client.
    pub(super) max_fds: u32,
    pub(super) info: DeviceInfo,
}
