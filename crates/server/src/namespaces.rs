//! Addition, removal and change of namespaces while their controller is in use.
//!
//! One change of controllers or namespaces runs at a time. From before the change until after it,
//! the checkpoint has both the old and the new state of the namespace.

use super::builder::isolate;
use super::guard::{self, DiskGuard, Effect, Loss};
use super::open_disk::{OpenDisk, check_group, id_of, missing_group};
use super::reconfigure::Changes;
use super::registry::ServedController;
use anyhow::{Context, anyhow};
use bytesize::ByteSize;
use shadowbell_config::controller_config::{
    ConfigureError, ControllerConfig, DiskConfig, nsids, open_disk,
};
use shadowbell_config::limits::{self, DiskLimits, Group};
use shadowbell_config::server_config::SocketConfig;
use shadowbell_config::{disk_spec, pool};
use shadowbell_control_api::api::{LimitSpec, Size};
use shadowbell_controller::config::MAX_NAMESPACES;
use shadowbell_controller::{Controller, NamespaceConfig, NamespaceError};
use shadowbell_disk::{Disk, ResizeError};
use shadowbell_disk_layers::{ErrorPolicy, LimitedDisk, Limits};
use shadowbell_process::exit;
use shadowbell_storage::disk_kinds;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;
use tracing::{info, warn};

/// Time limit for I/O threads to release a disk.
const IN_FLIGHT_TIMEOUT: Duration = Duration::from_secs(30);

/// Disk option: with `read-only=on`, the disk refuses writes.
const READ_ONLY: &str = "read-only";

/// A change of one property of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NamespaceChange {
    /// Size of the disk. A file that is too short is extended.
    Size(Size),
    /// Specification of a disk that replaces the current one.
    Disk(String),
    /// True to make the disk read-only, false to make it writable.
    ReadOnly(bool),
    /// Rate limits that replace all limits of the disk.
    Limits(DiskLimits),
    /// Rate limits that are changed; limits that are not given stay.
    LimitChange(LimitSpec),
}

/// A namespace of a served controller, with its configuration and its position in the list of
/// disks.
struct Found {
    at: usize,
    disk: DiskConfig,
    namespace: NamespaceConfig,
}

/// State of an accepted change of a namespace.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Accepted {
    /// No command uses the old state any more.
    Done,
    /// Commands are in flight at the old disk for longer than [`IN_FLIGHT_TIMEOUT`]. New ones use
    /// the new state.
    Slow { nsid: u32 },
}

impl Accepted {
    /// Error for a slow change. The caller returns it after it has completed the change.
    fn check(self) -> anyhow::Result<()> {
        match self {
            Self::Done => Ok(()),
            Self::Slow { nsid } => Err(anyhow!(
                "namespace {nsid} is changed for new commands, but those in flight at its disk have \
                 not ended within {} s",
                IN_FLIGHT_TIMEOUT.as_secs()
            )),
        }
    }
}

/// A namespace that is ready to be added to its controller.
pub(super) struct PreparedNamespace {
    served: Arc<ServedController>,
    nsid: u32,
    wanted: DiskConfig,
    disk: Arc<dyn Disk>,
}

impl Changes {
    /// Adds a namespace to a controller. Returns false if it exists already.
    ///
    /// # Errors
    /// The namespace cannot be served, or its NSID belongs to a different namespace.
    pub(super) fn add_namespace(
        &self,
        id: &str,
        nsid: u32,
        wanted: DiskConfig,
    ) -> anyhow::Result<bool> {
        let _guard = self.change_lock();
        let served = self.find(id)?;
        let requested = explicit(&served);
        check_pool(&requested, nsid)?;
        if let Some(found) = find(&served, &requested, nsid) {
            let is_same = (found.disk.id.as_ref() == Some(&wanted.disk)
                || disk_spec::with_absolute_paths(&found.disk.disk)
                    == disk_spec::with_absolute_paths(&wanted.disk))
                && wanted.uuid.is_none_or(|uuid| uuid == found.namespace.uuid);
            return match is_same {
                true => Ok(false),
                false => Err(exit::conflict(anyhow!(
                    "namespace {nsid} exists already, with other properties; remove it first, or \
                     replace its disk"
                ))),
            };
        }
        if !(1..=MAX_NAMESPACES as u32).contains(&nsid) {
            let why = anyhow!("an NSID is 1 to {MAX_NAMESPACES}, not {nsid}");
            return Err(exit::bad_input(why));
        }
        check_group(&wanted.disk)?;
        let prepared = self.prepare_namespace(served, nsid, wanted)?;
        self.commit_prepared_namespace(prepared)?;
        Ok(true)
    }

