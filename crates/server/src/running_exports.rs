//! Running exports, and the exports of the configuration that are to run.

use super::guard::{Effect, Loss};
use anyhow::anyhow;
use parking_lot::{Mutex, MutexGuard};
use shadowbell_block::BlockDevice;
use shadowbell_config::export_config::{ExportConfig, Mounted};
use shadowbell_config::server_config::NamedDisk;
use shadowbell_export::fuse::{Mount, MountError, Session};
use shadowbell_export::nbd::Server;
use shadowbell_export::ublk::Ublk;
use shadowbell_export::vhost::VhostUserBlk;
use shadowbell_process::exit;
use shadowbell_storage::disk_files;
use shadowbell_tls::ServerTls;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tracing::{info, warn};

/// An export that runs.
pub(super) struct RunningExport {
    pub(super) config: ExportConfig,
    pub(super) block: BlockDevice,
    pub(super) device: ExportDevice,
}

/// Block device of an export.
pub(super) struct ExportedBlock {
    /// Id of the export.
    pub(super) id: String,
    pub(super) block: BlockDevice,
}

/// Threads and sockets of an export.
pub(super) enum ExportDevice {
    Nbd(Server),
    VhostUserBlk(VhostUserBlk),
    /// FUSE session and path of the mounted file.
    Fuse(Session, PathBuf),
    Ublk(Box<Ublk>),
}

impl ExportDevice {
    /// Address of the export for clients, as in the configuration.
    pub(super) fn address(&self) -> String {
        match self {
            Self::Nbd(server) => server.address().to_string(),
            Self::VhostUserBlk(device) => device.path().display().to_string(),
            Self::Fuse(_, path) => path.display().to_string(),
            Self::Ublk(device) => device.path().display().to_string(),
        }
    }

    /// Number of requests that failed with an error of the disk.
    pub(super) fn failures(&self) -> u64 {
        match self {
            Self::Nbd(server) => server.failures(),
            Self::VhostUserBlk(device) => device.failures(),
            Self::Fuse(session, _) => session.failures(),
            Self::Ublk(device) => device.failures(),
        }
    }

    /// Completes the requests in flight and disconnects the clients. Requests that a stopped disk
    /// holds are left to the next process. Returns the number of requests that failed with an error
    /// of the disk.
    pub(super) fn stop(self) -> u64 {
        match self {
            Self::Nbd(server) => server.stop(),
            Self::VhostUserBlk(device) => device.stop(),
            Self::Fuse(session, _) => session.leave(),
            Self::Ublk(device) => device.stop(),
        }
    }
}

impl RunningExport {
    fn block_of(&self) -> ExportedBlock {
        ExportedBlock { id: self.config.id.clone(), block: self.block.clone() }
    }

    /// True if a client uses the export. A mounted FUSE file and a ublk device are in use.
    pub(super) fn has_client(&self) -> bool {
        match &self.device {
            ExportDevice::Nbd(_) | ExportDevice::VhostUserBlk(_) => self.block.traffic().queues > 0,
            ExportDevice::Fuse(session, _) => !session.is_over(),
            ExportDevice::Ublk(_) => true,
        }
    }
}

/// Exports of the server.
#[derive(Default)]
pub(super) struct Exports {
    pub(super) running: Mutex<BTreeMap<String, RunningExport>>,
    /// Descriptors of `/dev/fuse` by the id of the export.
    devices: Mutex<Devices>,
    unused: Arc<Unused>,
    /// Target of `shadowbell export`, as written on the command line.
    pub(super) target: OnceLock<String>,
}

