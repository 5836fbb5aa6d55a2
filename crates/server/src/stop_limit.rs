//! Time limit within which the process ends, even if its storage does not answer.

use super::server::Server;
use shadowbell_disk::Disk;
use shadowbell_process::{exit, logging};
use std::convert::Infallible;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;
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
        let (ends, ended) = channel();
        let (controllers, disks) = (server.controllers(), server.disks());
        let watch = move || {
            if has_ended(&ended, limit.mul_f64(0.8)) {
                return;
            }
            error!("the storage has not answered all requests within {} s", limit.as_secs());
            controllers.iter().for_each(|served| served.controller.log_pending());
            disks.iter().for_each(|disk| log_orphans(&**disk));
            // During this wait, the I/O threads log their requests in flight.
            if has_ended(&ended, limit.mul_f64(0.1)) {
                return;
            }
            logging::finish();
            std::process::exit(i32::from(exit::UNANSWERED));
        };
        let thread = thread::Builder::new().name("sb-stop-limit".into()).spawn(watch)?;
        Ok(Self { ends: Some(ends), thread: Some(thread) })
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
