//! Shared interior of a [`Controller`](crate::Controller): its control plane and the lock around
//! it, its inbox, and its turns. (In a turn, the control thread does a limited amount of work for
//! one controller.)

use crate::admin::Budget;
use crate::admin_server::{AdminServer, Next};
use crate::context::Context;
use crate::control::{Control, Deferred};
use crate::control_thread::{RunState, Turn, TurnTask};
use crate::journal::RecoveredJournal;
use crate::migration_state::MigrationState;
use crate::notice::{ControlPlane, Inbox, Notice, Notices};
use crate::restore_error::{RestoreError, SaveError};
use crate::route::RelocateError;
use crate::saved::{CauseOfDeath, Recorded, Recorder, SavedController, SavedJournal, SavedPart};
use parking_lot::{Mutex, MutexGuard};
use rustix::time::{ClockId, clock_gettime};
use shadowbell_memory::EventFd;
use shadowbell_state::{AbortPoint, Descriptors, FdRef, abort_point};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Maximum number of admin commands per turn.
const TURN_COMMANDS: u32 = 16;
/// Time limit of a turn. No further command is started after it.
const TURN_TIME: Duration = Duration::from_micros(100);

/// Shared interior of a controller.
pub(crate) struct ControllerInner {
    pub(crate) context: Context,
    me: Weak<ControllerInner>,
    control: Mutex<Control>,
    inbox: Inbox,
    run_state: RunState,
    /// Admin queue server and budget. Only the turn in progress uses them. A thread that takes both
    /// this lock and `control` takes this lock first. Guest memory is accessed while this lock is
    /// held, and these accesses may block. So neither the front end's thread nor an I/O thread ever
    /// takes it.
    admin: Mutex<Admin>,
    recorder: OnceLock<Arc<dyn Recorder>>,
    /// Lock that serializes checkpoints. `changed` is true if the state has changed since the last
    /// checkpoint.
    recording: Mutex<()>,
    changed: AtomicBool,
}

struct Admin {
    server: AdminServer,
    budget: Budget,
}

impl ControllerInner {
    pub(crate) fn new(context: Context, me: Weak<Self>) -> Self {
        Self {
            control: Mutex::new(Control::new(&context)),
            context,
            me,
            inbox: Inbox::default(),
            run_state: RunState::default(),
            admin: Mutex::new(Admin { server: AdminServer::default(), budget: Budget::new() }),
            recorder: OnceLock::new(),
            recording: Mutex::default(),
            changed: AtomicBool::new(true),
        }
    }

