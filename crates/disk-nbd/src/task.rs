//! Request to the disk, split into subrequests to the server.

use crate::export::Export;
use shadowbell_disk::{DiskError, Op, Orphans, Request};
use shadowbell_memory::{AfterChange, Segments, ViewChange};
use shadowbell_nbd::wire::{command, flag, transmission};
use std::task::Waker;

/// Maximum length of a subrequest without data, in bytes. Longer requests are split, because a slow
/// server would need too long for one.
const MAX_NO_DATA: u64 = 64 << 20;

/// Kind of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Read,
    Write,
    Compare,
    /// Reads and discards the data.
    Verify,
    /// Writes zeroes as data.
    Fill,
    /// A request without data transfer, executed by this NBD command.
    NoData(u16),
    Flush,
}

/// A request in execution.
#[derive(Debug)]
pub(crate) struct Task {
    action: Action,
    flags: u16,
    offset: u64,
    len: u64,
    /// Number of bytes for which a subrequest was started.
    started: u64,
    /// True if a flush has to follow, because the server does not support FUA.
    flushes_after: bool,
    /// True for a flush that only waits for orphans, because the server does not support flushes.
    pub(crate) is_barrier: bool,
    /// Number of subrequests in flight.
    pub(crate) in_flight: u32,
    pub(crate) outcome: Result<(), DiskError>,
    pub(crate) data: Segments,
}

/// Next subrequest of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Next {
    pub(crate) command: u16,
    pub(crate) flags: u16,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    /// Offset in the task's data.
    pub(crate) at: u64,
    /// True if the subrequest needs a buffer.
    pub(crate) has_data: bool,
}

impl Task {
    /// Creates the task of a checked request, or returns its result if there is nothing to do.
    pub(crate) fn new(
        request: &Request,
        export: &Export,
        reads_zeroes: bool,
    ) -> Result<Self, Result<(), DiskError>> {
        let has = |flag| export.has(flag);
        let mut durable = false;
        let zeroes = has(transmission::SEND_WRITE_ZEROES);
        let (action, flags) = match request.op {
            Op::Flush if has(transmission::SEND_FLUSH) => (Action::Flush, 0),
            Op::Flush => return Err(Ok(())),
            _ if request.len == 0 => return Err(Ok(())),
            Op::Read => (Action::Read, 0),
            Op::Write { fua } => {
                durable = fua;
                (Action::Write, 0)
            }
            Op::Compare => (Action::Compare, 0),
            Op::Verify => (Action::Verify, 0),
            Op::WriteZeroes { deallocate, fua } => {
                durable = fua;
                let action =
                    if zeroes { Action::NoData(command::WRITE_ZEROES) } else { Action::Fill };
                (action, if deallocate || !zeroes { 0 } else { flag::NO_HOLE })
            }
            // Write Zeroes guarantees that the range reads as zeroes, even if the server does not
            // deallocate it.
            Op::Discard if reads_zeroes => (Action::NoData(command::WRITE_ZEROES), 0),
            // After NBD's trim, reads would return undefined data. Discarded blocks of a disk must
            // read as zeroes, so the discard is ignored.
            Op::Discard => return Err(Ok(())),
            _ => return Err(Err(DiskError::Unsupported)),
        };
        let at_once = durable && has(transmission::SEND_FUA);
        Ok(Self {
            action,
            flags: if at_once { flags | flag::FUA } else { flags },
            offset: if action == Action::Flush { 0 } else { request.offset },
            len: if action == Action::Flush { 0 } else { request.len },
            started: 0,
            flushes_after: action == Action::Flush
                || (durable && !at_once && has(transmission::SEND_FLUSH)),
            is_barrier: false,
            in_flight: 0,
            outcome: Ok(()),
            data: Segments::new(),
        })
    }

    /// Creates a flush that only waits for orphans, on a server without flushes.
    pub(crate) fn barrier() -> Self {
        Self {
            action: Action::Flush,
            flags: 0,
            offset: 0,
            len: 0,
            started: 0,
            flushes_after: false,
            is_barrier: true,
            in_flight: 0,
            outcome: Ok(()),
            data: Segments::new(),
        }
    }

