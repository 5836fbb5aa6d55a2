//! Reconfiguration of a running server from a configuration: `ctl apply` and SIGHUP.

use super::args::Args;
use super::config_diff::{Plan, Step};
use super::disk_plan::DiskPlan;
use super::disks::ListedDisk;
use super::guard::{self, DiskGuard};
use super::namespaces::{PreparedNamespace, explicit};
use super::open_disk::has_same_source;
use super::reconfigure::{Changes, Prepared};
use super::registry::ServedController;
use anyhow::{Context, anyhow};
use shadowbell_config::config_file::write::Settings;
use shadowbell_config::controller_config::DiskConfig;
use shadowbell_config::disk_spec::{self, DiskSpecError};
use shadowbell_config::server_config::{NamedDisk, ServerConfig, SocketConfig};
use shadowbell_disk_file::{CheckedImage, check_image};
use shadowbell_process::exit;
use shadowbell_storage::disk_kinds;
use std::collections::HashSet;
use std::sync::Arc;
use tracing::{error, info, warn};

/// Changes the controllers and the limit groups to those of `config`. With `dry_run` the plan is
/// only computed. All other settings of `config` are ignored.
///
/// # Errors
/// The change is not possible. Nothing was changed unless the error says otherwise.
pub(super) fn apply(
    changes: &Changes,
    config: ServerConfig,
    dry_run: bool,
    forced: bool,
) -> anyhow::Result<Plan> {
    check_disks(&config).map_err(|error| error.context("nothing was changed"))?;
    let change_lock = changes.change_lock();
    changes.registry().check_waiting(None)?;
    let (named, exports) = (config.disks, config.exports);
    let mut plan = Plan::of(changes.registry(), config.controllers, &config.groups);
    let mut disks = DiskPlan::of(changes, &plan, &named, &exports);
    plan.add_losses(changes);
    plan.lost.append(&mut disks.lost);
    plan.differences.append(&mut disks.differences);
    let _checked = check_images(changes, &plan, &disks, &named)
        .map_err(|error| error.into_error().context("nothing was changed"))?;
    if dry_run {
        return Ok(plan);
    }
    guard::check(&plan.lost, forced)?;
    let before = changes.exports().wanted();
    let mut early = Early::default();
    let begun = disks.check(changes, &plan).and_then(|()| early.add_disks(changes, &named, &plan));
    let begun = begun.and_then(|()| disks.start_early(changes, &mut early.exports));
    let prepared = match begun.and_then(|()| PreparedPlan::of(changes, &plan, &disks)) {
        Ok(prepared) => prepared,
        Err(error) => {
            early.undo(changes);
            return Err(error.context("nothing was changed"));
        }
    };
    let mut failed = disks.stop_exports(changes);
    failed.extend(prepared.execute(changes, &plan, (&disks, &named), forced));
    failed.extend(disks.open_disks(changes, &named));
    failed.extend(disks.start_exports(changes, &exports, &before));
    for group in &config.groups {
        changes.put_limit_group(&group.name, group.limits);
    }
    changes.drop_other_limit_groups(&config.groups);
    drop(change_lock);
    if failed.is_empty() {
        return Ok(plan);
    }
    let failed: Vec<_> = failed.iter().map(exit::line).collect();
    Err(anyhow!("only a part was applied: {}", failed.join("; ")))
}

/// Checks the specifications of all disks. A disk of a controller that is replaced is opened only
/// after its removal, which is too late for a misspelt option.
///
/// # Errors
/// A specification is invalid.
fn check_disks(config: &ServerConfig) -> anyhow::Result<()> {
    let of_controllers = config.controllers.iter().flat_map(|one| &one.controller.disks);
    let mut specs =
        config.disks.iter().map(|disk| &disk.spec).chain(of_controllers.map(|disk| &disk.disk));
    let checked = specs.try_for_each(|spec| disk_kinds::check(spec));
    checked.map_err(DiskSpecError::into_error)
}

