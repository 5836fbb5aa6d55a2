//! Threads that use queues of block devices.
//!
//! A queue belongs to one thread. If its disk does not complete all requests before the queue is
//! dropped, the thread continues after its function has returned, until the requests have ended.
//! So buffers and locks of the requests are released at their end.

use std::cell::RefCell;
use std::io;
use std::mem::ManuallyDrop;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

/// Interval at which a thread checks the requests of dropped queues.
const INTERVAL: Duration = Duration::from_millis(50);

/// Requests of a dropped queue: takes completions, and returns true when all have ended.
type Unfinished = Box<dyn FnMut() -> bool>;

thread_local! {
    /// Requests of dropped queues of this thread. `None` if the thread ends with its function. They
    /// are never dropped before their end, because the disk may still access their buffers.
    static UNFINISHED: RefCell<Option<Vec<ManuallyDrop<Unfinished>>>> = const { RefCell::new(None) };
}

/// Thread that uses queues of block devices.
#[derive(Debug)]
pub struct QueueThread(Receiver<()>);

impl QueueThread {
    /// Starts a thread with this name that executes `work`.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let (working, ended) = channel();
        std::thread::Builder::new().name(name).spawn(move || {
            UNFINISHED.set(Some(Vec::new()));
            work();
            drop(working);
            finish();
        })?;
        Ok(Self(ended))
    }

    /// Waits until the function of the thread has returned. Requests of its queues may remain in
    /// flight.
    pub fn join(self) {
        let _ = self.0.recv();
    }

    /// True if the function of the thread has returned.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.0.try_recv() == Err(TryRecvError::Disconnected)
    }
}

/// Leaves the requests of a dropped queue to its thread. If the thread is no [`QueueThread`], they
/// are leaked.
pub(crate) fn leave(requests: Unfinished) {
    let requests = ManuallyDrop::new(requests);
    UNFINISHED.with_borrow_mut(|all| all.as_mut().map(|all| all.push(requests)));
}

/// Waits until the requests of all dropped queues have ended.
fn finish() {
    while let Some(mut all) = UNFINISHED.replace(Some(Vec::new())).filter(|all| !all.is_empty()) {
        let ended = all.extract_if(.., |requests| (**requests)()).collect::<Vec<_>>();
        ended.into_iter().map(ManuallyDrop::into_inner).for_each(drop);
        if !all.is_empty() {
            std::thread::sleep(INTERVAL);
        }
        UNFINISHED.set(Some(all));
    }
}
