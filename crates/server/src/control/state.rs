//! Interface of the control socket to the server.

use crate::open_disk::id_of;
use crate::reconfigure::Changes;
use crate::registry::{Registry, ServedController};
use crate::tracer::Tracer;
use crate::wait_sampler::WaitSampler;
use crate::worker_link::UpgradeRequester;
use parking_lot::Mutex;
use shadowbell_config::config_file::write::Settings;
use shadowbell_config::limits::DiskLimits;
use shadowbell_config::uuid_text::uuid_text;
use shadowbell_control_api::api::{LimitSpec, Namespace};
use std::sync::Arc;
use std::time::Instant;

/// Parts of the server that requests read and change.
pub(crate) struct ServerState {
    pub(crate) name: String,
    /// Start of the counters.
    pub(crate) began: Instant,
    /// Time at which this process began to serve.
    pub(crate) serves_since: Instant,
    pub(crate) workers: usize,
    pub(crate) supervisor_pid: Option<u32>,
    pub(crate) controllers: Arc<Registry>,
    pub(crate) changes: Arc<Changes>,
    /// Server-wide settings.
    pub(crate) settings: Settings,
    /// Ends the service.
    pub(crate) end: Box<dyn Fn() + Send + Sync>,
    /// Reason why the last upgrade failed, if it did.
    pub(crate) upgrade_error: Arc<Mutex<Option<String>>>,
    pub(crate) tracer: Arc<Tracer>,
    /// Sampler of what commands wait for.
    pub(crate) waits: WaitSampler,
    /// Requester that asks the supervisor for an upgrade, which a sandboxed process cannot begin
    /// itself. `None` without a sandbox.
    pub(crate) upgrade_requester: Option<UpgradeRequester>,
}

/// Current namespaces of a controller.
pub(super) fn namespaces_of(
    served: &ServedController,
) -> impl Iterator<Item = Namespace> + use<'_> {
    let requested = served.requested();
    let id = {
        let requested = Arc::clone(&requested);
        move |at: usize, nsid| {
            let disk = requested.controller.disks.get(at)?;
            Some(id_of(&served.id, nsid, disk))
        }
    };
    let limits = move |at: usize| {
        let disk = requested.controller.disks.get(at)?;
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
