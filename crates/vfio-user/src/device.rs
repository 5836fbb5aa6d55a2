//! What a server asks of the device that it serves, and what the device answers.

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

/// Indexes of the regions of a PCI device (`VFIO_PCI_*_REGION_INDEX` of `<linux/vfio.h>`).
pub mod region {
    /// Base address register 0; registers 1 to 5 follow.
    pub const BAR0: u32 = 0;
    /// Base address register 5, the last one.
    pub const BAR5: u32 = 5;
    /// The expansion ROM.
    pub const ROM: u32 = 6;
    /// The configuration space.
    pub const CONFIG: u32 = 7;
    /// Legacy VGA ranges.
    pub const VGA: u32 = 8;
    /// How many regions a PCI device has.
    pub const COUNT: u32 = 9;
}

/// Indexes of the interrupt kinds of a PCI device (`VFIO_PCI_*_IRQ_INDEX` of `<linux/vfio.h>`).
pub mod irq {
    /// The interrupt pin.
    pub const INTX: u32 = 0;
    /// Message signalled interrupts.
    pub const MSI: u32 = 1;
    /// Extended message signalled interrupts.
    pub const MSIX: u32 = 2;
    /// PCI Express error reporting.
    pub const ERR: u32 = 3;
    /// A request that the user lets go of the device.
    pub const REQ: u32 = 4;
    /// How many interrupt kinds a PCI device has.
    pub const COUNT: u32 = 5;
}

/// What DEVICE_GET_INFO answers. The device is always a PCI one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// DEVICE_RESET works (`VFIO_DEVICE_FLAGS_RESET`).
    pub resettable: bool,
    /// Number of regions; [`region::COUNT`] for a plain PCI device.
    pub regions: u32,
    /// Number of interrupt kinds; [`irq::COUNT`] for a PCI device.
    pub irqs: u32,
}

impl Default for DeviceInfo {
    fn default() -> Self {
        Self { resettable: true, regions: region::COUNT, irqs: irq::COUNT }
    }
}

/// A part of a region that a client may map, in bytes from the start of the region. Both ends
/// lie on page boundaries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub len: u64,
}

/// The file behind the mappable part of a region.
#[derive(Debug)]
pub struct Mapping {
    /// A duplicate for the peer to map; it travels with the reply and is closed here.
    pub fd: OwnedFd,
    /// Where the region begins in the file: byte *n* of the region is byte `offset + n`.
    pub offset: u64,
    /// What may be mapped; empty means all of the region.
    ///
    /// One descriptor travels whatever the number of areas. QEMU accepts no more; SPDK's client
    /// wants as many as there are areas, so a device for both has one area per region.
    pub areas: Vec<Area>,
}

/// What DEVICE_GET_REGION_INFO answers. The default is a region that does not exist: clients ask
/// about every index, and an error in answer ends their attach, so an absent one has size 0.
#[derive(Debug, Default)]
pub struct RegionInfo {
    /// Size in bytes; 0 for a region that the device does not have.
    pub size: u64,
    /// The client may read it.
    pub readable: bool,
    /// The client may write it.
    pub writable: bool,
    /// The client may map it, or parts of it.
    pub mapping: Option<Mapping>,
}

/// What DEVICE_GET_REGION_IO_FDS answers: eventfds, a signal of which stands for a write to some
/// part of a region whose value does not matter.
#[derive(Debug, Default)]
pub struct IoFds {
    /// The eventfds. Duplicates for the peer; they travel with the reply and are closed here.
    pub events: Vec<OwnedFd>,
    /// Parts of the region, and the index of the eventfd of each.
    pub areas: Vec<(Area, usize)>,
}

/// What DEVICE_GET_IRQ_INFO answers. The default is a kind that the device does not have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IrqInfo {
    /// Number of interrupts of this kind (for MSI-X, vectors).
    pub count: u32,
    /// They can be signalled through eventfds.
    pub eventfd: bool,
    /// [`IrqAction::Mask`] and [`IrqAction::Unmask`] work.
    pub maskable: bool,
    /// One masks itself when it fires.
    pub automasked: bool,
    /// They are set up as a whole: none can be added without taking all down first.
    pub noresize: bool,
}

