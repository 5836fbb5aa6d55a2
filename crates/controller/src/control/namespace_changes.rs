//! Namespace changes in progress, and errors.

use crate::config::{ConfigError, MAX_NAMESPACES};
use crate::namespace::Namespace;
use std::collections::BTreeMap;

/// Error in adding, removing or changing a namespace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// No namespace has this NSID.
    #[error("there is no namespace {0}")]
    Missing(u32),
    /// A namespace has this NSID already.
    #[error("there is a namespace {0} already")]
    Present(u32),
    /// The NSID is out of range, or all NSIDs are in use.
    #[error("the controller has no room for a namespace: NSIDs are 1 to {MAX_NAMESPACES}")]
    NoRoom,
    /// The namespace is being changed.
    #[error("namespace {0} is being changed: try again later")]
    Changing(u32),
    /// The disk or the UUID is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The new disk has another block size.
    #[error(
        "namespace {nsid} has blocks of {before} bytes, and {disk} has blocks of {after}; remove \
         the namespace and add it again"
    )]
    BlockSize {
        /// NSID.
        nsid: u32,
        /// Name of the new disk.
        disk: String,
        /// Block size of the namespace in bytes.
        before: u32,
        /// Block size of the new disk in bytes.
        after: u32,
    },
    /// An I/O thread could not open the disk; the change was undone.
    #[error("namespace {0}: an I/O thread could not open the disk; see the log")]
    Open(u32),
    /// The controller is quiesced or quiescing.
    #[error("the controller is quiesced, because another process is about to serve it")]
    Frozen,
}

/// Callback for the end of a change.
pub(crate) type Done = Box<dyn FnOnce(Result<(), NamespaceError>) + Send>;

/// Change in progress.
pub(super) struct Change {
    pub(super) before: Option<Namespace>,
    pub(super) after: Option<Namespace>,
    /// True if Identify changes at the end of the change.
    pub(super) publish_last: bool,
    /// True if the change is being undone.
    pub(super) undone: bool,
    pub(super) done: Done,
}

/// Changes in progress, by NSID.
#[derive(Default)]
pub(super) struct NamespaceChanges(pub(super) BTreeMap<u32, Change>);

impl NamespaceChanges {
    /// True if no change is in progress.
    pub(super) fn is_quiet(&self) -> bool {
        self.0.is_empty()
    }
}
