//! Disks of the namespaces of a [pool].

use crate::controller_config::{DiskConfig, nsids};
use crate::pool::index::Entry;
use crate::pool::{self, HostPool, PoolSpec};
use anyhow::anyhow;
use shadowbell_controller::NamespacePool;
use shadowbell_process::exit::bad_input;
use std::path::Path;

/// Disk of a namespace. The host controls the first bytes of the file, so `format=raw` is explicit.
/// Otherwise the content could be taken for another image format.
pub fn disk(pool: &HostPool, entry: &Entry) -> DiskConfig {
    let Entry { nsid, uuid, block_size, metadata, .. } = *entry;
    let file = pool.file(nsid);
    let metadata = metadata.map(|own| format!("&{}", own.options())).unwrap_or_default();
    let disk = format!("{}?format=raw&block-size={block_size}{metadata}", file.display());
    DiskConfig::with(disk, Some(uuid), Some(nsid))
}

/// Disks of a controller: the `given` ones and those of attached namespaces of the pool, sorted by
/// NSID.
///
/// # Errors
/// The pool was not opened at start-up, or two namespaces have the same NSID.
pub fn with_attached(spec: &PoolSpec, given: &[DiskConfig]) -> anyhow::Result<Vec<DiskConfig>> {
    let pool = pool::opened(spec).ok_or_else(|| {
        bad_input(anyhow!(
            "the pool {} was not opened at start-up: restart the server",
            spec.directory.display()
        ))
    })?;
    let index = pool.index();
    let numbered = nsids(given).zip(given);
    let mut all: Vec<_> =
        numbered.map(|(nsid, disk)| DiskConfig { nsid: Some(nsid), ..disk.clone() }).collect();
    if let Some(taken) =
        all.iter().filter_map(|disk| disk.nsid).find(|nsid| index.find(*nsid).is_some())
    {
        return Err(bad_input(anyhow!(
            "the pool {} has a namespace {taken}: give the disk with this number another `nsid`",
            spec.directory.display()
        )));
    }
    if pool.state().sanitize.barrier().is_none() {
        let attached = index.namespaces.iter().filter(|entry| entry.attached);
        all.extend(attached.map(|entry| disk(&pool, entry)));
    }
    all.sort_by_key(|disk| disk.nsid);
    Ok(all)
}

/// True if a disk is a namespace of the pool.
pub fn belongs_to(spec: &PoolSpec, disk: &DiskConfig) -> bool {
    let path = disk.disk.split('?').next().unwrap_or_default();
    Path::new(path).parent() == Some(&spec.directory)
}
