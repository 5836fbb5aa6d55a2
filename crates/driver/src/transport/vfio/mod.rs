//! VFIO transport: a PCI device of this machine, through Linux VFIO.
//!
//! # Architecture
//!
//! | module | contents |
//! |---|---|
//! | `address`, `function` | a PCI function, and its description in sysfs |
//! | `space` | opening a device by its group or character device, and mapping memory for it |
//! | `iova` | allocator of I/O virtual addresses |
//! | `bar` | registers and doorbells: loads and stores where they can be mapped |
//! | `info` | variable-length replies of the kernel |
//! | `error` | errors, with instructions for the operator |
//! | `steer` | affinity of interrupts to the processors that use the queue pairs |
//! | `sys` | the ioctls |
//!
//! # Not implemented
//!
//! Devices without an IOMMU (VFIO's "noiommu" mode), and several devices in one I/O address space.

mod address;
mod bar;
mod error;
mod function;
mod info;
mod iova;
mod space;
mod steer;
#[allow(unsafe_code)]
mod sys;

pub use address::PciAddress;
pub use error::VfioError;
pub use function::{PciFunction, SYSFS};
pub use steer::{Steered, steer_interrupts};

use super::interface::{Transport, TransportError};
use bar::{Bar, Window, is_removal};
use error::explain_map;
use iova::IovaSpace;
use parking_lot::Mutex;
use shadowbell_memory::{EventFd, Mapping, SharedBytes};
use shadowbell_spec::pci;
use space::{Opened, Space};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use vfio_bindings::bindings::vfio;

/// Offset of the Command register in configuration space. PCI Local Bus 3.0, 6.2.2.
const PCI_COMMAND: u64 = 0x04;
/// Command register: Memory Space, Bus Master.
const COMMAND_ENABLE: u16 = 1 << 1 | 1 << 2;

/// A [`Transport`] to a PCI device that is bound to `vfio-pci`.
///
/// Register accesses are loads and stores; a doorbell is one posted store. Shared memory is pinned
/// and mapped in the IOMMU; the device can access no other memory of the program. The kernel
/// delivers interrupts as eventfd signals.
///
/// ```no_run
/// use shadowbell_driver::{AttachOptions, Controller, Vfio};
/// use std::sync::Arc;
///
/// fn attach() -> Result<Controller, Box<dyn std::error::Error>> {
///     // After `shadowbell bind 0000:01:00.0`.
///     let transport = Vfio::open("0000:01:00.0".parse()?)?;
///     Ok(Controller::attach(Arc::new(transport), &AttachOptions::default())?)
/// }
/// ```
pub struct Vfio {
    name: String,
    through: String,
    // Fields are dropped in order: the device before the address space that it uses.
    device: OwnedFd,
    config: Window,
    bar: Bar,
    vectors: AtomicU32,
    /// True if the kernel allocates all vectors at once, when the first one is enabled.
    fixed_vectors: bool,
    msix: Mutex<bool>,
    resettable: bool,
    iova: Mutex<IovaSpace>,
    space: Space,
}

impl Vfio {
    /// Opens the NVMe controller at `address` and enables bus mastering. If the character device
    /// interface exists and this user may open it, that interface is used; otherwise the IOMMU
    /// group.
    ///
    /// # Errors
    ///
    /// [`VfioError`], with instructions for the operator.
    pub fn open(address: PciAddress) -> Result<Self, VfioError> {
        let function = check(Path::new(SYSFS), address)?;
        let Opened { device, space, iova, through } = space::open(&function)?;
        let failed = |operation| move |source| VfioError::System { address, operation, source };
        let unsupported = |what: String| VfioError::Unsupported { address, what };

        let flags = sys::device_flags(device.as_fd()).map_err(failed("asking about the device"))?;
        if flags & vfio::VFIO_DEVICE_FLAGS_PCI == 0 {
            return Err(unsupported("according to VFIO, it is not a PCI device".into()));
        }
        let bar = Bar::open(device.as_fd()).map_err(|error| unsupported(error.to_string()))?;
        let (config, _) = Window::find(device.as_fd(), vfio::VFIO_PCI_CONFIG_REGION_INDEX)
            .map_err(failed("asking about its configuration space"))?
            .ok_or_else(|| unsupported("its configuration space is not writable".into()))?;
        let (irq_flags, count) = sys::irq_info(device.as_fd(), vfio::VFIO_PCI_MSIX_IRQ_INDEX)
            .map_err(failed("asking about MSI-X"))?;
        let eventfd = irq_flags & vfio::VFIO_IRQ_INFO_EVENTFD != 0;
        let vectors = if eventfd { count.min(u32::from(pci::MSIX_MAX_VECTORS)) } else { 0 };
        let vfio = Self {
            name: format!("nvme://{address}"),
            through,
            device,
            config,
            bar,
            vectors: AtomicU32::new(vectors),
            fixed_vectors: irq_flags & vfio::VFIO_IRQ_INFO_NORESIZE != 0,
            msix: Mutex::new(false),
            resettable: flags & vfio::VFIO_DEVICE_FLAGS_RESET != 0,
            iova: Mutex::new(iova),
            space,
        };
        vfio.enable_bus_mastering().map_err(failed("enabling bus mastering"))?;
        tracing::debug!(
            "{} opened through {}, {vectors} vectors, doorbells {}",
            vfio.name,
            vfio.through,
            if vfio.bar.is_mapped() { "mapped" } else { "written by system calls" }
        );
        Ok(vfio)
    }

