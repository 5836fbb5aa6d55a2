//! Recovery after the death of a server process.
//!
//! The dead process has sent a checkpoint to the supervisor
//! ([`checkpointer`](super::checkpointer)). This process rebuilds the controllers without accessing
//! disks or guests, sends its own checkpoint, reports `RECOVERED`, and serves. If it dies before
//! `RECOVERED`, the next process recovers from the same checkpoint again; from `RECOVERED` on, only
//! its own checkpoint is valid.
//!
//! I/O that the dead process has submitted to the kernel may still be in flight, and may reach a
//! disk or a guest's memory. So all of it must have ended before any command is repeated: see
//! `shadowbell_disk_file::recover`. The wait has no time limit, because only the disk determines
//! how long its I/O takes. For an upgrade, the old process has quiesced, so no I/O is in flight.
//!
//! Each controller is recovered by itself, the busiest first, on threads that may wait
//! ([`recovery_job`](super::recovery_job)). A controller whose disks are not ready within a moment
//! does not delay the others: it is served later ([`late_recovery`](super::late_recovery)), and
//! until then the checkpoint of this process contains the dead process's items of that controller.
//! A client whose state or memory is unusable is disconnected, and the others are recovered.

use super::checkpoint_items::{self, ENDPOINTS, QUIESCED, Quiesced};
use super::checkpoint_store;
use super::checkpointer::{Checkpointer, Complete, ControllerEntry, FENCE, Pending};
use super::endpoints::{Endpoints, SavedEndpoints};
use super::event::EventQueue;
use super::fence_wait::FenceWait;
use super::late_recovery::{LateRecovery, Openers};
use super::parent_watch::ParentWatch;
use super::recovery_attempts::{Attempts, Slot};
use super::recovery_job::{
    self, ControllerJob, DiskJob, Items, Job, JobContext, Recovered, RecoveredController, decode,
};
use super::server::Server;
use super::startup_timing::Phases;
use super::worker_link::WorkerLink;
use anyhow::{Context, bail};
use shadowbell_config::limits;
use shadowbell_config::server_config::ServerConfig;
use shadowbell_controller::{CauseOfDeath, Pool, SavedController};
use shadowbell_state::{AbortPoint, READABLE, StateError, abort_point};
use shadowbell_supervisor::checkpoint::{COMPLETE, Checkpoint, Item};
use shadowbell_supervisor::protocol::to_supervisor;
use shadowbell_vfio_user::Reactor;
use shadowbell_vfio_user::server::Limits;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Time without progress after which the recovered controllers are served, and the others later.
const PROGRESS: Duration = Duration::from_millis(20);
/// Time after which the process serves although no controller is recovered yet.
const FIRST: Duration = Duration::from_millis(100);
/// Maximum number of threads that open disks at first. Further threads are started if all of them
/// wait.
const OPENERS: usize = 4;

/// Recovered server.
pub(super) struct Recovery {
    pub(super) server: Server,
    pub(super) endpoints: Option<Endpoints>,
    /// Recovery of the controllers and disks that are not ready yet. `None` if there are none.
    pub(super) late: Option<LateRecovery>,
}

