//! What one reactor tells another of a device that it serves.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::listener::SavedListener;
use super::session::SavedSession;

/// A device, its socket and its client, as [`Reactor::save`](super::Reactor::save) leaves them to
/// [`Reactor::restore`](super::Reactor::restore). Descriptors are beside it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SavedPort {
    /// None: there is one client, and no other comes.
    pub(super) listener: Option<SavedListener>,
    /// The client, if one is there.
    pub(super) session: Option<SavedSession>,
    pub(super) device: serde_json::Value,
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
