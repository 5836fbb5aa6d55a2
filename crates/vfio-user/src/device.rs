//! Trait [`Device`]: the callbacks of a device behind a server, and their arguments.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shadowbell_state::Descriptors;

use crate::Errno;
use crate::capabilities::DEFAULT_MAX_DMA_MAPS;
use crate::descriptor::{Closer, PeerFd};
pub use crate::done::Done;
use crate::handover::{RestoreError, SaveError};
use crate::migration::Migration;
use crate::shared_socket::SharedSocket;

/// Region indexes of a PCI device (`VFIO_PCI_*_REGION_INDEX` of `<linux/vfio.h>`).
pub mod region {
    /// Base address register 0; registers 1 to 5 follow.
    pub const BAR0: u32 = 0;
    /// Base address register 5, the last one.
    pub const BAR5: u32 = 5;
    /// Expansion ROM.
    pub const ROM: u32 = 6;
    /// Configuration space.
    pub const CONFIG: u32 = 7;
    /// Legacy VGA ranges.
    pub const VGA: u32 = 8;
    /// Number of regions of a PCI device.
    pub const COUNT: u32 = 9;
}

/// Interrupt indexes of a PCI device (`VFIO_PCI_*_IRQ_INDEX` of `<linux/vfio.h>`).
pub mod irq {
    /// Interrupt pin.
    pub const INTX: u32 = 0;
    /// Message signalled interrupts.
    pub const MSI: u32 = 1;
    /// Extended message signalled interrupts.
    pub const MSIX: u32 = 2;
    /// PCI Express error reporting.
    pub const ERR: u32 = 3;
    /// Request to release the device.
    pub const REQ: u32 = 4;
    /// Number of interrupt indexes of a PCI device.
    pub const COUNT: u32 = 5;
}

/// Reply to DEVICE_GET_INFO. The device is always a PCI device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// True if DEVICE_RESET is supported (`VFIO_DEVICE_FLAGS_RESET`).
    pub resettable: bool,
    /// Number of regions; [`region::COUNT`] for a plain PCI device.
    pub regions: u32,
    /// Number of interrupt indexes; [`irq::COUNT`] for a PCI device.
    pub irqs: u32,
}

impl Default for DeviceInfo {
    fn default() -> Self {
        Self { resettable: true, regions: region::COUNT, irqs: irq::COUNT }
    }
}

/// Part of a region, in bytes from the start of the region. A part that a client may map starts and
/// ends at page boundaries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    /// Offset in the region.
    pub offset: u64,
    /// Length.
    pub len: u64,
}

/// File behind the mappable part of a region.
#[derive(Debug)]
pub struct Mapping {
    /// Duplicate of the descriptor for the peer; closed after it was sent with the reply.
    pub fd: OwnedFd,
    /// Offset of the region in the file: byte *n* of the region is byte `offset + n`.
    pub offset: u64,
    /// Mappable areas; empty for the whole region.
    ///
    /// One descriptor is sent, whatever the number of areas. QEMU accepts no more. SPDK's client
    /// requires one per area, so a device for both clients has one area per region.
    pub areas: Vec<Area>,
}

/// Reply to DEVICE_GET_REGION_INFO. The default is an absent region, which has size 0: clients
/// query every index, and an error reply would end their attach.
#[derive(Debug, Default)]
pub struct RegionInfo {
    /// Size in bytes; 0 for an absent region.
    pub size: u64,
    /// True if the client may read the region.
    pub readable: bool,
    /// True if the client may write the region.
    pub writable: bool,
    /// File to map, if the client may map the region or parts of it.
    pub mapping: Option<Mapping>,
}

/// Reply to DEVICE_GET_REGION_IO_FDS: eventfds that replace writes to parts of a region. A client
/// may signal the eventfd instead of writing, because the written value is irrelevant.
#[derive(Debug, Default)]
pub struct IoFds {
    /// Duplicates of the eventfds for the peer; closed after they were sent with the reply.
    pub events: Vec<OwnedFd>,
    /// Parts of the region, and the index of the eventfd of each part.
    pub areas: Vec<(Area, usize)>,
}

/// Reply to DEVICE_GET_IRQ_INFO. The default is an absent index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IrqInfo {
    /// Number of interrupts of this index (for MSI-X, vectors).
    pub count: u32,
    /// True if the interrupts can be signalled through eventfds.
    pub eventfd: bool,
    /// True if [`IrqAction::Mask`] and [`IrqAction::Unmask`] are supported.
    pub maskable: bool,
    /// True if an interrupt masks itself when it is signalled.
    pub automasked: bool,
    /// True if the number of interrupts can only be changed by disabling all of them first.
    pub noresize: bool,
}

