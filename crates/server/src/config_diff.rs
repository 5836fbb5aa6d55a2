//! Comparison of a running server with a new configuration: the steps that make the server match
//! the configuration, and the differences for the operator.
//!
//! A controller of which only namespaces differ keeps its client, if each difference can be applied
//! while a guest runs: an added or removed namespace, other limits, or a change of read-only.

use super::disks::ListedDisk;
use super::guard::Loss;
use super::namespaces::{NamespaceChange, effect_of, explicit};
use super::open_disk::Parts;
use super::reconfigure::Changes;
use super::registry::{Registry, ServedController};
use bytesize::ByteSize;
use clap::ValueEnum;
use shadowbell_config::ana_state::AnaStateName;
use shadowbell_config::controller_config::{ControllerConfig, DiskConfig, nsids};
use shadowbell_config::disk_spec;
use shadowbell_config::limits::{self, Group};
use shadowbell_config::pool::PoolSpec;
use shadowbell_config::server_config::{Own, SocketConfig, WorkerChoice};
use shadowbell_config::uuid_text::uuid_text;
use shadowbell_control_api::api::Difference;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Steps that make a server serve a configuration.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) add: Vec<SocketConfig>,
    /// Ids of the controllers to remove.
    pub(super) remove: Vec<String>,
    /// Controllers that are removed and added again with another configuration, so that their
    /// clients are lost.
    pub(super) replace: Vec<SocketConfig>,
    /// Controllers that keep their clients: id, and the changes of their namespaces.
    pub(super) change: Vec<(String, Vec<Step>)>,
    pub(super) unchanged: usize,
    /// Ids of controllers whose connected client would lose its controller or a namespace.
    pub(super) busy: Vec<String>,
    /// Losses of connected clients.
    pub(super) lost: Vec<Loss>,
    /// Differences of controllers that are in both configurations, and of limit groups.
    pub(super) differences: Vec<Difference>,
}

/// Change of a namespace or an ANA state of a controller that stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Add a namespace.
    Add(u32, DiskConfig),
    /// Remove a namespace.
    Remove(u32),
    /// Change a namespace.
    Change(u32, NamespaceChange),
    /// Set the ANA state of a group.
    Ana(u32, AnaStateName),
}

impl Plan {
    /// Compares the served controllers with the controllers `wanted` and the limit groups `groups`.
    pub(super) fn of(registry: &Registry, wanted: Vec<SocketConfig>, groups: &[Group]) -> Self {
        let mut plan = Self::default();
        let ids: HashSet<String> = wanted.iter().map(SocketConfig::id).collect();
        for served in registry.all() {
            if !ids.contains(&served.id) {
                plan.remove.push(served.id.clone());
                plan.loses(&served, "would lose the controller".to_owned());
            }
        }
        for requested in wanted {
            match registry.find(&requested.id()) {
                None => plan.add.push(requested),
                Some(served) => plan.compare(&served, requested),
            }
        }
        plan.differences.extend(groups.iter().filter_map(group_difference));
        let now = limits::groups().into_iter();
        let gone = now.filter(|now| groups.iter().all(|wanted| wanted.name != now.name));
        plan.differences.extend(gone.map(|group| Difference {
            controller: None,
            what: format!("limit group {}", group.name),
            from: Some(match group.limits.is_none() {
                true => "no limits".to_owned(),
                false => group.limits.to_string(),
            }),
            to: None,
        }));
        plan
    }

    /// True if no controller has this disk after the removals of the plan, and before its
    /// additions.
    pub(super) fn releases(&self, disk: &ListedDisk) -> bool {
        disk.namespaces.iter().all(|(served, nsid)| {
            let mut changed = self.change.iter();
            self.remove.contains(&served.id)
                || self.replace.iter().any(|requested| requested.id() == served.id)
                || changed
                    .any(|(id, steps)| *id == served.id && steps.contains(&Step::Remove(*nsid)))
        })
    }

    /// True if a controller to be added, replaced or changed refers to the disk with this id.
    pub(super) fn names(&self, id: &str) -> bool {
        self.new_disks().any(|disk| disk.id.as_deref() == Some(id))
    }

    /// Disks of the controllers to be added or replaced, and of the namespaces to be added.
    pub(super) fn new_disks(&self) -> impl Iterator<Item = &DiskConfig> {
        let controllers = self.add.iter().chain(&self.replace);
        let disks = controllers.flat_map(|requested| &requested.controller.disks);
        let steps = self.change.iter().flat_map(|(_, steps)| steps);
        disks.chain(steps.filter_map(|step| match step {
            Step::Add(_, disk) => Some(disk),
            _ => None,
        }))
    }

