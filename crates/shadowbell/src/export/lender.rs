//! Lends the threads of a controller in this process to those that serve clients.

use shadowbell_controller::{Controller, WorkerThread};
use shadowbell_export::{QueueServer, QueueServerJob, QueueThreads};
use shadowbell_memory::EventFd;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The threads of this controller's workers.
#[derive(Debug)]
pub(super) struct Lender(pub(super) Controller);

impl QueueThreads for Lender {
    fn lend(&self, qid: u16, job: QueueServerJob) -> Result<(), QueueServerJob> {
        let place = Arc::new(Mutex::new(Some(job)));
        let (taken, controller) = (Arc::clone(&place), self.0.clone());
        let lent = self.0.lend_thread(
            qid,
            Box::new(move |thread| {
                let job = taken.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(job) = job {
                    job(Some(&mut Served::new(thread, &controller, qid)));
                }
            }),
        );
        let back = lent.err().and_then(|_| {
            let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
            place.take()
        });
        back.map_or(Ok(()), Err)
    }
}

/// The queues of a thread that is lent.
///
/// Completions of the client's own queue need no interrupt: whoever takes them does so after each
/// turn. The driver has its interrupts of queue n by vector n.
struct Served<'a> {
    thread: &'a mut dyn WorkerThread,
    controller: &'a Controller,
    vector: usize,
    /// What the vector signals otherwise.
    event: Option<EventFd>,
}

impl<'a> Served<'a> {
    fn new(thread: &'a mut dyn WorkerThread, controller: &'a Controller, qid: u16) -> Self {
        let vector = usize::from(qid);
        let event = controller.interrupt(vector).and_then(|event| event.try_clone().ok());
        if event.is_some() {
            controller.set_interrupt(vector, None);
        }
        Self { thread, controller, vector, event }
    }

    /// Another thread serves the queue, or will. Where the driver has set up the controller anew,
    /// it has said what the vector signals.
    fn connect(&mut self) {
        if let Some(event) = self.event.take()
            && self.controller.interrupt(self.vector).is_none()
        {
            self.controller.set_interrupt(self.vector, Some(event));
        }
    }
}

impl QueueServer for Served<'_> {
    fn turn(&mut self) -> bool {
        self.thread.turn()
    }

    fn looks_again(&mut self) -> bool {
        self.thread.looks_again()
    }

    fn sleep(&mut self, wait: &mut dyn FnMut(Option<Duration>) -> bool) -> bool {
        if self.event.is_some() && !self.thread.serves_lender() {
            self.connect();
        }
        self.thread.sleep(wait)
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.thread.event()
    }
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        self.connect();
    }
}
