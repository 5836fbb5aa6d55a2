//! Disks of the server: each has an id, and is used by controllers, by exports, or by none.
//!
//! A disk of a controller's short form (`disks = ["x.img"]`) has the derived id `CONTROLLER/NSID`,
//! and is closed when its namespace is detached. A named disk (`[[disk]]`, `ctl disk add`) stays
//! open: while no controller has it,
//! [`UnattachedDisks`](super::open_disk::UnattachedDisks) holds it.

use super::checkpointer::Checkpointer;
use super::flush::flush_within;
use super::guard::{DiskGuard, Effect, Loss};
use super::namespaces::{ChangeResult, NamespaceChange, apply_change};
use super::open_disk::{OpenDisk, check_group, derived_id, id_of, is_same_disk};
use super::reconfigure::Changes;
use super::registry::ServedController;
use anyhow::{Context, anyhow};
use shadowbell_config::controller_config::{DiskConfig, nsids};
use shadowbell_config::disk_spec::DiskSpecError;
use shadowbell_config::server_config::NamedDisk;
use shadowbell_config::subsystems::Membership;
use shadowbell_disk::{Disk, DiskError};
use shadowbell_process::exit;
use shadowbell_storage::disk_files;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};

/// Time limit for the flush of a disk that was detached or replaced.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);

/// A disk of the server, and its users.
pub(super) struct ListedDisk {
    pub(super) id: String,
    pub(super) open: OpenDisk,
    /// Namespaces that use the disk: controller and NSID. Only the controllers of a subsystem share
    /// a disk.
    pub(super) namespaces: Vec<(Arc<ServedController>, u32)>,
    /// True if the configuration of the disk's namespace permits another writer (`share`).
    pub(super) share: bool,
}

impl ListedDisk {
    /// True if the disk has this specification.
    pub(super) fn is_same(&self, spec: &str) -> bool {
        is_same_disk(&self.open.spec, spec)
    }

    /// True if the configuration or a request has named the disk.
    pub(super) fn has_own_id(&self) -> bool {
        let mut namespaces = self.namespaces.iter();
        namespaces.all(|(served, nsid)| self.id != derived_id(&served.id, *nsid))
    }

    /// True if the id names this disk. The derived id may have the path of the controller's socket
    /// instead of its id.
    fn is_called(&self, id: &str) -> bool {
        let mut namespaces = self.namespaces.iter();
        self.id == id
            || namespaces.any(|(served, nsid)| {
                [&served.id, &served.socket].iter().any(|of| derived_id(of, *nsid) == id)
            })
    }
}

fn missing(id: &str) -> anyhow::Error {
    exit::not_found(anyhow!("there is no disk `{id}`; `shadowbell ctl disk ls` lists them"))
}

impl Changes {
    /// Returns all disks of the server: those of controllers in the order of the configuration,
    /// then those without a controller, sorted by id.
    pub(super) fn disks(&self) -> Vec<ListedDisk> {
        let mut all: Vec<ListedDisk> = Vec::new();
        for served in self.registry().all() {
            let requested = served.requested();
            let configs = nsids(&requested.controller.disks).zip(&requested.controller.disks);
            let namespaces = served.controller.namespaces();
            for ((nsid, config), (_, namespace)) in configs.zip(namespaces) {
                let place = (Arc::clone(&served), nsid);
                // Controllers of a subsystem share their disks.
                let known =
                    all.iter_mut().find(|disk| Arc::ptr_eq(&disk.open.disk, &namespace.disk));
                match known {
                    Some(disk) => disk.namespaces.push(place),
                    None => all.push(ListedDisk {
                        id: id_of(&served.id, nsid, config),
                        open: OpenDisk { spec: config.disk.clone(), disk: namespace.disk },
                        namespaces: vec![place],
                        share: config.share,
                    }),
                }
            }
        }
        let unattached = self.unattached().lock();
        all.extend(unattached.iter().map(|(id, open)| ListedDisk {
            id: id.clone(),
            open: open.clone(),
            namespaces: Vec::new(),
            share: true,
        }));
        all
    }

