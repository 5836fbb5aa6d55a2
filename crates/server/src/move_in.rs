//! Takeover from another process, one controller after the other: the counterpart of
//! [`move_out`](super::move_out).
//!
//! The first controller is restored but not served until the old process commits. From then on
//! this process serves the controllers that it has, and the old process serves the rest: after an
//! error this process ends, and the supervisor starts a third process that recovers all
//! controllers.

use super::arriving::{Arriving, begin_trace, refused, what_is_served};
use super::checkpointer::Checkpointer;
use super::endpoints::Endpoints;
use super::event::{EventQueue, EventSender};
use super::server::Server;
use super::startup_timing::Phases;
use super::transfer::{self, COMMIT, DONE, GONE, HAVE};
use super::worker_link::WorkerLink;
use anyhow::{Context, anyhow, bail};
use shadowbell_config::server_config::{ServerConfig, SocketConfig};
use shadowbell_controller::Pool;
use shadowbell_process::exit;
use shadowbell_state::{AbortPoint, Parcel, StateError, abort_point};
use shadowbell_supervisor::protocol::to_supervisor;
use shadowbell_vfio_user::Reactor;
use shadowbell_vfio_user::server::Limits;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{debug, error, info};

/// Time limit for the reactor to pause, which a request of a client may delay.
const REST: Duration = Duration::from_secs(5);

struct MoveIn<'a, F> {
    link: &'a WorkerLink,
    checkpointer: &'a Checkpointer,
    transfer: &'a UnixStream,
    pool: Pool,
    asked: Vec<SocketConfig>,
    events: EventSender,
    server: Server,
    /// Reactor while it is paused. A drop would disconnect its clients.
    resting: Option<Reactor>,
    /// Callback for the end of the reactor, until the reactor starts.
    ended: Option<F>,
    /// The old process has committed, and cannot resume all controllers.
    is_committed: bool,
}

/// Takes over from the process at the other end of `transfer`, which has sent the list `parcel`
/// of its controllers. `None` if the old process continues instead. Ends this process if an error
/// occurs after the commit.
///
/// # Errors
/// A controller of the old process cannot be served.
pub(super) fn move_in<F: FnOnce() + Send + 'static>(
    config: &ServerConfig,
    link: &WorkerLink,
    checkpointer: &Checkpointer,
    ended: F,
    transfer: &UnixStream,
    mut parcel: Parcel,
    pool: Pool,
) -> anyhow::Result<Option<(Server, Endpoints)>> {
    let began = Instant::now();
    let (asked, is_changed) =
        what_is_served(config, &mut parcel).map_err(|error| refused(link, error))?;
    parcel.finish().map_err(|error| refused(link, error.into()))?;
    let queue = EventQueue::new();
    let events = queue.sender(0);
    let server = Server::resting(Vec::new(), queue, pool.clone(), true);
    server.changes().expect(asked.len());
    if is_changed {
        server.registry().set_changed();
    }
    let resting = Some(Reactor::new(Limits::default())?);
    let (ended, is_committed) = (Some(ended), false);
    let mut moving = MoveIn {
        link,
        checkpointer,
        transfer,
        pool,
        asked,
        events,
        server,
        resting,
        ended,
        is_committed,
    };
    checkpointer.begin_with_none(is_changed).map_err(|error| refused(link, error))?;
    let outcome = moving.run();
    let is_committed = moving.is_committed;
    let endpoints = match outcome {
        Ok(Some(endpoints)) => endpoints,
        Ok(None) if !is_committed => return Ok(None),
        Err(why) if !is_committed => return Err(refused(link, why)),
        other => {
            // The third process recovers the clients: nothing may be closed in order, only by
            // exit.
            let why = other.err().unwrap_or_else(|| anyhow!("the old process has ended"));
            error!("{why:#}");
            link.say(to_supervisor::FAILED, &exit::line(&why));
            std::process::exit(i32::from(exit::FAILED));
        }
    };
    // The old process's checkpoint is invalid from now on.
    link.say(to_supervisor::TAKEN, "");
    abort_point(AbortPoint::Taken);
    begin_trace(&moving.server, config);
    let took = began.elapsed().as_millis();
    info!("took over from the old process, one controller after the other, in {took} ms");
    Ok(Some((moving.server, endpoints)))
}