/// A range of the client's memory that the device may reach from now on.
#[derive(Debug)]
pub struct DmaMap {
    /// First bus address.
    pub iova: u64,
    /// Length in bytes; never 0, and `iova + len` does not overflow.
    pub len: u64,
    /// The device may read it.
    pub readable: bool,
    /// The device may write it.
    pub writable: bool,
    /// The file to map; mapping it waits for nobody (see [`descriptor`](crate::descriptor)). Without one the memory can only be reached by messages,
    /// which a device that wants mapped memory should refuse with [`Errno::OPNOTSUPP`] and a clear
    /// log line: it is what a QEMU without `share=on` sends.
    pub fd: Option<PeerFd>,
    /// Offset of the range in the file, in bytes.
    pub fd_offset: u64,
}

/// Memory that the client takes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaUnmap {
    /// One range, which has to be one that was mapped.
    Range {
        /// First bus address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// All of them.
    All,
}

/// What to do with interrupts (`VFIO_IRQ_SET_ACTION_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IrqAction {
    /// Hold them back.
    Mask,
    /// Let them through again.
    Unmask,
    /// Raise them; or with eventfds, say where to signal when the device raises them.
    Trigger,
}

/// What SET_IRQS brings along (`VFIO_IRQ_SET_DATA_*`).
#[derive(Debug)]
pub enum IrqData {
    /// Nothing: the action is for the whole range. Trigger with `count` 0 disables all interrupts
    /// of the index.
    None,
    /// One flag per interrupt of the range: the action is for those that are set.
    Bools(Vec<bool>),
    /// One eventfd per interrupt of the range (that they are eventfds was checked), or none at all,
    /// which takes the eventfds of the range away.
    Eventfds(Vec<PeerFd>),
}

/// A SET_IRQS request. `start + count` does not overflow; whether the range exists is for the
/// device to check.
#[derive(Debug)]
pub struct SetIrqs {
    /// The interrupt kind, see [`irq`].
    pub index: u32,
    /// First interrupt of the range.
    pub start: u32,
    /// Number of interrupts in the range.
    pub count: u32,
    /// What to do.
    pub action: IrqAction,
    /// With what.
    pub data: IrqData,
}

/// What the client stated during version negotiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// How many descriptors it takes with one message.
    pub max_msg_fds: u32,
    /// How many bytes it takes in one data transfer.
    pub max_data_xfer_size: u64,
}

/// Lets a register write take its time: see [`Device::region_write`].
pub struct Later<'a> {
    make: &'a mut dyn FnMut() -> Option<Done>,
}

impl<'a> Later<'a> {
    /// Wraps what makes the handle; `make` returns `None` from its second call on.
    pub fn new(make: &'a mut dyn FnMut() -> Option<Done>) -> Self {
        Self { make }
    }

    /// Asks for a handle: the write is answered when that completes, and with its outcome, once
    /// `region_write` has returned `Ok`. There is one per write; a second call gets `None`.
    pub fn done(&mut self) -> Option<Done> {
        (self.make)()
    }
}

impl fmt::Debug for Later<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Later")
    }
}

/// A device as the server sees it. All methods are called from the reactor's thread, one at a
/// time, and must not block; what has to wait for I/O in flight takes a [`Done`] along and
/// completes it from wherever that ends. While a [`Done`] is outstanding, nothing else of this
/// device is called; other devices of the same reactor go on.
///
/// Every value is the peer's word and has been checked only for what its documentation says.
/// An `Err` becomes an error reply with that number.
pub trait Device: Send {
    /// Answers DEVICE_GET_INFO. Asked once for each client, before anything else.
    fn info(&mut self) -> DeviceInfo {
        DeviceInfo::default()
    }

    /// How many ranges of memory a client may share at once; the server advertises it during
    /// version negotiation, and does no more about it: [`dma_map`](Self::dma_map) is to refuse what
    /// is too much.
    fn max_dma_maps(&self) -> u32 {
        DEFAULT_MAX_DMA_MAPS
    }

    /// Answers DEVICE_GET_REGION_INFO, for an index below [`DeviceInfo::regions`].
    fn region_info(&mut self, index: u32) -> Result<RegionInfo, Errno>;

