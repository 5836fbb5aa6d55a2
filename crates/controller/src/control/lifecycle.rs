//! Controller enable, shutdown and reset, and expiry of the Keep Alive Timer.

use super::Control;
use super::admin_port::Attach;
use super::diagnostics::hours;
use super::io_queues::{QueueEnvironment, ended_notice};
use super::lifecycle_state::{Callback, Deferred, Lifecycle, Phase, Shutdown, Step, Waiter};
use super::registers::{RESET_LIMIT, Registers};
use crate::admin::identify::SHUTDOWN_MICROSECONDS;
use crate::context::Context;
use crate::control_thread::AdminDoorbellPoll;
use crate::event::Event;
use crate::notice::Operation;
use crate::queue::admin::AdminQueue;
use crate::trace::Kind;
use crate::worker::mailbox::Message;
use shadowbell_spec::regs::{self, Cc, Csts, DoorbellKind, SHST_NORMAL};
use shadowbell_spec::status::Status;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Control {
    /// Handles a write of CC.
    pub(super) fn configure(&mut self, cx: &Context, old: Cc, deferred: &mut Deferred) {
        let new = self.registers.cc;
        match (old.en(), new.en()) {
            // If the host sets EN before RDY is 0, the end of the reset enables the controller.
            (false, true) if self.lifecycle.phase == Phase::Disabled => self.enable(cx, deferred),
            (true, false) => self.begin_reset(cx, false, deferred),
            _ => {}
        }
        if new.shn() != regs::SHN_NONE && old.shn() != new.shn() {
            self.shut_down(cx, deferred);
        }
    }

    /// Enables the controller: CC.EN changed from 0 to 1 (Base 2.1, "Memory-based Controller
    /// Initialization").
    pub(super) fn enable(&mut self, cx: &Context, deferred: &mut Deferred) {
        if let Err(why) = self.registers.check_enable() {
            return self.fail(cx, why, deferred);
        }
        cx.select_command_sets(self.registers.cc.css());
        let Registers { aqa, asq, acq, .. } = self.registers;
        let (table, generation) = (Arc::clone(self.memory.table()), self.lifecycle.generation);
        match AdminQueue::new(&cx.shared, &table, aqa, asq, acq) {
            Ok(queue) => {
                // The new positions must be in the journal before a checkpoint contains the queue:
                // before this, the journal has the queue positions and doorbell values from before
                // the reset.
                let journal = cx.shared.journal_part(0, generation).unwrap_or_default();
                if let Some(journal) = &journal {
                    queue.write_down(journal);
                }
                self.port.open(Attach { queue, table, generation, shadow: None });
            }
            Err(fault) => {
                tracing::warn!(%fault, "the memory of the admin queue is not accessible");
                let why = "the admin queue is not in memory that the host shared";
                return self.fail(cx, why, deferred);
            }
        }
        self.lifecycle.phase = Phase::Ready;
        self.lifecycle.shutdown_limit = None;
        self.registers.csts = Csts::new().with_rdy(true);
        self.log_enabled();
        deferred.event(Event::Enabled);
        self.poll_admin_doorbells(cx);
    }

    /// Starts polling the admin doorbells if the doorbells are mapped, because host writes to
    /// mapped doorbells do not trap.
    pub(super) fn poll_admin_doorbells(&self, cx: &Context) {
        if cx.shared.mapped {
            let tail = cx.shared.register(0, DoorbellKind::Sq);
            let head = cx.shared.register(0, DoorbellKind::Cq);
            let poll = AdminDoorbellPoll::new(tail, head, cx.control.clone());
            cx.pool.control().poll_doorbells(cx.shared.id, Some(poll));
        }
    }

    /// Starts a shutdown (CC.SHN; Base 2.1, 3.6.1, "Memory-based Controller Shutdown"). Commands in
    /// flight end first, and then the caches of all disks are flushed. The host must reset the
    /// controller before it sends further commands, but may reuse its memory before that reset:
    /// Linux frees the shadow doorbell pages, and enables bus mastering again before it resets the
    /// controller. So the queues are removed from their I/O threads, and do not return.
    ///
    /// A disabled controller flushes as well, because writes from before a reset may still be
    /// cached.
    pub(super) fn shut_down(&mut self, cx: &Context, deferred: &mut Deferred) {
        self.registers.csts.set_shst(regs::SHST_OCCURRING);
        if self.lifecycle.shutdown_limit.is_none() {
            let limit = Duration::from_micros(SHUTDOWN_MICROSECONDS.into());
            self.lifecycle.shutdown_limit = Instant::now().checked_add(limit);
        }
        match self.lifecycle.shutdown {
            Shutdown::AfterReset | Shutdown::Leaving => return,
            Shutdown::Flushing | Shutdown::FlushingAgain => {
                self.lifecycle.shutdown = Shutdown::FlushingAgain;
                return;
            }
            Shutdown::None => {}
        }
        match self.lifecycle.phase {
            Phase::Resetting => self.lifecycle.shutdown = Shutdown::AfterReset,
            Phase::Ready => {
                self.lifecycle.shutdown = Shutdown::Leaving;
                self.lifecycle.phase = Phase::ShutDown;
                self.drop_queues(cx, Operation::Shutdown, deferred);
            }
            Phase::Disabled | Phase::ShutDown => self.flush_for_shutdown(cx),
        }
    }

    /// True while a shutdown or a reset with a time limit is in progress.
    pub(crate) fn has_time_limit(&self) -> bool {
        self.lifecycle.shutdown_limit.or(self.lifecycle.reset_limit).is_some()
    }

    fn is_shutting_down(&self) -> bool {
        self.lifecycle.shutdown != Shutdown::None
    }

    fn flush_for_shutdown(&mut self, cx: &Context) {
        self.lifecycle.shutdown = Shutdown::Flushing;
        let (registers, memory) = (&self.registers, &self.memory);
        let generation = self.lifecycle.generation;
        let env = QueueEnvironment { registers, memory, generation };
        let overriding = self.overriding.as_ref().map(|overriding| overriding.queues());
        self.queues.flush(cx, &env, Operation::Shutdown, overriding);
    }

    /// Continues a shutdown: all I/O threads have finished their parts of the current step.
    pub(super) fn continue_shutdown(&mut self, cx: &Context, deferred: &mut Deferred) {
        match self.lifecycle.shutdown {
            Shutdown::None | Shutdown::AfterReset => {}
            Shutdown::Leaving => self.flush_for_shutdown(cx),
            Shutdown::FlushingAgain => {
                self.lifecycle.shutdown = Shutdown::None;
                self.shut_down(cx, deferred);
            }
            // During the flush, the host has enabled the controller. So the shutdown has ended.
            Shutdown::Flushing if self.lifecycle.phase == Phase::Ready => {
                self.lifecycle.shutdown = Shutdown::None;
            }
            Shutdown::Flushing => {
                self.detach_flushed(cx, deferred);
                cx.shared.irqs.clear_pending();
                self.end_shutdown();
                self.registers.csts.set_shst(regs::SHST_COMPLETE);
                deferred.event(Event::Shutdown);
            }
        }
    }

    /// Ends the shutdown of a disabled controller, because a reset has begun. The flush of that
    /// shutdown may still be in flight, but it accesses no host memory. The notice at the end of
    /// the flush has the previous generation, so the control plane ignores it.
    fn abandon_flush(&mut self, cx: &Context, deferred: &mut Deferred) {
        if self.is_shutting_down() {
            self.lifecycle.generation = self.lifecycle.generation.wrapping_add(1);
            self.end_shutdown();
            self.detach_flushed(cx, deferred);
        }
    }

    fn end_shutdown(&mut self) {
        self.lifecycle.shutdown = Shutdown::None;
        self.lifecycle.shutdown_limit = None;
    }

    /// Detaches the controller from the I/O thread to which the flush of its shutdown was sent.
    fn detach_flushed(&mut self, cx: &Context, deferred: &mut Deferred) {
        // The notice of this latch has the previous generation, so the control plane ignores it.
        let before = self.lifecycle.generation.wrapping_sub(1);
        let latch = cx.latch(ended_notice(before, Operation::Reset));
        cx.send_all(self.queues.workers(), |controller| Message::Detach {
            controller,
            latch: latch.clone(),
        });
        self.queues.clear_workers();
        deferred.latches.push(latch);
    }

    /// Drops the shadow doorbell pages, and removes all queues from the admin queue server and the
    /// I/O threads, which abort commands in flight. `operation` ends when the admin queue server
    /// and all I/O threads have done this.
    fn drop_queues(&mut self, cx: &Context, operation: Operation, deferred: &mut Deferred) {
        self.log_queues();
        self.memory.shadow = None;
        cx.shared.set_shadowed(false);
        self.queues.drop_eventfds();
        self.drop_exclusive(cx);
        let hours = hours(&self.lifecycle);
        self.commands.diagnostics.self_test.reset(hours);
        if cx.shared.mapped {
            cx.pool.control().poll_doorbells(cx.shared.id, None);
        }
        let latch = cx.latch(ended_notice(self.lifecycle.generation, operation));
        self.port.close(latch.clone());
        let controller = cx.shared.id;
        cx.route.hurry(&cx.pool, || Message::Hurry { controller });
        let message = |controller| Message::Detach { controller, latch: latch.clone() };
        cx.send_all(self.queues.workers(), message);
        deferred.latches.push(latch);
    }

    /// Starts a Controller Level Reset. The shadow doorbell pages are dropped first. Then the I/O
    /// threads and the admin queue server abort commands in flight. When all of them have finished,
    /// [`end_reset`](Self::end_reset) is called.
    pub(super) fn begin_reset(&mut self, cx: &Context, full: bool, deferred: &mut Deferred) {
        if self.quiesce.step == Step::Quiesced {
            // If the controller is quiesced, no I/O thread has its queues, and no command is in
            // flight.
            self.quiesce.step = Step::Running;
            deferred.callbacks.push(Box::new(cx.route.drop_quiesced()));
        }
        self.lifecycle.full_reset |= full;
        if self.lifecycle.phase == Phase::Resetting {
            return;
        }
        let is_flushed = self.registers.csts.shst() == regs::SHST_COMPLETE;
        let was_ready = matches!(self.lifecycle.phase, Phase::Ready | Phase::ShutDown);
        if was_ready && self.queues.has_sqs() && !is_flushed && full {
            self.lifecycle.unsafe_shutdowns = self.lifecycle.unsafe_shutdowns.saturating_add(1);
        }
        self.lifecycle.phase = Phase::Resetting;
        self.lifecycle.generation = self.lifecycle.generation.wrapping_add(1);
        if !was_ready {
            // The controller was not ready, so no queue exists.
            self.abandon_flush(cx, deferred);
            self.drop_exclusive(cx);
            return self.end_reset(cx, deferred);
        }
        self.end_shutdown();
        self.lifecycle.reset_limit = Instant::now().checked_add(RESET_LIMIT);
        self.drop_queues(cx, Operation::Reset, deferred);
    }

    /// Ends a reset: all commands in flight have ended.
    pub(super) fn end_reset(&mut self, cx: &Context, deferred: &mut Deferred) {
        self.queues.reset(cx);
        let doorbells = cx.shared.doorbells();
        let _ = doorbells.fill(0, doorbells.len(), 0);
        cx.shared.irqs.clear_pending();
        cx.shared.coalescing.reset();
        cx.shared.set_write_through(false);
        cx.shared.set_copy_formats(0);
        if let Some(member) = &cx.config.member {
            member.set_host(None);
        }
        self.commands.reset();
        self.commands.ana.begin(cx);
        deferred.latches.extend(cx.lba_status.drop_all());
        self.port.events.clear();
        self.lifecycle.reset_at = Instant::now();
        self.lifecycle.phase = Phase::Disabled;
        (self.lifecycle.shutdown_limit, self.lifecycle.reset_limit) = (None, None);
        let shutdown = std::mem::replace(&mut self.lifecycle.shutdown, Shutdown::None);
        self.registers.reset();
        if std::mem::take(&mut self.lifecycle.full_reset) {
            self.registers.power_on();
        }
        if let Some(overriding) = &mut self.overriding {
            overriding.reset_ended();
        }
        cx.trace(Kind::Reset, 0, 0, 0);
        deferred.event(Event::Disabled);
        for waiter in std::mem::take(&mut self.lifecycle.waiting) {
            self.run_waiter(cx, waiter, deferred);
        }
        if self.registers.cc.en() {
            self.enable(cx, deferred);
        }
        if shutdown == Shutdown::AfterReset && self.registers.cc.shn() != regs::SHN_NONE {
            self.shut_down(cx, deferred);
        }
    }

    /// Runs the action of a waiter after a reset.
    fn run_waiter(&mut self, cx: &Context, waiter: Waiter, deferred: &mut Deferred) {
        match waiter {
            Waiter::Reset(done) => deferred.callbacks.push(done),
            Waiter::Disconnect(done) => {
                cx.shared.irqs.clear();
                self.unmap_all(cx, done, deferred);
            }
        }
    }

    /// Resets the controller at the request of its front end.
    pub(crate) fn reset(&mut self, cx: &Context, done: Callback) -> Deferred {
        self.reset_for(cx, Waiter::Reset(done))
    }

    /// Handles a disconnected host: resets the controller, then drops memory maps and interrupts.
    pub(crate) fn disconnect(&mut self, cx: &Context, done: Callback) -> Deferred {
        self.reset_for(cx, Waiter::Disconnect(done))
    }

    fn reset_for(&mut self, cx: &Context, waiter: Waiter) -> Deferred {
        let mut deferred = Deferred::default();
        if let Some(overriding) = &mut self.overriding {
            overriding.function_reset();
        }
        if self.lifecycle.phase == Phase::Disabled {
            self.abandon_flush(cx, &mut deferred);
            if self.quiesce.step == Step::Quiesced {
                self.quiesce.step = Step::Running;
                deferred.callbacks.push(Box::new(cx.route.drop_quiesced()));
            }
            self.registers.power_on();
            self.run_waiter(cx, waiter, &mut deferred);
        } else {
            self.lifecycle.waiting.push(waiter);
            self.begin_reset(cx, true, &mut deferred);
        }
        deferred
    }
}

