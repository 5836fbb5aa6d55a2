//! What the commands have to know of the states of ANA groups. Base 2.1, 8.1.1.

use super::deferred::Callback;
use crate::admin::ana::AnaChanges;
use crate::context::Context;
use crate::saved::SavedAna;
use crate::subsystem::Member;
use shadowbell_spec::log::AnaState;
use shadowbell_spec::status::Status;
use std::collections::BTreeMap;

/// What the host can know, and who waits for the end of a change.
#[derive(Default)]
pub(super) struct Ana {
    pub(super) changes: AnaChanges,
    pub(super) waiting: Vec<(u64, Callback)>,
    pub(super) next_ticket: u64,
}

impl Ana {
    /// Looks at the states as they are: whether one has changed.
    pub(super) fn review(&mut self, cx: &Context) -> bool {
        cx.config.member.as_ref().is_some_and(|member| self.changes.review(states(cx, member)))
    }

    /// A controller comes to be, or a reset is over: what is now is what the host begins with.
    pub(super) fn begin(&mut self, cx: &Context) {
        self.changes = AnaChanges::default();
        self.review(cx);
    }

    pub(super) fn save(&self) -> SavedAna {
        self.changes.save()
    }
}

/// The namespaces of each group that has some.
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

/// Whether a command that is about this namespace is carried out.
///
/// # Errors
/// The state of its group refuses it.
pub(super) fn check(cx: &Context, nsid: u32) -> Result<(), Status> {
    let state = cx.config.member.as_ref().map(|member| member.ana_state(member.ana_group(nsid)));
    state.and_then(AnaState::refusal).map_or(Ok(()), Err)
}