    /// True if the task's next step has to wait for an orphan. `next` is its next subrequest.
    pub(crate) fn is_blocked(&self, next: Option<&Next>, orphans: &Orphans, by: &Waker) -> bool {
        let request = match (self.action, next) {
            (Action::Flush, Some(_)) => Request { op: Op::Flush, offset: 0, len: 0 },
            (Action::Flush, None) if self.is_barrier && self.outcome.is_ok() => {
                Request { op: Op::Flush, offset: 0, len: 0 }
            }
            // All operations with a range wait for the same orphans. So the check is made with a
            // read of this range.
            (_, Some(next)) => Request { op: Op::Read, offset: next.offset, len: next.len.into() },
            (_, None) => return false,
        };
        orphans.blocks(&request, by)
    }

    /// Returns the next subrequest, with at most `max_len` bytes of data. `None` if all subrequests
    /// were started, or if the next one is a flush that has to wait for the subrequests in flight.
    pub(crate) fn next(&self, max_len: u32) -> Option<Next> {
        let left = self.len.saturating_sub(self.started);
        if self.outcome.is_err() {
            return None;
        }
        if left == 0 {
            let flush = Next {
                command: command::FLUSH,
                flags: 0,
                offset: 0,
                len: 0,
                at: self.len,
                has_data: false,
            };
            return (self.flushes_after && self.in_flight == 0).then_some(flush);
        }
        let (command, has_data) = match self.action {
            Action::Read | Action::Compare | Action::Verify => (command::READ, true),
            Action::Write | Action::Fill => (command::WRITE, true),
            Action::NoData(command) => (command, false),
            Action::Flush => (command::FLUSH, false),
        };
        let max_len = if has_data { u64::from(max_len) } else { MAX_NO_DATA };
        Some(Next {
            command,
            flags: self.flags,
            offset: self.offset + self.started,
            len: left.min(max_len) as u32,
            at: self.started,
            has_data,
        })
    }

    /// Records that `next` was started.
    pub(crate) fn began(&mut self, next: &Next) {
        self.started += u64::from(next.len);
        self.in_flight += 1;
        if next.command == command::FLUSH {
            self.flushes_after = false;
        }
    }

    /// Fills the buffer of the subrequest at `at` with the data to send.
    pub(crate) fn fill(&self, at: u64, buffer: &mut [u8]) -> Result<(), DiskError> {
        match self.action {
            Action::Write => self.data.read_into(at as usize, buffer).ok_or(DiskError::BadBuffer),
            Action::Fill => {
                buffer.fill(0);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Adapts the task to a change of guest memory. Releases the memory of a write whose data were
    /// all copied; moves other data to the new view.
    pub(crate) fn change_memory(&mut self, change: &mut ViewChange) -> AfterChange {
        if self.action == Action::Write && self.started == self.len {
            self.data.release_view();
        }
        self.data.move_to(change)
    }

    /// Processes the end of the subrequest at `at`. `data` are the data that it has read.
    pub(crate) fn ended(&mut self, at: u64, result: Result<(), DiskError>, data: &[u8]) {
        self.in_flight = self.in_flight.saturating_sub(1);
        let result = result.and_then(|()| match self.action {
            Action::Read => self.data.write_from(at as usize, data).ok_or(DiskError::BadBuffer),
            Action::Compare => {
                let mut own = vec![0; data.len()];
                self.data.read_into(at as usize, &mut own).ok_or(DiskError::BadBuffer)?;
                if own == data { Ok(()) } else { Err(DiskError::CompareFailed) }
            }
            _ => Ok(()),
        });
        self.outcome = self.outcome.and(result);
    }

    /// True if no subrequest is in flight, and none is left to start.
    pub(crate) fn is_finished(&self, max_len: u32) -> bool {
        self.in_flight == 0 && self.next(max_len).is_none()
    }
}
