//! Dirty page logging of the controller's writes to host memory, for migration.

use super::Control;
use super::deferred::{Callback, Deferred};
use crate::context::Context;
use shadowbell_memory::DirtyLog;
use std::sync::Arc;

/// Bytes of a completion queue entry.
const ENTRY: u64 = 16;

impl Control {
    /// Enables or disables dirty page logging. `done` is called when all writes in flight use the
    /// new state. `None` if the state is unchanged.
    pub(crate) fn set_logged(
        &mut self,
        cx: &Context,
        logged: bool,
        done: Callback,
    ) -> Option<Deferred> {
        self.memory.set_logged(logged).then(|| self.renew_views(cx, done))
    }

    /// Replaces all views of host memory. `done` is called when no old view is used, so that all
    /// earlier writes are in the log.
    pub(crate) fn renew_views(&mut self, cx: &Context, done: Callback) -> Deferred {
        self.log_queues();
        let mut deferred = Deferred::default();
        self.release_memory(cx, done, &mut deferred);
        deferred
    }

    /// Dirty page log, if enabled.
    pub(crate) fn dirty_log(&self) -> Option<Arc<DirtyLog>> {
        self.memory.log().cloned()
    }

    /// Marks the memory that queues write without a view as dirty: all completion queues and the
    /// EventIdx page. Called before any of them is removed.
    pub(super) fn log_queues(&self) {
        let Some(log) = self.memory.log() else { return };
        for (iova, entries) in self.queues.completion_queues() {
            log.add(iova, u64::from(entries) * ENTRY);
        }
        if self.is_ready() {
            let entries = u64::from(self.registers.aqa.acqs()) + 1;
            log.add(self.registers.acq, entries * ENTRY);
        }
        if let Some((_, event_idx)) = self.memory.shadow {
            log.add(event_idx, self.registers.page_size() as u64);
        }
    }
}
