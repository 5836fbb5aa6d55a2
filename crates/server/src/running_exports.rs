//! Exports that are served, and those to serve.

use parking_lot::{Mutex, MutexGuard};
use shadowbell_block::BlockDevice;
use shadowbell_config::export_config::ExportConfig;
use shadowbell_export::fuse::Session;
use shadowbell_export::nbd::Server;
use shadowbell_export::vhost::VhostUserBlk;
use shadowbell_process::exit;
use shadowbell_tls::ServerTls;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use tracing::warn;

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
}

impl ExportDevice {
    /// Address for clients, as in the configuration.
    pub(super) fn address(&self) -> String {
        match self {
            Self::Nbd(server) => server.address().to_string(),
            Self::VhostUserBlk(device) => device.path().display().to_string(),
            Self::Fuse(_, path) => path.display().to_string(),
        }
    }

    /// Number of requests that failed because of the disk.
    pub(super) fn failures(&self) -> u64 {
        match self {
            Self::Nbd(server) => server.failures(),
            Self::VhostUserBlk(device) => device.failures(),
            Self::Fuse(session, _) => session.failures(),
        }
    }

    /// Completes the requests in flight and disconnects the clients. Returns the number of requests
    /// that failed because of the disk.
    pub(super) fn stop(self) -> u64 {
        match self {
            Self::Nbd(server) => server.stop(),
            Self::VhostUserBlk(device) => device.stop(),
            Self::Fuse(session, _) => session.stop(),
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
    devices: Mutex<BTreeMap<String, OwnedFd>>,
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
    pub(super) fn devices(&self) -> MutexGuard<'_, BTreeMap<String, OwnedFd>> {
        self.devices.lock()
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
            let failures = export.device.stop();
            if failures > 0 {
                warn!("export {id}: {failures} requests failed");
            }
        }
    }
}
