//! Time limit within which the process ends, even if its storage does not answer.
//!
//! The wait for the users of mounted files (FUSE) and block devices (ublk) has no such limit as
//! long as their storage answers, because they may still have data to write. If the storage hangs,
//! its users cannot close the file, so the limit begins with the last answer of the storage.

use super::registry::{ServedController, disable_limits};
use super::running_exports::ExportedBlock;
use super::server::Server;
use super::worker_link::WorkerLink;
use shadowbell_disk::Disk;
use shadowbell_process::{exit, logging};
use shadowbell_supervisor::protocol::to_supervisor;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tracing::error;

/// Thread that ends the process after a time limit. Before that, it logs the disks that have not
/// answered, with the number of their requests. A drop ends the thread.
pub(super) struct StopLimit {
    ends: Option<Sender<Infallible>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for StopLimit {
    /// Waits for the end of the thread. The thread may drop the last reference to a disk: a qcow2
    /// image then releases its unused clusters.
    fn drop(&mut self) {
        drop(self.ends.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl StopLimit {
    /// Starts the thread. It ends the process a little before `limit`, the time at which the
    /// supervisor would kill the process.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(server: &Server, limit: Duration) -> anyhow::Result<Self> {
        let unanswered = Unanswered::of(server);
        Self::spawn(move |ended| {
            if !has_ended(ended, limit.mul_f64(0.8)) {
                unanswered.end_process(ended, limit);
            }
        })
    }

    /// Starts the thread for the wait for the users of `exports`, which are mounted files and block
    /// devices. It ends the process if none of those in use has storage that answers, a little
    /// earlier than `limit` after the last answer.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start_for_users(
        server: &Server,
        exports: Vec<ExportedBlock>,
        limit: Duration,
        link: Option<&WorkerLink>,
    ) -> anyhow::Result<Self> {
        let unanswered = Unanswered::of(server);
        // Rate limits would delay the last requests of the users.
        exports.iter().for_each(|export| disable_limits(&**export.block.disk()));
        let now = Instant::now();
        let mut users: Vec<_> = exports.into_iter().map(|export| User::new(export, now)).collect();
        let link = link.cloned();
        Self::spawn(move |ended| {
            while !has_ended(ended, limit.mul_f64(0.05)) {
                if !all_hang(&mut users, Instant::now(), limit.mul_f64(0.8)) {
                    continue;
                }
                // The supervisor applies the limit from now on, in case that this process hangs.
                if let Some(link) = &link {
                    link.send(to_supervisor::UNUSED, "");
                }
                return unanswered.end_process(ended, limit);
            }
        })
    }

    fn spawn(run: impl FnOnce(&Receiver<Infallible>) + Send + 'static) -> anyhow::Result<Self> {
        let (ends, ended) = channel();
        let thread = thread::Builder::new().name("sb-stop-limit".into());
        let thread = thread.spawn(move || run(&ended))?;
        Ok(Self { ends: Some(ends), thread: Some(thread) })
    }
}

/// Controllers, disks and exports that may have requests without an answer.
struct Unanswered {
    controllers: Vec<Arc<ServedController>>,
    disks: Vec<Arc<dyn Disk>>,
    exports: Vec<ExportedBlock>,
}

impl Unanswered {
    fn of(server: &Server) -> Self {
        let exports = server.changes().exports().blocks();
        Self { controllers: server.controllers(), disks: server.disks(), exports }
    }

    /// Logs what has had no answer, and ends the process, unless the [`StopLimit`] is dropped
    /// meanwhile.
    fn end_process(&self, ended: &Receiver<Infallible>, limit: Duration) {
        error!("the storage has not answered all requests within {} s", limit.as_secs());
        self.controllers.iter().for_each(|served| served.controller.log_pending());
        self.disks.iter().for_each(|disk| log_orphans(&**disk));
        self.exports.iter().for_each(log_requests);
        // During this wait, the I/O threads log their requests in flight.
        if has_ended(ended, limit.mul_f64(0.1)) {
            return;
        }
        logging::finish();
        std::process::exit(i32::from(exit::UNANSWERED));
    }
}

/// Waits until the [`StopLimit`] is dropped. Returns false if that takes longer than `time`.
fn has_ended(ended: &Receiver<Infallible>, time: Duration) -> bool {
    ended.recv_timeout(time) != Err(RecvTimeoutError::Timeout)
}

fn log_orphans(disk: &dyn Disk) {
    let orphans = disk.orphans();
    if orphans != 0 {
        error!("{}: {orphans} cancelled writes have not been answered", disk.name());
    }
}

fn log_requests(export: &ExportedBlock) {
    let requests = export.block.traffic().in_flight();
    if requests != 0 {
        let (id, disk) = (&export.id, export.block.disk().name());
        error!("{disk}: {requests} requests of the export {id} have not been answered");
    }
}

/// Export in use, and the progress of its storage.
struct User {
    export: ExportedBlock,
    state: StorageState,
    /// Time of the last check in which the storage had answered a request, or had none.
    since: Instant,
}

/// State of the storage of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StorageState {
    answered: u64,
    in_flight: u64,
    /// Number of cancelled writes that the storage may still execute.
    orphans: usize,
}

impl StorageState {
    fn of(export: &ExportedBlock) -> Self {
        let traffic = export.block.traffic();
        let (answered, in_flight) = (traffic.answered, traffic.in_flight());
        Self { answered, in_flight, orphans: export.block.disk().orphans() }
    }

