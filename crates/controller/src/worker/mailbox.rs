//! Mailbox of an I/O thread: messages and wakeups from other threads.

use super::message::Message;
use super::queue_move::{Arrivals, Relocated};
use crate::stats::SleepCounters;
use crate::worker::utilization::BusyClock;
use parking_lot::Mutex;
use shadowbell_doorbell::{Cell, FullFence, Waker};
use shadowbell_memory::{DmaTable, EventFd};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// Number of messages that are searched for an earlier DMA map of the same controller.
const NEAR: usize = 16;

/// Adds a message. A DMA map replaces an unread earlier map of the same controller: to resolve all
/// queues in a map takes longer than to send one, so a client that sends maps without a pause would
/// keep the thread busy with nothing else. Latches that wait for the end of the replaced maps wait
/// for the end of the thread's current map. Returns the replaced map, which the caller drops
/// without the lock, because it may own memory.
fn add(messages: &mut VecDeque<Message>, message: Message) -> Option<Arc<DmaTable>> {
    let Message::Table { controller, table, mut latches } = message else {
        messages.push_back(message);
        return None;
    };
    for earlier in messages.iter_mut().rev().take(NEAR) {
        match earlier {
            Message::Table { controller: of, table: old, latches: all } if *of == controller => {
                all.append(&mut latches);
                return Some(std::mem::replace(old, table));
            }
            // These messages commute with a map.
            Message::Table { .. } | Message::DoorbellWritten { .. } => {}
            // Any other message (queue creation, reset) has to see the maps in order.
            _ => break,
        }
    }
    messages.push_back(Message::Table { controller, table, latches });
    None
}

/// Mailbox of an I/O thread, with the means to wake the thread.
pub(crate) struct Mailbox {
    /// True if there are messages. Read by the thread in every pass.
    has_any: AtomicBool,
    messages: Mutex<VecDeque<Message>>,
    /// Maximum number of waiting messages.
    most: AtomicUsize,
    pub(crate) state: Arc<AtomicU32>,
    pub(crate) event: EventFd,
    /// Time that the thread has been awake, read by other threads.
    pub(crate) busy: BusyClock,
    /// Sleep statistics of the thread.
    pub(crate) sleeps: SleepCounters,
}

