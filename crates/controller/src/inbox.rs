//! What workers have told a control plane that has not read it yet.
//!
//! Whoever gives notice holds the inbox's own lock for a moment, and never the control plane's.
//! What a guest can bring about without end takes no more room than the control plane would make
//! of it: of errors the newest, of bad doorbells how many.

use crate::admin::limits::ERROR_LOG_ENTRIES;
use crate::notice::Notice;
use parking_lot::Mutex;
use shadowbell_spec::status::Status;
use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// Namespaces remembered for an error that was left out. A controller has fewer, in practice.
const NAMESPACES: usize = 1024;

/// Errors that were left out because there were too many: what still has to be known of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MissedErrors {
    /// How many.
    pub(crate) count: u64,
    /// Namespaces that had no room for something.
    pub(crate) full: BTreeSet<u32>,
    /// The last one that could not be written, and how that ended.
    pub(crate) write_fault: Option<(u32, Status)>,
}

/// What has been told.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Notices {
    /// Came before all others of the errors.
    pub(crate) missed: MissedErrors,
    /// Errors of commands and doorbells, the oldest first.
    pub(crate) errors: VecDeque<Notice>,
    /// The rest, the oldest first: bounded by what is under way.
    pub(crate) others: Vec<Notice>,
}

impl Notices {
    fn push(&mut self, notice: Notice) {
        match notice {
            // To be scheduled is all that this asks for.
            Notice::AdminDoorbell => {}
            Notice::MemoryLost | Notice::Condition(_) | Notice::Shared
                if self.others.contains(&notice) => {}
            // As one that is there: it has no more to say but that it happened.
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

/// What workers have told a control plane that has not read it yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    has_any: AtomicBool,
    notices: Mutex<Notices>,
    /// The most notices that were there at a time.
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

    /// All that there is, if there is anything.
    pub(crate) fn take(&self) -> Option<Notices> {
        if !self.has_any.load(Acquire) {
            return None;
        }
        // First the flag, then the notices: one that comes in between is found again.
        self.has_any.store(false, Release);
        Some(std::mem::take(&mut *self.notices.lock())).filter(|notices| !notices.is_empty())
    }

    /// The most notices that have waited at a time since this was last asked.
    pub(crate) fn take_most(&self) -> usize {
        self.most.swap(0, Relaxed)
    }

    /// How many notices wait.
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
