//! Notices from I/O threads to the control plane: inbox, completion latch and liveness check.
//!
//! A [`Notice`] is plain data without closures, so it can be sent, queued and compared.
//!
//! A completion latch sends a notice when all participants of an operation have finished.
//!
//! # Inbox
//!
//! The inbox contains the notices that the control plane has not handled yet.
//!
//! A sender holds only the inbox's own lock, for a short time, and never the control plane's lock.
//! A guest can cause some notices without limit. Of those, the inbox keeps only what the control
//! plane would store: the newest errors, and a count of invalid doorbell writes.

use crate::admin::ERROR_LOG_ENTRIES;
use parking_lot::Mutex;
use shadowbell_spec::status::Status;
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Notice from an I/O thread to the control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// Invalid doorbell value.
    InvalidDoorbell {
        /// Queue identifier.
        qid: u16,
    },
    /// A command ended in an error, which belongs in the error log.
    CommandError {
        /// Submission queue identifier.
        sqid: u16,
        /// Command identifier.
        cid: u16,
        /// Completion status.
        status: Status,
        /// NSID.
        nsid: u32,
        /// First logical block.
        lba: u64,
    },
    /// Mapped host memory became inaccessible. The controller enters a fatal state.
    MemoryLost,
    /// The controller's passes take too long for other controllers on the same I/O thread.
    SlowTurns {
        /// Duration of the last pass.
        took: Duration,
    },
    /// The queues of I/O thread `from` have arrived at another I/O thread.
    Relocated {
        /// Number of the I/O thread in the pool.
        from: usize,
    },
    /// All queues of the controller have left their I/O threads for a quiesce. If the quiesce was
    /// cancelled, some queues may have stayed.
    QueuesDetached,
    /// Queues of the controller are lost, because the I/O thread to which they moved could not
    /// serve them.
    Stranded,
    /// Fault injection has caused a condition of the whole controller.
    #[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
    Condition(Condition),
    /// A command waits for exclusive execution.
    ExclusiveRequested,
    /// The admin queue has to be polled.
    AdminDoorbell,
    /// All I/O threads serve the changed namespace, and the old namespace's disk is unused.
    NamespaceChanged {
        /// NSID.
        nsid: u32,
        /// Error if an I/O thread could not open the disk.
        status: Status,
    },
    /// The namespace pool has finished an order.
    PoolEnded {
        /// Number of resets before the order.
        generation: u64,
        /// Identifier of the admin command.
        cid: u16,
        /// Completion status.
        status: Status,
        /// Dword 0 of the completion.
        dw0: u32,
    },
    /// A sanitize operation has finished.
    Sanitized,
    /// No thread uses the unmapped host memory any more.
    MemoryReleased {
        /// Number that the control plane gave to the unmap.
        ticket: u64,
    },
    /// The state of the controller's subsystem has changed.
    Shared,
    /// All commands that were in flight when an ANA group changed its state have ended.
    AnaChanged {
        /// Number that the control plane gave to the change.
        ticket: u64,
    },
    /// A reservation command has finished.
    ReservationEnded {
        /// Number that the I/O thread gave to the command.
        ticket: u64,
        /// Completion status.
        status: Status,
    },
    /// All I/O threads have finished their part of a control plane operation.
    Ended {
        /// Number of resets before the operation. The control plane ignores notices from before a
        /// reset.
        generation: u64,
        /// Kind of operation.
        operation: Operation,
        /// Status set by an I/O thread, otherwise success.
        status: Status,
    },
}

/// Operation of the control plane in which I/O threads participate. `cid` identifies the admin
/// command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Create I/O Completion Queue.
    CreateCq { qid: u16, cid: u16 },
    /// Create I/O Submission Queue.
    CreateSq { qid: u16, cid: u16 },
    /// Delete I/O Completion Queue.
    DeleteCq { qid: u16, cid: u16 },
    /// Delete I/O Submission Queue.
    DeleteSq { qid: u16, cid: u16 },
    /// Doorbell Buffer Config.
    ShadowDoorbells { cid: u16 },
    /// Abort. Status Command Abort Requested means that the command was aborted.
    Abort { cid: u16 },
    /// Get LBA Status.
    LbaStatus { cid: u16 },
    /// Set Features of a feature that belongs to the subsystem.
    Feature { cid: u16 },
    /// Flush of the data that were still cached when Set Features disabled the volatile write
    /// cache.
    Flush { cid: u16 },
    /// Pause before exclusive execution: commands in flight end.
    Pause,
    /// Exclusive execution of a command by an I/O thread.
    Exclusive,
    /// Checkpoint of changes made by exclusive commands.
    Recorded,
    /// Journal entries with the outcomes of exclusive commands, so that a recovery repeats none of
    /// them.
    DecisionsJournaled,
    /// Verification of one piece of a namespace, in a device self-test.
    SelfTest { run: u32, nsid: u32 },
    /// Step of a shutdown: queues detached, or caches flushed.
    Shutdown,
    /// Controller Level Reset.
    Reset,
}