    /// Prepares a new namespace: its disk is the open disk that `wanted` names by its id, or else a
    /// disk that is opened now.
    ///
    /// # Errors
    /// The disk cannot be opened, or is in use, or the disk with this id has another source.
    pub(super) fn prepare_namespace(
        &self,
        served: Arc<ServedController>,
        nsid: u32,
        mut wanted: DiskConfig,
    ) -> anyhow::Result<PreparedNamespace> {
        self.resolve(std::slice::from_mut(&mut wanted), None)?;
        let read_only = served.requested().controller.read_only;
        let disk = match self.unattached_disk(wanted.id.as_deref(), read_only) {
            Some(disk) => disk?,
            None => self.open_spec_for(&served, &wanted.disk)?,
        };
        self.check_files_of(&disk)?;
        Ok(PreparedNamespace { served, nsid, wanted, disk })
    }

    /// Adds a prepared namespace to its controller. The caller holds the
    /// [lock](Self::change_lock).
    ///
    /// # Errors
    /// The controller does not accept the namespace.
    pub(super) fn commit_prepared_namespace(
        &self,
        prepared: PreparedNamespace,
    ) -> anyhow::Result<()> {
        let PreparedNamespace { served, nsid, wanted, disk } = prepared;
        self.commit_namespace(&served, nsid, &wanted, disk)
    }

    /// Opens the disk of a new namespace.
    ///
    /// # Errors
    /// The disk cannot be opened.
    pub(super) fn open_spec_for(
        &self,
        served: &ServedController,
        spec: &str,
    ) -> anyhow::Result<Arc<dyn Disk>> {
        let read_only = served.requested().controller.read_only;
        let disk = open_disk(spec, read_only, |spec| self.open(spec));
        let disk = disk.map_err(ConfigureError::into_error)?;
        if served.requested().worker.is_none() && disk_kinds::may_block(spec) {
            isolate(&served.controller);
        }
        Ok(disk)
    }

    /// Adds a namespace with an open disk and a free NSID. The caller holds the
    /// [lock](Self::change_lock).
    ///
    /// # Errors
    /// The controller does not accept the namespace.
    pub(super) fn commit_namespace(
        &self,
        served: &ServedController,
        nsid: u32,
        wanted: &DiskConfig,
        disk: Arc<dyn Disk>,
    ) -> anyhow::Result<()> {
        check_no_subsystem(served)?;
        let requested = explicit(served);
        let taken = requested.controller.disks.iter().filter_map(|disk| disk.uuid).collect();
        let serial = &served.controller.config().serial;
        let uuid = wanted.uuid.unwrap_or_else(|| ControllerConfig::uuid_of(serial, &*disk, taken));
        let config = NamespaceConfig { disk, uuid };
        let own = DiskConfig { uuid: Some(uuid), nsid: Some(nsid), ..wanted.clone() };
        let mut after = requested.clone();
        let disks = &mut after.controller.disks;
        let place = disks.iter().position(|disk| disk.nsid > Some(nsid)).unwrap_or(disks.len());
        disks.insert(place, own.clone());
        let name = config.disk.name();
        let add = |controller: &Controller, done| {
            controller.add_namespace(Some(nsid), &config, done).map(drop)
        };
        let accepted = self.change(served, &requested, after, nsid, Some((&own, &config)), add)?;
        self.end_attach(own.id.as_deref());
        self.registry().warn_of_equal_uuids(served, Some(nsid));
        info!("{}: namespace {nsid} is {name}{}", served.name, describe(&*config.disk, &own.disk));
        accepted.check()
    }

    /// Removes a namespace of a controller. `forced` is required if the controller has a client.
    ///
    /// # Errors
    /// The namespace does not exist or is the only one, or its controller has a client and `forced`
    /// is false.
    pub(super) fn remove_namespace(&self, id: &str, nsid: u32, forced: bool) -> anyhow::Result<()> {
        let _guard = self.change_lock();
        let served = self.find(id)?;
        check_pool(&served.requested(), nsid)?;
        check_no_subsystem(&served)?;
        let its = explicit(&served);
        if its.controller.disks.len() > 1 && find(&served, &its, nsid).is_some() {
            let loss = Loss::of_controller(&served, format!("would lose namespace {nsid}"));
            guard::check(loss.as_slice(), forced)?;
        }
        self.take_namespace(&served, nsid)
    }

    /// Removes a namespace of a pool after the guest has deleted or detached it. Unlike
    /// [`take_namespace`](Self::take_namespace), it may remove the last namespace. The caller holds
    /// the [lock](Self::change_lock).
    ///
    /// # Errors
    /// The namespace does not exist, or its commands in flight take too long.
    pub(super) fn drop_namespace(
        &self,
        served: &ServedController,
        nsid: u32,
    ) -> anyhow::Result<()> {
        let requested = explicit(served);
        let found = find(served, &requested, nsid).ok_or_else(|| missing(served, nsid))?;
        let mut after = requested.clone();
        after.controller.disks.remove(found.at);
        // The disk is flushed, because guests need not flush before a detach, and the namespace may
        // be attached again.
        if let Err(error) = super::flush::flush(&*found.namespace.disk) {
            warn!("{}: cannot flush {}: {error}", served.name, found.namespace.disk.name());
        }
        drop(found);
        let remove = |controller: &Controller, done| controller.remove_namespace(nsid, done);
        self.change(served, &requested, after, nsid, None, remove)?.check()
    }