    /// Locks the control plane. The caller must pass the guard and the deferred work to
    /// [`release`](Self::release).
    pub(crate) fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock()
    }

    /// Runs `act` under the control plane's lock. After the lock is released, runs the deferred
    /// work that `act` has returned.
    pub(crate) fn with(&self, act: impl FnOnce(&mut Control, &Context) -> Deferred) {
        let mut control = self.control.lock();
        let deferred = act(&mut control, &self.context);
        self.note_change();
        self.release(control, deferred);
    }

    /// Marks the state as changed. It is then checkpointed before the host can see the change.
    pub(crate) fn note_change(&self) {
        self.changed.store(true, Ordering::Release);
    }

    /// Starts checkpointing the controller. The controller must not have queues yet.
    pub(crate) fn record_with(&self, recorder: Arc<dyn Recorder>) -> io::Result<()> {
        let Context { shared, config, .. } = &self.context;
        shared.create_journal(config.quota.requests)?;
        let _ = self.recorder.set(recorder);
        self.record();
        Ok(())
    }

    /// Checkpoints the controller, if it has a recorder and has changed. Another thread may store
    /// the latest change instead; this method then waits for it.
    pub(crate) fn record(&self) {
        let Some(recorder) = self.recorder.get() else { return };
        let _one_after_the_other = self.recording.lock();
        if !self.changed.swap(false, Ordering::AcqRel) {
            return;
        }
        abort_point(AbortPoint::Changed);
        let mut fds = Descriptors::default();
        match self.make_record(&mut fds) {
            Ok(state) => {
                recorder.record(&state, fds);
                abort_point(AbortPoint::ChangeRecorded);
            }
            Err(error) => {
                tracing::error!(%error, "checkpoint failed: if this process dies, the \
                    guest loses its controller");
            }
        }
    }

    fn make_record(&self, fds: &mut Descriptors) -> io::Result<SavedController> {
        let cx = &self.context;
        let Recorded { control, admin, parts } = self.control.lock().record(cx, fds)?;
        let mut counters = cx.shared.counters();
        counters.io = cx.shared.io();
        let journal = cx.shared.journal().map(|journal| {
            let records = journal.records();
            Ok::<_, io::Error>(SavedJournal { file: fds.add(journal.file()?), records })
        });
        Ok(SavedController {
            shape: cx.shape(),
            journal: journal.transpose()?,
            doorbells: fds.add(cx.shared.doorbell_file()?),
            control,
            admin,
            parts,
            isolated: cx.route.is_diverted(),
            pending_vectors: cx.shared.irqs.pending(),
            counters,
        })
    }

    /// Recovers the controller from the checkpoint of a dead process. The controller is quiesced
    /// at first. Returns the number of commands to replay.
    pub(crate) fn recover(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
        death: CauseOfDeath,
    ) -> Result<usize, RestoreError> {
        let cx = &self.context;
        let SavedController { control, admin, parts, .. } = saved.clone();
        let journal =
            saved.journal.as_ref().ok_or(RestoreError::Invalid("the journal is missing"))?;
        let (file, records) = (fds.take(journal.file)?, journal.records);
        let mut journal = RecoveredJournal::read(&file, records, control.generation, death)?;
        let eventfds = take_eventfds(&parts, fds)?;
        cx.shared.restore_counters(&saved.counters);
        if death != CauseOfDeath::Planned {
            cx.shared.count_recovery();
        }
        // The saved controller had an I/O thread of its own. It gets one again, unless the caller
        // has already chosen an I/O thread for it.
        if saved.isolated && !cx.route.is_diverted() {
            self.relocate(|control, cx| control.isolate(cx))?;
        }
        let recorded = Recorded { control, admin, parts };
        let mut deferred = Deferred::default();
        let mut plane = self.control.lock();
        let replays = plane.recover(cx, &recorded, eventfds, &mut journal, &mut deferred)?;
        abort_point(AbortPoint::QueuesRecovered);
        self.note_change();
        self.release(plane, deferred);
        Ok(replays)
    }

    /// Raises every vector once. The previous process may have died before it raised an interrupt.
    pub(crate) fn announce(&self, saved: &SavedController) {
        self.raise(&vectors(saved));
    }

    /// Raises the given vectors.
    pub(crate) fn raise(&self, vectors: &[u16]) {
        for vector in vectors {
            self.context.shared.irqs.trigger(usize::from(*vector));
        }
    }

    /// Unlocks the control plane, checkpoints the controller and runs the deferred work.
    pub(crate) fn release(&self, control: MutexGuard<'_, Control>, deferred: Deferred) {
        // A turn of the control thread sets the timer for the time limit of a shutdown or a reset.
        let needs_turn = control.has_admin_orders() || control.has_time_limit();
        drop(control);
        self.record();
        self.run(deferred);
        if needs_turn {
            self.schedule();
        }
    }

    /// Runs deferred work. The caller must hold no lock.
    fn run(&self, deferred: Deferred) {
        let Deferred { events, latches, callbacks } = deferred;
        if let Some(listener) = &self.context.listener {
            events.iter().for_each(listener);
        }
        drop(latches);
        callbacks.into_iter().for_each(|done| done());
    }

    /// Moves the controller to another I/O thread. `act` selects the I/O thread.
    pub(crate) fn relocate(
        &self,
        act: impl FnOnce(&mut Control, &Context) -> Result<(), RelocateError>,
    ) -> Result<(), RelocateError> {
        act(&mut self.control.lock(), &self.context)
    }

    /// Requests a turn of the control thread.
    pub(crate) fn schedule(&self) {
        if self.run_state.request() {
            self.context.pool.control().schedule(self.me.clone());
        }
    }

    /// Returns and resets the maximum number of pending notices.
    pub(crate) fn max_notices(&self) -> usize {
        self.inbox.take_max()
    }

    /// Handles the pending notices.
    fn receive(&self, deferred: &mut Deferred) {
        let Some(Notices { missed, errors, others }) = self.inbox.take() else { return };
        if missed.count != 0 {
            self.control.lock().receive_missed(&self.context, &missed, deferred);
        }
        for notice in errors.into_iter().chain(others) {
            self.control.lock().receive(&self.context, notice, deferred);
        }
        self.note_change();
    }

    /// Snapshot of the quiesced controller.
    pub(crate) fn save(&self, fds: &mut Descriptors) -> Result<SavedController, SaveError> {
        let cx = &self.context;
        let admin = self.admin.lock();
        let (control, used, unserved) = {
            let plane = self.control.lock();
            let (control, used) = plane.save(cx)?;
            (control, used, plane.save_unserved(used))
        };
        let mut counters = cx.shared.counters();
        counters.io = cx.shared.io();
        let mut parts = Vec::new();
        for stopover in cx.route.stopovers() {
            let worker = stopover.worker();
            let saved = stopover.with(|queues| {
                if queues.is_overridden() {
                    return Err(SaveError::Overridden);
                }
                queues.count(&mut counters.sq, &mut counters.cq);
                Ok(queues.save(worker, fds)?)
            });
            parts.extend(saved.transpose()?);
        }
        Ok(SavedController {
            shape: cx.shape(),
            doorbells: fds.add(cx.shared.doorbell_file()?),
            control,
            admin: unserved.or_else(|| admin.server.save(used)),
            parts,
            isolated: cx.route.is_diverted(),
            pending_vectors: cx.shared.irqs.pending(),
            counters,
            journal: None,
        })
    }

    /// Restores this controller from a snapshot of its predecessor. Host memory must be mapped
    /// already, and interrupts connected.
    pub(crate) fn restore(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
    ) -> Result<(), RestoreError> {
        let cx = &self.context;
        let eventfds = take_eventfds(&saved.parts, fds)?;
        cx.shared.restore_counters(&saved.counters);
        self.control.lock().restore(cx, saved, eventfds)?;
        self.note_change();
        self.record();
        self.schedule();
        self.announce(saved);
        Ok(())
    }

    /// Snapshot of the quiesced controller for migration to another machine.
    pub(crate) fn save_for_migration(&self) -> Result<MigrationState, SaveError> {
        if self.context.config.pool.is_some() {
            return Err(SaveError::Pool);
        }
        // Descriptors are not part of a migrated state. They are closed at the end of this
        // function.
        let mut fds = Descriptors::default();
        let saved = self.save(&mut fds)?;
        let doorbells = self.context.shared.doorbells();
        let mut registers = vec![0; doorbells.len()];
        let read = doorbells.read_into(0, &mut registers);
        read.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(MigrationState::new(saved, registers))
    }

    /// Loads a migrated state. The controller stays quiesced. Returns the vectors that must be
    /// raised when the controller [runs](crate::Controller::run_migrated).
    pub(crate) fn load(&self, migrated: MigrationState) -> Result<Vec<u16>, RestoreError> {
        let cx = &self.context;
        if cx.config.pool.is_some() {
            return Err(RestoreError::Invalid("the target has a namespace pool"));
        }
        let (mut saved, registers) = migrated.check(cx)?;
        let written = cx.shared.doorbells().write_from(0, &registers);
        written.ok_or(RestoreError::Invalid("the doorbell page"))?;
        let SavedController { control, admin, parts, .. } = &mut saved;
        let loaded = self.control.lock().load(cx, control, admin.as_ref(), parts);
        self.note_change();
        loaded?;
        self.record();
        self.schedule();
        Ok(vectors(&saved))
    }

    /// Lets the admin queue server execute the control plane's orders.
    fn execute_orders(&self, server: &mut AdminServer, has_fetched: bool) {
        if server.execute_orders(&self.control, &self.context, has_fetched) {
            self.note_change();
        }
    }

    fn is_inline(&self) -> bool {
        self.context.pool.control().is_inline()
    }

    /// Charges CPU time to the controller's budget for admin commands.
    fn spend(&self, budget: &mut Budget, used: Duration) {
        let cx = &self.context;
        if !cx.pool.control().is_inline() && budget.spend(used, Instant::now()) {
            tracing::warn!(
                serial = cx.config.serial,
                "admin commands of the guest take more than a fifth of a CPU; they are delayed"
            );
        }
    }

    fn serve_admin(&self, admin: &mut Admin, deferred: &mut Deferred) -> Turn {
        let Self { context: cx, control, .. } = self;
        let Admin { server, budget } = admin;
        let is_inline = cx.pool.control().is_inline();
        let began = Instant::now();
        self.execute_orders(server, false);
        self.record();
        server.post(control, cx);
        // Get LBA Status commands have turns of their own, whose CPU time is charged here.
        let elsewhere = cx.lba_status.take_used();
        if !elsewhere.is_zero() {
            self.spend(budget, elsewhere);
        }
        if let Some(until) = budget.wait_until(began) {
            return Turn::At(until);
        }
        if server.lacks_cq() {
            control.lock().lacks_admin_cq(cx, deferred);
            return Turn::Idle;
        }
        // CPU time is measured only if there is a command, because the CPU clock costs a system
        // call.
        let mut processor = None;
        let mut served = 0;
        let turn = loop {
            // In inline mode, turns run on a caller's thread, and only the number of commands
            // limits them. The caller limits the time.
            if served == TURN_COMMANDS || !is_inline && began.elapsed() >= TURN_TIME {
                break Turn::Requeue;
            }
            // `next` posts completions, which reveal the current state to the host. So the state is
            // checkpointed first.
            self.record();
            match server.next(control, cx) {
                Next::Idle => break Turn::Idle,
                Next::PollAgain => {}
                Next::Command(command) => {
                    if !is_inline {
                        processor.get_or_insert_with(processor_time);
                    }
                    // Notices are handled first, because I/O threads may have sent them before the
                    // host submitted the command.
                    self.receive(deferred);
                    self.execute_orders(server, true);
                    if !server.serve(control, cx, command, deferred) {
                        break Turn::Idle;
                    }
                    self.execute_orders(server, false);
                    self.note_change();
                }
            }
            served += 1;
        };
        self.record();
        server.post(control, cx);
        abort_point(AbortPoint::AdminPosted);
        if served != 0
            && let Some(processor) = processor
        {
            self.spend(budget, processor_time().saturating_sub(processor));
        }
        if turn == Turn::Idle && control.lock().has_admin_orders() { Turn::Requeue } else { turn }
    }
}

