//! Namespaces of a running controller: addition, removal, changes, ANA states, reservations and the
//! results of pool commands.
//!
//! To change a namespace, the control plane sends a message to every I/O thread that serves the
//! controller. The change ends when the last I/O thread has dropped the old disk. If a namespace is
//! removed or shrinks, Identify changes first, so that the host starts no command that must fail.
//! If a namespace is added or grows, Identify changes last, so that the host sees only usable
//! blocks. The asynchronous event is raised together with the change of Identify.
//!
//! # Asymmetric Namespace Access
//!
//! Changes of ANA states, and their event. Base 2.1, 8.1.1.
//!
//! A change has three steps. First the ANA log page is updated, so that it contains the reason when
//! a host's command is refused. Then the event Asymmetric Namespace Access Change is raised. Then
//! the I/O threads get the new state. Commands in flight end normally, because all controllers
//! share the medium. Commands that are fetched afterwards are executed or refused according to the
//! new state.
//!
//! # Reservations
//!
//! The control plane forwards changes of the [subsystem] to I/O threads and to the host.
//!
//! Changes are forwarded to all I/O threads that may have queues of the controller, even while the
//! controller moves or quiesces. When queues arrive at an I/O thread, the thread opens the
//! namespaces and reads the current access rights.

use super::Control;
use super::diagnostics::hours;
use super::lifecycle_state::{Callback, Deferred, Phase, Step};
use super::namespace_state::{Change, ChangeCallback, NamespaceError, groups};
use crate::admin::logs::{AnaChanges, ReservationLog};
use crate::admin::sanitize;
use crate::config::{ConfigError, MAX_NAMESPACES, NamespaceConfig};
use crate::context::Context;
use crate::namespace::Namespace;
use crate::notice::Notice;
use crate::reservations::HostId;
use crate::saved::{SavedAna, SavedSharing};
use crate::subsystem;
use crate::worker::mailbox::Message;
use shadowbell_disk::Disk;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::log::{AnaGroup, AnaState};
use shadowbell_spec::status::Status;
use std::sync::Arc;

/// Size in blocks; 0 if `namespace` is `None`.
fn blocks(namespace: Option<&Namespace>) -> u64 {
    namespace.map_or(0, Namespace::blocks)
}

impl Control {
    /// Adds a namespace with this NSID, or with the lowest free one. Returns its NSID.
    pub(crate) fn add_namespace(
        &mut self,
        cx: &Context,
        nsid: Option<u32>,
        config: &NamespaceConfig,
        done: ChangeCallback,
    ) -> Result<(u32, Deferred), NamespaceError> {
        let there = cx.serving();
        let mut possible = 1..=MAX_NAMESPACES as u32;
        let is_free = |nsid: &u32| there.get(*nsid).is_none() && !self.is_changing(*nsid);
        let nsid = match nsid {
            Some(nsid) => Some(nsid).filter(|nsid| possible.contains(nsid)),
            None => possible.find(is_free),
        };
        let nsid = nsid.ok_or(NamespaceError::NoRoom)?;
        self.check_change(nsid)?;
        if there.get(nsid).is_some() {
            return Err(NamespaceError::Present(nsid));
        }
        config.validate(nsid)?;
        if let Some(other) = there.iter().find(|other| other.uuid() == config.uuid) {
            let (first, second) = (other.nsid().min(nsid), other.nsid().max(nsid));
            return Err(ConfigError::SameUuid { first, second }.into());
        }
        let namespace = Namespace::new(nsid, config, &there.guarantees);
        Ok((nsid, self.change(cx, nsid, Some(namespace), done)))
    }

    /// Removes a namespace.
    pub(crate) fn remove_namespace(
        &mut self,
        cx: &Context,
        nsid: u32,
        done: ChangeCallback,
    ) -> Result<Deferred, NamespaceError> {
        self.check_change(nsid)?;
        cx.serving().get(nsid).ok_or(NamespaceError::Missing(nsid))?;
        Ok(self.change(cx, nsid, None, done))
    }

    /// Replaces the disk of a namespace by another disk with the same contents.
    pub(crate) fn change_disk(
        &mut self,
        cx: &Context,
        nsid: u32,
        disk: Arc<dyn Disk>,
        done: ChangeCallback,
    ) -> Result<Deferred, NamespaceError> {
        self.check_change(nsid)?;
        let there = cx.serving();
        let before = there.get(nsid).ok_or(NamespaceError::Missing(nsid))?;
        let config = NamespaceConfig { disk, uuid: before.uuid() };
        config.validate(nsid)?;
        let after = Namespace::new(nsid, &config, &there.guarantees);
        let (before, after_size) = (before.info().block_size, after.info().block_size);
        if before != after_size {
            let disk = config.disk.name();
            return Err(NamespaceError::BlockSize { nsid, disk, before, after: after_size });
        }
        Ok(self.change(cx, nsid, Some(after), done))
    }

