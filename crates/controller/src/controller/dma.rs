//! DMA maps of host memory, and dirty page logging.

use super::Controller;
use crate::control::Deferred;
use shadowbell_memory::{DirtyLog, DmaError, DmaTable, SharedBytes};
use std::sync::Arc;

impl Controller {
    /// Maps `len` bytes of `memory` at `iova` for the controller.
    ///
    /// # Errors
    /// [`DmaError`] if the range is invalid or in use.
    pub fn map_dma(&self, iova: u64, len: u64, memory: &SharedBytes) -> Result<(), DmaError> {
        let mut control = self.0.control();
        control.map(iova, len, memory)?;
        control.publish_table(&self.0.context, None);
        self.0.release(control, Deferred::default());
        Ok(())
    }

    /// Maps one of several ranges, like [`map_dma`](Self::map_dma). The range is accessible at the
    /// latest after [`settle_dma`](Self::settle_dma), so that I/O threads switch to a new DMA table
    /// once and not once per range.
    ///
    /// # Errors
    /// [`DmaError`] if the range is invalid or in use.
    pub fn add_dma(&self, iova: u64, len: u64, memory: &SharedBytes) -> Result<(), DmaError> {
        let mut control = self.0.control();
        let outcome = control.map(iova, len, memory);
        self.0.release(control, Deferred::default());
        outcome
    }

    /// Makes ranges of [`add_dma`](Self::add_dma) accessible.
    pub fn settle_dma(&self) {
        let mut control = self.0.control();
        control.publish_table(&self.0.context, None);
        self.0.release(control, Deferred::default());
    }

    /// Enables access to the mapped memory, which is the initial state. The cost does not depend on
    /// the size of the memory.
    pub fn enable_dma(&self) {
        let mut control = self.0.control();
        control.enable_memory();
        control.publish_table(&self.0.context, None);
        self.0.release(control, Deferred::default());
    }

    /// Disables access to memory until [`enable_dma`](Self::enable_dma), for current and later
    /// maps. `done` is as for [`unmap_dma`](Self::unmap_dma).
    pub fn disable_dma(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.disable_memory(cx, Box::new(done)));
    }

    /// DMA table of all maps. Dropping its last reference unmaps the memory.
    #[must_use]
    pub fn dma_table(&self) -> Arc<DmaTable> {
        Arc::clone(self.0.control().mapped())
    }

    /// Enables or disables dirty page logging of the controller's writes. `done` is as for
    /// [`renew_views`](Self::renew_views): all later writes are logged. Returns false, and drops
    /// `done`, if the state is unchanged.
    ///
    /// Completion queues and EventIdx count as dirty whenever the log is read.
    pub fn log_writes(&self, log: bool, done: impl FnOnce() + Send + 'static) -> bool {
        let mut control = self.0.control();
        let Some(deferred) = control.set_logged(&self.0.context, log, Box::new(done)) else {
            return false;
        };
        self.0.release(control, deferred);
        true
    }

    /// Completes the [dirty page log](Self::dirty_log) for all writes up to now: `done` runs, on
    /// any thread, when all commands that are now in flight have ended. As for
    /// [`unmap_dma`](Self::unmap_dma), it may be dropped instead.
    pub fn renew_views(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.renew_views(cx, Box::new(done)));
    }

    /// Dirty page log, if [enabled](Self::log_writes).
    #[must_use]
    pub fn dirty_log(&self) -> Option<Arc<DirtyLog>> {
        self.0.control().dirty_log()
    }

    /// Unmaps a range. `done` runs, on any thread, when no command in flight can access the range,
    /// possibly before this method returns. It is dropped instead if the last handle of the
    /// controller is dropped earlier.
    ///
    /// # Errors
    /// [`DmaError`] if the range is not mapped, or a map would be split; `done` does not run in
    /// that case.
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

    /// Unmaps all ranges. `done` is as for [`unmap_dma`](Self::unmap_dma).
    pub fn unmap_all(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| {
            let mut deferred = Deferred::default();
            control.unmap_all(cx, Box::new(done), &mut deferred);
            deferred
        });
    }
}
