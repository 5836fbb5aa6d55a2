//! Namespaces that come, go and change while a host uses the controller.

use super::Controller;
use crate::config::NamespaceConfig;
use crate::control::{Deferred, NamespaceError};
use shadowbell_backend::Disk;
use shadowbell_spec::log::{AnaGroup, AnaState};
use std::sync::Arc;

impl Controller {
    /// The namespaces as they are now, in the order of their NSIDs.
    #[must_use]
    pub fn namespaces(&self) -> Vec<(u32, NamespaceConfig)> {
        self.0.context.serving().iter().map(|ns| (ns.nsid(), ns.config())).collect()
    }

    /// Adds a namespace while the host uses the controller: at this NSID, or at the lowest that is
    /// free. Its NSID. The host finds it in Identify, and is told by the event Namespace Attribute
    /// Changed, when every worker serves it; then `done` runs, on any thread, perhaps before this
    /// returns. If a worker can not open the disk, none of that happens, and `done` is told. It is
    /// dropped instead if the last handle of the controller is dropped before.
    ///
    /// A host that has been told that there is no volatile write cache does not flush: every write
    /// to a namespace that has one is forced to the medium then.
    ///
    /// # Errors
    /// [`NamespaceError`]; `done` does not run then.
    pub fn add_namespace(
        &self,
        nsid: Option<u32>,
        namespace: &NamespaceConfig,
        done: impl FnOnce(Result<(), NamespaceError>) + Send + 'static,
    ) -> Result<u32, NamespaceError> {
        let mut control = self.0.control();
        let added = control.add_namespace(&self.0.context, nsid, namespace, Box::new(done));
        let (nsid, deferred) = added?;
        self.0.note_change();
        self.0.release(control, deferred);
        Ok(nsid)
    }

    /// Has an ANA group, from 1, be in this state for this controller, which is one of a
    /// [`Subsystem`](crate::Subsystem). The host is told by the event Asymmetric Namespace Access
    /// Change, if it wants to know. Commands that come for the group's namespaces from here on are
    /// carried out or refused as the state has it; those that are under way end as they would have.
    /// `done` runs when none of them is left; it is dropped if the controller goes before.
    pub fn set_ana_state(&self, group: u32, state: AnaState, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.set_ana_state(cx, (group, state), Box::new(done)));
    }

    /// The ANA groups of its namespaces, each with its state and its NSIDs; nothing if the
    /// controller is not one of a [`Subsystem`](crate::Subsystem).
    #[must_use]
    pub fn ana_groups(&self) -> Vec<AnaGroup> {
        self.0.control().ana_groups(&self.0.context)
    }

    /// Removes a namespace while the host uses the controller. It is told by the event Namespace
    /// Attribute Changed at once. Commands that are under way for the namespace, and those that
    /// come for it, end with Invalid Field in Command, as for any NSID that is not active. `done`
    /// as for [`add_namespace`](Self::add_namespace), when nothing uses the disk any more, and
    /// nobody here has it.
    ///
    /// # Errors
    /// As there.
    pub fn remove_namespace(
        &self,
        nsid: u32,
        done: impl FnOnce(Result<(), NamespaceError>) + Send + 'static,
    ) -> Result<(), NamespaceError> {
        let mut control = self.0.control();
        let deferred = control.remove_namespace(&self.0.context, nsid, Box::new(done))?;
        self.0.note_change();
        self.0.release(control, deferred);
        Ok(())
    }

    /// Has a namespace on `disk` from here on: the same bytes in another size, most likely
    /// ([`Disk::resized`]), or read-only. Commands that are under way end on the disk that they
    /// were begun on. The host is told by the event Namespace Attribute Changed: of a smaller disk
    /// at once, of a larger one when every worker serves it. `done` as for
    /// [`add_namespace`](Self::add_namespace), when nothing uses the disk of before any more.
    ///
    /// # Errors
    /// As there.
    pub fn change_disk(
        &self,
        nsid: u32,
        disk: Arc<dyn Disk>,
        done: impl FnOnce(Result<(), NamespaceError>) + Send + 'static,
    ) -> Result<(), NamespaceError> {
        let mut control = self.0.control();
        let deferred = control.change_disk(&self.0.context, nsid, disk, Box::new(done))?;
        self.0.note_change();
        self.0.release(control, deferred);
        Ok(())
    }

    /// Tells the host once more that a namespace has changed: a process before this one may have
    /// died between the change and the event.
    pub fn announce_namespace(&self, nsid: u32) {
        self.0.with(|control, _| {
            control.announce_namespace(nsid);
            Deferred::default()
        });
        self.0.schedule();
    }
}
