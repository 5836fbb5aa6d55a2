//! How others reach a worker.

use crate::worker::message::Message;
use doorbell::{Cell, FullFence, Waker};
use memory::EventFd;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A worker's mailbox and its bell.
pub(crate) struct Mailbox {
    /// Whether there are messages: what the worker looks at in every pass.
    news: AtomicBool,
    messages: Mutex<VecDeque<Message>>,
    pub(crate) state: Arc<AtomicU32>,
    pub(crate) event: EventFd,
}

impl Mailbox {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            news: AtomicBool::new(false),
            messages: Mutex::default(),
            state: Arc::default(),
            event: EventFd::new()?,
        })
    }

    /// Leaves a message, and wakes the worker if it sleeps: whether it did.
    pub(crate) fn send(&self, message: Message) -> bool {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).push_back(message);
        self.news.store(true, Ordering::Release);
        let asleep = self.waker().kick();
        if asleep {
            self.event.signal();
        }
        asleep
    }

    /// A trapped doorbell write of a controller that has this `bell` at the worker. If it is parked,
    /// the worker has to hear whose doorbell it was; if not, only that it must not sleep. Whether this
    /// has woken it.
    pub(crate) fn ring(
        &self,
        controller: u32,
        bell: &AtomicU32,
        register: &impl Cell,
        value: u32,
    ) -> bool {
        if Waker::<_, FullFence>::new(bell).ring(register, value) {
            return self.send(Message::Rung { controller });
        }
        let asleep = self.waker().kick();
        if asleep {
            self.event.signal();
        }
        asleep
    }

    fn waker(&self) -> Waker<&AtomicU32, FullFence> {
        Waker::new(&*self.state)
    }

    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.news.load(Ordering::Acquire)
    }

    /// All messages that are there, oldest first.
    pub(crate) fn take(&self) -> VecDeque<Message> {
        // First the flag, then the messages: one that comes in between is found again.
        self.news.store(false, Ordering::Release);
        std::mem::take(&mut *self.messages.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
