//! Stopped state of a disk, shared by the disk's queues and the control plane.

use parking_lot::Mutex;
use shadowbell_disk::{CompletionQueue, DiskError, Stopped, notify_resize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Wake-up of one queue.
pub(super) type Bell = CompletionQueue<()>;

#[derive(Debug, Default)]
struct State {
    /// Error of the request that stopped the disk.
    reason: Option<DiskError>,
    held: u64,
    /// True from a resume until the next request is held.
    is_resumed: bool,
    times: u64,
    /// Wake-ups of the queues that hold requests. Another queue would not handle its wake-up.
    bells: Vec<Arc<Bell>>,
}

/// Stopped state of a disk: the held requests of all queues.
#[derive(Debug, Default)]
pub(super) struct StopState {
    state: Mutex<State>,
    /// Number of resumes so far.
    resumes: AtomicU64,
    /// True if no request is to be held. It is changed under the lock of `state`.
    is_suspended: AtomicBool,
}

impl StopState {
    /// Records a request that the queue with the wake-up `bell` holds. The first one stops the
    /// disk. If the error policy was suspended meanwhile, the queue is woken, to end the request.
    pub(super) fn hold(&self, error: DiskError, bell: &Arc<Bell>) {
        let mut state = self.state.lock();
        if !state.bells.iter().any(|other| Arc::ptr_eq(other, bell)) {
            state.bells.push(Arc::clone(bell));
        }
        state.held += 1;
        if self.is_suspended() {
            return bell.signal();
        }
        let is_new = state.held == 1 || state.is_resumed;
        if is_new {
            (state.reason, state.is_resumed) = (Some(error), false);
            state.times += 1;
            drop(state);
            notify_resize();
        }
    }

    /// Records the end of `count` held requests: each was submitted again, or cancelled. `last` is
    /// the wake-up of a queue that holds no request any more.
    pub(super) fn release(&self, count: u64, last: Option<&Arc<Bell>>) {
        let mut state = self.state.lock();
        if let Some(last) = last {
            state.bells.retain(|bell| !Arc::ptr_eq(bell, last));
        }
        state.held = state.held.saturating_sub(count);
        if state.held == 0 && count != 0 {
            (state.reason, state.is_resumed) = (None, false);
            drop(state);
            notify_resize();
        }
    }

    /// Stopped state; `None` if no request is held, or if the held requests are being submitted
    /// again after a resume.
    pub(super) fn stopped(&self) -> Option<Stopped> {
        let state = self.state.lock();
        let reason = state.reason.filter(|_| state.held != 0 && !state.is_resumed)?;
        Some(Stopped { reason, held: state.held, times: state.times })
    }

    /// Instructs all queues to submit their held requests again. Returns false if the disk is not
    /// stopped.
    pub(super) fn resume(&self) -> bool {
        let mut state = self.state.lock();
        if state.held == 0 || state.is_resumed {
            return false;
        }
        state.is_resumed = true;
        self.resumes.fetch_add(1, Ordering::AcqRel);
        state.bells.iter().for_each(|bell| bell.signal());
        drop(state);
        notify_resize();
        true
    }

    /// Sets whether the error policy is suspended. While it is, the queues hold no request, and end
    /// the held ones. A queue that has not ended them before the policy is restored submits them
    /// again.
    pub(super) fn suspend(&self, suspended: bool) {
        let mut state = self.state.lock();
        self.is_suspended.store(suspended, Ordering::Release);
        if state.held != 0 {
            state.is_resumed = true;
            self.resumes.fetch_add(1, Ordering::AcqRel);
            state.bells.iter().for_each(|bell| bell.signal());
            drop(state);
            notify_resize();
        }
    }

    /// True if the error policy is suspended.
    pub(super) fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::Acquire)
    }

    /// Number of resumes so far. A queue compares it with the number that it saw last.
    pub(super) fn resumes(&self) -> u64 {
        self.resumes.load(Ordering::Acquire)
    }
}
