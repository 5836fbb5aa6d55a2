//! What everything that belongs to one attached controller shares, and how it ends.

use crate::admin::{AdminQueue, admin_name};
use crate::device::Device;
use crate::dma::{Buffer, BufferPool, Region};
use crate::error::{CommandError, DetachError};
use crate::options::Doorbells;
use crate::queue::{Bell, Completion, QueueMemory, Register, Shadow};
use ::memory::{EventFd, SharedBytes};
use doorbell::RingSize;
use spec::identify::IdentifyController;
use spec::{Sqe, dbbuf, regs};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// The controller runs for us.
const LIVE: u8 = 0;
/// It is being shut down.
const CLOSING: u8 = 1;
/// It is disabled: it touches no memory of ours.
const QUIET: u8 = 2;
/// It could not be disabled: it may touch whatever it was given, for ever.
const LOST: u8 = 3;

/// An attached controller. Kept by every handle; with the last of them it is shut down.
pub(crate) struct Shared {
    pub(crate) device: Device,
    pub(crate) admin: AdminQueue,
    state: AtomicU8,
    /// Held by whoever creates or deletes queues, or shuts down.
    control: Mutex<Control>,
    pub(crate) late: OnceLock<Late>,
    /// Small buffers for the data of admin commands.
    pub(crate) scratch: BufferPool,
    /// The admin queue's memory, and the two pages of the shadow doorbells.
    admin_memory: QueueMemory,
}

/// What is known only once the controller is enabled and was identified.
pub(crate) struct Late {
    pub(crate) identity: Box<IdentifyController>,
    /// [`Doorbells::Auto`] is not among what this can be.
    pub(crate) doorbells: Doorbells,
    pub(crate) shadow: Option<ShadowPages>,
    pub(crate) max_transfer: u64,
    pub(crate) io_memory: QueueMemory,
    /// Queue pairs that there may be, identifiers 1 to this.
    pub(crate) granted: u16,
    pub(crate) largest: RingSize,
    pub(crate) interrupts: bool,
}

/// The Shadow Doorbell and EventIdx buffers.
pub(crate) struct ShadowPages {
    pub(crate) values: SharedBytes,
    pub(crate) event_idxs: SharedBytes,
    pub(crate) dstrd: u8,
}

