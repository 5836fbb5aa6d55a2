//! Interface of the control socket to the server.

use crate::control::api::{LimitSpec, Namespace};
use crate::limits::DiskLimits;
use crate::serve::config_file::Settings;
use crate::serve::disks::id_of;
use crate::serve::reconfigure::Changes;
use crate::serve::registry::{Registry, ServedController};
use crate::serve::tracer::Tracer;
use crate::serve::worker_link::Asker;
use crate::uuid_text::uuid_text;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// The part of the server that requests read and control.
pub(in crate::serve) struct ServerState {
    pub(in crate::serve) name: String,
    /// Start of the counters.
    pub(in crate::serve) began: Instant,
    /// Time at which this process began to serve.
    pub(in crate::serve) serves_since: Instant,
    pub(in crate::serve) workers: usize,
    pub(in crate::serve) supervisor_pid: Option<u32>,
    pub(in crate::serve) controllers: Arc<Registry>,
    pub(in crate::serve) changes: Arc<Changes>,
    /// Server-wide settings.
    pub(in crate::serve) settings: Settings,
    /// Ends the service.
    pub(in crate::serve) end: Box<dyn Fn() + Send + Sync>,
    /// Reason for the failure of the last upgrade.
    pub(in crate::serve) upgrade_error: Arc<Mutex<Option<String>>>,
    pub(in crate::serve) tracer: Arc<Tracer>,
    /// Connection to the supervisor, for a sandboxed process.
    pub(in crate::serve) asks: Option<Asker>,
}

/// Current namespaces of a controller.
pub(super) fn namespaces_of(
    served: &ServedController,
) -> impl Iterator<Item = Namespace> + use<'_> {
    let asked = served.asked();
    let id = {
        let asked = Arc::clone(&asked);
        move |at: usize, nsid| {
            let disk = asked.controller.disks.get(at)?;
            Some(id_of(&served.id, nsid, disk))
        }
    };
    let limits = move |at: usize| {
        let disk = asked.controller.disks.get(at)?;
        let (_, limits) = DiskLimits::split(&disk.disk).ok()?;
        (!limits.is_none()).then(|| LimitSpec::of(&limits))
    };
    served.controller.namespaces().into_iter().enumerate().map(move |(at, (nsid, namespace))| {
        let info = namespace.disk.info();
        let counters = namespace.disk.counters().into_iter();
        Namespace {
            controller: served.id.clone(),
            nsid,
            disk_id: id(at, nsid).unwrap_or_default(),
            disk: namespace.disk.name(),
            bytes: info.bytes(),
            block_size: info.block_size,
            read_only: info.read_only,
            uuid: uuid_text(&namespace.uuid),
            limits: limits(at),
            counters: counters.map(|(name, count)| (name.to_owned(), count)).collect(),
        }
    })
}
