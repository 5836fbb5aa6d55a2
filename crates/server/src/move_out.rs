//! Handover to a new process, one controller after the other, so that each guest waits only for
//! its own controller.
//!
//! First each controller in turn quiesces and resumes, which proves that it quiesces in time.
//! Until the first controller is handed over, this process can resume everything. From then on
//! two processes serve, and neither can take the other's controllers: the supervisor knows that,
//! and if one of the two dies, it kills the other, and a third process recovers from both
//! checkpoints. For a controller the new process's checkpoint is used as soon as it exists. Until
//! then the old process's checkpoint is valid, because the controller stays quiesced there.
//!
//! A disk that becomes slow during the handover delays no other controller: its controller is
//! served here until it quiesces in time.

use super::endpoints::Endpoints;
use super::hand_over::{REST, add_controller, ended, is_possible, left, rest_all, what_is_served};
use super::registry::ServedController;
use super::server::Server;
use super::startup_timing::Phases;
use super::transfer::{self, COMMIT, DONE, GONE, HAVE};
use super::worker_link::{Told, WorkerLink};
use anyhow::{Context, anyhow};
use shadowbell_process::exit;
use shadowbell_state::{AbortPoint, Parcel, abort_point};
use shadowbell_supervisor::protocol::to_supervisor;
use shadowbell_vfio_user::{Device, Reactor};
use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{debug, error, info, warn};

/// Time limit for preparations of the new process, during which no guest waits.
pub(super) const PREPARES: Duration = Duration::from_secs(5);
/// Time limit for the new process to take a controller after the commit.
const TAKES: Duration = Duration::from_secs(5);
/// Interval of progress messages to the supervisor.
const SAYS: Duration = Duration::from_secs(1);
/// Delay before the next attempt with a controller that did not quiesce in time.
const AGAIN: Duration = Duration::from_millis(500);

/// Reason why a controller was not handed over.
enum Failed {
    /// The controller did not quiesce in time, and was resumed.
    Slow(anyhow::Error),
    /// The handover failed.
    Refused(anyhow::Error),
}

struct MoveOut<'a> {
    server: &'a Server,
    transfer: &'a UnixStream,
    link: &'a WorkerLink,
    /// The first controller was handed over, so this process cannot resume all controllers.
    is_committed: bool,
    /// Reactor while it is paused. A drop would disconnect its clients.
    resting: Option<Reactor>,
    /// Devices that were handed over. Leaked at exit, because their drop takes time.
    gone: Vec<Box<dyn Device>>,
}

/// Hands over to the process at the other end of `transfer`, which reads the state versions
/// `versions`. After success this process accesses no disk or guest any more, and must end. Ends
/// this process if an error occurs after the commit.
///
/// # Errors
/// The reason for the failure. The server has resumed.
pub(super) fn move_out(
    server: &mut Server,
    resting: &Endpoints,
    transfer: &UnixStream,
    versions: &str,
    link: &WorkerLink,
) -> anyhow::Result<()> {
    is_possible(server, versions)?;
    let began = Instant::now();
    let mut moving =
        MoveOut { server, transfer, link, is_committed: false, resting: None, gone: Vec::new() };
    let outcome = moving.run(resting);
    let MoveOut { is_committed, gone, .. } = moving;
    match outcome {
        Ok(()) => {}
        Err(why) if !is_committed => return Err(why),
        Err(why) => {
            // The third process recovers the remaining clients: nothing may be closed in order,
            // only by exit.
            error!("{why:#}");
            link.say(to_supervisor::FAILED, &exit::line(&why));
            std::process::exit(i32::from(exit::FAILED));
        }
    }
    abort_point(AbortPoint::Committed);
    link.say(to_supervisor::HANDED_OVER, "");
    if let Ok(reactor) = server.rest_sockets(Instant::now() + REST) {
        server.leave(reactor);
    }
    debug!("handed over one by one in {} us", began.elapsed().as_micros());
    // Fails only if the new process is dead.
    let _ = transfer::say(transfer, GONE);
    std::mem::forget(gone);
    info!("another process serves now");
    Ok(())
}

