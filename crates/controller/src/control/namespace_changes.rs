//! Which namespaces are being changed, and why one can not be.

use crate::config::{ConfigError, MAX_NAMESPACES};
use crate::namespace::Namespace;
use std::collections::BTreeMap;

/// Why a namespace can not be added, removed or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// There is none of this NSID.
    #[error("there is no namespace {0}")]
    Missing(u32),
    /// There is one of this NSID.
    #[error("there is a namespace {0} already")]
    Present(u32),
    /// The NSID is none that a namespace can have, or all are in use.
    #[error("the controller has no room for a namespace: NSIDs are 1 to {MAX_NAMESPACES}")]
    NoRoom,
    /// A change of it is under way.
    #[error("namespace {0} is being changed; wait for the end of that")]
    Changing(u32),
    /// The disk or the UUID is not possible.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The disk has another block size.
    #[error(
        "namespace {nsid} has blocks of {before} bytes, and {disk} has blocks of {after}; remove \
         the namespace and add it again"
    )]
    BlockSize {
        /// The namespace.
        nsid: u32,
        /// The disk's name.
        disk: String,
        /// Bytes in its blocks.
        before: u32,
        /// Bytes in the disk's.
        after: u32,
    },
    /// A worker could not open the disk: all is as it was.
    #[error("namespace {0}: a worker could not open its disk; the log says why")]
    Open(u32),
    /// The controller is at rest, or comes to rest.
    #[error("the controller is at rest: it is about to be served by another process")]
    Frozen,
}

/// Who is told of the end of a change.
pub(crate) type Done = Box<dyn FnOnce(Result<(), NamespaceError>) + Send>;

/// A change under way.
pub(super) struct Change {
    pub(super) before: Option<Namespace>,
    pub(super) after: Option<Namespace>,
    /// What Identify says changes with its end.
    pub(super) publish_last: bool,
    /// It is being undone.
    pub(super) undone: bool,
    pub(super) done: Done,
}

/// The changes under way, by NSID.
#[derive(Default)]
pub(super) struct NamespaceChanges(pub(super) BTreeMap<u32, Change>);

impl NamespaceChanges {
    /// Whether none is under way.
    pub(super) fn is_quiet(&self) -> bool {
        self.0.is_empty()
    }
}
