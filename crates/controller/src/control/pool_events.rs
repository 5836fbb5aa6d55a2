//! Results of pool orders and sanitize operations, and namespaces that were barred meanwhile.

use super::Control;
use super::deferred::Deferred;
use crate::admin::sanitize;
use crate::context::Context;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::status::Status;

impl Control {
    /// Completes the command whose order the pool has finished.
    pub(super) fn pool_ended(
        &mut self,
        cx: &Context,
        (generation, cid): (u64, u16),
        (status, dw0): (Status, u32),
        deferred: &mut Deferred,
    ) {
        let sanitizing = self.commands.pool.ended();
        if let Some(command) = sanitizing.filter(|_| status.is_success()) {
            let moment = self.commands.moment(&self.lifecycle);
            let dwords = (command.dword10(), command.ovrpat);
            let sanicap = sanitize::capabilities().into_bits();
            self.commands.diagnostics.events.sanitize_started(&moment, sanicap, dwords);
        }
        self.review_barred(cx, deferred);
        if generation != self.lifecycle.generation {
            return;
        }
        match status.is_success() {
            true => self.port.complete(cid, status, dw0),
            false => self.port.fail(cid, status, 0),
        }
    }

    /// Handles the end of a sanitize operation.
    pub(super) fn sanitized(&mut self, cx: &Context, deferred: &mut Deferred) {
        self.review_barred(cx, deferred);
        if let Some(pool) = &cx.config.pool {
            let moment = self.commands.moment(&self.lifecycle);
            let log = sanitize::page(&pool.state().sanitize);
            self.commands.diagnostics.events.sanitize_ended(&moment, &log);
        }
        self.port.raise(AsyncEvent::SANITIZE_COMPLETED);
    }

    /// Removes the bar of namespaces. A namespace that the pool has not added again is reported to
    /// the host as removed.
    fn review_barred(&mut self, cx: &Context, deferred: &mut Deferred) {
        let Some(pool) = &cx.config.pool else { return };
        let barrier = pool.state().sanitize.barrier();
        let barred: Vec<_> = cx.serving().barred().collect();
        for nsid in barred {
            cx.serve(cx.serving().barring(nsid, barrier));
            if barrier.is_none() {
                // An added namespace is no longer barred, so this one was not added again.
                self.publish_namespace(cx, nsid, None);
            }
            self.switch_namespace(cx, nsid, None, deferred);
        }
    }
}
