//! Quiesce: the last step of the old server process in an upgrade, before the supervisor kills it.
//! Afterwards no command is in flight at a disk, and no message of a client is half handled. The
//! checkpoint at the supervisor then has all state that the next process needs. The next process
//! recovers as after a crash, but it repeats no command and waits for no I/O of the old process.
//!
//! No client can block an upgrade: the quiesce has a time limit. A client that has not quiesced by
//! then is recovered as if this process had crashed: its commands are repeated, after the I/O of
//! this process has ended. The item [`QUIESCED`] in the checkpoint names the controllers that have
//! quiesced.

use super::checkpoint_items::{QUIESCED, Quiesced};
use super::endpoints::Endpoints;
use super::registry::ServedController;
use super::server::Server;
use super::worker_link::WorkerLink;
use anyhow::{Context, anyhow};
use shadowbell_disk::Disk;
use shadowbell_process::exit;
use shadowbell_state::{AbortPoint, Descriptors, abort_point};
use shadowbell_supervisor::protocol::{to_supervisor, to_worker};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{debug, info};

/// Time limit for the quiesce. It is short, because QEMU holds its big lock while it waits for a
/// reply, so the whole guest may stand still.
const LIMIT: Duration = Duration::from_millis(200);

/// Quiesces, and waits until the supervisor kills this process. Returns only if the checkpoint is
/// incomplete. `is_changing`: a change of controllers or namespaces is in progress.
///
/// # Errors
/// The reason why the checkpoint is incomplete. The server has not quiesced.
pub(super) fn quiesce(
    server: &Server,
    endpoints: &Endpoints,
    link: &WorkerLink,
    is_changing: bool,
) -> anyhow::Result<Infallible> {
    let checkpoint = server.changes().checkpoint().filter(|checkpoint| checkpoint.is_valid());
    let checkpoint = match checkpoint {
        Some(checkpoint) => checkpoint,
        None => return Err(why_incomplete(server)),
    };
    let mut fds = Descriptors::default();
    checkpoint.put_endpoints(&endpoints.save(&mut fds)?, &fds)?;
    let began = Instant::now();
    let mut unfinished = Vec::new();
    if is_changing {
        unfinished.push("a controller or a namespace was being changed".to_owned());
    }
    let quiesced = quiesce_all(server, began + LIMIT, &mut unfinished);
    // The next process recovers the controllers in this order, the busiest first.
    let mut order = quiesced.clone();
    order.sort_by_key(|served| std::cmp::Reverse(served.controller.io_commands()));
    let controllers = order.iter().map(|served| served.index).collect();
    // If the item cannot be sent, the checkpoint is outdated, and the next process detects that.
    let _ = checkpoint.put(QUIESCED, &Quiesced { controllers });
    abort_point(AbortPoint::Quiesced);
    if unfinished.is_empty() {
        server.release_locks();
    } else {
        // Disks of a subsystem stay locked, because its other controllers may not have quiesced.
        let alone =
            quiesced.iter().filter(|served| served.requested().controller.subsystem.is_none());
        alone.flat_map(|served| served.disks()).for_each(|disk| disk.release_lock());
    }
    link.send(to_supervisor::QUIESCED, &unfinished.join("\n"));
    debug!("quiesced after {} us", began.elapsed().as_micros());
    info!("quiesced; another process recovers");
    // If the service ends or the supervisor dies before the kill, this process ends, and the
    // checkpoint stays valid.
    while link.receive().is_some_and(|packet| packet.code != to_worker::END) {}
    std::process::exit(i32::from(exit::FAILED));
}

/// Quiesces exports, sockets and controllers. Returns the controllers that have quiesced, and adds
/// a sentence to `unfinished` for each part that has not quiesced by `until`.
fn quiesce_all(
    server: &Server,
    until: Instant,
    unfinished: &mut Vec<String>,
) -> Vec<Arc<ServedController>> {
    server.disable_limits();
    let exports = stop_exports(server);
    match server.pause_reactor(until) {
        // The reactor is leaked, because its drop would disconnect the clients.
        Ok(reactor) => std::mem::forget(reactor),
        Err(why) => unfinished.push(format!("{why:#}")),
    }
    let (unquiesced, mut quiesced) = quiesce_controllers(&server.controllers(), until);
    for served in &unquiesced {
        unfinished.push(format!(
            "{} did not quiesce within {} ms; it is recovered as after a crash",
            served.name,
            LIMIT.as_millis()
        ));
    }
    let ended = exports.recv_timeout(until.saturating_duration_since(Instant::now()));
    if ended == Err(RecvTimeoutError::Timeout) {
        unfinished.push("requests of an export's clients did not end in time".to_owned());
    }
    if shadowbell_block::unfinished_queues() > 0 {
        unfinished.push("requests of disconnected clients of an export did not end".to_owned());
    }
    // If the reactor or an export is unfinished, requests may still reach each disk and controller,
    // so no controller counts as quiesced.
    if unfinished.len() > unquiesced.len() {
        quiesced.clear();
    }
    let all = server.disks();
    all.iter().for_each(|disk| await_orphans(&**disk, until));
    let mut stalled = remove_stalled(&mut quiesced, |served| served.disks().collect());
    if unfinished.is_empty() && stalled.is_empty() {
        // A disk that no controller has.
        stalled.extend(all.iter().find(|disk| disk.orphans() != 0).map(|disk| disk.name()));
    }
    unfinished.extend(stalled.iter().map(|name| format!("{name} has not answered")));
    quiesced
}

