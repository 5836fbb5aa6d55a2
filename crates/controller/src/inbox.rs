//! Inbox of a control plane: notices from I/O threads that it has not read yet.
//!
//! A sender holds the inbox's own lock for a short time, and never the control plane's lock.
//! Notices that a guest can cause without limit are bounded by what the control plane would store
//! of them: the newest errors, and a count of invalid doorbell writes.

use crate::admin::ERROR_LOG_ENTRIES;
use crate::notice::Notice;
use parking_lot::Mutex;
use shadowbell_spec::status::Status;
use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// Maximum number of namespaces that are remembered for discarded errors. In practice a controller
/// has fewer namespaces.
const NAMESPACES: usize = 1024;

/// Summary of error notices that were discarded because too many were pending.
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
            // The notice only requests a turn, which `notify` has scheduled.
            Notice::AdminDoorbell => {}
            Notice::MemoryLost | Notice::Condition(_) | Notice::Shared
                if self.others.contains(&notice) => {}
            // An equal notice is already pending: only the count matters.
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
    /// Maximum number of notices that were pending at a time.
    most: AtomicUsize,
}

impl Inbox {
    pub(crate) fn push(&self, notice: Notice) {
        let mut notices = self.notices.lock();
        notices.push(notice);
        self.most.fetch_max(notices.len(), Relaxed);
        drop(notices);
        self.has_any.store(true, Release);
    }

    /// Takes all pending notices; `None` if there are none.
    pub(crate) fn take(&self) -> Option<Notices> {
        if !self.has_any.load(Acquire) {
            return None;
        }
        // The flag is cleared before the notices are taken, otherwise a notice pushed between the
        // two would be missed.
        self.has_any.store(false, Release);
        Some(std::mem::take(&mut *self.notices.lock())).filter(|notices| !notices.is_empty())
    }

    /// Returns and resets the maximum number of pending notices.
    pub(crate) fn take_most(&self) -> usize {
        self.most.swap(0, Relaxed)
    }

    /// Number of pending notices.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.notices.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notice::Operation;

    fn error(cid: u16, nsid: u32, status: Status) -> Notice {
        Notice::CommandError { sqid: 1, cid, status, nsid, lba: 0 }
    }

    #[test]
    fn a_flood_of_errors_takes_the_room_of_an_error_log() {
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
        let Notices { missed, errors, others } = inbox.take().unwrap();
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
