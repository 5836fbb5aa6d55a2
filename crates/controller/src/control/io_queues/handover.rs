//! Transfer of I/O queues between processes: checkpoint, restore and recovery.

use super::{CqRecord, IoQueues, QueueState, SqRecord};
use crate::context::Context;
use crate::journal::RecoveredJournal;
use crate::queue::QueueLayout;
use crate::restore_error::RestoreError;
use crate::saved::{SavedCq, SavedDoorbell, SavedPart, SavedSq, SavedTruth};
use crate::worker::queue_move::{Relocated, Restoring, Stopover};
use shadowbell_memory::EventFd;
use shadowbell_spec::regs::DoorbellKind;
use shadowbell_state::Descriptors;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

impl IoQueues {
    /// Layout of the queues for the checkpoint of a running controller. Queue positions are in the
    /// journal instead.
    ///
    /// # Errors
    /// The error of the system if it has no more descriptors.
    pub(in crate::control) fn record(&self, fds: &mut Descriptors) -> io::Result<Vec<SavedPart>> {
        let head = SavedDoorbell { last: 0, truth: SavedTruth::Register, snapshot: None };
        let place = |layout: &QueueLayout| (layout.qid, layout.iova, layout.size.entries());
        let mut parts = Vec::with_capacity(self.workers.len());
        for worker in self.workers() {
            let cqs = self.cqs.values().filter(|cq| cq.worker == worker && cq.exists());
            let sqs = self.sqs.values().filter(|sq| sq.worker == worker && sq.exists());
            let mut doorbell_eventfds = Vec::new();
            if let Some(event) = self.doorbell_eventfds.get(&worker) {
                doorbell_eventfds.push(fds.add(event.as_fd().try_clone_to_owned()?));
            }
            parts.push(SavedPart {
                worker,
                sqs: sqs
                    .map(|sq| {
                        let (qid, iova, entries) = place(&sq.layout);
                        SavedSq { qid, iova, entries, cqid: sq.cqid, head: 0, tail: head }
                    })
                    .collect(),
                cqs: cqs
                    .map(|cq| {
                        let ((qid, iova, entries), vector) = (place(&cq.layout), cq.vector);
                        let (tail, phase, staged) = (0, true, Vec::new());
                        SavedCq { qid, iova, entries, vector, tail, phase, head, staged }
                    })
                    .collect(),
                doorbell_eventfds,
            });
        }
        Ok(parts)
    }

    /// Restores queues of a quiesced controller.
    ///
    /// # Errors
    /// [`RestoreError`] if a queue is invalid.
    pub(in crate::control) fn restore(
        &mut self,
        cx: &Context,
        granted: (u16, u16),
        parts: &[SavedPart],
        eventfds: Vec<Vec<EventFd>>,
        restoring: &Restoring<'_>,
    ) -> Result<(), RestoreError> {
        self.granted = granted;
        let mut stopovers = Vec::with_capacity(parts.len());
        for (part, eventfds) in parts.iter().zip(eventfds) {
            let worker = self.adopt(cx, part, &eventfds)?;
            let serving = cx.route.resolve(worker);
            let queues = Relocated::restore(part, eventfds, restoring, serving)?;
            let queues = queues.ok_or(RestoreError::Invalid("an I/O queue"))?;
            stopovers.push(stopover(cx, serving, queues)?);
        }
        self.own(cx);
        cx.route.begin_quiesced(stopovers);
        Ok(())
    }

    /// Recovers queues of a dead process; they run when the quiesce ends. Returns the number of
    /// commands to replay.
    ///
    /// # Errors
    /// [`RestoreError`] if a queue is invalid.
    pub(in crate::control) fn recover(
        &mut self,
        cx: &Context,
        granted: (u16, u16),
        parts: &[SavedPart],
        eventfds: Vec<Vec<EventFd>>,
        restoring: &Restoring<'_>,
        journal: &mut RecoveredJournal,
    ) -> Result<usize, RestoreError> {
        self.granted = granted;
        let (mut stopovers, mut replays) = (Vec::with_capacity(parts.len()), 0);
        let mut of_worker: BTreeMap<usize, usize> = BTreeMap::new();
        for (part, eventfds) in parts.iter().zip(eventfds) {
            let worker = self.adopt(cx, part, &eventfds)?;
            let serving = cx.route.resolve(worker);
            let others = of_worker.entry(serving).or_default();
            let place = (serving, *others);
            let queues = Relocated::recover(part, eventfds, restoring, journal, place)?;
            let queues = queues.ok_or(RestoreError::Invalid("an I/O queue"))?;
            *others += queues.replays();
            replays += queues.replays();
            stopovers.push(stopover(cx, serving, queues)?);
        }
        self.own(cx);
        cx.route.begin_quiesced(stopovers);
        Ok(replays)
    }

    /// Adds records of queues from another process. Returns the I/O thread for them.
    fn adopt(
        &mut self,
        cx: &Context,
        part: &SavedPart,
        eventfds: &[EventFd],
    ) -> Result<usize, RestoreError> {
        let invalid = || RestoreError::Invalid("an I/O queue");
        let state = QueueState::Live;
        let worker = Some(part.worker).filter(|worker| *worker < cx.pool.len());
        let worker = worker.unwrap_or_else(|| cx.pool.least_loaded());
        self.workers.insert(worker);
        if let Some(event) = eventfds.first() {
            self.doorbell_eventfds.insert(worker, event.try_clone()?);
        }
        for cq in &part.cqs {
            let layout = QueueLayout::restore(cq.qid, cq.iova, cq.entries);
            let layout = layout.filter(|layout| layout.qid != 0).ok_or_else(invalid)?;
            let vector = cq.vector;
            let record = CqRecord { layout, vector, worker, state };
            if self.cqs.insert(cq.qid, record).is_some() {
                return Err(invalid());
            }
        }
        for sq in &part.sqs {
            let layout = QueueLayout::restore(sq.qid, sq.iova, sq.entries);
            let layout = layout.filter(|layout| layout.qid != 0).ok_or_else(invalid)?;
            let cqid = sq.cqid;
            let record = SqRecord { layout, cqid, worker, state };
            if self.sqs.insert(sq.qid, record).is_some() {
                return Err(invalid());
            }
        }
        Ok(worker)
    }

    /// Routes the doorbells of all queues to their I/O threads.
    fn own(&self, cx: &Context) {
        for (qid, cq) in &self.cqs {
            cx.pool.place_at(cq.worker);
            cx.shared.set_owner(*qid, DoorbellKind::Cq, Some(cx.route.resolve(cq.worker)));
        }
        for (qid, sq) in &self.sqs {
            cx.shared.set_owner(*qid, DoorbellKind::Sq, Some(cx.route.resolve(sq.worker)));
        }
    }
}

/// Holds queues for I/O thread `worker` until the quiesce ends.
fn stopover(cx: &Context, worker: usize, queues: Relocated) -> Result<Arc<Stopover>, RestoreError> {
    let home = cx.pool.destination(worker).ok_or(RestoreError::Invalid("a worker"))?;
    Ok(Stopover::with_queues(home, queues))
}
