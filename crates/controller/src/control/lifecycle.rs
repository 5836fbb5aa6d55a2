//! Enabling the controller, shutting it down and resetting it.

use super::Control;
use super::admin::Attach;
use super::deferred::{Callback, Deferred};
use super::diagnostics::hours;
use super::io_queues::{QueueEnvironment, ended};
use super::registers::Registers;
use super::reset::{Phase, ShutdownFlush, Waiter};
use super::rest::Step;
use crate::context::Context;
use crate::control_thread::AdminDoorbellPoll;
use crate::event::Event;
use crate::notice::Operation;
use crate::queue::admin::AdminQueue;
use crate::trace::Kind;
use crate::worker::message::Message;
use shadowbell_spec::regs::{self, Cc, Csts, DoorbellKind};
use std::sync::Arc;
use std::time::Instant;

impl Control {
    /// CC was written.
    pub(super) fn configure(&mut self, cx: &Context, old: Cc, deferred: &mut Deferred) {
        let new = self.registers.cc;
        match (old.en(), new.en()) {
            // Early, before RDY went to 0: it counts when the reset under way is over.
            (false, true) if self.lifecycle.phase == Phase::Disabled => self.enable(cx, deferred),
            (true, false) => self.begin_reset(cx, false, deferred),
            _ => {}
        }
        if new.shn() != regs::SHN_NONE && old.shn() != new.shn() {
            self.shut_down(cx, deferred);
        }
    }

    /// CC.EN went from 0 to 1 (Base 2.1, "Memory-based Controller Initialization").
    pub(super) fn enable(&mut self, cx: &Context, deferred: &mut Deferred) {
        if let Err(why) = self.registers.check_enable() {
            return self.fail(cx, why, deferred);
        }
        cx.select_command_sets(self.registers.cc.css());
        let Registers { aqa, asq, acq, .. } = self.registers;
        let (table, generation) = (Arc::clone(self.memory.table()), self.lifecycle.generation);
        match AdminQueue::new(&cx.shared, &table, aqa, asq, acq) {
            Ok(queue) => {
                // Before it is recorded that there is one: what is written down is that of the
                // queue before the reset, whose doorbells may have been elsewhere.
                let journal = cx.shared.journal_part(0, generation).unwrap_or_default();
                if let Some(journal) = &journal {
                    queue.write_down(journal);
                }
                self.port.open(Attach { queue, table, generation, shadow: None });
            }
            Err(fault) => {
                tracing::warn!(%fault, "the admin queue's memory can not be reached");
                let why = "the admin queue is not in memory that the host shared";
                return self.fail(cx, why, deferred);
            }
        }
        self.lifecycle.phase = Phase::Ready;
        self.registers.csts = Csts::new().with_rdy(true);
        self.log_enabled();
        deferred.event(Event::Enabled);
        self.poll_admin_doorbells(cx);
    }

    /// Where nothing traps, somebody has to look.
    pub(super) fn poll_admin_doorbells(&self, cx: &Context) {
        if cx.shared.mapped {
            let tail = cx.shared.register(0, DoorbellKind::Sq);
            let head = cx.shared.register(0, DoorbellKind::Cq);
            let poll = AdminDoorbellPoll::new(tail, head, cx.control.clone());
            cx.pool.control().poll_doorbells(cx.shared.id, Some(poll));
        }
    }

    /// CC.SHN: flushes what the disks hold back. The queues go on working meanwhile, if there are
    /// any; what was written before a reset counts as well.
    pub(super) fn shut_down(&mut self, cx: &Context, deferred: &mut Deferred) {
        self.registers.csts.set_shst(regs::SHST_OCCURRING);
        if self.lifecycle.flush != ShutdownFlush::None {
            self.lifecycle.flush = ShutdownFlush::Again;
            return;
        }
        self.lifecycle.flush = ShutdownFlush::UnderWay;
        if self.lifecycle.phase == Phase::Resetting {
            deferred.latches.push(cx.latch(ended(self.lifecycle.generation, Operation::Shutdown)));
            return;
        }
        let (registers, memory) = (&self.registers, &self.memory);
        let generation = self.lifecycle.generation;
        let env = QueueEnvironment { registers, memory, generation };
        let overriding = self.overriding.as_ref().map(|overriding| overriding.queues());
        self.queues.flush(cx, &env, Operation::Shutdown, overriding);
    }

    /// The last step of a shutdown but one: nobody reads or writes the shadow pages any more. The
    /// host goes on after a Controller Level Reset only (Base 2.1, "Memory-based Controller
    /// Shutdown"), and until then the pages may be anybody's memory: Linux frees them, and switches
    /// bus mastering on again before it resets.
    pub(super) fn end_shadow_doorbells(&mut self, cx: &Context, deferred: &mut Deferred) {
        self.lifecycle.flush = ShutdownFlush::UnderWay;
        self.log_queues();
        self.memory.shadow = None;
        self.port.change_shadow(None);
        let latch = cx.latch(ended(self.lifecycle.generation, Operation::Shutdown));
        self.port.when_followed(&latch);
        cx.send_all(self.queues.workers(), |controller| Message::Shadow {
            controller,
            pages: None,
            latch: latch.clone(),
        });
        deferred.latches.push(latch);
    }

