//! Messages that a worker has taken from its mailbox and not handled yet.
//!
//! A message takes some microseconds, and how many there are is up to guests. So a worker handles
//! as many in a turn as fit into a short time, one of each controller in rotation. Who sends many
//! waits for them; its neighbours do not.

use super::mailbox::Mailbox;
use super::message::Message;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// How long a worker handles messages in one turn, if there are that many.
const TURN: Duration = Duration::from_micros(50);

/// Messages by controller; those of one are handled in their order.
#[derive(Default)]
pub(super) struct Backlog {
    messages: HashMap<u32, VecDeque<Message>>,
    /// Controllers that have messages here: whose turn is next is first.
    order: VecDeque<u32>,
    /// How many messages there are, and the most that there were at a time.
    len: usize,
    most: usize,
}

/// The key of messages that are of no controller; their numbers begin at 1.
const NOBODY: u32 = 0;

impl Backlog {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Adds messages. Whether one of them is to stop the worker.
    pub(super) fn add(&mut self, messages: impl IntoIterator<Item = Message>) -> bool {
        for message in messages {
            if matches!(message, Message::Stop) {
                return true;
            }
            let controller = message.controller().unwrap_or(NOBODY);
            let waiting = self.messages.entry(controller).or_default();
            if waiting.is_empty() {
                self.order.push_back(controller);
            }
            waiting.push_back(message);
            self.len += 1;
        }
        self.most = self.most.max(self.len);
        false
    }

    /// Takes the messages of one turn to `handle`.
    pub(super) fn take_turn(&mut self, mut handle: impl FnMut(Message)) {
        let began = Instant::now();
        while let Some(message) = self.next() {
            handle(message);
            if began.elapsed() >= TURN {
                break;
            }
        }
    }

    /// The next message.
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

    /// The most messages that there were at a time since this was last asked.
    pub(super) fn take_most(&mut self) -> usize {
        std::mem::replace(&mut self.most, self.len)
    }

    fn has_of(&self, controller: u32) -> bool {
        self.messages.contains_key(&controller)
    }
}

/// What a controller's queues ask before they fetch commands: whether a message for the controller
/// has come that was not handled.
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

    fn written(controller: u32) -> Message {
        Message::DoorbellWritten { controller }
    }

    fn order(backlog: &mut Backlog) -> Vec<u32> {
        std::iter::from_fn(|| backlog.next()).filter_map(|message| message.controller()).collect()
    }

    #[test]
    fn a_controller_with_many_messages_lets_others_in_between() {
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
            // Longer than a turn.
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
