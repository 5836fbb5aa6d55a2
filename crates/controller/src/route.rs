//! Message routing of a controller: to the I/O thread to which a queue was assigned, or to the I/O
//! thread to which the controller has moved since.
//!
//! The control plane always uses the number of the I/O thread to which the queues were assigned at
//! first. If the controller moves to another I/O thread (see `worker::scheduling`), the route
//! translates this number. While queues move, the route defers the messages for them. When the
//! queues have arrived at the new I/O thread, the route sends the messages there, in order.

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
    /// The controller is quiesced, or a quiesce is in progress.
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
    /// I/O thread that serves the controller after a move, instead of the I/O threads to which its
    /// queues were assigned.
    to: Option<usize>,
    /// I/O threads that still hold moving queues, each with the messages to send after the move.
    leaving: BTreeMap<usize, Vec<Message>>,
    quiesce: Option<Quiesce>,
}

/// Routing state of a controller that is quiesced or about to be quiesced.
struct Quiesce {
    /// One stopover for each I/O thread: it holds the queues that have left the thread.
    stopovers: Vec<Arc<Stopover>>,
    /// Messages to send after the quiesce, each with the number of the I/O thread to which the
    /// queues were assigned.
    deferred: Vec<(usize, Message)>,
}

impl Quiesce {
    /// Defers a message to `worker`. Of several DMA tables, only the last one is kept, as in a
    /// mailbox. Otherwise a client that maps memory without limit during a quiesce could exhaust
    /// memory.
    fn defer(&mut self, worker: usize, message: Message) {
        let of_worker = self.deferred.iter_mut().rev().find(|(other, _)| *other == worker);
        match (message, of_worker) {
            (
                Message::Table { table, mut latches, .. },
                Some((_, Message::Table { table: old, latches: all, .. })),
            ) => {
                *old = table;
                all.append(&mut latches);
            }
            (message, _) => self.deferred.push((worker, message)),
        }
    }
}

impl Route {
    /// I/O thread that serves the queues assigned to `worker`, or will serve them after a move in
    /// progress.
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

    /// Sends `message` to the I/O thread that serves the queues assigned to `worker`. While these
    /// queues move or are quiesced, the route defers the message.
    pub(crate) fn send(&self, pool: &Pool, worker: usize, message: Message) {
        let mut state = self.0.lock();
        if let Some(quiesce) = &mut state.quiesce {
            quiesce.defer(worker, message);
        } else if let Some(deferred) = state.leaving.get_mut(&worker) {
            deferred.push(message);
        } else {
            pool.send(state.to.unwrap_or(worker), message);
        }
    }

    /// Starts to move the controller to I/O thread `to`. Sends a message created by `leave` to each
    /// of `workers`, the I/O threads with queues of the controller. A second call has no effect.
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

    /// Sends the deferred messages for `worker`'s queues, after these queues have arrived at the
    /// new I/O thread.
    pub(crate) fn send_deferred(&self, pool: &Pool, worker: usize) {
        let mut state = self.0.lock();
        let to = state.to.unwrap_or(worker);
        for message in state.leaving.remove(&worker).into_iter().flatten() {
            pool.send(to, message);
        }
    }

    /// Sends a message created by `hurry` to each I/O thread that still holds moving queues,
    /// because a reset waits for these queues.
    pub(crate) fn hurry(&self, pool: &Pool, hurry: impl Fn() -> Message) {
        self.0.lock().leaving.keys().for_each(|worker| pool.send(*worker, hurry()));
    }

    /// I/O threads that may have queues of the controller: the threads `workers` to which queues
    /// were assigned, and the target of a move. Queues that are moving are on one of these threads,
    /// unless the move has failed and they are lost (`Notice::Stranded`).
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

    /// Starts a quiesce: sends a message created by `leave` to each I/O thread that serves queues
    /// assigned to `workers`. The route defers all later messages.
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
        state.quiesce = Some(Quiesce { stopovers, deferred: Vec::new() });
    }

    /// Starts in the quiesced state, with restored queues.
    pub(crate) fn begin_quiesced(&self, stopovers: Vec<Arc<Stopover>>) {
        self.0.lock().quiesce = Some(Quiesce { stopovers, deferred: Vec::new() });
    }

    /// Queues of a quiesced controller.
    pub(crate) fn stopovers(&self) -> Vec<Arc<Stopover>> {
        self.0.lock().quiesce.iter().flat_map(|quiesce| quiesce.stopovers.iter().cloned()).collect()
    }

    /// Cancels a quiesce: sends a message created by `stay` to the I/O threads. They keep the
    /// queues that have not left.
    pub(crate) fn cancel_quiesce(&self, pool: &Pool, stay: impl Fn() -> Message) {
        let state = self.0.lock();
        let stopovers = state.quiesce.iter().flat_map(|quiesce| &quiesce.stopovers);
        stopovers.for_each(|stopover| pool.send(stopover.worker(), stay()));
    }

    /// Ends a quiesce without resuming service. Returns a function that drops the quiesced queues
    /// and the deferred messages. The caller must release its locks before it calls this function.
    pub(crate) fn drop_quiesced(&self) -> impl FnOnce() + Send + 'static {
        let quiesce = self.0.lock().quiesce.take();
        move || {
            let Some(Quiesce { stopovers, deferred }) = quiesce else { return };
            stopovers.iter().for_each(|stopover| stopover.drop_queues());
            drop(deferred);
        }
    }

    /// Ends a quiesce and resumes service: returns the queues to their I/O threads, then sends the
    /// deferred messages. Before the call, all queues must have left their I/O threads.
    pub(crate) fn end_quiesce(&self, pool: &Pool) {
        let mut state = self.0.lock();
        let Some(Quiesce { stopovers, deferred }) = state.quiesce.take() else { return };
        stopovers.iter().for_each(|stopover| stopover.send_back());
        let to = state.to;
        for (worker, message) in deferred {
            pool.send(to.unwrap_or(worker), message);
        }
    }
}
