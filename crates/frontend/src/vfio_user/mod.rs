//! vfio-user front end: a controller as a PCI function behind a vfio-user socket.
//!
//! # Architecture
//!
//! [`ControllerDevice`] connects a [`Controller`], which has no PCI parts, to the vfio-user server,
//! which has no NVMe parts:
//!
//! | region | contents |
//! |---|---|
//! | BAR0, 16 KiB | registers from 0, doorbells from 1000h (a mappable page, optionally) |
//! | BAR4, 4 KiB | the MSI-X table, and its pending bits from 800h |
//! | configuration | [`shadowbell_vfio_user::pci`]: power management, MSI-X, PCI Express with FLR |
//!
//! Interrupts are eventfds, one per MSI-X vector. The VMM masks vectors: while a vector is masked,
//! it disconnects the eventfd or delays the interrupt.
//!
//! # Bus mastering
//!
//! A function whose Bus Master Enable bit is 0 makes no memory requests (PCI Express Base
//! Specification, 7.5.1.1.3). The bit protects a kernel that starts after a crash (kdump) from DMA
//! of the previous kernel, so it is implemented strictly. The controller accesses the client's
//! memory only while the bit is 1. A write that clears the bit gets its reply when no access is in
//! progress any more. See `memory.rs`.
//!
//! # Restart for upgrade, and recovery
//!
//! [`Device::record`] serializes the state of the function and of its client. [`Device::restore`]
//! restores that state in a device with a new controller: the configuration space, the MSI-X table,
//! the eventfds of the vectors, and the ranges of memory with their files, which are mapped again.
//! The controller's own state (registers, queues, the doorbell page) is saved separately. It is
//! restored afterwards, because it refers to the memory and the eventfds.
//!
//! # Migration to another server
//!
//! See `migration.rs`. The stream contains the state of the function and of the controller. It does
//! not contain memory and eventfds of the client.
//!
//! # Not implemented
//!
//! The interrupt pin, and D3hot: in this power state, the registers remain accessible.

mod budget;
mod doorbell_source;
mod files;
mod halt;
mod memory;
mod migrated_state;
mod migration;
mod pci;
mod written_ranges;

pub use budget::read_limits;
pub use pci::{BAR0_SIZE, MSIX_BAR};

use doorbell_source::{SocketDoorbells, WakingWrites};
use halt::Halt;
use memory::{Memory, SavedMemory};
use serde::{Deserialize, Serialize};
use shadowbell_controller::Controller;
use shadowbell_controller::config::PCI_VENDOR_ID;
use shadowbell_memory::{EventFd, Signals};
use shadowbell_spec::regs::{self, DOORBELLS};
use shadowbell_state::{Bytes, Descriptors, FdRef, read_fields};
use shadowbell_vfio_user::descriptor::{Closer, PeerFd};
use shadowbell_vfio_user::device::{
    Area, Completer, Deferral, Device, DmaMap, DmaUnmap, IoFds, IrqAction, IrqData, IrqInfo,
    Mapping, Peer, RegionInfo, SetIrqs, irq, region,
};
use shadowbell_vfio_user::migration::Migration;
use shadowbell_vfio_user::pci::{CONFIG_SIZE, ConfigSpace, Effects, FunctionError, MsixTable};
use shadowbell_vfio_user::{Errno, LogLimit, RestoreError, SaveError, SharedSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

/// Client event, which the device's owner may log or count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// A client connected.
    Attached,
    /// The client has disconnected, and the controller no longer accesses its memory.
    Detached,
    /// The guest has started to use the controller, but none of the client's memory can be mapped.
    NoSharedMemory,
    /// The guest has written the admin queue's doorbell, but the shared memory contains no command.
    /// So the client has sent a file, but does not share the guest's memory by it.
    MemoryNotShared,
}

/// Callback for each [`ClientEvent`]. It runs on the reactor's thread or on an I/O thread, and must
/// not block.
pub type ClientEventHandler = Arc<dyn Fn(ClientEvent) + Send + Sync>;

