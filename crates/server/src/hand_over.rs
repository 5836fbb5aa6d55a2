//! Handover of all controllers at once: the server quiesces and hands over to a new process, or
//! resumes. (If both processes support it, controllers are moved one by one:
//! [`move_out`](super::move_out).)

use super::endpoints::Endpoints;
use super::registry::ServedController;
use super::server::Server;
use super::transfer::{self, COMMIT, GONE, HAVE};
use super::worker_link::WorkerLink;
use anyhow::{Context, anyhow, bail};
use shadowbell_config::limits;
use shadowbell_state::{AbortPoint, Descriptors, Parcel, VERSION, abort_point};
use shadowbell_supervisor::protocol::{parse_versions, to_supervisor};
use shadowbell_vfio_user::Reactor;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tracing::{debug, info};

/// Time limit for the pause of clients until the new process has taken over. QEMU holds its big
/// lock while it waits for a reply.
pub(super) const REST: Duration = Duration::from_millis(200);

/// Hands over to the process at the other end of `transfer`, which reads the state versions
/// `versions`. After success this process accesses no disk or guest any more, and must end.
///
/// # Errors
/// The reason for the failure. The server has resumed.
pub(super) fn hand_over(
    server: &mut Server,
    resting: &Endpoints,
    transfer: &UnixStream,
    versions: &str,
    link: &WorkerLink,
) -> anyhow::Result<()> {
    is_possible(server, versions)?;
    let began = Instant::now();
    let until = began + REST;
    let mut reactor = server.rest(until)?;
    let outcome = rest_all(&server.controllers(), until)
        .inspect(|()| abort_point(AbortPoint::AtRest))
        .and_then(|()| pass_on(server, resting, &mut reactor, transfer, until));
    if let Err(why) = outcome {
        server.go_on(reactor);
        debug!("resumed after {} us", began.elapsed().as_micros());
        return Err(why);
    }
    // Committed: the new process serves, and this one cannot resume.
    abort_point(AbortPoint::Committed);
    link.say(to_supervisor::HANDED_OVER, "");
    server.leave(reactor);
    debug!("handed over {} us after the quiesce began", began.elapsed().as_micros());
    // Fails only if the new process is dead.
    let _ = transfer::say(transfer, GONE);
    info!("another process serves now");
    Ok(())
}

/// Checks the versions and the disks before any client is paused.
///
/// # Errors
/// The handover is not possible.
pub(super) fn is_possible(server: &Server, versions: &str) -> anyhow::Result<()> {
    reads_ours(versions)?;
    for disk in server.disks() {
        disk.hand_over(&mut Descriptors::default())?;
    }
    Ok(())
}

/// Checks that the new process reads the state version that this one writes.
///
/// # Errors
/// The versions do not match.
pub(super) fn reads_ours(versions: &str) -> anyhow::Result<()> {
    let versions = parse_versions(versions).context("the new process reads no state")?;
    if !versions.contains(&VERSION) {
        bail!(
            "the new program reads state versions {} to {}, but this one writes version {VERSION}: \
             upgrade to a release next to the running one",
            versions.start(),
            versions.end()
        );
    }
    Ok(())
}

/// Quiesces these controllers.
///
/// # Errors
/// A controller does not quiesce in time. The caller must resume all of them.
pub(super) fn rest_all(all_served: &[Arc<ServedController>], until: Instant) -> anyhow::Result<()> {
    let (rests, all) = channel();
    for (index, served) in all_served.iter().enumerate() {
        let rests = rests.clone();
        served.controller.freeze(move || rests.send(index).unwrap_or_default());
    }
    drop(rests);
    let mut waits: Vec<_> = (0..all_served.len()).collect();
    while !waits.is_empty() {
        match all.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(index) => waits.retain(|other| *other != index),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let name = waits.first().and_then(|index| all_served.get(*index));
                bail!(
                    "{} has commands in flight at its disks that did not end within {} ms; try \
                     again when the disks are faster",
                    name.map_or("a controller", |served| &served.name),
                    REST.as_millis()
                );
            }
        }
    }
    Ok(())
}

/// Sends the state of everything, and commits once the new process has it.
fn pass_on(
    server: &Server,
    resting: &Endpoints,
    reactor: &mut Reactor,
    transfer: &UnixStream,
    until: Instant,
) -> anyhow::Result<()> {
    let mut parcel = what_is_served(server)?;
    resting.save(&mut parcel)?;
    let ports = reactor.save(parcel.descriptors())?;
    if ports.len() != server.controllers().len() {
        bail!("there are {} sockets for {} controllers", ports.len(), server.controllers().len());
    }
    for (index, port) in ports.iter().enumerate() {
        parcel.add(&transfer::port(index), true, port)?;
    }
    for (index, served) in server.controllers().iter().enumerate() {
        add_controller(&mut parcel, index, served)?;
    }
    transfer.set_write_timeout(Some(left(until)))?;
    // Before the new process opens the disks, whose locks this process still holds.
    server.share_locks(true);
    let outcome = commit(&parcel, transfer, until);
    if outcome.is_err() {
        server.share_locks(false);
    }
    outcome
}

/// List of the served controllers. The new process compares it with its configuration, or takes
/// the changed configuration from it.
///
/// # Errors
/// Serialization fails.
pub(super) fn what_is_served(server: &Server) -> anyhow::Result<Parcel> {
    let mut parcel = Parcel::new();
    let controllers = server.controllers();
    let asked: Vec<_> = controllers.iter().map(|served| served.asked()).collect();
    parcel.add(transfer::SERVED, true, &transfer::served_of(asked.iter().map(|asked| &**asked)))?;
    if server.registry().is_changed() {
        // Changed at run time, so the configuration file does not contain it.
        let asked: Vec<_> = asked.iter().map(|asked| &**asked).collect();
        parcel.add(transfer::ASKED, true, &asked)?;
        parcel.add(transfer::GROUPS, false, &limits::groups())?;
    }
    Ok(parcel)
}

/// Adds the state of a quiesced controller and its disks.
///
/// # Errors
/// Serialization fails, or a disk cannot be handed over.
pub(super) fn add_controller(
    parcel: &mut Parcel,
    index: usize,
    served: &ServedController,
) -> anyhow::Result<()> {
    let saved = served.controller.save(parcel.descriptors());
    let saved = saved.with_context(|| served.name.clone())?;
    parcel.add(&transfer::controller(index), true, &saved)?;
    for (nth, disk) in served.disks().enumerate() {
        let saved = disk.hand_over(parcel.descriptors())?;
        parcel.add(&transfer::disk(index, nth), true, &saved)?;
    }
    Ok(())
}

/// Error for a new process that has ended.
pub(super) fn ended() -> anyhow::Error {
    anyhow!("the new process has ended before it took over")
}

fn commit(parcel: &Parcel, transfer: &UnixStream, until: Instant) -> anyhow::Result<()> {
    let slow = || anyhow!("the new process did not take over within {} ms", REST.as_millis());
    parcel.send(transfer).map_err(|error| {
        if Instant::now() >= until { slow() } else { ended().context(error.to_string()) }
    })?;
    abort_point(AbortPoint::StateSent);
    transfer.set_read_timeout(Some(left(until)))?;
    match transfer::hear(transfer) {
        Ok(Some(HAVE)) => {}
        Ok(_) => return Err(ended()),
        Err(_) => return Err(slow()),
    }
    transfer::say(transfer, COMMIT).map_err(|_| ended())
}

/// Time until `until`, at least 1 ms because a socket timeout of zero means none.
pub(super) fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}
