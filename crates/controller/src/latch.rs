//! A notice that is given when the last of several has finished.

use crate::notice::{ControlHandle, Notice};
use parking_lot::Mutex;
use shadowbell_spec::status::Status;
use std::sync::Arc;

/// Gives notice to the control plane when its last clone is dropped, on the thread that drops it.
///
/// An operation that several workers take part in gives each of them a clone. A worker that has
/// nothing to wait for just drops it, so no path can forget to answer. Never drop one under the
/// control plane's lock: the notice takes it.
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

    /// Says how the operation went, if it is one: the last word counts.
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

    /// Keeps the notices that it gets.
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
