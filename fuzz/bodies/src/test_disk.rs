//! Disk that a fuzz program controls: each request ends at once or late, and succeeds or fails.
//! Writes are recorded but do not change the contents, so the data of each read are known.

use crate::source::Source;
use parking_lot::{Mutex, MutexGuard};
use shadowbell_disk::{
    Disk, DiskError, DiskInfo, Extent, Op, Queue, ReportExtent, Request, Submitted,
};
use shadowbell_memory::Segments;
use std::collections::VecDeque;
use std::sync::Arc;

/// Number of logical blocks, of 512 bytes each.
pub(crate) const BLOCKS: u64 = 128;
pub(crate) const BLOCK: u64 = 512;

/// Content of the disk at the byte `offset`. It differs from 0 and from the bytes with which the
/// bodies fill fresh memory.
pub(crate) fn content(offset: u64) -> u8 {
    (offset ^ offset >> 7 ^ offset >> 13) as u8 | 1
}

/// `len` bytes of the disk.
pub(crate) fn contents(offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(content).collect()
}

#[derive(Default)]
pub(crate) struct TestDiskState {
    /// True if requests remain pending until the program ends them.
    pub(crate) defer: bool,
    /// True if a cancelled request ends. Otherwise a cancellation has no effect.
    pub(crate) cancellable: bool,
    /// Errors of the next requests.
    pub(crate) fail: VecDeque<DiskError>,
    /// Offset and data of each write that the disk has received since this list was last taken.
    pub(crate) written: Vec<(u64, Vec<u8>)>,
    /// Pending requests, oldest first: queue, tag, and true for a flush.
    deferred: VecDeque<(usize, u32, bool)>,
    /// Requests that the next reap reports: queue, tag, and true if the request was cancelled.
    ending: Vec<(usize, u32, bool)>,
    queues: usize,
}

impl TestDiskState {
    /// Number of pending requests that access host memory.
    pub(crate) fn transfers(&self) -> usize {
        self.deferred.iter().filter(|(.., is_flush)| !is_flush).count()
    }

    /// Number of pending requests.
    pub(crate) fn deferred(&self) -> usize {
        self.deferred.len()
    }

    /// Ends the `n`th pending request.
    pub(crate) fn end(&mut self, n: usize) {
        if let Some((queue, tag, _)) = self.deferred.remove(n) {
            self.ending.push((queue, tag, false));
        }
    }

    /// Ends all pending flushes. A flush may belong to the shutdown of a disabled controller. A
    /// reset or disconnection does not wait for a flush, because a flush accesses no guest memory.
    pub(crate) fn complete_flushes(&mut self) {
        while let Some(at) = self.deferred.iter().position(|(.., is_flush)| *is_flush) {
            self.end(at);
        }
    }

    /// Ends all requests.
    pub(crate) fn complete_all(&mut self) {
        while !self.deferred.is_empty() {
            self.end(0);
        }
    }

    fn execute(&mut self, request: &Request, data: &Segments) -> Result<(), DiskError> {
        let Request { op, offset, len } = *request;
        let end = offset.checked_add(len).expect("a range");
        assert!(end <= BLOCKS * BLOCK, "beyond the end: {request:?}");
        assert!((offset | len).is_multiple_of(BLOCK), "not whole blocks: {request:?}");
        if let Some(error) = self.fail.pop_front() {
            return Err(error);
        }
        match op {
            Op::Read => {
                // The buffer may have room for metadata after the data.
                assert!(data.len() as u64 >= len, "{request:?}");
                data.write_from(0, &contents(offset, len)).expect("room that may be written");
            }
            Op::Write { .. } | Op::Compare => {
                assert!(data.len() as u64 >= len, "{request:?}");
                let mut bytes = vec![0; len as usize];
                data.read_into(0, &mut bytes).expect("data");
                if op == Op::Compare {
                    let same = bytes == contents(offset, len);
                    return if same { Ok(()) } else { Err(DiskError::CompareFailed) };
                }
                self.written.push((offset, bytes));
            }
            _ => {}
        }
        Ok(())
    }
}

/// A random error of a request.
pub(crate) fn error(source: &mut Source<'_>) -> DiskError {
    source.of(&[
        DiskError::Io(5),
        DiskError::NoSpace,
        DiskError::ReadOnly,
        DiskError::OutOfRange,
        DiskError::CompareFailed,
        DiskError::BadBuffer,
        DiskError::Unsupported,
        DiskError::Cancelled,
        DiskError::Device(0x0281),
    ])
}

#[derive(Clone, Default)]
pub(crate) struct TestDisk(Arc<Mutex<TestDiskState>>);

impl TestDisk {
    pub(crate) fn state(&self) -> MutexGuard<'_, TestDiskState> {
        self.0.lock()
    }
}

impl std::fmt::Debug for TestDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TestDisk")
    }
}

impl Disk for TestDisk {
    fn info(&self) -> DiskInfo {
        let mut info = DiskInfo::new(BLOCK as u32, BLOCKS);
        info.volatile_cache = true;
        info.discard = true;
        info
    }

    fn queue(&self) -> std::io::Result<Box<dyn Queue>> {
        let mut state = self.state();
        state.queues += 1;
        let number = state.queues;
        Ok(Box::new(TestQueue { disk: self.clone(), number, pending: Vec::new() }))
    }

    fn name(&self) -> String {
        "test".into()
    }

    /// Reports alternating data and holes of odd lengths, independent of writes. The bodies do not
    /// compare them with a model.
    fn extents(&self, offset: u64, len: u64, report: &mut ReportExtent<'_>) {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let next = (at / 1100 + 1) * 1100;
            let extent = Extent { len: next.min(end) - at, allocated: (at / 1100) % 2 == 1 };
            at += extent.len;
            if !report(extent) {
                return;
            }
        }
    }
}

/// A queue of the disk.
struct TestQueue {
    disk: TestDisk,
    number: usize,
    pending: Vec<(u32, Request, Segments)>,
}

impl Queue for TestQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        assert!(!self.pending.iter().any(|(other, ..)| *other == tag), "tag {tag} is in use");
        let mut state = self.disk.state();
        if !state.defer {
            return Submitted::Done(state.execute(request, data));
        }
        state.deferred.push_back((self.number, tag, matches!(request.op, Op::Flush)));
        self.pending.push((tag, *request, data.take()));
        Submitted::Pending
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        let ending = std::mem::take(&mut self.disk.state().ending);
        let (ours, others): (Vec<_>, _) =
            ending.into_iter().partition(|(queue, ..)| *queue == self.number);
        self.disk.state().ending = others;
        for (_, tag, cancelled) in ours {
            let at = self.pending.iter().position(|(other, ..)| *other == tag);
            let (_, request, data) = self.pending.remove(at.expect("a pending request"));
            let outcome = if cancelled {
                Err(DiskError::Cancelled)
            } else {
                self.disk.state().execute(&request, &data)
            };
            done(tag, outcome, data);
        }
    }

    fn cancel(&mut self, tag: u32) {
        let mut state = self.disk.state();
        let ours = (self.number, tag);
        if state.cancellable
            && let Some(at) =
                state.deferred.iter().position(|(queue, tag, _)| (*queue, *tag) == ours)
        {
            state.deferred.remove(at);
            state.ending.push((self.number, tag, true));
        }
    }

    fn pending(&self) -> usize {
        self.pending.len()
    }
}

impl Drop for TestQueue {
    fn drop(&mut self) {
        assert!(self.pending.is_empty(), "dropped under I/O");
    }
}
