//! Comparison of the exports and named disks of a configuration with those of a running server: the
//! steps that lead to the configuration.
//!
//! A named disk that stays attached to a controller changes with the controller's namespace. So
//! this plan has only the disks without a controller, among them those that the plan of the
//! controllers releases.
//!
//! Everything that can be refused is refused before the first step, as far as it is known then.

use super::config_diff::{Plan, changes};
use super::disks::ListedDisk;
use super::guard::{Effect, Loss};
use super::namespaces::{NamespaceChange, effect_of};
use super::reconfigure::Changes;
use anyhow::anyhow;
use serde_json::Value;
use shadowbell_config::controller_config::DiskConfig;
use shadowbell_config::export_config::ExportConfig;
use shadowbell_config::server_config::NamedDisk;
use shadowbell_control_api::api::Difference;
use shadowbell_process::exit;
use std::collections::HashSet;

/// Steps that change exports, and disks while no controller has them.
#[derive(Debug, Default)]
pub(super) struct DiskPlan {
    /// Ids of the disks to remove.
    remove: Vec<String>,
    /// Disks that stay open, and their changes.
    change: Vec<(String, Vec<NamespaceChange>)>,
    /// Disks to close and to open with another specification. If an export stays on a replaced
    /// disk, it is in `stop` and in `start`.
    replace: Vec<(NamedDisk, NamedDisk)>,
    /// Ids of the exports to remove.
    stop: Vec<String>,
    /// Exports to add.
    start: Vec<ExportConfig>,
    /// Losses of the clients of exports.
    pub(super) lost: Vec<Loss>,
    /// Differences of disks and exports, for the operator.
    pub(super) differences: Vec<Difference>,
}

impl DiskPlan {
    /// Compares the disks and exports of a server with those of a configuration. `controllers`: the
    /// steps that change the controllers.
    pub(super) fn of(
        changes: &Changes,
        controllers: &Plan,
        disks: &[NamedDisk],
        exports: &[ExportConfig],
    ) -> Self {
        let mut plan = Self::default();
        let open = changes.disks();
        for disk in open.iter().filter(|disk| disk.has_own_id() && controllers.releases(disk)) {
            match disks.iter().find(|wanted| wanted.id == disk.id) {
                Some(wanted) if disk.is_same(&wanted.spec) => {}
                Some(wanted) => plan.compare_disk(changes, disk, wanted),
                None => {
                    plan.differs("disk", &disk.id, Some(disk.open.spec.clone()), None);
                    plan.remove.push(disk.id.clone());
                }
            }
        }
        let known: HashSet<_> = open.iter().map(|disk| &disk.id).collect();
        for disk in disks.iter().filter(|disk| !known.contains(&disk.id)) {
            plan.differs("disk", &disk.id, None, Some(disk.spec.clone()));
        }
        plan.compare_exports(changes, exports);
        plan
    }

    fn differs(&mut self, kind: &str, id: &str, from: Option<String>, to: Option<String>) {
        let what = format!("{kind} {id}");
        self.differences.push(Difference { controller: None, what, from, to });
    }

    fn compare_disk(&mut self, changes: &Changes, disk: &ListedDisk, wanted: &NamedDisk) {
        self.differs("disk", &disk.id, Some(disk.open.spec.clone()), Some(wanted.spec.clone()));
        let takes_writes = || disk.open.disk.with_writes(true).is_ok();
        let (before, after) = (DiskConfig::of(&disk.open.spec), DiskConfig::of(&wanted.spec));
        let Some(steps) = self::changes(&before, &after, takes_writes) else {
            let spec = disk.open.spec.clone();
            let before = NamedDisk { id: disk.id.clone(), spec, origin: None };
            return self.replace.push((before, wanted.clone()));
        };
        for change in &steps {
            let effect = effect_of(&disk.open.spec, &disk.open.disk, change);
            // A controller's client loses the whole namespace, which is in the other plan.
            self.lost.extend(changes.exports().losses(&disk.id, &effect));
        }
        self.change.push((disk.id.clone(), steps));
    }

