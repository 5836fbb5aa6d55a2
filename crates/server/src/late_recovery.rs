//! Threads that open the disks of a dead process, and the recovery of controllers whose disks are
//! not ready when the first ones are served.

use super::namespace_requests;
use super::reconfigure::Changes;
use super::recovery_job::{Job, JobContext, Recovered, RecoveredController};
use super::registry::Registry;
use super::server::Server;
use parking_lot::Mutex;
use shadowbell_controller::CauseOfDeath;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Time without a result after which another thread is started, because all threads wait for disks.
const GROW: Duration = Duration::from_millis(5);
/// Time limit within which the reactor begins to serve a recovered socket.
const ACCEPTS: Duration = Duration::from_secs(5);

/// Threads that run jobs, in the order of the queue.
pub(super) struct Openers {
    queue: Arc<Mutex<VecDeque<Vec<Job>>>>,
    context: Arc<JobContext>,
    sender: Sender<Recovered>,
    results: Receiver<Recovered>,
    /// Number of jobs without a result.
    left: usize,
}

impl Openers {
    /// Starts `threads` threads. The jobs of a group run one after the other.
    pub(super) fn start(
        groups: VecDeque<Vec<Job>>,
        context: JobContext,
        threads: usize,
    ) -> anyhow::Result<Self> {
        let left = groups.iter().map(Vec::len).sum();
        let threads = threads.min(groups.len());
        let (sender, results) = channel();
        let queue = Arc::new(Mutex::new(groups));
        let openers = Self { queue, context: Arc::new(context), sender, results, left };
        (0..threads).try_for_each(|_| openers.add_thread())?;
        Ok(openers)
    }

    /// Number of jobs without a result.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    fn add_thread(&self) -> anyhow::Result<()> {
        let (queue, context) = (Arc::clone(&self.queue), Arc::clone(&self.context));
        let sender = self.sender.clone();
        std::thread::Builder::new().name("sb-recover".into()).spawn(move || {
            loop {
                let Some(group) = queue.lock().pop_front() else { return };
                for job in group {
                    let Some(recovered) = job.run(&context) else { return };
                    if sender.send(recovered).is_err() {
                        return;
                    }
                }
            }
        })?;
        Ok(())
    }

    /// Waits for the next result, at most until `until`.
    pub(super) fn next(&mut self, until: Instant) -> Option<Recovered> {
        let wait = until.saturating_duration_since(Instant::now()).min(GROW);
        match self.results.recv_timeout(wait) {
            Ok(recovered) => {
                self.left -= 1;
                Some(recovered)
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                if wait == GROW && !self.queue.lock().is_empty() {
                    // An error is not fatal, because the threads that wait run the remaining jobs
                    // later.
                    let _ = self.add_thread().inspect_err(|why| warn!("{why:#}"));
                }
                None
            }
        }
    }
}

/// Recovery of the controllers and disks that were not ready in time.
pub(super) struct LateRecovery(pub(super) Openers);

/// Guard that ends the late recovery when it is dropped.
pub(super) struct LateGuard {
    context: Arc<JobContext>,
}

impl Drop for LateGuard {
    fn drop(&mut self) {
        self.context.fence.cancel();
    }
}

impl LateRecovery {
    /// Starts the thread of the late recovery.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(self, server: &Server) -> anyhow::Result<LateGuard> {
        let (registry, changes) = (Arc::clone(server.registry()), Arc::clone(server.changes()));
        let context = Arc::clone(&self.0.context);
        std::thread::Builder::new()
            .name("sb-late-recover".into())
            .spawn(move || run(self.0, &registry, &changes))?;
        Ok(LateGuard { context })
    }
}

