//! The host's memory: what of it the controller can reach, and which pages it has written.

use super::Controller;
use crate::control::Deferred;
use shadowbell_memory::{DirtyLog, DmaError, DmaTable, SharedBytes};
use std::sync::Arc;

impl Controller {
    /// Makes `len` bytes of `memory` reachable for the controller at `iova`.
    ///
    /// # Errors
    /// [`DmaError`], if the range is bad or in use.
    pub fn map_dma(&self, iova: u64, len: u64, memory: &SharedBytes) -> Result<(), DmaError> {
        let mut control = self.0.control();
        control.map(iova, len, memory)?;
        control.publish_table(&self.0.context, None);
        self.0.release(control, Deferred::default());
        Ok(())
    }

    /// As [`map_dma`](Self::map_dma), for one of several ranges: they are reachable after
    /// [`settle_dma`](Self::settle_dma), at the latest. So the workers take over one other map, and
    /// not as many as there are ranges.
    ///
    /// # Errors
    /// [`DmaError`], if the range is bad or in use.
    pub fn add_dma(&self, iova: u64, len: u64, memory: &SharedBytes) -> Result<(), DmaError> {
        let mut control = self.0.control();
        let outcome = control.map(iova, len, memory);
        self.0.release(control, Deferred::default());
        outcome
    }

    /// Makes reachable what was [added](Self::add_dma).
    pub fn settle_dma(&self) {
        let mut control = self.0.control();
        control.publish_table(&self.0.context, None);
        self.0.release(control, Deferred::default());
    }

    /// Lets the controller use the memory that is mapped, as it may from the beginning. However
    /// much that is, it takes no time.
    pub fn enable_dma(&self) {
        let mut control = self.0.control();
        control.enable_memory();
        control.publish_table(&self.0.context, None);
        self.0.release(control, Deferred::default());
    }

    /// Lets the controller use no memory until [`enable_dma`](Self::enable_dma), whatever is or
    /// will be mapped. `done` as for [`unmap_dma`](Self::unmap_dma).
    pub fn disable_dma(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.disable_memory(cx, Box::new(done)));
    }

    /// Everything that is mapped. Whoever drops that last lets go of all the memory in it.
    #[must_use]
    pub fn dma_table(&self) -> Arc<DmaTable> {
        Arc::clone(self.0.control().mapped())
    }

    /// From now on, the pages of the host's memory that the controller writes are noted; or not any
    /// more. `done` as for [`renew_views`](Self::renew_views): whatever is written after that is
    /// noted. False, and `done` is dropped, if it was so already.
    ///
    /// Completion queues and EventIdx count as written whenever the log is looked at.
    pub fn log_writes(&self, log: bool, done: impl FnOnce() + Send + 'static) -> bool {
        let mut control = self.0.control();
        let Some(deferred) = control.set_logged(&self.0.context, log, Box::new(done)) else {
            return false;
        };
        self.0.release(control, deferred);
        true
    }

    /// Has everything that was written until now in the [log](Self::dirty_log): `done` runs, on any
    /// thread, when no command is in flight any more that is in flight now. As for
    /// [`unmap_dma`](Self::unmap_dma), it may be dropped instead.
    pub fn renew_views(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.renew_views(cx, Box::new(done)));
    }

    /// The pages that were [noted](Self::log_writes), if any are.
    #[must_use]
    pub fn dirty_log(&self) -> Option<Arc<DirtyLog>> {
        self.0.control().dirty_log()
    }

    /// Takes a range away. `done` runs, on any thread, when no command in flight can touch it any
    /// more; that may be before this returns. It is dropped instead if the last handle of the
    /// controller is dropped before.
    ///
    /// # Errors
    /// [`DmaError`], if nothing is mapped there or a map would be split; `done` does not run then.
    pub fn unmap_dma(
        &self,
        iova: u64,
        len: u64,
        done: impl FnOnce() + Send + 'static,
    ) -> Result<(), DmaError> {
        let mut control = self.0.control();
        let deferred = control.unmap(&self.0.context, iova, len, Box::new(done))?;
        self.0.release(control, deferred);
        Ok(())
    }

    /// Takes every range away; `done` as for [`unmap_dma`](Self::unmap_dma).
    pub fn unmap_all(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| {
            let mut deferred = Deferred::default();
            control.unmap_all(cx, Box::new(done), &mut deferred);
            deferred
        });
    }
}