/// Checks that the images can be read which the steps of a plan open, because some are opened only
/// after a removal. They stay available until the result is dropped.
///
/// # Errors
/// An image is missing or unreadable.
fn check_images(
    changes: &Changes,
    plan: &Plan,
    disks: &DiskPlan,
    named: &[NamedDisk],
) -> Result<Vec<CheckedImage>, DiskSpecError> {
    let open = changes.disks();
    let stays = |id: &str, spec: &str| {
        let is_it = |disk: &ListedDisk| disk.id == id && has_same_source(&disk.open.spec, spec);
        open.iter().any(|disk| is_it(disk) && !disks.closes(id))
    };
    let new =
        plan.new_disks().filter(|disk| disk.id.as_ref().is_none_or(|id| !stays(id, &disk.disk)));
    let named = named.iter().filter(|disk| !stays(&disk.id, &disk.spec));
    let specs = new.map(|disk| &disk.disk).chain(named.map(|disk| &disk.spec));
    let images = specs.filter_map(|spec| disk_spec::image(spec));
    images.map(|(path, _)| check_image(&path).map_err(DiskSpecError::Disk)).collect()
}

/// Disks and exports that were added before the first step of a plan.
#[derive(Default)]
struct Early {
    disks: Vec<String>,
    exports: Vec<String>,
}

impl Early {
    /// Opens the new disks with ids that no controller of the configuration uses. Leaves out disks
    /// whose file is still in use by an open disk.
    ///
    /// # Errors
    /// A disk cannot be opened.
    fn add_disks(
        &mut self,
        changes: &Changes,
        named: &[NamedDisk],
        plan: &Plan,
    ) -> anyhow::Result<()> {
        let exclusive_resources = |spec: &str| DiskConfig::of(spec).exclusive_resources();
        let all = changes.disks();
        let in_use: HashSet<_> =
            all.iter().map(|disk| exclusive_resources(&disk.open.spec)).collect();
        let is_new = |disk: &&NamedDisk| all.iter().all(|other| other.id != disk.id);
        let early = named.iter().filter(is_new).filter(|disk| !plan.names(&disk.id));
        for disk in early.filter(|disk| !in_use.contains(&exclusive_resources(&disk.spec))) {
            changes.put_disk(disk)?;
            self.disks.push(disk.id.clone());
        }
        Ok(())
    }

    /// Removes the exports and disks again, because the plan cannot be executed.
    fn undo(&self, changes: &Changes) {
        let exports = self.exports.iter().map(|id| changes.drop_export(id));
        for undone in exports.chain(self.disks.iter().map(|id| changes.drop_disk(id))) {
            if let Err(error) = undone {
                warn!("{}", exit::line(&error));
            }
        }
    }
}

/// A namespace to add: its controller, its NSID, and its disk.
type NewNamespace<'a> = (Arc<ServedController>, u32, &'a DiskConfig);

/// Plan with its new disks and sockets. Disks and sockets that are in use until a removal are
/// opened later.
struct PreparedPlan<'a> {
    to_remove: Vec<Arc<ServedController>>,
    controllers: Vec<Prepared>,
    namespaces: Vec<PreparedNamespace>,
    /// Controllers to add after the removals, because their socket or a disk is in use until then.
    /// `late_namespaces` are namespaces to add to existing controllers after the removals, for the
    /// same reason.
    late_controllers: Vec<&'a SocketConfig>,
    late_namespaces: Vec<NewNamespace<'a>>,
}

