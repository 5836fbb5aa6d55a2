//! Queue of controller events for the log.
//!
//! The reactor thread and the I/O threads send events while they hold locks and cannot query a
//! controller's counters. So they put events into a bounded queue, and a separate thread formats
//! the log lines.

use shadowbell_controller::Event;
use shadowbell_frontend::vfio_user::ClientEvent;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvError, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Instant;

/// Capacity of the queue. Events beyond it are lost.
const CAPACITY: usize = 1024;

/// Event of a controller.
#[derive(Clone, Debug)]
pub(super) enum ServerEvent {
    /// Event of the vfio-user device.
    Client(ClientEvent),
    /// Event of the controller itself.
    Controller(Event),
    /// Events were lost because the queue was full.
    Lost,
    /// No more events follow.
    End,
}

/// Queue of events, each with its controller's index.
pub(super) struct EventQueue {
    sender: SyncSender<(usize, ServerEvent)>,
    receiver: Receiver<(usize, ServerEvent)>,
}

impl EventQueue {
    pub(super) fn new() -> Self {
        let (sender, receiver) = sync_channel(CAPACITY);
        Self { sender, receiver }
    }

    /// Creates a sender for the controller with this index.
    pub(super) fn sender(&self, index: usize) -> EventSender {
        EventSender { index, sender: self.sender.clone(), lost: Arc::default() }
    }

    /// Waits for the next event, at most until `deadline`.
    pub(super) fn next(
        &self,
        deadline: Option<Instant>,
    ) -> Result<(usize, ServerEvent), RecvTimeoutError> {
        match deadline {
            None => self.receiver.recv().map_err(|RecvError| RecvTimeoutError::Disconnected),
            Some(deadline) => {
                self.receiver.recv_timeout(deadline.saturating_duration_since(Instant::now()))
            }
        }
    }
}

/// Sender of one controller's events.
#[derive(Clone)]
pub(super) struct EventSender {
    index: usize,
    sender: SyncSender<(usize, ServerEvent)>,
    lost: Arc<AtomicBool>,
}

impl EventSender {
    /// Creates a sender for another controller, with the index `index`.
    pub(super) fn of(&self, index: usize) -> Self {
        Self { index, sender: self.sender.clone(), lost: Arc::default() }
    }

    /// Sends an event. Never blocks, because callers serve guests.
    pub(super) fn send(&self, event: ServerEvent) {
        if self.lost.load(Ordering::Relaxed)
            && self.sender.try_send((self.index, ServerEvent::Lost)).is_ok()
        {
            self.lost.store(false, Ordering::Relaxed);
        }
        if self.sender.try_send((self.index, event)).is_err() {
            self.lost.store(true, Ordering::Relaxed);
        }
    }

    /// Sends the end marker. Blocks while the queue is full.
    pub(super) fn end(&self) {
        let _ = self.sender.send((self.index, ServerEvent::End));
    }
}