/// Recovers the controllers of the dead process. `None` if the service has to end.
///
/// # Errors
/// The recovery fails. The supervisor then starts without a checkpoint, and clients are lost.
pub(super) fn recover(
    config: &ServerConfig,
    link: &WorkerLink,
    checkpointer: &Arc<Checkpointer>,
    ended: impl FnOnce() + Send + 'static,
    phases: &mut Phases,
) -> anyhow::Result<Option<Recovery>> {
    let pool = Pool::start(&config.pool).context("cannot start the I/O threads")?;
    phases.ended("threads");
    link.send(to_supervisor::PREPARED, "");
    let (mut items, death, by_fault, deaths) = loop {
        let Some(received) = link.checkpoint()? else { return Ok(None) };
        if let Some(death) = received.death {
            break (received.items, death, received.by_fault, received.deaths);
        }
        let lost = check(config, received.items)?;
        abort_point(AbortPoint::Checked);
        link.send(to_supervisor::CHECKED, &lost.join("\n"));
    };
    let began = Instant::now();
    phases.ended("checkpoint");
    let watch = ParentWatch::start(link, Duration::ZERO)?;
    let endpoints = endpoints(&mut items);
    let complete = complete(&mut items)?;
    if checkpoint_store::is_outdated(&mut items)? {
        bail!("the checkpoint is outdated: the supervisor did not receive later changes");
    }
    matches_configuration(config, &complete)?;
    let is_changed = complete.is_changed;
    if is_changed {
        limits::set_groups(&complete.groups);
    }
    let ends = items.remove(FENCE).context("the state has no fence")?.read()?.1;
    let fence = Arc::new(FenceWait::new(ends));
    let fuse_devices = fuse_devices(&complete, &mut items)?;
    let mut attempts = Attempts::take(&mut items)?;
    let controllers = complete.controllers.iter().map(|entry| Slot::of_controller(entry.index));
    let unattached = complete.unattached.values().map(|entry| Slot::of_disk(&entry.key));
    let is_counted = attempts.count(controllers.chain(unattached), by_fault, deaths);
    let death = match death {
        // The fault is attributed to a recovery or a message, and not to a command in flight.
        CauseOfDeath::Fault if is_counted => CauseOfDeath::Killed,
        death => death,
    };
    let attempts = Arc::new(attempts);
    let plan = Plan::of(config, &complete, items, death, &attempts);
    checkpointer.begin_recovery(&fence, &attempts, plan.pending(), plan.disks, is_changed);
    let events = EventQueue::new();
    let event_sender = events.sender(0);
    let mut server = Server::new(Vec::new(), events, pool.clone(), true);
    server.changes().exports().set_wanted(complete.exports.clone());
    checkpointer.set_exports(complete.exports.clone());
    for (id, device) in &fuse_devices {
        checkpointer.put_fuse_device(id, device.as_fd());
    }
    server.changes().exports().devices().extend(fuse_devices);
    server.changes().number_from(plan.next);
    plan.jobs.iter().flatten().for_each(|job| job.begin_waiting(server.registry()));
    let context = JobContext {
        pool,
        events: event_sender,
        checkpoint: Arc::clone(checkpointer),
        fence,
        registry: Arc::clone(server.registry()),
        attempts: Arc::clone(&attempts),
    };
    let threads = config.pool.workers.clamp(1, OPENERS);
    let stray = plan.stray;
    let mut openers = Openers::start(plan.jobs, context, threads)?;
    let ready = first_results(&mut openers);
    phases.ended("disks and controllers");
    drop(watch);
    abort_point(AbortPoint::Rebuilt);
    let mut reactor = Reactor::new(Limits::default())?;
    let (mut replays, mut old, mut recovered) = (0, vec![stray], Vec::new());
    for one in ready {
        let one = match one {
            Recovered::Controller(one) => *one,
            Recovered::Disk(id, open) => {
                server.changes().add_recovered(&id, open, checkpointer);
                continue;
            }
            Recovered::Nothing => continue,
        };
        let RecoveredController { served, port, entry, saved, changing, lost, .. } = one;
        checkpointer.recovered(served.index, entry);
        let port = reactor.serve_restored(port).with_context(|| served.name.clone())?;
        let recorder = checkpointer.recovered_port_recorder(served.index, &attempts);
        reactor.record_with(port, recorder);
        served.set_port(port);
        server.registry().recovered(Arc::clone(&served));
        lost.iter().for_each(|why| link.send(to_supervisor::WARNING, why));
        replays += one.replays;
        old.push(one.old);
        recovered.push((served, saved, changing));
    }
    phases.ended("own checkpoint");
    // All recovered controllers are quiesced. The supervisor has their new items, and the dead
    // process's items of the controllers that wait.
    checkpointer.complete();
    checkpointer.delete_quiesced();
    abort_point(AbortPoint::Kept);
    for waiting in server.registry().waiting() {
        let name = waiting.requested.socket.display();
        link.send(to_supervisor::WARNING, &format!("{name} waits for its disks: {}", waiting.why));
    }
    attempts.begin_serving();
    link.send(to_supervisor::RECOVERED, "");
    abort_point(AbortPoint::Taken);
    phases.ended("supervisor notified");
    for (served, _, changing) in &recovered {
        served.controller.resume();
        changing.iter().for_each(|nsid| served.controller.announce_namespace(*nsid));
    }
    phases.ended("queues served");
    server.serve(reactor, ended)?;
    phases.ended("sockets served");
    let took = began.elapsed().as_micros();
    for (served, saved, _) in &recovered {
        saved.iter().for_each(|saved| served.controller.announce_recovery(saved));
    }
    phases.ended("interrupts");
    old.iter().for_each(|old| checkpointer.delete_old(old));
    if let Err(error) = server.trace(config, true) {
        warn!("the doorbell trace has ended: {error:#}");
    }
    let (of, count, left) = (
        if death == CauseOfDeath::Planned { "quiesced" } else { "dead" },
        recovered.len(),
        openers.left(),
    );
    if count > 0 || left == 0 {
        info!(
            "recovered from the checkpoint of a {of} process: controllers: {count}, commands in \
             flight: {replays}; that took {took} us"
        );
    }
    if left == 0 {
        checkpointer.end_recovery();
    }
    let late = (left > 0).then_some(LateRecovery(openers));
    Ok(Some(Recovery { server, endpoints, late }))
}

