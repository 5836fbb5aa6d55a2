//! Mailbox of an I/O thread: messages, wakeups and the backlog of unhandled messages.
//!
//! A thread reads its messages between two passes over its queues, so no lock is taken while it
//! serves commands.
//!
//! # Backlog
//!
//! The backlog contains messages that a thread has taken from its mailbox and not handled yet.
//!
//! A message takes some microseconds, and guests determine the number of messages. So a thread
//! handles messages only for a bounded time per turn, and takes them from the controllers in
//! rotation. A controller with many messages delays only itself.

use super::doorbell_sources::DoorbellSource;
use super::queue_move::{Arrivals, Departure, Relocated};
use super::queue_set::QueueOverride;
use super::scheduling::BusyClock;
use crate::admin::self_test::Piece;
use crate::exec::Quota;
use crate::namespace::Namespaces;
use crate::notice::{ControlHandle, Latch, LivenessCheck};
use crate::outstanding::SampleRequest;
use crate::queue::QueueLayout;
use crate::shared::ControllerShared;
use crate::stats::SleepCounters;
use crate::trace::TraceRing;
use parking_lot::Mutex;
use shadowbell_doorbell::{Cell, FullFence, Waker};
use shadowbell_memory::{DmaTable, EventFd};
use shadowbell_spec::status::Status;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Context that an I/O thread needs to serve a controller's first queue.
pub(crate) struct QueueContext {
    pub(crate) shared: Arc<ControllerShared>,
    pub(crate) control: ControlHandle,
    pub(crate) table: Arc<DmaTable>,
    pub(crate) namespaces: Arc<Namespaces>,
    /// CC.MPS in bytes.
    pub(crate) page_size: usize,
    /// MDTS in bytes.
    pub(crate) max_transfer: usize,
    /// In-flight limits of the controller.
    pub(crate) quota: Quota,
    /// Number of controller resets so far.
    pub(crate) generation: u64,
    /// Shadow Doorbell and EventIdx buffers, if Doorbell Buffer Config is enabled.
    pub(crate) shadow: Option<(u64, u64)>,
    /// Replacement of the normal command processing of these queues, if any.
    pub(crate) overriding: Option<Box<dyn QueueOverride>>,
}