impl MoveOut<'_> {
    fn run(&mut self, resting: &Endpoints) -> anyhow::Result<()> {
        let all = self.server.controllers();
        let mut plan = what_is_served(self.server)?;
        plan.add(transfer::MOVES, true, &all.len())?;
        self.send(&plan, PREPARES)?;
        self.expect(HAVE, PREPARES)?;
        for served in &all {
            self.rehearse(served)?;
        }
        let mut waiting: VecDeque<_> = all.into_iter().enumerate().collect();
        let mut told = 0;
        let mut said = Instant::now();
        while let Some((index, served)) = waiting.pop_front() {
            // The supervisor ends both processes if it receives no progress message.
            if self.is_committed && said.elapsed() > SAYS {
                self.link.say(to_supervisor::MOVING, "");
                said = Instant::now();
            }
            match self.one(index, &served) {
                Ok(()) => {}
                Err(Failed::Slow(why)) if self.is_committed => {
                    if told < 3 {
                        warn!("{why:#}; this process serves it until then");
                        told += 1;
                    }
                    waiting.push_back((index, served));
                    // The supervisor may have died meanwhile.
                    if self.link.told() == Some(Told::Gone) {
                        return Err(anyhow!("the supervisor has ended"));
                    }
                    std::thread::sleep(AGAIN);
                }
                Err(Failed::Slow(why) | Failed::Refused(why)) => return Err(why),
            }
        }
        let mut rest = Parcel::new();
        resting.save(&mut rest)?;
        self.send(&rest, TAKES)?;
        self.expect(HAVE, TAKES)
    }

    /// Quiesces a controller and resumes it, which proves that it quiesces in time.
    fn rehearse(&self, served: &Arc<ServedController>) -> anyhow::Result<()> {
        let (reactor, outcome) = self.rest(served, Instant::now() + REST)?;
        self.go_on(served, reactor);
        outcome
    }

    /// Pauses the reactor and quiesces this controller. The inner result tells if the controller
    /// quiesced; the caller must [resume](Self::go_on) both in any case.
    fn rest(
        &self,
        served: &Arc<ServedController>,
        until: Instant,
    ) -> anyhow::Result<(Reactor, anyhow::Result<()>)> {
        served.wait_for_limits(false);
        let reactor = self.server.rest_sockets(until);
        if reactor.is_err() {
            served.wait_for_limits(true);
        }
        Ok((reactor?, rest_all(std::slice::from_ref(served), until)))
    }

    fn go_on(&self, served: &ServedController, reactor: Reactor) {
        served.wait_for_limits(true);
        served.controller.resume();
        self.server.sockets_go_on(reactor);
    }

    /// Hands over one controller.
    fn one(&mut self, index: usize, served: &Arc<ServedController>) -> Result<(), Failed> {
        let until = Instant::now() + REST;
        let mut phases = Phases::begin();
        let (reactor, outcome) = self.rest(served, until).map_err(Failed::Slow)?;
        if let Err(why) = outcome {
            self.go_on(served, reactor);
            return Err(Failed::Slow(why));
        }
        abort_point(AbortPoint::AtRest);
        phases.ended("rest");
        self.resting = Some(reactor);
        let outcome = self.pass_on(index, served, until);
        if !self.is_committed
            && let Some(reactor) = self.resting.take()
        {
            self.go_on(served, reactor);
        }
        outcome.map_err(Failed::Refused)?;
        phases.ended("state");
        if let Some(reactor) = self.resting.take() {
            // Other controllers may share the limits.
            served.wait_for_limits(true);
            self.server.sockets_go_on(reactor);
        }
        abort_point(AbortPoint::LetGo);
        self.expect(DONE, TAKES).map_err(Failed::Refused)?;
        phases.ended("new process");
        debug!("{}: served by another process after {phases}", served.name);
        Ok(())
    }

    /// Sends the controller's state, commits if it is the first one, and releases the controller.
    fn pass_on(
        &mut self,
        index: usize,
        served: &ServedController,
        until: Instant,
    ) -> anyhow::Result<()> {
        let reactor = self.resting.as_mut().context("the reactor is not paused")?;
        let mut parcel = Parcel::new();
        parcel.add(transfer::MOVED, true, &index)?;
        let socket = served.port().context("a controller has no socket")?;
        let port = reactor.save_port(socket, parcel.descriptors())?;
        parcel.add(&transfer::port(index), true, &port.context("a controller has no socket")?)?;
        add_controller(&mut parcel, index, served)?;
        // Before the new process opens the disks, whose locks this process still holds.
        served.disks().for_each(|disk| disk.share_lock(true));
        let time = if self.is_committed { TAKES } else { left(until) };
        let outcome = self.send(&parcel, time);
        abort_point(AbortPoint::StateSent);
        if !self.is_committed {
            let outcome = outcome.and_then(|()| self.expect(HAVE, left(until)));
            if outcome.is_err() {
                served.disks().for_each(|disk| disk.share_lock(false));
                return outcome;
            }
            self.is_committed = true;
            // The supervisor must know before the new process can begin to serve.
            self.link.say(to_supervisor::MOVING, "");
            abort_point(AbortPoint::Moving);
            transfer::say(self.transfer, COMMIT).map_err(|_| ended())?;
        } else {
            outcome?;
        }
        let device = self.resting.as_mut().and_then(|reactor| reactor.hand_over_port(socket));
        self.gone.extend(device);
        transfer::say(self.transfer, GONE).map_err(|_| ended())
    }

    fn send(&self, parcel: &Parcel, time: Duration) -> anyhow::Result<()> {
        send(self.transfer, parcel, time)
    }

    fn expect(&self, letter: u8, time: Duration) -> anyhow::Result<()> {
        expect(self.transfer, letter, time)
    }
}

/// Sends state to the new process.
///
/// # Errors
/// The new process has ended, or does not read in time.
pub(super) fn send(transfer: &UnixStream, parcel: &Parcel, time: Duration) -> anyhow::Result<()> {
    transfer.set_write_timeout(Some(time))?;
    parcel.send(transfer).map_err(|error| ended().context(error.to_string()))
}

/// Waits for a message of the new process.
///
/// # Errors
/// The new process has ended, or does not send the message in time.
pub(super) fn expect(transfer: &UnixStream, letter: u8, time: Duration) -> anyhow::Result<()> {
    transfer.set_read_timeout(Some(time))?;
    match transfer::hear(transfer) {
        Ok(Some(heard)) if heard == letter => Ok(()),
        Ok(_) => Err(ended()),
        Err(_) => {
            let most = time.as_millis();
            Err(anyhow!("the new process did not take over within {most} ms"))
        }
    }
}
