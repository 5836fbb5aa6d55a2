//! Limit of open files: the number of files that clients may still need is counted, and
//! controllers, disks and exports that would exceed the limit are refused.

use super::reconfigure::Changes;
use super::registry::ServedController;
use shadowbell_config::export_config::{ExportConfig, MAX_DEFAULT_QUEUES};
use shadowbell_disk::Disk;
use shadowbell_process::{descriptor_limit, exit};
use std::sync::Arc;

/// Number of open files for requests of the control socket.
pub(super) const OF_REQUESTS: u64 = 16;
/// Minimum number of open files of a client: sockets, memory, interrupts.
pub(super) const OF_CLIENT: u64 = 16;
/// Number of open files of an export's queue, in addition to those of its disk queue: doorbell,
/// interrupt, error and epoll.
const OF_EXPORT_QUEUE: u64 = 4;
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

/// Number of open files that the clients of an export may need. Each queue of a guest has a thread
/// that opens its own queue of the disk. An NBD client opens a few connections, and the thread of
/// each connection also opens its own queue.
fn of_export(export: &ExportConfig, disk: Option<Arc<dyn Disk>>) -> u64 {
    let queues = u64::from(export.queues.unwrap_or(MAX_DEFAULT_QUEUES));
    OF_CLIENT + queues * OF_EXPORT_QUEUE + of_queues(disk, queues)
}

impl Changes {
    /// Number of open files that clients of all controllers and exports may still need.
    fn needed_files(&self) -> u64 {
        let (threads, exports) = (self.workers(), self.exports().wanted());
        let controllers = self.registry().all();
        let controllers = controllers.iter().map(|served| of_controller(served, threads));
        let exports = exports.iter().map(|export| self.files_of_export(export));
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

    /// Number of open files that the clients of an export may need.
    fn files_of_export(&self, export: &ExportConfig) -> u64 {
        of_export(export, self.disk(&export.disk).ok().map(|disk| disk.open.disk))
    }

    /// Checks that the limit leaves room for the clients of an export that is added.
    ///
    /// # Errors
    /// As for [`check_files`](Self::check_files).
    pub(super) fn check_files_of_export(&self, added: &ExportConfig) -> anyhow::Result<()> {
        self.check_files(self.files_of_export(added))
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

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_disk_file::MemDisk;

    /// Each queue of an export has a thread that opens a queue of the disk.
    #[test]
    fn the_queues_of_an_export_are_counted() {
        let disk: Arc<dyn Disk> = Arc::new(MemDisk::new(8, 512).unwrap());
        let export = |queues| ExportConfig { queues: Some(queues), ..ExportConfig::default() };
        let of = |queues| of_export(&export(queues), Some(Arc::clone(&disk)));
        assert_eq!(of(16) - of(1), 15 * (OF_EXPORT_QUEUE + disk.queue_files()));
    }
}
