//! Sleeping on the event that a queue's interrupt signals.

use crate::transport::Transport;
use shadowbell_memory::{Edge, Edges, EventFd};
use std::io;
use std::time::{Duration, Instant};

/// What a queue pair knows of its event beyond the descriptor.
#[derive(Default)]
pub(super) struct InterruptWait {
    /// The event and the device's hang-up, to sleep on; made when it is needed first.
    edges: Option<Edges>,
    /// How many completions had been taken when an interrupt ended a sleep.
    completed_at_wakeup: Option<u64>,
    /// The device's other end has hung up.
    hung_up: bool,
}

impl InterruptWait {
    /// Has something to sleep on.
    pub(super) fn open(&mut self, event: &EventFd, transport: &dyn Transport) {
        if self.edges.is_none() {
            self.edges = Edges::new(event, transport.hang_up()).ok();
        }
    }

    /// A sleep ended with a completion, `completed` after so many that were taken.
    pub(super) fn note_wakeup(&mut self, completed: u64) {
        self.completed_at_wakeup = Some(completed);
    }

    /// What the event was signalled for last is not known any more.
    pub(super) fn forget_wakeup(&mut self) {
        self.completed_at_wakeup = None;
    }

    /// Consumes what the event was signalled for in the past, if there can be anything: interrupts
    /// whose completions were found without them.
    pub(super) fn consume_signals(&mut self, event: &EventFd, completed: u64) {
        // An interrupt ended the last sleep, and one completion was taken since: there is no signal
        // left that has no completion to be seen. This is what saves whoever waits for one command
        // at a time a system call.
        let at_wakeup = self.completed_at_wakeup.take();
        if at_wakeup.is_some_and(|at_wakeup| completed == at_wakeup + 1) {
            return;
        }
        match &self.edges {
            // A hang-up is reported once, so it must not get lost here.
            Some(edges) => {
                self.hung_up |= matches!(edges.wait(Some(Duration::ZERO)), Ok(Edge::HungUp));
            }
            None => drop(event.drain()),
        }
    }

    /// Sleeps until a signal, a hang-up or `until`.
    pub(super) fn sleep(&mut self, event: &EventFd, until: Option<Instant>) -> io::Result<Edge> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let outcome = match &self.edges {
            _ if self.hung_up => Ok(Edge::HungUp),
            Some(edges) => edges.wait(left),
            None => event.wait(left).map(|woken| match woken {
                true => Edge::Signal,
                false => Edge::Timeout,
            }),
        };
        self.hung_up |= matches!(outcome, Ok(Edge::HungUp));
        outcome
    }
}
