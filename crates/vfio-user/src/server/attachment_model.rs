//! Exhaustive model of a shared connection, with every order of the steps of the reactor and the
//! second thread.
//!
//! The kernel is modelled as two epoll items on one socket. An arriving message marks the second
//! thread's item, and wakes that thread if it sleeps. Otherwise the message marks the reactor's
//! item. A wait reports a marked item only if the socket has data. The other steps are those of
//! `attachment.rs`. In every final state (no step is possible), all messages must have been read.
//! With a [`Defect`], some order of steps must leave a message unread.

use std::collections::HashSet;

/// Deliberate error in the protocol, which the model must detect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Defect {
    None,
    /// The second thread requests no turn if the session is not in the slot.
    NoRequestIfTaken,
    /// The second thread requests no turn for messages that it does not handle.
    NoRequestForRemaining,
    /// The second thread requests no turn when it stops polling.
    NoRequestOnLeaving,
    /// The second thread requests the turn before it marks the sharing as ended.
    RequestBeforeMark,
    /// The reactor does not read in a requested turn.
    TurnWithoutReading,
    /// The reactor does not watch for input again after the sharing has ended.
    EndWithoutWatching,
    /// The reactor adds its epoll instance again before the second thread has added its own.
    SecondBeforeFirst,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Reactor {
    Waits,
    Takes,
    Reads,
    /// The reactor reads `State::ended`. If it is true, the reactor removes the items `first` and
    /// `second`. Otherwise, if only `first` exists, the reactor adds `second`.
    Marks,
    /// The reactor has removed the items `first` and `second`, and has not watched for input again
    /// yet.
    Watches,
    PutsBack,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Other {
    /// The second thread has not started to poll.
    Out,
    Waits,
    Busy,
    Tries,
    /// The second thread holds the lock.
    Reads,
    Requests,
    /// The second thread has marked the sharing as ended or requested the turn, but not both.
    Leaves,
    /// The second thread sleeps in the same epoll instance, but no longer reads the socket.
    Stopped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    to_send: u8,
    in_socket: u8,
    /// Number of messages that the second thread has read and left for the reactor.
    left: u8,
    /// True if the socket is watched for input by the second thread (`first`), by the reactor after
    /// the second thread (`second`), or by the reactor alone (`is_exclusive`). A mark is an event
    /// that the next wait may report.
    first: bool,
    first_marked: bool,
    second: bool,
    is_exclusive: bool,
    reactor_marked: bool,
    in_slot: bool,
    reads: bool,
    ended: bool,
    requested: bool,
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
            is_exclusive: !early,
            reactor_marked: false,
            in_slot: true,
            reads: false,
            ended: false,
            requested: false,
            reactor: Reactor::Waits,
            other: Other::Out,
        }
    }

    fn sends(mut self) -> Option<Self> {
        self.to_send = self.to_send.checked_sub(1)?;
        self.in_socket += 1;
        // The kernel tries the items with `EPOLLEXCLUSIVE` in order. A sleeping thread consumes the
        // wakeup, so later items are not tried.
        let mut kept = false;
        if self.first {
            self.first_marked = true;
            kept = matches!(self.other, Other::Waits | Other::Stopped);
        }
        if self.is_exclusive || (self.second && !kept) {
            self.reactor_marked = true;
        }
        Some(self)
    }

    fn reactor_steps(mut self, defect: Defect) -> Option<Self> {
        match self.reactor {
            Reactor::Waits => {
                let event = std::mem::take(&mut self.reactor_marked) && self.in_socket != 0;
                let requested = std::mem::take(&mut self.requested);
                if !event && !requested {
                    return None;
                }
                self.reads = event || defect != Defect::TurnWithoutReading;
                self.reactor = Reactor::Takes;
            }
            // The second thread holds the lock while it reads, so the reactor cannot take the
            // session.
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
                self.reactor = Reactor::PutsBack;
                if self.ended && (self.first || self.second) {
                    (self.first, self.first_marked, self.second) = (false, false, false);
                    self.reactor = Reactor::Watches;
                } else if self.first && !self.second {
                    self.second = true;
                    self.is_exclusive = false;
                    self.reactor_marked = self.in_socket != 0;
                }
            }
            Reactor::Watches => {
                self.is_exclusive = defect != Defect::EndWithoutWatching;
                self.reactor_marked = self.is_exclusive && self.in_socket != 0;
                self.reactor = Reactor::PutsBack;
            }
            Reactor::PutsBack => {
                self.in_slot = true;
                self.reactor = Reactor::Waits;
            }
        }
        Some(self)
    }

    fn other_steps(self, defect: Defect) -> Vec<Self> {
        let to = |other| Self { other, ..self };
        let requesting = |other| Self { other, requested: true, ..self };
        match self.other {
            Other::Out => {
                let first_marked = self.in_socket != 0;
                vec![Self { first: true, first_marked, ..requesting(Other::Busy) }]
            }
            Other::Waits if self.first_marked => {
                let next = if self.in_socket != 0 { Other::Tries } else { Other::Waits };
                vec![Self { first_marked: false, ..to(next) }]
            }
            // Another descriptor may wake the second thread.
            Other::Waits => vec![to(Other::Busy)],
            Other::Busy if defect == Defect::RequestBeforeMark => {
                vec![to(Other::Waits), requesting(Other::Leaves)]
            }
            Other::Busy => vec![to(Other::Waits), Self { ended: true, ..to(Other::Leaves) }],
            Other::Tries if self.in_slot => vec![to(Other::Reads)],
            Other::Tries if defect == Defect::NoRequestIfTaken => vec![to(Other::Busy)],
            Other::Tries => vec![to(Other::Requests)],
            Other::Reads => {
                let read = Self { in_socket: 0, ..self };
                let rest = Self { left: self.in_socket, other: Other::Requests, ..read };
                vec![Self { other: Other::Busy, ..read }, rest]
            }
            Other::Requests if defect == Defect::NoRequestForRemaining && self.left != 0 => {
                vec![to(Other::Busy)]
            }
            Other::Requests => vec![requesting(Other::Busy)],
            Other::Leaves if defect == Defect::NoRequestOnLeaving => vec![to(Other::Stopped)],
            Other::Leaves if defect == Defect::RequestBeforeMark => {
                vec![Self { ended: true, ..to(Other::Stopped) }]
            }
            Other::Leaves => vec![requesting(Other::Stopped)],
            Other::Stopped => Vec::new(),
        }
    }
}

/// Finds a final state in which a message is unread. In a final state, no step is possible except
/// that the second thread stops polling.
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
        // True if the second thread will not read the message: it sleeps and its item reports no
        // data, or it no longer reads the socket.
        let sleeps = match state.other {
            Other::Waits => !state.first_marked || state.in_socket == 0,
            other => other == Other::Stopped,
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
        Defect::NoRequestIfTaken,
        Defect::NoRequestForRemaining,
        Defect::NoRequestOnLeaving,
        Defect::RequestBeforeMark,
        Defect::TurnWithoutReading,
        Defect::EndWithoutWatching,
    ] {
        assert!(lost(defect).is_some(), "{defect:?}");
    }
    // This defect only causes unnecessary wakeups: every message is read.
    assert_eq!(lost(Defect::SecondBeforeFirst), None);
}