/// Expiry of the Keep Alive Timer and of the time limits of a shutdown and a reset.
impl Control {
    /// Checks the Keep Alive Timer and the time limits of a shutdown and a reset. Returns true if
    /// one has expired.
    pub(crate) fn check_keep_alive(
        &mut self,
        cx: &Context,
        now: Instant,
        deferred: &mut Deferred,
    ) -> bool {
        let is_over = |limit: &mut Option<Instant>| limit.take_if(|limit| *limit <= now).is_some();
        let why = if is_over(&mut self.lifecycle.shutdown_limit) {
            Some("the storage has not answered in the time for a shutdown (RTD3E)")
        } else if is_over(&mut self.lifecycle.reset_limit) {
            Some("the storage has not answered in the time for a reset (CAP.TO)")
        } else {
            None
        };
        if let Some(why) = why {
            self.fail(cx, why, deferred);
            self.log_pending(cx);
            return true;
        }
        // Base 2.1, 3.9: the timer runs while the controller is ready and not shutting down. It is
        // also stopped while the controller is quiesced, because Keep Alive commands are not
        // processed then.
        let listens = self.is_ready()
            && self.registers.csts.shst() == SHST_NORMAL
            && self.quiesce.step == Step::Running;
        let timer = self.commands.keep_alive();
        if !listens {
            timer.restart(now);
            return false;
        }
        let is_gone = timer.expires(now);
        if is_gone {
            self.handle_dead_host(cx, deferred);
        }
        is_gone
    }