/// Waits for the controllers and disks that are ready within [`FIRST`] or [`PROGRESS`]. A message
/// that ends the service is handled only after this wait.
fn first_results(openers: &mut Openers) -> Vec<Recovered> {
    let (mut ready, mut until) = (Vec::new(), Instant::now() + FIRST);
    while openers.left() > 0 && Instant::now() < until {
        if let Some(one) = openers.next(until) {
            ready.push(one);
            until = Instant::now() + PROGRESS;
        }
    }
    ready
}

/// Jobs of a recovery.
struct Plan {
    /// Groups of jobs, the busiest controllers first. The controllers of a subsystem form one
    /// group, because they share disks.
    jobs: VecDeque<Vec<Job>>,
    /// Index that the next added controller gets.
    next: usize,
    /// Number in the key of the dead process's last disk item.
    disks: u64,
    /// Keys of items that the list does not name: an earlier process left them, because the next
    /// one died before it had deleted them. They hold the sockets of dropped clients open.
    stray: Vec<String>,
}

impl Plan {
    fn of(
        config: &ServerConfig,
        complete: &Complete,
        mut items: Checkpoint,
        death: CauseOfDeath,
        attempts: &Attempts,
    ) -> Self {
        let quiesced = take_quiesced(&mut items, &complete.controllers);
        let of_process = |index: &usize| match quiesced.controllers.contains(index) {
            true => CauseOfDeath::Planned,
            false => death,
        };
        let disks = items.keys("disk/");
        let disks = disks.iter().filter_map(|key| checkpoint_items::number(key)).max();
        let disks = disks.unwrap_or_default();
        // Controllers get indices that no item of the checkpoint has, so that the keys of their
        // items differ, also from those of items that the list does not name.
        let kinds = ["controller/", "port/", "file/"];
        let keys = kinds.iter().flat_map(|kind| items.keys(kind));
        let used = keys.filter_map(|key| key.split(['/', '.']).nth(1)?.parse::<usize>().ok());
        let used = used.chain(complete.controllers.iter().map(|entry| entry.index));
        let next = used.max().map_or(0, |used| used + 1);
        let mut jobs = Vec::new();
        let mut attached = HashSet::new();
        for (position, entry) in complete.controllers.iter().enumerate() {
            let requested = config.controllers.get(position).filter(|_| !complete.is_changed);
            attached.extend(entry.disk_ids());
            jobs.push(ControllerJob {
                index: next + position,
                items: recovery_job::take_items(&mut items, entry),
                death: entry.died.unwrap_or_else(|| of_process(&entry.index)),
                requested: requested.cloned(),
                entry: entry.clone(),
            });
        }
        let next = next + jobs.len();
        sort(&mut jobs, &quiesced, attempts);
        let mut groups: VecDeque<Vec<Job>> = VecDeque::new();
        let mut of_subsystem: HashMap<String, usize> = HashMap::new();
        for job in jobs {
            let subsystem = job.entry.requested.controller.subsystem.as_ref();
            let group = subsystem.map(|membership| {
                *of_subsystem.entry(membership.name.clone()).or_insert(groups.len())
            });
            let job = Job::Controller(Box::new(job));
            match group.and_then(|group| groups.get_mut(group)) {
                Some(group) => group.push(job),
                None => groups.push_back(vec![job]),
            }
        }
        // A disk that was being attached or detached may be in the checkpoint twice.
        let unattached = complete.unattached.iter().filter(|(id, _)| !attached.contains(*id));
        for (id, entry) in unattached {
            let items = items.all.remove_entry(&entry.key).into_iter().collect();
            let death = entry.died.unwrap_or(death);
            groups.push_back(vec![Job::Disk(DiskJob {
                id: id.clone(),
                entry: entry.clone(),
                death,
                items,
            })]);
        }
        let kinds = ["controller/", "port/", "disk/", "file/"];
        let stray = kinds.iter().flat_map(|kind| items.keys(kind)).collect();
        Self { jobs: groups, next, disks, stray }
    }