    fn compare_exports(&mut self, changes: &Changes, wanted: &[ExportConfig]) {
        // FUSE files stay. They are never in a configuration, because `ctl` mounts them.
        let now = changes.exports().wanted().into_iter();
        let now: Vec<_> = now.filter(|export| export.fuse.is_none()).collect();
        for export in &now {
            let after = wanted.iter().find(|after| after.id == export.id);
            let is_same = after.is_some_and(|after| after.is_same(export));
            if !is_same {
                self.differs("export", &export.id, Some(text(export)), after.map(text));
            }
            if !is_same || self.replaces(&export.disk) {
                self.stop.push(export.id.clone());
                self.lost.extend(changes.exports().loss(&export.id));
            }
        }
        for export in wanted {
            let now = now.iter().find(|now| now.id == export.id);
            if now.is_none() {
                self.differs("export", &export.id, None, Some(text(export)));
            }
            if now.is_none() || self.stop.contains(&export.id) {
                self.start.push(export.clone());
            }
        }
    }
}

impl DiskPlan {
    /// Refuses a plan whose steps would fail, as far as this is known.
    ///
    /// # Errors
    /// A FUSE file, which no configuration names, uses a disk that is removed or replaced, or that
    /// is closed with its controller, or writes a disk that a new export would write as well.
    pub(super) fn check(&self, changes: &Changes, controllers: &Plan) -> anyhow::Result<()> {
        let all = changes.exports().wanted();
        for file in all.iter().filter(|export| export.fuse.is_some()) {
            let (id, disk) = (&file.id, &file.disk);
            if self.remove.contains(disk) || self.replaces(disk) {
                return Err(exit::conflict(anyhow!(
                    "the disk {disk} has the export {id}; remove it first: `shadowbell ctl export \
                     remove {id}`"
                )));
            }
            let is_closed = |disk: &ListedDisk| !disk.has_own_id() && controllers.releases(disk);
            if changes.disk(disk).is_ok_and(|disk| is_closed(&disk)) {
                changes.check_unused(id)?;
            }
            let writes = |export: &&ExportConfig| {
                !(export.disk != *disk
                    || export.read_only
                    || file.read_only
                    || export.share && file.share)
            };
            if let Some(other) = self.start.iter().find(writes) {
                return Err(exit::conflict(anyhow!(
                    "the exports {id} and {} would both write the disk {disk}",
                    other.id
                )));
            }
        }
        Ok(())
    }

    fn replaces(&self, id: &str) -> bool {
        self.replace.iter().any(|(disk, _)| disk.id == id)
    }

    /// True if the disk with this id is changed or replaced.
    fn is_changed(&self, id: &str) -> bool {
        self.replaces(id) || self.change.iter().any(|(disk, _)| disk == id)
    }

    /// True if the disk with this id is closed.
    pub(super) fn closes(&self, id: &str) -> bool {
        self.replaces(id) || self.remove.iter().any(|other| other == id)
    }

    /// True if steps of this plan have to precede the attachment of the disk with this id to a
    /// controller.
    pub(super) fn precedes_attachment(&self, changes: &Changes, id: &str) -> bool {
        let exports = changes.exports().wanted();
        self.is_changed(id)
            || exports.iter().any(|now| now.disk == id && self.stop.contains(&now.id))
    }

    /// Starts the new exports that need no other step of the plan, so that an address in use or
    /// another writer is found before anything is changed. `started` gets their ids.
    ///
    /// # Errors
    /// An export cannot be started.
    pub(super) fn start_early(
        &self,
        changes: &Changes,
        started: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let stopped = |export: &ExportConfig| {
            let all = changes.exports().wanted();
            let mut stopped = all.iter().filter(|now| self.stop.contains(&now.id));
            stopped.any(|now| {
                now.id == export.id
                    || now.disk == export.disk
                    || now.socket().is_some() && now.socket() == export.socket()
                    || now.tcp().is_some() && now.tcp() == export.tcp()
            })
        };
        let is_ready = |export: &&ExportConfig| {
            let changed = self.replaces(&export.disk)
                || self.change.iter().any(|(disk, _)| *disk == export.disk);
            let disk = changes.disk(&export.disk);
            let is_free = disk.is_ok_and(|disk| disk.namespaces.is_empty() || export.read_only);
            is_free && !changed && !stopped(export)
        };
        for export in self.start.iter().filter(is_ready) {
            if changes.put_export(export.clone(), None)? {
                started.push(export.id.clone());
            }
        }
        Ok(())
    }

    /// Removes the exports that the configuration does not have, or has with other properties.
    /// Returns the errors.
    pub(super) fn stop_exports(&self, changes: &Changes) -> Vec<anyhow::Error> {
        self.stop.iter().filter_map(|id| changes.drop_export(id).err()).collect()
    }

