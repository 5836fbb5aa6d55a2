//! Open disks that no controller has, and the ids of disks.

use anyhow::anyhow;
use parking_lot::Mutex;
use shadowbell_config::controller_config::DiskConfig;
use shadowbell_config::limits::{self, DiskLimits};
use shadowbell_disk::Disk;
use shadowbell_process::exit;
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

/// Id of a namespace's disk that has no configured id.
pub(super) fn derived_id(controller: &str, nsid: u32) -> String {
    format!("{controller}/{nsid}")
}

/// Id of a namespace's disk.
pub(super) fn id_of(controller: &str, nsid: u32, disk: &DiskConfig) -> String {
    disk.id.clone().unwrap_or_else(|| derived_id(controller, nsid))
}

/// Refuses a disk specification of a request that names a limit group which does not exist.
pub(super) fn check_group(spec: &str) -> anyhow::Result<()> {
    let (_, limits) = DiskLimits::split(spec).unwrap_or_default();
    match limits.group.filter(|name| limits::existing(name).is_none()) {
        Some(name) => Err(missing_group(&name)),
        None => Ok(()),
    }
}

/// Error about a limit group that does not exist.
pub(super) fn missing_group(name: &str) -> anyhow::Error {
    exit::not_found(anyhow!(
        "there is no limit group `{name}`; `shadowbell ctl limit-group ls` lists them, and `shadowbell \
         ctl limit-group add` creates one"
    ))
}
