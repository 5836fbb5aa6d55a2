//! What everything that belongs to one attached controller shares, and how it ends.

use crate::admin::{AdminQueue, admin_name};
use crate::device::Device;
use crate::dma::{Buffer, BufferPool, Region};
use crate::error::{CommandError, DetachError, QueueError};
use crate::namespace::Namespace;
use crate::options::Doorbells;
use crate::queue::{Bell, Completion, QueueMemory, Register, Shadow};
use crate::recovery::{Counters, Keeper, Pace, Recovery};
use ::shadowbell_memory::{EventFd, SharedBytes};
use shadowbell_doorbell::RingSize;
use shadowbell_spec::identify::IdentifyController;
use shadowbell_spec::{Sqe, dbbuf, regs};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// The controller runs for us.
const LIVE: u32 = 0;
/// It is being shut down.
const CLOSING: u32 = 1;
/// It is disabled: it touches no memory of ours.
const QUIET: u32 = 2;
/// It could not be disabled: it may touch whatever it was given, for ever.
const LOST: u32 = 3;
/// It is being reset, by whoever holds the control lock.
const RESETTING: u32 = 4;
/// It went away.
const GONE: u32 = 5;
/// The bits of the word that are one of these.
const STATE: u32 = 7;
/// What the word grows by when there is something for every queue to look at.
const NEWS: u32 = 8;

/// What a queue pair finds when it looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// The controller works for us.
    Live,
    /// It will, when the control lock is free.
    Resetting,
    /// The program detached it.
    Detached,
    /// It went away or was given up. If it is quiet, it touches no memory of ours.
    Over { quiet: bool },
}

