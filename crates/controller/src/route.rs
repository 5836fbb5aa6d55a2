//! Message routing of a controller: to the I/O thread at which a queue was placed, or to the one
//! that has taken the controller over.
//!
//! The control plane identifies I/O threads by the numbers at which queues were placed. The numbers
//! stay valid when the controller moves to another I/O thread (see `worker::scheduling`): the route
//! translates them. While queues are moving, messages to their I/O thread are kept here in order,
//! and sent to the new I/O thread after the queues have arrived.

use crate::worker::Pool;
use crate::worker::mailbox::Message;
use crate::worker::queue_move::{Destination, Stopover};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

/// Error in moving a controller to another I/O thread.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelocateError {
    /// The controller was moved before and cannot be moved again.
    #[error(
        "the controller was already moved to another I/O thread, and stays there until it is removed"
    )]
    Placed,
    /// The I/O thread number is out of range.
    #[error("there is no worker {0}: the pool has {1} workers, counted from 0")]
    NoSuchWorker(usize, usize),
    /// The maximum number of dedicated I/O threads is reached.
    #[error("all dedicated I/O threads of this process are in use")]
    TooMany,
    /// The controller is quiesced or quiescing.
    #[error("the controller is quiesced, because another process is about to serve it")]
    Frozen,
    /// The system could not create a thread.
    #[error("cannot start a thread for the controller: {0}")]
    System(#[from] io::Error),
}

/// Message routing of a controller.
#[derive(Default)]
pub(crate) struct Route(Mutex<RouteState>);

#[derive(Default)]
struct RouteState {
    /// I/O thread that serves the controller, instead of those at which its queues were placed.
    to: Option<usize>,
    /// I/O threads whose queues have not left yet, with the messages to send after the move.
    leaving: BTreeMap<usize, Vec<Message>>,
    quiesce: Option<Quiesce>,
}

/// Routing state of a quiesced or quiescing controller.
struct Quiesce {
    /// Queues of each I/O thread after they have left it.
    stopovers: Vec<Arc<Stopover>>,
    /// Messages to send after the quiesce, with the I/O thread number at placement.
    kept: Vec<(usize, Message)>,
}

impl Quiesce {
    /// Keeps a message to `worker`. Of several DMA tables only the last one is kept, as in a
    /// mailbox, because a client can map memory without limit while its controller is quiesced.
    fn keep(&mut self, worker: usize, message: Message) {
        let of_worker = self.kept.iter_mut().rev().find(|(other, _)| *other == worker);
        match (message, of_worker) {
            (
                Message::Table { table, mut latches, .. },
                Some((_, Message::Table { table: old, latches: all, .. })),
            ) => {
                *old = table;
                all.append(&mut latches);
            }
            (message, _) => self.kept.push((worker, message)),
        }
    }
}

impl Route {
    /// I/O thread that serves queues placed at `worker`, or will after a move in progress.
    pub(crate) fn resolve(&self, worker: usize) -> usize {
        self.0.lock().to.unwrap_or(worker)
    }

    /// True if the controller has moved, or is moving, to another I/O thread.
    pub(crate) fn is_diverted(&self) -> bool {
        self.0.lock().to.is_some()
    }

    /// I/O thread to which the controller has moved or is moving.
    pub(crate) fn target(&self) -> Option<usize> {
        self.0.lock().to
    }

    /// Sends `message` to the I/O thread that serves queues placed at `worker`. The message is
    /// kept while the queues are moving or quiesced.
    pub(crate) fn send(&self, pool: &Pool, worker: usize, message: Message) {
        let mut state = self.0.lock();
        if let Some(quiesce) = &mut state.quiesce {
            quiesce.keep(worker, message);
        } else if let Some(kept) = state.leaving.get_mut(&worker) {
            kept.push(message);
        } else {
            pool.send(state.to.unwrap_or(worker), message);
        }
    }

    /// Moves the controller to I/O thread `to`. Each of `workers`, which have queues of the
    /// controller, is sent a message made by `leave`. A second call has no effect.
    pub(crate) fn divert(
        &self,
        pool: &Pool,
        to: usize,
        workers: impl IntoIterator<Item = usize>,
        leave: impl Fn(usize) -> Message,
    ) {
        let mut state = self.0.lock();
        if state.to.is_some() {
            return;
        }
        state.to = Some(to);
        for worker in workers.into_iter().filter(|worker| *worker != to) {
            pool.send(worker, leave(worker));
            state.leaving.insert(worker, Vec::new());
        }
    }

