//! Memory disk that holds its requests as long as the test requires, and completes the last
//! submitted request first.
#![allow(dead_code, reason = "every test file uses its own part of it")]
#![allow(unreachable_pub, reason = "a module of tests")]

use shadowbell_disk::{Disk, DiskError, DiskInfo, Op, Request, Submitted};
use shadowbell_disk_file::MemDisk;
use shadowbell_memory::{EventFd, Segments};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

/// Instructions of the test for a [`Held`] disk, and a record of the requests that the disk
/// received.
#[derive(Debug, Default)]
pub struct Instructions {
    pub hold: bool,
    /// Requests that start at this byte offset fail.
    pub fail_at: Option<u64>,
    /// Simulated write by another user of the storage: the block, and the number that is stored at
    /// the start of this block. The disk executes this write once, directly after a Compare.
    pub after_compare: Option<(u64, u64)>,
    /// True if compare-and-write requests remain held while the disk completes other requests.
    pub hold_both: bool,
    pub fail_both: bool,
    pub seen: Vec<Request>,
    pub cancelled: usize,
    events: Vec<EventFd>,
}

/// Memory disk that holds its requests.
#[derive(Clone, Debug)]
pub struct Held {
    pub mem: MemDisk,
    /// True if the disk reports a volatile cache.
    pub volatile: bool,
    /// True if the disk supports atomic compare-and-write.
    pub one_step: bool,
    instructions: Arc<Mutex<Instructions>>,
}

impl Held {
    pub fn new(blocks: u64) -> Self {
        let mem = MemDisk::new(blocks, 512).unwrap();
        Self { mem, volatile: false, one_step: false, instructions: Arc::default() }
    }

    pub fn instruct(&self, change: impl FnOnce(&mut Instructions)) {
        let mut instructions = self.instructions.lock().unwrap();
        change(&mut instructions);
        instructions.events.iter().for_each(EventFd::signal);
    }

    pub fn seen(&self) -> Vec<Request> {
        self.instructions.lock().unwrap().seen.clone()
    }

    pub fn cancelled(&self) -> usize {
        self.instructions.lock().unwrap().cancelled
    }

    /// Returns the number at the start of each of `count` blocks, from block `first` on.
    pub fn marks(&self, first: u64, count: u64) -> Vec<u64> {
        let read = |block| self.mem.bytes().read::<u64>((block * 512) as usize).unwrap();
        (first..first + count).map(read).collect()
    }

    /// Fills a block with zeroes, and writes this number at its start.
    pub fn set(&self, block: u64, value: u64) {
        let at = (block * 512) as usize;
        self.mem.bytes().fill(at, 512, 0).unwrap();
        self.mem.bytes().write(at, &value).unwrap();
    }

    /// Fills every block with its own number.
    pub fn mark(&self) {
        for block in 0..self.mem.info().blocks {
            let at = (block * 512) as usize;
            (0..64).for_each(|word| self.mem.bytes().write(at + word * 8, &block).unwrap());
        }
    }
}

impl Disk for Held {
    fn info(&self) -> DiskInfo {
        let mut info = self.mem.info();
        info.volatile_cache = self.volatile;
        info
    }

    fn queue(&self) -> std::io::Result<Box<dyn shadowbell_disk::Queue>> {
        let event = EventFd::new()?;
        self.instructions.lock().unwrap().events.push(event.try_clone()?);
        let inner = self.mem.queue()?;
        Ok(Box::new(HeldQueue { disk: self.clone(), inner, event, held: Vec::new() }))
    }

    fn name(&self) -> String {
        "held".into()
    }
}

fn compare_and_write(mem: &MemDisk, request: &Request, data: &Segments) -> Result<(), DiskError> {
    let (at, len) = (request.offset as usize, request.len as usize);
    let (mut expected, mut new, mut there) = (vec![0; len], vec![0; len], vec![0; len]);
    data.read_into(0, &mut expected).unwrap();
    data.read_into(len, &mut new).unwrap();
    mem.bytes().read_into(at, &mut there).unwrap();
    if there != expected {
        return Err(DiskError::CompareFailed);
    }
    mem.bytes().write_from(at, &new).unwrap();
    Ok(())
}

struct HeldQueue {
    disk: Held,
    inner: Box<dyn shadowbell_disk::Queue>,
    event: EventFd,
    held: Vec<(u32, Request, Segments)>,
}

impl shadowbell_disk::Queue for HeldQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        self.disk.instructions.lock().unwrap().seen.push(*request);
        self.held.push((tag, *request, data.take()));
        self.event.signal();
        Submitted::Pending
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        self.event.drain();
        let (fail_at, hold_both, fail_both) = match &*self.disk.instructions.lock().unwrap() {
            instructions if instructions.hold => return,
            instructions => (instructions.fail_at, instructions.hold_both, instructions.fail_both),
        };
        let mut held = Vec::new();
        // The request that was submitted last completes first.
        while let Some((tag, request, mut data)) = self.held.pop() {
            if matches!(request.op, Op::CompareAndWrite { .. }) {
                let outcome = match fail_both {
                    _ if hold_both => {
                        held.push((tag, request, data));
                        continue;
                    }
                    true => Err(DiskError::NoSpace),
                    false => compare_and_write(&self.disk.mem, &request, &data),
                };
                done(tag, outcome, data);
                continue;
            }
            let outcome = match self.inner.submit(tag, &request, &mut data) {
                _ if fail_at == Some(request.offset) => Err(DiskError::Io(5)),
                Submitted::Done(outcome) => outcome,
                Submitted::Pending => panic!("memory does not wait"),
            };
            if request.op == Op::Compare
                && let Some((block, value)) =
                    self.disk.instructions.lock().unwrap().after_compare.take()
            {
                self.disk.set(block, value);
            }
            done(tag, outcome, data);
        }
        self.held = held;
    }

    fn compares_and_writes(&self) -> bool {
        self.disk.one_step
    }

    fn cancel(&mut self, _: u32) {
        // The disk counts a cancellation and ignores it, so the request completes normally.
        self.disk.instructions.lock().unwrap().cancelled += 1;
    }

    fn pending(&self) -> usize {
        self.held.len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }
}
