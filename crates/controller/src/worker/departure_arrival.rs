//! Departure and arrival of queues that move between I/O threads.

use super::controller_queues::{ControllerQueues, insert};
use super::queue_move::{Departure, Relocated};
use super::queue_set::QueueSet;
use super::recovery::Recovery;
use super::replay::Inheritance;
use crate::exec::Closed;
use crate::notice::Latch;
use std::collections::VecDeque;
use std::sync::Arc;

impl ControllerQueues {
    /// Begins a move to another I/O thread: fetching stops, and when nothing is in flight,
    /// [`is_over`](Self::is_over) is true.
    pub(crate) fn leave(&mut self, departure: Departure) {
        self.set.engine.close(Closed::Leaves);
        self.departure = Some(departure);
    }

    /// Cancels a move that has not happened yet.
    pub(crate) fn stay(&mut self) {
        if self.departure.take().is_some() {
            self.set.engine.open(Closed::Leaves);
        }
    }

    /// Aborts commands in flight, because a controller reset waits for the pending move.
    pub(crate) fn hurry(&mut self) {
        if self.departure.is_some() {
            self.recovery = None;
            self.set.engine.cancel_all(None);
            if let Some(overriding) = &mut self.overriding {
                overriding.reset();
            }
        }
    }

    /// Sends the queues to their destination, unless they are being detached. True if they were
    /// sent.
    pub(crate) fn depart(&mut self, worker: usize) -> bool {
        let Some(Departure { to, latch }) = self.departure.take() else { return false };
        if self.detaching.is_some() {
            return false;
        }
        let table = self.table();
        // A namespace change may end at the destination before `self` is dropped; until then
        // nothing here may refer to the old disk.
        self.set.engine.forget_namespaces();
        // Nothing is in flight, so the dirty log is complete; a live migration may read it at once.
        self.set.engine.view().hand_in_log();
        // At the destination, or in another process, all commands are served normally.
        self.recovery = None;
        self.set.sqs.iter_mut().flatten().for_each(|sq| sq.careful = false);
        if let Some(journal) = &self.set.journal {
            self.set.cqs.iter_mut().flatten().for_each(|cq| cq.leave_journal(journal));
        }
        let relocated = Relocated {
            shared: Arc::clone(&self.set.shared),
            control: self.set.control.clone(),
            opening: self.opening.take(),
            table,
            counters: Arc::clone(&self.set.engine.counters),
            shadow: self.shadow,
            sqs: std::mem::take(&mut self.set.sqs),
            cqs: std::mem::take(&mut self.set.cqs),
            overriding: self.overriding.take(),
            doorbell_eventfds: std::mem::take(&mut self.doorbell_eventfds),
            losses: self.losses,
            lost: self.lost,
            inheritance: Inheritance::default(),
            latch: Some(latch),
        };
        // A doorbell's writer reads the owner again after the write. So either the destination sees
        // the doorbell, or the writer sees the new owner.
        self.set.shared.change_owner(worker, to.worker);
        to.arrivals.deliver(Box::new(relocated));
        true
    }

    /// Receives moved queues on the calling I/O thread, which has the index `worker`. If a disk
    /// cannot be opened, the queues are dropped.
    pub(crate) fn arrive(
        relocated: Relocated,
        worker: usize,
    ) -> Result<(Self, Option<Latch>), std::io::Error> {
        let Relocated { shared, control, opening, table, shadow, sqs, cqs, .. } = relocated;
        let Relocated { overriding, doorbell_eventfds, losses, lost, latch, .. } = relocated;
        let Relocated { counters, inheritance, .. } = relocated;
        let journal = shared.journal_part(worker, opening.generation)?;
        counters.set_worker(worker);
        let mut set = QueueSet::new(shared, control, opening.open(table, counters)?, journal);
        (set.sqs, set.cqs) = (sqs, cqs);
        if let Some(journal) = &mut set.journal {
            set.cqs.iter_mut().flatten().for_each(|cq| cq.join_journal(journal));
        }
        let arrived = Self {
            recovery: Recovery::new(inheritance, &mut set),
            set,
            overriding,
            shadow,
            doorbell_eventfds,
            draining: VecDeque::new(),
            deleting: Vec::new(),
            detaching: None,
            losses,
            lost,
            first: 0,
            opening,
            departure: None,
            look: None,
        };
        arrived.write_down();
        Ok((arrived, latch))
    }

    /// Adds moved queues to the queues of the same controller on this thread.
    pub(crate) fn absorb(&mut self, relocated: Relocated) -> Option<Latch> {
        let Relocated { sqs, cqs, counters, doorbell_eventfds, latch, inheritance, .. } = relocated;
        self.set.shared.join_parts(&counters, &self.set.engine.counters);
        // The moved queues were resolved in the DMA map of their previous thread.
        let (table, pages) = (self.table(), self.shadow);
        let mut places = Vec::with_capacity(cqs.len());
        for cq in cqs {
            let journal = self.set.journal.as_mut();
            places.push(cq.map(|mut cq| {
                cq.remap(&table, pages);
                if let Some(journal) = journal {
                    cq.join_journal(journal);
                }
                insert(&mut self.set.cqs, cq)
            }));
        }
        let mut indices = Vec::with_capacity(sqs.len());
        for sq in sqs {
            indices.push(sq.and_then(|mut sq| {
                // A submission queue has its completion queue on the same I/O thread.
                sq.cq = places.get(sq.cq).copied().flatten()?;
                sq.remap(&table, pages);
                Some(insert(&mut self.set.sqs, sq))
            }));
        }
        // Queues of several threads may be recovered by one.
        let inheritance = inheritance.moved(|sq| indices.get(sq).copied().flatten());
        if let Some(more) = Recovery::new(inheritance, &mut self.set) {
            match &mut self.recovery {
                Some(recovery) => recovery.join(*more),
                None => self.recovery = Some(more),
            }
        }
        self.doorbell_eventfds.extend(doorbell_eventfds);
        self.write_down();
        latch
    }
}
