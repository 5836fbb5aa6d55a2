//! Trait [`Device`]: the callbacks of a device behind a server, and their arguments.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shadowbell_state::Descriptors;

use crate::Errno;
use crate::capabilities::DEFAULT_MAX_DMA_MAPS;
pub use crate::completer::Completer;
use crate::descriptor::{Closer, PeerFd};
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

/// Part of a region, in bytes from the start of the region. If a client may map the part, it starts
/// and ends at page boundaries.
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
    /// Duplicate of the descriptor for the peer. It is closed after the reply is sent.
    pub fd: OwnedFd,
    /// Offset of the region in the file. Byte *n* of the region is byte `offset + n` of the file.
    pub offset: u64,
    /// Mappable areas. If there are none, the whole region is mappable.
    ///
    /// One descriptor is sent for all areas, because QEMU accepts only one. SPDK's client requires
    /// one per area. So a device for both clients has at most one area per region.
    pub areas: Vec<Area>,
}

/// Reply to DEVICE_GET_REGION_INFO. The default is an absent region, with size 0. An absent region
/// is no error, because clients query every index, and give up the device after an error reply.
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
/// may signal the eventfd instead of writing, because the device does not use the written value.
#[derive(Debug, Default)]
pub struct IoFds {
    /// Duplicates of the eventfds for the peer. They are closed after the reply is sent.
    pub events: Vec<OwnedFd>,
    /// Parts of the region, and the index of the eventfd of each part.
    pub areas: Vec<(Area, usize)>,
}

/// Reply to DEVICE_GET_IRQ_INFO. The default is an interrupt index without interrupts.
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
    /// True if the number of interrupts can only be changed after all of them are disabled.
    pub noresize: bool,
}

/// DMA_MAP: a range of the client's memory that the device may access after the reply.
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
    /// File to map; accesses to it never block (see [`descriptor`](crate::descriptor)). Without a
    /// file, the memory can only be accessed by messages. QEMU without `share=on` sends maps
    /// without a file. A device that requires mapped memory should refuse them with
    /// [`Errno::OPNOTSUPP`] and log a clear message.
    pub fd: Option<PeerFd>,
    /// Offset of the range in the file, in bytes.
    pub fd_offset: u64,
}

/// DMA_UNMAP: memory that the device must not access any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaUnmap {
    /// One range, which the client must have mapped.
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
    /// Raises interrupts. If the request has eventfds, sets the eventfds that the device signals.
    Trigger,
}

/// Data of SET_IRQS (`VFIO_IRQ_SET_DATA_*`).
#[derive(Debug)]
pub enum IrqData {
    /// No data: the action applies to the whole range. With `count` 0, Trigger disables all
    /// interrupts of the index.
    None,
    /// One flag per interrupt of the range. The action applies to interrupts whose flag is true.
    Bools(Vec<bool>),
    /// One eventfd per interrupt of the range; the server has checked that they are eventfds. An
    /// empty list removes the eventfds of the range.
    Eventfds(Vec<PeerFd>),
}

/// SET_IRQS request. The server has checked that `start + count` does not overflow. The device has
/// to check that the range exists.
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

/// Source of a completion callback for a register write, see [`Device::region_write`].
pub struct Deferral<'a> {
    make_completer: &'a mut dyn FnMut() -> Option<Completer>,
}

impl<'a> Deferral<'a> {
    /// Wraps `make_completer`, which returns a callback on its first call, and `None` afterwards.
    pub fn new(make_completer: &'a mut dyn FnMut() -> Option<Completer>) -> Self {
        Self { make_completer }
    }

    /// Creates the completion callback of the write. If `region_write` then returns `Ok`, the
    /// server sends the reply when the callback is completed. The result of the callback decides
    /// between success and error. A second call of this method returns `None`.
    pub fn completer(&mut self) -> Option<Completer> {
        (self.make_completer)()
    }
}

impl fmt::Debug for Deferral<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Later")
    }
}

/// Device behind a server.
///
/// All methods are called on the reactor's thread, one at a time, and must not block. A method that
/// may have to wait for I/O in flight gets a [`Completer`], which any thread may complete. While a
/// [`Completer`] is outstanding, the server calls no other method of this device. Meanwhile the
/// server serves the reactor's other devices.
///
/// All arguments come from an untrusted peer. The server has checked an argument only if the
/// documentation of the method says so. If a method returns `Err`, the server sends an error reply.
pub trait Device: Send {
    /// Replies to DEVICE_GET_INFO. Called once for each client, in the version negotiation.
    fn info(&mut self) -> DeviceInfo {
        DeviceInfo::default()
    }