impl TurnTask for ControllerInner {
    fn run_state(&self) -> &RunState {
        &self.run_state
    }

    fn turn(&self) -> Turn {
        let mut deferred = Deferred::default();
        // A host can repeat exclusive commands without limit, so their CPU time is charged too.
        let has_price = self.control.lock().has_exclusive() && !self.is_inline();
        let began = has_price.then(processor_time);
        self.receive(&mut deferred);
        let mut admin = self.admin.lock();
        if let Some(began) = began {
            self.record();
            self.spend(&mut admin.budget, processor_time().saturating_sub(began));
        }
        let turn = self.serve_admin(&mut admin, &mut deferred);
        if admin.server.take_memory_loss() {
            self.notify(Notice::MemoryLost);
        }
        let is_idle = admin.server.is_idle();
        let permitted_at = admin.budget.wait_until(Instant::now());
        drop(admin);
        let now = Instant::now();
        let mut control = self.control.lock();
        if permitted_at.is_none() {
            control.advance_exclusive(&self.context, &mut deferred);
            if control.run_background(&self.context, now, &mut deferred) {
                self.note_change();
            }
        }
        control.advance_quiesce(&self.context, is_idle, &mut deferred);
        if control.check_keep_alive(&self.context, now, &mut deferred) {
            self.note_change();
        }
        // A timer is needed only after an idle turn, because another turn follows otherwise. Inline
        // mode has no timers, and checks the Keep Alive Timer in turns for other work.
        let is_last = turn == Turn::Idle && !self.context.pool.control().is_inline();
        let watch = if is_last { control.next_timer() } else { None };
        // Background work that is due also waits until the admin budget permits a turn.
        let watch = watch.map(|at| permitted_at.map_or(at, |permitted| at.max(permitted)));
        drop(control);
        self.record();
        self.run(deferred);
        watch.map_or(turn, Turn::At)
    }
}