impl Mailbox {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            has_any: AtomicBool::new(false),
            messages: Mutex::default(),
            most: AtomicUsize::new(0),
            state: Arc::default(),
            event: EventFd::new()?,
            busy: BusyClock::new(),
            sleeps: SleepCounters::default(),
        })
    }

    /// Sends a message and wakes the thread if it sleeps. True if it woke it up.
    pub(crate) fn send(&self, message: Message) -> bool {
        let mut messages = self.messages.lock();
        let parting = add(&mut messages, message);
        self.most.fetch_max(messages.len(), Ordering::Relaxed);
        drop(messages);
        drop(parting);
        self.has_any.store(true, Ordering::Release);
        self.wake()
    }

    /// Wakes the thread if it sleeps. True if it woke it up.
    pub(crate) fn wake(&self) -> bool {
        let asleep = self.waker().kick();
        if asleep {
            self.event.signal();
        }
        asleep
    }

    /// Delivers a trapped doorbell write of a controller whose state on the thread is `park_state`.
    /// If the controller is parked, a message names it; otherwise, the thread is only woken. True
    /// if it woke it up.
    pub(crate) fn write_doorbell(
        &self,
        controller: u32,
        park_state: &AtomicU32,
        register: &impl Cell,
        value: u32,
    ) -> bool {
        if Waker::<_, FullFence>::new(park_state).ring(register, value) {
            return self.send(Message::DoorbellWritten { controller });
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
    pub(crate) fn has_messages(&self) -> bool {
        self.has_any.load(Ordering::Acquire)
    }

    /// True if there is a message for this controller.
    pub(crate) fn has_of(&self, controller: u32) -> bool {
        let messages = self.messages.lock();
        messages.iter().any(|message| message.controller() == Some(controller))
    }

    /// Returns and resets the maximum number of waiting messages.
    pub(crate) fn take_most(&self) -> usize {
        self.most.swap(0, Ordering::Relaxed)
    }

    /// Takes all messages, oldest first.
    pub(crate) fn take(&self) -> VecDeque<Message> {
        // The flag is cleared before the messages are taken, so a message sent in between sets it
        // again.
        self.has_any.store(false, Ordering::Release);
        std::mem::take(&mut *self.messages.lock())
    }
}

impl Arrivals for Mailbox {
    fn deliver(&self, queues: Box<Relocated>) {
        self.send(Message::Arrive(queues));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notice::tests::Notices;
    use crate::notice::{Latch, Notice};
    use shadowbell_memory::{DmaSpace, Mapping};

    /// DMA map message with `ranges` ranges and these latches.
    fn table(controller: u32, ranges: u64, latches: Vec<Latch>) -> Message {
        let bytes = Mapping::anonymous(4096).unwrap().bytes();
        let mut space = DmaSpace::default();
        (0..ranges).for_each(|n| space.map(n * 4096, 4096, &bytes).unwrap());
        Message::Table { controller, table: Arc::clone(space.table()), latches }
    }

    /// Taken messages as (controller, ranges, latches), or `None` for other messages.
    fn taken(mailbox: &Mailbox) -> Vec<Option<(u32, usize, usize)>> {
        let of = |message: &Message| match message {
            Message::Table { controller, table, latches } => {
                Some((*controller, table.len(), latches.len()))
            }
            _ => None,
        };
        mailbox.take().iter().map(of).collect()
    }

    #[test]
    fn only_the_newest_map_of_a_controller_is_taken() {
        let mailbox = Mailbox::new().unwrap();
        let notices = Arc::new(Notices::default());
        let latch = || Latch::new(notices.handle(), Notice::AdminDoorbell);
        let done = || notices.0.lock().len();
        for round in 0..1000 {
            mailbox.send(table(1, round % 7, vec![latch()]));
            mailbox.send(table(2, 3, Vec::new()));
            mailbox.send(Message::DoorbellWritten { controller: 3 });
        }
        assert!(mailbox.has_messages());
        // Each round also sends a doorbell message; a map behind sixteen of these is not found.
        let all = taken(&mailbox);
        let maps: Vec<_> = all.iter().flatten().collect();
        let waiting: usize = maps.iter().map(|(.., waiting)| waiting).sum();
        assert_eq!((all.len() - maps.len(), waiting), (1000, 1000));
        assert!(maps.len() < 300, "{}", maps.len());
        assert_eq!(maps.last().map(|map| (map.0, map.1)), Some((2, 3)));
        assert!(!mailbox.has_messages());

        for round in 0..1000 {
            mailbox.send(table(1, round % 7, vec![latch()]));
            mailbox.send(table(2, 3, Vec::new()));
        }
        let before = done();
        let messages = mailbox.take();
        assert_eq!(messages.len(), 2);
        assert_eq!(done(), before, "no latch is released before the thread has the map");
        drop(messages);
        assert_eq!(done(), before + 1000);
    }

    #[test]
    fn what_comes_between_two_maps_finds_the_first() {
        let mailbox = Mailbox::new().unwrap();
        mailbox.send(table(1, 1, Vec::new()));
        mailbox.send(Message::Detach {
            controller: 1,
            latch: Latch::new(Arc::new(Notices::default()).handle(), Notice::AdminDoorbell),
        });
        mailbox.send(table(1, 2, Vec::new()));
        mailbox.send(table(1, 3, Vec::new()));
        assert_eq!(taken(&mailbox), [Some((1, 1, 0)), None, Some((1, 3, 0))]);
        // A map that was taken is not replaced any more.
        mailbox.send(table(1, 4, Vec::new()));
        assert_eq!(taken(&mailbox), [Some((1, 4, 0))]);
    }
}
