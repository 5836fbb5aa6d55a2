//! Recovery after the death of a server process.
//!
//! The dead process has sent a checkpoint to the supervisor
//! ([`checkpointer`](super::checkpointer)). This process rebuilds everything without accessing
//! disks or guests, sends its own checkpoint, reports `TAKEN`, from which on only its own
//! checkpoint is valid, and serves. Until `TAKEN` it may fail or die, and the next process recovers
//! from the same checkpoint again.
//!
//! I/O that the dead process has submitted to the kernel may still be in flight, and may reach a
//! disk or a guest's memory. So all of it must have ended before any command is repeated: see
//! `shadowbell_disk_file::recover`. Only the disk limits the duration of this wait. For an upgrade,
//! the old process has quiesced, so there is no such I/O.

use super::builder;
use super::checkpoint_items::{self, ENDPOINTS};
use super::checkpoint_store;
use super::checkpointer::{Checkpointer, Complete, FENCE, UnattachedEntry};
use super::endpoints::{Endpoints, SavedEndpoints};
use super::event::EventQueue;
use super::open_disk::OpenDisk;
use super::parent_watch::ParentWatch;
use super::registry::ServedController;
use super::server::Server;
use super::startup_timing::Phases;
use super::worker_link::{Told, WorkerLink};
use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;
use shadowbell_config::controller_config::ConfigureError;
use shadowbell_config::disk_spec::DiskSpecError;
use shadowbell_config::limits;
use shadowbell_config::server_config::ServerConfig;
use shadowbell_controller::{Controller, Death, Pool, SavedController};
use shadowbell_frontend::vfio_user::ControllerDevice;
use shadowbell_state::{AbortPoint, Descriptors, READABLE, WrongOrder, abort_point, is_wrong};
use shadowbell_storage::disk_recovery;
use shadowbell_supervisor::checkpoint::{COMPLETE, Checkpoint, Item};
use shadowbell_supervisor::protocol::to_supervisor;
use shadowbell_vfio_user::Reactor;
use shadowbell_vfio_user::server::{Limits, PortId, SavedPort};
use std::cell::Cell;
use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use tracing::{debug, info, warn};

/// Interval at which a locked disk is tried again.
const LOOK: Duration = Duration::from_millis(1);
/// Delay before a log line names the reason for a wait.
const TELL: Duration = Duration::from_millis(100);

/// Rebuilt server, before it serves.
struct Rebuilt {
    server: Server,
    reactor: Reactor,
    ports: Vec<PortId>,
    controllers: Vec<Recovered>,
}

/// State of a controller in the checkpoint.
struct Recovered {
    saved: SavedController,
    fds: Descriptors,
    /// Namespaces whose change the guest may not have been notified of.
    changing: Vec<u32>,
}

/// Recovers the controllers of the dead process. `None`: the service is to end.
///
/// # Errors
/// The recovery fails. The supervisor then starts without a checkpoint, and clients are lost.
pub(super) fn recover(
    config: &ServerConfig,
    link: &WorkerLink,
    checkpointer: &Checkpointer,
    ended: impl FnOnce() + Send + 'static,
    phases: &mut Phases,
) -> anyhow::Result<Option<(Server, Option<Endpoints>)>> {
    let pool = Pool::start(&config.pool).context("cannot start the I/O threads")?;
    phases.ended("threads");
    link.say(to_supervisor::PREPARED, "");
    let (mut items, death) = loop {
        let Some(received) = link.checkpoint()? else { return Ok(None) };
        if let Some(death) = received.death {
            break (received.items, death);
        }
        check(config, received.items)?;
        abort_point(AbortPoint::Checked);
        link.say(to_supervisor::CHECKED, "");
    };
    let began = Instant::now();
    phases.ended("checkpoint");
    let watch = ParentWatch::start(link, std::time::Duration::ZERO)?;
    let fence =
        Fence { link, since: Instant::now(), is_told: Cell::new(false), gone: Cell::new(None) };
    let endpoints = endpoints(&mut items);
    let rebuilt = rebuild(config, items, death, pool, &fence, phases);
    if let Some(told) = fence.gone.get() {
        debug!("gives up: {told:?}");
        return Ok(None);
    }
    let Rebuilt { mut server, mut reactor, ports, controllers } = rebuilt?;
    drop(watch);
    abort_point(AbortPoint::Rebuilt);
    let is_changed = server.registry().is_changed();
    checkpointer.begin(&server.controllers(), &mut reactor, &ports, is_changed);
    checkpointer.keep_others(server.changes().unattached(), server.changes().exports().wanted());
    phases.ended("own checkpoint");
    let (mut again, mut announced) = (0, Vec::new());
    for (served, recovered) in server.controllers().iter().zip(controllers) {
        let Recovered { saved, mut fds, changing } = recovered;
        let recovered = served.controller.recover(&saved, &mut fds, death);
        again += recovered.with_context(|| served.name.clone())?;
        announced.push((saved, changing));
    }
    phases.ended("queues");
    // All controllers are quiesced, and the supervisor has their checkpoint.
    checkpointer.complete();
    checkpointer.kept().delete_quiesced();
    abort_point(AbortPoint::Kept);
    link.say(to_supervisor::TAKEN, "");
    abort_point(AbortPoint::Taken);
    phases.ended("supervisor notified");
    for (served, (_, changing)) in server.controllers().iter().zip(&announced) {
        served.controller.resume();
        changing.iter().for_each(|nsid| served.controller.announce_namespace(*nsid));
    }
    phases.ended("queues served");
    server.serve(reactor, ended)?;
    phases.ended("sockets served");
    let took = began.elapsed().as_micros();
    for (served, (saved, _)) in server.controllers().iter().zip(&announced) {
        served.controller.announce_recovery(saved);
    }
    phases.ended("interrupts");
    if let Err(error) = server.trace(config, true) {
        warn!("the doorbell trace has ended: {error:#}");
    }
    let of = if death == Death::Planned { "quiesced" } else { "dead" };
    info!(
        "recovered from the checkpoint of a {of} process: controllers: {}, commands in flight: \
         {again}; that took {took} us",
        server.controllers().len()
    );
    Ok(Some((server, endpoints)))
}