impl ControlPlane for ControllerInner {
    fn notify(&self, notice: Notice) {
        self.inbox.push(notice);
        self.schedule();
    }
}

/// Interrupt vectors of the controller's completion queues, and vectors that were raised while no
/// eventfd was connected.
fn vectors(saved: &SavedController) -> Vec<u16> {
    let cqs = saved.parts.iter().flat_map(|part| &part.cqs).filter_map(|cq| cq.vector);
    let of_admin = saved.admin.as_ref().map(|_| 0);
    let mut vectors: Vec<_> =
        cqs.chain(of_admin).chain(saved.pending_vectors.iter().copied()).collect();
    vectors.sort_unstable();
    vectors.dedup();
    vectors
}

/// CPU time of the calling thread. It excludes the time during which the thread is blocked.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Takes the doorbell eventfds out of `fds`, for the queues of each I/O thread.
fn take_eventfds(
    parts: &[SavedPart],
    fds: &mut Descriptors,
) -> Result<Vec<Vec<EventFd>>, RestoreError> {
    let mut eventfds = Vec::with_capacity(parts.len());
    for part in parts {
        let take =
            |fd: &FdRef| -> Result<EventFd, RestoreError> { Ok(EventFd::from_fd(fds.take(*fd)?)?) };
        let events: Result<Vec<_>, _> = part.doorbell_eventfds.iter().map(take).collect();
        eventfds.push(events?);
    }
    Ok(eventfds)
}
