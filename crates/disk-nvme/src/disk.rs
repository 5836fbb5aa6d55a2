//! Namespace of an SSD, attached by the driver, as a disk.

use crate::disconnect::DisconnectMonitor;
use crate::dma_share::DmaShares;
use crate::queue::{NoDevice, NvmeQueue};
use crate::recovery;
use crate::shared::NvmeDiskShared;
use crate::transfer_stats::DiskTransferStats;
use parking_lot::Mutex;
use serde_json::Value;
use shadowbell_disk::{CheckpointError, Disk, DiskInfo, Extent, Queue, ReportExtent};
use shadowbell_driver::{AttachError, AttachOptions, Controller, Namespace, SpinPolicy, Transport};
use shadowbell_state::Descriptors;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use std::{fmt, io};
use thiserror::Error;

/// Maximum number of allocated ranges to request by one command.
const MAX_RANGES: usize = 64;

/// Options for opening a namespace as a disk.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// True to refuse all requests that change the disk.
    pub read_only: bool,
    /// Number of queue pairs to request. Each I/O thread that uses the disk needs one.
    pub queue_pairs: u16,
    /// Entries per queue pair.
    pub queue_depth: u32,
    /// True to let the SSD access guest memory directly where possible.
    pub zero_copy: bool,
    /// Time after which a command counts as failed; `None` for the driver's default.
    pub timeout: Option<Duration>,
}

impl Default for Options {
    /// Default options: eight queue pairs of 256 entries, zero-copy where possible.
    fn default() -> Self {
        Self { read_only: false, queue_pairs: 8, queue_depth: 256, zero_copy: true, timeout: None }
    }
}

/// Error of opening a namespace as a disk.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The controller could not be attached.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The namespace does not exist on the controller.
    #[error("there is no namespace {nsid} on {device}; active are: {active}")]
    NoNamespace {
        /// Namespace identifier.
        nsid: u32,
        /// Name of the controller.
        device: String,
        /// Active namespaces.
        active: String,
    },
    /// The namespace has a feature that the disk does not support.
    #[error("namespace {nsid} {what}, which is not supported; format it without")]
    Unusable {
        /// Namespace identifier.
        nsid: u32,
        /// Unsupported feature, in words that follow "namespace N" in the message.
        what: &'static str,
    },
    /// The block size is neither 512 nor 4096 bytes.
    #[error("namespace {nsid} has blocks of {size} bytes; disks have 512 or 4096")]
    BlockSize {
        /// Namespace identifier.
        nsid: u32,
        /// Block size in bytes.
        size: u32,
    },
    /// No thread or file descriptor is available.
    #[error("the device cannot be monitored: {0}")]
    System(io::Error),
}

/// Disk on a namespace of an NVMe controller. The driver owns the controller exclusively.
///
/// The controller is shut down normally when the disk and all its queues are dropped.
#[derive(Clone)]
pub struct NvmeDisk(Arc<NvmeDiskShared>);

impl NvmeDisk {
    /// Attaches to the controller at the other end of `transport`. Messages call the disk `name`.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(
        transport: Arc<dyn Transport>,
        nsid: u32,
        name: &str,
        options: &Options,
    ) -> Result<Self, OpenError> {
        let mut attach = AttachOptions {
            queue_pairs: options.queue_pairs.max(1),
            queue_depth: options.queue_depth,
            // The driver must not spin, because I/O threads sleep and poll by themselves.
            spin: SpinPolicy::SLEEP,
            ..AttachOptions::default()
        };
        if let Some(timeout) = options.timeout {
            attach.timeouts.io = timeout;
        }
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
        let disconnect =
            DisconnectMonitor::start(transport.hang_up()).map_err(OpenError::System)?;
        let controller = Arc::new(Mutex::new(controller));
        let shares = DmaShares::new(Arc::clone(&controller), name);
        Ok(Self(Arc::new(NvmeDiskShared {
            namespace,
            info,
            shares: options.zero_copy.then(|| Arc::new(shares)),
            disconnect,
            name: name.to_owned(),
            transfers: DiskTransferStats::default(),
            depth: options.queue_depth,
            reports_allocated: OnceLock::new(),
            controller,
        })))
    }

    /// True if `state` is the checkpoint of an SSD namespace.
    #[must_use]
    pub fn is_checkpoint(state: &Value) -> bool {
        recovery::is_checkpoint(state)
    }

    /// True if a dead process [stored](Disk::checkpoint) this disk as `state`. Opening the disk has
    /// reset the SSD, so no request of the dead process can reach the disk or memory any more.
    #[must_use]
    pub fn is_same_disk(&self, state: &Value) -> bool {
        recovery::is_same_disk(state, &self.0.info, &self.0.namespace)
    }

    /// The namespace of the SSD.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.0.namespace
    }
}

