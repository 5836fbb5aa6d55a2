//! Namespaces that a host is told of, and that nobody serves.

use crate::config::NamespaceConfig;
use crate::pool::PoolNamespace;
use shadowbell_backend::{Disk, DiskInfo, Queue};
use std::io;
use std::sync::Arc;

/// What can be told of a namespace that nobody serves.
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

/// A namespace that is to be told of, and not served.
pub(crate) fn placeholder(namespace: &PoolNamespace) -> NamespaceConfig {
    let mut info = DiskInfo::new(namespace.block_size, namespace.blocks);
    (info.volatile_cache, info.discard) = (true, true);
    info.metadata = namespace.metadata;
    NamespaceConfig { disk: unserved(info), uuid: namespace.uuid }
}

/// The disk of a namespace that is to be told of.
pub(crate) fn unserved(info: DiskInfo) -> Arc<dyn Disk> {
    Arc::new(Placeholder(info))
}
