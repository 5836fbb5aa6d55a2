//! Host side of a doorbell: shadow doorbell entry and register. Base 2.1, 5.1.6.

use crate::transport::{Transport, TransportError};
use shadowbell_doorbell::{Cell, HostDoorbell, RingSize};
use shadowbell_memory::{EventFd, SharedBytes, SharedU32};
use shadowbell_spec::dbbuf;
use std::sync::Arc;

/// Register access for doorbell updates that need more than the shadow entry.
pub(crate) enum Register {
    /// Mapped memory that the controller polls. The update is a plain store.
    Mapped(SharedU32),
    /// A register whose write traps, or is sent as a message to a server.
    Trapped {
        /// Transport to the device.
        transport: Arc<dyn Transport>,
        /// Offset in BAR0.
        offset: u64,
        /// Eventfd that is signalled instead of the register write, if the shadow entry has the
        /// value.
        event: Option<EventFd>,
    },
}

/// Cells of one doorbell in the Shadow Doorbell and EventIdx buffers.
#[derive(Clone)]
pub(crate) struct ShadowCells {
    pub(crate) value: SharedU32,
    pub(crate) event_idx: SharedU32,
}

/// Host side of one doorbell.
pub(crate) struct Doorbell {
    host: HostDoorbell<SharedU32>,
    register: Register,
    /// Number of register writes.
    pub(crate) trapped: u64,
}

impl Doorbell {
    pub(crate) fn new(register: Register) -> Self {
        Self { host: HostDoorbell::new(0), register, trapped: 0 }
    }

    /// Sets the size of the queue: see [`HostDoorbell::set_ring`].
    pub(crate) fn set_ring(&mut self, size: RingSize) {
        self.host.set_ring(size);
    }

    /// Adds a shadow entry. The entry is written, but the controller is not yet relied on to read
    /// it: see [`HostDoorbell::attach_shadow`].
    pub(crate) fn attach_shadow(&mut self, shadow: ShadowCells) {
        self.host.attach_shadow(shadow.value, shadow.event_idx);
    }

    /// Relies on the shadow entry from the next update on: see [`HostDoorbell::enable_shadow`].
    pub(crate) fn enable_shadow(&mut self) {
        self.host.enable_shadow();
    }

    /// Sets an eventfd to signal instead of register writes. The controller must read the value
    /// from the shadow entry.
    pub(crate) fn set_eventfd(&mut self, eventfd: Option<EventFd>) {
        if let Register::Trapped { event, .. } = &mut self.register {
            *event = eventfd;
        }
    }

    /// Removes the shadow entry and the eventfd: see [`HostDoorbell::detach_shadow`].
    pub(crate) fn detach_shadow(&mut self) {
        self.set_eventfd(None);
        self.host.detach_shadow();
    }

    /// The number of updates that needed no register write because of the shadow entry.
    pub(crate) fn saved(&self) -> u64 {
        self.host.stats().mmio_saved
    }

    /// Publishes `value` to the controller.
    #[inline]
    pub(crate) fn publish(&mut self, value: u16) -> Result<(), TransportError> {
        if self.host.publish(value) { self.write(value) } else { Ok(()) }
    }

    /// Stores `value` in the shadow entry. A later call decides about the register write: see
    /// [`HostDoorbell::publish_deferred`].
    #[inline]
    pub(crate) fn publish_deferred(&mut self, value: u16) -> Result<(), TransportError> {
        if self.host.publish_deferred(value) { self.write(value) } else { Ok(()) }
    }

    /// Writes the register for the value of [`publish_deferred`](Self::publish_deferred), if the
    /// controller has requested the write by its EventIdx.
    #[inline]
    pub(crate) fn notify_if_needed(&mut self) -> Result<(), TransportError> {
        if self.host.needs_notification() { self.write(self.host.current()) } else { Ok(()) }
    }

    /// True if a deferred value may still need a register write.
    #[inline]
    pub(crate) fn has_deferred(&self) -> bool {
        self.host.has_deferred()
    }

    fn write(&mut self, value: u16) -> Result<(), TransportError> {
        match &self.register {
            Register::Mapped(cell) => {
                cell.store_release(u32::from(value));
                Ok(())
            }
            Register::Trapped { transport, offset, event } => {
                self.trapped += 1;
                if let Some(event) = event {
                    event.signal();
                    return Ok(());
                }
                transport.write_doorbell(*offset, u32::from(value))
            }
        }
    }
}

/// The two pages that were passed to the controller by Doorbell Buffer Config.
pub(crate) struct ShadowPages {
    pub(crate) values: SharedBytes,
    pub(crate) event_idxs: SharedBytes,
    pub(crate) dstrd: u8,
}

impl ShadowPages {
    /// Cells of a queue pair's two doorbells; `None` if they are beyond the page.
    pub(crate) fn of(&self, qid: u16) -> Option<[ShadowCells; 2]> {
        let at = |offset: u64| {
            let offset = usize::try_from(offset).ok()?;
            Some(ShadowCells {
                value: self.values.cell(offset)?,
                event_idx: self.event_idxs.cell(offset)?,
            })
        };
        Some([
            at(dbbuf::sq_entry_offset(qid, self.dstrd))?,
            at(dbbuf::cq_entry_offset(qid, self.dstrd))?,
        ])
    }
}