    /// Returns the entries of the dead process's checkpoint. The checkpoint of this process
    /// contains each of them until it is recovered.
    fn pending(&self) -> Pending {
        let mut pending = Pending::default();
        for job in self.jobs.iter().flatten() {
            match job {
                Job::Controller(job) => {
                    let entry = ControllerEntry { died: Some(job.death), ..job.entry.clone() };
                    pending.controllers.insert(job.index, entry);
                }
                Job::Disk(job) => {
                    let mut entry = job.entry.clone();
                    entry.died = Some(job.death);
                    pending.unattached.insert(job.id.clone(), entry);
                }
            }
        }
        pending
    }
}

/// Sorts controllers, the busiest first. If the dead process has quiesced, it has recorded this
/// order. Otherwise the counters in the checkpoint decide, and controllers whose earlier recovery
/// may have crashed a process come last.
fn sort(jobs: &mut [ControllerJob], quiesced: &Quiesced, attempts: &Attempts) {
    if !quiesced.controllers.is_empty() {
        let place: HashMap<_, _> = (0..).zip(&quiesced.controllers).map(|(n, i)| (*i, n)).collect();
        jobs.sort_by_key(|job| place.get(&job.entry.index).copied().unwrap_or(usize::MAX));
        return;
    }
    jobs.sort_by_cached_key(|job| {
        if attempts.deaths(job.slot()) > 0 {
            return Reverse(0);
        }
        let _attempt = attempts.begin(job.slot());
        let key = checkpoint_items::controller(job.entry.index);
        let saved = decode::<SavedController>(&job.items, &key);
        Reverse(saved.map_or(0, |(saved, _)| saved.io_commands()))
    });
}

/// Takes the list of the controllers that had quiesced out of the checkpoint, if there is one.
///
/// The controllers of a subsystem share their disks, and only the first one recovers them. If it
/// had quiesced and another one had not, the disks would be recovered without a fence. So none of
/// them counts as quiesced. Controllers that the dead process had not recovered yet do not count:
/// with the first controller, it had recovered their disks, after the fence.
fn take_quiesced(items: &mut Checkpoint, controllers: &[ControllerEntry]) -> Quiesced {
    let all: Items = items.all.remove_entry(QUIESCED).into_iter().collect();
    let (mut quiesced, _): (Quiesced, _) = decode(&all, QUIESCED).unwrap_or_default();
    let subsystem = |entry: &ControllerEntry| {
        let membership = entry.requested.controller.subsystem.as_ref();
        membership.map(|membership| membership.name.clone())
    };
    let is_quiesced = |entry: &&ControllerEntry| {
        entry.died.is_some() || quiesced.controllers.contains(&entry.index)
    };
    let unquiesced = controllers.iter().filter(|entry| !is_quiesced(entry));
    let unquiesced: HashSet<_> = unquiesced.filter_map(subsystem).collect();
    let is_unfenced =
        |entry: &&ControllerEntry| subsystem(entry).is_some_and(|name| unquiesced.contains(&name));
    let unfenced: HashSet<_> =
        controllers.iter().filter(is_unfenced).map(|entry| entry.index).collect();
    quiesced.controllers.retain(|index| !unfenced.contains(index));
    quiesced
}

/// Checks that this process could recover from the checkpoint of a process that still serves.
/// Returns the clients that it could not recover, a sentence each.
///
/// # Errors
/// The checkpoint has another version, does not match the configuration, or cannot be decoded.
fn check(config: &ServerConfig, mut items: Checkpoint) -> anyhow::Result<Vec<String>> {
    let complete = complete(&mut items)?;
    matches_configuration(config, &complete)?;
    let attempts = Attempts::take(&mut items)?;
    let mut lost = Vec::new();
    for entry in &complete.controllers {
        let its = recovery_job::take_items(&mut items, entry);
        let slot = Slot::of_controller(entry.index);
        let checked = recovery_job::check_deaths(attempts.deaths(slot));
        if let Err(why) = checked.and_then(|()| recovery_job::check(entry, &its)) {
            // If the state has the format of an unsupported release, the upgrade is refused,
            // because it would lose all clients.
            if why.downcast_ref::<StateError>().is_some_and(StateError::is_of_another_release) {
                return Err(why);
            }
            let name = entry.requested.socket.display();
            lost.push(format!("{name}: its client cannot be recovered: {why:#}"));
        }
    }
    Ok(lost)
}

/// Restores the management endpoints from the checkpoint of a process that had quiesced.
fn endpoints(items: &mut Checkpoint) -> Option<Endpoints> {
    let all: Items = items.all.remove_entry(ENDPOINTS).into_iter().collect();
    if all.is_empty() {
        return None;
    }
    let restored = decode::<SavedEndpoints>(&all, ENDPOINTS)
        .and_then(|(saved, mut fds)| Endpoints::restore(saved, &mut fds));
    restored.inspect_err(|why| warn!("the control socket is created anew: {why:#}")).ok()
}

