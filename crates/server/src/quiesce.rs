//! Quiesce for good, the old process's part of an upgrade: no command is in flight at a disk, and
//! no message of a client is half handled. The checkpoint at the supervisor then has everything
//! that the next process needs, which recovers as after a crash.

use super::endpoints::Endpoints;
use super::registry::ServedController;
use super::server::Server;
use super::worker_link::WorkerLink;
use anyhow::{Context, anyhow, bail};
use shadowbell_process::exit;
use shadowbell_state::{AbortPoint, Descriptors, abort_point};
use shadowbell_supervisor::protocol::{to_supervisor, to_worker};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tracing::{debug, info};

/// Time limit for the quiesce. QEMU holds its big lock while it waits for a reply.
const LIMIT: Duration = Duration::from_millis(200);

/// Quiesces for good and waits for the supervisor's kill. Returns only on failure.
///
/// # Errors
/// The reason for the failure. The server has resumed.
pub(super) fn quiesce(
    server: &Server,
    resting: &Endpoints,
    link: &WorkerLink,
) -> anyhow::Result<Infallible> {
    let kept = server.changes().kept().filter(|kept| kept.holds_all());
    let kept = match kept {
        Some(kept) => kept,
        None => return Err(why_incomplete(server)),
    };
    let mut fds = Descriptors::default();
    kept.put_endpoints(&resting.save(&mut fds)?, &fds)?;
    let began = Instant::now();
    if let Err(why) = quiesce_all(server, began + LIMIT) {
        kept.delete_endpoints();
        return Err(why);
    }
    abort_point(AbortPoint::Quiesced);
    // Requests of an export's clients may still be in flight: then the next process waits for the
    // fence.
    let has_exports = !server.changes().exports().is_empty();
    if !has_exports {
        server.release_locks();
    }
    link.say(to_supervisor::QUIESCED, if has_exports { "exports" } else { "" });
    debug!("quiesced after {} us", began.elapsed().as_micros());
    info!("quiesced; another process recovers");
    // If the service ends or the supervisor dies instead, the checkpoint stays valid.
    while link.hear().is_some_and(|packet| packet.letter != to_worker::END) {}
    std::process::exit(i32::from(exit::FAILED));
}

/// Quiesces the sockets and all controllers.
///
/// # Errors
/// A client's request or a controller does not quiesce in time. The server has resumed.
fn quiesce_all(server: &Server, until: Instant) -> anyhow::Result<()> {
    let reactor = server.rest(until)?;
    match quiesce_controllers(&server.controllers(), until) {
        Ok(()) => {
            // A drop would disconnect the clients.
            std::mem::forget(reactor);
            Ok(())
        }
        Err(why) => {
            server.go_on(reactor);
            Err(why)
        }
    }
}

fn quiesce_controllers(all_served: &[Arc<ServedController>], until: Instant) -> anyhow::Result<()> {
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
                    LIMIT.as_millis()
                );
            }
        }
    }
    Ok(())
}

/// Explains why the checkpoint does not suffice for an upgrade.
fn why_incomplete(server: &Server) -> anyhow::Error {
    let recoverable = || {
        for disk in server.disks() {
            disk.keep(&mut Descriptors::default())
                .context("not all disks can be recovered; stop the server and start it again")?;
        }
        anyhow::Ok(())
    };
    recoverable().err().unwrap_or_else(|| {
        anyhow!("the supervisor has no complete checkpoint; stop the server and start it again")
    })
}
