//! Upgrade of a server with disks that cannot be handed over to another process: qcow2 images,
//! NBD exports, namespaces of other controllers. The checkpoint at the supervisor suffices to
//! recover them. So the server quiesces for good, with no command in flight at a disk, and lets
//! the supervisor kill it: the next process recovers as after a crash.
//!
//! Before that, the new process has shown that it starts and accepts the same configuration.

use super::hand_over::{REST, reads_ours, rest_all, what_is_served};
use super::move_out::{PREPARES, expect, send};
use super::server::Server;
use super::transfer::{self, HAVE};
use super::worker_link::WorkerLink;
use anyhow::{Context, anyhow, bail};
use shadowbell_disk::HandOverError;
use shadowbell_process::exit;
use shadowbell_state::Descriptors;
use shadowbell_supervisor::protocol::to_supervisor;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use tracing::{debug, info};

/// Time limit for the supervisor to kill this process.
const ENDS: Duration = Duration::from_secs(5);
/// Interval at which messages of the supervisor are polled.
const LOOK: Duration = Duration::from_millis(5);

/// Returns true if the server has a disk that can never be handed over, one that no controller
/// has, or an export.
pub(super) fn is_needed(server: &Server) -> bool {
    !server.changes().unattached().lock().is_empty()
        || !server.changes().exports().is_empty()
        || server.disks().iter().any(|disk| {
            let outcome = disk.hand_over(&mut Descriptors::default());
            matches!(outcome, Err(HandOverError::Impossible { .. }))
        })
}

/// Quiesces for good and waits for the supervisor's kill. Returns only on failure.
///
/// # Errors
/// The reason for the failure. The server has resumed.
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
    debug!("quiesced after {} us", began.elapsed().as_micros());
    info!("quiesced; another process recovers");
    link.say(to_supervisor::RESTS, "");
    let since = Instant::now();
    while since.elapsed() < ENDS {
        if link.told().is_some() {
            // The service is to end. The checkpoint stays at the supervisor.
            std::process::exit(i32::from(exit::FAILED));
        }
        std::thread::sleep(LOOK);
    }
    server.go_on(reactor);
    Err(anyhow!("the supervisor did not kill this process within {} s", ENDS.as_secs()))
}

/// Explains why the checkpoint does not suffice for this upgrade.
///
/// # Errors
/// Always: the reason.
pub(super) fn is_possible(server: &Server) -> anyhow::Result<()> {
    for disk in server.disks() {
        disk.keep(&mut Descriptors::default())
            .context("not all disks can be recovered; stop the server and start it again")?;
    }
    bail!("the supervisor has no complete checkpoint; stop the server and start it again")
}