    /// True if the storage has answered a request since the state `before`, or has none.
    fn has_progress(self, before: Self) -> bool {
        let is_idle = self.in_flight == 0 && self.orphans == 0;
        is_idle || self.answered != before.answered || self.orphans < before.orphans
    }
}

impl User {
    fn new(export: ExportedBlock, now: Instant) -> Self {
        let state = StorageState::of(&export);
        Self { export, state, since: now }
    }

    /// True if the export's queues are open: its threads end when no program uses it any more.
    fn is_in_use(&self) -> bool {
        self.export.block.traffic().queues > 0
    }

    /// True if the storage has not answered for `limit`.
    fn hangs(&mut self, now: Instant, limit: Duration) -> bool {
        let state = StorageState::of(&self.export);
        if state.has_progress(std::mem::replace(&mut self.state, state)) {
            self.since = now;
        }
        now.saturating_duration_since(self.since) >= limit
    }
}

/// True if an export is in use, and the storage of each one in use has not answered for `limit`.
fn all_hang(users: &mut [User], now: Instant, limit: Duration) -> bool {
    let in_use = users.iter_mut().filter(|user| user.is_in_use());
    let hang: Vec<_> = in_use.map(|user| user.hangs(now, limit)).collect();
    !hang.is_empty() && hang.iter().all(|hangs| *hangs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_block::{BlockDevice, BlockOptions, BlockQueue};
    use shadowbell_testing::test_disk::TestDisk;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    // The tests compute with times and do not wait.
    const LIMIT: Duration = Duration::from_secs(5);

    fn export(disk: &TestDisk) -> ExportedBlock {
        let block = BlockDevice::new(Arc::new(disk.clone()), &BlockOptions::default()).unwrap();
        ExportedBlock { id: "e".to_owned(), block }
    }

    #[test]
    fn storage_without_an_answer_hangs() {
        let state = |answered, in_flight, orphans| StorageState { answered, in_flight, orphans };
        for (before, now, has_progress) in [
            (state(1, 2, 0), state(1, 2, 0), false),
            (state(1, 2, 0), state(2, 1, 0), true),
            (state(1, 0, 0), state(1, 1, 0), false),
            (state(1, 2, 0), state(1, 0, 0), true),
            // A timeout has cancelled the write, which the storage may still execute.
            (state(1, 1, 0), state(1, 0, 1), false),
            (state(1, 0, 2), state(1, 0, 1), true),
        ] {
            assert_eq!(now.has_progress(before), has_progress, "{before:?} {now:?}");
        }
    }

    /// The limit applies only while each export in use waits for its storage.
    #[test]
    fn users_of_healthy_storage_are_waited_for() {
        let (hung, healthy) = (TestDisk::new(64, 512), TestDisk::new(64, 512));
        let exports = [&hung, &healthy].map(export);
        let queues = [&exports[0], &exports[1]].map(|export| export.block.queue().unwrap());
        let (start, at) = (Instant::now(), |seconds| Duration::from_secs(seconds));
        let mut users: Vec<_> = exports.into_iter().map(|one| User::new(one, start)).collect();
        assert!(!all_hang(&mut users, start + at(9), LIMIT), "no request is in flight");
        hung.instruct(|instructions| instructions.hold = true);
        let [used, other] = queues;
        let writer: BlockQueue = used.clone();
        let mut write = pin!(async move { writer.write(0, &[7; 512], false).await });
        assert!(write.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(!all_hang(&mut users, start + at(13), LIMIT), "the limit has not expired");
        assert!(!all_hang(&mut users, start + at(14), LIMIT), "the other export is in use");
        drop(other);
        assert!(all_hang(&mut users, start + at(14), LIMIT));
        hung.instruct(|instructions| instructions.hold = false);
        used.block_on(write).unwrap();
        assert!(!all_hang(&mut users, start + at(99), LIMIT), "the storage has answered");
        drop(used);
        assert!(!all_hang(&mut users, start + at(999), LIMIT), "no export is in use");
    }
}