    /// Maximum number of memory ranges that a client may map at the same time. The server only
    /// announces it in the version negotiation; [`dma_map`](Self::dma_map) has to enforce it.
    fn max_dma_maps(&self) -> u32 {
        DEFAULT_MAX_DMA_MAPS
    }

    /// Replies to DEVICE_GET_REGION_INFO for an index below [`DeviceInfo::regions`].
    fn region_info(&mut self, index: u32) -> Result<RegionInfo, Errno>;

    /// Replies to DEVICE_GET_REGION_IO_FDS for an index below [`DeviceInfo::regions`]. The default
    /// replies [`Errno::OPNOTSUPP`]; the server also sends this error if the reply has no areas.
    fn region_io_fds(&mut self, index: u32) -> Result<IoFds, Errno> {
        let _ = index;
        Err(Errno::OPNOTSUPP)
    }

    /// Replies to DEVICE_GET_IRQ_INFO for an index below [`DeviceInfo::irqs`].
    fn irq_info(&mut self, index: u32) -> Result<IrqInfo, Errno>;

    /// Handles a client that has completed the version negotiation. Any request may follow.
    fn connected(&mut self, peer: &Peer) {
        let _ = peer;
    }

    /// Handles a client that has disconnected. The device releases every DMA map and eventfd. It
    /// completes `done` when no thread accesses the client's memory any more, and the next client
    /// is accepted then. Called once for each [`connected`](Device::connected). The server only
    /// logs the result of `done`.
    fn disconnected(&mut self, done: Completer);

    /// Reads `data.len()` bytes (at least one) from a region with an index below
    /// [`DeviceInfo::regions`]. `offset` plus the length does not overflow, but may exceed the size
    /// of the region.
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno>;

    /// Writes `data` to a region; the range is checked as for [`region_read`](Device::region_read).
    ///
    /// If the write has to wait (for example for a function level reset), the device takes a
    /// callback from `deferral`.
    fn region_write(
        &mut self,
        region: u32,
        offset: u64,
        data: &[u8],
        deferral: &mut Deferral<'_>,
    ) -> Result<(), Errno>;

    /// True if a thread of the device should poll this client's socket in addition to the reactor.
    /// A device requests this if most messages are doorbell writes whose only effect is to wake
    /// that thread. The server calls this method when it has handled all messages, unless the
    /// device already has the client's [`SharedSocket`].
    fn requests_shared_socket(&mut self) -> bool {
        false
    }

    /// Passes the client's socket to the device, after
    /// [`requests_shared_socket`](Self::requests_shared_socket) has returned true. Writes that the
    /// device's thread reads from the socket do not reach [`region_write`](Self::region_write).
    fn share_socket(&mut self, socket: SharedSocket) {
        drop(socket);
    }

    /// Sets up, takes down, masks or raises interrupts.
    fn set_irqs(&mut self, request: SetIrqs) -> Result<(), Errno>;

    /// Adds a range of the client's memory. Fails with [`Errno::EXIST`] if the range overlaps a
    /// mapped one.
    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno>;

    /// Removes memory, and completes `done` when no thread accesses it any more.
    fn dma_unmap(&mut self, unmap: DmaUnmap, done: Completer);

    /// Makes all requests since the previous call effective. The server calls this after a few
    /// requests, before it sends their replies. So a device can collect several DMA maps and apply
    /// them together. The default is for devices that apply each request at once.
    fn publish(&mut self) {}

    /// Resets the device to its power-on state, and then completes `done`. DMA maps and eventfds
    /// stay, because they belong to the client.
    fn reset(&mut self, done: Completer);

    /// Callbacks for migration, if the device supports it.
    fn migration(&mut self) -> Option<&mut dyn Migration> {
        None
    }

    /// Serializes the state of the device and of its client for a checkpoint, which replaces the
    /// previous one. `fds` gets duplicates of the client's descriptors. Of the
    /// [lasting](Descriptors::add_lasting) descriptors, it gets only those that were added or
    /// removed since the previous checkpoint, so that the cost of a checkpoint does not depend on
    /// the number of earlier messages.
    ///
    /// # Errors
    ///
    /// The default: this device type does not support the transfer.
    fn record(&mut self, fds: &mut Descriptors) -> Result<serde_json::Value, SaveError> {
        let _ = fds;
        Err(SaveError::Device)
    }

    /// Prepares the device for a new sequence of checkpoints. The next [`record`](Self::record)
    /// must include all lasting descriptors, because the receiver does not have any yet.
    fn reset_checkpoint(&mut self) {}

    /// Restores the state of [`record`](Self::record). Called once, before any other method. The
    /// previous server process may still resume, so restoring must have no effect on the client.
    /// The device wraps the client's descriptors in [`PeerFd::of_predecessor`] with this `closer`.
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
