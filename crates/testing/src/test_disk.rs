//! Disk in memory that holds, fails and records requests as a test instructs.

use crate::wait;
use parking_lot::Mutex;
use shadowbell_disk::{Disk, DiskError, DiskInfo, Op, Queue, ReportExtent, Request, Submitted};
use shadowbell_disk_file::MemDisk;
use shadowbell_memory::{EventFd, Segments, SharedBytes, View, ViewChange};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Instructions for a [`TestDisk`], and the requests that it received.
#[derive(Debug, Default)]
pub struct Instructions {
    /// If true, all requests are held: they complete only after the test changes the instructions.
    pub hold: bool,
    /// Requests whose offset is exactly this byte are held.
    pub hold_at: Option<u64>,
    /// Error with which requests other than reads and flushes fail.
    pub fail: Option<DiskError>,
    /// If true, every request fails, as on a disk that was removed.
    pub unavailable: bool,
    /// Maximum number of failures that `fail` causes; `None` for no limit.
    pub failures: Option<u32>,
    /// Reads fail if they start at or after this byte.
    pub fail_beyond: Option<u64>,
    /// If true, held requests move to a new view of guest memory, as on a disk that copies data.
    pub follow_memory: bool,
    /// If true, calls of `extents` block.
    pub hold_extents: bool,
    /// All requests that arrived, in order.
    pub seen: Vec<Request>,
    wakes: Vec<EventFd>,
}

/// Memory disk that follows the instructions of a test.
#[derive(Clone, Debug)]
pub struct TestDisk {
    /// Contents of the disk.
    pub mem: MemDisk,
    /// True if the disk reports a volatile write cache.
    pub cache: bool,
    /// Instructions, and received requests.
    pub instructions: Arc<Mutex<Instructions>>,
}

impl TestDisk {
    /// Creates a disk of zeroes.
    ///
    /// # Panics
    ///
    /// If the number of blocks or the block size is invalid.
    #[must_use]
    pub fn new(blocks: u64, block_size: u32) -> Self {
        let mem = MemDisk::new(blocks, block_size).unwrap();
        Self { mem, cache: false, instructions: Arc::default() }
    }

    /// Creates a disk of zeroes that reports unwritten bytes as holes.
    ///
    /// # Panics
    ///
    /// If the number of blocks or the block size is invalid.
    #[must_use]
    pub fn sparse(blocks: u64, block_size: u32) -> Self {
        let mem = MemDisk::recoverable(blocks, block_size).unwrap();
        Self { mem, cache: false, instructions: Arc::default() }
    }

    /// Changes the instructions. Held requests continue if the new instructions permit it.
    pub fn instruct(&self, instruct: impl FnOnce(&mut Instructions)) {
        let mut instructions = self.instructions.lock();
        instruct(&mut instructions);
        for wake in &instructions.wakes {
            wake.signal();
        }
    }

    /// All requests that arrived, in order.
    #[must_use]
    pub fn seen(&self) -> Vec<Request> {
        self.instructions.lock().seen.clone()
    }

    /// Waits until this number of requests have arrived.
    ///
    /// # Panics
    ///
    /// After [`wait::LIMIT`].
    #[track_caller]
    pub fn expect(&self, count: usize) {
        wait::until(&format!("{count} requests"), || self.seen().len() >= count);
    }
}

impl Disk for TestDisk {
    fn info(&self) -> DiskInfo {
        let mut info = self.mem.info();
        info.volatile_cache = self.cache;
        info
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        let wake = EventFd::new()?;
        self.instructions.lock().wakes.push(wake.try_clone()?);
        Ok(Box::new(TestQueue {
            disk: self.clone(),
            inner: self.mem.queue()?,
            wake,
            held: Vec::new(),
        }))
    }

    fn name(&self) -> String {
        "test".into()
    }

    fn extents(&self, offset: u64, len: u64, tell: &mut ReportExtent<'_>) {
        while self.instructions.lock().hold_extents {
            wait::pause();
        }
        self.mem.extents(offset, len, tell);
    }

    fn map(&self, len: u64) -> Option<SharedBytes> {
        self.mem.map(len)
    }
}

struct TestQueue {
    disk: TestDisk,
    inner: Box<dyn Queue>,
    wake: EventFd,
    held: Vec<(u32, Request, Segments)>,
}

impl TestQueue {
    fn run(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Result<(), DiskError> {
        if self.disk.instructions.lock().unavailable {
            return Err(DiskError::Io(19));
        }
        if !matches!(request.op, Op::Read | Op::Flush) {
            let mut instructions = self.disk.instructions.lock();
            let left = instructions.failures;
            if let Some(error) = instructions.fail.filter(|_| left != Some(0)) {
                instructions.failures = left.map(|left| left - 1);
                return Err(error);
            }
        }
        let beyond = self.disk.instructions.lock().fail_beyond;
        if request.op == Op::Read && beyond.is_some_and(|beyond| request.offset >= beyond) {
            return Err(DiskError::Io(5));
        }
        match self.inner.submit(tag, request, data) {
            Submitted::Done(outcome) => outcome,
            Submitted::Pending => panic!("a memory disk completes at once"),
        }
    }
}

impl Queue for TestQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        let hold = {
            let mut instructions = self.disk.instructions.lock();
            instructions.seen.push(*request);
            instructions.hold || instructions.hold_at == Some(request.offset)
        };
        if hold {
            self.held.push((tag, *request, data.take()));
            return Submitted::Pending;
        }
        Submitted::Done(self.run(tag, request, data))
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        self.wake.drain();
        let (hold, hold_at) = {
            let instructions = self.disk.instructions.lock();
            (instructions.hold, instructions.hold_at)
        };
        if hold {
            return;
        }
        let release = |(_, request, _): &mut (_, Request, _)| hold_at != Some(request.offset);
        let released: Vec<_> = self.held.extract_if(.., release).collect();
        for (tag, request, mut data) in released {
            let outcome = self.run(tag, &request, &mut data);
            done(tag, outcome, data);
        }
    }

    fn memory_changed(&mut self, view: &View) {
        if self.disk.instructions.lock().follow_memory {
            let mut change = ViewChange::new(view);
            for (_, _, data) in &mut self.held {
                data.move_to(&mut change);
            }
        }
    }

    fn pending(&self) -> usize {
        self.held.len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }
}
