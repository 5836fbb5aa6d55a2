//! Which pages of the host's memory the controller has written.

use super::Control;
use super::deferred::{Callback, Deferred};
use crate::context::Context;
use shadowbell_memory::DirtyLog;
use std::sync::Arc;

/// Bytes of a completion queue entry.
const ENTRY: u64 = 16;

impl Control {
    /// Has the pages noted that the controller writes, or not; `done` is called when nothing is in
    /// flight of which that is not so. `None` if it is so already.
    pub(crate) fn set_logged(
        &mut self,
        cx: &Context,
        logged: bool,
        done: Callback,
    ) -> Option<Deferred> {
        self.memory.set_logged(logged).then(|| self.renew_views(cx, done))
    }

    /// Has everybody begin with another view of the host's memory; `done` is called when nothing
    /// uses those of before. So what was written until now is in the log.
    pub(crate) fn renew_views(&mut self, cx: &Context, done: Callback) -> Deferred {
        self.log_queues();
        let mut deferred = Deferred::default();
        self.release_memory(cx, done, &mut deferred);
        deferred
    }

    /// The log, if there is one.
    pub(crate) fn dirty_log(&self) -> Option<Arc<DirtyLog>> {
        self.memory.log().cloned()
    }

    /// Counts as written what the queues write without a view: all completion queues, and the
    /// EventIdx buffer. To be called before any of these goes.
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