/// State that is used to end a server when all its exports have ended by themselves, because other
/// programs have unmounted the files or removed the devices.
#[derive(Default)]
struct Unused {
    /// Exports that run or are to run: those of the configuration or of the dead process, and added
    /// ones.
    wanted: Mutex<Vec<ExportConfig>>,
    /// Ids of the exports that have ended by themselves.
    ended: Mutex<BTreeSet<String>>,
    /// Function that ends the server.
    end: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Maximum wait for the end of a FUSE session after its file was unmounted.
const UNMOUNTED: Duration = Duration::from_secs(2);

/// FUSE files that this server has mounted, with the ids of their exports. A drop unmounts them,
/// unless another process is to recover them.
#[derive(Default)]
pub(super) struct OwnMounts {
    all: Vec<(String, Mount)>,
    is_recoverable: bool,
}

impl Drop for OwnMounts {
    fn drop(&mut self) {
        if !self.is_recoverable {
            self.undo();
        }
    }
}

impl OwnMounts {
    /// Mounts the files of these exports. The files must not be files of the `disks`. Also returns
    /// the descriptors of `/dev/fuse`.
    ///
    /// # Errors
    /// A file cannot be mounted. No file stays mounted then.
    pub(super) fn new(
        exports: &mut [ExportConfig],
        disks: &[NamedDisk],
    ) -> anyhow::Result<(Self, Devices)> {
        let (mut all, mut devices) = (Self::default(), Devices::new());
        for export in exports {
            let (Some(path), Mounted::ByServer { .. }) = (&export.fuse, export.mounted) else {
                continue;
            };
            if disks.iter().any(|disk| disk_files::uses(&disk.spec, Path::new(""), path)) {
                return Err(exit::bad_input(anyhow!(
                    "{} is the file of the disk: name another file for the mount",
                    path.display()
                )));
            }
            let mounted = match Mount::new(path, export.read_only) {
                // The file is still mounted, although the process that mounted it was killed.
                Err(MountError::Dead(path)) => {
                    Mount::at(&path, false).unmount();
                    Mount::new(&path, export.read_only)
                }
                mounted => mounted,
            };
            let (mount, device) = mounted.map_err(exit::unusable)?;
            export.fuse = Some(mount.path().to_owned());
            export.mounted = Mounted::ByServer { created: mount.has_created() };
            devices.insert(export.id.clone(), device);
            all.all.push((export.id.clone(), mount));
        }
        Ok((all, devices))
    }

    /// Returns the files that a dead process of this server has mounted.
    pub(super) fn recover(exports: &[ExportConfig]) -> Self {
        let all = exports.iter().filter_map(|export| match (&export.fuse, export.mounted) {
            (Some(path), Mounted::ByServer { created }) => {
                Some((export.id.clone(), Mount::at(path, created)))
            }
            _ => None,
        });
        Self { all: all.collect(), is_recoverable: true }
    }

    /// Keeps the files mounted if this process fails, because another one recovers them.
    pub(super) fn set_recoverable(&mut self) {
        self.is_recoverable = true;
    }

    fn undo(&self) {
        for (_, mount) in &self.all {
            mount.unmount();
            mount.remove_file();
        }
    }