    /// True if the storage of a disk may still execute a cancelled write.
    pub(super) fn has_orphans(&self) -> bool {
        let unattached = self.unattached().lock();
        let all = self.registry().all();
        unattached.values().any(|open| open.disk.orphans() != 0)
            || all.iter().flat_map(|served| served.disks()).any(|disk| disk.orphans() != 0)
    }

    /// Returns the disks with a configured id, as entries of a configuration. Disks that are not
    /// recovered yet are included. Disks that [stay open](Self::close_disk) after their removal are
    /// not.
    pub(super) fn named_disks(&self) -> Vec<NamedDisk> {
        let is_named = |disk: &ListedDisk| disk.has_own_id() && !disk.id.contains('/');
        let named = self.disks().into_iter().filter(is_named);
        named
            .map(|ListedDisk { id, open, .. }| NamedDisk { id, spec: open.spec, origin: None })
            .chain(self.registry().waiting_disks())
            .collect()
    }

    /// Finds a disk by its id.
    ///
    /// # Errors
    /// The disk does not exist, or is not recovered yet.
    pub(super) fn disk(&self, id: &str) -> anyhow::Result<ListedDisk> {
        if let Some(found) = self.disks().into_iter().find(|disk| disk.is_called(id)) {
            return Ok(found);
        }
        self.registry().check_waiting_disk(id)?;
        Err(missing(id))
    }

    /// Opens and adds a disk that no controller has. Returns false if the disk exists already.
    ///
    /// # Errors
    /// The disk cannot be opened, or its id belongs to a different disk.
    pub(super) fn add_disk(&self, wanted: &NamedDisk) -> anyhow::Result<bool> {
        let _guard = self.change_lock();
        check_group(&wanted.spec)?;
        self.put_disk(wanted)
    }

    /// Like [`add_disk`](Self::add_disk), for a caller that holds the lock of changes.
    ///
    /// # Errors
    /// As for [`add_disk`](Self::add_disk).
    pub(super) fn put_disk(&self, NamedDisk { id, spec, .. }: &NamedDisk) -> anyhow::Result<bool> {
        if let Ok(there) = self.disk(id) {
            return match there.is_same(spec) {
                true => Ok(false),
                false => Err(exit::conflict(anyhow!(
                    "a disk `{id}` exists already: {}; remove it first, or replace it",
                    there.open.spec
                ))),
            };
        }
        self.registry().check_waiting_disk(id)?;
        let disk = self.open(spec).map_err(DiskSpecError::into_error)?;
        self.check_files(0)?;
        self.add_unattached(id, OpenDisk { spec: spec.clone(), disk });
        info!("disk {id}: {spec}");
        Ok(true)
    }

    /// Adds a disk without a controller that was recovered. The caller holds the lock of changes,
    /// or the server does not serve yet.
    pub(super) fn add_recovered(&self, id: &str, open: OpenDisk, checkpoint: &Checkpointer) {
        checkpoint.put_unattached(id, &open.spec, &open.disk);
        self.unattached().lock().insert(id.to_owned(), open);
        self.registry().recovered_disk(id);
    }

    /// Adds an open disk that no controller has.
    fn add_unattached(&self, id: &str, open: OpenDisk) {
        if let Some(checkpoint) = self.checkpoint() {
            checkpoint.put_unattached(id, &open.spec, &open.disk);
        }
        self.unattached().lock().insert(id.to_owned(), open);
    }

    /// Flushes and removes a disk that no controller or export uses.
    ///
    /// # Errors
    /// The disk does not exist, or is in use.
    pub(super) fn remove_disk(&self, id: &str) -> anyhow::Result<()> {
        let _guard = self.change_lock();
        self.drop_disk(id)
    }