    /// Removes a namespace for a caller that holds the lock of changes. Unlike
    /// [`remove_namespace`](Self::remove_namespace), it does not check whether the namespace
    /// belongs to a pool.
    ///
    /// # Errors
    /// As for [`remove_namespace`](Self::remove_namespace).
    pub(super) fn take_namespace(
        &self,
        served: &ServedController,
        nsid: u32,
    ) -> anyhow::Result<()> {
        check_no_subsystem(served)?;
        let requested = explicit(served);
        let found = find(served, &requested, nsid).ok_or_else(|| missing(served, nsid))?;
        if requested.controller.disks.len() == 1 {
            return Err(exit::conflict(anyhow!(
                "{} has no other namespace, and a controller has one at least: add another one \
                 first, replace the disk of this one, or remove the controller",
                served.name
            )));
        }
        let id = id_of(&served.id, nsid, &found.disk);
        if let (None, Some(export)) = (&found.disk.id, self.exports().of(&id).first()) {
            return Err(exit::conflict(anyhow!(
                "the disk {id} has the export {export}, and would be closed; remove the export first: \
                 `shadowbell ctl export remove {export}`"
            )));
        }
        let mut after = requested.clone();
        after.controller.disks.remove(found.at);
        let name = found.namespace.disk.name();
        // The disk is flushed, because guests need not flush before a removal.
        super::flush::flush(&*found.namespace.disk)
            .with_context(|| format!("cannot flush {name}, so it is not removed"))?;
        let pending_detach = self.begin_detach(&found.disk, &found.namespace.disk);
        let own = OpenDisk { spec: found.disk.disk.clone(), disk: found.namespace.disk };
        let remove = |controller: &Controller, done| controller.remove_namespace(nsid, done);
        let outcome = self.change(served, &requested, after, nsid, None, remove);
        let is_closed = pending_detach.is_none();
        self.end_detach(pending_detach, outcome.is_ok());
        let accepted = outcome?;
        info!("{}: namespace {nsid}, {name}, is removed", served.name);
        // The guest may have written since the flush, and the removal cancels writes in flight.
        if is_closed { self.close_old_disk(&id, own, accepted) } else { accepted.check() }
    }

    /// Closes the old disk of a namespace. While commands are in flight at the disk, it stays open,
    /// so that it can be flushed after them.
    fn close_old_disk(&self, id: &str, old: OpenDisk, accepted: Accepted) -> anyhow::Result<()> {
        match accepted.check() {
            Ok(()) => self.close_disk(id, old),
            Err(slow) => Err(self.keep_disk(id, old, slow)),
        }
    }

    /// Changes a namespace that does not belong to a pool. Returns false if the namespace has this
    /// property already. The caller holds the [lock](Self::change_lock).
    ///
    /// # Errors
    /// The namespace does not exist, or the change is not possible.
    pub(super) fn change_namespace(
        &self,
        served: &ServedController,
        nsid: u32,
        change: &NamespaceChange,
        guard: &DiskGuard<'_>,
    ) -> anyhow::Result<bool> {
        check_pool(&served.requested(), nsid)?;
        self.apply_namespace_change(served, nsid, change, guard)
    }

    /// Like [`change_namespace`](Self::change_namespace), but the namespace may belong to a pool.
    ///
    /// # Errors
    /// As for [`change_namespace`](Self::change_namespace).
    pub(super) fn apply_namespace_change(
        &self,
        served: &ServedController,
        nsid: u32,
        change: &NamespaceChange,
        guard: &DiskGuard<'_>,
    ) -> anyhow::Result<bool> {
        check_no_subsystem(served)?;
        let requested = explicit(served);
        let found = find(served, &requested, nsid).ok_or_else(|| missing(served, nsid))?;
        if *change == NamespaceChange::ReadOnly(false) && requested.controller.read_only {
            let why = anyhow!("{} is configured as read-only", served.name);
            return Err(exit::conflict(why));
        }
        let open = |spec: &str| self.open_spec_for(served, spec);
        let (spec, disk, effect) =
            match apply_change(&found.disk.disk, &found.namespace.disk, change, guard, open)? {
                ChangeResult::Same => return Ok(false),
                ChangeResult::InPlace(spec) => {
                    self.update_spec(served, requested, found.at, nsid, spec);
                    return Ok(true);
                }
                ChangeResult::Disk(spec, disk, effect) => (spec, disk, effect),
            };
        if found.namespace.disk.info().read_only && !disk.info().read_only {
            self.check_made_writable(&self.disk(&id_of(&served.id, nsid, &found.disk))?)?;
        }
        let own = DiskConfig { disk: spec, ..found.disk.clone() };
        let mut after = requested.clone();
        if let Some(disk) = after.controller.disks.get_mut(found.at) {
            *disk = own.clone();
        }
        let config = NamespaceConfig { disk: Arc::clone(&disk), uuid: found.namespace.uuid };
        let replaced = change.replaces(&found.namespace.disk);
        let old = OpenDisk { spec: found.disk.disk, disk: found.namespace.disk };
        let replace =
            |controller: &Controller, done| change_disk(controller, nsid, disk, replaced, done);
        let accepted =
            self.change(served, &requested, after, nsid, Some((&own, &config)), replace)?;
        let name = config.disk.name();
        info!("{}: namespace {nsid} is {name}{}", served.name, describe(&*config.disk, &own.disk));
        let id = id_of(&served.id, nsid, &own);
        self.update_exports(&id, &config.disk, &effect);
        match change {
            NamespaceChange::Disk(_) => self.close_old_disk(&id, old, accepted)?,
            _ => accepted.check()?,
        }
        Ok(true)
    }