    /// Unmounts the files, and waits until the programs that use them have closed them.
    pub(super) fn end(mut self, exports: &Exports) {
        for (id, mount) in std::mem::take(&mut self.all) {
            let running = exports.running.lock().remove(&id);
            let session = match running.map(|export| export.device) {
                Some(ExportDevice::Fuse(session, _)) => Some(session),
                _ => None,
            };
            if !session.as_ref().is_some_and(Session::is_over) {
                mount.unmount();
            }
            if let Some(session) = session {
                warn_of_failures(&id, session.finish());
            }
            mount.remove_file();
        }
    }
}

/// Descriptors of `/dev/fuse` by the id of the export.
pub(super) type Devices = BTreeMap<String, OwnedFd>;

fn warn_of_failures(id: &str, failures: u64) {
    if failures > 0 {
        warn!("export {id}: {failures} requests failed");
    }
}

/// Certificates by their directory, and whether clients without a certificate are accepted.
static CERTIFICATES: Mutex<BTreeMap<(PathBuf, bool), ServerTls>> = Mutex::new(BTreeMap::new());

/// Reads the certificates of these exports before the sandbox makes them unreadable.
///
/// # Errors
/// Certificates cannot be read.
pub(super) fn read_certificates(exports: &[ExportConfig]) -> anyhow::Result<()> {
    for export in exports {
        if let Some(directory) = &export.tls_certificates {
            let tls = certificates(directory, export.tls_any_client)?;
            CERTIFICATES.lock().insert((directory.clone(), export.tls_any_client), tls);
        }
    }
    Ok(())
}

fn certificates(directory: &Path, any_client: bool) -> anyhow::Result<ServerTls> {
    ServerTls::load(directory, any_client).map_err(exit::unusable)
}

/// Returns the certificates of an export. The files are read again if possible, because they may
/// have been renewed.
pub(super) fn tls_of(export: &ExportConfig) -> anyhow::Result<Option<ServerTls>> {
    let Some(directory) = &export.tls_certificates else { return Ok(None) };
    let known = (directory.clone(), export.tls_any_client);
    certificates(directory, export.tls_any_client)
        .or_else(|error| CERTIFICATES.lock().get(&known).cloned().ok_or(error))
        .map(Some)
}

impl Exports {
    /// Sets the exports that [`Changes::start_exports`] starts.
    pub(super) fn set_wanted(&self, exports: Vec<ExportConfig>) {
        *self.unused.wanted.lock() = exports;
    }

    /// Exports that run or are to run.
    pub(super) fn wanted(&self) -> Vec<ExportConfig> {
        self.unused.wanted.lock().clone()
    }

    /// Descriptors of `/dev/fuse` by the id of the export.
    pub(super) fn devices(&self) -> MutexGuard<'_, Devices> {
        self.devices.lock()
    }

    /// Calls `end` when all wanted exports have ended by themselves.
    pub(super) fn end_when_unused(&self, end: impl Fn() + Send + Sync + 'static) {
        let _ = self.unused.end.set(Box::new(end));
    }