impl ShadowPages {
    /// The cells of a queue pair's two doorbells, or nothing if it lies beyond the page.
    pub(crate) fn of(&self, qid: u16) -> Option<[Shadow; 2]> {
        let at = |offset: u64| {
            let offset = usize::try_from(offset).ok()?;
            Some(Shadow {
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

/// What the control plane keeps under its lock.
#[derive(Default)]
pub(crate) struct Control {
    /// Queue pairs that exist at the controller.
    pub(crate) created: BTreeSet<u16>,
    /// Queue pairs that it did not confirm to have deleted: their memory is never used again.
    spoiled: BTreeSet<u16>,
    /// Vectors with an event.
    pub(crate) vectors: BTreeSet<u16>,
}

impl Control {
    /// The lowest queue identifier that is free.
    pub(crate) fn free_qid(&self, granted: u16) -> Option<u16> {
        (1..=granted).find(|qid| !self.created.contains(qid) && !self.spoiled.contains(qid))
    }
}

impl Shared {
    pub(crate) fn new(
        device: Device,
        admin: AdminQueue,
        admin_memory: QueueMemory,
        scratch: BufferPool,
    ) -> Self {
        Self {
            device,
            admin,
            // Nothing to end until the controller is enabled.
            state: AtomicU8::new(QUIET),
            control: Mutex::default(),
            late: OnceLock::new(),
            scratch,
            admin_memory,
        }
    }

    /// The controller is about to be enabled: from here on it has to be ended.
    pub(crate) fn begin(&self) {
        self.state.store(LIVE, Ordering::Release);
    }

    pub(crate) fn name(&self) -> &str {
        self.device.name()
    }

    /// Whether the controller works for us. One load from a line that never changes under load.
    #[inline]
    pub(crate) fn is_live(&self) -> bool {
        self.state.load(Ordering::Relaxed) == LIVE
    }

    pub(crate) fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn admin_memory(&self) -> &QueueMemory {
        &self.admin_memory
    }

    /// Runs an admin command that succeeds, or the error says why not.
    pub(crate) fn command(
        &self,
        sqe: Sqe,
        buffer: Option<Buffer>,
        transfer: u32,
        limit: Duration,
    ) -> Result<Completion, CommandError> {
        let completion = self.admin.execute(&self.device, sqe, buffer, transfer, limit)?;
        match completion.status.into_result() {
            Ok(()) => Ok(completion),
            Err(status) => Err(CommandError::Status {
                device: self.name().to_owned(),
                command: admin_name(sqe.opcode),
                status,
            }),
        }
    }

    /// The doorbells of queue pair `qid`, as the chosen mode has them.
    pub(crate) fn bells(&self, qid: u16, mode: Doorbells) -> [Bell; 2] {
        let transport = &self.device.transport;
        let dstrd = self.device.cap.dstrd();
        let page = (mode == Doorbells::Mapped).then(|| transport.doorbell_page()).flatten();
        let offsets = [regs::sq_doorbell_offset(qid, dstrd), regs::cq_doorbell_offset(qid, dstrd)];
        offsets.map(|offset| {
            let cell = page.as_ref().and_then(|page| {
                page.cell(usize::try_from(offset.checked_sub(regs::DOORBELLS)?).ok()?)
            });
            Bell::new(match cell {
                Some(cell) => {
                    doorbell::Cell::store_release(&cell, 0);
                    Register::Mapped(cell)
                }
                None => Register::Trapped { transport: Arc::clone(transport), offset, event: None },
            })
        })
    }

    /// Has `vector` signal `event`.
    pub(crate) fn set_irq(
        &self,
        vector: u16,
        event: &EventFd,
    ) -> Result<(), crate::TransportError> {
        self.device.transport.set_irq(vector.into(), Some(event))?;
        self.control().vectors.insert(vector);
        Ok(())
    }

    /// Deletes both queues of a pair. Whether the controller is certainly done with them.
    pub(crate) fn delete_queue_pair(&self, qid: u16) -> bool {
        let mut control = self.control();
        match self.state.load(Ordering::Acquire) {
            QUIET => true,
            LIVE => self.delete_locked(&mut control, qid),
            _ => false,
        }
    }

    /// Takes back what was created of a pair whose creation failed.
    pub(crate) fn withdraw_queue_pair(&self, qid: u16, why: &CommandError) {
        let mut control = self.control();
        if why.status().is_some() {
            // Refused: either the first command, and there is nothing, or the second, and there is
            // a completion queue, which nobody uses. It fails where there is nothing to delete.
            let delete = Sqe::delete_io_cq(qid, 0);
            let _ = self.command(delete, None, 0, self.device.timeouts.admin);
            control.created.remove(&qid);
        } else {
            // Nobody knows what the controller did; its memory is not used again.
            control.created.remove(&qid);
            control.spoiled.insert(qid);
        }
        if control.vectors.remove(&qid) {
            let _ = self.device.transport.set_irq(qid.into(), None);
        }
    }

    fn delete_locked(&self, control: &mut Control, qid: u16) -> bool {
        if !control.created.contains(&qid) {
            return !control.spoiled.contains(&qid);
        }
        let limit = self.device.timeouts.admin;
        let deleted = self
            .command(Sqe::delete_io_sq(qid, 0), None, 0, limit)
            .and_then(|_| self.command(Sqe::delete_io_cq(qid, 0), None, 0, limit));
        control.created.remove(&qid);
        if control.vectors.remove(&qid)
            && let Err(error) = self.device.transport.set_irq(qid.into(), None)
        {
            tracing::debug!(qid, "an interrupt could not be taken down: {error}");
        }
        match deleted {
            Ok(_) => true,
            Err(error) => {
                tracing::warn!(qid, "a queue pair was not deleted and is not used again: {error}");
                control.spoiled.insert(qid);
                false
            }
        }
    }

    /// Ends the controller's work: deletes the queues, notifies it of the shutdown, waits until
    /// that is complete, disables it. Whatever fails, it ends up disabled or reset if that can be
    /// had at all, because only then memory can be given back.
    pub(crate) fn shut_down(&self) -> Result<(), DetachError> {
        let mut control = self.control();
        if self.state.compare_exchange(LIVE, CLOSING, Ordering::AcqRel, Ordering::Acquire).is_err()
        {
            return Ok(());
        }
        let mut complaint = None;
        if let Some(why) = self.device.ailment() {
            complaint = Some(why);
        } else {
            let qids: Vec<_> = control.created.iter().copied().collect();
            if let Some(qid) = qids.into_iter().find(|qid| !self.delete_locked(&mut control, *qid))
            {
                complaint = Some(format!("it did not delete queue pair {qid}"));
            }
            if let Err(not) = self.device.shut_down(self.shutdown_limit()) {
                complaint = Some(format!("shutdown: {not}"));
            }
        }
        for vector in std::mem::take(&mut control.vectors) {
            if let Err(error) = self.device.transport.set_irq(vector.into(), None) {
                tracing::debug!(vector, "an interrupt could not be taken down: {error}");
            }
        }
        let quiet = self.device.disable().or_else(|not| {
            tracing::warn!("{} was not disabled ({not}); resetting it", self.name());
            self.device.transport.reset().map_err(|error| format!("{not}; {error}"))
        });
        let device = self.name().to_owned();
        match quiet {
            Ok(()) => {
                self.state.store(QUIET, Ordering::Release);
                match complaint {
                    None => Ok(()),
                    Some(why) => Err(DetachError::Unclean { device, why }),
                }
            }
            Err(error) => {
                self.state.store(LOST, Ordering::Release);
                Err(DetachError::Lost { device, why: error })
            }
        }
    }

    fn shutdown_limit(&self) -> Duration {
        let least = self.device.timeouts.shutdown;
        let told = self.late.get().map_or(0, |late| late.identity.rtd3e);
        // A controller that asks for more than a minute is not believed.
        least.max(Duration::from_micros(told.into()).min(Duration::from_secs(60)))
    }

    fn regions(&self) -> Vec<Arc<Region>> {
        let late = self.late.get().map(|late| Arc::clone(late.io_memory.region()));
        std::iter::once(Arc::clone(self.admin_memory.region())).chain(late).collect()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Err(error) = self.shut_down() {
            tracing::warn!("{error}");
        }
        if self.state.load(Ordering::Acquire) == LOST {
            let (regions, buffers) = (self.regions(), self.admin.take_buffers());
            tracing::warn!(
                "{} may still use its queues, so their memory ({} bytes) is kept",
                self.name(),
                regions.iter().map(|region| region.len()).sum::<u64>()
            );
            std::mem::forget(regions);
            std::mem::forget(buffers);
        }
    }
}
