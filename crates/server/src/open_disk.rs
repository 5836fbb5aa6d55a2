//! Open disks that no controller has, and the ids of disks.

use parking_lot::Mutex;
use shadowbell_config::controller_config::DiskConfig;
use shadowbell_disk::Disk;
use std::collections::BTreeMap;
use std::sync::Arc;

/// An open disk and its specification.
#[derive(Clone)]
pub(super) struct OpenDisk {
    pub(super) spec: String,
    pub(super) disk: Arc<dyn Disk>,
}

/// Named disks that no controller has, by id.
pub(super) type UnattachedDisks = Mutex<BTreeMap<String, OpenDisk>>;

/// Id of a disk of a controller's short form.
pub(super) fn derived_id(controller: &str, nsid: u32) -> String {
    format!("{controller}/{nsid}")
}

/// Id of a namespace's disk.
pub(super) fn id_of(controller: &str, nsid: u32, disk: &DiskConfig) -> String {
    disk.id.clone().unwrap_or_else(|| derived_id(controller, nsid))
}
