//! Automatic resize of namespaces whose storage has changed its size.
//!
//! Only disks whose storage reports a size change are resized automatically
//! (`Disk::take_size_change`). For all other disks the operator runs `ctl disk resize`, which
//! performs the same operation.
//!
//! The same thread logs disks that are stopped by an error of their storage, or resumed.

use super::disks::ListedDisk;
use super::namespaces::NamespaceChange;
use super::reconfigure::Changes;
use super::server::Server;
use super::stop_watch::StopWatch;
use shadowbell_control_api::api::Size;
use shadowbell_disk::{SizeChanges, notify_resize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use tracing::warn;

/// Thread that resizes namespaces, until it is dropped.
pub(super) struct ResizeWatch(Arc<AtomicBool>);

impl ResizeWatch {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(server: &Server) -> anyhow::Result<Self> {
        let is_over = Arc::new(AtomicBool::new(false));
        let (shared_flag, changes) = (Arc::clone(&is_over), Arc::downgrade(server.changes()));
        std::thread::Builder::new()
            .name("sb-resize".into())
            .spawn(move || watch(&shared_flag, &changes))?;
        Ok(Self(is_over))
    }
}

impl Drop for ResizeWatch {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
        notify_resize();
    }
}

fn watch(is_over: &AtomicBool, changes: &Weak<Changes>) {
    let mut size_changes = SizeChanges::default();
    let mut stops = StopWatch::default();
    loop {
        size_changes.wait();
        if is_over.load(Ordering::Acquire) {
            return;
        }
        // While the thread waits, it holds only a weak reference, so that disks can be closed.
        let Some(changes) = changes.upgrade() else { return };
        stops.report(&changes.disks());
        resize_changed(&changes);
    }
}

fn resize_changed(changes: &Changes) {
    let ids = |disk: ListedDisk| disk.open.disk.take_size_change().then_some(disk.id);
    for id in changes.disks().into_iter().filter_map(ids) {
        if let Err(error) = changes.change_disk(&id, &NamespaceChange::Size(Size::Whole), true) {
            warn!(
                "cannot resize the disk {id} to its new size: {error:#}; try again by `shadowbell \
                 ctl disk resize {id}`"
            );
        }
    }
}
