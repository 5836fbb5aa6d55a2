//! A disk for tests: what it says of itself is all there is to it.

use shadowbell_backend::{Disk, Info, Queue};
use std::io;
use std::sync::Arc;

/// Has an [`Info`] and no queues.
#[derive(Debug)]
pub(crate) struct TestDisk(pub(crate) Info);

impl TestDisk {
    /// What it is called.
    pub(crate) const NAME: &'static str = "test";

    /// A writable disk with a write cache and discards.
    pub(crate) fn new(blocks: u64, block_size: u32) -> Self {
        Self(Info {
            block_size,
            blocks,
            read_only: false,
            volatile_cache: true,
            discard: true,
            granularity: 1,
        })
    }

    /// The same, shared.
    pub(crate) fn shared(blocks: u64, block_size: u32) -> Arc<dyn Disk> {
        Arc::new(Self::new(blocks, block_size))
    }
}

impl Disk for TestDisk {
    fn info(&self) -> Info {
        self.0.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Err(io::Error::other("a test disk has no queues"))
    }

    fn name(&self) -> String {
        Self::NAME.into()
    }
}