    /// Changes, replaces and removes disks, after controllers have released them and before
    /// controllers get them. Returns the errors. A disk that cannot be opened with its new
    /// specification is opened with the previous one again if possible.
    pub(super) fn change_disks(
        &self,
        changes: &Changes,
        named: &[NamedDisk],
    ) -> Vec<anyhow::Error> {
        let mut failed = Vec::new();
        for (id, steps) in &self.change {
            // The losses were checked for the whole plan.
            let none = |_: &ListedDisk, _: &Effect| Vec::new();
            let outcomes = steps.iter().map(|change| changes.alter_disk(id, change, &none, false));
            failed.extend(outcomes.filter_map(Result::err));
        }
        // Disks whose storage may still execute cancelled writes stay open.
        let unattached: Vec<_> = {
            let all = changes.unattached().lock();
            let answered = all.iter().filter(|(_, open)| open.disk.orphans() == 0);
            answered.map(|(id, _)| id.clone()).collect()
        };
        let gone = unattached.iter().filter(|id| named.iter().all(|disk| disk.id != **id));
        failed.extend(gone.filter_map(|id| changes.drop_disk(id).err()));
        // All are closed before the first one is opened, because two disks may swap their images.
        let mut closed = Vec::new();
        for replaced in &self.replace {
            match changes.drop_disk(&replaced.0.id) {
                Ok(()) => closed.push(replaced),
                Err(error) => failed.push(error),
            }
        }
        for (before, after) in closed {
            if let Err(error) = changes.put_disk(after) {
                failed.push(error);
                failed.extend(changes.put_disk(before).err());
            }
        }
        failed
    }

    /// Prepares the disks of a controller or a namespace that is restored, because the plan failed:
    /// replaced disks get their previous source again. Changes stay and are recorded in `disks`.
    /// Returns the errors.
    pub(super) fn restore(
        &self,
        changes: &Changes,
        disks: &mut [DiskConfig],
    ) -> Vec<anyhow::Error> {
        let mut failed = Vec::new();
        for disk in disks {
            let Some(open) = disk.id.as_ref().and_then(|id| changes.disk(id).ok()) else {
                continue;
            };
            let replaced = self.replace.iter().find(|(before, _)| before.id == open.id);
            match replaced.filter(|(_, after)| open.is_same(&after.spec)) {
                Some((before, _)) => {
                    let closed = changes.drop_disk(&open.id);
                    failed.extend(closed.and_then(|()| changes.put_disk(before).map(drop)).err());
                }
                None => disk.disk.clone_from(&open.open.spec),
            }
        }
        failed
    }

    /// Opens the disks of the configuration that no controller has and that are not open yet.
    /// Returns the errors.
    pub(super) fn open_disks(&self, changes: &Changes, named: &[NamedDisk]) -> Vec<anyhow::Error> {
        let mut failed = Vec::new();
        // The errors of changed and replaced disks are known already.
        for disk in named.iter().filter(|disk| !self.is_changed(&disk.id)) {
            let is_attached = changes.disk(&disk.id).is_ok_and(|open| !open.namespaces.is_empty());
            if !is_attached {
                failed.extend(changes.put_disk(disk).err());
            }
        }
        failed
    }

    /// Adds the exports of the configuration that do not run. Returns the errors. An export that
    /// cannot be started is started with its previous properties again if possible.
    pub(super) fn start_exports(
        &self,
        changes: &Changes,
        wanted: &[ExportConfig],
        before: &[ExportConfig],
    ) -> Vec<anyhow::Error> {
        let mut failed = Vec::new();
        for export in wanted {
            let Err(error) = changes.put_export(export.clone(), None) else { continue };
            failed.push(error);
            let before = before.iter().find(|before| before.id == export.id);
            let again = before.filter(|_| self.stop.contains(&export.id));
            failed.extend(again.and_then(|again| changes.put_export(again.clone(), None).err()));
        }
        failed
    }
}

/// Properties of an export, under the keys of the configuration file.
fn text(export: &ExportConfig) -> String {
    let Ok(Value::Object(all)) = serde_json::to_value(export) else { return String::new() };
    let all = all.iter().filter(|(key, _)| *key != "id");
    let all = all.map(|(key, value)| match value {
        Value::String(value) => format!("{key}={value}"),
        value => format!("{key}={value}"),
    });
    all.collect::<Vec<_>>().join(", ")
}