    /// Logs the disks that have not answered all requests of the controller.
    pub(crate) fn log_pending(&self, cx: &Context) {
        let message = |controller| Message::LogPending { controller };
        cx.send_all(self.queues.workers(), message);
    }

    /// Time of the next turn for Keep Alive, a time limit or background work. `None` if no turn is
    /// needed.
    pub(crate) fn next_timer(&mut self) -> Option<Instant> {
        let Lifecycle { shutdown_limit, reset_limit, .. } = self.lifecycle;
        let keep_alive = self.commands.keep_alive().expires_at();
        let others = [keep_alive, shutdown_limit, reset_limit, self.quiesce.retry_at];
        others.into_iter().flatten().chain(self.next_due()).min()
    }

    /// Handles a dead host: adds an error log entry, enters a fatal state and stops command
    /// execution.
    fn handle_dead_host(&mut self, cx: &Context, deferred: &mut Deferred) {
        self.port.no_command_failed(Status::KEEP_ALIVE_TIMER_EXPIRED);
        let why = "the Keep Alive Timer expired without a command from the host";
        self.fail(cx, why, deferred);
        // The host must reset the controller, so the queues are detached at once. The notice of the
        // latch has the previous generation, so the control plane ignores the notice.
        let before = self.lifecycle.generation.wrapping_sub(1);
        let latch = cx.latch(ended_notice(before, Operation::Reset));
        cx.send_all(self.queues.workers(), |controller| Message::Detach {
            controller,
            latch: latch.clone(),
        });
        deferred.latches.push(latch);
    }
}