fn info(namespace: &Namespace, read_only: bool) -> DiskInfo {
    let mut info = DiskInfo::new(namespace.block_size(), namespace.blocks());
    info.read_only = read_only || namespace.is_read_only();
    info.volatile_cache = namespace.has_volatile_cache();
    info.discard = crate::task::discards(namespace);
    // NPDG is a 0's based number of blocks. An implausibly large one is limited.
    info.granularity = u32::from(namespace.identity().npdg).min(0x7ff).saturating_add(1);
    info
}

impl Disk for NvmeDisk {
    fn info(&self) -> DiskInfo {
        self.0.info.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        let mut controller = self.0.controller.lock();
        let pair = match controller.take_queue_pair() {
            _ if self.0.disconnect.is_disconnected() => return Ok(Box::new(NoDevice)),
            Some(pair) => pair,
            // All queue pairs that were created at opening were taken. A new queue pair replaces
            // the pair of a dropped queue.
            None => match controller.create_queue_pair(self.0.depth) {
                Ok(pair) => pair,
                // If the SSD was removed or disconnected, the queue is opened nevertheless, and its
                // requests fail. Otherwise the emulated controller would fail as a whole, although
                // its other namespaces may still work.
                Err(_) if controller.check().is_err() => return Ok(Box::new(NoDevice)),
                Err(error) => return Err(io::Error::other(error)),
            },
        };
        drop(controller);
        Ok(Box::new(NvmeQueue::new(Arc::clone(&self.0), pair)?))
    }

    fn queue_files(&self) -> u64 {
        4
    }

    fn name(&self) -> String {
        self.0.name.clone()
    }

    fn extents(&self, offset: u64, len: u64, report: &mut ReportExtent<'_>) {
        let Self(shared) = self;
        let size = u64::from(shared.info.block_size);
        let (mut at, end) = (offset, offset.saturating_add(len));
        while at < end && self.reports_allocated() {
            let admin = shared.controller.lock().admin();
            let blocks = at / size..end.div_ceil(size);
            let Ok(found) = admin.allocated_blocks(shared.namespace.nsid(), blocks, MAX_RANGES)
            else {
                break;
            };
            let known = found.until.saturating_mul(size).min(end);
            for range in found.ranges {
                let from = range.start.saturating_mul(size).clamp(at, known);
                let to = range.end.saturating_mul(size).clamp(from, known);
                for extent in [Extent::hole(from - at), Extent::data(to - from)] {
                    if extent.len != 0 && !report(extent) {
                        return;
                    }
                }
                at = to;
            }
            if at < known {
                if !report(Extent::hole(known - at)) {
                    return;
                }
                at = known;
            } else if found.until <= at / size {
                // The SSD has reported nothing beyond `at`. The rest is reported as data below.
                break;
            }
        }
        if at < end {
            report(Extent::data(end - at));
        }
    }

    fn checkpoint(&self, _: &mut Descriptors) -> Result<Value, CheckpointError> {
        Ok(recovery::checkpoint(&self.0.info, &self.0.namespace))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let transfers = self.0.transfers.sum();
        let recovery = self.0.controller.lock().recovery_stats();
        vec![
            ("commands_in_place", transfers.in_place),
            ("commands_copied", transfers.copied),
            ("resets", recovery.resets),
        ]
    }
}

impl NvmeDisk {
    /// True if the SSD reports which blocks are allocated, and deallocated blocks read as zeroes.
    /// The SSD is queried by the first call, and the result is cached. If the query fails, the
    /// result is false.
    fn reports_allocated(&self) -> bool {
        let Self(shared) = self;
        *shared.reports_allocated.get_or_init(|| {
            let admin = shared.controller.lock().admin();
            shared.namespace.identity().dlfeat.drb() == 1
                && admin.reports_allocated().unwrap_or(false)
        })
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
