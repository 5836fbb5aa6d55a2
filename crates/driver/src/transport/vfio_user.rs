//! vfio-user transport: a controller behind a UNIX socket.

use super::interface::{Transport, TransportError};
use ::shadowbell_vfio_user::client::{Client, ClientError, ClientIoFds, DmaRange, Options};
use ::shadowbell_vfio_user::device::{DmaUnmap, irq, region};
use parking_lot::Mutex;
use shadowbell_memory::{EventFd, Mapping, PeerDescriptor, Protection, SharedBytes, Signals};
use shadowbell_spec::{pci, regs};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Offset of the Command register in configuration space. PCI Local Bus 3.0, 6.2.2.
const PCI_COMMAND: u64 = 0x04;
/// Command register: Memory Space, Bus Master, Interrupt Disable. The driver never uses INTx, but a
/// server may check Interrupt Disable: if INTx is enabled and MSI-X is not, SPDK's server raises
/// INTx for each admin completion. If INTx has no receiver, the server fails the controller.
const COMMAND_SET: u16 = 1 << 1 | 1 << 2 | 1 << 10;
/// Offset of the Status register. Bit 4 indicates a capabilities list.
const PCI_STATUS: u64 = 0x06;
const STATUS_CAPABILITIES: u16 = 1 << 4;
/// Offset of the pointer to the first capability.
const PCI_CAPABILITIES: u64 = 0x34;
/// Valid offsets of a capability.
const CAPABILITIES: std::ops::Range<u8> = 0x40..0xfd;
/// Minimum size of BAR0: the controller properties and the doorbells of the admin queue.
const BAR0_MIN: u64 = regs::DOORBELLS + 8;

/// A [`Transport`] over a vfio-user socket.
///
/// Register accesses are messages with a reply. Doorbells are posted region writes without a reply,
/// unless the server lets the client map them. Memory is shared by the file descriptor of its
/// memfd. The IOVA of a mapping is its address in this process, so IOVAs are unique.
pub struct VfioUser {
    client: Client,
    name: String,
    doorbells: Option<SharedBytes>,
    vectors: u32,
    resettable: bool,
    /// Shared mappings with their IOVAs.
    shared: Mutex<Vec<(u64, Weak<Mapping>)>>,
}

impl VfioUser {
    /// Connects to the server at `path`. If `path` is a directory, connects to its entry `cntrl`.
    /// Enables memory accesses and bus mastering of the device, and disables INTx.
    ///
    /// `timeout` limits every reply, and also the wait for a device that another client uses.
    ///
    /// # Errors
    /// [`TransportError`], if the path has no server, or the device is not an NVMe controller.
    pub fn connect(path: impl AsRef<Path>, timeout: Duration) -> Result<Self, TransportError> {
        let path = path.as_ref();
        let name = format!("vfio-user:{}", path.display());
        let failed = |operation| {
            let device = name.clone();
            move |source: ClientError| TransportError::Failed {
                device,
                operation,
                source: source.into(),
            }
        };
        let options = Options { timeout: Some(timeout) };
        let client = Client::connect(path, options).map_err(failed("connecting"))?;
        let info = client.device_info().map_err(failed("asking about the device"))?;
        let bar0 = client.region_info(region::BAR0).map_err(failed("asking about BAR0"))?;
        let other = |operation, what: String| TransportError::Failed {
            device: name.clone(),
            operation,
            source: what.into(),
        };
        if !bar0.readable || !bar0.writable || bar0.size < BAR0_MIN {
            return Err(other(
                "asking about BAR0",
                format!("it has {} bytes, too few for an NVMe controller", bar0.size),
            ));
        }
        let irqs = client.irq_info(irq::MSIX).map_err(failed("asking about MSI-X"))?;
        let vectors =
            if irqs.eventfd { irqs.count.min(u32::from(pci::MSIX_MAX_VECTORS)) } else { 0 };
        let doorbells = bar0
            .areas
            .iter()
            .find(|area| {
                area.offset <= regs::DOORBELLS
                    && regs::DOORBELLS < area.offset.saturating_add(area.len)
            })
            .map(|area| {
                let mapping =
                    Mapping::from_fd(&*area.fd, area.fd_offset, area.len, Protection::ReadWrite)
                        .map_err(|e| other("mapping the doorbells", e.to_string()))?;
                let skip = usize::try_from(regs::DOORBELLS - area.offset).ok();
                skip.and_then(|skip| mapping.bytes().slice(skip, mapping.len().checked_sub(skip)?))
                    .ok_or_else(|| other("mapping the doorbells", "the area is empty".into()))
            })
            .transpose()?;
        let transport = Self {
            client,
            name: name.clone(),
            doorbells,
            vectors,
            resettable: info.resettable,
            shared: Mutex::default(),
        };
        transport.set_command()?;
        Ok(transport)
    }

