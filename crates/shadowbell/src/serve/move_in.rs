//! Takes over from another process one controller after the other: the other side of
//! [`move_out`](super::move_out).
//!
//! The first one is taken in and touched by nobody until the other process says that there is no way
//! back. From then on this process serves what it has got so far, and needs the other one for the
//! rest: should anything fail, it ends, and the keeper has a third one go on for both.

use super::arriving::{Arriving, begin_trace, refused, what_is_served};
use super::asides::Asides;
use super::event::{EventQueue, EventSender};
use super::keeping::Keeping;
use super::phases::Phases;
use super::server::Server;
use super::server_config::{ServerConfig, SocketConfig};
use super::transfer::{self, COMMIT, DONE, GONE, HAVE};
use super::worker_link::WorkerLink;
use crate::exit;
use crate::keeper_link::to_keeper;
use anyhow::{Context, anyhow, bail};
use shadowbell_controller::Pool;
use shadowbell_state::{AbortPoint, Parcel, StateError, abort_point};
use shadowbell_vfio_user::Reactor;
use shadowbell_vfio_user::server::Limits;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{debug, error, info};

/// How long a request of a client may hold up the next controller.
const REST: Duration = Duration::from_secs(5);

struct MoveIn<'a, F> {
    link: &'a WorkerLink,
    keeping: &'a Keeping,
    transfer: &'a UnixStream,
    pool: Pool,
    asked: Vec<SocketConfig>,
    events: EventSender,
    server: Server,
    /// The sockets while they rest. Clients would notice if this were dropped.
    resting: Option<Reactor>,
    /// What runs when serving comes to its end; until it begins.
    ended: Option<F>,
    /// The other process can not go on with all of it any more.
    is_committed: bool,
}

/// Takes over from who is at the other end of `transfer`, and has sent `parcel`, which says what is
/// to come. `None` if that one goes on instead. If it comes to a point from which there is no way,
/// it ends the process.
///
/// # Errors
/// What the other one serves can not be served here.
pub(super) fn move_in<F: FnOnce() + Send + 'static>(
    config: &ServerConfig,
    link: &WorkerLink,
    keeping: &Keeping,
    ended: F,
    transfer: &UnixStream,
    mut parcel: Parcel,
    pool: Pool,
) -> anyhow::Result<Option<(Server, Asides)>> {
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
        keeping,
        transfer,
        pool,
        asked,
        events,
        server,
        resting,
        ended,
        is_committed,
    };
    keeping.begin_with_none(is_changed).map_err(|error| refused(link, error))?;
    let outcome = moving.run();
    let is_committed = moving.is_committed;
    let asides = match outcome {
        Ok(Some(asides)) => asides,
        Ok(None) if !is_committed => return Ok(None),
        Err(why) if !is_committed => return Err(refused(link, why)),
        other => {
            // The clients are the next process's: nothing may be taken apart.
            let why = other.err().unwrap_or_else(|| anyhow!("the process before has ended"));
            error!("{why:#}");
            link.say(to_keeper::FAILED, &exit::line(&why));
            std::process::exit(i32::from(exit::FAILED));
        }
    };
    // Nothing of the predecessor counts from here on.
    link.say(to_keeper::TAKEN, "");
    abort_point(AbortPoint::Taken);
    begin_trace(&moving.server, config);
    let took = began.elapsed().as_millis();
    info!("goes on for the process before, one controller after the other in {took} ms");
    Ok(Some((moving.server, asides)))
}

impl<F: FnOnce() + Send + 'static> MoveIn<'_, F> {
    /// Takes all that comes. `None`: the other one is not there any more.
    fn run(&mut self) -> anyhow::Result<Option<Asides>> {
        transfer::say(self.transfer, HAVE).ok();
        loop {
            let mut parcel = match Parcel::receive(self.transfer) {
                Ok(parcel) => parcel,
                Err(StateError::Io(error)) => {
                    debug!("no more is handed over: {error}");
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

    /// Serves the controller that has come. False if the other one does.
    fn one(&mut self, index: usize, mut parcel: Parcel) -> anyhow::Result<bool> {
        let mut phases = Phases::begin();
        let asked = self.asked.get(index).context("the state has another number")?;
        let events = self.events.of(index);
        let arriving = Arriving::take(&mut parcel, asked, index, events, &self.pool)?;
        let Arriving { served, device, port, saved } = arriving;
        let mut fds = std::mem::take(parcel.descriptors());
        parcel.finish()?;
        phases.ended("disks and controller");
        if self.resting.is_none() {
            self.resting = Some(self.server.rest_sockets(Instant::now() + REST)?);
        }
        phases.ended("sockets at rest");
        let reactor = self.resting.as_mut().context("the sockets do not rest")?;
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
            bail!("the process before has ended while it handed over {}", served.name);
        }
        phases.ended("the other one");
        served.disks().for_each(|disk| disk.share_lock(false));
        self.keeping.keep_one(&served, reactor, port)?;
        phases.ended("records");
        let restored = served.controller.restore_quiesced(&saved, &mut fds);
        restored.with_context(|| served.name.clone())?;
        phases.ended("queues");
        // Who goes on after this process's death has to find it here, and not where it was.
        self.keeping.name_all()?;
        abort_point(AbortPoint::Kept);
        if self.ended.is_some() {
            self.link.say(to_keeper::SHARED, "");
        }
        abort_point(AbortPoint::TakenOne);
        phases.ended("names");
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

    /// What answers beside the guests comes last.
    fn rest(&self, mut parcel: Parcel) -> anyhow::Result<Asides> {
        let asides = Asides::restore(&mut parcel)?;
        parcel.finish()?;
        if self.server.controllers().len() != self.asked.len() {
            bail!("the process before has not handed over all that it serves");
        }
        transfer::say(self.transfer, HAVE).ok();
        if !matches!(transfer::hear(self.transfer), Ok(Some(GONE))) {
            // It died on its way out, when it had nothing under way any more.
            debug!("the predecessor has ended without a word");
        }
        Ok(asides)
    }
}