pub(crate) enum Message {
    /// Reports a doorbell write for a parked controller (see `poll_group`).
    DoorbellWritten {
        controller: u32,
    },
    /// Registration of an eventfd that signals doorbell writes of the controller.
    DoorbellEventfd {
        controller: u32,
        event: EventFd,
    },
    /// Registration of a source from which the thread receives the host's doorbell writes directly.
    DoorbellSource {
        controller: u32,
        source: Box<dyn DoorbellSource>,
    },
    CreateCq {
        context: Box<QueueContext>,
        layout: QueueLayout,
        vector: Option<u16>,
        latch: Latch,
    },
    CreateSq {
        controller: u32,
        layout: QueueLayout,
        cqid: u16,
        latch: Latch,
    },
    /// Stops the queue, aborts commands in flight, deletes the queue, then releases the latch.
    DeleteSq {
        controller: u32,
        qid: u16,
        latch: Latch,
    },
    DeleteCq {
        controller: u32,
        qid: u16,
        latch: Latch,
    },
    /// Enables Doorbell Buffer Config, or disables it (`None`).
    Shadow {
        controller: u32,
        pages: Option<(u64, u64)>,
        latch: Latch,
    },
    /// Replaces the DMA map. Each latch is released when no request of this thread uses the old map
    /// any more.
    Table {
        controller: u32,
        table: Arc<DmaTable>,
        latches: Vec<Latch>,
    },
    /// Applies the entry for `nsid` of `namespaces`: a changed namespace, or its removal. The latch
    /// is released when nothing uses the old disk any more. If the new disk cannot be opened,
    /// nothing changes, and the latch gets an error status.
    ChangeNamespace {
        controller: u32,
        nsid: u32,
        namespaces: Arc<Namespaces>,
        latch: Latch,
    },
    /// Applies a change of the controller's access to a namespace. The latch is released when the
    /// commands in flight on the namespace have ended. If `aborts` is true, these commands are
    /// aborted.
    ReviewAccess {
        controller: u32,
        uuid: [u8; 16],
        aborts: bool,
        latch: Latch,
    },
    /// Ends a reservation command.
    ReservationEnded {
        controller: u32,
        ticket: u64,
        status: Status,
    },
    /// Flushes every namespace.
    Flush {
        context: Box<QueueContext>,
        latch: Latch,
    },
    /// Verifies the range `piece` of a namespace, for a device self-test. On an error, the latch
    /// receives the status.
    Verify {
        context: Box<QueueContext>,
        piece: Piece,
        latch: Latch,
    },
    /// Aborts a command. If the command was aborted, the latch gets the status Command Abort
    /// Requested.
    Abort {
        controller: u32,
        sqid: u16,
        cid: u16,
        latch: Latch,
    },
    /// Controller reset: drops shadow pages at once, aborts commands in flight, deletes all queues,
    /// then releases the latch.
    Detach {
        controller: u32,
        latch: Latch,
    },
    /// Logs the disks that have not answered the controller's requests.
    LogPending {
        controller: u32,
    },
    /// Moves the controller's queues to another I/O thread once nothing is in flight. Until the
    /// latch is released, the route (the path of messages to the controller's thread) holds back
    /// further messages for the controller, except [`CancelMove`](Self::CancelMove),
    /// [`Hurry`](Self::Hurry) and those of exclusive execution.
    MoveAway {
        controller: u32,
        departure: Departure,
    },
    /// Cancels a move that has not happened yet.
    CancelMove {
        controller: u32,
    },
    /// Stops fetching. The latch is released when all commands in flight are parked for exclusive
    /// execution.
    Pause {
        controller: u32,
        latch: Latch,
    },
    /// Executes parked commands exclusively, then releases the latch.
    RunExclusive {
        controller: u32,
        latch: Latch,
    },
    /// Reports that the control plane has recorded the blocks that the exclusive commands mark as
    /// uncorrectable. The thread then writes the outcomes of these commands to the journal, so that
    /// a recovery does not repeat them, and releases the latch.
    JournalDecisions {
        controller: u32,
        latch: Latch,
    },
    /// Ends exclusive execution: fetching continues.
    EndExclusive {
        controller: u32,
    },
    /// Aborts the commands in flight of a controller that is about to move.
    Hurry {
        controller: u32,
    },
    /// Delivers a controller's queues from another I/O thread.
    MoveIn(Box<Relocated>),
    /// Sets an override, which then serves the controller's queues.
    Override {
        controller: u32,
        overriding: Box<dyn QueueOverride>,
    },
    /// Starts recording of a trace in this ring, or ends it (`None`).
    Trace(Option<TraceRing>),
    /// Starts or stops the measurement of command latencies.
    Measure(bool),
    /// Liveness check. The thread only has to drop the message.
    LivenessCheck(LivenessCheck),
    /// Request for the outstanding commands of all controllers.
    Sample(SampleRequest),
    Stop,
}

impl Message {
    /// Number of the controller that the message is about.
    pub(crate) fn controller(&self) -> Option<u32> {
        match self {
            Self::CreateCq { context, .. }
            | Self::Flush { context, .. }
            | Self::Verify { context, .. } => Some(context.shared.id),
            Self::DoorbellWritten { controller }
            | Self::DoorbellEventfd { controller, .. }
            | Self::DoorbellSource { controller, .. }
            | Self::CreateSq { controller, .. }
            | Self::DeleteSq { controller, .. }
            | Self::DeleteCq { controller, .. }
            | Self::Shadow { controller, .. }
            | Self::Table { controller, .. }
            | Self::ChangeNamespace { controller, .. }
            | Self::ReviewAccess { controller, .. }
            | Self::ReservationEnded { controller, .. }
            | Self::Abort { controller, .. }
            | Self::Detach { controller, .. }
            | Self::Pause { controller, .. }
            | Self::RunExclusive { controller, .. }
            | Self::JournalDecisions { controller, .. }
            | Self::EndExclusive { controller }
            | Self::LogPending { controller }
            | Self::MoveAway { controller, .. }
            | Self::Hurry { controller }
            | Self::CancelMove { controller }
            | Self::Override { controller, .. } => Some(*controller),
            Self::MoveIn(relocated) => Some(relocated.id()),
            Self::Trace(_)
            | Self::Measure(_)
            | Self::LivenessCheck(_)
            | Self::Sample(_)
            | Self::Stop => None,
        }
    }
}

/// Maximum number of unread messages, from the latest back, that are searched for an earlier DMA
/// map of the same controller.
const SEARCHED_MESSAGES: usize = 16;

