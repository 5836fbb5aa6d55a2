//! Hands over to the successor in another process one controller after the other, so that each guest
//! waits for its own controller only.
//!
//! First all of them show that they come to rest in time, one by one, and go on. Until the first one
//! is handed over everything can go on as it was. From then on two processes serve, and there is no
//! way back: the keeper knows, and should one of the two die, it ends the other, and a third one goes
//! on with what both have left. Of a controller that is the newer one's, as soon as that has it
//! held; what this one has left of it is good until then, for it stays at rest here.
//!
//! A disk that becomes slow meanwhile holds up nobody else: its controller is served here until it
//! comes to rest in time.

use super::asides::Asides;
use super::hand_over::{REST, add_controller, ended, is_possible, left, rest_all, what_is_served};
use super::phases::Phases;
use super::registry::ServedController;
use super::server::Server;
use super::transfer::{self, COMMIT, DONE, GONE, HAVE};
use super::worker_link::{Told, WorkerLink};
use crate::exit;
use crate::keeper_link::to_keeper;
use anyhow::{Context, anyhow};
use shadowbell_state::{AbortPoint, Parcel, abort_point};
use shadowbell_vfio_user::{Device, Reactor};
use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{debug, error, info, warn};

/// How long the new process may take for what no guest waits for.
pub(super) const PREPARES: Duration = Duration::from_secs(5);
/// How long it may take for a controller once there is no way back.
const TAKES: Duration = Duration::from_secs(5);
/// How often the keeper is told that there is no end yet.
const SAYS: Duration = Duration::from_secs(1);
/// After how long a controller that has not come to rest is tried again.
const AGAIN: Duration = Duration::from_millis(500);

/// Why a controller is not handed over.
enum Failed {
    /// It did not come to rest in time, and goes on.
    Slow(anyhow::Error),
    /// It can not be done.
    Refused(anyhow::Error),
}

struct MoveOut<'a> {
    server: &'a Server,
    transfer: &'a UnixStream,
    link: &'a WorkerLink,
    /// There is no way back.
    is_committed: bool,
    /// The sockets while they rest. Clients would notice if this were dropped.
    resting: Option<Reactor>,
    /// What was let go of, until the process ends: to take it apart would take time.
    gone: Vec<Box<dyn Device>>,
}

/// Hands over to whoever is at the other end of `transfer`, and reads the state versions
/// `versions`. When this returns without an error, nothing is touched any more, and the process
/// is to end. If it comes to a point from which there is no way, it ends the process.
///
/// # Errors
/// Why not: the server goes on as it was.
pub(super) fn move_out(
    server: &mut Server,
    resting: &Asides,
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
            // The clients that are left are the next process's: nothing may be taken apart.
            error!("{why:#}");
            link.say(to_keeper::FAILED, &exit::line(&why));
            std::process::exit(i32::from(exit::FAILED));
        }
    }
    abort_point(AbortPoint::Committed);
    link.say(to_keeper::HANDED_OVER, "");
    if let Ok(reactor) = server.rest_sockets(Instant::now() + REST) {
        server.leave(reactor);
    }
    debug!("handed over one by one in {} us", began.elapsed().as_micros());
    // It can not fail but for a successor that is dead.
    let _ = transfer::say(transfer, GONE);
    std::mem::forget(gone);
    info!("another process goes on");
    Ok(())
}

impl MoveOut<'_> {
    fn run(&mut self, resting: &Asides) -> anyhow::Result<()> {
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
            // The keeper waits for a word.
            if self.is_committed && said.elapsed() > SAYS {
                self.link.say(to_keeper::MOVING, "");
                said = Instant::now();
            }
            match self.one(index, &served) {
                Ok(()) => {}
                Err(Failed::Slow(why)) if self.is_committed => {
                    if told < 3 {
                        warn!("{why:#}; it is served by this process until it does");
                        told += 1;
                    }
                    waiting.push_back((index, served));
                    // The keeper may be gone.
                    if self.link.told() == Some(Told::Gone) {
                        return Err(anyhow!("the keeper has ended"));
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

    /// Shows that a controller comes to rest in time. It goes on.
    fn rehearse(&self, served: &Arc<ServedController>) -> anyhow::Result<()> {
        let (reactor, outcome) = self.rest(served, Instant::now() + REST)?;
        self.go_on(served, reactor);
        outcome
    }

    /// Has the sockets come to rest, and this controller. Whether it does; it is to
    /// [go on](Self::go_on) in any case.
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

    /// Hands over a controller.
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
            // Others may have the same limits.
            served.wait_for_limits(true);
            self.server.sockets_go_on(reactor);
        }
        abort_point(AbortPoint::LetGo);
        self.expect(DONE, TAKES).map_err(Failed::Refused)?;
        phases.ended("the other one");
        debug!("{}: served by another process after {phases}", served.name);
        Ok(())
    }

    /// Writes it down, sends it, makes sure that there is no way back, and lets go of it.
    fn pass_on(
        &mut self,
        index: usize,
        served: &ServedController,
        until: Instant,
    ) -> anyhow::Result<()> {
        let reactor = self.resting.as_mut().context("the sockets do not rest")?;
        let mut parcel = Parcel::new();
        parcel.add(transfer::MOVED, true, &index)?;
        let socket = served.port().context("a controller has no socket")?;
        let port = reactor.save_port(socket, parcel.descriptors())?;
        parcel.add(&transfer::port(index), true, &port.context("a controller has no socket")?)?;
        add_controller(&mut parcel, index, served)?;
        // From the moment that the other one has them.
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
            // Before the other one can have begun.
            self.link.say(to_keeper::MOVING, "");
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

/// Sends something to the new one.
///
/// # Errors
/// It is gone, or does not read it in time.
pub(super) fn send(transfer: &UnixStream, parcel: &Parcel, time: Duration) -> anyhow::Result<()> {
    transfer.set_write_timeout(Some(time))?;
    parcel.send(transfer).map_err(|error| ended().context(error.to_string()))
}

/// Waits for a letter of the new one.
///
/// # Errors
/// It is gone, or does not say it in time.
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