    /// Records the new specification of a disk, after the disk itself was changed.
    fn update_spec(
        &self,
        served: &ServedController,
        mut requested: SocketConfig,
        at: usize,
        nsid: u32,
        spec: String,
    ) {
        if let Some(disk) = requested.controller.disks.get_mut(at) {
            disk.disk.clone_from(&spec);
        }
        let limits = DiskLimits::split(&spec).unwrap_or_default().1;
        if let Some(checkpoint) = self.checkpoint() {
            checkpoint.set_disk_spec(served.index, nsid, spec, &requested);
        }
        info!("{}: namespace {nsid} has the limits {limits} from now on", served.name);
        served.set_requested(requested);
    }

    /// Creates a limit group. Returns false if it exists with these limits already.
    ///
    /// # Errors
    /// The name is invalid, or the group has other limits.
    pub(super) fn add_limit_group(&self, name: &str, wanted: Limits) -> anyhow::Result<bool> {
        let _guard = self.change_lock();
        limits::check_name(name).map_err(|why| exit::bad_input(anyhow!(why)))?;
        match limits::existing(name).map(|group| group.limits()) {
            Some(now) if now == wanted => return Ok(false),
            // The group has no limits yet: it exists because a disk on the command line names it.
            Some(now) if now.is_none() => {}
            Some(now) => {
                return Err(exit::conflict(anyhow!(
                    "a limit group `{name}` exists already, with the limits {now}; `shadowbell ctl \
                     limit-group set` changes them"
                )));
            }
            None => {}
        }
        self.put_limit_group(name, wanted);
        Ok(true)
    }

    /// Changes the limits of a group and returns all of its limits. Limits that are not given stay.
    ///
    /// # Errors
    /// The group does not exist, or a limit is invalid.
    pub(super) fn change_limit_group(
        &self,
        name: &str,
        given: &LimitSpec,
    ) -> anyhow::Result<Limits> {
        let _guard = self.change_lock();
        let group = limits::existing(name).ok_or_else(|| missing_group(name))?;
        let before = DiskLimits { own: group.limits(), group: None };
        let wanted = given.changed(&before).map_err(|why| exit::bad_input(anyhow!(why)))?.own;
        self.put_limit_group(name, wanted);
        Ok(wanted)
    }

    /// Sets the limits of a group, and creates the group if it does not exist. The caller holds the
    /// [lock](Self::change_lock).
    pub(super) fn put_limit_group(&self, name: &str, wanted: Limits) {
        let group = limits::group(name);
        if group.limits() != wanted {
            group.set(wanted);
            info!("the limit group {name} has the limits {wanted} from now on");
        }
        if let Some(checkpoint) = self.checkpoint() {
            checkpoint.publish_change();
        }
    }

    /// Removes the limit groups except these, unless a disk names the group. The caller holds the
    /// [lock](Self::change_lock).
    pub(super) fn drop_other_limit_groups(&self, kept: &[Group]) {
        let disks = self.disks();
        let used = disks.iter().filter_map(|disk| DiskLimits::split(&disk.open.spec).ok()?.1.group);
        let used: HashSet<_> = used.collect();
        let is_kept = |group: &Group| {
            kept.iter().any(|other| other.name == group.name) || used.contains(&group.name)
        };
        for group in limits::groups().into_iter().filter(|group| !is_kept(group)) {
            limits::remove_group(&group.name);
            info!("the limit group {} was removed", group.name);
            if let Some(checkpoint) = self.checkpoint() {
                checkpoint.publish_change();
            }
        }
    }