    /// Like [`remove_disk`](Self::remove_disk), for a caller that holds the lock of changes.
    ///
    /// # Errors
    /// As for [`remove_disk`](Self::remove_disk).
    pub(super) fn drop_disk(&self, id: &str) -> anyhow::Result<()> {
        let ListedDisk { id, open, namespaces, .. } = self.disk(id)?;
        if let Some((served, nsid)) = namespaces.first() {
            return Err(exit::conflict(anyhow!(
                "the disk {id} is namespace {nsid} of {}; detach it first: `shadowbell ctl namespace \
                 detach {} {nsid}`",
                served.name,
                served.id
            )));
        }
        if let Some(export) = self.exports().of(&id).first() {
            return Err(exit::conflict(anyhow!(
                "the disk {id} has the export {export}; remove it first: `shadowbell ctl export \
                 remove {export}`"
            )));
        }
        flush_within(&*open.disk, CLOSE_TIMEOUT)
            .with_context(|| format!("cannot flush {}, so it is not removed", open.disk.name()))?;
        self.unattached().lock().remove(&id);
        if let Some(checkpoint) = self.checkpoint() {
            checkpoint.drop_unattached(&id);
        }
        info!("disk {id}: removed");
        Ok(())
    }

    /// Flushes a disk that was detached or replaced, and closes it. The flush also waits for the
    /// writes that the detach has cancelled. If the storage does not answer, the disk stays open
    /// without a controller: otherwise, unflushed data would be lost, or a late write would
    /// overwrite that of a disk which is opened from the same source.
    ///
    /// # Errors
    /// The flush fails. The error names the id of the disk if it stays open.
    pub(super) fn close_disk(&self, id: &str, open: OpenDisk) -> anyhow::Result<()> {
        let (name, had_lost_writes) = (open.disk.name(), open.disk.has_lost_writes());
        let Err(error) = flush_within(&*open.disk, CLOSE_TIMEOUT) else { return Ok(()) };
        if open.disk.orphans() == 0 && error.is::<DiskError>() {
            // The storage reports an error. After an earlier loss, it has been reported to flushes
            // of the clients.
            warn!("{name}: closed with unflushed data: {error:#}");
            return match had_lost_writes {
                true => Ok(()),
                false => Err(error.context(format!(
                    "the change is made, but data written to {name} may be lost"
                ))),
            };
        }
        Err(self.keep_disk(id, open, error.context(format!("cannot flush {name}"))))
    }

    /// Keeps a disk that cannot be closed yet open without a controller. `id` is its former id.
    /// Returns `why`, the reason, with the new id.
    pub(super) fn keep_disk(&self, id: &str, open: OpenDisk, why: anyhow::Error) -> anyhow::Error {
        let mut kept = format!("{id}.old");
        while self.disk(&kept).is_ok() {
            kept.push_str(".old");
        }
        let stays = format!(
            "{} stays open as the disk {kept}, until `shadowbell ctl disk remove {kept}` succeeds",
            open.disk.name()
        );
        warn!("{stays}: {why:#}");
        self.add_unattached(&kept, open);
        why.context(stays)
    }

    /// Refuses a disk that was opened from the same source as a disk of this server whose storage
    /// may still execute cancelled writes. Requests of the open disk wait for these writes; those
    /// of the new one would not.
    ///
    /// # Errors
    /// There is such a disk.
    pub(super) fn check_orphans(&self, disk: &Arc<dyn Disk>) -> anyhow::Result<()> {
        let name = disk.name();
        let has_its_orphans = |ListedDisk { open: other, .. }: &ListedDisk| {
            !Arc::ptr_eq(&other.disk, disk)
                && other.disk.orphans() != 0
                && other.disk.name() == name
        };
        match self.disks().into_iter().find(has_its_orphans) {
            None => Ok(()),
            Some(other) => Err(exit::conflict(anyhow!(
                "{name}: its storage has not answered all writes of the disk {}; use that disk, or \
                 wait",
                other.id
            ))),
        }
    }