/// DMA_MAP: a range of the client's memory that the device may access from now on.
#[derive(Debug)]
pub struct DmaMap {
    /// First bus address.
    pub iova: u64,
    /// Length in bytes; never 0, and `iova + len` does not overflow.
    pub len: u64,
    /// True if the device may read the range.
    pub readable: bool,
    /// True if the device may write the range.
    pub writable: bool,
    /// File to map, which never blocks (see [`descriptor`](crate::descriptor)). Without a file the
    /// memory can only be accessed by messages. A device that requires mapped memory should refuse
    /// the range with [`Errno::OPNOTSUPP`] and log a clear message: a QEMU without `share=on` sends
    /// such ranges.
    pub fd: Option<PeerFd>,
    /// Offset of the range in the file, in bytes.
    pub fd_offset: u64,
}

/// DMA_UNMAP: memory that the device must not access any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaUnmap {
    /// One range, which must be a mapped one.
    Range {
        /// First bus address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// All ranges.
    All,
}

/// Action of SET_IRQS (`VFIO_IRQ_SET_ACTION_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IrqAction {
    /// Masks interrupts.
    Mask,
    /// Unmasks interrupts.
    Unmask,
    /// Raises interrupts; with eventfds, sets the eventfds that the device signals.
    Trigger,
}

/// Data of SET_IRQS (`VFIO_IRQ_SET_DATA_*`).
#[derive(Debug)]
pub enum IrqData {
    /// No data: the action applies to the whole range. Trigger with `count` 0 disables all
    /// interrupts of the index.
    None,
    /// One flag per interrupt of the range: the action applies to interrupts whose flag is set.
    Bools(Vec<bool>),
    /// One eventfd per interrupt of the range (their type was checked), or none, which removes the
    /// eventfds of the range.
    Eventfds(Vec<PeerFd>),
}

/// SET_IRQS request. `start + count` does not overflow; the device has to check that the range
/// exists.
#[derive(Debug)]
pub struct SetIrqs {
    /// Interrupt index, see [`irq`].
    pub index: u32,
    /// First interrupt of the range.
    pub start: u32,
    /// Number of interrupts in the range.
    pub count: u32,
    /// Action.
    pub action: IrqAction,
    /// Data of the action.
    pub data: IrqData,
}

/// Limits that the client has announced in the version negotiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Maximum number of descriptors per message.
    pub max_msg_fds: u32,
    /// Maximum number of bytes per data transfer.
    pub max_data_xfer_size: u64,
}

/// Source of a completion callback for a register write: see [`Device::region_write`].
pub struct Later<'a> {
    make: &'a mut dyn FnMut() -> Option<Done>,
}

impl<'a> Later<'a> {
    /// Wraps `make`, which returns `None` from its second call on.
    pub fn new(make: &'a mut dyn FnMut() -> Option<Done>) -> Self {
        Self { make }
    }

    /// Creates the completion callback of the write. If `region_write` returns `Ok`, the write is
    /// answered when the callback completes, with its result. A second call returns `None`.
    pub fn done(&mut self) -> Option<Done> {
        (self.make)()
    }
}

impl fmt::Debug for Later<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Later")
    }
}

/// Device behind a server.
///
/// All methods are called on the reactor's thread, one at a time, and must not block. A method that
/// has to wait for I/O in flight takes a [`Done`], which may be completed on any thread. While a
/// [`Done`] is outstanding, the server calls no other method of this device; other devices of the
/// reactor are served.
///
/// All values come from an untrusted peer, and are checked only as far as their documentation says.
/// An `Err` is sent as error reply.
pub trait Device: Send {
    /// Replies to DEVICE_GET_INFO. Called once for each client, in the version negotiation.
    fn info(&mut self) -> DeviceInfo {
        DeviceInfo::default()
    }

    /// Maximum number of memory ranges that a client may map at the same time. The server only
    /// announces it in the version negotiation: [`dma_map`](Self::dma_map) has to enforce it.
    fn max_dma_maps(&self) -> u32 {
        DEFAULT_MAX_DMA_MAPS
    }

    /// Replies to DEVICE_GET_REGION_INFO for an index below [`DeviceInfo::regions`].
    fn region_info(&mut self, index: u32) -> Result<RegionInfo, Errno>;

