//! Exports that are served, and those to serve.

use parking_lot::{Mutex, MutexGuard};
use shadowbell_block::BlockDevice;
use shadowbell_config::export_config::{ExportConfig, Mounted};
use shadowbell_export::fuse::{Mount, Session};
use shadowbell_export::nbd::Server;
use shadowbell_export::ublk::Ublk;
use shadowbell_export::vhost::VhostUserBlk;
use shadowbell_process::exit;
use shadowbell_tls::ServerTls;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use tracing::{info, warn};

/// An export that is served.
pub(super) struct RunningExport {
    pub(super) config: ExportConfig,
    pub(super) block: BlockDevice,
    pub(super) device: ExportDevice,
}

/// Threads and sockets of an export.
pub(super) enum ExportDevice {
    Nbd(Server),
    VhostUserBlk(VhostUserBlk),
    /// Session and path of the file.
    Fuse(Session, PathBuf),
    Ublk(Box<Ublk>),
}

impl ExportDevice {
    /// Address for clients, as in the configuration.
    pub(super) fn address(&self) -> String {
        match self {
            Self::Nbd(server) => server.address().to_string(),
            Self::VhostUserBlk(device) => device.path().display().to_string(),
            Self::Fuse(_, path) => path.display().to_string(),
            Self::Ublk(device) => device.path().display().to_string(),
        }
    }

    /// Number of requests that failed because of the disk.
    pub(super) fn failures(&self) -> u64 {
        match self {
            Self::Nbd(server) => server.failures(),
            Self::VhostUserBlk(device) => device.failures(),
            Self::Fuse(session, _) => session.failures(),
            Self::Ublk(device) => device.failures(),
        }
    }

    /// Completes the requests in flight and disconnects the clients. Returns the number of requests
    /// that failed because of the disk.
    pub(super) fn stop(self) -> u64 {
        match self {
            Self::Nbd(server) => server.stop(),
            Self::VhostUserBlk(device) => device.stop(),
            Self::Fuse(session, _) => session.stop(),
            Self::Ublk(device) => device.stop(),
        }
    }
}

/// Exports of the server.
#[derive(Default)]
pub(super) struct Exports {
    pub(super) running: Mutex<BTreeMap<String, RunningExport>>,
    /// Exports to start: of the configuration, or of the dead process.
    wanted: Mutex<Vec<ExportConfig>>,
    /// Descriptors of `/dev/fuse` by the id of the export.
    devices: Mutex<Devices>,
    unused: Arc<Unused>,
}

/// End of a server whose exports have all ended by themselves: other programs have unmounted the
/// files and removed the devices.
#[derive(Default)]
struct Unused {
    ended: AtomicUsize,
    /// Number of exports, and the end of the server.
    end: OnceLock<(usize, Box<dyn Fn() + Send + Sync>)>,
}

/// FUSE files that this server has mounted, by the id of the export.
#[derive(Default)]
pub(super) struct OwnMounts(Vec<(String, Mount)>);

impl OwnMounts {
    /// Mounts the files of these exports. Also returns the descriptors of `/dev/fuse`.
    ///
    /// # Errors
    /// A file cannot be mounted. No file is.
    pub(super) fn new(exports: &mut [ExportConfig]) -> anyhow::Result<(Self, Devices)> {
        let (mut all, mut devices) = (Self::default(), Devices::new());
        for export in exports {
            let (Some(path), Mounted::ByServer { .. }) = (&export.fuse, export.mounted) else {
                continue;
            };
            let mounted = Mount::new(path, export.read_only);
            let (mount, device) = mounted.inspect_err(|_| all.undo()).map_err(exit::bad_input)?;
            export.fuse = Some(mount.path().to_owned());
            export.mounted = Mounted::ByServer { created: mount.has_created() };
            devices.insert(export.id.clone(), device);
            all.0.push((export.id.clone(), mount));
        }
        Ok((all, devices))
    }

    /// Files that a dead process of this server has mounted.
    pub(super) fn recover(exports: &[ExportConfig]) -> Self {
        let all = exports.iter().filter_map(|export| match (&export.fuse, export.mounted) {
            (Some(path), Mounted::ByServer { created }) => {
                Some((export.id.clone(), Mount::at(path, created)))
            }
            _ => None,
        });
        Self(all.collect())
    }

    /// Unmounts the files before they were served.
    pub(super) fn undo(&self) {
        for (_, mount) in &self.0 {
            mount.unmount();
            mount.remove_file();
        }
    }

    /// Unmounts the files, and waits until no program uses them.
    pub(super) fn end(self, exports: &Exports) {
        for (id, mount) in self.0 {
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

/// Certificates by directory, with or without clients that have none.
static CERTIFICATES: Mutex<BTreeMap<(PathBuf, bool), ServerTls>> = Mutex::new(BTreeMap::new());

/// Reads the certificates of these exports, which the sandbox makes unreadable.
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
    ServerTls::load(directory, any_client).map_err(exit::bad_input)
}

/// Certificates of an export. They are read again if possible, since they may have been renewed.
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
        *self.wanted.lock() = exports;
    }

    /// Exports to start, or that run.
    pub(super) fn wanted(&self) -> Vec<ExportConfig> {
        self.wanted.lock().clone()
    }

    /// Descriptors of `/dev/fuse` by the id of the export.
    pub(super) fn devices(&self) -> MutexGuard<'_, Devices> {
        self.devices.lock()
    }

    /// Calls `end` when all wanted exports have ended by themselves.
    pub(super) fn end_when_unused(&self, end: impl Fn() + Send + Sync + 'static) {
        let _ = self.unused.end.set((self.wanted.lock().len(), Box::new(end)));
    }

    /// Function to call when an export has ended by itself, for the reason `why`.
    pub(super) fn on_end(&self, why: String) -> impl FnOnce() + Send + 'static + use<> {
        let unused = Arc::clone(&self.unused);
        move || {
            info!("{why}");
            let ended = unused.ended.fetch_add(1, Ordering::AcqRel) + 1;
            if let Some((count, end)) = unused.end.get()
                && *count == ended
            {
                end();
            }
        }
    }

    /// True if there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.running.lock().is_empty()
    }

    /// Calls `each` with every export.
    pub(super) fn map<T>(&self, each: impl FnMut(&RunningExport) -> T) -> Vec<T> {
        self.running.lock().values().map(each).collect()
    }

    /// Ids of the exports of a disk.
    pub(super) fn of(&self, disk: &str) -> Vec<String> {
        let running = self.running.lock();
        let its = running.values().filter(|export| export.config.disk == disk);
        its.map(|export| export.config.id.clone()).collect()
    }

    /// Ends all exports: requests in flight are completed, and clients disconnected.
    pub(super) fn stop(&self) {
        let running = std::mem::take(&mut *self.running.lock());
        for (id, export) in running {
            warn_of_failures(&id, export.device.stop());
        }
    }
}