    /// Human-readable name of the kernel interface that the device was opened through.
    #[must_use]
    pub fn through(&self) -> &str {
        &self.through
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    fn failed(&self, operation: &'static str, source: io::Error) -> TransportError {
        let device = self.name.clone();
        if is_removal(&source) {
            TransportError::Disconnected { device, operation, source: source.into() }
        } else {
            TransportError::Failed { device, operation, source: source.into() }
        }
    }

    fn enable_bus_mastering(&self) -> io::Result<()> {
        let command = u16::from_le_bytes(self.config.read(self.fd(), PCI_COMMAND)?);
        self.config.write(self.fd(), PCI_COMMAND, &(command | COMMAND_ENABLE).to_le_bytes())
    }

    /// Enables all vectors at once, with `event` for `vector`. Needed if `fixed_vectors` is true.
    fn enable_all(&self, vector: u32, event: BorrowedFd<'_>) -> io::Result<()> {
        let mut count = self.vectors.load(Ordering::Relaxed);
        // If fewer vectors are available, the kernel returns their number. The next iteration uses
        // that number.
        for _ in 0..8 {
            let mut events = vec![None; count as usize];
            *events.get_mut(vector as usize).ok_or(io::ErrorKind::InvalidInput)? = Some(event);
            let have = sys::set_irq_events(self.fd(), vfio::VFIO_PCI_MSIX_IRQ_INDEX, 0, &events)?;
            if have == 0 {
                self.vectors.store(count, Ordering::Relaxed);
                return Ok(());
            }
            count = have.min(count.saturating_sub(1));
        }
        Err(io::Error::other("the system has no interrupt vectors left"))
    }
}

/// Finds the function at `address`. It must be an NVMe controller that is bound to a VFIO driver.
fn check(sysfs: &Path, address: PciAddress) -> Result<PciFunction, VfioError> {
    let function = PciFunction::find(sysfs, address)
        .map_err(|source| VfioError::System { address, operation: "looking for it", source })?
        .ok_or(VfioError::Absent { address })?;
    if !function.is_nvme() {
        return Err(VfioError::NotNvme { address, class: function.class });
    }
    if !function.is_for_programs() {
        return Err(match function.driver {
            Some(driver) => VfioError::Bound { address, driver },
            None => VfioError::Unbound { address },
        });
    }
    Ok(function)
}

impl Transport for Vfio {
    fn name(&self) -> &str {
        &self.name
    }

    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        self.bar.read32(self.fd(), offset).map_err(|e| self.failed("reading a register", e))
    }

    fn read64(&self, offset: u64) -> Result<u64, TransportError> {
        let low = self.read32(offset)?;
        Ok(u64::from(self.read32(offset.saturating_add(4))?) << 32 | u64::from(low))
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        let written = self.bar.write32(self.fd(), offset, value);
        written.map_err(|e| self.failed("writing a register", e))
    }

    fn write64(&self, offset: u64, value: u64) -> Result<(), TransportError> {
        self.write32(offset, value as u32)?;
        self.write32(offset.saturating_add(4), (value >> 32) as u32)
    }

    #[inline]
    fn write_doorbell(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.bar.ring(self.fd(), offset, value).map_err(|e| self.failed("ringing a doorbell", e))
    }

    /// Returns no page. A store to a mapped doorbell of VFIO is an MMIO write that the device or
    /// its emulation handles, not a store to memory that the controller polls.
    fn doorbell_page(&self) -> Option<SharedBytes> {
        None
    }