    /// A worker has flushed for a controller that is disabled: nobody needs its queues.
    pub(super) fn let_workers_go(&mut self, cx: &Context, deferred: &mut Deferred) {
        if self.lifecycle.phase != Phase::Disabled {
            return;
        }
        // Nobody waits for that: what ends is of a time before.
        let before = self.lifecycle.generation.wrapping_sub(1);
        let latch = cx.latch(ended(before, Operation::Reset));
        cx.send_all(self.queues.workers(), |controller| Message::Detach {
            controller,
            latch: latch.clone(),
        });
        self.queues.forget_workers();
        deferred.latches.push(latch);
    }

    /// A Controller Level Reset begins: the shadow pages are dropped before anything else, the
    /// workers give up what is in flight, and so does whoever serves the admin queue. The rest
    /// follows when they have.
    pub(super) fn begin_reset(&mut self, cx: &Context, full: bool, deferred: &mut Deferred) {
        if self.rest.step == Step::Resting {
            // Its queues are at no worker, and nothing is in flight.
            self.rest.step = Step::Working;
            deferred.callbacks.push(Box::new(cx.route.give_up_rest()));
        }
        self.log_queues();
        self.memory.shadow = None;
        self.queues.drop_eventfds();
        self.forget_alone(cx);
        self.lifecycle.full_reset |= full;
        if self.lifecycle.phase == Phase::Resetting {
            return;
        }
        if self.lifecycle.phase == Phase::Ready
            && self.queues.has_sqs()
            && self.registers.csts.shst() != regs::SHST_COMPLETE
            && full
        {
            self.lifecycle.unsafe_shutdowns = self.lifecycle.unsafe_shutdowns.saturating_add(1);
        }
        let was_ready = self.lifecycle.phase == Phase::Ready;
        self.lifecycle.phase = Phase::Resetting;
        self.lifecycle.generation = self.lifecycle.generation.wrapping_add(1);
        self.lifecycle.flush = ShutdownFlush::None;
        let hours = hours(&self.lifecycle);
        self.commands.diagnostics.self_test.reset(hours);
        if cx.shared.mapped {
            cx.pool.control().poll_doorbells(cx.shared.id, None);
        }
        if !was_ready {
            // Enabling it had failed: nobody has anything to give up.
            return self.end_reset(cx, deferred);
        }
        let latch = cx.latch(ended(self.lifecycle.generation, Operation::Reset));
        self.port.close(latch.clone());
        let controller = cx.shared.id;
        cx.route.hurry(&cx.pool, || Message::Hurry { controller });
        let message = |controller| Message::Detach { controller, latch: latch.clone() };
        cx.send_all(self.queues.workers(), message);
        deferred.latches.push(latch);
    }

    /// Nothing is in flight any more.
    pub(super) fn end_reset(&mut self, cx: &Context, deferred: &mut Deferred) {
        self.queues.reset(cx);
        let doorbells = cx.shared.doorbells();
        let _ = doorbells.fill(0, doorbells.len(), 0);
        cx.shared.irqs.forget_pending();
        cx.shared.coalescing.reset();
        cx.shared.set_write_through(false);
        cx.shared.set_copy_formats(0);
        if let Some(member) = &cx.config.member {
            member.set_host(None);
        }
        self.commands.reset();
        self.commands.ana.begin(cx);
        deferred.latches.extend(cx.lba_status.forget());
        self.port.events.clear();
        self.lifecycle.reset_at = Instant::now();
        self.lifecycle.phase = Phase::Disabled;
        self.lifecycle.flush = ShutdownFlush::None;
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
            self.reset_is_over(cx, waiter, deferred);
        }
        if self.registers.cc.en() {
            self.enable(cx, deferred);
        }
    }

    /// Does what somebody wanted done after a reset.
    pub(super) fn reset_is_over(&mut self, cx: &Context, waiter: Waiter, deferred: &mut Deferred) {
        match waiter {
            Waiter::Reset(done) => deferred.callbacks.push(done),
            Waiter::Disconnect(done) => {
                cx.shared.irqs.clear();
                self.unmap_all(cx, done, deferred);
            }
        }
    }

    /// A reset from outside.
    pub(crate) fn reset(&mut self, cx: &Context, done: Callback) -> Deferred {
        self.reset_for(cx, Waiter::Reset(done))
    }

    /// The host is gone: a reset, after which its memory and its interrupts are forgotten.
    pub(crate) fn disconnect(&mut self, cx: &Context, done: Callback) -> Deferred {
        self.reset_for(cx, Waiter::Disconnect(done))
    }

    pub(super) fn reset_for(&mut self, cx: &Context, waiter: Waiter) -> Deferred {
        let mut deferred = Deferred::default();
        if let Some(overriding) = &mut self.overriding {
            overriding.function_reset();
        }
        if self.lifecycle.phase == Phase::Disabled {
            if self.rest.step == Step::Resting {
                self.rest.step = Step::Working;
                deferred.callbacks.push(Box::new(cx.route.give_up_rest()));
            }
            self.registers.power_on();
            self.reset_is_over(cx, waiter, &mut deferred);
        } else {
            self.lifecycle.waiting.push(waiter);
            self.begin_reset(cx, true, &mut deferred);
        }
        deferred
    }
}