    fn failed(&self, operation: &'static str, source: ClientError) -> TransportError {
        let device = self.name.clone();
        match source {
            ClientError::Refused { .. }
            | ClientError::Unsendable { .. }
            | ClientError::TooManyMaps { .. } => {
                TransportError::Failed { device, operation, source: source.into() }
            }
            // Any other error breaks the connection, so the device is unreachable.
            _ => TransportError::Disconnected { device, operation, source: source.into() },
        }
    }

    /// Checks whether memory pages were lost. The server has the descriptors of this process's
    /// memory, and can remove huge pages from it. The content of removed pages is lost, and later
    /// writes to them do not reach the server. Called with each register read; the watchdog reads a
    /// register periodically.
    fn check_memory(&self) -> Result<(), TransportError> {
        let lost = |mapping: &Weak<Mapping>| mapping.upgrade().is_some_and(|m| m.is_poisoned());
        if !self.shared.lock().iter().any(|(_, mapping)| lost(mapping)) {
            return Ok(());
        }
        Err(TransportError::Disconnected {
            device: self.name.clone(),
            operation: "checking shared memory",
            source: "its server has removed pages from the memory".into(),
        })
    }

    /// Reads from a region of the device.
    fn read<const LEN: usize>(
        &self,
        region: u32,
        offset: u64,
        operation: &'static str,
    ) -> Result<[u8; LEN], TransportError> {
        let mut bytes = [0; LEN];
        let read = self.client.region_read(region, offset, &mut bytes);
        read.map(|()| bytes).map_err(|e| self.failed(operation, e))
    }

    /// Writes a register.
    fn write(&self, offset: u64, value: &[u8]) -> Result<(), TransportError> {
        let written = self.client.region_write(region::BAR0, offset, value);
        written.map_err(|e| self.failed("writing a register", e))
    }

    fn config16(&self, offset: u64) -> Result<u16, TransportError> {
        Ok(u16::from_le_bytes(self.read(region::CONFIG, offset, "reading configuration space")?))
    }

    fn set_config16(&self, offset: u64, value: u16) -> Result<(), TransportError> {
        self.client
            .region_write(region::CONFIG, offset, &value.to_le_bytes())
            .map_err(|e| self.failed("writing configuration space", e))
    }

    fn set_command(&self) -> Result<(), TransportError> {
        let command = self.config16(PCI_COMMAND)?;
        self.set_config16(PCI_COMMAND, command | COMMAND_SET)
    }

    /// Sets MSI-X Enable. Some servers raise interrupts as soon as eventfds are set, but servers
    /// that model hardware more closely require this bit.
    fn enable_msix(&self) -> Result<(), TransportError> {
        if self.config16(PCI_STATUS)? & STATUS_CAPABILITIES == 0 {
            return Ok(());
        }
        let mut at = self.config16(PCI_CAPABILITIES)? as u8 & !3;
        // A capability has at least 4 bytes. So a chain with more entries than fit into the space
        // has a cycle.
        for _ in 0..CAPABILITIES.len() / 4 {
            if !CAPABILITIES.contains(&at) {
                break;
            }
            let [id, next] = self.config16(at.into())?.to_le_bytes();
            if id == pci::CAP_ID_MSIX {
                let control = u64::from(at) + 2;
                let value = self.config16(control)?;
                let enabled = value & !pci::MSIX_FUNCTION_MASK | pci::MSIX_ENABLE;
                return if value == enabled { Ok(()) } else { self.set_config16(control, enabled) };
            }
            at = next & !3;
        }
        Ok(())
    }
}

