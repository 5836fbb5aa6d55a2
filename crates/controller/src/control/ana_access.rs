//! ANA states in admin commands. Base 2.1, 8.1.1.

use super::deferred::Callback;
use crate::admin::logs::AnaChanges;
use crate::context::Context;
use crate::saved::SavedAna;
use crate::subsystem::Member;
use shadowbell_spec::log::AnaState;
use shadowbell_spec::status::Status;
use std::collections::BTreeMap;

/// ANA states that the host may know, and callbacks of changes in progress.
#[derive(Default)]
pub(super) struct Ana {
    pub(super) changes: AnaChanges,
    pub(super) waiting: Vec<(u64, Callback)>,
    pub(super) next_ticket: u64,
}

impl Ana {
    /// Compares the states with the known ones. Returns true if one has changed.
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
pub(super) fn check(cx: &Context, nsid: u32) -> Result<(), Status> {
    let state = cx.config.member.as_ref().map(|member| member.ana_state(member.ana_group(nsid)));
    state.and_then(AnaState::refusal).map_or(Ok(()), Err)
}
