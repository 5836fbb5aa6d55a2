//! Every order in which the steps of a lent connection can happen.
//!
//! The kernel's part is two epoll items on one socket: an arriving message marks the other thread's
//! item, and wakes it if it sleeps; if not, it marks the reactor's. A wait reports a marked item only
//! if there is something to read by then. The rest is `shared_socket.rs`, step by step. In the end, when
//! nobody can go on, every message must have been read. With one of the defects, some order must be
//! found in which one is not.

use std::collections::HashSet;

/// Something that is done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Defect {
    None,
    /// No note if the session is not in the slot.
    NoNoteIfHeld,
    /// No note of what is not for the other thread.
    NoNoteOfRest,
    /// Nor when it no longer listens.
    NoNoteOnLeaving,
    /// A note, but before the mark.
    NoteBeforeMark,
    /// The reactor obeys a note without reading.
    NoteWithoutReading,
    /// The reactor goes on waiting as the second of two.
    RecallWithoutWatching,
    /// The reactor puts up with being second before the other has begun.
    SecondBeforeFirst,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Reactor {
    Waits,
    Takes,
    Reads,
    /// Looks at the mark.
    Marks,
    /// Has taken the other's item away, not yet watched again.
    Watches,
    Rests,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Other {
    /// Has not begun.
    Out,
    Waits,
    Busy,
    Tries,
    /// Has the lock.
    Reads,
    Notes,
    /// Two halves of leaving.
    Leaves,
    /// Sleeps in the same epoll instance, and does not listen.
    Deaf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    to_send: u8,
    in_socket: u8,
    /// Read by the other thread and left for the reactor.
    left: u8,
    /// Items, and whether they are marked.
    first: bool,
    first_marked: bool,
    second: bool,
    alone: bool,
    reactor_marked: bool,
    in_slot: bool,
    reads: bool,
    over: bool,
    notes: bool,
    reactor: Reactor,
    other: Other,
}

impl State {
    fn start(defect: Defect, to_send: u8) -> Self {
        let early = defect == Defect::SecondBeforeFirst;
        Self {
            to_send,
            in_socket: 0,
            left: 0,
            first: false,
            first_marked: false,
            second: early,
            alone: !early,
            reactor_marked: false,
            in_slot: true,
            reads: false,
            over: false,
            notes: false,
            reactor: Reactor::Waits,
            other: Other::Out,
        }
    }

    fn sends(mut self) -> Option<Self> {
        self.to_send = self.to_send.checked_sub(1)?;
        self.in_socket += 1;
        // The exclusive ones in their order; who sleeps keeps it for itself.
        let mut kept = false;
        if self.first {
            self.first_marked = true;
            kept = matches!(self.other, Other::Waits | Other::Deaf);
        }
        if self.alone || (self.second && !kept) {
            self.reactor_marked = true;
        }
        Some(self)
    }

    fn reactor_steps(mut self, defect: Defect) -> Option<Self> {
        match self.reactor {
            Reactor::Waits => {
                let event = std::mem::take(&mut self.reactor_marked) && self.in_socket != 0;
                let note = std::mem::take(&mut self.notes);
                if !event && !note {
                    return None;
                }
                self.reads = event || defect != Defect::NoteWithoutReading;
                self.reactor = Reactor::Takes;
            }
            // The lock is the other's while it reads.
            Reactor::Takes if self.other == Other::Reads => return None,
            Reactor::Takes => {
                self.in_slot = false;
                self.left = 0;
                self.reactor = Reactor::Reads;
            }
            Reactor::Reads => {
                if self.reads {
                    (self.reads, self.in_socket) = (false, 0);
                }
                self.reactor = Reactor::Marks;
            }
            Reactor::Marks => {
                self.reactor = Reactor::Rests;
                if self.over && (self.first || self.second) {
                    (self.first, self.first_marked, self.second) = (false, false, false);
                    self.reactor = Reactor::Watches;
                } else if self.first && !self.second {
                    self.second = true;
                    self.alone = false;
                    self.reactor_marked = self.in_socket != 0;
                }
            }
            Reactor::Watches => {
                self.alone = defect != Defect::RecallWithoutWatching;
                self.reactor_marked = self.alone && self.in_socket != 0;
                self.reactor = Reactor::Rests;
            }
            Reactor::Rests => {
                self.in_slot = true;
                self.reactor = Reactor::Waits;
            }
        }
        Some(self)
    }

    fn other_steps(self, defect: Defect) -> Vec<Self> {
        let to = |other| Self { other, ..self };
        let noted = |other| Self { other, notes: true, ..self };
        match self.other {
            Other::Out => {
                let first_marked = self.in_socket != 0;
                vec![Self { first: true, first_marked, ..noted(Other::Busy) }]
            }
            Other::Waits if self.first_marked => {
                let heard = if self.in_socket != 0 { Other::Tries } else { Other::Waits };
                vec![Self { first_marked: false, ..to(heard) }]
            }
            // It may be woken by anything else.
            Other::Waits => vec![to(Other::Busy)],
            Other::Busy if defect == Defect::NoteBeforeMark => {
                vec![to(Other::Waits), noted(Other::Leaves)]
            }
            Other::Busy => vec![to(Other::Waits), Self { over: true, ..to(Other::Leaves) }],
            Other::Tries if self.in_slot => vec![to(Other::Reads)],
            Other::Tries if defect == Defect::NoNoteIfHeld => vec![to(Other::Busy)],
            Other::Tries => vec![to(Other::Notes)],
            Other::Reads => {
                let read = Self { in_socket: 0, ..self };
                let rest = Self { left: self.in_socket, other: Other::Notes, ..read };
                vec![Self { other: Other::Busy, ..read }, rest]
            }
            Other::Notes if defect == Defect::NoNoteOfRest && self.left != 0 => {
                vec![to(Other::Busy)]
            }
            Other::Notes => vec![noted(Other::Busy)],
            Other::Leaves if defect == Defect::NoNoteOnLeaving => vec![to(Other::Deaf)],
            Other::Leaves if defect == Defect::NoteBeforeMark => {
                vec![Self { over: true, ..to(Other::Deaf) }]
            }
            Other::Leaves => vec![noted(Other::Deaf)],
            Other::Deaf => Vec::new(),
        }
    }
}

/// A state in which nobody but one who may leave can go on, and a message was not read.
fn lost(defect: Defect) -> Option<State> {
    let mut seen = HashSet::new();
    let mut left = vec![State::start(defect, 3)];
    while let Some(state) = left.pop() {
        if !seen.insert(state) {
            continue;
        }
        let sent = state.sends();
        let reacted = state.reactor_steps(defect);
        let done = sent.is_none() && reacted.is_none();
        // Whoever is asleep, or will be for ever, does not come to the rescue.
        let sleeps = match state.other {
            Other::Waits => !state.first_marked || state.in_socket == 0,
            other => other == Other::Deaf,
        };
        if done && sleeps && (state.in_socket != 0 || state.left != 0) {
            return Some(state);
        }
        left.extend(sent);
        left.extend(reacted);
        left.extend(state.other_steps(defect));
    }
    assert!(seen.len() > 300, "{} states are not all", seen.len());
    None
}

#[test]
fn no_order_loses_a_message() {
    assert_eq!(lost(Defect::None), None);
}

#[test]
fn every_defect_loses_one() {
    for defect in [
        Defect::NoNoteIfHeld,
        Defect::NoNoteOfRest,
        Defect::NoNoteOnLeaving,
        Defect::NoteBeforeMark,
        Defect::NoteWithoutReading,
        Defect::RecallWithoutWatching,
    ] {
        assert!(lost(defect).is_some(), "{defect:?}");
    }
    // It only costs: whoever is woken first, the message is read.
    assert_eq!(lost(Defect::SecondBeforeFirst), None);
}
