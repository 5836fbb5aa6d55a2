//! Backlog of messages that an I/O thread has taken from its mailbox and not handled yet.
//!
//! A message takes some microseconds, and guests determine their number. So a thread handles
//! messages for a bounded time per turn, one of each controller in rotation. A controller with many
//! messages delays itself, not the others.

use super::mailbox::Mailbox;
use super::message::Message;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Maximum time per turn for which an I/O thread handles messages.
const TURN: Duration = Duration::from_micros(50);

/// Messages by controller, in order of arrival for each controller.
#[derive(Default)]
pub(super) struct Backlog {
    messages: HashMap<u32, VecDeque<Message>>,
    /// Controllers with messages, in order of their turns.
    order: VecDeque<u32>,
    /// Number of messages, and the maximum so far.
    len: usize,
    most: usize,
}

/// Key of messages without a controller; controller numbers begin at 1.
const NOBODY: u32 = 0;

impl Backlog {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Adds messages. True if one of them stops the thread.
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

    /// Calls `handle` with messages for the duration of one turn.
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
    pub(super) fn take_most(&mut self) -> usize {
        std::mem::replace(&mut self.most, self.len)
    }

    fn has_of(&self, controller: u32) -> bool {
        self.messages.contains_key(&controller)
    }
}

/// Query for unhandled messages of a controller, made before its commands are fetched.
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