/// Condition of a whole controller. Caused only by fault injection.
#[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "made by fault injection only"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// Controller Fatal Status.
    Fatal,
    /// NVM Subsystem Reset.
    SubsystemReset,
    /// Surprise removal of the device.
    Removed,
}

/// Receiver of notices. Any thread may call it, and it does not block.
pub(crate) trait ControlPlane: Send + Sync {
    fn notify(&self, notice: Notice);
}

/// Weak handle of a controller's control plane.
#[derive(Clone)]
pub(crate) struct ControlHandle(Weak<dyn ControlPlane>);

impl ControlHandle {
    pub(crate) fn new(plane: Weak<dyn ControlPlane>) -> Self {
        Self(plane)
    }

    /// Sends a notice. Returns false if the controller no longer exists.
    pub(crate) fn notify(&self, notice: Notice) -> bool {
        self.0.upgrade().map(|plane: Arc<dyn ControlPlane>| plane.notify(notice)).is_some()
    }

    /// True if the controller still exists.
    pub(crate) fn is_alive(&self) -> bool {
        self.0.strong_count() != 0
    }
}

impl fmt::Debug for ControlHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ControlHandle")
    }
}

/// Latch of an operation: when the last clone is dropped, the dropping thread sends the notice to
/// the control plane.
///
/// In an operation of several I/O threads, each thread gets a clone. A thread drops its clone when
/// its part is done, or immediately if it has no work. No code has to send an answer, so no answer
/// can be forgotten. Never drop a clone under the control plane's lock, because sending the notice
/// may take that lock.
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

    /// Sets the status in the notice, if that kind of notice has a status. The last call
    /// determines the status.
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

/// Maximum number of NSIDs that are stored for discarded errors. A controller has fewer namespaces
/// in practice.
const NAMESPACES: usize = 1024;

/// Summary of error notices that were discarded because the inbox had no room.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MissedErrors {
    /// Number of discarded errors.
    pub(crate) count: u64,
    /// NSIDs of namespaces whose storage was full.
    pub(crate) full: BTreeSet<u32>,
    /// NSID and status of the last discarded write fault.
    pub(crate) write_fault: Option<(u32, Status)>,
}

/// Pending notices.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Notices {
    /// Discarded errors, all older than `errors`.
    pub(crate) missed: MissedErrors,
    /// Errors of commands and doorbells, oldest first.
    pub(crate) errors: VecDeque<Notice>,
    /// All other notices, oldest first. Their number is bounded by the operations in flight.
    pub(crate) others: Vec<Notice>,
}

impl Notices {
    fn push(&mut self, notice: Notice) {
        match notice {
            // An admin doorbell only requests a turn, and `notify` has already scheduled the turn.
            Notice::AdminDoorbell => {}
            Notice::MemoryLost | Notice::Condition(_) | Notice::Shared
                if self.others.contains(&notice) => {}
            // If an equal notice is pending, only the count changes.
            Notice::InvalidDoorbell { .. } if self.errors.contains(&notice) => {
                self.missed.count += 1;
            }
            Notice::InvalidDoorbell { .. } | Notice::CommandError { .. } => {
                if self.errors.len() == ERROR_LOG_ENTRIES
                    && let Some(oldest) = self.errors.pop_front()
                {
                    self.missed.add(&oldest);
                }
                self.errors.push_back(notice);
            }
            other => self.others.push(other),
        }
    }

    fn len(&self) -> usize {
        self.errors.len() + self.others.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.errors.is_empty() && self.others.is_empty()
    }
}

impl MissedErrors {
    fn add(&mut self, notice: &Notice) {
        self.count += 1;
        let &Notice::CommandError { status, nsid, .. } = notice else { return };
        if status.code() == Status::CAPACITY_EXCEEDED && self.full.len() < NAMESPACES {
            self.full.insert(nsid);
        } else if status.code() == Status::WRITE_FAULT {
            self.write_fault = Some((nsid, status));
        }
    }
}

