//! Descriptors that stand for doorbells.
//!
//! A host whose doorbell values are in its shadow doorbell buffer rings only to wake a sleeper: the
//! value that it writes is of no use to anybody. So an eventfd does as well, and goes to the worker
//! without a message to whoever carries the controller, and without that one's thread.
//!
//! Each controller has its own for each worker, because who holds an eventfd can also read it, and
//! so take the wakeups of others who would share it.

use crate::control::{Control, QueueState};
use crate::controller::Controller;
use crate::shared::DSTRD;
use crate::worker::message::Message;
use shadowbell_memory::EventFd;
use shadowbell_spec::regs::{cq_doorbell_offset, sq_doorbell_offset};
use std::collections::BTreeMap;
use std::io;

/// Which descriptors stand for which doorbells.
#[derive(Debug, Default)]
pub struct DoorbellEvents {
    /// The descriptors; signal one to have doorbells looked at.
    pub events: Vec<EventFd>,
    /// Doorbells by their offset in BAR0, and the index of the descriptor that stands for each.
    pub doorbells: Vec<(u64, usize)>,
}

impl Controller {
    /// Descriptors that stand for writes to doorbells, as of now: those of the I/O queues that exist,
    /// if Doorbell Buffer Config is in force, and none otherwise. A host may signal one instead of
    /// writing any of its doorbells, after it has put the value in its shadow doorbell buffer.
    ///
    /// They stand for nothing any more when the queue is deleted or the controller reset.
    ///
    /// # Errors
    /// The system's, when it has no more descriptors.
    pub fn doorbell_events(&self) -> io::Result<DoorbellEvents> {
        let inner = self.inner();
        let mut control = inner.lock();
        let mut found = DoorbellEvents::default();
        if control.shadow.is_none() || self.has_mapped_doorbells() {
            return Ok(found);
        }
        let sqs = control.sqs.values().map(|q| (q.state, q.worker, (q.place.qid, true)));
        let cqs = control.cqs.values().map(|q| (q.state, q.worker, (q.place.qid, false)));
        let live: Vec<_> =
            sqs.chain(cqs).filter(|(state, ..)| *state == QueueState::Live).collect();
        let mut indices = BTreeMap::new();
        for (_, worker, (qid, is_sq)) in live {
            let index = match indices.get(&worker) {
                Some(index) => *index,
                None => {
                    found.events.push(control.kick(self, worker)?);
                    indices.insert(worker, found.events.len() - 1);
                    found.events.len() - 1
                }
            };
            let offset = if is_sq { sq_doorbell_offset } else { cq_doorbell_offset };
            found.doorbells.push((offset(qid, DSTRD), index));
        }
        Ok(found)
    }
}

impl Control {
    /// The descriptor that has `worker` look at this controller's doorbells.
    fn kick(&mut self, controller: &Controller, worker: usize) -> io::Result<EventFd> {
        if let Some(event) = self.kicks.get(&worker) {
            return event.try_clone();
        }
        let event = EventFd::new()?;
        let (ours, theirs) = (event.try_clone()?, event.try_clone()?);
        let inner = controller.inner();
        let message = Message::Kick { controller: inner.shared.id, event: theirs };
        inner.pool.send(worker, message);
        self.kicks.insert(worker, ours);
        Ok(event)
    }
}