/// Checks that this process could recover from the checkpoint of a process that still serves.
///
/// # Errors
/// The checkpoint has another version, does not match the configuration, or cannot be decoded.
fn check(config: &ServerConfig, mut items: Checkpoint) -> anyhow::Result<()> {
    let complete = complete(&mut items)?;
    matches_configuration(config, &complete)?;
    for kept in &complete.controllers {
        let _: (SavedController, _) = take(&mut items, &checkpoint_items::controller(kept.index))?;
        let _: (SavedPort, _) = take(&mut items, &checkpoint_items::port(kept.index))?;
    }
    Ok(())
}

/// Restores the management endpoints, which a process that has quiesced leaves.
fn endpoints(items: &mut Checkpoint) -> Option<Endpoints> {
    items.contains(ENDPOINTS).then_some(())?;
    let restored = take::<SavedEndpoints>(items, ENDPOINTS)
        .and_then(|(saved, mut fds)| Endpoints::restore(saved, &mut fds));
    restored.inspect_err(|why| warn!("the control socket is created anew: {why:#}")).ok()
}

/// Takes the list of what is served, which must be of a readable version.
fn complete(items: &mut Checkpoint) -> anyhow::Result<Complete> {
    let (complete, _): (Complete, _) = take(items, COMPLETE)?;
    if !READABLE.contains(&complete.version) {
        bail!(shadowbell_state::StateError::Version(complete.version));
    }
    Ok(complete)
}

/// Checks that the configuration asks for what is served, unless that was changed at run time.
fn matches_configuration(config: &ServerConfig, complete: &Complete) -> anyhow::Result<()> {
    let asked = checkpoint_items::served(config);
    match checkpoint_items::difference(&complete.served, &asked) {
        Some(why) if !complete.is_changed => bail!(why),
        _ => Ok(()),
    }
}

/// Rebuilds the server from a checkpoint, after all I/O of the dead process has ended.
fn rebuild(
    config: &ServerConfig,
    mut items: Checkpoint,
    death: Death,
    pool: Pool,
    fence: &Fence<'_>,
    phases: &mut Phases,
) -> anyhow::Result<Rebuilt> {
    let complete = complete(&mut items)?;
    if checkpoint_store::is_old(&mut items)? {
        bail!("the checkpoint is outdated: the supervisor did not receive later changes");
    }
    matches_configuration(config, &complete)?;
    let is_changed = complete.is_changed;
    let ends = items.remove(FENCE).context("the state has no fence")?.read()?.1;
    if death != Death::Planned {
        ends.iter().try_for_each(|end| fence.wait_for(end))?;
    }
    phases.ended("fence");
    if is_changed {
        limits::set_groups(&complete.groups);
    }
    let events = EventQueue::new();
    let mut reactor = Reactor::new(Limits::default())?;
    let (mut served, mut controllers, mut ports) = (Vec::new(), Vec::new(), Vec::new());
    for (index, kept) in complete.controllers.iter().enumerate() {
        let items = &mut items;
        let (saved, mut fds): (SavedController, _) =
            take(items, &checkpoint_items::controller(kept.index))?;
        let (port, mut port_fds): (SavedPort, _) =
            take(items, &checkpoint_items::port(kept.index))?;
        for key in items.keys(&checkpoint_items::client_files(kept.index)) {
            let number = checkpoint_items::client_file_number(&key);
            let file = items
                .remove(&key)
                .map(Item::read)
                .transpose()?
                .and_then(|(_, fds)| fds.into_iter().next());
            if let Some((number, fd)) = number.zip(file) {
                port_fds.put_lasting(number, fd);
            }
        }
        let disks = saved.namespaces().map(|seen| kept.disk_of(&seen)).collect::<Option<Vec<_>>>();
        let disks = disks.context("the state lacks the disk of a namespace")?;
        let asked = match config.controllers.get(index) {
            Some(asked) if !is_changed => asked.clone(),
            _ => kept.as_asked(&disks),
        };
        let asked = &asked;
        let location = asked.absolute_socket();
        let opened = asked.controller.open_by(&location.to_string_lossy(), |nth, spec| {
            let key = disks.get(nth).map_or("", |disk| disk.key());
            let (state, mut fds) = take(items, key).map_err(DiskSpecError::Device)?;
            disk_recovery::recover(spec, &state, &mut fds, &|| fence.wait_for_lock(spec))
        });
        let opened = builder::with_origin(asked, opened.map_err(ConfigureError::into_error))?;
        let name = asked.socket.display().to_string();
        let carrier = builder::carrier(asked, &events.sender(index));
        let controller = Controller::successor(opened, pool.clone(), carrier, &saved, &mut fds)
            .with_context(|| name.clone())?;
        builder::place(asked, &controller)?;
        let client = Arc::new(AtomicBool::new(port.has_client()));
        let handler = builder::client_events(events.sender(index), &client);
        let device = ControllerDevice::new(controller.clone(), handler)?;
        let port = reactor.restore(port, &mut port_fds, Box::new(device));
        let port = port.with_context(|| name.clone())?;
        let one = ServedController::new(index, asked.clone(), controller, client);
        one.set_port(port);
        ports.push(port);
        served.push(one);
        controllers.push(Recovered { saved, fds, changing: kept.changing.clone() });
    }
    phases.ended("disks and controllers");
    let server = Server::resting(served, events, pool, true);
    recover_unattached(&mut items, &complete, &server, fence)?;
    phases.ended("other disks");
    if is_changed {
        server.registry().set_changed();
    }
    Ok(Rebuilt { server, reactor, ports, controllers })
}