    /// Replies to DEVICE_GET_REGION_IO_FDS for an index below [`DeviceInfo::regions`]. The client
    /// gets [`Errno::OPNOTSUPP`] by default, and if there are no areas.
    fn region_io_fds(&mut self, index: u32) -> Result<IoFds, Errno> {
        let _ = index;
        Err(Errno::OPNOTSUPP)
    }

    /// Replies to DEVICE_GET_IRQ_INFO for an index below [`DeviceInfo::irqs`].
    fn irq_info(&mut self, index: u32) -> Result<IrqInfo, Errno>;

    /// A client has completed the version negotiation; any request may follow.
    fn connected(&mut self, peer: &Peer) {
        let _ = peer;
    }

    /// The client has disconnected. The device releases every DMA map and eventfd, and completes
    /// `done` when nothing accesses the client's memory any more; the next client is accepted
    /// afterwards. Called once for each [`connected`](Device::connected). The result of `done` is
    /// only logged.
    fn disconnected(&mut self, done: Done);

    /// Reads `data.len()` bytes, at least one, from a region with an index below
    /// [`DeviceInfo::regions`]. `offset` plus the length does not overflow, but may exceed the size
    /// of the region.
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno>;

    /// Writes `data` to a region; the range is checked as for [`region_read`](Device::region_read).
    ///
    /// A write that has to wait (a function level reset) takes a callback from `later`.
    fn region_write(
        &mut self,
        region: u32,
        offset: u64,
        data: &[u8],
        later: &mut Later<'_>,
    ) -> Result<(), Errno>;

    /// True if a thread of the device should poll this client's socket as well: because that thread
    /// sleeps, and most messages are writes that only wake it. Called whenever all messages are
    /// handled, unless the client's [`SharedSocket`] is in use.
    fn wants_shared_socket(&mut self) -> bool {
        false
    }

    /// Passes the socket, after [`wants_shared_socket`](Self::wants_shared_socket) returned true.
    /// Writes that the second thread handles do not reach [`region_write`](Self::region_write).
    fn share_socket(&mut self, socket: SharedSocket) {
        drop(socket);
    }

    /// Sets up, takes down, masks or raises interrupts.
    fn set_irqs(&mut self, request: SetIrqs) -> Result<(), Errno>;

    /// Adds a range of the client's memory. [`Errno::EXIST`] if it overlaps a mapped range.
    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno>;

    /// Removes memory, and completes `done` when nothing accesses it any more.
    fn dma_unmap(&mut self, unmap: DmaUnmap, done: Done);

    /// Applies all requests so far. Called after a few requests and before their replies are sent,
    /// so that a device can apply several maps at once.
    fn settle(&mut self) {}

    /// Resets the device to its power-on state, and completes `done` afterwards. DMA maps and
    /// eventfds remain, because they belong to the client.
    fn reset(&mut self, done: Done);

    /// Callbacks for migration, if the device supports it.
    fn migration(&mut self) -> Option<&mut dyn Migration> {
        None
    }

    /// Serializes the state of the device and of its client for the next server process, with
    /// duplicates of the client's descriptors in `fds`. No [`Done`] is outstanding. The device may
    /// continue to serve afterwards.
    ///
    /// # Errors
    ///
    /// The default: this device type does not support the transfer.
    fn save(&mut self, fds: &mut Descriptors) -> Result<serde_json::Value, SaveError> {
        let _ = fds;
        Err(SaveError::Device)
    }

    /// [`save`](Self::save) for a checkpoint, which replaces the previous one. The cost of a
    /// checkpoint must not depend on the number of earlier messages: `fds` gets only changes of
    /// [lasting](Descriptors::put_lasting) descriptors.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save).
    fn record(&mut self, fds: &mut Descriptors) -> Result<serde_json::Value, SaveError> {
        self.save(fds)
    }

    /// The next [`record`](Self::record) is the first checkpoint of its receiver, which has no
    /// lasting descriptors: it must be complete.
    fn begin_records(&mut self) {}

    /// Restores the state of [`save`](Self::save) or [`record`](Self::record). Called once, before
    /// any other method. The previous server process may still resume, so this must have no effect
    /// on the client. The client's descriptors are wrapped in [`PeerFd::of_predecessor`] with this
    /// `closer`.
    ///
    /// # Errors
    ///
    /// The default: this device type does not support the transfer.
    fn restore(
        &mut self,
        saved: serde_json::Value,
        fds: &mut Descriptors,
        closer: &Arc<Closer>,
    ) -> Result<(), RestoreError> {
        let _ = (saved, fds, closer);
        Err(RestoreError::Device)
    }
}
