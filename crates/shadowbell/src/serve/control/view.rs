//! What the control socket sees of the server.

use crate::control::api::Namespace;
use crate::serve::changes::Changes;
use crate::serve::registry::{Registry, ServedController};
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
    /// Ends the service.
    pub(in crate::serve) end: Box<dyn Fn() + Send + Sync>,
    /// Why the last upgrade has failed.
    pub(in crate::serve) upgrade_error: Arc<Mutex<Option<String>>>,
}

/// The namespaces of a controller, as they are now.
pub(super) fn namespaces_of(served: &ServedController) -> impl Iterator<Item = Namespace> {
    served.controller.namespaces().into_iter().map(|(nsid, namespace)| {
        let info = namespace.disk.info();
        let counters = namespace.disk.counters().into_iter();
        Namespace {
            controller: served.id.clone(),
            nsid,
            disk: namespace.disk.name(),
            bytes: info.bytes(),
            block_size: info.block_size,
            read_only: info.read_only,
            uuid: uuid(&namespace.uuid),
            counters: counters.map(|(name, count)| (name.to_owned(), count)).collect(),
        }
    })
}

/// A UUID as people write it.
fn uuid(bytes: &[u8; 16]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let groups = [0..8, 8..12, 12..16, 16..20, 20..32];
    groups.map(|group| digits.get(group).unwrap_or_default()).join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_in_groups() {
        let bytes = std::array::from_fn(|n| n as u8 * 17);
        assert_eq!(uuid(&bytes), "00112233-4455-6677-8899-aabbccddeeff");
    }
}
