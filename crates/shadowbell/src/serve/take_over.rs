//! A server that goes on where another process has come to rest.

use super::asides::Asides;
use super::event::EventQueue;
use super::keeping::Keeping;
use super::making;
use super::registry::ServedController;
use super::server::Server;
use super::server_config::{ServerConfig, SocketConfig};
use super::transfer::{self, COMMIT, GONE, HAVE, Served};
use super::worker_link::WorkerLink;
use crate::controller_config::ConfigureError;
use crate::keeper_link::{to_keeper, to_worker, versions};
use crate::limits::{self, Group};
use crate::{disk_spec, exit};
use anyhow::{Context, anyhow, bail};
use shadowbell_controller::{Controller, Pool, SavedController};
use shadowbell_frontend::vfio_user::ControllerDevice;
use shadowbell_state::{AbortPoint, Descriptors, Parcel, READABLE, abort_point};
use shadowbell_vfio_user::Reactor;
use shadowbell_vfio_user::server::{Limits, PortId, SavedPort};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use tracing::{debug, info, warn};

/// What was taken in, and does nothing yet.
struct Taken {
    server: Server,
    reactor: Reactor,
    controllers: Vec<SavedController>,
    ports: Vec<PortId>,
    asides: Asides,
    fds: Descriptors,
}

