//! What the driver needs of a controller, whichever way it is reached: the [`Transport`] trait.

use shadowbell_memory::{EventFd, Mapping, SharedBytes};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use thiserror::Error;

/// The way to one controller: its registers, its doorbells, the memory that it may reach and the
/// interrupts that it raises.
///
/// An implementation is shared by every queue pair and by the control plane. Only
/// [`write_doorbell`](Self::write_doorbell) is on the data path; everything else may block, but
/// not for ever: an implementation that waits for a peer gives up after a time of its own and
/// returns [`TransportError::Gone`].
pub trait Transport: Send + Sync {
    /// What a person would call the device: a path, a PCI address.
    fn name(&self) -> &str;

    /// Reads the 4-byte register at `offset` of BAR0. A device that is gone may read as all ones.
    ///
    /// # Errors
    /// [`TransportError`], when the device can not be reached.
    fn read32(&self, offset: u64) -> Result<u32, TransportError>;

    /// Reads the 8-byte register at `offset` of BAR0, in one access or two: every 8-byte register
    /// of NVMe allows both (Base 2.1, 3.1.4).
    ///
    /// # Errors
    /// As [`read32`](Self::read32).
    fn read64(&self, offset: u64) -> Result<u64, TransportError>;

    /// Writes the 4-byte register at `offset` of BAR0. The device has seen it, and what it does in
    /// answer is ordered after it, when this returns or with the next read at the latest.
    ///
    /// # Errors
    /// As [`read32`](Self::read32).
    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError>;

    /// Writes the 8-byte register at `offset` of BAR0, lower half first if in two accesses.
    ///
    /// # Errors
    /// As [`read32`](Self::read32).
    fn write64(&self, offset: u64, value: u64) -> Result<(), TransportError>;

    /// Writes a doorbell, `offset` from the start of BAR0. The write may be posted: nobody waits
    /// for it, and writes to different doorbells may arrive in any order.
    ///
    /// # Errors
    /// [`TransportError`], when it is certain that the device will not see it.
    fn write_doorbell(&self, offset: u64, value: u32) -> Result<(), TransportError>;

    /// Events that stand for writes to the doorbells at `offsets` of BAR0, as far as there are any.
    /// Signalling one says that a value was put into the doorbell's shadow entry, which is where
    /// the device looks for it; it costs the device less than a write. To be asked for when the
    /// queues exist. The default has none.
    ///
    /// # Errors
    /// [`TransportError`], when the device can not be reached.
    fn doorbell_events(&self, offsets: [u64; 2]) -> Result<[Option<EventFd>; 2], TransportError> {
        let _ = offsets;
        Ok([None, None])
    }

    /// The doorbells as memory, from BAR0 offset 1000h on, if the device lets them be mapped. A
    /// store there is a doorbell that nobody traps.
    fn doorbell_page(&self) -> Option<SharedBytes>;

    /// Lets the device reach all of `mapping`, for reading and writing. Returns the address (IOVA)
    /// under which the device finds its first byte, which is a multiple of 4096; the rest follows
    /// without a gap.
    ///
    /// # Errors
    /// [`TransportError`], when the memory can not be shared with the device.
    fn map_dma(&self, mapping: &Arc<Mapping>) -> Result<u64, TransportError>;

    /// Takes the memory at `iova`, `len` bytes as mapped, away from the device. When this returns
    /// with success, the device does not touch it any more.
    ///
    /// # Errors
    /// [`TransportError`], when that is not certain.
    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), TransportError>;

    /// A socket that hangs up when the device has gone, for those who sleep and would not notice it
    /// otherwise. The default has none.
    fn hang_up(&self) -> Option<OwnedFd> {
        None
    }

    /// How many interrupt vectors the device has (MSI-X); 0 if it raises none.
    fn irq_vectors(&self) -> u32;

    /// Has interrupt `vector` signal `event` from now on, or nothing.
    ///
    /// # Errors
    /// [`TransportError`], when there is no such vector or the device refuses.
    fn set_irq(&self, vector: u32, event: Option<&EventFd>) -> Result<(), TransportError>;

    /// Resets the function (FLR or the transport's like). When this returns with success the
    /// controller is disabled and touches no memory.
    ///
    /// # Errors
    /// [`TransportError`], when the device can not be reset this way.
    fn reset(&self) -> Result<(), TransportError>;
}

/// Why a device could not be reached.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TransportError {
    /// Nothing will work any more until the program attaches again.
    #[error("{device} went away during {doing}: {source}; attach again when it is back")]
    Gone {
        /// [`Transport::name`].
        device: String,
        /// What was being done.
        doing: &'static str,
        /// The reason below.
        source: BoxError,
    },
    /// This one thing failed; others may work.
    #[error("{device}: {doing} failed: {source}")]
    Failed {
        /// [`Transport::name`].
        device: String,
        /// What was being done.
        doing: &'static str,
        /// The reason below.
        source: BoxError,
    },
    /// The transport or the device at its end has no such thing.
    #[error("{device} has no {what}")]
    Unsupported {
        /// [`Transport::name`].
        device: String,
        /// What is missing.
        what: &'static str,
    },
}

/// The reason below a [`TransportError`], of whatever type the transport has.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;