/// Recovers the disks that no controller has, and the list of exports. A disk that was being
/// attached or detached may be in the checkpoint twice; the state of the controller decides.
fn recover_unattached(
    items: &mut Checkpoint,
    complete: &Complete,
    server: &Server,
    fence: &Fence<'_>,
) -> anyhow::Result<()> {
    server.changes().exports().set_wanted(complete.exports.clone());
    let attached: HashSet<_> = server.changes().disks().into_iter().map(|disk| disk.id).collect();
    for (id, UnattachedEntry { key, spec }) in &complete.unattached {
        if attached.contains(id) {
            continue;
        }
        let (state, mut fds) = take(items, key)?;
        let disk = disk_recovery::recover(spec, &state, &mut fds, &|| fence.wait_for_lock(spec));
        let disk = disk.map_err(DiskSpecError::into_error)?;
        let open = OpenDisk { spec: spec.clone(), disk };
        server.changes().unattached().lock().insert(id.clone(), open);
    }
    Ok(())
}

/// Decodes an item, and returns its state and descriptors.
fn take<T: DeserializeOwned>(
    items: &mut Checkpoint,
    key: &str,
) -> anyhow::Result<(T, Descriptors)> {
    let item = items.remove(key).with_context(|| format!("the state has no section {key}"))?;
    let (body, fds) = item.read()?;
    let state = serde_json::from_slice(&body)
        .with_context(|| format!("cannot decode section {key} of the state"))?;
    Ok((state, Descriptors::from(fds)))
}

/// Wait for the end of the dead process's I/O, which a message of the supervisor may cut short.
struct Fence<'a> {
    link: &'a WorkerLink,
    since: Instant,
    is_told: Cell<bool>,
    /// Reason to give up the wait, received from the supervisor.
    gone: Cell<Option<Told>>,
}

impl Fence<'_> {
    /// Waits until no process has the other end of `end` open.
    fn wait_for(&self, end: &OwnedFd) -> anyhow::Result<()> {
        while !is_wrong(WrongOrder::NoFence) && !self.poll(Some(end.as_fd()), TELL) {
            if !self.goes_on("I/O of the dead process at its disks") {
                bail!("the service is shutting down");
            }
        }
        Ok(())
    }

    /// Waits a moment. Returns false if the wait is to be given up.
    fn wait_for_lock(&self, disk: &str) -> bool {
        self.poll(None, LOOK);
        let what = format!("I/O of the dead process at {disk}");
        self.since.elapsed() < TELL || self.goes_on(&what)
    }

    /// Logs the reason for the wait once. Returns false if the wait is to be given up.
    fn goes_on(&self, what: &str) -> bool {
        if !self.is_told.replace(true) && self.gone.get().is_none() {
            warn!("waiting for {what}");
        }
        self.gone.get().is_none()
    }

    /// Waits for at most `most`. Returns true if the other end of `end` is closed.
    fn poll(&self, end: Option<BorrowedFd<'_>>, most: Duration) -> bool {
        let fds = [self.link.as_fd()].into_iter().chain(end);
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let timeout = Timespec::try_from(most).ok();
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return false;
        }
        let is = |nth: usize| fds.get(nth).is_some_and(|fd| !fd.revents().is_empty());
        if is(0)
            && let Some(told) = self.link.told()
        {
            self.gone.set(Some(told));
        }
        is(1)
    }
}