    /// Changes a disk, and the namespaces that use it. Returns false if the disk has the property
    /// already. `forced` is required if connected clients would find other content or a smaller
    /// disk.
    ///
    /// # Errors
    /// The disk does not exist, or the change is not possible.
    pub(super) fn change_disk(
        &self,
        id: &str,
        change: &NamespaceChange,
        forced: bool,
    ) -> anyhow::Result<bool> {
        let _guard = self.change_lock();
        let losses = |disk: &ListedDisk, effect: &Effect| self.losses(disk, effect);
        self.alter_disk(id, change, &losses, forced)
    }

    /// Like [`change_disk`](Self::change_disk), for a caller that holds the lock of changes.
    /// `losses` returns the losses of connected clients. A change with losses requires `forced`.
    ///
    /// # Errors
    /// As for [`change_disk`](Self::change_disk).
    pub(super) fn alter_disk(
        &self,
        id: &str,
        change: &NamespaceChange,
        losses: &dyn Fn(&ListedDisk, &Effect) -> Vec<Loss>,
        forced: bool,
    ) -> anyhow::Result<bool> {
        let disk = self.disk(id)?;
        let losses = |effect: &Effect| losses(&disk, effect);
        let is_exported = !self.exports().of(&disk.id).is_empty();
        let guard = DiskGuard { losses: &losses, forced, is_exported };
        if let Some((served, nsid)) = disk.namespaces.first() {
            return self.change_namespace(served, *nsid, change, &guard);
        }
        let id = disk.id.clone();
        let open = |spec: &str| self.open(spec).map_err(DiskSpecError::into_error);
        let before = self.unattached().lock().get(&id).cloned().ok_or_else(|| missing(&id))?;
        let replaced = change.replaces(&before.disk);
        let (spec, new, effect) =
            match apply_change(&before.spec, &before.disk, change, &guard, open)? {
                ChangeResult::Same => return Ok(false),
                ChangeResult::InPlace(spec) => (spec, Arc::clone(&before.disk), None),
                ChangeResult::Disk(spec, new, effect) => {
                    if before.disk.info().read_only && !new.info().read_only {
                        self.check_made_writable(&disk)?;
                    }
                    (spec, new, Some(effect))
                }
            };
        info!("disk {id}: {spec}");
        self.add_unattached(&id, OpenDisk { spec, disk: Arc::clone(&new) });
        if let Some(old) = replaced {
            old.suspend_error_policy(true);
        }
        if let Some(effect) = effect {
            self.update_exports(&id, &new, &effect);
        }
        if let NamespaceChange::Disk(_) = change {
            self.close_disk(&id, before)?;
        }
        Ok(true)
    }

    /// Error for an image that is a disk of this server already. `None` if it is not.
    pub(super) fn own_disk(&self, spec: &str) -> Option<DiskSpecError> {
        let here = Path::new("");
        let files = disk_files::files(spec, here);
        let is_it = |disk: &ListedDisk| {
            files.iter().any(|file| disk_files::uses(&disk.open.spec, here, file))
        };
        let disk = self.disks().into_iter().find(is_it)?;
        Some(DiskSpecError::Other(exit::conflict(anyhow!(
            "{}: this server has it open as the disk {}; export or attach that disk, or remove it \
             first",
            disk.open.disk.name(),
            disk.id
        ))))
    }

    /// Losses of the clients of a disk by a change with this effect.
    pub(super) fn losses(&self, disk: &ListedDisk, effect: &Effect) -> Vec<Loss> {
        let namespaces = disk
            .namespaces
            .iter()
            .filter_map(|(served, nsid)| Loss::of_controller(served, effect.on_namespace(*nsid)?));
        namespaces.chain(self.exports().losses(&disk.id, effect)).collect()
    }