    /// Sends the kept messages after the queues of `worker` have arrived.
    pub(crate) fn arrived(&self, pool: &Pool, worker: usize) {
        let mut state = self.0.lock();
        let to = state.to.unwrap_or(worker);
        for message in state.leaving.remove(&worker).into_iter().flatten() {
            pool.send(to, message);
        }
    }

    /// Sends a message made by `hurry` to I/O threads whose queues have not left, because a reset
    /// waits for them.
    pub(crate) fn hurry(&self, pool: &Pool, hurry: impl Fn() -> Message) {
        self.0.lock().leaving.keys().for_each(|worker| pool.send(*worker, hurry()));
    }

    /// I/O threads that may have queues of the controller: those of `workers`, where queues were
    /// placed, and the target of a move. Moving queues are at one of them, or already lost.
    pub(crate) fn everywhere(&self, workers: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let state = self.0.lock();
        let mut all: BTreeSet<_> = workers.into_iter().collect();
        all.extend(state.to);
        all.into_iter().collect()
    }

    /// True if queues are moving to another I/O thread.
    pub(crate) fn is_leaving(&self) -> bool {
        !self.0.lock().leaving.is_empty()
    }

    /// Starts a quiesce: sends a message made by `leave` to each I/O thread that serves queues
    /// placed at `workers`. All later messages are kept.
    pub(crate) fn begin_quiesce(
        &self,
        pool: &Pool,
        workers: impl IntoIterator<Item = usize>,
        leave: impl Fn(Destination) -> Message,
    ) {
        let mut state = self.0.lock();
        let to = state.to;
        let workers: BTreeSet<_> = workers.into_iter().map(|w| to.unwrap_or(w)).collect();
        let homes = workers.into_iter().filter_map(|worker| pool.destination(worker));
        let stopovers: Vec<_> = homes.map(Stopover::new).collect();
        for stopover in &stopovers {
            pool.send(stopover.worker(), leave(stopover.destination()));
        }
        state.quiesce = Some(Quiesce { stopovers, kept: Vec::new() });
    }

    /// Starts quiesced, with restored queues.
    pub(crate) fn begin_quiesced(&self, stopovers: Vec<Arc<Stopover>>) {
        self.0.lock().quiesce = Some(Quiesce { stopovers, kept: Vec::new() });
    }

    /// Queues of a quiesced controller.
    pub(crate) fn stopovers(&self) -> Vec<Arc<Stopover>> {
        self.0.lock().quiesce.iter().flat_map(|quiesce| quiesce.stopovers.iter().cloned()).collect()
    }

    /// Cancels a quiesce: sends a message made by `stay` to the I/O threads, which keep the queues
    /// that have not left.
    pub(crate) fn cancel_quiesce(&self, pool: &Pool, stay: impl Fn() -> Message) {
        let state = self.0.lock();
        let stopovers = state.quiesce.iter().flat_map(|quiesce| &quiesce.stopovers);
        stopovers.for_each(|stopover| pool.send(stopover.worker(), stay()));
    }

    /// Drops the quiesced queues and the kept messages for good. The caller calls the returned
    /// function without a lock.
    pub(crate) fn drop_quiesced(&self) -> impl FnOnce() + Send + 'static {
        let quiesce = self.0.lock().quiesce.take();
        move || {
            let Some(Quiesce { stopovers, kept }) = quiesce else { return };
            stopovers.iter().for_each(|stopover| stopover.give_up());
            drop(kept);
        }
    }

    /// Ends a quiesce: returns the queues to their I/O threads, then sends the kept messages. No
    /// queue may still be leaving.
    pub(crate) fn end_quiesce(&self, pool: &Pool) {
        let mut state = self.0.lock();
        let Some(Quiesce { stopovers, kept }) = state.quiesce.take() else { return };
        stopovers.iter().for_each(|stopover| stopover.send_back());
        let to = state.to;
        for (worker, message) in kept {
            pool.send(to.unwrap_or(worker), message);
        }
    }
}