/// Controller as a device of a vfio-user server.
pub struct ControllerDevice {
    controller: Controller,
    config: ConfigSpace,
    msix: MsixTable,
    memory: Memory,
    handler: ClientEventHandler,
    /// True if a problem with this client's memory has been reported.
    has_reported: bool,
    /// True if the memory of the admin queue has been checked since the controller was enabled.
    has_checked: bool,
    /// Counter of I/O thread wakeups by the client's doorbell writes.
    doorbell_writes: WakingWrites,
    halt: Halt,
    /// Reference to an object that exists while a thread parses a migration state.
    parser: Weak<()>,
    /// State for signalling the eventfds that clients have sent.
    signals: Signals,
    log: LogLimit,
}

/// Serialized [`ControllerDevice`] for the next server process, without its controller.
#[derive(Serialize, Deserialize)]
struct SavedDevice {
    config: Bytes,
    msix_table: Bytes,
    msix_pending: Bytes,
    memory: SavedMemory,
    /// Interrupt vectors and their eventfds.
    interrupts: Vec<(usize, FdRef)>,
    #[serde(default)]
    has_reported: bool,
    #[serde(default)]
    has_checked: bool,
}

impl ControllerDevice {
    /// Creates a PCI function for `controller`. No other front end may be connected to the
    /// controller.
    ///
    /// # Errors
    /// [`FunctionError`], if a PCI function cannot have the controller's number of vectors.
    pub fn new(controller: Controller, handler: ClientEventHandler) -> Result<Self, FunctionError> {
        let vectors = u16::try_from(controller.vectors()).unwrap_or(u16::MAX);
        let config = ConfigSpace::new(&pci::function(PCI_VENDOR_ID, vectors))?;
        Ok(Self {
            memory: Memory::new(controller.clone()),
            controller,
            config,
            msix: MsixTable::new(vectors),
            handler,
            has_reported: false,
            has_checked: false,
            doorbell_writes: WakingWrites::default(),
            halt: Halt::default(),
            parser: Weak::new(),
            signals: Signals::default(),
            log: LogLimit::default(),
        })
    }

    fn vectors(&self) -> u32 {
        u32::try_from(self.controller.vectors()).unwrap_or(0)
    }

    /// Converts descriptors of the client to eventfds. Another type of descriptor, and a lack of
    /// descriptors in this process, cause different errors.
    fn events(&self, fds: Vec<PeerFd>) -> Result<Vec<EventFd>, Errno> {
        let event = |fd| EventFd::of_peer(Arc::new(fd), &self.signals);
        let events: Result<Vec<_>, std::io::Error> = fds.into_iter().map(event).collect();
        events.map_err(|e| e.raw_os_error().map_or(Errno::BADF, Errno::from_raw_os_error))
    }

    /// Applies the effects of a write to the configuration space.
    fn apply(&mut self, effects: &Effects, deferral: &mut Deferral<'_>) {
        if effects.function_level_reset {
            return self.restart(deferral.completer().unwrap_or_else(|| Completer::new(|_| ())));
        }
        match effects.command.map(|command| command.bus_master) {
            Some(true) => self.memory.grant(),
            Some(false) if self.memory.is_granted() => {
                self.memory.revoke(deferral.completer().unwrap_or_else(|| Completer::new(|_| ())));
            }
            _ => {}
        }
    }

    /// Resets the function and the controller to the state after power-on. The client's DMA maps
    /// and eventfds stay.
    fn restart(&mut self, done: Completer) {
        self.config.reset();
        self.msix.reset();
        self.has_checked = false;
        self.halt = Halt::Running;
        // The controller is reset before its access is revoked, because a reset may still access
        // memory.
        let revoke = self.memory.start_revoke();
        self.controller.reset(move || revoke(done));
    }