/// An attached controller. Kept by every handle; with the last of them it is shut down.
pub(crate) struct Shared {
    pub(crate) device: Device,
    pub(crate) admin: AdminQueue,
    /// The state, and how often there was something for every queue to look at: the one word that a
    /// queue pair compares with what it saw last, once for each batch.
    word: AtomicU32,
    /// How often the controller was reset.
    generation: AtomicU32,
    /// Why the controller is no more, if that is not the program's doing.
    over: OnceLock<Arc<str>>,
    pub(crate) recovery: Recovery,
    pub(crate) pace: Pace,
    pub(crate) counters: Counters,
    pub(crate) keeper: OnceLock<Keeper>,
    /// Queues that sleep by themselves, and whether they want to be woken.
    sleepers: Mutex<Vec<(Arc<AtomicBool>, EventFd)>>,
    /// A queue had something outstanding for long when it looked last.
    waiting: AtomicBool,
    /// CSTS.NSSRO can not be cleared.
    pub(crate) nssro_stuck: AtomicBool,
    /// What vector 0 signals.
    pub(crate) admin_event: OnceLock<EventFd>,
    /// The namespaces, if they were read again and nobody has asked for them.
    pub(crate) news: Mutex<Option<Vec<Namespace>>>,
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
    /// Queue pairs that somebody has.
    pub(crate) created: BTreeSet<u16>,
    /// Those of them that exist at the controller: none after a reset.
    pub(crate) live: BTreeSet<u16>,
    /// Queue pairs that it did not confirm to have deleted: their memory is not used again before
    /// it was reset.
    pub(crate) spoiled: BTreeSet<u16>,
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
        recovery: Recovery,
    ) -> Self {
        Self {
            pace: Pace::new(recovery, &device.timeouts),
            recovery,
            device,
            admin,
            // Nothing to end until the controller is enabled.
            word: AtomicU32::new(QUIET),
            generation: AtomicU32::new(0),
            over: OnceLock::new(),
            counters: Counters::default(),
            keeper: OnceLock::new(),
            sleepers: Mutex::default(),
            waiting: AtomicBool::new(false),
            nssro_stuck: AtomicBool::new(false),
            admin_event: OnceLock::new(),
            news: Mutex::default(),
            control: Mutex::default(),
            late: OnceLock::new(),
            scratch,
            admin_memory,
        }
    }

    /// The controller is about to be enabled: from here on it has to be ended.
    pub(crate) fn begin(&self) {
        self.set_state(LIVE);
    }

    pub(crate) fn name(&self) -> &str {
        self.device.name()
    }

    /// The word that changes when there is something to look at. One load from a line that is
    /// written some times a second at most.
    #[inline]
    pub(crate) fn word(&self) -> u32 {
        self.word.load(Ordering::Relaxed)
    }

    /// What the word means, and everything that was done before it was set.
    pub(crate) fn condition(&self) -> Condition {
        match (self.state(), self.over.get()) {
            (LIVE, _) => Condition::Live,
            (RESETTING, _) => Condition::Resetting,
            (state, Some(_)) => Condition::Over { quiet: state == QUIET },
            (_, None) => Condition::Detached,
        }
    }

    fn state(&self) -> u32 {
        self.word.load(Ordering::Acquire) & STATE
    }

    fn set_state(&self, state: u32) {
        let change = |word: u32| Some((word & !STATE | state).wrapping_add(NEWS));
        let _ = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
    }

    /// A queue that sleeps on `event` by itself: when this is set, the keeper signals it once.
    pub(crate) fn add_sleeper(&self, event: EventFd) -> Arc<AtomicBool> {
        let expects = Arc::new(AtomicBool::new(false));
        self.sleepers().push((Arc::clone(&expects), event));
        expects
    }

    /// That queue is dropped.
    pub(crate) fn forget_sleeper(&self, expects: &Arc<AtomicBool>) {
        self.sleepers().retain(|(sleeper, _)| !Arc::ptr_eq(sleeper, expects));
    }

    fn sleepers(&self) -> MutexGuard<'_, Vec<(Arc<AtomicBool>, EventFd)>> {
        self.sleepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the queues that sleep by themselves with something outstanding.
    pub(crate) fn wake_sleepers(&self) {
        for (expects, event) in &*self.sleepers() {
            if expects.swap(false, Ordering::Relaxed) {
                event.signal();
            }
        }
    }

    /// A queue has something outstanding for long.
    pub(crate) fn note_waiting(&self) {
        self.waiting.store(true, Ordering::Relaxed);
    }

    /// Whether one had since this was asked last.
    pub(crate) fn was_waiting(&self) -> bool {
        self.waiting.swap(false, Ordering::Relaxed)
    }

    /// Has every queue look at the ages of its commands.
    pub(crate) fn tick(&self) {
        self.word.fetch_add(NEWS, Ordering::AcqRel);
    }

    /// How often the controller was reset.
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// A reset begins. Called with the control lock held.
    pub(crate) fn begin_reset(&self) {
        self.set_state(RESETTING);
    }

    /// It is over, and the controller works.
    pub(crate) fn end_reset(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.set_state(LIVE);
    }

    /// The controller is given up, disabled if `quiet`.
    pub(crate) fn give_up(&self, why: &str, quiet: bool) {
        self.over.get_or_init(|| why.into());
        self.set_state(if quiet { QUIET } else { LOST });
    }

    /// The controller went away while it worked, or while it was being reset by the caller. What it
    /// was given stays given. Whether that is news.
    pub(crate) fn remove(&self, why: &str, in_reset: bool) -> bool {
        let from = if in_reset { RESETTING } else { LIVE };
        if self.state() != from {
            return false;
        }
        self.over.get_or_init(|| why.into());
        let gone =
            |word: u32| (word & STATE == from).then_some((word & !STATE | GONE).wrapping_add(NEWS));
        self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, gone).is_ok()
    }

    /// Why the controller is no more.
    pub(crate) fn why_over(&self) -> Arc<str> {
        self.over.get().cloned().unwrap_or_else(|| "it was closed".into())
    }

    /// Whether queue `qid` can be used, after the reset that may be under way.
    pub(crate) fn check(&self, qid: u16) -> Result<(), QueueError> {
        if self.condition() == Condition::Resetting {
            drop(self.control());
        }
        self.usable(qid)
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

    /// Whether queue `qid` can be used now. Who holds the control lock sees no reset.
    pub(crate) fn usable(&self, qid: u16) -> Result<(), QueueError> {
        match self.condition() {
            Condition::Live => Ok(()),
            Condition::Over { .. } => Err(QueueError::Failed { qid, why: self.why_over() }),
            Condition::Resetting | Condition::Detached => Err(QueueError::Detached { qid }),
        }
    }

    /// The namespaces that were read again, until somebody takes them.
    pub(crate) fn news(&self) -> MutexGuard<'_, Option<Vec<Namespace>>> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
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
                    shadowbell_doorbell::Cell::store_release(&cell, 0);
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
        match self.state() {
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
            control.live.remove(&qid);
        } else {
            // Nobody knows what the controller did; its memory is not used again.
            control.created.remove(&qid);
            control.live.remove(&qid);
            control.spoiled.insert(qid);
        }
        if control.vectors.remove(&qid) {
            let _ = self.device.transport.set_irq(qid.into(), None);
        }
    }

    /// Deletes both queues at the controller.
    pub(crate) fn delete_both(&self, control: &mut Control, qid: u16) -> Result<(), CommandError> {
        let limit = self.device.timeouts.admin;
        control.live.remove(&qid);
        self.command(Sqe::delete_io_sq(qid, 0), None, 0, limit)
            .and_then(|_| self.command(Sqe::delete_io_cq(qid, 0), None, 0, limit))
            .map(drop)
    }

    fn delete_locked(&self, control: &mut Control, qid: u16) -> bool {
        if !control.created.contains(&qid) {
            return !control.spoiled.contains(&qid);
        }
        let deleted = if control.live.contains(&qid) {
            self.delete_both(control, qid)
        } else {
            // A reset has.
            Ok(())
        };
        control.created.remove(&qid);
        if control.vectors.remove(&qid)
            && let Err(error) = self.device.transport.set_irq(qid.into(), None)
        {
            tracing::debug!(qid, "an interrupt could not be taken down: {error}");
        }
        match deleted {
            Ok(()) => true,
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
        if let Some(keeper) = self.keeper.get() {
            keeper.stop();
        }
        let mut control = self.control();
        let state = self.state();
        if !matches!(state, LIVE | GONE) {
            return self.outcome(state);
        }
        self.set_state(CLOSING);
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
                self.set_state(QUIET);
                match complaint {
                    None => Ok(()),
                    Some(why) => Err(DetachError::Unclean { device, why }),
                }
            }
            Err(error) => {
                self.set_state(LOST);
                Err(DetachError::Lost { device, why: error })
            }
        }
    }

    /// Called by a handle that is being dropped: if it is the last, the controller is shut down here
    /// and now, and not when the keeper, who may be looking at it, lets go of it.
    pub(crate) fn let_go(self: &Arc<Self>) {
        let Some(keeper) = self.keeper.get() else { return };
        let Some(_held) = keeper.hold() else { return };
        if Arc::strong_count(self) == 1
            && let Err(error) = self.shut_down()
        {
            tracing::warn!("{error}");
        }
    }

    /// How a controller was left that was given up before.
    fn outcome(&self, state: u32) -> Result<(), DetachError> {
        let (device, Some(why)) = (self.name().to_owned(), self.over.get()) else { return Ok(()) };
        let why = why.to_string();
        Err(match state {
            LOST => DetachError::Lost { device, why },
            _ => DetachError::Unclean { device, why },
        })
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
        // One that was given up was told of then.
        if self.over.get().is_none() {
            if let Err(error) = self.shut_down() {
                tracing::warn!("{error}");
            }
        } else if let Err(error) = self.shut_down() {
            tracing::debug!("{error}");
        }
        if self.state() == LOST {
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