    fn compare(&mut self, served: &ServedController, requested: SocketConfig) {
        let before = explicit(served);
        let steps = steps(&before, &requested, |nsid| takes_writes(served, nsid));
        if steps.as_ref().is_some_and(Vec::is_empty) {
            self.unchanged += 1;
            return;
        }
        let differences = differences(&before, &requested);
        self.differences.extend(
            differences
                .map(|difference| Difference { controller: Some(served.id.clone()), ..difference }),
        );
        let Some(steps) = steps else {
            self.loses(served, "would lose the controller".to_owned());
            self.replace.push(requested);
            return;
        };
        for step in &steps {
            if let Step::Remove(nsid) = step {
                self.loses(served, format!("would lose namespace {nsid}"));
            }
        }
        self.change.push((served.id.clone(), steps));
    }

    /// Records that a controller's client, if there is one, would lose its controller or a
    /// namespace.
    fn loses(&mut self, served: &ServedController, what: String) {
        let Some(loss) = Loss::of_controller(served, what) else { return };
        self.lost.push(loss);
        if !self.busy.contains(&served.id) {
            self.busy.push(served.id.clone());
        }
    }

    /// Records what clients lose by the changes of namespaces.
    pub(super) fn add_losses(&mut self, changes: &Changes) {
        let replaced = self.replace.iter().map(SocketConfig::id);
        let ended = self.remove.iter().cloned().chain(replaced);
        let ended = ended.filter_map(|id| changes.registry().find(&id));
        let lost: Vec<_> = ended.flat_map(|served| changes.export_losses(&served)).collect();
        self.lost.extend(lost);
        let disks = changes.disks();
        for (id, steps) in self.change.clone() {
            for step in steps {
                let Step::Change(nsid, change) = step else { continue };
                let is_it = |disk: &&ListedDisk| {
                    let mut namespaces = disk.namespaces.iter();
                    namespaces.any(|(served, other)| served.id == id && *other == nsid)
                };
                let Some(disk) = disks.iter().find(is_it) else { continue };
                let effect = effect_of(&disk.open.spec, &disk.open.disk, &change);
                let losses = changes.losses(disk, &effect);
                let has_client = disk.namespaces.iter().any(|(served, _)| served.has_client());
                if has_client && effect.on_namespace(nsid).is_some() && !self.busy.contains(&id) {
                    self.busy.push(id.clone());
                }
                self.lost.extend(losses);
            }
        }
    }
}

/// Returns true if a namespace's disk can be changed to writable.
fn takes_writes(served: &ServedController, nsid: u32) -> bool {
    let namespaces = served.controller.namespaces();
    let found = namespaces.iter().find(|(other, _)| *other == nsid);
    found.is_some_and(|(_, namespace)| namespace.disk.with_writes(true).is_ok())
}

/// Returns the steps that change a controller without a disconnect of its client. `None` if that is
/// not possible.
fn steps(
    before: &SocketConfig,
    after: &SocketConfig,
    takes_writes: impl Fn(u32) -> bool,
) -> Option<Vec<Step>> {
    let is_same = before.canonical_socket() == after.canonical_socket()
        && before.worker == after.worker
        && before.controller.is_same_but_disks(&with_ana_of(before, after));
    let ana = states(before, after);
    let (before, after) = (disks(before), disks(after));
    // One namespace must exist both before and after the steps, because a controller always has a
    // namespace.
    if !is_same || !after.keys().any(|nsid| before.contains_key(nsid)) {
        return None;
    }
    let mut steps = Vec::new();
    for (nsid, disk) in &after {
        let Some(old) = before.get(nsid) else {
            steps.push(Step::Add(*nsid, (*disk).clone()));
            continue;
        };
        let changes = changes(old, disk, || takes_writes(*nsid))?;
        steps.extend(changes.into_iter().map(|change| Step::Change(*nsid, change)));
    }
    steps.extend(ana);
    let gone = before.keys().filter(|nsid| !after.contains_key(nsid));
    steps.extend(gone.map(|nsid| Step::Remove(*nsid)));
    Some(steps)
}

/// Returns the configuration `after` with the ANA states of `before`, so that a comparison ignores
/// them.
fn with_ana_of(before: &SocketConfig, after: &SocketConfig) -> ControllerConfig {
    let mut wanted = after.controller.clone();
    if let (Some(before), Some(after)) = (&before.controller.subsystem, &mut wanted.subsystem) {
        after.ana.states.clone_from(&before.ana.states);
    }
    wanted
}

/// Returns a step for each ANA state that differs.
fn states(before: &SocketConfig, after: &SocketConfig) -> Vec<Step> {
    let both = before.controller.subsystem.as_ref().zip(after.controller.subsystem.as_ref());
    let changes = both.map(|(before, after)| {
        let (before, after) = (&before.ana, &after.ana);
        let groups = 1..=after.count();
        let others = groups.filter(|group| before.state(*group) != after.state(*group));
        others.map(|group| Step::Ana(group, after.state(group))).collect()
    });
    changes.unwrap_or_default()
}