    /// Reports a problem with the client's memory, once, when a guest starts to use the controller.
    /// A range without a descriptor is no problem by itself, because QEMU maps video memory without
    /// one.
    fn check_memory(&mut self, offset: u64) {
        if self.has_reported {
            return;
        }
        if self.memory.is_all_unusable() {
            self.has_reported = true;
            return (self.handler)(ClientEvent::NoSharedMemory);
        }
        if offset == DOORBELLS && !self.has_checked {
            self.has_checked = true;
            let mut asq = [0; 8];
            self.controller.read(regs::ASQ, &mut asq);
            // No driver starts with a command of 64 zeroes, which is Delete I/O Submission Queue 0.
            // If there are only zeroes, the VMM has sent a file but uses private memory: with
            // `share=off`, a guest's writes do not change the file.
            if self.memory.is_zero(u64::from_le_bytes(asq) & !0xfff, shadowbell_spec::Sqe::SIZE) {
                self.has_reported = true;
                (self.handler)(ClientEvent::MemoryNotShared);
            }
        }
    }
}

impl Device for ControllerDevice {
    fn max_dma_maps(&self) -> u32 {
        memory::MAX_RANGES
    }

    fn region_info(&mut self, index: u32) -> Result<RegionInfo, Errno> {
        let plain = |size| RegionInfo { size, readable: true, writable: true, mapping: None };
        Ok(match index {
            region::BAR0 => RegionInfo { mapping: self.doorbells()?, ..plain(BAR0_SIZE) },
            MSIX_BAR => plain(pci::MSIX_BAR_SIZE),
            region::CONFIG => plain(CONFIG_SIZE as u64),
            _ => RegionInfo::default(),
        })
    }

    /// Replies with eventfds for doorbells. With shadow doorbells, the value is in memory, and a
    /// doorbell write only wakes an I/O thread, so an eventfd can replace it.
    fn region_io_fds(&mut self, index: u32) -> Result<IoFds, Errno> {
        if index != region::BAR0 {
            return Err(Errno::OPNOTSUPP);
        }
        let found = self.controller.doorbell_eventfds().map_err(|error| {
            self.log
                .warn(format_args!("a client asked for descriptors for its doorbells: {error}"));
            Errno::MFILE
        })?;
        Ok(IoFds {
            events: found
                .events
                .into_iter()
                .map(OwnedFd::try_from)
                .collect::<Result<_, _>>()
                .map_err(|_| Errno::MFILE)?,
            areas: found
                .doorbells
                .into_iter()
                .map(|(offset, event)| (Area { offset, len: 4 }, event))
                .collect(),
        })
    }

    fn irq_info(&mut self, index: u32) -> Result<IrqInfo, Errno> {
        Ok(match index {
            // `noresize` is not set, because vectors can be added one by one.
            irq::MSIX => IrqInfo { count: self.vectors(), eventfd: true, ..IrqInfo::default() },
            // Interrupt for errors that make the device unusable. It is never raised, because QEMU
            // would then stop the machine. This controller reports failures in CSTS.CFS, so that a
            // host can recover. It exists because QEMU warns at each start if a device does not
            // have it.
            irq::ERR => IrqInfo { count: 1, eventfd: true, noresize: true, ..IrqInfo::default() },
            _ => IrqInfo::default(),
        })
    }

    fn connected(&mut self, _peer: &Peer) {
        self.has_reported = false;
        self.has_checked = false;
        (self.handler)(ClientEvent::Attached);
    }

    fn disconnected(&mut self, done: Completer) {
        self.config.reset();
        self.msix.reset();
        self.halt = Halt::Running;
        self.controller.log_writes(false, || ());
        let released = self.memory.clear();
        let handler = Arc::clone(&self.handler);
        let controller = self.controller.clone();
        self.controller.disconnect(move || {
            // For the next client, bus mastering is disabled initially.
            controller.disable_dma(|| ());
            handler(ClientEvent::Detached);
            done.ok();
            drop(released);
        });
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        self.doorbell_writes.reset();
        match index {
            region::BAR0 => {
                pci::check_range(offset, data.len(), BAR0_SIZE)?;
                self.controller.read(offset, data);
                Ok(())
            }
            MSIX_BAR => pci::read_msix(&self.msix, offset, data),
            region::CONFIG => self.config.read(offset, data),
            _ => Err(Errno::INVAL),
        }
    }