/// Adds a message. A DMA map replaces an unread earlier map of the same controller. Otherwise a
/// client could keep the thread busy with maps, because resolving all queues in a map takes longer
/// than sending it. The latches of both maps wait for the new one. Returns the replaced map. The
/// caller must release the lock before it drops that map, because the drop may unmap memory.
fn add(messages: &mut VecDeque<Message>, message: Message) -> Option<Arc<DmaTable>> {
    let Message::Table { controller, table, mut latches } = message else {
        messages.push_back(message);
        return None;
    };
    for earlier in messages.iter_mut().rev().take(SEARCHED_MESSAGES) {
        match earlier {
            Message::Table { controller: of, table: old, latches: all } if *of == controller => {
                all.append(&mut latches);
                return Some(std::mem::replace(old, table));
            }
            // The order between these messages and a map does not matter.
            Message::Table { .. } | Message::DoorbellWritten { .. } => {}
            // Other messages (such as queue creation or reset) must not change their order relative
            // to maps. So an earlier map is not replaced across them.
            _ => break,
        }
    }
    messages.push_back(Message::Table { controller, table, latches });
    None
}

/// Mailbox of an I/O thread: its messages, and the wakeup of the thread.
pub(crate) struct Mailbox {
    /// True if there are messages. Read by the thread in every pass.
    has_any: AtomicBool,
    messages: Mutex<VecDeque<Message>>,
    /// Highest number of messages that were waiting at once.
    max: AtomicUsize,
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
            max: AtomicUsize::new(0),
            state: Arc::default(),
            event: EventFd::new()?,
            busy: BusyClock::new(),
            sleeps: SleepCounters::default(),
        })
    }

    /// Sends a message and wakes the thread if it sleeps. Returns true if the thread was asleep.
    pub(crate) fn send(&self, message: Message) -> bool {
        let mut messages = self.messages.lock();
        let parting = add(&mut messages, message);
        self.max.fetch_max(messages.len(), Ordering::Relaxed);
        drop(messages);
        drop(parting);
        self.has_any.store(true, Ordering::Release);
        self.wake()
    }

    /// Wakes the thread if it sleeps. Returns true if it was asleep.
    pub(crate) fn wake(&self) -> bool {
        let asleep = self.waker().kick();
        if asleep {
            self.event.signal();
        }
        asleep
    }

    /// Stores a trapped doorbell value in `register` and wakes the thread if necessary.
    /// `park_state` is the state of the controller on the thread. If the controller is parked, the
    /// thread also gets a message with the number of the controller. Returns true if the thread was
    /// asleep.
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
    pub(crate) fn take_max(&self) -> usize {
        self.max.swap(0, Ordering::Relaxed)
    }

    /// Takes all messages, oldest first.
    pub(crate) fn take(&self) -> VecDeque<Message> {
        // The flag is cleared before the messages are taken. A message that is sent after that sets
        // the flag again, so none is missed.
        self.has_any.store(false, Ordering::Release);
        std::mem::take(&mut *self.messages.lock())
    }
}

impl Arrivals for Mailbox {
    fn deliver(&self, queues: Box<Relocated>) {
        self.send(Message::MoveIn(queues));
    }
}

/// Maximum time for which an I/O thread handles messages between two passes over its queues.
const TURN: Duration = Duration::from_micros(50);

/// Messages by controller, in order of arrival for each controller.
#[derive(Default)]
pub(super) struct Backlog {
    messages: HashMap<u32, VecDeque<Message>>,
    /// Numbers of the controllers with messages. The first one is next in the rotation.
    order: VecDeque<u32>,
    /// Number of messages, and its highest value since the last [`take_max`](Self::take_max).
    len: usize,
    max: usize,
}

/// Key of messages without a controller; controller numbers begin at 1.
const NO_CONTROLLER: u32 = 0;

impl Backlog {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Adds messages. Returns true if one of the messages stops the thread.
    pub(super) fn add(&mut self, messages: impl IntoIterator<Item = Message>) -> bool {
        for message in messages {
            if matches!(message, Message::Stop) {
                return true;
            }
            let controller = message.controller().unwrap_or(NO_CONTROLLER);
            let waiting = self.messages.entry(controller).or_default();
            if waiting.is_empty() {
                self.order.push_back(controller);
            }
            waiting.push_back(message);
            self.len += 1;
        }
        self.max = self.max.max(self.len);
        false
    }

    /// Calls `handle` with one message after another, for at most [`TURN`], but with at least one
    /// message if there is any.
    pub(super) fn take_turn(&mut self, mut handle: impl FnMut(Message)) {
        let began = Instant::now();
        while let Some(message) = self.next() {
            handle(message);
            if began.elapsed() >= TURN {
                break;
            }
        }
    }

    /// Takes the next message.
    pub(super) fn next(&mut self) -> Option<Message> {
        let controller = self.order.pop_front()?;
        let waiting = self.messages.get_mut(&controller)?;
        let message = waiting.pop_front();
        self.len -= usize::from(message.is_some());
        if waiting.is_empty() {
            self.messages.remove(&controller);
        } else {
            self.order.push_back(controller);
        }
        message
    }