/// Notices from I/O threads that the control plane has not read yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    has_any: AtomicBool,
    notices: Mutex<Notices>,
    /// Highest number of notices that were pending at the same time.
    max: AtomicUsize,
}

impl Inbox {
    pub(crate) fn push(&self, notice: Notice) {
        let mut notices = self.notices.lock();
        notices.push(notice);
        self.max.fetch_max(notices.len(), Relaxed);
        drop(notices);
        self.has_any.store(true, Release);
    }

    /// Takes all pending notices; `None` if there are none.
    pub(crate) fn take(&self) -> Option<Notices> {
        if !self.has_any.load(Acquire) {
            return None;
        }
        // The flag is cleared before the notices are taken. In the opposite order, a notice added
        // between the two steps would stay in the inbox until the next one arrives.
        self.has_any.store(false, Release);
        Some(std::mem::take(&mut *self.notices.lock())).filter(|notices| !notices.is_empty())
    }

    /// Returns and resets the maximum number of pending notices.
    pub(crate) fn take_max(&self) -> usize {
        self.max.swap(0, Relaxed)
    }

    /// Number of pending notices.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.notices.lock().len()
    }
}

/// Liveness check, sent to several threads. Each thread drops its clone when it handles the
/// message.
#[derive(Clone)]
pub(crate) struct LivenessCheck {
    _pending: Arc<PendingCheck>,
}

struct PendingCheck(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl LivenessCheck {
    /// Creates a check. `ended` runs on the thread that drops the last clone.
    pub(crate) fn new(ended: impl FnOnce() + Send + 'static) -> Self {
        Self { _pending: Arc::new(PendingCheck(Mutex::new(Some(Box::new(ended))))) }
    }

    /// Creates a check that sends a message through a channel when it ends.
    #[cfg(test)]
    pub(crate) fn for_tests() -> (Self, std::sync::mpsc::Receiver<()>) {
        let (send, receive) = std::sync::mpsc::channel();
        let ended = move || {
            let _ = send.send(());
        };
        (Self::new(ended), receive)
    }
}

impl Drop for PendingCheck {
    fn drop(&mut self) {
        if let Some(ended) = self.0.get_mut().take() {
            ended();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Control plane for tests that stores the notices it receives.
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
    fn a_notice_has_the_status_that_a_worker_set() {
        let notices = Arc::new(Notices::default());
        let ended = |status| Notice::Ended { generation: 3, operation: Operation::Reset, status };
        Latch::new(notices.handle(), ended(Status::SUCCESS)).set_status(Status::INTERNAL);
        assert_eq!(*notices.0.lock(), [ended(Status::INTERNAL)]);
    }

    fn error(cid: u16, nsid: u32, status: Status) -> Notice {
        Notice::CommandError { sqid: 1, cid, status, nsid, lba: 0 }
    }

    #[test]
    fn error_notices_are_limited_to_the_size_of_the_error_log() {
        let inbox = Inbox::default();
        assert_eq!(inbox.take(), None);
        let ended = |generation| Notice::Ended {
            generation,
            operation: Operation::Shutdown,
            status: Status::SUCCESS,
        };
        inbox.push(ended(1));
        inbox.push(error(1, 7, Status::CAPACITY_EXCEEDED));
        inbox.push(error(2, 8, Status::WRITE_FAULT));
        for n in 0..100_000u32 {
            inbox.push(error(n as u16, 1, Status::LBA_OUT_OF_RANGE));
            inbox.push(Notice::InvalidDoorbell { qid: 3 });
            inbox.push(Notice::AdminDoorbell);
            inbox.push(Notice::MemoryLost);
            assert!(inbox.len() <= ERROR_LOG_ENTRIES + 2);
        }
        inbox.push(ended(2));
        let super::Notices { missed, errors, others } = inbox.take().unwrap();
        assert_eq!(others, [ended(1), Notice::MemoryLost, ended(2)]);
        assert_eq!(missed.count + errors.len() as u64, 200_002, "none is forgotten");
        assert_eq!(missed.full, BTreeSet::from([7]));
        assert_eq!(missed.write_fault, Some((8, Status::WRITE_FAULT)));
        assert_eq!(errors.len(), ERROR_LOG_ENTRIES);
        let newest = |notice: &&Notice| matches!(notice, Notice::CommandError { .. });
        let last = errors.iter().rev().find(newest).unwrap();
        assert_eq!(*last, error(99_999u32 as u16, 1, Status::LBA_OUT_OF_RANGE));
        assert_eq!(inbox.take(), None);
    }
}
