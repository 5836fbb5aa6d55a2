//! [`Transport`] trait: register, DMA and interrupt access to one controller.

use shadowbell_memory::{EventFd, Mapping, SharedBytes};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use thiserror::Error;

/// Access to one controller: registers, doorbells, DMA memory and interrupts.
///
/// An implementation is shared by all queue pairs and the admin queue. Only
/// [`write_doorbell`](Self::write_doorbell) is on the data path. All other methods may block, but
/// only for a limited time: an implementation that waits for a peer needs a timeout, after which it
/// returns [`TransportError::Disconnected`].
pub trait Transport: Send + Sync {
    /// Human-readable name of the device: a path or a PCI address.
    fn name(&self) -> &str;

    /// Reads the 4-byte register at `offset` of BAR0. A removed device may read as all ones.
    ///
    /// # Errors
    /// [`TransportError`], if the device is unreachable.
    fn read32(&self, offset: u64) -> Result<u32, TransportError>;

    /// Reads the 8-byte register at `offset` of BAR0 in one or two accesses; NVMe allows either for
    /// every 8-byte register (Base 2.1, 3.1.4).
    ///
    /// # Errors
    /// As [`read32`](Self::read32).
    fn read64(&self, offset: u64) -> Result<u64, TransportError>;

    /// Writes the 4-byte register at `offset` of BAR0. The write may be posted: the device has
    /// processed it at the latest when the next register read returns.
    ///
    /// # Errors
    /// As [`read32`](Self::read32).
    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError>;

    /// Writes the 8-byte register at `offset` of BAR0. If the write takes two accesses, the lower
    /// half comes first.
    ///
    /// # Errors
    ///
    /// As [`read32`](Self::read32).
    fn write64(&self, offset: u64, value: u64) -> Result<(), TransportError>;

    /// Writes the doorbell at `offset` of BAR0. The write may be posted: this method need not wait
    /// until it has arrived, and writes to different doorbells may arrive in any order.
    ///
    /// # Errors
    /// [`TransportError`], if the write did not reach the device. Success does not prove that it
    /// did.
    fn write_doorbell(&self, offset: u64, value: u32) -> Result<(), TransportError>;

    /// Eventfds that replace writes to the doorbells at `offsets` of BAR0, if available. A signal
    /// means that a new value is in the doorbell's shadow entry. A signal costs the device less
    /// than a register write. Called after the queues were created. The default implementation
    /// returns no eventfds.
    ///
    /// # Errors
    /// [`TransportError`], if the device is unreachable.
    fn doorbell_events(&self, offsets: [u64; 2]) -> Result<[Option<EventFd>; 2], TransportError> {
        let _ = offsets;
        Ok([None, None])
    }

    /// Doorbells as shared memory, from BAR0 offset 1000h on, if the device can map them. A store
    /// to this memory is not trapped, so the controller has to poll it.
    fn doorbell_page(&self) -> Option<SharedBytes>;

    /// Shares all of `mapping` with the device, for reading and writing. Returns the IOVA of its
    /// first byte, a multiple of 4096; the mapping is contiguous for the device.
    ///
    /// # Errors
    /// [`TransportError`], if the memory cannot be shared.
    fn map_dma(&self, mapping: &Arc<Mapping>) -> Result<u64, TransportError>;

    /// Unmaps the `len` bytes at `iova`, a whole mapping, from the device. After success the device
    /// no longer accesses the memory.
    ///
    /// # Errors
    /// [`TransportError`], if the device may still access the memory.
    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), TransportError>;

    /// A socket that hangs up when the device disappears. A sleeping thread polls it, because
    /// otherwise it would not notice the disappearance. The default implementation returns `None`.
    fn hang_up(&self) -> Option<OwnedFd> {
        None
    }

    /// Number of MSI-X vectors of the device; 0 if it raises no interrupts.
    fn irq_vectors(&self) -> u32;

    /// Connects interrupt `vector` to `event`, or disconnects it with `None`.
    ///
    /// # Errors
    /// [`TransportError`], if the vector does not exist or the device refuses.
    fn set_irq(&self, vector: u32, event: Option<&EventFd>) -> Result<(), TransportError>;

    /// Resets the function (FLR or the transport's equivalent). After success the controller is
    /// disabled and accesses no memory.
    ///
    /// # Errors
    /// [`TransportError`], if the device does not support a reset or the reset fails.
    fn reset(&self) -> Result<(), TransportError>;
}

/// Failed access to a device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The device is unreachable: all further operations fail until the program attaches again.
    #[error("lost the connection to {device} ({operation}: {source})")]
    Disconnected {
        /// Name of the device ([`Transport::name`]).
        device: String,
        /// Failed operation.
        operation: &'static str,
        /// Cause of the failure.
        source: BoxError,
    },
    /// One operation failed; other operations may succeed.
    #[error("{device}: {operation} failed: {source}")]
    Failed {
        /// Name of the device ([`Transport::name`]).
        device: String,
        /// Failed operation.
        operation: &'static str,
        /// Cause of the failure.
        source: BoxError,
    },
    /// The transport or the device does not support the operation.
    #[error("{device} has no {what}")]
    Unsupported {
        /// Name of the device ([`Transport::name`]).
        device: String,
        /// Missing feature.
        what: &'static str,
    },
}

/// Cause of a [`TransportError`], of any error type of the transport.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;