/// Removes the controllers whose disk has orphans from `quiesced`: the storage may still execute
/// these writes, so the next process has to wait for the fence. `disks` returns the disks of a
/// controller. Returns the names of the disks with orphans.
fn remove_stalled<T>(
    quiesced: &mut Vec<T>,
    disks: impl Fn(&T) -> Vec<Arc<dyn Disk>>,
) -> BTreeSet<String> {
    let mut stalled = BTreeSet::new();
    quiesced.retain(|served| {
        let disks = disks(served);
        let mut with_orphans = disks.iter().filter(|disk| disk.orphans() != 0).peekable();
        let is_quiesced = with_orphans.peek().is_none();
        stalled.extend(with_orphans.map(|disk| disk.name()));
        is_quiesced
    });
    stalled
}

/// Ends the exports, whose clients connect to the next process. The channel is closed when they
/// have ended.
fn stop_exports(server: &Server) -> std::sync::mpsc::Receiver<Infallible> {
    let (sender, ended) = channel();
    if !server.changes().exports().is_empty() {
        let changes = Arc::clone(server.changes());
        let stop = move || {
            changes.exports().stop();
            drop(sender);
        };
        // If the thread cannot be started, the dropped closure closes the channel. The exports, and
        // so their locks, then last until the process ends.
        if let Err(error) = thread::Builder::new().name("sb-exports-end".into()).spawn(stop) {
            info!("the exports end with this process: {error}");
        }
    }
    ended
}

/// Waits until a disk has no orphans, but at most until `until`.
fn await_orphans(disk: &dyn Disk, until: Instant) {
    while disk.orphans() != 0 && Instant::now() < until {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Quiesces controllers. Returns those that have not quiesced by `until`, and those that have.
fn quiesce_controllers(
    all_served: &[Arc<ServedController>],
    until: Instant,
) -> (Vec<Arc<ServedController>>, Vec<Arc<ServedController>>) {
    let (quiesced_sender, all) = channel();
    for (nth, served) in all_served.iter().enumerate() {
        let quiesced_sender = quiesced_sender.clone();
        served.controller.freeze(move || quiesced_sender.send(nth).unwrap_or_default());
    }
    drop(quiesced_sender);
    let mut unquiesced: Vec<_> = (0..all_served.len()).collect();
    while !unquiesced.is_empty()
        && let Ok(nth) = all.recv_timeout(until.saturating_duration_since(Instant::now()))
    {
        unquiesced.retain(|other| *other != nth);
    }
    let is_unquiesced = |nth: &usize| unquiesced.contains(nth);
    let of = |which: &dyn Fn(&usize) -> bool| {
        let all = all_served.iter().enumerate().filter(|(nth, _)| which(nth));
        all.map(|(_, served)| Arc::clone(served)).collect()
    };
    (of(&is_unquiesced), of(&|nth| !is_unquiesced(nth)))
}

/// Explains why the checkpoint does not suffice for an upgrade.
fn why_incomplete(server: &Server) -> anyhow::Error {
    let recoverable = || {
        for disk in server.disks() {
            disk.checkpoint(&mut Descriptors::default())
                .context("not all disks can be recovered; stop the server and start it again")?;
        }
        anyhow::Ok(())
    };
    recoverable().err().unwrap_or_else(|| {
        anyhow!("the supervisor has no complete checkpoint; stop the server and start it again")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_disk::{DiskInfo, Queue};
    use std::io;

    /// A disk with this name and number of orphans.
    #[derive(Debug)]
    struct Stalled(&'static str, usize);

    impl Disk for Stalled {
        fn info(&self) -> DiskInfo {
            DiskInfo::new(512, 8)
        }

        fn queue(&self) -> io::Result<Box<dyn Queue>> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn name(&self) -> String {
            self.0.to_owned()
        }

        fn orphans(&self) -> usize {
            self.1
        }
    }

    #[test]
    fn a_controller_has_not_quiesced_while_its_disk_has_orphans() {
        let disk = |name, orphans| Arc::new(Stalled(name, orphans)) as Arc<dyn Disk>;
        let shared = disk("shared", 2);
        let mut quiesced = vec![
            (0, vec![disk("a", 0)]),
            (1, vec![disk("b", 0), Arc::clone(&shared)]),
            (2, vec![Arc::clone(&shared)]),
            (3, vec![disk("c", 1), disk("d", 0)]),
        ];
        let stalled = remove_stalled(&mut quiesced, |(_, disks)| disks.clone());
        assert_eq!(stalled.into_iter().collect::<Vec<_>>(), ["c", "shared"]);
        assert_eq!(quiesced.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0]);
    }
}
