//! Takeover from a quiesced server process, of all controllers at once.

use super::arriving::{Arriving, begin_trace, refused, what_is_served};
use super::checkpointer::Checkpointer;
use super::endpoints::Endpoints;
use super::event::EventQueue;
use super::move_in;
use super::server::Server;
use super::transfer::{self, COMMIT, GONE, HAVE};
use super::worker_link::WorkerLink;
use anyhow::{Context, anyhow};
use shadowbell_config::server_config::ServerConfig;
use shadowbell_controller::{Pool, SavedController};
use shadowbell_state::{AbortPoint, Descriptors, Parcel, READABLE, abort_point};
use shadowbell_supervisor::protocol::{to_supervisor, to_worker, versions};
use shadowbell_vfio_user::Reactor;
use shadowbell_vfio_user::server::{Limits, PortId};
use std::os::unix::net::UnixStream;
use std::time::Instant;
use tracing::{debug, info};

/// Restored state, before it is served.
struct Taken {
    server: Server,
    reactor: Reactor,
    controllers: Vec<SavedController>,
    ports: Vec<PortId>,
    endpoints: Endpoints,
    fds: Descriptors,
}

/// Takes over from the process that the supervisor names. `None` if that process continues
/// instead.
///
/// # Errors
/// The old process's controllers cannot be served; or a failure after it has handed over.
pub(super) fn take_over(
    config: &ServerConfig,
    link: &WorkerLink,
    checkpointer: &Checkpointer,
    ended: impl FnOnce() + Send + 'static,
) -> anyhow::Result<Option<(Server, Endpoints)>> {
    let transfer = predecessor(link)?;
    let pool = Pool::start(&config.pool).context("cannot start the I/O threads")?;
    link.say(to_supervisor::PREPARED, &versions(&READABLE));
    let mut parcel = match Parcel::receive(&transfer) {
        Ok(parcel) => parcel,
        Err(shadowbell_state::StateError::Io(error)) => {
            debug!("nothing was handed over: {error}");
            return Ok(None);
        }
        Err(error) => return Err(refused(link, error.into())),
    };
    if parcel.take::<usize>(transfer::MOVES).map_err(|error| refused(link, error.into()))?.is_some()
    {
        return move_in::move_in(config, link, checkpointer, ended, &transfer, parcel, pool);
    }
    let began = Instant::now();
    let taken = take_in(config, parcel, pool).map_err(|error| refused(link, error))?;
    debug!("restored after {} us", began.elapsed().as_micros());
    abort_point(AbortPoint::TakenIn);
    transfer::say(&transfer, HAVE).ok();
    if !matches!(transfer::hear(&transfer), Ok(Some(COMMIT))) {
        return Ok(None);
    }
    match transfer::hear(&transfer) {
        Ok(Some(GONE)) => {}
        // The old process died on exit, with no command in flight any more.
        _ => debug!("the old process has ended without its last message"),
    }
    let Taken { mut server, mut reactor, controllers, ports, endpoints, mut fds } = taken;
    server.share_locks(false);
    let is_changed = server.registry().is_changed();
    checkpointer.begin(&server.controllers(), &mut reactor, &ports, is_changed);
    for (served, saved) in server.controllers().iter().zip(&controllers) {
        let restored = served.controller.restore_quiesced(saved, &mut fds);
        restored.with_context(|| served.name.clone())?;
    }
    // All controllers are quiesced, and the supervisor has their checkpoint.
    checkpointer.complete();
    abort_point(AbortPoint::Kept);
    // The old process's checkpoint is invalid from now on.
    link.say(to_supervisor::TAKEN, "");
    abort_point(AbortPoint::Taken);
    server.controllers().iter().for_each(|served| served.controller.resume());
    server.serve(reactor, ended)?;
    let took = began.elapsed().as_micros();
    begin_trace(&server, config);
    info!("took over from the old process, {} us after its state arrived", took);
    Ok(Some((server, endpoints)))
}

/// Receives the socket to the old process.
fn predecessor(link: &WorkerLink) -> anyhow::Result<UnixStream> {
    match link.hear() {
        Some(packet) if packet.letter == to_worker::TAKE_OVER => {
            let fd = packet.fd().context("the supervisor has sent no descriptor")?;
            Ok(UnixStream::from(fd))
        }
        _ => Err(anyhow!("the supervisor has ended")),
    }
}

/// Restores the state. The old process may still resume, so nothing visible is done.
fn take_in(config: &ServerConfig, mut parcel: Parcel, pool: Pool) -> anyhow::Result<Taken> {
    let (controllers_asked, is_changed) = what_is_served(config, &mut parcel)?;
    let endpoints = Endpoints::restore(&mut parcel)?;
    let events = EventQueue::new();
    let mut reactor = Reactor::new(Limits::default())?;
    let mut controllers = Vec::new();
    let (mut all_saved, mut ports) = (Vec::new(), Vec::new());
    for (index, asked) in controllers_asked.iter().enumerate() {
        let arriving = Arriving::take(&mut parcel, asked, index, events.sender(index), &pool)?;
        let Arriving { served, device, port, saved } = arriving;
        let port = reactor.restore(port, parcel.descriptors(), Box::new(device));
        let port = port.with_context(|| served.name.clone())?;
        served.set_port(port);
        ports.push(port);
        controllers.push(served);
        all_saved.push(saved);
    }
    let fds = std::mem::take(parcel.descriptors());
    parcel.finish()?;
    let server = Server::resting(controllers, events, pool, true);
    if is_changed {
        server.registry().set_changed();
    }
    Ok(Taken { server, reactor, controllers: all_saved, ports, endpoints, fds })
}