impl Transport for VfioUser {
    fn name(&self) -> &str {
        &self.name
    }

    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        self.check_memory()?;
        Ok(u32::from_le_bytes(self.read(region::BAR0, offset, "reading a register")?))
    }

    fn read64(&self, offset: u64) -> Result<u64, TransportError> {
        Ok(u64::from_le_bytes(self.read(region::BAR0, offset, "reading a register")?))
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.write(offset, &value.to_le_bytes())
    }

    fn write64(&self, offset: u64, value: u64) -> Result<(), TransportError> {
        self.write(offset, &value.to_le_bytes())
    }

    fn write_doorbell(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.client
            .region_write_posted(region::BAR0, offset, &value.to_le_bytes())
            .map_err(|e| self.failed("ringing a doorbell", e))
    }

    fn doorbell_events(&self, offsets: [u64; 2]) -> Result<[Option<EventFd>; 2], TransportError> {
        const ACTION: &str = "asking for descriptors for doorbells";
        let ClientIoFds { events, areas } = match self.client.region_io_fds(region::BAR0) {
            Ok(found) => found,
            Err(ClientError::Refused { .. }) => return Ok([None, None]),
            Err(error) => return Err(self.failed(ACTION, error)),
        };
        let of = |offset| {
            let (_, event) = areas.iter().find(|(area, _)| area.offset == offset)?;
            let fd: PeerDescriptor = Arc::clone(events.get(*event)?) as _;
            let event = EventFd::of_peer(fd, &Signals::default());
            event.inspect_err(|error| tracing::debug!("{ACTION}: {error}")).ok()
        };
        Ok(offsets.map(of))
    }

    fn hang_up(&self) -> Option<OwnedFd> {
        self.client
            .as_fd()
            .try_clone_to_owned()
            .inspect_err(|e| tracing::debug!("no descriptor to watch: {e}"))
            .ok()
    }

    fn doorbell_page(&self) -> Option<SharedBytes> {
        self.doorbells.clone()
    }

    fn map_dma(&self, mapping: &Arc<Mapping>) -> Result<u64, TransportError> {
        let Some(fd) = mapping.fd() else {
            return Err(TransportError::Unsupported {
                device: self.name.clone(),
                what: "support for memory without a descriptor; share memory of Mapping::shared",
            });
        };
        let iova = mapping.address() as u64;
        let share = DmaRange {
            iova,
            len: mapping.len() as u64,
            readable: true,
            writable: true,
            fd: Some(fd),
            fd_offset: mapping.fd_offset(),
        };
        self.client.dma_map(&share).map_err(|e| self.failed("sharing memory", e))?;
        self.shared.lock().push((iova, Arc::downgrade(mapping)));
        Ok(iova)
    }

    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        self.shared.lock().retain(|(shared, _)| *shared != iova);
        self.client
            .dma_unmap(DmaUnmap::Range { iova, len })
            .map_err(|e| self.failed("unmapping memory", e))
    }

    fn irq_vectors(&self) -> u32 {
        self.vectors
    }

    fn set_irq(&self, vector: u32, event: Option<&EventFd>) -> Result<(), TransportError> {
        let failed = |e| self.failed("setting up an interrupt", e);
        match event {
            Some(event) => {
                let events = std::slice::from_ref(event);
                self.client.set_irq_eventfds(irq::MSIX, vector, events).map_err(failed)?;
                self.enable_msix()
            }
            None => self.client.clear_irq_eventfds(irq::MSIX, vector, 1).map_err(failed),
        }
    }

    fn reset(&self) -> Result<(), TransportError> {
        if !self.resettable {
            return Err(TransportError::Unsupported {
                device: self.name.clone(),
                what: "function reset",
            });
        }
        self.client.reset().map_err(|e| self.failed("resetting the device", e))?;
        // The reset has cleared the Command register.
        self.set_command()
    }
}

impl fmt::Debug for VfioUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VfioUser").field("name", &self.name).finish_non_exhaustive()
    }
}