/// Returns the changes that turn a namespace's disk `before` into `after`. `None` if the namespace
/// cannot be changed in this way at run time.
pub(super) fn changes(
    before: &DiskConfig,
    after: &DiskConfig,
    takes_writes: impl FnOnce() -> bool,
) -> Option<Vec<NamespaceChange>> {
    let is_same_uuid = before.uuid.zip(after.uuid).is_none_or(|(one, other)| one == other);
    let is_same_disk = (&before.id, before.share) == (&after.id, after.share);
    let (before, after) = (Parts::of(&before.disk)?, Parts::of(&after.disk)?);
    if !is_same_uuid || !is_same_disk || before.bare != after.bare {
        return None;
    }
    let mut changes = Vec::new();
    if before.limits != after.limits {
        changes.push(NamespaceChange::Limits(after.limits));
    }
    if before.read_only != after.read_only {
        if !after.read_only && !takes_writes() {
            return None;
        }
        changes.push(NamespaceChange::ReadOnly(after.read_only));
    }
    Some(changes)
}

/// Disks of a controller by NSID.
fn disks(of: &SocketConfig) -> BTreeMap<u32, &DiskConfig> {
    nsids(&of.controller.disks).zip(&of.controller.disks).collect()
}

/// Returns the differences between two configurations of a controller. The caller fills in the
/// controller's id.
fn differences(
    before: &SocketConfig,
    after: &SocketConfig,
) -> impl Iterator<Item = Difference> + use<> {
    let mut all = Vec::new();
    let mut compare = |what: String, from: Option<String>, to: Option<String>| {
        if from != to {
            all.push(Difference { controller: None, what, from, to });
        }
    };
    for ((what, from), (_, to)) in texts(before).into_iter().zip(texts(after)) {
        compare(what.to_owned(), from, to);
    }
    let (before, after) = (disks(before), disks(after));
    let nsids: BTreeSet<u32> = before.keys().chain(after.keys()).copied().collect();
    for nsid in nsids {
        let (from, to) = (before.get(&nsid), after.get(&nsid));
        // UUIDs are only compared if both configurations have one.
        let is_both =
            from.zip(to).is_none_or(|(from, to)| from.uuid.is_some() && to.uuid.is_some());
        let text = |disk: &&DiskConfig| {
            let spec = disk_spec::with_absolute_paths(&disk.disk);
            match disk.uuid.filter(|_| is_both) {
                Some(uuid) => disk_spec::with_option(&spec, "uuid", &uuid_text(&uuid)),
                None => spec,
            }
        };
        compare(format!("namespace {nsid}"), from.map(text), to.map(text));
    }
    all.into_iter()
}

