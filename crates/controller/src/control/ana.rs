//! Asymmetric Namespace Access in the control plane: changes of ANA states. Base 2.1,
//! 8.1.1.
//!
//! A change is applied in this order. The log page is updated first, so that a host whose command
//! is refused finds the reason there. Then the event is raised, and then the I/O threads are
//! notified. Commands in flight end normally, because all controllers share the medium. Commands
//! fetched afterwards are refused if the new state refuses them.

use super::Control;
use super::ana_access::groups;
use super::deferred::{Callback, Deferred};
use crate::admin::logs::AnaChanges;
use crate::context::Context;
use crate::notice::Notice;
use crate::saved::SavedAna;
use crate::worker::mailbox::Message;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::log::{AnaGroup, AnaState};

impl Control {
    /// Sets the ANA state of a group for this controller. `done` is called when all commands that
    /// were in flight before the change have ended.
    pub(crate) fn set_ana_state(
        &mut self,
        cx: &Context,
        (group, state): (u32, AnaState),
        done: Callback,
    ) -> Deferred {
        let mut deferred = Deferred::default();
        let Some(member) = &cx.config.member else {
            deferred.callbacks.push(done);
            return deferred;
        };
        self.commands.ana.review(cx);
        member.set_ana_state(group, state);
        self.tell_ana(cx);
        let ticket = self.commands.ana.next_ticket;
        self.commands.ana.next_ticket += 1;
        self.commands.ana.waiting.push((ticket, done));
        let latch = cx.latch(Notice::AnaChanged { ticket });
        let namespaces = cx.identified();
        let of_group =
            namespaces.iter().filter(|namespace| member.ana_group(namespace.nsid()) == group);
        for uuid in of_group.map(|namespace| namespace.uuid()) {
            for worker in cx.route.everywhere(self.queues.workers()) {
                let (controller, latch) = (cx.shared.id, latch.clone());
                let message = Message::ReviewAccess { controller, uuid, aborts: false, latch };
                cx.pool.send(worker, message);
            }
        }
        deferred.latches.push(latch);
        deferred
    }

    /// Current states and namespaces of the ANA groups.
    pub(crate) fn ana_groups(&self, cx: &Context) -> Vec<AnaGroup> {
        let Some(member) = &cx.config.member else { return Vec::new() };
        let group = |(id, nsids): (u32, Vec<u32>)| {
            let state = Some(member.ana_state(id));
            AnaGroup { id, state, nsids, ..AnaGroup::default() }
        };
        groups(cx, member).into_iter().map(group).collect()
    }

    /// Raises the ANA change event if a state differs from the last one that the host could know.
    pub(super) fn tell_ana(&mut self, cx: &Context) {
        if self.commands.ana.review(cx) && self.is_ready() {
            self.port.raise(AsyncEvent::ANA_CHANGE);
        }
    }

    /// Calls the callback of a change whose earlier commands have all ended.
    pub(super) fn ana_changed(&mut self, ticket: u64, deferred: &mut Deferred) {
        let waiting = &mut self.commands.ana.waiting;
        if let Some(at) = waiting.iter().position(|(its, _)| *its == ticket) {
            deferred.callbacks.push(waiting.swap_remove(at).1);
        }
    }

    /// Restores the ANA state of another process. The caller calls [`tell_ana`](Self::tell_ana)
    /// when the admin queue exists, because a state may have changed in the meantime.
    pub(super) fn restore_ana(&mut self, cx: &Context, saved: &SavedAna) {
        self.commands.ana.changes = AnaChanges::restore(saved);
        if saved == &SavedAna::default() {
            self.commands.ana.begin(cx);
        }
    }
}
