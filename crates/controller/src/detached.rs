//! Placeholder disks of namespaces that Identify reports and no I/O thread serves.

use crate::config::NamespaceConfig;
use crate::pool::PoolNamespace;
use shadowbell_backend::{Disk, DiskInfo, Queue};
use std::io;
use std::sync::Arc;

/// Disk with properties and without queues.
#[derive(Debug)]
struct Placeholder(DiskInfo);

impl Disk for Placeholder {
    fn info(&self) -> DiskInfo {
        self.0.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Err(io::Error::other("the namespace is not served"))
    }

    fn name(&self) -> String {
        "a namespace that is not served".to_owned()
    }
}

/// Configuration of a namespace for Identify only.
pub(crate) fn placeholder(namespace: &PoolNamespace) -> NamespaceConfig {
    let mut info = DiskInfo::new(namespace.block_size, namespace.blocks);
    (info.volatile_cache, info.discard) = (true, true);
    info.metadata = namespace.metadata;
    NamespaceConfig { disk: placeholder_disk(info), uuid: namespace.uuid }
}

/// Placeholder disk with the given properties.
pub(crate) fn placeholder_disk(info: DiskInfo) -> Arc<dyn Disk> {
    Arc::new(Placeholder(info))
}