/// Takes the list of the served controllers, disks and exports out of the checkpoint, and checks
/// its version.
fn complete(items: &mut Checkpoint) -> anyhow::Result<Complete> {
    let all: Items = items.all.remove_entry(COMPLETE).into_iter().collect();
    let (complete, _): (Complete, _) = decode(&all, COMPLETE)?;
    if !READABLE.contains(&complete.version) {
        bail!(StateError::Version(complete.version));
    }
    Ok(complete)
}

/// Takes the descriptors of `/dev/fuse` of the exports.
fn fuse_devices(
    complete: &Complete,
    items: &mut Checkpoint,
) -> anyhow::Result<Vec<(String, OwnedFd)>> {
    let mut all = Vec::new();
    for export in complete.exports.iter().filter(|export| export.fuse.is_some()) {
        let item = items.remove(&checkpoint_items::fuse_device(&export.id)).map(Item::read);
        let device = item.transpose()?.and_then(|(_, fds)| fds.into_iter().next());
        all.extend(device.map(|device| (export.id.clone(), device)));
    }
    Ok(all)
}

/// Checks that the configuration has the controllers of the checkpoint, unless these were changed
/// at run time.
fn matches_configuration(config: &ServerConfig, complete: &Complete) -> anyhow::Result<()> {
    let requested = checkpoint_items::served(config);
    match checkpoint_items::difference(&complete.served, &requested) {
        Some(why) if !complete.is_changed => bail!(why),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_config::ana_state::AnaGroups;
    use shadowbell_config::controller_config::ControllerConfig;
    use shadowbell_config::server_config::SocketConfig;
    use shadowbell_config::subsystems::Membership;
    use shadowbell_supervisor::checkpoint::Body;
    use std::path::PathBuf;

    fn entry(index: usize, subsystem: Option<&str>) -> ControllerEntry {
        let membership = |name: &str| Membership {
            name: name.to_owned(),
            state: PathBuf::from("reservations"),
            serial: None,
            cntlid: index as u16 + 1,
            ana: AnaGroups::default(),
        };
        let subsystem = subsystem.map(membership);
        let controller = ControllerConfig { subsystem, ..ControllerConfig::default() };
        let socket = PathBuf::from(format!("{index}.sock"));
        let requested = SocketConfig { id: None, socket, controller, worker: None, origin: None };
        ControllerEntry { index, requested, disks: Vec::new(), changing: Vec::new(), died: None }
    }

    /// Deaths by which a recovery plans the controllers, in the order of `controllers`, if those
    /// with the indices `quiesced` had quiesced, and the others were killed.
    fn deaths(controllers: Vec<ControllerEntry>, quiesced: &[usize]) -> Vec<CauseOfDeath> {
        let mut items = Checkpoint::default();
        let list = serde_json::to_vec(&Quiesced { controllers: quiesced.to_vec() }).unwrap();
        let item = Item { body: Body::Here(list), fds: Vec::new() };
        items.all.insert(QUIESCED.to_owned(), Arc::new(item));
        let attempts = Attempts::take(&mut items).unwrap();
        let complete = Complete {
            version: *READABLE.end(),
            served: Vec::new(),
            is_changed: true,
            controllers,
            groups: Vec::new(),
            unattached: std::collections::BTreeMap::new(),
            exports: Vec::new(),
        };
        let config = ServerConfig::default();
        let plan = Plan::of(&config, &complete, items, CauseOfDeath::Killed, &attempts);
        let pending = plan.pending().controllers;
        pending.into_values().filter_map(|entry| entry.died).collect()
    }

    #[test]
    fn a_subsystem_has_quiesced_only_as_a_whole() {
        use CauseOfDeath::{Fault, Killed, Planned};
        let all =
            || vec![entry(3, Some("s")), entry(4, Some("s")), entry(5, Some("t")), entry(6, None)];
        assert_eq!(deaths(all(), &[5, 3, 6]), [Killed, Killed, Planned, Planned]);
        assert_eq!(deaths(all(), &[4, 3, 5, 6]), [Planned; 4]);
        assert_eq!(deaths(all(), &[]), [Killed; 4]);
        // The dead process has recovered the disks of the subsystem with its first controller.
        let mut all = all();
        all[1].died = Some(Fault);
        assert_eq!(deaths(all, &[3, 5, 6]), [Planned, Fault, Planned, Planned]);
    }
}
