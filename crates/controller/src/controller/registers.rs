//! Registers, doorbells and interrupts: what a host sees of a controller without its memory.

use super::Controller;
use crate::context::Context;
use crate::control::{Deferred, DoorbellEventfds};
use crate::doorbell_source::DoorbellSource;
use crate::shared::{DSTRD, MAX_QUEUES};
use crate::trace::{COMPLETION_QUEUE, Kind};
use crate::worker::message::Message;
use shadowbell_memory::{EventFd, SharedBytes};
use shadowbell_spec::regs::{DOORBELLS, DoorbellKind, decode_doorbell};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

impl Controller {
    /// Reads BAR0. Registers are little-endian; any length and alignment inside
    /// [`BAR0_BYTES`](crate::BAR0_BYTES) is answered, and bytes beyond are zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        // Doorbells read as zero: what they return is vendor specific (PCIe 1.1, 3.1.2.1).
        if offset < DOORBELLS {
            self.0.control().read(offset, data);
        }
    }

    /// Writes BAR0. Registers take aligned accesses of 4 bytes, or of 8 where a register has 8;
    /// others are ignored, as the specification leaves them undefined.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if offset >= DOORBELLS {
            if let Ok(value) = data.try_into().map(u32::from_le_bytes) {
                self.write_doorbell(offset, value);
            }
            return;
        }
        self.0.with(|control, cx| control.write(cx, offset, data));
    }

    /// A trapped write of a doorbell: `offset` is the one in BAR0. Which worker this has woken, if
    /// it has woken one.
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
                // Pairs with the sleeper's fence, which follows its `want_head`: either it sees
                // the head in its last look, or we see here that it has to be woken.
                fence(Ordering::SeqCst);
                shared.is_head_wanted(doorbell.qid)
                    && pool.write_doorbell(worker, shared, &register, value)
            }
        };
        let woken = ring(worker);
        // The queue may have gone to another worker meanwhile, which has looked at the register
        // before it was written.
        match shared.owner(doorbell.qid, doorbell.kind) {
            Some(now) if now != worker => ring(now).then_some(now),
            _ => woken.then_some(worker),
        }
    }

    /// The page of doorbell registers (BAR0 from 1000h on), backed by a memfd. Only to be mapped
    /// by a host if the controller was made with
    /// [`Carrier::mapped_doorbells`](crate::Carrier::mapped_doorbells).
    #[must_use]
    pub fn doorbells(&self) -> &SharedBytes {
        self.0.context.shared.doorbells()
    }

    /// Whether the controller expects its doorbells to be mapped.
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

    /// Descriptors that stand for writes to doorbells, as of now: those of the I/O queues that
    /// exist, if Doorbell Buffer Config is in force, and none otherwise. A host may signal one
    /// instead of writing any of its doorbells, after it has put the value in its shadow
    /// doorbell buffer.
    ///
    /// They stand for nothing any more when the queue is deleted or the controller reset.
    ///
    /// # Errors
    /// The system's, when it has no more descriptors.
    pub fn doorbell_eventfds(&self) -> io::Result<DoorbellEventfds> {
        let events = self.0.control().doorbell_eventfds(&self.0.context);
        self.0.note_change();
        self.0.record();
        events
    }

    /// Has `worker`, which is one that [`write_doorbell`](Self::write_doorbell) named, take the
    /// host's doorbell writes by itself: those of the I/O queues that it serves, while it
    /// sleeps. It drops the source when the controller is reset, when another is added, or when
    /// it has been woken in vain several times in a row.
    pub fn add_doorbell_source(&self, worker: usize, source: Box<dyn DoorbellSource>) {
        let Context { shared, pool, .. } = &self.0.context;
        pool.send(worker, Message::DoorbellSource { controller: shared.id, source });
    }

    /// How many interrupt vectors the controller has.
    #[must_use]
    pub fn vectors(&self) -> usize {
        self.0.context.shared.irqs.len()
    }

    /// Connects an interrupt vector to an eventfd, or disconnects it. An interrupt that was raised
    /// while there was none is delivered now. False if there is no such vector.
    pub fn set_interrupt(&self, vector: usize, event: Option<EventFd>) -> bool {
        self.0.context.shared.irqs.set(vector, event)
    }

    /// The eventfd that a vector is connected to, if it is.
    #[must_use]
    pub fn interrupt(&self, vector: usize) -> Option<Arc<EventFd>> {
        self.0.context.shared.irqs.event(vector)
    }

    /// Raises a vector, as if a queue had. False if there is no such vector.
    pub fn trigger_interrupt(&self, vector: usize) -> bool {
        self.0.context.shared.irqs.trigger(vector)
    }
}