    /// Applies a change to the controller, waits for its end for a limited time, and updates the
    /// checkpoint before and after.
    fn change(
        &self,
        served: &ServedController,
        before: &SocketConfig,
        after: SocketConfig,
        nsid: u32,
        disk: Option<(&DiskConfig, &NamespaceConfig)>,
        act: impl FnOnce(&Controller, Done) -> Result<(), NamespaceError>,
    ) -> anyhow::Result<Accepted> {
        if let Some(checkpoint) = self.checkpoint() {
            checkpoint.begin_change(served.index, nsid, disk);
        }
        let (ends, end) = channel();
        let began = act(
            &served.controller,
            Box::new(move |outcome| {
                let _ = ends.send(outcome);
            }),
        );
        let outcome = began.and_then(|()| match end.recv_timeout(IN_FLIGHT_TIMEOUT) {
            Ok(outcome) => outcome.map(|()| Accepted::Done),
            Err(_) => Ok(Accepted::Slow { nsid }),
        });
        let requested = if outcome.is_ok() { after } else { before.clone() };
        if let Some(checkpoint) = self.checkpoint() {
            checkpoint.end_change(served.index, nsid, outcome.is_ok(), &requested);
        }
        if outcome.is_ok() {
            served.set_requested(requested);
        }
        outcome.map_err(impossible)
    }
}

/// Changes the disk of a namespace. `replaced` is the old disk if the new one has another source.
///
/// The queues of a replaced disk drain, and a resume would not reach it any more. So its error
/// policy holds no request from now on, unless the replacement fails.
fn change_disk(
    controller: &Controller,
    nsid: u32,
    disk: Arc<dyn Disk>,
    replaced: Option<Arc<dyn Disk>>,
    done: Done,
) -> Result<(), NamespaceError> {
    let Some(old) = replaced else { return controller.change_disk(nsid, disk, done) };
    old.suspend_error_policy(true);
    let its = Arc::clone(&old);
    let done = move |outcome: Result<(), NamespaceError>| {
        if outcome.is_err() {
            its.suspend_error_policy(false);
        }
        // The callback may open the storage of the old disk again.
        drop(its);
        done(outcome);
    };
    let began = controller.change_disk(nsid, disk, Box::new(done));
    began.inspect_err(|_| old.suspend_error_policy(false))
}

impl NamespaceChange {
    /// Returns the old disk if this change replaces it by a disk with another source. Other changes
    /// keep its held requests.
    pub(super) fn replaces(&self, old: &Arc<dyn Disk>) -> Option<Arc<dyn Disk>> {
        matches!(self, Self::Disk(_)).then(|| Arc::clone(old))
    }
}

/// Outcome of a change of a disk.
pub(super) enum ChangeResult {
    /// The disk has the property already.
    Same,
    /// The open disk was changed. This is its new specification.
    InPlace(String),
    /// Changed disk, to replace the old disk: its specification, the disk itself, and the effect on
    /// clients.
    Disk(String, Arc<dyn Disk>, Effect),
}

