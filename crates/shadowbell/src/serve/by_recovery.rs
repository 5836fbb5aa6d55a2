//! An upgrade of a server with disks that can not be handed over to another process: qcow2 images,
//! exports, namespaces of other controllers. What the keeper holds for the time after a death is
//! enough to go on with them. So the server comes to rest for good, with nothing under way at a
//! disk, and has the keeper end it: the next process does what it would do after a death.
//!
//! Before that the successor has shown that it begins, and that it would serve the same.

use super::hand_over::{REST, reads_ours, rest_all, what_is_served};
use super::move_out::{PREPARES, expect, send};
use super::server::Server;
use super::transfer::{self, HAVE};
use super::worker_link::WorkerLink;
use crate::exit;
use crate::keeper_link::to_keeper;
use anyhow::{Context, anyhow, bail};
use shadowbell_backend::HandOverError;
use shadowbell_state::Descriptors;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use tracing::{debug, info};

/// How long the keeper may take to end the process.
const ENDS: Duration = Duration::from_secs(5);
/// How often it is looked whether the keeper is there.
const LOOK: Duration = Duration::from_millis(5);

/// Whether the server has a disk that can not be handed over, whatever is tried.
pub(super) fn is_needed(server: &Server) -> bool {
    server.disks().iter().any(|disk| {
        let outcome = disk.hand_over(&mut Descriptors::default());
        matches!(outcome, Err(HandOverError::Impossible { .. }))
    })
}

/// Comes to rest for good. The process ends in here.
///
/// # Errors
/// Why not: the server goes on as it was.
pub(super) fn rest_for_good(
    server: &Server,
    transfer: &UnixStream,
    versions: &str,
    link: &WorkerLink,
) -> anyhow::Result<()> {
    reads_ours(versions)?;
    let mut plan = what_is_served(server)?;
    plan.add(transfer::MOVES, true, &0_usize)?;
    send(transfer, &plan, PREPARES)?;
    expect(transfer, HAVE, PREPARES)?;
    let began = Instant::now();
    let reactor = server.rest(began + REST)?;
    if let Err(why) = rest_all(&server.controllers(), began + REST) {
        server.go_on(reactor);
        return Err(why);
    }
    debug!("at rest after {} us", began.elapsed().as_micros());
    info!("rests, and another process goes on");
    link.say(to_keeper::RESTS, "");
    let since = Instant::now();
    while since.elapsed() < ENDS {
        if link.told().is_some() {
            // The service is to end: whoever goes on finds all of it with the keeper.
            std::process::exit(i32::from(exit::FAILED));
        }
        std::thread::sleep(LOOK);
    }
    server.go_on(reactor);
    Err(anyhow!("the keeper did not end this process within {} s", ENDS.as_secs()))
}

/// Why the keeper does not hold what that takes.
///
/// # Errors
/// That.
pub(super) fn is_possible(server: &Server) -> anyhow::Result<()> {
    for disk in server.disks() {
        disk.keep(&mut Descriptors::default()).context(
            "no other process can go on with all of the disks; stop the server and start it again",
        )?;
    }
    bail!(
        "the keeper does not hold what the next process needs; stop the server and start it again"
    )
}
