//! Adding, removing and changing namespaces while the host uses the controller.
//!
//! A change is a message to every I/O thread that serves the controller, and ends when the last of
//! them has dropped the old disk. If a namespace is removed or shrinks, Identify changes first, so
//! that the host does not start commands that must fail. If a namespace is added or grows,
//! Identify changes last, so that the host can use what it sees. The asynchronous event is raised
//! together with the change of Identify.

use super::Control;
use super::deferred::{Callback, Deferred};
use super::diagnostics::hours;
use super::namespace_changes::{Change, Done, NamespaceError};
use super::quiesce_state::Step;
use super::reset::Phase;
use crate::config::{ConfigError, MAX_NAMESPACES, NamespaceConfig};
use crate::context::Context;
use crate::namespace::Namespace;
use crate::notice::Notice;
use crate::worker::mailbox::Message;
use shadowbell_backend::Disk;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::status::Status;
use std::sync::Arc;

/// Size in blocks; 0 without a namespace.
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
        done: Done,
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
        let namespace = Namespace::new(nsid, config, &there.promises);
        Ok((nsid, self.change(cx, nsid, Some(namespace), done)))
    }

    /// Removes a namespace.
    pub(crate) fn remove_namespace(
        &mut self,
        cx: &Context,
        nsid: u32,
        done: Done,
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
        done: Done,
    ) -> Result<Deferred, NamespaceError> {
        self.check_change(nsid)?;
        let there = cx.serving();
        let before = there.get(nsid).ok_or(NamespaceError::Missing(nsid))?;
        let config = NamespaceConfig { disk, uuid: before.uuid() };
        config.validate(nsid)?;
        let after = Namespace::new(nsid, &config, &there.promises);
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
        done: Done,
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

    /// Has all I/O threads serve `namespace` as NSID `nsid`, or none.
    pub(super) fn switch_namespace(
        &self,
        cx: &Context,
        nsid: u32,
        namespace: Option<Namespace>,
        deferred: &mut Deferred,
    ) {
        let blocks = blocks(namespace.as_ref());
        cx.shared.change_uncorrectable(|marks| marks.forget(nsid, blocks));
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
    pub(super) fn publish_namespace(
        &mut self,
        cx: &Context,
        nsid: u32,
        namespace: Option<Namespace>,
    ) {
        // A barred namespace stays active for the host; only its disk is dropped.
        if namespace.is_none() && cx.serving().barred().any(|barred| barred == nsid) {
            let identified = cx.identified();
            if let Some(there) = identified.get(nsid) {
                cx.identify(identified.with(nsid, Some(there.without_disk())));
            }
            return;
        }
        if namespace.is_none() || cx.identified().get(nsid).is_none() {
            self.commands.forget_namespace(nsid, hours(&self.lifecycle));
        }
        cx.identify(cx.identified().with(nsid, namespace));
        self.announce_namespace(nsid);
    }

    /// Notifies the host of a changed namespace.
    pub(crate) fn announce_namespace(&mut self, nsid: u32) {
        // A host that enables the controller later identifies all namespaces anyway.
        if self.lifecycle.phase == Phase::Ready {
            self.commands.namespace_changed(nsid);
            self.port.raise(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
        }
    }

    /// Ends a change after all I/O threads have answered. If one of them could not open the disk,
    /// the change is undone first.
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
        // The disks are dropped before the callback, which may open them again.
        let told: Callback = Box::new(move || {
            drop((before, after));
            done(outcome);
        });
        deferred.callbacks.push(told);
    }
}
