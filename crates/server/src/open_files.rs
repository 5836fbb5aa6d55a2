//! Limit of open files: the number of files that clients may still need is counted, and
//! controllers, disks and exports that would exceed the limit are refused.

use super::reconfigure::Changes;
use super::registry::ServedController;
use shadowbell_disk::Disk;
use shadowbell_process::{descriptor_limit, exit};
use std::sync::Arc;

/// Number of open files for requests of the control socket.
pub(super) const OF_REQUESTS: u64 = 16;
/// Minimum number of open files of a client: sockets, memory, interrupts.
pub(super) const OF_CLIENT: u64 = 16;
/// Number of open files of a disk, without its queues.
pub(super) const OF_DISK: u64 = 2;

/// Number of open files of the queues that `threads` threads may open on each disk.
fn of_queues(disks: impl IntoIterator<Item = Arc<dyn Disk>>, threads: u64) -> u64 {
    disks.into_iter().map(|disk| disk.queue_files()).sum::<u64>() * threads
}

/// Number of open files that the guest of a controller may still need, on `threads` I/O threads.
pub(super) fn of_controller(served: &ServedController, threads: usize) -> u64 {
    // The sockets and memory files of a connected client are open already. The files of its disk
    // queues may not be.
    let client = if served.has_client() { 0 } else { OF_CLIENT };
    client + of_queues(served.disks(), threads as u64)
}

impl Changes {
    /// Number of open files that clients of all controllers and exports may still need.
    fn needed_files(&self) -> u64 {
        let (threads, exports) = (self.workers(), self.exports().wanted());
        let controllers = self.registry().all();
        let controllers = controllers.iter().map(|served| of_controller(served, threads));
        let of_export = |id: &str| {
            let disk = self.disk(id).ok().map(|disk| disk.open.disk);
            OF_CLIENT + of_queues(disk, 1)
        };
        let exports = exports.iter().map(|export| of_export(&export.disk));
        OF_REQUESTS + controllers.chain(exports).sum::<u64>()
    }

    /// Number of open files that remain for further controllers, disks and exports. `None` without
    /// a limit.
    pub(super) fn files_left(&self) -> Option<u64> {
        descriptor_limit::room().map(|room| room.saturating_sub(self.needed_files()))
    }

    /// Checks that the limit leaves room for `more` open files, in addition to those that clients
    /// may need already.
    ///
    /// # Errors
    /// The limit of open files is too low.
    pub(super) fn check_files(&self, more: u64) -> anyhow::Result<()> {
        descriptor_limit::check_room(self.needed_files() + more).map_err(exit::conflict)
    }

    /// Checks that the limit leaves room for the guest of a controller that is added.
    ///
    /// # Errors
    /// As for [`check_files`](Self::check_files).
    pub(super) fn check_files_of_controller(&self, added: &ServedController) -> anyhow::Result<()> {
        self.check_files(of_controller(added, self.workers()))
    }

    /// Checks that the limit leaves room for a queue per I/O thread of a disk that is added to a
    /// controller.
    ///
    /// # Errors
    /// As for [`check_files`](Self::check_files).
    pub(super) fn check_files_of(&self, disk: &Arc<dyn Disk>) -> anyhow::Result<()> {
        self.check_files(of_queues([Arc::clone(disk)], self.workers() as u64))
    }
}