fn run(mut openers: Openers, registry: &Registry, changes: &Arc<Changes>) {
    while openers.left() > 0 && !openers.context.fence.is_cancelled() {
        let until = Instant::now() + Duration::from_secs(1);
        let Some(recovered) = openers.next(until) else { continue };
        // During an upgrade, this waits until the end of the process, because the upgrade holds the
        // lock.
        let _guard = changes.change_lock();
        let checkpoint = &openers.context.checkpoint;
        match recovered {
            Recovered::Controller(ready) => serve(*ready, registry, changes, &openers.context),
            Recovered::Disk(id, open) => {
                changes.add_recovered(&id, open, checkpoint);
                info!("recovered from the checkpoint of the previous process: disk {id}");
                changes.start_missing_exports();
            }
            Recovered::Nothing => {}
        }
    }
    if openers.left() == 0 {
        openers.context.checkpoint.end_recovery();
    }
}

/// Begins to serve a controller that has waited for its disks.
fn serve(
    ready: RecoveredController,
    registry: &Registry,
    changes: &Arc<Changes>,
    JobContext { checkpoint, attempts, .. }: &JobContext,
) {
    let RecoveredController { served, port, entry, saved, changing, death, replays, old, .. } =
        ready;
    let Some(handle) = changes.handle() else { return };
    checkpoint.put_unrecorded(served.index, entry);
    let (begun, begins) = channel();
    let controller = served.controller.clone();
    // The reactor sends the first checkpoint of the socket. This also sends the list, which then
    // names the new items. Before that, the controller must not execute commands.
    let recorder = checkpoint.recovered_port_recorder(served.index, attempts);
    let port = handle.restore(port, recorder, move || {
        controller.resume();
        changing.iter().for_each(|nsid| controller.announce_namespace(*nsid));
        let _ = begun.send(());
    });
    served.set_port(port);
    registry.recovered(Arc::clone(&served));
    if begins.recv_timeout(ACCEPTS).is_err() {
        warn!("{}: its socket is not served yet", served.name);
    }
    if let Some(saved) = &saved {
        served.controller.announce_recovery(saved);
    }
    checkpoint.delete_old(&old);
    if let Err(error) = namespace_requests::begin_one(&served, changes) {
        warn!("{}: requests of its pool are not served: {error}", served.name);
    }
    let of = if death == CauseOfDeath::Planned { "quiesced" } else { "dead" };
    info!(
        "recovered from the checkpoint of a {of} process: {}, commands in flight: {replays}",
        served.name
    );
    changes.start_missing_exports();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpointer::{Checkpointer, UnattachedEntry};
    use crate::event::EventQueue;
    use crate::fence_wait::FenceWait;
    use crate::recovery_attempts::{Attempts, Slot};
    use crate::recovery_job::DiskJob;
    use crate::worker_link::WorkerLink;
    use shadowbell_controller::{Pool, PoolOptions};
    use shadowbell_supervisor::protocol;
    use shadowbell_testing::wait::LIMIT;

    /// A job that is given up still has a result ([`Recovered::Nothing`]), so the next job of its
    /// group is run.
    #[test]
    fn an_item_that_crashes_every_process_does_not_block_its_group() {
        let (ours, _theirs) = protocol::pair().unwrap();
        let attempts = Attempts::new().unwrap();
        let job = |number: u32| {
            let key = format!("disk/unattached.{number}");
            attempts.give_up(Slot::of_disk(&key));
            Job::Disk(DiskJob {
                id: number.to_string(),
                entry: UnattachedEntry { key, spec: "mem:1MiB".to_owned(), died: None },
                death: CauseOfDeath::Fault,
                items: std::collections::BTreeMap::new(),
            })
        };
        let groups = VecDeque::from([vec![job(1), job(2)]]);
        let context = JobContext {
            pool: Pool::start(&PoolOptions::default()).unwrap(),
            events: EventQueue::new().sender(0),
            checkpoint: Checkpointer::new(&WorkerLink::from_socket(ours)).unwrap(),
            fence: Arc::new(FenceWait::new(Vec::new())),
            registry: Arc::new(Registry::new(Vec::new())),
            attempts: Arc::new(attempts),
        };
        let mut openers = Openers::start(groups, context, 1).unwrap();
        let until = Instant::now() + LIMIT;
        while openers.left() > 0 && Instant::now() < until {
            if let Some(result) = openers.next(until) {
                assert!(matches!(result, Recovered::Nothing));
            }
        }
        assert_eq!(openers.left(), 0);
    }
}
