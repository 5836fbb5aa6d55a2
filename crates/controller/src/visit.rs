//! Liveness check of I/O threads and the control thread.

use parking_lot::Mutex;
use std::sync::Arc;

/// Liveness check, sent to several threads. Each thread drops its clone when it handles the
/// message.
#[derive(Clone)]
pub(crate) struct Visit {
    _pending: Arc<PendingVisit>,
}

struct PendingVisit(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Visit {
    /// Creates a check. `ended` runs on the thread that drops the last clone.
    pub(crate) fn new(ended: impl FnOnce() + Send + 'static) -> Self {
        Self { _pending: Arc::new(PendingVisit(Mutex::new(Some(Box::new(ended))))) }
    }

    /// Creates a check whose end is reported through a channel.
    #[cfg(test)]
    pub(crate) fn for_tests() -> (Self, std::sync::mpsc::Receiver<()>) {
        let (send, receive) = std::sync::mpsc::channel();
        let ended = move || {
            let _ = send.send(());
        };
        (Self::new(ended), receive)
    }
}

impl Drop for PendingVisit {
    fn drop(&mut self) {
        if let Some(ended) = self.0.get_mut().take() {
            ended();
        }
    }
}
