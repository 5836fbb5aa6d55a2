//! Creation and deletion of I/O queues, and the table of existing queues.
//!
//! Base 2.1, 5.2.1 to 5.2.4. A completion queue is created before its submission queue, and deleted
//! after that submission queue.

use crate::admin::{AdminCommands, AdminData, AdminPlane};
use crate::controller_state::ControllerInfo;
use crate::device::Device;
use crate::dma::DmaError;
use crate::error::{AttachError, CommandError};
use crate::options::{AttachOptions, Doorbells};
use crate::queue::{Core, Doorbell, PairShape, QueueLayout, QueueMemory, Register};
use crate::transport::TransportError;
use shadowbell_doorbell::{Cell, RingSize};
use shadowbell_memory::EventFd;
use shadowbell_spec::admin::{CreateIoCq, CreateIoSq};
use shadowbell_spec::{Sqe, regs};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Minimum number of entries of a queue. Base 2.1, 3.3.3.1.
const SMALLEST: RingSize = match RingSize::new(RingSize::MIN) {
    Some(size) => size,
    None => panic!("the smallest size of a ring is a size of a ring"),
};
const STEP: &str = "creating an I/O queue pair";
const CREATE: &str = "Create I/O Completion Queue";

/// Table of I/O queues and interrupt vectors. Its lock serializes the creation and deletion of
/// queues, controller resets and shutdown.
#[derive(Default)]
pub(crate) struct IoQueueTable {
    /// Queue pairs that exist in the driver.
    created: BTreeSet<u16>,
    /// Queue pairs of `created` that also exist in the controller. None exist there after a
    /// controller reset.
    live: BTreeSet<u16>,
    /// Queue pairs whose deletion the controller did not confirm. Their identifiers and memory are
    /// not used again before a controller reset.
    quarantined: BTreeSet<u16>,
    /// Interrupt vectors that are connected to an eventfd.
    vectors: BTreeSet<u16>,
}

/// A created I/O queue pair.
pub(crate) struct IoQueuePair {
    pub(crate) core: Core,
    pub(crate) layout: QueueLayout,
    /// Eventfd that the interrupt of the pair signals.
    pub(crate) event: EventFd,
}

/// Allocates memory for `granted` queue pairs. Also returns the number of entries of a submission
/// queue: the wanted number, limited by CAP.MQES.
pub(crate) fn io_queue_memory(
    device: &Device,
    options: &AttachOptions,
    max_transfer: u64,
    granted: u16,
) -> Result<(QueueMemory, RingSize), DmaError> {
    // `most` is at least the minimum size of a ring, because `Device::probe` refuses a controller
    // with MQES 0.
    let most = u32::from(device.cap.mqes()) + 1;
    let entries = |wanted: u32| RingSize::new(wanted.min(most)).unwrap_or(SMALLEST);
    let sq = entries(options.queue_depth);
    // The completion queue has twice the entries of the submission queue, so that the driver has to
    // publish the head half as often.
    let cq = entries(options.queue_depth.saturating_mul(2).min(RingSize::MAX));
    let shape = PairShape { sq, cq, max_transfer, page: device.page };
    Ok((QueueMemory::new(&device.transport, shape, granted.into(), 0)?, sq))
}

impl IoQueueTable {
    /// Creates the queue pair with the lowest free identifier, with at most `size` entries.
    pub(crate) fn create(
        &mut self,
        admin: &AdminPlane,
        info: &ControllerInfo,
        size: RingSize,
    ) -> Result<IoQueuePair, AttachError> {
        let free = |qid: &u16| !self.created.contains(qid) && !self.quarantined.contains(qid);
        let Some(qid) = (1..=info.granted).find(free) else {
            return Err(AttachError::Option {
                option: "queue_pairs",
                value: info.granted.into(),
                why: "the controller grants no more, and all are in use",
            });
        };
        let doorbells = doorbells(admin, info, qid, info.io_memory.sizes(size));
        let pair = info.io_memory.pair(u64::from(qid) - 1, qid, size, doorbells);
        let (mut core, mut layout) = pair.ok_or_else(|| {
            let what = "its queues have no room in memory";
            let source = CommandError::invalid_data(admin.name(), CREATE, what);
            AttachError::Command { step: STEP, source }
        })?;
        let event = EventFd::new().map_err(AttachError::Event)?;
        layout.interrupts =
            info.interrupts && u32::from(qid) < admin.device.transport.irq_vectors();
        if info.interrupts && !layout.interrupts {
            tracing::info!(qid, "no interrupt vector is left for this queue pair; polling");
        }
        self.connect(admin, layout, &event)?;
        // The pair is recorded before the first command, because a command that times out may still
        // have created a queue.
        self.created.insert(qid);
        if let Err(source) = self.create_at_controller(admin, layout) {
            self.remove_failed_pair(admin, qid, &source);
            return Err(AttachError::Command { step: STEP, source });
        }
        set_doorbell_eventfds(admin, info, &mut core);
        Ok(IoQueuePair { core, layout, event })
    }