    fn is_changing(&self, nsid: u32) -> bool {
        self.namespace_changes.0.contains_key(&nsid)
    }

    fn check_change(&self, nsid: u32) -> Result<(), NamespaceError> {
        if self.quiesce.step != Step::Running {
            Err(NamespaceError::Frozen)
        } else if self.is_changing(nsid) {
            Err(NamespaceError::Changing(nsid))
        } else {
            Ok(())
        }
    }

    fn change(
        &mut self,
        cx: &Context,
        nsid: u32,
        after: Option<Namespace>,
        done: ChangeCallback,
    ) -> Deferred {
        let before = cx.serving().get(nsid).cloned();
        let publish_last = blocks(after.as_ref()) >= blocks(before.as_ref());
        let change = Change { before, after, publish_last, undone: false, done };
        let mut deferred = Deferred::default();
        if !publish_last {
            self.publish_namespace(cx, nsid, change.after.clone());
        }
        self.switch_namespace(cx, nsid, change.after.clone(), &mut deferred);
        self.namespace_changes.0.insert(nsid, change);
        deferred
    }

    /// Sends `namespace` to all I/O threads as the new namespace with NSID `nsid`; `None` removes
    /// it.
    fn switch_namespace(
        &self,
        cx: &Context,
        nsid: u32,
        namespace: Option<Namespace>,
        deferred: &mut Deferred,
    ) {
        let blocks = blocks(namespace.as_ref());
        cx.shared.change_uncorrectable(|marks| marks.clear_marks(nsid, blocks));
        let namespaces = cx.serving().with(nsid, namespace);
        cx.serve(Arc::clone(&namespaces));
        let latch = cx.latch(Notice::NamespaceChanged { nsid, status: Status::SUCCESS });
        cx.lba_status.wait_for(nsid, &latch);
        let visible = cx.visible();
        cx.send_all(self.queues.workers(), |controller| Message::ChangeNamespace {
            controller,
            nsid,
            namespaces: Arc::clone(&visible),
            latch: latch.clone(),
        });
        deferred.latches.push(latch);
    }

    /// Changes a namespace in Identify, or removes it, and notifies the host.
    fn publish_namespace(&mut self, cx: &Context, nsid: u32, namespace: Option<Namespace>) {
        // A barred namespace is not served, but stays active for the host. Only its disk is
        // dropped.
        if namespace.is_none() && cx.serving().barred().any(|barred| barred == nsid) {
            let identified = cx.identified();
            if let Some(there) = identified.get(nsid) {
                cx.identify(identified.with(nsid, Some(there.without_disk())));
            }
            return;
        }
        if namespace.is_none() || cx.identified().get(nsid).is_none() {
            self.commands.clear_namespace(nsid, hours(&self.lifecycle));
        }
        cx.identify(cx.identified().with(nsid, namespace));
        self.announce_namespace(nsid);
    }

    /// Notifies the host of a changed namespace by an event and the Changed Namespace List.
    pub(crate) fn announce_namespace(&mut self, nsid: u32) {
        // While the controller is disabled, no event is needed: the host identifies all namespaces
        // after it enables the controller.
        if self.lifecycle.phase == Phase::Ready {
            self.commands.namespace_changed(nsid);
            self.port.raise(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
        }
    }

    /// Ends the change of a namespace after all I/O threads have handled it. If an I/O thread could
    /// not open the disk, undoes the change first.
    pub(super) fn namespace_changed(
        &mut self,
        cx: &Context,
        nsid: u32,
        status: Status,
        deferred: &mut Deferred,
    ) {
        let Some(mut change) = self.namespace_changes.0.remove(&nsid) else { return };
        if !status.is_success() && !change.undone {
            if !change.publish_last {
                self.publish_namespace(cx, nsid, change.before.clone());
            }
            self.switch_namespace(cx, nsid, change.before.clone(), deferred);
            change.undone = true;
            self.namespace_changes.0.insert(nsid, change);
            return;
        }
        let Change { before, after, publish_last, undone, done } = change;
        if publish_last && !undone {
            self.publish_namespace(cx, nsid, after.clone());
        }
        let outcome = if undone { Err(NamespaceError::Open(nsid)) } else { Ok(()) };
        // The disks are dropped first, because the callback may open them again.
        let on_disconnect: Callback = Box::new(move || {
            drop((before, after));
            done(outcome);
        });
        deferred.callbacks.push(on_disconnect);
    }
}

/// Results of pool commands and sanitize operations. During these, namespaces were barred: visible
/// to the host, but not served.
impl Control {
    /// Completes the command that the pool has finished.
    pub(super) fn pool_ended(
        &mut self,
        cx: &Context,
        (generation, cid): (u64, u16),
        (status, dw0): (Status, u32),
        deferred: &mut Deferred,
    ) {
        let sanitizing = self.commands.pool.ended();
        if let Some(command) = sanitizing.filter(|_| status.is_success()) {
            let context = self.commands.event_context(&self.lifecycle);
            let dwords = (command.dword10(), command.ovrpat);
            let sanicap = sanitize::capabilities().into_bits();
            self.commands.diagnostics.events.sanitize_started(&context, sanicap, dwords);
        }
        self.review_barred(cx, deferred);
        if generation != self.lifecycle.generation {
            return;
        }
        match status.is_success() {
            true => self.port.complete(cid, status, dw0),
            false => self.port.fail(cid, status, 0),
        }
    }

