//! Completion latch: a notice that is sent when the last participant has finished.

use crate::notice::{ControlHandle, Notice};
use parking_lot::Mutex;
use shadowbell_spec::status::Status;
use std::sync::Arc;

/// Sends its notice to the control plane when the last clone is dropped, on the thread that drops
/// it.
///
/// In an operation of several I/O threads, each thread gets a clone. A thread without work drops
/// its clone immediately, so no code path can forget to answer. Never drop a clone under the
/// control plane's lock, because sending the notice may take that lock.
#[derive(Clone, Debug)]
pub(crate) struct Latch(Arc<Pending>);

#[derive(Debug)]
struct Pending {
    control: ControlHandle,
    notice: Mutex<Notice>,
}

impl Latch {
    pub(crate) fn new(control: ControlHandle, notice: Notice) -> Self {
        Self(Arc::new(Pending { control, notice: Mutex::new(notice) }))
    }

    /// Sets the status of the operation, for notices that have a status. The last call wins.
    pub(crate) fn set_status(&self, new: Status) {
        if let Notice::Ended { status, .. }
        | Notice::NamespaceChanged { status, .. }
        | Notice::ReservationEnded { status, .. } = &mut *self.0.notice.lock()
        {
            *status = new;
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.control.notify(self.notice.get_mut().clone());
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::notice::{ControlPlane, Operation};

    /// Collects the notices that it receives.
    #[derive(Default)]
    pub(crate) struct Notices(pub(crate) Mutex<Vec<Notice>>);

    impl ControlPlane for Notices {
        fn notify(&self, notice: Notice) {
            self.0.lock().push(notice);
        }
    }

    impl Notices {
        pub(crate) fn handle(self: &Arc<Self>) -> ControlHandle {
            let plane: Arc<dyn ControlPlane> = Arc::<Self>::clone(self);
            ControlHandle::new(Arc::downgrade(&plane))
        }
    }

    #[test]
    fn notice_is_given_once_and_only_at_the_end() {
        let notices = Arc::new(Notices::default());
        let latch = Latch::new(notices.handle(), Notice::MemoryReleased { ticket: 7 });
        let other = latch.clone();
        drop(latch);
        assert_eq!(*notices.0.lock(), []);
        std::thread::spawn(move || drop(other)).join().unwrap();
        assert_eq!(*notices.0.lock(), [Notice::MemoryReleased { ticket: 7 }]);
    }

    #[test]
    fn what_a_worker_says_of_it_is_in_the_notice() {
        let notices = Arc::new(Notices::default());
        let ended = |status| Notice::Ended { generation: 3, operation: Operation::Reset, status };
        Latch::new(notices.handle(), ended(Status::SUCCESS)).set_status(Status::INTERNAL);
        assert_eq!(*notices.0.lock(), [ended(Status::INTERNAL)]);
    }
}