/// Changes a property of the disk `old`, whose specification is `spec`. `open` opens a disk that
/// replaces it.
///
/// # Errors
/// The change is not possible.
pub(super) fn apply_change(
    spec: &str,
    old: &Arc<dyn Disk>,
    change: &NamespaceChange,
    guard: &DiskGuard<'_>,
    open: impl FnOnce(&str) -> anyhow::Result<Arc<dyn Disk>>,
) -> anyhow::Result<ChangeResult> {
    let info = old.info();
    let (spec, disk, effect) = match change {
        NamespaceChange::Size(size) => {
            let bytes = match size {
                Size::Whole => None,
                Size::Bytes(bytes) => Some(*bytes),
                Size::Grow(bytes) => Some(info.bytes().saturating_add(*bytes)),
            };
            let disk = old.resized(bytes).map_err(refused)?;
            if disk.info().blocks == info.blocks {
                return Ok(ChangeResult::Same);
            }
            let effect = match disk.info().blocks < info.blocks {
                true => Effect::Content(format!(
                    "{} instead of {}",
                    ByteSize(disk.info().bytes()).display().iec(),
                    ByteSize(info.bytes()).display().iec()
                )),
                false => Effect::None,
            };
            (disk_spec::with_size(spec, disk.info().bytes()), disk, effect)
        }
        NamespaceChange::ReadOnly(wanted) if *wanted == info.read_only => {
            return Ok(ChangeResult::Same);
        }
        NamespaceChange::ReadOnly(wanted) => {
            let disk = old.with_writes(!wanted).map_err(refused)?;
            let value = if *wanted { "on" } else { "off" };
            let with_option = disk_spec::with_option(spec, READ_ONLY, value);
            (with_option, disk, effect_of(spec, old, change))
        }
        NamespaceChange::LimitChange(given) => {
            let (_, before) = DiskLimits::split(spec).unwrap_or_default();
            let wanted = given.changed(&before).map_err(|why| exit::bad_input(anyhow!(why)))?;
            if wanted.group != before.group {
                check_group(&wanted.joined(spec))?;
            }
            return apply_change(spec, old, &NamespaceChange::Limits(wanted), guard, open);
        }
        NamespaceChange::Limits(wanted) => {
            let (_, before) = DiskLimits::split(spec).unwrap_or_default();
            if *wanted == before {
                return Ok(ChangeResult::Same);
            }
            let spec = wanted.joined(spec);
            let limited = LimitedDisk::of(&**old);
            if let Some(own) = limited.and_then(|limited| limited.limiters().first())
                && wanted.group == before.group
                // The layer with the limits stays if the disk has exports, because its removal
                // would disconnect their clients.
                && (!wanted.is_none() || guard.is_exported)
            {
                own.set(wanted.own);
                return Ok(ChangeResult::InPlace(spec));
            }
            let bare = limited.map_or(old, LimitedDisk::unlimited);
            (spec, wanted.limit(Arc::clone(bare)), Effect::Reconnect)
        }
        NamespaceChange::Disk(new) => {
            let name = new;
            let new = &with_kept_options(spec, new);
            if disk_spec::with_absolute_paths(new) == disk_spec::with_absolute_paths(spec) {
                return Ok(ChangeResult::Same);
            }
            check_group(new)?;
            if let Some(stopped) = old.stopped() {
                return Err(exit::conflict(anyhow!(
                    "{} is stopped and holds {} requests, which the new source would not get: resume \
                     it first (`shadowbell ctl disk resume`), or reset its guests",
                    old.name(),
                    stopped.held
                )));
            }
            let old = old.name();
            let effect = Effect::Content(format!("the content of {name} instead of {old}"));
            // The guard is checked before the disk is opened, because the open may take long.
            guard.check(&effect)?;
            return Ok(ChangeResult::Disk(new.clone(), open(new)?, effect));
        }
    };
    guard.check(&effect)?;
    Ok(ChangeResult::Disk(spec, disk, effect))
}

/// Returns the source `new` of a disk with the rate limits, `read-only=on` and `on-error` of its
/// old source `old`, unless `new` names them.
fn with_kept_options(old: &str, new: &str) -> String {
    let Ok((mut bare, named)) = DiskLimits::split(new) else { return new.to_owned() };
    let (_, before) = DiskLimits::split(old).unwrap_or_default();
    let limits = LimitSpec::of(&named).changed(&before).unwrap_or(named);
    let read_only = disk_spec::is_read_only(old).then(|| "on".to_owned());
    let on_error = disk_spec::take_option(old, ErrorPolicy::OPTION).1;
    for (option, value) in [(READ_ONLY, read_only), (ErrorPolicy::OPTION, on_error)] {
        if let Some(value) = value
            && disk_spec::take_option(&bare, option).1.is_none()
        {
            bare = disk_spec::with_option(&bare, option, &value);
        }
    }
    limits.joined(&bare)
}

/// Effect of a change that a configuration file can ask for: limits, or read-only.
pub(super) fn effect_of(spec: &str, disk: &Arc<dyn Disk>, change: &NamespaceChange) -> Effect {
    match change {
        NamespaceChange::ReadOnly(true) => Effect::ReadOnly,
        NamespaceChange::Limits(wanted) => {
            let (_, before) = DiskLimits::split(spec).unwrap_or_default();
            let is_in_place = LimitedDisk::of(&**disk).is_some() && wanted.group == before.group;
            if is_in_place { Effect::None } else { Effect::Reconnect }
        }
        _ => Effect::None,
    }
}

/// Callback for the end of a change.
type Done = Box<dyn FnOnce(Result<(), NamespaceError>) + Send>;

/// Describes a disk for the log: ` (64.0 MiB, read-only, iops=100, as db)`.
fn describe(disk: &dyn Disk, spec: &str) -> String {
    let info = disk.info();
    let mut parts = vec![ByteSize(info.bytes()).display().iec().to_string()];
    if info.read_only {
        parts.push("read-only".to_owned());
    }
    let (_, limits) = DiskLimits::split(spec).unwrap_or_default();
    if !limits.is_none() {
        parts.push(limits.to_string());
    }
    format!(" ({})", parts.join(", "))
}

/// Configuration of a controller with all NSIDs and UUIDs of its namespaces filled in.
pub(super) fn explicit(served: &ServedController) -> SocketConfig {
    let mut requested = (*served.requested()).clone();
    let namespaces = served.controller.namespaces();
    for (disk, (nsid, namespace)) in requested.controller.disks.iter_mut().zip(namespaces) {
        (disk.nsid, disk.uuid) = (Some(nsid), Some(namespace.uuid));
    }
    requested
}

