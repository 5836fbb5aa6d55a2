//! Register accesses, doorbells and interrupts of a controller.

use super::Controller;
use crate::context::Context;
use crate::control::{Deferred, DoorbellEventfds};
use crate::shared::{DSTRD, MAX_QUEUES};
use crate::trace::{COMPLETION_QUEUE, Kind};
use crate::worker::DoorbellSource;
use crate::worker::mailbox::Message;
use shadowbell_memory::{EventFd, SharedBytes};
use shadowbell_spec::regs::{DOORBELLS, DoorbellKind, decode_doorbell};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

impl Controller {
    /// Reads BAR0. Registers are little-endian. Any length and alignment inside
    /// [`BAR0_BYTES`](crate::BAR0_BYTES) is valid, and bytes beyond are zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        // Doorbells read as zero: their read value is vendor specific (PCIe 1.1, 3.1.2.1).
        if offset < DOORBELLS {
            self.0.control().read(offset, data);
        }
    }

    /// Writes BAR0. Registers accept aligned accesses of 4 bytes, or of 8 bytes for 8-byte
    /// registers. Other accesses are undefined by the specification and are ignored.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if offset >= DOORBELLS {
            if let Ok(value) = data.try_into().map(u32::from_le_bytes) {
                self.write_doorbell(offset, value);
            }
            return;
        }
        self.0.with(|control, cx| control.write(cx, offset, data));
    }

    /// Delivers a trapped doorbell write at `offset` in BAR0. Returns the I/O thread that was
    /// woken, if any.
    pub fn write_doorbell(&self, offset: u64, value: u32) -> Option<usize> {
        let Context { shared, pool, .. } = &self.0.context;
        let doorbell = decode_doorbell(offset, DSTRD);
        let Some(doorbell) = doorbell.filter(|d| usize::from(d.qid) < MAX_QUEUES) else {
            self.invalid_doorbell_register();
            return None;
        };
        let worker = shared.trap(doorbell.qid, doorbell.kind);
        let side = if doorbell.kind == DoorbellKind::Cq { COMPLETION_QUEUE } else { 0 };
        self.0.context.trace(Kind::MmioWrite, doorbell.qid | side, value, 0);
        let register = shared.register(doorbell.qid, doorbell.kind);
        if doorbell.qid == 0 {
            shadowbell_doorbell::Cell::store_release(&register, value);
            self.0.schedule();
            return None;
        }
        let Some(worker) = worker else {
            self.invalid_doorbell_register();
            return None;
        };
        let ring = |worker| match doorbell.kind {
            DoorbellKind::Sq => pool.write_doorbell(worker, shared, &register, value),
            DoorbellKind::Cq => {
                shadowbell_doorbell::Cell::store_release(&register, value);
                // Pairs with the sleeper's fence, which follows its `want_head`: either the
                // sleeper sees the head in its recheck, or this thread sees that it has to wake it.
                fence(Ordering::SeqCst);
                shared.is_head_wanted(doorbell.qid)
                    && pool.write_doorbell(worker, shared, &register, value)
            }
        };
        let woken = ring(worker);
        // The queue may have moved to another I/O thread, which read the register before the
        // write. The doorbell is then delivered there as well.
        match shared.owner(doorbell.qid, doorbell.kind) {
            Some(now) if now != worker => ring(now).then_some(now),
            _ => woken.then_some(worker),
        }
    }

    /// Doorbell page (BAR0 from 1000h on), backed by a memfd. A host may map it only if the
    /// controller was created with
    /// [`Carrier::mapped_doorbells`](crate::Carrier::mapped_doorbells).
    #[must_use]
    pub fn doorbells(&self) -> &SharedBytes {
        self.0.context.shared.doorbells()
    }

    /// True if the controller expects its doorbells to be mapped.
    #[must_use]
    pub fn has_mapped_doorbells(&self) -> bool {
        self.0.context.shared.mapped
    }

    fn invalid_doorbell_register(&self) {
        self.0.with(|control, _| {
            control.invalid_doorbell_register();
            Deferred::default()
        });
    }

    /// Eventfds that replace doorbell writes of the existing I/O queues; empty unless Doorbell
    /// Buffer Config is in use. A host may signal the eventfd instead of writing the doorbell,
    /// after it has stored the value in its shadow doorbell page.
    ///
    /// An eventfd has no effect after its queue is deleted or the controller is reset.
    ///
    /// # Errors
    /// The error of the system if it has no more descriptors.
    pub fn doorbell_eventfds(&self) -> io::Result<DoorbellEventfds> {
        let events = self.0.control().doorbell_eventfds(&self.0.context);
        self.0.note_change();
        self.0.record();
        events
    }

    /// Has I/O thread `worker`, as returned by [`write_doorbell`](Self::write_doorbell), receive
    /// doorbell writes of its I/O queues from `source` while it sleeps. The I/O thread drops the
    /// source when the controller is reset, when another source is added, or after several wakeups
    /// in a row without a doorbell write.
    pub fn add_doorbell_source(&self, worker: usize, source: Box<dyn DoorbellSource>) {
        let Context { shared, pool, .. } = &self.0.context;
        pool.send(worker, Message::DoorbellSource { controller: shared.id, source });
    }

    /// Number of interrupt vectors.
    #[must_use]
    pub fn vectors(&self) -> usize {
        self.0.context.shared.irqs.len()
    }

    /// Connects an interrupt vector to an eventfd, or disconnects it. An interrupt that was raised
    /// while no eventfd was connected is delivered immediately. Returns false if the vector does
    /// not exist.
    pub fn set_interrupt(&self, vector: usize, event: Option<EventFd>) -> bool {
        self.0.context.shared.irqs.set(vector, event)
    }

    /// Eventfd of an interrupt vector, if connected.
    #[must_use]
    pub fn interrupt(&self, vector: usize) -> Option<Arc<EventFd>> {
        self.0.context.shared.irqs.event(vector)
    }

    /// Raises an interrupt vector. Returns false if the vector does not exist.
    pub fn trigger_interrupt(&self, vector: usize) -> bool {
        self.0.context.shared.irqs.trigger(vector)
    }
}
