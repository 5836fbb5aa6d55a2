//! Open disks that no controller has, and the ids of disks.

use anyhow::anyhow;
use parking_lot::Mutex;
use shadowbell_config::controller_config::DiskConfig;
use shadowbell_config::disk_spec;
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

/// A disk specification, split into the options that can change at run time and the rest.
#[derive(PartialEq)]
pub(super) struct Parts {
    pub(super) bare: String,
    pub(super) limits: DiskLimits,
    pub(super) read_only: bool,
}

impl Parts {
    pub(super) fn of(spec: &str) -> Option<Self> {
        let (rest, limits) = DiskLimits::split(spec).ok()?;
        let read_only = disk_spec::is_read_only(&rest);
        let (bare, _) = disk_spec::take_option(&rest, "read-only");
        Some(Self { bare: disk_spec::with_absolute_paths(&bare), limits, read_only })
    }
}

/// True if two specifications stand for the same disk with the same properties.
pub(super) fn is_same_disk(one: &str, other: &str) -> bool {
    disk_spec::with_absolute_paths(one) == disk_spec::with_absolute_paths(other)
        || Parts::of(one).zip(Parts::of(other)).is_some_and(|(one, other)| one == other)
}

/// True if two specifications differ at most in limits and in `read-only`.
pub(super) fn has_same_source(one: &str, other: &str) -> bool {
    Parts::of(one).zip(Parts::of(other)).is_some_and(|(one, other)| one.bare == other.bare)
}

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