    /// Replaces disk ids in a controller's configuration by the specifications of these disks.
    /// `subsystem`: the subsystem of the controller.
    ///
    /// # Errors
    /// Another controller has the disk, and is not in the subsystem; an export writes the disk; the
    /// disk is open with another source; or it is not recovered yet.
    pub(super) fn resolve(
        &self,
        disks: &mut [DiskConfig],
        subsystem: Option<&Membership>,
    ) -> anyhow::Result<()> {
        let all = self.disks();
        let is_other = |(served, _): &&(Arc<ServedController>, u32)| {
            let requested = served.requested();
            let its = requested.controller.subsystem.as_ref();
            its.zip(subsystem).is_none_or(|(its, subsystem)| its.name != subsystem.name)
        };
        for wanted in disks {
            let id = wanted.id.as_ref().unwrap_or(&wanted.disk);
            let Some(found) = all.iter().find(|disk| disk.id == *id) else {
                self.registry().check_waiting_disk(id)?;
                self.registry().check_waiting_source(&wanted.disk)?;
                continue;
            };
            if let Some((served, nsid)) = found.namespaces.iter().find(is_other) {
                return Err(exit::conflict(anyhow!(
                    "the disk {id} is namespace {nsid} of {} already",
                    served.name
                )));
            }
            self.check_exports(&found.id, wanted.share)?;
            // The configuration names the disk with its source; a request gives the id only.
            if wanted.id.is_some() && wanted.disk != *id && !found.is_same(&wanted.disk) {
                return Err(exit::conflict(anyhow!(
                    "the disk {id} is open with another source: {}; replace it first: `shadowbell \
                     ctl disk replace {id} SOURCE`",
                    found.open.spec
                )));
            }
            wanted.id = Some(found.id.clone());
            wanted.disk.clone_from(&found.open.spec);
        }
        Ok(())
    }

    /// Returns the disk with this id if no controller has it. With `read_only`, a writable disk is
    /// made read-only.
    ///
    /// # Errors
    /// The disk cannot be made read-only.
    pub(super) fn unattached_disk(
        &self,
        id: Option<&str>,
        read_only: bool,
    ) -> Option<anyhow::Result<Arc<dyn Disk>>> {
        let found = self.unattached().lock().get(id?).cloned()?;
        Some(match read_only && !found.disk.info().read_only {
            true => found.disk.with_writes(false).map_err(exit::conflict),
            false => Ok(found.disk),
        })
    }

    /// Prepares to keep a controller's named disk open when the controller releases it. The result
    /// is passed to [`end_detach`](Self::end_detach).
    pub(super) fn begin_detach(
        &self,
        config: &DiskConfig,
        disk: &Arc<dyn Disk>,
    ) -> Option<PendingDetach> {
        let id = config.id.clone()?;
        let open = OpenDisk { spec: config.disk.clone(), disk: Arc::clone(disk) };
        if let Some(checkpoint) = self.checkpoint() {
            checkpoint.put_unattached(&id, &open.spec, &open.disk);
        }
        Some(PendingDetach { id, open })
    }

    /// Ends a detach that [`begin_detach`](Self::begin_detach) began: the controller has released
    /// the disk (`is_done`), or keeps it.
    pub(super) fn end_detach(&self, pending_detach: Option<PendingDetach>, is_done: bool) {
        let Some(PendingDetach { id, open }) = pending_detach else { return };
        if is_done {
            self.unattached().lock().insert(id, open);
        } else if let Some(checkpoint) = self.checkpoint() {
            checkpoint.drop_unattached(&id);
        }
    }

    /// Removes a disk from the unattached disks after its attachment to a controller.
    pub(super) fn end_attach(&self, id: Option<&str>) {
        let Some(id) = id else { return };
        if self.unattached().lock().remove(id).is_some()
            && let Some(checkpoint) = self.checkpoint()
        {
            checkpoint.drop_unattached(id);
        }
    }
}

/// Named disk that a controller is about to release.
pub(super) struct PendingDetach {
    id: String,
    open: OpenDisk,
}