/// Properties of a controller without its disks, under the keys of the configuration file.
fn texts(of: &SocketConfig) -> [(&'static str, Option<String>); 11] {
    let config = &of.controller;
    let doorbells = config.doorbells.to_possible_value().map(|value| value.get_name().to_owned());
    let worker = of.worker.map(|worker| match worker {
        WorkerChoice::Own(Own::Own) => "own".to_owned(),
        WorkerChoice::Shared(number) => number.to_string(),
    });
    let size = |bytes| ByteSize(bytes).display().iec().to_string();
    [
        ("socket", Some(of.canonical_socket())),
        ("serial", config.serial.clone()),
        ("model", config.model.clone()),
        ("doorbells", doorbells),
        ("queues", config.queues.map(|queues| queues.to_string())),
        ("queue-entries", config.queue_entries.map(|entries| entries.to_string())),
        ("max-transfer", config.max_transfer.map(size)),
        ("read-only", config.read_only.then(|| "true".to_owned())),
        ("worker", worker),
        ("pool", config.pool.as_ref().map(PoolSpec::to_string)),
        ("ana", config.subsystem.as_ref().and_then(|membership| membership.ana.text())),
    ]
}

fn group_difference(wanted: &Group) -> Option<Difference> {
    let now = limits::groups().into_iter().find(|group| group.name == wanted.name);
    let from = now.map(|group| group.limits).filter(|limits| !limits.is_none());
    let to = Some(wanted.limits).filter(|limits| !limits.is_none());
    (from != to).then(|| Difference {
        controller: None,
        what: format!("limit group {}", wanted.name),
        from: from.map(|limits| limits.to_string()),
        to: to.map(|limits| limits.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_config::config_file::parse;
    use shadowbell_config::limits::DiskLimits;

    fn controller(lines: &str) -> SocketConfig {
        let text = format!("[[controller]]\nsocket = \"/vm0.sock\"\n{lines}");
        parse(&text, "vms.toml").unwrap().controllers.remove(0)
    }

    fn between(before: &str, after: &str) -> Option<Vec<Step>> {
        let (before, after) = (controller(before), controller(after));
        steps(&before, &after, |nsid| nsid != 9)
    }

    #[test]
    fn changes_that_a_guest_can_follow_keep_the_controller() {
        let before = "disks = [\"/a.img\", \"/b.img?direct=on&iops=5\"]";
        assert_eq!(between(before, before), Some(vec![]));
        // The same configuration in another notation needs no step.
        let same = "disks = [\"/a.img?read-only=off\", \"/b.img?iops=5&direct=on\"]";
        assert_eq!(between(before, same), Some(vec![]));
        let after = "disks = [\"/a.img?read-only=on\", { disk = \"/c.img\", nsid = 4 }]";
        let added = DiskConfig { nsid: Some(4), ..DiskConfig::of("/c.img") };
        let read_only = NamespaceChange::ReadOnly;
        assert_eq!(
            between(before, after),
            Some(vec![Step::Change(1, read_only(true)), Step::Add(4, added), Step::Remove(2),])
        );
        let (_, limits) = DiskLimits::split("x?bandwidth=1MiB").unwrap();
        assert_eq!(
            between(before, "disks = [\"/a.img\", \"/b.img?direct=on&bandwidth=1MiB\"]"),
            Some(vec![Step::Change(2, NamespaceChange::Limits(limits))])
        );
        let requested = |option: &str| {
            format!("disks = [\"/a.img\", {{ disk = \"/b.img{option}\", nsid = 9 }}]")
        };
        let locked = requested("?read-only=on");
        assert_eq!(between(&locked, &requested("")), None, "it was opened to be read");
        assert!(between(&locked.replace('9', "8"), &requested("").replace('9', "8")).is_some());
    }

    #[test]
    fn an_ana_state_can_change_but_ana_groups_need_a_new_controller() {
        let of = |groups: &str, ana: &str| {
            let text = format!(
                "[[subsystem]]\nname = \"pair\"\nstate = \"/s\"\n{groups}\n[[controller]]\n\
                 socket = \"/vm0.sock\"\nsubsystem = \"pair\"\ndisks = [\"/a.img\", \"/b.img\"]\n{ana}"
            );
            parse(&text, "vms.toml").unwrap().controllers.remove(0)
        };
        let two = "ana-groups = [[1], [2]]";
        let (before, after) = (of(two, "ana = \"change\""), of(two, "ana = [\"change\"]"));
        assert_eq!(steps(&before, &before, |_| true), Some(vec![]));
        let step = Step::Ana(2, AnaStateName::Optimized);
        assert_eq!(steps(&before, &after, |_| true), Some(vec![step]));
        assert_eq!(steps(&before, &of("", "ana = \"change\""), |_| true), None);
    }

    #[test]
    fn other_changes_replace_the_controller() {
        let before = "disks = [\"/a.img\"]";
        for after in [
            "disks = [\"/b.img\"]",
            "disks = [\"/a.img?direct=on\"]",
            "disks = [{ disk = \"/a.img\", nsid = 2 }]",
            "disks = [\"/a.img\"]\nserial = \"X\"",
            "disks = [\"/a.img\"]\nread-only = true",
            "disks = [\"/a.img\"]\nworker = \"own\"",
        ] {
            assert_eq!(between(before, after), None, "{after}");
        }
        let uuid = |digit| {
            let uuid = "0190163d-8694-739b-aea5-966c26f8ad91".replace('9', digit);
            format!("disks = [{{ disk = \"/a.img\", uuid = \"{uuid}\" }}]")
        };
        assert_eq!(between(&uuid("1"), &uuid("2")), None);
        assert_eq!(between(&uuid("1"), before), Some(vec![]), "what one leaves open");
    }

    #[test]
    fn differences_have_the_names_of_the_configuration_file() {
        let before = controller("disks = [\"/a.img\", \"/b.img\"]\nqueues = 4");
        let after =
            controller("disks = [\"/a.img?iops=5\"]\nserial = \"X\"\nmax-transfer = \"2MiB\"");
        let all = differences(&before, &after).map(|difference| {
            let or_none = |text: Option<String>| text.unwrap_or_else(|| "none".to_owned());
            let Difference { what, from, to, .. } = difference;
            format!("{what}: {} -> {}", or_none(from), or_none(to))
        });
        assert_eq!(
            all.collect::<Vec<_>>(),
            [
                "serial: none -> X",
                "queues: 4 -> none",
                "max-transfer: none -> 2.0 MiB",
                "namespace 1: /a.img -> /a.img?iops=5",
                "namespace 2: /b.img -> none",
            ]
        );
        assert_eq!(differences(&before, &before).count(), 0);
    }
}