    /// Returns and resets the maximum number of waiting messages.
    pub(super) fn take_max(&mut self) -> usize {
        std::mem::replace(&mut self.max, self.len)
    }

    fn has_of(&self, controller: u32) -> bool {
        self.messages.contains_key(&controller)
    }
}

/// Unhandled messages of an I/O thread: those in the mailbox and in the backlog. Before the thread
/// fetches commands of a controller, it checks that there are none for this controller.
#[derive(Clone, Copy)]
pub(crate) struct Unread<'a> {
    pub(super) mailbox: &'a Mailbox,
    pub(super) backlog: &'a Backlog,
}

impl Unread<'_> {
    #[inline(always)]
    pub(crate) fn has_of(self, controller: u32) -> bool {
        (self.mailbox.has_messages() || !self.backlog.is_empty()) && self.find(controller)
    }

    #[cold]
    #[inline(never)]
    fn find(self, controller: u32) -> bool {
        self.backlog.has_of(controller) || self.mailbox.has_of(controller)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notice::tests::Notices;
    use crate::notice::{Latch, Notice};
    use shadowbell_memory::{DmaSpace, Mapping};

    /// Creates a DMA map message with `ranges` ranges and the given latches.
    fn table(controller: u32, ranges: u64, latches: Vec<Latch>) -> Message {
        let bytes = Mapping::anonymous(4096).unwrap().bytes();
        let mut space = DmaSpace::default();
        (0..ranges).for_each(|n| space.map(n * 4096, 4096, &bytes).unwrap());
        Message::Table { controller, table: Arc::clone(space.table()), latches }
    }

    /// Takes all messages. Returns (controller, ranges, latches) for a DMA map, and `None` for
    /// another message.
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
        // Each round also sends a doorbell message. If a map is followed by sixteen other messages,
        // a later map does not replace it.
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
    fn a_message_between_two_memory_maps_finds_the_first_map() {
        let mailbox = Mailbox::new().unwrap();
        mailbox.send(table(1, 1, Vec::new()));
        mailbox.send(Message::Detach {
            controller: 1,
            latch: Latch::new(Arc::new(Notices::default()).handle(), Notice::AdminDoorbell),
        });
        mailbox.send(table(1, 2, Vec::new()));
        mailbox.send(table(1, 3, Vec::new()));
        assert_eq!(taken(&mailbox), [Some((1, 1, 0)), None, Some((1, 3, 0))]);
        // A map that the thread has already taken is not replaced.
        mailbox.send(table(1, 4, Vec::new()));
        assert_eq!(taken(&mailbox), [Some((1, 4, 0))]);
    }

    fn written(controller: u32) -> Message {
        Message::DoorbellWritten { controller }
    }

    fn order(backlog: &mut Backlog) -> Vec<u32> {
        std::iter::from_fn(|| backlog.next()).filter_map(|message| message.controller()).collect()
    }

    #[test]
    fn messages_of_controllers_are_interleaved() {
        let mut backlog = Backlog::default();
        assert!(!backlog.add((0..1000).map(|_| written(1)).chain([written(2), written(3)])));
        assert!(backlog.has_of(3) && !backlog.has_of(4));
        let order = order(&mut backlog);
        assert_eq!(order[..3], [1, 2, 3]);
        assert_eq!(order.len(), 1002);
        assert!(backlog.is_empty() && !backlog.has_of(1));
    }

    #[test]
    fn a_turn_ends_after_a_while_with_at_least_one_message_handled() {
        let mut backlog = Backlog::default();
        backlog.add((0..3).map(|_| written(1)));
        let mut handled = 0;
        backlog.take_turn(|_| {
            handled += 1;
            std::thread::sleep(TURN);
        });
        assert_eq!(handled, 1);
        assert!(!backlog.is_empty());
    }

    #[test]
    fn stop_does_not_wait_for_its_turn() {
        let mut backlog = Backlog::default();
        assert!(backlog.add((0..9).map(|_| written(1)).chain([Message::Stop])));
    }

    #[test]
    fn messages_are_seen_in_the_mailbox_and_in_the_backlog() {
        let (mailbox, mut backlog) = (Mailbox::new().unwrap(), Backlog::default());
        mailbox.send(written(1));
        backlog.add([written(2)]);
        let unread = Unread { mailbox: &mailbox, backlog: &backlog };
        assert_eq!([1, 2, 3].map(|id| unread.has_of(id)), [true, true, false]);
    }
}
