//! Background work for diagnostics: self-test pieces, SMART / Health snapshots and persistent
//! events.

use super::Control;
use super::deferred::Deferred;
use super::diagnostics::{hours, media, summary};
use super::io_queues::QueueEnvironment;
use super::quiesce_state::Step;
use crate::admin::persistent_events::{FATAL, ISOLATED, Moment, Own, RECOVERED};
use crate::context::Context;
use crate::notice::Operation;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::status::Status;
use std::time::{Duration, Instant};

impl Control {
    pub(super) fn moment(&self) -> Moment {
        self.commands.moment(&self.lifecycle)
    }

    /// Logs that the controller was enabled.
    pub(super) fn log_enabled(&mut self) {
        let moment = self.moment();
        self.commands.diagnostics.events.enabled(&moment);
    }

    /// Adds a vendor-specific persistent event, captures controller-initiated telemetry and raises
    /// the telemetry event.
    fn log_own(&mut self, cx: &Context, own: Own, text: &str) {
        let moment = self.moment();
        let stats = cx.shared.stats(|_| None);
        let diagnostics = &mut self.commands.diagnostics;
        diagnostics.events.own(&moment, own, text);
        let (errors, events) = (&self.port.errors, diagnostics.events.len());
        let summary = summary(&cx.config, &self.lifecycle, errors, &stats, events);
        let reason = format!("{}: {text}", own.1);
        diagnostics.telemetry.capture_own(&reason, &summary.unwrap_or_default());
        self.port.raise(AsyncEvent::TELEMETRY_LOG_CHANGED);
    }

    pub(super) fn log_fatal(&mut self, cx: &Context, why: &str) {
        self.log_own(cx, FATAL, why);
    }

    pub(super) fn log_recovered(&mut self, cx: &Context) {
        self.log_own(cx, RECOVERED, "recovered by a new process after a crash");
    }

    pub(super) fn log_isolated(&mut self, cx: &Context, took: Duration) {
        let text = format!("a pass took {took:?}: moved to a dedicated I/O thread");
        self.log_own(cx, ISOLATED, &text);
    }

    /// Does the due work: a self-test piece or a health snapshot. Returns true if any was due.
    pub(crate) fn run_background(
        &mut self,
        cx: &Context,
        now: Instant,
        deferred: &mut Deferred,
    ) -> bool {
        if !self.is_ready() || self.quiesce.step != Step::Running {
            return false;
        }
        let wants_snapshot = self.commands.diagnostics.events.wants_snapshot(now);
        if wants_snapshot {
            let (commands, env) = self.split(cx, deferred);
            let health = commands.health_page(&env);
            let moment = commands.moment(env.lifecycle);
            commands.diagnostics.events.snapshot(&moment, &health, now);
        }
        let hours = hours(&self.lifecycle);
        let self_test = &mut self.commands.diagnostics.self_test;
        if self_test.next_at().is_none_or(|at| at > now) {
            return wants_snapshot;
        }
        if let Some(piece) = self_test.next(&media(cx), now, hours) {
            let operation = Operation::SelfTest { run: self_test.run(), nsid: piece.nsid };
            let (registers, memory) = (&self.registers, &self.memory);
            let generation = self.lifecycle.generation;
            let env = QueueEnvironment { registers, memory, generation };
            let overriding = self.overriding.as_ref().map(|overriding| overriding.queues());
            self.queues.verify(cx, &env, piece, operation, overriding);
        }
        true
    }

    /// Time of the next due work.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let works = self.is_ready() && self.quiesce.step == Step::Running;
        let diagnostics = &self.commands.diagnostics;
        let due = [diagnostics.self_test.next_at(), diagnostics.events.snapshot_due()];
        due.into_iter().flatten().min().filter(|_| works)
    }

    /// Stores the result of a verified self-test piece.
    pub(super) fn verified(&mut self, cx: &Context, (run, nsid): (u32, u32), status: Status) {
        let shift = cx.serving().get(nsid).map_or(0, |namespace| namespace.block_shift());
        let self_test = &mut self.commands.diagnostics.self_test;
        self_test.verified(run, status, shift, Instant::now());
    }
}
