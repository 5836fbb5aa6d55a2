//! Reservations in the control plane: forwards changes of the [subsystem](crate::subsystem) to I/O
//! threads and to the host.
//!
//! Changes are forwarded even while the controller moves or quiesces: they are sent to all I/O
//! threads that may have its queues. Queues that arrive at an I/O thread read the current access
//! rights when they open their namespaces.

use super::Control;
use super::deferred::Deferred;
use crate::admin::logs::ReservationLog;
use crate::context::Context;
use crate::reservations::HostId;
use crate::saved::SavedSharing;
use crate::subsystem;
use crate::worker::mailbox::Message;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::status::Status;

impl Control {
    /// Forwards the subsystem's pending changes and notifications.
    pub(super) fn pass_on_changes(&mut self, cx: &Context, deferred: &mut Deferred) {
        let Some(member) = &cx.config.member else { return };
        for subsystem::Change { uuid, aborts, latch } in member.take_changes() {
            for worker in cx.route.everywhere(self.queues.workers()) {
                let (controller, latch) = (cx.shared.id, latch.clone());
                let message = Message::ReviewAccess { controller, uuid, aborts, latch };
                cx.pool.send(worker, message);
            }
            deferred.latches.push(latch);
        }
        for (uuid, kind) in member.take_told() {
            let namespaces = cx.identified();
            let found = namespaces.iter().find(|namespace| namespace.uuid() == uuid);
            if let Some(namespace) = found
                && self.is_ready()
                && self.commands.reservations.tell(namespace.nsid(), kind)
            {
                self.port.raise(AsyncEvent::RESERVATION_LOG_PAGE);
            }
        }
    }

    /// Reports the end of a reservation command to the I/O threads, one of which has issued it.
    pub(super) fn end_reservation(&self, cx: &Context, ticket: u64, status: Status) {
        for worker in cx.route.everywhere(self.queues.workers()) {
            let controller = cx.shared.id;
            cx.pool.send(worker, Message::ReservationEnded { controller, ticket, status });
        }
    }

    pub(super) fn save_sharing(&self, cx: &Context) -> SavedSharing {
        let Some(member) = &cx.config.member else { return SavedSharing::default() };
        let host = member.host().map(HostId::bytes).unwrap_or_default();
        self.commands.reservations.save(host, self.commands.ana.save())
    }

    pub(super) fn restore_sharing(&mut self, cx: &Context, saved: &SavedSharing) {
        let Some(member) = &cx.config.member else { return };
        member.go_on();
        member.set_host(HostId::from_bytes(&saved.host));
        self.commands.reservations = ReservationLog::restore(saved);
        self.restore_ana(cx, &saved.ana);
    }
}
