//! A controller behind its public face: the control plane under its lock, what workers have told
//! it, and the turns in which it is served.

use crate::admin::budget::Budget;
use crate::admin_server::{AdminServer, Next};
use crate::context::Context;
use crate::control::{Control, Deferred};
use crate::control_thread::{RunState, TakesTurns, Turn};
use crate::inbox::{Inbox, Notices};
use crate::journal::RecoveredJournal;
use crate::migrated::MigratedController;
use crate::notice::{ControlPlane, Notice};
use crate::recorder::Recorder;
use crate::route::RelocateError;
use crate::saved::{Death, Recorded, SavedController, SavedJournal, SavedPart};
use crate::successor::{RestoreError, SaveError};
use crate::worker::ThreadJob;
use parking_lot::{Mutex, MutexGuard};
use rustix::time::{ClockId, clock_gettime};
use shadowbell_memory::EventFd;
use shadowbell_state::{AbortPoint, Descriptors, FdRef, abort_point};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Admin commands served in one turn, at most.
const TURN_COMMANDS: u32 = 16;
/// How long a turn goes on, apart from the last command.
const TURN_TIME: Duration = Duration::from_micros(100);

/// A controller behind its public face.
pub(crate) struct ControllerInner {
    pub(crate) context: Context,
    me: Weak<ControllerInner>,
    control: Mutex<Control>,
    inbox: Inbox,
    run_state: RunState,
    /// Belongs to the turn under way. To be locked before `control`, and never by the thread that
    /// carries the controller, nor by a worker: the guest's memory is touched under it.
    admin: Mutex<Admin>,
    recorder: OnceLock<Arc<dyn Recorder>>,
    /// Locked while a record is made: they are made one after the other. Whether something has
    /// changed since.
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

