//! What the control socket sees of the server.

use crate::control::api::{LimitSpec, Namespace};
use crate::limits::DiskLimits;
use crate::serve::changes::Changes;
use crate::serve::config_file::Settings;
use crate::serve::registry::{Registry, ServedController};
use crate::serve::tracer::Tracer;
use crate::serve::worker_link::Asker;
use crate::uuid_text::uuid_text;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// What the control socket sees of the server, and can do with it.
pub(in crate::serve) struct View {
    pub(in crate::serve) name: String,
    /// When the counters began.
    pub(in crate::serve) began: Instant,
    /// When this process began to serve.
    pub(in crate::serve) serves_since: Instant,
    pub(in crate::serve) workers: usize,
    pub(in crate::serve) keeper_pid: Option<u32>,
    pub(in crate::serve) controllers: Arc<Registry>,
    pub(in crate::serve) changes: Arc<Changes>,
    /// What is not of its controllers.
    pub(in crate::serve) settings: Settings,
    /// Ends the service.
    pub(in crate::serve) end: Box<dyn Fn() + Send + Sync>,
    /// Why the last upgrade has failed.
    pub(in crate::serve) upgrade_error: Arc<Mutex<Option<String>>>,
    pub(in crate::serve) tracer: Arc<Tracer>,
    /// The way to the keeper, if that is the only one.
    pub(in crate::serve) asks: Option<Asker>,
}

/// The namespaces of a controller, as they are now.
pub(super) fn namespaces_of(
    served: &ServedController,
) -> impl Iterator<Item = Namespace> + use<'_> {
    let asked = served.asked();
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
