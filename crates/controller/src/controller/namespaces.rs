//! Adding, removing and changing namespaces while the host uses the controller.

use super::Controller;
use crate::config::NamespaceConfig;
use crate::control::{Deferred, NamespaceError};
use shadowbell_backend::Disk;
use shadowbell_spec::log::{AnaGroup, AnaState};
use std::sync::Arc;

impl Controller {
    /// Current namespaces in ascending order of NSID.
    #[must_use]
    pub fn namespaces(&self) -> Vec<(u32, NamespaceConfig)> {
        self.0.context.serving().iter().map(|ns| (ns.nsid(), ns.config())).collect()
    }

    /// Adds a namespace while the host uses the controller, with this NSID or with the lowest free
    /// one. Returns its NSID. When every I/O thread serves the namespace, it appears in Identify,
    /// the host gets the event Namespace Attribute Changed, and `done` runs, on any thread and
    /// possibly before this method returns. If an I/O thread cannot open the disk, the namespace is
    /// not added, and `done` gets the error. `done` is dropped instead if the last handle of the
    /// controller is dropped earlier.
    ///
    /// A host that was told that no volatile write cache is present does not flush. Every write to
    /// a namespace with a cache is then forced to the medium.
    ///
    /// # Errors
    /// [`NamespaceError`]; `done` does not run in that case.
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

    /// Sets the state of an ANA group, from 1, for this controller, which must belong to a
    /// [`Subsystem`](crate::Subsystem). The host gets the event Asymmetric Namespace Access Change
    /// if it is enabled. Later commands for the group's namespaces are executed or refused
    /// according to the state; commands in flight end normally. `done` runs when these have ended,
    /// and is dropped if the controller is dropped earlier.
    pub fn set_ana_state(&self, group: u32, state: AnaState, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.set_ana_state(cx, (group, state), Box::new(done)));
    }

    /// ANA groups of the controller's namespaces with states and NSIDs; empty if the controller
    /// does not belong to a [`Subsystem`](crate::Subsystem).
    #[must_use]
    pub fn ana_groups(&self) -> Vec<AnaGroup> {
        self.0.control().ana_groups(&self.0.context)
    }

    /// Removes a namespace while the host uses the controller. The host gets the event Namespace
    /// Attribute Changed immediately. Commands for the namespace, including those in flight, end
    /// with Invalid Field in Command, as for any inactive NSID. `done` runs, as for
    /// [`add_namespace`](Self::add_namespace), when the disk is unused and the controller has
    /// dropped it.
    ///
    /// # Errors
    /// [`NamespaceError`]; `done` does not run in that case.
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

    /// Replaces the disk of a namespace by `disk` with the same contents, usually in another size
    /// ([`Disk::resized`]) or read-only. Commands in flight end on the old disk. The host gets the
    /// event Namespace Attribute Changed: immediately for a smaller disk, and when every I/O thread
    /// serves the new disk for a larger one. `done` runs, as for
    /// [`add_namespace`](Self::add_namespace), when the old disk is unused.
    ///
    /// # Errors
    /// [`NamespaceError`]; `done` does not run in that case.
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

    /// Raises the event Namespace Attribute Changed again after a recovery, because the dead
    /// process may have crashed between a change and its event.
    pub fn announce_namespace(&self, nsid: u32) {
        self.0.with(|control, _| {
            control.announce_namespace(nsid);
            Deferred::default()
        });
        self.0.schedule();
    }
}
