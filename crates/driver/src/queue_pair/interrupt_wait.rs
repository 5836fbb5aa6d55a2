//! Sleeping on the eventfd that a queue's interrupt signals.

use crate::transport::Transport;
use shadowbell_memory::{Edge, Edges, EventFd};
use std::io;
use std::time::{Duration, Instant};

/// Sleep state of a queue pair: its pollable descriptors and recent signals.
#[derive(Default)]
pub(super) struct InterruptWait {
    /// Epoll instance on which the queue sleeps, with the eventfd and the device's hang-up socket.
    /// Created on first use.
    edges: Option<Edges>,
    /// Number of completions that had been taken when an interrupt last ended a sleep.
    completed_at_wakeup: Option<u64>,
    /// True if the device's server has hung up.
    hung_up: bool,
}

impl InterruptWait {
    /// Creates the descriptors that the queue sleeps on, on first use.
    pub(super) fn open(&mut self, event: &EventFd, transport: &dyn Transport) {
        if self.edges.is_none() {
            self.edges = Edges::new(event, transport.hang_up()).ok();
        }
    }

    /// Records that a sleep ended with a completion, after `completed` completions had been taken.
    pub(super) fn note_wakeup(&mut self, completed: u64) {
        self.completed_at_wakeup = Some(completed);
    }

    /// Forgets the last wakeup, so that the next sleep consumes stale signals.
    pub(super) fn clear_wakeup(&mut self) {
        self.completed_at_wakeup = None;
    }

    /// Consumes stale signals of the eventfd: those of interrupts whose completions were found by
    /// polling.
    pub(super) fn consume_signals(&mut self, event: &EventFd, completed: u64) {
        // If an interrupt ended the last sleep and exactly one completion was taken since, there is
        // no stale signal. This check saves a system call for programs with one command in flight.
        let at_wakeup = self.completed_at_wakeup.take();
        if at_wakeup.is_some_and(|at_wakeup| completed == at_wakeup + 1) {
            return;
        }
        match &self.edges {
            // The hang-up is stored, because it is reported only once.
            Some(edges) => {
                self.hung_up |= matches!(edges.wait(Some(Duration::ZERO)), Ok(Edge::HungUp));
            }
            None => drop(event.drain()),
        }
    }

    /// Sleeps until a signal, a hang-up, or the time `until`.
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