impl<'a> PreparedPlan<'a> {
    fn of(changes: &Changes, plan: &'a Plan, disks: &DiskPlan) -> anyhow::Result<Self> {
        let registry = changes.registry();
        let to_remove =
            plan.remove.iter().cloned().chain(plan.replace.iter().map(SocketConfig::id));
        let to_remove: Vec<_> = to_remove.filter_map(|id| registry.find(&id)).collect();
        let mut in_use: HashSet<_> =
            to_remove.iter().flat_map(|served| served.requested().exclusive_resources()).collect();
        let mut to_add = Vec::new();
        for (id, steps) in &plan.change {
            let served = changes.find(id)?;
            for step in steps {
                match step {
                    Step::Add(nsid, disk) => to_add.push((Arc::clone(&served), *nsid, disk)),
                    Step::Remove(nsid) => {
                        in_use.extend(served.requested().exclusive_resource_of(*nsid))
                    }
                    Step::Change(..) | Step::Ana(..) => {}
                }
            }
        }
        let closed = changes.disks().into_iter().filter(|disk| disks.closes(&disk.id));
        in_use.extend(closed.map(|disk| DiskConfig::of(&disk.open.spec).exclusive_resources()));
        let is_late = |disk: &DiskConfig| {
            in_use.contains(&disk.exclusive_resources())
                || disk.id.as_ref().is_some_and(|id| disks.precedes_attachment(changes, id))
        };
        let (late_controllers, early): (Vec<_>, Vec<_>) = plan.add.iter().partition(|requested| {
            requested.exclusive_resources().iter().any(|what| in_use.contains(what))
                || requested.controller.disks.iter().any(is_late)
        });
        let (late_namespaces, namespaces): (Vec<_>, Vec<_>) =
            to_add.into_iter().partition(|(_, _, disk)| is_late(disk));
        let controllers = early.into_iter().map(|requested| changes.prepare(requested.clone()));
        let controllers = controllers.collect::<Result<_, _>>()?;
        let namespaces = namespaces
            .into_iter()
            .map(|(served, nsid, wanted)| changes.prepare_namespace(served, nsid, wanted.clone()));
        let namespaces = namespaces.collect::<anyhow::Result<_>>()?;
        Ok(Self { to_remove, controllers, namespaces, late_controllers, late_namespaces })
    }

    /// Carries out the plan and returns the errors. `disks`: the steps for the disks while no
    /// controller has them, and the disks of the configuration.
    fn execute(
        self,
        changes: &Changes,
        plan: &Plan,
        (disks, named): (&DiskPlan, &[NamedDisk]),
        forced: bool,
    ) -> Vec<anyhow::Error> {
        let mut failed = Vec::new();
        let (mut before, mut detached) = (Vec::new(), Vec::new());
        for prepared in self.namespaces {
            failed.extend(changes.commit_prepared_namespace(prepared).err());
        }
        for (id, steps) in &plan.change {
            for step in steps {
                let outcome = changes.find(id).and_then(|served| match step {
                    Step::Add(..) => Ok(()),
                    Step::Remove(nsid) => {
                        let config = explicit(&served).controller.disks;
                        changes.take_namespace(&served, *nsid)?;
                        let config = config.into_iter().find(|disk| disk.nsid == Some(*nsid));
                        detached.extend(config.map(|config| (served, *nsid, config)));
                        Ok(())
                    }
                    Step::Change(nsid, change) => {
                        // No losses are checked here, because those of the whole plan were checked
                        // before.
                        let is_exported = !changes.exports().is_empty();
                        let guard = DiskGuard { losses: &|_| Vec::new(), forced, is_exported };
                        changes.apply_namespace_change(&served, *nsid, change, &guard).map(drop)
                    }
                    Step::Ana(group, state) => {
                        changes.apply_ana_state(&served, *group, *state).map(drop)
                    }
                });
                failed.extend(outcome.err());
            }
        }
        for served in self.to_remove {
            before.push(served.requested());
            failed.extend(changes.take_away(served).err());
        }
        failed.extend(disks.change_disks(changes, named));
        for prepared in self.controllers {
            failed.extend(changes.commit(prepared).err());
        }
        let serve = |requested: &SocketConfig| {
            changes.prepare(requested.clone()).and_then(|prepared| changes.commit(prepared))
        };
        for requested in self.late_controllers.into_iter().chain(&plan.replace) {
            let Err(error) = serve(requested) else { continue };
            failed.push(error);
            // The controller could not be replaced, so the previous one is served again if
            // possible.
            if let Some(before) = before.iter().find(|before| before.id() == requested.id()) {
                let mut before = (**before).clone();
                failed.extend(disks.restore(changes, &mut before.controller.disks));
                failed.extend(serve(&before).err());
            }
        }
        let attach = |served: &Arc<ServedController>, nsid, wanted: &DiskConfig| {
            let prepared = changes.prepare_namespace(Arc::clone(served), nsid, wanted.clone());
            prepared.and_then(|prepared| changes.commit_prepared_namespace(prepared))
        };
        for (served, nsid, wanted) in self.late_namespaces {
            let Err(error) = attach(&served, nsid, wanted) else { continue };
            failed.push(error);
            // The named disk could not be attached, so it is attached where it was before if
            // possible.
            let is_it = |disk: &DiskConfig| disk.id.is_some() && disk.id == wanted.id;
            let place = detached.iter_mut().find(|(_, _, disk)| is_it(disk));
            if let Some((served, nsid, before)) = place {
                failed.extend(disks.restore(changes, std::slice::from_mut(before)));
                failed.extend(attach(served, *nsid, before).err());
            }
        }
        failed
    }
}