    fn map_dma(&self, mapping: &Arc<Mapping>) -> Result<u64, TransportError> {
        let len = mapping.len() as u64;
        let mut iova = self.iova.lock();
        let address = iova.take(len).ok_or_else(|| {
            let left = iova.available();
            let why =
                format!("the IOMMU has no room for {len} bytes in one piece ({left} are free)");
            self.failed("sharing memory", io::Error::new(io::ErrorKind::OutOfMemory, why))
        })?;
        match self.space.map(mapping, address) {
            Ok(()) => Ok(address),
            Err(error) => {
                iova.release(address, len);
                let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
                Err(self.failed("sharing memory", explain_map(error, len, limit)))
            }
        }
    }

    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        const ACTION: &str = "unmapping memory";
        let mut space = self.iova.lock();
        let gone = self.space.unmap(iova, len).map_err(|e| self.failed(ACTION, e))?;
        if gone != len {
            // The IOVA range is not freed, because a part of it may still be mapped.
            let why = format!("{gone} of {len} bytes were unmapped");
            return Err(self.failed(ACTION, io::Error::new(io::ErrorKind::InvalidInput, why)));
        }
        space.release(iova, len);
        Ok(())
    }

    fn irq_vectors(&self) -> u32 {
        self.vectors.load(Ordering::Relaxed)
    }

    fn set_irq(&self, vector: u32, event: Option<&EventFd>) -> Result<(), TransportError> {
        const ACTION: &str = "setting up an interrupt";
        let mut enabled = self.msix.lock();
        if vector >= self.irq_vectors() {
            let why = format!("there is no vector {vector}");
            return Err(self.failed(ACTION, io::Error::new(io::ErrorKind::InvalidInput, why)));
        }
        match (event.map(AsFd::as_fd), *enabled) {
            (None, false) => Ok(()),
            (Some(event), false) if self.fixed_vectors => self.enable_all(vector, event),
            (event, _) => {
                let index = vfio::VFIO_PCI_MSIX_IRQ_INDEX;
                match sys::set_irq_events(self.fd(), index, vector, &[event]) {
                    Ok(0) => Ok(()),
                    Ok(_) => Err(io::Error::new(
                        io::ErrorKind::OutOfMemory,
                        "the system has no interrupt vectors left",
                    )),
                    Err(error) => Err(error),
                }
            }
        }
        .map_err(|error| self.failed(ACTION, error))?;
        *enabled |= event.is_some();
        Ok(())
    }

    fn reset(&self) -> Result<(), TransportError> {
        if !self.resettable {
            return Err(TransportError::Unsupported {
                device: self.name.clone(),
                what: "function reset",
            });
        }
        let reset = sys::reset(self.fd()).and_then(|()| self.enable_bus_mastering());
        reset.map_err(|error| self.failed("resetting the device", error))
    }
}

impl fmt::Debug for Vfio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vfio")
            .field("name", &self.name)
            .field("through", &self.through)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::function::tests::add;
    use super::*;

    #[test]
    fn a_device_of_another_driver_is_refused_with_the_remedy() {
        let sysfs = tempfile::tempdir().unwrap();
        let add = |address, class, driver| add(sysfs.path(), address, class, driver, Some(1));
        add("0000:01:00.0", "0x010802", Some("nvme"));
        add("0000:02:00.0", "0x010802", None);
        add("0000:03:00.0", "0x060100", Some("vfio-pci"));
        add("0000:04:00.0", "0x010802", Some("vfio-pci"));
        let error = |address: &str| {
            check(sysfs.path(), address.parse().unwrap()).map(drop).unwrap_err().to_string()
        };
        for (address, words) in [
            ("01:00.0", "kernel driver nvme; take it over with `shadowbell bind 0000:01:00.0`"),
            ("02:00.0", "`shadowbell bind 0000:02:00.0`"),
            ("03:00.0", "class code is 060100h"),
            ("05:00.0", "no PCI device 0000:05:00.0"),
        ] {
            let error = error(address);
            assert!(error.contains(words), "{error}");
            assert_eq!(error.matches('\n').count(), 0, "{error}");
        }
        assert!(check(sysfs.path(), "04:00.0".parse().unwrap()).is_ok());
    }

    #[test]
    fn a_missing_device_is_not_opened() {
        let error = Vfio::open("ffff:ff:1f.7".parse().unwrap()).unwrap_err();
        assert!(matches!(error, VfioError::Absent { .. }), "{error}");
    }
}