    /// Handles the end of a sanitize operation.
    pub(super) fn sanitized(&mut self, cx: &Context, deferred: &mut Deferred) {
        self.review_barred(cx, deferred);
        if let Some(pool) = &cx.config.pool {
            let context = self.commands.event_context(&self.lifecycle);
            let log = sanitize::page(&pool.state().sanitize);
            self.commands.diagnostics.events.sanitize_ended(&context, &log);
        }
        self.port.raise(AsyncEvent::SANITIZE_COMPLETED);
    }

    /// Handles namespaces that are still barred after a pool command or a sanitize operation. The
    /// pool has not added them again, so each is removed and the host gets an event, unless a
    /// sanitize operation still bars it.
    fn review_barred(&mut self, cx: &Context, deferred: &mut Deferred) {
        let Some(pool) = &cx.config.pool else { return };
        let barrier = pool.state().sanitize.barrier();
        let barred: Vec<_> = cx.serving().barred().collect();
        for nsid in barred {
            cx.serve(cx.serving().barring(nsid, barrier));
            if barrier.is_none() {
                // The pool has not added this namespace again, because an added namespace is not
                // barred.
                self.publish_namespace(cx, nsid, None);
            }
            self.switch_namespace(cx, nsid, None, deferred);
        }
    }
}

/// Asymmetric Namespace Access.
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
        self.report_ana_changes(cx);
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

    /// Raises the ANA change event if a state differs from the last state that the host could know.
    pub(super) fn report_ana_changes(&mut self, cx: &Context) {
        if self.commands.ana.review(cx) && self.is_ready() {
            self.port.raise(AsyncEvent::ANA_CHANGE);
        }
    }

    /// Calls the callback of the ANA change with number `ticket`: all commands that were in flight
    /// before the change have ended.
    pub(super) fn ana_changed(&mut self, ticket: u64, deferred: &mut Deferred) {
        let waiting = &mut self.commands.ana.waiting;
        if let Some(at) = waiting.iter().position(|(its, _)| *its == ticket) {
            deferred.callbacks.push(waiting.swap_remove(at).1);
        }
    }

    /// Restores the ANA state that the previous process has saved. The state of a group may have
    /// changed since it was saved, so the caller must call
    /// [`report_ana_changes`](Self::report_ana_changes) when the admin queue exists.
    fn restore_ana(&mut self, cx: &Context, saved: &SavedAna) {
        self.commands.ana.changes = AnaChanges::restore(saved);
        if saved == &SavedAna::default() {
            self.commands.ana.begin(cx);
        }
    }
}

/// Reservations: changes of the subsystem.
impl Control {
    /// Forwards pending changes and notifications of the subsystem to I/O threads and to the host.
    pub(super) fn forward_changes(&mut self, cx: &Context, deferred: &mut Deferred) {
        let Some(member) = &cx.config.member else { return };
        for subsystem::Change { uuid, aborts, latch } in member.take_changes() {
            for worker in cx.route.everywhere(self.queues.workers()) {
                let (controller, latch) = (cx.shared.id, latch.clone());
                let message = Message::ReviewAccess { controller, uuid, aborts, latch };
                cx.pool.send(worker, message);
            }
            deferred.latches.push(latch);
        }
        for (uuid, kind) in member.take_notifications() {
            let namespaces = cx.identified();
            let found = namespaces.iter().find(|namespace| namespace.uuid() == uuid);
            if let Some(namespace) = found
                && self.is_ready()
                && self.commands.reservations.add_notification(namespace.nsid(), kind)
            {
                self.port.raise(AsyncEvent::RESERVATION_LOG_PAGE);
            }
        }
    }

    /// Sends the status of a reservation command to all I/O threads. The I/O thread that has the
    /// command in flight completes it; the other threads ignore the message.
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
        member.resume();
        member.set_host(HostId::from_bytes(&saved.host));
        self.commands.reservations = ReservationLog::restore(saved);
        self.restore_ana(cx, &saved.ana);
    }
}