fn find(served: &ServedController, requested: &SocketConfig, nsid: u32) -> Option<Found> {
    let at = nsids(&requested.controller.disks).position(|other| other == nsid)?;
    let disk = requested.controller.disks.get(at)?.clone();
    let namespaces = served.controller.namespaces();
    let (_, namespace) = namespaces.into_iter().find(|(other, _)| *other == nsid)?;
    Some(Found { at, disk, namespace })
}

/// Refuses a namespace of a pool: only the guest manages these namespaces.
fn check_pool(requested: &SocketConfig, nsid: u32) -> anyhow::Result<()> {
    let pool = requested.controller.pool.as_ref().and_then(pool::opened);
    match pool.is_some_and(|pool| pool.index().find(nsid).is_some()) {
        true => Err(exit::conflict(anyhow!(
            "namespace {nsid} was created by the guest, and only the guest may change it"
        ))),
        false => Ok(()),
    }
}

/// Refuses a controller of a subsystem, since all controllers of a subsystem share its
/// namespaces.
fn check_no_subsystem(served: &ServedController) -> anyhow::Result<()> {
    match &served.requested().controller.subsystem {
        None => Ok(()),
        Some(membership) => Err(exit::conflict(anyhow!(
            "{} belongs to the subsystem {}, whose namespaces change only with the configuration \
             at the start of the server",
            served.name,
            membership.name
        ))),
    }
}

fn missing(served: &ServedController, nsid: u32) -> anyhow::Error {
    exit::not_found(anyhow!(
        "{} has no namespace {nsid}; `shadowbell ctl namespaces` lists them",
        served.name
    ))
}

/// Converts a refused change of a disk to an error with an exit status.
fn refused(error: ResizeError) -> anyhow::Error {
    match error {
        ResizeError::System { .. } => error.into(),
        ResizeError::Opened { .. } | ResizeError::Impossible { .. } => exit::conflict(error),
        _ => exit::bad_input(error),
    }
}