    /// The control plane. What has to be done without the lock goes to [`run`](Self::run) then.
    pub(crate) fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock()
    }

    /// Does something under the control plane's lock, and then what has to be done without it.
    pub(crate) fn with(&self, act: impl FnOnce(&mut Control, &Context) -> Deferred) {
        let mut control = self.control.lock();
        let deferred = act(&mut control, &self.context);
        self.note_change();
        self.release(control, deferred);
    }

    /// Something has changed that has to be recorded before the host can see it.
    pub(crate) fn note_change(&self) {
        self.changed.store(true, Ordering::Release);
    }

    /// From now on, what the controller is is recorded. It has no queues yet.
    pub(crate) fn record_with(&self, recorder: Arc<dyn Recorder>) -> io::Result<()> {
        let Context { shared, config, .. } = &self.context;
        shared.keep_journal(config.quota.requests)?;
        let _ = self.recorder.set(recorder);
        self.record();
        Ok(())
    }

    /// Records what the controller is, if it is recorded and has changed. When this returns it is,
    /// whoever has done it.
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
                tracing::error!(%error, "the controller could not be recorded: should this \
                    process die now, its guest has lost it");
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

    /// Goes on from the record of a controller whose process is dead; at rest, at first. How many
    /// commands were under way.
    pub(crate) fn recover(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
        death: Death,
    ) -> Result<usize, RestoreError> {
        let cx = &self.context;
        let SavedController { control, admin, parts, .. } = saved.clone();
        let journal = saved.journal.as_ref().ok_or(RestoreError::Invalid("there is no journal"))?;
        let (file, records) = (fds.take(journal.file)?, journal.records);
        let mut journal = RecoveredJournal::read(&file, records, control.generation, death)?;
        let eventfds = take_eventfds(&parts, fds)?;
        cx.shared.restore_counters(&saved.counters);
        cx.shared.count_recovery();
        // Whoever serves it may have said where, before.
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

    /// What a process before has announced is not known: each vector is raised once more.
    pub(crate) fn announce(&self, saved: &SavedController) {
        self.raise(&vectors(saved));
    }

    /// Raises these vectors.
    pub(crate) fn raise(&self, vectors: &[u16]) {
        for vector in vectors {
            self.context.shared.irqs.trigger(usize::from(*vector));
        }
    }

    /// Has `job` run on the thread of the worker that serves a submission queue.
    pub(crate) fn lend_thread(&self, sqid: u16, job: ThreadJob) -> Result<(), ThreadJob> {
        let cx = &self.context;
        let Some(placed) = self.control.lock().worker_of(sqid) else { return Err(job) };
        cx.pool.lend(cx.shared.id, cx.route.resolve(placed), job)
    }

    /// Lets go of the lock, and does what has to be done without it.
    pub(crate) fn release(&self, control: MutexGuard<'_, Control>, deferred: Deferred) {
        let has_orders = control.has_admin_orders();
        drop(control);
        self.record();
        self.run(deferred);
        if has_orders {
            self.schedule();
        }
    }

    /// Does what has to be done without the lock.
    fn run(&self, deferred: Deferred) {
        let Deferred { events, latches, callbacks } = deferred;
        if let Some(listener) = &self.context.listener {
            events.iter().for_each(listener);
        }
        drop(latches);
        callbacks.into_iter().for_each(|done| done());
    }

    /// Has the controller served by another worker.
    pub(crate) fn relocate(
        &self,
        act: impl FnOnce(&mut Control, &Context) -> Result<(), RelocateError>,
    ) -> Result<(), RelocateError> {
        act(&mut self.control.lock(), &self.context)
    }

    /// Has the control thread give this controller a turn.
    pub(crate) fn schedule(&self) {
        if self.run_state.request() {
            self.context.pool.control().schedule(self.me.clone());
        }
    }

    /// The most that workers have told, and that was not read, at a time since this was last asked.
    pub(crate) fn most_notices(&self) -> usize {
        self.inbox.take_most()
    }

    /// Reads what workers have told.
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

    /// What has to be kept of the controller, which is at rest.
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

    /// Goes on from the state of another controller. The host's memory is mapped, and its
    /// interrupts are connected.
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

    /// What has to be kept of the controller, which is at rest, on another machine.
    pub(crate) fn save_for_migration(&self) -> Result<MigratedController, SaveError> {
        if self.context.config.pool.is_some() {
            return Err(SaveError::Pool);
        }
        // They stay here.
        let mut fds = Descriptors::default();
        let saved = self.save(&mut fds)?;
        let doorbells = self.context.shared.doorbells();
        let mut registers = vec![0; doorbells.len()];
        let read = doorbells.read_into(0, &mut registers);
        read.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(MigratedController::new(saved, registers))
    }

    /// Goes on from there, at rest. What whoever [runs](crate::Controller::run_migrated) it has to
    /// announce then.
    pub(crate) fn load(&self, migrated: MigratedController) -> Result<Vec<u16>, RestoreError> {
        let cx = &self.context;
        if cx.config.pool.is_some() {
            return Err(RestoreError::Invalid("the namespaces of its host"));
        }
        let (mut saved, registers) = migrated.check(cx)?;
        let written = cx.shared.doorbells().write_from(0, &registers);
        written.ok_or(RestoreError::Invalid("the page of doorbells"))?;
        let SavedController { control, admin, parts, .. } = &mut saved;
        let loaded = self.control.lock().load(cx, control, admin.as_ref(), parts);
        self.note_change();
        loaded?;
        self.record();
        self.schedule();
        Ok(vectors(&saved))
    }

    /// Has the server do what the control plane has decided.
    fn follow_orders(&self, server: &mut AdminServer, has_fetched: bool) {
        if server.follow_orders(&self.control, &self.context, has_fetched) {
            self.note_change();
        }
    }

    fn is_inline(&self) -> bool {
        self.context.pool.control().is_inline()
    }

    /// So much of a processor went to the guest's commands.
    fn spend(&self, budget: &mut Budget, used: Duration) {
        let cx = &self.context;
        if !cx.pool.control().is_inline() && budget.spend(used, Instant::now()) {
            tracing::warn!(
                serial = cx.config.serial,
                "the guest gives more admin commands than a fifth of a processor can serve; they \
                 wait their turn"
            );
        }
    }

    fn serve_admin(&self, admin: &mut Admin, deferred: &mut Deferred) -> Turn {
        let Self { context: cx, control, .. } = self;
        let Admin { server, budget } = admin;
        let is_inline = cx.pool.control().is_inline();
        let began = Instant::now();
        self.follow_orders(server, false);
        self.record();
        server.post(control, cx);
        // What was done for them elsewhere.
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
        // Most turns have no command, and the question is a system call.
        let mut processor = None;
        let mut served = 0;
        let turn = loop {
            // What a caller's thread does is up to the caller; its turns are all alike.
            if served == TURN_COMMANDS || !is_inline && began.elapsed() >= TURN_TIME {
                break Turn::Again;
            }
            // What it posts, if there is nothing more to do, is recorded.
            self.record();
            match server.next(control, cx) {
                Next::Idle => break Turn::Idle,
                Next::Look => {}
                Next::Command(command) => {
                    if !is_inline {
                        processor.get_or_insert_with(processor_time);
                    }
                    // What was the case before the host submitted the command counts first.
                    self.receive(deferred);
                    self.follow_orders(server, true);
                    if !server.serve(control, cx, command, deferred) {
                        break Turn::Idle;
                    }
                    self.follow_orders(server, false);
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
        if turn == Turn::Idle && control.lock().has_admin_orders() { Turn::Again } else { turn }
    }
}

impl TakesTurns for ControllerInner {
    fn run_state(&self) -> &RunState {
        &self.run_state
    }

    fn turn(&self) -> Turn {
        let mut deferred = Deferred::default();
        // What a host can have done as often as it likes has its price.
        let has_price = self.control.lock().has_one_alone() && !self.is_inline();
        let began = has_price.then(processor_time);
        self.receive(&mut deferred);
        let mut admin = self.admin.lock();
        if let Some(began) = began {
            self.record();
            self.spend(&mut admin.budget, processor_time().saturating_sub(began));
        }
        let turn = self.serve_admin(&mut admin, &mut deferred);
        let is_quiet = admin.server.is_quiet();
        let may_be_alone = admin.budget.wait_until(Instant::now()).is_none();
        drop(admin);
        let now = Instant::now();
        let mut control = self.control.lock();
        if may_be_alone {
            control.advance_alone(&self.context, &mut deferred);
            if control.tend(&self.context, now, &mut deferred) {
                self.note_change();
            }
        }
        control.advance_rest(&self.context, is_quiet, &mut deferred);
        if control.watch_host(&self.context, now, &mut deferred) {
            self.note_change();
        }
        // Another turn follows in any case, but for an idle one. Where there are no threads, there
        // is no clock either: a host is looked for when there is something else to do.
        let is_last = turn == Turn::Idle && !self.context.pool.control().is_inline();
        let watch = if is_last { control.next_watch(now) } else { None };
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

/// The vectors of the queues of a controller, and what it has raised and nobody was there to hear.
fn vectors(saved: &SavedController) -> Vec<u16> {
    let cqs = saved.parts.iter().flat_map(|part| &part.cqs).filter_map(|cq| cq.vector);
    let of_admin = saved.admin.as_ref().map(|_| 0);
    let mut vectors: Vec<_> =
        cqs.chain(of_admin).chain(saved.pending_vectors.iter().copied()).collect();
    vectors.sort_unstable();
    vectors.dedup();
    vectors
}

/// The processor time that this thread has taken: a turn that waits for somebody takes none.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// The descriptors that stand for doorbells, by part.
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