    fn region_write(
        &mut self,
        index: u32,
        offset: u64,
        data: &[u8],
        deferral: &mut Deferral<'_>,
    ) -> Result<(), Errno> {
        self.memory.publish();
        match index {
            region::BAR0 => {
                pci::check_range(offset, data.len(), BAR0_SIZE)?;
                if offset >= DOORBELLS {
                    if !self.has_checked {
                        self.check_memory(offset);
                    }
                    if let Ok(value) = data.try_into().map(u32::from_le_bytes) {
                        self.doorbell_writes.count(self.controller.write_doorbell(offset, value));
                    }
                    return Ok(());
                }
                if offset == regs::CC {
                    self.has_checked = false;
                    self.check_memory(offset);
                }
                self.controller.write(offset, data);
                Ok(())
            }
            MSIX_BAR => pci::write_msix(&mut self.msix, offset, data),
            region::CONFIG => {
                let effects = self.config.write(offset, data)?;
                // During migration, only migration messages may run the device again.
                if effects.function_level_reset && !self.halt.is_running() {
                    return Err(Errno::BUSY);
                }
                self.apply(&effects, deferral);
                Ok(())
            }
            _ => Err(Errno::INVAL),
        }
    }

    fn requests_shared_socket(&mut self) -> bool {
        self.doorbell_writes.worker().is_some()
    }

    fn share_socket(&mut self, socket: SharedSocket) {
        if let Some(worker) = self.doorbell_writes.worker() {
            self.controller.add_doorbell_source(worker, Box::new(SocketDoorbells(socket)));
        }
        self.doorbell_writes.reset();
    }

    fn set_irqs(&mut self, request: SetIrqs) -> Result<(), Errno> {
        let SetIrqs { index, start, count, action, data } = request;
        if action != IrqAction::Trigger {
            return Err(Errno::OPNOTSUPP);
        }
        let available = match index {
            irq::MSIX => self.vectors(),
            irq::ERR => 1,
            _ => 0,
        };
        if count == 0 && matches!(data, IrqData::None) {
            // The request disables all vectors of the index. It is also valid for an index without
            // vectors.
            for vector in (0..available).filter(|_| index == irq::MSIX) {
                self.controller.set_interrupt(vector as usize, None);
            }
            return Ok(());
        }
        if start.checked_add(count).is_none_or(|end| end > available) {
            return Err(Errno::INVAL);
        }
        if index == irq::ERR {
            // The interrupt is never raised, so its eventfd is not stored.
            return match data {
                IrqData::Eventfds(fds) => self.events(fds).map(drop),
                IrqData::None | IrqData::Bools(_) => Ok(()),
            };
        }
        let vectors = (start..start + count).map(|vector| vector as usize);
        match data {
            IrqData::None => vectors.for_each(|vector| {
                self.controller.trigger_interrupt(vector);
            }),
            IrqData::Bools(flags) => {
                for (vector, _) in vectors.zip(flags).filter(|(_, set)| *set) {
                    self.controller.trigger_interrupt(vector);
                }
            }
            IrqData::Eventfds(fds) if fds.is_empty() => vectors.for_each(|vector| {
                self.controller.set_interrupt(vector, None);
            }),
            IrqData::Eventfds(fds) => {
                for (vector, event) in vectors.zip(self.events(fds)?) {
                    self.controller.set_interrupt(vector, Some(event));
                }
            }
        }
        Ok(())
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        self.memory.map(map)
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap, done: Completer) {
        match unmap {
            DmaUnmap::Range { iova, len } => self.memory.unmap(iova, len, done),
            DmaUnmap::All => self.memory.unmap_all(done),
        }
    }