    /// Creates the queues of a pair again. The controller has lost the old queues by a deletion or
    /// a reset. The caller has restarted `core` with new [`doorbells`].
    pub(crate) fn recreate(
        &mut self,
        admin: &AdminPlane,
        info: &ControllerInfo,
        core: &mut Core,
        layout: QueueLayout,
        event: &EventFd,
    ) -> Result<(), String> {
        self.connect(admin, layout, event).map_err(|error| error.to_string())?;
        self.create_at_controller(admin, layout).map_err(|error| error.to_string())?;
        set_doorbell_eventfds(admin, info, core);
        Ok(())
    }

    /// Connects the interrupt of a queue pair, if it has one, to `event`.
    fn connect(
        &mut self,
        admin: &AdminPlane,
        layout: QueueLayout,
        event: &EventFd,
    ) -> Result<(), TransportError> {
        if layout.interrupts { self.connect_vector(admin, layout.qid, event) } else { Ok(()) }
    }

    /// Connects an interrupt vector to `event`.
    pub(crate) fn connect_vector(
        &mut self,
        admin: &AdminPlane,
        vector: u16,
        event: &EventFd,
    ) -> Result<(), TransportError> {
        admin.device.transport.set_irq(vector.into(), Some(event))?;
        self.vectors.insert(vector);
        Ok(())
    }

    fn create_at_controller(
        &mut self,
        admin: &AdminPlane,
        layout: QueueLayout,
    ) -> Result<(), CommandError> {
        let QueueLayout { qid, interrupts, .. } = layout;
        let cq = CreateIoCq {
            qid,
            qsize0: layout.cq_size0(),
            pc: true,
            ien: interrupts,
            iv: if interrupts { qid } else { 0 },
        };
        let qsize0 = layout.sq_size0();
        let sq = CreateIoSq { qid, qsize0, pc: true, cqid: qid, ..Default::default() };
        self.live.insert(qid);
        admin.succeed(Sqe::create_io_cq(cq, layout.cq_iova, 0), AdminData::None)?;
        admin.succeed(Sqe::create_io_sq(sq, layout.sq_iova, 0), AdminData::None)?;
        Ok(())
    }

    /// Removes a pair whose creation failed.
    fn remove_failed_pair(&mut self, admin: &AdminPlane, qid: u16, why: &CommandError) {
        if why.status().is_some() {
            // If the controller refused Create I/O Submission Queue, the completion queue exists
            // and must be deleted. If it refused Create I/O Completion Queue, neither queue exists,
            // and this deletion fails without an effect.
            let _ = admin.succeed(Sqe::delete_io_cq(qid, 0), AdminData::None);
        } else {
            // The outcome is unknown, and the controller may use the queues. So their memory must
            // not be used again.
            self.quarantined.insert(qid);
        }
        self.created.remove(&qid);
        self.live.remove(&qid);
        self.disconnect(admin, qid);
    }

    /// Deletes both queues of a pair in the controller.
    pub(crate) fn delete_at_controller(
        &mut self,
        admin: &AdminPlane,
        qid: u16,
    ) -> Result<(), CommandError> {
        self.live.remove(&qid);
        admin.succeed(Sqe::delete_io_sq(qid, 0), AdminData::None)?;
        admin.succeed(Sqe::delete_io_cq(qid, 0), AdminData::None)?;
        Ok(())
    }

