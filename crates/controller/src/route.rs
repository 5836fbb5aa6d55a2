//! Where the messages of a controller go: to the worker that they are for, or to the one that has
//! taken the controller over from it.
//!
//! The rest of the control plane knows workers by the numbers at which queues were placed. A
//! controller that is served elsewhere (see `worker::slow`) keeps these numbers; the route leads
//! from there. While queues are on their way, what is said to their worker is kept here, in its
//! order, and sent to the other one when they have arrived there.

use crate::worker::Pool;
use crate::worker::message::Message;
use crate::worker::queue_move::{Destination, Stopover};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

/// Why a controller can not be served by another worker.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelocateError {
    /// It was moved before, and stays where it is.
    #[error("the controller has a worker of its own already, where it stays until it is removed")]
    Placed,
    /// There is no such worker.
    #[error("there is no worker {0}: the pool has {1}, counted from 0")]
    NoSuchWorker(usize, usize),
    /// As many controllers have a thread of their own as can.
    #[error("no more controllers of this process can have a thread of their own")]
    TooMany,
    /// It is at rest, or comes to rest.
    #[error("the controller is at rest: it is about to be served by another process")]
    Frozen,
    /// The system's.
    #[error("a thread for the controller could not be started: {0}")]
    System(#[from] io::Error),
}

/// Where the messages of a controller go.
#[derive(Default)]
pub(crate) struct Route(Mutex<Way>);

#[derive(Default)]
struct Way {
    /// The worker that serves the controller instead of those that its queues were placed at.
    to: Option<usize>,
    /// Workers that have queues of it yet, and what is to be said when these have left.
    leaving: BTreeMap<usize, Vec<Message>>,
    rest: Option<Rest>,
}

/// A controller at rest, or on the way there.
struct Rest {
    /// Where its queues are when they have left their workers.
    stopovers: Vec<Arc<Stopover>>,
    /// What is to be said, to those of which worker, when they are back.
    kept: Vec<(usize, Message)>,
}

impl Rest {
    /// Keeps what is said to `worker`. As in its mailbox, of several DMA maps the last one counts:
    /// a client may share memory for as long as it likes while its controller is at rest.
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
    /// The worker that serves what was placed at `worker`, or will when it has arrived.
    pub(crate) fn resolve(&self, worker: usize) -> usize {
        self.0.lock().to.unwrap_or(worker)
    }

    /// Whether the controller goes, or has gone, to a worker that it was not placed at.
    pub(crate) fn is_diverted(&self) -> bool {
        self.0.lock().to.is_some()
    }

    /// The worker that it was diverted to.
    pub(crate) fn target(&self) -> Option<usize> {
        self.0.lock().to
    }

    /// Sends `message` to whoever serves what was placed at `worker`, now or later.
    pub(crate) fn send(&self, pool: &Pool, worker: usize, message: Message) {
        let mut way = self.0.lock();
        if let Some(rest) = &mut way.rest {
            rest.keep(worker, message);
        } else if let Some(kept) = way.leaving.get_mut(&worker) {
            kept.push(message);
        } else {
            pool.send(way.to.unwrap_or(worker), message);
        }
    }

    /// From now on worker `to` serves the controller. Those of `workers` have queues of it: each is
    /// sent what `leave` makes. Nothing happens if it was diverted before.
    pub(crate) fn divert(
        &self,
        pool: &Pool,
        to: usize,
        workers: impl IntoIterator<Item = usize>,
        leave: impl Fn(usize) -> Message,
    ) {
        let mut way = self.0.lock();
        if way.to.is_some() {
            return;
        }
        way.to = Some(to);
        for worker in workers.into_iter().filter(|worker| *worker != to) {
            pool.send(worker, leave(worker));
            way.leaving.insert(worker, Vec::new());
        }
    }

    /// What `worker` had has arrived.
    pub(crate) fn arrived(&self, pool: &Pool, worker: usize) {
        let mut way = self.0.lock();
        let to = way.to.unwrap_or(worker);
        for message in way.leaving.remove(&worker).into_iter().flatten() {
            pool.send(to, message);
        }
    }

    /// A reset waits for those that are leaving: `hurry` makes what they are told.
    pub(crate) fn hurry(&self, pool: &Pool, hurry: impl Fn() -> Message) {
        self.0.lock().leaving.keys().for_each(|worker| pool.send(*worker, hurry()));
    }

    /// All workers that may have queues of it, which were placed at `workers`: whatever is on its
    /// way is at one of these, or nowhere.
    pub(crate) fn everywhere(&self, workers: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let way = self.0.lock();
        let mut all: BTreeSet<_> = workers.into_iter().collect();
        all.extend(way.to);
        all.into_iter().collect()
    }

    /// Whether queues of the controller are on their way to another worker.
    pub(crate) fn is_leaving(&self) -> bool {
        !self.0.lock().leaving.is_empty()
    }

    /// Has the queues leave all workers, for a rest: each that serves what was placed at one of
    /// `workers` is sent what `leave` makes. What is said from here on is kept.
    pub(crate) fn begin_rest(
        &self,
        pool: &Pool,
        workers: impl IntoIterator<Item = usize>,
        leave: impl Fn(Destination) -> Message,
    ) {
        let mut way = self.0.lock();
        let to = way.to;
        let workers: BTreeSet<_> = workers.into_iter().map(|w| to.unwrap_or(w)).collect();
        let homes = workers.into_iter().filter_map(|worker| pool.destination(worker));
        let stopovers: Vec<_> = homes.map(Stopover::new).collect();
        for stopover in &stopovers {
            pool.send(stopover.worker(), leave(stopover.destination()));
        }
        way.rest = Some(Rest { stopovers, kept: Vec::new() });
    }

    /// The controller is at rest from the beginning: its queues are there.
    pub(crate) fn begin_rest_with(&self, stopovers: Vec<Arc<Stopover>>) {
        self.0.lock().rest = Some(Rest { stopovers, kept: Vec::new() });
    }

    /// Where the queues of a controller at rest are.
    pub(crate) fn stopovers(&self) -> Vec<Arc<Stopover>> {
        self.0.lock().rest.iter().flat_map(|rest| rest.stopovers.iter().cloned()).collect()
    }

    /// The queues that have not left do not leave: their workers are sent what `stay` makes.
    pub(crate) fn call_off_rest(&self, pool: &Pool, stay: impl Fn() -> Message) {
        let way = self.0.lock();
        let stopovers = way.rest.iter().flat_map(|rest| &rest.stopovers);
        stopovers.for_each(|stopover| pool.send(stopover.worker(), stay()));
    }

    /// The queues never go back, and nobody is told what was kept: to be dropped without a lock.
    pub(crate) fn give_up_rest(&self) -> impl FnOnce() + Send + 'static {
        let rest = self.0.lock().rest.take();
        move || {
            let Some(Rest { stopovers, kept }) = rest else { return };
            stopovers.iter().for_each(|stopover| stopover.give_up());
            drop(kept);
        }
    }

    /// The queues go back, and then what was kept follows. None of them is on its way any more.
    pub(crate) fn end_rest(&self, pool: &Pool) {
        let mut way = self.0.lock();
        let Some(Rest { stopovers, kept }) = way.rest.take() else { return };
        stopovers.iter().for_each(|stopover| stopover.send_back());
        let to = way.to;
        for (worker, message) in kept {
            pool.send(to.unwrap_or(worker), message);
        }
    }
}