/// A configuration file that can be reloaded.
pub(super) struct Reload {
    args: Args,
    settings: Settings,
}

impl Reload {
    /// Returns the file that `args` names and from which `config` was read. `None` if there is no
    /// file.
    pub(super) fn of(args: &Args, config: &ServerConfig) -> Option<Arc<Self>> {
        let args = args.has_file().then(|| args.clone())?;
        Some(Arc::new(Self { args, settings: Settings::of(config) }))
    }

    /// Reloads the file, or its `text` that the supervisor has read, on a thread of its own,
    /// because disks may take long to open. At the end the thread calls `done` with a sentence
    /// about the result.
    pub(super) fn start(
        self: &Arc<Self>,
        changes: &Arc<Changes>,
        text: anyhow::Result<Option<String>>,
        done: impl FnOnce(&str) + Send + 'static,
    ) {
        let (reload, changes) = (Arc::clone(self), Arc::clone(changes));
        let thread = std::thread::Builder::new().name("sb-reload".into());
        let started = thread.spawn(move || done(&reload.run(&changes, text)));
        if let Err(error) = started {
            error!("the configuration is not reloaded: cannot start a thread ({error})");
        }
    }

    /// Reloads the file, logs the result and returns it.
    fn run(&self, changes: &Changes, text: anyhow::Result<Option<String>>) -> String {
        match self.read(changes, text) {
            Ok(summary) => {
                info!("{summary}");
                summary
            }
            Err(why) => {
                let why = exit::line(&why);
                error!("{why}");
                why
            }
        }
    }

    fn read(
        &self,
        changes: &Changes,
        text: anyhow::Result<Option<String>>,
    ) -> anyhow::Result<String> {
        let refused = "the configuration is refused, and nothing was changed";
        let mut config =
            text.and_then(|text| self.args.clone().config(text.as_deref())).context(refused)?;
        config.add_attached().context(refused)?;
        if !Settings::of(&config).are_in_effect(&self.settings) {
            warn!(
                "server-wide settings of the configuration have changed; they take effect at the \
                 next `shadowbell upgrade` or restart"
            );
        }
        let plan = apply(changes, config, false, false).context("the configuration")?;
        let Plan { add, remove, replace, change, unchanged, .. } = plan;
        Ok(format!(
            "the configuration was reloaded; controllers: {} added, {} removed, {} replaced, {} \
             changed, {unchanged} unchanged",
            add.len(),
            remove.len(),
            replace.len(),
            change.len(),
        ))
    }
}