/// Converts a change that the controller refused to an error with an exit status.
fn impossible(error: NamespaceError) -> anyhow::Error {
    match error {
        NamespaceError::Config(_) | NamespaceError::NoRoom => exit::bad_input(error),
        NamespaceError::Missing(_) => exit::not_found(error),
        NamespaceError::Open(_) => error.into(),
        _ => exit::conflict(error),
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::EventQueue;
    use super::super::registry::Registry;
    use super::*;
    use parking_lot::Mutex;
    use shadowbell_controller::{Carrier, Config, Pool, PoolOptions};
    use shadowbell_disk::{DiskError, DiskInfo, Op, Queue, Request, Submitted};
    use shadowbell_memory::Segments;
    use std::collections::VecDeque;
    use std::io;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    #[derive(Debug, Default)]
    struct State {
        /// Results of the next flushes.
        flushes: Mutex<VecDeque<Result<(), DiskError>>>,
        orphans: AtomicUsize,
        has_lost_writes: AtomicBool,
    }

    /// A disk with these results of flushes. A failed flush sets `has_lost_writes` if there are no
    /// orphans.
    #[derive(Clone, Debug, Default)]
    struct Flushed(Arc<State>);

    impl Disk for Flushed {
        fn info(&self) -> DiskInfo {
            let mut info = DiskInfo::new(512, 2048);
            info.volatile_cache = true;
            info
        }

        fn queue(&self) -> io::Result<Box<dyn Queue>> {
            Ok(Box::new(self.clone()))
        }

        fn name(&self) -> String {
            "flushed".to_owned()
        }

        fn orphans(&self) -> usize {
            self.0.orphans.load(Ordering::Relaxed)
        }

        fn has_lost_writes(&self) -> bool {
            self.0.has_lost_writes.load(Ordering::Relaxed)
        }
    }

    impl Queue for Flushed {
        fn submit(&mut self, _: u32, request: &Request, _: &mut Segments) -> Submitted {
            assert_eq!(request.op, Op::Flush);
            let outcome = self.0.flushes.lock().pop_front().expect("a flush too many");
            let is_loss = outcome.is_err() && self.orphans() == 0;
            self.0.has_lost_writes.store(is_loss, Ordering::Relaxed);
            Submitted::Done(outcome)
        }
    }

    /// Changes of a server with the controller `vm`, whose namespace 1 is this disk.
    fn changes(disk: &Flushed) -> Changes {
        let pool = Pool::start(&PoolOptions { workers: 1, ..PoolOptions::default() }).unwrap();
        let disks = ["fake:1", "null:1MiB"].map(DiskConfig::of).into();
        let controller = ControllerConfig { disks, ..ControllerConfig::default() };
        let (id, socket) = (Some("vm".to_owned()), PathBuf::from("vm.sock"));
        let requested = SocketConfig { id, socket, controller, worker: None, origin: None };
        let null = shadowbell_disk_file::open("null:1MiB").unwrap();
        let namespaces = [Arc::new(disk.clone()) as Arc<dyn Disk>, null];
        let namespaces = (1..).zip(namespaces);
        let namespaces = namespaces.map(|(nth, disk)| NamespaceConfig { disk, uuid: [nth; 16] });
        let config = Config { namespaces: namespaces.collect(), ..Config::default() };
        let carrier = Carrier { mapped_doorbells: false, listener: None };
        let controller = Controller::new(config, pool.clone(), carrier).unwrap();
        let served = ServedController::new(0, requested, controller, Arc::default());
        let registry = Arc::new(Registry::new(vec![served]));
        Changes::new(pool, EventQueue::new().sender(0), false, registry)
    }

    /// Sets the results of the next flushes, and the number of orphans.
    fn prepare(disk: &Flushed, flushes: &[Result<(), DiskError>], orphans: usize) {
        *disk.0.flushes.lock() = flushes.iter().copied().collect();
        disk.0.orphans.store(orphans, Ordering::Relaxed);
    }

    #[test]
    fn a_disk_is_flushed_after_its_removal_or_replacement() {
        let (ok, failed) = (Ok(()), Err(DiskError::Io(5)));
        let replacement = NamespaceChange::Disk("null:1MiB?block-size=512".to_owned());
        let remove = |changes: &Changes| changes.remove_namespace("vm", 1, true);
        let replace = |changes: &Changes| changes.change_disk("vm/1", &replacement, true).map(drop);
        let replace_unattached = |changes: &Changes| {
            let disk = changes.disk("vm/1").unwrap().open;
            changes.unattached().lock().insert("data".to_owned(), disk);
            changes.remove_namespace("vm", 1, true).unwrap();
            changes.change_disk("data", &replacement, true).map(drop)
        };
        type Change<'a> = &'a dyn Fn(&Changes) -> anyhow::Result<()>;
        let cases: [(&[_], &str, Change<'_>); 3] = [
            // A removal also flushes the disk before the change.
            (&[ok], "vm/1.old", &remove),
            (&[], "vm/1.old", &replace),
            (&[ok, ok], "data.old", &replace_unattached),
        ];
        for (before, kept, change) in cases {
            let disk = Flushed::default();
            prepare(&disk, &[before, &[ok]].concat(), 0);
            change(&changes(&disk)).unwrap();
            assert!(disk.0.flushes.lock().is_empty(), "no flush: {kept}");

            // The flush fails because of a loss: the disk is closed, and the request fails.
            prepare(&disk, &[before, &[failed]].concat(), 0);
            let server = changes(&disk);
            let error = format!("{:#}", change(&server).unwrap_err());
            assert!(error.contains("data written to flushed may be lost"), "{error}");
            assert!(server.disk(kept).is_err());

            // The storage does not answer a write: the disk stays open until it does.
            let disk = Flushed::default();
            prepare(&disk, &[before, &[failed]].concat(), 1);
            let server = changes(&disk);
            let error = format!("{:#}", change(&server).unwrap_err());
            assert!(error.contains(&format!("stays open as the disk {kept},")), "{error}");
            let again: Arc<dyn Disk> = Arc::new(disk.clone());
            let error = server.check_orphans(&again).unwrap_err().to_string();
            assert!(error.contains(kept), "{error}");
            prepare(&disk, &[ok], 0);
            server.check_orphans(&again).unwrap();
            server.remove_disk(kept).unwrap();
            assert!(server.disk(kept).is_err() && disk.0.flushes.lock().is_empty());
        }
    }

    #[test]
    fn a_replaced_source_keeps_limits_and_read_only_unless_the_new_one_names_them() {
        let old = "/a.img?iops=100:200&read-only=on&limit-group=g&direct=on";
        for (new, expected) in [
            ("/b.img", "/b.img?read-only=on&iops=100:200&limit-group=g"),
            ("/b.img?aio=threads", "/b.img?aio=threads&read-only=on&iops=100:200&limit-group=g"),
            ("/b.img?iops=5&read-only=off", "/b.img?read-only=off&iops=5&limit-group=g"),
            (
                "/b.img?bandwidth=1MiB&limit-group=h",
                "/b.img?read-only=on&iops=100:200&bandwidth=1MiB&limit-group=h",
            ),
        ] {
            assert_eq!(with_kept_options(old, new), expected);
        }
        for (new, expected) in [
            ("/b.img", "/b.img?on-error=stop-on-full"),
            ("/b.img?on-error=report", "/b.img?on-error=report"),
        ] {
            assert_eq!(with_kept_options("/a.img?on-error=stop-on-full", new), expected);
        }
        for old in ["/a.img", "/a.img?read-only=off&direct=on"] {
            assert_eq!(
                with_kept_options(old, "mem:1MiB?block-size=512"),
                "mem:1MiB?block-size=512"
            );
        }
    }
}
