//! Namespace changes in progress, and the ANA states that the host may already have read. If a
//! current ANA state differs from the known one, the host gets an event (Base 2.1, 8.1.1).

use super::lifecycle_state::Callback;
use crate::admin::logs::AnaChanges;
use crate::config::{ConfigError, MAX_NAMESPACES};
use crate::context::Context;
use crate::namespace::Namespace;
use crate::saved::SavedAna;
use crate::subsystem::Member;
use shadowbell_spec::log::AnaState;
use shadowbell_spec::status::Status;
use std::collections::BTreeMap;

/// Error in adding, removing or changing a namespace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// No namespace has this NSID.
    #[error("there is no namespace {0}")]
    Missing(u32),
    /// A namespace with this NSID exists already.
    #[error("there is a namespace {0} already")]
    Present(u32),
    /// The NSID is out of range, or all NSIDs are in use.
    #[error("the controller has no room for a namespace: NSIDs are 1 to {MAX_NAMESPACES}")]
    NoRoom,
    /// Another change of the namespace is in progress.
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
    /// The controller is quiesced, or a quiesce is in progress.
    #[error("the controller is quiesced, because another process is about to serve it")]
    Frozen,
}

/// Callback for the end of a namespace change. It gets the result of the change.
pub(crate) type ChangeCallback = Box<dyn FnOnce(Result<(), NamespaceError>) + Send>;

/// Namespace change in progress.
pub(super) struct Change {
    pub(super) before: Option<Namespace>,
    pub(super) after: Option<Namespace>,
    /// True if Identify reports the new disk only after the change has ended; false if Identify
    /// reports it from the start of the change.
    pub(super) publish_last: bool,
    /// True if the change is being undone.
    pub(super) undone: bool,
    pub(super) done: ChangeCallback,
}

/// Namespace changes in progress, by NSID.
#[derive(Default)]
pub(super) struct NamespaceChanges(pub(super) BTreeMap<u32, Change>);

impl NamespaceChanges {
    /// True if no change is in progress.
    pub(super) fn is_idle(&self) -> bool {
        self.0.is_empty()
    }
}

/// ANA states that the host may know, and callbacks of ANA changes in progress.
#[derive(Default)]
pub(super) struct Ana {
    pub(super) changes: AnaChanges,
    pub(super) waiting: Vec<(u64, Callback)>,
    pub(super) next_ticket: u64,
}

impl Ana {
    /// Compares the current states with the known ones, and then stores the current ones. Returns
    /// true if a state has changed.
    pub(super) fn review(&mut self, cx: &Context) -> bool {
        cx.config.member.as_ref().is_some_and(|member| self.changes.review(states(cx, member)))
    }

    /// Sets the current states as the initial ones, for a new controller or after a reset.
    pub(super) fn begin(&mut self, cx: &Context) {
        self.changes = AnaChanges::default();
        self.review(cx);
    }

    pub(super) fn save(&self) -> SavedAna {
        self.changes.save()
    }
}

/// NSIDs by ANA group, for groups that have namespaces.
pub(super) fn groups(cx: &Context, member: &Member) -> BTreeMap<u32, Vec<u32>> {
    let mut groups = BTreeMap::<u32, Vec<u32>>::new();
    for namespace in cx.identified().iter() {
        groups.entry(member.ana_group(namespace.nsid())).or_default().push(namespace.nsid());
    }
    groups
}

fn states(cx: &Context, member: &Member) -> impl Iterator<Item = (u32, AnaState)> {
    let groups = groups(cx, member).into_keys().collect::<Vec<_>>();
    groups.into_iter().map(|group| (group, member.ana_state(group)))
}

/// Checks that the ANA state allows a command for namespace `nsid`.
///
/// # Errors
/// The status with which the state of the namespace's group refuses the command.
pub(super) fn check_ana_state(cx: &Context, nsid: u32) -> Result<(), Status> {
    let state = cx.config.member.as_ref().map(|member| member.ana_state(member.ana_group(nsid)));
    state.and_then(AnaState::refusal).map_or(Ok(()), Err)
}