impl<F: FnOnce() + Send + 'static> MoveIn<'_, F> {
    /// Receives all controllers. `None` if the old process closes the connection.
    fn run(&mut self) -> anyhow::Result<Option<Endpoints>> {
        transfer::say(self.transfer, HAVE).ok();
        loop {
            let mut parcel = match Parcel::receive(self.transfer) {
                Ok(parcel) => parcel,
                Err(StateError::Io(error)) => {
                    debug!("the handover has ended: {error}");
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            };
            match parcel.take::<usize>(transfer::MOVED)? {
                Some(index) => {
                    if !self.one(index, parcel)? {
                        return Ok(None);
                    }
                }
                None => return self.rest(parcel).map(Some),
            }
        }
    }

    /// Restores a controller and serves it. Returns false if the old process serves it.
    fn one(&mut self, index: usize, mut parcel: Parcel) -> anyhow::Result<bool> {
        let mut phases = Phases::begin();
        let asked = self.asked.get(index).context("the state has an unknown controller index")?;
        let events = self.events.of(index);
        let arriving = Arriving::take(&mut parcel, asked, index, events, &self.pool)?;
        let Arriving { served, device, port, saved } = arriving;
        let mut fds = std::mem::take(parcel.descriptors());
        parcel.finish()?;
        phases.ended("disks and controller");
        if self.resting.is_none() {
            self.resting = Some(self.server.rest_sockets(Instant::now() + REST)?);
        }
        phases.ended("reactor paused");
        let reactor = self.resting.as_mut().context("the reactor is not paused")?;
        let port = reactor.restore(port, &mut fds, Box::new(device));
        let port = port.with_context(|| served.name.clone())?;
        served.set_port(port);
        phases.ended("socket");
        abort_point(AbortPoint::TakenIn);
        if !self.is_committed {
            transfer::say(self.transfer, HAVE).ok();
            if !matches!(transfer::hear(self.transfer), Ok(Some(COMMIT))) {
                return Ok(false);
            }
            self.is_committed = true;
        }
        if !matches!(transfer::hear(self.transfer), Ok(Some(GONE))) {
            bail!("the old process has ended while it handed over {}", served.name);
        }
        phases.ended("old process");
        served.disks().for_each(|disk| disk.share_lock(false));
        self.checkpointer.keep_one(&served, reactor, port)?;
        phases.ended("checkpoint items");
        let restored = served.controller.restore_quiesced(&saved, &mut fds);
        restored.with_context(|| served.name.clone())?;
        phases.ended("queues");
        // From this checkpoint on, a recovery takes the controller from here instead of from the
        // old process's checkpoint.
        self.checkpointer.name_all()?;
        abort_point(AbortPoint::Kept);
        if self.ended.is_some() {
            self.link.say(to_supervisor::SHARED, "");
        }
        abort_point(AbortPoint::TakenOne);
        phases.ended("checkpoint list");
        let served = Arc::new(served);
        self.server.registry().join(Arc::clone(&served));
        served.controller.resume();
        if let Some(reactor) = self.resting.take() {
            match self.ended.take() {
                Some(ended) => self.server.serve(reactor, ended)?,
                None => self.server.sockets_go_on(reactor),
            }
        }
        transfer::say(self.transfer, DONE).ok();
        phases.ended("served");
        debug!("{}: it took: {phases}", served.name);
        Ok(true)
    }

    /// Receives the management endpoints, which are last.
    fn rest(&self, mut parcel: Parcel) -> anyhow::Result<Endpoints> {
        let endpoints = Endpoints::restore(&mut parcel)?;
        parcel.finish()?;
        if self.server.controllers().len() != self.asked.len() {
            bail!("the old process has not handed over all controllers");
        }
        transfer::say(self.transfer, HAVE).ok();
        if !matches!(transfer::hear(self.transfer), Ok(Some(GONE))) {
            // The old process died on exit, with no command in flight any more.
            debug!("the old process has ended without its last message");
        }
        Ok(endpoints)
    }
}
