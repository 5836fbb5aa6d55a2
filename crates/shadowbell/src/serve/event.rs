//! What happens to the controllers, on its way to the log.
//!
//! The reactor's thread and the workers see it happen, under locks and with no time to ask a
//! controller for its counters. So they leave it in a short queue, and a thread of its own makes
//! the lines.

use shadowbell_controller::Event;
use shadowbell_frontend::vfio_user::ClientEvent;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvError, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Instant;

/// Events that may wait in the queue, before one is lost.
const CAPACITY: usize = 1024;

/// What happened to a controller.
#[derive(Clone, Debug)]
pub(super) enum ServerEvent {
    /// To the device around it.
    Client(ClientEvent),
    /// To itself.
    Controller(Event),
    /// Something that the queue had no room for.
    Lost,
    /// There will be no more.
    End,
}

/// The queue: what happened, and to which controller.
pub(super) struct EventQueue {
    sender: SyncSender<(usize, ServerEvent)>,
    receiver: Receiver<(usize, ServerEvent)>,
}

impl EventQueue {
    pub(super) fn new() -> Self {
        let (sender, receiver) = sync_channel(CAPACITY);
        Self { sender, receiver }
    }

    /// For the events of the controller of this number.
    pub(super) fn sender(&self, index: usize) -> EventSender {
        EventSender { index, sender: self.sender.clone(), lost: Arc::default() }
    }

    /// Waits for the next one, until `deadline` if there is one.
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

/// Where a controller's events go.
#[derive(Clone)]
pub(super) struct EventSender {
    index: usize,
    sender: SyncSender<(usize, ServerEvent)>,
    lost: Arc<AtomicBool>,
}

impl EventSender {
    /// For the events of the controller of another number.
    pub(super) fn of(&self, index: usize) -> Self {
        Self { index, sender: self.sender.clone(), lost: Arc::default() }
    }

    /// Never waits: who calls this serves guests.
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

    /// Sends that there will be no more, and waits until there is room for it.
    pub(super) fn end(&self) {
        let _ = self.sender.send((self.index, ServerEvent::End));
    }
}