/// Takes over from whoever the keeper names. `None` if that one goes on instead.
///
/// # Errors
/// What it serves can not be served here; or, after it has handed over, not any more.
pub(super) fn take_over(
    config: &ServerConfig,
    link: &WorkerLink,
    keeping: &Keeping,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<Option<(Server, Asides)>> {
    let transfer = predecessor(link)?;
    let pool = Pool::start(&config.pool).context("the workers can not be started")?;
    link.say(to_keeper::PREPARED, &versions(&READABLE));
    let parcel = match Parcel::receive(&transfer) {
        Ok(parcel) => parcel,
        Err(shadowbell_state::StateError::Io(error)) => {
            debug!("nothing was handed over: {error}");
            return Ok(None);
        }
        Err(error) => return Err(refused(link, error.into())),
    };
    let began = Instant::now();
    let taken = take_in(config, parcel, pool).map_err(|error| refused(link, error))?;
    debug!("taken in after {} us", began.elapsed().as_micros());
    abort_point(AbortPoint::TakenIn);
    transfer::say(&transfer, HAVE).ok();
    if !matches!(transfer::hear(&transfer), Ok(Some(COMMIT))) {
        return Ok(None);
    }
    match transfer::hear(&transfer) {
        Ok(Some(GONE)) => {}
        // It died on its way out, when it had nothing under way any more.
        _ => debug!("the predecessor has ended without a word"),
    }
    let Taken { mut server, mut reactor, controllers, ports, asides, mut fds } = taken;
    server.share_locks(false);
    let is_changed = server.registry().is_changed();
    keeping.begin(&server.controllers(), &mut reactor, &ports, is_changed);
    for (served, saved) in server.controllers().iter().zip(&controllers) {
        let restored = served.controller.restore_at_rest(saved, &mut fds);
        restored.with_context(|| served.name.clone())?;
    }
    // Everything is at rest, and the keeper holds all of it.
    keeping.complete();
    abort_point(AbortPoint::Kept);
    // What the predecessor has the keeper hold is of no use from here on.
    link.say(to_keeper::TAKEN, "");
    abort_point(AbortPoint::Taken);
    server.controllers().iter().for_each(|served| served.controller.resume());
    server.serve(reactor, ended)?;
    let took = began.elapsed().as_micros();
    begin_trace(&server, config);
    info!("goes on for the process before, {} us after its state came", took);
    Ok(Some((server, asides)))
}

/// Says why, while the other process still waits: it only sees that this one has gone.
fn refused(link: &WorkerLink, why: anyhow::Error) -> anyhow::Error {
    link.say(to_keeper::FAILED, &exit::line(&why));
    why
}

/// Records doorbells in a new file; that of the other process is kept beside it.
pub(super) fn begin_trace(server: &Server, config: &ServerConfig) {
    if let Err(error) = server.trace(config, true) {
        warn!("doorbells are not recorded any more: {error:#}");
    }
}

/// The socket to the process that is to hand over.
fn predecessor(link: &WorkerLink) -> anyhow::Result<UnixStream> {
    match link.hear() {
        Some(packet) if packet.letter == to_worker::TAKE_OVER => {
            let fd = packet.fd().context("the keeper has sent no descriptor")?;
            Ok(UnixStream::from(fd))
        }
        _ => Err(anyhow!("the keeper has ended")),
    }
}

/// Makes everything from what the other one was. It may still go on: nobody will know of this then.
fn take_in(config: &ServerConfig, mut parcel: Parcel, pool: Pool) -> anyhow::Result<Taken> {
    let served: Vec<Served> = section(&mut parcel, transfer::SERVED)?;
    let changed: Option<Vec<SocketConfig>> = parcel.take(transfer::ASKED)?;
    let controllers_asked = changed.as_ref().unwrap_or(&config.controllers);
    if let Some(why) = transfer::difference(&served, &transfer::served_of(controllers_asked.iter()))
    {
        bail!(why);
    }
    if let Some(groups) = parcel.take::<Vec<Group>>(transfer::GROUPS)? {
        limits::set_groups(&groups);
    }
    let asides = Asides::restore(&mut parcel)?;
    let events = EventQueue::new();
    let mut reactor = Reactor::new(Limits::default())?;
    let mut controllers = Vec::new();
    let (mut all_saved, mut ports) = (Vec::new(), Vec::new());
    for (index, asked) in controllers_asked.iter().enumerate() {
        let saved_disks = asked.controller.disks.iter().enumerate();
        let saved_disks: Vec<serde_json::Value> = saved_disks
            .map(|(nth, _)| section(&mut parcel, &transfer::disk(index, nth)))
            .collect::<Result<_, _>>()?;
        let saved: SavedController = section(&mut parcel, &transfer::controller(index))?;
        let port: SavedPort = section(&mut parcel, &transfer::port(index))?;
        let fds = parcel.descriptors();
        let location = asked.absolute_socket();
        let opened = asked.controller.open_by(&location.to_string_lossy(), |nth, spec| {
            let nothing = serde_json::Value::Null;
            disk_spec::adopt(spec, saved_disks.get(nth).unwrap_or(&nothing), fds)
        });
        let opened = making::with_origin(asked, opened.map_err(ConfigureError::into_error))?;
        let name = asked.socket.display().to_string();
        let carrier = making::carrier(asked, &events.sender(index));
        let controller = Controller::successor(opened, pool.clone(), carrier, &saved, fds)
            .with_context(|| name.clone())?;
        making::place(asked, &controller)?;
        let client = Arc::new(AtomicBool::new(port.has_client()));
        let handler = making::client_events(events.sender(index), &client);
        let device = ControllerDevice::new(controller.clone(), handler)?;
        let port = reactor.restore(port, fds, Box::new(device));
        let port = port.with_context(|| name.clone())?;
        let served = ServedController::new(index, asked.clone(), controller, client);
        served.set_port(port);
        ports.push(port);
        controllers.push(served);
        all_saved.push(saved);
    }
    let fds = std::mem::take(parcel.descriptors());
    parcel.finish()?;
    let server = Server::resting(controllers, events, pool, true);
    if changed.is_some() {
        server.registry().set_changed();
    }
    Ok(Taken { server, reactor, controllers: all_saved, ports, asides, fds })
}

fn section<T: serde::de::DeserializeOwned>(parcel: &mut Parcel, name: &str) -> anyhow::Result<T> {
    parcel.take(name)?.with_context(|| format!("the state has no section {name}"))
}
