//! The controller that the driver owns, and the namespace of it that is a disk.

use crate::counts::Totals;
use crate::lent::Loans;
use crate::queue::{NoDevice, NvmeQueue};
use crate::watch::Watch;
use shadowbell_backend::{Disk, Info, Queue};
use shadowbell_driver::{AttachError, AttachOptions, Controller, Namespace, SpinPolicy, Transport};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io};
use thiserror::Error;

/// How a namespace is used as a disk.
#[derive(Clone, Debug)]
pub struct Options {
    /// Refuse everything that changes the disk.
    pub read_only: bool,
    /// How many queue pairs to ask for: so many workers can use the disk.
    pub queue_pairs: u16,
    /// Entries of each.
    pub queue_depth: u32,
    /// Let the SSD reach the guest's memory by itself, where it can.
    pub zero_copy: bool,
}

impl Default for Options {
    /// Eight queue pairs of 256 entries, and no copies where that is possible.
    fn default() -> Self {
        Self { read_only: false, queue_pairs: 8, queue_depth: 256, zero_copy: true }
    }
}

/// Why a namespace is no disk.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The controller could not be taken over.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The controller has no such namespace.
    #[error("there is no namespace {nsid} on {device}; active are: {active}")]
    NoNamespace {
        /// The namespace.
        nsid: u32,
        /// What a person calls the controller.
        device: String,
        /// The namespaces that there are.
        active: String,
    },
    /// The namespace is one whose blocks can not be moved.
    #[error("namespace {nsid} {what}, which can not be passed on; format it without")]
    Unusable {
        /// The namespace.
        nsid: u32,
        /// What it has.
        what: &'static str,
    },
    /// A guest could not use the namespace's blocks.
    #[error("namespace {nsid} has blocks of {size} bytes; disks have 512 or 4096")]
    BlockSize {
        /// The namespace.
        nsid: u32,
        /// Bytes of a block.
        size: u32,
    },
    /// The system has no thread or descriptor.
    #[error("the device can not be watched: {0}")]
    System(io::Error),
}

/// What is shared by all queues.
pub(crate) struct Shared {
    pub(crate) namespace: Namespace,
    pub(crate) info: Info,
    pub(crate) zero_copy: bool,
    pub(crate) name: String,
    pub(crate) loans: Loans,
    pub(crate) counts: Totals,
    pub(crate) watch: Watch,
    depth: u32,
    controller: Mutex<Controller>,
}

impl Shared {
    pub(crate) fn controller(&self) -> MutexGuard<'_, Controller> {
        self.controller.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A namespace of an NVMe controller, which the driver has to itself, as a disk.
///
/// With the last handle on it, the queues of its users included, the controller is shut down in
/// order.
#[derive(Clone)]
pub struct NvmeDisk(Arc<Shared>);

impl NvmeDisk {
    /// Attaches to the controller at the other end of `transport`; `name` is what a person calls the
    /// disk.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(
        transport: Arc<dyn Transport>,
        nsid: u32,
        name: &str,
        options: &Options,
    ) -> Result<Self, OpenError> {
        let attach = AttachOptions {
            queue_pairs: options.queue_pairs.max(1),
            queue_depth: options.queue_depth,
            // Workers have a way of their own to wait.
            spin: SpinPolicy::SLEEP,
            ..AttachOptions::default()
        };
        let controller = Controller::attach(Arc::clone(&transport), &attach)?;
        let namespace = match controller.namespace(nsid) {
            Some(namespace) => namespace.clone(),
            None => {
                let list = controller.namespaces().iter().map(|ns| ns.nsid().to_string());
                let active = match list.collect::<Vec<_>>().join(", ") {
                    none if none.is_empty() => "none".to_owned(),
                    list => list,
                };
                let device = controller.name().to_owned();
                return Err(OpenError::NoNamespace { nsid, device, active });
            }
        };
        if let Some(what) = namespace.unusable() {
            return Err(OpenError::Unusable { nsid, what });
        }
        let size = namespace.block_size();
        if !matches!(size, 512 | 4096) {
            return Err(OpenError::BlockSize { nsid, size });
        }
        let info = info(&namespace, options.read_only);
        Ok(Self(Arc::new(Shared {
            namespace,
            info,
            zero_copy: options.zero_copy,
            watch: Watch::start(transport.hang_up()).map_err(OpenError::System)?,
            name: name.to_owned(),
            loans: Loans::default(),
            counts: Totals::default(),
            depth: options.queue_depth,
            controller: Mutex::new(controller),
        })))
    }

    /// The namespace below.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.0.namespace
    }
}

fn info(namespace: &Namespace, read_only: bool) -> Info {
    let granularity = namespace.identity().npdg;
    Info {
        block_size: namespace.block_size(),
        blocks: namespace.blocks(),
        read_only: read_only || namespace.is_read_only(),
        volatile_cache: namespace.has_volatile_cache(),
        discard: crate::task::discards(namespace),
        // 0's based; what is beyond reason is not believed.
        granularity: u32::from(granularity).min(0x7ff).saturating_add(1),
    }
}

impl Disk for NvmeDisk {
    fn info(&self) -> Info {
        self.0.info.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        let mut controller = self.0.controller();
        let pair = match controller.take_queue_pair() {
            _ if self.0.watch.is_gone() => return Ok(Box::new(NoDevice)),
            Some(pair) => pair,
            // In the place of one whose user has gone.
            None => match controller.create_queue_pair(self.0.depth) {
                Ok(pair) => pair,
                // The controller with this namespace may have others that are well, and a guest that
                // comes back to them.
                Err(_) if controller.check().is_err() => return Ok(Box::new(NoDevice)),
                Err(error) => return Err(io::Error::other(error)),
            },
        };
        drop(controller);
        Ok(Box::new(NvmeQueue::new(Arc::clone(&self.0), pair)?))
    }

    fn name(&self) -> String {
        self.0.name.clone()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let ways = self.0.counts.sum();
        let recovery = self.0.controller().recovery_stats();
        vec![
            ("commands_in_place", ways.in_place),
            ("commands_copied", ways.copied),
            ("resets", recovery.resets),
        ]
    }
}

impl fmt::Debug for NvmeDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmeDisk")
            .field("name", &self.0.name)
            .field("info", &self.0.info)
            .finish_non_exhaustive()
    }
}