    /// Answers DEVICE_GET_REGION_IO_FDS, for an index below [`DeviceInfo::regions`]. The default
    /// has none, and the client gets [`Errno::OPNOTSUPP`]; so it does where there are no areas.
    fn region_io_fds(&mut self, index: u32) -> Result<IoFds, Errno> {
        let _ = index;
        Err(Errno::OPNOTSUPP)
    }

    /// Answers DEVICE_GET_IRQ_INFO, for an index below [`DeviceInfo::irqs`].
    fn irq_info(&mut self, index: u32) -> Result<IrqInfo, Errno>;

    /// A client is attached: version negotiation is over. It may ask for anything now.
    fn connected(&mut self, peer: &Peer) {
        let _ = peer;
    }

    /// The client is gone. Let go of every DMA map and eventfd, and complete `done` when nothing
    /// touches the client's memory any more; the next client is accepted after that. Called once
    /// for each [`connected`](Device::connected). The outcome is only logged.
    fn disconnected(&mut self, done: Done);

    /// Fills `data`, which is not empty, from a region whose index is below
    /// [`DeviceInfo::regions`]. `offset` plus the length does not overflow, but has not been
    /// checked against the size of the region.
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno>;

    /// Writes `data` to a region; for the range, see [`region_read`](Device::region_read).
    ///
    /// A write that has to wait (a function level reset) takes a handle from `later`.
    fn region_write(
        &mut self,
        region: u32,
        offset: u64,
        data: &[u8],
        later: &mut Later<'_>,
    ) -> Result<(), Errno>;

    /// Whether another thread of the device's is to poll this client's socket as well, because it
    /// sleeps while most of what comes are writes that only wake it. Asked whenever no message is
    /// left to handle, unless somebody has the client's [`SharedSocket`].
    fn wants_shared_socket(&mut self) -> bool {
        false
    }

    /// Takes the socket that it [asked for](Self::wants_shared_socket). From the thread that polls
    /// it, writes reach the device by other ways than [`region_write`](Self::region_write).
    fn share_socket(&mut self, socket: SharedSocket) {
        drop(socket);
    }

    /// Sets up, takes down, masks or raises interrupts.
    fn set_irqs(&mut self, request: SetIrqs) -> Result<(), Errno>;

    /// A range of memory becomes reachable. [`Errno::EXIST`] if it overlaps one that is.
    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno>;

    /// A range of memory goes away: complete `done` when nothing touches it any more.
    fn dma_unmap(&mut self, unmap: DmaUnmap, done: Done);

    /// What was asked for up to here has to be in force when this returns: called after a few
    /// requests and before their replies are sent. So a device may do once for several maps what
    /// it would have to do for each.
    fn settle(&mut self) {}

    /// Resets the device: complete `done` when it is as after power-on. DMA maps and eventfds
    /// stay, they are the client's.
    fn reset(&mut self, done: Done);

    /// How the device is moved to another server, if it can be.
    fn migration(&mut self) -> Option<&mut dyn Migration> {
        None
    }

    /// Writes down what a successor has to know of the client and of what it has done, with
    /// duplicates of what the client sent in `fds`. No [`Done`] is outstanding. The device may be
    /// asked to go on as if this had not been called.
    ///
    /// # Errors
    ///
    /// The default: a device of this kind can not be handed over.
    fn save(&mut self, fds: &mut Descriptors) -> Result<serde_json::Value, SaveError> {
        let _ = fds;
        Err(SaveError::Device)
    }

    /// As [`save`](Self::save), for a record that takes the place of the last one: what a message
    /// costs in it is not to depend on how many there were before. Only changes of
    /// [lasting](Descriptors::put_lasting) descriptors are given.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save).
    fn record(&mut self, fds: &mut Descriptors) -> Result<serde_json::Value, SaveError> {
        self.save(fds)
    }

    /// Whoever keeps the next record has none of those before, and no lasting descriptors.
    fn begin_records(&mut self) {}

    /// The other side of [`save`](Self::save) and of [`record`](Self::record), called once, before
    /// anything else. The predecessor
    /// may still go on, so nothing that the client would notice is done here. What the client
    /// had sent is held as ever: in [`PeerFd::of_predecessor`], with this `closer`.
    ///
    /// # Errors
    ///
    /// The default: a device of this kind can not be taken over.
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