    fn publish(&mut self) {
        self.memory.publish();
    }

    fn reset(&mut self, done: Completer) {
        self.restart(done);
    }

    fn migration(&mut self) -> Option<&mut dyn Migration> {
        Some(self)
    }

    fn record(&mut self, fds: &mut Descriptors) -> Result<serde_json::Value, SaveError> {
        // A device that is being migrated may already run on another machine. The next server
        // process would run it here too.
        if !self.halt.is_running() {
            return Err(SaveError::Client("it is being migrated".to_owned()));
        }
        let mut interrupts = Vec::new();
        for vector in 0..self.controller.vectors() {
            if let Some(event) = self.controller.interrupt(vector) {
                interrupts.push((vector, fds.add(event.as_fd().try_clone_to_owned()?)));
            }
        }
        let (table, pending) = self.msix.bytes();
        Ok(serde_json::to_value(SavedDevice {
            config: Bytes(self.config.bytes().to_vec()),
            msix_table: Bytes(table.to_vec()),
            msix_pending: Bytes(pending.to_vec()),
            memory: self.memory.record(fds)?,
            interrupts,
            has_reported: self.has_reported,
            has_checked: self.has_checked,
        })?)
    }

    fn reset_checkpoint(&mut self) {
        self.memory.reset_checkpoint();
    }

    fn restore(
        &mut self,
        saved: serde_json::Value,
        fds: &mut Descriptors,
        closer: &Arc<Closer>,
    ) -> Result<(), RestoreError> {
        let saved: SavedDevice = read_fields("device", saved)?;
        let config = saved.config.0.as_slice().try_into();
        self.config.restore(config.map_err(|_| other("configuration space"))?);
        if !self.msix.restore(&saved.msix_table.0, &saved.msix_pending.0) {
            return Err(other("number of interrupt vectors"));
        }
        self.memory.restore(saved.memory, fds, closer)?;
        for (vector, event) in saved.interrupts {
            let event = Arc::new(PeerFd::of_predecessor(fds.take(event)?, closer));
            let event = EventFd::of_peer(event, &self.signals)?;
            if !self.controller.set_interrupt(vector, Some(event)) {
                return Err(other("number of interrupt vectors"));
            }
        }
        self.has_reported = saved.has_reported;
        self.has_checked = saved.has_checked;
        Ok(())
    }
}

/// Checks that the memory of a client in the checkpoint of a device can be mapped. Nothing stays
/// mapped.
///
/// # Errors
/// [`RestoreError`]: the state cannot be decoded, or memory cannot be mapped.
pub fn check_memory(saved: &serde_json::Value, fds: &mut Descriptors) -> Result<(), RestoreError> {
    let saved: SavedDevice = read_fields("device", saved)?;
    memory::check(saved.memory, fds)
}

fn other(what: &str) -> RestoreError {
    RestoreError::Client(format!("its controller has another {what} than this one"))
}

impl ControllerDevice {
    fn doorbells(&self) -> Result<Option<Mapping>, Errno> {
        if !self.controller.has_mapped_doorbells() {
            return Ok(None);
        }
        let page = self.controller.doorbells();
        let mapping = page.mapping();
        let fd =
            mapping.fd().ok_or(Errno::NODEV)?.try_clone_to_owned().map_err(|_| Errno::MFILE)?;
        // To get the file offset of an area, clients add the area's offset in the region to the
        // file offset of the region. So the file offset of the region is the page's file offset
        // minus its region offset.
        let offset = mapping.fd_offset() + page.offset_in_mapping() as u64;
        let offset = offset.checked_sub(DOORBELLS).ok_or(Errno::NODEV)?;
        let areas = vec![Area { offset: DOORBELLS, len: page.len() as u64 }];
        Ok(Some(Mapping { fd, offset, areas }))
    }
}

impl std::fmt::Debug for ControllerDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControllerDevice")
            .field("controller", &self.controller)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