    /// Returns a function for the export `id`, which is about to start. The export calls the
    /// function when it has ended by itself. `why`: reason for the log.
    pub(super) fn on_end(&self, id: &str, why: String) -> impl FnOnce() + Send + 'static + use<> {
        let (unused, id) = (Arc::clone(&self.unused), id.to_owned());
        unused.ended.lock().remove(&id);
        move || {
            info!("{why}");
            let wanted = unused.wanted.lock();
            let mut ended = unused.ended.lock();
            ended.insert(id);
            if let Some(end) = unused.end.get()
                && wanted.iter().all(|export| ended.contains(&export.id))
            {
                end();
            }
        }
    }

    /// True if no export runs.
    pub(super) fn is_empty(&self) -> bool {
        self.running.lock().is_empty()
    }

    /// Calls `each` with every running export.
    pub(super) fn map<T>(&self, each: impl FnMut(&RunningExport) -> T) -> Vec<T> {
        self.running.lock().values().map(each).collect()
    }

    /// Ids of the running exports of a disk.
    pub(super) fn of(&self, disk: &str) -> Vec<String> {
        let running = self.running.lock();
        let its = running.values().filter(|export| export.config.disk == disk);
        its.map(|export| export.config.id.clone()).collect()
    }

    /// Losses of the clients of the disk's exports by a change with this effect.
    pub(super) fn losses(&self, disk: &str, effect: &Effect) -> Vec<Loss> {
        let running = self.running.lock();
        let its = running.values().filter(|export| export.config.disk == disk);
        let its = its.filter(|export| export.has_client());
        let loss = |export: &RunningExport| {
            // Clients of a FUSE file lose nothing: the mount stays while its session is replaced.
            let stays =
                *effect == Effect::Reconnect && matches!(export.device, ExportDevice::Fuse(..));
            let what = effect.on_export(export.config.read_only).filter(|_| !stays)?;
            Some(Loss::of_export(&export.config.id, what))
        };
        its.filter_map(loss).collect()
    }

    /// Loss of the clients of the export `id` by its removal.
    pub(super) fn loss(&self, id: &str) -> Option<Loss> {
        let running = self.running.lock();
        let export = running.get(id)?;
        // For a FUSE file there is no loss, because the removal of a mounted one is always refused.
        let is_file = matches!(export.device, ExportDevice::Fuse(..));
        let what = || format!("would lose the disk {}", export.config.disk);
        (export.has_client() && !is_file).then(|| Loss::of_export(id, what()))
    }

    /// Path of the export's FUSE file if it is mounted, or programs use it.
    pub(super) fn file_in_use(&self, id: &str) -> Option<PathBuf> {
        match &self.running.lock().get(id)?.device {
            ExportDevice::Fuse(session, path) => {
                (!session.is_over_within(UNMOUNTED)).then(|| path.clone())
            }
            _ => None,
        }
    }

    /// Ends the exports of FUSE files that `ctl` has mounted: waits until they are unmounted and no
    /// program uses them. If the server `can_unmount`, it unmounts them itself.
    pub(super) fn finish_files(&self, can_unmount: bool) {
        let all = std::mem::take(&mut *self.running.lock());
        for (id, export) in all {
            let ExportDevice::Fuse(session, path) = export.device else {
                self.running.lock().insert(id, export);
                continue;
            };
            if can_unmount && !session.is_over() {
                Mount::at(&path, false).unmount();
            }
            if !session.is_over_within(UNMOUNTED) {
                warn!(
                    "{} is mounted, waiting for its users and `umount`; a second signal ends at once",
                    path.display()
                );
            }
            warn_of_failures(&id, session.finish());
        }
    }

    /// Block devices of the exports.
    pub(super) fn blocks(&self) -> Vec<ExportedBlock> {
        self.map(RunningExport::block_of)
    }

    /// Block devices of the mounted files and ublk devices. Programs of this machine may use them.
    pub(super) fn local_blocks(&self) -> Vec<ExportedBlock> {
        let running = self.running.lock();
        let is_local = |export: &&RunningExport| {
            matches!(export.device, ExportDevice::Fuse(..) | ExportDevice::Ublk(_))
        };
        running.values().filter(is_local).map(RunningExport::block_of).collect()
    }

    /// Waits until no program uses the ublk devices, and removes them.
    pub(super) fn stop_block_devices(&self) {
        let all = std::mem::take(&mut *self.running.lock());
        for (id, export) in all {
            match export.device {
                ExportDevice::Ublk(device) => warn_of_failures(&id, device.stop()),
                _ => drop(self.running.lock().insert(id, export)),
            }
        }
    }

    /// Ends all exports. Requests in flight are completed, and clients are disconnected.
    pub(super) fn stop(&self) {
        let running = std::mem::take(&mut *self.running.lock());
        for (id, export) in running {
            warn_of_failures(&id, export.device.stop());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn the_server_ends_when_all_wanted_exports_have_ended() {
        let export = |id: &str| ExportConfig { id: id.to_owned(), ..ExportConfig::default() };
        let exports = Exports::default();
        exports.set_wanted(vec![export("nbd"), export("fuse")]);
        let ends = Arc::<AtomicUsize>::default();
        let count = Arc::clone(&ends);
        exports.end_when_unused(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let ends = || ends.load(Ordering::Relaxed);
        let end = |id: &str| exports.on_end(id, String::new())();
        end("fuse");
        // An export that is added later is expected to end as well. Its second end is not counted.
        exports.set_wanted(vec![export("nbd"), export("fuse"), export("more")]);
        end("more");
        end("more");
        assert_eq!(ends(), 0);
        // The export has been started again, so the server waits for its end again.
        let more = exports.on_end("more", String::new());
        end("nbd");
        assert_eq!(ends(), 0);
        more();
        assert_eq!(ends(), 1);
    }
}