    /// Deletes a queue pair. Returns true if the controller no longer uses the memory of the pair.
    pub(crate) fn delete(&mut self, admin: &AdminPlane, qid: u16) -> bool {
        if !self.created.contains(&qid) {
            return !self.quarantined.contains(&qid);
        }
        let deleted = if self.live.contains(&qid) {
            self.delete_at_controller(admin, qid)
        } else {
            // A controller reset has deleted the queues.
            Ok(())
        };
        self.created.remove(&qid);
        self.disconnect(admin, qid);
        match deleted {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(qid, "a queue pair was not deleted and is not used again: {error}");
                self.quarantined.insert(qid);
                false
            }
        }
    }

    /// Deletes all queue pairs. Stops at the first failure, and returns the identifier of the pair
    /// that could not be deleted.
    pub(crate) fn delete_all(&mut self, admin: &AdminPlane) -> Option<u16> {
        let qids: Vec<_> = self.created.iter().copied().collect();
        qids.into_iter().find(|qid| !self.delete(admin, *qid))
    }

    /// Records that a controller reset has deleted all I/O queues in the controller.
    pub(crate) fn clear_live(&mut self) {
        self.live.clear();
    }

    /// Permits the identifiers of quarantined queue pairs to be used again. The caller has disabled
    /// the controller, so the controller no longer uses any queue.
    pub(crate) fn release_quarantined(&mut self) {
        self.quarantined.clear();
    }

    fn disconnect(&mut self, admin: &AdminPlane, vector: u16) {
        if self.vectors.remove(&vector)
            && let Err(error) = admin.device.transport.set_irq(vector.into(), None)
        {
            tracing::debug!(vector, "an interrupt could not be disconnected: {error}");
        }
    }

    /// Disconnects all interrupts.
    pub(crate) fn disconnect_all(&mut self, admin: &AdminPlane) {
        for vector in self.vectors.clone() {
            self.disconnect(admin, vector);
        }
    }
}

/// Creates the doorbells of queue pair `qid`, for queues with the given sizes.
pub(crate) fn doorbells(
    admin: &AdminPlane,
    info: &ControllerInfo,
    qid: u16,
    sizes: [RingSize; 2],
) -> [Doorbell; 2] {
    let transport = &admin.device.transport;
    let page = (info.doorbells == Doorbells::Mapped).then(|| transport.doorbell_page()).flatten();
    let mut doorbells = offsets(admin, qid).map(|offset| {
        let cell = page.as_ref().and_then(|page| {
            page.cell(usize::try_from(offset.checked_sub(regs::DOORBELLS)?).ok()?)
        });
        Doorbell::new(match cell {
            Some(cell) => {
                cell.store_release(0);
                Register::Mapped(cell)
            }
            None => Register::Trapped { transport: Arc::clone(transport), offset, event: None },
        })
    });
    if let Some(shadows) = info.shadow.as_ref().and_then(|pages| pages.of(qid)) {
        for ((doorbell, shadow), size) in doorbells.iter_mut().zip(shadows).zip(sizes) {
            doorbell.set_ring(size);
            doorbell.attach_shadow(shadow);
            doorbell.enable_shadow();
        }
    }
    doorbells
}

/// Replaces the doorbell register writes of an existing queue pair by eventfds, if its doorbells
/// are shadowed and the transport supports doorbell eventfds.
fn set_doorbell_eventfds(admin: &AdminPlane, info: &ControllerInfo, core: &mut Core) {
    let qid = core.qid();
    if info.shadow.as_ref().and_then(|pages| pages.of(qid)).is_none() {
        return;
    }
    match admin.device.transport.doorbell_events(offsets(admin, qid)) {
        Ok([sq, cq]) => {
            core.sq_doorbell.set_eventfd(sq);
            core.cq_doorbell.set_eventfd(cq);
        }
        Err(error) => tracing::info!(qid, "no doorbell eventfds, using register writes: {error}"),
    }
}

/// Offsets of the doorbells of queue pair `qid` in BAR0.
fn offsets(admin: &AdminPlane, qid: u16) -> [u64; 2] {
    let dstrd = admin.device.cap.dstrd();
    [regs::sq_doorbell_offset(qid, dstrd), regs::cq_doorbell_offset(qid, dstrd)]
}
