//! How others reach a worker.

use super::message::Message;
use super::relocation::{Arrivals, Relocated};
use crate::stats::SleepCounters;
use crate::worker::busy::BusyClock;
use parking_lot::Mutex;
use shadowbell_doorbell::{Cell, FullFence, Waker};
use shadowbell_memory::{DmaTable, EventFd};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// How many messages are looked through for one of the same kind.
const NEAR: usize = 16;

/// Adds a message. A DMA map that has not been read yet gives way to the next of the same
/// controller: to find every queue again takes longer than to send a map, and a client that sends
/// them without a pause would have the worker do nothing else. Who waits for the end of the old
/// ones waits for that of the map that the worker has. Returns what is to be dropped without the
/// lock: memory, perhaps.
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
            // The order of these does not matter to it.
            Message::Table { .. } | Message::DoorbellWritten { .. } => {}
            // A queue or a reset in between has to find the maps as they were.
            _ => break,
        }
    }
    messages.push_back(Message::Table { controller, table, latches });
    None
}

/// A worker's mailbox, and what wakes the worker.
pub(crate) struct Mailbox {
    /// Whether there are messages: what the worker looks at in every pass.
    has_any: AtomicBool,
    messages: Mutex<VecDeque<Message>>,
    /// The most messages that were there at a time.
    most: AtomicUsize,
    pub(crate) state: Arc<AtomicU32>,
    pub(crate) event: EventFd,
    /// For whoever wants to know how long the worker has been awake.
    pub(crate) busy: BusyClock,
    /// Where it counts its sleeps.
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

    /// Leaves a message, and wakes the worker if it sleeps: whether it did.
    pub(crate) fn send(&self, message: Message) -> bool {
        let mut messages = self.messages.lock();
        let parting = add(&mut messages, message);
        self.most.fetch_max(messages.len(), Ordering::Relaxed);
        drop(messages);
        drop(parting);
        self.has_any.store(true, Ordering::Release);
        self.wake()
    }

    /// Wakes the worker if it sleeps: whether it did.
    pub(crate) fn wake(&self) -> bool {
        let asleep = self.waker().kick();
        if asleep {
            self.event.signal();
        }
        asleep
    }

    /// A trapped doorbell write of a controller whose state at the worker is `park_state`. If it is
    /// parked, the worker has to know whose doorbell it was; if not, only that it must not sleep.
    /// Whether this has woken it.
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

    /// Whether there is a message of this controller.
    pub(crate) fn has_of(&self, controller: u32) -> bool {
        let messages = self.messages.lock();
        messages.iter().any(|message| message.controller() == Some(controller))
    }

    /// The most messages that were there at a time since this was last asked.
    pub(crate) fn take_most(&self) -> usize {
        self.most.swap(0, Ordering::Relaxed)
    }

    /// All messages that are there, oldest first.
    pub(crate) fn take(&self) -> VecDeque<Message> {
        // First the flag, then the messages: one that comes in between is found again.
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
    use crate::latch::Latch;
    use crate::latch::tests::Notices;
    use crate::notice::Notice;
    use shadowbell_memory::{DmaSpace, Mapping};

    /// A map of so many ranges, for which as many wait as are in `latches`.
    fn table(controller: u32, ranges: u64, latches: Vec<Latch>) -> Message {
        let bytes = Mapping::anonymous(4096).unwrap().bytes();
        let mut space = DmaSpace::default();
        (0..ranges).for_each(|n| space.map(n * 4096, 4096, &bytes).unwrap());
        Message::Table { controller, table: Arc::clone(space.table()), latches }
    }

    /// What is taken: (controller, ranges, who waits), or `None` for something else.
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
        // The ring of every round is a message; behind sixteen of them a map is no longer looked
        // for.
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
        assert_eq!(done(), before, "no notice is given before the worker has the map");
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
        // What has been taken does not come back.
        mailbox.send(table(1, 4, Vec::new()));
        assert_eq!(taken(&mailbox), [Some((1, 4, 0))]);
    }
}
